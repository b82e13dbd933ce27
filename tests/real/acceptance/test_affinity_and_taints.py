"""Node affinity, taints and tolerations, and job anti-affinity over regions."""

from __future__ import annotations

from typing import Any

import pytest

from real.acceptance.cluster import Cluster, node, nodes_refusing, scores

pytestmark = pytest.mark.real


def test_required_node_affinity_leaves_only_nodes_of_the_zone(cluster: Cluster) -> None:
    # Given a job with required node affinity: label "zone" = "us-east-1"
    required: dict[str, Any] = {"affinity": {"required": ["zone=us-east-1"]}}
    # And nodes: two in us-east-1, one in us-west-2, which is the largest and emptiest
    cluster.up_with(
        node("east-1", cpu=2, labels={"zone": "us-east-1"}),
        node("east-2", cpu=2, labels={"zone": "us-east-1"}),
        node("west-1", cpu=16, labels={"zone": "us-west-2"}),
    )
    # When the scheduler filters
    jobs = [cluster.run_job(f"job-{i}", cpu=2, **required) for i in (1, 2)]
    # Then only the nodes in us-east-1 are considered
    assert set(scores(cluster.decision(jobs[0]))) == {"east-1", "east-2"}
    assert {cluster.node_of(job) for job in jobs} == {"east-1", "east-2"}
    # And the node in us-west-2 is eliminated, even when the nodes in us-east-1 are full
    refused = cluster.until_refused(cluster.submit_job("job-3", cpu=2, **required))
    assert nodes_refusing(refused, "AFFINITY_MISMATCH") == {"west-1"}
    assert nodes_refusing(refused, "INSUFFICIENT_CPU") == {"east-1", "east-2"}


def test_a_toleration_that_matches_the_taint_makes_the_node_feasible(cluster: Cluster) -> None:
    # Given a node with the taint dedicated=gpu:NoSchedule
    cluster.up_with(node("reserved", taints=["dedicated=gpu:NoSchedule"]))
    # And a job with a toleration that matches the taint, one without, and one for another value
    without = cluster.submit_job("without")
    other = cluster.submit_job("other", tolerations=["dedicated=database:NoSchedule"])
    matching = cluster.run_job("matching", tolerations=["dedicated=gpu:NoSchedule"])
    # When the scheduler filters, then the node is feasible for the job that tolerates it
    assert cluster.decision(matching).feasible == 1
    assert cluster.node_of(matching) == "reserved"
    # And not for the other jobs
    for job in (without, other):
        assert nodes_refusing(cluster.until_refused(job), "UNTOLERATED_TAINT") == {"reserved"}
    assert "tolerate dedicated=gpu" in cluster.ok("why", str(without)).out


REGIONS = (
    node("eu-1", cpu=8, region="eu"),
    node("eu-2", cpu=8, region="eu"),
    node("us-1", cpu=4, region="us"),
    node("ap-1", cpu=4, region="ap"),
)


def regions_of(cluster: Cluster, *jobs: int) -> list[str]:
    return [cluster.node_of(job).partition("-")[0] for job in jobs]


def test_preferred_anti_affinity_spreads_jobs_over_the_available_regions(cluster: Cluster) -> None:
    cluster.up_with(*REGIONS)
    # Given three jobs with the label app=nginx that prefer different regions
    different = {"preferred": [{"weight": 100, "match": "app=nginx", "topology": "region"}]}
    nginx: dict[str, Any] = {"labels": {"app": "nginx"}, "job_anti_affinity": different}
    # When the three are scheduled
    jobs = [cluster.run_job(f"nginx-{i}", **nginx) for i in (1, 2, 3)]
    # Then they are in different regions, although the second best node is in the region of the best
    assert sorted(regions_of(cluster, *jobs)) == ["ap", "eu", "us"]
    # And a fourth job still starts when every region has one: it is only a preference
    fourth = cluster.run_job("nginx-4", **nginx)
    assert regions_of(cluster, fourth)[0] in ("ap", "eu", "us")


def test_required_anti_affinity_keeps_a_job_pending_until_a_region_is_free(cluster: Cluster) -> None:
    cluster.up_with(*REGIONS)
    # Given three jobs with a rule that requires different regions
    nginx: dict[str, Any] = {
        "labels": {"app": "nginx"},
        "affinity_rules": [{"with": "app=nginx", "different": "region"}],
    }
    # When they are scheduled, then they are in different regions
    jobs = [cluster.run_job(f"nginx-{i}", **nginx) for i in (1, 2, 3)]
    regions = regions_of(cluster, *jobs)
    assert sorted(regions) == ["ap", "eu", "us"]
    # And a fourth stays pending until one of the regions is free again
    fourth = cluster.submit_job("nginx-4", **nginx)
    assert nodes_refusing(cluster.until_refused(fourth), "JOB_ANTI_AFFINITY") == {"eu-1", "eu-2", "us-1", "ap-1"}
    cluster.finish("nginx-2")
    cluster.until_running(fourth)
    assert regions_of(cluster, fourth) == [regions[1]]
