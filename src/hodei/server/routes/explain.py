"""Explanations: why a job waits, its priority, its dependency graph, plans and what-if queries. Nothing here changes state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from hodei.api.views import MAX_GRAPH_EDGES, MAX_GRAPH_JOBS, JobGraph, PlanReply, WhatIfRequest, graph_of
from hodei.control.explain.whatif import Question
from hodei.jobfile.parse import parse_job
from hodei.model.array import shell_reference
from hodei.model.errors import Conflict, InvalidInput, NotFound
from hodei.model.explanation import Explanation, PriorityBreakdown, WhatIf
from hodei.model.ids import JobId
from hodei.model.job import Job
from hodei.runtime.dependency_lookup import read_jobs
from hodei.server.route import API, JOB_ID, READ, Call, Param, Route
from hodei.server.routes.jobs import parse_specs

if TYPE_CHECKING:
    from hodei.ports import Store

MAX_PLANNED = 100
MAX_MEMBERS_PLANNED = 2000
_MAX_WHAT_IF_JOBS = 1000
_MAX_WHAT_IF_NODES = 1000
_what_if_request = msgspec.json.Decoder(WhatIfRequest)


async def why_job(call: Call) -> Explanation:
    return await call.service.why(call.args["id"], call.args["node"])


async def priority(call: Call) -> PriorityBreakdown:
    service, number = call.service, call.args["id"]
    found = await service.priority(number)
    if found is None:
        job = await service.job(number)
        hint = f"hodei why {shell_reference(number, job.spec.array)}"
        raise Conflict(f"job {number} is {job.state}: it is not in a queue", hint=hint)
    return found


async def plan(call: Call) -> PlanReply:
    specs = await parse_specs(call)
    members = sum(spec.size for spec in specs)
    if len(specs) > MAX_PLANNED or members > MAX_MEMBERS_PLANNED:
        # A plan runs between two steps of the scheduler and delays it and every other request.
        raise InvalidInput(
            f"too much for one plan: {len(specs)} jobs with {members} members, at most {MAX_PLANNED} with {MAX_MEMBERS_PLANNED}",
            hint="plan fewer, or use /whatif, which runs in its own process",
        )
    return PlanReply(await call.service.plan(specs))


async def what_if(call: Call) -> WhatIf:
    with call.shared.what_ifs.hold(call.limit_key):
        request = _what_if_request.decode(call.body)
        if len(request.jobs) > _MAX_WHAT_IF_JOBS or len(request.remove_nodes) > _MAX_WHAT_IF_NODES:
            raise InvalidInput(
                f"more than {_MAX_WHAT_IF_JOBS} jobs or {_MAX_WHAT_IF_NODES} nodes in one query", hint="ask about fewer"
            )
        if not (request.jobs or request.policy is not None or request.add_nodes or request.remove_nodes):
            raise InvalidInput("the query changes nothing", hint="give jobs, policy, add_nodes or remove_nodes")
        specs = [parse_job(document, now_ms=call.shared.now_ms()) for document in request.jobs]
        question = Question(
            tuple(structs.replace(spec, user=call.who.name) for spec in specs),
            request.add_nodes,
            request.like,
            tuple(request.remove_nodes),
        )
        return await call.service.what_if(question, request.policy)


async def show_graph(call: Call) -> JobGraph:
    return await call.service.read(dependency_graph, call.service.store, call.args["id"], call.args["limit"])


def dependency_graph(store: Store, job: JobId, limit: int) -> JobGraph:
    """Breadth first in both directions, so that the limit cuts off the farthest jobs. Blocks."""
    start = store.job(job)
    if start is None:
        raise NotFound(f"there is no job {job}", hint="hodei jobs --all")
    up, down = {job: start}, {job: start}
    front, truncated = [job], False
    while front and not truncated:  # dependencies
        dependencies = _unseen((one.job for id in front for one in up[id].spec.after.of if one.job), up)
        front, truncated = _add(store, dependencies, up, limit)
    front = [job]
    while front and not truncated:  # dependents
        edges = store.dependents(front, MAX_GRAPH_EDGES)
        dependents = _unseen((dependent for _, dependent in edges), down)
        front, truncated = _add(store, dependents, down, max(limit - len(up) + 1, 1))
        truncated = truncated or len(edges) >= MAX_GRAPH_EDGES
    return graph_of(job, list((up | down).values()), truncated=truncated)


def _unseen(ids: Iterable[JobId], seen: dict[JobId, Job]) -> list[JobId]:
    return [id for id in dict.fromkeys(ids) if id not in seen]


def _add(store: Store, ids: list[JobId], to: dict[JobId, Job], limit: int) -> tuple[list[JobId], bool]:
    """Adds the jobs that the store has; their ids, and whether the limit cut some off."""
    room = max(limit - len(to), 0)
    found = {job.id: job for job in read_jobs(store, ids[:room])}
    to.update(found)
    return sorted(found), len(ids) > room


ROUTES = (
    Route("GET", f"{API}/jobs/{{id}}/why", READ, "Why a job waits, or why it was placed there", why_job,
          response=Explanation, params=(JOB_ID, Param("node", "only the reasons of this node", default=""))),
    Route("GET", f"{API}/jobs/{{id}}/priority", READ, "The terms of its priority in the queue", priority,
          response=PriorityBreakdown, params=(JOB_ID,)),
    Route(
        "GET", f"{API}/jobs/{{id}}/graph", READ, "Its dependencies and dependents", show_graph, response=JobGraph,
        params=(
            JOB_ID,
            Param("limit", "jobs at most, nearest first", type=int, default=MAX_GRAPH_JOBS, minimum=1, maximum=MAX_GRAPH_JOBS),
        ),
    ),
    Route("POST", f"{API}/plan", READ, "What would happen to these jobs, without submitting them", plan,
          request=bytes, response=PlanReply, read_only=True),
    Route("POST", f"{API}/whatif", READ, "Which jobs would start when after a change, without making it", what_if,
          request=WhatIfRequest, response=WhatIf, concurrency="long", read_only=True),
)  # fmt: skip
