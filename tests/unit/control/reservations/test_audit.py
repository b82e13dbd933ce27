"""Start reservations: what `why` reports, whether they are kept, and the cause of a missed one."""

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


def batch_cluster(*cpus: int, fill: str = "queue", **options: Any) -> Harness:
    profile = build_profile("default", queue="batch", queue_arguments={"fill": fill})
    return Harness(*some_nodes(*cpus), profiles={"default": profile}, **options)


def blocked(**options: Any) -> Harness:
    """Job 1 holds 3 of 4 cores for an hour; job 2 requests 4 and has a start reservation after that."""
    harness = batch_cluster(4, **options)
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


def test_a_start_is_reported_as_head_or_backfill():
    harness = blocked()
    harness.submit(3, cpu=1, estimate_ms=30 * MINUTE)
    assert [(bind.job, bind.kind) for bind in harness.last.plan.binds] == [(3, "backfill")]
    scheduled = {event.job: event.detail["start"] for event in harness.events if event.kind == "job.scheduled"}
    assert scheduled == {1: "head", 3: "backfill"}


def test_a_kept_start_reservation_is_not_missed():
    harness = blocked()
    harness.now_ms += 60 * MINUTE
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.started() == ["2.0.1"]
    harness.advance(60 * MINUTE)
    assert not any(harness.controller.reservation_audit.missed.values())


def test_an_overrun_delays_a_start_reservation_without_breaking_it():
    harness = blocked()
    harness.advance(61 * MINUTE)
    assert harness.controller.reservation_audit.missed == {"broken": 0, "overrun": 1, "node": 0, "rules": 0}
    missed = [event for event in harness.events if event.kind == "start_reservation.missed"]
    assert [(event.job, event.detail["cause"]) for event in missed] == [(2, "overrun")]
    harness.now_ms += MINUTE
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.started() == ["2.0.1"]


def test_a_lost_node_is_its_own_cause_of_a_missed_start_reservation():
    harness = blocked()
    harness.step(NodeLost("n1"))
    harness.controller.cluster.availability.add_start_reservation(
        StartReservation(2, NOW_MS + 1, NOW_MS + 2, (("n1", amounts(4)),))
    )
    harness.advance(10)
    assert harness.controller.reservation_audit.missed["node"] == 1


def test_a_run_within_its_estimate_that_blocks_a_start_reservation_breaks_it():
    harness = blocked()
    harness.controller.cluster.availability.add_start_reservation(
        StartReservation(2, NOW_MS + MINUTE, NOW_MS + 61 * MINUTE, (("n1", amounts(4)),))
    )
    harness.controller.reservation_audit.check(NOW_MS + 2 * MINUTE)
    assert harness.controller.reservation_audit.broken == 1, "job 1 may run for an hour, so this reservation was wrong"


def test_a_learned_estimate_orders_backfill_but_does_not_extend_limits():
    harness = batch_cluster(4, fill="shortest", estimator=LearnedEstimates())
    for id in (11, 12):  # quick takes a minute, whatever the estimate of its user
        harness.submit(id, cpu=1, name="quick", estimate_ms=90 * MINUTE)
        harness.observe(f"{id}.0.1", "running")
        harness.now_ms += MINUTE
        harness.observe(f"{id}.0.1", "succeeded", 0)
    harness.submit(1, cpu=3, estimate_ms=60 * MINUTE)
    harness.submit(2, cpu=4, estimate_ms=60 * MINUTE)
    harness.submit(3, cpu=1, name="quick", estimate_ms=90 * MINUTE)
    assert harness.started() == [], "it is expected to take a minute, but may take 90"
    gang = harness.controller.queues["default"].gangs[3]
    assert (gang.expected_ms, gang.estimate_ms) == (MINUTE, 90 * MINUTE)
    harness.submit(4, cpu=1, name="slow", estimate_ms=50 * MINUTE)
    assert harness.started() == ["4.0.1"]


def test_the_learned_estimate_decides_between_two_candidates_for_backfill():
    harness = batch_cluster(2, fill="shortest", estimator=LearnedEstimates())
    for id in (11, 12):
        harness.submit(id, cpu=1, name="quick", estimate_ms=40 * MINUTE)
        harness.observe(f"{id}.0.1", "running")
        harness.now_ms += MINUTE
        harness.observe(f"{id}.0.1", "succeeded", 0)
    harness.submit(1, cpu=1, estimate_ms=60 * MINUTE)
    harness.submit(5, cpu=1, estimate_ms=10 * MINUTE, name="brief")
    harness.submit(2, cpu=2, estimate_ms=60 * MINUTE)
    harness.submit(3, cpu=1, name="other", estimate_ms=30 * MINUTE)
    harness.submit(4, cpu=1, name="quick", estimate_ms=40 * MINUTE)
    harness.now_ms += 10 * MINUTE
    harness.observe("5.0.1", "succeeded", 0)
    assert harness.started() == ["4.0.1"]
