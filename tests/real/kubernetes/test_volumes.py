"""Pods with volumes that wait for their first consumer, belong to a zone, or are missing."""

from __future__ import annotations

from typing import Any

import pytest

from real.kubernetes.cluster import ZONE, Cluster

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("hodei")]

HOSTNAME = "kubernetes.io/hostname"
SELECTED = "volume.kubernetes.io/selected-node"


def make_class(cluster: Cluster, provisioner: str = "kubernetes.io/no-provisioner") -> str:
    name = f"{cluster.namespace}-later"
    cluster.apply([{
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": name},
        "provisioner": provisioner, "volumeBindingMode": "WaitForFirstConsumer",
    }])  # fmt: skip
    return name


def make_claim(cluster: Cluster, name: str, cls: str, mode: str = "ReadWriteOnce") -> None:
    spec = {"storageClassName": cls, "accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
    cluster.apply([{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}])


def make_volume(
    cluster: Cluster, name: str, cls: str, node: str = "", claim: str = "", mode: str = "ReadWriteOnce", **labels: str
) -> str:
    """Create a volume, on `node` and for `claim` if given; returns its name."""
    spec: dict[str, Any] = {
        "capacity": {"storage": "1Gi"}, "accessModes": [mode], "storageClassName": cls,
        "persistentVolumeReclaimPolicy": "Retain", "local": {"path": "/data"} if node else None,
        "hostPath": None if node else {"path": "/data"},
    }  # fmt: skip
    if node:
        term = {"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": [node]}]}
        spec["nodeAffinity"] = {"required": {"nodeSelectorTerms": [term]}}
    if claim:
        spec["claimRef"] = {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": cluster.namespace, "name": claim,
            "uid": cluster.get(claim_path(cluster, claim))["metadata"]["uid"],
        }  # fmt: skip
    full = f"{cluster.namespace}-{name}"
    spec = {key: value for key, value in spec.items() if value is not None}
    cluster.apply(
        [{"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": full, "labels": labels}, "spec": spec}]
    )

    def is_known() -> bool:
        return bool(cluster.get(f"/api/v1/persistentvolumes/{full}")["status"].get("phase", "Pending") != "Pending")

    # After an outage of the apiserver, the informers of the volume controller recover within 30 s.
    cluster.wait(is_known, f"the controllers know the volume {full}", timeout=90)
    return full


def claim_path(cluster: Cluster, name: str) -> str:
    return f"/api/v1/namespaces/{cluster.namespace}/persistentvolumeclaims/{name}"


def volume_of(cluster: Cluster, claim: str) -> str:
    """Wait until the claim is bound; returns its volume."""

    def bound() -> str:
        found = cluster.get(claim_path(cluster, claim))
        return str(found["spec"].get("volumeName", "")) if found["status"].get("phase") == "Bound" else ""

    return cluster.wait(bound, f"the claim {claim} is bound")


def using(claim: str) -> dict[str, Any]:
    return {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]}


def test_an_unbound_claim_is_bound_where_the_pod_is_placed(cluster: Cluster):
    cluster.make_nodes(2)
    cls = make_class(cluster)
    volumes = {name: make_volume(cluster, f"on-{name}", cls, name) for name in ("node-0", "node-1")}
    make_claim(cluster, "data", cls)
    cluster.make_pod("filler", cpu="3", nodeSelector={HOSTNAME: "node-0"})
    cluster.until_bound("filler")
    cluster.make_pod("one", cpu="3", **using("data"))
    assert cluster.until_bound("one") == {"one": "node-1"}
    assert volume_of(cluster, "data") == volumes["node-1"]


def test_two_pods_do_not_get_the_same_volume(cluster: Cluster):
    cluster.make_nodes(2)
    cls = make_class(cluster)
    for name in ("node-0", "node-1"):
        make_volume(cluster, f"on-{name}", cls, name)
    for at in range(3):
        make_claim(cluster, f"data-{at}", cls)
        cluster.make_pod(f"pod-{at}", cpu="1", **using(f"data-{at}"))
    bound = cluster.wait(lambda: found if len(found := cluster.bound()) == 2 else None, "two of three are bound")
    assert set(bound.values()) == {"node-0", "node-1"}
    assert len({volume_of(cluster, name.replace("pod", "data")) for name in bound}) == 2
    third = next(f"pod-{at}" for at in range(3) if f"pod-{at}" not in bound)
    message = cluster.until_condition(third, "PodScheduled", "False", "Unschedulable")["message"]
    assert "2 node(s) didn't find available persistent volumes to bind" in message


def test_a_pod_that_loses_a_race_for_a_volume_gets_the_next_one(cluster: Cluster):
    cluster.make_nodes(1)
    cls = make_class(cluster)
    make_volume(cluster, "first", cls, "node-0")
    for at in range(2):
        make_claim(cluster, f"data-{at}", cls)
    for at in range(2):
        cluster.make_pod(f"pod-{at}", **using(f"data-{at}"))
    bound = cluster.wait(cluster.bound, "one of two is bound")
    other = "pod-0" if "pod-1" in bound else "pod-1"
    cluster.until_condition(other, "PodScheduled", "False", "Unschedulable")
    make_volume(cluster, "second", cls, "node-0")
    cluster.until_bound(other)


def test_a_volume_is_provisioned_for_the_node_of_the_pod(cluster: Cluster):
    """The test acts as the provisioner: it reads the node from the claim and creates the volume there."""
    cluster.make_nodes(2)
    cls = make_class(cluster, "example.com/disks")
    make_claim(cluster, "data", cls)
    cluster.make_pod("one", **using("data"))
    node = cluster.wait(lambda: chosen_node(cluster, "data"), "the claim names a node")
    assert cluster.bound_to("one") == ""  # not before its volume exists
    make_volume(cluster, "made", cls, node, claim="data")
    assert cluster.until_bound("one") == {"one": node}


def test_another_node_is_tried_where_no_volume_can_be_provisioned(cluster: Cluster):
    """The provisioner rejects a node by removing it from the claim."""
    cluster.make_nodes(2)
    cls = make_class(cluster, "example.com/disks")
    make_claim(cluster, "data", cls)
    cluster.make_pod("one", **using("data"))
    first = cluster.wait(lambda: chosen_node(cluster, "data"), "the claim names a node")
    cluster.patch(f"/api/v1/nodes/{first}", {"spec": {"unschedulable": True}})
    cluster.patch(claim_path(cluster, "data"), {"metadata": {"annotations": {SELECTED: None}}})
    second = cluster.wait(lambda: chosen_node(cluster, "data"), "the claim names another node")
    assert second != first
    make_volume(cluster, "made", cls, second, claim="data")
    assert cluster.until_bound("one") == {"one": second}


def chosen_node(cluster: Cluster, claim: str) -> str:
    return str(cluster.get(claim_path(cluster, claim))["metadata"].get("annotations", {}).get(SELECTED, ""))


def test_a_claim_for_one_pod_is_used_by_one_pod(cluster: Cluster):
    cluster.make_nodes(2)
    make_claim(cluster, "data", "", "ReadWriteOncePod")
    make_volume(cluster, "single", "", claim="data", mode="ReadWriteOncePod")
    volume_of(cluster, "data")
    cluster.make_pod("one", **using("data"))
    cluster.until_bound("one")
    cluster.make_pod("two", **using("data"))
    message = cluster.until_condition("two", "PodScheduled", "False", "Unschedulable")["message"]
    assert "node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod access mode" in message
    cluster.delete_pod("one")
    cluster.until_bound("two")


def test_a_pod_goes_to_the_zone_of_its_volume(cluster: Cluster):
    cluster.make_nodes(3, zones=3)
    make_claim(cluster, "data", "")
    make_volume(cluster, "zonal", "", claim="data", **{ZONE: "zone-2"})
    volume_of(cluster, "data")
    cluster.make_pod("one", **using("data"))
    assert cluster.until_bound("one") == {"one": "node-2"}


def test_a_pod_waits_for_a_missing_claim(cluster: Cluster):
    cluster.make_nodes(1)
    cluster.make_pod("one", **using("data"))
    message = cluster.until_condition("one", "PodScheduled", "False", "Unschedulable")["message"]
    assert message.startswith('0/1 nodes are available: persistentvolumeclaim "data" not found.')
    make_claim(cluster, "data", "")

    def reason_changed() -> bool:
        return "pod has unbound immediate PersistentVolumeClaims" in cluster.condition("one")["message"]

    cluster.wait(reason_changed, "the unbound claim is reported")
    make_volume(cluster, "late", "", claim="data")
    cluster.until_bound("one")


def test_a_pod_waits_for_its_ephemeral_claim(cluster: Cluster):
    """The controller of the cluster creates the claim of an ephemeral volume after the pod."""
    cluster.make_nodes(1)
    cls = make_class(cluster)
    make_volume(cluster, "on-node", cls, "node-0")
    spec = {"storageClassName": cls, "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    cluster.make_pod("one", volumes=[{"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": spec}}}])
    cluster.until_bound("one")
    volume_of(cluster, "one-scratch")


def publishing_class(cluster: Cluster) -> str:
    """A class whose driver publishes free storage per node."""
    driver = f"{cluster.namespace}.example.com"
    cluster.apply([{
        "apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": driver},
        "spec": {"storageCapacity": True, "attachRequired": False},
    }])  # fmt: skip
    return make_class(cluster, driver)


def publish(cluster: Cluster, name: str, cls: str, node: str, size: str) -> str:
    (path,) = cluster.apply([{
        "apiVersion": "storage.k8s.io/v1", "kind": "CSIStorageCapacity", "metadata": {"name": name},
        "storageClassName": cls, "capacity": size, "nodeTopology": {"matchLabels": {HOSTNAME: node}},
    }])  # fmt: skip
    return path


def test_a_volume_is_provisioned_where_the_driver_has_capacity(cluster: Cluster):
    cluster.make_nodes(3)
    cls = publishing_class(cluster)
    publish(cluster, "little", cls, "node-0", "500Mi")
    publish(cluster, "enough", cls, "node-1", "5Gi")
    make_claim(cluster, "data", cls)
    cluster.make_pod("one", **using("data"))
    assert cluster.wait(lambda: chosen_node(cluster, "data"), "the claim names a node") == "node-1"
    make_volume(cluster, "made", cls, "node-1", claim="data")
    assert cluster.until_bound("one") == {"one": "node-1"}


def test_a_pod_waits_until_the_driver_has_enough_storage(cluster: Cluster):
    cluster.make_nodes(1)
    cls = publishing_class(cluster)
    little = publish(cluster, "free", cls, "node-0", "500Mi")
    make_claim(cluster, "data", cls)
    cluster.make_pod("one", **using("data"))
    message = cluster.until_condition("one", "PodScheduled", "False", "Unschedulable")["message"]
    assert message.startswith("0/1 nodes are available: 1 node(s) did not have enough free storage.")
    cluster.patch(little, {"capacity": "5Gi"})
    cluster.wait(lambda: chosen_node(cluster, "data"), "the claim names a node")


def test_a_pod_with_two_claims_goes_where_two_volumes_are(cluster: Cluster):
    """On the node with one volume, that volume would be bound, and the pod could not be placed anywhere."""
    cluster.make_nodes(2)
    cls = make_class(cluster)
    make_volume(cluster, "a", cls, "node-0")
    for name in ("b", "c"):
        make_volume(cluster, name, cls, "node-1")
    for at in range(2):
        make_claim(cluster, f"data-{at}", cls)
    volumes = [{"name": f"v{at}", "persistentVolumeClaim": {"claimName": f"data-{at}"}} for at in range(2)]
    cluster.make_pod("one", volumes=volumes)
    assert cluster.until_bound("one") == {"one": "node-1"}
    assert volume_of(cluster, "data-0") != volume_of(cluster, "data-1")


def test_claims_that_compete_for_few_volumes_each_get_their_own_and_no_binding_fails(cluster: Cluster):
    cluster.make_nodes(2)
    cls = make_class(cluster)
    for at in range(4):
        make_volume(cluster, f"v{at}", cls, f"node-{at % 2}")
    for at in range(6):
        make_claim(cluster, f"data-{at}", cls)
    for at in range(6):
        cluster.make_pod(f"pod-{at}", **using(f"data-{at}"))
    cluster.wait(lambda: len(cluster.bound()) == 4, "one pod per volume is bound")
    bound = cluster.bound()
    assert len({volume_of(cluster, name.replace("pod", "data")) for name in bound}) == 4
    for name in {f"pod-{at}" for at in range(6)} - set(bound):
        message = cluster.until_condition(name, "PodScheduled", "False", "Unschedulable")["message"]
        assert "2 node(s) didn't find available persistent volumes to bind" in message
    failures = [one["message"] for at in range(6) for one in cluster.events_of(f"pod-{at}", "FailedScheduling")]
    assert not [one for one in failures if "no volume is left" in one or "modified" in one], failures
