"""Selection across profiles: the highest priority of all queues is tried first."""

from __future__ import annotations

import pytest

from builders import a_job, a_node
from hodei.control.queue.selection import ProfileQueue, next_gangs
from hodei.model.facts import JobSubmitted, NodeJoined
from unit.control.configured import ConfiguredHarness
from unit.control.harness import some_nodes

URGENT = """
[scheduling.preemption]
enabled = false
[scheduling.profiles.urgent]
[scheduling.profiles.fair]
queue = "fair"
[scheduling.profiles.points]
queue = "multifactor"
[scheduling.profiles.easy]
queue = "batch"
[[scheduling.routes]]
when = {priority_at_least = "critical"}
profile = "urgent"
"""


def test_a_critical_job_of_another_profile_starts_before_low_jobs_of_the_default_one() -> None:
    harness = ConfiguredHarness(URGENT, *some_nodes(1))
    harness.submit(1, cpu=1, priority="low")
    harness.submit(2, 3, cpu=1, priority="low")
    harness.submit(4, cpu=1, priority="critical")
    assert harness.queue_of(4) == "urgent"
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.started() == ["4.0.1"]


@pytest.mark.parametrize("low", ["default", "fair", "points"])
@pytest.mark.parametrize("high", ["urgent", "fair", "points", "easy", "compute"])
def test_the_higher_priority_starts_first_for_every_pair_of_queues(low: str, high: str) -> None:
    if low == high:
        pytest.skip("one profile alone")
    harness = ConfiguredHarness(URGENT, *some_nodes(1))
    harness.submit(1, cpu=1, profile="default", estimate_ms=1000)
    harness.submit(2, 3, cpu=1, profile=low, priority="low", estimate_ms=1000)
    harness.submit(4, cpu=1, profile=high, priority="high", estimate_ms=1000)
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.started() == ["4.0.1"]


def test_a_backfill_queue_gives_way_to_new_work_of_higher_priority() -> None:
    harness = ConfiguredHarness(URGENT, *some_nodes(1))
    harness.step(
        JobSubmitted(a_job(1, cpu=1, profile="easy", priority="low", estimate_ms=1000)),
        JobSubmitted(a_job(2, cpu=1, profile="urgent", priority="high", estimate_ms=1000)),
    )
    assert harness.started() == ["2.0.1"]


def test_start_reservations_hold_against_higher_priority_of_other_profiles() -> None:
    harness = ConfiguredHarness(URGENT, *some_nodes(2))
    harness.submit(1, cpu=1, profile="easy", estimate_ms=10_000)
    harness.submit(2, cpu=2, profile="easy", priority="low", estimate_ms=10_000)
    start_reservation = harness.controller.cluster.availability.start_reservations[2]
    harness.submit(3, cpu=1, profile="urgent", priority="critical", estimate_ms=60_000)
    assert harness.started() == []
    assert harness.reason(3)[0] == "START_RESERVED"
    harness.submit(4, cpu=1, profile="urgent", priority="critical", estimate_ms=5_000)
    assert harness.started() == ["4.0.1"], "it ends before the reserved start"
    assert harness.controller.cluster.availability.start_reservations[2] == start_reservation


def test_a_start_reservation_is_kept_while_a_new_head_waits_for_its_turn() -> None:
    """A shorter job is queued before the reserved one. Until it is tried, the start reservation holds: a job of higher
    priority in another profile, which is tried before both, must not take the capacity."""
    config = URGENT + '[scheduling.profiles.short]\nqueue = "batch"\noptions = {batch = {order = "sjf"}}\n'
    harness = ConfiguredHarness(config, *some_nodes(2))
    harness.submit(1, cpu=1, profile="short", estimate_ms=10_000)
    harness.submit(2, cpu=2, profile="short", priority="low", estimate_ms=10_000)
    assert 2 in harness.controller.cluster.availability.start_reservations
    harness.step(
        JobSubmitted(a_job(3, cpu=2, profile="short", priority="low", estimate_ms=5_000)),
        JobSubmitted(a_job(4, cpu=1, profile="urgent", priority="critical", estimate_ms=60_000)),
    )
    assert harness.started() == []
    assert harness.reason(4)[0] == "START_RESERVED"
    assert set(harness.controller.cluster.availability.start_reservations) == {3}


def test_equal_priorities_of_two_profiles_go_by_submission() -> None:
    harness = ConfiguredHarness(URGENT, *some_nodes(1))
    harness.submit(1, cpu=1)
    for id, profile in ((2, "urgent"), (3, "default"), (4, "compute"), (5, "urgent")):
        harness.now_ms += 1
        harness.submit(id, cpu=1, profile=profile)
    order = []
    run = "1.0.1"
    for _ in range(4):
        harness.observe(run, "succeeded", 0)
        (run,) = harness.started()
        order.append(int(run.split(".")[0]))
    assert order == [2, 3, 4, 5]


def test_a_profile_keeps_its_own_order() -> None:
    """In a FIFO profile a critical job does not pass a low one that was submitted before it."""
    harness = ConfiguredHarness(URGENT + '[scheduling.profiles.fifo]\nqueue = "fifo"\n', *some_nodes(1))
    harness.submit(1, cpu=1, profile="fifo")
    harness.submit(2, cpu=1, profile="fifo", priority="low")
    harness.submit(3, cpu=1, profile="fifo", priority="critical")
    harness.submit(4, cpu=1, profile="compute", priority="medium")
    starts = []
    run = "1.0.1"
    for _ in range(3):
        harness.observe(run, "succeeded", 0)
        (run,) = harness.started()
        starts.append(run)
    assert starts == ["4.0.1", "2.0.1", "3.0.1"]


def test_a_preemptor_comes_before_lower_jobs_of_another_profile() -> None:
    harness = ConfiguredHarness(URGENT.replace("enabled = false", "enabled = true"), *some_nodes(1))
    harness.submit(1, cpu=1, priority="low")
    harness.observe("1.0.1", "running")
    harness.now_ms += 60_000
    harness.submit(2, cpu=1, priority="critical")
    assert harness.stopped() == ["1.0.1"]
    harness.submit(3, cpu=1, priority="medium", profile="compute")
    harness.step(NodeJoined(a_node("n9", 1, "64Gi")))
    assert harness.started() == ["2.0.1"]


def test_a_step_compares_only_the_first_of_each_queue() -> None:
    harness = ConfiguredHarness(URGENT, *some_nodes(1))
    harness.submit(*range(1, 200), cpu=1, priority="low")
    harness.submit(*range(200, 400), cpu=1, profile="compute", priority="medium")
    queues, view = harness.controller.queues, harness.controller.view(harness.now_ms)
    for queue in queues.values():
        queue.wake("run_ended")
    per_node = harness.controller.per_node
    candidates = [ProfileQueue(name, queue, [], per_node) for name, queue in queues.items() if queue.gangs]
    order = next_gangs(candidates, view)
    first, gang = next(order)
    assert (first.name, gang.id) == ("compute", 200)
    order.close()
