"""What time has to do with it: how long a job should take, what it was promised, and who else was promised what it wants."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from hodei.control.controller import Controller
from hodei.control.state import ClusterState
from hodei.engine.availability import FOREVER, Claim, corrected_end
from hodei.engine.cycle import Engine
from hodei.engine.plan import Refusal
from hodei.engine.view import Gang, Member, View
from hodei.model.explanation import Explanation, ReservedStart
from hodei.model.ids import NodeName, RunId
from hodei.model.job import Job
from hodei.model.node import Grant
from hodei.model.reservation import CapacityHold

_SHOWN = 5


def holds_on(cluster: ClusterState, node: NodeName) -> tuple[CapacityHold, ...]:
    """All that is spoken for of a node, the soonest first."""
    claims = sorted(cluster.availability.claims_on(node), key=lambda claim: (claim.start_ms, claim.job, claim.name))
    return tuple(_hold(node, claim) for claim in claims)


def in_time(controller: Controller, job: Job, answer: Explanation, now_ms: int) -> Explanation:
    """The answer with all that is known of time."""
    estimate = controller.estimator.estimate(job.spec)
    answer = structs.replace(answer, estimate=estimate if estimate.expected_ms else None)
    if job.state == "running" and estimate.expected_ms and job.started_ms:
        ends_ms = corrected_end(job.started_ms, estimate.expected_ms, now_ms)
        past_estimate = job.started_ms + estimate.expected_ms < now_ms
        return structs.replace(answer, expected_end_ms=ends_ms, past_estimate=past_estimate)
    if job.state != "pending":
        return answer
    start_reservation = controller.cluster.availability.start_reservations.get(job.id)
    if start_reservation is not None:
        nodes = tuple(node for node, _ in start_reservation.places)
        return structs.replace(answer, start_reservation=ReservedStart(start_reservation.start_ms, nodes))
    line = controller.queues.get(job.spec.profile)
    gang = line.gangs.get(job.id) if line is not None else None
    if gang is None:
        return answer
    held_for = tuple(_held_for(controller, gang, now_ms))
    if held_for and not gang.estimate_ms and not answer.hint:
        answer = structs.replace(answer, hint="give it a timeout or an estimate: what is over by then may start before")
    return structs.replace(answer, held_for=held_for)


def _held_for(controller: Controller, gang: Gang, now_ms: int) -> Sequence[CapacityHold]:
    """Whose room it is on nodes that have enough for a member now; of each owner the first node."""
    availability, table = controller.cluster.availability, controller.cluster.table
    until_ms = now_ms + gang.estimate_ms if gang.estimate_ms else FOREVER
    found: dict[tuple[int, str], CapacityHold] = {}
    for node in sorted(availability.claimed):
        row = table.row.get(node)
        if row is None:
            continue
        room, used = table.allocatable[row], table.usage(row)
        for member in gang.members:
            request = {resource: amount for resource, amount in member.task.request.items() if amount}
            if any(room.get(resource, 0) - used.get(resource, 0) < amount for resource, amount in request.items()):
                continue
            claim = availability.first_conflict(node, request, now_ms, until_ms, gang.id, gang.job.project)
            if claim is not None:
                found.setdefault((claim.job, claim.name), _hold(node, claim))
        if len(found) >= _SHOWN:
            break
    return list(found.values())


def _hold(node: NodeName, claim: Claim) -> CapacityHold:
    return CapacityHold(node, claim.start_ms, claim.end_ms, claim.request, claim.job, claim.name, claim.project)


# ---------------------------------------------------------------------------------------- next release
# When waiting is enough: the end of work under way that would make room for a gang, by the estimates of that work.


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


def next_release(engine: Engine, cluster: ClusterState, gang: Gang, view: View) -> Release | None:
    """The first expected end after which the gang fits, all ends before it included; None if estimates do not tell.
    To be called inside `table.trial()`."""
    table = engine.table
    ends = _expected(engine, cluster, gang, view)
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


def _expected(engine: Engine, cluster: ClusterState, gang: Gang, view: View) -> list[Release]:
    """Runs with an estimate on nodes that only others' work keeps from the gang, the soonest end first."""
    table = engine.table
    open_rows = table.view().none()
    for member in gang.members:
        open_rows = open_rows | engine.open_to(gang, member, view)
    ends = []
    for row in open_rows.nonzero()[0].tolist():
        for id in cluster.on_node.get(table.names[row], ()):
            run = cluster.run(id)
            job = None if run is None else cluster.jobs.get(run.job)
            if run is not None and job is not None and job.spec.estimate_ms:
                at_ms = (run.started_ms or run.placed_ms) + job.spec.estimate_ms
                ends.append(Release(at_ms, id, job, row, Member(job.spec, job.spec.task_of(run.member)), run.grant))
    ends.sort(key=lambda end: (end.at_ms, end.run))
    return ends[:_ENDS]
