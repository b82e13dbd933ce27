"""Pods that stop for other reasons than preemption are evicted in a real cluster, and pending pods use their capacity."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from real.kubernetes.cluster import Cluster, pod
from real.kubernetes.pod_scheduler import PodSchedulers

pytestmark = pytest.mark.real

ROLE = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes" / "rbac-reclaim.yaml"


@pytest.fixture
def owner(cluster: Cluster) -> str:
    """A second namespace, which owns the capacity."""
    name = f"{cluster.namespace}-owner"
    cluster.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}])
    return name


def config_option(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "hodei.toml"
    file.write_text(text)
    return [f"--config={file}"]


def lending_quotas(cluster: Cluster, owner: str) -> str:
    quota = '[scheduling.quotas."{}"]\nhard = {{cpu = 2}}\ncohort = "lab"\n'
    return quota.format(owner) + quota.format(cluster.namespace)


def make_pod_in(cluster: Cluster, namespace: str, name: str, cpu: str = "1") -> str:
    """Create a pod in another namespace; returns its path."""
    cluster.post(f"/api/v1/namespaces/{namespace}/pods", pod(name, cpu))
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def until_on_a_node(cluster: Cluster, path: str) -> str:
    return cluster.wait(lambda: str(cluster.get(path)["spec"].get("nodeName", "")), f"{path} is bound", 60)


def test_lent_quota_is_reclaimed(cluster: Cluster, owner: str, hodei_kube: PodSchedulers, tmp_path: Path):
    cluster.allow_hodei(ROLE)
    cluster.make_nodes(1, cpu="4")
    scheduler = hodei_kube(extra=config_option(tmp_path, lending_quotas(cluster, owner)))
    cluster.make_pods(4, cpu="1", prefix="borrower")
    cluster.until_bound()
    path = make_pod_in(cluster, owner, "mine")
    assert until_on_a_node(cluster, path) == "node-0"
    remaining = {one["metadata"]["name"] for one in cluster.pods()}
    assert len(remaining) == 3
    (evicted,) = {f"borrower-{at}" for at in range(4)} - remaining
    event = cluster.until_event(evicted, "Evicted")
    assert f"reclaimed for project {owner}: it gives back what project {cluster.namespace} borrowed" in event["message"]
    assert cluster.events_of(evicted, "Preempted") == []
    # A second pod is within the quota too; a third is not, and nothing is evicted for it.
    assert until_on_a_node(cluster, make_pod_in(cluster, owner, "mine-too")) == "node-0"
    third = make_pod_in(cluster, owner, "too-much")

    def scheduled_condition() -> dict[str, Any] | None:
        conditions = cluster.get(third)["status"].get("conditions", [])
        return next((one for one in conditions if one["type"] == "PodScheduled"), None)

    assert cluster.wait(scheduled_condition, "the pod has a reason")["reason"] == "WaitingForQuota"
    assert len(cluster.pods()) == 2
    assert scheduler.output().count("is removed: ") == 2


def test_a_disruption_budget_is_waited_for(cluster: Cluster, owner: str, hodei_kube: PodSchedulers, tmp_path: Path):
    cluster.allow_hodei(ROLE)
    cluster.make_nodes(1, cpu="4")
    scheduler = hodei_kube(extra=config_option(tmp_path, lending_quotas(cluster, owner)))
    cluster.make_pods(4, cpu="1", prefix="borrower", labels={"app": "guarded"})
    cluster.until_bound()
    (budget,) = cluster.apply("""
        apiVersion: policy/v1
        kind: PodDisruptionBudget
        metadata: {name: all}
        spec: {maxUnavailable: 0, selector: {matchLabels: {app: guarded}}}
    """)
    cluster.wait(
        lambda: cluster.get(budget).get("status", {}).get("observedGeneration"), "the controllers know the budget"
    )
    path = make_pod_in(cluster, owner, "mine")
    cluster.wait(lambda: "cannot be removed yet" in scheduler.output(), "the budget prevents the eviction")
    assert len(cluster.pods()) == 4
    cluster.delete(budget)
    assert until_on_a_node(cluster, path) == "node-0"
    assert len(cluster.pods()) == 3


def test_a_pod_on_the_nodes_of_a_started_reservation_is_evicted(
    cluster: Cluster, owner: str, hodei_kube: PodSchedulers, tmp_path: Path
):
    """The pod was bound before the scheduler started."""
    cluster.allow_hodei(ROLE)
    cluster.make_nodes(1, cpu="4")
    cluster.make_pod("in-the-way", cpu="3", scheduler="other")
    cluster.bind("in-the-way", "node-0")
    until = (datetime.now(UTC) + timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:%SZ")  # noqa: TID251
    text = f'[[reservations]]\nname = "demo"\nnamespace = "{owner}"\nuntil = {until}\nnodes = 1\ncpu = 4\nat_start = "stop"\n'
    hodei_kube(extra=config_option(tmp_path, text))
    cluster.until_deleted("in-the-way")
    assert until_on_a_node(cluster, make_pod_in(cluster, owner, "mine", "4")) == "node-0"
