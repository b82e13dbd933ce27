"""How many jobs stand in each state, kept up with every commit so that asking costs nothing."""

from __future__ import annotations

import sqlite3
from collections import Counter

from hodei.store import rows


def move(db: sqlite3.Connection, moves: Counter[str]) -> None:
    changes = [[state, change] for state, change in sorted(moves.items()) if change]
    if changes:
        db.execute(
            """INSERT INTO tally (state, jobs) SELECT value ->> 0, value ->> 1 FROM json_each(?) WHERE true
               ON CONFLICT DO UPDATE SET jobs = jobs + excluded.jobs""",
            (rows.json_text(changes),),
        )


def recount(db: sqlite3.Connection) -> None:
    """As it must be: by the jobs that there are."""
    db.execute("DELETE FROM tally")
    db.execute("INSERT INTO tally (state, jobs) SELECT state, count(*) FROM job GROUP BY state")
