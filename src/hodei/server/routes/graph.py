"""What a job waits for and who waits for it, as a graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hodei.api.graph import MOST_EDGES, MOST_JOBS, JobGraph, graph_of
from hodei.model.errors import NotFound
from hodei.model.ids import JobId
from hodei.model.job import Job
from hodei.ports import JobQuery
from hodei.server.route import API, READ, Call, Param, Route

if TYPE_CHECKING:
    from hodei.ports import Store

_PAGE = 1000


async def show_graph(call: Call) -> JobGraph:
    return await call.service.read(graph, call.service.store, call.args["id"], call.args["limit"])


def graph(store: Store, job: JobId, limit: int) -> JobGraph:
    """Breadth first along both directions, so that what is left out is what is farthest away. Blocks."""
    start = store.job(job)
    if start is None:
        raise NotFound(f"there is no job {job}", hint="hodei jobs -a")
    up, down = {job: start}, {job: start}
    front, truncated = [job], False
    while front and not truncated:  # what it waits for
        wanted = _new((one.job for id in front for one in up[id].spec.after.of if one.job), up)
        front, truncated = _take(store, wanted, up, limit)
    front = [job]
    while front and not truncated:  # who waits for it
        edges = store.dependents(front, MOST_EDGES)
        waiting = _new((waiter for _, waiter in edges), down)
        front, truncated = _take(store, waiting, down, max(limit - len(up) + 1, 1))
        truncated = truncated or len(edges) >= MOST_EDGES
    return graph_of(job, list((up | down).values()), truncated=truncated)


def _new(ids: Iterable[JobId], known: dict[JobId, Job]) -> list[JobId]:
    return [id for id in dict.fromkeys(ids) if id not in known]


def _take(store: Store, ids: list[JobId], into: dict[JobId, Job], limit: int) -> tuple[list[JobId], bool]:
    """Those of them that the store still has, and whether there was no room for all."""
    room = max(limit - len(into), 0)
    taken: list[JobId] = []
    for first in range(0, min(len(ids), room), _PAGE):
        some = tuple(ids[first : min(first + _PAGE, room)])
        for found in store.jobs(JobQuery(ids=some, limit=_PAGE)).jobs:
            into[found.id] = found
            taken.append(found.id)
    return sorted(taken), len(ids) > room


ROUTES = (
    Route(
        "GET", f"{API}/jobs/{{id}}/graph", READ, "What the job waits for and who waits for it", show_graph,
        response=JobGraph,
        params=(
            Param("id", "the job's number", type=int, where="path", minimum=1),
            Param("limit", "at most so many jobs, the nearest first", type=int, default=MOST_JOBS, minimum=1,
                  maximum=MOST_JOBS),
        ),
    ),
)  # fmt: skip
