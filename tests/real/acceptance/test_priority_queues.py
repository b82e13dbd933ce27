"""The order of queues: by priority, fair between tenants, and by fair share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from real.acceptance.cluster import Cluster, single_core_nodes

pytestmark = pytest.mark.real


def queued(cluster: Cluster, order: Path, **jobs: dict[str, Any]) -> list[int]:
    """Pending jobs that append their names to `order` when they start."""
    pending = [
        cluster.submit_job(name, command=["sh", "-c", f"echo {name} >>{order}"], **fields)
        for name, fields in jobs.items()
    ]
    assert {cluster.state(job) for job in pending} == {"pending"}
    return pending


@pytest.mark.parametrize("queue", ["priority", "multifactor"])
def test_a_queue_is_ordered_by_priority(cluster: Cluster, queue: str) -> None:
    # Given pending jobs with different priorities
    cluster.up_with(*single_core_nodes("n1"), config=f'[scheduling.profiles.default]\nqueue = "{queue}"\n')
    cluster.run_job("first", priority="critical")
    order = cluster.home.parent / "order"
    priorities = ("low", "critical", "batch", "high", "medium", 600)
    jobs = queued(cluster, order, **{f"p-{priority}": {"priority": priority} for priority in priorities})
    assert cluster.ok("why", str(jobs[1]), "-o", "json").json["queue"] == {"position": 1, "pending": 6}
    # When they start one after the other
    cluster.finish("first")
    cluster.ended(*jobs)
    # Then the highest priority starts first
    assert order.read_text().split() == ["p-critical", "p-high", "p-600", "p-medium", "p-low", "p-batch"]


def test_a_fair_queue_goes_round_robin_over_tenants_by_their_weights(cluster: Cluster) -> None:
    # Given a fair queue and two tenants with pending jobs, of which "big" has a weight of two
    fair = '[scheduling.profiles.default]\nqueue = "fair"\nweights = {big = 2}\n'
    cluster.up_with(*single_core_nodes("n1"), config=fair)
    cluster.run_job("first", project="other")
    order = cluster.home.parent / "order"
    jobs = queued(
        cluster, order, **{f"{project}-{i}": {"project": project} for project in ("big", "one") for i in range(6)}
    )
    # When they start one after the other
    cluster.finish("first")
    cluster.ended(*jobs)
    # Then two jobs of big start for each job of the other tenant
    tenants = [name.partition("-")[0] for name in order.read_text().split()]
    for started in (3, 6, 9):
        assert abs(tenants[:started].count("one") - started // 3) <= 1
    assert "one" in tenants[:3]
    assert tenants[:9].count("one") == 3


def test_fair_share_starts_jobs_of_the_tenant_with_less_usage_first(cluster: Cluster) -> None:
    # Given a tenant that has used the cluster, and one that has not
    shares = (
        '[scheduling.profiles.default]\nqueue = "multifactor"\n[scheduling.shares]\nenabled = true\nrefresh = "1ms"\n'
    )
    cluster.up_with(*single_core_nodes("n1"), config=shares)
    cluster.run_job("first", project="greedy")
    order = cluster.home.parent / "order"
    # And both have pending jobs, those of the first submitted earlier
    jobs = queued(
        cluster, order, **{f"{project}-{i}": {"project": project} for project in ("greedy", "modest") for i in (1, 2)}
    )
    # When a node is free
    priority = cluster.ok("priority", str(jobs[2]), "-o", "json").json
    assert priority["position"] == 1
    cluster.finish("first")
    cluster.ended(*jobs)
    # Then a job of the tenant without usage starts first
    assert order.read_text().split()[0] == "modest-1"
