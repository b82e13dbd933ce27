"""The pending gangs of a backfill queue as columns: a round over all of them is a few operations on arrays.

If the order does not change with time, only the first gangs have a slot in the columns, as many as the lookahead; the
others wait beyond them and move up. So a step costs no more with a million pending gangs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hodei.control.queue.sorted_keys import SortedKeys
from hodei.engine.nodes import Ints, Mask
from hodei.engine.points import ANY_TRIGGER, PendingColumns, TimedQueue, Trigger
from hodei.engine.profile import Shapes
from hodei.engine.view import Gang
from hodei.model.ids import JobId
from hodei.model.resources import CPU, Resources

BIT: dict[Trigger, int] = {trigger: 1 << number for number, trigger in enumerate(ANY_TRIGGER)}
_NEVER = np.iinfo(np.int64).max
# Bits of the column PARKED besides those of the triggers: the gang is parked, and the slot is free.
_IS_PARKED, _FREE = 1 << 40, 1 << 41
_WAITING = len(PendingColumns.__struct_fields__)
_ID, _SUBMITTED, _ESTIMATE, _PRIORITY = 0, 1, 2, 4
_LIMIT, _GROUP, _PARKED, _TRIED, _KEY = range(_WAITING, _WAITING + 5)
# Up to this many changes of the order are applied one by one.
_FEW = 16
# Up to this many slots are evaluated without NumPy, which is faster.
_FEW_SLOTS = 48
# Fractions of the cluster as integers.
_SCALE = 1e12
OrderKey = tuple[int, int, JobId]
Slots = list[int] | NDArray[np.intp]


class Gap(NamedTuple):
    """Which gangs may start before a start reservation, by amounts: those that end before it (`length_ms`), those that fit
    beside it, and those that fit on another node (None: there is none). Amounts in the order of `PendingTable.needs`."""

    length_ms: int
    spare: Callable[[], list[int]]
    elsewhere: Callable[[], list[int] | None]


class PendingTable:
    """`gangs`: all gangs of the queue, with those that back off. A removed gang frees its slot at once, but only `compact`
    reuses slots, so that an iteration over them stays valid."""

    def __init__(self, queue: TimedQueue, gangs: Mapping[JobId, Gang]) -> None:
        self._queue, self._gangs = queue, gangs
        self.steady = not queue.reorders
        self._fills_in_order = queue.fill_order(PendingColumns(*np.zeros((_WAITING, 0), dtype=np.int64)), 0) is None
        self._window = max(queue.lookahead, queue.reservation_depth, 1) if self.steady else _NEVER
        self.slots: dict[JobId, int] = {}
        self.end = 0
        self._holes: list[int] = []
        self.needs: dict[str, int] = {}  # by resource: the row of the largest request of a member
        self._groups = Shapes()
        self._sorted: list[OrderKey] = []
        self._order_keys: dict[JobId, OrderKey] = {}
        self._beyond: SortedKeys[OrderKey] = SortedKeys()
        self.of_user: dict[str, set[JobId]] = {}
        # Gangs added since the queue last cleared it; the triggers that any, and that all, parked gangs wait for.
        self.added: list[JobId] = []
        self._any_trigger, self._all_triggers = 0, -1
        # Rows: those of `PendingColumns`, _LIMIT to _KEY, then the needs; one column for each slot.
        self.data: Ints = np.zeros((_WAITING + 5, 64), dtype=np.int64)

    def __len__(self) -> int:
        """The number of gangs, those beyond the columns included."""
        return len(self._order_keys)

    def __contains__(self, job: JobId) -> bool:
        return job in self._order_keys

    def add(self, gang: Gang) -> None:
        values, largest = self._values(gang)
        order_key = self._order_key(values)
        self._order_keys[gang.id] = order_key
        if len(self.slots) >= self._window and order_key > self._sorted[-1]:
            self._beyond.add(order_key)
            return
        self._fill_slot(gang, values, largest, order_key)
        if len(self.slots) > self._window:
            last = self._sorted[-1]
            self._free_slot(last[2], last)
            self._beyond.add(last)

    def remove(self, job: JobId) -> None:
        order_key = self._order_keys.pop(job, None)
        if order_key is None:
            return
        if job not in self.slots:
            self._beyond.remove(order_key)
            return
        self._free_slot(job, order_key)
        self._move_up()

    def _move_up(self) -> None:
        """Gangs beyond the columns take the free slots."""
        while self._beyond and len(self.slots) < self._window:
            job = self._beyond.pop_first()[2]
            gang = self._gangs[job]
            values, largest = self._values(gang)
            self._order_keys[job] = order_key = self._order_key(values)  # its estimate may have changed
            self._fill_slot(gang, values, largest, order_key)

    def _values(self, gang: Gang) -> tuple[tuple[int, ...], Resources]:
        job = gang.job
        if len(gang.members) == 1:
            largest: Resources = gang.members[0].task.request if gang.needed[0] else {}
            cpus = len(gang.needed[0]) * largest.get(CPU, 0)
        else:
            largest, cpus = {}, 0
            for member, numbers in zip(gang.members, gang.needed, strict=True):
                cpus += len(numbers) * member.task.request.get(CPU, 0)
                if numbers:
                    for resource, amount in member.task.request.items():
                        largest[resource] = max(largest.get(resource, 0), amount)
        expected_ms = gang.expected_ms or gang.estimate_ms
        return (gang.id, gang.submitted_ms, expected_ms, cpus, job.priority, job.deadline_ms), largest

    def _order_key(self, values: tuple[int, ...]) -> OrderKey:
        """Its position in a fixed order."""
        if not self.steady:
            return 0, values[1], values[0]
        if self._queue.by_submission:
            return values[1], values[1], values[0]
        return int(self._queue.order(PendingColumns(*map(np.int64, values)), 0)), values[1], values[0]  # type: ignore[arg-type]

    def _fill_slot(self, gang: Gang, values: tuple[int, ...], largest: Resources, order_key: OrderKey) -> None:
        for resource in largest:
            if resource not in self.needs:
                self.needs[resource] = len(self.data)
                self.data = np.concatenate([self.data, np.zeros_like(self.data[:1])])
        slot = self.end
        self.end += 1
        if self.end > self.data.shape[1]:
            self.data = np.concatenate([self.data, np.zeros_like(self.data)], axis=1)
        self.slots[gang.id] = slot
        more = (gang.estimate_ms, self._groups.number(gang.group), 0, 0, order_key[0])
        self.data[:, slot] = (*values, *more, *[largest.get(resource, 0) for resource in self.needs])
        self.of_user.setdefault(gang.job.user, set()).add(gang.id)
        self.added.append(gang.id)
        if self.steady:
            insort(self._sorted, order_key)

    def _free_slot(self, job: JobId, order_key: OrderKey) -> None:
        slot = self.slots.pop(job)
        if self.steady:
            del self._sorted[bisect_left(self._sorted, order_key)]
        self.data[_PARKED, slot] = _FREE
        self._holes.append(slot)
        user = self._gangs[job].job.user
        self.of_user[user].discard(job)
        if not self.of_user[user]:
            del self.of_user[user]

    def compact(self) -> None:
        """Move gangs from the end to free slots."""
        if self._holes:
            for slot in sorted(self._holes, reverse=True):
                self.end -= 1
                if slot != self.end:
                    self.data[:, slot] = self.data[:, self.end]
                    self.slots[self.data.item(_ID, slot)] = slot
            self._holes.clear()

    def reestimate(self, expected: Mapping[JobId, int]) -> None:
        """Reorder gangs whose expected run times have changed."""
        slots = [self.slots[job] for job in expected]
        self.data[_ESTIMATE, slots] = list(expected.values())
        if not self.steady:
            return
        keys = self._queue.order(PendingColumns(*self.data[:_WAITING, slots]), 0)
        self.data[_KEY, slots] = keys
        before = {self._order_keys[job] for job in expected}
        for job, key in zip(expected, keys.tolist(), strict=True):
            self._order_keys[job] = (key, self._order_keys[job][1], job)
        if len(expected) > _FEW:
            self._sorted = sorted(
                [
                    *(self._order_keys[job] for job in expected),
                    *(order_key for order_key in self._sorted if order_key not in before),
                ]
            )
        else:
            for order_key in before:
                del self._sorted[bisect_left(self._sorted, order_key)]
            for job in expected:
                insort(self._sorted, self._order_keys[job])
        while self._beyond and self._sorted and self._beyond.first < self._sorted[-1]:
            last = self._sorted[-1]
            self._free_slot(last[2], last)
            self._move_up()
            self._beyond.add(last)
        self._move_up()

    def park(self, job: JobId, requeue_on: Sequence[Trigger], *, but: Sequence[JobId]) -> None:
        """Park a gang, with those of its group that would run as long or longer, `but` these."""
        bits, slot, end = _IS_PARKED, self.slots[job], self.end
        for trigger in requeue_on:
            bits |= BIT[trigger]
        alike: Mask = (self.data[_GROUP, :end] == self.data[_GROUP, slot]) & (self.data[_PARKED, :end] != _FREE)
        alike &= self.data[_LIMIT, :end] >= self.data[_LIMIT, slot]
        if but:
            alike[[self.slots[other] for other in but if other != job and other in self.slots]] = False
        self.data[_PARKED, :end][alike] = bits
        self.data[_TRIED, :end][alike] = 1
        self._any_trigger |= bits
        self._all_triggers &= bits

    def wake(self, bits: int) -> bool:
        """Wake the gangs that wait for one of these triggers; returns whether there may be any."""
        if not bits & self._any_trigger:
            return False
        if bits & self._all_triggers:
            self.wake_all()
            return True
        parked = self.data[_PARKED, : self.end]
        parked[(parked & bits) != 0] = 0
        return True

    def wake_all(self) -> None:
        self.data[_PARKED, : self.end] = 0
        if self._holes:
            self.data[_PARKED, self._holes] = _FREE
        self._any_trigger, self._all_triggers = 0, -1

    def active(self, slot: int) -> bool:
        return not self.data.item(_PARKED, slot)

    def job_in(self, slot: int) -> JobId:
        return int(self.data.item(_ID, slot))

    def all_but(self, jobs: Sequence[JobId]) -> Slots:
        """All used slots but those of these jobs."""
        left_out = {self.slots[job] for job in jobs}
        if self.end <= _FEW_SLOTS:
            return [slot for slot in range(self.end) if slot not in left_out]
        mask = np.ones(self.end, dtype=np.bool_)
        mask[list(left_out)] = False
        return mask.nonzero()[0]

    def fitting(self, slots: Slots, largest_free: Sequence[int], gap: Gap | None) -> Slots:
        """The slots worth a try: not parked, no member exceeds the amounts of `largest_free`, and they fit the gap. A
        new gang is tried even if it does not fit the gap, so that it gets a reason."""
        if isinstance(slots, list) and len(slots) <= _FEW_SLOTS:
            return self._fitting_few(slots, largest_free, gap)
        slots = np.asarray(slots, dtype=np.intp)
        slots = slots[self.data[_PARKED].take(slots) == 0]
        for row, most in zip(self.needs.values(), largest_free, strict=True):
            slots = slots[self.data[row].take(slots) <= most]
        if gap is None or not len(slots):
            return slots
        may = (self.data[_LIMIT].take(slots) <= gap.length_ms) | (self.data[_TRIED].take(slots) == 0)
        if not may.all():
            for amounts in (gap.spare(), gap.elsewhere()):
                if amounts is not None:
                    fits = np.ones(len(slots), dtype=np.bool_)
                    for row, most in zip(self.needs.values(), amounts, strict=True):
                        fits &= self.data[row].take(slots) <= most
                    may |= fits
        passing: Slots = slots[may]
        return passing

    def _fitting_few(self, slots: list[int], largest_free: Sequence[int], gap: Gap | None) -> Slots:
        parked = self.data[_PARKED, : self.end].tolist()
        slots = self._small([slot for slot in slots if not parked[slot]], largest_free)
        if gap is None or not slots:
            return slots
        limits, tried = self.data[_LIMIT, : self.end].tolist(), self.data[_TRIED, : self.end].tolist()
        judged = [slot for slot in slots if limits[slot] > gap.length_ms and tried[slot]]
        if judged:
            found = set(self._small(judged, gap.spare()))
            elsewhere = gap.elsewhere() if len(found) < len(judged) else None
            if elsewhere is not None:
                found.update(self._small(judged, elsewhere))
            slots = [slot for slot in slots if slot in found or slot not in judged]
        return slots

    def _small(self, slots: list[int], largest_free: Sequence[int]) -> list[int]:
        """The slots whose requests do not exceed these amounts."""
        for row, most in zip(self.needs.values(), largest_free, strict=True):
            if slots:
                needs = self.data[row, : self.end].tolist()
                slots = [slot for slot in slots if needs[slot] <= most]
        return slots

    def highest_priority(self) -> int:
        """Of the gangs in the columns; far below all others if there is none."""
        here = self.data[_PARKED, : self.end] != _FREE
        return int(self.data[_PRIORITY, : self.end].max(initial=-_NEVER, where=here))

    def in_order(self, now_ms: int) -> Iterator[Gang]:
        """The gangs in the columns, in order; gangs that are removed meanwhile are skipped."""
        if self.steady:
            at = 0
            while at < len(self._sorted):
                job = self._sorted[at][2]
                yield self._gangs[job]
                at += job in self.slots
            return
        end = self.end
        keys = np.where(self.data[_PARKED, :end] == _FREE, _NEVER, self._queue.order(self.waiting(), now_ms))
        while len(keys):
            slot = int(keys.argmin())
            if keys.item(slot) == _NEVER:
                return
            slot = self._first(np.flatnonzero(keys == keys.item(slot)))
            keys[slot] = _NEVER
            if self.data.item(_PARKED, slot) != _FREE:
                yield self._gangs[self.data.item(_ID, slot)]

    def pick(self, slots: Slots, now_ms: int, worth: Callable[[], list[float]]) -> int:
        """The slot that comes first in backfill. `worth`: of a unit of each resource, to balance resources."""
        if len(slots) == 1:
            return int(slots[0])
        slots = np.asarray(slots)
        if self._queue.balances:
            used = sum(
                self.data[row].take(slots) * each for row, each in zip(self.needs.values(), worth(), strict=True)
            )
            keys = -np.rint(used * _SCALE).astype(np.int64)
        elif self.steady and self._fills_in_order:
            keys = self.data[_KEY].take(slots)
        else:
            waiting = PendingColumns(*self.data[:_WAITING, slots])
            found = self._queue.fill_order(waiting, now_ms)
            keys = found if found is not None else self._queue.order(waiting, now_ms)
        return self._first(slots[keys == keys.item(keys.argmin())])

    def _first(self, slots: NDArray[np.intp]) -> int:
        """The first of slots with equal keys."""
        if len(slots) > 1:
            slots = slots[np.lexsort((self.data[_ID, slots], self.data[_SUBMITTED, slots]))]
        return int(slots[0])

    def waiting(self) -> PendingColumns:
        return PendingColumns(*self.data[:_WAITING, : self.end])

    def order_key(self, job: JobId) -> OrderKey:
        return self._order_keys[job]

    def position(self, gang: Gang, now_ms: int) -> int:
        """1 for the first gang; gangs beyond the columns come after all others."""
        mine = self._order_keys[gang.id]
        if gang.id not in self.slots:
            return 1 + len(self.slots) + self._beyond.before(mine)
        if self.steady:
            return 1 + bisect_left(self._sorted, mine)
        slot, end, used = self.slots[gang.id], self.end, self.data[_PARKED, : self.end] != _FREE
        keys, submitted, ids = (
            self._queue.order(self.waiting(), now_ms),
            self.data[_SUBMITTED, :end],
            self.data[_ID, :end],
        )
        earlier = (submitted < mine[1]) | ((submitted == mine[1]) & (ids < gang.id))
        ahead = used & ((keys < keys[slot]) | ((keys == keys[slot]) & earlier))
        return 1 + int(np.count_nonzero(ahead))
