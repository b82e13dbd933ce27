"""Free space in the file and on the disk, and the checks of `SqliteStore.check` for `hodei doctor`."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from contextlib import suppress
from pathlib import Path

from hodei.model.errors import Unavailable
from hodei.model.resources import MEMORY, human_amount
from hodei.store import schema

_INCREMENTAL = 2
# A file of this size is rewritten when a server starts; it takes about a second.
_SMALL_BYTES = 64 << 20
# Free pages that are kept for new rows, or a tenth of the file if that is more.
_KEPT_PAGES = 1024


def prepare(db: sqlite3.Connection, path: Path) -> None:
    """Turn on incremental vacuum, before the first table is created or while no other program has the file open."""
    if _pragma(db, "auto_vacuum") == _INCREMENTAL:
        return
    empty = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    if empty:
        db.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
    elif path.stat().st_size <= _SMALL_BYTES:
        # Fails while another program reads the file, or on a full disk; the next start tries again.
        with suppress(sqlite3.OperationalError):
            db.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
            db.execute("VACUUM")


def shrink(db: sqlite3.Connection, limit: int) -> int:
    pages, free = _pragma(db, "page_count"), _pragma(db, "freelist_count")
    spare = min(free - max(_KEPT_PAGES, pages // 10), limit)
    if spare <= 0 or _pragma(db, "auto_vacuum") != _INCREMENTAL:
        return 0
    # Not `execute`: it takes a single step of a statement without columns, which frees a single page.
    db.executescript(f"PRAGMA incremental_vacuum({spare})")
    return free - _pragma(db, "freelist_count")


def describe_free_space(db: sqlite3.Connection) -> tuple[bool, str]:
    """Whether the file shrinks when it should, and how much of it is free."""
    page_bytes, pages, free = _pragma(db, "page_size"), _pragma(db, "page_count"), _pragma(db, "freelist_count")
    text = f"{free * page_bytes >> 20} of {pages * page_bytes >> 20} MiB are free in the file"
    if _pragma(db, "auto_vacuum") == _INCREMENTAL:
        return True, text
    return (
        free * 2 < pages or free * page_bytes < _SMALL_BYTES,
        f"{text}; it was created by an older version and does not shrink",
    )


def _pragma(db: sqlite3.Connection, name: str) -> int:
    number: int = db.execute(f"PRAGMA {name}").fetchone()[0]
    return number


LOW_DISK_BYTES = 1 << 30
# With less, not even one commit fits.
NO_DISK_BYTES = 64 << 10
_SYNCHRONOUS = {0: "off", 1: "normal", 2: "full", 3: "extra"}


def check_disk_space(path: Path) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < NO_DISK_BYTES:
        raise Unavailable(f"the disk of {path} is full", hint="free some disk space")


def check(reader: sqlite3.Connection, writer: sqlite3.Connection | None, path: Path) -> list[tuple[str, bool, str]]:
    """`writer` is None in a process that only reads; its settings are then unknown."""
    found = []
    problems = [text for (text,) in reader.execute("PRAGMA quick_check(5)")]
    found.append(("store integrity", problems == ["ok"], "; ".join(problems)))
    journal = reader.execute("PRAGMA journal_mode").fetchone()[0]
    found.append(("store journal mode", journal == "wal", journal))
    if writer is not None:
        synchronous = writer.execute("PRAGMA synchronous").fetchone()[0]
        found.append(("store synchronous", synchronous >= 2, _SYNCHRONOUS[synchronous]))
    version = reader.execute("PRAGMA user_version").fetchone()[0]
    found.append(("store schema", version == schema.VERSION, f"version {version}, this program has {schema.VERSION}"))
    found.append(("store space", *describe_free_space(reader)))
    free = shutil.disk_usage(path.parent).free
    found.append(("store disk space", free >= LOW_DISK_BYTES, f"{human_amount(MEMORY, free)} free"))
    mode = stat.S_IMODE(os.stat(path).st_mode)
    found.append(("store file mode", mode & 0o077 == 0, f"{mode:04o}"))
    return found
