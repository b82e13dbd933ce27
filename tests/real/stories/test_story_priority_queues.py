"""Story US-008, priority queues and preemption: the most important first, room taken from the least important, and tenants
that take turns. Who makes room for whom in every other case is in `test_story_preemption.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from real.stories.cluster import Cluster, one_job_per_node

pytestmark = pytest.mark.real


def queued(cluster: Cluster, order: Path, **jobs: dict[str, str]) -> list[int]:
    """Jobs that wait, and write their names as they start."""
    waiting = [
        cluster.want(name, command=["sh", "-c", f"echo {name} >>{order}"], **fields) for name, fields in jobs.items()
    ]
    assert {cluster.state(job) for job in waiting} == {"pending"}
    return waiting


def test_scenario_a_high_priority_job_preempts_a_low_priority_one(cluster: Cluster) -> None:
    # Given a high-priority job in the queue and a low-priority job running
    cluster.of(*one_job_per_node("n1"))
    low = cluster.run("low", priority="low")
    high = cluster.want("high", priority="high")
    # When the high-priority job is scheduled, then it preempts the low-priority one
    cluster.until_running(high)
    assert "job.preempted" in cluster.history(low)
    # And the one that was preempted is pending, and says for whom
    assert cluster.state(low) == "pending"
    assert cluster.why(low).status == "waiting"
    # And goes on when there is room again
    cluster.finish("high")
    cluster.until_running(low)


@pytest.mark.parametrize("queue", ["priority", "multifactor"])
def test_scenario_the_queue_is_ordered_by_priority(cluster: Cluster, queue: str) -> None:
    # Given jobs of different priorities: low, high, medium, critical
    cluster.of(*one_job_per_node("n1"), config=f'[scheduling.profiles.default]\nqueue = "{queue}"\n')
    cluster.run("first", priority="critical")
    order = cluster.home.parent / "order"
    names = ("low", "high", "medium", "critical")
    jobs = queued(cluster, order, **{name: {"priority": name} for name in names})
    # When the scheduler selects the next, one after the other
    cluster.finish("first")
    cluster.ended(*jobs)
    # Then it selects them in order: critical, high, medium, low
    assert order.read_text().split() == ["critical", "high", "medium", "low"]


def test_scenario_fair_queuing_goes_round_robin_over_tenants_by_their_weights(cluster: Cluster) -> None:
    # Given several tenants with jobs in the queue, of which "big" has a weight of two
    fair = '[scheduling.profiles.default]\nqueue = "fair"\nweights = {big = 2}\n'
    cluster.of(*one_job_per_node("n1"), config=fair)
    cluster.run("first", project="other")
    order = cluster.home.parent / "order"
    jobs = queued(
        cluster, order, **{f"{project}-{i}": {"project": project} for project in ("big", "one") for i in range(6)}
    )
    # When the fair queue is enabled
    cluster.finish("first")
    cluster.ended(*jobs)
    # Then it goes round robin between the tenants, and respects the weights: two of big for each of the other
    turns = [name.partition("-")[0] for name in order.read_text().split()]
    assert turns[:9].count("big") == 6
    assert turns[:9].count("one") == 3
    assert "one" in turns[:3], "nobody waits until another is done"


def test_scenario_fair_share_keeps_tenants_in_balance_over_time(cluster: Cluster) -> None:
    # Given a tenant that has used the cluster, and one that has not
    shares = (
        '[scheduling.profiles.default]\nqueue = "multifactor"\n[scheduling.shares]\nenabled = true\nrefresh = "1ms"\n'
    )
    cluster.of(*one_job_per_node("n1"), config=shares)
    cluster.run("first", project="greedy")
    order = cluster.home.parent / "order"
    # And both with jobs in the queue, those of the first before those of the other
    jobs = queued(
        cluster, order, **{f"{project}-{i}": {"project": project} for project in ("greedy", "modest") for i in (1, 2)}
    )
    # When the scheduler selects the next
    standing = cluster.ok("priority", str(jobs[2]), "-o", "json").json
    assert standing["position"] == 1
    cluster.finish("first")
    cluster.ended(*jobs)
    # Then who has had less goes first
    assert order.read_text().split()[0] == "modest-1"
