"""The home directory of a server: made, closed to others, locked, and checked before anything in it is opened.

A store that is missing beside what an earlier server left is a question for the operator, not a new beginning.
"""

from __future__ import annotations

import fcntl
import logging.handlers
import os
import time
from pathlib import Path
from typing import TextIO

from hodei.model.errors import Conflict, InvalidInput

STORE = "hodei.db"
CONFIG_FILES = ("config.toml", "hodei.yaml")
# What a server leaves in a home when it has worked there. Tokens alone do not count: they may be put there beforehand.
_LEFT = ("agent", "backends")
_OF_THE_STORE = ("hodei.db-wal", "hodei.db-shm")
RESTORE = "docs/how-to/run-as-a-service.md#restore"


def settle_in(home: Path) -> None:
    """A home is closed to others; a directory that holds other things as well keeps its mode (our files have theirs)."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if home.stat().st_mode & 0o077 and {path.name for path in home.iterdir()} <= {*CONFIG_FILES, "server.log"}:
        home.chmod(0o700)


def only_one(home: Path) -> TextIO:
    lock = os.fdopen(os.open(home / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise Conflict(f"a server is running in {home} already", hint="hodei down, or choose another --home") from None
    return lock


def ask_about_lost_store(home: Path, *, fresh: bool) -> list[Path]:
    """InvalidInput if there is no store although a server has worked here, unless a `fresh` start is wanted. Then what
    the earlier server left is set aside, and where to is the answer: job numbers are given out again, and an agent that
    remembers runs of the same numbers would refuse to run them."""
    store = home / STORE
    if store.exists() and store.stat().st_size:
        return []
    left = [home / name for name in _LEFT if (home / name).is_dir() and any((home / name).iterdir())]
    if not left:
        return []
    if not fresh:
        state = "is empty" if store.exists() else "is missing"
        also = " and tokens" if (home / "tokens").exists() else ""
        raise InvalidInput(
            f"the store {store} {state}, but {', '.join(path.name for path in left)}{also} of an earlier server are here; "
            "a new store would forget all jobs and lose sight of those that run",
            hint=f"restore a backup ({RESTORE}), or start anew on purpose: hodei up --fresh",
            code="STORE_MISSING",
        )
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = []
    for path in [*left, *(home / name for name in (*_OF_THE_STORE, STORE) if (home / name).exists())]:
        aside.append(path.with_name(f"{path.name}.before-{stamp}"))
        path.rename(aside[-1])
    return aside


# --------------------------------------------------------------------------------------------- logfile
# The log of a server in the background: bounded in size, with a few older files beside it.


MAX_BYTES = 16 << 20
OLDER_FILES = 3


class LogFile(logging.handlers.RotatingFileHandler):
    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, older_files: int = OLDER_FILES) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=older_files, encoding="utf-8")
        self._take_over()

    def doRollover(self) -> None:
        super().doRollover()
        self._take_over()

    def _take_over(self) -> None:
        assert self.stream is not None
        for fd in (1, 2):
            os.dup2(self.stream.fileno(), fd)

    def _open(self):  # type: ignore[no-untyped-def]
        """The file is never readable by others, not even for a moment."""
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=_closed_to_others)


def _closed_to_others(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
