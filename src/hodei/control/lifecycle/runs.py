"""Runs: from placements to start orders, what the end of a run means for its gang, and reconciliation with backends."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from msgspec import structs

from hodei.control.state import ClusterState
from hodei.engine.plan import Bind, Plan
from hodei.engine.points import Placed
from hodei.engine.preemption.victims import Place
from hodei.engine.view import Gang, Member
from hodei.model.effects import Forget, Start, Stop
from hodei.model.facts import RunObserved
from hodei.model.ids import JobId, NodeName, RunId, run_id
from hodei.model.job import RUN_ENDED, Job, JobSpec, Run
from hodei.model.node import Node
from hodei.model.outcome import MOVED, StopReason
from hodei.model.resources import Resources, format_time

# Reason codes of runs that never started: the backend failed to start it, or was unreachable. The latter does not count
# as an attempt of the job.
START_FAILED = "start_failed"
NOT_REACHED_RUN = "not_reached"
NEVER_STARTED = (START_FAILED, NOT_REACHED_RUN)
# The reason to stop a run that belongs to no job.
NOT_WANTED = StopReason("not_wanted")
# In larger gangs each member gets only the first address: all of them in every order would be too much.
_MAX_ADDRESSES = 1000
# Jobs keep the names of this many nodes.
_MAX_NODES = 20
# An event gives the real time of what was reported later than this.
_LATE_MS = 1000
_JOB_TIMES = ("submitted_ms", "queued_ms", "scheduled_ms", "started_ms", "changed_ms")
_RUN_TIMES = ("placed_ms", "started_ms", "finished_ms", "checkpoint_ms")


def latest_runs(runs: Iterable[Run]) -> dict[int, Run]:
    """The last run of each member, by member."""
    return {run.member: run for run in sorted(runs, key=lambda run: (run.member, run.attempt))}


def gang_action(run: Run) -> Literal["", "repair", "shrink"]:
    """What follows for the gang when this run stops: the member is replaced or left out, or ("") the attempt is over."""
    return run.stop_reason.gang if run.stop_reason is not None else ""


def is_missing(run: Run) -> bool:
    """Ended, and another run has to replace it."""
    return run.state in RUN_ENDED and run.state != "succeeded" and gang_action(run) == "repair"


def lost_together(run: Run, at_ms: int) -> bool:
    """Members lost with one node count as one loss."""
    return run.state == "lost" and gang_action(run) == "repair" and run.finished_ms == at_ms


def place_of(spec: JobSpec, run: Run) -> Place:
    return Place(run.node, Member(spec, spec.task_of(run.member)), run.grant)


# Clocks differ and are set: no time of the past may lie in the future.


def clamp_job_times(job: Job, now_ms: int) -> Job:
    """The job without past times after `now_ms`; the pause before its next try keeps its length."""
    if job.changed_ms <= now_ms and job.submitted_ms <= now_ms:
        return job  # no field of it was written later
    changes = {name: now_ms for name in _JOB_TIMES if getattr(job, name) > now_ms}
    if job.not_before_ms > now_ms:
        changes["not_before_ms"] = now_ms + max(job.not_before_ms - max(job.changed_ms, now_ms), 0)
    return structs.replace(job, **changes)


def clamp_run_times(run: Run, now_ms: int) -> Run:
    changes = {name: now_ms for name in _RUN_TIMES if getattr(run, name) > now_ms}
    return structs.replace(run, **changes) if changes else run


def clamp_time(at_ms: int, least_ms: int, now_ms: int) -> int:
    """A time reported by a backend, between `least_ms` and now; now if the backend gives none (0 or less)."""
    return max(min(at_ms, now_ms), least_ms) if at_ms > 0 else now_ms


def late_detail(name: str, at_ms: int, now_ms: int) -> dict[str, str]:
    """The detail of an event about something that was reported late: when it happened."""
    return {name: format_time(at_ms)} if now_ms - at_ms >= _LATE_MS else {}


def start_orders(
    cluster: ClusterState, job: JobId, runs: Iterable[Run], together: Sequence[Run] | None = None
) -> list[Start]:
    """Start orders for runs of a job, with the addresses of its gang. `together`: all live runs by rank, if known."""
    spec = cluster.jobs[job].spec
    if together is None:
        together = sorted(cluster.live_runs(job), key=lambda run: run.rank)
    named = together if len(together) <= _MAX_ADDRESSES else together[:1]
    nodes = [cluster.nodes.get(run.node) for run in named]
    known = tuple([node.address for node in nodes if node is not None and node.address])
    addresses = known if len(known) == len(nodes) else ()
    names = tuple([run.node for run in named]) if 1 < len(together) == len(named) else ()
    return [Start(run, spec, spec.task_of(run.member), len(together), addresses, names) for run in runs]


def stop_order(job: Job, run: Run, reason: StopReason) -> Stop:
    saved_first = job.spec.checkpoint.has_hook and (reason.gang or reason.code in MOVED)
    return Stop(run.id, run.backend, job.spec.grace_ms, reason, job.spec.checkpoint if saved_first else None)


def share_of_price(node: Node, request: Resources) -> int:
    """The part of the node's price for the largest part of a resource that the request takes; all of it if it requests
    nothing that the node counts."""
    shares = [amount * 1000 // node.capacity[name] for name, amount in request.items() if node.capacity.get(name)]
    return node.cost_milli * min(max(shares, default=1000), 1000) // 1000


def bind(cluster: ClusterState, gang: Gang, placements: Sequence[Placed], plan: Plan, now_ms: int) -> Job:
    """Turn placements into runs: a new attempt of the whole job, or members that join the running gang."""
    job = cluster.jobs[gang.id]
    if cluster.tracks_availability:
        cluster.availability.remove_start_reservation(gang.id)
        cluster.estimates[gang.id] = gang.estimate_ms
    attempt = job.attempt + 1
    nodes = sorted({placed.node.name for placed in placements}) if len(placements) > 1 else [placements[0].node.name]
    ranks: _Ranks | None = None  # a new attempt: members are numbered from 0
    if gang.is_joining:
        ranks = _Ranks(cluster.runs.get(job.id, {}).values())
        places = format_nodes({*nodes, *(run.node for run in cluster.live_runs(job.id))})
        job = cluster.change_job(job, now_ms, attempt=attempt, not_before_ms=0, nodes=places)
    else:
        job = cluster.change_job(
            job,
            now_ms,
            to="scheduled",
            attempt=attempt,
            first_attempt=attempt,
            scheduled_ms=now_ms,
            reason_code="",
            reason="",
            not_before_ms=0,
            move=None,
            last_preemption="",
            nodes=format_nodes(nodes),
        )
        cluster.drop_runs(job.id)
    runs: list[Run] = []
    for placed in sorted(placements, key=lambda placed: placed.index) if len(placements) > 1 else placements:
        node, task = placed.node, placed.member.task
        plan.binds.append(Bind(job.id, task.name, placed.index, node.name, node.backend, placed.decision, gang.kind))
        run = Run(
            id=run_id(job.id, placed.index, attempt),
            job=job.id,
            task=task.name,
            member=placed.index,
            attempt=attempt,
            node=node.name,
            backend=node.backend,
            state="placed",
            placed_ms=now_ms,
            decision=placed.decision,
            rank=len(runs) if ranks is None else ranks.give(placed.index),
            grant=placed.grant,
            kind=gang.kind,
            cost_milli=share_of_price(node, task.request) if node.cost_milli else 0,
        )
        cluster.add_run(run, new=True)
        runs.append(run)
    for order in start_orders(cluster, job.id, runs, None if gang.is_joining else runs):
        cluster.act(order)
    if gang.is_joining:
        cluster.emit(
            "gang.member_joined", now_ms, job=job.id, attempt=attempt, members=[run.member for run in runs][:_MAX_NODES]
        )
    else:
        how = {"start": gang.kind} if gang.kind else {}
        cluster.emit("job.scheduled", now_ms, job=job.id, attempt=attempt, nodes=nodes[:_MAX_NODES], **how)
    return job


def format_nodes(names: Iterable[str]) -> str:
    """The node names as a job keeps them."""
    return " ".join(sorted(names)[:_MAX_NODES])


class _Ranks:
    """Ranks of members: the rank that the member had before, else the lowest free one."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._former = {run.member: run.rank for run in sorted(runs, key=lambda run: run.attempt)}
        self._taken = {run.rank for run in runs if run.state not in RUN_ENDED}
        self._next = 0

    def give(self, member: int) -> int:
        rank = self._former.get(member)
        if rank is None or rank in self._taken:
            while self._next in self._taken:
                self._next += 1
            rank = self._next
        self._taken.add(rank)
        return rank


def reconcile(
    cluster: ClusterState,
    backend: str,
    known: Mapping[RunId, RunObserved],
    now_ms: int,
    *,
    silent: Collection[NodeName] = (),
    only: Collection[NodeName] | None = None,
) -> tuple[list[RunObserved], list[Start | Stop | Forget]]:
    """The facts and orders that make controller and backend agree. `known`: the runs that the backend knows. `silent`: nodes
    whose runs it cannot know now; those may be running. `only`: the nodes that are not silent any more, None for all."""
    facts: list[RunObserved] = []
    orders: list[Start | Stop | Forget] = []
    own = {run.id: run for runs in cluster.runs.values() for run in runs.values() if run.backend == backend}
    for run in own.values():
        if run.state in RUN_ENDED or (only is not None and run.node not in only):
            continue
        seen = known.get(run.id)
        if seen is not None:
            facts.append(seen)
            if seen.state not in RUN_ENDED and run.stop_reason:
                orders.append(stop_order(cluster.jobs[run.job], run, run.stop_reason))
        elif run.state == "placed":
            orders += start_orders(cluster, run.job, [run])
            if run.stop_reason:
                orders.append(stop_order(cluster.jobs[run.job], run, run.stop_reason))
        elif run.node not in silent:
            reason = f"backend {backend} does not know this run any more"
            facts.append(RunObserved(run.id, "lost", now_ms, reason_code="lost", reason=reason))
    for id, seen in known.items():
        if id not in own or own[id].state in RUN_ENDED:
            if seen.state in RUN_ENDED:
                orders.append(Forget(id, backend))
            else:
                orders.append(Stop(id, backend, 0, NOT_WANTED))  # of an attempt that is over
    return facts, orders
