"""Commands on submitted jobs: suspend, resume, checkpoint and migrate one; cancel, hold, release and wait for an array;
requeue many.

A command that is not possible is refused at once, with the reason. Otherwise its facts are durable when it returns: one
commit, however many jobs they concern.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from hodei.control.lifecycle.dependencies import NEVER_MET, TIMED_OUT
from hodei.control.lifecycle.nodes import can_move
from hodei.control.state import chunks
from hodei.model.array import ArrayElement, shell_reference
from hodei.model.errors import Conflict, NotFound, NotPermitted, Unsupported, did_you_mean
from hodei.model.facts import (
    Fact,
    JobCancelled,
    JobCheckpointRequested,
    JobHeld,
    JobMigrated,
    JobReleased,
    JobRequeued,
    JobSuspended,
)
from hodei.model.ids import JobId
from hodei.model.job import JOB_ENDED, Job
from hodei.ports import JobQuery, Store
from hodei.runtime.dependency_lookup import read_jobs
from hodei.runtime.rights import CALLER

if TYPE_CHECKING:
    from hodei.runtime.service import Service

_DOCS = "docs/how-to/checkpoints.md"
_PAGE = 200
# Limit on the dependents that one requeue follows.
MAX_DEPENDENTS = 100_000
_FAILED_WAITING = (NEVER_MET, TIMED_OUT)


async def suspend(service: Service, job: JobId) -> Job:
    """A pending job is held; a running one takes a checkpoint, gives up its nodes, and is then held."""
    found = await _own_job(service, job)
    if found.state in JOB_ENDED:
        raise Conflict(f"job {job} has already {found.state}", hint="there is nothing left to suspend")
    if found.cancel_requested:
        raise Conflict(f"job {job} is being cancelled", hint="it can be requeued when it has ended")
    if found.state == "held" or found.suspend_requested:
        return found
    return await service.apply(job, JobSuspended(job))


async def resume(service: Service, job: JobId) -> Job:
    found = await _own_job(service, job)
    if found.state != "held" and not found.suspend_requested:
        hint = f"hodei job show {shell_reference(job, found.spec.array)}"
        raise Conflict(f"job {job} is {found.state}, not suspended", hint=hint)
    return await service.apply(job, JobReleased(job))


async def checkpoint(service: Service, job: JobId) -> Job:
    """Its runs take a checkpoint now and continue."""
    found = await _own_job(service, job)
    if not found.spec.checkpoint.has_hook:
        raise Conflict(
            f"job {job} does not define how to take a checkpoint",
            hint=f"set `checkpoint: {{signal: USR1}}` or a command in its job file; see {_DOCS}",
            code="NO_CHECKPOINT",
        )
    if found.state != "running":
        raise Conflict(f"job {job} is {found.state}; only a running job can take a checkpoint", code="NOT_RUNNING")
    names = {run.backend for run in service.controller.cluster.live_runs(job)}
    manager = service.backend_manager
    backends = [manager.backends[name] for name in sorted(names) if name in manager.backends]
    if backends and not any(backend.capabilities.checkpoint for backend in backends):
        listed = ", ".join(f"backend {backend.name} ({backend.kind})" for backend in backends)
        raise Unsupported(
            f"{listed} cannot request a checkpoint",
            hint=f"`hodei backend show NAME` lists what a backend can do; a job may take checkpoints by itself; see {_DOCS}",
        )
    return await service.apply(job, JobCheckpointRequested(job))


async def migrate(service: Service, job: JobId, to: str = "", force: bool = False) -> Job:
    """Stops the job and starts it on other nodes. Conflict if no other node could take it now, unless `force`."""
    found = await _own_job(service, job)
    cluster, relocation = service.controller.cluster, service.controller.relocation
    known = cluster.jobs.get(job)
    if known is None or not can_move(known):
        state = "being stopped" if found.state in ("scheduled", "running") else found.state
        raise Conflict(f"job {job} is {state}; only a running job can be moved", code="NOT_RUNNING")
    if to and to not in cluster.nodes:
        raise NotFound(f"there is no node {to!r}{did_you_mean(to, sorted(cluster.nodes))}", hint="hodei nodes")
    if to and all(run.node == to for run in cluster.live_runs(job)):
        raise Conflict(f"job {job} is already on {to}")
    reason = relocation.refusal(known, to, service.clock.now_ms())
    if reason and not force:
        raise Conflict(
            f"job {job} cannot be moved: {reason}",
            hint="--force stops it nevertheless; it then waits until there is capacity",
            code="NO_OTHER_NODE",
        )
    return await service.apply(job, JobMigrated(job, to, force))


async def _own_job(service: Service, job: JobId) -> Job:
    found = await service.job(job)
    # Checked first: a caller who may not change the job learns nothing else about it.
    service.rights.check_owner(found)
    return found


class ArrayStatus(Struct, frozen=True):
    """An array: one of its elements, and the number of elements by state."""

    job: Job
    place: ArrayElement
    states: dict[str, int]


async def array_status(service: Service, id: JobId) -> ArrayStatus:
    """`id`: any element of the array."""
    found = await service.job(id)
    place = found.spec.array
    if place is None or not place.first:
        raise NotFound(f"job {id} is not an element of an array", hint=f"hodei job show {id}", code="NO_SUCH_ARRAY")
    states = await service.read(service.store.states_between, place.first, place.last)
    return ArrayStatus(found, place, states)


async def cancel_array(service: Service, id: JobId, reason: str) -> ArrayStatus:
    return await _apply_to_elements(
        service, id, lambda job, by: JobCancelled(job.id, reason, by=by), lambda job: not job.cancel_requested
    )


async def hold_array(service: Service, id: JobId) -> ArrayStatus:
    return await _apply_to_elements(
        service, id, lambda job, by: JobHeld(job.id, by=by), lambda job: job.state == "pending"
    )


async def release_array(service: Service, id: JobId) -> ArrayStatus:
    return await _apply_to_elements(
        service, id, lambda job, by: JobReleased(job.id, by=by), lambda job: job.state == "held", first_to_last=True
    )


async def wait_array(service: Service, id: JobId, timeout_ms: int) -> ArrayStatus:
    """The status when every element has ended, or at the timeout."""
    status = await array_status(service, id)
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            # One after the other is as fast as all at once: it ends with the slowest.
            for element in range(status.place.first, status.place.last + 1):
                while element in service.controller.cluster.jobs:
                    await service.wait(element, timeout_ms)
    except TimeoutError:
        pass
    return await array_status(service, id)


async def _apply_to_elements(
    service: Service,
    id: JobId,
    fact: Callable[[Job, str], Fact],
    applies: Callable[[Job], bool],
    *,
    first_to_last: bool = False,
) -> ArrayStatus:
    status = await array_status(service, id)
    known, facts = service.controller.cluster.jobs, list[Fact]()
    caller = CALLER.get()
    by = caller.entry.who if caller is not None else ""
    # Last first by default: an element that leaves the queue would let the next one start, which is about to leave too.
    # Released elements go first to last, so that they queue in order.
    elements = range(status.place.first, status.place.last + 1)
    for part in chunks(elements if first_to_last else reversed(elements)):
        facts += [fact(known[job], by) for job in part if job in known and applies(known[job])]
        await asyncio.sleep(0)
    if not facts:
        # An earlier command may still be on its way into the store: report the state after it.
        await service.loop.commit(())
        status = await array_status(service, id)
        counts = ", ".join(f"{count} {state}" for state, count in status.states.items())
        raise Conflict(
            f"this applies to no element of array {status.place.first}: {counts or 'all of them were pruned'}"
        )
    await service.loop.commit(facts)
    return await array_status(service, id)


class JobRow(Struct, frozen=True):
    """A job, or with `states` the array that it represents."""

    job: Job
    states: dict[str, int] | None = None


def list_folded(store: Store, query: JobQuery) -> tuple[list[JobRow], JobId]:
    """One page of jobs, newest first, and where the next page starts. Each array is one row, at its newest element that
    matches; its size does not matter for the cost. Blocks."""
    rows: list[JobRow] = []
    after = query.after
    while True:
        page = store.jobs(structs.replace(query, after=after, limit=min(query.limit - len(rows), _PAGE)))
        after = page.next_after
        skip_from = 0  # elements with ids from here on belong to an array that has its row
        for job in page.jobs:
            place = job.spec.array
            if skip_from and job.id >= skip_from:
                continue
            states = None
            if place is not None and place.first:
                states = store.states_between(place.first, place.last)
                skip_from = place.first
            rows.append(JobRow(job, states))
        if after and skip_from:
            after = min(after, skip_from)
        if not after or len(rows) >= query.limit:
            return rows, after


class Requeued(Struct, frozen=True):
    """`revived`: dependents that had failed waiting for a requeued job. `refused`: jobs that the caller may not requeue, and
    why; they are unchanged."""

    requeued: list[JobId]
    revived: list[JobId]
    refused: dict[JobId, NotPermitted]


async def requeue_all(
    service: Service,
    jobs: Sequence[JobId],
    arrays: Sequence[JobId] = (),
    *,
    failed: bool = False,
    permitted: bool = False,
) -> Requeued:
    """Starts these jobs and the elements of these arrays again, in one commit; jobs that have not started stay as they are.

    `failed`: only failed jobs, and with them the jobs that failed because they waited for one of them. `permitted`: only
    those that exist and that the caller may requeue, instead of refusing all.
    """
    wanted = list(jobs)
    for id in arrays:
        place = (await array_status(service, id)).place
        wanted += range(place.first, place.last + 1)
    found = await _read_jobs(service, wanted)
    missing = sorted(set(jobs) - found.keys())
    if missing and not permitted:
        raise NotFound(f"there is no job {missing[0]}", hint="hodei jobs --all")
    states = ("failed",) if failed else (*JOB_ENDED, "scheduled", "running")
    chosen: list[Job] = []
    for some in chunks(dict.fromkeys(wanted)):
        chosen += [found[id] for id in some if id in found and found[id].state in states]
        await asyncio.sleep(0)
    refused: dict[JobId, NotPermitted] = {}
    if permitted:
        chosen = [job for job in chosen if _may_requeue(service, job, refused)]
    revived = await _failed_dependents(service, chosen, refused) if failed else []
    facts: list[Fact] = []
    # Awaited jobs first, so that their dependents find them in the queue.
    for part in chunks((*chosen, *revived)):
        for job in part:
            record = job if job.state in JOB_ENDED else None
            facts.append(JobRequeued(job.id, record, await service.dependency_lookup.of_record(record)))
        await asyncio.sleep(0)
    if facts:
        await service.loop.commit(facts)
    return Requeued([job.id for job in chosen], [job.id for job in revived], refused)


def _may_requeue(service: Service, job: Job, refused: dict[JobId, NotPermitted]) -> bool:
    """If not, the reason is added to `refused`."""
    caller = CALLER.get()
    try:
        if caller is not None:
            service.rights.check(caller, [JobRequeued(job.id, job)], ())
    except NotPermitted as error:
        refused[job.id] = error
        return False
    return True


async def _failed_dependents(service: Service, failed: Iterable[Job], refused: dict[JobId, NotPermitted]) -> list[Job]:
    """Jobs that failed because of these, transitively, nearest first. Those that the caller may not requeue are added to
    `refused`."""
    seen = {job.id for job in failed}
    front, revived = sorted(seen), list[Job]()
    while front and len(seen) < MAX_DEPENDENTS:
        edges = await service.read(service.store.dependents, front, MAX_DEPENDENTS)
        dependents = await _read_jobs(service, [dependent for _, dependent in edges if dependent not in seen])
        seen.update(dependents)
        front = []
        for job in dependents.values():
            if job.state not in JOB_ENDED or job.reason_code not in _FAILED_WAITING:
                continue
            if _may_requeue(service, job, refused):
                revived.append(job)
                front.append(job.id)
    return revived


async def _read_jobs(service: Service, ids: Iterable[JobId]) -> dict[JobId, Job]:
    """Those that the store has, by number."""
    return await service.read(
        lambda: {job.id: job for job in sorted(read_jobs(service.store, ids), key=lambda job: job.id)}
    )
