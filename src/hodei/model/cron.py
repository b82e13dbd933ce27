"""Periodic jobs: cron schedules in a time zone, and which of their times are due.

cronsim parses the schedule and follows Debian's cron. A fixed time that a clock change skips is due at the first minute
after the gap, and a fixed time that occurs twice is due once. A schedule whose minute or hour starts with `*` follows
elapsed time, so it is due in both of the repeated hours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from itertools import takewhile
from typing import Literal
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from msgspec import Struct, structs

from hodei.model.errors import InvalidInput
from hodei.model.ids import JobId
from hodei.model.job import JobSpec

_NAMED = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_HINT = "minute, hour, day of the month, month, day of the week, as in '*/5 * * * *'; or one of " + ", ".join(
    sorted(_NAMED)
)
_LAST_MS = 253_300_000_000_000  # close to the last year of `datetime`


class Cron(Struct, frozen=True):
    """A valid schedule: five cron fields and a time zone."""

    fields: str
    zone: str

    def times_ms(self, after_ms: int) -> Iterator[int]:
        """The due times strictly after `after_ms`, in order."""
        if after_ms >= _LAST_MS:
            return
        after = datetime.fromtimestamp(after_ms / 1000, UTC)
        try:
            for time in CronSim(self.fields, after.astimezone(time_zone(self.zone))):
                # In the second of two repeated hours cronsim starts with times of the first.
                if time.astimezone(UTC) > after:
                    yield round(time.timestamp() * 1000)
        except OverflowError:
            return

    def next_ms(self, after_ms: int) -> int:
        """The first due time strictly after `after_ms`; 0 if there is none."""
        return next(self.times_ms(after_ms), 0)


@lru_cache(maxsize=1024)
def parse_cron(schedule: str, zone: str = "UTC") -> Cron:
    """InvalidInput names the field that is wrong."""
    text = " ".join(schedule.lower().split())
    text = _NAMED.get(text, text)
    fields = text.split(" ")
    if len(fields) != 5:
        count = len(fields) if text else 0
        raise InvalidInput(f"{schedule[:60]!r} is not a schedule: it has {count} fields, not 5", hint=_HINT)
    fields[4] = re.sub(r"-(sun|0)\b", "-7", fields[4])  # fri-sun
    time_zone(zone)
    cron = Cron(" ".join(fields), zone)
    try:
        due = cron.next_ms(0)
    except (CronSimError, ValueError) as error:
        text = str(error).lower() if isinstance(error, CronSimError) else "a number is too large"
        raise InvalidInput(f"{schedule[:60]!r} is not a schedule: {text}", hint=_HINT) from None
    if not due:
        raise InvalidInput(f"{schedule[:60]!r} is never due", hint="no month has such a day")
    return cron


@lru_cache(maxsize=64)
def time_zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise InvalidInput(
            f"there is no time zone {name[:60]!r}", hint="write it as in Europe/Madrid, America/New_York or UTC"
        ) from None


MissedPolicy = Literal["skip", "run_once", "run_all"]
OverlapPolicy = Literal["allow", "skip", "replace"]
# A run that is at most this late counts as on time: the server was busy, or is just starting.
ON_TIME_MS = 60_000
# The most missed times that are ever made up for, whatever `missed_limit` is.
MAX_MISSED = 1000
PERIODIC_LABEL = "hodei/periodic"
DUE_TIME_ANNOTATION = "hodei/due-time"


class Periodic(Struct, frozen=True, omit_defaults=True):
    """`job` is the template of every job that it creates; a deadline in it counts from the due time.

    `missed`: of the times that passed while no server ran, none, the latest, or all (the latest `missed_limit`) are made
    up for. `overlap`: if the previous job has not ended, the next one runs too, is skipped, or replaces it.
    `handled_ms`: all times up to this one are handled. `last_job`, `last_due_ms`: the last job created, and its due time.
    """

    name: str
    schedule: str
    job: JobSpec
    timezone: str = "UTC"
    missed: MissedPolicy = "run_once"
    missed_limit: int = 10
    overlap: OverlapPolicy = "skip"
    paused: bool = False
    by: str = ""
    made_ms: int = 0
    handled_ms: int = 0
    last_job: JobId = 0
    last_due_ms: int = 0
    last_result: str = ""

    @property
    def cron(self) -> Cron:
        return parse_cron(self.schedule, self.timezone)

    def next_ms(self, after_ms: int = 0) -> int:
        """The next due time; 0 if there is none."""
        return 0 if self.paused else self.cron.next_ms(max(self.handled_ms, after_ms))


class Due(Struct, frozen=True):
    """The due times to run for, how many missed ones are skipped (a lower bound if there are thousands), and the time up
    to which everything is handled then."""

    run: tuple[int, ...]
    dropped: int
    handled_ms: int


def due(periodic: Periodic, now_ms: int) -> Due:
    """The due times since `handled_ms`. Those of this minute are on time; `missed` decides about older ones."""
    if periodic.paused:
        return Due((), 0, periodic.handled_ms)
    times = _times(periodic, now_ms)
    on_time = [time for time in times if time > now_ms - ON_TIME_MS]
    missed = times[: len(times) - len(on_time)]
    if periodic.missed == "skip":
        kept = []
    elif periodic.missed == "run_once":
        # One job makes up for all of them; if one is due right now, that is it.
        kept = [] if on_time else missed[-1:]
    else:
        kept = missed[-min(periodic.missed_limit, MAX_MISSED) :]
    handled = times[-1] if times else periodic.handled_ms
    return Due((*kept, *on_time), len(missed) - len(kept), handled)


def _times(periodic: Periodic, now_ms: int) -> list[int]:
    """The due times since it was last handled; of very many the latest, at least MAX_MISSED. The search widens from now
    backwards, so that years of minutes cost no more than a day of them."""
    cron, back_ms = periodic.cron, 3_600_000
    while True:
        since = max(periodic.handled_ms, now_ms - back_ms)
        times = list(takewhile(lambda at: at <= now_ms, cron.times_ms(since)))
        if since == periodic.handled_ms or len(times) > MAX_MISSED:
            return times
        back_ms *= 4


def due_text(due_ms: int) -> str:
    return datetime.fromtimestamp(due_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def job_due_at(periodic: Periodic, due_ms: int) -> JobSpec:
    """The job for one due time, which a label, an annotation and HODEI_DUE_TIME identify."""
    spec, text = periodic.job, due_text(due_ms)
    return structs.replace(
        spec,
        tasks=tuple(structs.replace(task, env={**task.env, "HODEI_DUE_TIME": text}) for task in spec.tasks),
        labels={**spec.labels, PERIODIC_LABEL: periodic.name},
        annotations={**spec.annotations, DUE_TIME_ANNOTATION: text},
        deadline_ms=due_ms + spec.deadline_ms if spec.deadline_ms else 0,
    )
