"""Capabilities: refuses nodes of backends that cannot do what the job asks for (images, health checks, GPU shares ...)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

from hodei.engine.explain import Change, sole_refusals
from hodei.engine.nodes import Mask, Nodes
from hodei.engine.points import Reads, Refusals, Trigger
from hodei.engine.view import Member, View
from hodei.model.backend import NEEDS, needs_of
from hodei.model.job import Checkpoint, HealthCheck, Interactive, Reason
from hodei.model.node import Node

CODE = "BACKEND_CANNOT"
_Able = tuple[str, tuple[str, ...]]
# What can be left out of a job without making another job of it: the need, the words, the fields and their new values.
_LEFT_OUT: dict[str, tuple[str, dict[str, Any], bool]] = {
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
        return [(mask, reason) for mask, reason, _ in self._unable(member, nodes)]

    def _unable(self, member: Member, nodes: Nodes) -> list[tuple[Mask, Reason, str]]:
        out: list[tuple[Mask, Reason, str]] = []
        backends = nodes.by("what its backend cannot do", _able)
        lacking = [(name, cannot) for name, cannot in backends.values if cannot]
        if not lacking:
            return out
        for need in needs_of(member.job, member.task):
            for name, cannot in sorted(lacking):
                if need in cannot and not (need == "checkpoint_commands" and "checkpoint" in cannot):
                    text = f"backend {name} cannot {NEEDS[need].what}"
                    reason = Reason(self.name, CODE, text, hint=NEEDS[need].hint)
                    out.append((backends.where(partial(_is, (name, cannot))), reason, need))
        return out

    def suggest(self, member: Member, nodes: Nodes, view: View) -> Iterator[Change]:
        found = self._unable(member, nodes)
        helps = sole_refusals([(mask, reason) for mask, reason, _ in found])
        told = set[str]()
        for (_, _, need), alone_in_the_way in zip(found, helps, strict=True):
            if alone_in_the_way and need in _LEFT_OUT and (words := _LEFT_OUT[need])[0] not in told:
                told.add(words[0])
                yield Change("drop", words[0], words[1], whole_job=words[2])


def _able(node: Node) -> _Able:
    return node.backend, node.cannot


def _is(wanted: _Able, able: _Able) -> bool:
    return able == wanted
