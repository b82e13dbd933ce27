"""`hodei kube plan`: all pods of a manifest, each in the capacity that the previous ones leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hodei.kube.scheduler.commands import render_answer
from hodei.kube.scheduler.explain import Planned, _plan_answer, plan_workloads, read_manifests
from hodei.kube.scheduler.run import Options, build_scheduler
from hodei.kube.scheduler.translate import Reader, ReaderOptions
from hodei.model.errors import InvalidInput
from unit.kube.pod_factory import a_node

NOW_MS = 1_800_000_000_000


def template(cpu: str = "1", **spec: Any) -> dict[str, Any]:
    annotations = spec.pop("annotations", {})
    resources = {"requests": {"cpu": cpu, "memory": "1Mi"}}
    containers = [{"name": "main", "image": "x", "resources": resources}]
    return {
        "metadata": {"labels": {"app": "x"}, "annotations": annotations},
        "spec": {"containers": containers, **spec},
    }


def workload(kind: str, name: str = "x", version: str = "apps/v1", **spec: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def plan(tmp_path: Path, *documents: dict[str, Any], nodes: dict[str, Any] | None = None) -> list[Planned]:
    """Plan on two nodes with four and two cores."""
    file = tmp_path / "all.yaml"
    file.write_text("\n---\n".join(json.dumps(document) for document in documents))
    parts = build_scheduler(Options(), tries=0)
    for name, fields in (nodes or {"a": {"cpu": "4"}, "b": {"cpu": "2"}}).items():
        allocatable = {"cpu": fields.pop("cpu"), "memory": "64Gi", "pods": "110"}
        parts.pods.node_changed(name, None, a_node(name, allocatable=allocatable, **fields))
    parts.controller.step(NOW_MS, parts.pods.take_facts())
    reader = Reader(parts.cache.context, ReaderOptions(), parts.refusals)
    plans = plan_workloads(parts, reader, read_manifests([file], "ns"), NOW_MS)
    table = parts.controller.cluster.table
    assert all(not used for used in (table.usage(row) for row in range(len(table.names))))
    return plans


@pytest.mark.parametrize(
    "document",
    [
        workload("Job", version="batch/v1", parallelism=50, template=template()),
        workload("Job", version="batch/v1", parallelism=60, completions=50, template=template()),
        workload("CronJob", version="batch/v1", jobTemplate={"spec": {"parallelism": 50, "template": template()}}),
        workload("Deployment", replicas=50, template=template()),
        workload("ReplicaSet", replicas=50, template=template()),
        workload("ReplicationController", version="v1", replicas=50, template=template()),
        workload("StatefulSet", replicas=50, template=template()),
    ],
    ids=lambda document: document["kind"],
)
def test_all_pods_of_a_workload_are_planned(tmp_path: Path, document: dict[str, Any]):
    (planned,) = plan(tmp_path, document)
    assert (planned.total, planned.now, planned.waiting) == (50, 6, 44)
    assert planned.nodes == {"a": 4, "b": 2}
    assert planned.first is not None
    assert planned.first.code == "INSUFFICIENT_CPU"
    output = render_answer(_plan_answer(planned, Options(), []), planned=True)
    assert f"{document['kind']} ns/x: 6 of 50 pods would start now (4 on a, 2 on b); 44 would wait" in output
    assert "Insufficient cpu" in output


def test_later_workloads_of_a_file_get_the_remaining_capacity(tmp_path: Path):
    first, service, second = plan(
        tmp_path,
        workload("Deployment", "first", replicas=5, template=template()),
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"selector": {"app": "x"}}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "alone"}, "spec": template()["spec"]},
        {"apiVersion": "v1", "kind": "List", "items": [workload("Job", "last", "batch/v1", template=template())]},
    )
    assert (first.now, first.waiting) == (5, 0)
    assert (service.workload.kind, service.now) == ("Pod", 1)
    assert (second.now, second.waiting) == (0, 1)
    assert "Job ns/last: 0 of 1 pods would start now; 1 would wait" in render_answer(
        _plan_answer(second, Options(), []), planned=True
    )


def test_pods_that_fit_are_reported_as_starting(tmp_path: Path):
    (planned,) = plan(tmp_path, workload("Deployment", replicas=3, template=template()))
    output = render_answer(_plan_answer(planned, Options(), []), planned=True)
    assert output.startswith("Deployment ns/x: all 3 pods would start now (")


@pytest.mark.parametrize(("size", "now"), [(6, 6), (7, 0)])
def test_a_gang_starts_whole_or_not_at_all(tmp_path: Path, size: int, now: int):
    annotations = {"pod-group": "ring", "pod-group-size": str(size)}
    (planned,) = plan(
        tmp_path, workload("Job", version="batch/v1", parallelism=size, template=template(annotations=annotations))
    )
    assert (planned.now, planned.waiting) == (now, size - now)


@pytest.mark.parametrize(
    ("version", "spec", "annotations", "field"),
    [
        ("scheduling.x-k8s.io/v1alpha1", {"minMember": 7}, {}, {}),
        ("scheduling.volcano.sh/v1beta1", {"minMember": 7}, {"scheduling.k8s.io/group-name": "ring"}, {}),
        ("scheduling.k8s.io/v1alpha2", {"schedulingPolicy": {"gang": {"minCount": 7}}}, {}, {"schedulingGroup": {"podGroupName": "ring"}}),
    ],
)  # fmt: skip
def test_a_pod_group_of_the_same_file_defines_the_gang(
    tmp_path: Path, version: str, spec: Any, annotations: Any, field: Any
):
    group = {"apiVersion": version, "kind": "PodGroup", "metadata": {"name": "ring"}, "spec": spec}
    pods = template(annotations=annotations, **field)
    pods["metadata"]["labels"] = {"scheduling.x-k8s.io/pod-group": "ring"} if "x-k8s" in version else {}
    workers, leader = plan(
        tmp_path, workload("Job", "workers", "batch/v1", parallelism=6, template=pods), group,
        workload("Job", "leader", "batch/v1", template=pods),
    )  # fmt: skip
    assert (workers.now, workers.waiting, leader.now, leader.waiting) == (0, 6, 0, 1)


def test_a_gang_that_is_not_complete_waits(tmp_path: Path):
    annotations = {"pod-group": "ring", "pod-group-size": "3"}
    (planned,) = plan(
        tmp_path, workload("Job", version="batch/v1", parallelism=2, template=template(annotations=annotations))
    )
    assert (planned.now, planned.waiting) == (0, 2)
    assert "minCount pods from a gang" in planned.refused


def test_a_daemon_set_has_a_pod_on_every_matching_node(tmp_path: Path):
    taint = {"taints": [{"key": "only", "value": "gpu", "effect": "NoSchedule"}]}
    nodes = {"a": {"cpu": "4"}, "b": {"cpu": "1"}, "c": {"cpu": "4", **taint}, "d": {"cpu": "4", "labels": {"os": "x"}}}
    (planned,) = plan(
        tmp_path, workload("DaemonSet", template=template("2")), nodes={k: dict(v) for k, v in nodes.items()}
    )
    assert (planned.total, planned.now, planned.waiting) == (3, 2, 1)
    assert planned.nodes == {"a": 1, "d": 1}
    (planned,) = plan(tmp_path, workload("DaemonSet", template=template("2", nodeSelector={"os": "x"})), nodes=nodes)
    assert (planned.total, planned.now, planned.nodes) == (1, 1, {"d": 1})


@pytest.mark.parametrize(
    ("spec", "now"), [({"resourceClaims": [{"name": "gpu"}]}, 0), ({"schedulingGates": [{"name": "wait"}]}, 0)]
)
def test_a_refusal_applies_to_all_pods_of_the_workload(tmp_path: Path, spec: Any, now: int):
    (planned,) = plan(tmp_path, workload("Deployment", replicas=3, template=template(**spec)))
    assert (planned.now, planned.waiting) == (now, 3)
    assert planned.refused


@pytest.mark.parametrize(
    "document",
    [
        workload("Deployment", replicas="many", template=template()),
        workload("Deployment", replicas=-1, template=template()),
        workload("Deployment", replicas=10**9, template=template()),
        workload("Deployment", replicas=1, template={"spec": {"containers": "none"}}),
        {"kind": "ConfigMap", "metadata": {"name": "x"}},
        {"no": "kind"},
    ],
)
def test_invalid_manifests_are_reported(tmp_path: Path, document: Any):
    with pytest.raises(InvalidInput):
        plan(tmp_path, document)


def test_a_workload_without_pods_plans_none(tmp_path: Path):
    (planned,) = plan(tmp_path, workload("Deployment", replicas=0, template=template()))
    assert "creates no pods" in render_answer(_plan_answer(planned, Options(), []), planned=True)
