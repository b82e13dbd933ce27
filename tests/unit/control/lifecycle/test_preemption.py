"""Choice of victims beyond plain capacity: devices, ports, layouts, checkpoints, gangs that can shrink."""

from __future__ import annotations

import pytest

from builders import a_node
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.model.affinity import HostPort
from hodei.model.facts import JobCancelled, NodeLost
from hodei.model.job import Checkpoint, GangRules
from hodei.model.node import Location, Socket
from hodei.model.outcome import StopReason
from unit.control.harness import Harness, a_harness

ELASTIC = GangRules(elastic=True)


def _run(harness: Harness, id: int, *members: int, **fields: object) -> None:
    """A job that has been running for a minute."""
    harness.submit(id, **fields)
    for member in members or (0,):
        harness.observe(f"{id}.{member}.1", "running")
    harness.now_ms += 60_000


def _stop(harness: Harness, *runs: str) -> None:
    harness.now_ms += 100
    for run in runs:
        harness.observe(run, "failed", 143)


def test_the_holder_of_a_port_is_preempted_even_if_there_is_capacity_for_both():
    harness = a_harness(8)
    _run(harness, 1, cpu="1", priority="low")
    _run(harness, 2, cpu="1", priority="low", ports=(HostPort(80),))
    _run(harness, 3, cpu="1", priority="low")
    harness.submit(9, cpu="1", priority="high", ports=(HostPort(80),))
    assert harness.stopped() == ["2.0.1"]
    _stop(harness, "2.0.1")
    assert harness.started() == ["9.0.1"]


def test_no_job_is_preempted_for_a_port_of_a_higher_job():
    harness = a_harness(8)
    _run(harness, 1, cpu="1", priority="critical", ports=(HostPort(80),))
    _run(harness, 2, cpu="1", priority="low")
    harness.submit(9, cpu="1", priority="high", ports=(HostPort(80),))
    assert (harness.stopped(), harness.state(9)) == ([], "pending")


def test_victims_are_on_one_gpu_if_a_whole_gpu_is_requested():
    harness = Harness(a_node("n1", 16, "64Gi", gpu=2))
    for id, priority in ((1, "batch"), (2, "low"), (3, "batch"), (4, "low")):
        _run(harness, id, cpu="1", gpu="0.5", priority=priority)
    harness.submit(9, cpu="1", gpu="1", priority="high")
    assert harness.stopped() == ["3.0.1", "4.0.1"]  # 1 and 3 would lose less, but share no GPU
    _stop(harness, "3.0.1", "4.0.1")
    assert harness.started() == ["9.0.1"]


def test_victims_are_on_one_socket_if_the_binding_requires_it():
    sockets = (Socket(cpus=(0, 1)), Socket(cpus=(2, 3)))
    harness = Harness(a_node("n1", 8, "64Gi", sockets=sockets))
    for id in (1, 2, 3, 4):
        _run(harness, id, cpu="1", binding="cores", priority="low" if id % 2 else "batch")
    on = {id: harness.runs[f"{id}.0.1"].grant.cpus[0] // 2 for id in (1, 2, 3, 4)}
    harness.submit(9, cpu="2", binding="numa", priority="high")
    stopped = [int(run.partition(".")[0]) for run in harness.stopped()]
    assert len(stopped) == 2
    assert len({on[id] for id in stopped}) == 1


def test_victims_are_in_one_rack_if_the_gang_requires_it():
    nodes = [a_node(f"{rack}{i}", 1, location=Location(rack=rack)) for rack in "ab" for i in (1, 2)]
    harness = Harness(*nodes)
    for id, priority in ((1, "batch"), (2, "low"), (3, "batch"), (4, "low")):
        _run(harness, id, cpu="1", priority=priority)
    on = {run.job: run.node for run in harness.runs.values()}
    harness.submit(9, cpu="1", count=2, priority="high", gang=GangRules(topology="rack"))
    stopped = harness.stopped()
    assert len(stopped) == 2
    assert len({on[int(run.partition(".")[0])][0] for run in stopped}) == 1
    _stop(harness, *stopped)
    assert harness.started() == ["9.0.1", "9.1.1"]


def test_two_preemptors_do_not_count_on_the_same_capacity():
    harness = a_harness(2, 2)
    for id in (1, 2, 3, 4):
        _run(harness, id, cpu="1", priority="low")
    harness.submit(8, 9, cpu="2", priority="high")
    assert sorted(harness.stopped()) == ["1.0.1", "2.0.1", "3.0.1", "4.0.1"]
    assert harness.controller.preemption.holds.keys() == {8, 9}


def test_a_stopping_job_causes_no_other_preemption():
    harness = a_harness(1, 1)
    _run(harness, 1, cpu="1", priority="low")
    _run(harness, 2, cpu="1", priority="low")
    harness.step(JobCancelled(1))
    harness.submit(9, cpu="1", priority="high")
    assert harness.stopped() == []
    assert "waiting for job 1 to stop" in harness.reason(9)[1]


def test_victims_of_a_gang_are_only_those_that_free_capacity_does_not_replace():
    harness = a_harness(2, 2)
    for id in (1, 2, 3):
        _run(harness, id, cpu="1", priority="low")
    harness.submit(9, cpu="1", count=2, priority="high")
    assert len(harness.stopped()) == 1
    harness.submit(10, cpu="1", count=2, priority="high")
    assert len(harness.stopped()) == 2


@pytest.mark.parametrize("saved_ms", [0, 500_000], ids=["no checkpoint", "a recent checkpoint"])
def test_work_lost_is_counted_from_the_last_checkpoint(saved_ms):
    harness = a_harness(2)
    harness.submit(1, cpu="1", priority="low")
    harness.observe("1.0.1", "running")
    started_ms = harness.now_ms
    harness.now_ms += 400_000
    _run(harness, 2, cpu="1", priority="low")
    harness.now_ms = started_ms + 500_001
    if saved_ms:
        harness.observe("1.0.1", "running", checkpoint_ms=started_ms + saved_ms)
    harness.submit(9, cpu="1", priority="high")
    assert harness.stopped() == (["1.0.1"] if saved_ms else ["2.0.1"])


def test_a_victim_with_a_checkpoint_hook_loses_no_work():
    harness = a_harness(2)
    _run(harness, 1, cpu="1", priority="low", checkpoint=Checkpoint(signal="USR1"))
    _run(harness, 2, cpu="1", priority="low")
    harness.submit(9, cpu="1", priority="high")
    assert harness.stopped() == ["1.0.1"]


def test_members_above_the_minimum_of_an_elastic_gang_are_stopped_first():
    harness = a_harness(3)
    _run(harness, 1, 0, 1, 2, cpu="1", count=3, min_count=1, priority="low", gang=ELASTIC)
    done = harness.submit(9, cpu="1", priority="high", name="urgent")
    assert harness.stopped() == ["1.2.1"]
    assert harness.runs["1.2.1"].stop_reason == StopReason(
        "preempted", "by job 9 (urgent, priority 750)", gang="shrink"
    )
    assert [(e.job, e.preemptor, e.nodes, e.members) for e in done.plan.evictions] == [(1, 9, ("n1",), (2,))]
    assert "job.shrunk" in harness.event_kinds(1)
    assert "job.preempted" not in harness.event_kinds(1)
    assert harness.reason(9) == ("PREEMPTING", "preempting on n1: waiting for job 1 (member 2) to stop")
    _stop(harness, "1.2.1")
    assert harness.started() == ["9.0.1"]
    assert (harness.state(1), harness.jobs[1].preemptions) == ("running", 0)


def test_shrinking_a_gang_is_preferred_to_preempting_another_job():
    harness = a_harness(2, 1)
    _run(harness, 1, 0, 1, cpu="1", count=2, min_count=1, priority="low", gang=ELASTIC)
    _run(harness, 2, cpu="1", priority="low")
    harness.submit(9, cpu="1", priority="high")
    assert harness.stopped() == ["1.1.1"]


def test_a_gang_is_preempted_whole_if_shrinking_is_not_enough():
    harness = a_harness(3)
    _run(harness, 1, 0, 1, 2, cpu="1", count=3, min_count=2, priority="low", gang=ELASTIC)
    done = harness.submit(9, cpu="2", priority="high")
    assert sorted(harness.stopped()) == ["1.0.1", "1.1.1", "1.2.1"]
    assert [eviction.members for eviction in done.plan.evictions] == [()]
    assert "job.preempted" in harness.event_kinds(1)


def test_a_gang_that_is_not_elastic_is_preempted_whole():
    harness = a_harness(3)
    _run(harness, 1, 0, 1, 2, cpu="1", count=3, min_count=1, priority="low")
    harness.submit(9, cpu="1", priority="high")
    assert sorted(harness.stopped()) == ["1.0.1", "1.1.1", "1.2.1"]


def test_a_shrunk_gang_is_preempted_whole_for_the_next_preemptor():
    harness = a_harness(2)
    _run(harness, 1, 0, 1, cpu="1", count=2, min_count=1, priority="low", gang=ELASTIC)
    harness.submit(8, cpu="1", priority="high")
    assert harness.stopped() == ["1.1.1"]
    harness.submit(9, cpu="1", priority="high")
    assert harness.stopped() == ["1.0.1"]  # only its minimum is left
    assert harness.runs["1.0.1"].stop_reason.code == "preempted"


def test_a_gang_protected_from_preemption_can_still_shrink():
    harness = a_harness(2, preemption=PreemptionPolicy(max_per_job=0))
    _run(harness, 1, 0, 1, cpu="1", count=2, min_count=1, priority="low", gang=ELASTIC)
    harness.submit(8, cpu="1", priority="high")
    assert harness.stopped() == ["1.1.1"]
    harness.submit(9, cpu="1", priority="high")
    assert harness.stopped() == []


def test_a_preemption_by_shrinking_is_abandoned_when_the_node_is_lost():
    harness = a_harness(2)
    _run(harness, 1, 0, 1, cpu="1", count=2, min_count=1, priority="low", gang=ELASTIC)
    harness.submit(9, cpu="1", priority="high")
    harness.step(NodeLost("n1"))
    assert "job.preemption_abandoned" in harness.event_kinds(9)
