"""Start reservations of a backfill queue: kept, withdrawn and made again."""

from __future__ import annotations

from typing import Any

import pytest

from builders import NOW_MS, a_job, a_node, a_task
from hodei.control.controller import Step
from hodei.model.facts import JobSubmitted, NodeLost
from hodei.model.job import GangRules
from hodei.plugins.registry import build_profile
from unit.control.harness import Harness

SECOND = 1000
HOUR = 3600 * SECOND
ONE_ZONE = GangRules(topology="zone", topology_required=True)


def a_profile(backfill: str = "conservative", fill: str = "queue") -> Any:
    return build_profile("default", queue="batch", queue_arguments={"backfill": backfill, "fill": fill})


def two_zones(**options: Any) -> Harness:
    nodes = [a_node(f"n{at}", 2, "64Gi", labels={"zone": zone}) for at, zone in enumerate("ab", 1)]
    return Harness(*nodes, **options)


def end(harness: Harness, run: str, at_ms: int) -> Step:
    harness.now_ms = NOW_MS + at_ms
    return harness.observe(run, "succeeded", 0)


@pytest.mark.parametrize("backfill", ["easy", "conservative"])
def test_a_job_blocked_by_a_rule_at_its_reserved_start_loses_the_reservation(backfill):
    harness = two_zones(profiles={"default": a_profile(backfill)})
    harness.submit(1, cpu=1, estimate_ms=HOUR)
    harness.observe("1.0.1", "running")
    harness.submit(2, cpu=1, count=4, min_count=4, estimate_ms=HOUR, gang=ONE_ZONE)
    harness.submit(3, cpu=2, estimate_ms=2 * HOUR)
    assert harness.reason(3)[0] == "START_RESERVED"
    end(harness, "1.0.1", HOUR)
    assert harness.started() == ["3.0.1"], "job 2 fits in no zone and does not block job 3"


@pytest.mark.parametrize("name", ["a profile before default", "the profile after default"])
def test_a_lapsed_start_reservation_wakes_other_queues(name):
    harness = two_zones(profiles={"default": a_profile(), name: build_profile(name)})
    harness.submit(1, cpu=1, estimate_ms=HOUR)
    harness.observe("1.0.1", "running")
    harness.submit(2, cpu=1, count=4, min_count=4, estimate_ms=HOUR, gang=ONE_ZONE)
    harness.submit(3, cpu=2, estimate_ms=2 * HOUR, profile=name)
    assert harness.reason(3)[0] == "START_RESERVED"
    end(harness, "1.0.1", HOUR)
    started = harness.started()
    assert harness.controller.next_wakeup_ms(harness.now_ms) == harness.now_ms
    harness.step()
    assert [*started, *harness.started()] == ["3.0.1"]
    assert harness.controller.next_wakeup_ms(harness.now_ms) != harness.now_ms, "there is one extra step only"


def test_a_withdrawn_start_reservation_wakes_jobs_at_the_front():
    """Job 1 fits only with its members in one order, which the search for a start reservation does not find."""
    small = a_task("small", cpu="500m", count=2, min_count=2, node_selector={"zone": "b"})
    large = a_task("large", cpu=1, count=3, min_count=3)
    harness = two_zones(profiles={"default": a_profile()})
    harness.submit(9, cpu=1, estimate_ms=HOUR)
    harness.observe("9.0.1", "running")
    harness.now_ms += SECOND
    harness.submit(1, tasks=(large, small), estimate_ms=HOUR)
    harness.now_ms += SECOND
    harness.submit(2, cpu=1, count=4, min_count=4, estimate_ms=HOUR, gang=ONE_ZONE)
    assert list(harness.controller.cluster.availability.start_reservations) == [2]
    end(harness, "9.0.1", HOUR)
    assert harness.started() == ["1.0.1", "1.1.1", "1.2.1", "1.3.1", "1.4.1"]


def test_a_start_reservation_on_a_removed_node_is_made_again():
    harness = Harness(a_node("n1", 4), a_node("n2", 4), profiles={"default": a_profile()})
    harness.submit(1, cpu=3, estimate_ms=HOUR)
    harness.observe("1.0.1", "running")
    harness.submit(2, cpu=4, count=2, min_count=2, estimate_ms=HOUR)
    harness.submit(3, cpu=4, estimate_ms=2 * HOUR)
    assert harness.reason(3)[0] == "START_RESERVED"
    harness.now_ms += SECOND
    harness.step(NodeLost("n1" if harness.runs["1.0.1"].node == "n1" else "n2", "unplugged"))
    assert harness.started() == ["3.0.1"], "job 2 cannot start on one node"


def test_a_gang_of_different_members_starts_at_its_reserved_time():
    """Of the placements of job 4, only the reserved one does not delay job 6."""
    sizes = (("2", "8Gi"), ("4", "4Gi"), ("2", "4Gi"), ("4", "8Gi"))
    nodes = [a_node(f"n{at}", cpu, memory) for at, (cpu, memory) in enumerate(sizes, 1)]
    harness = Harness(*nodes, profiles={"default": a_profile(fill="largest")})
    thin = a_task("thin", cpu="500m", memory="2Gi", count=3, min_count=3)
    thick = a_task("thick", cpu=1, memory="3Gi", count=3, min_count=3)
    harness.submit(1, cpu=1, memory="2Gi", estimate_ms=19 * SECOND)
    harness.submit(2, cpu=1, memory=0, estimate_ms=27 * SECOND)
    harness.now_ms += SECOND
    harness.submit(3, cpu=2, memory="1Gi", estimate_ms=8 * SECOND)
    at = {"at_ms": harness.now_ms, "queued_ms": harness.now_ms}
    harness.step(
        JobSubmitted(a_job(4, tasks=(thin, thick), estimate_ms=55 * SECOND, **at)),
        JobSubmitted(a_job(5, cpu=1, memory="3Gi", estimate_ms=21 * SECOND, **at)),
        JobSubmitted(a_job(6, cpu=1, memory="2Gi", count=3, min_count=3, estimate_ms=53 * SECOND, **at)),
        JobSubmitted(a_job(7, cpu=1, memory="2Gi", estimate_ms=6 * SECOND, **at)),
    )
    assert harness.controller.cluster.availability.start_reservations[4].start_ms == NOW_MS + 9 * SECOND
    end(harness, "7.0.1", 5200)
    end(harness, "1.0.1", 5700)
    assert harness.reason(4)[0] == "START_RESERVED"
    end(harness, "3.0.1", 9000)
    assert [run for run in harness.started() if run.startswith("4.")], harness.reason(4)
    assert harness.controller.reservation_audit.broken == 0
