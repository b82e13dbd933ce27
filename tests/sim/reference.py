"""A reference simulator: EASY, EASY-SJBF and conservative backfilling on one pool of processors, written from their published
definitions alone, as plainly as possible. It uses no code of Hodei and is slow."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

Ends = list[tuple[int, int]]
"""The expected ends of running jobs with their processors, in order."""


class Job(NamedTuple):
    """All times are in seconds. No job runs longer than its estimate."""

    id: int
    submit: int
    run: int
    estimate: int
    procs: int


Key = Callable[[Job], tuple[float, ...]]


def by_arrival(job: Job) -> tuple[float, ...]:
    return job.submit, job.id


def easy(jobs: list[Job], procs: int, *, order: Key = by_arrival, fill: Key | None = None) -> dict[int, int]:
    """The wait of every job by id. `order` sorts the queue, `fill` the candidates for backfill (default: `order`)."""

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
    """The same, but every queued job has a planned start that no other job may delay. When processors are freed, all starts are
    planned again in order of arrival, and none becomes later."""
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
    """The earliest time from which the job fits for the whole of its estimate."""
    steps = list(ends)
    for start, other in others:
        steps += [(max(start, now), -other.procs), (max(start, now) + other.estimate, other.procs)]

    def free_at(time: int) -> int:
        return left + sum(change for at, change in steps if at <= time)

    times = sorted({now, *(at for at, _ in steps)})
    for start in times:
        within = [start, *(at for at in times if start < at < start + job.estimate)]
        if all(free_at(time) >= job.procs for time in within):
            return start
    raise AssertionError("a job that is larger than the machine")


Choice = Callable[[list[Job], int, int, Ends, bool], list[Job]]
"""Removes the jobs that start now from the queue: (queue, now, free processors, expected ends, whether any were freed)."""


def _waits(jobs: list[Job], procs: int, choose: Choice) -> dict[int, int]:
    """Events are processed one by one; at the same time arrivals first, then ends in order of start. A job at its expected end
    has ended, also without an event."""
    waits: dict[int, int] = {}
    queue: list[Job] = []
    running: dict[int, tuple[int, int]] = {}
    events = [(job.submit, 0, job.id, job) for job in jobs]
    heapq.heapify(events)
    while events:
        now, kind, _, job = heapq.heappop(events)
        ended = [id for id, (end, _) in running.items() if end <= now]
        if kind == 0:
            queue.append(job)
        elif job.id in running and job.id not in ended:
            ended.append(job.id)
        for id in ended:
            del running[id]
        ends = sorted(running.values())
        for each in choose(queue, now, procs - sum(held for _, held in ends), ends, bool(ended)):
            waits[each.id] = now - each.submit
            running[each.id] = (now + each.estimate, each.procs)
            heapq.heappush(events, (now + each.run, 1, len(waits), each))
    return waits
