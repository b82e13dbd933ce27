"""Elements of arrays, no more than so many at once: the rest wait outside the line, in order, and are let in as others end.

An element holds its place from the moment it is let in until it ends or is held; a retry or a preemption does not cost it
the place. That an element waits outside is told by its reason code, which is stored with it: so a restarted server sorts
the elements as they were sorted before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator

from hodei.control.queue.sorted_keys import SortedKeys
from hodei.control.state import PART, ClusterState, parts
from hodei.model.explanation import Explanation
from hodei.model.ids import JobId
from hodei.model.job import Job

LIMIT = "ARRAY_LIMIT"


class _Array:
    __slots__ = ("inside", "outside")

    def __init__(self) -> None:
        self.inside: set[JobId] = set()
        self.outside: SortedKeys[JobId] = SortedKeys()  # in order of index


class Arrays:
    """Nothing is known here of arrays without a limit: they cost nothing."""

    def __init__(self, cluster: ClusterState, enqueue: Callable[[Job, int], None]) -> None:
        self._cluster = cluster
        self._enqueue = enqueue
        self._arrays: dict[JobId, _Array] = {}
        # By profile, how many wait outside.
        self.waiting: Counter[str] = Counter()

    def lets_in(self, job: Job, now_ms: int) -> bool:
        """Whether it may join the line; if not, it waits here until an element before it is done."""
        place = job.spec.array
        if place is None or not place.at_most or not place.first:
            return True
        array = self._arrays.setdefault(place.first, _Array())
        if job.id in array.inside:
            return True
        if job.reason_code != LIMIT and len(array.inside) < place.at_most:
            array.inside.add(job.id)
            return True
        if job.id not in array.outside:
            array.outside.add(job.id)
            self.waiting[job.spec.profile] += 1
        if job.reason_code != LIMIT:
            reason = f"at most {place.at_most} of the {place.count} elements of its array at once"
            self._cluster.change_job(job, now_ms, reason_code=LIMIT, reason=reason)
        return False

    def restored(self, job: Job) -> None:
        """An element that was under way when the server stopped has its place."""
        place = job.spec.array
        if place is not None and place.at_most and place.first and job.state in ("scheduled", "running", "suspended"):
            self._arrays.setdefault(place.first, _Array()).inside.add(job.id)

    def turning(self, now_ms: int) -> Generator[None, None, None]:
        """Those who have ended or are held give their places to the next; in parts."""
        gone, self._cluster.left_arrays = self._cluster.left_arrays, []
        for part in parts(gone):
            for job in part:
                now = self._cluster.jobs.get(job.id)
                if now is None or now.state == "held":  # else it was released within the same moment, and has its place
                    self._left(job, now_ms)
            if len(gone) > PART:
                yield

    def _left(self, job: Job, now_ms: int) -> None:
        place = job.spec.array
        array = self._arrays.get(place.first) if place is not None else None
        if place is None or array is None:
            return
        if job.id in array.outside:
            array.outside.remove(job.id)
            self.waiting[job.spec.profile] -= 1
        array.inside.discard(job.id)
        while len(array.inside) < place.at_most and (following := self._next_of(array)) is not None:
            array.outside.remove(following.id)
            self._let_in(array, following, now_ms)
        if not array.inside and not array.outside:
            del self._arrays[place.first]

    def _next_of(self, array: _Array) -> Job | None:
        """The first of those outside; one that was held just now is about to leave."""
        known = (self._cluster.jobs.get(id) for id in array.outside)
        return next((job for job in known if job is not None and job.state == "pending"), None)

    def _let_in(self, array: _Array, job: Job, now_ms: int) -> None:
        array.inside.add(job.id)
        self.waiting[job.spec.profile] -= 1
        # Its patience (scheduling_timeout) begins now: until here it was not even in line.
        job = self._cluster.change_job(job, now_ms, reason_code="", reason="", queued_ms=now_ms)
        self._enqueue(job, now_ms)

    def explain(self, job: Job, now_ms: int, beat_ms: int) -> Explanation | None:
        """Why it waits, if it does so here."""
        place = job.spec.array
        array = self._arrays.get(place.first) if place is not None else None
        if place is None or array is None or job.id not in array.outside:
            return None
        before = array.outside.before(job.id)
        text = f"{job.reason}: {len(array.inside)} are under way, {before} of the others go first"
        return Explanation(
            status="waiting", code=LIMIT, summary=text, job=job.id, name=job.spec.name, state=job.state,
            hint=f"wait, or submit it with a larger at_most; the whole array: hodei job show '{place.first}[]'",
            next_trigger="when an element of its array ends", at_ms=now_ms, scheduler_beat_ms=beat_ms,
        )  # fmt: skip
