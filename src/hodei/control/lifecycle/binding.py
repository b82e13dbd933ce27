"""Placements become runs, with a rank each, and orders to start them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hodei.control.lifecycle.run_orders import start_orders
from hodei.control.state import ClusterState
from hodei.engine.plan import Bind, Plan
from hodei.engine.points import Placed
from hodei.engine.view import Gang
from hodei.model.ids import run_id
from hodei.model.job import Job, Run
from hodei.model.lifecycle import RUN_ENDED


def bind(world: ClusterState, gang: Gang, placements: Sequence[Placed], plan: Plan, now_ms: int) -> Job:
    """The placements become runs: a new attempt of the whole job, or members that join the one that runs."""
    job = world.jobs[gang.id]
    if world.keeps_book:
        world.book.withdraw(gang.id)
        world.estimates[gang.id] = gang.estimate_ms
    attempt = job.attempt + 1
    nodes = sorted({placed.node.name for placed in placements}) if len(placements) > 1 else [placements[0].node.name]
    ranks: _Ranks | None = None  # none has one yet: they are numbered through
    if gang.joins:
        ranks = _Ranks(world.runs.get(job.id, {}).values())
        places = nodes_of({*nodes, *(run.node for run in world.live_runs(job.id))})
        job = world.change_job(job, now_ms, attempt=attempt, not_before_ms=0, nodes=places)
    else:
        job = world.change_job(
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
        world.drop_runs(job.id)
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
        world.add_run(run, new=True)
        runs.append(run)
    for order in start_orders(world, job.id, runs, None if gang.joins else runs):
        world.act(order)
    if gang.joins:
        world.tell("gang.joined", now_ms, job=job.id, attempt=attempt, members=[run.member for run in runs][:20])
    else:
        how = {"start": gang.kind} if gang.kind else {}
        world.tell("job.scheduled", now_ms, job=job.id, attempt=attempt, nodes=nodes[:20], **how)
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
