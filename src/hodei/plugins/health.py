"""Health: refuses nodes that are not ready or cordoned."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

from hodei.engine.nodes import Mask, Nodes
from hodei.engine.points import Reads, Refusals, Trigger
from hodei.engine.view import Member, View
from hodei.model.job import Reason
from hodei.model.node import Node, Taint
from hodei.plugins.taints import is_tolerated

_NOT_READY = "NODE_NOT_READY"


class Health:
    """`cordon_taint`: the key of a taint; members that tolerate it may use cordoned nodes ("": none may)."""

    name = "health"
    reads: Reads = "static"
    requeue_on: tuple[Trigger, ...] = ("node_joined", "node_changed")

    def __init__(self, cordon_taint: str = "") -> None:
        self._cordon = Taint(cordon_taint) if cordon_taint else None

    def key(self, member: Member) -> Hashable:
        waits = member.job.backend.offline_ms > 0
        return waits if self._cordon is None else (waits, self._tolerates_cordon(member))

    def _tolerates_cordon(self, member: Member) -> bool:
        return self._cordon is not None and is_tolerated(self._cordon, member.task.tolerations)

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        out: list[tuple[Mask, Reason]] = []
        states = nodes.by("health", _state)
        waits = member.job.backend.offline_ms > 0
        for code, why in {(state[2], state[1]): None for state in states.values if not state[0]}:
            # A code comes from the backend, whose text is complete.
            text = why if code else f"not ready: {why}" if why else "not ready"
            refused = states.where(partial(_not_ready, code, why, waits))
            out.append((refused, Reason(self.name, code or _NOT_READY, text)))
        if any(state[3] for state in states.values) and not self._tolerates_cordon(member):
            out.append((states.where(lambda state: state[3]), Reason(self.name, "NODE_CORDONED", "cordoned")))
        return out


_State = tuple[bool, str, str, bool, bool]


def _state(node: Node) -> _State:
    return node.ready, node.not_ready_reason, node.not_ready_code, node.cordoned, node.offline_ok


def _not_ready(code: str, why: str, waits: bool, state: _State) -> bool:
    return not state[0] and state[1] == why and state[2] == code and not (waits and state[4])
