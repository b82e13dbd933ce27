"""The home directory of a server: created, made private, locked, and checked before anything in it is opened."""

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
# Directories that show that a server has run in this home. Tokens do not: they may be installed beforehand.
_SERVER_DIRS = ("agent", "backends")
_STORE_FILES = ("hodei.db-wal", "hodei.db-shm", STORE)
RESTORE = "docs/how-to/run-as-a-service.md#restore"


def find_config_file(home: Path) -> Path | None:
    found = [home / name for name in CONFIG_FILES if (home / name).exists()]
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise InvalidInput(f"{home} has both {names}", hint="keep one of them, or choose one with --config")
    return found[0] if found else None


def prepare_home(home: Path) -> None:
    """Makes the home private. A directory that also has other files keeps its mode; ours are private by themselves."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if home.stat().st_mode & 0o077 and {path.name for path in home.iterdir()} <= {*CONFIG_FILES, "server.log"}:
        home.chmod(0o700)


def lock_home(home: Path) -> TextIO:
    """Conflict if another server runs in this home. The lock is held until the file is closed."""
    lock = os.fdopen(os.open(home / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise Conflict(f"a server is already running in {home}", hint="hodei down, or choose another --home") from None
    return lock


def check_store_exists(home: Path, *, fresh: bool) -> list[Path]:
    """InvalidInput if a server has run here but its store is missing. With `fresh` its other files are renamed instead, and
    their new paths returned: job numbers start again, and an agent that knows runs of these numbers would refuse them."""
    store = home / STORE
    if store.exists() and store.stat().st_size:
        return []
    left = [home / name for name in _SERVER_DIRS if (home / name).is_dir() and any((home / name).iterdir())]
    if not left:
        return []
    if not fresh:
        state = "is empty" if store.exists() else "is missing"
        names = ", ".join(path.name for path in left) + (" and tokens" if (home / "tokens").exists() else "")
        raise InvalidInput(
            f"the store {store} {state}, but {names} of an earlier server exist; "
            "with a new store all jobs would be lost, and active runs would not be tracked",
            hint=f"restore a backup ({RESTORE}), or create a new store on purpose: hodei up --fresh",
            code="STORE_MISSING",
        )
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return [
        path.rename(path.with_name(f"{path.name}.before-{stamp}"))
        for path in [*left, *(home / name for name in _STORE_FILES if (home / name).exists())]
    ]


MAX_BYTES = 16 << 20
BACKUP_COUNT = 3


class LogFile(logging.handlers.RotatingFileHandler):
    """The log of a server in the background, rotated by size. Also gets what is written to stdout and stderr."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, backup_count: int = BACKUP_COUNT) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=backup_count, encoding="utf-8")
        self._redirect_output()

    def doRollover(self) -> None:
        super().doRollover()
        self._redirect_output()

    def _redirect_output(self) -> None:
        assert self.stream is not None
        for fd in (1, 2):
            os.dup2(self.stream.fileno(), fd)

    def _open(self):  # type: ignore[no-untyped-def]
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=_open_private)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
