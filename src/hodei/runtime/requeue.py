"""Starting many jobs again at once: whole arrays, only what has failed, and with it the jobs that gave up waiting for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from hodei.control.chunks import parts
from hodei.control.lifecycle.dependencies import NEVER_MET, TIMED_OUT
from hodei.model.errors import NotFound, NotPermitted
from hodei.model.facts import Fact, JobRequeued
from hodei.model.ids import JobId
from hodei.model.job import Job
from hodei.model.lifecycle import JOB_ENDED
from hodei.ports import JobQuery
from hodei.runtime import arrays
from hodei.runtime.caller import CALLER

if TYPE_CHECKING:
    from hodei.runtime.service import Service

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
    found = await _stored(service, dict.fromkeys(wanted))
    missing = sorted(set(jobs) - found.keys())
    if missing:
        raise NotFound(f"there is no job {missing[0]}", hint="hodei jobs --all")
    states = ("failed",) if failed else (*JOB_ENDED, "scheduled", "running")
    chosen: list[Job] = []
    for some in parts(dict.fromkeys(wanted)):
        chosen += [found[id] for id in some if id in found and found[id].state in states]
        await asyncio.sleep(0)
    revived, refused = await _gave_up(service, chosen) if failed else ([], [])
    facts: list[Fact] = []
    # What is waited for goes first, so that those who wait for it find it in the line.
    for part in parts((*chosen, *revived)):
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
        waiting = await _stored(service, [waiter for _, waiter in edges if waiter not in seen])
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


async def _stored(service: Service, ids: Iterable[JobId]) -> dict[JobId, Job]:
    """Those of them that the store still has, by number."""
    wanted = sorted(set(ids))

    def look() -> dict[JobId, Job]:
        out: dict[JobId, Job] = {}
        for first in range(0, len(wanted), _PAGE):
            page = service.store.jobs(JobQuery(ids=tuple(wanted[first : first + _PAGE]), limit=_PAGE))
            out |= {job.id: job for job in page.jobs}
        return dict(sorted(out.items()))

    return await service.read(look)
