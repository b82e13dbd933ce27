"""The scheduling queue of a profile: pending gangs that are ready, back off, or are parked until a trigger fires.

Gangs that no plugin distinguishes form a group: when the first is refused the whole group is parked, and when a trigger
fires only the first is tried. Groups with equal requests to nodes (of different projects, for example) are of one kind:
if no node has capacity for one of them, none has for the others, and the whole kind is parked. So a wake-up costs as many
tries as there are kinds of work, not as many as there are jobs. Tenants take turns by the charge of what they started.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Hashable

from hodei.control.queue.sorted_keys import SortedKeys
from hodei.engine.plan import Refusal
from hodei.engine.points import Trigger
from hodei.engine.profile import Profile
from hodei.engine.view import Gang, View
from hodei.model.ids import JobId

# Ends with the number of the job, so that it identifies the gang.
Order = tuple[int, ...]


class _Kind:
    """Groups with equal requests to nodes, by their keys. `refusal` is set while all of them are parked."""

    __slots__ = ("groups", "refusal")

    def __init__(self) -> None:
        self.groups: dict[Hashable, None] = {}
        self.refusal: Refusal | None = None


class _Group:
    """Equal gangs in queue order. `refusal`: set while parked. `rank`: of its first gang, in a multifactor queue."""

    __slots__ = ("heap", "key", "kind", "kind_key", "rank", "refusal", "tenant")

    def __init__(self, key: Hashable, tenant: str, kind: _Kind, kind_key: Hashable) -> None:
        self.key = key
        self.tenant = tenant
        self.kind, self.kind_key = kind, kind_key
        self.heap: list[Order] = []
        self.refusal: Refusal | None = None
        self.rank: tuple[int, JobId] | None = None

    @property
    def active(self) -> bool:
        return self.refusal is None and self.kind.refusal is None


class GangQueue(ABC):
    """What all queues have in common: the pending gangs of one profile, and those that back off."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.gangs: dict[JobId, Gang] = {}
        self._backoff: list[tuple[int, JobId]] = []
        self._until: dict[JobId, int] = {}

    def __len__(self) -> int:
        return len(self.gangs)

    @abstractmethod
    def _queue(self, gang: Gang) -> None:
        """Let a gang take part in the order."""

    def _queue_at(self, gang: Gang, not_before_ms: int, now_ms: int) -> None:
        if not_before_ms > now_ms:
            self._wait_until(gang.id, not_before_ms)
        else:
            self._queue(gang)

    def _wait_until(self, job: JobId, until_ms: int) -> None:
        self._until[job] = until_ms
        heapq.heappush(self._backoff, (until_ms, job))

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

    def backing_off_until(self, job: JobId) -> int:
        return self._until.get(job, 0)


class SchedulingQueue(GangQueue):
    """A queue in the order of `queue_sort`, with turns of tenants."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self._groups: dict[Hashable, _Group] = {}
        self._kinds: dict[Hashable, _Kind] = {}
        self._parked: dict[Hashable, _Group] = {}
        self._parked_kinds: dict[Hashable, _Kind] = {}
        # By tenant: the first gangs of active groups, the virtual time, and the number of pending gangs.
        self._ready: dict[str, list[Order]] = {}
        self._virtual_time: dict[str, int] = {}
        self._clock = 0
        self._pending: Counter[str] = Counter()
        # Gangs that form groups of their own, because of their labels.
        self._separated: dict[JobId, Hashable] = {}
        # All gangs in queue order, by tenant, for `position`.
        self._positions: dict[Hashable, SortedKeys[Order]] = {}

    def add(self, gang: Gang, *, not_before_ms: int = 0, now_ms: int = 0) -> None:
        self._admit(gang)
        tenant = gang.tenant
        if not self._pending[tenant]:
            # A tenant that was idle joins at the present turn: turns are not saved up.
            self._virtual_time[tenant] = max(self._virtual_time.get(tenant, 0), self._clock)
        self._pending[tenant] += 1
        self.gangs[gang.id] = gang
        key = self._position_key(gang)
        positions = self._positions.get(key)
        if positions is None:
            positions = self._positions[key] = SortedKeys()
        positions.add(gang.order, self.profile.queue.charge(gang))
        self._queue_at(gang, not_before_ms, now_ms)

    def _admit(self, gang: Gang) -> None:
        self.profile.admit(gang)

    def _position_key(self, gang: Gang) -> Hashable:
        """Gangs with equal keys are compared by their order alone."""
        return gang.tenant

    def remove(self, job: JobId) -> Gang | None:
        """Remove a gang; its entries in the heaps are skipped later."""
        self._until.pop(job, None)
        self._separated.pop(job, None)
        gang = self.gangs.pop(job, None)
        if gang is not None:
            self._pending[gang.tenant] -= 1
            key = self._position_key(gang)
            positions = self._positions[key]
            positions.remove(gang.order)
            if not positions:
                del self._positions[key]
            self._update_group(gang.group)
        return gang

    def set_inherited_priority(self, job: JobId, to: int | None) -> None:
        """Move a gang to the position of a priority that it inherits; None for its own."""
        gang = self.gangs.get(job)
        if gang is not None and gang.inherited_priority != to:
            until = self._until.get(job, 0)
            self.remove(job)
            gang.inherited_priority = to
            self.add(gang, not_before_ms=until)

    def started(self, gang: Gang) -> None:
        self._clock = max(self._clock, self._virtual_time[gang.tenant])
        self._virtual_time[gang.tenant] += self.profile.queue.charge(gang)
        self.remove(gang.id)

    def copy_virtual_time(self, other: SchedulingQueue) -> None:
        """Take over the charges of tenants from the queue that this one replaces."""
        self._virtual_time, self._clock = dict(other._virtual_time), other._clock

    def ready(self, view: View | None = None) -> Generator[Gang, None, None]:
        """Gangs to try, in order; for each the caller must call `started`, `refused` or `back_off` before the next."""
        while (gang := self._next()) is not None:
            yield gang

    def refused(self, gang: Gang, refusal: Refusal) -> None:
        """Park the group of the gang, or its kind, until a trigger of the refusal fires."""
        if refusal.by_labels and gang.id not in self._separated:
            self._separate(gang)
        group = self._groups[gang.group]
        if refusal.by_nodes and gang.id not in self._separated:
            group.kind.refusal = refusal
            self._parked_kinds[gang.shape_key] = group.kind
        else:
            group.refusal = refusal
            self._parked[gang.group] = group

    def _separate(self, gang: Gang) -> None:
        """Move a gang to a group of its project and labels: the others of its group may be schedulable."""
        before, labels = gang.group, tuple(sorted(gang.job.labels.items()))
        gang.group = self._separated[gang.id] = (before, gang.job.project, labels)
        heapq.heappush(self._group_of(gang).heap, gang.order)
        self._update_group(before)

    def _group_of(self, gang: Gang) -> _Group:
        group = self._groups.get(gang.group)
        if group is None:
            # A separated gang is not of its kind any more.
            kind_key = gang.group if gang.id in self._separated else gang.shape_key
            kind = self._kinds.get(kind_key)
            if kind is None:
                kind = self._kinds[kind_key] = _Kind()
            group = self._groups[gang.group] = _Group(gang.group, gang.tenant, kind, kind_key)
            kind.groups[gang.group] = None
        else:
            gang.group = group.key  # the same object for all of them
        return group

    def back_off(self, gang: Gang, until_ms: int) -> None:
        """Only this gang waits; the others of its group stay active."""
        self._wait_until(gang.id, until_ms)
        self._update_group(gang.group)

    def wake(self, *triggers: Trigger) -> None:
        for kind_key, kind in list(self._parked_kinds.items()):
            if kind.refusal is not None and not set(triggers).isdisjoint(kind.refusal.requeue_on):
                kind.refusal = None
                del self._parked_kinds[kind_key]
                self._kind_woken(kind_key, kind)
        for key, group in list(self._parked.items()):
            if group.refusal is not None and not set(triggers).isdisjoint(group.refusal.requeue_on):
                group.refusal = None
                del self._parked[key]
                self._update_group(key)

    def _kind_woken(self, kind_key: Hashable, kind: _Kind) -> None:
        for key in list(kind.groups):
            self._update_group(key)

    def needs_capacity(self) -> bool:
        """Whether preemption could help a gang here."""
        parked = [kind.refusal for kind in self._parked_kinds.values()]
        parked += [group.refusal for group in self._parked.values()]
        return any(refusal is not None and refusal.for_capacity for refusal in parked)

    def refusal_of(self, gang: Gang) -> Refusal | None:
        group = self._groups.get(gang.group)
        return (group.refusal or group.kind.refusal) if group is not None else None

    def position(self, gang: Gang, view: View | None = None) -> int:
        """1 for the first gang, in the order of tries if every gang fitted."""
        mine = self._positions[gang.tenant]
        ahead = mine.before(gang.order)
        if len(self._positions) == 1:
            return 1 + ahead
        virtual_ms = self._virtual_time[gang.tenant] + mine.weight_before(gang.order)
        for tenant, positions in self._positions.items():
            if tenant != gang.tenant:
                # Tenants with equal turns go by name.
                ahead += positions.lighter(
                    virtual_ms - self._virtual_time[str(tenant)], or_equal=str(tenant) < gang.tenant
                )
        return 1 + ahead

    def _queue(self, gang: Gang) -> None:
        group = self._group_of(gang)
        heapq.heappush(group.heap, gang.order)
        if group.refusal is None and group.heap[0] is gang.order:
            self._make_ready(group)

    def _is_current(self, order: Order, key: Hashable) -> bool:
        """Whether an entry of the group `key` still belongs to a gang of the group."""
        job = order[-1]
        gang = self.gangs.get(job)
        if gang is None or gang.order != order or job in self._until:
            return False
        return job not in self._separated or self._separated[job] == key

    def _update_group(self, key: Hashable) -> None:
        """Make the first gang of an active group ready; drop an empty group."""
        group = self._groups.get(key)
        if group is None:
            return
        # Removing the last entry of a heap costs nothing, and arrays are cancelled from the last element on.
        while group.heap and not self._is_current(group.heap[-1], key):
            group.heap.pop()
        while group.heap and not self._is_current(group.heap[0], key):
            heapq.heappop(group.heap)
        if not group.heap:
            self._drop_group(group)
        elif group.refusal is None:
            self._make_ready(group)

    def _drop_group(self, group: _Group) -> None:
        del self._groups[group.key]
        self._parked.pop(group.key, None)
        del group.kind.groups[group.key]
        if not group.kind.groups:
            del self._kinds[group.kind_key]
            self._parked_kinds.pop(group.kind_key, None)

    def _make_ready(self, group: _Group) -> None:
        """Make the first gang of a group ready, unless its kind is parked."""
        if group.kind.refusal is not None:
            return
        tenant = group.tenant
        heap = self._ready.get(tenant)
        if heap is None:
            heap = self._ready[tenant] = []
        heapq.heappush(heap, group.heap[0])

    def _next(self) -> Gang | None:
        while self._ready:
            tenant = next(iter(self._ready))
            if len(self._ready) > 1:
                tenant = min(self._ready, key=lambda name: (self._virtual_time[name], name))
            heap = self._ready[tenant]
            while heap:
                gang = self.gangs.get(heap[0][-1])
                if gang is not None and gang.order == heap[0] and gang.id not in self._until:
                    group = self._groups.get(gang.group)
                    if group is not None and group.active and group.heap and group.heap[0] == heap[0]:
                        return gang
                heapq.heappop(heap)
            del self._ready[tenant]
        return None
