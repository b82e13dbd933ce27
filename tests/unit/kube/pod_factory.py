"""Pods and nodes of Kubernetes for tests."""

from __future__ import annotations

from typing import Any

from hodei.engine.nodes import Table
from hodei.kube.api.objects import Node, Pod, from_builtins
from hodei.kube.scheduler import translate
from hodei.kube.scheduler.translate import NO_CONTEXT, PodContext, PodInfo


def a_pod(name: str = "pod", *, namespace: str = "ns", requests: dict[str, str] | None = None, **spec: Any) -> Pod:
    """Fields of `spec` in the API's spelling; `labels`, `annotations`, `owners`, `uid` and `deleted` go to the metadata,
    `status` is the status."""
    meta = {"name": name, "namespace": namespace, "uid": spec.pop("uid", f"uid-{name}")}
    meta |= {key: spec.pop(key) for key in ("labels", "annotations") if key in spec}
    if "owners" in spec:
        meta["ownerReferences"] = spec.pop("owners")
    if spec.pop("deleted", False):
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    status = spec.pop("status", {})
    spec.setdefault("containers", [{"name": "main", "image": "img", "resources": {"requests": requests or {}}}])
    return from_builtins({"metadata": meta, "spec": spec, "status": status}, Pod)


def a_node(name: str = "n1", *, allocatable: dict[str, str] | None = None, **spec: Any) -> Node:
    meta = {"name": name, "labels": spec.pop("labels", {})}
    default = {"cpu": "4", "memory": "8Gi", "pods": "110"} if allocatable is None else allocatable
    status = {"allocatable": default, **spec.pop("status", {})}
    return from_builtins({"metadata": meta, "spec": spec, "status": status}, Node)


def pod_info(cache: PodContext = NO_CONTEXT, **fields: Any) -> PodInfo:
    return translate.pod(a_pod(**fields), cache)


def a_table(*nodes: Node) -> Table:
    table = Table(translate.node(node) for node in nodes)
    table.settle()
    return table
