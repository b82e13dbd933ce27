"""Scope: refuses nodes that a profile may not use. `nodes` of a profile is its label selector; empty for all nodes."""

from __future__ import annotations

from collections.abc import Hashable

from hodei.engine.nodes import Nodes
from hodei.engine.points import NO_OPINION, Reads, Refusals, Trigger
from hodei.engine.view import Member, View
from hodei.model.affinity import parse_selector
from hodei.model.job import Reason


class Scope:
    name = "scope"
    reads: Reads = "static"
    requeue_on: tuple[Trigger, ...] = ("node_joined", "node_changed")

    def __init__(self, nodes: str = "") -> None:
        self._wanted = parse_selector(nodes)
        shown = ", ".join(str(requirement) for requirement in self._wanted)
        self._reason = Reason(self.name, "OUTSIDE_PROFILE", f"not among the nodes of the profile ({shown})")

    def key(self, member: Member) -> Hashable:
        return None if self._wanted else NO_OPINION

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        if not self._wanted:
            return []
        inside = ~nodes.none()
        for requirement in self._wanted:
            inside = inside & nodes.matching(requirement)
        return [(~inside, self._reason)]
