"""Sets damaged rows aside: a raw copy goes into the table `quarantine`, and a readable record takes the row's place where
there is one. All in one transaction of the writer, so that readers see either the old state or the new one.
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
from hodei.store import queries, rows
from hodei.store.batch import Batch
from hodei.store.damage import (
    UNREADABLE,
    Key,
    event_placeholder,
    job_placeholder,
    lenient,
    run_placeholder,
    stray_runs,
    text_of,
)
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
# Operators act on each entry, so there are few; a failing disk may produce many.
MAX_LISTED = 1000
# The table of each kind, and the columns of its key.
_TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "event": ("event", ("seq",)),
    "audit": ("audit", ("seq",)),
    "key": ("key", ("key",)),
    "node mark": ("mark", ("node",)),
    "reservation": ("reservation", ("name",)),
    "node order": ("node_order", ("node",)),
    "periodic job": ("periodic", ("name",)),
    "usage": ("usage", ("path", "resource", "start_ms")),
    "note": ("note", ("name",)),
}
_OUTCOMES = {
    "event": "the event stays in the history, without its details",
    "audit": "the row stays, as far as it can be read",
    "key": "a request with this key is refused, because it is unknown whether it was carried out",
    "node mark": "the node is cordoned, because it may have been: uncordon it if that is right",
    "reservation": "it is no longer in effect: create it again",
    "node order": "the node is adopted when its backend reports it, and released when it is idle",
    "periodic job": "it no longer runs: create it again",
    "usage": "this usage no longer counts",
    "note": "this part of the server started with defaults",
}
Known = Mapping[JobId, tuple[Job, Sequence[Run]]]
# If the last number in use is unknown, this many are skipped, so that none is used twice.
_SKIPPED_NUMBERS = 1_000_000
_INVALID_NUMBER = "a number out of range"
_WRONG_PLACE = "it has the number of another record"
_MISSING = "its row is missing"
_FROM_MEMORY = "it was written again from memory"


def repair(db: sqlite3.Connection, suspects: Mapping[Key, str], known: Known, now_ms: int) -> list[DamagedRecord]:
    """`known`: jobs that are intact in memory, with their runs; they are written back. Inside a transaction."""
    with lenient(db):
        return _Repair(db, known, now_ms).suspects(suspects)


def repair_conflicts(db: sqlite3.Connection, batch: Batch, now_ms: int) -> list[DamagedRecord]:
    """For a batch that was refused. Missing rows that it changes are written again; rows with the keys of its new ones are
    moved to another number or set aside. Inside a transaction."""
    with lenient(db):
        return _Repair(db, {}, now_ms).conflicts(batch)


def renumber(db: sqlite3.Connection, now_ms: int) -> None:
    """Rows whose own number is out of range cannot be queried, and the next number would be out of range too, so nothing
    new could be stored. Inside a transaction, before a number is used."""
    with lenient(db):
        _Repair(db, {}, now_ms).numbers()


def list_damaged(db: sqlite3.Connection) -> list[DamagedRecord]:
    found = db.execute(
        "SELECT at_ms, kind, name, job, reason, outcome FROM quarantine ORDER BY seq DESC LIMIT ?", (MAX_LISTED,)
    )
    return [DamagedRecord(*row) for row in found][::-1]


def job_of_key(kind: str, key: Any) -> JobId:
    """The job that a suspect belongs to; 0 for none."""
    return int(key[0]) if kind == "run" else int(key) if kind == "job" else 0


class _Repair:
    """One transaction. `_db` reads invalid text as bytes."""

    def __init__(self, db: sqlite3.Connection, known: Known, now_ms: int) -> None:
        self._db, self._known, self._now_ms = db, known, now_ms
        self._done: list[DamagedRecord] = []

    def suspects(self, suspects: Mapping[Key, str]) -> list[DamagedRecord]:
        db = self._db
        # Runs first: the placeholder of a job depends on them.
        for (kind, key), why in sorted(suspects.items(), key=lambda suspect: suspect[0][0] != "run"):
            db.execute("SAVEPOINT one")
            before = len(self._done)
            try:
                if kind == "run":
                    self._run(key, why)
                elif kind == "job" and not 0 < key <= LAST_NUMBER:
                    self._restore_number(key)
                elif kind == "job":
                    self._job(key, why)
                else:
                    self._other(kind, key, why)
            except (*UNREADABLE, sqlite3.IntegrityError) as error:
                db.execute("ROLLBACK TO one")
                del self._done[before:]
                log.error("a damaged record cannot be repaired: %s %s (%s): %s", kind, key, why, error)
            db.execute("RELEASE one")
        if any(record.kind == "job" for record in self._done):
            recount(db)
        return self._done

    def conflicts(self, batch: Batch) -> list[DamagedRecord]:
        db = self._db
        for id in batch.new_jobs:
            self._restore_number(id)
            self._clear("spec", ("job",), (id,), id)
        for run in batch.new_runs.values():
            self._clear("run", rows.RUN_KEY, (run.job, run.attempt, run.member), run.job)
        for seq in batch.events:
            if raw := self._raw("event", ("seq",), (seq,)):
                place = max(self._highest("event", "seq"), batch.last_event) + _SKIPPED_NUMBERS
                db.execute("UPDATE event SET seq = ? WHERE seq = ?", (place, seq))
                self._set_aside("event", str(seq), 0, _WRONG_PLACE, f"it stays, as number {place}", raw[0])
        for job in batch.jobs.values():
            self._write_missing_job(job)
        for run in batch.runs.values():
            if not self._raw("run", rows.RUN_KEY, (run.job, run.attempt, run.member)):
                self._insert("run", dict(zip(rows.RUN, rows.run_row(run), strict=True)))
                self._set_aside("run", run.id, run.job, _MISSING, _FROM_MEMORY, None)
        if self._done:
            recount(db)
        return self._done

    def numbers(self) -> None:
        db = self._db
        # The quarantine first, because the others are recorded there.
        for table in ("quarantine", "audit", "event"):
            self._renumber(table)
        for id in self._out_of_range("job", "id"):
            self._restore_number(id)
        for column, table, key in (("last_job", "job", "id"), ("last_event", "event", "seq")):
            (stored,) = db.execute(f"SELECT {column} FROM meta").fetchone()  # noqa: S608 (constants)
            if not 0 <= stored <= LAST_NUMBER:
                last = self._highest(table, key) + _SKIPPED_NUMBERS
                db.execute(f"UPDATE meta SET {column} = ?", (last,))  # noqa: S608 (constants)
                self._set_aside("counter", column, 0, _INVALID_NUMBER, f"new numbers start after {last}", stored)

    def _renumber(self, table: str) -> None:
        """Moves the rows of a history with invalid numbers to its end, in their order."""
        db = self._db
        if table == "event":
            (last,) = db.execute("SELECT last_event FROM meta").fetchone()
        else:
            (last,) = db.execute(
                "SELECT CAST(coalesce(max(seq), 0) AS INTEGER) FROM sqlite_sequence WHERE name = ?", (table,)
            ).fetchone()
            if last > LAST_NUMBER:
                last = self._highest(table, "seq") + _SKIPPED_NUMBERS
                db.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = ?", (last, table))
        last = max(self._highest(table, "seq"), last if last <= LAST_NUMBER else 0)
        for place, seq in enumerate(self._out_of_range(table, "seq"), last + 1):
            db.execute(f"UPDATE {table} SET seq = ? WHERE seq = ?", (place, seq))  # noqa: S608 (constants)
            if table != "quarantine":
                self._set_aside(table, str(seq), 0, _INVALID_NUMBER, f"it stays, as number {place}", seq)

    def _out_of_range(self, table: str, key: str) -> list[int]:
        found = self._db.execute(
            f"SELECT {key} FROM {table} WHERE {key} < 1 UNION ALL SELECT {key} FROM {table} WHERE {key} > ?",  # noqa: S608 (constants)
            (LAST_NUMBER,),
        )
        return sorted(number for (number,) in found)

    def _highest(self, table: str, key: str) -> int:
        query = f"SELECT coalesce(max({key}), 0) FROM {table} WHERE {key} BETWEEN 1 AND ?"  # noqa: S608 (constants)
        return int(self._db.execute(query, (LAST_NUMBER,)).fetchone()[0])

    def _restore_number(self, id: JobId) -> None:
        """A job with a damaged number gets its old one back if exactly one spec without a job matches it."""
        db = self._db
        if not (raw := self._raw("job", ("id",), (id,))):
            return
        row, body = raw[0], self._spec_text(id)
        wanted, alone = (row["name"], row["project"], row["user"]), list[JobId]()
        for number, text in db.execute(
            """SELECT job, body FROM spec WHERE job BETWEEN 1 AND ? AND NOT EXISTS
                (SELECT 1 FROM job WHERE job.id = spec.job)""",
            (LAST_NUMBER,),
        ).fetchall():
            try:
                spec = rows.spec_from(text)
            except UNREADABLE:
                continue
            if (spec.name, spec.project, spec.user) == wanted:
                alone.append(number)
        found = alone[0] if len(alone) == 1 else 0
        if found:
            db.execute("UPDATE job SET id = ? WHERE id = ?", (found, id))
            outcome = f"by its spec it is job {found}"
        else:
            db.execute("DELETE FROM job WHERE id = ?", (id,))
            db.execute("DELETE FROM spec WHERE job = ?", (id,))
            outcome = "which job it was is unknown: if one is missing, submit it again"
        self._set_aside("job", str(id), found, _INVALID_NUMBER, outcome, {"job": row, "spec": body})

    def _write_missing_job(self, job: Job) -> None:
        """The row may exist under another number, without a spec."""
        if self._raw("job", ("id",), (job.id,)):
            return
        lost = self._db.execute(
            """SELECT id FROM job WHERE name = ? AND project = ? AND user = ? AND submitted_ms = ?
                AND NOT EXISTS (SELECT 1 FROM spec WHERE spec.job = job.id)""",
            (job.spec.name, job.spec.project, job.spec.user, job.submitted_ms),
        ).fetchall()
        for (id,) in lost if len(lost) == 1 else ():
            self._db.execute("DELETE FROM job WHERE id = ?", (id,))
        self._insert("job", dict(zip(rows.JOB, rows.job_row(job), strict=True)))
        self._db.execute("INSERT OR IGNORE INTO spec (job, body) VALUES (?, ?)", (job.id, rows.text(job.spec)))
        self._set_aside("job", str(job.id), job.id, _MISSING, _FROM_MEMORY, {"found as": [id for (id,) in lost]})

    def _run(self, key: tuple[int, int, int], why: str) -> None:
        raw = self._raw("run", rows.RUN_KEY, key)
        if not raw:
            return
        run, certain = run_placeholder(raw[0])
        outcome = "its readable part counts; its backend reports its state"
        in_memory = next((one for one in self._known.get(run.job, (None, ()))[1] if one.id == run.id), None)
        if in_memory is not None:
            run, outcome = in_memory, _FROM_MEMORY
        elif not certain and run.state in ("placed", "running"):
            outcome += f"; what it holds is unknown, so node {run.node} is cordoned"
            self._cordon(run.node)
        values = dict(zip(rows.RUN, rows.run_row(run), strict=True))
        self._update("run", rows.RUN_KEY, key, {name: values[name] for name in values if name not in rows.RUN_KEY})
        self._set_aside("run", run.id, run.job, why, outcome, raw[0])

    def _job(self, id: JobId, why: str) -> None:
        db = self._db
        row, body, runs = (self._raw("job", ("id",), (id,)) or [{}])[0], self._spec_text(id), self._runs_of(id)
        if not row and body is None and not runs:
            return
        strays = stray_runs(body, runs)
        for run in strays:
            key = (run.job, run.attempt, run.member)
            raw = self._raw("run", rows.RUN_KEY, key)[0]
            outcome = "it no longer counts; a process under this name is left alone"
            self._set_aside("run", run.id, id, "its job has no such member", outcome, raw)
            self._delete("run", rows.RUN_KEY, key)
        if id in self._known:
            job, outcome = self._known[id][0], _FROM_MEMORY
        else:
            made = job_placeholder(id, row, body, [run for run in runs if run not in strays], why, self._now_ms)
            job, outcome = made.job, made.outcome
            for node in made.uncertain_nodes:
                self._cordon(node)
        values = dict(zip(rows.JOB, rows.job_row(job), strict=True))
        if row:
            del values["id"]
            self._update("job", ("id",), (id,), values)
        else:
            self._insert("job", values)
        db.execute("INSERT OR REPLACE INTO spec (job, body) VALUES (?, ?)", (id, rows.text(job.spec)))
        self._set_aside("job", str(id), id, why, outcome, {"job": row, "spec": body})

    def _spec_text(self, id: JobId) -> Any:
        return next((one["body"] for one in self._raw("spec", ("job",), (id,))), None)

    def _runs_of(self, id: JobId) -> list[Run]:
        """Suspect runs are repaired before their job, so that most can be read."""
        columns = ", ".join(rows.RUN)
        out = []
        for row in self._db.execute(f"SELECT {columns} FROM run WHERE job = ?", (id,)).fetchall():  # noqa: S608 (constants)
            try:
                out.append(rows.run_from(row))
            except UNREADABLE:
                out.append(run_placeholder(dict(zip(rows.RUN, row, strict=True)))[0])
        return out

    def _cordon(self, node: str) -> None:
        found = self._db.execute("SELECT node, body FROM mark WHERE node = ?", (node,)).fetchone()
        overrides = NodeOverrides(node)
        if found is not None:
            try:
                overrides = rows.overrides_from(found)
            except UNREADABLE:
                pass
        text = rows.text(structs.replace(overrides, cordoned=True))
        self._db.execute("INSERT OR REPLACE INTO mark (node, body) VALUES (?, ?)", (node, text))

    def _other(self, kind: str, key: Any, why: str) -> None:
        table, columns = _TABLES[kind]
        values = key if isinstance(key, tuple) else (key,)
        raw = self._raw(table, columns, values)
        if not raw:
            return
        name = " ".join(text_of(value, str(value)) for value in values)
        job = raw[0]["job"] if kind == "event" and isinstance(raw[0]["job"], int) else 0
        if kind == "event":
            event = event_placeholder([raw[0][column] for column in rows.EVENT], why)
            self._update(table, columns, values, dict(zip(rows.EVENT[1:], rows.event_row(event)[1:], strict=True)))
        elif kind == "audit":
            at_ms = raw[0]["at_ms"] if 0 <= raw[0]["at_ms"] <= rows.LAST_MS else 0
            texts = {column: text_of(raw[0][column]) for column in queries.AUDIT_COLUMNS if column != "at_ms"}
            self._update(table, columns, values, {"at_ms": at_ms, **texts})
        elif kind == "key" and isinstance(key, str):
            self._update(table, columns, values, {"fingerprint": "", "jobs": "[]"})
        else:
            self._delete(table, columns, values)
            if kind == "node mark" and isinstance(key, str):
                self._cordon(key)
        self._set_aside(kind, name, max(job, 0), why, _OUTCOMES[kind], raw[0])

    def _set_aside(self, kind: str, name: str, job: JobId, reason: str, outcome: str, body: Any) -> None:
        """Bytes of the body that are no text are kept as hexadecimal digits."""
        text = json.dumps(body, default=lambda raw: {"hex": raw.hex()})
        self._db.execute(
            "INSERT INTO quarantine (at_ms, kind, name, job, reason, outcome, body) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (self._now_ms, kind, name, job, reason, outcome, text),
        )
        self._done.append(DamagedRecord(self._now_ms, kind, name, job, reason, outcome))

    def _clear(self, table: str, columns: tuple[str, ...], key: tuple[int, ...], job: JobId) -> None:
        if raw := self._raw(table, columns, key):
            self._delete(table, columns, key)
            self._set_aside(table, ".".join(map(str, key)), job, _WRONG_PLACE, "it no longer counts", raw[0])

    def _raw(self, table: str, columns: Sequence[str], key: Sequence[Any]) -> list[dict[str, Any]]:
        found = self._db.execute(f"SELECT * FROM {table} WHERE {_where(columns, key)}", _parameters(key))  # noqa: S608 (constants)
        names = [column[0] for column in found.description]
        return [dict(zip(names, row, strict=True)) for row in found]

    def _delete(self, table: str, columns: Sequence[str], key: Sequence[Any]) -> None:
        self._db.execute(f"DELETE FROM {table} WHERE {_where(columns, key)}", _parameters(key))  # noqa: S608 (constants)

    def _update(self, table: str, columns: Sequence[str], key: Sequence[Any], values: Mapping[str, Any]) -> None:
        changes, wanted = (", ".join(f"{name} = ?" for name in values), " AND ".join(f"{name} = ?" for name in columns))
        self._db.execute(f"UPDATE {table} SET {changes} WHERE {wanted}", [*values.values(), *key])  # noqa: S608 (constants)

    def _insert(self, table: str, values: Mapping[str, Any]) -> None:
        places = ", ".join("?" * len(values))
        self._db.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({places})", list(values.values()))  # noqa: S608 (constants)


def _where(columns: Sequence[str], key: Sequence[Any]) -> str:
    """Text is compared as bytes: it may be invalid."""
    return " AND ".join(
        f"{column} = ?" if isinstance(value, int) else f"CAST({column} AS BLOB) = ?"
        for column, value in zip(columns, key, strict=True)
    )


def _parameters(key: Sequence[Any]) -> list[Any]:
    return [value.encode() if isinstance(value, str) else value for value in key]
