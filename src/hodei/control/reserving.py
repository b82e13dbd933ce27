"""Who waits in a line that promises starts: the first in order goes first, the blocked are promised a time, and others
may pass them only where that breaks no promise (the plugin `promises` sees to that, in every line).

The gangs are kept as columns, so that a look over all of them is a few operations on arrays, however many wait.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from hodei.engine.book import Book, Promise
from hodei.engine.cycle import Engine
from hodei.engine.nodes import Ints, Mask
from hodei.engine.plan import Refusal
from hodei.engine.points import ANY_TRIGGER, TimedQueue, Trigger, Waiting
from hodei.engine.profile import Profile, Shapes
from hodei.engine.promising import Outlooks
from hodei.engine.view import Gang, View
from hodei.model.estimate import Estimate
from hodei.model.ids import JobId
from hodei.model.job import JobSpec
from hodei.model.resources import CPU, Resources

# First in line; before one who was promised a start, and over by then; beside what is promised.
StartKind = Literal["head", "backfill", "spill"]
_BIT = {trigger: 1 << place for place, trigger in enumerate(ANY_TRIGGER)}
_NEVER = np.iinfo(np.int64).max
# Of those in front who can be promised nothing, so many are passed over in the search for one who can.
_WITHOUT_PROMISE = 100
_COLUMNS = (
    "ids",
    "submitted_ms",
    "estimate_ms",  # the best guess, which orders; `limit_ms` is what promises are kept by
    "limit_ms",
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
        self._outlooks = Outlooks(engine)
        self._slots: dict[JobId, int] = {}
        self._unused: list[int] = []
        self._end = 0
        self._columns: dict[str, Ints] = {name: np.zeros(64, dtype=np.int64) for name in _COLUMNS}
        self._needs: dict[str, Ints] = {}
        self._groups = Shapes()
        self._refusals: dict[JobId, Refusal] = {}
        self._backoff: list[tuple[int, JobId]] = []
        self._until: dict[JobId, int] = {}
        self._freed = True
        # Where the order does not change with time, it is kept as it is.
        self._steady = not self.queue.restless
        self._sorted: list[tuple[int, int, JobId]] = []
        self._largest: dict[JobId, Resources] = {}
        self._most_of: tuple[int, int] = (-1, -1)
        self._mosts: Resources = {}
        self._of_user: dict[str, set[JobId]] = {}
        self._made: dict[JobId, tuple[int, int]] = {}
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
        values = (
            gang.id, gang.submitted_ms, gang.expected_ms or gang.estimate_ms, gang.estimate_ms, cpus, gang.job.priority,
            gang.job.deadline_ms, 0, self._groups.number(gang.group), 0, 1,
        )  # fmt: skip
        for name, value in zip(_COLUMNS, values, strict=True):
            self._columns[name][slot] = value
        largest: Resources = {}
        for member, numbers in zip(gang.members, gang.needed, strict=True):
            if numbers:
                for resource, amount in member.task.request.items():
                    largest[resource] = max(largest.get(resource, 0), amount)
        self._largest[gang.id] = largest
        self._of_user.setdefault(gang.job.user, set()).add(gang.id)
        for resource in largest:
            if resource not in self._needs:
                self._needs[resource] = np.zeros_like(self._columns["ids"])
        for resource, column in self._needs.items():
            column[slot] = largest.get(resource, 0)
        if self._steady:
            insort(self._sorted, self._place(gang.id))

    def _place(self, job: JobId) -> tuple[int, int, JobId]:
        """Where a gang stands in an order that does not change."""
        slot = self._slots[job]
        waiting = Waiting(*[self._columns[name][slot : slot + 1] for name in Waiting.__struct_fields__])
        return int(self.queue.order(waiting, 0)[0]), int(waiting.submitted_ms[0]), job

    def _exit(self, job: JobId) -> None:
        if job not in self._slots:
            return
        if self._steady:
            del self._sorted[bisect_left(self._sorted, self._place(job))]
        slot = self._slots.pop(job)
        user = self.gangs[job].job.user
        self._of_user[user].discard(job)
        if not self._of_user[user]:
            del self._of_user[user]
        self._columns["waits"][slot] = 0
        self._unused.append(slot)
        del self._largest[job]
        self._made.pop(job, None)

    def remove(self, job: JobId) -> Gang | None:
        self._until.pop(job, None)
        self._refusals.pop(job, None)
        self._exit(job)
        return self.gangs.pop(job, None)

    def reconsider(self, user: str, estimate: Callable[[JobSpec], Estimate]) -> None:
        """More is known of how long this user's jobs run: those that wait may change their places."""
        for job in sorted(self._of_user.get(user, ())):
            gang = self.gangs[job]
            expected_ms = estimate(gang.job).expected_ms or gang.estimate_ms
            if expected_ms != gang.expected_ms:
                gang.expected_ms = expected_ms
                if self._steady:
                    del self._sorted[bisect_left(self._sorted, self._place(job))]
                self._columns["estimate_ms"][self._slots[job]] = expected_ms
                if self._steady:
                    insort(self._sorted, self._place(job))

    def started(self, gang: Gang) -> None:
        self.remove(gang.id)

    def refused(self, gang: Gang, refusal: Refusal) -> None:
        """It sleeps until one of the refusal's cures, and with it all of its group that would run as long or longer."""
        self._refusals[gang.id] = refusal
        slot = self._slots[gang.id]
        columns, end = self._columns, self._end
        alike = columns["group"][:end] == columns["group"][slot]
        alike &= columns["limit_ms"][:end] >= columns["limit_ms"][slot]
        if self.queue.promises > 1:
            # What stands in the way may be what one of them was promised: its own is not in its way.
            alike[[self._slots[job] for job in self._made if job != gang.id]] = False
        columns["asleep"][:end][alike] = 1
        columns["cures"][:end][alike] = sum(_BIT[trigger] for trigger in refusal.cured_by)

    def back_off(self, gang: Gang, until_ms: int) -> None:
        self._exit(gang.id)
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
        self._renew(view)
        promised, without = list[JobId](), 0
        self.kind = "head"
        for gang in self._in_order(view.now_ms):
            if self._may_try(gang.id):
                if self.queue.promises == 1:
                    self._withdraw_all_but([gang.id], book)  # whoever was first before must not stand in its way
                yield gang
                if gang.id not in self._slots:
                    continue  # it has started, or stepped aside
            if not self.queue.promises:
                return
            if self._promise(gang, view):
                promised.append(gang.id)
            else:
                without += 1
            if len(promised) >= self.queue.promises or without >= _WITHOUT_PROMISE:
                break
        self._withdraw_all_but(promised, book)
        yield from self._fill(promised, view)

    def _withdraw_all_but(self, kept: list[JobId], book: Book) -> None:
        for job in [job for job in book.promises if job in self.gangs and job not in kept]:
            book.withdraw(job)
            self._columns["asleep"][: self._end] = 0  # it may have been all that stood in someone's way

    def _in_order(self, now_ms: int) -> Iterator[Gang]:
        """The waiting gangs, the first in line first; those that leave meanwhile are left out."""
        if self._steady:
            place = 0
            while place < len(self._sorted):
                id = self._sorted[place][2]
                yield self.gangs[id]
                place += id in self._slots
            return
        columns, order = self._columns, self._order(now_ms)
        while len(order):
            slot = int(order.argmin())
            if order.item(slot) == _NEVER:
                return
            ties = np.flatnonzero(order == order.item(slot))
            if len(ties) > 1:
                slot = int(ties[np.lexsort((columns["ids"][ties], columns["submitted_ms"][ties]))[0]])
            order[slot] = _NEVER
            if columns["waits"].item(slot):
                yield self.gangs[columns["ids"].item(slot)]

    def _order(self, now_ms: int) -> Ints:
        order = self.queue.order(self._waiting(), now_ms)
        return np.where(self._columns["waits"][: self._end] != 0, order, _NEVER)

    def _fill(self, promised: list[JobId], view: View) -> Iterator[Gang]:
        """Those behind the promised ones, as far as there is room now, looked for anew after each that was tried."""
        columns, places = self._columns, None
        next_ms = min((promise.start_ms for promise in _book(view).promises.values()), default=_NEVER)
        while True:
            slots = self._fitting(promised, view)
            if not len(slots):
                return
            if places is None and len(slots) > 1:
                waiting = self._waiting()
                order = self.queue.fill_order(waiting, view.now_ms)
                if order is None:
                    order = self.queue.order(waiting, view.now_ms)
                places = np.empty(self._end, dtype=np.int64)
                places[np.lexsort((waiting.ids, waiting.submitted_ms, order))] = np.arange(self._end)
            slot = int(slots[0] if places is None else slots[places[slots].argmin()])
            gang = self.gangs[columns["ids"].item(slot)]
            self.kind = "backfill" if view.now_ms + gang.estimate_ms <= next_ms else "spill"
            yield gang

    def _fitting(self, promised: list[JobId], view: View) -> NDArray[np.intp]:
        """The slots of those whom nothing keeps from being tried: they do not sleep, none of their members is larger than
        the largest free amount, and they could pass those who are promised a start."""
        end, columns = self._end, self._columns
        fits = columns["waits"][:end] > columns["asleep"][:end]
        for resource, need in self._needs.items():
            fits &= need[:end] <= self._most(resource)
        for job in promised:
            fits[self._slots[job]] = False
        if fits.any():
            fits &= self._could_pass(view)
        return fits.nonzero()[0]

    def _could_pass(self, view: View) -> Mask:
        """Those who may go ahead of the one promise that there is, as far as amounts tell: they find room on another node,
        or are over by then, or fit beside it. Whoever was not tried since it came is not judged by this: it is to be told
        why it waits."""
        end, book = self._end, _book(view)
        could: Mask = self._columns["cures"][:end] == 0
        elsewhere, beside = np.ones((2, end), dtype=np.bool_)
        if len(book.promises) != 1 or book.bookings:
            return elsewhere
        (promise,) = book.promises.values()
        table = self._engine.table
        rows = [table.row[node] for node, _ in promise.places if node in table.row]
        for resource, need in self._needs.items():
            column = table.column_of(resource)  # before the array: a new column lays that anew
            free = table.free[column]
            others = np.delete(free, rows)
            elsewhere &= need[:end] <= (others.max() if others.size else 0)
            beside &= need[:end] <= max(
                (book.spare(promise, node, resource, view.now_ms) for node, _ in promise.places), default=0
            )
        could |= elsewhere | beside | (self._columns["limit_ms"][:end] <= promise.start_ms - view.now_ms)
        return could

    def _waiting(self) -> Waiting:
        end, columns = self._end, self._columns
        return Waiting(*[columns[name][:end] for name in Waiting.__struct_fields__])

    def _may_try(self, job: JobId) -> bool:
        if self._columns["asleep"].item(self._slots[job]):
            return False
        return all(amount <= self._most(resource) for resource, amount in self._largest[job].items())

    def _most(self, resource: str) -> int:
        """The largest amount of it that is free on one node."""
        table = self._engine.table
        if self._most_of[1] != len(table.changes) or self._most_of[0] != table.generation:
            self._most_of, self._mosts = (table.generation, len(table.changes)), {}
        most = self._mosts.get(resource)
        if most is None:
            column = table.column_of(resource)  # before the array: a new column lays that anew
            free = table.free[column]
            most = self._mosts[resource] = int(free.max()) if free.size else 0
        return most

    # ------------------------------------------------------------------------------------------- promises

    def _renew(self, view: View) -> None:
        """Room has been freed: every promise may move forward, one after another in order, never back."""
        if self._freed and self.queue.promises > 1:
            promises = _book(view).promises
            for gang in list(self._in_order(view.now_ms)):
                if gang.id in promises:
                    self._made.pop(gang.id, None)
                    self._promise(gang, view, tried=False)
        self._freed = False

    def _promise(self, gang: Gang, view: View, *, tried: bool = True) -> bool:
        """A start for a gang that has none yet, or an earlier one, if something has changed since it was given; whether
        it has one. None is given to whom rules, and not the want of room, keep from starting now: who knows till when."""
        book, table = _book(view), self._engine.table
        kept, now = book.promises.get(gang.id), (book.version, table.generation)
        if (
            kept is not None
            and kept.start_ms >= view.now_ms
            and ((self.queue.promises > 1 and gang.id in self._made) or self._made.get(gang.id) == now)
        ):
            return True
        book.withdraw(gang.id)
        # Where there is one promise only, whoever had it before does not count for the one who is first now.
        before = self._mine(book) if self.queue.promises == 1 else []
        for other in before:
            book.withdraw(other.job)
        promise = self._outlooks.soonest(gang, view)
        if kept is not None and view.now_ms < kept.start_ms and (promise is None or kept.start_ms < promise.start_ms):
            promise = kept  # also when, one by one, its members find no better
        if tried and promise is not None and promise.start_ms <= view.now_ms and self._has_room(promise):
            refusal = self._refusals.get(gang.id)
            passed = refusal is not None and bool(refusal.verdicts) and refusal.verdicts[0].reason.code == "PROMISED"
            promise = kept if passed and kept is not None and kept.start_ms > view.now_ms else None
        if promise is not None:
            book.promise(promise)
            if before:
                self._columns["asleep"][: self._end] = 0
        else:
            for other in before:
                book.promise(other)
        self._made[gang.id] = now
        return promise is not None

    def _mine(self, book: Book) -> list[Promise]:
        return [promise for promise in book.promises.values() if promise.job in self.gangs]

    def _has_room(self, promise: Promise) -> bool:
        table = self._engine.table
        for node, request in promise.places:
            row = table.row[node]
            room, used = table.room[row], table.holds[row].used
            if any(room.get(name, 0) - used.get(name, 0) < amount for name, amount in request.items()):
                return False
        return True

    # -------------------------------------------------------------------------------------------- for `why`

    def wants_room(self) -> bool:
        return any(refusal.for_room for refusal in self._refusals.values())

    def refusal_of(self, gang: Gang) -> Refusal | None:
        return self._refusals.get(gang.id)

    def backing_off_until(self, job: JobId) -> int:
        return self._until.get(job, 0)

    def position(self, gang: Gang, now_ms: int = 0) -> int:
        """1 for the first in line."""
        if gang.id not in self._slots:
            return len(self.gangs)
        return 1 + next(place for place, other in enumerate(self._in_order(now_ms)) if other.id == gang.id)


def _book(view: View) -> Book:
    assert view.book is not None, "a line that promises starts needs a book"
    return view.book
