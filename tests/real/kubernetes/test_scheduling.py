"""The pod scheduler in a real cluster: pods are placed by the rules of Kubernetes, or get a reason."""

from __future__ import annotations

import pytest

from real.kubernetes.cluster import Cluster
from real.kubernetes.pod_scheduler import PodSchedulers

pytestmark = pytest.mark.real


def test_pods_are_bound_with_an_event(cluster: Cluster, hodei_kube: PodSchedulers):
    cluster.make_nodes(2, cpu="4")
    hodei_kube()
    cluster.make_pods(6, cpu="1")
    cluster.until_bound(*[f"pod-{n}" for n in range(6)])
    assert sorted(cluster.bound().values()).count("node-0") == 3
    event = cluster.until_event("pod-0", "Scheduled")
    assert event["message"].startswith(f"Successfully assigned {cluster.namespace}/pod-0 to node-")
    assert (event["reportingComponent"], event["action"], event["type"]) == ("hodei", "Binding", "Normal")


def test_a_pod_that_fits_nowhere_gets_the_reason(cluster: Cluster, hodei_kube: PodSchedulers):
    cluster.make_nodes(2, cpu="4")
    hodei_kube()
    cluster.make_pod("large", cpu="8")
    condition = cluster.until_condition("large", "PodScheduled", "False", "Unschedulable")
    assert condition["message"].startswith("0/2 nodes are available: 2 Insufficient cpu.")
    event = cluster.until_event("large", "FailedScheduling")
    assert event["message"] == condition["message"]
    cluster.make_node("big", cpu="16")
    cluster.until_bound("large")


def test_a_pod_of_higher_priority_preempts_one_of_lower_priority(cluster: Cluster, hodei_kube: PodSchedulers):
    cluster.make_nodes(1, cpu="4")
    cluster.apply(
        "{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: five}, value: 5, description: five}"
    )
    hodei_kube()
    cluster.make_pod("low", cpu="3", terminationGracePeriodSeconds=1, annotations={"hodei.test/stops-after": "1s"})
    cluster.until_bound("low")
    low = cluster.get(f"/api/v1/namespaces/{cluster.namespace}/pods/low")
    cluster.make_pod("high", cpu="3", priorityClassName="five")
    event = cluster.until_event("low", "Preempted")
    cluster.until_bound("high")
    high = cluster.get(f"/api/v1/namespaces/{cluster.namespace}/pods/high")
    assert event["message"] == f"Preempted by pod {high['metadata']['uid']} on node node-0"
    assert low["spec"]["nodeName"] == "node-0"


def test_a_gang_is_bound_as_a_whole_or_not_at_all(cluster: Cluster, hodei_kube: PodSchedulers):
    cluster.make_nodes(2, cpu="4")
    hodei_kube()
    annotations = {"pod-group": "ring", "pod-group-size": "3"}
    cluster.make_pods(2, cpu="2", annotations=annotations, prefix="ring")
    cluster.until_condition("ring-0", "PodScheduled", "False", "WaitingForPodGroup")
    cluster.make_pod("filler", cpu="3")
    cluster.until_bound("filler")
    cluster.make_pod("ring-2", cpu="2", annotations=annotations)
    cluster.until_condition("ring-2", "PodScheduled", "False", "Unschedulable")
    assert cluster.bound_to("ring-0") == ""
    cluster.delete_pod("filler")
    cluster.until_bound("ring-0", "ring-1", "ring-2")
