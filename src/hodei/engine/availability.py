"""The book of time: until when runs are expected to hold what they hold, and from when it is promised to others.

Everything here is an expectation: a run that outlives its estimate is expected to end when its estimate has doubled (and
doubled again). A promise is kept by never starting anything that would still hold the promised room by then. Of room that
is booked for a project as much is spoken for as the project's own runs do not hold already.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from hodei.engine.nodes import Table
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.reservation import Reservation
from hodei.model.resources import Resources

FOREVER = 1 << 62
_NOTHING: Resources = {}


class Span(NamedTuple):
    """What a run holds of a node and when it is expected to be over; ordered by that."""

    end_ms: int
    run: RunId
    start_ms: int
    request: Resources
    project: str = ""


class StartReservation(Struct, frozen=True):
    """From `start_ms` on `job` is to have `request` of each of these nodes, until `end_ms`."""

    job: JobId
    start_ms: int
    end_ms: int
    places: tuple[tuple[NodeName, Resources], ...]
    made_ms: int = 0


class Claim(NamedTuple):
    """Room on one node that is spoken for: of a promise (`job`) or of a booking (`project`)."""

    start_ms: int
    end_ms: int
    request: Resources
    job: JobId = 0
    project: str = ""
    name: str = ""


class AvailabilityProfile:
    def __init__(self, table: Table) -> None:
        self._table = table
        self._spans: dict[NodeName, list[Span]] = {}
        self._where: dict[RunId, tuple[NodeName, Span]] = {}
        # What the runs of a node hold together, and the promises by the time at which they fall due.
        self._held: dict[NodeName, Resources] = {}
        self._due: list[tuple[int, JobId]] = []
        self._claims: dict[NodeName, list[Claim]] = {}
        self.version = 0  # counts what may bring a promise forward: ends, and bookings that come or go
        self.promises: dict[JobId, StartReservation] = {}
        self.bookings: dict[str, Reservation] = {}
        self.forecasts: dict[JobId, int] = {}  # when those who wait will probably start, as far as anyone foretold it

    # ------------------------------------------------------------------------------------------------ runs

    def started(
        self, run: RunId, node: NodeName, request: Resources, start_ms: int, estimate_ms: int, project: str = ""
    ) -> None:
        self.ended(run)
        span = Span(start_ms + estimate_ms if estimate_ms else FOREVER, run, start_ms, request, project)
        insort(self._spans.setdefault(node, []), span, key=_by_end)
        self._where[run] = (node, span)
        held = self._held.setdefault(node, {})
        for resource, amount in request.items():
            held[resource] = held.get(resource, 0) + amount

    def ended(self, run: RunId) -> None:
        node, span = self._where.pop(run, ("", None))
        if span is not None:
            spans = self._spans[node]
            at = bisect_left(spans, _by_end(span), key=_by_end)
            del spans[at]
            held = self._held[node]
            for resource, amount in span.request.items():
                held[resource] -= amount
            self.version += 1

    def expected_end_ms(self, run: RunId) -> int:
        """When it should be over, as it was said when it started; FOREVER if nobody knows."""
        _, span = self._where.get(run, ("", None))
        return FOREVER if span is None else span.end_ms

    def leaves_by(self, run: RunId, end_ms: int) -> None:
        """It was told to go, and is expected to be gone by then."""
        node, span = self._where.get(run, ("", None))
        if span is not None:
            self.started(run, node, span.request, span.start_ms, max(end_ms - span.start_ms, 1), span.project)

    def outlived(self, node: NodeName, at_ms: int) -> list[Span]:
        """The runs of a node that should have been over by then."""
        return [span for span in self._spans.get(node, ()) if span.end_ms <= at_ms]

    def spans(self, node: NodeName, now_ms: int) -> Sequence[Span]:
        """The runs of a node by expected end; those that have outlived their estimate with a later one."""
        spans = self._spans.get(node, ())
        if not spans or spans[0].end_ms >= now_ms:
            return spans
        return sorted((_corrected(span, now_ms) for span in spans), key=_by_end)

    # -------------------------------------------------------------------------------------------- claims

    def promise(self, promise: StartReservation) -> None:
        self.withdraw(promise.job)
        self.promises[promise.job] = promise
        heapq.heappush(self._due, (promise.start_ms, promise.job))
        for node, request in promise.places:
            claim = Claim(promise.start_ms, promise.end_ms, request, promise.job)
            self._claims.setdefault(node, []).append(claim)

    def withdraw(self, job: JobId) -> StartReservation | None:
        promise = self.promises.pop(job, None)
        if promise is not None:
            self._drop(promise.places, lambda claim: claim.job == job)
        return promise

    def next_start_ms(self, now_ms: int) -> int | None:
        """When the next promise falls due."""
        if not self.promises:
            return None
        return min([promise.start_ms for promise in self.promises.values() if promise.start_ms > now_ms], default=None)

    def overdue(self, now_ms: int) -> list[StartReservation]:
        """The promises that stand and whose time has passed; each is named once."""
        if not self._due or self._due[0][0] >= now_ms:
            return []
        late = dict[JobId, StartReservation]()
        while self._due and self._due[0][0] < now_ms:
            start_ms, job = heapq.heappop(self._due)
            promise = self.promises.get(job)
            if promise is not None and promise.start_ms == start_ms:
                late[job] = promise
        return list(late.values())

    def book(self, booking: Reservation) -> None:
        self.unbook(booking.name)
        self.bookings[booking.name] = booking
        self.version += 1
        for node, request in booking.places:
            claim = Claim(booking.start_ms, booking.end_ms, request, 0, booking.project, booking.name)
            self._claims.setdefault(node, []).append(claim)

    def unbook(self, name: str) -> Reservation | None:
        booking = self.bookings.pop(name, None)
        if booking is not None:
            self._drop(booking.places, lambda claim: claim.name == name)
            self.version += 1
        return booking

    def _drop(self, places: Iterable[tuple[NodeName, Resources]], which: object) -> None:
        for node, _ in places:
            left = [claim for claim in self._claims.get(node, ()) if not which(claim)]  # type: ignore[operator]
            if left:
                self._claims[node] = left
            else:
                self._claims.pop(node, None)

    def claims_on(self, node: NodeName) -> Sequence[Claim]:
        """All that is spoken for there, promised and booked."""
        return self._claims.get(node, ())

    @property
    def claimed(self) -> Iterable[NodeName]:
        """The nodes of which something is spoken for."""
        return self._claims

    def claims(self, node: NodeName, job: JobId, project: str) -> list[Claim]:
        """What others may count on there."""
        return [
            claim
            for claim in self._claims.get(node, ())
            if (claim.job != job if claim.job else claim.project != project)
        ]

    # ------------------------------------------------------------------------------------------- questions

    def hindered(
        self, node: NodeName, request: Resources, now_ms: int, until_ms: int, job: JobId, project: str
    ) -> Claim | None:
        """The first claim that `request`, held from now until then, would stand in the way of; None if it is free.
        That there is room now is for others to say."""
        claims = self.claims(node, job, project)
        for claim in claims:
            if claim.start_ms >= until_ms or claim.end_ms <= now_ms:
                continue
            at_ms = max(claim.start_ms, now_ms)
            free = self._free_at(node, request, now_ms, at_ms)
            alone = len(claims) == 1 and claim.job
            spoken_for = claim.request if alone else _spoken_for(claims, self.spans(node, now_ms), at_ms)
            for resource, amount in request.items():
                if free[resource] - spoken_for.get(resource, 0) < amount:
                    return claim
        return None

    def earliest(
        self,
        node: NodeName,
        request: Resources,
        duration_ms: int,
        now_ms: int,
        job: JobId,
        project: str,
        after_ms: int = 0,
    ) -> int | None:
        """When the node is first expected to have room for so long, at `after_ms` or later; None for never."""
        claims = self.claims(node, job, project) if node in self._claims else ()
        if not claims:
            at_ms = self.unclaimed(node, request, now_ms)[0]
            return max(at_ms, now_ms, after_ms) if at_ms < FOREVER else None
        free = self._free_at(node, request, now_ms, -1)
        steps = _steps(self.spans(node, now_ms), claims, now_ms)
        return _first_gap(steps, free, request, duration_ms, now_ms, max(now_ms, after_ms))

    def most_spare(self, promise: StartReservation, resource: str, now_ms: int) -> int:
        """How much of a resource is left at most on one of its nodes when the promised job has its part of it."""
        at_ms, most = max(promise.start_ms, now_ms), 0
        for node, request in promise.places:
            if node in self._table.row:
                free = self._free_at(node, {resource: 0}, now_ms, at_ms)[resource]
                most = max(most, free - request.get(resource, 0))
        return most

    def unclaimed(self, node: NodeName, request: Resources, now_ms: int) -> tuple[int, int]:
        """When the node has room for it if nothing more is started (0 for now, FOREVER for never), and until when that
        is expected: past that moment a run has outlived its estimate."""
        spans = self.spans(node, now_ms)
        until_ms = spans[0].end_ms if spans else FOREVER
        free = self._free_at(node, request, now_ms, -1)
        short = {resource: amount - free[resource] for resource, amount in request.items() if free[resource] < amount}
        if not short:
            return 0, until_ms
        if len(short) == 1:
            ((resource, lack),) = short.items()
            for span in spans:
                lack -= span.request.get(resource, 0)
                if lack <= 0:
                    return min(span.end_ms, FOREVER), until_ms
            return FOREVER, until_ms
        for span in spans:
            if span.end_ms >= FOREVER:
                break
            for resource in list(short):
                short[resource] -= span.request.get(resource, 0)
                if short[resource] <= 0:
                    del short[resource]
            if not short:
                return span.end_ms, until_ms
        return FOREVER, until_ms

    def _free_at(self, node: NodeName, request: Resources, now_ms: int, at_ms: int) -> Resources:
        """What is free of the resources that are asked for, when all runs that should be over by then are."""
        row = self._table.row[node]
        room, used, held = self._table.room[row], self._table.holds[row].used, self._held.get(node, _NOTHING)
        # While others are only thought away (a trial of taking their place) the table has less than the book: their
        # room must not be counted as free once now and once more when they should have ended.
        free = {}
        for resource in request:
            taken, booked = used.get(resource, 0), held.get(resource, 0)
            free[resource] = room.get(resource, 0) - (taken if taken > booked else booked)
        if at_ms >= 0:
            for span in self.spans(node, now_ms):
                if span.end_ms > at_ms:
                    break
                for resource, amount in span.request.items():
                    if resource in free:
                        free[resource] += amount
        return free


def _by_end(span: Span) -> tuple[int, RunId]:
    return span.end_ms, span.run


def _corrected(span: Span, now_ms: int) -> Span:
    if span.end_ms >= now_ms:
        return span
    end_ms = corrected_end(span.start_ms, span.end_ms - span.start_ms, now_ms)
    return Span(end_ms, span.run, span.start_ms, span.request, span.project)


def corrected_end(start_ms: int, length_ms: int, now_ms: int) -> int:
    """When something that began then and should take so long ends: if it is not over by now, after twice as long, or
    four times."""
    length_ms = max(length_ms, 1)
    while start_ms + length_ms < now_ms:
        length_ms *= 2
    return start_ms + length_ms


def _spoken_for(claims: Sequence[Claim], spans: Sequence[Span], at_ms: int) -> Resources:
    """What is promised or booked at that moment, less what the projects that booked hold of it already."""
    out: Resources = {}
    booked: dict[str, Resources] = {}
    for claim in claims:
        if claim.start_ms <= at_ms < claim.end_ms:
            amounts = out if claim.job else booked.setdefault(claim.project, {})
            for resource, amount in claim.request.items():
                amounts[resource] = amounts.get(resource, 0) + amount
    for project, amounts in booked.items():
        for span in spans:
            if span.project == project and span.end_ms > at_ms:
                for resource in amounts:
                    amounts[resource] -= span.request.get(resource, 0)
        for resource, amount in amounts.items():
            if amount > 0:
                out[resource] = out.get(resource, 0) + amount
    return out


def _steps(spans: Sequence[Span], claims: Sequence[Claim], now_ms: int) -> list[tuple[int, int, Resources]]:
    """Changes of what is free, in order of time: (when, by which sign, how much)."""
    steps = [(max(span.end_ms, now_ms), 1, span.request) for span in spans if span.end_ms < FOREVER]
    booked: dict[str, list[Claim]] = {}
    for claim in claims:
        if claim.end_ms > now_ms:
            if not claim.job and any(span.project == claim.project for span in spans):
                booked.setdefault(claim.project, []).append(claim)
                continue
            steps.append((max(claim.start_ms, now_ms), -1, claim.request))
            steps.append((claim.end_ms, 1, claim.request))
    for project, theirs in booked.items():
        own = [span for span in spans if span.project == project]
        moments = {now_ms, *(claim.end_ms for claim in theirs), *(span.end_ms for span in own)}
        moments |= {claim.start_ms for claim in theirs}
        before: Resources = {}
        for at_ms in sorted(moment for moment in moments if now_ms <= moment < FOREVER):
            spoken_for = _spoken_for(theirs, own, at_ms)
            steps += [(at_ms, 1, before), (at_ms, -1, spoken_for)]
            before = spoken_for
    return sorted(steps, key=lambda step: step[0])


def _first_gap(
    steps: list[tuple[int, int, Resources]],
    free: Resources,
    request: Resources,
    duration_ms: int,
    now_ms: int,
    after_ms: int,
) -> int | None:
    """The first moment from `after_ms` on from which there is room for `request` without a break for `duration_ms`."""
    since: int | None = None
    for at_ms, levels in _levels(steps, free, now_ms):
        if all(levels[resource] >= amount for resource, amount in request.items()):
            since = max(at_ms, after_ms) if since is None else since
        elif since is not None:
            if at_ms - since >= duration_ms:
                return since
            since = None
    return since


def _levels(steps: list[tuple[int, int, Resources]], free: Resources, now_ms: int) -> Iterator[tuple[int, Resources]]:
    """What is free from each moment on at which it changes, the present one first."""
    levels, at_ms = dict(free), now_ms
    for when_ms, sign, amounts in steps:
        if when_ms > at_ms:
            yield at_ms, levels
            at_ms = when_ms
        for resource, amount in amounts.items():
            if resource in levels:
                levels[resource] += sign * amount
    yield at_ms, levels
