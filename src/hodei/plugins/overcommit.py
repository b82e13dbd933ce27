"""Overcommit: what a node promises beyond what it has is not for guaranteed members.

A guaranteed member (QoS: limits equal to requests) counts on what really is there. Burstable and best-effort ones may use
the overcommitted room too.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

from hodei.engine.nodes import Nodes
from hodei.engine.points import NO_OPINION, Reads, Refusals, Trigger
from hodei.engine.view import Member, View
from hodei.model.job import Reason, qos
from hodei.model.node import Node
from hodei.model.resources import CPU, MEMORY

# What is sent ahead to a batch system waits in its queue: nothing is promised twice there.
_QUEUES = ("slurm", "pbs")
_ENOUGH = 1 << 62


class Overcommit:
    name = "overcommit"
    reads: Reads = "usage"
    requeue_on: tuple[Trigger, ...] = ("run_ended", "node_joined", "node_changed")

    def key(self, member: Member) -> Hashable:
        task = member.task
        # Most tasks have no limits; the class of those need not be worked out.
        if not task.limits or qos(task) != "guaranteed":
            return NO_OPINION
        return task.request.get(CPU, 0), task.request.get(MEMORY, 0)

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        task, out = member.task, []
        if qos(task) != "guaranteed" or not nodes.by("overcommits", _overcommits).where(bool).any():
            return ()
        for resource in (CPU, MEMORY):
            amount = task.request.get(resource, 0)
            there = nodes.by(("really there", resource), partial(_there, resource)).numbers(int)
            # Where not even the overcommitted room is enough, `fit` says so.
            short = (there - nodes.used(resource) < amount) & (nodes.free(resource) >= amount)
            text = f"only overcommitted {resource} is left"
            out.append((short, Reason(self.name, "ONLY_OVERCOMMITTED", text, evictable=True)))
        return out


def _there(resource: str, node: Node) -> int:
    return node.capacity.get(resource, 0) if _overcommits(node) else _ENOUGH


def _overcommits(node: Node) -> bool:
    return node.kind not in _QUEUES and any(percent > 100 for percent in node.overcommit_percent.values())
