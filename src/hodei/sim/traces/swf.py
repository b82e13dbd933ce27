"""Standard Workload Format: the Parallel Workloads Archive's. Eighteen numbers a line, -1 for unknown, `;` for comments.

Columns: id submit wait run alloc cpu mem reqP reqT reqMem status user group exe queue partition preceding think.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hodei.sim.traces.source import Reading, Source
from hodei.sim.traces.workload import Arrival, Shapes, Workload, machine, ordered

# ------------------------------------------------------------------------------------------ processors
# Jobs of processor counts and run times (SWF, golden CSV) to a workload, through the filter that published schedules
# use.


class Record(NamedTuple):
    """One job as a trace has it; what is missing is -1 or empty."""

    id: int
    submit_ms: int
    run_ms: int
    requested_ms: int
    allocated: int
    requested: int
    user: str
    project: str = "default"
    name: str = "job"


_LARGE = "larger than the machine: dropped"
_NO_PROCESSORS = "without a number of processors: dropped"
_NO_RUN = "without a run time (0 or unknown): dropped"
_NO_REQUEST = "without a requested time, where others have one: dropped"
_EARLY = "submitted before the trace's start: dropped"
_LONG = "ran longer than they had asked for: cut to what they asked for"
_COPIED = "without requested processors: those allocated are taken"
_TWICE = "with the id of another job: a new id is given"
_UNORDERED = "not in order of submission: sorted"


def to_workload(name: str, records: Iterable[Record], how: Reading, procs: int | None, notes: list[str]) -> Workload:
    """`procs` is the machine's size if it is known. Notes get a line for each thing that was changed, with its count."""
    jobs = list(records)
    estimated = any(job.requested_ms > 0 for job in jobs)
    if jobs and not estimated:
        notes.append("no job has a requested time: its real run time is its estimate")
    counts: Counter[str] = Counter()
    shapes = Shapes(per_node=how.per_node)
    actual = how.estimates == "actual" or not estimated
    arrivals: list[Arrival] = []
    last, seen, twice = -1, set[int](), list[int]()
    for job in jobs:
        id, at_ms, run_ms, requested_ms, allocated, units, user, project, title = job
        if units <= 0:
            if allocated <= 0:
                counts[_NO_PROCESSORS] += 1
                continue
            units = allocated
            counts[_COPIED] += 1
        if procs is not None and units > procs:
            counts[_LARGE] += 1
            continue
        if run_ms <= 0:
            counts[_NO_RUN] += 1
            continue
        if estimated:
            if requested_ms <= 0:
                counts[_NO_REQUEST] += 1
                continue
            if run_ms > requested_ms:
                run_ms = requested_ms
                counts[_LONG] += 1
        if at_ms < 0:
            counts[_EARLY] += 1
            continue
        if at_ms < last:
            counts[_UNORDERED] += 1
        last = max(last, at_ms)
        if id in seen:
            twice.append(len(arrivals))
        seen.add(id)
        spec = shapes.spec(
            units, name=title, user=user, project=project, estimate_ms=run_ms if actual else requested_ms
        )
        arrivals.append(Arrival(at_ms, id, spec, run_ms))
    for fresh, place in enumerate(twice, max(seen, default=0) + 1):
        old = arrivals[place]
        arrivals[place] = Arrival(old.at_ms, fresh, old.spec, old.run_ms)
        counts[_TWICE] += 1
    notes.extend(f"{count:,} of {len(jobs):,} jobs {what}" for what, count in sorted(counts.items()))
    if procs is None:
        notes.append("the trace does not say how large the machine is: give its processors or a cluster")
    return Workload(name, ordered(arrivals), machine(procs, per_node=how.per_node) if procs else [], notes)


# ----------------------------------------------------------------------------------------------------

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
