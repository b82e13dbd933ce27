"""Nodes and the work on them: nodes join, change, are overridden by operators and are lost; runs are evicted by taints, and
jobs are moved by migrations and drains.

A job that moves is stopped only after a full trial placement has found other nodes, and capacity there is held until it
has stopped; then it is placed before all pending gangs. The nodes that it leaves are stored in `Job.move`, so that they
are known after a restart.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from hodei.control.accounting.accounts import Accounts
from hodei.control.capacity.scaling import NodeScaling
from hodei.control.lifecycle.gangs import Gangs
from hodei.control.lifecycle.jobs import JobLifecycle
from hodei.control.lifecycle.preemption import PreemptionControl
from hodei.control.lifecycle.victims import Hold
from hodei.control.state import ClusterState, Timers
from hodei.engine.cycle import Engine
from hodei.engine.explain import summary
from hodei.engine.plan import Refusal
from hodei.engine.preemption.victims import NO_DEVICES, Place
from hodei.engine.view import Gang
from hodei.model.facts import (
    CapacityPlanned,
    Fact,
    JobMigrated,
    NodeJoined,
    NodeLost,
    NodeOrderRestored,
    NodeOverridden,
    NodeRefused,
)
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.job import Job, Move, TaskSpec
from hodei.model.node import Node, NodeOverrides
from hodei.model.outcome import StopReason
from hodei.model.resources import format_resources

# A job that was moved avoids its old nodes for this long; then any node will do.
MOVE_TIMEOUT_MS = 600_000
NODE_FACTS = (NodeJoined, NodeLost, NodeOverridden, NodeOrderRestored, NodeRefused, CapacityPlanned)
# Phases of nodes that may have runs.
_HAS_RUNS = ("ready", "draining", "stopping")


class TaintEviction:
    """NoExecute: runs that do not tolerate a taint of their node are evicted, at once or when the toleration ends."""

    def __init__(self, cluster: ClusterState, lifecycle: JobLifecycle) -> None:
        self._cluster = cluster
        self._lifecycle = lifecycle
        # Off where another component evicts by taints, as in Kubernetes.
        self.enabled = True
        self._due: list[tuple[int, NodeName, RunId]] = []

    def check_node(self, name: NodeName, now_ms: int) -> None:
        """Evict the runs of a node whose taints may have changed, now or later."""
        node = self._cluster.table.node(name)
        if not self.enabled or node is None or not any(taint.effect == "NoExecute" for taint in node.taints):
            return
        for id in sorted(self._cluster.on_node.get(name, ())):
            run = self._cluster.run(id)
            if run is None or run.stop_reason:
                continue
            tolerated = tolerated_ms(node, self._cluster.jobs[run.job].spec.task_of(run.member))
            if tolerated == 0:
                self._lifecycle.evict(run, StopReason("tainted"), now_ms)
            elif tolerated is not None:
                heapq.heappush(self._due, (now_ms + tolerated, name, id))

    def expire(self, now_ms: int) -> None:
        while self._due and self._due[0][0] <= now_ms:
            _, name, id = heapq.heappop(self._due)
            run, node = self._cluster.run(id), self._cluster.table.node(name)
            # The taint may have been removed, or the run may have ended.
            if run is not None and node is not None and id in self._cluster.on_node.get(name, ()):
                spec = self._cluster.jobs[run.job].spec
                if tolerated_ms(node, spec.task_of(run.member)) is not None:
                    self._lifecycle.evict(run, StopReason("tainted"), now_ms)

    def next_ms(self) -> int | None:
        return self._due[0][0] if self._due else None


def tolerated_ms(node: Node, task: TaskSpec) -> int | None:
    """How long a task may stay on a node: None forever, 0 not at all, else until its shortest toleration ends."""
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


class Relocation:
    """Moves jobs to other nodes: migrations and drains. `gang`: builds the gang of a job."""

    def __init__(
        self,
        cluster: ClusterState,
        engine: Engine,
        lifecycle: JobLifecycle,
        preemption: PreemptionControl,
        accounts: Accounts,
        gang: Callable[..., Gang],
    ) -> None:
        self._cluster, self._engine, self._lifecycle, self._preemption = cluster, engine, lifecycle, preemption
        self._accounts, self._gang = accounts, gang
        self._timers = Timers()
        self.held: dict[JobId, list[Place]] = {}
        cluster.signals.job_ended.append(self._job_left)
        cluster.signals.job_suspended.append(self._job_left)

    def migrate(self, fact: JobMigrated, now_ms: int) -> None:
        job = self._cluster.jobs.get(fact.job)
        if job is None or not can_move(job):
            return
        move = self._allowed_nodes(job, fact.to)
        places = self._trial(job, move, now_ms)
        if isinstance(places, str) and not fact.force:
            self._cluster.emit("job.migration_refused", now_ms, job=job.id, reason=places)
            return
        self._cluster.emit("job.migrating", now_ms, job=job.id, move=str(move))
        job = self._cluster.change_job(job, now_ms, move=move)
        self._lifecycle.stop_all(job, StopReason("migrated", str(move)), now_ms)
        if not isinstance(places, str):
            self._hold(job.id, places)
        self._lifecycle.conclude(self._cluster.jobs[job.id], now_ms)

    def drain(self, node: NodeName, now_ms: int) -> None:
        """Move the work off a node. Capacity is held for jobs that fit elsewhere now; the others queue again."""
        cluster, reason = self._cluster, StopReason("drained", node)
        for id in sorted(cluster.on_node.get(node, ())):
            run = cluster.run(id)
            if run is None:
                continue
            job = cluster.jobs[run.job]
            gang = job.spec.gang
            moves_whole = not gang.per_node and (job.spec.size == 1 or gang.on_failure != "repair")
            holds = moves_whole and not run.stop_reason and can_move(job)
            places = self._trial(job, job.move, now_ms) if holds else ""
            self._lifecycle.evict(run, reason, now_ms)
            if not isinstance(places, str) and job.id in cluster.jobs:
                self._hold(job.id, places)

    def refusal(self, job: Job, to: NodeName, now_ms: int) -> str:
        """Why no other node can take the job now; "" if one can. Nothing is changed."""
        places = self._trial(job, self._allowed_nodes(job, to), now_ms)
        return places if isinstance(places, str) else ""

    def hold_elsewhere(self, jobs: Sequence[JobId], now_ms: int) -> bool:
        """Hold capacity for all of these jobs on other nodes, in addition to what they use now; False, and nothing is
        held, if one finds none."""
        held: list[JobId] = []
        for id in jobs:
            job = self._cluster.jobs[id]
            places = self._trial(job, self._allowed_nodes(job, ""), now_ms) if can_move(job) else ""
            if isinstance(places, str):
                for other in held:
                    self._release(other)
                return False
            self._hold(id, places)
            held.append(id)
        return True

    def _allowed_nodes(self, job: Job, to: NodeName) -> Move:
        return Move(to) if to else Move(off=tuple(sorted({run.node for run in self._cluster.live_runs(job.id)})))

    def _trial(self, job: Job, move: Move | None, now_ms: int) -> list[Place] | str:
        """Where the job fits in addition to everything that runs now, itself included; or why nowhere."""
        table = self._cluster.table
        table.settle()
        gang = self._gang(job.id, job.spec, job.submitted_ms)
        gang.move = move
        self._engine.profile(gang).admit(gang)
        with table.trial():
            found = self._engine.place_needed(gang, self._accounts.view(now_ms))
            if isinstance(found, Refusal):
                return summary(found.verdicts, found.nodes)
            self._engine.undo(found)
        return [Place(placed.node.name, placed.member, NO_DEVICES) for placed in found]

    def _hold(self, id: JobId, places: list[Place]) -> None:
        self._release(id)
        for place in places:
            self._cluster.table.place_by_name(*place)
        self.held[id] = places

    def _release(self, id: JobId) -> None:
        for place in self.held.pop(id, ()):
            self._cluster.table.release_by_name(*place)

    def _job_left(self, job: Job) -> None:
        self._release(job.id)

    def release_node(self, node: NodeName) -> None:
        """A node is about to be removed: jobs with held capacity on it find other nodes through the queue."""
        for id in [id for id, places in self.held.items() if any(place.node == node for place in places)]:
            self._release(id)

    def queued(self, gang: Gang, job: Job) -> bool:
        """A job is pending. Returns True if capacity is held for it: it is placed first, without queueing."""
        gang.move = job.move
        places = self.held.pop(job.id, None) if self.held else None
        if places is None:
            if job.move:
                self._timers.set(job.queued_ms + MOVE_TIMEOUT_MS, job.id)
            return False
        self._engine.profile(gang).admit(gang)
        self._preemption.holds[job.id] = Hold(gang, places, set())
        return True

    def expire(self, now_ms: int) -> None:
        """Jobs that found no other node in time may go anywhere."""
        for id in self._timers.due(now_ms):
            job = self._cluster.jobs.get(id)
            if job is not None and job.move and job.state == "pending" and job.queued_ms + MOVE_TIMEOUT_MS <= now_ms:
                self._cluster.dequeue(job)
                job = self._cluster.change_job(job, now_ms, move=None)
                self._cluster.emit("job.migration_abandoned", now_ms, job=id)
                self._cluster.enqueue(job, now_ms)

    def next_ms(self) -> int | None:
        return self._timers.next_ms()


def can_move(job: Job) -> bool:
    return job.state in ("scheduled", "running") and not job.stop_requested


class NodeEvents:
    def __init__(
        self,
        cluster: ClusterState,
        lifecycle: JobLifecycle,
        gangs: Gangs,
        evictions: TaintEviction,
        preemption: PreemptionControl,
        relocation: Relocation,
        scaling: NodeScaling,
    ) -> None:
        self._cluster, self._lifecycle, self._gangs = cluster, lifecycle, gangs
        self._evictions, self._preemption, self._relocation = evictions, preemption, relocation
        self._scaling = scaling

    def apply(self, fact: Fact, now_ms: int) -> None:
        """One of NODE_FACTS."""
        match fact:
            case NodeJoined():
                self.joined(fact, now_ms)
            case NodeLost():
                self.lost(fact, now_ms)
            case NodeOverridden():
                self.overridden(fact, now_ms)
            case NodeOrderRestored(order=order):
                self._scaling.restored(order)
            case NodeRefused():
                self._scaling.refused(fact, now_ms)
            case CapacityPlanned(plan=plan):
                for name in self._scaling.apply(plan, now_ms):
                    self._relocation.drain(name, now_ms)

    def joined(self, fact: NodeJoined, now_ms: int) -> None:
        cluster = self._cluster
        known = cluster.nodes.get(fact.node.name)
        node = self._scaling.joined(fact.node, now_ms)
        if known is not None and known.phase in _HAS_RUNS and node.phase in ("potential", "starting"):
            self._take_away(node.name, f"node {node.name} was switched off", now_ms, reclaimed=node.spot)
        if known != node:
            cluster.put_node(node)
            self._evictions.check_node(node.name, now_ms)
            cluster.wake("node_joined" if known is None else "node_changed")
            if known is None:
                cluster.emit("node.joined", now_ms, node=node.name, backend=node.backend)

    def lost(self, fact: NodeLost, now_ms: int) -> None:
        name, cluster = fact.node, self._cluster
        if name not in cluster.nodes:
            return
        node = cluster.nodes[name]
        self._take_away(name, fact.reason or f"node {name} was lost", now_ms, reclaimed=fact.reclaimed)
        self._scaling.lost(name, now_ms)
        cluster.remove_node(name)
        cluster.emit("node.lost", now_ms, node=name, reason=fact.reason, **_node_detail(node))
        cluster.wake("node_changed")

    def _take_away(self, name: NodeName, reason: str, now_ms: int, *, reclaimed: bool) -> None:
        """A node is gone, with the runs and the held capacity on it."""
        self._gangs.release_node(name)
        self._relocation.release_node(name)
        self._preemption.abandon_node(name, reason, now_ms)
        for held in sorted(self._cluster.on_node.get(name, ())):
            run = self._cluster.run(held)
            if run is not None and reclaimed:
                self._lifecycle.run_reclaimed(run, now_ms)
            elif run is not None:
                self._lifecycle.run_lost(run, now_ms, reason)

    def overridden(self, fact: NodeOverridden, now_ms: int) -> None:
        cluster = self._cluster
        before = cluster.overrides.get(fact.node, NodeOverrides(fact.node))
        overrides = merged_overrides(before, fact)
        if overrides != before:
            cluster.put_overrides(overrides, new=True)
            self._evictions.check_node(fact.node, now_ms)
            cluster.wake("node_changed")
        if overrides != before or fact.drain:
            detail = _override_detail(fact)
            cluster.emit("node.updated", now_ms, node=fact.node, cordoned=overrides.cordoned, **detail)
        if fact.drain:
            self._relocation.drain(fact.node, now_ms)


def merged_overrides(overrides: NodeOverrides, fact: NodeOverridden) -> NodeOverrides:
    """The overrides of a node with those of a new request."""
    labels, removed_labels = dict(overrides.labels), set(overrides.removed_labels)
    for key, value in fact.labels.items():
        if value is None:
            labels.pop(key, None)
            removed_labels.add(key)
        else:
            labels[key] = value
            removed_labels.discard(key)
    taints = {(taint.key, taint.effect): taint for taint in overrides.taints}
    removed_taints = {(taint.key, taint.effect): taint for taint in overrides.removed_taints}
    for taint in fact.remove_taints:
        taints.pop((taint.key, taint.effect), None)
        removed_taints[taint.key, taint.effect] = taint
    for taint in fact.add_taints:
        taints[taint.key, taint.effect] = taint
        removed_taints.pop((taint.key, taint.effect), None)
    cordoned = overrides.cordoned if fact.cordon is None else fact.cordon
    return NodeOverrides(
        overrides.node,
        cordoned or fact.drain,
        labels,
        tuple(sorted(removed_labels)),
        tuple(taints.values()),
        tuple(removed_taints.values()),
    )


def _override_detail(fact: NodeOverridden) -> dict[str, Any]:
    """The detail of an event: only what the request changes."""
    out: dict[str, Any] = {} if fact.cordon is None else {"cordon": fact.cordon}
    if fact.drain:
        out["drain"] = True
    for key, taints in (("add_taints", fact.add_taints), ("remove_taints", fact.remove_taints)):
        if taints:
            out[key] = [str(taint) for taint in taints]
    return out | ({"labels": fact.labels} if fact.labels else {})


def _node_detail(node: Node) -> dict[str, Any]:
    """The detail of an event about a removed node: what it was."""
    more = {"labels": node.labels, "taints": [str(taint) for taint in node.taints]}
    return {"capacity": format_resources(node.capacity)} | {key: value for key, value in more.items() if value}
