"""Reservations, periodic jobs and the audit log: request and response types, and their conversion from and to the model."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from msgspec import Struct, field

from hodei.jobfile.parse import MAX_TIME_MS, parse_job
from hodei.jobfile.render import iso, job_document
from hodei.model.audit import AuditEntry, EnvVisibility
from hodei.model.cron import MAX_MISSED, Periodic, parse_cron
from hodei.model.errors import InvalidInput
from hodei.model.job import Job
from hodei.model.names import plain_name
from hodei.model.reservation import LateRun, OverstayPolicy, Reservation, ReservationSpec
from hodei.model.resources import MAX_DURATION_MS, format_duration, format_resources, parse_duration_ms, parse_resources

T = TypeVar("T")
MAX_NODES = 100_000
MAX_SCHEDULE_LENGTH = 500
_MAX_RESERVATION_MS = 366 * 86_400_000


class ReservationRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Reserve capacity for a project and a time window.

    `from` is ISO 8601 (UTC without a zone), milliseconds since the epoch, `now`, or an offset such as `+2h`. Give `for`
    (the duration) or `until`; give `nodes` (a number, the scheduler chooses) or `node` (names). Amounts are per node;
    without any, whole nodes are reserved. `at_start: stop` requeues runs of other projects that still hold the capacity
    when it starts; `at_end: stop` requeues the project's own runs when it ends.
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
    """A run that may still hold the capacity when the reservation starts; `end_at` is empty if its end is unknown."""

    node: str
    run: str
    end_at: str = ""


class ReservationView(Struct, frozen=True):
    """`state`: upcoming or active. `late`: runs that may delay its capacity."""

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


def parse_reservation(request: ReservationRequest, now_ms: int, by: str) -> ReservationSpec:
    """InvalidInput lists every wrong field."""
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
        problems.append(("for", "give either `for` (the duration) or `until` (the end)"))
    elif request.duration:
        length = checked("for", lambda: parse_duration_ms(request.duration))
        end = None if length is None else start_ms + length
    else:
        end = checked("until", lambda: parse_moment_ms(request.until, now_ms))
    if end is not None and not 0 < end - start_ms <= _MAX_RESERVATION_MS:
        problems.append(("until" if request.until else "for", "the duration must be above 0 and at most a year"))
    elif end is not None and end > MAX_TIME_MS:
        problems.append(("until" if request.until else "from", "the reservation must end before the year 10000"))
    if bool(request.nodes) == bool(request.node):
        problems.append(("nodes", "give either `nodes` (how many) or `node` (which)"))
    elif not 0 <= request.nodes <= MAX_NODES or len(request.node) > MAX_NODES:
        problems.append(("nodes", f"{request.nodes or len(request.node)} is not from 1 to {MAX_NODES}"))
    elif len(set(request.node)) < len(request.node):
        problems.append(("node", "a node is listed twice"))
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
    """`now`, `+90m`, ISO 8601 (UTC without a zone) or milliseconds since the epoch."""
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
            f"{given[:40]!r} is not a time", hint="write 2026-01-31T14:00:00Z, now, or an offset such as +2h"
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


class PeriodicRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`job` is a job document in either form."""

    name: str
    schedule: str
    job: dict[str, Any]
    timezone: str = "UTC"
    missed: Literal["skip", "run_once", "run_all"] = "run_once"
    missed_limit: int = 10
    overlap: Literal["allow", "skip", "replace"] = "skip"
    paused: bool = False


class PeriodicView(Struct, frozen=True):
    """`next_at` is empty while it is paused. `last_state` is the state of `last_job`, empty if there is none or it was
    deleted. `last_result` is the result of the latest scheduled time: made, skipped or refused, and why. Lists omit
    `job`."""

    name: str
    schedule: str
    timezone: str
    missed: str
    missed_limit: int
    overlap: str
    paused: bool
    by: str
    made_at: str
    next_at: str
    last_job: int = 0
    last_due: str = ""
    last_state: str = ""
    last_result: str = ""
    job: dict[str, Any] = {}


class PeriodicList(Struct, frozen=True):
    periodics: list[PeriodicView]


def parse_periodic(request: PeriodicRequest, by: str) -> Periodic:
    """InvalidInput if the name, the schedule or the job is wrong."""
    if len(request.schedule) > MAX_SCHEDULE_LENGTH or len(request.timezone) > MAX_SCHEDULE_LENGTH:
        raise InvalidInput(f"the schedule or the time zone is longer than {MAX_SCHEDULE_LENGTH} characters")
    parse_cron(request.schedule, request.timezone)
    if not 1 <= request.missed_limit <= MAX_MISSED:
        raise InvalidInput(f"missed_limit {request.missed_limit} is not between 1 and {MAX_MISSED}")
    # With now_ms=0 a deadline given as a duration is parsed to its length.
    spec = parse_job(request.job, now_ms=0)
    if spec.deadline_ms > MAX_DURATION_MS:
        raise InvalidInput(
            "the deadline of a periodic job is a fixed time, which only its first job could meet",
            hint="give a duration such as 4h; it counts from each scheduled time",
        )
    return Periodic(
        plain_name(request.name), " ".join(request.schedule.split()), spec, request.timezone, request.missed,
        request.missed_limit, request.overlap, request.paused, by,
    )  # fmt: skip


def periodic_view(
    periodic: Periodic, last: Job | None, *, with_job: bool = False, env: EnvVisibility = "names"
) -> PeriodicView:
    document: dict[str, Any] = {}
    if with_job:
        document = job_document(periodic.job, env=env)
        if periodic.job.deadline_ms:
            document["spec"]["deadline"] = format_duration(periodic.job.deadline_ms)
    return PeriodicView(
        name=periodic.name,
        schedule=periodic.schedule,
        timezone=periodic.timezone,
        missed=periodic.missed,
        missed_limit=periodic.missed_limit,
        overlap=periodic.overlap,
        paused=periodic.paused,
        by=periodic.by,
        made_at=iso(periodic.made_ms),
        next_at=iso(periodic.next_ms()),
        last_job=periodic.last_job,
        last_due=iso(periodic.last_due_ms),
        last_state=last.state if last is not None else "",
        last_result=periodic.last_result,
        job=document,
    )


class AuditView(Struct, frozen=True):
    """`outcome`: ok, or refused with a `code`. `detail`: the command of an exec."""

    seq: int
    at: str
    who: str
    role: str
    verb: str
    target: str
    outcome: str
    code: str
    request: str
    remote: str
    detail: str = ""


class AuditList(Struct, frozen=True):
    entries: list[AuditView]


def audit_view(entry: AuditEntry) -> AuditView:
    return AuditView(
        entry.seq, iso(entry.at_ms), entry.who, entry.role, entry.verb, entry.target,
        "refused" if entry.code else "ok", entry.code, entry.request, entry.remote, entry.detail,
    )  # fmt: skip
