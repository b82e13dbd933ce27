"""What plugins are told of the world besides the nodes: the gang at hand, its parts, and the time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

from msgspec import Struct

from hodei.model.decision import Reason, StartKind
from hodei.model.ids import JobId, NodeName
from hodei.model.job import JobSpec, TaskSpec

if TYPE_CHECKING:
    from hodei.engine.availability import AvailabilityProfile

Numbers = tuple[tuple[int, ...], ...]


class Member(Struct, frozen=True, gc=False):
    """A task of a gang that wants a node; its `count` equals are indistinguishable, so they share one Member.
    `leaving`: it is on its way out, holds its room still, and is not counted by rules that spread."""

    job: JobSpec
    task: TaskSpec
    leaving: bool = False

    @property
    def labels(self) -> dict[str, str]:
        own = self.task.labels
        return {**self.job.labels, **own} if own else self.job.labels


class Gang(Struct, gc=False):
    """The members that must be placed together. `order` is given by the profile's queue_sort, smallest first.

    For each of `members`: the numbers of those that are `needed` (placed all, or nothing is), and of those that are
    taken along if there is room for them too (`extra`). `joins`: they join a gang that runs already, on `beside`.
    `group`: gangs that nothing can tell apart have the same; `alike`: those that ask nodes for the same, whoever's they are.
    `leaves`: it was moved off these nodes, and goes elsewhere; `goes_to`: there or nowhere.
    `estimate_ms`: how long it may hold what it gets, by which promises are kept; `expected_ms`: the best guess, for orders
    and forecasts; 0 for "nobody knows". `kind`: how it came to its start, in a line that promises some. `laid_by`: the plugins that have a say in how it
    lies.
    """

    id: JobId
    job: JobSpec
    submitted_ms: int
    members: tuple[Member, ...] = ()
    needed: tuple[tuple[int, ...], ...] = ()
    extra: tuple[tuple[int, ...], ...] = ()
    order: tuple[int, ...] = ()
    tenant: str = ""
    group: Hashable = None
    shapes: tuple[Hashable, ...] = ()
    attempts: int = 0
    last_attempt_ms: int = 0
    queued_ms: int = 0
    estimate_ms: int = 0
    expected_ms: int = 0
    kind: StartKind | Literal[""] = ""
    laid_by: tuple[Any, ...] = ()
    joins: bool = False
    beside: tuple[NodeName, ...] = ()
    lifted: int | None = None
    alike: tuple[Hashable, ...] = ()

    @property
    def priority(self) -> int:
        """What it counts for in line: its own, or that of the most important who waits for it."""
        own = self.job.priority
        return own if self.lifted is None or self.lifted < own else self.lifted

    leaves: tuple[NodeName, ...] = ()
    goes_to: NodeName = ""

    @property
    def size(self) -> int:
        """How many are needed."""
        return sum(map(len, self.needed))

    def each(self) -> Iterator[tuple[int, int, Member]]:
        """Every needed member in its own right: which of `members` it is one of, its number, and that member."""
        for kind, (member, numbers) in enumerate(zip(self.members, self.needed, strict=True)):
            for number in numbers:
                yield kind, number, member


@lru_cache(maxsize=1024)
def _numbers(counts: tuple[tuple[int, int], ...]) -> tuple[Numbers, Numbers]:
    """Of the members of each task those that are needed and those that are extra: the same objects for all who are alike."""
    needed, extra, first = [], [], 0
    for at_least, count in counts:
        enough, end = first + at_least, first + count
        needed.append(tuple(range(first, enough)))
        extra.append(tuple(range(enough, end)))
        first = end
    return tuple(needed), tuple(extra)


def gang_of(id: JobId, job: JobSpec, submitted_ms: int) -> Gang:
    """All members of a job: of each task the first `needed`, and the rest as extra."""
    members = tuple([Member(job, task) for task in job.tasks])
    needed, extra = _numbers(tuple([(task.needed, task.count) for task in job.tasks]))
    return Gang(
        id,
        job,
        submitted_ms,
        members,
        needed,
        extra,
        queued_ms=submitted_ms,
        estimate_ms=job.estimate_ms,
        expected_ms=job.estimate_ms,
    )


class Shares(Protocol):
    """`version` counts the changes of factors."""

    version: int

    def changed_since(self, version: int) -> list[str] | None:
        """The projects whose factors may have changed since; None for all."""

    def factor_milli(self, project: str, user: str) -> int:
        """How far the account is from its fair share: 1000 for one that has used nothing of it, towards 0 for one that
        has used far too much."""


class Bounds(Protocol):
    def refusal(self, gang: Gang, now_ms: int) -> Reason | None:
        """Why it may not start now, as far as quotas and budgets go."""


class View(Struct, frozen=True):
    """The moment of decision, and the book of what is expected and promised after it (None: nobody keeps one).
    `shares`: who has had how much so far, `bounds`: who may hold how much (None: nobody keeps account)."""

    now_ms: int
    book: AvailabilityProfile | None = None
    shares: Shares | None = None
    bounds: Bounds | None = None
