"""The second order of a queue: who goes first among those that the queue's own order calls equal.

A tie-breaker is a class with a `name` and `keys(gang)`: whole numbers, the smallest goes first. What is equal by these too
goes by submission. Like every plugin it keeps nothing between calls.
"""

from __future__ import annotations

from typing import Any, Protocol

from hodei.engine.points import QueueSort
from hodei.engine.view import Gang
from hodei.model.resources import CPU

_NEVER_MS = 1 << 62


class TieBreaker(Protocol):
    name: str

    def keys(self, gang: Gang) -> tuple[int, ...]: ...


class Shortest:
    """The shortest estimate first; those without one last."""

    name = "shortest"

    def keys(self, gang: Gang) -> tuple[int, ...]:
        return (gang.expected_ms or gang.estimate_ms or _NEVER_MS,)


class Smallest:
    """The fewest cores first, of all members together."""

    name = "smallest"

    def keys(self, gang: Gang) -> tuple[int, ...]:
        return (_cores(gang),)


class Largest:
    """The most cores first: large jobs are harder to place later."""

    name = "largest"

    def keys(self, gang: Gang) -> tuple[int, ...]:
        return (-_cores(gang),)


class Deadline:
    """The nearest deadline first; those without one last."""

    name = "deadline"

    def keys(self, gang: Gang) -> tuple[int, ...]:
        return (gang.job.deadline_ms or _NEVER_MS,)


class Newest:
    """The latest submission first."""

    name = "newest"

    def keys(self, gang: Gang) -> tuple[int, ...]:
        # Jobs of one bulk submit have the same time: the higher number came later.
        return (-gang.queued_ms, -gang.id)


class ByPriority:
    """The highest priority first: for queues whose own order knows none."""

    name = "priority"

    def keys(self, gang: Gang) -> tuple[int, ...]:
        return (-gang.priority,)


SECONDARIES: dict[str, type[Any]] = {
    made.name: made for made in (Shortest, Smallest, Largest, Deadline, Newest, ByPriority)
}


class TieBreakingQueue:
    """A queue with a tie-breaker. All but the order is the queue's own."""

    def __init__(self, primary: QueueSort, secondary: TieBreaker) -> None:
        self.primary, self.secondary = primary, secondary
        self.name, self.preempts = primary.name, primary.preempts
        # A queue that ends its keys with the time of submission says what comes before that in `primary_keys`.
        self._keys = getattr(primary, "primary_keys", primary.queue_sort)

    def queue_sort(self, gang: Gang) -> tuple[int, ...]:
        return (*self._keys(gang), *self.secondary.keys(gang), gang.queued_ms)

    def tenant(self, gang: Gang) -> str:
        return self.primary.tenant(gang)

    def charge(self, gang: Gang) -> int:
        return self.primary.charge(gang)


def _cores(gang: Gang) -> int:
    sizes = zip(gang.members, gang.needed, strict=True)
    return sum(len(numbers) * member.task.request.get(CPU, 0) for member, numbers in sizes)
