"""Story US-010, rules about where jobs run: node affinity, taints and tolerations, jobs away from each other."""

from __future__ import annotations

from typing import Any

import pytest

from real.stories.cluster import Cluster, node, refusing, scores

pytestmark = pytest.mark.real


def test_required_node_affinity_leaves_only_workers_of_the_zone(cluster: Cluster) -> None:
    # Given a job with required node affinity: label "zone" = "us-east-1"
    required: dict[str, Any] = {"affinity": {"required": ["zone=us-east-1"]}}
    # And workers: two in us-east-1, one in us-west-2 (and that is the largest, emptiest one)
    cluster.of(
        node("east-1", cpu=2, labels={"zone": "us-east-1"}),
        node("east-2", cpu=2, labels={"zone": "us-east-1"}),
        node("west-1", cpu=16, labels={"zone": "us-west-2"}),
    )
    # When the scheduler filters
    jobs = [cluster.run(f"job-{i}", cpu=2, **required) for i in (1, 2)]
    # Then only the workers in us-east-1 are considered
    assert set(scores(cluster.decision(jobs[0]))) == {"east-1", "east-2"}
    assert {cluster.node_of(job) for job in jobs} == {"east-1", "east-2"}
    # And the worker in us-west-2 is eliminated, even when the others are full
    said = cluster.until_refused(cluster.want("job-3", cpu=2, **required))
    assert refusing(said, "AFFINITY_MISMATCH") == {"west-1"}
    assert refusing(said, "INSUFFICIENT_CPU") == {"east-1", "east-2"}


def test_a_toleration_that_matches_the_taint_makes_the_worker_feasible(cluster: Cluster) -> None:
    # Given a worker with the taint dedicated=gpu:NoSchedule
    cluster.of(node("reserved", taints=["dedicated=gpu:NoSchedule"]))
    # And a job with a toleration that matches the taint, one without, and one for another value
    without = cluster.want("without")
    other = cluster.want("other", tolerations=["dedicated=database:NoSchedule"])
    matching = cluster.run("matching", tolerations=["dedicated=gpu:NoSchedule"])
    # When the scheduler filters, then the worker is feasible for the one that tolerates it
    assert cluster.decision(matching).feasible == 1
    assert cluster.node_of(matching) == "reserved"
    # And for nobody else
    for job in (without, other):
        assert refusing(cluster.until_refused(job), "UNTOLERATED_TAINT") == {"reserved"}
    assert "tolerate dedicated=gpu" in cluster.ok("why", str(without)).out


REGIONS = (
    node("eu-1", cpu=8, region="eu"),
    node("eu-2", cpu=8, region="eu"),
    node("us-1", cpu=4, region="us"),
    node("ap-1", cpu=4, region="ap"),
)


def regions_of(cluster: Cluster, *jobs: int) -> list[str]:
    return [cluster.node_of(job).partition("-")[0] for job in jobs]


def test_jobs_that_should_not_share_a_region_are_spread_over_those_available(cluster: Cluster) -> None:
    cluster.of(*REGIONS)
    # Given three jobs with the same label app=nginx, which should not be in the same region
    apart = {"preferred": [{"weight": 100, "match": "app=nginx", "topology": "region"}]}
    nginx: dict[str, Any] = {"labels": {"app": "nginx"}, "job_anti_affinity": apart}
    # When the three are scheduled
    jobs = [cluster.run(f"nginx-{i}", **nginx) for i in (1, 2, 3)]
    # Then they are in different regions, though the second best worker was in the region of the best
    assert sorted(regions_of(cluster, *jobs)) == ["ap", "eu", "us"]
    # And without a region left a fourth still finds a place: it was a wish
    fourth = cluster.run("nginx-4", **nginx)
    assert regions_of(cluster, fourth)[0] in ("ap", "eu", "us")


def test_jobs_that_must_not_share_a_region_wait_for_one_of_their_own(cluster: Cluster) -> None:
    cluster.of(*REGIONS)
    # Given three jobs that say in one line that they keep to different regions
    nginx: dict[str, Any] = {
        "labels": {"app": "nginx"},
        "affinity_rules": [{"with": "app=nginx", "different": "region"}],
    }
    # When they are scheduled, then they are in different regions
    jobs = [cluster.run(f"nginx-{i}", **nginx) for i in (1, 2, 3)]
    regions = regions_of(cluster, *jobs)
    assert sorted(regions) == ["ap", "eu", "us"]
    # And a fourth waits, for no region is left, until there is one again
    fourth = cluster.want("nginx-4", **nginx)
    assert refusing(cluster.until_refused(fourth), "JOB_ANTI_AFFINITY") == {"eu-1", "eu-2", "us-1", "ap-1"}
    cluster.finish("nginx-2")
    cluster.until_running(fourth)
    assert regions_of(cluster, fourth) == [regions[1]]
