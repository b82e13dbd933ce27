"""Trace files: plain or gzip, text or CSV, with errors that name the file and the line; and the options behind a `?`."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NoReturn
from urllib.parse import parse_qsl

from msgspec import Struct

from hodei.model.errors import InvalidInput
from hodei.sim.traces.workload import Estimates

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
            with self._open() as file:
                yield from file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InvalidInput(
                f"{self.path} is cut short or damaged: {error}", hint="fetch it again, and check its size"
            ) from error
        except OSError as error:
            raise InvalidInput(f"cannot read {self.path}: {error.strerror}", hint="check the path") from error

    def _open(self) -> IO[str]:
        raw = self.path.open("rb")
        packed = raw.read(2) == _GZIP
        raw.seek(0)
        # Archives are older than UTF-8: a strange letter in a comment must not stop the reading.
        return io.TextIOWrapper(gzip.open(raw) if packed else raw, encoding="utf-8", errors="replace", newline="")

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
