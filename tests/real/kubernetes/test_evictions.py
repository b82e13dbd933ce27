"""Pods that stop for another cause than preemption are evicted from a real cluster, and pending pods take their place."""

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
    """A second namespace, of whoever the room belongs to."""
    name = f"{cluster.namespace}-owner"
    cluster.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}])
    return name


def configured(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "hodei.toml"
    file.write_text(text)
    return [f"--config={file}"]


def lent(cluster: Cluster, owner: str) -> str:
    quota = '[scheduling.quotas."{}"]\nhard = {{cpu = 2}}\ncohort = "lab"\n'
    return quota.format(owner) + quota.format(cluster.namespace)


def wants(cluster: Cluster, namespace: str, name: str, cpu: str = "1") -> str:
    """A pod in another namespace; its path."""
    cluster.post(f"/api/v1/namespaces/{namespace}/pods", pod(name, cpu))
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def until_on_a_node(cluster: Cluster, path: str) -> str:
    return cluster.wait(lambda: str(cluster.get(path)["spec"].get("nodeName", "")), f"{path} is bound", 60)


def test_lent_quota_is_reclaimed(cluster: Cluster, owner: str, hodei_kube: PodSchedulers, tmp_path: Path):
    cluster.allow_hodei(ROLE)
    cluster.make_nodes(1, cpu="4")
    mine = hodei_kube(extra=configured(tmp_path, lent(cluster, owner)))
    cluster.make_pods(4, cpu="1", prefix="borrower")
    cluster.until_bound()
    path = wants(cluster, owner, "mine")
    assert until_on_a_node(cluster, path) == "node-0"
    left = {one["metadata"]["name"] for one in cluster.pods()}
    assert len(left) == 3
    (gone,) = {f"borrower-{at}" for at in range(4)} - left
    event = cluster.until_event(gone, "Evicted")
    assert f"reclaimed for project {owner}: it gives back what project {cluster.namespace} borrowed" in event["message"]
    assert cluster.events_of(gone, "Preempted") == []
    # A second one is within its quota too; a third is not, and nobody goes for it.
    assert until_on_a_node(cluster, wants(cluster, owner, "mine-too")) == "node-0"
    third = wants(cluster, owner, "too-much")

    def told() -> dict[str, Any] | None:
        conditions = cluster.get(third)["status"].get("conditions", [])
        return next((one for one in conditions if one["type"] == "PodScheduled"), None)

    assert cluster.wait(told, "it is told why it waits")["reason"] == "WaitingForQuota"
    assert len(cluster.pods()) == 2
    assert mine.said().count("is removed: ") == 2


def test_a_disruption_budget_is_waited_for(cluster: Cluster, owner: str, hodei_kube: PodSchedulers, tmp_path: Path):
    cluster.allow_hodei(ROLE)
    cluster.make_nodes(1, cpu="4")
    mine = hodei_kube(extra=configured(tmp_path, lent(cluster, owner)))
    cluster.make_pods(4, cpu="1", prefix="borrower", labels={"app": "kept"})
    cluster.until_bound()
    (budget,) = cluster.apply("""
        apiVersion: policy/v1
        kind: PodDisruptionBudget
        metadata: {name: all}
        spec: {maxUnavailable: 0, selector: {matchLabels: {app: kept}}}
    """)
    seen = lambda: cluster.get(budget).get("status", {}).get("observedGeneration")  # noqa: E731
    cluster.wait(seen, "the budget counts")
    path = wants(cluster, owner, "mine")
    cluster.wait(lambda: "cannot be removed yet" in mine.said(), "the budget forbids it")
    assert len(cluster.pods()) == 4
    cluster.delete(budget)
    assert until_on_a_node(cluster, path) == "node-0"
    assert len(cluster.pods()) == 3


def test_a_pod_on_the_nodes_of_a_started_reservation_is_evicted(
    cluster: Cluster, owner: str, hodei_kube: PodSchedulers, tmp_path: Path
):
    """It was there before the scheduler started."""
    cluster.allow_hodei(ROLE)
    cluster.make_nodes(1, cpu="4")
    cluster.make_pod("in-the-way", cpu="3", scheduler="nobody")
    cluster.bind("in-the-way", "node-0")
    until = (datetime.now(UTC) + timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:%SZ")  # noqa: TID251
    text = f'[[reservations]]\nname = "demo"\nnamespace = "{owner}"\nuntil = {until}\nnodes = 1\ncpu = 4\nat_start = "stop"\n'
    hodei_kube(extra=configured(tmp_path, text))
    cluster.until_gone("in-the-way")
    assert until_on_a_node(cluster, wants(cluster, owner, "mine", "4")) == "node-0"
