"""Who waits in a line whose order changes while they wait: with age, and with fair share.

Equal gangs of equal priority stand behind each other by submission, which no passing of time changes; so it is enough to
compare the first of each group. They are ranked as of one moment, because all grow older at one rate: all ranks are
worked out anew only when someone has reached the most that age can give, at most once a minute, and those of one project
when its own factor of fair share has changed. In between, who is first is found in heaps, one for each kind of work.
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
# (points below zero, order, job, group): the first of a group, if the group's rank is still this one.
_Entry = tuple[int, tuple[int, ...], JobId, Hashable]


class MultifactorQueue(SchedulingQueue):
    """A Line whose queue has `rank_milli`: the most points first, ties by priority and submission. Its order begins with
    the priority below zero and the time since when it waits."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self._ranking: Any = profile.queue
        self._heaps: dict[Hashable, list[_Entry]] = {}
        self._awake: dict[Hashable, None] = {}
        self._of_project: dict[str, dict[Hashable, None]] = {}
        self._as_of: View | None = None
        self._version = -1
        # When the first of those that are ranked has all that age can give; None if nobody ever will.
        self._grown_ms: int | None = None
        # Groups whose first has changed before there was a moment to rank it as of.
        self._unranked: dict[Hashable, None] = {}

    def _admit(self, gang: Gang) -> None:
        super()._admit(gang)
        gang.group = (gang.group, gang.priority)

    # ----------------------------------------------------------------------------------------------- ranks

    def _rank_anew(self, view: View) -> None:
        """All that is not as of now any more."""
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
        """Whether some no longer grow older at the rate of the others."""
        return self._grown_ms is not None and now_ms >= max(self._grown_ms, as_of_ms + _RANKED_EVERY_MS)

    def _rank(self, key: Hashable) -> None:
        """The first of a group into the heap of its kind, if it is not there as it is."""
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
        heapq.heappush(self._heaps.setdefault(group.alike, []), (-points, order, job, key))
        self._of_project.setdefault(gang.job.project, {})[key] = None
        if group.kind.refusal is None:
            self._awake[group.alike] = None

    def _show(self, group: _Group) -> None:
        if self._as_of is None:
            self._unranked[group.key] = None
        else:
            self._rank(group.key)

    def _kind_woken(self, alike: Hashable, kind: _Kind) -> None:
        self._awake[alike] = None

    # ------------------------------------------------------------------------------------------- the order

    def ready(self, view: View | None = None) -> Generator[Gang, None, None]:
        assert view is not None
        self._rank_anew(view)
        while (entry := self._take()) is not None:
            _, _, job, key = entry
            group, done = self._groups[key], False
            group.rank = None
            try:
                yield self.gangs[job]
                done = True
            finally:
                if not done or not group.awake:
                    self._rank(key)  # not decided (enough for this step), or asleep with all of its kind
            if not self.is_ranked(view):
                self._rank_anew(view)

    def is_ranked(self, view: View) -> bool:
        """Whether the ranks are still those of the shares as they are now."""
        return view.shares is None or view.shares.version == self._version

    def _take(self) -> _Entry | None:
        """The first of all whose kind and group are awake, out of its heap."""
        best: tuple[_Entry, Hashable] | None = None
        for alike in list(self._awake):
            entry = self._first_of(alike)
            if entry is None:
                del self._awake[alike]
            elif best is None or entry < best[0]:
                best = (entry, alike)
        if best is None:
            return None
        heapq.heappop(self._heaps[best[1]])
        return best[0]

    def _first_of(self, alike: Hashable) -> _Entry | None:
        kind, heap = self._kinds.get(alike), self._heaps.get(alike)
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
        """A look at each account and priority, not at each gang: among those who share both, who came first is first."""
        assert view is not None
        ranking, order, ahead = self._ranking, gang.order, 0
        points, shares = ranking.rank_milli(gang, view), dict[str, int]()
        for standing in self._standing.values():
            other = self.gangs[standing.first[-1]]
            tenant, minus_priority = other.tenant, other.order[0]
            share = shares.get(tenant)
            if share is None:
                share = shares[tenant] = ranking.share_milli(other, view)
            age = points + minus_priority * 1000 - share  # with more than so much of age they are ahead
            more = standing.before((minus_priority, ranking.queued_before_ms(age + 1, view.now_ms) + 1))
            as_much = standing.before((minus_priority, ranking.queued_before_ms(age, view.now_ms) + 1))
            ahead += more if more == as_much else min(max(standing.before(order), more), as_much)
        return 1 + ahead

    def _among(self, gang: Gang) -> Hashable:
        return gang.tenant, gang.order[0]
