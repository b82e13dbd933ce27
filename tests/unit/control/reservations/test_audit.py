"""Promises: what `why` says of them, that they are kept, and whose fault it is when one comes late."""

from __future__ import annotations

from typing import Any

from builders import NOW_MS, amounts
from hodei.control.estimates import LearnedEstimates
from hodei.control.explain import why as explain
from hodei.control.explain.time import holds_on
from hodei.engine.availability import StartReservation
from hodei.model.explanation import Promised
from hodei.model.facts import NodeLost
from hodei.model.reservation import Hold
from hodei.plugins.registry import build_profile
from unit.control.house import House, some_nodes

MINUTE = 60_000


def easy_house(*cpus: int, fill: str = "queue", **options: Any) -> House:
    profile = build_profile("default", queue="batch", queue_arguments={"fill": fill})
    return House(*some_nodes(*cpus), profiles={"default": profile}, **options)


def blocked(**options: Any) -> House:
    """Job 1 holds 3 of 4 cores for an hour; job 2, which wants 4, is promised them then."""
    house = easy_house(4, **options)
    house.submit(1, cpu=3, estimate_ms=60 * MINUTE)
    house.submit(2, cpu=4, estimate_ms=60 * MINUTE)
    return house


def test_why_says_what_was_promised_and_to_whom():
    house = blocked()
    house.submit(3, cpu=1, estimate_ms=90 * MINUTE)
    first = explain.why(house.controller, 2, house.now_ms)
    assert first.promise == Promised(NOW_MS + 60 * MINUTE, ("n1",))
    held_back = explain.why(house.controller, 3, house.now_ms)
    assert held_back.code == "PROMISED"
    hold = Hold("n1", NOW_MS + 60 * MINUTE, NOW_MS + 120 * MINUTE, amounts(4, "1Gi"), 2)
    assert held_back.held_for == (hold,)
    assert holds_on(house.controller.world, "n1") == (hold,)


def test_each_start_says_how_it_came_about():
    house = blocked()
    house.submit(3, cpu=1, estimate_ms=30 * MINUTE)
    assert [(bind.job, bind.kind) for bind in house.last.plan.binds] == [(3, "backfill")]
    scheduled = {event.job: event.detail["start"] for event in house.events if event.kind == "job.scheduled"}
    assert scheduled == {1: "head", 3: "backfill"}


def test_a_promise_that_is_kept_is_not_missed():
    house = blocked()
    house.now_ms += 60 * MINUTE
    house.see("1.0.1", "succeeded", 0)
    assert house.started() == ["2.0.1"]
    house.later(60 * MINUTE)
    assert not any(house.controller.keeping.missed.values())


def test_a_run_that_outlives_its_estimate_makes_a_promise_late_but_nobody_broke_it():
    house = blocked()
    house.later(61 * MINUTE)
    assert house.controller.keeping.missed == {"broken": 0, "overrun": 1, "node": 0, "rules": 0}
    told = [event for event in house.events if event.kind == "promise.missed"]
    assert [(event.job, event.detail["cause"]) for event in told] == [(2, "overrun")]
    house.now_ms += MINUTE
    house.see("1.0.1", "succeeded", 0)
    assert house.started() == ["2.0.1"]


def test_a_node_that_went_is_told_apart():
    house = blocked()
    house.learn(NodeLost("n1"))
    house.controller.world.book.promise(StartReservation(2, NOW_MS + 1, NOW_MS + 2, (("n1", amounts(4)),)))
    house.later(10)
    assert house.controller.keeping.missed["node"] == 1


def test_a_run_that_still_has_its_time_and_stands_in_the_way_is_a_broken_promise():
    house = blocked()
    house.controller.world.book.promise(
        StartReservation(2, NOW_MS + MINUTE, NOW_MS + 61 * MINUTE, (("n1", amounts(4)),))
    )
    house.controller.keeping.judge(NOW_MS + 2 * MINUTE)
    assert house.controller.keeping.broken == 1, "job 1 may go on for an hour, so this should never have been promised"


def test_a_guess_orders_those_who_fill_gaps_but_does_not_loosen_what_they_are_bound_by():
    house = easy_house(4, fill="shortest", estimator=LearnedEstimates())
    for id in (11, 12):  # quick.sh takes a minute, whatever its user says
        house.submit(id, cpu=1, name="quick", estimate_ms=90 * MINUTE)
        house.see(f"{id}.0.1", "running")
        house.now_ms += MINUTE
        house.see(f"{id}.0.1", "succeeded", 0)
    house.submit(1, cpu=3, estimate_ms=60 * MINUTE)
    house.submit(2, cpu=4, estimate_ms=60 * MINUTE)
    house.submit(3, cpu=1, name="quick", estimate_ms=90 * MINUTE)
    assert house.started() == [], "it is expected to be over in a minute, but may take 90"
    gang = house.controller.lines["default"].gangs[3]
    assert (gang.expected_ms, gang.estimate_ms) == (MINUTE, 90 * MINUTE)
    house.submit(4, cpu=1, name="slow", estimate_ms=50 * MINUTE)
    assert house.started() == ["4.0.1"]


def test_the_guess_decides_who_of_two_that_may_goes_first():
    house = easy_house(2, fill="shortest", estimator=LearnedEstimates())
    for id in (11, 12):
        house.submit(id, cpu=1, name="quick", estimate_ms=40 * MINUTE)
        house.see(f"{id}.0.1", "running")
        house.now_ms += MINUTE
        house.see(f"{id}.0.1", "succeeded", 0)
    house.submit(1, cpu=1, estimate_ms=60 * MINUTE)
    house.submit(5, cpu=1, estimate_ms=10 * MINUTE, name="brief")
    house.submit(2, cpu=2, estimate_ms=60 * MINUTE)
    house.submit(3, cpu=1, name="other", estimate_ms=30 * MINUTE)
    house.submit(4, cpu=1, name="quick", estimate_ms=40 * MINUTE)
    house.now_ms += 10 * MINUTE
    house.see("5.0.1", "succeeded", 0)
    assert house.started() == ["4.0.1"]
