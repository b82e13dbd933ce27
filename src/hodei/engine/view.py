"""What plugins are told of the world besides the nodes: the gang at hand, its parts, and the time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from msgspec import Struct

from hodei.model.ids import JobId
from hodei.model.job import JobSpec, TaskSpec


class Member(Struct, frozen=True):
    """A task of a gang that wants a node; its `count` equals are indistinguishable, so they share one Member."""

    job: JobSpec
    task: TaskSpec


class Gang(Struct):
    """The members that must be placed together. `order` is given by the profile's queue_sort, smallest first."""

    id: JobId
    job: JobSpec
    submitted_ms: int
    members: tuple[Member, ...] = ()
    order: tuple[int, ...] = ()
    tenant: str = ""
    group: Hashable = None
    shapes: tuple[Hashable, ...] = ()
    attempts: int = 0
    last_attempt_ms: int = 0
    queued_ms: int = 0

    @property
    def size(self) -> int:
        return sum(member.task.count for member in self.members)

    def each(self) -> Iterator[Member]:
        """Every member in its own right, in order."""
        for member in self.members:
            for _ in range(member.task.count):
                yield member


def gang_of(id: JobId, job: JobSpec, submitted_ms: int) -> Gang:
    return Gang(id, job, submitted_ms, tuple(Member(job, task) for task in job.tasks), queued_ms=submitted_ms)


class View(Struct, frozen=True):
    """The moment of decision."""

    now_ms: int
