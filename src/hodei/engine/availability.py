"""Availability profile: expected ends of runs, start reservations of pending jobs, and reservations of projects.

Everything here is an expectation. A run past its estimate is expected to end after twice the estimate, then four
times. A start reservation holds because nothing starts that would still occupy its capacity at that time. Of a
reservation only the part counts that the project's own runs do not hold yet.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from hodei.engine.nodes import Table
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.reservation import Reservation
from hodei.model.resources import Resources

FOREVER = 1 << 62
_NOTHING: Resources = {}
_by_end = attrgetter("end_ms", "run")  # of a span


class Span(NamedTuple):
    """Resources that a run holds on a node until its expected end; ordered by that end."""

    end_ms: int
    run: RunId
    start_ms: int
    request: Resources
    project: str = ""


class StartReservation(Struct, frozen=True):
    """`job` gets `request` on each of these nodes from `start_ms` to `end_ms`."""

    job: JobId
    start_ms: int
    end_ms: int
    places: tuple[tuple[NodeName, Resources], ...]
    made_ms: int = 0


class Claim(NamedTuple):
    """Reserved capacity on one node: of a start reservation (`job`) or of a reservation (`project`)."""

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
        # Per node the sum held by its runs; start reservations by start time.
        self._held: dict[NodeName, Resources] = {}
        self._due: list[tuple[int, JobId]] = []
        self._claims: dict[NodeName, list[Claim]] = {}
        self.version = 0  # changes when a start reservation could move forward: a run ended, a reservation came or went
        self.start_reservations: dict[JobId, StartReservation] = {}
        self.reservations: dict[str, Reservation] = {}
        self.forecasts: dict[JobId, int] = {}  # forecast start by pending job

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
        """The end expected at its start; FOREVER if unknown."""
        _, span = self._where.get(run, ("", None))
        return FOREVER if span is None else span.end_ms

    def expect_end_by(self, run: RunId, end_ms: int) -> None:
        """It is being stopped and is expected to have ended by then."""
        node, span = self._where.get(run, ("", None))
        if span is not None:
            self.started(run, node, span.request, span.start_ms, max(end_ms - span.start_ms, 1), span.project)

    def overdue_runs(self, node: NodeName, at_ms: int) -> list[Span]:
        return [span for span in self._spans.get(node, ()) if span.end_ms <= at_ms]

    def spans(self, node: NodeName, now_ms: int) -> Sequence[Span]:
        """The runs of a node by expected end; the end of a run past its estimate is corrected."""
        spans = self._spans.get(node, ())
        if not spans or spans[0].end_ms >= now_ms:
            return spans
        return sorted((_corrected(span, now_ms) for span in spans), key=_by_end)

    def add_start_reservation(self, start_reservation: StartReservation) -> None:
        self.remove_start_reservation(start_reservation.job)
        self.start_reservations[start_reservation.job] = start_reservation
        heapq.heappush(self._due, (start_reservation.start_ms, start_reservation.job))
        for node, request in start_reservation.places:
            claim = Claim(start_reservation.start_ms, start_reservation.end_ms, request, start_reservation.job)
            self._claims.setdefault(node, []).append(claim)

    def remove_start_reservation(self, job: JobId) -> StartReservation | None:
        start_reservation = self.start_reservations.pop(job, None)
        if start_reservation is not None:
            self._drop(start_reservation.places, lambda claim: claim.job == job)
        return start_reservation

    def next_start_ms(self, now_ms: int) -> int | None:
        """The start of the next start reservation."""
        if not self.start_reservations:
            return None
        return min(
            [
                start_reservation.start_ms
                for start_reservation in self.start_reservations.values()
                if start_reservation.start_ms > now_ms
            ],
            default=None,
        )

    def overdue(self, now_ms: int) -> list[StartReservation]:
        """Start reservations whose start has passed; each is returned once."""
        if not self._due or self._due[0][0] >= now_ms:
            return []
        late = dict[JobId, StartReservation]()
        while self._due and self._due[0][0] < now_ms:
            start_ms, job = heapq.heappop(self._due)
            start_reservation = self.start_reservations.get(job)
            if start_reservation is not None and start_reservation.start_ms == start_ms:
                late[job] = start_reservation
        return list(late.values())

    def add_reservation(self, reservation: Reservation) -> None:
        self.remove_reservation(reservation.name)
        self.reservations[reservation.name] = reservation
        self.version += 1
        for node, request in reservation.places:
            claim = Claim(reservation.start_ms, reservation.end_ms, request, 0, reservation.project, reservation.name)
            self._claims.setdefault(node, []).append(claim)

    def remove_reservation(self, name: str) -> Reservation | None:
        reservation = self.reservations.pop(name, None)
        if reservation is not None:
            self._drop(reservation.places, lambda claim: claim.name == name)
            self.version += 1
        return reservation

    def _drop(self, places: Iterable[tuple[NodeName, Resources]], which: object) -> None:
        for node, _ in places:
            left = [claim for claim in self._claims.get(node, ()) if not which(claim)]  # type: ignore[operator]
            if left:
                self._claims[node] = left
            else:
                self._claims.pop(node, None)

    def claims_on(self, node: NodeName) -> Sequence[Claim]:
        """Start reservations and reservations."""
        return self._claims.get(node, ())

    @property
    def claimed(self) -> Iterable[NodeName]:
        return self._claims

    def claims(self, node: NodeName, job: JobId, project: str) -> list[Claim]:
        """Claims of other jobs and projects."""
        return [
            claim
            for claim in self._claims.get(node, ())
            if (claim.job != job if claim.job else claim.project != project)
        ]

    def first_conflict(
        self, node: NodeName, request: Resources, now_ms: int, until_ms: int, job: JobId, project: str
    ) -> Claim | None:
        """The first claim that `request`, held until `until_ms`, would violate. Free capacity now is not checked."""
        claims = self.claims(node, job, project)
        for claim in claims:
            if claim.start_ms >= until_ms or claim.end_ms <= now_ms:
                continue
            at_ms = max(claim.start_ms, now_ms)
            free = self._free_at(node, request, now_ms, at_ms)
            alone = len(claims) == 1 and claim.job
            claimed = claim.request if alone else _claimed(claims, self.spans(node, now_ms), at_ms)
            for resource, amount in request.items():
                if free[resource] - claimed.get(resource, 0) < amount:
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
        """The first time from `after_ms` on at which the node has capacity for `duration_ms`; None for never."""
        claims = self.claims(node, job, project) if node in self._claims else ()
        if not claims:
            at_ms = self.earliest_unclaimed(node, request, now_ms)[0]
            return max(at_ms, now_ms, after_ms) if at_ms < FOREVER else None
        free = self._free_at(node, request, now_ms, -1)
        steps = _steps(self.spans(node, now_ms), claims, now_ms)
        return _first_gap(steps, free, request, duration_ms, now_ms, max(now_ms, after_ms))

    def max_spare(self, start_reservation: StartReservation, resource: str, now_ms: int) -> int:
        """The largest amount of a resource that one of its nodes has left beside the reserved job."""
        at_ms, most = max(start_reservation.start_ms, now_ms), 0
        for node, request in start_reservation.places:
            if node in self._table.row:
                free = self._free_at(node, {resource: 0}, now_ms, at_ms)[resource]
                most = max(most, free - request.get(resource, 0))
        return most

    def earliest_unclaimed(self, node: NodeName, request: Resources, now_ms: int) -> tuple[int, int]:
        """When the node has capacity if nothing more starts (0: now, FOREVER: never), and how long this answer is
        valid: until a run passes its estimate."""
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
        """Free amounts of the requested resources at `at_ms`, assuming that runs end as expected; -1 for now."""
        row = self._table.row[node]
        allocatable, used, held = (
            self._table.allocatable[row],
            self._table.node_usage[row].used,
            self._held.get(node, _NOTHING),
        )
        # In a preemption trial the table holds less than this profile: the victims' capacity must not count as free
        # twice, once now and once at their expected end.
        free = {}
        for resource in request:
            taken, reserved = used.get(resource, 0), held.get(resource, 0)
            free[resource] = allocatable.get(resource, 0) - (taken if taken > reserved else reserved)
        if at_ms >= 0:
            for span in self.spans(node, now_ms):
                if span.end_ms > at_ms:
                    break
                for resource, amount in span.request.items():
                    if resource in free:
                        free[resource] += amount
        return free


def _corrected(span: Span, now_ms: int) -> Span:
    if span.end_ms >= now_ms:
        return span
    end_ms = corrected_end(span.start_ms, span.end_ms - span.start_ms, now_ms)
    return Span(end_ms, span.run, span.start_ms, span.request, span.project)


def corrected_end(start_ms: int, length_ms: int, now_ms: int) -> int:
    """Its expected end; the length doubles until that lies in the future."""
    length_ms = max(length_ms, 1)
    while start_ms + length_ms < now_ms:
        length_ms *= 2
    return start_ms + length_ms


def _claimed(claims: Sequence[Claim], spans: Sequence[Span], at_ms: int) -> Resources:
    """Capacity claimed at that time, less what reserving projects already hold."""
    out: Resources = {}
    reserved: dict[str, Resources] = {}
    for claim in claims:
        if claim.start_ms <= at_ms < claim.end_ms:
            amounts = out if claim.job else reserved.setdefault(claim.project, {})
            for resource, amount in claim.request.items():
                amounts[resource] = amounts.get(resource, 0) + amount
    for project, amounts in reserved.items():
        for span in spans:
            if span.project == project and span.end_ms > at_ms:
                for resource in amounts:
                    amounts[resource] -= span.request.get(resource, 0)
        for resource, amount in amounts.items():
            if amount > 0:
                out[resource] = out.get(resource, 0) + amount
    return out


def _steps(spans: Sequence[Span], claims: Sequence[Claim], now_ms: int) -> list[tuple[int, int, Resources]]:
    """Changes of free capacity, ordered by time: (time, sign, amounts)."""
    steps = [(max(span.end_ms, now_ms), 1, span.request) for span in spans if span.end_ms < FOREVER]
    reserved: dict[str, list[Claim]] = {}
    for claim in claims:
        if claim.end_ms > now_ms:
            if not claim.job and any(span.project == claim.project for span in spans):
                reserved.setdefault(claim.project, []).append(claim)
                continue
            steps.append((max(claim.start_ms, now_ms), -1, claim.request))
            steps.append((claim.end_ms, 1, claim.request))
    for project, theirs in reserved.items():
        own = [span for span in spans if span.project == project]
        moments = {now_ms, *(claim.end_ms for claim in theirs), *(span.end_ms for span in own)}
        moments |= {claim.start_ms for claim in theirs}
        before: Resources = {}
        for at_ms in sorted(moment for moment in moments if now_ms <= moment < FOREVER):
            claimed = _claimed(theirs, own, at_ms)
            steps += [(at_ms, 1, before), (at_ms, -1, claimed)]
            before = claimed
    return sorted(steps, key=lambda step: step[0])


def _first_gap(
    steps: list[tuple[int, int, Resources]],
    free: Resources,
    request: Resources,
    duration_ms: int,
    now_ms: int,
    after_ms: int,
) -> int | None:
    """The first time from `after_ms` on at which `request` fits for `duration_ms` without a break."""
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
    """Free capacity over time, one entry per change, beginning with the present."""
    levels, at_ms = dict(free), now_ms
    for when_ms, sign, amounts in steps:
        if when_ms > at_ms:
            yield at_ms, levels
            at_ms = when_ms
        for resource, amount in amounts.items():
            if resource in levels:
                levels[resource] += sign * amount
    yield at_ms, levels
