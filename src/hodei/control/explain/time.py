"""What time has to do with it: how long a job should take, what it was promised, and who else was promised what it wants."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from hodei.control.controller import Controller
from hodei.control.state import ClusterState
from hodei.engine.availability import FOREVER, Claim, corrected_end
from hodei.engine.view import Gang
from hodei.model.explanation import Explanation, Promised
from hodei.model.ids import NodeName
from hodei.model.job import Job
from hodei.model.reservation import Hold

_SHOWN = 5


def holds_on(world: ClusterState, node: NodeName) -> tuple[Hold, ...]:
    """All that is spoken for of a node, the soonest first."""
    claims = sorted(world.book.claims_on(node), key=lambda claim: (claim.start_ms, claim.job, claim.name))
    return tuple(_hold(node, claim) for claim in claims)


def in_time(controller: Controller, job: Job, answer: Explanation, now_ms: int) -> Explanation:
    """The answer with all that is known of time."""
    estimate = controller.estimator.estimate(job.spec)
    answer = structs.replace(answer, estimate=estimate if estimate.expected_ms else None)
    if job.state == "running" and estimate.expected_ms and job.started_ms:
        ends_ms = corrected_end(job.started_ms, estimate.expected_ms, now_ms)
        outlived = job.started_ms + estimate.expected_ms < now_ms
        return structs.replace(answer, expected_end_ms=ends_ms, outlived=outlived)
    if job.state != "pending":
        return answer
    promise = controller.world.book.promises.get(job.id)
    if promise is not None:
        nodes = tuple(node for node, _ in promise.places)
        return structs.replace(answer, promise=Promised(promise.start_ms, nodes))
    line = controller.lines.get(job.spec.profile)
    gang = line.gangs.get(job.id) if line is not None else None
    if gang is None:
        return answer
    held_for = tuple(_held_for(controller, gang, now_ms))
    if held_for and not gang.estimate_ms and not answer.hint:
        answer = structs.replace(answer, hint="give it a timeout or an estimate: what is over by then may start before")
    return structs.replace(answer, held_for=held_for)


def _held_for(controller: Controller, gang: Gang, now_ms: int) -> Sequence[Hold]:
    """Whose room it is on nodes that have enough for a member now; of each owner the first node."""
    book, table = controller.world.book, controller.world.table
    until_ms = now_ms + gang.estimate_ms if gang.estimate_ms else FOREVER
    found: dict[tuple[int, str], Hold] = {}
    for node in sorted(book.claimed):
        row = table.row.get(node)
        if row is None:
            continue
        room, used = table.room[row], table.usage(row)
        for member in gang.members:
            request = {resource: amount for resource, amount in member.task.request.items() if amount}
            if any(room.get(resource, 0) - used.get(resource, 0) < amount for resource, amount in request.items()):
                continue
            claim = book.hindered(node, request, now_ms, until_ms, gang.id, gang.job.project)
            if claim is not None:
                found.setdefault((claim.job, claim.name), _hold(node, claim))
        if len(found) >= _SHOWN:
            break
    return list(found.values())


def _hold(node: NodeName, claim: Claim) -> Hold:
    return Hold(node, claim.start_ms, claim.end_ms, claim.request, claim.job, claim.name, claim.project)
