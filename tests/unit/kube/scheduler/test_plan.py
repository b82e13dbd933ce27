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
    asked = {"requests": {"cpu": cpu, "memory": "1Mi"}}
    containers = [{"name": "main", "image": "x", "resources": asked}]
    return {
        "metadata": {"labels": {"app": "x"}, "annotations": annotations},
        "spec": {"containers": containers, **spec},
    }


def made(kind: str, name: str = "x", version: str = "apps/v1", **spec: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def planned(tmp_path: Path, *documents: dict[str, Any], nodes: dict[str, Any] | None = None) -> list[Planned]:
    """Plan on two nodes with four and two cores."""
    file = tmp_path / "all.yaml"
    file.write_text("\n---\n".join(json.dumps(document) for document in documents))
    parts = build_scheduler(Options(), tries=0)
    for name, fields in (nodes or {"a": {"cpu": "4"}, "b": {"cpu": "2"}}).items():
        room = {"cpu": fields.pop("cpu"), "memory": "64Gi", "pods": "110"}
        parts.pods.node_changed(name, None, a_node(name, allocatable=room, **fields))
    parts.controller.step(NOW_MS, parts.pods.take_facts())
    reader = Reader(parts.cache.context, ReaderOptions(), parts.refusals)
    found = plan_workloads(parts, reader, read_manifests([file], "ns"), NOW_MS)
    table = parts.controller.cluster.table
    assert all(not used for used in (table.usage(row) for row in range(len(table.names))))
    return found


@pytest.mark.parametrize(
    "document",
    [
        made("Job", version="batch/v1", parallelism=50, template=template()),
        made("Job", version="batch/v1", parallelism=60, completions=50, template=template()),
        made("CronJob", version="batch/v1", jobTemplate={"spec": {"parallelism": 50, "template": template()}}),
        made("Deployment", replicas=50, template=template()),
        made("ReplicaSet", replicas=50, template=template()),
        made("ReplicationController", version="v1", replicas=50, template=template()),
        made("StatefulSet", replicas=50, template=template()),
    ],
    ids=lambda document: document["kind"],
)
def test_all_pods_of_a_workload_are_planned(tmp_path: Path, document: dict[str, Any]):
    (one,) = planned(tmp_path, document)
    assert (one.total, one.now, one.waiting) == (50, 6, 44)
    assert one.nodes == {"a": 4, "b": 2}
    assert one.first is not None
    assert one.first.code == "INSUFFICIENT_CPU"
    said = render_answer(_plan_answer(one, Options(), []), planned=True)
    assert f"{document['kind']} ns/x: 6 of 50 pods would start now (4 on a, 2 on b); 44 would wait" in said
    assert "Insufficient cpu" in said


def test_later_workloads_of_a_file_get_the_remaining_capacity(tmp_path: Path):
    first, service, second = planned(
        tmp_path,
        made("Deployment", "first", replicas=5, template=template()),
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"selector": {"app": "x"}}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "alone"}, "spec": template()["spec"]},
        {"apiVersion": "v1", "kind": "List", "items": [made("Job", "last", "batch/v1", template=template())]},
    )
    assert (first.now, first.waiting) == (5, 0)
    assert (service.workload.kind, service.now) == ("Pod", 1)
    assert (second.now, second.waiting) == (0, 1)
    assert "Job ns/last: 0 of 1 pods would start now; 1 would wait" in render_answer(
        _plan_answer(second, Options(), []), planned=True
    )


def test_pods_that_fit_are_reported_as_starting(tmp_path: Path):
    (one,) = planned(tmp_path, made("Deployment", replicas=3, template=template()))
    said = render_answer(_plan_answer(one, Options(), []), planned=True)
    assert said.startswith("Deployment ns/x: all 3 pods would start now (")


@pytest.mark.parametrize(("size", "now"), [(6, 6), (7, 0)])
def test_a_gang_starts_whole_or_not_at_all(tmp_path: Path, size: int, now: int):
    said = {"pod-group": "ring", "pod-group-size": str(size)}
    (one,) = planned(tmp_path, made("Job", version="batch/v1", parallelism=size, template=template(annotations=said)))
    assert (one.now, one.waiting) == (now, size - now)


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
    workers, chief = planned(
        tmp_path, made("Job", "workers", "batch/v1", parallelism=6, template=pods), group,
        made("Job", "chief", "batch/v1", template=pods),
    )  # fmt: skip
    assert (workers.now, workers.waiting, chief.now, chief.waiting) == (0, 6, 0, 1)


def test_a_gang_that_is_not_complete_waits(tmp_path: Path):
    said = {"pod-group": "ring", "pod-group-size": "3"}
    (one,) = planned(tmp_path, made("Job", version="batch/v1", parallelism=2, template=template(annotations=said)))
    assert (one.now, one.waiting) == (0, 2)
    assert "minCount pods from a gang" in one.refused


def test_a_daemon_set_has_a_pod_on_every_matching_node(tmp_path: Path):
    taint = {"taints": [{"key": "only", "value": "gpu", "effect": "NoSchedule"}]}
    nodes = {"a": {"cpu": "4"}, "b": {"cpu": "1"}, "c": {"cpu": "4", **taint}, "d": {"cpu": "4", "labels": {"os": "x"}}}
    (one,) = planned(tmp_path, made("DaemonSet", template=template("2")), nodes={k: dict(v) for k, v in nodes.items()})
    assert (one.total, one.now, one.waiting) == (3, 2, 1)
    assert one.nodes == {"a": 1, "d": 1}
    (one,) = planned(tmp_path, made("DaemonSet", template=template("2", nodeSelector={"os": "x"})), nodes=nodes)
    assert (one.total, one.now, one.nodes) == (1, 1, {"d": 1})


@pytest.mark.parametrize(
    ("spec", "now"), [({"resourceClaims": [{"name": "gpu"}]}, 0), ({"schedulingGates": [{"name": "wait"}]}, 0)]
)
def test_a_refusal_applies_to_all_pods_of_the_workload(tmp_path: Path, spec: Any, now: int):
    (one,) = planned(tmp_path, made("Deployment", replicas=3, template=template(**spec)))
    assert (one.now, one.waiting) == (now, 3)
    assert one.refused


@pytest.mark.parametrize(
    "document",
    [
        made("Deployment", replicas="many", template=template()),
        made("Deployment", replicas=-1, template=template()),
        made("Deployment", replicas=10**9, template=template()),
        made("Deployment", replicas=1, template={"spec": {"containers": "none"}}),
        {"kind": "ConfigMap", "metadata": {"name": "x"}},
        {"no": "kind"},
    ],
)
def test_invalid_manifests_are_reported(tmp_path: Path, document: Any):
    with pytest.raises(InvalidInput):
        planned(tmp_path, document)


def test_a_workload_without_pods_plans_none(tmp_path: Path):
    (one,) = planned(tmp_path, made("Deployment", replicas=0, template=template()))
    assert "creates no pods" in render_answer(_plan_answer(one, Options(), []), planned=True)
