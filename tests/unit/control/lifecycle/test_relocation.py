"""Jobs that move to other nodes: migration and drain."""

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
from unit.control.scenarios import is_empty, live_runs, mark_running, stop_runs

SAVES = Checkpoint(signal="USR1")


def running_on_n1(*cpus: int, **spec) -> Harness:
    """A job that runs on n1; the other nodes join after its start."""
    harness = a_harness(cpus[0])
    harness.submit(1, **{"cpu": "1"} | spec)
    mark_running(harness, *live_runs(harness))
    for node in some_nodes(*cpus)[1:]:
        harness.step(NodeJoined(node))
    return harness


def test_a_migrated_job_takes_a_checkpoint_and_continues_on_another_node():
    harness = running_on_n1(4, 1, checkpoint=SAVES)
    harness.step(JobMigrated(1))
    assert harness.acts == [Stop("1.0.1", "local", 10_000, StopReason("migrated", "off n1"), SAVES)]
    assert harness.used()["n2"]["cpu"] == 1000, "the capacity is held for it"
    stop_runs(harness, "1.0.1")
    assert (harness.state(), harness.started(), harness.runs["1.0.2"].node) == ("scheduled", ["1.0.2"], "n2")
    assert harness.used()["n1"] == {}
    requeued = [event for event in harness.events if event.kind == "job.requeued"]
    assert requeued[0].detail["reason_code"] == "MIGRATED"
    assert (harness.jobs[1].move, harness.jobs[1].failures, harness.jobs[1].preemptions) == (None, 0, 0)


def test_a_migration_without_another_node_is_refused_with_a_reason():
    harness = running_on_n1(4, 1, cpu="2")
    harness.step(JobMigrated(1))
    assert (harness.acts, harness.state()) == ([], "running")
    assert harness.events[-1].kind == "job.migration_refused"
    assert harness.events[-1].detail["reason"] == "it is being moved off n1, and no other node has capacity for it"


def test_a_forced_migration_stops_the_job_and_waits_for_another_node():
    harness = running_on_n1(4, 1, cpu="2")
    harness.step(JobMigrated(1, force=True))
    stop_runs(harness, "1.0.1")
    assert (harness.state(), harness.started()) == ("pending", [])
    harness.step()
    assert harness.reason()[0] == "MOVING"
    assert "n1" in harness.reason()[1]


def test_after_ten_minutes_a_migrating_job_may_return_to_its_node():
    harness = running_on_n1(4, 1, cpu="2")
    harness.step(JobMigrated(1, force=True))
    stop_runs(harness, "1.0.1")
    harness.advance(599_000)
    assert harness.state() == "pending"
    harness.advance(1_000)
    assert harness.runs["1.0.2"].node == "n1"


def test_hold_and_release_end_a_forced_migration():
    harness = running_on_n1(4, 1, cpu="2")
    harness.step(JobMigrated(1, force=True))
    stop_runs(harness, "1.0.1")
    harness.step(JobHeld(1))
    harness.step(JobReleased(1))
    assert harness.runs["1.0.2"].node == "n1"


def test_the_node_that_a_migration_leaves_survives_a_restart():
    harness = running_on_n1(4, 1, cpu="2")
    harness.step(JobMigrated(1, force=True))
    stop_runs(harness, "1.0.1")
    harness.restart(*some_nodes(4, 1))
    assert (harness.state(), harness.started()) == ("pending", [])
    harness.restart(*some_nodes(4, 1, 2))
    assert harness.runs["1.0.2"].node == "n3"


def test_a_migration_may_name_the_target_node():
    harness = running_on_n1(4, 2, 2)
    harness.step(JobMigrated(1, "n3"))
    stop_runs(harness, "1.0.1")
    assert harness.runs["1.0.2"].node == "n3"


def test_capacity_of_a_migration_is_held_against_other_jobs():
    harness = running_on_n1(4, 1)
    harness.step(JobMigrated(1))
    harness.submit(2, cpu="1", node_selector={}, priority="high")
    harness.submit(3, cpu="4", priority="high")
    assert harness.runs["2.0.1"].node == "n1"
    stop_runs(harness, "1.0.1")
    assert harness.runs["1.0.2"].node == "n2"


@pytest.mark.parametrize(
    "fact",
    [JobCancelled(1), JobSuspended(1), NodeLost("n2")],
    ids=["cancelled", "suspended", "its target node is lost"],
)
def test_the_hold_of_a_migration_is_released_if_it_does_not_happen(fact):
    harness = running_on_n1(1, 1)
    harness.step(JobMigrated(1))
    harness.step(fact)
    stop_runs(harness, "1.0.1")
    if isinstance(fact, NodeLost):
        assert (harness.state(), harness.used()) == ("pending", {"n1": {}})
    else:
        assert is_empty(harness)


def test_a_migrated_gang_leaves_all_its_nodes():
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2)
    mark_running(harness, *live_runs(harness))
    harness.step(JobMigrated(1))
    assert harness.acts == []
    harness = Harness(*some_nodes(1, 1, 1, 1))
    harness.submit(1, cpu="1", count=2)
    mark_running(harness, *live_runs(harness))
    before = {run.node for run in harness.runs.values()}
    harness.step(JobMigrated(1))
    stop_runs(harness, *live_runs(harness))
    after = {harness.runs[run].node for run in live_runs(harness)}
    assert len(after) == 2
    assert not after & before


def test_a_drained_job_takes_a_checkpoint_and_continues_on_held_capacity():
    harness = running_on_n1(1, 1, checkpoint=SAVES)
    submitted = harness.jobs[1].submitted_ms
    harness.step(NodeOverridden("n1", cordon=True, drain=True))
    assert harness.acts == [Stop("1.0.1", "local", 10_000, StopReason("drained", "n1"), SAVES)]
    harness.submit(2, cpu="1", priority="high")
    assert harness.state(2) == "pending"
    stop_runs(harness, "1.0.1")
    assert (harness.runs["1.0.2"].node, harness.jobs[1].submitted_ms) == ("n2", submitted)
    requeued = [event.detail for event in harness.events if event.kind == "job.requeued"]
    assert [detail["reason_code"] for detail in requeued] == ["DRAINED"]
    assert "n1" in requeued[0]["reason"]


def test_a_drain_stops_jobs_that_fit_nowhere_else():
    harness = running_on_n1(1)
    harness.step(NodeOverridden("n1", cordon=True, drain=True))
    stop_runs(harness, "1.0.1")
    assert harness.state() == "pending"


def test_two_jobs_of_a_drained_node_hold_different_capacity():
    harness = a_harness(2)
    harness.submit(1, 2, cpu="1")
    mark_running(harness, "1.0.1", "2.0.1")
    harness.step(NodeJoined(some_nodes(2, 1)[1]))
    harness.step(NodeOverridden("n1", cordon=True, drain=True))
    stop_runs(harness, "2.0.1", "1.0.1")
    assert sorted(harness.state(id) for id in (1, 2)) == ["pending", "scheduled"]
    assert harness.used()["n2"]["cpu"] == 1000
