"""The answer to "why?": one object, the same in the engine, the API and the terminal."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hodei.model.decision import Decision
from hodei.model.ids import JobId, NodeName, RunId

Status = Literal["waiting", "unsatisfiable", "held", "placed", "running", "ended"]


class Blocker(Struct, frozen=True, omit_defaults=True):
    """One reason, how many nodes gave it, and their names (the first of them: `count` tells how many there are)."""

    code: str
    text: str
    plugin: str
    task: str = ""
    count: int = 0
    nodes: tuple[NodeName, ...] = ()


class NearestMiss(Struct, frozen=True, omit_defaults=True):
    """The node with the fewest and smallest objections, and what exactly it lacks."""

    node: NodeName
    text: str
    task: str = ""


class QueuePlace(Struct, frozen=True):
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


class Explanation(Struct, frozen=True, omit_defaults=True):
    """`code` and `summary` are the dominant reason; `blockers` lists every reason, the most frequent first.

    `status` tells apart what merely waits from what no node could ever take (`unsatisfiable`).
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
    queue: QueuePlace | None = None
    attempts: int = 0
    last_attempt_ms: int = 0
    next_attempt_ms: int = 0
    next_trigger: str = ""
    hint: str = ""
    placements: tuple[Placement, ...] = ()
    scheduler_beat_ms: int = 0
    at_ms: int = 0
