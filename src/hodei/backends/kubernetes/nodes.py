"""The cluster's nodes as ours to fill: what each has, less what the pods of others ask for. No I/O: watches tell it.

A pod of ours takes no room here, because the house counts its runs itself; but it takes one of its node's places for pods.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from hodei.backends.kubernetes.manifest import WHOLE_GPU, Settings
from hodei.kube.api.objects import Node as KubeNode
from hodei.kube.api.objects import Pod
from hodei.kube.api.quantities import PODS, amounts, requests_of
from hodei.model.errors import InvalidInput
from hodei.model.ids import NodeName
from hodei.model.node import Location, Node, Taint
from hodei.model.resources import GPU, Resources

log = logging.getLogger("hodei.kubernetes")
# Seen here only, not in the cluster: a node that has no place for one more pod, however small.
NO_PLACE = Taint("hodei.io/no-place-for-pods")
# Said by `cordoned` already.
_CORDON = "node.kubernetes.io/unschedulable"
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


class Picture:
    """`ours`: the labels of our own pods. `changed` is called when `nodes` has something new to say."""

    def __init__(self, backend: str, settings: Settings, ours: Mapping[str, str], changed: Callable[[], None]) -> None:
        self._backend, self._settings = backend, settings
        self._ours, self._changed = ours, changed
        self._nodes: dict[NodeName, KubeNode] = {}
        self._pods: dict[str, tuple[NodeName, Resources]] = {}
        self._used: dict[NodeName, Resources] = {}
        self._offered: dict[NodeName, Node] = {}
        self._dirty: set[NodeName] = set()

    def nodes(self) -> list[Node]:
        return [self._offered[name] for name in sorted(self._offered)]

    def flush(self) -> None:
        """After a batch of changes: what of it matters to anybody."""
        news = False
        for name in self._dirty:
            before, now = self._offered.get(name), self._offer(name)
            if before == now:
                continue
            news = True
            if now is None:
                del self._offered[name]
            else:
                self._offered[name] = now
        self._dirty.clear()
        if news:
            self._changed()

    # ---------------------------------------------------------------------------------------- what is told

    def node_changed(self, node: KubeNode, gone: bool) -> None:
        name = node.metadata.name
        if gone:
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = node
        self._dirty.add(name)

    def nodes_listed(self, nodes: list[KubeNode]) -> None:
        self._dirty |= self._nodes.keys()
        self._nodes = {node.metadata.name: node for node in nodes}
        self._dirty |= self._nodes.keys()

    def pod_changed(self, pod: Pod, gone: bool) -> None:
        """`gone` also when it has ended, or is not bound any more."""
        self._count(self._pods.pop(pod.metadata.uid, None), -1)
        if not gone and pod.spec.node_name:
            took = (pod.spec.node_name, self._taken_by(pod))
            self._pods[pod.metadata.uid] = took
            self._count(took, 1)

    def pods_listed(self, pods: list[Pod]) -> None:
        self._dirty |= self._used.keys()
        self._pods.clear()
        self._used.clear()
        for pod in pods:
            self.pod_changed(pod, gone=False)

    def _count(self, took: tuple[NodeName, Resources] | None, sign: int) -> None:
        if took is None:
            return
        node, taken = took
        used = self._used.setdefault(node, {})
        for name, amount in taken.items():
            used[name] = used.get(name, 0) + sign * amount
        self._dirty.add(node)

    def _taken_by(self, pod: Pod) -> Resources:
        if pod.metadata.namespace == self._settings.namespace and self._ours.items() <= pod.metadata.labels.items():
            return {PODS: 1}
        try:
            return requests_of(pod)
        except InvalidInput as error:
            log.warning("%s: what pod %s asks for is not counted: %s", self._backend, pod.metadata.name, error.message)
            return {PODS: 1}

    # ------------------------------------------------------------------------------------------ what is offered

    def _offer(self, name: NodeName) -> Node | None:
        node = self._nodes.get(name)
        if node is None or not self._settings.node_selector.items() <= node.metadata.labels.items():
            return None
        used, problem = self._used.get(name, {}), ""
        try:
            has = amounts(node.status.allocatable)
        except InvalidInput as error:
            has, problem = {}, f"what it has cannot be read: {error.message}"
        room = {name: max(0, amount - used.get(name, 0)) for name, amount in has.items()}
        gpus = room.pop(self._settings.gpu, 0)
        places = room.pop(PODS, None)
        if gpus:
            room[GPU] = gpus * WHOLE_GPU
        labels = node.metadata.labels
        problem = problem or _not_ready(node)
        taints = [
            Taint(one.key, one.value, one.effect)  # type: ignore[arg-type]
            for one in node.spec.taints
            if one.effect in _EFFECTS and one.key != _CORDON
        ]
        if places == 0:
            taints.append(NO_PLACE)
        return Node(
            self._settings.node_prefix + name,
            self._backend,
            kind="kubernetes",
            capacity=room,
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
        return "it has not said that it is ready"
    if ready.status == "True":
        return ""
    return f"{ready.reason}: {ready.message}".strip(": ") or "it says that it is not ready"


class NodeSink:
    """Nodes into the picture."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self.listed, self.flushed = picture.nodes_listed, picture.flush

    def changed(self, kind: str, node: KubeNode) -> None:
        self._picture.node_changed(node, kind == "DELETED")


class PodSink:
    """All pods that hold room into the picture."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self.listed, self.flushed = picture.pods_listed, picture.flush

    def changed(self, kind: str, pod: Pod) -> None:
        self._picture.pod_changed(pod, kind == "DELETED")
