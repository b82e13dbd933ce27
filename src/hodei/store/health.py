"""Is the file well? The answers of `SqliteStore.check`, for `hodei doctor`."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from pathlib import Path

from hodei.model.errors import Unavailable
from hodei.model.resources import MEMORY, human_amount
from hodei.store import schema, vacuum

LOW_DISK_BYTES = 1 << 30
# Less than this, and not even one commit fits beside what the file holds already.
NO_DISK_BYTES = 64 << 10
_SYNCHRONOUS = {0: "off", 1: "normal", 2: "full", 3: "extra"}


def check_room(path: Path) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < NO_DISK_BYTES:
        raise Unavailable(f"the disk of {path} is full", hint="free some disk space")


def check(reader: sqlite3.Connection, writer: sqlite3.Connection | None, path: Path) -> list[tuple[str, bool, str]]:
    """`writer` is None when only looking from outside; how it would write is then not to be seen."""
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
    found.append(("store room", *vacuum.told(reader)))
    free = shutil.disk_usage(path.parent).free
    found.append(("store disk space", free >= LOW_DISK_BYTES, f"{human_amount(MEMORY, free)} free"))
    mode = stat.S_IMODE(os.stat(path).st_mode)
    found.append(("store file mode", mode & 0o077 == 0, f"{mode:04o}"))
    return found
