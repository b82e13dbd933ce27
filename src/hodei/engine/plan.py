"""The Plan: what a cycle decided. Nothing has happened yet; the controller turns it into state and effects."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hodei.engine.points import Trigger
from hodei.model.decision import Decision, StartKind, Verdict
from hodei.model.ids import JobId, NodeName

EXISTING_ANTI_AFFINITY = "EXISTING_ANTI_AFFINITY"


class Bind(Struct, frozen=True, omit_defaults=True):
    """Member `member` of job `job` goes to `node`. `kind`, of a line that promises starts: head | backfill | spill."""

    job: JobId
    task: str
    member: int
    node: NodeName
    backend: str
    decision: Decision | None = None
    kind: StartKind | Literal[""] = ""


class Refusal(Struct, frozen=True, omit_defaults=True):
    """Why a gang was not placed: every reason with its nodes, for the first member that found no room.

    `fitted` members of the gang had found one by then; all were let go again. `for_room`: on some node nothing but
    others' work is in the way.
    """

    job: JobId
    verdicts: tuple[Verdict, ...]
    task: str = ""
    fitted: int = 0
    nodes: int = 0
    cured_by: tuple[Trigger, ...] = ()
    for_room: bool = False

    @property
    def by_nodes(self) -> bool:
        """Whether the nodes said no, each for itself: then they say so to every gang that asks them for the same."""
        return bool(self.verdicts) and not self.by_labels and all(verdict.count for verdict in self.verdicts)

    @property
    def by_labels(self) -> bool:
        """Whether a rule of a resident had a part in it, which means some jobs by their labels and not others."""
        return any(verdict.reason.code == EXISTING_ANTI_AFFINITY for verdict in self.verdicts)


class Eviction(Struct, frozen=True):
    """`job` is told to go, to make room on `nodes` for `preemptor`, which starts when all who must have gone.
    `members`: only those of it, and the others go on; none named: all."""

    job: JobId
    preemptor: JobId
    nodes: tuple[NodeName, ...]
    members: tuple[int, ...] = ()


class Fault(Struct, frozen=True):
    """A plugin raised or answered nonsense; it was fenced, and the gang at hand went on without it or waits."""

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
