"""Who else will come? Those who came before come again: the past from a random moment of it on, over and over.

So newcomers keep the rate, the sizes and the bursts of the recent past. Which moment it is, is drawn by the caller's chance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import islice

from msgspec import structs

from hodei.control.explain.randomness import RandomSource
from hodei.model.ids import JobId
from hodei.model.job import Job, JobSpec

# So many are remembered, and fewer than those tell nothing.
_REMEMBERED = 1000
_ENOUGH = 20


class ArrivalModel:
    def __init__(self) -> None:
        self._at_ms: deque[int] = deque(maxlen=_REMEMBERED)
        self._specs: deque[JobSpec] = deque(maxlen=_REMEMBERED)
        self._last: JobId = 0

    def arrived(self, job: Job) -> None:
        """To be told of every job once it is submitted, in their order; of one that is known already nothing is learned."""
        if job.id <= self._last:
            return
        self._last = job.id
        self._at_ms.append(max(job.submitted_ms, self._at_ms[-1] if self._at_ms else 0))
        # A deadline that has passed means nothing to another job.
        self._specs.append(structs.replace(job.spec, deadline_ms=0) if job.spec.deadline_ms else job.spec)

    def draw(self, now_ms: int, first_id: JobId, most: int, chance: RandomSource) -> Iterator[tuple[int, Job]]:
        """At most so many to come, in order of time, numbered from `first_id` on."""
        times, specs = list(self._at_ms), list(self._specs)
        span_ms = now_ms - times[0] if times else 0
        if len(times) < _ENOUGH or span_ms <= 0:
            return iter(())
        return islice(_again(times, specs, now_ms, times[0] + chance.randrange(0, span_ms), first_id), most)


def _again(
    times: list[int], specs: list[JobSpec], now_ms: int, from_ms: int, first_id: JobId
) -> Iterator[tuple[int, Job]]:
    ahead_ms, place, id = now_ms - from_ms, bisect_left(times, from_ms), first_id
    while True:
        for past_ms, spec in zip(times[place:], specs[place:], strict=True):
            at_ms = max(past_ms + ahead_ms, now_ms)
            yield at_ms, Job(id, spec, "pending", at_ms, at_ms, queued_ms=at_ms)
            id += 1
        ahead_ms += now_ms - times[0]
        place = 0
