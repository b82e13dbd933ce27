"""What every trace becomes: jobs in order of arrival, perhaps the nodes that they ran on, and notes on what was changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Literal, Protocol

from msgspec import Struct, structs

from hodei.model.errors import InvalidInput
from hodei.model.ids import JobId
from hodei.model.job import JobSpec, TaskSpec
from hodei.model.node import Node
from hodei.model.resources import CPU

Estimates = Literal["user", "actual"]
BACKEND = "sim"
WHOLE = 1000
# Enough for every distinct job of a real trace; a generated million must not be kept in memory for its specs' sake.
_MOST_SPECS = 65_536


class Arrival(Struct, frozen=True, gc=False):
    """A job as it arrives, `at_ms` after the trace's start. `run_ms` is what it really takes; only the driver may know it.

    What the scheduler may know of it is `spec.estimate_ms`.
    """

    at_ms: int
    id: JobId
    spec: JobSpec
    run_ms: int


class Arrivals(Protocol):
    """Arrivals in order of (at_ms, id), as often as asked for, and how many there are."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Arrival]: ...


class Lazy:
    """Arrivals that are made while they are read, from the beginning each time: a million of them need no list."""

    def __init__(self, count: int, make: Callable[[], Iterator[Arrival]]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Arrival]:
        return islice(self._make(), self._count)


class Workload(Struct, frozen=True):
    """`nodes` is empty when the trace does not say what it ran on. `notes`: what was odd, how often, and what was done.

    `extra`: further numbers per job that a trace carries (a published schedule's waits), by column and job.
    """

    name: str
    arrivals: Arrivals
    nodes: list[Node] = []
    notes: list[str] = []
    extra: dict[str, dict[JobId, int]] = {}

    def window(self, first: int, jobs: int) -> Workload:
        """`jobs` of them, the first being number `first`, counted from 0. Times stay as they were.

        A window with no job in it is InvalidInput: a run of nothing would look like a good result."""
        total = len(self.arrivals)
        found = list(islice(iter(self.arrivals), first, first + jobs))
        if not found:
            raise InvalidInput(
                f"{self.name} has {total:,} job{'s' * (total != 1)}, counted from 0: there is no job {first:,}",
                hint=f"begin the window at one of 0 to {total - 1}",
            )
        note = f"only jobs {first} to {first + len(found) - 1} of {total}, counted from 0"
        if len(found) < jobs and first + jobs > total:
            note += f"; {jobs} were asked for"
        return structs.replace(self, arrivals=found, notes=[*self.notes, note])


class Shapes:
    """Equal jobs share one `JobSpec`, jobs of equal size their tasks: a trace is read faster and takes less room.

    A job is one member with all its units (processors, GPUs) of `resource`; if nodes have `per_node` of them, a larger
    one is a gang of members that fill a node each, and one for the rest.
    """

    def __init__(self, resource: str = CPU, per_node: int | None = None) -> None:
        self._resource = resource
        self._per_node = per_node
        self._tasks: dict[int, tuple[TaskSpec, ...]] = {}
        self._specs: dict[tuple[int, str, str, str, int], JobSpec] = {}

    def spec(self, units: int, *, name: str, user: str, project: str, estimate_ms: int) -> JobSpec:
        key = (units, name, user, project, estimate_ms)
        found = self._specs.get(key)
        if found is None:
            if len(self._specs) >= _MOST_SPECS:
                self._specs.clear()
            found = JobSpec(name=name, tasks=self.tasks(units), project=project, user=user, estimate_ms=estimate_ms)
            self._specs[key] = found
        return found

    def tasks(self, units: int) -> tuple[TaskSpec, ...]:
        if units not in self._tasks:
            self._tasks[units] = tuple(self._split(units))
        return self._tasks[units]

    def _split(self, units: int) -> Iterator[TaskSpec]:
        most = self._per_node or units
        full, rest = divmod(units, most)
        if full:
            yield TaskSpec(count=full, request={self._resource: most * WHOLE})
        if rest:
            yield TaskSpec(name="rest" if full else "main", request={self._resource: rest * WHOLE})


def machine(
    units: int, resource: str = CPU, per_node: int | None = None, more: dict[str, int] | None = None
) -> list[Node]:
    """`units` processors (or GPUs) in one pool, or in nodes of `per_node`; `more` is what goes with each unit."""
    most = per_node or units
    sizes = [most] * (units // most) + ([units % most] if units % most else [])
    width = len(str(max(len(sizes) - 1, 0)))
    return [
        Node(
            name="pool" if len(sizes) == 1 else f"node-{number:0{width}}",
            backend=BACKEND,
            kind=BACKEND,
            capacity={resource: size * WHOLE} | {name: amount * size for name, amount in (more or {}).items()},
        )
        for number, size in enumerate(sizes)
    ]


def ordered(arrivals: Sequence[Arrival]) -> list[Arrival]:
    return sorted(arrivals, key=lambda arrival: (arrival.at_ms, arrival.id))
