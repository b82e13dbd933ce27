"""Who waits in a line that promises starts, as columns: a look over all of them is a few operations on arrays.

Where the order does not change with time, only the first of it stand in the columns, as many as the line looks ahead;
the others wait beyond them and move up as those in front leave. So a step costs no more with a million in line.
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

BIT: dict[Trigger, int] = {trigger: 1 << place for place, trigger in enumerate(ANY_TRIGGER)}
_NEVER = np.iinfo(np.int64).max
# Bits of `asleep` beside those of the triggers that wake: asleep at all, and nobody is there (any more).
_SLEEPS, _GONE = 1 << 40, 1 << 41
_WAITING = len(PendingColumns.__struct_fields__)
_ID, _SUBMITTED, _ESTIMATE, _PRIORITY = 0, 1, 2, 4
_LIMIT, _GROUP, _ASLEEP, _TRIED, _KEY = range(_WAITING, _WAITING + 5)
# Fewer changes of place than these are made one by one.
_FEW = 16
# Of so few each is looked at in plain numbers.
_FEW_SEATS = 48
# What is left is weighed in parts of a whole cluster.
_PARTS = 1e12
Place = tuple[int, int, JobId]
Slots = list[int] | NDArray[np.intp]


class Gap(NamedTuple):
    """Who may go ahead of a promise, as far as amounts tell: those over by then (`length_ms`), those that fit beside it,
    and those that find room on another node (None: there is none). Largest amounts, in the order of `PendingTable.needs`."""

    length_ms: int
    beside: Callable[[], list[int]]
    elsewhere: Callable[[], list[int] | None]


class PendingTable:
    """`gangs` is the line's own, with those who are backing off as well. A gang that leaves frees its slot at once, but
    slots are given anew only by `compact`, so that a walk over them is not led astray."""

    def __init__(self, queue: TimedQueue, gangs: Mapping[JobId, Gang]) -> None:
        self._queue, self._gangs = queue, gangs
        self.steady = not queue.reorders
        self._fills_in_order = queue.fill_order(PendingColumns(*np.zeros((_WAITING, 0), dtype=np.int64)), 0) is None
        self._window = max(queue.lookahead, queue.reservation_depth, 1) if self.steady else _NEVER
        self.slots: dict[JobId, int] = {}
        self.end = 0
        self._holes: list[int] = []
        self.needs: dict[str, int] = {}  # the row in which the largest request of a member for a resource is kept
        self._groups = Shapes()
        self._sorted: list[Place] = []
        self._places: dict[JobId, Place] = {}
        self._beyond: SortedKeys[Place] = SortedKeys()
        self.of_user: dict[str, set[JobId]] = {}
        # Those who came since this was last emptied, and the cures that any and all of those asleep wait for.
        self.fresh: list[JobId] = []
        self._cures, self._common = 0, -1
        # One row for each of `PendingColumns`, then those named below, then the needs; one column for each slot.
        self.data: Ints = np.zeros((_WAITING + 5, 64), dtype=np.int64)

    def __len__(self) -> int:
        """How many wait, those beyond included."""
        return len(self._places)

    def __contains__(self, job: JobId) -> bool:
        return job in self._places

    # ------------------------------------------------------------------------------------ coming and going

    def enter(self, gang: Gang) -> None:
        values, largest = self._values(gang)
        place = self._place(values)
        self._places[gang.id] = place
        if len(self.slots) >= self._window and place > self._sorted[-1]:
            self._beyond.add(place)
            return
        self._seat(gang, values, largest, place)
        if len(self.slots) > self._window:
            last = self._sorted[-1]
            self._unseat(last[2], last)
            self._beyond.add(last)

    def leave(self, job: JobId) -> None:
        place = self._places.pop(job, None)
        if place is None:
            return
        if job not in self.slots:
            self._beyond.remove(place)
            return
        self._unseat(job, place)
        self._move_up()

    def _move_up(self) -> None:
        """Those beyond take the seats that are free."""
        while self._beyond and len(self.slots) < self._window:
            job = self._beyond.pop_first()[2]
            gang = self._gangs[job]
            values, largest = self._values(gang)
            self._places[job] = place = self._place(values)  # more may be known of it than when it came
            self._seat(gang, values, largest, place)

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

    def _place(self, values: tuple[int, ...]) -> Place:
        """Where it stands in an order that does not change."""
        if not self.steady:
            return 0, values[1], values[0]
        if self._queue.by_submission:
            return values[1], values[1], values[0]
        return int(self._queue.order(PendingColumns(*map(np.int64, values)), 0)), values[1], values[0]  # type: ignore[arg-type]

    def _seat(self, gang: Gang, values: tuple[int, ...], largest: Resources, place: Place) -> None:
        for resource in largest:
            if resource not in self.needs:
                self.needs[resource] = len(self.data)
                self.data = np.concatenate([self.data, np.zeros_like(self.data[:1])])
        slot = self.end
        self.end += 1
        if self.end > self.data.shape[1]:
            self.data = np.concatenate([self.data, np.zeros_like(self.data)], axis=1)
        self.slots[gang.id] = slot
        more = (gang.estimate_ms, self._groups.number(gang.group), 0, 0, place[0])
        self.data[:, slot] = (*values, *more, *[largest.get(resource, 0) for resource in self.needs])
        self.of_user.setdefault(gang.job.user, set()).add(gang.id)
        self.fresh.append(gang.id)
        if self.steady:
            insort(self._sorted, place)

    def _unseat(self, job: JobId, place: Place) -> None:
        slot = self.slots.pop(job)
        if self.steady:
            del self._sorted[bisect_left(self._sorted, place)]
        self.data[_ASLEEP, slot] = _GONE
        self._holes.append(slot)
        user = self._gangs[job].job.user
        self.of_user[user].discard(job)
        if not self.of_user[user]:
            del self.of_user[user]

    def compact(self) -> None:
        """Those at the end take the slots that are free."""
        if self._holes:
            for slot in sorted(self._holes, reverse=True):
                self.end -= 1
                if slot != self.end:
                    self.data[:, slot] = self.data[:, self.end]
                    self.slots[self.data.item(_ID, slot)] = slot
            self._holes.clear()

    def reestimate(self, expected: Mapping[JobId, int]) -> None:
        """More is known of how long these run: their places may be others now."""
        slots = [self.slots[job] for job in expected]
        self.data[_ESTIMATE, slots] = list(expected.values())
        if not self.steady:
            return
        keys = self._queue.order(PendingColumns(*self.data[:_WAITING, slots]), 0)
        self.data[_KEY, slots] = keys
        before = {self._places[job] for job in expected}
        for job, key in zip(expected, keys.tolist(), strict=True):
            self._places[job] = (key, self._places[job][1], job)
        if len(expected) > _FEW:
            self._sorted = sorted(
                [*(self._places[job] for job in expected), *(place for place in self._sorted if place not in before)]
            )
        else:
            for place in before:
                del self._sorted[bisect_left(self._sorted, place)]
            for job in expected:
                insort(self._sorted, self._places[job])
        while self._beyond and self._sorted and self._beyond.first < self._sorted[-1]:
            last = self._sorted[-1]
            self._unseat(last[2], last)
            self._move_up()
            self._beyond.add(last)
        self._move_up()

    # ------------------------------------------------------------------------------------ sleeping and waking

    def put_to_sleep(self, job: JobId, requeue_on: Sequence[Trigger], *, but: Sequence[JobId]) -> None:
        """A gang sleeps, and with it those of its group that would run as long or longer."""
        bits, slot, end = _SLEEPS, self.slots[job], self.end
        for trigger in requeue_on:
            bits |= BIT[trigger]
        alike: Mask = (self.data[_GROUP, :end] == self.data[_GROUP, slot]) & (self.data[_ASLEEP, :end] != _GONE)
        alike &= self.data[_LIMIT, :end] >= self.data[_LIMIT, slot]
        if but:
            alike[[self.slots[other] for other in but if other != job and other in self.slots]] = False
        self.data[_ASLEEP, :end][alike] = bits
        self.data[_TRIED, :end][alike] = 1
        self._cures |= bits
        self._common &= bits

    def wake(self, bits: int) -> bool:
        """Those who wait for one of these; whether there may be any."""
        if not bits & self._cures:
            return False
        if bits & self._common:
            self.wake_all()
            return True
        asleep = self.data[_ASLEEP, : self.end]
        asleep[(asleep & bits) != 0] = 0
        return True

    def wake_all(self) -> None:
        self.data[_ASLEEP, : self.end] = 0
        if self._holes:
            self.data[_ASLEEP, self._holes] = _GONE
        self._cures, self._common = 0, -1

    def awake(self, slot: int) -> bool:
        return not self.data.item(_ASLEEP, slot)

    def job_in(self, slot: int) -> JobId:
        return int(self.data.item(_ID, slot))

    # ------------------------------------------------------------------------------------------ who may be tried

    def all_but(self, jobs: Sequence[JobId]) -> Slots:
        """The slots of all in the columns but these."""
        left_out = {self.slots[job] for job in jobs}
        if self.end <= _FEW_SEATS:
            return [slot for slot in range(self.end) if slot not in left_out]
        mask = np.ones(self.end, dtype=np.bool_)
        mask[list(left_out)] = False
        return mask.nonzero()[0]

    def fitting(self, slots: Slots, mosts: Sequence[int], gap: Gap | None) -> Slots:
        """Those of them whom nothing keeps from being tried: they do not sleep, none of their members is larger than the
        largest free amount, and they may fill the gap. Whoever was not tried since it came is not judged by the gap: it
        is to be told why it waits."""
        if isinstance(slots, list) and len(slots) <= _FEW_SEATS:
            return self._fitting_few(slots, mosts, gap)
        slots = np.asarray(slots, dtype=np.intp)
        slots = slots[self.data[_ASLEEP].take(slots) == 0]
        for row, most in zip(self.needs.values(), mosts, strict=True):
            slots = slots[self.data[row].take(slots) <= most]
        if gap is None or not len(slots):
            return slots
        may = (self.data[_LIMIT].take(slots) <= gap.length_ms) | (self.data[_TRIED].take(slots) == 0)
        if not may.all():
            for amounts in (gap.beside(), gap.elsewhere()):
                if amounts is not None:
                    fits = np.ones(len(slots), dtype=np.bool_)
                    for row, most in zip(self.needs.values(), amounts, strict=True):
                        fits &= self.data[row].take(slots) <= most
                    may |= fits
        passing: Slots = slots[may]
        return passing

    def _fitting_few(self, slots: list[int], mosts: Sequence[int], gap: Gap | None) -> Slots:
        asleep = self.data[_ASLEEP, : self.end].tolist()
        slots = self._small([slot for slot in slots if not asleep[slot]], mosts)
        if gap is None or not slots:
            return slots
        limits, tried = self.data[_LIMIT, : self.end].tolist(), self.data[_TRIED, : self.end].tolist()
        judged = [slot for slot in slots if limits[slot] > gap.length_ms and tried[slot]]
        if judged:
            found = set(self._small(judged, gap.beside()))
            elsewhere = gap.elsewhere() if len(found) < len(judged) else None
            if elsewhere is not None:
                found.update(self._small(judged, elsewhere))
            slots = [slot for slot in slots if slot in found or slot not in judged]
        return slots

    def _small(self, slots: list[int], mosts: Sequence[int]) -> list[int]:
        """Those of them who need no more than that."""
        for row, most in zip(self.needs.values(), mosts, strict=True):
            if slots:
                needs = self.data[row, : self.end].tolist()
                slots = [slot for slot in slots if needs[slot] <= most]
        return slots

    # ------------------------------------------------------------------------------------------- the order

    def highest_priority(self) -> int:
        """Of those in the columns; far below all others if there is none."""
        here = self.data[_ASLEEP, : self.end] != _GONE
        return int(self.data[_PRIORITY, : self.end].max(initial=-_NEVER, where=here))

    def in_order(self, now_ms: int) -> Iterator[Gang]:
        """Those in the columns, the first in line first; those that leave meanwhile are left out."""
        if self.steady:
            at = 0
            while at < len(self._sorted):
                job = self._sorted[at][2]
                yield self._gangs[job]
                at += job in self.slots
            return
        end = self.end
        keys = np.where(self.data[_ASLEEP, :end] == _GONE, _NEVER, self._queue.order(self.waiting(), now_ms))
        while len(keys):
            slot = int(keys.argmin())
            if keys.item(slot) == _NEVER:
                return
            slot = self._first(np.flatnonzero(keys == keys.item(slot)))
            keys[slot] = _NEVER
            if self.data.item(_ASLEEP, slot) != _GONE:
                yield self._gangs[self.data.item(_ID, slot)]

    def pick(self, slots: Slots, now_ms: int, worth: Callable[[], list[float]]) -> int:
        """Which of these slots comes first among those who fill gaps. `worth`: what a unit of each resource counts for, in
        a line that wants what is left used evenly."""
        if len(slots) == 1:
            return int(slots[0])
        slots = np.asarray(slots)
        if self._queue.balances:
            used = sum(
                self.data[row].take(slots) * each for row, each in zip(self.needs.values(), worth(), strict=True)
            )
            keys = -np.rint(used * _PARTS).astype(np.int64)
        elif self.steady and self._fills_in_order:
            keys = self.data[_KEY].take(slots)
        else:
            waiting = PendingColumns(*self.data[:_WAITING, slots])
            found = self._queue.fill_order(waiting, now_ms)
            keys = found if found is not None else self._queue.order(waiting, now_ms)
        return self._first(slots[keys == keys.item(keys.argmin())])

    def _first(self, slots: NDArray[np.intp]) -> int:
        """Of those with equal keys."""
        if len(slots) > 1:
            slots = slots[np.lexsort((self.data[_ID, slots], self.data[_SUBMITTED, slots]))]
        return int(slots[0])

    def waiting(self) -> PendingColumns:
        return PendingColumns(*self.data[:_WAITING, : self.end])

    def place_of(self, job: JobId) -> Place:
        return self._places[job]

    def position(self, gang: Gang, now_ms: int) -> int:
        """1 for the first in line; those beyond come after all in the columns."""
        mine = self._places[gang.id]
        if gang.id not in self.slots:
            return 1 + len(self.slots) + self._beyond.before(mine)
        if self.steady:
            return 1 + bisect_left(self._sorted, mine)
        slot, end, there = self.slots[gang.id], self.end, self.data[_ASLEEP, : self.end] != _GONE
        keys, submitted, ids = (
            self._queue.order(self.waiting(), now_ms),
            self.data[_SUBMITTED, :end],
            self.data[_ID, :end],
        )
        as_old = (submitted < mine[1]) | ((submitted == mine[1]) & (ids < gang.id))
        ahead = there & ((keys < keys[slot]) | ((keys == keys[slot]) & as_old))
        return 1 + int(np.count_nonzero(ahead))
