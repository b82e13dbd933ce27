"""What every trace becomes (jobs in order of arrival, nodes, notes), and what readers use: files, options, specs, nodes."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, NoReturn, Protocol
from urllib.parse import parse_qsl

from msgspec import Struct, structs

from hodei.model.errors import InvalidInput
from hodei.model.ids import JobId
from hodei.model.job import JobSpec, TaskSpec
from hodei.model.node import Node
from hodei.model.resources import CPU

Estimates = Literal["user", "actual"]
BACKEND = "sim"
# One processor or GPU.
WHOLE = 1000
# Left out of the notes where the processors come from the cluster of a simulation.
PROCS_IGNORED = "processors were given, but the trace has its own nodes: ignored"
# Enough for the distinct jobs of a real trace; bounds the memory for generated millions.
_MAX_SPECS = 65_536
_GZIP_MAGIC = b"\x1f\x8b"


class Arrival(Struct, frozen=True, gc=False):
    """A job that arrives `at_ms` after the start of the trace. `run_ms` is its real run time, which only the driver may use;
    the scheduler knows `spec.estimate_ms`."""

    at_ms: int
    id: JobId
    spec: JobSpec
    run_ms: int


class Arrivals(Protocol):
    """A repeatable sequence of arrivals in order of (at_ms, id)."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Arrival]: ...


class LazyArrivals:
    """Arrivals generated on each iteration, so that a million of them need no list."""

    def __init__(self, count: int, make: Callable[[], Iterator[Arrival]]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Arrival]:
        return islice(self._make(), self._count)


class Workload(Struct, frozen=True):
    """`nodes` is empty if the trace has none. `notes`: irregularities, how often each occurs, and how it was handled. `extra`:
    further numbers by column and job, such as the waits of a published schedule."""

    name: str
    arrivals: Arrivals
    nodes: list[Node] = []
    notes: list[str] = []
    extra: dict[str, dict[JobId, int]] = {}

    def window(self, first: int, jobs: int) -> Workload:
        """Jobs number `first` to `first + jobs - 1`, counted from 0, at their original times. InvalidInput if there is no such
        job: the simulation of nothing would look like a good result."""
        total = len(self.arrivals)
        found = list(islice(iter(self.arrivals), first, first + jobs))
        if not found:
            raise InvalidInput(
                f"{self.name} has {total:,} job{'s' * (total != 1)}, counted from 0: there is no job {first:,}",
                hint=f"start the window at one of 0 to {total - 1}",
            )
        note = f"only jobs {first} to {first + len(found) - 1} of {total}, counted from 0"
        if len(found) < jobs and first + jobs > total:
            note += f"; {jobs} were requested"
        return structs.replace(self, arrivals=found, notes=[*self.notes, note])


class SpecCache:
    """Equal jobs share one `JobSpec`, which makes reading faster and needs less memory."""

    def __init__(self) -> None:
        self._specs: dict[tuple[int, str, str, str, int], JobSpec] = {}

    def spec(self, tasks: tuple[TaskSpec, ...], *, name: str, user: str, project: str, estimate_ms: int) -> JobSpec:
        """`tasks` must be the same object for equal tasks."""
        key = (id(tasks), name, user, project, estimate_ms)
        found = self._specs.get(key)
        if found is None:
            if len(self._specs) >= _MAX_SPECS:
                self._specs.clear()
            found = JobSpec(name=name, tasks=tasks, project=project, user=user, estimate_ms=estimate_ms)
            self._specs[key] = found
        return found


class JobSizes:
    """Tasks for jobs of a number of units (processors, GPUs) of `resource`: one member with all of them, or, if nodes have
    `per_node` of them, a gang of members that fill a node each, and one for the rest."""

    def __init__(self, resource: str = CPU, per_node: int | None = None) -> None:
        self._resource = resource
        self._per_node = per_node
        self._tasks: dict[int, tuple[TaskSpec, ...]] = {}

    def tasks(self, units: int) -> tuple[TaskSpec, ...]:
        if units not in self._tasks:
            self._tasks[units] = tuple(self._split(units))
        return self._tasks[units]

    def _split(self, units: int) -> Iterator[TaskSpec]:
        per_member = self._per_node or units
        full, rest = divmod(units, per_member)
        if full:
            yield TaskSpec(count=full, request={self._resource: per_member * WHOLE})
        if rest:
            yield TaskSpec(name="rest" if full else "main", request={self._resource: rest * WHOLE})


def uniform_nodes(
    units: int, resource: str = CPU, per_node: int | None = None, per_unit: dict[str, int] | None = None
) -> list[Node]:
    """`units` processors (or GPUs) in one pool, or in nodes of `per_node`; `per_unit`: other resources of each unit."""
    size = per_node or units
    sizes = [size] * (units // size) + ([units % size] if units % size else [])
    width = len(str(max(len(sizes) - 1, 0)))
    return [
        Node(
            name="pool" if len(sizes) == 1 else f"node-{number:0{width}}",
            backend=BACKEND,
            kind=BACKEND,
            capacity={resource: size * WHOLE} | {name: amount * size for name, amount in (per_unit or {}).items()},
        )
        for number, size in enumerate(sizes)
    ]


def sort_arrivals(arrivals: Sequence[Arrival]) -> list[Arrival]:
    return sorted(arrivals, key=lambda arrival: (arrival.at_ms, arrival.id))


class TraceFile:
    """A text or CSV file, plain or gzip. Its errors are InvalidInput that names file and line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """A short name for reports: folder and file name."""
        bare = self.path.name.removesuffix(".gz").rsplit(".", 1)[0]
        return f"{self.path.parent.name}/{bare}" if self.path.parent.name else bare

    def lines(self) -> Iterator[str]:
        try:
            with self.path.open("rb") as raw:
                compressed = raw.peek(2)[:2] == _GZIP_MAGIC
                # Old archives are not UTF-8: an invalid character in a comment is not an error.
                with io.TextIOWrapper(
                    gzip.GzipFile(fileobj=raw) if compressed else raw, encoding="utf-8", errors="replace", newline=""
                ) as file:
                    yield from file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InvalidInput(
                f"{self.path} is truncated or damaged: {error}", hint="fetch it again, and check its size"
            ) from error
        except OSError as error:
            raise InvalidInput(f"cannot read {self.path}: {error.strerror}", hint="check the path") from error

    def fail(self, line: int, problem: str, hint: str = "") -> NoReturn:
        raise InvalidInput(f"{self.path}, line {line}: {problem}", hint=hint or "correct the line, or remove it")

    def table(self, needed: Sequence[str]) -> tuple[dict[str, int], Iterator[tuple[int, list[str]]]]:
        """The position of each column, and the rows with their line numbers. All `needed` columns exist."""
        reader = csv.reader(self.lines())
        head = next(reader, [])
        places = {column.strip().lstrip("\ufeff"): place for place, column in enumerate(head)}
        if missing := [column for column in needed if column not in places]:
            self.fail(1, f"there is no column {', '.join(missing)}", f"the columns here are {', '.join(places)}")
        return places, self._rows(reader, max((places[column] for column in needed), default=0) + 1)

    def _rows(self, reader: Iterator[list[str]], width: int) -> Iterator[tuple[int, list[str]]]:
        for number, row in enumerate(reader, 2):
            if not row:
                continue
            if len(row) < width:
                self.fail(number, f"{len(row)} columns where {width} are needed", "the file may be truncated")
            yield number, row

    def integer(self, text: str, line: int, column: str) -> int:
        """`12.0` is accepted."""
        try:
            return int(text)
        except ValueError:
            return round(self.number(text, line, column))

    def number(self, text: str, line: int, column: str) -> float:
        try:
            found = float(text)
        except ValueError:
            self.fail(line, f"{column} is {text[:40]!r}, which is not a number")
        if found != found or abs(found) > 2**53:
            self.fail(line, f"{column} is {text[:40]!r}, which is out of range")
        return found


class TraceOptions:
    """`a=1&b=2` after a `?`. Readers take the options that they know; `finish` refuses the rest."""

    def __init__(self, text: str, trace: str) -> None:
        self._trace = trace
        self._known: list[str] = []
        try:
            pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text))
        except ValueError as error:
            raise InvalidInput(
                f"cannot read {text!r} after {trace}?", hint="write it like ?jobs=1000&seed=1"
            ) from error
        self._left = dict(pairs)
        if len(self._left) != len(pairs):
            raise InvalidInput(f"an option of {trace} is given twice: {text}", hint="keep one of them")

    def text(self, name: str, default: str = "") -> str:
        self._known.append(name)
        return self._left.pop(name, default)

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """One of `choices`, by default the first."""
        found = self.text(name, choices[0])
        if found not in choices:
            raise InvalidInput(f"{self._trace}: {name} is {found!r}", hint=f"choose one of {', '.join(choices)}")
        return found

    def integer(self, name: str, default: int, *, least: int = 1, most: int = 10**9) -> int:
        text = self.text(name)
        if not text:
            return default
        try:
            found = int(text)
        except ValueError:
            found = least - 1
        if not least <= found <= most:
            hint = f"give a whole number from {least} to {most:,}"
            raise InvalidInput(f"{self._trace}: {name} is {text!r}", hint=hint)
        return found

    def number(self, name: str, default: float, *, most: float) -> float:
        text = self.text(name)
        if not text:
            return default
        try:
            found = float(text)
        except ValueError:
            found = 0.0
        if not 0 < found <= most:
            raise InvalidInput(f"{self._trace}: {name} is {text!r}", hint=f"give a number above 0, at most {most:g}")
        return found

    def finish(self) -> None:
        if self._left:
            raise InvalidInput(
                f"{self._trace} has no option {', '.join(sorted(self._left))}",
                hint=f"it has {', '.join(sorted(set(self._known)))}",
            )


class ReadSettings(Struct, frozen=True):
    """`procs`: the size of the machine if the user gives it; `per_node`: processors (or GPUs) of one node."""

    options: TraceOptions
    estimates: Estimates = "user"
    procs: int | None = None
    per_node: int | None = None
