"""Periodic jobs on the wire: what is asked for, what is answered, and the way between that and the model."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from hodei.jobfile.document import parse_job
from hodei.jobfile.names import plain_name
from hodei.jobfile.render import iso, job_document
from hodei.model.audit import EnvVisibility
from hodei.model.cron import MAX_MISSED, Periodic, parse_cron
from hodei.model.errors import InvalidInput
from hodei.model.job import Job
from hodei.model.resources import MAX_DURATION_MS, format_duration

MOST_SCHEDULE = 500


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
    """`next_at` is empty while it is paused. `last_state` is that of `last_job`, empty if that is forgotten or there was
    none; `last_result` says what became of the latest time: made, skipped or refused, and why. `job` is left out of
    lists."""

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
    """InvalidInput names what is wrong with the name, the schedule or the job."""
    if len(request.schedule) > MOST_SCHEDULE or len(request.timezone) > MOST_SCHEDULE:
        raise InvalidInput(f"the schedule or the time zone is longer than {MOST_SCHEDULE} characters")
    parse_cron(request.schedule, request.timezone)
    if not 1 <= request.missed_limit <= MAX_MISSED:
        raise InvalidInput(f"missed_limit {request.missed_limit} is not between 1 and {MAX_MISSED}")
    # Read at the beginning of time, a deadline that counts from the submission is its own length.
    spec = parse_job(request.job, now_ms=0)
    if spec.deadline_ms > MAX_DURATION_MS:
        raise InvalidInput(
            "the deadline of a periodic job is a fixed time, which only its first job could meet",
            hint="give it as a duration, such as 4h: it counts from the time at which a job is due",
        )
    return Periodic(
        plain_name(request.name), " ".join(request.schedule.split()), spec, request.timezone, request.missed,
        request.missed_limit, request.overlap, request.paused, by,
    )  # fmt: skip


def periodic_view(
    periodic: Periodic, last: Job | None, *, whole: bool = False, env: EnvVisibility = "names"
) -> PeriodicView:
    document: dict[str, Any] = {}
    if whole:
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
