"""Jobs that come again and again: a mould, a schedule, and what to do about times that were missed or that overlap."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct, structs

from hodei.model.cron import Cron, parse_cron
from hodei.model.ids import JobId
from hodei.model.job import JobSpec

Missed = Literal["skip", "run_once", "run_all"]
Overlap = Literal["allow", "skip", "replace"]
# So much later than planned is still on time: the server was busy, or is just starting.
ON_TIME_MS = 60_000
# Nobody catches up with more than this, whatever the limit says.
MOST_MISSED = 1000
LABEL = "hodei/periodic"
DUE = "hodei/due-time"


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
    missed: Missed = "run_once"
    missed_limit: int = 10
    overlap: Overlap = "skip"
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
        kept = missed[-min(periodic.missed_limit, MOST_MISSED) :]
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
        if since == periodic.handled_ms or len(times) > MOST_MISSED:
            return times
        back_ms *= 4


def due_text(due_ms: int) -> str:
    return datetime.fromtimestamp(due_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def job_for(periodic: Periodic, due_ms: int) -> JobSpec:
    """The job for one time: told apart by a label, an annotation and HODEI_DUE_TIME."""
    spec, text = periodic.job, due_text(due_ms)
    return structs.replace(
        spec,
        tasks=tuple(structs.replace(task, env={**task.env, "HODEI_DUE_TIME": text}) for task in spec.tasks),
        labels={**spec.labels, LABEL: periodic.name},
        annotations={**spec.annotations, DUE: text},
        deadline_ms=due_ms + spec.deadline_ms if spec.deadline_ms else 0,
    )
