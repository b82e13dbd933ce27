"""A batch into SQLite, inside a transaction that `sqlite` has opened.

Many rows go into one statement (`VALUES (...), (...), ...`), never one statement per row: Python lets go of its
interpreter lock around every single step of SQLite, and beside a busy thread each letting go costs a turn of waiting.
`executemany` was twenty times slower here under load. For the same reason results come back as one row of JSON.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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

# ----------------------------------------------------------------------------------------------- usage
# What accounts have used, in SQLite: one row for each account, resource and bucket of time.


def write_usage(db: sqlite3.Connection, changed: Iterable[UsageRow]) -> None:
    """All of them in two statements; a row whose amount became 0 goes."""
    rows = [(json.dumps(row.path), row.resource, row.start_ms, row.width_ms, str(row.amount)) for row in changed]
    gone = json.dumps([row[:3] for row in rows if row[4] == "0"])
    db.execute(
        """DELETE FROM usage WHERE (path, resource, start_ms) IN
           (SELECT value ->> 0, value ->> 1, value ->> 2 FROM json_each(?))""",
        (gone,),
    )
    db.execute(
        """INSERT OR REPLACE INTO usage (path, resource, start_ms, width_ms, amount)
           SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4 FROM json_each(?) WHERE true""",
        (json.dumps([row for row in rows if row[4] != "0"]),),
    )


def read(db: sqlite3.Connection, suspects: Suspects) -> list[UsageRow]:
    found = fetch(db, "SELECT path, resource, start_ms, width_ms, amount FROM usage")
    rows = suspects.read("usage", found, _row, lambda row: tuple(row[:3]))
    return sorted(rows, key=lambda row: (row.path, row.resource, row.start_ms))


def _row(row: Sequence[Any]) -> UsageRow:
    path, resource, start_ms, width_ms, amount = row
    names = json.loads(path)
    if not isinstance(names, list) or not isinstance(resource, str) or not all(isinstance(name, str) for name in names):
        raise ValueError("not an account")
    if start_ms < 0 or width_ms <= 0:
        raise ValueError("a time that cannot be")
    return UsageRow(tuple(names), resource, start_ms, width_ms, int(amount))


# ----------------------------------------------------------------------------------------------------

# SQLite takes 32,766 parameters in one statement; half of it keeps prepared statements small.
_MOST_PARAMETERS = 16_384
_DAY_MS = 86_400_000
# The index is named because SQLite, which does not know how many jobs there are, would rather sort all ended ones.
TO_PRUNE = f"""SELECT json_group_array(json_array(id, state)) FROM
    (SELECT id, state FROM job INDEXED BY job_ended WHERE {ENDED} AND changed_ms < ? ORDER BY changed_ms, id LIMIT ?)"""  # noqa: S608 (a constant)


def write(db: sqlite3.Connection, batch: Batch) -> None:
    """Everything in `batch`. Conflict or NotFound leave the transaction half-done: the caller rolls back."""
    moves: Counter[str] = Counter()
    if batch.new_jobs:
        jobs = batch.new_jobs.values()
        _insert(db, "job", rows.JOB, map(rows.job_row, jobs))
        _insert(db, "spec", ("job", "body"), ((job.id, rows.spec_text(job.spec)) for job in jobs))
        moves.update(job.state for job in jobs)
        if edges := {(one.job, job.id) for job in jobs for one in job.spec.after.of if one.job}:
            _insert(db, "awaits", ("awaited", "job"), sorted(edges))
    if batch.jobs:
        moves.subtract(_states_before(db, batch.jobs))
        _update(db, "job", ("id",), rows.STANDING, map(rows.job_standing, batch.jobs.values()))
        moves.update(job.state for job in batch.jobs.values())
    if batch.new_runs:
        _insert(db, "run", rows.RUN, map(rows.run_row, batch.new_runs.values()))
    if batch.runs:
        standing = map(rows.run_standing, batch.runs.values())
        if _update(db, "run", rows.RUN_KEY, rows.RUN_STANDING, standing) != len(batch.runs):
            raise NotFound("a run that was never stored cannot be changed")
    if batch.events:
        _insert(db, "event", rows.EVENT, map(rows.event_row, batch.events.values()))
    if batch.keys:
        _insert(db, "key", rows.KEY, map(rows.key_row, batch.keys.values()))
    for overrides in batch.overrides.values():
        db.execute("DELETE FROM mark WHERE node = ?", (overrides.node,))
        if not overrides.empty:
            db.execute("INSERT INTO mark (node, body) VALUES (?, ?)", (overrides.node, rows.overrides_text(overrides)))
    if batch.usage:
        write_usage(db, batch.usage.values())
    for name, body in batch.notes.items():
        db.execute("INSERT OR REPLACE INTO note (name, body) VALUES (?, ?)", (name, body))
    if batch.audits:
        queries.write(db, batch.audits)
    for kept in batch.periodics.values():
        db.execute("DELETE FROM periodic WHERE name = ?", (kept.periodic.name,))
        if not kept.deleted:
            db.execute(
                "INSERT INTO periodic (name, body) VALUES (?, ?)",
                (kept.periodic.name, rows.periodic_text(kept.periodic)),
            )
    for saved in batch.reservations.values():
        db.execute("DELETE FROM reservation WHERE name = ?", (saved.reservation.name,))
        if not saved.deleted:
            db.execute(
                "INSERT INTO reservation (name, body) VALUES (?, ?)",
                (saved.reservation.name, rows.reservation_text(saved.reservation)),
            )
    rows.move(db, moves)


def prune(db: sqlite3.Connection, ended_before_ms: int, limit: int) -> list[JobId]:
    """See `Store.prune`."""
    found = db.execute(TO_PRUNE, (ended_before_ms, limit)).fetchone()[0]
    gone = [(job, state) for job, state in rows.rows_in(found)]
    ids = rows.json_text([job for job, _ in gone])
    for table, column in (("job", "id"), ("spec", "job"), ("run", "job"), ("event", "job"), ("awaits", "awaited")):
        db.execute(f"DELETE FROM {table} WHERE {column} IN (SELECT value FROM json_each(?))", (ids,))  # noqa: S608 (constants)
    rows.move(db, Counter({state: -count for state, count in Counter(state for _, state in gone).items()}))
    return [job for job, _ in gone]


def prune_loose(db: sqlite3.Connection, before_ms: int, limit: int) -> int:
    """See `Store.prune_loose`. Both come in order of time, so looking at the first few is enough."""
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
    """How many of these jobs stand in each state; NotFound if one is not there at all."""
    found = db.execute(
        """SELECT json_group_array(json_array(state, jobs)) FROM
            (SELECT state, count(*) AS jobs FROM json_each(?) AS wanted JOIN job ON job.id = wanted.value
             GROUP BY state)""",
        (rows.json_text(list(jobs)),),
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
    """How many rows were there to be changed. `columns` begin with those of `key`."""
    return _in_chunks(db, _update_sql, table, key, columns, values)


def _in_chunks(
    db: sqlite3.Connection,
    sql: Callable[[str, tuple[str, ...], tuple[str, ...], int, bool], str],
    table: str,
    key: tuple[str, ...],
    columns: tuple[str, ...],
    values: Iterable[Sequence[Any]],
) -> int:
    """Mostly two statements, whose sizes are powers of two: the largest that is filled, and one for the rest that is
    padded with empty rows. So a handful of prepared statements serves batches of every size."""
    flat = list(chain.from_iterable(values))
    width = len(columns)
    most = 1 << ((_MOST_PARAMETERS // width).bit_length() - 1)
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
    """Padding needs no care here: an empty key equals none."""
    given = {column: f"given.column{number}" for number, column in enumerate(columns, start=1)}
    changes = ", ".join(f"{column} = {given[column]}" for column in columns if column not in key)
    same = " AND ".join(f"{table}.{column} = {given[column]}" for column in key)
    return f"UPDATE {table} SET {changes} FROM ({_values(columns, count)}) AS given WHERE {same}"  # noqa: S608 (made of constants)


def _values(columns: tuple[str, ...], count: int) -> str:
    row = f"({', '.join('?' * len(columns))})"
    return f"VALUES {', '.join([row] * count)}"
