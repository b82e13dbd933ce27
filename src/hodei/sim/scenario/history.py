"""What happened in a scenario, as it can be asked for afterwards. Times are milliseconds since it began."""

from __future__ import annotations

from msgspec import Struct

from hodei.model.errors import HodeiError
from hodei.model.ids import JobId
from hodei.model.job import JOB_ENDED, Job
from hodei.sim.scenario.schema import ScenarioJob


class Stay(Struct):
    """One member on one node; `to_ms` is None while it is there."""

    member: int
    node: str
    from_ms: int
    to_ms: int | None = None


class Started(Struct):
    """The gang was placed at `at_ms`; `stays` has those who joined or were replaced later too. `over_ms`: when the last of
    them had ended, None while one runs."""

    at_ms: int
    stays: list[Stay]
    over_ms: int | None = None

    @property
    def places(self) -> list[str]:
        """Where it was placed to begin with."""
        return sorted({stay.node for stay in self.stays if stay.from_ms == self.at_ms})

    def places_at(self, at_ms: int) -> list[str]:
        there = (s for s in self.stays if s.from_ms <= at_ms and (s.to_ms is None or s.to_ms > at_ms))
        return sorted({stay.node for stay in there})


class Course:
    """The life of one job: every change of where it stood, and every start."""

    def __init__(self, job: ScenarioJob) -> None:
        self.job = job
        self.changes: list[tuple[int, Job]] = []
        self.starts: list[Started] = []
        self.refused: HodeiError | None = None

    def at(self, at_ms: int) -> Job | None:
        """How it stood after all that happened at `at_ms`; None before it was submitted, or if it never was let in."""
        return next((job for changed_ms, job in reversed(self.changes) if changed_ms <= at_ms), None)

    def state_at(self, at_ms: int) -> tuple[str, str]:
        """State and reason code."""
        found = self.at(at_ms)
        if found is not None:
            return found.state, found.reason_code
        if self.refused is not None and at_ms >= self.job.at_ms:
            return "refused", self.refused.code
        return "absent", ""

    @property
    def end(self) -> tuple[int, Job] | None:
        """When and how it ended; None if it has not."""
        last = self.changes[-1] if self.changes else None
        return last if last is not None and last[1].state in JOB_ENDED else None


class Broken(Struct):
    """A promised start that had passed by `noticed_ms`, through the scheduler's own fault."""

    job: str
    reserved_start_ms: int
    noticed_ms: int


class Evicted(Struct):
    at_ms: int
    job: str
    by: str


class History:
    """`wrongs` are breaches of what must hold in every scenario; `notes` are facts that found nothing to happen to."""

    def __init__(self, jobs: tuple[ScenarioJob, ...]) -> None:
        self.courses = {job.name: Course(job) for job in jobs}
        self.by_id: dict[JobId, Course] = {job.id: self.courses[job.name] for job in jobs}
        self.evictions: list[Evicted] = []
        self.broken: list[Broken] = []
        self.wrongs: list[str] = []
        self.notes: list[str] = []
        self.end_ms = 0
