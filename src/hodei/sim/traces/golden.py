"""A filtered trace with the waits of published schedules: id,submit_s,run_s,requested_s,procs[,user][,wait_*_s].

The waits are carried along in `Workload.extra`, by column; nothing of the simulation reads them.
"""

from __future__ import annotations

from collections.abc import Iterator

from hodei.model.ids import JobId
from hodei.sim.traces.processors import Record, to_workload
from hodei.sim.traces.source import Reading, Source
from hodei.sim.traces.workload import Workload

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
