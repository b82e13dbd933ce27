"""Failures of preemption known from other schedulers: mutual, useless and excessive evictions, lost victims.

Each test names the failure elsewhere and the guarantee here. The tests control the time and report as the backends; tests of
the real server show that real processes stop and start.
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
from unit.control.scenarios import full_cluster, live_runs, mark_running, preempted_jobs, stop_runs


def test_two_jobs_never_preempt_each_other_in_turn():
    """Elsewhere: A evicted B, B came back and evicted A, forever. Here: a victim never preempts its preemptor."""
    harness = full_cluster(1)
    harness.submit(9, cpu="1", priority="high")
    stop_runs(harness, "1.0.1")
    mark_running(harness, "9.0.1")
    for _ in range(50):
        harness.advance(60_000)
        assert (harness.started(), harness.stopped()) == ([], [])
    assert preempted_jobs(harness) == [1]


@pytest.mark.parametrize(("first", "second"), [(550, 600), (600, 550), (500, 500), (760, 999)])
def test_jobs_of_one_class_do_not_preempt_each_other(first, second):
    """Elsewhere: small differences in priority made jobs flap. Here: only a higher class preempts, not a higher number."""
    harness = full_cluster(1, priority=first)
    harness.submit(9, cpu="1", priority=second)
    for _ in range(10):
        harness.advance(60_000)
    assert preempted_jobs(harness) == []


def test_a_job_is_not_preempted_forever():
    """Elsewhere: a low job was evicted at every burst and never ended. Here: after `max_per_job` preemptions it is protected."""
    harness = full_cluster(1, preemption=PreemptionPolicy(max_per_job=3))
    for burst in range(10, 20):
        harness.submit(burst, cpu="1", priority="high")
        if harness.state(burst) == "pending" and not harness.stopped():
            break
        stop_runs(harness, *harness.stopped())
        harness.observe(f"{burst}.0.1", "succeeded", 0)
        mark_running(harness, *live_runs(harness, 1))
        harness.now_ms += 60_000
    assert (preempted_jobs(harness), live_runs(harness, 1)) == ([1, 1, 1], ["1.0.4"])
    harness.observe("1.0.4", "succeeded", 0)
    assert harness.started() == ["13.0.1"]


def test_three_classes_do_not_evict_each_other_in_a_cycle():
    """Elsewhere: affinity rules let three jobs displace each other in a cycle. Here: victims are always of a lower class."""
    harness = a_harness(1, 1)
    for id, priority in ((1, "low"), (2, "medium")):
        harness.submit(id, cpu="1", priority=priority)
        mark_running(harness, f"{id}.0.1")
    harness.now_ms += 60_000
    harness.submit(3, cpu="1", priority="critical")
    for _ in range(20):
        stop_runs(harness, *harness.stopped())
        mark_running(harness, *(run for id in (1, 2, 3) for run in live_runs(harness, id)))
        harness.advance(60_000)
    assert preempted_jobs(harness) == [1]
    assert (live_runs(harness, 2), live_runs(harness, 3)) == (["2.0.1"], ["3.0.1"])


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"cpu": "3"}, id="it is larger than any node"),
        pytest.param({"cpu": "2", "count": 3}, id="its gang needs more nodes than there are"),
        pytest.param({"cpu": "1", "node_selector": {"zone": "nowhere"}}, id="no node has its label"),
        pytest.param({"cpu": "1", "arch": "sparc"}, id="no node has its processor"),
        pytest.param({"cpu": "1", "request": {"fpga": 1}}, id="no job holds the resource that it lacks"),
    ],
)
def test_no_job_is_preempted_if_the_preemptor_still_does_not_fit(fields):
    """Elsewhere: victims stopped and the preemptor still did not fit. Here: a full trial by all plugins comes first."""
    harness = full_cluster(2, 2)
    harness.submit(9, priority="critical", **fields)
    harness.advance(60_000)
    assert (preempted_jobs(harness), harness.state(9)) == ([], "pending")


def test_no_job_is_preempted_for_a_port_that_stays_taken():
    """Elsewhere: cores were freed on the node where the port was taken. Here: the trial checks ports too."""
    harness = a_harness(2)
    harness.submit(1, cpu="1", priority="critical", ports=(HostPort(80),))
    harness.submit(2, cpu="1", priority="low")
    mark_running(harness, "1.0.1", "2.0.1")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", priority="high", ports=(HostPort(80),))
    assert preempted_jobs(harness) == []
    harness.submit(10, cpu="1", priority="high", ports=(HostPort(81),))
    assert preempted_jobs(harness) == [2]


def test_no_job_is_preempted_on_a_node_that_the_preemptor_may_not_use():
    """Elsewhere: the cheapest victims were on a tainted node. Here: only nodes that accept the preemptor are considered."""
    harness = Harness(a_node("n1", 1, "64Gi", taints=(Taint("dedicated"),)), a_node("n2", 1, "64Gi"))
    harness.submit(1, cpu="1", priority="scavenger", tolerations=(Toleration("dedicated", "Exists"),))
    harness.submit(2, cpu="1", priority="low")
    mark_running(harness, "1.0.1", "2.0.1")
    on = {run.node: run.job for run in harness.runs.values()}
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", priority="high")
    assert preempted_jobs(harness) == [on["n2"]]


def test_freed_capacity_goes_to_the_preemptor():
    """Elsewhere: another job took the freed capacity, so more victims were needed. Here: it is held for the preemptor."""
    harness = full_cluster(1)
    harness.submit(9, cpu="1", priority="high")
    harness.submit(10, cpu="1", priority="critical")
    stop_runs(harness, "1.0.1")
    assert live_runs(harness, 9) == ["9.0.1"]
    assert preempted_jobs(harness) == [1]


def test_an_abandoned_preemption_is_recorded_as_an_event():
    """Elsewhere: a victim was stopped without any record of why. Here: an event of the preemptor says so."""
    harness = full_cluster(1)
    harness.submit(9, cpu="1", priority="high")
    harness.step(NodeLost("n1"))
    assert harness.event_kinds(9)[-1] == "job.preemption_abandoned"
    harness.step(NodeJoined(a_node("n1", 1, "64Gi")))
    assert live_runs(harness, 9) == ["9.0.1"]


def test_no_more_jobs_are_preempted_than_needed():
    """Elsewhere: a node was emptied for one small job. Here: only the needed victims stop."""
    harness = full_cluster(8)
    harness.submit(9, cpu="3", priority="high")
    assert len(preempted_jobs(harness)) == 3


def test_waiting_for_a_slow_victim_preempts_no_other_job():
    """Elsewhere: every retry during the grace period chose a new victim. Here: the stopping victim is waited for."""
    harness = full_cluster(1, 1, 1, 1)
    harness.submit(9, cpu="1", priority="high")
    for _ in range(30):
        harness.advance(1_000)
    harness.submit(20, cpu="4")  # another submission in between
    harness.restart(*some_nodes(1, 1, 1, 1))  # and a new process
    for _ in range(30):
        harness.advance(1_000)
    assert len(preempted_jobs(harness)) == 1


def test_a_gang_uses_free_capacity_before_it_preempts():
    """Elsewhere: a gang evicted one victim per member though nodes were free. Here: free capacity is used first."""
    harness = full_cluster(1, 1, 1, 1)
    harness.observe("2.0.1", "succeeded", 0)
    harness.observe("4.0.1", "succeeded", 0)
    harness.submit(9, cpu="1", count=3, priority="high")
    assert len(preempted_jobs(harness)) == 1


def test_small_victims_are_spared_if_a_large_one_is_enough():
    """Elsewhere: small victims stopped first, and then the large one too. Here: unneeded victims are reprieved."""
    harness = a_harness(4)
    for id, cpu, priority in ((1, "1", "scavenger"), (2, "3", "batch")):
        harness.submit(id, cpu=cpu, priority=priority)
        mark_running(harness, f"{id}.0.1")
    harness.now_ms += 60_000
    harness.submit(9, cpu="3", priority="high")
    assert preempted_jobs(harness) == [2]


def test_single_jobs_are_spared_if_a_victim_gang_frees_enough():
    """Elsewhere: single jobs stopped although a gang freed enough. Here: they run on, as the gang stops whole anyway."""
    harness = a_harness(2, 2)
    harness.submit(1, tasks=[a_task(cpu="2", count=1), a_task("side", cpu="1", count=1)], priority="scavenger")
    harness.submit(2, cpu="1", priority="scavenger")
    mark_running(harness, "1.0.1", "1.1.1", "2.0.1")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", count=3, priority="high")
    assert preempted_jobs(harness) == [1]


@pytest.mark.parametrize("restart", ["never", "on_failure", "always"])
@pytest.mark.parametrize("exit_code", [143, 137, 1])
def test_a_preempted_job_is_always_requeued(restart, exit_code):
    """Elsewhere: a victim counted as failed and did not run again. Here: it is requeued and uses no retry."""
    harness = a_harness(1)
    harness.submit(1, cpu="1", priority="low", restart=restart)
    mark_running(harness, "1.0.1")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", priority="high")
    stop_runs(harness, "1.0.1", exit_code=exit_code)
    assert (harness.state(1), harness.jobs[1].failures, harness.jobs[1].preemptions) == ("pending", 0, 1)
    harness.observe("9.0.1", "succeeded", 0)
    assert harness.started() == ["1.0.2"]
    harness.observe("1.0.2", "succeeded", 0)
    if restart != "always":
        assert harness.state(1) == "succeeded"


def test_a_preempted_job_is_requeued_after_a_restart_of_the_scheduler():
    """Elsewhere: the pending requeue was lost with the process. Here: it follows from the saved state."""
    harness = full_cluster(1)
    harness.submit(9, cpu="1", priority="high")
    harness.restart(*some_nodes(1))
    stop_runs(harness, "1.0.1")
    assert (harness.state(1), live_runs(harness, 9)) == ("pending", ["9.0.1"])
    harness.restart(*some_nodes(1))
    harness.observe("9.0.1", "succeeded", 0)
    assert harness.started() == ["1.0.2"]


def test_a_preempted_gang_is_requeued_whole_when_its_members_stop_one_by_one():
    """Elsewhere: members that stopped last were forgotten. Here: the gang is requeued once, with all its members."""
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2, priority="low")
    mark_running(harness, "1.0.1", "1.1.1")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", priority="high")
    assert harness.stopped() == ["1.0.1", "1.1.1"]
    stop_runs(harness, "1.1.1")
    assert harness.state(1) == "running"
    stop_runs(harness, "1.0.1")
    assert (harness.state(1), harness.event_kinds(1).count("job.requeued")) == ("pending", 1)
    harness.observe("9.0.1", "succeeded", 0)
    assert harness.started() == ["1.0.2", "1.1.2"]


def test_a_victim_that_succeeds_while_it_stops_is_not_run_again():
    """Elsewhere: finished work was repeated. Here: a victim that succeeds before it stops has succeeded."""
    harness = full_cluster(1)
    harness.submit(9, cpu="1", priority="high")
    harness.observe("1.0.1", "succeeded", 0)
    assert (harness.state(1), harness.started()) == ("succeeded", ["9.0.1"])


def test_a_victim_whose_preemptor_is_cancelled_starts_again():
    """Elsewhere: capacity stayed reserved for a cancelled preemptor. Here: the victim gets it back."""
    harness = full_cluster(1)
    harness.submit(9, cpu="1", priority="high")
    harness.step(JobCancelled(9))
    stop_runs(harness, "1.0.1")
    assert harness.started() == ["1.0.2"]
