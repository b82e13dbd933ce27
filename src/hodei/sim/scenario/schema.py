"""The keys of a scenario file, and the values they become.

Jobs have the keys of a job file and nodes those of the configuration; only the additional ones are here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from hodei.jobfile.values import Duration, Form, Line, Word
from hodei.model.config import SchedulingConfig
from hodei.model.ids import JobId
from hodei.model.job import JobSpec
from hodei.model.node import Node, Taint

Names = Word | Annotated[list[Word], Meta(min_length=1, max_length=1000)]
Verb = Literal[
    "lose", "join", "drain", "cordon", "uncordon", "taint", "untaint",
    "cancel", "hold", "release", "requeue", "fail", "suspend", "migrate", "appear",
]  # fmt: skip
NODE_VERBS = ("lose", "join", "drain", "cordon", "uncordon", "taint", "untaint")
JOB_VERBS = ("cancel", "hold", "release", "requeue", "suspend", "migrate", "fail")
DATA_VERBS = ("appear",)
End = Literal["succeeded", "failed", "cancelled", "refused", "never"]
State = Literal["pending", "held", "scheduled", "running", "succeeded", "failed", "cancelled", "refused", "absent"]
# The tolerance of `about`.
ABOUT_MS = 1000
FOREVER_MS = 1 << 62


class FactForm(Form, frozen=True):
    """An entry of `facts`: a time, one verb with its targets, and the options of the verb."""

    at: Duration
    lose: Names | None = None
    join: Names | None = None
    drain: Names | None = None
    cordon: Names | None = None
    uncordon: Names | None = None
    taint: Names | None = None
    untaint: Names | None = None
    cancel: Names | None = None
    hold: Names | None = None
    release: Names | None = None
    requeue: Names | None = None
    suspend: Names | None = None
    migrate: Names | None = None
    fail: Names | None = None
    appear: Line | Annotated[list[Line], Meta(min_length=1, max_length=1000)] | None = None
    taint_as: Line | None = field(name="as", default=None)
    member: Annotated[int, Meta(ge=0)] | None = None
    exit: Annotated[int, Meta(ge=1, le=255)] | None = None


class TimesForm(Form, frozen=True):
    """A range of times."""

    before: Duration | None = None
    after: Duration | None = None
    about: Duration | None = None


class ExpectForm(Form, frozen=True):
    """An entry of `expect`: about a job, a preemption, or the whole scenario."""

    job: Word | None = None
    at: Duration | None = None
    attempt: Annotated[int, Meta(ge=1)] | None = None
    state: State | None = None
    reason: Word | None = None
    starts: Duration | TimesForm | None = None
    on: Names | None = None
    not_on: Names | None = None
    ends: End | None = None
    within: Duration | None = None
    preempted: Word | None = None
    by: Word | None = None
    never: Literal["over-commit", "preemption"] | None = None
    start_reservations_broken: Annotated[int, Meta(ge=0)] | None = None


class ScenarioJob(Struct, frozen=True):
    """A job and what its runs do. `run_ms` and `exit_codes` are per attempt, the last one for all that follow; without
    `run_ms`, or with FOREVER_MS, a run does not end by itself. `running`: the nodes of its members, for a job that runs
    from before the scenario."""

    id: JobId
    name: str
    spec: JobSpec
    at_ms: int
    run_ms: tuple[int, ...] = ()
    exit_codes: tuple[int, ...] = (0,)
    stopping_ms: int = 0
    running: tuple[str, ...] = ()


class ScenarioFact(Struct, frozen=True):
    """`place`: index in `facts`."""

    place: int
    at_ms: int
    verb: Verb
    target: str
    taint: Taint | None = None
    member: int | None = None
    exit: int = 1


class Times(Struct, frozen=True):
    """When a start is expected; `before` and `after` exclude their own time."""

    exactly_ms: int | None = None
    before_ms: int | None = None
    after_ms: int | None = None
    about_ms: int | None = None
    never: bool = False


class Expectation(Struct, frozen=True):
    """An `ExpectForm` with times in milliseconds and names as tuples. `place`: index in `expect`."""

    place: int
    job: str = ""
    at_ms: int | None = None
    attempt: int = 1
    state: str = ""
    reason: str = ""
    starts: Times | None = None
    on: tuple[str, ...] = ()
    not_on: tuple[str, ...] = ()
    ends: str = ""
    within_ms: int | None = None
    preempted: str = ""
    by: str = ""
    never: str = ""
    start_reservations_broken: int | None = None


class Scenario(Struct, frozen=True):
    """`absent`: nodes that join later. `until_ms`: when it ends at the latest."""

    title: str
    policy: str
    config: SchedulingConfig
    nodes: tuple[Node, ...]
    absent: frozenset[str]
    jobs: tuple[ScenarioJob, ...]
    facts: tuple[ScenarioFact, ...]
    expect: tuple[Expectation, ...]
    until_ms: int | None = None
    source: str = ""
    text: str = ""

    def job(self, name: str) -> ScenarioJob:
        return next(job for job in self.jobs if job.name == name)
