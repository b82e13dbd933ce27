"""The multifactor queue: its order changes with the age of jobs and with fair share.

Equal gangs of equal priority are ordered by submission, at any time; so only the first of each group is compared. All
gangs age at one rate, so ranks are computed as of one moment. They are all computed again only when a gang has reached
the maximum of the age factor, at most once a minute; those of one project when its fair-share factor has changed. In
between heaps find the first gang, one heap for each kind of work.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Hashable
from typing import Any

from hodei.control.queue.base import SchedulingQueue, _Group, _Kind
from hodei.engine.profile import Profile
from hodei.engine.view import Gang, View
from hodei.model.ids import JobId

_RANKED_EVERY_MS = 60_000
# (negative points, order, job, group): the first of a group, valid while the group has this rank.
_Entry = tuple[int, tuple[int, ...], JobId, Hashable]


class MultifactorQueue(SchedulingQueue):
    """For a queue plugin with `rank_milli`: most points first, ties by priority and submission. The order of a gang begins
    with the negative priority and the time of queueing."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self._ranking: Any = profile.queue
        self._heaps: dict[Hashable, list[_Entry]] = {}
        self._active: dict[Hashable, None] = {}
        self._of_project: dict[str, dict[Hashable, None]] = {}
        self._as_of: View | None = None
        self._version = -1
        # When the first ranked gang reaches the maximum of the age factor; None for never.
        self._grown_ms: int | None = None
        # Groups whose first gang changed before the first ranking.
        self._unranked: dict[Hashable, None] = {}

    def _admit(self, gang: Gang) -> None:
        super()._admit(gang)
        gang.group = (gang.group, gang.priority)

    def _update_ranks(self, view: View) -> None:
        """Compute outdated ranks: all of them, or those of projects whose shares have changed."""
        shares, as_of = view.shares, self._as_of
        changed = shares.changed_since(self._version) if shares is not None and as_of is not None else []
        if as_of is None or changed is None or self._outgrown(as_of.now_ms, view.now_ms):
            self._as_of = view
            self._grown_ms = None
            self._heaps, self._of_project = {}, {}
            for group in self._groups.values():
                group.rank = None
            keys: list[Hashable] = list(self._groups)
        else:
            self._as_of = View(as_of.now_ms, shares=shares)
            keys = [key for project in changed for key in self._of_project.get(project, ())]
            for key in keys:
                if key in self._groups:
                    self._groups[key].rank = None
        self._version = shares.version if shares is not None else 0
        for key in (*keys, *self._unranked):
            self._rank(key)
        self._unranked = {}

    def _outgrown(self, as_of_ms: int, now_ms: int) -> bool:
        """Whether some gangs do not age at the common rate any more."""
        return self._grown_ms is not None and now_ms >= max(self._grown_ms, as_of_ms + _RANKED_EVERY_MS)

    def _rank(self, key: Hashable) -> None:
        """Put the first gang of a group into the heap of its kind, unless it is there."""
        group = self._groups.get(key)
        if group is None or group.refusal is not None or not group.heap:
            return
        order = group.heap[0]
        job = order[-1]
        gang = self.gangs.get(job)
        if gang is None or (group.rank is not None and group.rank[1] == job):
            return
        assert self._as_of is not None
        points = self._ranking.rank_milli(gang, self._as_of)
        group.rank = (points, job)
        grown_ms = self._ranking.max_age_ms(gang)
        if grown_ms is not None and (self._grown_ms is None or grown_ms < self._grown_ms):
            self._grown_ms = grown_ms
        heapq.heappush(self._heaps.setdefault(group.kind_key, []), (-points, order, job, key))
        self._of_project.setdefault(gang.job.project, {})[key] = None
        if group.kind.refusal is None:
            self._active[group.kind_key] = None

    def _make_ready(self, group: _Group) -> None:
        if self._as_of is None:
            self._unranked[group.key] = None
        else:
            self._rank(group.key)

    def _kind_woken(self, kind_key: Hashable, kind: _Kind) -> None:
        self._active[kind_key] = None

    def ready(self, view: View | None = None) -> Generator[Gang, None, None]:
        assert view is not None
        self._update_ranks(view)
        while (entry := self._take()) is not None:
            _, _, job, key = entry
            group, done = self._groups[key], False
            group.rank = None
            try:
                yield self.gangs[job]
                done = True
            finally:
                if not done or not group.active:
                    self._rank(key)  # not decided in this step, or parked with its kind
            if not self.is_ranked(view):
                self._update_ranks(view)

    def is_ranked(self, view: View) -> bool:
        """Whether the ranks are those of the present shares."""
        return view.shares is None or view.shares.version == self._version

    def _take(self) -> _Entry | None:
        """Pop the first entry of an active kind and group."""
        best: tuple[_Entry, Hashable] | None = None
        for kind_key in list(self._active):
            entry = self._first_of(kind_key)
            if entry is None:
                del self._active[kind_key]
            elif best is None or entry < best[0]:
                best = (entry, kind_key)
        if best is None:
            return None
        heapq.heappop(self._heaps[best[1]])
        return best[0]

    def _first_of(self, kind_key: Hashable) -> _Entry | None:
        kind, heap = self._kinds.get(kind_key), self._heaps.get(kind_key)
        if kind is None or kind.refusal is not None or heap is None:
            return None
        while heap:
            points, order, job, key = heap[0]
            group = self._groups.get(key)
            if (
                group is not None
                and group.refusal is None
                and group.rank == (-points, job)
                and group.heap
                and group.heap[0] == order
                and job in self.gangs
                and job not in self._until
            ):
                return heap[0]
            heapq.heappop(heap)
        return None

    def position(self, gang: Gang, view: View | None = None) -> int:
        """Compares accounts and priorities instead of single gangs: gangs that share both are ordered by submission."""
        assert view is not None
        ranking, order, ahead = self._ranking, gang.order, 0
        points, shares = ranking.rank_milli(gang, view), dict[str, int]()
        for positions in self._positions.values():
            other = self.gangs[positions.first[-1]]
            tenant, minus_priority = other.tenant, other.order[0]
            share = shares.get(tenant)
            if share is None:
                share = shares[tenant] = ranking.share_milli(other, view)
            age = points + minus_priority * 1000 - share  # gangs with more points for age are ahead
            more = positions.before((minus_priority, ranking.queued_before_ms(age + 1, view.now_ms) + 1))
            at_least = positions.before((minus_priority, ranking.queued_before_ms(age, view.now_ms) + 1))
            ahead += more if more == at_least else min(max(positions.before(order), more), at_least)
        return 1 + ahead

    def _position_key(self, gang: Gang) -> Hashable:
        return gang.tenant, gang.order[0]
