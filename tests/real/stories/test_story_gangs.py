"""Gangs on nodes that take one job each: all members start together or none does, also when others have to make room."""

from __future__ import annotations

import pytest

from real.installation import until
from real.stories.cluster import Cluster, one_job_per_node

pytestmark = pytest.mark.real

NAMES = ["n1", "n2", "n3"]
THREE = one_job_per_node(*NAMES)


def test_scenario_2_a_gang_with_enough_capacity_starts_whole(cluster: Cluster) -> None:
    cluster.of(*THREE)
    gang = cluster.want(
        "success-group", count=3, command=["sh", "-c", "echo $HODEI_RANK of $HODEI_WORLD_SIZE on $HODEI_NODE"]
    )
    (detail,) = cluster.ended(gang)
    assert detail.job.state == "succeeded"
    assert sorted(run.node for run in detail.runs) == NAMES
    for run in detail.runs:
        assert cluster.log_of(gang, member=run.member) == f"{run.member} of 3 on {run.node}\n"
    assert [cluster.history(gang).count(kind) for kind in ("job.scheduled", "job.preempting")] == [1, 0]


def test_scenario_3_a_gang_starts_nothing_in_a_cluster_full_of_high_priority_jobs(cluster: Cluster) -> None:
    cluster.of(*THREE)
    # First, fill the cluster completely with high priority jobs
    high = [cluster.run(f"high-{i}", priority="high") for i in (1, 2, 3)]
    # Then deploy a gang: it fails to schedule, and says why
    gang = cluster.want("gang", count=3)
    said = cluster.until_refused(gang)
    assert (said.status, said.code) == ("waiting", "INSUFFICIENT_CPU")
    assert cluster.untouched(*high)
    # Two of three nodes are not enough either: nothing of it is started
    cluster.finish("high-1", "high-2")
    cluster.ended(*high[:2])
    assert "2 of 3 members fit" in cluster.until_refused(gang).summary
    # It is tried again whole when there is room for all
    cluster.finish("high-3")
    cluster.until_running(gang)
    assert (cluster.nodes_of(gang), cluster.job(gang).job.attempt) == (NAMES, 1)


def test_a_gang_larger_than_the_cluster_is_refused_at_the_door(cluster: Cluster) -> None:
    cluster.of(*THREE)
    refused = cluster.hodei("submit", "-", input="{name: gang, command: 'true', cpu: 1, count: 4}")
    assert refused.code == 1
    assert "[LARGER_THAN_CLUSTER]" in refused.err


def test_a_gang_takes_the_places_of_as_many_as_it_needs_and_then_starts_whole(cluster: Cluster) -> None:
    cluster.of(*THREE)
    # Two nodes are taken by low priority jobs, which take their time to go; one is free
    low = [cluster.run_stubborn(f"low-{i}", priority="low") for i in (1, 2)]
    gang = cluster.want("gang", count=3, priority="high")
    # While they go the room is held, and nothing of the gang is started on the free node
    until(lambda: cluster.why(gang).code == "PREEMPTING", "room is being made")
    filler = cluster.want("filler", priority="critical")
    assert cluster.until_refused(filler).code == "INSUFFICIENT_CPU"
    cluster.finish("low-1")
    until(lambda: "run.ended" in cluster.history(low[0]), "the first has gone")
    assert (cluster.why(gang).code, cluster.job(gang).runs) == ("PREEMPTING", [])
    # Then it starts, all of it
    cluster.finish("low-2")
    cluster.until_running(gang)
    assert cluster.nodes_of(gang) == NAMES
    assert all(cluster.state(job) == "pending" and "job.preempted" in cluster.history(job) for job in low)


def test_a_gang_takes_nobodys_place_when_that_would_not_make_room_for_all(cluster: Cluster) -> None:
    cluster.of(*THREE)
    # One of three nodes has a job that may not be told to go
    high = cluster.run("high", priority="high")
    low = [cluster.run(f"low-{i}", priority="low") for i in (1, 2)]
    gang = cluster.want("gang", count=3, priority="medium")
    cluster.until_refused(gang)
    assert cluster.untouched(high, *low)
    # When that one is over the other two are worth it
    cluster.finish("high")
    cluster.until_running(gang)
    assert cluster.nodes_of(gang) == NAMES
    assert [cluster.state(job) for job in low] == ["pending", "pending"]


def test_a_gang_of_which_one_member_has_to_go_goes_whole_and_comes_back_whole(cluster: Cluster) -> None:
    cluster.of(*THREE)
    gang = cluster.run("gang", count=3, priority="low")
    high = cluster.run("high", priority="high")
    assert cluster.state(gang) == "pending"
    assert {run.state for run in cluster.job(gang).runs} == {"stopped"}
    assert "2 of 3 members fit" in cluster.why(gang).summary
    cluster.finish("high")
    cluster.until_running(gang)
    assert cluster.job(gang).job.attempt == 2
    assert (cluster.nodes_of(gang), cluster.state(high)) == (NAMES, "succeeded")


def test_a_deleted_gang_frees_all_its_nodes(cluster: Cluster) -> None:
    cluster.of(*THREE)
    gang = cluster.run("gang", count=3)
    waiting = [cluster.want(f"waiting-{i}") for i in (1, 2, 3)]
    cluster.until_refused(waiting[0])  # the others are like it: they are not asked one by one
    cluster.delete(gang)
    for job in waiting:
        cluster.until_running(job)
    assert sorted(cluster.node_of(job) for job in waiting) == NAMES


def test_the_example_deployment_one_high_one_low_and_a_gang_of_three(cluster: Cluster) -> None:
    cluster.of(*THREE)
    high = cluster.run("high-priority", priority="high")
    low = cluster.run("low-priority", priority="low")
    group = cluster.want("group-a", count=3, priority="medium")
    # One node is free and one could be: two are not three, so the low priority job is left in peace
    assert "1 of 3 members fit" in cluster.until_refused(group).summary
    assert cluster.untouched(high, low)
    # The high priority job ends: now the gang gets its three nodes, and the low one waits
    cluster.finish("high-priority")
    cluster.until_running(group)
    assert (cluster.nodes_of(group), cluster.state(low)) == (NAMES, "pending")
    # The gang ends: the low priority job is recreated, and ends well
    cluster.finish("group-a")
    cluster.until_running(low)
    cluster.finish("low-priority")
    details = cluster.ended(high, low, group)
    assert [detail.job.state for detail in details] == ["succeeded"] * 3
    assert [detail.job.attempt for detail in details] == [1, 2, 1]


def test_an_elastic_gang_starts_with_what_fits_grows_and_makes_way(cluster: Cluster) -> None:
    cluster.of(*THREE)
    # One node is taken: a gang of three that needs only two starts with two
    other = cluster.run("other")
    gang = cluster.run("gang", count=3, min=2, gang={"elastic": True}, priority="low")
    assert len(cluster.members(gang)) == 2
    first = {run.id for run in cluster.members(gang)}
    # The node is free again: the third joins those who run already
    cluster.finish("other")
    cluster.ended(other)
    until(lambda: len(cluster.members(gang)) == 3, "the third has joined")
    cluster.until_running(gang)
    assert {run.id for run in cluster.members(gang)} > first
    assert cluster.nodes_of(gang) == NAMES
    # A job of a higher class comes: the gang gives up one member, and runs on with the others
    high = cluster.run("high", priority="high")
    assert (cluster.state(gang), len(cluster.members(gang)), cluster.job(gang).job.reason_code) == (
        "running", 2, "PARTIAL",
    )  # fmt: skip
    # When that is over the third comes back, and in the end all have succeeded
    cluster.finish("high")
    cluster.ended(high)
    until(lambda: len(cluster.members(gang)) == 3, "the third is back")
    cluster.finish("gang")
    assert cluster.ended(gang)[0].job.state == "succeeded"
