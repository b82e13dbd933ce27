"""The audit in SQLite: rows that are only ever added, and dropped when they are old."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from hodei.model.audit import AuditEntry, AuditQuery
from hodei.store import placeholders, rows
from hodei.store.damage import Suspects, fetch_json

COLUMNS = ("at_ms", "who", "role", "verb", "target", "code", "request", "remote", "detail")
TABLE = """CREATE TABLE audit (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        at_ms INTEGER NOT NULL,
        who TEXT NOT NULL,
        role TEXT NOT NULL,
        verb TEXT NOT NULL,
        target TEXT NOT NULL,
        code TEXT NOT NULL,
        request TEXT NOT NULL,
        remote TEXT NOT NULL
    ) STRICT"""
# Which command was run on a machine.
DETAIL = ("ALTER TABLE audit ADD COLUMN detail TEXT NOT NULL DEFAULT ''",)
_NAMES = ", ".join(COLUMNS)
_VALUES = ", ".join(f"value ->> {i}" for i in range(len(COLUMNS)))
_INSERT = f"INSERT INTO audit ({_NAMES}) SELECT {_VALUES} FROM json_each(?)"  # noqa: S608 (constants)


def write(db: sqlite3.Connection, entries: Sequence[AuditEntry]) -> None:
    values = [[getattr(entry, column) for column in COLUMNS] for entry in entries]
    db.execute(_INSERT, (rows.json_text(values),))


def find(db: sqlite3.Connection, query: AuditQuery, suspects: Suspects) -> list[AuditEntry]:
    wanted, values = ["at_ms >= ?"], list[int | str]([query.since_ms])
    for column, value in (("who", query.who), ("target", query.target)):
        if value:
            wanted.append(f"{column} = ?")
            values.append(value)
    if query.what:
        things, act = "substr(verb, 1, instr(verb, '.') - 1)", "substr(verb, instr(verb, '.') + 1)"
        wanted.append(f"? IN (verb, {things}, {act})")
        values.append(query.what)
    if query.before:
        wanted.append("seq < ?")
        values.append(query.before)
    order = "DESC"
    if query.after is not None:
        wanted.append("seq > ?")
        values.append(query.after)
        order = "ASC"
    found = fetch_json(
        db,
        f"""SELECT json_group_array(json_array({_NAMES}, seq)) FROM
            (SELECT * FROM audit WHERE {" AND ".join(wanted)} ORDER BY seq {order} LIMIT ?)""",  # noqa: S608 (constants)
        (*values, max(1, query.limit)),
    )
    read = suspects.read("audit", found, rows.audit_from, lambda row: row[-1], _instead)
    return sorted(read, key=lambda e: e.seq, reverse=order == "DESC")


def _instead(row: Sequence[Any], why: str) -> AuditEntry:
    words = dict(zip(COLUMNS[1:], map(placeholders.text_of, row[1:-1]), strict=True))
    return AuditEntry(row[0] if 0 <= row[0] <= rows.LAST_MS else 0, seq=row[-1], **words)


def prune(db: sqlite3.Connection, before_ms: int, limit: int) -> int:
    """Rows come in order of time, so the oldest have the lowest numbers. How many went."""
    gone = db.execute(
        "DELETE FROM audit WHERE seq IN (SELECT seq FROM audit ORDER BY seq LIMIT ?) AND at_ms < ?", (limit, before_ms)
    )
    return gone.rowcount
