"""Reservations as callers write and read them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

from msgspec import Struct, field

from hodei.jobfile.names import plain_name
from hodei.jobfile.render import iso
from hodei.model.errors import InvalidInput
from hodei.model.reservation import LateRun, OverstayPolicy, Reservation, ReservationSpec
from hodei.model.resources import format_resources, parse_duration_ms, parse_resources

T = TypeVar("T")
MOST_NODES = 100_000
_LONGEST_MS = 366 * 86_400_000


class ReservationRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """What to reserve, for whom, and when.

    `from` is ISO 8601 (UTC if it names no zone), milliseconds since the epoch, `now`, or a time from now such as `+2h`;
    `for` is how long, or `until` says when it ends. Either `nodes` (how many, the scheduler chooses) or `node` (their
    names). Amounts are of each node; without any it is whole nodes. What `stop` stops queues again: `at_start` others' runs
    that are in the way when it begins, `at_end` the project's own when it is over.
    """

    name: str
    project: str
    start: str | int = field(name="from", default="now")
    duration: str | int = field(name="for", default="")
    until: str | int = ""
    nodes: int = 0
    node: list[str] = []
    cpu: str | int | float = ""
    memory: str | int = ""
    gpu: str | int | float = ""
    resources: dict[str, str | int | float] = {}
    at_start: OverstayPolicy = "let"
    at_end: OverstayPolicy = "let"


class PlaceView(Struct, frozen=True):
    node: str
    resources: dict[str, str]


class LateView(Struct, frozen=True):
    """A run that may still be there when the reservation begins; `end_at` is empty if nobody knows how long it takes."""

    node: str
    run: str
    end_at: str = ""


class ReservationView(Struct, frozen=True):
    """`state`: upcoming or active. `late`: what may keep it from having all of its room in time."""

    name: str
    project: str
    state: str
    start_at: str
    end_at: str
    places: list[PlaceView]
    by: str = ""
    made_at: str = ""
    late: list[LateView] = []
    at_start: OverstayPolicy = "let"
    at_end: OverstayPolicy = "let"


class ReservationList(Struct, frozen=True):
    reservations: list[ReservationView]


def parse_wish(request: ReservationRequest, now_ms: int, by: str) -> ReservationSpec:
    """InvalidInput names each place that is wrong."""
    problems: list[tuple[str, str]] = []

    def checked(where: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except InvalidInput as error:
            problems.append((where, f"{error.message}{f' ({error.hint})' if error.hint else ''}"))
            return None

    checked("name", lambda: plain_name(request.name))
    checked("project", lambda: plain_name(request.project))
    start = checked("from", lambda: parse_moment_ms(request.start, now_ms))
    start_ms = max(start or now_ms, now_ms)
    end: int | None = None
    if bool(request.duration) == bool(request.until):
        problems.append(("for", "say how long it lasts with `for`, or when it ends with `until`"))
    elif request.duration:
        length = checked("for", lambda: parse_duration_ms(request.duration))
        end = None if length is None else start_ms + length
    else:
        end = checked("until", lambda: parse_moment_ms(request.until, now_ms))
    if end is not None and not 0 < end - start_ms <= _LONGEST_MS:
        problems.append(("until" if request.until else "for", "it must last for some time, and for a year at most"))
    if bool(request.nodes) == bool(request.node):
        problems.append(("nodes", "say how many nodes with `nodes`, or which with `node`"))
    elif not 0 <= request.nodes <= MOST_NODES or len(request.node) > MOST_NODES:
        problems.append(("nodes", f"from 1 to {MOST_NODES}"))
    elif len(set(request.node)) < len(request.node):
        problems.append(("node", "a node is named twice"))
    amounts = {"cpu": request.cpu, "memory": request.memory, "gpu": request.gpu, **request.resources}
    wanted = checked("resources", lambda: parse_resources({name: amount for name, amount in amounts.items() if amount}))
    if problems:
        raise InvalidInput(f"{problems[0][0]}: {problems[0][1]}", problems=tuple(problems))
    assert end is not None
    assert wanted is not None
    return ReservationSpec(
        request.name, request.project, start_ms, end, request.nodes, tuple(request.node), wanted, by,
        request.at_start, request.at_end,
    )  # fmt: skip


def parse_moment_ms(text: str | int, now_ms: int) -> int:
    """`now`, `+90m`, ISO 8601 (UTC if it names no zone) or milliseconds since the epoch."""
    given = str(text).strip()
    if given == "now":
        return now_ms
    if given.startswith("+"):
        return now_ms + parse_duration_ms(given[1:])
    if given.isascii() and given.isdigit() and 12 <= len(given) <= 14:
        return int(given)
    try:
        moment = datetime.fromisoformat(given)
    except ValueError:
        raise InvalidInput(
            f"{given[:40]!r} is not a time", hint="write 2026-01-31T14:00:00Z, now, or a time from now such as +2h"
        ) from None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def reservation_view(reservation: Reservation, active: bool, late: tuple[LateRun, ...] = ()) -> ReservationView:
    return ReservationView(
        reservation.name,
        reservation.project,
        "active" if active else "upcoming",
        iso(reservation.start_ms),
        iso(reservation.end_ms),
        [PlaceView(node, format_resources(request)) for node, request in reservation.places],
        reservation.by,
        iso(reservation.made_ms),
        [LateView(each.node, each.run, iso(each.end_ms)) for each in late],
        reservation.at_start,
        reservation.at_end,
    )
