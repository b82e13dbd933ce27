"""What becomes of nodes, and of the work on them: they join and change, are marked by operators, and are lost."""

from __future__ import annotations

from collections.abc import Callable

from hodei.control.lifecycle.gangs import Gangs
from hodei.control.lifecycle.jobs import JobLifecycle
from hodei.control.lifecycle.node_overrides import described, marked, said
from hodei.control.lifecycle.preemption import PreemptionControl
from hodei.control.lifecycle.relocation import Relocation
from hodei.control.lifecycle.taint_eviction import TaintEviction
from hodei.control.state import ClusterState
from hodei.engine.points import Trigger
from hodei.engine.view import Gang
from hodei.model.facts import NodeJoined, NodeLost, NodeOverridden
from hodei.model.node import NodeOverrides

Void = Callable[[Gang, str, int], None]


class NodeEvents:
    """`void` is called with every gang whose room, made for it on a node, has come to nothing."""

    def __init__(
        self, world: ClusterState, lives: JobLifecycle, gangs: Gangs, evictions: TaintEviction, preempting: PreemptionControl, moving: Relocation,
        void: Void, wake: Callable[[Trigger], None],
    ) -> None:  # fmt: skip
        self._world, self._lives, self._gangs, self._evictions = world, lives, gangs, evictions
        self._preempting, self._moving, self._void, self._wake = preempting, moving, void, wake

    def joined(self, fact: NodeJoined, now_ms: int) -> None:
        node, world = fact.node, self._world
        known = world.nodes.get(node.name)
        if known != node:
            world.put_node(node)
            self._evictions.look_at(node.name, now_ms)
            self._wake("node_joined" if known is None else "node_changed")
            if known is None:
                world.tell("node.joined", now_ms, node=node.name, backend=node.backend)

    def lost(self, fact: NodeLost, now_ms: int) -> None:
        name, world = fact.node, self._world
        if name not in world.nodes:
            return
        self._gangs.leave_node(name)
        self._moving.void_on(name)
        for gang in self._preempting.void_on(name):
            self._void(gang, f"node {name} was lost", now_ms)
        for held in sorted(world.on_node.get(name, ())):
            run = world.run(held)
            if run is not None:
                self._lives.lost(run, now_ms, fact.reason or f"node {name} was lost")
        gone = world.nodes[name]
        world.remove_node(name)
        world.tell("node.lost", now_ms, node=name, reason=fact.reason, **described(gone))
        self._wake("node_changed")

    def marked(self, fact: NodeOverridden, now_ms: int) -> None:
        world = self._world
        before = world.marks.get(fact.node, NodeOverrides(fact.node))
        marks = marked(before, fact)
        if marks != before:
            world.put_marks(marks, new=True)
            self._evictions.look_at(fact.node, now_ms)
            self._wake("node_changed")
        if marks != before or fact.drain:
            world.tell("node.marked", now_ms, node=fact.node, cordoned=marks.cordoned, **said(fact))
        if fact.drain:
            self._moving.drain(fact.node, now_ms)
