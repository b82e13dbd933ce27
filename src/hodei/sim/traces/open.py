"""`open_workload`: which reader a trace needs, told from its name and its first lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hodei.model.errors import InvalidInput
from hodei.model.ids import JobId
from hodei.sim.traces import decision_log, generate, openb, philly, prow, swf
from hodei.sim.traces.source import Options, Reading, Source
from hodei.sim.traces.swf import Record, to_workload
from hodei.sim.traces.workload import Estimates, Workload

# ---------------------------------------------------------------------------------------------- golden
# A filtered trace with the waits of published schedules: id,submit_s,run_s,requested_s,procs[,user][,wait_*_s].


COLUMNS = ("id", "submit_s", "run_s", "requested_s", "procs")


def read(source: Source, how: Reading) -> Workload:
    places, rows = source.table(COLUMNS)
    waits: dict[str, dict[JobId, int]] = {column: {} for column in places if column.startswith("wait_")}
    found = to_workload(source.name, _records(source, places, rows, waits), how, how.procs, [])
    found.extra.update(waits)
    return found


def _records(
    source: Source, places: dict[str, int], rows: Iterator[tuple[int, list[str]]], waits: dict[str, dict[JobId, int]]
) -> Iterator[Record]:
    id_at, submit_at, run_at, requested_at, procs_at = (places[column] for column in COLUMNS)
    user_at = places.get("user")
    waits_at = [(places[column], table) for column, table in waits.items()]
    for line, row in rows:
        try:
            id, procs = int(row[id_at]), int(row[procs_at])
            submit_s, run_s, requested_s = int(row[submit_at]), int(row[run_at]), int(row[requested_at])
            for place, table in waits_at:
                if place < len(row) and row[place]:
                    table[id] = int(row[place])
        except ValueError:
            _blame(source, places, line, row)
            raise
        user = f"u{row[user_at]}" if user_at is not None and user_at < len(row) and row[user_at] else ""
        yield Record(id, submit_s * 1000, run_s * 1000, requested_s * 1000, procs, procs, user)


def _blame(source: Source, places: dict[str, int], line: int, row: list[str]) -> None:
    for column, place in places.items():
        if column != "user" and place < len(row):
            try:
                int(row[place])
            except ValueError:
                source.wrong(line, f"{column} is {row[place][:40]!r}, which is not a whole number")


# ----------------------------------------------------------------------------------------------------

_GENERATE = "generate:"
_KNOWN = (
    "readable are: SWF (.swf, .swf.gz), a CSV with the columns of golden.csv, Alibaba openb pods, Philly or Prow jobs, "
    "a decision log of Hodei, and generate:lublin?jobs=1000&seed=1 (or ci, gpu, mixed)"
)


class _Table(NamedTuple):
    """A kind of CSV: what it is, the columns that it must have, and its reader."""

    what: str
    columns: Sequence[str]
    read: Callable[[Source, Reading], Workload]


# A CSV is known by columns that no other has.
_TABLES = [
    _Table("a table of jobs", COLUMNS, read),
    _Table("openb's list of pods", openb.POD_COLUMNS, openb.read),
    _Table("openb's list of nodes", openb.NODE_COLUMNS, openb.read),
    _Table("the Philly trace", philly.COLUMNS, philly.read),
    _Table("Prow's job definitions", prow.COLUMNS, prow.read),
]


def open_workload(
    path: str | Path, *, estimates: Estimates = "user", procs: int | None = None, per_node: int | None = None
) -> Workload:
    """The workload at `path`, or InvalidInput that says what is wrong and what to do.

    `path` is a file, a folder (openb), or `generate:NAME`, each with options behind a `?`; `first` and `jobs` cut a
    window out of any file. `estimates`: what the users said, or the real run times ("actual"). `procs`: how many
    processors (or GPUs) the machine has, where the trace does not say or is to be overruled. `per_node`: how many
    of them one node has, so that larger jobs become gangs; without it the machine is one pool.
    """
    for name, value in (("procs", procs), ("per_node", per_node)):
        if value is not None and value < 1:
            raise InvalidInput(f"{name} is {value}", hint="give a whole number from 1")
    if estimates not in ("user", "actual"):
        raise InvalidInput(f"estimates are {estimates!r}", hint="choose user or actual")
    text = str(path)
    made = text.startswith(_GENERATE)
    bare, _, query = text.partition("?") if made or not Path(text).exists() else (text, "", "")
    options = Options(query, of=bare)
    how = Reading(options, estimates, procs, per_node)
    if made:
        found = generate.generate(bare.removeprefix(_GENERATE), how)
        options.finish()
        return found
    first, jobs = options.whole("first", 0, least=0), options.whole("jobs", 0)
    found = _read(bare, how)
    options.finish()
    if not len(found.arrivals):
        raise InvalidInput(f"{bare} has no job that can be run: {'; '.join(found.notes) or 'it is empty'}", hint=_KNOWN)
    return found.window(first, jobs or max(len(found.arrivals) - first, 0)) if first or jobs else found


def _read(text: str, how: Reading) -> Workload:
    path = Path(text)
    if path.is_dir():
        return openb.read_folder(path, how)
    if "," in text and not path.exists():
        return openb.read_pair([Path(part.strip()) for part in text.split(",")], how)
    if not path.exists():
        raise InvalidInput(f"there is no trace {text}", hint=f"check the path; {_KNOWN}")
    return _reader_of(Source(path))(Source(path), how)


def _reader_of(source: Source) -> Callable[[Source, Reading], Workload]:
    lines = source.lines()
    first = next(lines, "").strip().lstrip("\ufeff")
    if not first and next(lines, None) is None:
        raise InvalidInput(f"{source.path} cannot be read: it is empty", hint="fetch it again, and check its size")
    if '"hodei_decision_log"' in first[:200]:
        return decision_log.read
    columns = [column.strip() for column in first.split(",")]
    for table in _TABLES:
        if set(table.columns) <= set(columns):
            return table.read
    _name_the_missing(source, columns)
    # A comment or a line of numbers; the name alone must not make SWF of something else.
    while first.startswith(";") or not first:
        following = next(lines, None)
        if following is None:
            break
        first = following.strip()
    if first.startswith(";") or re.fullmatch(r"[-+\d.eE\s]+", first):
        return swf.read
    if ".swf" in source.path.name:
        source.wrong(1, f"this is not SWF: {first[:60]!r}", "SWF has ; before comments, else numbers between spaces")
    raise InvalidInput(f"{source.path} is not a trace that is known; it begins with {first[:60]!r}", hint=_KNOWN)


def _name_the_missing(source: Source, columns: list[str]) -> None:
    """A table with more than half of what a known kind needs is taken for one of that kind, with columns missing."""
    missing = {table: [c for c in table.columns if c not in columns] for table in _TABLES}
    nearest = min(_TABLES, key=lambda table: len(missing[table]) / len(table.columns))
    lacks = missing[nearest]
    if len(lacks) * 2 < len(nearest.columns):
        raise InvalidInput(
            f"{source.path} has no column{'s' * (len(lacks) > 1)} {', '.join(lacks)}, which {nearest.what} needs",
            hint=f"the columns here are {', '.join(columns)}; rename or add",
        )
