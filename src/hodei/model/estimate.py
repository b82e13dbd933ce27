"""Estimates of run time, samples of past runs, and forecasts of start times."""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

from hodei.model.job import Job, JobSpec
from hodei.model.resources import format_duration

Source = Literal["", "user", "timeout", "learned", "corrected"]
_DIGITS = re.compile(r"\d+")
# Only jobs that ended in one of these ways have a representative run time.
_REPRESENTATIVE_CODES = ("", "EXIT_CODE", "TIMEOUT", "OUT_OF_MEMORY")


class Estimate(Struct, frozen=True, omit_defaults=True):
    """`expected_ms` is the best guess, for ordering and forecasts. `limit_ms` is the user's own bound; start
    reservations rely on it. 0: unknown.

    `source`: the user's estimate, the job's timeout, or learned: then `percent` is the quantile of the last `runs`
    similar runs.
    """

    expected_ms: int = 0
    limit_ms: int = 0
    source: Source = ""
    percent: int = 0
    runs: int = 0

    @property
    def basis(self) -> str:
        """The source, for people."""
        if self.source == "learned":
            return f"P{self.percent} of its last {self.runs} runs"
        if self.source == "corrected":
            return f"its own estimate, corrected by its user's last {self.runs} runs"
        return {"user": "its own estimate", "timeout": "its timeout"}.get(self.source, "")

    def __str__(self) -> str:
        if not self.expected_ms:
            return "its run time is unknown"
        return f"expected to run {format_duration(round_up(self.expected_ms))} ({self.basis})"


def round_up(ms: int) -> int:
    """To whole seconds, for people."""
    return (ms + 999) // 1000 * 1000


class RuntimeSample(Struct, frozen=True, omit_defaults=True):
    """The run time of a job that ended by itself, to estimate similar jobs from. `name` has its digits replaced
    (`nightly-17` is like `nightly-18`); `shape` is the request. `stated_ms`: the user's own estimate."""

    project: str
    user: str
    name: str
    shape: str
    runtime_ms: int
    stated_ms: int = 0


def name_pattern(spec: JobSpec) -> str:
    return _DIGITS.sub("#", spec.name)


def request_shape(spec: JobSpec) -> str:
    """`2 x cpu=1000 memory=1024 + 1 x cpu=500`"""
    parts = (
        f"{task.count} x " + " ".join(f"{resource}={task.request[resource]}" for resource in sorted(task.request))
        for task in spec.tasks
    )
    return " + ".join(parts)


def runtime_sample(job: Job) -> RuntimeSample | None:
    """The sample of an ended job; None if it did not end by itself."""
    if job.state not in ("succeeded", "failed") or job.reason_code not in _REPRESENTATIVE_CODES or not job.started_ms:
        return None
    # If the end is the first observation of the run, only the time of its placement is known.
    started_ms = job.started_ms if job.started_ms < job.finished_ms else job.scheduled_ms
    spec, ran_ms = job.spec, job.finished_ms - started_ms
    said_ms = spec.estimate_ms or spec.timeout_ms
    return RuntimeSample(spec.project, spec.user, name_pattern(spec), request_shape(spec), max(ran_ms, 1), said_ms)


# When a pending job is expected to start.


class Forecast(Struct, frozen=True, array_like=True):
    """Made at `made_ms`: P50 and P90 of the start. `reach_ms`: P90 before its correction by past errors."""

    made_ms: int
    p50_ms: int
    p90_ms: int
    reach_ms: int = 0


class StartForecast(Struct, frozen=True, omit_defaults=True):
    """A forecast with its track record: `right_percent` of the last `graded` forecasts had a start by their P90."""

    p50_ms: int
    p90_ms: int
    made_ms: int
    right_percent: int = 0
    graded: int = 0
