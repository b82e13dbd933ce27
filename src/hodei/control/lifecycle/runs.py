"""Placements become runs, with a rank each, and orders to start them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hodei.control.state import ClusterState
from hodei.engine.plan import Bind, Plan
from hodei.engine.points import Placed
from hodei.engine.view import Gang
from hodei.model.effects import Forget, Start, Stop
from hodei.model.facts import RunObserved
from hodei.model.ids import JobId, RunId, run_id
from hodei.model.job import RUN_ENDED, Job, Run
from hodei.model.outcome import MOVED, StopReason

# ------------------------------------------------------------------------------------------ run orders
# Orders to start and stop runs, with all that a backend needs to know in them.


# Past this many members each is told the first address only: all of them in every order would be too much.
_ADDRESSES_TOLD = 1000


def start_orders(
    cluster: ClusterState, job: JobId, runs: Iterable[Run], together: Sequence[Run] | None = None
) -> list[Start]:
    """Orders for runs of one job, with the size and the addresses of the gang as it will be then.
    `together`: all that are live then, by rank, from a caller who knows them."""
    spec = cluster.jobs[job].spec
    if together is None:
        together = sorted(cluster.live_runs(job), key=lambda run: run.rank)
    told = together if len(together) <= _ADDRESSES_TOLD else together[:1]
    nodes = [cluster.nodes.get(run.node) for run in told]
    known = tuple([node.address for node in nodes if node is not None and node.address])
    addresses = known if len(known) == len(nodes) else ()
    names = tuple([run.node for run in told]) if 1 < len(together) == len(told) else ()
    return [Start(run, spec, spec.task_of(run.member), len(together), addresses, names) for run in runs]


def stop_order(job: Job, run: Run, reason: StopReason) -> Stop:
    saved_first = job.spec.checkpoint.has_hook and (reason.gang or reason.code in MOVED)
    return Stop(run.id, run.backend, job.spec.grace_ms, reason, job.spec.checkpoint if saved_first else None)


# ----------------------------------------------------------------------------------------------------


def bind(cluster: ClusterState, gang: Gang, placements: Sequence[Placed], plan: Plan, now_ms: int) -> Job:
    """The placements become runs: a new attempt of the whole job, or members that join the one that runs."""
    job = cluster.jobs[gang.id]
    if cluster.tracks_availability:
        cluster.availability.remove_start_reservation(gang.id)
        cluster.estimates[gang.id] = gang.estimate_ms
    attempt = job.attempt + 1
    nodes = sorted({placed.node.name for placed in placements}) if len(placements) > 1 else [placements[0].node.name]
    ranks: _Ranks | None = None  # none has one yet: they are numbered through
    if gang.joins:
        ranks = _Ranks(cluster.runs.get(job.id, {}).values())
        places = nodes_of({*nodes, *(run.node for run in cluster.live_runs(job.id))})
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
            move="",
            nodes=nodes_of(nodes),
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
        )
        cluster.add_run(run, new=True)
        runs.append(run)
    for order in start_orders(cluster, job.id, runs, None if gang.joins else runs):
        cluster.act(order)
    if gang.joins:
        cluster.emit(
            "gang.member_joined", now_ms, job=job.id, attempt=attempt, members=[run.member for run in runs][:20]
        )
    else:
        how = {"start": gang.kind} if gang.kind else {}
        cluster.emit("job.scheduled", now_ms, job=job.id, attempt=attempt, nodes=nodes[:20], **how)
    return job


def nodes_of(names: Iterable[str]) -> str:
    """As a job keeps them: the first of them, in order."""
    return " ".join(sorted(names)[:20])


class _Ranks:
    """Numbers for members: the one that it had before, else the lowest that is free."""

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


# ------------------------------------------------------------------------------------------- reconcile
# After a crash or an outage: what we believe of a backend's runs against what the backend says.


NOT_WANTED = StopReason("not_wanted")


def reconcile(
    cluster: ClusterState, backend: str, known: Mapping[RunId, RunObserved], now_ms: int
) -> tuple[list[RunObserved], list[Start | Stop | Forget]]:
    """Facts to learn and orders to give, so that both sides agree again."""
    facts: list[RunObserved] = []
    orders: list[Start | Stop | Forget] = []
    ours = {run.id: run for runs in cluster.runs.values() for run in runs.values() if run.backend == backend}
    for run in ours.values():
        if run.state in RUN_ENDED:
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
        else:
            reason = f"backend {backend} no longer knows of it"
            facts.append(RunObserved(run.id, "lost", now_ms, reason_code="lost", reason=reason))
    for id, seen in known.items():
        if id not in ours or ours[id].state in RUN_ENDED:
            if seen.state in RUN_ENDED:
                orders.append(Forget(id, backend))
            else:
                # Nobody here wants it any more: it belongs to an attempt that is over.
                orders.append(Stop(id, backend, 0, NOT_WANTED))
    return facts, orders
