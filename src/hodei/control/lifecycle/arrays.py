"""Arrays with a limit (`at_most`): the other elements wait outside the queue, in order, and are queued as others end.

An element counts from its queueing until it ends or is held; a retry or a preemption does not change that. An element
that waits outside has the reason code ARRAY_LIMIT, which is stored, so that a restarted server knows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

from hodei.control.queue.sorted_keys import SortedKeys
from hodei.control.state import CHUNK_SIZE, ClusterState, chunks
from hodei.model.explanation import Explanation
from hodei.model.ids import JobId
from hodei.model.job import Job

LIMIT = "ARRAY_LIMIT"


class _Array:
    """`active`: elements that are queued or run; `outside`: elements that wait for the limit, by index."""

    __slots__ = ("active", "outside")

    def __init__(self) -> None:
        self.active: set[JobId] = set()
        self.outside: SortedKeys[JobId] = SortedKeys()


class Arrays:
    """Arrays without a limit are not tracked."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._arrays: dict[JobId, _Array] = {}
        # Elements that ended or were held since the last `queue_next`.
        self._left: list[Job] = []
        # Elements outside the queue, by profile.
        self.waiting: Counter[str] = Counter()
        cluster.signals.element_left.append(self._element_left)

    def admits(self, job: Job, now_ms: int) -> bool:
        """Whether it may join the queue; if not, it waits here until another element ends."""
        place = job.spec.array
        if place is None or not place.at_most or not place.first:
            return True
        array = self._arrays.setdefault(place.first, _Array())
        if job.id in array.active:
            return True
        if job.reason_code != LIMIT and len(array.active) < place.at_most:
            array.active.add(job.id)
            return True
        if job.id not in array.outside:
            array.outside.add(job.id)
            self.waiting[job.spec.profile] += 1
        if job.reason_code != LIMIT:
            reason = f"at most {place.at_most} of the {place.count} elements of its array at once"
            self._cluster.change_job(job, now_ms, reason_code=LIMIT, reason=reason)
        return False

    def restored(self, job: Job) -> None:
        """An element that was active when the server stopped stays active."""
        place = job.spec.array
        if place is not None and place.at_most and place.first and job.state in ("scheduled", "running", "suspended"):
            self._arrays.setdefault(place.first, _Array()).active.add(job.id)

    def _element_left(self, job: Job) -> None:
        self._left.append(job)

    def queue_next(self, now_ms: int) -> Generator[None, None, None]:
        """Queue the next elements for those that ended or were held; in chunks."""
        left, self._left = self._left, []
        for chunk in chunks(left):
            for job in chunk:
                now = self._cluster.jobs.get(job.id)
                if now is None or now.state == "held":  # else it was released in the same step and stays active
                    self._replace(job, now_ms)
            if len(left) > CHUNK_SIZE:
                yield

    def _replace(self, job: Job, now_ms: int) -> None:
        place = job.spec.array
        array = self._arrays.get(place.first) if place is not None else None
        if place is None or array is None:
            return
        if job.id in array.outside:
            array.outside.remove(job.id)
            self.waiting[job.spec.profile] -= 1
        array.active.discard(job.id)
        while len(array.active) < place.at_most and (following := self._next_of(array)) is not None:
            array.outside.remove(following.id)
            self._queue(array, following, now_ms)
        if not array.active and not array.outside:
            del self._arrays[place.first]

    def _next_of(self, array: _Array) -> Job | None:
        """The first element outside that is pending; one that was held in this step leaves next."""
        known = (self._cluster.jobs.get(id) for id in array.outside)
        return next((job for job in known if job is not None and job.state == "pending"), None)

    def _queue(self, array: _Array, job: Job, now_ms: int) -> None:
        array.active.add(job.id)
        self.waiting[job.spec.profile] -= 1
        # Its scheduling_timeout counts from now on: until here it was not queued.
        job = self._cluster.change_job(job, now_ms, reason_code="", reason="", queued_ms=now_ms)
        self._cluster.enqueue(job, now_ms)

    def explain(self, job: Job, now_ms: int, beat_ms: int) -> Explanation | None:
        """Why it waits, if it waits for the limit of its array."""
        place = job.spec.array
        array = self._arrays.get(place.first) if place is not None else None
        if place is None or array is None or job.id not in array.outside:
            return None
        before = array.outside.before(job.id)
        text = f"{job.reason}: {len(array.active)} are active, {before} others go first"
        return Explanation(
            status="waiting", code=LIMIT, summary=text, job=job.id, name=job.spec.name, state=job.state,
            hint=f"wait, or submit it with a larger at_most; the whole array: hodei job show '{place.first}[]'",
            next_trigger="when an element of its array ends", at_ms=now_ms, scheduler_beat_ms=beat_ms,
        )  # fmt: skip
