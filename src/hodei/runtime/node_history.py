"""Which runs held room on a node, from when to when, and how much of the node that was. From the store, in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from hodei.engine.nodes import allocatable
from hodei.model.ids import NodeName
from hodei.model.job import Job, Run
from hodei.model.resources import Resources
from hodei.ports import JobQuery, NodeRunsQuery, RunKey

if TYPE_CHECKING:
    from hodei.runtime.service import Service


class Held(Struct, frozen=True):
    """A run and what it held. `job` is None if its record is gone."""

    run: Run
    job: Job | None
    request: Resources


class NodeHistory(Struct, frozen=True):
    """`busy_ms`: for how long the whole of a resource would have been held by the runs of this page within the span, by
    what the node has now; pages add up. Empty if the node is not there any more."""

    held: list[Held]
    since_ms: int
    until_ms: int
    busy_ms: dict[str, int]
    known: bool
    next_after: RunKey | None = None


async def node_history(
    service: Service, node: NodeName, since_ms: int, until_ms: int, after: RunKey | None, limit: int
) -> NodeHistory:
    now_ms = service.clock.now_ms()
    until_ms = min(until_ms or now_ms, now_ms)
    query = NodeRunsQuery(node, since_ms, until_ms, after, limit)
    page = await service.browse(service.store.runs_on, query)
    ids = tuple({run.job for run in page.runs})
    jobs = {}
    if ids:
        found = await service.browse(service.store.jobs, JobQuery(ids=ids, limit=len(ids)))
        jobs = {job.id: job for job in found.jobs}
    held = [_held(run, jobs.get(run.job)) for run in page.runs]
    there = service.controller.cluster.table.node(node)
    room = allocatable(there) if there is not None else {}
    busy: dict[str, int] = {}
    for one in held:
        span_ms = max(0, min(one.run.finished_ms or until_ms, until_ms) - max(one.run.placed_ms, since_ms))
        for resource, amount in one.request.items():
            if whole := room.get(resource, 0):
                busy[resource] = busy.get(resource, 0) + span_ms * amount // whole
    return NodeHistory(held, since_ms, until_ms, busy, there is not None, page.next_after)


def _held(run: Run, job: Job | None) -> Held:
    known = job is not None and job.spec.has_member(run.member)
    return Held(run, job, job.spec.task_of(run.member).request if job is not None and known else {})
