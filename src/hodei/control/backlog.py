"""Who waits: lines of pending gangs, ready, backing off, or asleep until something that could help them happens.

Gangs that no plugin can tell apart form a group and wait behind each other: when its first is refused the whole group
sleeps, and when it is woken only its first is tried. So a wake-up costs as many tries as there are kinds of work, not
as many as there are jobs. Lines of different tenants take turns by the charge of what they started.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator

from hodei.engine.plan import Refusal
from hodei.engine.points import Trigger
from hodei.engine.profile import Profile
from hodei.engine.view import Gang, View
from hodei.model.ids import JobId


class _Group:
    """Equal gangs in queue order. `refusal` is set while the group sleeps."""

    __slots__ = ("heap", "refusal", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.heap: list[tuple[tuple[int, ...], JobId]] = []
        self.refusal: Refusal | None = None


class Line:
    """The pending gangs of one profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.gangs: dict[JobId, Gang] = {}
        self._groups: dict[Hashable, _Group] = {}
        self._ready: dict[str, list[tuple[tuple[int, ...], JobId]]] = {}
        self._turns: dict[str, int] = {}
        self._clock = 0
        self._waiting: Counter[str] = Counter()
        self._backoff: list[tuple[int, JobId]] = []
        self._until: dict[JobId, int] = {}
        self._apart: dict[JobId, Hashable] = {}

    def __len__(self) -> int:
        return len(self.gangs)

    # ------------------------------------------------------------------------------------ coming and going

    def add(self, gang: Gang, *, not_before_ms: int = 0, now_ms: int = 0) -> None:
        self.profile.admit(gang)
        tenant = gang.tenant
        if not self._waiting[tenant]:
            # A tenant that was idle joins at the present turn: it has not saved any up. One that waits keeps its own.
            self._turns[tenant] = max(self._turns.get(tenant, 0), self._clock)
        self._waiting[tenant] += 1
        self.gangs[gang.id] = gang
        if not_before_ms > now_ms:
            self._until[gang.id] = not_before_ms
            heapq.heappush(self._backoff, (not_before_ms, gang.id))
        else:
            self._queue(gang)

    def remove(self, job: JobId) -> Gang | None:
        """Take a gang out; its entries in the heaps are skipped when they come up."""
        self._until.pop(job, None)
        self._apart.pop(job, None)
        gang = self.gangs.pop(job, None)
        if gang is not None:
            self._waiting[gang.tenant] -= 1
            self._expose(gang.group)
        return gang

    def started(self, gang: Gang) -> None:
        self._clock = max(self._clock, self._turns[gang.tenant])
        self._turns[gang.tenant] += self.profile.queue.charge(gang)
        self.remove(gang.id)

    # ------------------------------------------------------------------------------------------- the order

    def ready(self, view: View | None = None) -> Iterator[Gang]:
        """Gangs to try, in order; the caller must say `started`, `refused` or `back_off` of each before the next."""
        while (gang := self._next()) is not None:
            yield gang

    def refused(self, gang: Gang, refusal: Refusal) -> None:
        """The group of `gang` sleeps until one of the refusal's cures."""
        if refusal.by_labels and gang.id not in self._apart:
            self._set_apart(gang)
        self._groups[gang.group].refusal = refusal

    def _set_apart(self, gang: Gang) -> None:
        """Others of its group may be free to go: from now on it waits among those with its project and labels."""
        before, labels = gang.group, tuple(sorted(gang.job.labels.items()))
        gang.group = self._apart[gang.id] = (before, gang.job.project, labels)
        group = self._groups.setdefault(gang.group, _Group(gang.tenant))
        heapq.heappush(group.heap, (gang.order, gang.id))
        self._expose(before)

    def back_off(self, gang: Gang, until_ms: int) -> None:
        """This gang alone steps aside for a while; the others of its group go on."""
        self._until[gang.id] = until_ms
        heapq.heappush(self._backoff, (until_ms, gang.id))
        self._expose(gang.group)

    def wake(self, trigger: Trigger) -> None:
        for key, group in list(self._groups.items()):
            if group.refusal is not None and trigger in group.refusal.cured_by:
                group.refusal = None
                self._expose(key)

    def wake_all(self) -> None:
        for key, group in list(self._groups.items()):
            group.refusal = None
            self._expose(key)

    def wake_due(self, now_ms: int) -> None:
        while self._backoff and self._backoff[0][0] <= now_ms:
            until, job = heapq.heappop(self._backoff)
            if self._until.get(job) == until:
                del self._until[job]
                self._queue(self.gangs[job])

    def next_due_ms(self) -> int | None:
        while self._backoff and self._until.get(self._backoff[0][1]) != self._backoff[0][0]:
            heapq.heappop(self._backoff)
        return self._backoff[0][0] if self._backoff else None

    def wants_room(self) -> bool:
        """Whether somebody here is kept waiting by what others hold."""
        return any(group.refusal is not None and group.refusal.for_room for group in self._groups.values())

    # -------------------------------------------------------------------------------------------- for `why`

    def refusal_of(self, gang: Gang) -> Refusal | None:
        group = self._groups.get(gang.group)
        return group.refusal if group is not None else None

    def backing_off_until(self, job: JobId) -> int:
        return self._until.get(job, 0)

    def position(self, gang: Gang) -> int:
        """1 for the first in line, by the order in which gangs would be tried if each found room."""
        turns, places = dict(self._turns), dict[JobId, tuple[int, str, tuple[int, ...]]]()
        for other in sorted(self.gangs.values(), key=lambda other: other.order):
            places[other.id] = (turns[other.tenant], other.tenant, other.order)
            turns[other.tenant] += self.profile.queue.charge(other)
        return 1 + sum(place < places[gang.id] for place in places.values())

    # ---------------------------------------------------------------------------------------------- inside

    def _queue(self, gang: Gang) -> None:
        group = self._groups.get(gang.group)
        if group is None:
            group = self._groups[gang.group] = _Group(gang.tenant)
        heapq.heappush(group.heap, (gang.order, gang.id))
        if group.refusal is None and group.heap[0][1] == gang.id:
            self._show(group)

    def _waits(self, entry: tuple[tuple[int, ...], JobId], key: Hashable) -> bool:
        """Whether an entry of the group `key` still stands for a gang that waits there."""
        order, job = entry
        gang = self.gangs.get(job)
        if gang is None or gang.order != order or job in self._until:
            return False
        return job not in self._apart or self._apart[job] == key

    def _expose(self, key: Hashable) -> None:
        """Bring the first of a group that is awake to the front of its line; drop a group that is empty."""
        group = self._groups.get(key)
        if group is None:
            return
        while group.heap and not self._waits(group.heap[0], key):
            heapq.heappop(group.heap)
        if not group.heap:
            del self._groups[key]
        elif group.refusal is None:
            self._show(group)

    def _show(self, group: _Group) -> None:
        tenant = group.tenant
        heap = self._ready.get(tenant)
        if heap is None:
            heap = self._ready[tenant] = []
        heapq.heappush(heap, group.heap[0])

    def _next(self) -> Gang | None:
        while self._ready:
            tenant = next(iter(self._ready))
            if len(self._ready) > 1:
                tenant = min(self._ready, key=lambda name: (self._turns[name], name))
            heap = self._ready[tenant]
            while heap:
                gang = self.gangs.get(heap[0][1])
                if gang is not None and gang.order == heap[0][0] and gang.id not in self._until:
                    group = self._groups.get(gang.group)
                    if group is not None and group.refusal is None and group.heap and group.heap[0] == heap[0]:
                        return gang
                heapq.heappop(heap)
            del self._ready[tenant]
        return None
