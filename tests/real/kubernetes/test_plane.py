"""The control plane of the tests does what tests rely on: nodes, kubelets, controllers, users, and kube-scheduler."""

from __future__ import annotations

import pytest

from real.kubernetes.api import ApiFailed
from real.kubernetes.cluster import Cluster
from real.kubernetes.plane import Plane

pytestmark = pytest.mark.real


def test_new_nodes_are_ready_and_have_only_the_requested_taints(cluster: Cluster):
    cluster.make_nodes(3, cpu="2", zones=2)
    cluster.make_node("tainted", taints=["team=blue:NoSchedule"])
    nodes = {one["metadata"]["name"]: one for one in cluster.items("/api/v1/nodes")}
    assert sorted(nodes) == ["node-0", "node-1", "node-2", "tainted"]
    assert [one["spec"].get("taints", []) for one in nodes.values()] == [
        [], [], [], [{"key": "team", "value": "blue", "effect": "NoSchedule"}],
    ]  # fmt: skip
    zones = [nodes[f"node-{at}"]["metadata"]["labels"]["topology.kubernetes.io/zone"] for at in range(3)]
    assert zones == ["zone-0", "zone-1", "zone-0"]
    assert nodes["node-1"]["status"]["allocatable"]["cpu"] == "2"


def test_a_node_that_is_not_ready_is_tainted(cluster: Cluster):
    cluster.make_nodes(1)
    cluster.set_ready("node-0", False)
    cluster.wait(lambda: "not-ready" in str(cluster.node("node-0")["spec"].get("taints")), "node-0 is tainted")
    cluster.set_ready("node-0", True)
    cluster.wait(lambda: "taints" not in cluster.node("node-0")["spec"], "node-0 is not tainted")


def test_a_pod_bound_by_hand_runs_and_ends_with_its_grace_period(cluster: Cluster):
    cluster.make_nodes(1)
    cluster.make_pod("one", scheduler="by-hand", annotations={"hodei.test/stops-after": "500ms"})
    assert cluster.bound_to("one") == ""
    cluster.bind("one", "node-0")
    cluster.until_phase("one", "Running")
    assert cluster.condition("one", "Ready")["status"] == "True"
    assert cluster.condition("one", "PodScheduled")["status"] == "True", (
        "kwok does not change conditions of other components"
    )
    cluster.delete_pod("one")
    assert "deletionTimestamp" in cluster.pod("one")["metadata"], "it exists while it stops"
    cluster.until_deleted("one")


@pytest.mark.parametrize(("code", "phase"), [("0", "Succeeded"), ("3", "Failed")])
def test_the_run_time_and_end_of_a_pod_can_be_set(cluster: Cluster, code: str, phase: str):
    cluster.make_nodes(1)
    ending = {"hodei.test/runs-for": "100ms", "hodei.test/exit-code": code}
    cluster.make_pod("one", scheduler="by-hand", annotations=ending, restartPolicy="Never")
    cluster.bind("one", "node-0")
    ended = cluster.until_phase("one", phase)
    assert ended["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == int(code)


def test_a_node_with_the_name_of_a_deleted_one_runs_pods(cluster: Cluster):
    for at in range(2):
        cluster.make_nodes(1)
        cluster.make_pod(f"pod-{at}", scheduler="by-hand")
        cluster.bind(f"pod-{at}", "node-0")
        cluster.until_phase(f"pod-{at}", "Running")
        cluster.delete_pod(f"pod-{at}", grace=0)
        cluster.delete("/api/v1/nodes/node-0")


def test_kube_scheduler_binds_pods_that_fit_and_reports_the_others(cluster: Cluster, plane: Plane):
    cluster.make_nodes(2, cpu="1")
    plane.kube_scheduler("theirs")
    try:
        cluster.make_pod("small", scheduler="theirs")
        cluster.make_pod("large", cpu="2", scheduler="theirs")
        assert cluster.until_bound("small")["small"] in ("node-0", "node-1")
        condition = cluster.until_condition("large", "PodScheduled", "False", "Unschedulable")
        assert condition["message"].startswith("0/2 nodes are available: 2 Insufficient cpu.")
        assert cluster.until_event("large", "FailedScheduling")["message"] == condition["message"]
        assert cluster.until_event("small", "Scheduled")["action"] == "Binding"
    finally:
        plane.stop_kube_scheduler("theirs")


def test_controllers_create_pods_of_workloads_and_the_status_of_budgets(cluster: Cluster):
    cluster.apply(
        """
        apiVersion: apps/v1
        kind: ReplicaSet
        metadata: {name: web}
        spec:
          replicas: 2
          selector: {matchLabels: {app: web}}
          template:
            metadata: {labels: {app: web}}
            spec: {schedulerName: by-hand, containers: [{name: main, image: pause}]}
        ---
        apiVersion: policy/v1
        kind: PodDisruptionBudget
        metadata: {name: web}
        spec: {minAvailable: 1, selector: {matchLabels: {app: web}}}
        """
    )
    names = [one["metadata"]["name"] for one in cluster.wait(lambda: cluster.pods()[1:] and cluster.pods(), "two pods")]
    cluster.make_nodes(1)
    for name in names:
        cluster.bind(name, "node-0")
    budget = f"/apis/policy/v1/namespaces/{cluster.namespace}/poddisruptionbudgets/web"
    cluster.wait(
        lambda: cluster.get(budget)["status"].get("disruptionsAllowed") == 1, "the budget allows one disruption"
    )


def test_the_pod_groups_of_kubernetes_are_served(cluster: Cluster):
    cluster.apply(
        """
        apiVersion: scheduling.k8s.io/v1alpha2
        kind: PodGroup
        metadata: {name: gang}
        spec: {schedulingPolicy: {gang: {minCount: 2}}}
        """
    )
    assert cluster.make_pod("one", schedulingGroup={"podGroupName": "gang"})["spec"]["schedulingGroup"]


def test_the_data_outlives_the_apiserver(cluster: Cluster, plane: Plane):
    cluster.make_nodes(1)
    cluster.make_pod("one", scheduler="by-hand")
    plane.restart_apiserver()
    assert cluster.bound_to("one") == ""
    cluster.bind("one", "node-0")
    cluster.until_phase("one", "Running")
    plane.stop_apiserver()
    with pytest.raises(ApiFailed) as failed:
        cluster.pod("one")
    assert failed.value.status == 0
    plane.start_apiserver()
    assert cluster.pod("one")["status"]["phase"] == "Running"


@pytest.mark.parametrize("by", ["certificate", "token"])
def test_hodei_has_the_permissions_of_a_scheduler_and_no_others(plane: Plane, by: str):
    def allowed(verb: str, resource: str, subresource: str = "", user: str = "hodei") -> bool:
        attributes = {"verb": verb, "resource": resource, "subresource": subresource}
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer = plane.api_of(user, by).post(path, {"spec": {"resourceAttributes": attributes}})
        return bool(answer["status"]["allowed"])

    assert allowed("create", "pods", "binding")
    assert allowed("patch", "pods", "status")
    assert allowed("delete", "pods")
    assert allowed("list", "nodes")
    assert not allowed("create", "pods")
    assert not allowed("delete", "nodes")
    assert not allowed("list", "secrets")
    assert not allowed("list", "nodes", user="unprivileged")


def test_kubectl_reads_the_kubeconfig_of_hodei(plane: Plane):
    assert plane.kubectl("auth", "can-i", "create", "pods", "--subresource=binding", user="hodei").strip() == "yes"
