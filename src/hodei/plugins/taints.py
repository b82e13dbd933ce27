"""Taints: refuses nodes that keep off work which does not tolerate them (NoSchedule, NoExecute)."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

from hodei.engine.nodes import Mask, Nodes
from hodei.engine.points import Reads, Refusals, Trigger
from hodei.engine.view import Member, View
from hodei.model.decision import Reason
from hodei.model.job import Toleration
from hodei.model.node import Node, Taint


class Taints:
    name = "taints"
    reads: Reads = "static"
    cured_by: tuple[Trigger, ...] = ("node_joined", "node_changed")

    def key(self, member: Member) -> Hashable:
        return member.task.tolerations

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        tolerations = member.task.tolerations
        column = nodes.by("taints", _hard_taints)
        unmet = {
            taint: None for taints in column.values for taint in taints if not tolerated(taint, tolerations)
        }  # a dict keeps the order of first sight
        out: list[tuple[Mask, Reason]] = []
        for taint in unmet:
            out.append(
                (
                    column.where(partial(_has, taint)),
                    Reason(self.name, "UNTOLERATED_TAINT", f"untolerated taint {taint}"),
                )
            )
        return out


def tolerated(taint: Taint, tolerations: tuple[Toleration, ...]) -> bool:
    return any(toleration.tolerates(taint) for toleration in tolerations)


def _has(taint: Taint, taints: tuple[Taint, ...]) -> bool:
    return taint in taints


def _hard_taints(node: Node) -> tuple[Taint, ...]:
    return tuple(taint for taint in node.taints if taint.effect != "PreferNoSchedule")
