"""Health: refuses nodes that are not ready, or that an operator has cordoned."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

from hodei.engine.nodes import Mask, Nodes
from hodei.engine.points import Reads, Refusals, Trigger
from hodei.engine.view import Member, View
from hodei.model.decision import Reason


class Health:
    name = "health"
    reads: Reads = "static"
    cured_by: tuple[Trigger, ...] = ("node_joined", "node_changed")

    def key(self, member: Member) -> Hashable:
        return None

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        out: list[tuple[Mask, Reason]] = []
        states = nodes.by("health", lambda node: (node.ready, node.not_ready_reason, node.cordoned))
        for why in {reason: None for ready, reason, _ in states.values if not ready}:
            text = f"not ready: {why}" if why else "not ready"
            out.append((states.where(partial(_not_ready, why)), Reason(self.name, "NODE_NOT_READY", text)))
        if any(cordoned for _, _, cordoned in states.values):
            out.append((states.where(lambda state: state[2]), Reason(self.name, "NODE_CORDONED", "cordoned")))
        return out


def _not_ready(why: str, state: tuple[bool, str, bool]) -> bool:
    return not state[0] and state[1] == why
