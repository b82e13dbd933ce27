"""Trace files: plain or gzip, text or CSV, with errors that name the file and the line; and the options behind a `?`."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from bisect import bisect
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import accumulate, count
from pathlib import Path
from random import Random
from typing import NoReturn, Protocol
from urllib.parse import parse_qsl

from msgspec import Struct, structs

from hodei.model.errors import InvalidInput
from hodei.model.job import JobSpec
from hodei.model.node import Node
from hodei.sim.traces.workload import Arrival, Estimates

_GZIP = b"\x1f\x8b"


class Source:
    """A trace file. Errors of reading it are InvalidInput, and say what to do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """A short name for reports: the file's own, and that of its folder, which often says more."""
        bare = self.path.name.removesuffix(".gz").rsplit(".", 1)[0]
        return f"{self.path.parent.name}/{bare}" if self.path.parent.name else bare

    def lines(self) -> Iterator[str]:
        try:
            with self.path.open("rb") as raw:
                packed = raw.peek(2)[:2] == _GZIP
                # Archives are older than UTF-8: a strange letter in a comment must not stop the reading.
                with io.TextIOWrapper(
                    gzip.GzipFile(fileobj=raw) if packed else raw, encoding="utf-8", errors="replace", newline=""
                ) as file:
                    yield from file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InvalidInput(
                f"{self.path} is cut short or damaged: {error}", hint="fetch it again, and check its size"
            ) from error
        except OSError as error:
            raise InvalidInput(f"cannot read {self.path}: {error.strerror}", hint="check the path") from error

    def wrong(self, line: int, what: str, hint: str = "") -> NoReturn:
        raise InvalidInput(f"{self.path}, line {line}: {what}", hint=hint or "correct the line, or take it out")

    def table(self, needed: Sequence[str]) -> tuple[dict[str, int], Iterator[tuple[int, list[str]]]]:
        """Where each column is, and the rows with their line numbers. All `needed` columns are there."""
        reader = csv.reader(self.lines())
        head = next(reader, [])
        places = {column.strip().lstrip("\ufeff"): place for place, column in enumerate(head)}
        if missing := [column for column in needed if column not in places]:
            self.wrong(1, f"there is no column {', '.join(missing)}", f"the columns here are {', '.join(places)}")
        return places, self._rows(reader, max((places[column] for column in needed), default=0) + 1)

    def _rows(self, reader: Iterator[list[str]], least: int) -> Iterator[tuple[int, list[str]]]:
        for number, row in enumerate(reader, 2):
            if not row:
                continue
            if len(row) < least:
                self.wrong(number, f"{len(row)} columns where {least} are needed", "the file may be cut short")
            yield number, row

    def whole(self, text: str, line: int, column: str) -> int:
        """A whole number, or InvalidInput that names line and column. `12.0` is one."""
        try:
            return int(text)
        except ValueError:
            return round(self.number(text, line, column))

    def number(self, text: str, line: int, column: str) -> float:
        try:
            found = float(text)
        except ValueError:
            self.wrong(line, f"{column} is {text[:40]!r}, which is not a number")
        if found != found or abs(found) > 2**53:
            self.wrong(line, f"{column} is {text[:40]!r}, which no clock or machine can count")
        return found


class Options:
    """`a=1&b=2` behind a `?`. Each is taken once by whoever knows it; `finish` refuses what nobody took."""

    def __init__(self, text: str, of: str) -> None:
        self._of = of
        self._known: list[str] = []
        try:
            pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text))
        except ValueError as error:
            raise InvalidInput(f"cannot read {text!r} behind {of}", hint="write it like ?jobs=1000&seed=1") from error
        self._left = dict(pairs)
        if len(self._left) != len(pairs):
            raise InvalidInput(f"an option of {of} is given twice: {text}", hint="keep one of them")

    def text(self, name: str, default: str = "") -> str:
        self._known.append(name)
        return self._left.pop(name, default)

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """One of `choices`, the first if none is given."""
        found = self.text(name, choices[0])
        if found not in choices:
            raise InvalidInput(f"{self._of}: {name} is {found!r}", hint=f"choose one of {', '.join(choices)}")
        return found

    def whole(self, name: str, default: int, *, least: int = 1, most: int = 10**9) -> int:
        given = self.text(name)
        if not given:
            return default
        try:
            found = int(given)
        except ValueError:
            found = least - 1
        if not least <= found <= most:
            raise InvalidInput(f"{self._of}: {name} is {given!r}", hint=f"give a whole number from {least} to {most:,}")
        return found

    def number(self, name: str, default: float, *, most: float) -> float:
        given = self.text(name)
        if not given:
            return default
        try:
            found = float(given)
        except ValueError:
            found = 0.0
        if not 0 < found <= most:
            raise InvalidInput(f"{self._of}: {name} is {given!r}", hint=f"give a number above 0, at most {most:g}")
        return found

    def finish(self) -> None:
        if self._left:
            raise InvalidInput(
                f"{self._of} does not know the option {', '.join(sorted(self._left))}",
                hint=f"it knows {', '.join(sorted(set(self._known)))}",
            )


class Reading(Struct, frozen=True):
    """How a trace is to be read. `procs`: the machine's size if the user says it; `per_node`: how much one node has."""

    options: Options
    estimates: Estimates = "user"
    procs: int | None = None
    per_node: int | None = None


# ---------------------------------------------------------------------------------------------- stream
# Generated arrivals: a model says what arrives and how far apart, a clock lays it over the hours of the day.


BUCKETS = 48
BUCKET_S = 86_400 // BUCKETS
_PILOT = 10_000
# What people ask for, in seconds: round figures from five minutes to two weeks.
_ROUND = (300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 28_800, 43_200, 64_800, 86_400, 129_600, 172_800, 259_200,
          432_000, 604_800, 1_209_600)  # fmt: skip
_LEAST_ACCURACY = 0.05

Drawn = tuple[JobSpec, int]
"""A job and its run time in milliseconds."""


class Model(Protocol):
    """`day` weighs the 48 half hours of a day, their mean being 1. Jobs of one `batch` arrive together.

    `gap_s`: seconds to the next batch at mean load.
    """

    @property
    def name(self) -> str: ...

    @property
    def day(self) -> Sequence[float]: ...

    def gap_s(self, rng: Random) -> float: ...

    def batch(self, rng: Random) -> list[Drawn]: ...


def arrivals(parts: Sequence[tuple[Model, float]], seed: int) -> Iterator[Arrival]:
    """All that the models bring, without end, in order; each model's gaps are multiplied by its pace."""
    streams = [_stream(model, Random(f"{seed}/{model.name}"), pace, place) for place, (model, pace) in enumerate(parts)]
    # By place in equal moments: specs have no order.
    for id, (at_ms, _, (spec, run_ms)) in zip(count(1), merge(*streams, key=lambda entry: entry[:2]), strict=False):
        yield Arrival(at_ms, id, spec, run_ms)


def with_deadlines(found: Iterator[Arrival], percent: int, seed: int) -> Iterator[Arrival]:
    """So many of a hundred jobs have to be done by some time after their submission: 1.2 to 5 times their estimate."""
    if not percent:
        yield from found
        return
    rng = Random(f"{seed}/deadlines")
    for arrival in found:
        hurried, times = rng.randrange(100) < percent, rng.randint(120, 500)
        if hurried:
            deadline_ms = arrival.at_ms + arrival.spec.estimate_ms * times // 100
            arrival = structs.replace(arrival, spec=structs.replace(arrival.spec, deadline_ms=deadline_ms))
        yield arrival


def _stream(model: Model, rng: Random, pace: float, place: int) -> Iterator[tuple[int, int, Drawn]]:
    """A gap is paid with the weights of the half hours that pass: many jobs in busy ones, few at night."""
    passed, left = 0, 0.0
    while True:
        left += model.gap_s(rng) * pace / BUCKET_S
        while left > model.day[passed % BUCKETS]:
            left -= model.day[passed % BUCKETS]
            passed += 1
        at_ms = round(1000 * BUCKET_S * (passed + left / model.day[passed % BUCKETS]))
        for drawn in model.batch(rng):
            yield at_ms, place, drawn


def pace_for(model: Model, nodes: Sequence[Node], load: float, seed: int) -> float:
    """The pace at which the model asks for about `load` of the nodes' scarcest resource, by a trial of its own."""
    capacity: dict[str, int] = {}
    for node in nodes:
        for resource, amount in node.capacity.items():
            capacity[resource] = capacity.get(resource, 0) + amount
    rng = Random(f"{seed}/{model.name}/trial")
    asked, gaps_s, jobs = dict.fromkeys(capacity, 0), 0.0, 0
    while jobs < _PILOT:
        gaps_s += model.gap_s(rng)
        for spec, run_ms in model.batch(rng):
            jobs += 1
            for task in spec.tasks:
                for resource, amount in task.request.items():
                    asked[resource] = asked.get(resource, 0) + amount * task.count * run_ms
    needed_ms = max(amount / capacity[resource] for resource, amount in asked.items() if capacity.get(resource))
    return needed_ms / (1000 * gaps_s * load)


class Popularity:
    """Names of which a few are frequent and most are rare: the n-th comes up 1/n as often as the first."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._weights = list(accumulate(1 / place for place in range(1, len(names) + 1)))

    def draw(self, rng: Random) -> str:
        return self._names[bisect(self._weights, rng.random() * self._weights[-1])]


def asked_ms(rng: Random, run_ms: int) -> int:
    """What a user would ask for: accuracy is spread evenly, as in the archive's logs, and people like round figures."""
    wanted_s = run_ms / 1000 / (1 - rng.random() * (1 - _LEAST_ACCURACY))
    return next((figure * 1000 for figure in _ROUND if figure >= wanted_s), max(run_ms, _ROUND[-1] * 1000))
