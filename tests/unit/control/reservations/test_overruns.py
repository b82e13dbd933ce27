"""Who stays too long is told to go when the room is due to others, if the policy says so, and never more than need be."""

from __future__ import annotations

from typing import Any

import pytest

from builders import NOW_MS, a_node, amounts
from hodei.control.explain import why as explain
from hodei.control.reservations.reservations import choose
from hodei.model.effects import Stop
from hodei.model.errors import InvalidInput
from hodei.model.facts import ReservationCancelled, ReservationMade
from hodei.model.job import Checkpoint
from hodei.model.reservation import Reservation, ReservationSpec
from hodei.plugins.registry import build_profile
from unit.control.house import House, a_house, some_nodes

MINUTE = 60_000
HOUR = 60 * MINUTE
SAVES = Checkpoint(signal="USR1", timeout_ms=30_000)


def a_line(overrun: str = "stop", backfill: str = "easy") -> Any:
    return build_profile("default", queue="batch", queue_arguments={"overrun": overrun, "backfill": backfill})


def ahead(overrun: str = "stop", *, backfill: str = "easy", **fields: Any) -> House:
    """Job 1 has 3 of 4 cores for an hour, job 2 wants all 4 and is promised them then, job 3 goes ahead of it."""
    house = House(*some_nodes(4), profiles={"default": a_line(overrun, backfill)})
    house.submit(1, cpu=3, estimate_ms=HOUR, name="first")
    house.submit(2, cpu=4, estimate_ms=HOUR, name="promised")
    house.submit(3, cpu=1, estimate_ms=30 * MINUTE, name="ahead", **fields)
    assert house.runs["3.0.1"].kind == "backfill"
    for run in ("1.0.1", "3.0.1"):
        house.see(run, "running")
    return house


def at_the_promised_time(house: House) -> None:
    house.now_ms = NOW_MS + HOUR
    house.see("1.0.1", "succeeded", 0)


# ----------------------------------------------------------------------------------------------- promised room


@pytest.mark.parametrize("backfill", ["easy", "conservative"])
def test_who_went_ahead_and_stays_too_long_is_stopped_when_the_promised_time_comes(backfill):
    house = ahead(backfill=backfill)
    house.later(59 * MINUTE)
    assert house.stopped() == [], "nobody could start in its place yet"
    at_the_promised_time(house)
    assert house.stopped() == ["3.0.1"]
    assert house.reason(3) == ("OVERRAN", "overran its estimate of 30m while job 2 was promised its room")
    assert "overran its estimate of 30m" in explain.why(house.controller, 3, house.now_ms).summary
    (told,) = [event for event in house.events if event.kind == "job.overran"]
    assert (told.job, told.run, told.node, told.detail) == (3, "3.0.1", "n1", {"promised": 2})
    house.now_ms += 2000
    house.see("3.0.1", "stopped", 143)
    assert house.started() == ["2.0.1"]
    assert (house.state(3), house.jobs[3].exit_code) == ("failed", 143)
    assert house.controller.keeping.broken == 0


def test_nothing_but_time_needs_to_pass_for_it():
    house = ahead()
    house.now_ms += 20 * MINUTE
    house.see("1.0.1", "succeeded", 0)
    assert house.stopped() == [], "it has its half an hour"
    assert house.controller.next_wakeup_ms(house.now_ms) == NOW_MS + 30 * MINUTE
    house.now_ms = NOW_MS + 30 * MINUTE
    house.learn()
    assert house.stopped() == ["3.0.1"]


def test_by_default_it_goes_on_and_the_promise_comes_late():
    house = ahead("let")
    at_the_promised_time(house)
    house.later(MINUTE)
    assert house.stopped() == []
    assert house.state(3) == "running"


def test_work_that_is_saved_first_queues_again_instead_of_failing():
    house = ahead(checkpoint=SAVES)
    at_the_promised_time(house)
    (order,) = [act for act in house.acts if isinstance(act, Stop)]
    assert order.checkpoint == SAVES
    house.see("3.0.1", "stopped", 0)
    assert house.state(3) == "pending"
    assert (house.reason(3)[0], house.jobs[3].failures) == ("OVERRAN", 0) or house.reason(3)[0] == "PROMISED"
    assert [event.detail["reason_code"] for event in house.events if event.kind == "job.requeued"] == ["OVERRAN"]
    assert house.started() == ["2.0.1"]


def test_without_a_way_to_save_it_counts_as_a_failure_and_is_retried_as_often_as_its_user_said():
    house = ahead(retries=1)
    at_the_promised_time(house)
    house.see("3.0.1", "stopped", 143)
    assert (house.state(3), house.jobs[3].failures) == ("pending", 1)


def test_one_that_makes_it_before_it_is_gone_has_made_it():
    house = ahead()
    at_the_promised_time(house)
    house.see("3.0.1", "succeeded", 0)
    assert house.state(3) == "succeeded"
    assert house.started() == ["2.0.1"]


def test_it_goes_on_while_the_promised_job_could_not_start_anyway():
    house = ahead()
    house.later(HOUR)
    assert house.stopped() == [], "the first one is late too, and nobody went ahead with it"
    house.later(10 * MINUTE)
    assert house.stopped() == []
    house.see("1.0.1", "succeeded", 0)
    assert house.stopped() == ["3.0.1"]


def test_who_was_first_in_line_is_never_stopped_for_it():
    house = House(*some_nodes(4), profiles={"default": a_line()})
    house.submit(1, cpu=3, estimate_ms=HOUR)
    house.submit(2, cpu=4, estimate_ms=HOUR)
    house.later(3 * HOUR)
    assert house.stopped() == []
    assert house.controller.keeping.missed["overrun"] == 1


def test_while_it_goes_nobody_else_takes_the_promised_room():
    house = ahead()
    house.now_ms = NOW_MS + HOUR
    house.see("1.0.1", "succeeded", 0)
    house.submit(4, cpu=1, estimate_ms=20 * MINUTE, name="later")
    assert house.started() == [], "it would be over before the doubled estimate, but not before the grace is"
    house.see("3.0.1", "stopped", 143)
    assert house.started() == ["2.0.1"]


def test_a_run_that_takes_its_time_to_go_is_nobodys_broken_promise():
    house = ahead()
    at_the_promised_time(house)
    for _ in range(20):
        house.later(MINUTE)
    assert house.controller.keeping.broken == 0


@pytest.mark.parametrize("passed", [50 * MINUTE, 2 * HOUR], ids=["before its time", "while nobody was there"])
def test_it_is_the_same_after_a_restart(passed):
    house = ahead()
    house.now_ms += passed
    house.restart(*some_nodes(4))
    house.now_ms = max(house.now_ms, NOW_MS + HOUR)
    house.see("1.0.1", "succeeded", 0)
    assert house.stopped() == ["3.0.1"]


def test_only_as_many_go_as_the_promised_job_needs():
    house = House(*some_nodes(8), profiles={"default": a_line()})
    house.submit(1, cpu=5, estimate_ms=HOUR, name="first")
    house.submit(2, cpu=7, estimate_ms=HOUR, name="promised")
    for id in (3, 4, 5):
        house.submit(id, cpu=1, estimate_ms=30 * MINUTE, name=f"ahead{id}")
    kinds = {run.job: run.kind for run in house.runs.values()}
    assert kinds == {1: "head", 3: "backfill", 4: "backfill", 5: "backfill"}
    at_the_promised_time(house)
    assert len(house.stopped()) == 2
    for run in house.stopped():
        house.see(run, "stopped", 143)
    assert house.state(2) == "scheduled"


def test_a_line_knows_let_and_stop():
    with pytest.raises(InvalidInput, match="'kill'"):
        a_line("kill")


# ----------------------------------------------------------------------------------------------- reserved room


def reserve(house: House, name: str = "nightly", start: int = HOUR, length: int = HOUR, **fields: Any) -> Reservation:
    fields = {"project": "ml", "count": 1} | fields
    end = NOW_MS + start + length
    wish = ReservationSpec(name, start_ms=NOW_MS + start, end_ms=end, **fields)
    booking = choose(house.controller.world, wish, house.now_ms)
    house.learn(ReservationMade(booking))
    return booking


def begun(house: House, booking: Reservation) -> list[str]:
    house.now_ms = booking.start_ms
    house.learn()
    return house.stopped()


def ended(house: House, booking: Reservation) -> list[str]:
    house.now_ms = booking.end_ms
    house.learn()
    return house.stopped()


def test_a_window_that_begins_clears_its_room_if_it_says_so_and_who_was_there_queues_again():
    house = a_house(4)
    house.submit(1, cpu=4)
    house.see("1.0.1", "running")
    booking = reserve(house, at_start="stop")
    assert house.stopped() == [], "not before it begins"
    assert begun(house, booking) == ["1.0.1"]
    says = "cleared off n1: reservation nightly of project ml has begun"
    assert house.reason(1) == ("CLEARED", says)
    (told,) = [event for event in house.events if event.kind == "reservation.stopped"]
    assert (told.job, told.run, told.node, told.detail["name"]) == (1, "1.0.1", "n1", "nightly")
    house.see("1.0.1", "stopped", 143)
    assert (house.state(1), house.jobs[1].failures) == ("pending", 0)
    assert [event.detail["reason"] for event in house.events if event.kind == "job.requeued"] == [says]
    assert house.reason(1)[0] == "BOOKED"
    ended(house, booking)
    assert house.started() == ["1.0.2"]


def test_by_default_who_is_there_stays_at_both_ends():
    house = a_house(4)
    house.submit(1, cpu=2)
    house.submit(2, cpu=2, project="ml")
    booking = reserve(house)
    assert begun(house, booking) == []
    assert ended(house, booking) == []


def test_only_as_much_is_cleared_as_is_reserved_the_least_important_and_latest_first():
    house = a_house(4)
    house.submit(1, cpu=1, priority=750)
    house.submit(2, cpu=1)
    house.now_ms += MINUTE
    house.submit(3, cpu=1)
    house.submit(4, cpu=1, project="ml")
    booking = reserve(house, request=amounts(2), at_start="stop")
    assert begun(house, booking) == ["3.0.1"], "the project has one of its two cores already"


def test_a_larger_run_that_has_to_go_anyway_spares_a_small_one():
    house = a_house(4)
    house.submit(1, cpu=3)
    house.now_ms += MINUTE
    house.submit(2, cpu=1)
    assert begun(house, reserve(house, request=amounts(3), at_start="stop")) == ["1.0.1"]


def test_runs_on_room_that_is_reserved_for_their_own_project_stay():
    house = a_house(4)
    reserve(house, "web", start=0, length=3 * HOUR, project="web", request=amounts(2))
    house.submit(1, cpu=2, project="web")
    house.submit(2, cpu=2, project="other", estimate_ms=30 * MINUTE)
    booking = reserve(house, request=amounts(2), at_start="stop")
    house.now_ms += 59 * MINUTE
    assert begun(house, booking) == ["2.0.1"]


def test_a_reservation_that_begins_at_once_clears_at_once():
    house = a_house(4, 4)
    house.submit(1, cpu=4)
    reserve(house, start=0, count=2, at_start="stop")
    assert house.stopped() == ["1.0.1"]


def test_a_gang_that_lies_half_in_the_window_goes_whole_and_is_told_once():
    house = a_house(4, 4)
    house.submit(1, cpu=4, count=2)
    booking = reserve(house, count=1, at_start="stop")
    assert begun(house, booking) == ["1.0.1", "1.1.1"]
    assert house.kinds().count("reservation.stopped") == 1


def test_when_the_window_ends_the_projects_runs_go_if_it_says_so():
    house = a_house(4)
    booking = reserve(house, start=0, at_end="stop")
    house.submit(1, cpu=2, project="ml")
    house.submit(2, cpu=4, project="web", name="waits")
    assert ended(house, booking) == ["1.0.1"]
    assert house.reason(1) == ("OUTSTAYED", "outstayed reservation nightly, which is over")
    house.see("1.0.1", "stopped", 143)
    assert sorted((house.state(1), house.state(2))) == ["pending", "scheduled"]


def test_of_a_part_of_a_node_as_much_is_given_back_as_was_reserved():
    house = a_house(4)
    booking = reserve(house, start=0, request=amounts(2), at_end="stop")
    house.submit(1, cpu=2, project="ml")
    house.now_ms += MINUTE
    house.submit(2, cpu=2, project="ml")
    assert ended(house, booking) == ["2.0.1"], "the latest"


def test_runs_that_the_projects_next_reservation_covers_stay():
    house = a_house(4)
    booking = reserve(house, start=0, at_end="stop")
    reserve(house, "next", start=HOUR, at_end="stop")
    house.submit(1, cpu=4, project="ml")
    assert ended(house, booking) == []


def test_a_reservation_that_is_given_up_stops_nobody():
    house = a_house(4)
    booking = reserve(house, start=0, at_start="stop", at_end="stop")
    house.submit(1, cpu=4, project="ml")
    house.learn(ReservationCancelled("nightly", by="ann"))
    assert house.stopped() == []
    assert ended(house, booking) == []


def test_a_window_that_began_while_nobody_was_there_is_cleared_when_its_node_is_back():
    house = a_house(4)
    house.submit(1, cpu=4)
    booking = reserve(house, at_start="stop")
    house.now_ms = booking.start_ms + MINUTE
    house.restart(a_node("n1", 4, "64Gi"))
    assert house.stopped() == ["1.0.1"]
    house.restart(a_node("n1", 4, "64Gi"))
    assert house.stopped() == [], "it was told; the order is repeated by whoever looks after runs at a restart"


def test_a_window_that_ended_while_nobody_was_there_ends_for_its_runs_too():
    house = a_house(4)
    booking = reserve(house, start=0, at_end="stop")
    house.submit(1, cpu=4, project="ml")
    house.now_ms = booking.end_ms + MINUTE
    house.restart(a_node("n1", 4, "64Gi"))
    assert house.runs["1.0.1"].stop_requested.startswith("outstayed")
    assert house.bookings == {}
