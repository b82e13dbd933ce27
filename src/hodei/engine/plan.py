"""The Plan: what a cycle decided. Nothing has happened yet; the controller turns it into state and effects."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hodei.engine.points import Trigger
from hodei.model.ids import JobId, NodeName
from hodei.model.job import Decision, StartKind, Verdict

EXISTING_ANTI_AFFINITY = "EXISTING_ANTI_AFFINITY"


class Bind(Struct, frozen=True, omit_defaults=True):
    """Member `member` of job `job` goes to `node`. `kind` in a backfill queue: head | backfill | spill."""

    job: JobId
    task: str
    member: int
    node: NodeName
    backend: str
    decision: Decision | None = None
    kind: StartKind | Literal[""] = ""


class Refusal(Struct, frozen=True, omit_defaults=True):
    """Why a gang was not placed: every reason with its nodes, for the first member without a node.

    `fitted`: members placed before that (and released). `for_capacity`: preemption could make some node feasible.
    """

    job: JobId
    verdicts: tuple[Verdict, ...]
    task: str = ""
    fitted: int = 0
    nodes: int = 0
    requeue_on: tuple[Trigger, ...] = ()
    for_capacity: bool = False

    @property
    def by_nodes(self) -> bool:
        """Refused node by node: true for every gang with the same shapes."""
        return bool(self.verdicts) and not self.by_labels and all(verdict.count for verdict in self.verdicts)

    @property
    def by_labels(self) -> bool:
        """Refused by an existing job's anti-affinity, which depends on labels."""
        return any(verdict.reason.code == EXISTING_ANTI_AFFINITY for verdict in self.verdicts)


class Eviction(Struct, frozen=True):
    """`job` (only `members`, if given) is stopped on `nodes`; `preemptor` starts when all victims have ended."""

    job: JobId
    preemptor: JobId
    nodes: tuple[NodeName, ...]
    members: tuple[int, ...] = ()


class Fault(Struct, frozen=True):
    """A plugin raised or returned an invalid answer; it was treated as a refusal or as no opinion."""

    plugin: str
    point: str
    job: JobId
    error: str


class Plan(Struct, omit_defaults=True):
    binds: list[Bind] = []
    refusals: list[Refusal] = []
    faults: list[Fault] = []
    evictions: list[Eviction] = []

    @property
    def empty(self) -> bool:
        return not (self.binds or self.refusals or self.faults or self.evictions)
