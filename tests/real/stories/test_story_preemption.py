"""Priorities and preemption on nodes that take one job each: who starts first, who makes room for whom, and who does not."""

from __future__ import annotations

from typing import Any

import pytest

from real.stories.cluster import Cluster, one_job_per_node

pytestmark = pytest.mark.real

THREE = one_job_per_node("n1", "n2", "n3")


def test_scenario_1_a_high_priority_job_takes_the_place_of_a_low_priority_one(cluster: Cluster) -> None:
    cluster.of(*THREE)
    # Fill the cluster with low priority jobs
    low = [cluster.run(f"low-{i}", priority="low") for i in (1, 2, 3)]
    places = {cluster.node_of(job): job for job in low}
    assert set(places) == {"n1", "n2", "n3"}
    # Deploy a high priority job: it takes the place of a low priority one
    high = cluster.run("high-1", priority="high")
    victim = places[cluster.node_of(high)]
    # One had to go, and it waits for room; the others never noticed
    assert (cluster.state(victim), cluster.job(victim).job.reason_code) == ("pending", "INSUFFICIENT_CPU")
    assert cluster.untouched(*(job for job in low if job != victim))
    # Who went for whom is told on both sides
    by = next(event for event in cluster.events(victim) if event.kind == "job.preempted")
    of = next(event for event in cluster.events(high) if event.kind == "job.preempting")
    assert by.detail["by"] == high
    assert of.detail["victims"] == [victim]
    assert "preempted by job" in cluster.ok("job", "history", str(victim)).out
    # And it comes back by itself when there is room
    cluster.finish("high-1")
    cluster.until_running(victim)
    assert cluster.job(victim).job.attempt == 2


def test_a_single_job_takes_a_free_node_and_preempts_nobody(cluster: Cluster) -> None:
    cluster.of(*THREE)
    low = [cluster.run(f"low-{i}", priority="low") for i in (1, 2)]
    high = cluster.run("high", priority="high")
    assert {cluster.node_of(job) for job in (*low, high)} == {"n1", "n2", "n3"}
    assert cluster.untouched(*low)


def test_a_single_job_that_finds_no_lower_one_waits_and_preempts_nobody(cluster: Cluster) -> None:
    cluster.of(*THREE)
    running = [cluster.run(name, priority=name) for name in ("critical", "high", "medium")]
    waiting = [cluster.want("equal", priority="medium"), cluster.want("low", priority="low")]
    for job in waiting:
        assert cluster.until_refused(job).code == "INSUFFICIENT_CPU"
    assert cluster.untouched(*running)


def test_the_lowest_priority_goes_first(cluster: Cluster) -> None:
    cluster.of(*THREE)
    victims = [cluster.run(name, priority=name) for name in ("medium", "batch", "low")]
    gone = []
    for i in (1, 2, 3):
        cluster.run(f"high-{i}", priority="high")
        gone.append({cluster.job(job).job.name for job in victims if cluster.state(job) == "pending"})
    assert gone == [{"batch"}, {"batch", "low"}, {"batch", "low", "medium"}]


def test_a_deleted_job_leaves_its_node_to_the_one_that_waits(cluster: Cluster) -> None:
    cluster.of(*THREE)
    running = [cluster.run(f"job-{i}") for i in (1, 2, 3)]
    waiting = cluster.want("waiting")
    cluster.until_refused(waiting)
    freed = cluster.node_of(running[1])
    cluster.delete(running[1])
    cluster.until_running(waiting)
    assert cluster.node_of(waiting) == freed
    assert cluster.untouched(running[0], running[2])


def test_a_deleted_job_that_only_waited_leaves_nothing_behind(cluster: Cluster) -> None:
    cluster.of(*THREE)
    running = [cluster.run(f"job-{i}") for i in (1, 2, 3)]
    waiting = cluster.want("waiting")
    cluster.until_refused(waiting)
    cluster.delete(waiting)
    cluster.finish("job-1")
    cluster.ended(running[0])
    with cluster.client() as client:
        assert sum(node.runs for node in client.nodes()) == 2
    assert cluster.job(waiting).runs == []


def test_waiting_jobs_start_in_the_order_of_their_priorities(cluster: Cluster) -> None:
    cluster.of(*one_job_per_node("n1"))
    cluster.run("first", priority="critical")
    order = cluster.home.parent / "order"
    waiting = {
        name: cluster.want(name, priority=name, command=["sh", "-c", f"echo {name} >>{order}"])
        for name in ("low", "high", "medium", "critical")
    }
    for job in waiting.values():
        cluster.until_refused(job)
    cluster.finish("first")
    cluster.ended(*waiting.values())
    assert order.read_text().split() == ["critical", "high", "medium", "low"]


def test_a_priority_is_a_class_or_a_number_and_medium_if_not_said(cluster: Cluster) -> None:
    cluster.of(*one_job_per_node("n1"))
    cluster.run("first", priority="critical")
    told: dict[Any, int] = {"high": 750, "scavenger": 0, 42: 42, -7: -7, None: 500}
    for given, number in told.items():
        said: dict[str, Any] = {} if given is None else {"priority": given}
        job = cluster.want("job", **said)
        assert cluster.job(job).job.priority == number


def test_a_server_that_starts_again_knows_which_nodes_are_taken(cluster: Cluster) -> None:
    cluster.of(*THREE)
    running = [cluster.run(f"job-{i}") for i in (1, 2)]
    taken = {cluster.node_of(job) for job in running}
    cluster.kill()
    cluster.up()
    third, fourth = cluster.run("job-3"), cluster.want("job-4")
    assert {cluster.node_of(third)} == {"n1", "n2", "n3"} - taken
    cluster.until_refused(fourth)
    assert cluster.untouched(*running)
