"""Who waits: lines of pending gangs, ready, backing off, or asleep until something that could help them happens.

Gangs that no plugin can tell apart form a group and wait behind each other: when its first is refused the whole group
sleeps, and when it is woken only its first is tried. Groups that ask nodes for the same (of many projects, say) are of one
kind: when no node has room for one of them, none has for the others, and the whole kind sleeps. So a wake-up costs as many
tries as there are kinds of work, not as many as there are jobs. Lines of different tenants take turns by the charge of
what they started.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Generator, Hashable

from hodei.control.queue.sorted_keys import SortedKeys
from hodei.engine.plan import Refusal
from hodei.engine.points import Trigger
from hodei.engine.profile import Profile
from hodei.engine.view import Gang, View
from hodei.model.ids import JobId

# Ends with the number of the job, so that it stands for the gang.
Order = tuple[int, ...]


class _Kind:
    """Groups whose gangs ask nodes for the same, by their keys. `refusal` is set while all of them sleep."""

    __slots__ = ("groups", "refusal")

    def __init__(self) -> None:
        self.groups: dict[Hashable, None] = {}
        self.refusal: Refusal | None = None


class _Group:
    """Equal gangs in queue order. `refusal` is set while the group sleeps."""

    __slots__ = ("alike", "heap", "key", "kind", "rank", "refusal", "tenant")

    def __init__(self, key: Hashable, tenant: str, kind: _Kind, alike: Hashable) -> None:
        self.key = key
        self.tenant = tenant
        self.kind, self.alike = kind, alike
        self.heap: list[Order] = []
        self.refusal: Refusal | None = None
        self.rank: tuple[int, JobId] | None = None  # of its first, in a line by points

    @property
    def awake(self) -> bool:
        return self.refusal is None and self.kind.refusal is None


class SchedulingQueue:
    """The pending gangs of one profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.gangs: dict[JobId, Gang] = {}
        self._groups: dict[Hashable, _Group] = {}
        self._kinds: dict[Hashable, _Kind] = {}
        # Those of either that sleep.
        self._asleep: dict[Hashable, _Group] = {}
        self._kinds_asleep: dict[Hashable, _Kind] = {}
        self._ready: dict[str, list[Order]] = {}
        self._turns: dict[str, int] = {}
        self._clock = 0
        self._waiting: Counter[str] = Counter()
        self._backoff: list[tuple[int, JobId]] = []
        self._until: dict[JobId, int] = {}
        self._apart: dict[JobId, Hashable] = {}
        # All who wait, by order: those of each tenant among themselves. For their places in line.
        self._standing: dict[Hashable, SortedKeys[Order]] = {}

    def __len__(self) -> int:
        return len(self.gangs)

    # ------------------------------------------------------------------------------------ coming and going

    def add(self, gang: Gang, *, not_before_ms: int = 0, now_ms: int = 0) -> None:
        self._admit(gang)
        tenant = gang.tenant
        if not self._waiting[tenant]:
            # A tenant that was idle joins at the present turn: it has not saved any up. One that waits keeps its own.
            self._turns[tenant] = max(self._turns.get(tenant, 0), self._clock)
        self._waiting[tenant] += 1
        self.gangs[gang.id] = gang
        among = self._among(gang)
        standing = self._standing.get(among)
        if standing is None:
            standing = self._standing[among] = SortedKeys()
        standing.add(gang.order, self.profile.queue.charge(gang))
        if not_before_ms > now_ms:
            self._until[gang.id] = not_before_ms
            heapq.heappush(self._backoff, (not_before_ms, gang.id))
        else:
            self._queue(gang)

    def _admit(self, gang: Gang) -> None:
        self.profile.admit(gang)

    def _among(self, gang: Gang) -> Hashable:
        """Which others it can be compared with by its order alone."""
        return gang.tenant

    def remove(self, job: JobId) -> Gang | None:
        """Take a gang out; its entries in the heaps are skipped when they come up."""
        self._until.pop(job, None)
        self._apart.pop(job, None)
        gang = self.gangs.pop(job, None)
        if gang is not None:
            self._waiting[gang.tenant] -= 1
            among = self._among(gang)
            standing = self._standing[among]
            standing.remove(gang.order)
            if not standing:
                del self._standing[among]
            self._expose(gang.group)
        return gang

    def set_inherited_priority(self, job: JobId, to: int | None) -> None:
        """More important work waits for this gang, or no longer does: it goes where it belongs."""
        gang = self.gangs.get(job)
        if gang is not None and gang.inherited_priority != to:
            until = self._until.get(job, 0)
            self.remove(job)
            gang.inherited_priority = to
            self.add(gang, not_before_ms=until)

    def started(self, gang: Gang) -> None:
        self._clock = max(self._clock, self._turns[gang.tenant])
        self._turns[gang.tenant] += self.profile.queue.charge(gang)
        self.remove(gang.id)

    def take_turns_of(self, other: SchedulingQueue) -> None:
        """Tenants go on with what they have been charged in another line, which this one takes the place of."""
        self._turns, self._clock = dict(other._turns), other._clock

    # ------------------------------------------------------------------------------------------- the order

    def ready(self, view: View | None = None) -> Generator[Gang, None, None]:
        """Gangs to try, in order; the caller must say `started`, `refused` or `back_off` of each before the next."""
        while (gang := self._next()) is not None:
            yield gang

    def refused(self, gang: Gang, refusal: Refusal) -> None:
        """The group of `gang` sleeps until one of the refusal's cures."""
        if refusal.by_labels and gang.id not in self._apart:
            self._set_apart(gang)
        group = self._groups[gang.group]
        if refusal.by_nodes and gang.id not in self._apart:
            group.kind.refusal = refusal
            self._kinds_asleep[gang.alike] = group.kind
        else:
            group.refusal = refusal
            self._asleep[gang.group] = group

    def _set_apart(self, gang: Gang) -> None:
        """Others of its group may be free to go: from now on it waits among those with its project and labels."""
        before, labels = gang.group, tuple(sorted(gang.job.labels.items()))
        gang.group = self._apart[gang.id] = (before, gang.job.project, labels)
        heapq.heappush(self._group_of(gang).heap, gang.order)
        self._expose(before)

    def _group_of(self, gang: Gang) -> _Group:
        group = self._groups.get(gang.group)
        if group is None:
            # One that was set apart is not like the others of its kind any more.
            alike = gang.group if gang.id in self._apart else gang.alike
            kind = self._kinds.get(alike)
            if kind is None:
                kind = self._kinds[alike] = _Kind()
            group = self._groups[gang.group] = _Group(gang.group, gang.tenant, kind, alike)
            kind.groups[gang.group] = None
        else:
            gang.group = group.key  # the same object for all of them
        return group

    def back_off(self, gang: Gang, until_ms: int) -> None:
        """This gang alone steps aside for a while; the others of its group go on."""
        self._until[gang.id] = until_ms
        heapq.heappush(self._backoff, (until_ms, gang.id))
        self._expose(gang.group)

    def wake(self, *triggers: Trigger) -> None:
        for alike, kind in list(self._kinds_asleep.items()):
            if kind.refusal is not None and not set(triggers).isdisjoint(kind.refusal.requeue_on):
                kind.refusal = None
                del self._kinds_asleep[alike]
                self._kind_woken(alike, kind)
        for key, group in list(self._asleep.items()):
            if group.refusal is not None and not set(triggers).isdisjoint(group.refusal.requeue_on):
                group.refusal = None
                del self._asleep[key]
                self._expose(key)

    def _kind_woken(self, alike: Hashable, kind: _Kind) -> None:
        for key in list(kind.groups):
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

    def needs_capacity(self) -> bool:
        """Whether somebody here is kept waiting by what others hold."""
        asleep = [kind.refusal for kind in self._kinds_asleep.values()]
        asleep += [group.refusal for group in self._asleep.values()]
        return any(refusal is not None and refusal.for_capacity for refusal in asleep)

    # -------------------------------------------------------------------------------------------- for `why`

    def refusal_of(self, gang: Gang) -> Refusal | None:
        group = self._groups.get(gang.group)
        return (group.refusal or group.kind.refusal) if group is not None else None

    def backing_off_until(self, job: JobId) -> int:
        return self._until.get(job, 0)

    def position(self, gang: Gang, view: View | None = None) -> int:
        """1 for the first in line, by the order in which gangs would be tried if each found room."""
        mine = self._standing[gang.tenant]
        ahead = mine.before(gang.order)
        if len(self._standing) == 1:
            return 1 + ahead
        turn = self._turns[gang.tenant] + mine.weight_before(gang.order)
        for tenant, standing in self._standing.items():
            if tenant != gang.tenant:
                # Tenants with the same turn go by their names.
                ahead += standing.lighter(turn - self._turns[str(tenant)], or_equal=str(tenant) < gang.tenant)
        return 1 + ahead

    # ---------------------------------------------------------------------------------------------- inside

    def _queue(self, gang: Gang) -> None:
        group = self._group_of(gang)
        heapq.heappush(group.heap, gang.order)
        if group.refusal is None and group.heap[0] is gang.order:
            self._show(group)

    def _waits(self, order: Order, key: Hashable) -> bool:
        """Whether an entry of the group `key` still stands for a gang that waits there."""
        job = order[-1]
        gang = self.gangs.get(job)
        if gang is None or gang.order != order or job in self._until:
            return False
        return job not in self._apart or self._apart[job] == key

    def _expose(self, key: Hashable) -> None:
        """Bring the first of a group that is awake to the front of its line; drop a group that is empty."""
        group = self._groups.get(key)
        if group is None:
            return
        # The last of a heap goes at no cost. Arrays go from the last on: else all of them would be popped at the first's end.
        while group.heap and not self._waits(group.heap[-1], key):
            group.heap.pop()
        while group.heap and not self._waits(group.heap[0], key):
            heapq.heappop(group.heap)
        if not group.heap:
            self._dissolve(group)
        elif group.refusal is None:
            self._show(group)

    def _dissolve(self, group: _Group) -> None:
        del self._groups[group.key]
        self._asleep.pop(group.key, None)
        del group.kind.groups[group.key]
        if not group.kind.groups:
            del self._kinds[group.alike]
            self._kinds_asleep.pop(group.alike, None)

    def _show(self, group: _Group) -> None:
        """The first of a group comes to the front of its line, unless all of its kind sleep."""
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
                tenant = min(self._ready, key=lambda name: (self._turns[name], name))
            heap = self._ready[tenant]
            while heap:
                gang = self.gangs.get(heap[0][-1])
                if gang is not None and gang.order == heap[0] and gang.id not in self._until:
                    group = self._groups.get(gang.group)
                    if group is not None and group.awake and group.heap and group.heap[0] == heap[0]:
                        return gang
                heapq.heappop(heap)
            del self._ready[tenant]
        return None
