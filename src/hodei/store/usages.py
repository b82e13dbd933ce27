"""What accounts have used, in SQLite: one row for each account, resource and bucket of time."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable

from hodei.model.usage import UsageRow


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


def read(db: sqlite3.Connection) -> list[UsageRow]:
    found = db.execute("SELECT path, resource, start_ms, width_ms, amount FROM usage").fetchall()
    rows = [
        UsageRow(tuple(json.loads(path)), name, start, width, int(amount)) for path, name, start, width, amount in found
    ]
    return sorted(rows, key=lambda row: (row.path, row.resource, row.start_ms))
