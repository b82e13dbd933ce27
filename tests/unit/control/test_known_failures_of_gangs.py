"""Failures of gangs known from other schedulers: partial gangs, deadlocks of gangs, lost members.

Each test names the failure elsewhere and the guarantee here. The tests control the time and report as the backends; tests of
the real server show that real processes stop and start.
"""

from __future__ import annotations

from typing import Any

import pytest

from builders import a_job, a_node
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.control.lifecycle.runs import START_FAILED
from hodei.model.facts import JobCancelled, JobRequeued, JobSubmitted, NodeJoined, NodeLost, RunObserved
from hodei.model.job import GangRules
from unit.control.harness import Harness, a_harness, some_nodes
from unit.control.scenarios import full_cluster, is_empty, live_runs, mark_running, preempted_jobs, stop_runs

REPAIR = GangRules(on_failure="repair")


def test_a_gang_that_fits_in_part_holds_no_capacity_while_it_waits():
    """Elsewhere: members that fitted were bound and idled on their nodes. Here: all or none, and others use the capacity."""
    harness = a_harness(1, 1, 1)
    harness.submit(1, cpu="1", count=4)
    assert (harness.started(), is_empty(harness)) == ([], True)
    harness.submit(2, 3, 4, cpu="1")
    assert harness.started() == ["2.0.1", "3.0.1", "4.0.1"]


def test_a_gang_with_a_failed_start_releases_all_its_capacity():
    """Elsewhere: one bind failed and the other members held their nodes forever. Here: they stop too, and the gang is retried."""
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2)
    mark_running(harness, "1.0.1")
    harness.submit(2, cpu="1", count=2)
    harness.observe("1.1.1", "failed", reason_code=START_FAILED, reason="no such image")
    assert harness.stopped() == ["1.0.1"]
    stop_runs(harness, "1.0.1")
    assert harness.started() == ["2.0.1", "2.1.1"]  # the capacity is free at once
    assert harness.state(1) == "pending"
    harness.observe("2.0.1", "succeeded", 0)
    harness.observe("2.1.1", "succeeded", 0)
    harness.advance(60_000)
    assert harness.started() == ["1.0.2", "1.1.2"]


def test_a_gang_whose_last_member_never_starts_releases_all_its_capacity():
    """Elsewhere: one member hung at its start and the rest waited forever. Here: the assembly has a time limit."""
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2, gang=GangRules(assembly_timeout_ms=10_000))
    mark_running(harness, "1.0.1")
    harness.advance(10_000)
    assert harness.stopped() == ["1.0.1", "1.1.1"]
    stop_runs(harness, "1.0.1", "1.1.1")
    assert is_empty(harness)
    harness.submit(2, cpu="1", count=2)
    assert harness.started() == ["2.0.1", "2.1.1"]


def test_a_gang_that_was_starting_during_a_crash_is_complete_after_it():
    """Elsewhere: a crash between two binds left half a gang. Here: all its runs are restored, and run or stop together."""
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2)
    mark_running(harness, "1.0.1")
    harness.restart(*some_nodes(1, 1))
    assert live_runs(harness, 1) == ["1.0.1", "1.1.1"]
    harness.observe("1.1.1", "lost", reason_code="lost", reason="unknown run")
    assert harness.stopped() == ["1.0.1"]
    stop_runs(harness, "1.0.1")
    assert is_empty(harness)


def test_two_gangs_never_hold_and_wait_for_each_other():
    """Elsewhere: two gangs got half the cluster each and both waited forever. Here: one starts, the other holds nothing."""
    harness = a_harness(1, 1, 1, 1)
    harness.submit(1, 2, cpu="1", count=3)
    assert harness.started() == ["1.0.1", "1.1.1", "1.2.1"]
    assert live_runs(harness, 2) == []
    harness.submit(3, cpu="1")
    assert harness.started() == ["3.0.1"]  # nothing is held for gang 2, which does not fit
    for run in ("1.0.1", "1.1.1", "1.2.1"):
        harness.observe(run, "succeeded", 0)
    assert harness.started() == ["2.0.1", "2.1.1", "2.2.1"]


def test_two_preempting_gangs_do_not_split_the_victims():
    """Elsewhere: two preempting gangs evicted half of what each needed. Here: one gets all its victims, the other none."""
    harness = full_cluster(1, 1, 1, 1)
    harness.submit(8, 9, cpu="1", count=3, priority="high")
    assert len(preempted_jobs(harness)) == 3
    assert [harness.jobs[id].reason_code for id in (8, 9)] == ["PREEMPTING", "INSUFFICIENT_CPU"]
    stop_runs(harness, *harness.stopped())
    assert live_runs(harness, 8) == ["8.0.1", "8.1.1", "8.2.1"]
    assert live_runs(harness, 9) == []
    harness.step(*(RunObserved(run, "succeeded", harness.now_ms, 0) for run in live_runs(harness, 8)))
    # The second gang comes before the victims, which have a lower priority.
    assert live_runs(harness, 9) == ["9.0.1", "9.1.1", "9.2.1"]
    assert len(preempted_jobs(harness)) == 3


def a_gang_and_a_pending_job(**fields: Any) -> Harness:
    """A gang of two that runs on both nodes, and a pending single job of higher priority."""
    harness = a_harness(1, 1, preemption=PreemptionPolicy(enabled=False))
    harness.submit(1, cpu="1", count=2, **fields)
    mark_running(harness, "1.0.1", "1.1.1")
    harness.submit(2, cpu="1", priority="critical")
    assert harness.state(2) == "pending"
    return harness


def test_the_capacity_of_a_lost_member_is_not_taken_by_a_pending_job():
    """Elsewhere: a small job took the capacity and the gang starved. Here: the lost member is replaced first."""
    harness = a_gang_and_a_pending_job(gang=REPAIR)
    harness.observe("1.1.1", "lost", reason_code="lost", reason="its host forgot it")
    assert (harness.started(), harness.stopped()) == (["1.1.2"], [])
    assert harness.state(2) == "pending"
    lost, replacement = harness.runs["1.1.1"], harness.runs["1.1.2"]
    assert (replacement.member, replacement.rank, replacement.attempt) == (lost.member, lost.rank, 2)
    assert harness.runs["1.0.1"].state == "running"
    mark_running(harness, "1.1.2")
    for run in ("1.0.1", "1.1.2"):
        harness.observe(run, "succeeded", 0)
    assert (harness.state(1), live_runs(harness, 2)) == ("succeeded", ["2.0.1"])


def test_the_member_of_a_lost_node_gets_the_next_free_capacity():
    """Elsewhere: the node came back and a small job was faster. Here: freed capacity goes to the lost member."""
    harness = a_gang_and_a_pending_job(gang=REPAIR)
    lost = next(run for run in harness.runs.values() if run.node == "n2")
    harness.step(NodeLost("n2"))
    assert (harness.started(), harness.stopped(), harness.state(1)) == ([], [], "running")
    harness.advance(300_000)
    harness.step(NodeJoined(a_node("n3", 1, "64Gi")))
    (replacement,) = harness.started()
    assert (harness.runs[replacement].member, harness.runs[replacement].rank) == (lost.member, lost.rank)
    assert (harness.runs[replacement].node, harness.state(2)) == ("n3", "pending")


def test_a_job_submitted_with_the_report_of_a_loss_comes_second():
    """Elsewhere: loss and submission came in one batch and their order decided. Here: the lost member comes first."""
    harness = a_gang_and_a_pending_job(gang=REPAIR)
    submitted = a_job(3, cpu="1", priority="critical", at_ms=harness.now_ms)
    lost = RunObserved("1.1.1", "lost", harness.now_ms, reason_code="lost", reason="its host forgot it")
    harness.step(JobSubmitted(submitted), lost)
    assert harness.started() == ["1.1.2"]


def test_without_repair_a_gang_that_lost_a_member_stops_whole():
    """Elsewhere: the remaining members ran on without use. Here: the gang stops whole and releases its capacity."""
    harness = a_gang_and_a_pending_job()
    harness.observe("1.1.1", "lost", reason_code="lost", reason="its host forgot it")
    assert harness.stopped() == ["1.0.1"]
    stop_runs(harness, "1.0.1")
    assert live_runs(harness, 1) == []
    assert live_runs(harness, 2) == ["2.0.1"]


def test_a_gang_preempted_during_a_repair_is_requeued_whole():
    """Elsewhere: the replacement started after its gang had stopped. Here: the repair ends with the attempt."""
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2, priority="low", gang=REPAIR)
    mark_running(harness, "1.0.1", "1.1.1")
    harness.step(NodeLost("n2"))
    harness.now_ms += 60_000
    harness.submit(2, cpu="1", priority="high")
    (survivor,) = harness.stopped()
    stop_runs(harness, survivor)
    mark_running(harness, "2.0.1")
    assert harness.state(1) == "pending"
    harness.step(NodeJoined(a_node("n2", 1, "64Gi")))
    assert harness.started() == []  # one of two members is not enough
    harness.observe("2.0.1", "succeeded", 0)
    assert harness.started() == ["1.0.2", "1.1.2"]


@pytest.mark.parametrize("end", ["cancelled", "failed", "requeued"])
def test_capacity_held_for_a_lost_member_is_released_when_its_gang_ends(end):
    """Elsewhere: capacity stayed reserved for a gang that had ended. Here: nothing is held or started for it."""
    harness = a_harness(1, 1, 1)
    harness.submit(1, cpu="1", count=2, priority="high", gang=REPAIR)
    harness.submit(2, cpu="1", priority="low")
    mark_running(harness, "1.0.1", "1.1.1", "2.0.1")
    harness.now_ms += 60_000
    harness.step(NodeLost(harness.runs["1.1.1"].node))
    assert harness.stopped() == ["2.0.1"]
    if end != "failed":
        harness.step(JobCancelled(1) if end == "cancelled" else JobRequeued(1))
    stop_runs(harness, "1.0.1")
    assert harness.state(1) == ("pending" if end == "requeued" else end)
    stop_runs(harness, "2.0.1")
    if end == "requeued":
        assert (live_runs(harness, 1), harness.state(1)) == (["1.0.2", "1.1.2"], "scheduled")
    else:
        assert (live_runs(harness, 1), live_runs(harness, 2)) == ([], ["2.0.2"])


@pytest.mark.parametrize("cause", ["cancelled", "requeued", "preempted"])
@pytest.mark.parametrize("rules", [REPAIR, GangRules(elastic=True)], ids=["repair", "elastic"])
def test_a_gang_that_is_being_stopped_gets_no_new_members(cause, rules):
    """Elsewhere: a replacement started while its gang stopped, and ran on. Here: a stopping gang gets no new runs."""
    harness = a_harness(1, 1, 1)
    harness.submit(1, cpu="1", count=3, min_count=2, priority="low", gang=rules)
    mark_running(harness, *harness.started())
    node = harness.runs["1.2.1"].node
    harness.step(NodeLost(node))
    harness.now_ms += 60_000
    if cause == "preempted":
        harness.submit(9, cpu="1", count=2, priority="high")
    else:
        harness.step(JobCancelled(1) if cause == "cancelled" else JobRequeued(1))
    assert harness.stopped() == ["1.0.1", "1.1.1"]
    harness.step(NodeJoined(a_node(node, 1, "64Gi")))
    assert [run for run in harness.started() if run.startswith("1.")] == []
    stop_runs(harness, "1.0.1", "1.1.1")
    assert harness.state(1) in ("cancelled", "pending", "scheduled")
    assert len(live_runs(harness, 1)) == (3 if cause == "requeued" else 0)


def test_capacity_held_for_a_failed_member_ends_with_its_node():
    """Elsewhere: a hold outlived its node and was released twice. Here: the node joins again with its own capacity."""
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2, gang=REPAIR, retries=5)
    mark_running(harness, "1.0.1", "1.1.1")
    node = harness.runs["1.1.1"].node
    harness.observe("1.1.1", "failed", 1)  # its capacity is held until its retry
    harness.step(NodeLost(node))
    harness.step(NodeJoined(a_node(node, 1, "64Gi")))
    harness.submit(2, cpu="1")
    harness.advance(60_000)
    assert harness.used()[node] == {"cpu": 1000, "memory": harness.used()[node]["memory"]}
    live_on_node = [run.id for run in harness.runs.values() if run.node == node and run.state in ("placed", "running")]
    assert len(live_on_node) == 1
