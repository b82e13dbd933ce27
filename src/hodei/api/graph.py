"""The graph of what jobs wait for, as the API answers with it: of one job all that it waits for and all that wait for it."""

from __future__ import annotations

from msgspec import Struct

from hodei.model.job import Job

MOST_JOBS = 10_000
MOST_EDGES = 100_000


class GraphJob(Struct, frozen=True, omit_defaults=True):
    """`need`: so many of what it waits for are enough; 0: all of it."""

    id: int
    name: str
    state: str
    project: str = ""
    reason_code: str = ""
    reason: str = ""
    need: int = 0


class GraphEdge(Struct, frozen=True, omit_defaults=True):
    """`job` waits for `awaited`, or (with `on: exists`) for the data `what`."""

    job: int
    on: str
    awaited: int = 0
    what: str = ""


class JobGraph(Struct, frozen=True):
    """`truncated`: there is more of it than was asked for, or than is ever answered with."""

    job: int
    jobs: list[GraphJob]
    edges: list[GraphEdge]
    truncated: bool = False


def graph_of(job: int, jobs: list[Job], *, truncated: bool) -> JobGraph:
    """Jobs in order of id, with the edges between them; who is not among them is not drawn."""
    known = {each.id for each in jobs}
    jobs = sorted(jobs, key=lambda each: each.id)
    edges = [
        GraphEdge(each.id, one.on, one.job, one.what)
        for each in jobs
        for one in each.spec.after.of
        if one.on == "exists" or one.job in known
    ]
    views = [
        GraphJob(
            each.id, each.spec.name, each.state, each.spec.project, each.reason_code, each.reason, each.spec.after.need
        )
        for each in jobs
    ]
    return JobGraph(job, views, edges[:MOST_EDGES], truncated or len(edges) > MOST_EDGES)
