"""Standard Workload Format: the Parallel Workloads Archive's. Eighteen numbers a line, -1 for unknown, `;` for comments.

Columns: id submit wait run alloc cpu mem reqP reqT reqMem status user group exe queue partition preceding think.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hodei.sim.traces.processors import Record, to_workload
from hodei.sim.traces.source import Reading, Source
from hodei.sim.traces.workload import Workload

_HEADER = re.compile(r";\s*(MaxProcs|MaxNodes)\s*:\s*(\d+)", re.IGNORECASE)
_LEAST_COLUMNS = 5  # up to the allocated processors; what is cut off behind them counts as unknown
_COLUMNS = 18
_HINT = "a line of SWF has 18 numbers; comments begin with ;"


class _Log:
    """The records of a log; what was seen on the way is known when all were read."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.sizes: dict[str, int] = {}
        self.short = 0
        self.padded = 0

    def records(self) -> Iterator[Record]:
        for number, line in enumerate(self._source.lines(), 1):
            fields = line.split()
            if not fields:
                continue
            if fields[0].startswith(";"):
                self._comment(line)
                continue
            if len(fields) < _LEAST_COLUMNS:
                self.short += 1
                continue
            if len(fields) < _COLUMNS:
                fields += ["-1"] * (_COLUMNS - len(fields))
                self.padded += 1
            try:
                yield _record(fields)
            except ValueError:
                self._wrong(number, fields)

    def _comment(self, line: str) -> None:
        if (found := _HEADER.match(line.strip())) and int(found[2]) > 0:
            self.sizes.setdefault(found[1].lower(), int(found[2]))

    def _wrong(self, number: int, fields: list[str]) -> None:
        for column, text in enumerate(fields, 1):
            if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text):
                self._source.wrong(number, f"column {column} is {text[:40]!r}, which is not a number", _HINT)
        self._source.wrong(number, "it cannot be read", _HINT)


def read(source: Source, how: Reading) -> Workload:
    log = _Log(source)
    records = list(log.records())
    notes = []
    procs = how.procs or log.sizes.get("maxprocs") or log.sizes.get("maxnodes")
    if how.procs is None and procs:
        kind = "MaxProcs" if "maxprocs" in log.sizes else "MaxNodes (there is no MaxProcs)"
        notes.append(f"{procs} processors, as the header's {kind} says")
    if log.short:
        notes.append(f"{log.short:,} lines with fewer than {_LEAST_COLUMNS} numbers left out")
    if log.padded:
        notes.append(f"{log.padded:,} lines with fewer than {_COLUMNS} numbers: the rest is taken as unknown")
    return to_workload(source.name, records, how, procs, notes)


def _record(fields: list[str]) -> Record:
    user, group, program = fields[11], fields[12], fields[13]
    return Record(
        _whole(fields[0]),
        _ms(fields[1]),
        _ms(fields[3]),
        _ms(fields[8]),
        _whole(fields[4]),
        _whole(fields[7]),
        "" if user == "-1" else f"u{user}",
        "default" if group == "-1" else f"g{group}",
        "job" if program == "-1" else f"app{program}",
    )


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return int(float(text))  # some converters write 16.0


def _ms(text: str) -> int:
    """Milliseconds of seconds; unknown (-1) stays below zero."""
    try:
        return int(text) * 1000
    except ValueError:
        return round(float(text) * 1000)
