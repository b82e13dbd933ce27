"""Jobs that are moved to other nodes, by a wish or because theirs is drained."""

from __future__ import annotations

import pytest

from hodei.model.effects import Stop
from hodei.model.facts import (
    JobCancelled,
    JobHeld,
    JobMigrated,
    JobReleased,
    JobSuspended,
    NodeJoined,
    NodeLost,
    NodeOverridden,
)
from hodei.model.job import Checkpoint
from hodei.model.outcome import StopReason
from unit.control.harness import Harness, a_harness, some_nodes
from unit.control.scenarios import gone, is_empty, live, running

SAVES = Checkpoint(signal="USR1")


def on_the_first(*cpus: int, **spec) -> Harness:
    """A job that runs on n1, where n1 is the only node until it does."""
    harness = a_harness(cpus[0])
    harness.submit(1, **{"cpu": "1"} | spec)
    running(harness, *live(harness))
    for node in some_nodes(*cpus)[1:]:
        harness.learn(NodeJoined(node))
    return harness


def test_a_job_saves_its_work_and_goes_on_elsewhere():
    harness = on_the_first(4, 1, checkpoint=SAVES)
    harness.learn(JobMigrated(1))
    assert harness.acts == [Stop("1.0.1", "local", 10_000, StopReason("migrated", "off n1"), SAVES)]
    assert harness.used()["n2"]["cpu"] == 1000, "the room is kept for it"
    gone(harness, "1.0.1")
    assert (harness.state(), harness.started(), harness.runs["1.0.2"].node) == ("scheduled", ["1.0.2"], "n2")
    assert harness.used()["n1"] == {}
    requeued = [event for event in harness.events if event.kind == "job.requeued"]
    assert requeued[0].detail["reason_code"] == "MIGRATED"
    assert (harness.jobs[1].move, harness.jobs[1].failures, harness.jobs[1].preemptions) == ("", 0, 0)


def test_a_migration_without_another_node_is_refused_with_a_reason():
    harness = on_the_first(4, 1, cpu="2")
    harness.learn(JobMigrated(1))
    assert (harness.acts, harness.state()) == ([], "running")
    assert harness.events[-1].kind == "job.migration_refused"
    assert harness.events[-1].detail["reason"] == "it is being moved off n1, and no other node has capacity for it"


def test_by_force_it_leaves_and_waits_for_another_node_beside_its_own_that_is_free():
    harness = on_the_first(4, 1, cpu="2")
    harness.learn(JobMigrated(1, force=True))
    gone(harness, "1.0.1")
    assert (harness.state(), harness.started()) == ("pending", [])
    harness.learn()
    assert harness.reason()[0] == "MOVING"
    assert "n1" in harness.reason()[1]


def test_one_that_finds_no_other_node_for_ten_minutes_takes_any():
    harness = on_the_first(4, 1, cpu="2")
    harness.learn(JobMigrated(1, force=True))
    gone(harness, "1.0.1")
    harness.later(599_000)
    assert harness.state() == "pending"
    harness.later(1_000)
    assert harness.runs["1.0.2"].node == "n1"


def test_one_that_waits_for_another_node_is_free_to_go_anywhere_when_it_was_held_and_released():
    harness = on_the_first(4, 1, cpu="2")
    harness.learn(JobMigrated(1, force=True))
    gone(harness, "1.0.1")
    harness.learn(JobHeld(1))
    harness.learn(JobReleased(1))
    assert harness.runs["1.0.2"].node == "n1"


def test_which_nodes_it_leaves_is_known_after_a_crash():
    harness = on_the_first(4, 1, cpu="2")
    harness.learn(JobMigrated(1, force=True))
    gone(harness, "1.0.1")
    harness.restart(*some_nodes(4, 1))
    assert (harness.state(), harness.started()) == ("pending", [])
    harness.restart(*some_nodes(4, 1, 2))
    assert harness.runs["1.0.2"].node == "n3"


def test_it_goes_to_the_node_that_was_named():
    harness = on_the_first(4, 2, 2)
    harness.learn(JobMigrated(1, "n3"))
    gone(harness, "1.0.1")
    assert harness.runs["1.0.2"].node == "n3"


def test_capacity_of_a_migration_is_held_against_other_jobs():
    harness = on_the_first(4, 1)
    harness.learn(JobMigrated(1))
    harness.submit(2, cpu="1", node_selector={}, priority="high")
    harness.submit(3, cpu="4", priority="high")
    assert harness.runs["2.0.1"].node == "n1"
    gone(harness, "1.0.1")
    assert harness.runs["1.0.2"].node == "n2"


@pytest.mark.parametrize(
    "word", [JobCancelled(1), JobSuspended(1), NodeLost("n2")], ids=["cancelled", "suspended", "its new node goes"]
)
def test_no_room_is_kept_for_one_that_does_not_come(word):
    harness = on_the_first(1, 1)
    harness.learn(JobMigrated(1))
    harness.learn(word)
    gone(harness, "1.0.1")
    if isinstance(word, NodeLost):
        assert (harness.state(), harness.used()) == ("pending", {"n1": {}})
    else:
        assert is_empty(harness)


def test_a_gang_leaves_all_its_nodes():
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2)
    running(harness, *live(harness))
    harness.learn(JobMigrated(1))
    assert harness.acts == []
    harness = Harness(*some_nodes(1, 1, 1, 1))
    harness.submit(1, cpu="1", count=2)
    running(harness, *live(harness))
    left = {run.node for run in harness.runs.values()}
    harness.learn(JobMigrated(1))
    gone(harness, *live(harness))
    came = {harness.runs[run].node for run in live(harness)}
    assert len(came) == 2
    assert not came & left


def test_a_drained_job_saves_its_work_and_continues_on_held_capacity():
    harness = on_the_first(1, 1, checkpoint=SAVES)
    submitted = harness.jobs[1].submitted_ms
    harness.learn(NodeOverridden("n1", cordon=True, drain=True))
    assert harness.acts == [Stop("1.0.1", "local", 10_000, StopReason("drained", "n1"), SAVES)]
    harness.submit(2, cpu="1", priority="high")
    assert harness.state(2) == "pending"
    gone(harness, "1.0.1")
    assert (harness.runs["1.0.2"].node, harness.jobs[1].submitted_ms) == ("n2", submitted)
    requeued = [event.detail for event in harness.events if event.kind == "job.requeued"]
    assert [detail["reason_code"] for detail in requeued] == ["DRAINED"]
    assert "n1" in requeued[0]["reason"]


def test_a_drain_stops_jobs_that_fit_nowhere_else():
    harness = on_the_first(1)
    harness.learn(NodeOverridden("n1", cordon=True, drain=True))
    gone(harness, "1.0.1")
    assert harness.state() == "pending"


def test_two_jobs_of_a_drained_node_hold_different_capacity():
    harness = a_harness(2)
    harness.submit(1, 2, cpu="1")
    running(harness, "1.0.1", "2.0.1")
    harness.learn(NodeJoined(some_nodes(2, 1)[1]))
    harness.learn(NodeOverridden("n1", cordon=True, drain=True))
    gone(harness, "2.0.1", "1.0.1")
    assert sorted(harness.state(id) for id in (1, 2)) == ["pending", "scheduled"]
    assert harness.used()["n2"]["cpu"] == 1000
