"""Answers to "why?", "what is its priority?" and "what if?": the same objects in the engine, the API and the CLI."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, convert, structs

from hodei.model.capacity import CapacityOutlook
from hodei.model.escalation_state import EscalationStep
from hodei.model.estimate import Estimate, StartForecast
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.job import Decision, JobSpec, TaskSpec
from hodei.model.reservation import CapacityHold

Status = Literal["waiting", "unsatisfiable", "held", "placed", "running", "ended"]
ChangeKind = Literal["lower", "tolerate", "drop", "members"]


class Blocker(Struct, frozen=True, omit_defaults=True):
    """A reason, its `count` of nodes, and the names of the first of them. `hint`: what to do, if known."""

    code: str
    text: str
    plugin: str
    task: str = ""
    count: int = 0
    nodes: tuple[NodeName, ...] = ()
    hint: str = ""


class NearestMiss(Struct, frozen=True, omit_defaults=True):
    """The node with the fewest and smallest objections, and what it lacks."""

    node: NodeName
    text: str
    task: str = ""


class QueuePosition(Struct, frozen=True):
    """`position` counts from 1 among the `pending` jobs of the profile, in queue order."""

    position: int
    pending: int


class Placement(Struct, frozen=True, omit_defaults=True):
    """Where one run was placed (or, in a plan, would be) and why."""

    node: NodeName
    task: str
    member: int
    run: RunId = ""
    state: str = ""
    decision: Decision | None = None


class Patch(Struct, frozen=True, omit_defaults=True):
    """A change to a job: the fields to `set` of the named task, or of the job itself for ""."""

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
    """One change that would let the job start now; it was tried on the live state.

    `nodes`: how many nodes could then run what was changed; `example`: the one it would be placed on.
    """

    change: str
    kind: ChangeKind
    nodes: int
    example: NodeName
    patch: Patch = Patch()


class ReservedStart(Struct, frozen=True):
    """The latest start of the job on these nodes, if all estimates hold."""

    start_ms: int
    nodes: tuple[NodeName, ...]


class BackendQueueEntry(Struct, frozen=True, omit_defaults=True):
    """The job waits in the queue of its backend. `start_ms`: the backend's own estimate of the start (0: none);
    `reason`: why it waits, in the backend's words."""

    backend: str
    start_ms: int = 0
    reason: str = ""


class Explanation(Struct, frozen=True, omit_defaults=True):
    """`code` and `summary` are the dominant reason; `blockers` lists every reason, the most frequent first.

    `status` distinguishes a job that waits from one that no node could ever run (`unsatisfiable`). `suggestions` are
    single changes to the job, the smallest first, each of which would let it start now. `escalation_steps`: how its
    profile was chosen, and what was changed while it waited.

    Time: `estimate` is the expected run time, `expected_end_ms` the expected end if it runs (`past_estimate`: it has
    exceeded its estimate, and the end assumes twice or four times as long). `start_reservation` is its reserved start,
    `held_for` are the start reservations and reservations that keep it from capacity that is free now, `forecast` is
    the probable start, `backend_queue` the start that the backend expects, `capacity` the start on nodes that can be
    ordered.
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
    capacity: CapacityOutlook | None = None


# The priority of a job as a sum of terms, in thousandths of a point.


class PriorityTerm(Struct, frozen=True, omit_defaults=True):
    """`text`: how the points were computed."""

    name: str
    milli: int
    text: str = ""


class PriorityBreakdown(Struct, frozen=True, omit_defaults=True):
    """`terms` add up to `milli`; the higher sum is first in the queue."""

    job: JobId
    milli: int
    terms: tuple[PriorityTerm, ...]
    position: int = 0
    pending: int = 0
    queue: str = ""


# Start times and preemptions after a change, compared with the present state.


class ProjectedStart(Struct, frozen=True, omit_defaults=True):
    """`start_ms` is 0 if no start is in sight, and the present time if it would start now. `before_ms`: the same
    without the change (0 also for a hypothetical job)."""

    name: str
    job: JobId = 0
    start_ms: int = 0
    nodes: tuple[NodeName, ...] = ()
    before_ms: int = 0
    before_nodes: tuple[NodeName, ...] = ()


class ProjectedEviction(Struct, frozen=True, omit_defaults=True):
    """A job that would be stopped at `at_ms`, preempted by `by` (0 and "": because of its node). `again_ms`: its next
    start, 0 if none is in sight."""

    name: str
    at_ms: int
    job: JobId = 0
    by: JobId = 0
    by_name: str = ""
    again_ms: int = 0


class WhatIf(Struct, frozen=True, omit_defaults=True):
    """`jobs` are the jobs of the question, in order. `sooner` and `later`: other pending jobs whose start would change;
    `same`: how many would not. `notes`: what the answer does not take into account."""

    at_ms: int
    jobs: tuple[ProjectedStart, ...] = ()
    evicted: tuple[ProjectedEviction, ...] = ()
    sooner: tuple[ProjectedStart, ...] = ()
    later: tuple[ProjectedStart, ...] = ()
    same: int = 0
    notes: tuple[str, ...] = ()
