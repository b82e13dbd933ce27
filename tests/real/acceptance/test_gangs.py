"""Gangs on nodes that hold one job each: all members start together or none does, also with preemption."""

from __future__ import annotations

import pytest

from real.acceptance.cluster import Cluster, single_core_nodes
from real.installation import until

pytestmark = pytest.mark.real

NAMES = ["n1", "n2", "n3"]
THREE = single_core_nodes(*NAMES)


def test_a_gang_with_enough_capacity_starts_whole(cluster: Cluster) -> None:
    cluster.up_with(*THREE)
    gang = cluster.submit_job(
        "success-group", count=3, command=["sh", "-c", "echo $HODEI_RANK of $HODEI_WORLD_SIZE on $HODEI_NODE"]
    )
    (detail,) = cluster.ended(gang)
    assert detail.job.state == "succeeded"
    assert sorted(run.node for run in detail.runs) == NAMES
    for run in detail.runs:
        assert cluster.log_of(gang, member=run.member) == f"{run.member} of 3 on {run.node}\n"
    assert [cluster.history(gang).count(kind) for kind in ("job.scheduled", "job.preempting")] == [1, 0]


def test_no_member_of_a_gang_starts_in_a_cluster_full_of_high_priority_jobs(cluster: Cluster) -> None:
    cluster.up_with(*THREE)
    # Fill the cluster with high priority jobs
    high = [cluster.run_job(f"high-{i}", priority="high") for i in (1, 2, 3)]
    # The gang cannot be placed, and `why` has the reason
    gang = cluster.submit_job("gang", count=3)
    refused = cluster.until_refused(gang)
    assert (refused.status, refused.code) == ("waiting", "INSUFFICIENT_CPU")
    assert cluster.undisturbed(*high)
    # Two of three nodes are not enough: no member starts
    cluster.finish("high-1", "high-2")
    cluster.ended(*high[:2])
    assert "2 of 3 members fit" in cluster.until_refused(gang).summary
    # The gang starts whole when all three nodes are free
    cluster.finish("high-3")
    cluster.until_running(gang)
    assert (cluster.nodes_of(gang), cluster.job(gang).job.attempt) == (NAMES, 1)


def test_a_gang_larger_than_the_cluster_is_refused_at_submission(cluster: Cluster) -> None:
    cluster.up_with(*THREE)
    refused = cluster.hodei("submit", "-", input="{name: gang, command: 'true', cpu: 1, count: 4}")
    assert refused.code == 1
    assert "[LARGER_THAN_CLUSTER]" in refused.err


def test_a_gang_preempts_as_many_jobs_as_it_needs_and_then_starts_whole(cluster: Cluster) -> None:
    cluster.up_with(*THREE)
    # Two nodes have low priority jobs that stop slowly; one is free
    low = [cluster.run_ignoring_term(f"low-{i}", priority="low") for i in (1, 2)]
    gang = cluster.submit_job("gang", count=3, priority="high")
    # While they stop, the capacity is held for the gang, and no member starts on the free node
    until(lambda: cluster.why(gang).code == "PREEMPTING", "the victims are being stopped")
    filler = cluster.submit_job("filler", priority="critical")
    assert cluster.until_refused(filler).code == "INSUFFICIENT_CPU"
    cluster.finish("low-1")
    until(lambda: "run.ended" in cluster.history(low[0]), "the first victim has ended")
    assert (cluster.why(gang).code, cluster.job(gang).runs) == ("PREEMPTING", [])
    # Then the whole gang starts
    cluster.finish("low-2")
    cluster.until_running(gang)
    assert cluster.nodes_of(gang) == NAMES
    assert all(cluster.state(job) == "pending" and "job.preempted" in cluster.history(job) for job in low)


def test_a_gang_preempts_no_job_if_it_would_still_not_fit_whole(cluster: Cluster) -> None:
    cluster.up_with(*THREE)
    # One of three nodes has a job that the gang may not preempt
    high = cluster.run_job("high", priority="high")
    low = [cluster.run_job(f"low-{i}", priority="low") for i in (1, 2)]
    gang = cluster.submit_job("gang", count=3, priority="medium")
    cluster.until_refused(gang)
    assert cluster.undisturbed(high, *low)
    # When that job has ended, preempting the other two is enough
    cluster.finish("high")
    cluster.until_running(gang)
    assert cluster.nodes_of(gang) == NAMES
    assert [cluster.state(job) for job in low] == ["pending", "pending"]


def test_a_gang_is_preempted_and_restarted_whole(cluster: Cluster) -> None:
    cluster.up_with(*THREE)
    gang = cluster.run_job("gang", count=3, priority="low")
    high = cluster.run_job("high", priority="high")
    assert cluster.state(gang) == "pending"
    assert {run.state for run in cluster.job(gang).runs} == {"stopped"}
    assert "2 of 3 members fit" in cluster.why(gang).summary
    cluster.finish("high")
    cluster.until_running(gang)
    assert cluster.job(gang).job.attempt == 2
    assert (cluster.nodes_of(gang), cluster.state(high)) == (NAMES, "succeeded")


def test_a_cancelled_gang_frees_all_its_nodes(cluster: Cluster) -> None:
    cluster.up_with(*THREE)
    gang = cluster.run_job("gang", count=3)
    waiting = [cluster.submit_job(f"waiting-{i}") for i in (1, 2, 3)]
    cluster.until_refused(waiting[0])  # the others have the same shape, so they are not tried separately
    cluster.cancel(gang)
    for job in waiting:
        cluster.until_running(job)
    assert sorted(cluster.node_of(job) for job in waiting) == NAMES


def test_a_gang_of_three_waits_for_a_high_priority_job_and_preempts_a_low_one(cluster: Cluster) -> None:
    cluster.up_with(*THREE)
    high = cluster.run_job("high-priority", priority="high")
    low = cluster.run_job("low-priority", priority="low")
    group = cluster.submit_job("group-a", count=3, priority="medium")
    # One node is free and one could be freed. The gang needs three, so the low priority job is not preempted
    assert "1 of 3 members fit" in cluster.until_refused(group).summary
    assert cluster.undisturbed(high, low)
    # The high priority job ends: the gang preempts the low priority job and starts
    cluster.finish("high-priority")
    cluster.until_running(group)
    assert (cluster.nodes_of(group), cluster.state(low)) == (NAMES, "pending")
    # The gang ends: the low priority job starts again and succeeds
    cluster.finish("group-a")
    cluster.until_running(low)
    cluster.finish("low-priority")
    details = cluster.ended(high, low, group)
    assert [detail.job.state for detail in details] == ["succeeded"] * 3
    assert [detail.job.attempt for detail in details] == [1, 2, 1]


def test_an_elastic_gang_starts_with_its_minimum_grows_and_shrinks(cluster: Cluster) -> None:
    cluster.up_with(*THREE)
    # One node is taken: a gang of three with a minimum of two starts with two
    other = cluster.run_job("other")
    gang = cluster.run_job("gang", count=3, min=2, gang={"elastic": True}, priority="low")
    assert len(cluster.members(gang)) == 2
    first = {run.id for run in cluster.members(gang)}
    # The node is free again: the third member joins the running ones
    cluster.finish("other")
    cluster.ended(other)
    until(lambda: len(cluster.members(gang)) == 3, "the third member has joined")
    cluster.until_running(gang)
    assert {run.id for run in cluster.members(gang)} > first
    assert cluster.nodes_of(gang) == NAMES
    # A job of a higher priority is submitted: one member is preempted, and the others continue
    high = cluster.run_job("high", priority="high")
    assert (cluster.state(gang), len(cluster.members(gang)), cluster.job(gang).job.reason_code) == (
        "running", 2, "PARTIAL",
    )  # fmt: skip
    # When that job has ended, the third member starts again, and the gang succeeds
    cluster.finish("high")
    cluster.ended(high)
    until(lambda: len(cluster.members(gang)) == 3, "the third member runs again")
    cluster.finish("gang")
    assert cluster.ended(gang)[0].job.state == "succeeded"
