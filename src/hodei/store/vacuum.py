"""Room that pruned rows leave behind in the file, and its way back to the file system.

A file that was made with `auto_vacuum = INCREMENTAL` gives free pages back a few at a time. Older files were made without;
a small one is rewritten when it is opened, a large one is left alone and `hodei doctor` says so.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path

_INCREMENTAL = 2
# So much is rewritten at the start of a server without asking; it takes about a second.
_SMALL_BYTES = 64 << 20
# What is pruned today is needed again tomorrow: so many free pages are kept, or a tenth of the file if that is more.
_KEPT_PAGES = 1024


def prepare(db: sqlite3.Connection, path: Path) -> None:
    """Before the first table is made, or while nobody else has the file open."""
    if _mode(db) == _INCREMENTAL:
        return
    empty = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    if empty:
        db.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
    elif path.stat().st_size <= _SMALL_BYTES:
        # Not possible while another program looks at the file, or on a full disk: then another time.
        with suppress(sqlite3.OperationalError):
            db.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
            db.execute("VACUUM")


def shrink(db: sqlite3.Connection, limit: int) -> int:
    pages, free = _count(db, "page_count"), _count(db, "freelist_count")
    spare = min(free - max(_KEPT_PAGES, pages // 10), limit)
    if spare <= 0 or _mode(db) != _INCREMENTAL:
        return 0
    # Not `execute`: it takes a single step of a statement without columns, which gives back a single page.
    db.executescript(f"PRAGMA incremental_vacuum({spare})")
    return free - _count(db, "freelist_count")


def told(db: sqlite3.Connection) -> tuple[bool, str]:
    """For `doctor`: whether the file can shrink where it should, and how much room is free in it."""
    page_bytes, pages, free = _count(db, "page_size"), _count(db, "page_count"), _count(db, "freelist_count")
    text = f"{free * page_bytes >> 20} of {pages * page_bytes >> 20} MiB are free in the file"
    if _mode(db) == _INCREMENTAL:
        return True, text
    return (
        free * 2 < pages or free * page_bytes < _SMALL_BYTES,
        f"{text}; it was made by an older version and does not shrink",
    )


def _mode(db: sqlite3.Connection) -> int:
    return _count(db, "auto_vacuum")


def _count(db: sqlite3.Connection, what: str) -> int:
    number: int = db.execute(f"PRAGMA {what}").fetchone()[0]
    return number
