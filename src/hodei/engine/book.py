"""The book of time: until when runs are expected to hold what they hold, and from when it is promised to others.

Everything here is an expectation: a run that outlives its estimate is expected to end when its estimate has doubled (and
doubled again). A promise is kept by never starting anything that would still hold the promised room by then.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from hodei.engine.nodes import Table
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.resources import Resources

FOREVER = 1 << 62


class Span(NamedTuple):
    """What a run holds of a node and when it is expected to be over; ordered by that."""

    end_ms: int
    run: RunId
    start_ms: int
    request: Resources


class Promise(Struct, frozen=True):
    """From `start_ms` on `job` is to have `request` of each of these nodes, until `end_ms`."""

    job: JobId
    start_ms: int
    end_ms: int
    places: tuple[tuple[NodeName, Resources], ...]
    made_ms: int = 0


class Booking(Struct, frozen=True):
    """Room that belongs to a project for a window of time, whoever asks for it."""

    name: str
    project: str
    start_ms: int
    end_ms: int
    places: tuple[tuple[NodeName, Resources], ...]


class Claim(NamedTuple):
    """Room on one node that is spoken for: of a promise (`job`) or of a booking (`project`)."""

    start_ms: int
    end_ms: int
    request: Resources
    job: JobId = 0
    project: str = ""
    name: str = ""


class Book:
    def __init__(self, table: Table) -> None:
        self._table = table
        self._spans: dict[NodeName, list[Span]] = {}
        self._where: dict[RunId, tuple[NodeName, Span]] = {}
        self._claims: dict[NodeName, list[Claim]] = {}
        self.promises: dict[JobId, Promise] = {}
        self.bookings: dict[str, Booking] = {}

    # ------------------------------------------------------------------------------------------------ runs

    def started(self, run: RunId, node: NodeName, request: Resources, start_ms: int, estimate_ms: int) -> None:
        self.ended(run)
        span = Span(start_ms + estimate_ms if estimate_ms else FOREVER, run, start_ms, request)
        insort(self._spans.setdefault(node, []), span, key=_by_end)
        self._where[run] = (node, span)

    def ended(self, run: RunId) -> None:
        node, span = self._where.pop(run, ("", None))
        if span is not None:
            spans = self._spans[node]
            at = bisect_left(spans, _by_end(span), key=_by_end)
            del spans[at]

    def spans(self, node: NodeName, now_ms: int) -> Sequence[Span]:
        """The runs of a node by expected end; those that have outlived their estimate with a later one."""
        spans = self._spans.get(node, ())
        if not spans or spans[0].end_ms >= now_ms:
            return spans
        return sorted((_corrected(span, now_ms) for span in spans), key=_by_end)

    # -------------------------------------------------------------------------------------------- claims

    def promise(self, promise: Promise) -> None:
        self.withdraw(promise.job)
        self.promises[promise.job] = promise
        for node, request in promise.places:
            claim = Claim(promise.start_ms, promise.end_ms, request, promise.job)
            self._claims.setdefault(node, []).append(claim)

    def withdraw(self, job: JobId) -> Promise | None:
        promise = self.promises.pop(job, None)
        if promise is not None:
            self._drop(promise.places, lambda claim: claim.job == job)
        return promise

    def book(self, booking: Booking) -> None:
        self.unbook(booking.name)
        self.bookings[booking.name] = booking
        for node, request in booking.places:
            claim = Claim(booking.start_ms, booking.end_ms, request, 0, booking.project, booking.name)
            self._claims.setdefault(node, []).append(claim)

    def unbook(self, name: str) -> Booking | None:
        booking = self.bookings.pop(name, None)
        if booking is not None:
            self._drop(booking.places, lambda claim: claim.name == name)
        return booking

    def _drop(self, places: Iterable[tuple[NodeName, Resources]], which: object) -> None:
        for node, _ in places:
            left = [claim for claim in self._claims.get(node, ()) if not which(claim)]  # type: ignore[operator]
            if left:
                self._claims[node] = left
            else:
                self._claims.pop(node, None)

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
        for claim in self.claims(node, job, project):
            if claim.start_ms >= until_ms or claim.end_ms <= now_ms:
                continue
            at_ms = max(claim.start_ms, now_ms)
            free = self._free_at(node, request, now_ms, at_ms)
            for other in self.claims(node, job, project):
                if other.start_ms <= at_ms < other.end_ms:
                    for resource in request:
                        free[resource] -= other.request.get(resource, 0)
            if any(free[resource] < amount for resource, amount in request.items()):
                return claim
        return None

    def earliest(
        self, node: NodeName, request: Resources, duration_ms: int, now_ms: int, job: JobId, project: str
    ) -> int | None:
        """When the node is first expected to have room for so long; None for never."""
        claims = self.claims(node, job, project)
        spans = self.spans(node, now_ms)
        free = self._free_at(node, request, now_ms, -1)
        if not claims:
            if all(free[resource] >= amount for resource, amount in request.items()):
                return now_ms
            for span in spans:
                if span.end_ms >= FOREVER:
                    return None
                for resource, amount in span.request.items():
                    if resource in free:
                        free[resource] += amount
                if all(free[resource] >= amount for resource, amount in request.items()):
                    return max(span.end_ms, now_ms)
            return None
        return _first_gap(_steps(spans, claims, now_ms), free, request, duration_ms, now_ms)

    def _free_at(self, node: NodeName, request: Resources, now_ms: int, at_ms: int) -> Resources:
        """What is free of the resources that are asked for, when all runs that should be over by then are."""
        row = self._table.row[node]
        room, used = self._table.room[row], self._table.holds[row].used
        free = {resource: room.get(resource, 0) - used.get(resource, 0) for resource in request}
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
    length = max(span.end_ms - span.start_ms, 1)
    while span.start_ms + length < now_ms:
        length *= 2
    return Span(span.start_ms + length, span.run, span.start_ms, span.request)


def _steps(spans: Sequence[Span], claims: Sequence[Claim], now_ms: int) -> list[tuple[int, int, Resources]]:
    """Changes of what is free, in order of time: (when, by which sign, how much)."""
    steps = [(max(span.end_ms, now_ms), 1, span.request) for span in spans if span.end_ms < FOREVER]
    for claim in claims:
        if claim.end_ms > now_ms:
            steps.append((max(claim.start_ms, now_ms), -1, claim.request))
            steps.append((claim.end_ms, 1, claim.request))
    return sorted(steps, key=lambda step: step[0])


def _first_gap(
    steps: list[tuple[int, int, Resources]], free: Resources, request: Resources, duration_ms: int, now_ms: int
) -> int | None:
    """The first moment from which there is room for `request` without a break for `duration_ms`."""
    since: int | None = None
    for at_ms, levels in _levels(steps, free, now_ms):
        if all(levels[resource] >= amount for resource, amount in request.items()):
            since = at_ms if since is None else since
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
