"""A line that promises starts: the first in order goes first, the blocked are promised a time, and others may pass them
only where that breaks no promise (the plugin `promises` sees to that, in every line). Who waits is in `control.queue.pending_table`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterator
from typing import Literal, cast

import numpy as np

from hodei.control.queue.base import SchedulingQueue
from hodei.control.queue.pending_table import BIT, Gap, PendingTable, Slots
from hodei.engine.availability import AvailabilityProfile, StartReservation
from hodei.engine.cycle import Engine
from hodei.engine.plan import Refusal
from hodei.engine.points import TimedQueue, Trigger
from hodei.engine.profile import Profile
from hodei.engine.start_search import StartSearch, most_free
from hodei.engine.view import Gang, View
from hodei.model.estimate import Estimate
from hodei.model.ids import JobId
from hodei.model.job import JobSpec

# First in line; before one who was promised a start, and over by then; beside what is promised.
StartKind = Literal["head", "backfill", "spill"]
_NEVER = int(np.iinfo(np.int64).max)
# Of those in front who can be promised nothing, so many are passed over in the search for one who can.
_WITHOUT_PROMISE = 100


class BackfillQueue:
    """The pending gangs of one profile whose queue is timed. Those who sleep were refused and nothing has changed since;
    those that do not even fit into the largest free amounts are not tried at all."""

    def __init__(self, profile: Profile, engine: Engine) -> None:
        self.profile = profile
        self.queue = cast("TimedQueue", profile.queue)
        self.gangs: dict[JobId, Gang] = {}
        self.kind: StartKind = "head"
        self._next_head: JobId | None = None
        self._engine = engine
        self._outlooks = StartSearch(engine)
        self._pending_table = PendingTable(self.queue, self.gangs)
        self._refusals: dict[JobId, Refusal] = {}
        self._for_room: set[JobId] = set()
        self._backoff: list[tuple[int, JobId]] = []
        self._until: dict[JobId, int] = {}
        self._freed = True
        self.lapsed = False  # whether, when it was last asked who is ready, a promise turned out not to be kept
        self._most_at: tuple[int, ...] = ()
        self._most: list[int] = []
        self._made: dict[JobId, tuple[int, int]] = {}
        # Promises given behind someone who could be promised nothing: kept, also when that one can be.
        self._behind: set[JobId] = set()
        # After a look over all: who is in front, what that depended on, and until when it holds.
        self._front: list[JobId] = []
        self._settled: tuple[int, ...] | None = None
        self._settled_until = 0

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
            self._pending_table.enter(gang)

    def _exit(self, job: JobId) -> None:
        self._pending_table.leave(job)
        if self._made.pop(job, None) is not None:
            self._settled = None  # one of those in front

    def remove(self, job: JobId) -> Gang | None:
        self._until.pop(job, None)
        self._forget_refusal(job)
        self._exit(job)
        self._behind.discard(job)
        return self.gangs.pop(job, None)

    def _forget_refusal(self, job: JobId) -> None:
        if self._refusals.pop(job, None) is not None:
            self._for_room.discard(job)

    def reestimate(self, user: str, estimate: Callable[[JobSpec], Estimate]) -> None:
        """More is known of how long this user's jobs run: those that wait may change their places (those who wait beyond
        the line's lookahead, when they move up)."""
        changed: dict[JobId, int] = {}
        guesses: dict[int, int] = {}
        for job in sorted(self._pending_table.of_user.get(user, ())):
            gang = self.gangs[job]
            guess_ms = guesses.get(id(gang.job))
            if guess_ms is None:
                guess_ms = guesses[id(gang.job)] = estimate(gang.job).expected_ms
            expected_ms = guess_ms or gang.estimate_ms
            if expected_ms != gang.expected_ms:
                gang.expected_ms = changed[job] = expected_ms
        if changed:
            self._pending_table.reestimate(changed)
            self._settled = None

    def started(self, gang: Gang) -> None:
        self.remove(gang.id)

    def refused(self, gang: Gang, refusal: Refusal) -> None:
        """It sleeps until one of the refusal's cures, and with it all of its group that would run as long or longer (what
        stands in the way may be a promise)."""
        self._refusals[gang.id] = refusal
        (self._for_room.add if refusal.for_capacity else self._for_room.discard)(gang.id)
        # What stands in the way may be what one of them was promised: its own is not in its way.
        own = list(self._made) if self.queue.reservation_depth > 1 else []
        self._pending_table.put_to_sleep(gang.id, refusal.requeue_on, but=own)

    def back_off(self, gang: Gang, until_ms: int) -> None:
        self._exit(gang.id)
        self._until[gang.id] = until_ms
        heapq.heappush(self._backoff, (until_ms, gang.id))

    def wake(self, *triggers: Trigger) -> None:
        bits = 0
        for trigger in triggers:
            bits |= BIT[trigger]
        if bits & ~BIT["run_placed"]:
            self._freed = True
            self._settled = None
        if self._pending_table.wake(bits):
            self._settled = None

    def wake_due(self, now_ms: int) -> None:
        while self._backoff and self._backoff[0][0] <= now_ms:
            until, job = heapq.heappop(self._backoff)
            if self._until.get(job) == until:
                del self._until[job]
                self._pending_table.enter(self.gangs[job])

    def next_due_ms(self) -> int | None:
        while self._backoff and self._until.get(self._backoff[0][1]) != self._backoff[0][0]:
            heapq.heappop(self._backoff)
        return self._backoff[0][0] if self._backoff else None

    # ------------------------------------------------------------------------------------------- the order

    def ready(self, view: View) -> Generator[Gang, None, None]:
        """Gangs to try, in order; the caller must say `started`, `refused` or `back_off` of each before the next."""
        pending_table, self.lapsed = self._pending_table, False
        if not pending_table.slots:
            return
        pending_table.compact()
        if self._is_settled(view):
            slots = [
                pending_table.slots[job]
                for job in pending_table.fresh
                if job in pending_table.slots and self._may_try(job)
            ]
            if slots and self.queue.reservation_depth:
                yield from self._fill(slots, view)
        else:
            self._settled = None
            settled = yield from self._look_over(view)
            if settled is None:
                settled = yield from self._look_over(view, again=True)
            if not settled:
                return
        pending_table.fresh.clear()
        self._settled = self._state(view)

    def begin(self, gang: Gang, view: View) -> None:
        """A gang that `ready` has named is about to be tried; it may have waited for gangs of other lines until now."""
        if gang.id == self._next_head and self.queue.reservation_depth == 1:
            self._withdraw_all_but([gang.id], view)  # whoever was first before must not stand in its way
        self._next_head = None

    def highest_priority(self) -> int:
        """Of those who wait here, as far as the line looks ahead."""
        return self._pending_table.highest_priority()

    def _look_over(self, view: View, *, again: bool = False) -> Generator[Gang, None, bool | None]:
        """All who wait: those in front are tried and promised a start, the others fill gaps. Whether those in front are as
        many as there can be, so that nobody who comes after them is one; None, once, to be called again: a promise turned
        out not to be kept, and it stood in the way of others who had been tried already."""
        availability, pending_table, start_reservations = (
            _availability(view),
            self._pending_table,
            self.queue.reservation_depth,
        )
        self._renew(view)
        front, promised, enough, next_ms = list[JobId](), list[JobId](), False, _NEVER
        for gang in pending_table.in_order(view.now_ms):
            if self._may_try(gang.id):
                self._next_head = gang.id
                self.kind = _kind(gang, next_ms, view) if promised else "head"
                yield gang
                if gang.id not in pending_table.slots:
                    continue  # it has started, or stepped aside
            front.append(gang.id)
            if start_reservations and self._start_reservation(gang, view, behind=len(front) > len(promised) + 1):
                promised.append(gang.id)
                next_ms = min(next_ms, availability.start_reservations[gang.id].start_ms)
            enough = len(promised) >= start_reservations or len(front) - len(promised) >= _WITHOUT_PROMISE
            if enough:
                break
        if self.lapsed and not again:
            return None
        self._front = front
        if start_reservations:
            self._withdraw_all_but(promised, view)
        if not front:
            return False
        if start_reservations:
            starts = [availability.start_reservations[job].start_ms for job in promised]
            self._settled_until = min(starts, default=_NEVER)
            yield from self._fill(pending_table.all_but(promised), view)
        else:
            self._settled_until = _NEVER
        return enough

    def _state(self, view: View) -> tuple[int, ...]:
        """What a look over all depends on, besides time and those who come and go."""
        availability, table = _availability(view), self._engine.table
        return table.generation, len(table.changes), availability.version, len(availability.reservations)

    def _is_settled(self, view: View) -> bool:
        """Nothing has happened since all were looked over but that some came, and none of them before those in front."""
        pending_table = self._pending_table
        if self._settled is None or view.now_ms > self._settled_until or not pending_table.steady:
            return False
        if self._settled != self._state(view) or self._settled[-1] or not self._front:
            return False
        last = pending_table.place_of(self._front[-1])
        return all(pending_table.place_of(job) > last for job in pending_table.fresh if job in pending_table)

    def _withdraw_all_but(self, kept: list[JobId], view: View) -> None:
        start_reservations = _availability(view).start_reservations
        if not start_reservations:
            return
        for job in [job for job in start_reservations if job in self.gangs and job not in kept]:
            if job not in self._behind or start_reservations[job].start_ms < view.now_ms:
                self._behind.discard(job)
                _availability(view).remove_start_reservation(job)
                self._pending_table.wake_all()  # it may have been all that stood in someone's way

    # ----------------------------------------------------------------------------------------- those behind

    def _fill(self, slots: Slots, view: View) -> Iterator[Gang]:
        """Those behind the promised ones, as far as there is room now, looked at anew after each that was tried."""
        pending_table, now_ms = self._pending_table, view.now_ms
        next_ms = min(
            [start_reservation.start_ms for start_reservation in _availability(view).start_reservations.values()],
            default=_NEVER,
        )
        while len(slots := pending_table.fitting(slots, self._mosts(), self._gap(view))):
            slot = pending_table.pick(slots, now_ms, self._worth)
            gang = self.gangs[pending_table.job_in(slot)]
            self.kind = _kind(gang, next_ms, view)
            yield gang
            slots = [other for other in slots if other != slot] if isinstance(slots, list) else slots[slots != slot]

    def _gap(self, view: View) -> Gap | None:
        """What those behind must fit into, if there is one promise only; else each is tried."""
        availability = _availability(view)
        if len(availability.start_reservations) != 1 or availability.reservations:
            return None
        (start_reservation,) = availability.start_reservations.values()
        table, needs = self._engine.table, self._pending_table.needs

        def beside() -> list[int]:
            return [availability.max_spare(start_reservation, resource, view.now_ms) for resource in needs]

        def elsewhere() -> list[int] | None:
            rows = [table.row[node] for node, _ in start_reservation.places if node in table.row]
            if len(rows) == len(table.names):
                return None
            return [most_free(table, resource, rows) for resource in needs]

        return Gap(start_reservation.start_ms - view.now_ms, beside, elsewhere)

    def _worth(self) -> list[float]:
        """What a unit of each resource counts for: more of it is free, and less of it is there in all, the more."""
        table, worth = self._engine.table, []
        for resource in self._pending_table.needs:
            free = int(table.free[table.column_of(resource)].sum())
            whole = sum(room.get(resource, 0) for room in table.allocatable)
            worth.append(free / whole / whole if whole else 0.0)
        return worth

    def _may_try(self, job: JobId) -> bool:
        """It does not sleep, and none of its members is larger than the largest free amount."""
        pending_table = self._pending_table
        slot = pending_table.slots[job]
        if not pending_table.awake(slot):
            return False
        for row, most in zip(pending_table.needs.values(), self._mosts(), strict=True):
            if pending_table.data.item(row, slot) > most:
                return False
        return True

    def _mosts(self) -> list[int]:
        """The largest amount of each resource that is free on one node."""
        table, needs = self._engine.table, self._pending_table.needs
        at = (table.generation, len(table.changes), len(needs))
        if self._most_at != at:
            self._most_at = at
            self._most = [most_free(table, resource) for resource in needs]
        return self._most

    # ------------------------------------------------------------------------------------------- promises

    def _renew(self, view: View) -> None:
        """Room has been freed: every promise may move forward, one after another in order, never back."""
        freed, self._freed = self._freed, False
        if freed and self.queue.reservation_depth > 1:
            start_reservations = _availability(view).start_reservations
            for gang in list(self._pending_table.in_order(view.now_ms)):
                if gang.id in start_reservations:
                    self._made.pop(gang.id, None)
                    self._start_reservation(gang, view, tried=False)

    def _start_reservation(self, gang: Gang, view: View, *, tried: bool = True, behind: bool = False) -> bool:
        """A start for a gang that has none yet, or an earlier one, if something has changed since it was given; whether
        it has one. None is given to whom rules, and not the want of room, keep from starting now: who knows till when."""
        availability, table, start_reservations = _availability(view), self._engine.table, self.queue.reservation_depth
        kept, now = availability.start_reservations.get(gang.id), (availability.version, table.generation)
        if kept is not None and not all(node in table.row for node, _ in kept.places):
            self._lapse(gang.id, availability)  # a node that it counts on is gone
            kept = None
        if (
            kept is not None
            and kept.start_ms >= view.now_ms
            and ((start_reservations > 1 and gang.id in self._made) or self._made.get(gang.id) == now)
            and not (tried and kept.start_ms == view.now_ms and self._has_room(kept))
        ):
            return True
        availability.remove_start_reservation(gang.id)
        # Where there is one promise only, whoever had it before does not count for the one who is first now.
        before = self._before(availability) if start_reservations == 1 else []
        for other in before:
            availability.remove_start_reservation(other.job)
        start_reservation = self._outlooks.soonest(gang, view)
        if (
            kept is not None
            and view.now_ms <= kept.start_ms
            and (start_reservation is None or kept.start_ms < start_reservation.start_ms)
        ):
            start_reservation = kept  # also when, one by one, its members find no better
        if (
            tried
            and start_reservation is not None
            and start_reservation.start_ms <= view.now_ms
            and self._has_room(start_reservation)
        ):
            refusal = self._refusals.get(gang.id)
            passed = (
                refusal is not None and bool(refusal.verdicts) and refusal.verdicts[0].reason.code == "START_RESERVED"
            )
            start_reservation = kept if passed and kept is not None and kept.start_ms > view.now_ms else None
        if start_reservation is not None:
            availability.add_start_reservation(start_reservation)
            if behind:
                self._behind.add(gang.id)
            if before:
                self._pending_table.wake_all()
        else:
            self._behind.discard(gang.id)
            for other in before:
                availability.add_start_reservation(other)
            if kept is not None:
                self._lapse(gang.id, availability)
        self._made[gang.id] = now
        return start_reservation is not None

    def _lapse(self, job: JobId, availability: AvailabilityProfile) -> None:
        """Its promise can not be kept; what it was promised may have been all that stood in someone's way."""
        availability.remove_start_reservation(job)
        self._pending_table.wake_all()
        self._freed = self.lapsed = True

    def _before(self, availability: AvailabilityProfile) -> list[StartReservation]:
        """The promises of this line that give way to that of whoever is first."""
        return [
            p for p in availability.start_reservations.values() if p.job in self.gangs and p.job not in self._behind
        ]

    def _has_room(self, start_reservation: StartReservation) -> bool:
        table = self._engine.table
        for node, request in start_reservation.places:
            row = table.row[node]
            room, used = table.allocatable[row], table.holds[row].used
            if any(room.get(name, 0) - used.get(name, 0) < amount for name, amount in request.items()):
                return False
        return True

    # -------------------------------------------------------------------------------------------- for `why`

    def needs_capacity(self) -> bool:
        return bool(self._for_room)

    def refusal_of(self, gang: Gang) -> Refusal | None:
        return self._refusals.get(gang.id)

    def backing_off_until(self, job: JobId) -> int:
        return self._until.get(job, 0)

    def position(self, gang: Gang, view: View | None = None) -> int:
        """1 for the first in line."""
        if gang.id not in self._pending_table:
            return len(self.gangs)
        return self._pending_table.position(gang, view.now_ms if view is not None else 0)


def _kind(gang: Gang, next_ms: int, view: View) -> StartKind:
    """How one starts that passes others: before the next of them is to start, or beside what is promised."""
    return "backfill" if view.now_ms + gang.estimate_ms <= next_ms else "spill"


def _availability(view: View) -> AvailabilityProfile:
    assert view.availability is not None, "a line that promises starts needs a book"
    return view.availability


def needs_availability(line: SchedulingQueue | BackfillQueue) -> bool:
    """Whether someone asks until when runs will hold what they hold: the line itself, or a plugin of its profile."""
    return isinstance(line, BackfillQueue) or any(
        getattr(plugin, "needs_availability", False) for plugin in line.profile.layouts
    )
