"""The messages of unschedulable pods equal those of kube-scheduler: both get the same pod, and their conditions and Events must be
identical.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from real.kubernetes.cluster import ZONE, Cluster
from real.kubernetes.plane import Plane
from real.kubernetes.pod_scheduler import PodScheduler

pytestmark = pytest.mark.real

BOTH = {"theirs": "default-scheduler", "ours": "hodei"}


def reported(cluster: Cluster, name: str) -> tuple[str, str, str]:
    """Reason and message of the condition, and the text of the newest Event."""
    condition = cluster.condition(name)
    events = cluster.events_of(name, "FailedScheduling")
    return condition.get("reason", ""), condition.get("message", ""), events[-1]["message"] if events else ""


def compare(cluster: Cluster, *amounts: str, **fields: Any) -> tuple[str, str, str]:
    """What both schedulers report in the end. The pods do not affect each other, because neither gets a node."""
    for name, scheduler in BOTH.items():
        cluster.make_pod(name, *amounts, scheduler=scheduler, **fields)

    def agree() -> bool:
        ours = reported(cluster, "ours")
        return all(ours) and ours == reported(cluster, "theirs")

    try:
        cluster.wait(agree, "both report the same", 6)
    except AssertionError:
        pass
    try:
        ours, theirs = reported(cluster, "ours"), reported(cluster, "theirs")
        for mine, other in zip(ours, theirs, strict=True):
            assert mine == other
        assert ours[1] == ours[2]
        return ours
    finally:
        for name in BOTH:
            cluster.delete_pod(name, grace=0)


@pytest.fixture(scope="module")
def stage(plane: Plane, kube_scheduler: str) -> Iterator[Cluster]:
    """Five nodes that each reject some pods, and a few running pods."""
    made = Cluster(plane, "same-message")
    try:
        made.make_node("plain", cpu="4", memory="8Gi", zone="east", labels={"disk": "ssd"})
        made.make_node("tainted", cpu="4", memory="8Gi", zone="west", taints=["dedicated=db:NoSchedule"])
        made.make_node("crowded", cpu="4", memory="8Gi", pods=2, zone="east")
        made.make_node("cordoned", cpu="4", memory="8Gi", zone="west")
        made.patch("/api/v1/nodes/cordoned", {"spec": {"unschedulable": True}})
        made.make_node("zoneless", cpu="2", memory="4Gi", more={"example.com/gpu": "2"})
        anti_affinity = {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [near("repelled", "kubernetes.io/hostname")]
            }
        }
        port = [{"name": "main", "image": "x", "ports": [{"containerPort": 80, "hostPort": 8080}]}]
        running: list[tuple[str, str, dict[str, Any]]] = [
            ("one", "crowded", {}),
            ("two", "crowded", {"labels": {"app": "web"}}),
            ("three", "plain", {"labels": {"app": "web"}, "affinity": anti_affinity}),
            ("four", "zoneless", {"containers": port}),
            ("five", "plain", {"containers": port}),
        ]
        for name, node, fields in running:
            made.make_pod(name, scheduler="none", **fields)
            made.bind(name, node)
        made.apply("""
            {apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: never-preempts}, value: 9, preemptionPolicy: Never}
            ---
            {apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: preempts}, value: 9}
            ---
            {apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: later}, provisioner: kubernetes.io/no-provisioner, volumeBindingMode: WaitForFirstConsumer}
            ---
            apiVersion: v1
            kind: PersistentVolumeClaim
            metadata: {name: at-once}
            spec: {storageClassName: without-provisioner, accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
            ---
            apiVersion: v1
            kind: PersistentVolumeClaim
            metadata: {name: later}
            spec: {storageClassName: later, accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
        """)
        yield made
    finally:
        made.close()


def near(app: str, key: str = ZONE) -> dict[str, Any]:
    return {"labelSelector": {"matchLabels": {"app": app}}, "topologyKey": key}


def required(*terms: dict[str, Any]) -> dict[str, Any]:
    return {"requiredDuringSchedulingIgnoredDuringExecution": list(terms)}


def claim(name: str) -> list[dict[str, Any]]:
    return [{"name": "data", "persistentVolumeClaim": {"claimName": name}}]


def spread(key: str) -> list[dict[str, Any]]:
    picked = {"matchLabels": {"app": "web"}}
    return [{"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": picked}]


IN_ZONE_SOUTH = {"matchExpressions": [{"key": ZONE, "operator": "In", "values": ["south"]}]}
PORT = [{"name": "main", "image": "x", "ports": [{"containerPort": 80, "hostPort": 8080}]}]
ANYWHERE = [{"operator": "Exists"}]

CASES: dict[str, dict[str, Any]] = {
    "too much cpu": {"cpu": "8"},
    "too much cpu even with preemption": {"cpu": "64", "priorityClassName": "preempts"},
    "too much memory": {"memory": "64Gi"},
    "too much cpu and memory": {"cpu": "3", "memory": "7Gi", "nodeSelector": {"kubernetes.io/hostname": "zoneless"}},
    "a resource that few nodes have": {"requests": {"example.com/gpu": "4"}},
    "a resource that no node has": {"requests": {"example.com/tpu": "1"}},
    "too many pods": {"nodeSelector": {"kubernetes.io/hostname": "crowded"}},
    "too many pods and too much cpu": {"cpu": "8", "tolerations": ANYWHERE},
    "a taint": {"nodeSelector": {"kubernetes.io/hostname": "tainted"}},
    "a cordoned node": {"nodeSelector": {"kubernetes.io/hostname": "cordoned"}},
    "a node selector": {"nodeSelector": {"disk": "tape"}},
    "node affinity": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [IN_ZONE_SOUTH]}}}},
    "a missing node by name": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["elsewhere"]}]}]}}}},
    "a full node by name": {"cpu": "8", "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["plain"]}]}]}}}},
    "a host port": {"containers": PORT},
    "pod affinity": {"affinity": {"podAffinity": required(near("missing"))}},
    "pod anti-affinity": {"affinity": {"podAntiAffinity": required(near("web"))}, "nodeSelector": {ZONE: "east"}},
    "the anti-affinity of a running pod": {"labels": {"app": "repelled"}, "nodeSelector": {"disk": "ssd"}},
    "topology spread": {"labels": {"app": "web"}, "topologySpreadConstraints": spread(ZONE)},
    "topology spread over missing labels": {"labels": {"app": "web"}, "topologySpreadConstraints": spread("rack")},
    "an unbound claim": {"volumes": claim("at-once")},
    "a claim without a matching volume": {"volumes": claim("later")},
    "a missing claim": {"volumes": claim("missing")},
    "preemption that is disabled": {"cpu": "8", "priorityClassName": "never-preempts"},
    "preemption without victims": {"cpu": "3950m", "nodeSelector": {"disk": "ssd"}},
}  # fmt: skip


def test_both_schedulers_report_the_same_without_nodes(cluster: Cluster, hodei: PodScheduler, kube_scheduler: str):
    assert compare(cluster)[1].startswith("no nodes available")


@pytest.mark.parametrize("case", CASES)
def test_both_schedulers_report_the_same_for(case: str, stage: Cluster, hodei: PodScheduler):
    reason, message, _ = compare(stage, **CASES[case])
    assert reason == "Unschedulable"
    assert message.startswith("0/5 nodes are available: ")
