"""When a schedule is due: the five fields of cron, in a time zone, as pure arithmetic.

Clocks that are put forward and back: a time that does not exist that day is due at the first moment after the gap, and a
time that comes twice is due the first time. Schedules for every hour (`*` or `*/n` in the field of hours) go by the time
that really passes: they are due in both of the hours that look alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from typing import Literal
from zoneinfo import ZoneInfo

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
_MONTHS = dict(
    zip(["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"], range(1, 13), strict=True)
)
_DAYS = dict(zip(["sun", "mon", "tue", "wed", "thu", "fri", "sat"], range(7), strict=True))
_FIELDS: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day of the month", 1, 31, {}),
    ("month", 1, 12, _MONTHS),
    ("day of the week", 0, 7, _DAYS),
)
_PART = re.compile(r"(?P<from>\*|[a-z0-9]+)(?:-(?P<to>[a-z0-9]+))?(?:/(?P<step>\d{1,4}))?")
# The 29th of February may be eight years away.
_HORIZON_DAYS = 366 * 9
_ZERO = timedelta()
_FAR = timedelta(hours=4)
_LAST_MS = 253_300_000_000_000  # near the end of what a calendar can say


class Cron(Struct, frozen=True):
    """A schedule that was read. Days count if they match either field of days, where both are restricted."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    either_day: bool
    every_hour: bool
    zone: str

    def next_ms(self, after_ms: int) -> int:
        """The first time strictly after `after_ms`; 0 if there is none within nine years."""
        if after_ms >= _LAST_MS:
            return 0
        zone = time_zone(self.zone)
        after = datetime.fromtimestamp(after_ms / 1000, UTC)
        wall = after.astimezone(zone)
        soon = (after + _FAR).astimezone(zone)
        if (soon.utcoffset() or _ZERO) < (wall.utcoffset() or _ZERO):
            wall -= _FAR  # the clock is about to be put back: times of the wall that are past come again
        wall = wall.replace(tzinfo=None)
        best: datetime | None = None
        for local in self._walls(wall):
            moments = _moments(local, zone)
            if best is not None and moments[0] >= best:
                break
            for moment in moments if self.every_hour else moments[:1]:
                if moment > after and (best is None or moment < best):
                    best = moment
        return 0 if best is None else round(best.timestamp() * 1000)

    def _walls(self, start: datetime) -> Iterator[datetime]:
        """The times of the wall clock that match, from `start` on."""
        day = start.date()
        for _ in range(_HORIZON_DAYS):
            if self._matches(day):
                for hour in self.hours if day > start.date() else [hour for hour in self.hours if hour >= start.hour]:
                    for minute in self.minutes:
                        local = datetime.combine(day, time(hour, minute))
                        if local >= start:
                            yield local
            day += timedelta(days=1)

    def _matches(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        by_date, by_weekday = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return by_date or by_weekday if self.either_day else by_date and by_weekday


@lru_cache(maxsize=1024)
def parse_cron(schedule: str, zone: str = "UTC") -> Cron:
    """InvalidInput says which field is wrong, and how it is written."""
    text = " ".join(schedule.lower().split())
    text = _NAMED.get(text, text)
    fields = text.split(" ")
    if len(fields) != 5:
        known = ", ".join(sorted(_NAMED))
        raise InvalidInput(
            f"{schedule[:60]!r} is not a schedule: it has {len(fields) if text else 0} fields, not 5",
            hint=f"minute, hour, day of the month, month, day of the week, as in '*/5 * * * *'; or one of {known}",
        )
    minutes, hours, days, months, weekdays = (_read(field, *what) for field, what in zip(fields, _FIELDS, strict=True))
    time_zone(zone)
    cron = Cron(
        tuple(sorted(minutes)),
        tuple(sorted(hours)),
        frozenset(days),
        frozenset(months),
        frozenset(day % 7 for day in weekdays),
        either_day=not fields[2].startswith("*") and not fields[4].startswith("*"),
        every_hour=fields[1].startswith("*"),
        zone=zone,
    )
    if not cron.next_ms(0):
        raise InvalidInput(f"{schedule[:60]!r} never comes", hint="no month has such a day")
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


def _read(field: str, what: str, low: int, high: int, names: dict[str, int]) -> set[int]:
    out: set[int] = set()
    for part in field.split(","):
        found = _PART.fullmatch(part)
        if found is None:
            raise _wrong(part, what)
        if found["from"] == "*":
            if found["to"]:
                raise _wrong(part, what)
            first, last = low, 6 if what == "day of the week" else high
        else:
            first = _number(found["from"], part, what, low, high, names)
            # As in cron: `5/15` means from 5 to the end in steps of 15.
            last = high if found["step"] and not found["to"] else first
            if found["to"]:
                last = _number(found["to"], part, what, low, high, names)
                if what == "day of the week" and last == 0:
                    last = 7  # fri-sun
        step = int(found["step"] or 1)
        if not step or last < first:
            raise _wrong(part, what)
        out |= set(range(first, last + 1, step))
    return out


def _number(text: str, part: str, what: str, low: int, high: int, names: dict[str, int]) -> int:
    number = names.get(text, int(text) if text.isdigit() and len(text) <= 4 else -1)
    if not low <= number <= high:
        raise InvalidInput(f"{part[:40]!r} is not a {what}", hint=f"from {low} to {high}")
    return number


def _wrong(part: str, what: str) -> InvalidInput:
    return InvalidInput(f"{part[:40]!r} is not a {what}", hint="write *, a number, 1-5, 1,3,5 or */10")


def _moments(local: datetime, zone: tzinfo) -> tuple[datetime, ...]:
    """When the wall clock shows `local`: once, twice, or (in a gap) the first moment after it."""
    early = local.replace(tzinfo=zone, fold=0).astimezone(UTC)
    late = local.replace(tzinfo=zone, fold=1).astimezone(UTC)
    if early == late:
        return (early,)
    if early < late:
        return (early, late)
    # A gap: read with the offset from before it, the time lies after the change, and the other way round.
    before, after = late, early
    offset = after.astimezone(zone).utcoffset() or _ZERO
    while after - before > timedelta(seconds=1):
        middle = before + timedelta(seconds=(after - before).total_seconds() // 2)
        if (middle.astimezone(zone).utcoffset() or _ZERO) == offset:
            after = middle
        else:
            before = middle
    return (after,)


# -------------------------------------------------------------------------------------------- periodic
# Jobs that come again and again: a mould, a schedule, and what to do about times that were missed or that overlap.


MissedPolicy = Literal["skip", "run_once", "run_all"]
OverlapPolicy = Literal["allow", "skip", "replace"]
# So much later than planned is still on time: the server was busy, or is just starting.
ON_TIME_MS = 60_000
# Nobody catches up with more than this, whatever the limit says.
MAX_MISSED = 1000
PERIODIC_LABEL = "hodei/periodic"
DUE_TIME_ANNOTATION = "hodei/due-time"


class Periodic(Struct, frozen=True, omit_defaults=True):
    """`job` is the mould of every job that it makes; a deadline in it counts from the time at which the job was due.

    `missed`: of the times that passed while no server was there, none, the latest, or all (the latest `missed_limit`) are
    made up for. `overlap`: when the job before has not ended, the next one runs beside it, is left out, or takes its
    place. `handled_ms`: all times up to this one are dealt with. `last_job`, `last_due_ms`: the job made last, and for when.
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
        """When it is due next; 0 for never (again)."""
        return 0 if self.paused else self.cron.next_ms(max(self.handled_ms, after_ms))


class Due(Struct, frozen=True):
    """What a look at the clock says: the times to run for, how many were missed and are left out (of thousands, some
    thousands), and up to which time all is dealt with then."""

    run: tuple[int, ...]
    left_out: int
    handled_ms: int


def due(periodic: Periodic, now_ms: int) -> Due:
    """The times since `handled_ms` that have come. Those of this minute are on time; what to do about older ones is what
    `missed` says."""
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
    """The times that have come since it was last dealt with; of very many the latest, at least as many as anyone could
    make up for. Looked for from now backwards, so that years of minutes cost no more than a day of them."""
    cron, times, back_ms = periodic.cron, list[int](), 3_600_000
    while True:
        since = max(periodic.handled_ms, now_ms - back_ms)
        times, at = [], cron.next_ms(since)
        while at and at <= now_ms:
            times.append(at)
            at = cron.next_ms(at)
        if since == periodic.handled_ms or len(times) > MAX_MISSED:
            return times
        back_ms *= 4


def due_text(due_ms: int) -> str:
    return datetime.fromtimestamp(due_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def job_due_at(periodic: Periodic, due_ms: int) -> JobSpec:
    """The job for one time: told apart by a label, an annotation and HODEI_DUE_TIME."""
    spec, text = periodic.job, due_text(due_ms)
    return structs.replace(
        spec,
        tasks=tuple(structs.replace(task, env={**task.env, "HODEI_DUE_TIME": text}) for task in spec.tasks),
        labels={**spec.labels, PERIODIC_LABEL: periodic.name},
        annotations={**spec.annotations, DUE_TIME_ANNOTATION: text},
        deadline_ms=due_ms + spec.deadline_ms if spec.deadline_ms else 0,
    )
