"""The backfill queue: gangs are tried in order, blocked ones get a start reservation, and later ones may overtake them only
if that delays no start reservation (a plugin checks that, in every queue). `pending_table` has the pending gangs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import cast

import numpy as np

from hodei.control.queue.base import GangQueue, SchedulingQueue
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
from hodei.model.job import JobSpec, StartKind

_NEVER = int(np.iinfo(np.int64).max)
# Gangs at the front without a possible start reservation that are passed over in the search for one with.
_MAX_UNRESERVED = 100


class BackfillQueue(GangQueue):
    """The pending gangs of a profile with start reservations. Refused gangs are parked until a trigger fires; gangs that
    exceed the largest free amounts are not tried."""

    def __init__(self, profile: Profile, engine: Engine) -> None:
        super().__init__(profile)
        self.queue = cast("TimedQueue", profile.queue)
        self.kind: StartKind = "head"
        self._next_head: JobId | None = None
        self._engine = engine
        self._start_search = StartSearch(engine)
        self._pending_table = PendingTable(self.queue, self.gangs)
        self._refusals: dict[JobId, Refusal] = {}
        self._needs_capacity: set[JobId] = set()
        self._freed = True  # capacity was freed: start reservations may move forward
        self.reservation_lost = False  # a start reservation could not be kept in the last round
        self._largest_version: tuple[int, ...] = ()
        self._largest: list[int] = []
        # The state for which the start of a gang was searched.
        self._searched: dict[JobId, tuple[int, int]] = {}
        # Start reservations behind a gang that could not get one: they stay even if that gang gets one later.
        self._behind: set[JobId] = set()
        # After a full round: the gangs at the front, what the result depends on, and until when it is valid.
        self._front: list[JobId] = []
        self._settled: tuple[int, ...] | None = None
        self._settled_until = 0

    def add(self, gang: Gang, *, not_before_ms: int = 0, now_ms: int = 0) -> None:
        self.profile.admit(gang)
        gang.estimate_ms = gang.estimate_ms or self.queue.estimate_ms(gang)
        self.gangs[gang.id] = gang
        self._queue_at(gang, not_before_ms, now_ms)

    def _queue(self, gang: Gang) -> None:
        self._pending_table.add(gang)

    def _exit(self, job: JobId) -> None:
        self._pending_table.remove(job)
        if self._searched.pop(job, None) is not None:
            self._settled = None  # it was at the front

    def remove(self, job: JobId) -> Gang | None:
        self._until.pop(job, None)
        if self._refusals.pop(job, None) is not None:
            self._needs_capacity.discard(job)
        self._exit(job)
        self._behind.discard(job)
        return self.gangs.pop(job, None)

    def reestimate(self, user: str, estimate: Callable[[JobSpec], Estimate]) -> None:
        """Reorder the pending jobs of a user whose run times were learned (jobs beyond the lookahead when they move up)."""
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
        """Park it, with all of its group that would run as long or longer, until a trigger of the refusal fires."""
        self._refusals[gang.id] = refusal
        (self._needs_capacity.add if refusal.for_capacity else self._needs_capacity.discard)(gang.id)
        # The start reservation of one of them may be in the way; its own is not.
        own = list(self._searched) if self.queue.reservation_depth > 1 else []
        self._pending_table.park(gang.id, refusal.requeue_on, but=own)

    def back_off(self, gang: Gang, until_ms: int) -> None:
        self._exit(gang.id)
        self._wait_until(gang.id, until_ms)

    def wake(self, *triggers: Trigger) -> None:
        bits = 0
        for trigger in triggers:
            bits |= BIT[trigger]
        if bits & ~BIT["run_placed"]:
            self._freed = True
            self._settled = None
        if self._pending_table.wake(bits):
            self._settled = None

    def ready(self, view: View) -> Generator[Gang, None, None]:
        """Gangs to try, in order; for each the caller must call `started`, `refused` or `back_off` before the next."""
        pending_table, self.reservation_lost = self._pending_table, False
        if not pending_table.slots:
            return
        pending_table.compact()
        if self._is_settled(view):
            slots = [
                pending_table.slots[job]
                for job in pending_table.added
                if job in pending_table.slots and self._may_try(job)
            ]
            if slots and self.queue.reservation_depth:
                yield from self._backfill(slots, view)
        else:
            self._settled = None
            settled = yield from self._full_round(view)
            if settled is None:
                settled = yield from self._full_round(view, again=True)
            if not settled:
                return
        pending_table.added.clear()
        self._settled = self._state(view)

    def begin(self, gang: Gang, view: View) -> None:
        """A gang of `ready` is about to be tried; gangs of other queues may have been tried in between."""
        if gang.id == self._next_head and self.queue.reservation_depth == 1:
            self._withdraw_all_but([gang.id], view)  # the reservation of an earlier head must not block it
        self._next_head = None

    def highest_priority(self) -> int:
        """Of the gangs within the lookahead."""
        return self._pending_table.highest_priority()

    def _full_round(self, view: View, *, again: bool = False) -> Generator[Gang, None, bool | None]:
        """All pending gangs: the front is tried and gets start reservations, the others backfill. Returns whether the front
        is complete, so that no later gang belongs to it; None, once, to repeat the round: a start reservation was lost that
        had blocked gangs which were tried before."""
        availability, pending_table, depth = _availability(view), self._pending_table, self.queue.reservation_depth
        self._renew_reservations(view)
        front, reserved, enough, next_ms = list[JobId](), list[JobId](), False, _NEVER
        for gang in pending_table.in_order(view.now_ms):
            if self._may_try(gang.id):
                self._next_head = gang.id
                self.kind = _kind(gang, next_ms, view) if reserved else "head"
                yield gang
                if gang.id not in pending_table.slots:
                    continue  # it has started, or backs off
            front.append(gang.id)
            if depth and self._reserve_start(gang, view, behind=len(front) > len(reserved) + 1):
                reserved.append(gang.id)
                next_ms = min(next_ms, availability.start_reservations[gang.id].start_ms)
            enough = len(reserved) >= depth or len(front) - len(reserved) >= _MAX_UNRESERVED
            if enough:
                break
        if self.reservation_lost and not again:
            return None
        self._front = front
        if depth:
            self._withdraw_all_but(reserved, view)
        if not front:
            return False
        if depth:
            starts = [availability.start_reservations[job].start_ms for job in reserved]
            self._settled_until = min(starts, default=_NEVER)
            yield from self._backfill(pending_table.all_but(reserved), view)
        else:
            self._settled_until = _NEVER
        return enough

    def _state(self, view: View) -> tuple[int, ...]:
        """What a full round depends on, besides time and the pending gangs."""
        availability, table = _availability(view), self._engine.table
        return table.generation, len(table.changes), availability.version, len(availability.reservations)

    def _is_settled(self, view: View) -> bool:
        """Since the last full round gangs have only been added, and none of them before the front."""
        pending_table = self._pending_table
        if self._settled is None or view.now_ms > self._settled_until or not pending_table.steady:
            return False
        if self._settled != self._state(view) or self._settled[-1] or not self._front:
            return False
        last = pending_table.order_key(self._front[-1])
        return all(pending_table.order_key(job) > last for job in pending_table.added if job in pending_table)

    def _withdraw_all_but(self, kept: list[JobId], view: View) -> None:
        availability = _availability(view)
        reservations = availability.start_reservations
        for job in [job for job in reservations if job in self.gangs and job not in kept]:
            if job not in self._behind or reservations[job].start_ms < view.now_ms:
                self._behind.discard(job)
                availability.remove_start_reservation(job)
                self._pending_table.wake_all()  # it may have been all that blocked a gang

    def _backfill(self, slots: Slots, view: View) -> Iterator[Gang]:
        """Later gangs that fit now, checked again after each try."""
        pending_table, now_ms = self._pending_table, view.now_ms
        reservations = _availability(view).start_reservations.values()
        next_ms = min([reservation.start_ms for reservation in reservations], default=_NEVER)
        while len(slots := pending_table.fitting(slots, self._largest_free(), self._gap(view))):
            slot = pending_table.pick(slots, now_ms, self._worth)
            gang = self.gangs[pending_table.job_in(slot)]
            self.kind = _kind(gang, next_ms, view)
            yield gang
            slots = [other for other in slots if other != slot] if isinstance(slots, list) else slots[slots != slot]

    def _gap(self, view: View) -> Gap | None:
        """What later gangs must fit into, if there is only one start reservation; else each is tried."""
        availability = _availability(view)
        if len(availability.start_reservations) != 1 or availability.reservations:
            return None
        (reservation,) = availability.start_reservations.values()
        table, needs = self._engine.table, self._pending_table.needs

        def spare() -> list[int]:
            return [availability.max_spare(reservation, resource, view.now_ms) for resource in needs]

        def elsewhere() -> list[int] | None:
            rows = [table.row[node] for node, _ in reservation.places if node in table.row]
            if len(rows) == len(table.names):
                return None
            return [most_free(table, resource, rows) for resource in needs]

        return Gap(reservation.start_ms - view.now_ms, spare, elsewhere)

    def _worth(self) -> list[float]:
        """The value of a unit of each resource: it grows with the free share, and with the scarcity of the resource."""
        table, worth = self._engine.table, []
        for resource in self._pending_table.needs:
            free = int(table.free[table.column_of(resource)].sum())
            total = sum(allocatable.get(resource, 0) for allocatable in table.allocatable)
            worth.append(free / total / total if total else 0.0)
        return worth

    def _may_try(self, job: JobId) -> bool:
        """It is not parked, and none of its members exceeds the largest free amount."""
        pending_table = self._pending_table
        slot = pending_table.slots[job]
        if not pending_table.active(slot):
            return False
        for row, most in zip(pending_table.needs.values(), self._largest_free(), strict=True):
            if pending_table.data.item(row, slot) > most:
                return False
        return True

    def _largest_free(self) -> list[int]:
        """The largest amount of each resource that is free on one node."""
        table, needs = self._engine.table, self._pending_table.needs
        version = (table.generation, len(table.changes), len(needs))
        if self._largest_version != version:
            self._largest_version = version
            self._largest = [most_free(table, resource) for resource in needs]
        return self._largest

    def _renew_reservations(self, view: View) -> None:
        """After capacity was freed, start reservations may move forward, in order, but never back."""
        freed, self._freed = self._freed, False
        if freed and self.queue.reservation_depth > 1:
            start_reservations = _availability(view).start_reservations
            for gang in list(self._pending_table.in_order(view.now_ms)):
                if gang.id in start_reservations:
                    self._searched.pop(gang.id, None)
                    self._reserve_start(gang, view, tried=False)

    def _reserve_start(self, gang: Gang, view: View, *, tried: bool = True, behind: bool = False) -> bool:
        """Give a gang a start reservation, or an earlier one if something has changed; returns whether it has one. A gang
        that rules and not missing capacity prevent from starting now gets none: the time is unknown."""
        availability, table, depth = _availability(view), self._engine.table, self.queue.reservation_depth
        kept, now = availability.start_reservations.get(gang.id), (availability.version, table.generation)
        if kept is not None and not all(node in table.row for node, _ in kept.places):
            self._lose_reservation(gang.id, availability)  # one of its nodes was removed
            kept = None
        if (
            kept is not None
            and kept.start_ms >= view.now_ms
            and ((depth > 1 and gang.id in self._searched) or self._searched.get(gang.id) == now)
            and not (tried and kept.start_ms == view.now_ms and self._has_capacity(kept))
        ):
            return True
        availability.remove_start_reservation(gang.id)
        # With a depth of one the reservations of earlier heads do not count for the present head.
        before = self._replaceable(availability) if depth == 1 else []
        for other in before:
            availability.remove_start_reservation(other.job)
        found = self._start_search.soonest(gang, view)
        if kept is not None and view.now_ms <= kept.start_ms and (found is None or kept.start_ms < found.start_ms):
            found = kept  # the search, member by member, may miss it
        if tried and found is not None and found.start_ms <= view.now_ms and self._has_capacity(found):
            refusal = self._refusals.get(gang.id)
            verdicts = refusal.verdicts if refusal is not None else ()
            delays = bool(verdicts) and verdicts[0].reason.code == "START_RESERVED"
            found = kept if delays and kept is not None and kept.start_ms > view.now_ms else None
        if found is not None:
            availability.add_start_reservation(found)
            if behind:
                self._behind.add(gang.id)
            if before:
                self._pending_table.wake_all()
        else:
            self._behind.discard(gang.id)
            for other in before:
                availability.add_start_reservation(other)
            if kept is not None:
                self._lose_reservation(gang.id, availability)
        self._searched[gang.id] = now
        return found is not None

    def _lose_reservation(self, job: JobId, availability: AvailabilityProfile) -> None:
        """Drop a start reservation that cannot be kept; it may have been all that blocked other gangs."""
        availability.remove_start_reservation(job)
        self._pending_table.wake_all()
        self._freed = self.reservation_lost = True

    def _replaceable(self, availability: AvailabilityProfile) -> list[StartReservation]:
        """The start reservations of this queue that give way to that of the head."""
        return [
            r for r in availability.start_reservations.values() if r.job in self.gangs and r.job not in self._behind
        ]

    def _has_capacity(self, reservation: StartReservation) -> bool:
        table = self._engine.table
        for node, request in reservation.places:
            row = table.row[node]
            allocatable, used = table.allocatable[row], table.node_usage[row].used
            if any(allocatable.get(name, 0) - used.get(name, 0) < amount for name, amount in request.items()):
                return False
        return True

    def needs_capacity(self) -> bool:
        return bool(self._needs_capacity)

    def refusal_of(self, gang: Gang) -> Refusal | None:
        return self._refusals.get(gang.id)

    def position(self, gang: Gang, view: View | None = None) -> int:
        """1 for the first gang."""
        if gang.id not in self._pending_table:
            return len(self.gangs)
        return self._pending_table.position(gang, view.now_ms if view is not None else 0)


def _kind(gang: Gang, next_ms: int, view: View) -> StartKind:
    """How a gang overtakes others: it ends before the next reserved start, or uses capacity that is not reserved."""
    return "backfill" if view.now_ms + gang.estimate_ms <= next_ms else "spill"


def _availability(view: View) -> AvailabilityProfile:
    assert view.availability is not None, "a backfill queue needs an availability profile"
    return view.availability


def needs_availability(queue: SchedulingQueue | BackfillQueue) -> bool:
    """Whether the queue, or a plugin of its profile, reads the expected ends of runs."""
    return isinstance(queue, BackfillQueue) or any(
        getattr(plugin, "needs_availability", False) for plugin in queue.profile.layouts
    )
