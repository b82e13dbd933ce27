"""Nodes of the cluster with the capacity that other pods leave. No I/O: fed by watches.

Our own pods take no capacity here, because the scheduler counts its runs itself; but each counts against its node's limit
of pods.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hodei.backends.base import WHOLE_GPU
from hodei.backends.kubernetes.manifest import Settings
from hodei.kube.api.objects import Node as KubeNode
from hodei.kube.api.objects import Pod
from hodei.kube.api.quantities import PODS, amounts, requests_of
from hodei.model.errors import InvalidInput
from hodei.model.ids import NodeName
from hodei.model.node import Location, Node, Taint
from hodei.model.resources import GPU, Resources

log = logging.getLogger("hodei.kubernetes")
# Not in the cluster, only in our copy of a node: it has reached its limit of pods.
NO_PLACE = Taint("hodei.io/no-place-for-pods")
# Expressed by `cordoned`.
_CORDON = "node.kubernetes.io/unschedulable"
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


class NodeCache:
    """`own_labels`: the labels of our own pods. `on_change` is called when `nodes` changes."""

    def __init__(
        self, backend: str, settings: Settings, own_labels: Mapping[str, str], on_change: Callable[[], None]
    ) -> None:
        self._backend, self._settings = backend, settings
        self._own_labels, self._on_change = own_labels, on_change
        self._nodes: dict[NodeName, KubeNode] = {}
        self._pods: dict[str, tuple[NodeName, Resources]] = {}
        self._used: dict[NodeName, Resources] = {}
        self._offered: dict[NodeName, Node] = {}
        self._dirty: set[NodeName] = set()

    def nodes(self) -> list[Node]:
        return [self._offered[name] for name in sorted(self._offered)]

    def flush(self) -> None:
        """After a batch of changes: recompute the affected nodes."""
        changed = False
        for name in self._dirty:
            before, now = self._offered.get(name), self._build_node(name)
            if before == now:
                continue
            changed = True
            if now is None:
                del self._offered[name]
            else:
                self._offered[name] = now
        self._dirty.clear()
        if changed:
            self._on_change()

    def node_changed(self, kind: str, node: KubeNode) -> None:
        name = node.metadata.name
        if kind == "DELETED":
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = node
        self._dirty.add(name)

    def nodes_listed(self, nodes: list[KubeNode]) -> None:
        self._dirty |= self._nodes.keys()
        self._nodes = {node.metadata.name: node for node in nodes}
        self._dirty |= self._nodes.keys()

    def pod_changed(self, kind: str, pod: Pod) -> None:
        """`kind` is DELETED also when the pod has ended or is no longer bound."""
        self._count(self._pods.pop(pod.metadata.uid, None), -1)
        if kind != "DELETED" and pod.spec.node_name:
            usage = (pod.spec.node_name, self._requests_of(pod))
            self._pods[pod.metadata.uid] = usage
            self._count(usage, 1)

    def pods_listed(self, pods: list[Pod]) -> None:
        self._dirty |= self._used.keys()
        self._pods.clear()
        self._used.clear()
        for pod in pods:
            self.pod_changed("ADDED", pod)

    def _count(self, usage: tuple[NodeName, Resources] | None, sign: int) -> None:
        if usage is None:
            return
        node, requests = usage
        used = self._used.setdefault(node, {})
        for name, amount in requests.items():
            used[name] = used.get(name, 0) + sign * amount
        self._dirty.add(node)

    def _requests_of(self, pod: Pod) -> Resources:
        if (
            pod.metadata.namespace == self._settings.namespace
            and self._own_labels.items() <= pod.metadata.labels.items()
        ):
            return {PODS: 1}
        try:
            return requests_of(pod)
        except InvalidInput as error:
            log.warning(
                "%s: the requests of pod %s are not counted: %s", self._backend, pod.metadata.name, error.message
            )
            return {PODS: 1}

    def _build_node(self, name: NodeName) -> Node | None:
        node = self._nodes.get(name)
        if node is None or not self._settings.node_selector.items() <= node.metadata.labels.items():
            return None
        used, problem = self._used.get(name, {}), ""
        try:
            allocatable = amounts(node.status.allocatable)
        except InvalidInput as error:
            allocatable, problem = {}, f"its allocatable resources cannot be read: {error.message}"
        free = {name: max(0, amount - used.get(name, 0)) for name, amount in allocatable.items()}
        gpus = free.pop(self._settings.gpu, 0)
        pods_left = free.pop(PODS, None)
        if gpus:
            free[GPU] = gpus * WHOLE_GPU
        labels = node.metadata.labels
        problem = problem or _not_ready(node)
        taints = [
            Taint(one.key, one.value, one.effect)  # type: ignore[arg-type]
            for one in node.spec.taints
            if one.effect in _EFFECTS and one.key != _CORDON
        ]
        if pods_left == 0:
            taints.append(NO_PLACE)
        return Node(
            self._settings.node_prefix + name,
            self._backend,
            kind="kubernetes",
            capacity=free,
            labels=labels,
            taints=tuple(taints),
            arch=labels.get("kubernetes.io/arch", ""),
            gpu_type=labels.get("nvidia.com/gpu.product", ""),
            location=Location(
                region=labels.get("topology.kubernetes.io/region", ""),
                zone=labels.get("topology.kubernetes.io/zone", ""),
            ),
            ready=not problem,
            not_ready_reason=problem[:200],
            cordoned=node.spec.unschedulable,
            images={name: image.size_bytes for image in node.status.images for name in image.names},
        )


def _not_ready(node: KubeNode) -> str:
    ready = next((one for one in node.status.conditions if one.type == "Ready"), None)
    if ready is None:
        return "it has not reported that it is ready"
    if ready.status == "True":
        return ""
    return f"{ready.reason}: {ready.message}".strip(": ") or "it reports that it is not ready"


class Sink(NamedTuple):
    """The receiver of a reflector's events."""

    listed: Callable[[list[Any]], None]
    changed: Callable[[str, Any], None]
    flushed: Callable[[], None]
