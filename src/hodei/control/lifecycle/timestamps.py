"""Times that are not now: those that lie ahead, and those that backends tell.

Times that lie ahead were written under a clock that was wrong and has been set back since. A job that stands in line, or
runs, is brought back to now, so that it is not last in line for a year, does not pause for a year, and no duration is
negative. What has ended stays as it was written.
"""

from __future__ import annotations

from msgspec import structs

from hodei.model.job import Job, Run
from hodei.model.text import moment

_OF_JOB = ("submitted_ms", "queued_ms", "scheduled_ms", "started_ms", "changed_ms")
_OF_RUN = ("placed_ms", "started_ms", "finished_ms", "checkpoint_ms")
# An event says when it really happened if we heard of it later than this.
_LATE_MS = 1000


def not_ahead(job: Job, now_ms: int) -> Job:
    """The job with no time of its past after `now_ms`; a pause before its next try is as long as it was meant to be."""
    if job.changed_ms <= now_ms and job.submitted_ms <= now_ms:
        return job  # nothing of it was written later than that
    changes = {name: now_ms for name in _OF_JOB if getattr(job, name) > now_ms}
    if job.not_before_ms > now_ms:
        changes["not_before_ms"] = now_ms + max(job.not_before_ms - max(job.changed_ms, now_ms), 0)
    return structs.replace(job, **changes)


def run_not_ahead(run: Run, now_ms: int) -> Run:
    changes = {name: now_ms for name in _OF_RUN if getattr(run, name) > now_ms}
    return structs.replace(run, **changes) if changes else run


def credible(at_ms: int, least_ms: int, now_ms: int) -> int:
    """What a backend says of a moment between `least_ms` and now. Clocks differ and are set; 0 or less is no moment at all,
    and then all that is known is that it was before now."""
    return max(min(at_ms, now_ms), least_ms) if at_ms > 0 else now_ms


def if_late(name: str, at_ms: int, now_ms: int) -> dict[str, str]:
    """For an event about something that we heard of late: when it was."""
    return {name: moment(at_ms)} if now_ms - at_ms >= _LATE_MS else {}
