"""Traces of parallel machines: the Standard Workload Format, and CSV tables with the waits of published schedules.

SWF is the format of the Parallel Workloads Archive: 18 numbers a line, -1 for unknown, `;` for comments. Columns: id submit
wait run alloc cpu mem reqP reqT reqMem status user group exe queue partition preceding think.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hodei.model.ids import JobId
from hodei.sim.traces.workload import (
    Arrival,
    JobSizes,
    ReadSettings,
    SpecCache,
    TraceFile,
    Workload,
    sort_arrivals,
    uniform_nodes,
)


class Record(NamedTuple):
    """A job of a trace; missing values are -1 or empty."""

    id: int
    submit_ms: int
    run_ms: int
    requested_ms: int
    allocated: int
    requested: int
    user: str
    project: str = "default"
    name: str = "job"


_TOO_LARGE = "larger than the machine: dropped"
_NO_PROCESSORS = "without a number of processors: dropped"
_NO_RUN_TIME = "without a run time (0 or unknown): dropped"
_NO_REQUESTED_TIME = "without a requested time, where others have one: dropped"
_TOO_EARLY = "submitted before the start of the trace: dropped"
_TOO_LONG = "ran longer than requested: cut to the requested time"
_ALLOCATED = "without requested processors: the allocated ones are used"
_SAME_ID = "with the id of another job: a new id is assigned"
_UNORDERED = "not in order of submission: sorted"


def to_workload(
    name: str, records: Iterable[Record], settings: ReadSettings, procs: int | None, notes: list[str]
) -> Workload:
    """Applies the filter of published schedules, with a note for each kind of change. `procs`: the machine's size."""
    jobs = list(records)
    has_requests = any(job.requested_ms > 0 for job in jobs)
    if jobs and not has_requests:
        notes.append("no job has a requested time: the real run time is the estimate")
    counts: Counter[str] = Counter()
    sizes, specs = JobSizes(per_node=settings.per_node), SpecCache()
    actual = settings.estimates == "actual" or not has_requests
    arrivals: list[Arrival] = []
    last, ids, repeated = -1, set[int](), list[int]()
    for job in jobs:
        id, at_ms, run_ms, requested_ms, allocated, units, user, project, job_name = job
        if units <= 0:
            if allocated <= 0:
                counts[_NO_PROCESSORS] += 1
                continue
            units = allocated
            counts[_ALLOCATED] += 1
        if procs is not None and units > procs:
            counts[_TOO_LARGE] += 1
            continue
        if run_ms <= 0:
            counts[_NO_RUN_TIME] += 1
            continue
        if has_requests:
            if requested_ms <= 0:
                counts[_NO_REQUESTED_TIME] += 1
                continue
            if run_ms > requested_ms:
                run_ms = requested_ms
                counts[_TOO_LONG] += 1
        if at_ms < 0:
            counts[_TOO_EARLY] += 1
            continue
        if at_ms < last:
            counts[_UNORDERED] += 1
        last = max(last, at_ms)
        if id in ids:
            repeated.append(len(arrivals))
        ids.add(id)
        estimate_ms = run_ms if actual else requested_ms
        spec = specs.spec(sizes.tasks(units), name=job_name, user=user, project=project, estimate_ms=estimate_ms)
        arrivals.append(Arrival(at_ms, id, spec, run_ms))
    for new_id, place in enumerate(repeated, max(ids, default=0) + 1):
        old = arrivals[place]
        arrivals[place] = Arrival(old.at_ms, new_id, old.spec, old.run_ms)
        counts[_SAME_ID] += 1
    notes.extend(f"{count:,} of {len(jobs):,} jobs {what}" for what, count in sorted(counts.items()))
    if procs is None:
        notes.append("the trace does not state the size of the machine: give its processors or a cluster")
    nodes = uniform_nodes(procs, per_node=settings.per_node) if procs else []
    return Workload(name, sort_arrivals(arrivals), nodes, notes)


_HEADER = re.compile(r";\s*(MaxProcs|MaxNodes)\s*:\s*(\d+)", re.IGNORECASE)
_LEAST_COLUMNS = 5  # up to the allocated processors; missing columns after them are unknown
_COLUMNS = 18
_HINT = "a line of SWF has 18 numbers; comments start with ;"


class _SwfReader:
    """`sizes` of the header and the counts of irregular lines are complete when all records are read."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self.sizes: dict[str, int] = {}
        self.short = 0
        self.padded = 0

    def records(self) -> Iterator[Record]:
        for number, line in enumerate(self._file.lines(), 1):
            fields = line.split()
            if not fields:
                continue
            if fields[0].startswith(";"):
                if (found := _HEADER.match(line.strip())) and int(found[2]) > 0:
                    self.sizes.setdefault(found[1].lower(), int(found[2]))
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
                self._fail(number, fields)

    def _fail(self, number: int, fields: list[str]) -> None:
        for column, text in enumerate(fields, 1):
            if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text):
                self._file.fail(number, f"column {column} is {text[:40]!r}, which is not a number", _HINT)
        self._file.fail(number, "the line cannot be parsed", _HINT)


def read_swf(file: TraceFile, settings: ReadSettings) -> Workload:
    reader = _SwfReader(file)
    records = list(reader.records())
    notes = []
    procs = settings.procs or reader.sizes.get("maxprocs") or reader.sizes.get("maxnodes")
    if settings.procs is None and procs:
        field = "MaxProcs" if "maxprocs" in reader.sizes else "MaxNodes (there is no MaxProcs)"
        notes.append(f"{procs} processors, from {field} of the header")
    if reader.short:
        notes.append(f"{reader.short:,} lines with fewer than {_LEAST_COLUMNS} numbers: skipped")
    if reader.padded:
        notes.append(f"{reader.padded:,} lines with fewer than {_COLUMNS} numbers: the rest is unknown")
    return to_workload(file.name, records, settings, procs, notes)


def _record(fields: list[str]) -> Record:
    user, group, program = fields[11], fields[12], fields[13]
    return Record(
        _integer(fields[0]),
        _ms(fields[1]),
        _ms(fields[3]),
        _ms(fields[8]),
        _integer(fields[4]),
        _integer(fields[7]),
        "" if user == "-1" else f"u{user}",
        "default" if group == "-1" else f"g{group}",
        "job" if program == "-1" else f"app{program}",
    )


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return int(float(text))  # some converters write 16.0


def _ms(text: str) -> int:
    """Seconds to milliseconds; unknown (-1) stays negative."""
    try:
        return int(text) * 1000
    except ValueError:
        return round(float(text) * 1000)


TABLE_COLUMNS = ("id", "submit_s", "run_s", "requested_s", "procs")


def read_table(file: TraceFile, settings: ReadSettings) -> Workload:
    """A filtered trace with the waits of published schedules: id,submit_s,run_s,requested_s,procs[,user][,wait_*_s]."""
    places, rows = file.table(TABLE_COLUMNS)
    waits: dict[str, dict[JobId, int]] = {column: {} for column in places if column.startswith("wait_")}
    found = to_workload(file.name, _table_records(file, places, rows, waits), settings, settings.procs, [])
    found.extra.update(waits)
    return found


def _table_records(
    file: TraceFile, places: dict[str, int], rows: Iterator[tuple[int, list[str]]], waits: dict[str, dict[JobId, int]]
) -> Iterator[Record]:
    at = [places[column] for column in TABLE_COLUMNS]
    user_at = places.get("user")
    waits_at = [(places[column], table) for column, table in waits.items()]
    for line, row in rows:
        try:
            id, submit_s, run_s, requested_s, procs = (int(row[place]) for place in at)
            for place, table in waits_at:
                if place < len(row) and row[place]:
                    table[id] = int(row[place])
        except ValueError:
            for column, place in places.items():
                if column != "user" and place < len(row) and not re.fullmatch(r"\s*[-+]?\d+\s*", row[place]):
                    file.fail(line, f"{column} is {row[place][:40]!r}, which is not a whole number")
            raise
        user = f"u{row[user_at]}" if user_at is not None and user_at < len(row) and row[user_at] else ""
        yield Record(id, submit_s * 1000, run_s * 1000, requested_s * 1000, procs, procs, user)
