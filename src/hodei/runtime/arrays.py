"""One word to all elements of an array at once: one commit, however many they are. And arrays as one row of a list."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from hodei.control.state import chunks
from hodei.model.array import ArrayElement
from hodei.model.errors import Conflict, NotFound
from hodei.model.facts import Fact, JobCancelled, JobHeld, JobReleased
from hodei.model.ids import JobId
from hodei.model.job import JOB_ENDED, Job
from hodei.ports import JobQuery, Store
from hodei.runtime.rights import CALLER

if TYPE_CHECKING:
    from hodei.runtime.service import Service

_PAGE = 200


class ArrayStatus(Struct, frozen=True):
    """An array as a whole: one of its elements (the newest that was looked for), and how many are in each state."""

    job: Job
    place: ArrayElement
    states: dict[str, int]

    @property
    def ended(self) -> bool:
        return all(state in JOB_ENDED for state in self.states)


class Row(Struct, frozen=True):
    """A job, or the array that it stands for."""

    job: Job
    states: dict[str, int] | None = None


async def array_status(service: Service, id: JobId) -> ArrayStatus:
    """`id` may be that of any element."""
    found = await service.read(service.store.job, id)
    if found is None:
        raise NotFound(f"there is no job {id}", hint="hodei jobs --all")
    place = found.spec.array
    if place is None or not place.first:
        raise NotFound(f"job {id} is not an element of an array", hint=f"hodei job show {id}", code="NO_SUCH_ARRAY")
    states = await service.read(service.store.states_between, place.first, place.last)
    return ArrayStatus(found, place, states)


async def cancel_array(service: Service, id: JobId, reason: str) -> ArrayStatus:
    return await _tell_all(
        service, id, lambda job, by: JobCancelled(job.id, reason, by=by), lambda job: not job.cancel_requested
    )


async def hold_array(service: Service, id: JobId) -> ArrayStatus:
    return await _tell_all(service, id, lambda job, by: JobHeld(job.id, by=by), lambda job: job.state == "pending")


async def release_array(service: Service, id: JobId) -> ArrayStatus:
    return await _tell_all(
        service, id, lambda job, by: JobReleased(job.id, by=by), lambda job: job.state == "held", first_to_last=True
    )


async def wait_array(service: Service, id: JobId, timeout_ms: int) -> ArrayStatus:
    """How it stands when every element has ended, or when the time is over."""
    status = await array_status(service, id)
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            # One after the other is as quick as all together: it is over when the slowest is.
            for element in range(status.place.first, status.place.last + 1):
                while element in service.controller.cluster.jobs:
                    await service.wait(element, timeout_ms)
    except TimeoutError:
        pass
    return await array_status(service, id)


async def _tell_all(
    service: Service,
    id: JobId,
    fact: Callable[[Job, str], Fact],
    concerned: Callable[[Job], bool],
    *,
    first_to_last: bool = False,
) -> ArrayStatus:
    status = await array_status(service, id)
    known, facts = service.controller.cluster.jobs, list[Fact]()
    caller = CALLER.get()
    by = caller.entry.who if caller is not None else ""
    # From the last on: an element that goes lets the next one in, and that one is about to go too. Those that come back
    # come as they came: from the last on, each would be the first in line for a moment.
    elements = range(status.place.first, status.place.last + 1)
    for part in chunks(elements if first_to_last else reversed(elements)):
        facts += [fact(known[job], by) for job in part if job in known and concerned(known[job])]
        await asyncio.sleep(0)
    if not facts:
        # What was asked for just now may be on its way into the store: told is how they stand when it is there.
        await service.loop.committed(())
        status = await array_status(service, id)
        counts = ", ".join(f"{many} {state}" for state, many in status.states.items())
        raise Conflict(f"no element of array {status.place.first} can do that: {counts or 'all are forgotten'}")
    await service.loop.committed(facts)
    return await array_status(service, id)


def folded(store: Store, query: JobQuery) -> tuple[list[Row], JobId]:
    """One page of jobs, newest first, each array as one row at the place of its newest element that answers the query;
    and where the next page begins. A million elements cost one question more than one."""
    rows: list[Row] = []
    after = query.after
    while True:
        page = store.jobs(structs.replace(query, after=after, limit=min(query.limit - len(rows), _PAGE)))
        after = page.next_after
        skip_from = 0  # elements with ids from here on are told of already
        for job in page.jobs:
            place = job.spec.array
            if skip_from and job.id >= skip_from:
                continue
            states = None
            if place is not None and place.first:
                states = store.states_between(place.first, place.last)
                skip_from = place.first
            rows.append(Row(job, states))
        if after and skip_from:
            after = min(after, skip_from)
        if not after or len(rows) >= query.limit:
            return rows, after
