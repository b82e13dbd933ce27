"""What plugins see besides the nodes: the gang, its members, and the time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

from msgspec import Struct

from hodei.model.ids import JobId, NodeName
from hodei.model.job import JobSpec, Move, Reason, StartKind, TaskSpec
from hodei.model.resources import Resources

if TYPE_CHECKING:
    from hodei.engine.availability import AvailabilityProfile

Numbers = tuple[tuple[int, ...], ...]


class Member(Struct, frozen=True, gc=False):
    """A task of a gang, for its `count` equal members. `stopping`: it stops, and does not count for spread rules."""

    job: JobSpec
    task: TaskSpec
    stopping: bool = False

    @property
    def labels(self) -> dict[str, str]:
        own = self.task.labels
        return {**self.job.labels, **own} if own else self.job.labels

    @property
    def needs(self) -> Resources:
        """The resources of which it requests more than 0."""
        return {resource: amount for resource, amount in self.task.request.items() if amount}


class Gang(Struct, gc=False):
    """The members that are placed together. `order`: from the profile's queue_sort, smallest first.

    For each of `members`: the numbers of `needed` members (all are placed, or none) and of `extra` members (placed if
    capacity allows). `is_joining`: they join a gang that runs on the nodes `running_nodes`. `group`: equal for gangs that no
    plugin distinguishes; `shape_key`: equal for gangs with the same shapes, in any project. `move`: the nodes that it may
    use while it is moved. `estimate_ms`: longest expected run time, used for start
    reservations; `expected_ms`: best estimate, used for order and forecasts; 0 if unknown. `kind`: how a backfill
    queue started it. `layout_plugins`: plugins that restrict its layout.
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
    layout_plugins: tuple[Any, ...] = ()
    is_joining: bool = False
    running_nodes: tuple[NodeName, ...] = ()
    inherited_priority: int | None = None
    shape_key: tuple[Hashable, ...] = ()
    move: Move | None = None

    @property
    def priority(self) -> int:
        """Its own priority, or the highest of the jobs that wait for it."""
        own = self.job.priority
        return own if self.inherited_priority is None or self.inherited_priority < own else self.inherited_priority

    @property
    def size(self) -> int:
        return sum(map(len, self.needed))

    def needed_members(self) -> Iterator[tuple[int, int, Member]]:
        """Index in `members`, number, Member."""
        for kind, (member, numbers) in enumerate(zip(self.members, self.needed, strict=True)):
            for number in numbers:
                yield kind, number, member


@lru_cache(maxsize=1024)
def _numbers(counts: tuple[tuple[int, int], ...]) -> tuple[Numbers, Numbers]:
    """Needed and extra numbers per task; cached, so that equal gangs share the tuples."""
    needed, extra, first = [], [], 0
    for at_least, count in counts:
        enough, end = first + at_least, first + count
        needed.append(tuple(range(first, enough)))
        extra.append(tuple(range(enough, end)))
        first = end
    return tuple(needed), tuple(extra)


def gang_of(id: JobId, job: JobSpec, submitted_ms: int) -> Gang:
    """The gang of a job: per task the first `needed` members, the others as extra."""
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
        """Projects whose factors may have changed; None for all."""

    def factor_milli(self, project: str, user: str) -> int:
        """Fair-share factor: 1000 for no past use, towards 0 for far too much."""


class Bounds(Protocol):
    def refusal(self, gang: Gang, now_ms: int) -> Reason | None:
        """The quota or budget that prevents its start."""


class View(Struct, frozen=True):
    """The time of a decision, the availability profile (None: not tracked), shares and quotas (None: not in use)."""

    now_ms: int
    availability: AvailabilityProfile | None = None
    shares: Shares | None = None
    bounds: Bounds | None = None
