"""Capabilities: refuses nodes of backends that cannot do what the job needs (images, health checks, GPU shares ...)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from operator import eq
from typing import Any

from hodei.engine.explain import Change, sole_refusals
from hodei.engine.nodes import Mask, Nodes
from hodei.engine.points import Reads, Refusals, Trigger
from hodei.engine.view import Member, View
from hodei.model.backend import NEEDS, needs_of
from hodei.model.job import Checkpoint, HealthCheck, Interactive, Reason

CODE = "BACKEND_CANNOT"
# Needs that a job can drop and still do its work: text, fields with their new values, whether they are the job's.
_DROPPABLE: dict[str, tuple[str, dict[str, Any], bool]] = {
    "health_checks": ("drop health", {"health": HealthCheck()}, True),
    "checkpoint": ("drop checkpoint", {"checkpoint": Checkpoint()}, True),
    "checkpoint_commands": ("drop checkpoint", {"checkpoint": Checkpoint()}, True),
    "limits": ("drop limits", {"limits": {}}, False),
    "idle_timeouts": ("drop idle_timeout", {"workload": Interactive()}, True),
}


class Capabilities:
    name = "capabilities"
    reads: Reads = "static"
    requeue_on: tuple[Trigger, ...] = ("node_joined", "node_changed")

    def key(self, member: Member) -> Hashable:
        return needs_of(member.job, member.task)

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        return [(mask, reason) for mask, reason, _ in self._unmet(member, nodes)]

    def _unmet(self, member: Member, nodes: Nodes) -> list[tuple[Mask, Reason, str]]:
        out: list[tuple[Mask, Reason, str]] = []
        backends = nodes.by("unmet needs", lambda node: (node.backend, node.cannot))
        lacking = [(name, cannot) for name, cannot in backends.values if cannot]
        if not lacking:
            return out
        for need in needs_of(member.job, member.task):
            for name, cannot in sorted(lacking):
                if need in cannot and not (need == "checkpoint_commands" and "checkpoint" in cannot):
                    text = f"backend {name} cannot {NEEDS[need].what}"
                    reason = Reason(self.name, CODE, text, hint=NEEDS[need].hint)
                    out.append((backends.where(partial(eq, (name, cannot))), reason, need))
        return out

    def suggest(self, member: Member, nodes: Nodes, view: View) -> Iterator[Change]:
        found = self._unmet(member, nodes)
        helps = sole_refusals([(mask, reason) for mask, reason, _ in found])
        proposed = set[str]()
        for (_, _, need), only_refusal in zip(found, helps, strict=True):
            if only_refusal and need in _DROPPABLE and (change := _DROPPABLE[need])[0] not in proposed:
                proposed.add(change[0])
                yield Change("drop", change[0], change[1], whole_job=change[2])
