"""Taints: nodes that keep off work which does not tolerate them; PreferNoSchedule only makes a node the worse choice."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial

import numpy as np

from hodei.engine.changes import Change
from hodei.engine.nodes import Ints, Mask, Nodes
from hodei.engine.points import MAX_SCORE, Reads, Refusals, Trigger
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
        column = nodes.by("taints", hard_taints)
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

    def repairs(self, member: Member, nodes: Nodes, view: View) -> Iterator[Change]:
        """Tolerate the one taint that alone keeps some node shut."""
        given = member.task.tolerations
        column = nodes.by("taints", hard_taints)
        found: dict[Taint, None] = {}
        for taints in column.values:
            unmet = [taint for taint in taints if not tolerated(taint, given)]
            if len(unmet) == 1 and column.where(partial(tuple.__eq__, taints)).any():
                found[unmet[0]] = None
        for taint in sorted(found, key=str):
            more = Toleration(taint.key, "Equal" if taint.value else "Exists", taint.value, taint.effect)
            yield Change("tolerate", f"tolerate {taint}", {"tolerations": (*given, more)})

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        """How many soft taints are not tolerated; no opinion while no node has any."""
        column = nodes.by("soft taints", soft_taints)
        if not any(column.values):
            return None
        tolerations = member.task.tolerations
        return column.numbers(lambda taints: sum(not tolerated(taint, tolerations) for taint in taints))

    def normalize(self, raw: Ints, feasible: Mask) -> Ints:
        """The fewer the better."""
        most = int(raw[feasible].max()) if feasible.any() else 0
        return MAX_SCORE - raw * MAX_SCORE // most if most else np.full_like(raw, MAX_SCORE)


def tolerated(taint: Taint, tolerations: tuple[Toleration, ...]) -> bool:
    return any(toleration.tolerates(taint) for toleration in tolerations)


def _has(taint: Taint, taints: tuple[Taint, ...]) -> bool:
    return taint in taints


def hard_taints(node: Node) -> tuple[Taint, ...]:
    return tuple(taint for taint in node.taints if taint.effect != "PreferNoSchedule")


def soft_taints(node: Node) -> tuple[Taint, ...]:
    return tuple(taint for taint in node.taints if taint.effect == "PreferNoSchedule")
