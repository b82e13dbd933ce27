"""Nodes join, are cordoned, change, fail and are deleted: pods follow."""

from __future__ import annotations

import pytest

from real.kubernetes.cluster import Cluster

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("hodei")]


def unschedulable_message(cluster: Cluster, name: str) -> str:
    """Wait until the pod is unschedulable; returns the message."""
    return str(cluster.until_condition(name, "PodScheduled", "False", "Unschedulable")["message"])


def patch(cluster: Cluster, node: str, body: dict[str, object]) -> None:
    cluster.patch(f"/api/v1/nodes/{node}", body)


def test_a_pending_pod_is_bound_to_a_node_that_joins(cluster: Cluster):
    cluster.make_pod("early")
    assert unschedulable_message(cluster, "early") == "no nodes available to schedule pods"
    cluster.make_nodes(1)
    cluster.until_bound("early")


def test_a_cordoned_node_takes_no_pod_until_it_is_uncordoned(cluster: Cluster):
    cluster.make_nodes(1)
    cluster.kubectl("cordon", "node-0")
    cluster.make_pod("one")
    assert unschedulable_message(cluster, "one").startswith("0/1 nodes are available: 1 node(s) were unschedulable.")
    cluster.kubectl("uncordon", "node-0")
    cluster.until_bound("one")


def test_a_taint_keeps_away_pods_that_do_not_tolerate_it(cluster: Cluster):
    cluster.make_nodes(1, taints=["dedicated=db:NoSchedule"])
    cluster.make_pod("one")
    assert unschedulable_message(cluster, "one").startswith(
        "0/1 nodes are available: 1 node(s) had untolerated taint(s)."
    )
    cluster.make_pod("db", tolerations=[{"key": "dedicated", "operator": "Equal", "value": "db"}])
    cluster.until_bound("db")
    cluster.kubectl("taint", "nodes", "node-0", "dedicated-")
    cluster.until_bound("one")


def test_pods_evicted_from_a_node_are_placed_elsewhere(cluster: Cluster):
    """The controller of the cluster evicts for NoExecute; new pods are bound to nodes that they tolerate."""
    cluster.make_nodes(2)
    cluster.make_pod("one", cpu="3", nodeSelector={"kubernetes.io/hostname": "node-0"})
    cluster.until_bound("one")
    cluster.until_phase("one", "Running")
    cluster.kubectl("taint", "nodes", "node-0", "broken=yes:NoExecute")
    cluster.until_deleted("one")
    cluster.make_pods(2, cpu="3", prefix="next")
    bound = cluster.wait(lambda: cluster.bound(), "one of two is bound")
    assert list(bound.values()) == ["node-1"]
    other = next(name for name in ("next-0", "next-1") if name not in bound)
    unschedulable_message(cluster, other)
    cluster.kubectl("taint", "nodes", "node-0", "broken-")
    assert cluster.until_bound(other) == {other: "node-0"}


def test_a_lost_node_takes_no_pod_until_it_returns(cluster: Cluster):
    cluster.make_nodes(1)
    cluster.set_ready("node-0", False)

    def tainted() -> bool:
        return any("not-ready" in taint["key"] for taint in cluster.node("node-0")["spec"].get("taints", []))

    cluster.wait(tainted, "the controllers have tainted the node")
    cluster.make_pod("one")
    unschedulable_message(cluster, "one")
    cluster.set_ready("node-0", True)
    cluster.until_bound("one")


def test_a_node_that_is_deleted_and_created_again_still_has_its_pods(cluster: Cluster):
    cluster.make_nodes(1)
    cluster.make_pod("old", cpu="3")
    cluster.until_bound("old")
    cluster.delete("/api/v1/nodes/node-0")
    cluster.make_pod("new", cpu="3")
    assert unschedulable_message(cluster, "new") == "no nodes available to schedule pods"
    assert set(cluster.bound()) == {"old"}
    cluster.make_nodes(1)
    cluster.make_pod("small", cpu="1")
    cluster.until_bound("small")
    assert cluster.bound_to("new") == ""
    cluster.delete_pod("old", grace=0)
    cluster.until_bound("new")


def test_a_changed_label_starts_pods_that_wait_for_it(cluster: Cluster):
    cluster.make_nodes(2)
    cluster.make_pod("one", nodeSelector={"disk": "ssd"})
    unschedulable_message(cluster, "one")
    patch(cluster, "node-1", {"metadata": {"labels": {"disk": "ssd"}}})
    assert cluster.until_bound("one") == {"one": "node-1"}


@pytest.mark.parametrize("resource", ["cpu", "example.com/gpu"])
def test_a_node_that_grows_starts_pods_that_wait_for_capacity(cluster: Cluster, resource: str):
    cluster.make_nodes(1)
    cluster.make_pod("one", requests={resource: "8"})
    assert f"1 Insufficient {resource}" in unschedulable_message(cluster, "one")
    grown = {resource: "16"}
    cluster.patch("/api/v1/nodes/node-0/status", {"status": {"capacity": grown, "allocatable": grown}})
    cluster.until_bound("one")


def test_a_node_that_shrinks_takes_no_more_pods(cluster: Cluster):
    cluster.make_nodes(1)
    cluster.make_pod("one", cpu="2")
    cluster.until_bound("one")
    cluster.patch("/api/v1/nodes/node-0/status", {"status": {"capacity": {"cpu": "1"}, "allocatable": {"cpu": "1"}}})
    cluster.make_pod("two", cpu="100m")
    assert "1 Insufficient cpu" in unschedulable_message(cluster, "two")
    assert cluster.bound_to("one") == "node-0"
