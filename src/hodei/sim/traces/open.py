"""`open_workload`: chooses the reader of a trace by its content."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hodei.model.errors import InvalidInput
from hodei.sim.traces import decision_log, generate, gpu_clusters, prow, swf
from hodei.sim.traces.workload import Estimates, ReadSettings, TraceFile, TraceOptions, Workload

Reader = Callable[[TraceFile, ReadSettings], Workload]
_GENERATE = "generate:"
_SUPPORTED = (
    "supported are SWF (.swf, .swf.gz), a CSV with the columns id,submit_s,run_s,requested_s,procs, Alibaba openb pods, Philly or Prow jobs, "
    "a decision log of Hodei, and generate:lublin?jobs=1000&seed=1 (or ci, gpu, mixed)"
)


class _Table(NamedTuple):
    """A kind of CSV file, recognised by columns that no other kind has."""

    title: str
    columns: Sequence[str]
    read: Reader


_TABLES = [
    _Table("a table of jobs", swf.TABLE_COLUMNS, swf.read_table),
    _Table("a pod list of openb", gpu_clusters.POD_COLUMNS, gpu_clusters.read_openb),
    _Table("a node list of openb", gpu_clusters.NODE_COLUMNS, gpu_clusters.read_openb),
    _Table("the Philly trace", gpu_clusters.PHILLY_COLUMNS, gpu_clusters.read_philly),
    _Table("Prow's job definitions", prow.COLUMNS, prow.read),
]


def open_workload(
    trace: str | Path, *, estimates: Estimates = "user", procs: int | None = None, per_node: int | None = None
) -> Workload:
    """The workload of `trace`: a file, a folder (openb), or `generate:NAME`, with options after a `?`. `first` and `jobs` select
    a window of any file.

    `estimates`: what users requested, or the real run times ("actual"). `procs`: the processors (or GPUs) of the machine, if
    the trace does not state them or to override them. `per_node`: those of one node, so that larger jobs become gangs; without
    it the machine is one pool. InvalidInput says what is wrong and what to do.
    """
    for name, value in (("procs", procs), ("per_node", per_node)):
        if value is not None and value < 1:
            raise InvalidInput(f"{name} is {value}", hint="give a whole number from 1")
    if estimates not in ("user", "actual"):
        raise InvalidInput(f"estimates are {estimates!r}", hint="choose user or actual")
    text = str(trace)
    generated = text.startswith(_GENERATE)
    path, _, query = text.partition("?") if generated or not Path(text).exists() else (text, "", "")
    options = TraceOptions(query, path)
    settings = ReadSettings(options, estimates, procs, per_node)
    if generated:
        found = generate.generate(path.removeprefix(_GENERATE), settings)
        options.finish()
        return found
    first, jobs = options.integer("first", 0, least=0), options.integer("jobs", 0)
    found = _read(path, settings)
    options.finish()
    if not len(found.arrivals):
        raise InvalidInput(f"{path} has no job to run: {'; '.join(found.notes) or 'it is empty'}", hint=_SUPPORTED)
    return found.window(first, jobs or max(len(found.arrivals) - first, 0)) if first or jobs else found


def _read(text: str, settings: ReadSettings) -> Workload:
    path = Path(text)
    if path.is_dir():
        return gpu_clusters.read_openb_folder(path, settings)
    if "," in text and not path.exists():
        return gpu_clusters.read_openb_pair([Path(part.strip()) for part in text.split(",")], settings)
    if not path.exists():
        raise InvalidInput(f"there is no trace {text}", hint=f"check the path; {_SUPPORTED}")
    return _reader_of(TraceFile(path))(TraceFile(path), settings)


def _reader_of(file: TraceFile) -> Reader:
    lines = file.lines()
    first = next(lines, "").strip().lstrip("\ufeff")
    if not first and next(lines, None) is None:
        raise InvalidInput(f"{file.path} cannot be read: it is empty", hint="fetch it again, and check its size")
    if '"hodei_decision_log"' in first[:200]:
        return decision_log.read
    columns = [column.strip() for column in first.split(",")]
    for table in _TABLES:
        if set(table.columns) <= set(columns):
            return table.read
    _fail_if_columns_are_missing(file, columns)
    # SWF starts with comments or numbers; the file name alone does not decide.
    while first.startswith(";") or not first:
        following = next(lines, None)
        if following is None:
            break
        first = following.strip()
    if first.startswith(";") or re.fullmatch(r"[-+\d.eE\s]+", first):
        return swf.read_swf
    if ".swf" in file.path.name:
        file.fail(1, f"this is not SWF: {first[:60]!r}", "SWF has comments after ; and lines of numbers")
    raise InvalidInput(f"{file.path} is not a known trace; it begins with {first[:60]!r}", hint=_SUPPORTED)


def _fail_if_columns_are_missing(file: TraceFile, columns: list[str]) -> None:
    """A table with more than half of the columns of a known kind is taken for that kind, with columns missing."""
    missing = {table: [column for column in table.columns if column not in columns] for table in _TABLES}
    nearest = min(_TABLES, key=lambda table: len(missing[table]) / len(table.columns))
    names = missing[nearest]
    if len(names) * 2 < len(nearest.columns):
        raise InvalidInput(
            f"{file.path} has no column{'s' * (len(names) > 1)} {', '.join(names)}, which {nearest.title} needs",
            hint=f"its columns are {', '.join(columns)}; rename or add the missing ones",
        )
