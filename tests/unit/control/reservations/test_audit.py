"""Promises: what `why` says of them, that they are kept, and whose fault it is when one comes late."""

from __future__ import annotations

from typing import Any

from builders import NOW_MS, amounts
from hodei.control.estimates import LearnedEstimates
from hodei.control.explain import why as explain
from hodei.control.explain.why import holds_on
from hodei.engine.availability import StartReservation
from hodei.model.explanation import ReservedStart
from hodei.model.facts import NodeLost
from hodei.model.reservation import CapacityHold
from hodei.plugins.registry import build_profile
from unit.control.harness import Harness, some_nodes

MINUTE = 60_000


def easy_house(*cpus: int, fill: str = "queue", **options: Any) -> Harness:
    profile = build_profile("default", queue="batch", queue_arguments={"fill": fill})
    return Harness(*some_nodes(*cpus), profiles={"default": profile}, **options)


def blocked(**options: Any) -> Harness:
    """Job 1 holds 3 of 4 cores for an hour; job 2, which wants 4, is promised them then."""
    harness = easy_house(4, **options)
    harness.submit(1, cpu=3, estimate_ms=60 * MINUTE)
    harness.submit(2, cpu=4, estimate_ms=60 * MINUTE)
    return harness


def test_why_reports_start_reservations():
    harness = blocked()
    harness.submit(3, cpu=1, estimate_ms=90 * MINUTE)
    first = explain.why(harness.controller, 2, harness.now_ms)
    assert first.start_reservation == ReservedStart(NOW_MS + 60 * MINUTE, ("n1",))
    held_back = explain.why(harness.controller, 3, harness.now_ms)
    assert held_back.code == "START_RESERVED"
    hold = CapacityHold("n1", NOW_MS + 60 * MINUTE, NOW_MS + 120 * MINUTE, amounts(4, "1Gi"), 2)
    assert held_back.held_for == (hold,)
    assert holds_on(harness.controller.cluster, "n1") == (hold,)


def test_each_start_says_how_it_came_about():
    harness = blocked()
    harness.submit(3, cpu=1, estimate_ms=30 * MINUTE)
    assert [(bind.job, bind.kind) for bind in harness.last.plan.binds] == [(3, "backfill")]
    scheduled = {event.job: event.detail["start"] for event in harness.events if event.kind == "job.scheduled"}
    assert scheduled == {1: "head", 3: "backfill"}


def test_a_kept_start_reservation_is_not_missed():
    harness = blocked()
    harness.now_ms += 60 * MINUTE
    harness.see("1.0.1", "succeeded", 0)
    assert harness.started() == ["2.0.1"]
    harness.later(60 * MINUTE)
    assert not any(harness.controller.reservation_audit.missed.values())


def test_an_overrun_delays_a_start_reservation_without_breaking_it():
    harness = blocked()
    harness.later(61 * MINUTE)
    assert harness.controller.reservation_audit.missed == {"broken": 0, "overrun": 1, "node": 0, "rules": 0}
    told = [event for event in harness.events if event.kind == "start_reservation.missed"]
    assert [(event.job, event.detail["cause"]) for event in told] == [(2, "overrun")]
    harness.now_ms += MINUTE
    harness.see("1.0.1", "succeeded", 0)
    assert harness.started() == ["2.0.1"]


def test_a_node_that_went_is_told_apart():
    harness = blocked()
    harness.learn(NodeLost("n1"))
    harness.controller.cluster.availability.add_start_reservation(
        StartReservation(2, NOW_MS + 1, NOW_MS + 2, (("n1", amounts(4)),))
    )
    harness.later(10)
    assert harness.controller.reservation_audit.missed["node"] == 1


def test_a_run_within_its_estimate_that_blocks_a_start_reservation_breaks_it():
    harness = blocked()
    harness.controller.cluster.availability.add_start_reservation(
        StartReservation(2, NOW_MS + MINUTE, NOW_MS + 61 * MINUTE, (("n1", amounts(4)),))
    )
    harness.controller.reservation_audit.check(NOW_MS + 2 * MINUTE)
    assert harness.controller.reservation_audit.broken == 1, (
        "job 1 may go on for an hour, so this should never have been promised"
    )


def test_a_learned_estimate_orders_backfill_but_does_not_extend_limits():
    harness = easy_house(4, fill="shortest", estimator=LearnedEstimates())
    for id in (11, 12):  # quick.sh takes a minute, whatever its user says
        harness.submit(id, cpu=1, name="quick", estimate_ms=90 * MINUTE)
        harness.see(f"{id}.0.1", "running")
        harness.now_ms += MINUTE
        harness.see(f"{id}.0.1", "succeeded", 0)
    harness.submit(1, cpu=3, estimate_ms=60 * MINUTE)
    harness.submit(2, cpu=4, estimate_ms=60 * MINUTE)
    harness.submit(3, cpu=1, name="quick", estimate_ms=90 * MINUTE)
    assert harness.started() == [], "it is expected to be over in a minute, but may take 90"
    gang = harness.controller.queues["default"].gangs[3]
    assert (gang.expected_ms, gang.estimate_ms) == (MINUTE, 90 * MINUTE)
    harness.submit(4, cpu=1, name="slow", estimate_ms=50 * MINUTE)
    assert harness.started() == ["4.0.1"]


def test_the_guess_decides_who_of_two_that_may_goes_first():
    harness = easy_house(2, fill="shortest", estimator=LearnedEstimates())
    for id in (11, 12):
        harness.submit(id, cpu=1, name="quick", estimate_ms=40 * MINUTE)
        harness.see(f"{id}.0.1", "running")
        harness.now_ms += MINUTE
        harness.see(f"{id}.0.1", "succeeded", 0)
    harness.submit(1, cpu=1, estimate_ms=60 * MINUTE)
    harness.submit(5, cpu=1, estimate_ms=10 * MINUTE, name="brief")
    harness.submit(2, cpu=2, estimate_ms=60 * MINUTE)
    harness.submit(3, cpu=1, name="other", estimate_ms=30 * MINUTE)
    harness.submit(4, cpu=1, name="quick", estimate_ms=40 * MINUTE)
    harness.now_ms += 10 * MINUTE
    harness.see("5.0.1", "succeeded", 0)
    assert harness.started() == ["4.0.1"]
