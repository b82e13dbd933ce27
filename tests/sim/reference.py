"""A second opinion: EASY, EASY-SJBF and conservative backfilling on one pool of processors, written from their published
definitions alone and as plainly as possible. It knows nothing of the house and is not fast."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

Ends = list[tuple[int, int]]
"""When processors are expected back, and how many, in order."""


class Job(NamedTuple):
    """All times in seconds. Nothing runs longer than was estimated."""

    id: int
    submit: int
    run: int
    estimate: int
    procs: int


Key = Callable[[Job], tuple[float, ...]]


def by_arrival(job: Job) -> tuple[float, ...]:
    return job.submit, job.id


def easy(jobs: list[Job], procs: int, *, order: Key = by_arrival, fill: Key | None = None) -> dict[int, int]:
    """The wait of every job by id. `order` says who is first, `fill` who of the others is tried first (else `order`)."""

    def choose(queue: list[Job], now: int, left: int, ends: Ends, freed: bool) -> list[Job]:
        started: list[Job] = []
        queue.sort(key=order)
        while queue and queue[0].procs <= left:
            started.append(queue.pop(0))
            left -= started[-1].procs
        if not queue:
            return started
        first, *behind = queue
        shadow, by_then = now, left
        for end, held in sorted(ends + [(now + job.estimate, job.procs) for job in started]):
            if by_then >= first.procs and end > shadow:
                break
            shadow, by_then = end, by_then + held
        extra = by_then - first.procs
        for job in sorted(behind, key=fill or order):
            in_time = now + job.estimate <= shadow
            if job.procs <= left and (in_time or job.procs <= extra):
                left -= job.procs
                extra -= 0 if in_time else job.procs
                queue.remove(job)
                started.append(job)
        return started

    return _waits(jobs, procs, choose)


def conservative(jobs: list[Job], procs: int) -> dict[int, int]:
    """The same, but everyone in the queue has a planned start that nobody may delay. When processors come back all
    plans are made anew in order of arrival, and none becomes later by it."""
    planned: dict[int, int] = {}

    def choose(queue: list[Job], now: int, left: int, ends: Ends, freed: bool) -> list[Job]:
        for job in queue:
            if job.id in planned and not freed:
                continue
            others = [(planned[other.id], other) for other in queue if other is not job and other.id in planned]
            start = _first_gap(job, now, left, ends, others)
            planned[job.id] = min(start, planned.get(job.id, start))
        started = [job for job in queue if planned[job.id] <= now]
        queue[:] = [job for job in queue if planned[job.id] > now]
        return started

    return _waits(jobs, procs, choose)


def _first_gap(job: Job, now: int, left: int, ends: Ends, others: list[tuple[int, Job]]) -> int:
    """The first moment from which there is room for the job, for as long as it was estimated to take."""
    steps = list(ends)
    for start, other in others:
        steps += [(max(start, now), -other.procs), (max(start, now) + other.estimate, other.procs)]

    def free_at(moment: int) -> int:
        return left + sum(change for at, change in steps if at <= moment)

    moments = sorted({now, *(at for at, _ in steps)})
    for start in moments:
        within = [start, *(at for at in moments if start < at < start + job.estimate)]
        if all(free_at(moment) >= job.procs for moment in within):
            return start
    raise AssertionError("a job that is larger than the machine")


Choice = Callable[[list[Job], int, int, Ends, bool], list[Job]]
"""Takes those out of the queue that start now: of (queue, now, processors free, ends in sight, whether any came back)."""


def _waits(jobs: list[Job], procs: int, choose: Choice) -> dict[int, int]:
    """Each arrival and each end is looked at by itself, of those at the same time arrivals first, then ends in order of
    start. What should have ended by now has: nobody needs to be told."""
    waits: dict[int, int] = {}
    queue: list[Job] = []
    running: dict[int, tuple[int, int]] = {}
    events = [(job.submit, 0, job.id, job) for job in jobs]
    heapq.heapify(events)
    while events:
        now, kind, _, job = heapq.heappop(events)
        over = [id for id, (end, _) in running.items() if end <= now]
        if kind == 0:
            queue.append(job)
        elif job.id in running and job.id not in over:
            over.append(job.id)
        for id in over:
            del running[id]
        ends = sorted(running.values())
        for each in choose(queue, now, procs - sum(held for _, held in ends), ends, bool(over)):
            waits[each.id] = now - each.submit
            running[each.id] = (now + each.estimate, each.procs)
            heapq.heappush(events, (now + each.run, 1, len(waits), each))
    return waits
