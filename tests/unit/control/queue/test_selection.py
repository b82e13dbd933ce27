"""One order over all profiles: the highest priority of any profile is tried first."""

from __future__ import annotations

import pytest

from builders import a_job, a_node
from hodei.control.queue.selection import ProfileQueue, next_gangs
from hodei.model.facts import JobSubmitted, NodeJoined
from unit.control.configured import Configured
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
    harness = Configured(URGENT, *some_nodes(1))
    harness.submit(1, cpu=1, priority="low")
    harness.submit(2, 3, cpu=1, priority="low")
    harness.submit(4, cpu=1, priority="critical")
    assert harness.where(4) == "urgent"
    harness.see("1.0.1", "succeeded", 0)
    assert harness.started() == ["4.0.1"]


@pytest.mark.parametrize("low", ["default", "fair", "points"])
@pytest.mark.parametrize("high", ["urgent", "fair", "points", "easy", "compute"])
def test_it_is_so_for_every_pair_of_queues(low: str, high: str) -> None:
    if low == high:
        pytest.skip("one profile alone")
    harness = Configured(URGENT, *some_nodes(1))
    harness.submit(1, cpu=1, profile="default", estimate_ms=1000)
    harness.submit(2, 3, cpu=1, profile=low, priority="low", estimate_ms=1000)
    harness.submit(4, cpu=1, profile=high, priority="high", estimate_ms=1000)
    harness.see("1.0.1", "succeeded", 0)
    assert harness.started() == ["4.0.1"]


def test_a_backfill_queue_gives_way_to_new_work_of_higher_priority() -> None:
    harness = Configured(URGENT, *some_nodes(1))
    harness.learn(
        JobSubmitted(a_job(1, cpu=1, profile="easy", priority="low", estimate_ms=1000)),
        JobSubmitted(a_job(2, cpu=1, profile="urgent", priority="high", estimate_ms=1000)),
    )
    assert harness.started() == ["2.0.1"]


def test_start_reservations_hold_against_higher_priority_of_other_profiles() -> None:
    harness = Configured(URGENT, *some_nodes(2))
    harness.submit(1, cpu=1, profile="easy", estimate_ms=10_000)
    harness.submit(2, cpu=2, profile="easy", priority="low", estimate_ms=10_000)
    start_reservation = harness.controller.cluster.availability.start_reservations[2]
    harness.submit(3, cpu=1, profile="urgent", priority="critical", estimate_ms=60_000)
    assert harness.started() == []
    assert harness.reason(3)[0] == "START_RESERVED"
    harness.submit(4, cpu=1, profile="urgent", priority="critical", estimate_ms=5_000)
    assert harness.started() == ["4.0.1"], "it is over before the promised start"
    assert harness.controller.cluster.availability.start_reservations[2] == start_reservation


def test_a_start_reservation_is_kept_while_a_new_head_waits_for_its_turn() -> None:
    """A shorter job comes before the promised one in its line. Until it is tried, the promise stands: more important work
    of another profile, which is tried before both, must not take the room meanwhile."""
    config = URGENT + '[scheduling.profiles.short]\nqueue = "batch"\noptions = {batch = {order = "sjf"}}\n'
    harness = Configured(config, *some_nodes(2))
    harness.submit(1, cpu=1, profile="short", estimate_ms=10_000)
    harness.submit(2, cpu=2, profile="short", priority="low", estimate_ms=10_000)
    assert 2 in harness.controller.cluster.availability.start_reservations
    harness.learn(
        JobSubmitted(a_job(3, cpu=2, profile="short", priority="low", estimate_ms=5_000)),
        JobSubmitted(a_job(4, cpu=1, profile="urgent", priority="critical", estimate_ms=60_000)),
    )
    assert harness.started() == []
    assert harness.reason(4)[0] == "START_RESERVED"
    assert set(harness.controller.cluster.availability.start_reservations) == {3}


def test_equal_priorities_of_two_profiles_go_by_submission() -> None:
    harness = Configured(URGENT, *some_nodes(1))
    harness.submit(1, cpu=1)
    for id, profile in ((2, "urgent"), (3, "default"), (4, "compute"), (5, "urgent")):
        harness.now_ms += 1
        harness.submit(id, cpu=1, profile=profile)
    order = []
    run = "1.0.1"
    for _ in range(4):
        harness.see(run, "succeeded", 0)
        (run,) = harness.started()
        order.append(int(run.split(".")[0]))
    assert order == [2, 3, 4, 5]


def test_a_profile_keeps_its_own_order() -> None:
    """In a profile by submission, a critical job behind a low one does not pass it, and is not passed either."""
    harness = Configured(URGENT + '[scheduling.profiles.line]\nqueue = "fifo"\n', *some_nodes(1))
    harness.submit(1, cpu=1, profile="line")
    harness.submit(2, cpu=1, profile="line", priority="low")
    harness.submit(3, cpu=1, profile="line", priority="critical")
    harness.submit(4, cpu=1, profile="compute", priority="medium")
    starts = []
    run = "1.0.1"
    for _ in range(3):
        harness.see(run, "succeeded", 0)
        (run,) = harness.started()
        starts.append(run)
    assert starts == ["4.0.1", "2.0.1", "3.0.1"]


def test_one_that_is_made_room_for_comes_before_lower_work_of_another_profile() -> None:
    harness = Configured(URGENT.replace("enabled = false", "enabled = true"), *some_nodes(1))
    harness.submit(1, cpu=1, priority="low")
    harness.see("1.0.1", "running")
    harness.now_ms += 60_000
    harness.submit(2, cpu=1, priority="critical")
    assert harness.stopped() == ["1.0.1"]
    harness.submit(3, cpu=1, priority="medium", profile="compute")
    harness.learn(NodeJoined(a_node("n9", 1, "64Gi")))
    assert harness.started() == ["2.0.1"]


def test_a_step_compares_only_the_first_of_each_queue() -> None:
    harness = Configured(URGENT, *some_nodes(1))
    harness.submit(*range(1, 200), cpu=1, priority="low")
    harness.submit(*range(200, 400), cpu=1, profile="compute", priority="medium")
    lines, view = harness.controller.queues, harness.controller.view(harness.now_ms)
    for line in lines.values():
        line.wake("run_ended")
    turns = [ProfileQueue(name, line, [], harness.controller.per_node) for name, line in lines.items() if line.gangs]
    order = next_gangs(turns, view)
    turn, gang = next(order)
    assert (turn.name, gang.id) == ("compute", 200)
    order.close()
