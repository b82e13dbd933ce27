"""The last look before a binding: has somebody else taken the room since it was decided?

No lock reaches over several schedulers: each binds by what it has seen. What has come to a node between a decision and its
binding can still be regarded; what comes after that is for the kubelet to refuse.
"""

from __future__ import annotations

from collections.abc import Iterable

from hodei.kube.api.objects import Node
from hodei.kube.api.quantities import readable
from hodei.model.ids import NodeName
from hodei.model.resources import Resources


class PrebindCheck:
    """Counts those who come to nodes without having been sent there by us; a decision remembers how far the count was."""

    def __init__(self) -> None:
        self.count = 0
        self._last: dict[NodeName, int] = {}

    def came(self, node: NodeName) -> None:
        self.count += 1
        self._last[node] = self.count

    def since(self, node: NodeName, count: int) -> bool:
        return self._last.get(node, 0) > count

    def forget(self, node: NodeName) -> None:
        self._last.pop(node, None)


def lacking(node: Node, wanted: Resources, there: Iterable[Resources]) -> str:
    """The first resource, of those that are `wanted`, of which all that are `there` ask for more than the node has; "" if
    there is none. Whoever wants it is one of them."""
    room, _ = readable(node.status.allocatable)
    held = list(there)
    for name in sorted(wanted.keys() & room.keys()):
        if sum(one.get(name, 0) for one in held) > room[name]:
            return name
    return ""
