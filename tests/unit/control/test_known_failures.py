"""Failures known from other schedulers: evictions in turn, in vain, too many, without return. Each test names the failure and the
guarantee here.

Time passes only when the test lets it pass, and the test plays the backends; tests of the real server show that real
processes stop and start.
"""

from __future__ import annotations

import pytest

from builders import a_node, a_task
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.model.affinity import HostPort
from hodei.model.facts import JobCancelled, NodeJoined, NodeLost
from hodei.model.job import Toleration
from hodei.model.node import Taint
from unit.control.harness import Harness, a_harness, some_nodes
from unit.control.scenarios import evicted, filled, gone, live, running


def test_two_jobs_never_take_each_others_place_in_turn():
    """Elsewhere: A evicted B, B came back and evicted A, for ever. Here: a victim never takes its preemptor's place."""
    harness = filled(1)
    harness.submit(9, cpu="1", priority="high")
    gone(harness, "1.0.1")
    running(harness, "9.0.1")
    for _ in range(50):
        harness.later(60_000)
        assert (harness.started(), harness.stopped()) == ([], [])
    assert evicted(harness) == [1]


@pytest.mark.parametrize(("first", "second"), [(550, 600), (600, 550), (500, 500), (760, 999)])
def test_jobs_of_one_class_leave_each_other_alone(first, second):
    """Elsewhere: numbers that differ a little made jobs flap. Here: only a higher class takes a place, not a higher number."""
    harness = filled(1, priority=first)
    harness.submit(9, cpu="1", priority=second)
    for _ in range(10):
        harness.later(60_000)
    assert evicted(harness) == []


def test_a_job_is_not_sent_away_for_ever():
    """Elsewhere: a low job was evicted at every burst and never ended. Here: so often and no more, then it is left alone."""
    harness = filled(1, preemption=PreemptionPolicy(max_per_job=3))
    for burst in range(10, 20):
        harness.submit(burst, cpu="1", priority="high")
        if harness.state(burst) == "pending" and not harness.stopped():
            break
        gone(harness, *harness.stopped())
        harness.see(f"{burst}.0.1", "succeeded", 0)
        running(harness, *live(harness, 1))
        harness.now_ms += 60_000
    assert (evicted(harness), live(harness, 1)) == ([1, 1, 1], ["1.0.4"])
    harness.see("1.0.4", "succeeded", 0)
    assert harness.started() == ["13.0.1"]


def test_three_classes_in_a_ring_of_rules_come_to_rest():
    """Elsewhere: rules about company let three jobs displace each other in a ring. Here: every eviction goes downwards."""
    harness = a_harness(1, 1)
    for id, priority in ((1, "low"), (2, "medium")):
        harness.submit(id, cpu="1", priority=priority)
        running(harness, f"{id}.0.1")
    harness.now_ms += 60_000
    harness.submit(3, cpu="1", priority="critical")
    for _ in range(20):
        gone(harness, *harness.stopped())
        running(harness, *(run for id in (1, 2, 3) for run in live(harness, id)))
        harness.later(60_000)
    assert evicted(harness) == [1]
    assert (live(harness, 2), live(harness, 3)) == (["2.0.1"], ["3.0.1"])


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"cpu": "3"}, id="it is larger than any node"),
        pytest.param({"cpu": "2", "count": 3}, id="its gang needs more nodes than there are"),
        pytest.param({"cpu": "1", "node_selector": {"zone": "nowhere"}}, id="no node has its label"),
        pytest.param({"cpu": "1", "arch": "sparc"}, id="no node has its processor"),
        pytest.param({"cpu": "1", "request": {"fpga": 1}}, id="the resource it lacks is held by nobody"),
    ],
)
def test_no_job_is_preempted_in_vain(asked):
    """Elsewhere: victims went and the preemptor still did not fit. Here: a full trial by all plugins comes first."""
    harness = filled(2, 2)
    harness.submit(9, priority="critical", **asked)
    harness.later(60_000)
    assert (evicted(harness), harness.state(9)) == ([], "pending")


def test_no_job_is_preempted_for_a_port_that_stays_taken():
    """Elsewhere: cores were freed on the node where the port was taken. Here: the trial asks about ports too."""
    harness = a_harness(2)
    harness.submit(1, cpu="1", priority="critical", ports=(HostPort(80),))
    harness.submit(2, cpu="1", priority="low")
    running(harness, "1.0.1", "2.0.1")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", priority="high", ports=(HostPort(80),))
    assert evicted(harness) == []
    harness.submit(10, cpu="1", priority="high", ports=(HostPort(81),))
    assert evicted(harness) == [2]


def test_no_job_is_preempted_on_a_node_that_the_preemptor_may_not_use():
    """Elsewhere: the cheapest victims were on a tainted node. Here: only nodes that take the preemptor are looked at."""
    harness = Harness(a_node("n1", 1, "64Gi", taints=(Taint("dedicated"),)), a_node("n2", 1, "64Gi"))
    harness.submit(1, cpu="1", priority="scavenger", tolerations=(Toleration("dedicated", "Exists"),))
    harness.submit(2, cpu="1", priority="low")
    running(harness, "1.0.1", "2.0.1")
    on = {run.node: run.job for run in harness.runs.values()}
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", priority="high")
    assert evicted(harness) == [on["n2"]]


def test_freed_capacity_goes_to_the_preemptor():
    """Elsewhere: while victims went, somebody else slipped in and more had to go. Here: the room is held by name."""
    harness = filled(1)
    harness.submit(9, cpu="1", priority="high")
    harness.submit(10, cpu="1", priority="critical")
    gone(harness, "1.0.1")
    assert live(harness, 9) == ["9.0.1"]
    assert evicted(harness) == [1]


def test_an_eviction_that_comes_to_nothing_is_on_record():
    """Elsewhere: a victim was gone and nobody could say why. Here: the preemptor says that its room came to nothing."""
    harness = filled(1)
    harness.submit(9, cpu="1", priority="high")
    harness.learn(NodeLost("n1"))
    assert harness.kinds(9)[-1] == "job.preemption_abandoned"
    harness.learn(NodeJoined(a_node("n1", 1, "64Gi")))
    assert live(harness, 9) == ["9.0.1"]


def test_no_more_are_evicted_than_needed():
    """Elsewhere: a node was emptied for one small job. Here: those who need not go stay."""
    harness = filled(8)
    harness.submit(9, cpu="3", priority="high")
    assert len(evicted(harness)) == 3


def test_waiting_for_a_slow_victim_preempts_no_other_job():
    """Elsewhere: every retry during the grace period chose a new victim. Here: who is going already is waited for."""
    harness = filled(1, 1, 1, 1)
    harness.submit(9, cpu="1", priority="high")
    for _ in range(30):
        harness.later(1_000)
    harness.submit(20, cpu="4")  # other news, too
    harness.restart(*some_nodes(1, 1, 1, 1))  # and a new process
    for _ in range(30):
        harness.later(1_000)
    assert len(evicted(harness)) == 1


def test_a_gang_evicts_only_where_free_room_does_not_do():
    """Elsewhere: a gang evicted one victim per member though nodes were free. Here: free room counts first."""
    harness = filled(1, 1, 1, 1)
    harness.see("2.0.1", "succeeded", 0)
    harness.see("4.0.1", "succeeded", 0)
    harness.submit(9, cpu="1", count=3, priority="high")
    assert len(evicted(harness)) == 1


def test_one_large_victim_is_not_joined_by_small_ones_that_free_nothing_more():
    """Elsewhere: the smallest went first and in the end the large one too. Here: who turns out not to matter is let off."""
    harness = a_harness(4)
    for id, cpu, priority in ((1, "1", "scavenger"), (2, "3", "batch")):
        harness.submit(id, cpu=cpu, priority=priority)
        running(harness, f"{id}.0.1")
    harness.now_ms += 60_000
    harness.submit(9, cpu="3", priority="high")
    assert evicted(harness) == [2]


def test_a_victim_gang_is_not_joined_by_single_jobs_that_its_leaving_makes_unneeded():
    """Elsewhere: single jobs went beside a gang that freed enough. Here: they stay, for the gang leaves whole anyway."""
    harness = a_harness(2, 2)
    harness.submit(1, tasks=[a_task(cpu="2", count=1), a_task("side", cpu="1", count=1)], priority="scavenger")
    harness.submit(2, cpu="1", priority="scavenger")
    running(harness, "1.0.1", "1.1.1", "2.0.1")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", count=3, priority="high")
    assert evicted(harness) == [1]


@pytest.mark.parametrize("restart", ["never", "on_failure", "always"])
@pytest.mark.parametrize("exit_code", [143, 137, 1])
def test_a_preempted_job_is_always_requeued(restart, exit_code):
    """Elsewhere: a victim counted as failed and was gone. Here: however it goes, it queues again and loses no retry."""
    harness = a_harness(1)
    harness.submit(1, cpu="1", priority="low", restart=restart)
    running(harness, "1.0.1")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", priority="high")
    gone(harness, "1.0.1", exit_code=exit_code)
    assert (harness.state(1), harness.jobs[1].failures, harness.jobs[1].preemptions) == ("pending", 0, 1)
    harness.see("9.0.1", "succeeded", 0)
    assert harness.started() == ["1.0.2"]
    harness.see("1.0.2", "succeeded", 0)
    if restart != "always":
        assert harness.state(1) == "succeeded"


def test_a_preempted_job_is_requeued_though_the_scheduler_died_meanwhile():
    """Elsewhere: the intention to requeue died with the process. Here: it follows from what was saved."""
    harness = filled(1)
    harness.submit(9, cpu="1", priority="high")
    harness.restart(*some_nodes(1))
    gone(harness, "1.0.1")
    assert (harness.state(1), live(harness, 9)) == ("pending", ["9.0.1"])
    harness.restart(*some_nodes(1))
    harness.see("9.0.1", "succeeded", 0)
    assert harness.started() == ["1.0.2"]


def test_a_preempted_gang_is_requeued_whole_also_when_it_goes_piece_by_piece():
    """Elsewhere: members that went last were forgotten. Here: the gang queues again once, with all its members."""
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2, priority="low")
    running(harness, "1.0.1", "1.1.1")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", priority="high")
    assert harness.stopped() == ["1.0.1", "1.1.1"]
    gone(harness, "1.1.1")
    assert harness.state(1) == "running"
    gone(harness, "1.0.1")
    assert (harness.state(1), harness.kinds(1).count("job.requeued")) == ("pending", 1)
    harness.see("9.0.1", "succeeded", 0)
    assert harness.started() == ["1.0.2", "1.1.2"]


def test_a_victim_that_ended_well_in_time_is_not_run_again():
    """Elsewhere: work that was done was done twice. Here: one that made it before it was stopped has made it."""
    harness = filled(1)
    harness.submit(9, cpu="1", priority="high")
    harness.see("1.0.1", "succeeded", 0)
    assert (harness.state(1), harness.started()) == ("succeeded", ["9.0.1"])


def test_a_victim_whose_preemptor_is_cancelled_comes_back():
    """Elsewhere: the room stayed reserved for a preemptor that was gone. Here: the victim has its place again."""
    harness = filled(1)
    harness.submit(9, cpu="1", priority="high")
    harness.learn(JobCancelled(9))
    gone(harness, "1.0.1")
    assert harness.started() == ["1.0.2"]
