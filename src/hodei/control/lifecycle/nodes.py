"""What becomes of nodes, and of the work on them: they join and change, are marked by operators, and are lost."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from hodei.control.lifecycle.gangs import Gangs
from hodei.control.lifecycle.jobs import JobLifecycle
from hodei.control.lifecycle.preemption import PreemptionControl
from hodei.control.lifecycle.relocation import Relocation
from hodei.control.state import ClusterState
from hodei.engine.points import Trigger
from hodei.engine.view import Gang
from hodei.model.facts import NodeJoined, NodeLost, NodeOverridden
from hodei.model.ids import NodeName, RunId
from hodei.model.job import TaskSpec
from hodei.model.node import Node, NodeOverrides
from hodei.model.outcome import StopReason
from hodei.model.resources import format_resources

# -------------------------------------------------------------------------------------- taint eviction
# NoExecute: work that does not tolerate a node's taint leaves it, at once or when its toleration runs out.


class TaintEviction:
    def __init__(self, cluster: ClusterState, lifecycle: JobLifecycle) -> None:
        self._cluster = cluster
        self._lifecycle = lifecycle
        # Off where somebody else sends work away for its node's taints (a cluster's own controller).
        self.enabled = True
        self._due: list[tuple[int, NodeName, RunId]] = []

    def look_at(self, name: NodeName, now_ms: int) -> None:
        """A node's taints may have changed: its runs leave now, later, or not at all."""
        node = self._cluster.table.node(name)
        if not self.enabled or node is None or not any(taint.effect == "NoExecute" for taint in node.taints):
            return
        for id in sorted(self._cluster.on_node.get(name, ())):
            run = self._cluster.run(id)
            if run is None or run.stop_reason:
                continue
            patience = tolerated_ms(node, self._cluster.jobs[run.job].spec.task_of(run.member))
            if patience == 0:
                self._lifecycle.leave(run, StopReason("tainted"), now_ms)
            elif patience is not None:
                heapq.heappush(self._due, (now_ms + patience, name, id))

    def run_out(self, now_ms: int) -> None:
        while self._due and self._due[0][0] <= now_ms:
            _, name, id = heapq.heappop(self._due)
            run, node = self._cluster.run(id), self._cluster.table.node(name)
            # The taint may have gone meanwhile, or the run.
            if run is not None and node is not None and id in self._cluster.on_node.get(name, ()):
                spec = self._cluster.jobs[run.job].spec
                if tolerated_ms(node, spec.task_of(run.member)) is not None:
                    self._lifecycle.leave(run, StopReason("tainted"), now_ms)

    def next_ms(self) -> int | None:
        return self._due[0][0] if self._due else None


def tolerated_ms(node: Node, task: TaskSpec) -> int | None:
    """How long a task may stay on a node: None for ever, 0 not at all, else until its shortest toleration runs out."""
    shortest: int | None = None
    for taint in node.taints:
        if taint.effect != "NoExecute":
            continue
        matching = [toleration for toleration in task.tolerations if toleration.tolerates(taint)]
        if not matching:
            return 0
        limits = [toleration.seconds for toleration in matching if toleration.seconds is not None]
        if limits:
            least = max(min(limits), 0) * 1000
            shortest = least if shortest is None else min(shortest, least)
    return shortest


# ----------------------------------------------------------------------------------------------------


# -------------------------------------------------------------------------------------- node overrides
# What operators say of nodes, added up; and what events tell of nodes.


def marked(overrides: NodeOverrides, fact: NodeOverridden) -> NodeOverrides:
    """Marks with an operator's latest word in them."""
    labels, removed = dict(overrides.labels), set(overrides.removed_labels)
    for key, value in fact.labels.items():
        if value is None:
            labels.pop(key, None)
            removed.add(key)
        else:
            labels[key] = value
            removed.discard(key)
    taints = {(taint.key, taint.effect): taint for taint in overrides.taints}
    gone = {(taint.key, taint.effect): taint for taint in overrides.removed_taints}
    for taint in fact.remove_taints:
        taints.pop((taint.key, taint.effect), None)
        gone[taint.key, taint.effect] = taint
    for taint in fact.add_taints:
        taints[taint.key, taint.effect] = taint
        gone.pop((taint.key, taint.effect), None)
    cordoned = overrides.cordoned if fact.cordon is None else fact.cordon
    return NodeOverrides(
        overrides.node,
        cordoned or fact.drain,
        labels,
        tuple(sorted(removed)),
        tuple(taints.values()),
        tuple(gone.values()),
    )


def said(fact: NodeOverridden) -> dict[str, Any]:
    """An operator's word, as it is told: only what it changes."""
    out: dict[str, Any] = {} if fact.cordon is None else {"cordon": fact.cordon}
    if fact.drain:
        out["drain"] = True
    for key, taints in (("add_taints", fact.add_taints), ("remove_taints", fact.remove_taints)):
        if taints:
            out[key] = [str(taint) for taint in taints]
    return out | ({"labels": fact.labels} if fact.labels else {})


def described(node: Node) -> dict[str, Any]:
    """What a node was, for those who look back after it has gone."""
    more = {"labels": node.labels, "taints": [str(taint) for taint in node.taints]}
    return {"capacity": format_resources(node.capacity)} | {key: value for key, value in more.items() if value}


# ----------------------------------------------------------------------------------------------------

Void = Callable[[Gang, str, int], None]


class NodeEvents:
    """`void` is called with every gang whose room, made for it on a node, has come to nothing."""

    def __init__(
        self, cluster: ClusterState, lifecycle: JobLifecycle, gangs: Gangs, evictions: TaintEviction, preempting: PreemptionControl, moving: Relocation,
        void: Void, wake: Callable[[Trigger], None],
    ) -> None:  # fmt: skip
        self._cluster, self._lifecycle, self._gangs, self._evictions = cluster, lifecycle, gangs, evictions
        self._preempting, self._moving, self._void, self._wake = preempting, moving, void, wake

    def joined(self, fact: NodeJoined, now_ms: int) -> None:
        node, cluster = fact.node, self._cluster
        known = cluster.nodes.get(node.name)
        if known != node:
            cluster.put_node(node)
            self._evictions.look_at(node.name, now_ms)
            self._wake("node_joined" if known is None else "node_changed")
            if known is None:
                cluster.emit("node.joined", now_ms, node=node.name, backend=node.backend)

    def lost(self, fact: NodeLost, now_ms: int) -> None:
        name, cluster = fact.node, self._cluster
        if name not in cluster.nodes:
            return
        self._gangs.leave_node(name)
        self._moving.void_on(name)
        for gang in self._preempting.void_on(name):
            self._void(gang, f"node {name} was lost", now_ms)
        for held in sorted(cluster.on_node.get(name, ())):
            run = cluster.run(held)
            if run is not None:
                self._lifecycle.lost(run, now_ms, fact.reason or f"node {name} was lost")
        gone = cluster.nodes[name]
        cluster.remove_node(name)
        cluster.emit("node.lost", now_ms, node=name, reason=fact.reason, **described(gone))
        self._wake("node_changed")

    def marked(self, fact: NodeOverridden, now_ms: int) -> None:
        cluster = self._cluster
        before = cluster.overrides.get(fact.node, NodeOverrides(fact.node))
        overrides = marked(before, fact)
        if overrides != before:
            cluster.put_overrides(overrides, new=True)
            self._evictions.look_at(fact.node, now_ms)
            self._wake("node_changed")
        if overrides != before or fact.drain:
            cluster.emit("node.updated", now_ms, node=fact.node, cordoned=overrides.cordoned, **said(fact))
        if fact.drain:
            self._moving.drain(fact.node, now_ms)
