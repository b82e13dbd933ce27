"""`hodei kube why` and `plan` against the live cluster, with the permissions of the shipped role and mostly without a running scheduler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from real.kubernetes.cluster import Cluster, pod
from real.kubernetes.plane import Plane
from real.kubernetes.pod_scheduler import PodScheduler, kube_command

pytestmark = pytest.mark.real


def test_why_explains_what_a_pod_lacks_and_what_would_help(cluster: Cluster, plane: Plane):
    cluster.make_nodes(2, cpu="4")
    cluster.make_pod("large", cpu="6")
    output = kube_command(plane, "why", f"{cluster.namespace}/large")
    assert f"pod {cluster.namespace}/large can never start as things are" in output
    assert "0/2 nodes are available: 2 Insufficient cpu." in output
    assert cluster.condition("large") == {}


def test_why_reports_the_node_of_a_pod(cluster: Cluster, plane: Plane):
    cluster.make_nodes(1, cpu="4")
    cluster.make_pod("there", cpu="1")
    cluster.bind("there", "node-0")
    assert "it is on node node-0" in kube_command(plane, "why", f"{cluster.namespace}/there")


def test_plan_reports_where_a_pod_would_go_and_creates_nothing(cluster: Cluster, plane: Plane, tmp_path: Path):
    cluster.make_nodes(2, cpu="4", labels={"disk": "ssd"})
    wanted = tmp_path / "pod.yaml"
    wanted.write_text(json.dumps(pod("later", "2", nodeSelector={"disk": "ssd"})))
    (answer,) = json.loads(kube_command(plane, "plan", wanted, "-o", "json"))
    assert answer["explanation"]["status"] == "placed"
    wanted.write_text(json.dumps(pod("later", "2", nodeSelector={"disk": "tape"})))
    assert "later can never start as it is" in kube_command(plane, "plan", wanted)
    assert cluster.pods() == []


def test_plan_judges_all_pods_of_a_workload(cluster: Cluster, plane: Plane, tmp_path: Path):
    cluster.make_node("large", "4")
    cluster.make_node("small", "2")
    spec = pod("", "1")["spec"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "fifty"}}
    wanted = tmp_path / "job.yaml"
    wanted.write_text(json.dumps({**job, "spec": {"parallelism": 50, "template": {"spec": spec}}}))
    output = kube_command(plane, "plan", wanted)
    assert "Job default/fifty: 6 of 50 pods would start now (4 on large, 2 on small); 44 would wait" in output
    assert "Insufficient cpu" in output
    (answer,) = json.loads(kube_command(plane, "plan", wanted, "-o", "json"))
    assert (answer["total"], answer["now"], answer["waiting"]) == (50, 6, 44)


@pytest.mark.parametrize("cluster_wide", [True, False], ids=["cluster", "namespace"])
def test_why_works_with_view_permissions(cluster: Cluster, plane: Plane, hodei: PodScheduler, cluster_wide: bool):
    """The role `view` cannot read nodes and volumes; bound in one namespace, it cannot read the others."""
    cluster.make_nodes(1, cpu="4")
    cluster.make_pod("large", cpu="6")
    condition = cluster.until_condition("large", "PodScheduled", "False", "Unschedulable")
    cluster.apply([{
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding" if cluster_wide else "RoleBinding",
        "metadata": {"name": "viewer"}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
        "subjects": [{"kind": "User", "name": "unprivileged", "apiGroup": "rbac.authorization.k8s.io"}],
    }])  # fmt: skip
    output = kube_command(plane, "why", f"{cluster.namespace}/large", user="unprivileged")
    assert f"its scheduler reported: Unschedulable: {condition['message']}" in output
    assert "not readable with these rights: " in output
    assert "/api/v1/nodes" in output
    assert "/api/v1/persistentvolumes" in output
    assert ("/api/v1/pods of other namespaces" in output) is not cluster_wide
