"""What accounts have used, in SQLite: one row for each account, resource and bucket of time."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from hodei.model.usage import UsageRow
from hodei.store.damage import Suspects, fetch


def write(db: sqlite3.Connection, changed: Iterable[UsageRow]) -> None:
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
