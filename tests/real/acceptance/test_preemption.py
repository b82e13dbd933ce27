"""Priorities and preemption on nodes that hold one job each."""

from __future__ import annotations

from typing import Any

import pytest

from real.acceptance.cluster import Cluster, single_core_nodes

pytestmark = pytest.mark.real

THREE = single_core_nodes("n1", "n2", "n3")


def test_a_high_priority_job_preempts_a_low_priority_one(cluster: Cluster) -> None:
    cluster.up_with(*THREE)
    # Fill the cluster with low priority jobs
    low = [cluster.run_job(f"low-{i}", priority="low") for i in (1, 2, 3)]
    by_node = {cluster.node_of(job): job for job in low}
    assert set(by_node) == {"n1", "n2", "n3"}
    # A high priority job preempts one of them
    high = cluster.run_job("high-1", priority="high")
    victim = by_node[cluster.node_of(high)]
    # The victim is pending; the other jobs continue
    assert (cluster.state(victim), cluster.job(victim).job.reason_code) == ("pending", "INSUFFICIENT_CPU")
    assert cluster.why(victim).status == "waiting"
    assert cluster.undisturbed(*(job for job in low if job != victim))
    # The events of both jobs name the other
    preempted = next(event for event in cluster.events(victim) if event.kind == "job.preempted")
    preempting = next(event for event in cluster.events(high) if event.kind == "job.preempting")
    assert preempted.detail["by"] == high
    assert preempting.detail["victims"] == [victim]
    assert "preempted by job" in cluster.ok("job", "history", str(victim)).out
    # And the victim starts again when a node is free
    cluster.finish("high-1")
    cluster.until_running(victim)
    assert cluster.job(victim).job.attempt == 2


def test_a_job_uses_a_free_node_and_preempts_no_job(cluster: Cluster) -> None:
    cluster.up_with(*THREE)
    low = [cluster.run_job(f"low-{i}", priority="low") for i in (1, 2)]
    high = cluster.run_job("high", priority="high")
    assert {cluster.node_of(job) for job in (*low, high)} == {"n1", "n2", "n3"}
    assert cluster.undisturbed(*low)


def test_a_job_preempts_no_job_of_its_own_or_a_higher_priority(cluster: Cluster) -> None:
    cluster.up_with(*THREE)
    running = [cluster.run_job(name, priority=name) for name in ("critical", "high", "medium")]
    waiting = [cluster.submit_job("equal", priority="medium"), cluster.submit_job("low", priority="low")]
    for job in waiting:
        assert cluster.until_refused(job).code == "INSUFFICIENT_CPU"
    assert cluster.undisturbed(*running)


def test_the_job_of_the_lowest_priority_is_preempted_first(cluster: Cluster) -> None:
    cluster.up_with(*THREE)
    victims = [cluster.run_job(name, priority=name) for name in ("medium", "batch", "low")]
    preempted = []
    for i in (1, 2, 3):
        cluster.run_job(f"high-{i}", priority="high")
        preempted.append({cluster.job(job).job.name for job in victims if cluster.state(job) == "pending"})
    assert preempted == [{"batch"}, {"batch", "low"}, {"batch", "low", "medium"}]


def test_a_pending_job_starts_on_the_node_of_a_cancelled_job(cluster: Cluster) -> None:
    cluster.up_with(*THREE)
    running = [cluster.run_job(f"job-{i}") for i in (1, 2, 3)]
    waiting = cluster.submit_job("waiting")
    cluster.until_refused(waiting)
    freed = cluster.node_of(running[1])
    cluster.cancel(running[1])
    cluster.until_running(waiting)
    assert cluster.node_of(waiting) == freed
    assert cluster.undisturbed(running[0], running[2])


def test_a_cancelled_pending_job_never_starts(cluster: Cluster) -> None:
    cluster.up_with(*THREE)
    running = [cluster.run_job(f"job-{i}") for i in (1, 2, 3)]
    waiting = cluster.submit_job("waiting")
    cluster.until_refused(waiting)
    cluster.cancel(waiting)
    cluster.finish("job-1")
    cluster.ended(running[0])
    with cluster.client() as client:
        assert sum(node.runs for node in client.nodes()) == 2
    assert cluster.job(waiting).runs == []


def test_a_priority_is_a_class_or_a_number_and_medium_by_default(cluster: Cluster) -> None:
    cluster.up_with(*single_core_nodes("n1"))
    cluster.run_job("first", priority="critical")
    numbers: dict[Any, int] = {"high": 750, "scavenger": 0, 42: 42, -7: -7, None: 500}
    for priority, number in numbers.items():
        fields: dict[str, Any] = {} if priority is None else {"priority": priority}
        job = cluster.submit_job("job", **fields)
        assert cluster.job(job).job.priority == number


def test_a_restarted_server_knows_which_nodes_are_in_use(cluster: Cluster) -> None:
    cluster.up_with(*THREE)
    running = [cluster.run_job(f"job-{i}") for i in (1, 2)]
    in_use = {cluster.node_of(job) for job in running}
    cluster.kill()
    cluster.up()
    third, fourth = cluster.run_job("job-3"), cluster.submit_job("job-4")
    assert {cluster.node_of(third)} == {"n1", "n2", "n3"} - in_use
    cluster.until_refused(fourth)
    assert cluster.undisturbed(*running)
