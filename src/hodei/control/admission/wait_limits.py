"""How long a job may wait before it fails: what the job says, else its profile, else the server.

`scheduling_timeout` bounds every wait, also one after a retry or after it gave up its place. `max_queue_time` bounds the
wait for its first start only: a job that has run before is not given up for it. Both are about room: waiting outside the
queue, for `after` or for the `at_most` of an array, does not count. The defaults are written into the job when it is
submitted, as its profile is: a later change of the configuration does not shorten what it was told. How long it has
between TERM and KILL (`grace`) is given in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, structs

from hodei.engine.explain import summary
from hodei.engine.plan import Refusal
from hodei.model.escalation_state import Measure
from hodei.model.job import Job, JobSpec
from hodei.model.quantity import format_duration
from hodei.model.text import moment

_USUAL_GRACE_MS = structs.fields(JobSpec)[JobSpec.__struct_fields__.index("grace_ms")].default


class WaitLimits(Struct, frozen=True):
    """Milliseconds, 0 for none. `timeout_from` and `queue_time_from`: who has set them, for people."""

    scheduling_timeout_ms: int = 0
    max_queue_time_ms: int = 0
    timeout_from: str = ""
    queue_time_from: str = ""
    grace_ms: int = 0


class WaitDefaults:
    def __init__(self, of_profile: Mapping[str, WaitLimits] | None = None, others: WaitLimits | None = None) -> None:
        """`others`: for profiles that are not named."""
        self._of_profile, self._others = dict(of_profile or {}), others or WaitLimits()
        self.any = any(
            limits.scheduling_timeout_ms or limits.max_queue_time_ms or limits.grace_ms
            for limits in (self._others, *self._of_profile.values())
        )

    def given(self, spec: JobSpec) -> JobSpec:
        """The spec with what it leaves to the defaults."""
        limits = self._of_profile.get(spec.profile, self._others)
        changes: dict[str, int] = {}
        said = []
        if limits.scheduling_timeout_ms and not spec.scheduling_timeout_ms:
            changes["scheduling_timeout_ms"] = limits.scheduling_timeout_ms
            said.append(f"scheduling_timeout from {limits.timeout_from}")
        if limits.max_queue_time_ms and not spec.max_queue_time_ms:
            changes["max_queue_time_ms"] = limits.max_queue_time_ms
            said.append(f"max_queue_time from {limits.queue_time_from}")
        if limits.grace_ms and spec.grace_ms == _USUAL_GRACE_MS:
            changes["grace_ms"] = limits.grace_ms  # asking for just what everyone gets counts as not saying
        if not changes:
            return spec
        return structs.replace(spec, **changes, waits_by=", ".join(said) or spec.waits_by)


def due_ms(job: Job) -> int | None:
    """When a job that waits fails because of it; None for never."""
    found = _due(job)
    return found[0] if found is not None else None


def overdue(job: Job, now_ms: int, refusal: Refusal | None = None) -> tuple[str, str] | None:
    """The code and the text with which a job that waits fails now. `refusal`: what its line last heard of jobs of its
    shape; of many that are alike only the first is asked about, and only that one has it as its own reason."""
    found = _due(job)
    if found is None or found[0] > now_ms:
        return None
    last = job.reason
    if (
        not last or job.reason_code == "REQUEUED"
    ):  # that it was requeued tells why it is in line, not why it still waits
        last = summary(refusal.verdicts, refusal.nodes) if refusal is not None else "other jobs were ahead"
    if found[1] == "scheduling_timeout":
        return "SCHEDULING_TIMEOUT", f"not scheduled within its scheduling timeout; {last}"
    longest = format_duration(job.spec.max_queue_time_ms)
    return "QUEUE_TIME_EXCEEDED", f"not started within its longest time in the queue ({longest}); {last}"


def limits_told(job: Job) -> tuple[Measure, ...]:
    """For `why`: until when it may wait, and who says so."""
    found = _due(job)
    if found is None:
        return ()
    at_ms, name = found
    whose = next((part for part in job.spec.waits_by.split(", ") if part.startswith(f"{name} ")), f"its own {name}")
    span_ms = job.spec.scheduling_timeout_ms if name == "scheduling_timeout" else job.spec.max_queue_time_ms
    return (Measure(f"fails if it still waits at {moment(at_ms)} ({format_duration(span_ms)}: {whose})"),)


def _due(job: Job) -> tuple[int, str] | None:
    """The first of the two moments, and which it is."""
    spec, since = job.spec, job.queued_ms or job.submitted_ms
    due = []
    if spec.scheduling_timeout_ms:
        due.append((since + spec.scheduling_timeout_ms, "scheduling_timeout"))
    if spec.max_queue_time_ms and not job.attempt:
        due.append((since + spec.max_queue_time_ms, "max_queue_time"))
    return min(due, default=None)
