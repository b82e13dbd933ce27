"""When waiting is enough: the end of work under way that would make room for a gang, by the estimates of that work."""

from __future__ import annotations

from msgspec import Struct

from hodei.control.state import ClusterState
from hodei.engine.cycle import Engine
from hodei.engine.plan import Refusal
from hodei.engine.view import Gang, Member, View
from hodei.model.ids import RunId
from hodei.model.job import Job
from hodei.model.node import Grant

# The soonest ends that are looked at; further away an estimate says little.
_ENDS = 1000


class Release(Struct, frozen=True):
    """A run that is expected to end, and the room that it will leave."""

    at_ms: int
    run: RunId
    job: Job
    row: int
    member: Member
    grant: Grant | None = None


def next_release(engine: Engine, world: ClusterState, gang: Gang, view: View) -> Release | None:
    """The first expected end after which the gang fits, all ends before it included; None if estimates do not tell.
    To be called inside `table.trial()`."""
    table = engine.table
    ends = _expected(engine, world, gang, view)
    bench = Engine(table, {gang.job.profile: engine.profile(gang)})
    gone = 0

    def fits_after(number: int) -> bool:
        nonlocal gone
        for end in ends[gone:number]:
            table.release(end.row, end.member.task.request, end.member, end.grant)
        for end in ends[number:gone]:
            table.place(end.row, end.member.task.request, end.member, end.grant)
        gone = number
        result = bench.place(gang, view, search=False)
        if isinstance(result, Refusal):
            return False
        bench.withdraw(gang, result)
        return True

    low, high = 1, len(ends)
    try:
        if not ends or not fits_after(high):
            return None
        while low < high:
            middle = (low + high) // 2
            if fits_after(middle):
                high = middle
            else:
                low = middle + 1
        return ends[low - 1]
    finally:
        for end in ends[:gone]:
            table.place(end.row, end.member.task.request, end.member, end.grant)


def _expected(engine: Engine, world: ClusterState, gang: Gang, view: View) -> list[Release]:
    """Runs with an estimate on nodes that only others' work keeps from the gang, the soonest end first."""
    table = engine.table
    open_rows = table.view().none()
    for member in gang.members:
        open_rows = open_rows | engine.open_to(gang, member, view)
    ends = []
    for row in open_rows.nonzero()[0].tolist():
        for id in world.on_node.get(table.names[row], ()):
            run = world.run(id)
            job = None if run is None else world.jobs.get(run.job)
            if run is not None and job is not None and job.spec.estimate_ms:
                at_ms = (run.started_ms or run.placed_ms) + job.spec.estimate_ms
                ends.append(Release(at_ms, id, job, row, Member(job.spec, job.spec.task_of(run.member)), run.grant))
    ends.sort(key=lambda end: (end.at_ms, end.run))
    return ends[:_ENDS]
