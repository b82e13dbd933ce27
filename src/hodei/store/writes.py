"""Writes a batch into SQLite, inside a transaction of `sqlite`.

One statement writes many rows (`VALUES (...), (...), ...`): Python releases its interpreter lock around every step of
SQLite, and next to a busy thread each release costs a turn of waiting. `executemany` was twenty times slower under load.
For the same reason query results are one row of JSON.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from hodei.model.accounting import UsageRow
from hodei.model.errors import Conflict, NotFound
from hodei.model.ids import JobId
from hodei.store import queries, rows
from hodei.store.batch import Batch
from hodei.store.damage import Suspects, fetch
from hodei.store.schema import ENDED

# One row per account, resource and bucket of time.


def write_usage(db: sqlite3.Connection, changed: Iterable[UsageRow]) -> None:
    """In two statements; a row with the amount 0 is deleted."""
    rows = [(json.dumps(row.path), row.resource, row.start_ms, row.width_ms, str(row.amount)) for row in changed]
    deleted = json.dumps([row[:3] for row in rows if row[4] == "0"])
    db.execute(
        """DELETE FROM usage WHERE (path, resource, start_ms) IN
           (SELECT value ->> 0, value ->> 1, value ->> 2 FROM json_each(?))""",
        (deleted,),
    )
    db.execute(
        """INSERT OR REPLACE INTO usage (path, resource, start_ms, width_ms, amount)
           SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4 FROM json_each(?) WHERE true""",
        (json.dumps([row for row in rows if row[4] != "0"]),),
    )


def read_usage(db: sqlite3.Connection, suspects: Suspects) -> list[UsageRow]:
    found = fetch(db, "SELECT path, resource, start_ms, width_ms, amount FROM usage")
    rows = suspects.read("usage", found, _usage_row, lambda row: tuple(row[:3]))
    return sorted(rows, key=lambda row: (row.path, row.resource, row.start_ms))


def _usage_row(row: Sequence[Any]) -> UsageRow:
    path, resource, start_ms, width_ms, amount = row
    names = json.loads(path)
    if not isinstance(names, list) or not isinstance(resource, str) or not all(isinstance(name, str) for name in names):
        raise ValueError("not an account")
    if start_ms < 0 or width_ms <= 0:
        raise ValueError("a time out of range")
    return UsageRow(tuple(names), resource, start_ms, width_ms, int(amount))


# SQLite accepts 32,766 parameters in a statement; half of it keeps prepared statements small.
_MAX_PARAMETERS = 16_384
_DAY_MS = 86_400_000
# The index is named because SQLite, without statistics, would sort all ended jobs instead.
TO_PRUNE = f"""SELECT json_group_array(json_array(id, state)) FROM
    (SELECT id, state FROM job INDEXED BY job_ended WHERE {ENDED} AND changed_ms < ? ORDER BY changed_ms, id LIMIT ?)"""  # noqa: S608 (a constant)


def write(db: sqlite3.Connection, batch: Batch) -> None:
    """Conflict and NotFound leave the transaction half done: the caller rolls back."""
    states: Counter[str] = Counter()
    if batch.new_jobs:
        jobs = batch.new_jobs.values()
        _insert(db, "job", rows.JOB, map(rows.job_row, jobs))
        _insert(db, "spec", ("job", "body"), ((job.id, rows.text(job.spec)) for job in jobs))
        states.update(job.state for job in jobs)
        if edges := {(one.job, job.id) for job in jobs for one in job.spec.after.of if one.job}:
            _insert(db, "awaits", ("awaited", "job"), sorted(edges))
    if batch.jobs:
        states.subtract(_states_before(db, batch.jobs))
        _update(db, "job", ("id",), rows.JOB_STATUS, map(rows.job_status, batch.jobs.values()))
        states.update(job.state for job in batch.jobs.values())
    if batch.new_runs:
        _insert(db, "run", rows.RUN, map(rows.run_row, batch.new_runs.values()))
    if batch.runs:
        values = map(rows.run_status, batch.runs.values())
        if _update(db, "run", rows.RUN_KEY, rows.RUN_STATUS, values) != len(batch.runs):
            raise NotFound("a run that was never stored cannot be changed")
    if batch.events:
        _insert(db, "event", rows.EVENT, map(rows.event_row, batch.events.values()))
    if batch.keys:
        _insert(db, "key", rows.KEY, map(rows.key_row, batch.keys.values()))
    _replace(db, "mark", "node", {one.node: None if one.empty else one for one in batch.overrides.values()})
    if batch.usage:
        write_usage(db, batch.usage.values())
    for name, body in batch.notes.items():
        db.execute("INSERT OR REPLACE INTO note (name, body) VALUES (?, ?)", (name, body))
    if batch.audits:
        queries.write_audit(db, batch.audits)
    periodics = {name: None if save.deleted else save.periodic for name, save in batch.periodics.items()}
    _replace(db, "periodic", "name", periodics)
    reservations = {name: None if save.deleted else save.reservation for name, save in batch.reservations.items()}
    _replace(db, "reservation", "name", reservations)
    node_orders = {name: None if save.deleted else save.order for name, save in batch.node_orders.items()}
    _replace(db, "node_order", "node", node_orders)
    rows.change_counts(db, states)


def _replace(db: sqlite3.Connection, table: str, key: str, values: Mapping[str, Any]) -> None:
    """A row with a JSON body for each value; None deletes."""
    for name, value in values.items():
        db.execute(f"DELETE FROM {table} WHERE {key} = ?", (name,))  # noqa: S608 (constants)
        if value is not None:
            db.execute(f"INSERT INTO {table} ({key}, body) VALUES (?, ?)", (name, rows.text(value)))  # noqa: S608 (constants)


def prune(db: sqlite3.Connection, ended_before_ms: int, limit: int) -> list[JobId]:
    """See `Store.prune`."""
    found = db.execute(TO_PRUNE, (ended_before_ms, limit)).fetchone()[0]
    pruned = rows.rows_in(found)
    ids = rows.text([job for job, _ in pruned])
    for table, column in (("job", "id"), ("spec", "job"), ("run", "job"), ("event", "job"), ("awaits", "awaited")):
        db.execute(f"DELETE FROM {table} WHERE {column} IN (SELECT value FROM json_each(?))", (ids,))  # noqa: S608 (constants)
    removed: Counter[str] = Counter()
    removed.subtract(state for _, state in pruned)
    rows.change_counts(db, removed)
    return [job for job, _ in pruned]


def prune_unattached(db: sqlite3.Connection, before_ms: int, limit: int) -> int:
    """See `Store.prune_unattached`. Both tables are in order of time, so the first rows are the oldest."""
    events = db.execute(
        """DELETE FROM event WHERE seq IN (SELECT seq FROM
            (SELECT seq, at_ms FROM event WHERE job = 0 ORDER BY seq LIMIT ?) WHERE at_ms < ?)""",
        (limit, before_ms),
    ).rowcount
    if events >= limit:
        return events
    keys = db.execute(
        "DELETE FROM key WHERE rowid IN (SELECT rowid FROM key ORDER BY rowid LIMIT ?) AND at_ms < ?",
        (limit - events, before_ms - _DAY_MS),
    ).rowcount
    return events + keys


def _states_before(db: sqlite3.Connection, jobs: dict[JobId, Any]) -> Counter[str]:
    """The number of these jobs in each stored state; NotFound if one is not stored."""
    found = db.execute(
        """SELECT json_group_array(json_array(state, jobs)) FROM
            (SELECT state, count(*) AS jobs FROM json_each(?) AS wanted JOIN job ON job.id = wanted.value
             GROUP BY state)""",
        (rows.text(list(jobs)),),
    ).fetchone()[0]
    before = Counter(dict(rows.rows_in(found)))
    if before.total() != len(jobs):
        raise NotFound("a job that was never stored (or is pruned) cannot be changed")
    return before


def _insert(db: sqlite3.Connection, table: str, columns: tuple[str, ...], values: Iterable[Sequence[Any]]) -> None:
    try:
        _in_chunks(db, _insert_sql, table, (), columns, values)
    except sqlite3.IntegrityError as error:
        if error.sqlite_errorname not in ("SQLITE_CONSTRAINT_PRIMARYKEY", "SQLITE_CONSTRAINT_UNIQUE"):
            raise
        raise Conflict(f"this {table} is already stored") from error


def _update(
    db: sqlite3.Connection,
    table: str,
    key: tuple[str, ...],
    columns: tuple[str, ...],
    values: Iterable[Sequence[Any]],
) -> int:
    """Returns the number of changed rows. `columns` starts with those of `key`."""
    return _in_chunks(db, _update_sql, table, key, columns, values)


def _in_chunks(
    db: sqlite3.Connection,
    sql: Callable[[str, tuple[str, ...], tuple[str, ...], int, bool], str],
    table: str,
    key: tuple[str, ...],
    columns: tuple[str, ...],
    values: Iterable[Sequence[Any]],
) -> int:
    """Mostly two statements, with sizes that are powers of two: the largest full one, and one for the rest, padded with
    empty rows. So a few prepared statements serve batches of every size."""
    flat = list(chain.from_iterable(values))
    width = len(columns)
    most = 1 << ((_MAX_PARAMETERS // width).bit_length() - 1)
    left = len(flat) // width
    start = changed = 0
    while left:
        filled = min(most, 1 << (left.bit_length() - 1))
        padded = start > 0 and left < most
        size = 1 << (left - 1).bit_length() if padded else filled
        chunk = flat[start : start + size * width]
        chunk.extend([None] * (size * width - len(chunk)))
        changed += db.execute(sql(table, key, columns, size, padded), chunk).rowcount
        start += size * width
        left = max(0, left - size)
    return changed


@lru_cache(maxsize=256)
def _insert_sql(table: str, key: tuple[str, ...], columns: tuple[str, ...], count: int, padded: bool) -> str:
    values = _values(columns, count)
    if padded:
        values = f"SELECT * FROM ({values}) WHERE column1 IS NOT NULL"  # noqa: S608 (made of constants)
    return f"INSERT INTO {table} ({', '.join(columns)}) {values}"


@lru_cache(maxsize=256)
def _update_sql(table: str, key: tuple[str, ...], columns: tuple[str, ...], count: int, padded: bool) -> str:
    """Padding is harmless: an empty key matches no row."""
    given = {column: f"given.column{number}" for number, column in enumerate(columns, start=1)}
    changes = ", ".join(f"{column} = {given[column]}" for column in columns if column not in key)
    same = " AND ".join(f"{table}.{column} = {given[column]}" for column in key)
    return f"UPDATE {table} SET {changes} FROM ({_values(columns, count)}) AS given WHERE {same}"  # noqa: S608 (made of constants)


def _values(columns: tuple[str, ...], count: int) -> str:
    row = f"({', '.join('?' * len(columns))})"
    return f"VALUES {', '.join([row] * count)}"
