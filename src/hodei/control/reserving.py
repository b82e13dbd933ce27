"""Who waits in a line that promises starts: the first in order goes first, the blocked are promised a time, and others
may pass them only where that breaks no promise (the plugin `promises` sees to that, in every line).

The gangs are kept as columns, so that a look over all of them is a few operations on arrays, however many wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from hodei.engine.book import Book
from hodei.engine.cycle import Engine
from hodei.engine.nodes import Ints
from hodei.engine.plan import Refusal
from hodei.engine.points import ANY_TRIGGER, TimedQueue, Trigger, Waiting
from hodei.engine.profile import Profile
from hodei.engine.promising import soonest
from hodei.engine.view import Gang, View
from hodei.model.ids import JobId
from hodei.model.resources import CPU

# First in line; before one who was promised a start, and over by then; beside what is promised.
StartKind = Literal["head", "backfill", "spill"]
_BIT = {trigger: 1 << place for place, trigger in enumerate(ANY_TRIGGER)}
_NEVER = np.iinfo(np.int64).max
_COLUMNS = (
    "ids",
    "submitted_ms",
    "estimate_ms",
    "cpus",
    "priority",
    "deadline_ms",
    "cures",
    "group",
    "asleep",
    "waits",
)


class ReservingLine:
    """The pending gangs of one profile whose queue is timed. `asleep` gangs were refused and nothing has changed since;
    those that do not even fit into the largest free amounts are not tried at all."""

    def __init__(self, profile: Profile, engine: Engine) -> None:
        self.profile = profile
        self.queue = cast("TimedQueue", profile.queue)
        self.gangs: dict[JobId, Gang] = {}
        self._engine = engine
        self._slots: dict[JobId, int] = {}
        self._unused: list[int] = []
        self._end = 0
        self._columns: dict[str, Ints] = {name: np.zeros(64, dtype=np.int64) for name in _COLUMNS}
        self._needs: dict[str, Ints] = {}
        self._groups: dict[object, int] = {}
        self._refusals: dict[JobId, Refusal] = {}
        self._backoff: list[tuple[int, JobId]] = []
        self._until: dict[JobId, int] = {}
        self._freed = True
        self.kind: StartKind = "head"

    def __len__(self) -> int:
        return len(self.gangs)

    # ------------------------------------------------------------------------------------ coming and going

    def add(self, gang: Gang, *, not_before_ms: int = 0, now_ms: int = 0) -> None:
        self.profile.admit(gang)
        gang.estimate_ms = gang.estimate_ms or self.queue.estimate_ms(gang)
        self.gangs[gang.id] = gang
        if not_before_ms > now_ms:
            self._until[gang.id] = not_before_ms
            heapq.heappush(self._backoff, (not_before_ms, gang.id))
        else:
            self._enter(gang)

    def _enter(self, gang: Gang) -> None:
        slot = self._unused.pop() if self._unused else self._end
        if slot == self._end:
            self._end += 1
            if self._end > len(self._columns["ids"]):
                for columns in (self._columns, self._needs):
                    for name, column in columns.items():
                        columns[name] = np.concatenate([column, np.zeros_like(column)])
        self._slots[gang.id] = slot
        cpus = sum(
            len(numbers) * m.task.request.get(CPU, 0) for m, numbers in zip(gang.members, gang.needed, strict=True)
        )
        group = self._groups.setdefault(gang.group, len(self._groups))
        values = (
            gang.id, gang.submitted_ms, gang.estimate_ms, cpus, gang.job.priority, gang.job.deadline_ms, 0, group, 0, 1,
        )  # fmt: skip
        for name, value in zip(_COLUMNS, values, strict=True):
            self._columns[name][slot] = value
        for column in self._needs.values():
            column[slot] = 0
        for member, numbers in zip(gang.members, gang.needed, strict=True):
            if numbers:
                for resource, amount in member.task.request.items():
                    need = self._needs.get(resource)
                    if need is None:
                        need = self._needs[resource] = np.zeros_like(self._columns["ids"])
                    need[slot] = max(need[slot], amount)

    def remove(self, job: JobId) -> Gang | None:
        self._until.pop(job, None)
        self._refusals.pop(job, None)
        slot = self._slots.pop(job, None)
        if slot is not None:
            self._columns["waits"][slot] = 0
            self._unused.append(slot)
        return self.gangs.pop(job, None)

    def started(self, gang: Gang) -> None:
        self.remove(gang.id)

    def refused(self, gang: Gang, refusal: Refusal) -> None:
        """It sleeps until one of the refusal's cures, and with it all of its group that would run as long or longer."""
        self._refusals[gang.id] = refusal
        slot = self._slots[gang.id]
        columns, end = self._columns, self._end
        alike = columns["group"][:end] == columns["group"][slot]
        alike &= columns["estimate_ms"][:end] >= columns["estimate_ms"][slot]
        columns["asleep"][:end][alike] = 1
        columns["cures"][:end][alike] = sum(_BIT[trigger] for trigger in refusal.cured_by)

    def back_off(self, gang: Gang, until_ms: int) -> None:
        slot = self._slots.pop(gang.id)
        self._columns["waits"][slot] = 0
        self._unused.append(slot)
        self._until[gang.id] = until_ms
        heapq.heappush(self._backoff, (until_ms, gang.id))

    def wake(self, trigger: Trigger) -> None:
        woken = (self._columns["cures"][: self._end] & _BIT[trigger]) != 0
        self._columns["asleep"][: self._end][woken] = 0
        self._freed |= trigger != "run_placed"

    def wake_due(self, now_ms: int) -> None:
        while self._backoff and self._backoff[0][0] <= now_ms:
            until, job = heapq.heappop(self._backoff)
            if self._until.get(job) == until:
                del self._until[job]
                self._enter(self.gangs[job])

    def next_due_ms(self) -> int | None:
        while self._backoff and self._until.get(self._backoff[0][1]) != self._backoff[0][0]:
            heapq.heappop(self._backoff)
        return self._backoff[0][0] if self._backoff else None

    # ------------------------------------------------------------------------------------------- the order

    def ready(self, view: View) -> Iterator[Gang]:
        """Gangs to try, in order; the caller must say `started`, `refused` or `back_off` of each before the next."""
        if not self._slots:
            return
        book = _book(view)
        renewed = self._renew(view)
        promised = list[JobId]()
        self.kind = "head"
        order = self._masked(self.queue.order(self._waiting(), view.now_ms))
        while (slot := self._first(order)) is not None:
            gang = self.gangs[int(self._columns["ids"][slot])]
            if self._may_try(slot):
                yield gang
                if gang.id not in self.gangs:
                    continue
            order[slot] = _NEVER
            if not self.queue.promises:
                return
            if gang.id not in self._slots:
                continue
            if not (renewed and gang.id in book.promises):
                self._promise(gang, view)
            promised.append(gang.id)
            if len(promised) >= self.queue.promises:
                break
        for job in [job for job in self._promised(view) if job not in promised]:
            book.withdraw(job)
        yield from self._fill(promised, view)

    def _fill(self, promised: list[JobId], view: View) -> Iterator[Gang]:
        """Those behind the promised ones, as far as there is room now."""
        fits = self._fits() & (self._columns["asleep"][: self._end] == 0)
        for job in promised:
            fits[self._slots[job]] = False
        slots = np.flatnonzero(fits)
        if not len(slots):
            return
        waiting = self._waiting()
        order = self.queue.fill_order(waiting, view.now_ms)
        if order is None:
            order = self.queue.order(waiting, view.now_ms)
        inorder = np.lexsort((waiting.ids[slots], waiting.submitted_ms[slots], order[slots]))
        for slot in slots[inorder].tolist():
            job = int(self._columns["ids"][slot])
            if self._slots.get(job) == slot and self._may_try(slot):
                gang = self.gangs[job]
                ends_ms = view.now_ms + gang.estimate_ms
                starts = [promise.start_ms for promise in _book(view).promises.values()]
                self.kind = "backfill" if not starts or ends_ms <= min(starts) else "spill"
                yield gang

    def _first(self, order: Ints) -> int | None:
        slot = int(order.argmin())
        if order.item(slot) == _NEVER:
            return None
        ties = np.flatnonzero(order == order.item(slot))
        if len(ties) > 1:
            columns = self._columns
            slot = int(ties[np.lexsort((columns["ids"][ties], columns["submitted_ms"][ties]))[0]])
            if not columns["waits"][slot]:
                order[slot] = _NEVER
                return self._first(order)
        if not self._columns["waits"][slot]:
            order[slot] = _NEVER
            return self._first(order)
        return slot

    def _masked(self, order: Ints) -> Ints:
        return np.where(self._columns["waits"][: self._end] != 0, order, _NEVER)

    def _waiting(self) -> Waiting:
        end, columns = self._end, self._columns
        return Waiting(*[columns[name][:end] for name in Waiting.__struct_fields__])

    def _fits(self) -> NDArray[np.bool_]:
        """Whose largest member is not larger than the largest free amount of each resource: the rest need not be tried."""
        fits: NDArray[np.bool_] = self._columns["waits"][: self._end] != 0
        for resource, need in self._needs.items():
            fits &= need[: self._end] <= self._most(resource)
        return fits

    def _may_try(self, slot: int) -> bool:
        if self._columns["asleep"].item(slot):
            return False
        return all(need.item(slot) <= self._most(resource) for resource, need in self._needs.items())

    def _most(self, resource: str) -> int:
        free = self._engine.table.view().free(resource)
        return int(free.max()) if free.size else 0

    # ------------------------------------------------------------------------------------------- promises

    def _promised(self, view: View) -> list[JobId]:
        return [job for job in _book(view).promises if job in self.gangs]

    def _renew(self, view: View) -> bool:
        """Room has been freed: every promise may move forward, one after another in order, never back. Whether those
        that stand may be kept as they are (with a single one it is as easy to make it anew)."""
        if self.queue.promises <= 1:
            return False
        if self._freed:
            self._freed = False
            order = self.queue.order(self._waiting(), view.now_ms)
            jobs = [job for job in self._promised(view) if job in self._slots]
            for job in sorted(jobs, key=lambda job: (int(order[self._slots[job]]), self.gangs[job].submitted_ms, job)):
                self._promise(self.gangs[job], view)
        return True

    def _promise(self, gang: Gang, view: View) -> None:
        book = _book(view)
        kept = book.withdraw(gang.id)
        promise = soonest(self._engine, gang, view)
        if promise is not None and kept is not None and kept.start_ms < promise.start_ms:
            promise = kept if kept.start_ms > view.now_ms else promise
        if promise is not None:
            book.promise(promise)

    # -------------------------------------------------------------------------------------------- for `why`

    def wants_room(self) -> bool:
        return any(refusal.for_room for refusal in self._refusals.values())

    def refusal_of(self, gang: Gang) -> Refusal | None:
        return self._refusals.get(gang.id)

    def backing_off_until(self, job: JobId) -> int:
        return self._until.get(job, 0)

    def position(self, gang: Gang, now_ms: int = 0) -> int:
        """1 for the first in line."""
        slot = self._slots.get(gang.id)
        if slot is None:
            return len(self.gangs)
        order = self._masked(self.queue.order(self._waiting(), now_ms))
        return 1 + int(np.count_nonzero(order < order[slot]))


def _book(view: View) -> Book:
    assert view.book is not None, "a line that promises starts needs a book"
    return view.book
