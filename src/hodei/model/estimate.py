"""How long a job is expected to run and how long it may; and what is remembered of a job that has run."""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

from hodei.model.job import Job, JobSpec
from hodei.model.resources import format_duration

Source = Literal["", "user", "timeout", "learned", "corrected"]
_DIGITS = re.compile(r"\d+")
# A job that ended in one of these ways ran for as long as such a job runs.
_TELLING = ("", "EXIT_CODE", "TIMEOUT", "OUT_OF_MEMORY")


class Estimate(Struct, frozen=True, omit_defaults=True):
    """`expected_ms` is the best guess: it may order jobs and forecast. `limit_ms` is what promises to others are kept by:
    what the user said, wherever that was said. 0 for either: nobody knows.

    `source`: the user's estimate, the job's timeout, or what was learned: then `percent` says which quantile of the last
    `runs` runs of its like it is.
    """

    expected_ms: int = 0
    limit_ms: int = 0
    source: Source = ""
    percent: int = 0
    runs: int = 0

    @property
    def basis(self) -> str:
        """Where it comes from, in words."""
        if self.source == "learned":
            return f"P{self.percent} of its last {self.runs} runs"
        if self.source == "corrected":
            return f"its own estimate, corrected by its user's last {self.runs} runs"
        return {"user": "its own estimate", "timeout": "its timeout"}.get(self.source, "")

    def __str__(self) -> str:
        if not self.expected_ms:
            return "nobody knows how long it runs"
        return f"expected to run {format_duration(round_up(self.expected_ms))} ({self.basis})"


def round_up(ms: int) -> int:
    """To whole seconds, for people."""
    return (ms + 999) // 1000 * 1000


class RuntimeSample(Struct, frozen=True, omit_defaults=True):
    """A job that has ended by itself, as far as it tells of others: whose it was, what it was, how long it took, and what its user had said.

    Numbers in a name count as one and the same (`nightly-17` is like `nightly-18`); `shape` is what it asked for.
    """

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
    """What a job that has ended tells of its like; None if it did not come to its own end."""
    if job.state not in ("succeeded", "failed") or job.reason_code not in _TELLING or not job.started_ms:
        return None
    # Of a run whose end is the first that was heard of it, only the time of its placing tells when it began.
    began_ms = job.started_ms if job.started_ms < job.finished_ms else job.scheduled_ms
    spec, ran_ms = job.spec, job.finished_ms - began_ms
    said_ms = spec.estimate_ms or spec.timeout_ms
    return RuntimeSample(spec.project, spec.user, name_pattern(spec), request_shape(spec), max(ran_ms, 1), said_ms)


# -------------------------------------------------------------------------------------------- forecast
# When a job that waits is expected to start.


class Forecast(Struct, frozen=True, array_like=True):
    """Made at `made_ms`: an even chance to start by `p50_ms`, nine in ten to start by `p90_ms`. `reach_ms` is the P90
    before it was stretched by what past forecasts lacked."""

    made_ms: int
    p50_ms: int
    p90_ms: int
    reach_ms: int = 0


class StartForecast(Struct, frozen=True, omit_defaults=True):
    """A forecast as people are told of it: with how many in a hundred of the last `graded` ones were right, which is to say
    that the job had started by its P90."""

    p50_ms: int
    p90_ms: int
    made_ms: int
    right_percent: int = 0
    graded: int = 0
