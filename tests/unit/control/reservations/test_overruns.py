"""Overruns and reservation windows: which runs are stopped, when, and what happens to their jobs."""

from __future__ import annotations

from typing import Any

import pytest

from builders import NOW_MS, a_node, amounts
from hodei.control.explain import why as explain
from hodei.control.reservations.reservations import choose_nodes
from hodei.model.effects import Stop
from hodei.model.errors import InvalidInput
from hodei.model.facts import ReservationDeleted, ReservationMade
from hodei.model.job import Checkpoint
from hodei.model.reservation import Reservation, ReservationSpec
from hodei.plugins.registry import build_profile
from unit.control.harness import Harness, a_harness, some_nodes

MINUTE = 60_000
HOUR = 60 * MINUTE
SAVES = Checkpoint(signal="USR1", timeout_ms=30_000)


def a_profile(overrun: str = "stop", backfill: str = "easy") -> Any:
    return build_profile("default", queue="batch", queue_arguments={"overrun": overrun, "backfill": backfill})


def with_backfilled_run(overrun: str = "stop", *, backfill: str = "easy", **fields: Any) -> Harness:
    """Job 1 has 3 of 4 cores for an hour, job 2 has a start reservation for all 4 after that, job 3 is backfilled."""
    harness = Harness(*some_nodes(4), profiles={"default": a_profile(overrun, backfill)})
    harness.submit(1, cpu=3, estimate_ms=HOUR, name="first")
    harness.submit(2, cpu=4, estimate_ms=HOUR, name="reserved")
    harness.submit(3, cpu=1, estimate_ms=30 * MINUTE, name="backfilled", **fields)
    assert harness.runs["3.0.1"].kind == "backfill"
    for run in ("1.0.1", "3.0.1"):
        harness.observe(run, "running")
    return harness


def reach_reserved_start(harness: Harness) -> None:
    harness.now_ms = NOW_MS + HOUR
    harness.observe("1.0.1", "succeeded", 0)


@pytest.mark.parametrize("backfill", ["easy", "conservative"])
def test_a_backfilled_overrun_is_stopped_at_the_reserved_start(backfill):
    harness = with_backfilled_run(backfill=backfill)
    harness.advance(59 * MINUTE)
    assert harness.stopped() == [], "job 2 could not start yet"
    reach_reserved_start(harness)
    assert harness.stopped() == ["3.0.1"]
    assert harness.reason(3) == ("OVERRUN", "overran its estimate of 30m and blocked the start reservation of job 2")
    assert "overran its estimate of 30m" in explain.why(harness.controller, 3, harness.now_ms).summary
    (event,) = [one for one in harness.events if one.kind == "job.overrun"]
    assert (event.job, event.run, event.node, event.detail) == (3, "3.0.1", "n1", {"reserved_for": 2})
    harness.now_ms += 2000
    harness.observe("3.0.1", "stopped", 143)
    assert harness.started() == ["2.0.1"]
    assert (harness.state(3), harness.jobs[3].exit_code) == ("failed", 143)
    assert harness.controller.reservation_audit.broken == 0


def test_an_overrun_is_stopped_when_its_estimate_ends():
    harness = with_backfilled_run()
    harness.now_ms += 20 * MINUTE
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.stopped() == [], "it is within its estimate"
    assert harness.controller.next_wakeup_ms(harness.now_ms) == NOW_MS + 30 * MINUTE
    harness.now_ms = NOW_MS + 30 * MINUTE
    harness.step()
    assert harness.stopped() == ["3.0.1"]


def test_by_default_an_overrun_continues_and_the_reserved_start_is_late():
    harness = with_backfilled_run("let")
    reach_reserved_start(harness)
    harness.advance(MINUTE)
    assert harness.stopped() == []
    assert harness.state(3) == "running"


def test_an_overrun_with_a_checkpoint_is_requeued_instead_of_failing():
    harness = with_backfilled_run(checkpoint=SAVES)
    reach_reserved_start(harness)
    (order,) = [act for act in harness.acts if isinstance(act, Stop)]
    assert order.checkpoint == SAVES
    harness.observe("3.0.1", "stopped", 0)
    assert harness.state(3) == "pending"
    assert (harness.reason(3)[0], harness.jobs[3].failures) == ("OVERRUN", 0) or harness.reason(3)[
        0
    ] == "START_RESERVED"
    assert [event.detail["reason_code"] for event in harness.events if event.kind == "job.requeued"] == ["OVERRUN"]
    assert harness.started() == ["2.0.1"]


def test_an_overrun_without_a_checkpoint_counts_as_a_failure_with_retries():
    harness = with_backfilled_run(retries=1)
    reach_reserved_start(harness)
    harness.observe("3.0.1", "stopped", 143)
    assert (harness.state(3), harness.jobs[3].failures) == ("pending", 1)


def test_an_overrun_that_succeeds_while_it_stops_has_succeeded():
    harness = with_backfilled_run()
    reach_reserved_start(harness)
    harness.observe("3.0.1", "succeeded", 0)
    assert harness.state(3) == "succeeded"
    assert harness.started() == ["2.0.1"]


def test_an_overrun_continues_while_the_reserved_job_could_not_start():
    harness = with_backfilled_run()
    harness.advance(HOUR)
    assert harness.stopped() == [], "job 1 overruns too, but was not backfilled"
    harness.advance(10 * MINUTE)
    assert harness.stopped() == []
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.stopped() == ["3.0.1"]


def test_a_head_is_never_stopped_as_an_overrun():
    harness = Harness(*some_nodes(4), profiles={"default": a_profile()})
    harness.submit(1, cpu=3, estimate_ms=HOUR)
    harness.submit(2, cpu=4, estimate_ms=HOUR)
    harness.advance(3 * HOUR)
    assert harness.stopped() == []
    assert harness.controller.reservation_audit.missed["overrun"] == 1


def test_reserved_capacity_is_not_taken_while_an_overrun_stops():
    harness = with_backfilled_run()
    harness.now_ms = NOW_MS + HOUR
    harness.observe("1.0.1", "succeeded", 0)
    harness.submit(4, cpu=1, estimate_ms=20 * MINUTE, name="later")
    assert harness.started() == [], "it would end before the doubled estimate, but not before the grace period"
    harness.observe("3.0.1", "stopped", 143)
    assert harness.started() == ["2.0.1"]


def test_a_slow_stop_does_not_break_a_start_reservation():
    harness = with_backfilled_run()
    reach_reserved_start(harness)
    for _ in range(20):
        harness.advance(MINUTE)
    assert harness.controller.reservation_audit.broken == 0


@pytest.mark.parametrize(
    "passed", [50 * MINUTE, 2 * HOUR], ids=["before the reserved start", "during the reserved start"]
)
def test_an_overrun_is_stopped_after_a_restart(passed):
    harness = with_backfilled_run()
    harness.now_ms += passed
    harness.restart(*some_nodes(4))
    harness.now_ms = max(harness.now_ms, NOW_MS + HOUR)
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.stopped() == ["3.0.1"]


def test_only_needed_overruns_are_stopped():
    harness = Harness(*some_nodes(8), profiles={"default": a_profile()})
    harness.submit(1, cpu=5, estimate_ms=HOUR, name="first")
    harness.submit(2, cpu=7, estimate_ms=HOUR, name="reserved")
    for id in (3, 4, 5):
        harness.submit(id, cpu=1, estimate_ms=30 * MINUTE, name=f"backfilled{id}")
    kinds = {run.job: run.kind for run in harness.runs.values()}
    assert kinds == {1: "head", 3: "backfill", 4: "backfill", 5: "backfill"}
    reach_reserved_start(harness)
    assert len(harness.stopped()) == 2
    for run in harness.stopped():
        harness.observe(run, "stopped", 143)
    assert harness.state(2) == "scheduled"


def test_a_queue_accepts_let_and_stop():
    with pytest.raises(InvalidInput, match="'kill'"):
        a_profile("kill")


def reserve(
    harness: Harness, name: str = "nightly", start: int = HOUR, length: int = HOUR, **fields: Any
) -> Reservation:
    fields = {"project": "ml", "count": 1} | fields
    end = NOW_MS + start + length
    spec = ReservationSpec(name, start_ms=NOW_MS + start, end_ms=end, **fields)
    reservation = choose_nodes(harness.controller.cluster, spec, harness.now_ms)
    harness.step(ReservationMade(reservation))
    return reservation


def start_window(harness: Harness, reservation: Reservation) -> list[str]:
    harness.now_ms = reservation.start_ms
    harness.step()
    return harness.stopped()


def end_window(harness: Harness, reservation: Reservation) -> list[str]:
    harness.now_ms = reservation.end_ms
    harness.step()
    return harness.stopped()


def test_a_window_with_at_start_stop_evicts_runs_which_queue_again():
    harness = a_harness(4)
    harness.submit(1, cpu=4)
    harness.observe("1.0.1", "running")
    reservation = reserve(harness, at_start="stop")
    assert harness.stopped() == [], "not before the window starts"
    assert start_window(harness, reservation) == ["1.0.1"]
    reason = "cleared off n1: reservation nightly of project ml has started"
    assert harness.reason(1) == ("RESERVATION_STARTED", reason)
    (event,) = [one for one in harness.events if one.kind == "reservation.run_stopped"]
    assert (event.job, event.run, event.node, event.detail["name"]) == (1, "1.0.1", "n1", "nightly")
    harness.observe("1.0.1", "stopped", 143)
    assert (harness.state(1), harness.jobs[1].failures) == ("pending", 0)
    assert [event.detail["reason"] for event in harness.events if event.kind == "job.requeued"] == [reason]
    assert harness.reason(1)[0] == "RESERVED"
    end_window(harness, reservation)
    assert harness.started() == ["1.0.2"]


def test_by_default_runs_stay_at_both_ends_of_a_window():
    harness = a_harness(4)
    harness.submit(1, cpu=2)
    harness.submit(2, cpu=2, project="ml")
    reservation = reserve(harness)
    assert start_window(harness, reservation) == []
    assert end_window(harness, reservation) == []


def test_only_reserved_capacity_is_cleared_lowest_priority_and_latest_start_first():
    harness = a_harness(4)
    harness.submit(1, cpu=1, priority=750)
    harness.submit(2, cpu=1)
    harness.now_ms += MINUTE
    harness.submit(3, cpu=1)
    harness.submit(4, cpu=1, project="ml")
    reservation = reserve(harness, request=amounts(2), at_start="stop")
    assert start_window(harness, reservation) == ["3.0.1"], "the project already has one of its two cores"


def test_a_small_run_is_not_stopped_if_a_larger_one_has_to_be():
    harness = a_harness(4)
    harness.submit(1, cpu=3)
    harness.now_ms += MINUTE
    harness.submit(2, cpu=1)
    assert start_window(harness, reserve(harness, request=amounts(3), at_start="stop")) == ["1.0.1"]


def test_runs_on_capacity_reserved_for_their_own_project_stay():
    harness = a_harness(4)
    reserve(harness, "web", start=0, length=3 * HOUR, project="web", request=amounts(2))
    harness.submit(1, cpu=2, project="web")
    harness.submit(2, cpu=2, project="other", estimate_ms=30 * MINUTE)
    reservation = reserve(harness, request=amounts(2), at_start="stop")
    harness.now_ms += 59 * MINUTE
    assert start_window(harness, reservation) == ["2.0.1"]


def test_a_reservation_that_starts_now_clears_its_nodes_at_once():
    harness = a_harness(4, 4)
    harness.submit(1, cpu=4)
    reserve(harness, start=0, count=2, at_start="stop")
    assert harness.stopped() == ["1.0.1"]


def test_a_gang_partly_in_the_window_is_stopped_whole_with_one_event():
    harness = a_harness(4, 4)
    harness.submit(1, cpu=4, count=2)
    reservation = reserve(harness, count=1, at_start="stop")
    assert start_window(harness, reservation) == ["1.0.1", "1.1.1"]
    assert harness.event_kinds().count("reservation.run_stopped") == 1


def test_at_end_stop_stops_the_runs_of_the_project():
    harness = a_harness(4)
    reservation = reserve(harness, start=0, at_end="stop")
    harness.submit(1, cpu=2, project="ml")
    harness.submit(2, cpu=4, project="web", name="waits")
    assert end_window(harness, reservation) == ["1.0.1"]
    assert harness.reason(1) == ("RESERVATION_ENDED", "outstayed reservation nightly, which is over")
    harness.observe("1.0.1", "stopped", 143)
    assert sorted((harness.state(1), harness.state(2))) == ["pending", "scheduled"]


def test_at_end_stop_frees_as_much_of_a_node_as_was_reserved():
    harness = a_harness(4)
    reservation = reserve(harness, start=0, request=amounts(2), at_end="stop")
    harness.submit(1, cpu=2, project="ml")
    harness.now_ms += MINUTE
    harness.submit(2, cpu=2, project="ml")
    assert end_window(harness, reservation) == ["2.0.1"], "the latest start"


def test_runs_that_the_projects_next_reservation_covers_stay():
    harness = a_harness(4)
    reservation = reserve(harness, start=0, at_end="stop")
    reserve(harness, "next", start=HOUR, at_end="stop")
    harness.submit(1, cpu=4, project="ml")
    assert end_window(harness, reservation) == []


def test_a_cancelled_reservation_stops_no_run():
    harness = a_harness(4)
    reservation = reserve(harness, start=0, at_start="stop", at_end="stop")
    harness.submit(1, cpu=4, project="ml")
    harness.step(ReservationDeleted("nightly", by="ann"))
    assert harness.stopped() == []
    assert end_window(harness, reservation) == []


def test_a_window_that_started_during_an_outage_is_cleared_when_its_node_joins():
    harness = a_harness(4)
    harness.submit(1, cpu=4)
    reservation = reserve(harness, at_start="stop")
    harness.now_ms = reservation.start_ms + MINUTE
    harness.restart(a_node("n1", 4, "64Gi"))
    assert harness.stopped() == ["1.0.1"]
    harness.restart(a_node("n1", 4, "64Gi"))
    assert harness.stopped() == [], "the stop is already ordered; reconciliation repeats it"


def test_a_window_that_ended_during_an_outage_ends_for_its_runs():
    harness = a_harness(4)
    reservation = reserve(harness, start=0, at_end="stop")
    harness.submit(1, cpu=4, project="ml")
    harness.now_ms = reservation.end_ms + MINUTE
    harness.restart(a_node("n1", 4, "64Gi"))
    assert harness.runs["1.0.1"].stop_reason.code == "outstayed"
    assert harness.reservations == {}
