"""Who stays too long is told to go when the room is due to others, if the policy says so, and never more than need be."""

from __future__ import annotations

from typing import Any

import pytest

from builders import NOW_MS, a_node, amounts
from hodei.control.explain import why as explain
from hodei.control.reservations.reservations import choose_nodes
from hodei.model.effects import Stop
from hodei.model.errors import InvalidInput
from hodei.model.facts import ReservationCancelled, ReservationMade
from hodei.model.job import Checkpoint
from hodei.model.reservation import Reservation, ReservationSpec
from hodei.plugins.registry import build_profile
from unit.control.harness import Harness, a_harness, some_nodes

MINUTE = 60_000
HOUR = 60 * MINUTE
SAVES = Checkpoint(signal="USR1", timeout_ms=30_000)


def a_line(overrun: str = "stop", backfill: str = "easy") -> Any:
    return build_profile("default", queue="batch", queue_arguments={"overrun": overrun, "backfill": backfill})


def ahead(overrun: str = "stop", *, backfill: str = "easy", **fields: Any) -> Harness:
    """Job 1 has 3 of 4 cores for an hour, job 2 wants all 4 and is promised them then, job 3 goes ahead of it."""
    harness = Harness(*some_nodes(4), profiles={"default": a_line(overrun, backfill)})
    harness.submit(1, cpu=3, estimate_ms=HOUR, name="first")
    harness.submit(2, cpu=4, estimate_ms=HOUR, name="promised")
    harness.submit(3, cpu=1, estimate_ms=30 * MINUTE, name="ahead", **fields)
    assert harness.runs["3.0.1"].kind == "backfill"
    for run in ("1.0.1", "3.0.1"):
        harness.see(run, "running")
    return harness


def at_the_promised_time(harness: Harness) -> None:
    harness.now_ms = NOW_MS + HOUR
    harness.see("1.0.1", "succeeded", 0)


@pytest.mark.parametrize("backfill", ["easy", "conservative"])
def test_a_backfilled_overrun_is_stopped_at_the_reserved_start(backfill):
    harness = ahead(backfill=backfill)
    harness.later(59 * MINUTE)
    assert harness.stopped() == [], "nobody could start in its place yet"
    at_the_promised_time(harness)
    assert harness.stopped() == ["3.0.1"]
    assert harness.reason(3) == ("OVERRUN", "overran its estimate of 30m and blocked the start reservation of job 2")
    assert "overran its estimate of 30m" in explain.why(harness.controller, 3, harness.now_ms).summary
    (told,) = [event for event in harness.events if event.kind == "job.overrun"]
    assert (told.job, told.run, told.node, told.detail) == (3, "3.0.1", "n1", {"promised": 2})
    harness.now_ms += 2000
    harness.see("3.0.1", "stopped", 143)
    assert harness.started() == ["2.0.1"]
    assert (harness.state(3), harness.jobs[3].exit_code) == ("failed", 143)
    assert harness.controller.reservation_audit.broken == 0


def test_nothing_but_time_needs_to_pass_for_it():
    harness = ahead()
    harness.now_ms += 20 * MINUTE
    harness.see("1.0.1", "succeeded", 0)
    assert harness.stopped() == [], "it has its half an hour"
    assert harness.controller.next_wakeup_ms(harness.now_ms) == NOW_MS + 30 * MINUTE
    harness.now_ms = NOW_MS + 30 * MINUTE
    harness.learn()
    assert harness.stopped() == ["3.0.1"]


def test_by_default_an_overrun_continues_and_the_reserved_start_is_late():
    harness = ahead("let")
    at_the_promised_time(harness)
    harness.later(MINUTE)
    assert harness.stopped() == []
    assert harness.state(3) == "running"


def test_work_that_is_saved_first_queues_again_instead_of_failing():
    harness = ahead(checkpoint=SAVES)
    at_the_promised_time(harness)
    (order,) = [act for act in harness.acts if isinstance(act, Stop)]
    assert order.checkpoint == SAVES
    harness.see("3.0.1", "stopped", 0)
    assert harness.state(3) == "pending"
    assert (harness.reason(3)[0], harness.jobs[3].failures) == ("OVERRUN", 0) or harness.reason(3)[
        0
    ] == "START_RESERVED"
    assert [event.detail["reason_code"] for event in harness.events if event.kind == "job.requeued"] == ["OVERRUN"]
    assert harness.started() == ["2.0.1"]


def test_without_a_way_to_save_it_counts_as_a_failure_and_is_retried_as_often_as_its_user_said():
    harness = ahead(retries=1)
    at_the_promised_time(harness)
    harness.see("3.0.1", "stopped", 143)
    assert (harness.state(3), harness.jobs[3].failures) == ("pending", 1)


def test_one_that_makes_it_before_it_is_gone_has_made_it():
    harness = ahead()
    at_the_promised_time(harness)
    harness.see("3.0.1", "succeeded", 0)
    assert harness.state(3) == "succeeded"
    assert harness.started() == ["2.0.1"]


def test_an_overrun_continues_while_the_reserved_job_could_not_start():
    harness = ahead()
    harness.later(HOUR)
    assert harness.stopped() == [], "the first one is late too, and nobody went ahead with it"
    harness.later(10 * MINUTE)
    assert harness.stopped() == []
    harness.see("1.0.1", "succeeded", 0)
    assert harness.stopped() == ["3.0.1"]


def test_a_head_is_never_stopped_as_an_overrun():
    harness = Harness(*some_nodes(4), profiles={"default": a_line()})
    harness.submit(1, cpu=3, estimate_ms=HOUR)
    harness.submit(2, cpu=4, estimate_ms=HOUR)
    harness.later(3 * HOUR)
    assert harness.stopped() == []
    assert harness.controller.reservation_audit.missed["overrun"] == 1


def test_reserved_capacity_is_not_taken_while_an_overrun_stops():
    harness = ahead()
    harness.now_ms = NOW_MS + HOUR
    harness.see("1.0.1", "succeeded", 0)
    harness.submit(4, cpu=1, estimate_ms=20 * MINUTE, name="later")
    assert harness.started() == [], "it would be over before the doubled estimate, but not before the grace is"
    harness.see("3.0.1", "stopped", 143)
    assert harness.started() == ["2.0.1"]


def test_a_slow_stop_does_not_break_a_start_reservation():
    harness = ahead()
    at_the_promised_time(harness)
    for _ in range(20):
        harness.later(MINUTE)
    assert harness.controller.reservation_audit.broken == 0


@pytest.mark.parametrize("passed", [50 * MINUTE, 2 * HOUR], ids=["before its time", "while nobody was there"])
def test_it_is_the_same_after_a_restart(passed):
    harness = ahead()
    harness.now_ms += passed
    harness.restart(*some_nodes(4))
    harness.now_ms = max(harness.now_ms, NOW_MS + HOUR)
    harness.see("1.0.1", "succeeded", 0)
    assert harness.stopped() == ["3.0.1"]


def test_only_needed_overruns_are_stopped():
    harness = Harness(*some_nodes(8), profiles={"default": a_line()})
    harness.submit(1, cpu=5, estimate_ms=HOUR, name="first")
    harness.submit(2, cpu=7, estimate_ms=HOUR, name="promised")
    for id in (3, 4, 5):
        harness.submit(id, cpu=1, estimate_ms=30 * MINUTE, name=f"ahead{id}")
    kinds = {run.job: run.kind for run in harness.runs.values()}
    assert kinds == {1: "head", 3: "backfill", 4: "backfill", 5: "backfill"}
    at_the_promised_time(harness)
    assert len(harness.stopped()) == 2
    for run in harness.stopped():
        harness.see(run, "stopped", 143)
    assert harness.state(2) == "scheduled"


def test_a_queue_accepts_let_and_stop():
    with pytest.raises(InvalidInput, match="'kill'"):
        a_line("kill")


def reserve(
    harness: Harness, name: str = "nightly", start: int = HOUR, length: int = HOUR, **fields: Any
) -> Reservation:
    fields = {"project": "ml", "count": 1} | fields
    end = NOW_MS + start + length
    wish = ReservationSpec(name, start_ms=NOW_MS + start, end_ms=end, **fields)
    reservation = choose_nodes(harness.controller.cluster, wish, harness.now_ms)
    harness.learn(ReservationMade(reservation))
    return reservation


def begun(harness: Harness, reservation: Reservation) -> list[str]:
    harness.now_ms = reservation.start_ms
    harness.learn()
    return harness.stopped()


def ended(harness: Harness, reservation: Reservation) -> list[str]:
    harness.now_ms = reservation.end_ms
    harness.learn()
    return harness.stopped()


def test_a_window_with_at_start_stop_evicts_runs_which_queue_again():
    harness = a_harness(4)
    harness.submit(1, cpu=4)
    harness.see("1.0.1", "running")
    reservation = reserve(harness, at_start="stop")
    assert harness.stopped() == [], "not before it begins"
    assert begun(harness, reservation) == ["1.0.1"]
    says = "cleared off n1: reservation nightly of project ml has started"
    assert harness.reason(1) == ("RESERVATION_STARTED", says)
    (told,) = [event for event in harness.events if event.kind == "reservation.run_stopped"]
    assert (told.job, told.run, told.node, told.detail["name"]) == (1, "1.0.1", "n1", "nightly")
    harness.see("1.0.1", "stopped", 143)
    assert (harness.state(1), harness.jobs[1].failures) == ("pending", 0)
    assert [event.detail["reason"] for event in harness.events if event.kind == "job.requeued"] == [says]
    assert harness.reason(1)[0] == "RESERVED"
    ended(harness, reservation)
    assert harness.started() == ["1.0.2"]


def test_by_default_runs_stay_at_both_ends_of_a_window():
    harness = a_harness(4)
    harness.submit(1, cpu=2)
    harness.submit(2, cpu=2, project="ml")
    reservation = reserve(harness)
    assert begun(harness, reservation) == []
    assert ended(harness, reservation) == []


def test_only_as_much_is_cleared_as_is_reserved_the_least_important_and_latest_first():
    harness = a_harness(4)
    harness.submit(1, cpu=1, priority=750)
    harness.submit(2, cpu=1)
    harness.now_ms += MINUTE
    harness.submit(3, cpu=1)
    harness.submit(4, cpu=1, project="ml")
    reservation = reserve(harness, request=amounts(2), at_start="stop")
    assert begun(harness, reservation) == ["3.0.1"], "the project has one of its two cores already"


def test_a_larger_run_that_has_to_go_anyway_spares_a_small_one():
    harness = a_harness(4)
    harness.submit(1, cpu=3)
    harness.now_ms += MINUTE
    harness.submit(2, cpu=1)
    assert begun(harness, reserve(harness, request=amounts(3), at_start="stop")) == ["1.0.1"]


def test_runs_on_room_that_is_reserved_for_their_own_project_stay():
    harness = a_harness(4)
    reserve(harness, "web", start=0, length=3 * HOUR, project="web", request=amounts(2))
    harness.submit(1, cpu=2, project="web")
    harness.submit(2, cpu=2, project="other", estimate_ms=30 * MINUTE)
    reservation = reserve(harness, request=amounts(2), at_start="stop")
    harness.now_ms += 59 * MINUTE
    assert begun(harness, reservation) == ["2.0.1"]


def test_a_reservation_that_begins_at_once_clears_at_once():
    harness = a_harness(4, 4)
    harness.submit(1, cpu=4)
    reserve(harness, start=0, count=2, at_start="stop")
    assert harness.stopped() == ["1.0.1"]


def test_a_gang_that_lies_half_in_the_window_goes_whole_and_is_told_once():
    harness = a_harness(4, 4)
    harness.submit(1, cpu=4, count=2)
    reservation = reserve(harness, count=1, at_start="stop")
    assert begun(harness, reservation) == ["1.0.1", "1.1.1"]
    assert harness.kinds().count("reservation.run_stopped") == 1


def test_when_the_window_ends_the_projects_runs_go_if_it_says_so():
    harness = a_harness(4)
    reservation = reserve(harness, start=0, at_end="stop")
    harness.submit(1, cpu=2, project="ml")
    harness.submit(2, cpu=4, project="web", name="waits")
    assert ended(harness, reservation) == ["1.0.1"]
    assert harness.reason(1) == ("RESERVATION_ENDED", "outstayed reservation nightly, which is over")
    harness.see("1.0.1", "stopped", 143)
    assert sorted((harness.state(1), harness.state(2))) == ["pending", "scheduled"]


def test_of_a_part_of_a_node_as_much_is_given_back_as_was_reserved():
    harness = a_harness(4)
    reservation = reserve(harness, start=0, request=amounts(2), at_end="stop")
    harness.submit(1, cpu=2, project="ml")
    harness.now_ms += MINUTE
    harness.submit(2, cpu=2, project="ml")
    assert ended(harness, reservation) == ["2.0.1"], "the latest"


def test_runs_that_the_projects_next_reservation_covers_stay():
    harness = a_harness(4)
    reservation = reserve(harness, start=0, at_end="stop")
    reserve(harness, "next", start=HOUR, at_end="stop")
    harness.submit(1, cpu=4, project="ml")
    assert ended(harness, reservation) == []


def test_a_cancelled_reservation_stops_no_run():
    harness = a_harness(4)
    reservation = reserve(harness, start=0, at_start="stop", at_end="stop")
    harness.submit(1, cpu=4, project="ml")
    harness.learn(ReservationCancelled("nightly", by="ann"))
    assert harness.stopped() == []
    assert ended(harness, reservation) == []


def test_a_window_that_started_during_an_outage_is_cleared_when_its_node_joins():
    harness = a_harness(4)
    harness.submit(1, cpu=4)
    reservation = reserve(harness, at_start="stop")
    harness.now_ms = reservation.start_ms + MINUTE
    harness.restart(a_node("n1", 4, "64Gi"))
    assert harness.stopped() == ["1.0.1"]
    harness.restart(a_node("n1", 4, "64Gi"))
    assert harness.stopped() == [], "it was told; the order is repeated by whoever looks after runs at a restart"


def test_a_window_that_ended_during_an_outage_ends_for_its_runs():
    harness = a_harness(4)
    reservation = reserve(harness, start=0, at_end="stop")
    harness.submit(1, cpu=4, project="ml")
    harness.now_ms = reservation.end_ms + MINUTE
    harness.restart(a_node("n1", 4, "64Gi"))
    assert harness.runs["1.0.1"].stop_reason.code == "outstayed"
    assert harness.reservations == {}
