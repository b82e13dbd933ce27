"""Times that lie ahead: written under a clock that was wrong and has been set back since.

A job that stands in line, or runs, is brought back to now, so that it is not last in line for a year, does not pause for
a year, and no duration is negative. What has ended stays as it was written.
"""

from __future__ import annotations

from msgspec import structs

from hodei.model.job import Job, Run

_OF_JOB = ("submitted_ms", "queued_ms", "scheduled_ms", "started_ms", "changed_ms")
_OF_RUN = ("placed_ms", "started_ms", "finished_ms", "checkpoint_ms")


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
