"""The answer to "why?": one object, the same in the engine, the API and the terminal."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, convert, structs

from hodei.model.escalation_state import EscalationStep
from hodei.model.estimate import Estimate, StartForecast
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.job import Decision, JobSpec, TaskSpec
from hodei.model.reservation import CapacityHold

Status = Literal["waiting", "unsatisfiable", "held", "placed", "running", "ended"]
ChangeKind = Literal["lower", "tolerate", "drop", "members"]


class Blocker(Struct, frozen=True, omit_defaults=True):
    """One reason, how many nodes gave it, and their names (the first of them: `count` tells how many there are). `hint`:
    what to do about it, if that is known."""

    code: str
    text: str
    plugin: str
    task: str = ""
    count: int = 0
    nodes: tuple[NodeName, ...] = ()
    hint: str = ""


class NearestMiss(Struct, frozen=True, omit_defaults=True):
    """The node with the fewest and smallest objections, and what exactly it lacks."""

    node: NodeName
    text: str
    task: str = ""


class QueuePosition(Struct, frozen=True):
    """Where the job stands: `position` counts from 1 among the `pending` jobs of its profile, in queue order."""

    position: int
    pending: int


class Placement(Struct, frozen=True, omit_defaults=True):
    """Where one run went (or, in a plan, would go) and why there."""

    node: NodeName
    task: str
    member: int
    run: RunId = ""
    state: str = ""
    decision: Decision | None = None


class Patch(Struct, frozen=True, omit_defaults=True):
    """A change to a job in plain values: the fields to `set` of the task so named, or of the job itself for ""."""

    task: str = ""
    set: dict[str, Any] = {}

    def applied_to(self, spec: JobSpec) -> JobSpec:
        if not self.task:
            return structs.replace(spec, **_typed(JobSpec, self.set))
        changed = _typed(TaskSpec, self.set)
        tasks = (structs.replace(task, **changed) if task.name == self.task else task for task in spec.tasks)
        return structs.replace(spec, tasks=tuple(tasks))


def _typed(kind: type[Struct], values: dict[str, Any]) -> dict[str, Any]:
    types = {field.name: field.type for field in structs.fields(kind)}
    return {name: convert(value, types[name]) for name, value in values.items()}


class Suggestion(Struct, frozen=True, omit_defaults=True):
    """One change that would let the job start now, if nothing else changes: it was tried.

    `nodes`: how many nodes could then take what was changed; `example`: one that it would go to.
    """

    change: str
    kind: ChangeKind
    nodes: int
    example: NodeName
    patch: Patch = Patch()


class ReservedStart(Struct, frozen=True):
    """The job is to have room on these nodes by then at the latest, if all goes as estimated."""

    start_ms: int
    nodes: tuple[NodeName, ...]


class BackendQueueEntry(Struct, frozen=True, omit_defaults=True):
    """The job was handed to a backend that queues by itself, and waits there: by that backend's own estimate it begins then
    (0: it has not told), and `reason` is why it waits, in the backend's words."""

    backend: str
    start_ms: int = 0
    reason: str = ""


class Explanation(Struct, frozen=True, omit_defaults=True):
    """`code` and `summary` are the dominant reason; `blockers` lists every reason, the most frequent first.

    `status` tells apart what merely waits from what no node could ever take (`unsatisfiable`). `suggestions` are single
    changes to the job, the smallest first, each of which would let it start now.

    Of time: `estimate` is how long it is expected to run, `expected_end_ms` when it should be over if it runs
    (`past_estimate`: it should have been before, and that is when twice as long, or four times, is over), `promise` the start
    that it was promised, `held_for` who was promised or has reserved the room that it could start in now,
    `forecast` when it will probably start, `backend_queue` when it will by the backend that has it in its own line. `escalation_steps`: what was done about it before and while it waits (which rule chose
    its profile, what was changed because it waits for so long).
    """

    status: Status
    code: str
    summary: str
    job: JobId = 0
    name: str = ""
    state: str = ""
    nodes: int = 0
    feasible: int = 0
    blockers: tuple[Blocker, ...] = ()
    nearest: NearestMiss | None = None
    queue: QueuePosition | None = None
    attempts: int = 0
    last_attempt_ms: int = 0
    next_attempt_ms: int = 0
    next_trigger: str = ""
    hint: str = ""
    placements: tuple[Placement, ...] = ()
    scheduler_beat_ms: int = 0
    at_ms: int = 0
    suggestions: tuple[Suggestion, ...] = ()
    estimate: Estimate | None = None
    expected_end_ms: int = 0
    past_estimate: bool = False
    start_reservation: ReservedStart | None = None
    held_for: tuple[CapacityHold, ...] = ()
    forecast: StartForecast | None = None
    escalation_steps: tuple[EscalationStep, ...] = ()
    backend_queue: BackendQueueEntry | None = None


# -------------------------------------------------------------------------------------------- priority
# A job's place in line as a sum that anyone can add up: one term for each thing that counts, in thousandths of a
# point.


class PriorityTerm(Struct, frozen=True, omit_defaults=True):
    """`text` says how the points came about."""

    name: str
    milli: int
    text: str = ""


class PriorityBreakdown(Struct, frozen=True, omit_defaults=True):
    """What a job's place in line comes from. `terms` add up to `milli`; who has more of it is ahead."""

    job: JobId
    milli: int
    terms: tuple[PriorityTerm, ...]
    position: int = 0
    pending: int = 0
    queue: str = ""


# ---------------------------------------------------------------------------------------------- whatif
# The answer to "what if?": who would start when and where, who would be sent away, and for whom that differs from
# today.


class ProjectedStart(Struct, frozen=True, omit_defaults=True):
    """One job. `start_ms` is 0 if no start is in sight, and the present moment if it would start now.
    `before_ms`: the same as things are (0 also for a job that is only thought of)."""

    name: str
    job: JobId = 0
    start_ms: int = 0
    nodes: tuple[NodeName, ...] = ()
    before_ms: int = 0
    before_nodes: tuple[NodeName, ...] = ()


class ProjectedEviction(Struct, frozen=True, omit_defaults=True):
    """A job that runs, or would have started before, and would be told to go at `at_ms`: for the sake of `by` (0 and "":
    for nobody's, its node goes). `again_ms`: when it would start again, 0 if that is not in sight."""

    name: str
    at_ms: int
    job: JobId = 0
    by: JobId = 0
    by_name: str = ""
    again_ms: int = 0


class WhatIf(Struct, frozen=True, omit_defaults=True):
    """`jobs` are those that were asked about, in order. `sooner` and `later`: those that wait and would start at another
    time than as things are. `same`: how many would not. `notes`: what the answer does not know."""

    at_ms: int
    jobs: tuple[ProjectedStart, ...] = ()
    evicted: tuple[ProjectedEviction, ...] = ()
    sooner: tuple[ProjectedStart, ...] = ()
    later: tuple[ProjectedStart, ...] = ()
    same: int = 0
    notes: tuple[str, ...] = ()
