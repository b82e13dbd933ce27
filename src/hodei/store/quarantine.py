"""Damaged rows are set aside: copied as they are into `quarantine`, never deleted, and something readable put in their place
where there is something. All in one transaction of the writer's, so that no reader sees a thing in between.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from hodei.model.audit import DamagedRecord
from hodei.model.ids import JobId
from hodei.model.job import Job, Run
from hodei.model.node import NodeOverrides
from hodei.store import placeholders, queries, rows
from hodei.store.batch import Batch
from hodei.store.damage import UNREADABLE, Key, lenient
from hodei.store.rows import LAST_NUMBER, recount

log = logging.getLogger("hodei.store")
TABLE = (
    """CREATE TABLE quarantine (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        at_ms INTEGER NOT NULL,
        kind TEXT NOT NULL,
        name TEXT NOT NULL,
        job INTEGER NOT NULL,
        reason TEXT NOT NULL,
        outcome TEXT NOT NULL,
        body TEXT NOT NULL
    ) STRICT""",
    "CREATE INDEX quarantine_job ON quarantine (job)",
)
# An answer of the operator's is needed for each, so there are few; a disk that goes on dying may make many.
MOST_TOLD = 1000
# The table of each kind, and the columns of its key.
_TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "event": ("event", ("seq",)),
    "audit": ("audit", ("seq",)),
    "key": ("key", ("key",)),
    "node mark": ("mark", ("node",)),
    "reservation": ("reservation", ("name",)),
    "periodic job": ("periodic", ("name",)),
    "usage": ("usage", ("path", "resource", "start_ms")),
    "note": ("note", ("name",)),
}
_OUTCOMES = {
    "event": "its line of history stays, without what it said",
    "audit": "the row stays, as far as it can be read",
    "key": "a request with this key is refused, because it is not known whether it was carried out",
    "node mark": "the node is cordoned, because it may have been: uncordon it when that is right",
    "reservation": "it does not count any more: make it again",
    "periodic job": "it does not run any more: add it again",
    "usage": "what was used there and then does not count any more",
    "note": "its part of the server began anew",
}
Known = Mapping[JobId, tuple[Job, Sequence[Run]]]
# Where the last number that was given out is not known, so many are left out, and none is given out twice.
_LEFT_OUT = 1_000_000
_WRONG_PLACE = "it is where another belongs"


def mend(db: sqlite3.Connection, suspects: Mapping[Key, str], known: Known, now_ms: int) -> list[DamagedRecord]:
    """`known`: jobs that are well in memory, with their runs; what is there is written back. Inside a transaction."""
    found: list[DamagedRecord] = []
    with lenient(db):
        # Runs first: what a job comes to depends on them.
        for (kind, key), why in sorted(suspects.items(), key=lambda suspect: suspect[0][0] != "run"):
            db.execute("SAVEPOINT one")
            try:
                if kind == "run":
                    found += _mend_run(db, key, why, known, now_ms)
                elif kind == "job" and not 0 < key <= LAST_NUMBER:
                    found += _find_job(db, key, now_ms)
                elif kind == "job":
                    found += _mend_job(db, key, why, known, now_ms)
                else:
                    found += _mend_other(db, kind, key, why, now_ms)
            except (*UNREADABLE, sqlite3.IntegrityError) as error:
                db.execute("ROLLBACK TO one")
                log.error("a damaged record stays where it is: %s %s (%s): %s", kind, key, why, error)
            db.execute("RELEASE one")
        if any(damage.kind == "job" for damage in found):
            recount(db)
    return found


def told(db: sqlite3.Connection) -> list[DamagedRecord]:
    found = db.execute(
        "SELECT at_ms, kind, name, job, reason, outcome FROM quarantine ORDER BY seq DESC LIMIT ?", (MOST_TOLD,)
    )
    return [DamagedRecord(*row) for row in found][::-1]


def _set_aside(db: sqlite3.Connection, damage: DamagedRecord, body: Any) -> DamagedRecord:
    db.execute(
        "INSERT INTO quarantine (at_ms, kind, name, job, reason, outcome, body) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (damage.at_ms, damage.kind, damage.name, damage.job, damage.reason, damage.outcome, _json(body)),
    )
    return damage


def _json(value: Any) -> str:
    """Bytes that are no text are kept in hexadecimal digits."""
    return json.dumps(value, default=lambda raw: {"hex": raw.hex()})


def _raw(db: sqlite3.Connection, table: str, columns: Sequence[str], key: Sequence[Any]) -> list[dict[str, Any]]:
    wanted = " AND ".join(f"{column} = ?" if isinstance(value, int) else f"CAST({column} AS BLOB) = ?"
                          for column, value in zip(columns, key, strict=True))  # fmt: skip
    found = db.execute(f"SELECT * FROM {table} WHERE {wanted}", [_bytes(value) for value in key])  # noqa: S608 (constants)
    names = [column[0] for column in found.description]
    return [dict(zip(names, row, strict=True)) for row in found]


def _bytes(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


# ------------------------------------------------------------------------------------------------ numbers


def renumber(db: sqlite3.Connection, now_ms: int) -> None:
    """Rows whose own number cannot be. Nobody could ask for them, and the next number would be beyond all numbers: nothing
    new could be stored. Inside a transaction, before a number is given out."""
    with lenient(db):
        # In this order, because what is done about the others is told in the first.
        for table in ("quarantine", "audit", "event"):
            _renumber(db, table, now_ms)
        for id in _beyond(db, "job", "id"):
            _find_job(db, id, now_ms)
        for column, table, key in (("last_job", "job", "id"), ("last_event", "event", "seq")):
            (told,) = db.execute(f"SELECT {column} FROM meta").fetchone()  # noqa: S608 (constants)
            if not 0 <= told <= LAST_NUMBER:
                last = _highest(db, table, key) + _LEFT_OUT
                db.execute(f"UPDATE meta SET {column} = ?", (last,))  # noqa: S608 (constants)
                outcome = f"new numbers begin behind {last}"
                _set_aside(db, DamagedRecord(now_ms, "counter", column, 0, "a number that cannot be", outcome), told)


def _renumber(db: sqlite3.Connection, table: str, now_ms: int) -> None:
    """The rows of a history, in their order, to its end."""
    if table == "event":
        (last,) = db.execute("SELECT last_event FROM meta").fetchone()
    else:
        told = db.execute("SELECT CAST(coalesce(max(seq), 0) AS INTEGER) FROM sqlite_sequence WHERE name = ?", (table,))
        (last,) = told.fetchone()
        if last > LAST_NUMBER:
            last = _highest(db, table, "seq") + _LEFT_OUT
            db.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = ?", (last, table))
    last = max(_highest(db, table, "seq"), last if last <= LAST_NUMBER else 0)
    for place, seq in enumerate(_beyond(db, table, "seq"), last + 1):
        db.execute(f"UPDATE {table} SET seq = ? WHERE seq = ?", (place, seq))  # noqa: S608 (constants)
        if table != "quarantine":
            outcome = f"it stays, as number {place}"
            _set_aside(db, DamagedRecord(now_ms, table, str(seq), 0, "a number that cannot be", outcome), seq)


def _beyond(db: sqlite3.Connection, table: str, key: str) -> list[int]:
    found = db.execute(
        f"SELECT {key} FROM {table} WHERE {key} < 1 UNION ALL SELECT {key} FROM {table} WHERE {key} > ?",  # noqa: S608 (constants)
        (LAST_NUMBER,),
    )
    return sorted(number for (number,) in found)


def _highest(db: sqlite3.Connection, table: str, key: str) -> int:
    asked = f"SELECT coalesce(max({key}), 0) FROM {table} WHERE {key} BETWEEN 1 AND ?"  # noqa: S608 (constants)
    return int(db.execute(asked, (LAST_NUMBER,)).fetchone()[0])


def _find_job(db: sqlite3.Connection, id: JobId, now_ms: int) -> list[DamagedRecord]:
    """The job of a damaged number has its old one again if its description, which is kept beside it, tells which that was."""
    if not (raw := _raw(db, "job", ("id",), (id,))):
        return []
    row = raw[0]
    body = ([one["body"] for one in _raw(db, "spec", ("job",), (id,))] or [None])[0]
    mine, alone = (row["name"], row["project"], row["user"]), list[JobId]()
    for number, text in db.execute(
        """SELECT job, body FROM spec WHERE job BETWEEN 1 AND ? AND NOT EXISTS
            (SELECT 1 FROM job WHERE job.id = spec.job)""",
        (LAST_NUMBER,),
    ).fetchall():
        try:
            spec = rows.spec_from(text)
        except UNREADABLE:
            continue
        if (spec.name, spec.project, spec.user) == mine:
            alone.append(number)
    found = alone[0] if len(alone) == 1 else 0
    if found:
        db.execute("UPDATE job SET id = ? WHERE id = ?", (found, id))
        outcome = f"by its description it is job {found}"
    else:
        db.execute("DELETE FROM job WHERE id = ?", (id,))
        db.execute("DELETE FROM spec WHERE job = ?", (id,))
        outcome = "it is not known which job it was: submit it again, if one is missing"
    damage = DamagedRecord(now_ms, "job", str(id), found, "a number that cannot be", outcome)
    return [_set_aside(db, damage, {"job": row, "spec": body})]


def make_way(db: sqlite3.Connection, batch: Batch, now_ms: int) -> list[DamagedRecord]:
    """For a batch that was refused, because rows that it changes are gone, or others are where its new ones belong: the first
    are written anew, the others get another number or are set aside. Inside a transaction."""
    found = list[DamagedRecord]()
    with lenient(db):
        for id in batch.new_jobs:
            found += _find_job(db, id, now_ms)
            found += _clear(db, "spec", ("job",), (id,), id, now_ms)
        for run in batch.new_runs.values():
            found += _clear(db, "run", rows.RUN_KEY, (run.job, run.attempt, run.member), run.job, now_ms)
        for seq in batch.events:
            if raw := _raw(db, "event", ("seq",), (seq,)):
                place = max(_highest(db, "event", "seq"), batch.last_event) + _LEFT_OUT
                db.execute("UPDATE event SET seq = ? WHERE seq = ?", (place, seq))
                outcome = f"it stays, as number {place}"
                found.append(_set_aside(db, DamagedRecord(now_ms, "event", str(seq), 0, _WRONG_PLACE, outcome), raw[0]))
        for job in batch.jobs.values():
            found += _bring_back(db, job, now_ms)
        for run in batch.runs.values():
            if not _raw(db, "run", rows.RUN_KEY, (run.job, run.attempt, run.member)):
                _put(db, "run", rows.RUN, rows.run_row(run))
                damage = DamagedRecord(now_ms, "run", run.id, run.job, "it is gone", "it was written anew from memory")
                found.append(_set_aside(db, damage, None))
        if found:
            recount(db)
    return found


def _clear(
    db: sqlite3.Connection, table: str, columns: tuple[str, ...], key: tuple[int, ...], job: JobId, now_ms: int
) -> list[DamagedRecord]:
    if not (raw := _raw(db, table, columns, key)):
        return []
    db.execute(f"DELETE FROM {table} WHERE {' AND '.join(f'{column} = ?' for column in columns)}", key)  # noqa: S608 (constants)
    name = ".".join(map(str, key))
    return [_set_aside(db, DamagedRecord(now_ms, table, name, job, _WRONG_PLACE, "it does not count any more"), raw[0])]


def _bring_back(db: sqlite3.Connection, job: Job, now_ms: int) -> list[DamagedRecord]:
    """A job whose row is gone: it may be there under another number, by which no description is kept."""
    if _raw(db, "job", ("id",), (job.id,)):
        return []
    lost = db.execute(
        """SELECT id FROM job WHERE name = ? AND project = ? AND user = ? AND submitted_ms = ?
            AND NOT EXISTS (SELECT 1 FROM spec WHERE spec.job = job.id)""",
        (job.spec.name, job.spec.project, job.spec.user, job.submitted_ms),
    ).fetchall()
    for (id,) in lost if len(lost) == 1 else ():
        db.execute("DELETE FROM job WHERE id = ?", (id,))
    _put(db, "job", rows.JOB, rows.job_row(job))
    db.execute("INSERT OR IGNORE INTO spec (job, body) VALUES (?, ?)", (job.id, rows.spec_text(job.spec)))
    damage = DamagedRecord(now_ms, "job", str(job.id), job.id, "it is gone", "it was written anew from memory")
    return [_set_aside(db, damage, {"found as": [id for (id,) in lost]})]


def _put(db: sqlite3.Connection, table: str, columns: Sequence[str], values: Sequence[Any]) -> None:
    overrides = ", ".join("?" * len(columns))
    db.execute(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({overrides})", values)  # noqa: S608 (constants)


# --------------------------------------------------------------------------------------------------- jobs


def _mend_run(
    db: sqlite3.Connection, key: tuple[int, int, int], why: str, known: Known, now_ms: int
) -> list[DamagedRecord]:
    raw = _raw(db, "run", rows.RUN_KEY, key)
    if not raw:
        return []
    run, sure = placeholders.run(raw[0])
    outcome = "what is left of it counts; its backend says how it stands"
    memory = next((one for one in known.get(run.job, (None, ()))[1] if one.id == run.id), None)
    if memory is not None:
        run, sure, outcome = memory, True, "it was written anew from memory"
    elif not sure and run.state in ("placed", "running"):
        outcome += f"; it is not known any more what it holds, so node {run.node} is cordoned"
        _cordon(db, run.node)
    values = dict(zip(rows.RUN, rows.run_row(run), strict=True))
    _update(db, "run", rows.RUN_KEY, key, {name: value for name, value in values.items() if name not in rows.RUN_KEY})
    return [_set_aside(db, DamagedRecord(now_ms, "run", run.id, run.job, why, outcome), raw[0])]


def _mend_job(db: sqlite3.Connection, id: JobId, why: str, known: Known, now_ms: int) -> list[DamagedRecord]:
    row = (_raw(db, "job", ("id",), (id,)) or [{}])[0]
    body = ([one["body"] for one in _raw(db, "spec", ("job",), (id,))] or [None])[0]
    runs = _runs_left(db, id)
    if not row and body is None and not runs:
        return []
    found, strays = list[DamagedRecord](), placeholders.strays(body, runs)
    for run in strays:
        raw = _raw(db, "run", rows.RUN_KEY, (run.job, run.attempt, run.member))[0]
        outcome = "it does not count any more; whatever runs under this name is left alone"
        found.append(
            _set_aside(db, DamagedRecord(now_ms, "run", run.id, id, "its job has no such member", outcome), raw)
        )
        db.execute("DELETE FROM run WHERE job = ? AND attempt = ? AND member = ?", (run.job, run.attempt, run.member))
    runs = [run for run in runs if run not in strays]
    if id in known:
        stands, outcome = known[id][0], "it was written anew from memory"
    else:
        made = placeholders.job(id, row, body, runs, why, now_ms)
        stands, outcome = made.job, made.outcome
        for node in made.unsure_of:
            _cordon(db, node)
    spec = stands.spec
    standing = dict(zip(rows.STANDING, rows.job_standing(stands), strict=True))
    standing |= {"project": spec.project, "user": spec.user, "name": spec.name}
    if row:
        del standing["id"]
        _update(db, "job", ("id",), (id,), standing)
    else:
        names, overrides = ", ".join(standing), ", ".join("?" * len(standing))
        db.execute(f"INSERT INTO job ({names}) VALUES ({overrides})", list(standing.values()))  # noqa: S608 (constants)
    db.execute("INSERT OR REPLACE INTO spec (job, body) VALUES (?, ?)", (id, rows.spec_text(spec)))
    return [*found, _set_aside(db, DamagedRecord(now_ms, "job", str(id), id, why, outcome), {"job": row, "spec": body})]


def _runs_left(db: sqlite3.Connection, id: JobId) -> list[Run]:
    """After those that are suspect were mended, so that all can be read."""
    columns = ", ".join(rows.RUN)
    out = []
    for row in db.execute(f"SELECT {columns} FROM run WHERE job = ?", (id,)).fetchall():  # noqa: S608 (constants)
        try:
            out.append(rows.run_from(row))
        except UNREADABLE:
            out.append(placeholders.run(dict(zip(rows.RUN, row, strict=True)))[0])
    return out


def _cordon(db: sqlite3.Connection, node: str) -> None:
    found = db.execute("SELECT node, body FROM mark WHERE node = ?", (node,)).fetchone()
    overrides = NodeOverrides(node)
    if found is not None:
        try:
            overrides = rows.overrides_from(found)
        except UNREADABLE:
            pass
    text = rows.overrides_text(structs.replace(overrides, cordoned=True))
    db.execute("INSERT OR REPLACE INTO mark (node, body) VALUES (?, ?)", (node, text))


def _update(
    db: sqlite3.Connection, table: str, columns: Sequence[str], key: Sequence[Any], values: Mapping[str, Any]
) -> None:
    changes = ", ".join(f"{name} = ?" for name in values)
    wanted = " AND ".join(f"{column} = ?" for column in columns)
    db.execute(f"UPDATE {table} SET {changes} WHERE {wanted}", [*values.values(), *key])  # noqa: S608 (constants)


# ------------------------------------------------------------------------------------------------- the rest


def _mend_other(db: sqlite3.Connection, kind: str, key: Any, why: str, now_ms: int) -> list[DamagedRecord]:
    table, columns = _TABLES[kind]
    values = key if isinstance(key, tuple) else (key,)
    raw = _raw(db, table, columns, values)
    if not raw:
        return []
    name = " ".join(placeholders.text_of(value, str(value)) for value in values)
    job = raw[0]["job"] if kind == "event" and isinstance(raw[0]["job"], int) else 0
    if kind == "event":
        event = placeholders.event([raw[0][column] for column in rows.EVENT], why)
        _update(db, table, columns, values, dict(zip(rows.EVENT[1:], rows.event_row(event)[1:], strict=True)))
    elif kind == "audit":
        at_ms = raw[0]["at_ms"] if 0 <= raw[0]["at_ms"] <= rows.LAST_MS else 0
        text = {column: placeholders.text_of(raw[0][column]) for column in queries.COLUMNS if column != "at_ms"}
        _update(db, table, columns, values, {"at_ms": at_ms, **text})
    elif kind == "key" and isinstance(key, str):
        _update(db, table, columns, values, {"fingerprint": "", "jobs": "[]"})
    else:
        wanted = " AND ".join(f"{c} = ?" if isinstance(v, int) else f"CAST({c} AS BLOB) = ?"
                              for c, v in zip(columns, values, strict=True))  # fmt: skip
        db.execute(f"DELETE FROM {table} WHERE {wanted}", [_bytes(value) for value in values])  # noqa: S608 (constants)
        if kind == "node mark" and isinstance(key, str):
            _cordon(db, key)
    return [_set_aside(db, DamagedRecord(now_ms, kind, name, max(job, 0), why, _OUTCOMES[kind]), raw[0])]


def job_of_key(kind: str, key: Any) -> JobId:
    """Which job a suspect is of; 0 for none."""
    if kind == "job":
        return int(key)
    return int(key[0]) if kind == "run" else 0
