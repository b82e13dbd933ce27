"""What may be asked of a job while it lives: suspend it, let it go on, have it save its work, move it.

Whoever asks is told at once why it cannot be done; what can be done becomes a fact, and is stored when these return.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from hodei.control.lifecycle.dependencies import NEVER_MET, TIMED_OUT
from hodei.control.lifecycle.nodes import can_move
from hodei.control.state import chunks
from hodei.model.array import shell_reference
from hodei.model.errors import Conflict, NotFound, NotPermitted, Unsupported, did_you_mean
from hodei.model.facts import Fact, JobCheckpointRequested, JobMigrated, JobReleased, JobRequeued, JobSuspended
from hodei.model.ids import JobId
from hodei.model.job import JOB_ENDED, Job
from hodei.ports import JobQuery
from hodei.runtime import arrays
from hodei.runtime.rights import CALLER

if TYPE_CHECKING:
    from hodei.runtime.service import Service

if TYPE_CHECKING:
    from hodei.runtime.service import Service

_DOCS = "docs/how-to/checkpoints.md"


async def suspend(service: Service, job: JobId) -> Job:
    """A waiting job is held; a running one saves its work, lets go of its nodes, and is held then."""
    found = await _stored(service, job)
    if found.state in JOB_ENDED:
        raise Conflict(f"job {job} has {found.state} already", hint="there is nothing left to suspend")
    if found.cancel_requested:
        raise Conflict(f"job {job} is being cancelled", hint="it can be requeued when it has ended")
    if found.state == "held" or found.suspend_requested:
        return found
    return await _changed(service, job, JobSuspended(job))


async def resume(service: Service, job: JobId) -> Job:
    found = await _stored(service, job)
    if found.state != "held" and not found.suspend_requested:
        hint = f"hodei job show {shell_reference(job, found.spec.array)}"
        raise Conflict(f"job {job} is {found.state}, not suspended", hint=hint)
    return await _changed(service, job, JobReleased(job))


async def save_work(service: Service, job: JobId) -> Job:
    """Its runs are told to save their work now, and go on."""
    found = await _stored(service, job)
    if not found.spec.checkpoint.has_hook:
        raise Conflict(
            f"job {job} does not say how its work is saved",
            hint=f"give its file `checkpoint: {{signal: USR1}}` or a command; see {_DOCS}",
            code="NO_CHECKPOINT",
        )
    if found.state != "running":
        raise Conflict(f"job {job} is {found.state}; only a running job can save its work", code="NOT_RUNNING")
    _check_can_save(service, job)
    return await _changed(service, job, JobCheckpointRequested(job))


def _check_can_save(service: Service, job: JobId) -> None:
    """Unsupported if no run of it is on a backend that can tell it to."""
    names = {run.backend for run in service.controller.cluster.live_runs(job)}
    backends = [service.fleet.backends[name] for name in sorted(names) if name in service.fleet.backends]
    if backends and not any(backend.capabilities.checkpoint for backend in backends):
        told = ", ".join(f"backend {backend.name} ({backend.kind})" for backend in backends)
        raise Unsupported(
            f"{told} cannot let a run save its work",
            hint=f"`hodei backend show NAME` lists what a backend can do; a job may save its work by itself; see {_DOCS}",
        )


async def migrate(service: Service, job: JobId, to: str = "", force: bool = False) -> Job:
    """It leaves its nodes for others. Refused, with the reason, if no other could take it now, unless `force`."""
    found = await _stored(service, job)
    cluster, moving = service.controller.cluster, service.controller.relocation
    known = cluster.jobs.get(job)
    if known is None or not can_move(known):
        state = "on its way out" if found.state in ("scheduled", "running") else found.state
        raise Conflict(f"job {job} is {state}; only a running job can be moved", code="NOT_RUNNING")
    if to and to not in cluster.nodes:
        raise NotFound(f"there is no node {to!r}{did_you_mean(to, sorted(cluster.nodes))}", hint="hodei nodes")
    if to and all(run.node == to for run in cluster.live_runs(job)):
        raise Conflict(f"job {job} is on {to} already")
    reason = moving.refusal(known, to, service.clock.now_ms())
    if reason and not force:
        raise Conflict(
            f"job {job} stays where it is: {reason}",
            hint="add --force to stop it all the same; it then waits until there is room",
            code="NO_OTHER_NODE",
        )
    return await _changed(service, job, JobMigrated(job, to, force))


async def _stored(service: Service, job: JobId) -> Job:
    found = await service.read(service.store.job, job)
    if found is None:
        raise NotFound(f"there is no job {job}", hint="hodei jobs --all")
    # Before anything else is said of it: a caller who may not change it learns no more than that.
    service.rights.check_owner(found)
    return found


async def _changed(service: Service, job: JobId, fact: Fact) -> Job:
    await service.loop.committed([fact])
    return await _stored(service, job)


# --------------------------------------------------------------------------------------------- requeue
# Starting many jobs again at once: whole arrays, only what has failed, and with it the jobs that gave up waiting for
# it.


_PAGE = 1000
# More dependents than these are never looked at in one call.
MOST_DEPENDENTS = 100_000
_GAVE_UP = (NEVER_MET, TIMED_OUT)


class Requeued(Struct, frozen=True):
    """`revived`: jobs that had given up waiting for one of these. `refused`: such jobs of other users, left alone."""

    requeued: list[JobId]
    revived: list[JobId]
    refused: list[JobId]


async def requeue_all(
    service: Service, jobs: Sequence[JobId], whole: Sequence[JobId] = (), *, failed: bool = False
) -> Requeued:
    """Start these jobs and the elements of these arrays again, in one commit; what has not started yet is left as it is.

    `failed`: only those that have failed, and then also the jobs that failed because they waited for one of them.
    """
    wanted = list(jobs)
    for id in whole:
        place = (await arrays.array_status(service, id)).place
        wanted += range(place.first, place.last + 1)
    found = await _stored_jobs(service, dict.fromkeys(wanted))
    missing = sorted(set(jobs) - found.keys())
    if missing:
        raise NotFound(f"there is no job {missing[0]}", hint="hodei jobs --all")
    states = ("failed",) if failed else (*JOB_ENDED, "scheduled", "running")
    chosen: list[Job] = []
    for some in chunks(dict.fromkeys(wanted)):
        chosen += [found[id] for id in some if id in found and found[id].state in states]
        await asyncio.sleep(0)
    revived, refused = await _gave_up(service, chosen) if failed else ([], [])
    facts: list[Fact] = []
    # What is waited for goes first, so that those who wait for it find it in the line.
    for part in chunks((*chosen, *revived)):
        for job in part:
            record = job if job.state in JOB_ENDED else None
            facts.append(JobRequeued(job.id, record, await service.depending.of_record(record)))
        await asyncio.sleep(0)
    if facts:
        await service.loop.committed(facts)
    return Requeued([job.id for job in chosen], [job.id for job in revived], refused)


async def _gave_up(service: Service, failed: Iterable[Job]) -> tuple[list[Job], list[JobId]]:
    """The jobs that failed because they waited for one of these, those that waited for them, and so on, the nearest
    first; and those of them that the caller may not start."""
    caller = CALLER.get()
    seen = {job.id for job in failed}
    front, revived, refused = sorted(seen), list[Job](), list[JobId]()
    while front and len(seen) < MOST_DEPENDENTS:
        edges = await service.read(service.store.dependents, front, MOST_DEPENDENTS)
        waiting = await _stored_jobs(service, [waiter for _, waiter in edges if waiter not in seen])
        seen.update(waiting)
        front = []
        for job in waiting.values():
            if job.state not in JOB_ENDED or job.reason_code not in _GAVE_UP:
                continue
            try:
                if caller is not None:
                    service.rights.check(caller, [JobRequeued(job.id, job)], ())
            except NotPermitted:
                refused.append(job.id)
                continue
            revived.append(job)
            front.append(job.id)
    return revived, refused


async def _stored_jobs(service: Service, ids: Iterable[JobId]) -> dict[JobId, Job]:
    """Those of them that the store still has, by number."""
    wanted = sorted(set(ids))

    def look() -> dict[JobId, Job]:
        out: dict[JobId, Job] = {}
        for first in range(0, len(wanted), _PAGE):
            page = service.store.jobs(JobQuery(ids=tuple(wanted[first : first + _PAGE]), limit=_PAGE))
            out |= {job.id: job for job in page.jobs}
        return dict(sorted(out.items()))

    return await service.read(look)
