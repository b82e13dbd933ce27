"""Directories for runs: one each, made at birth, kept for what the run said, used again if it said nothing.

Using again matters: creating and deleting files is what a short run costs most on a busy file system (ext4 looks at
every inode deleted in the last minute before it hands out a new one). A directory is used again only if nothing was
said in it and no process has its files open.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable

from hodei.agent import logs

SPARES_KEPT = 1000
# Lines in a status file carry the run's name, so they may stay when it is used again. (Emptying it would be dear:
# ext4 writes a file that was emptied and filled again to the disk at once.)
STATUS_LIMIT = 4096
# Where a run's mark of its last checkpoint is, if it names no place of its own, and where a checkpoint command's end is.
MARK, HOOK = "checkpoint", "hook"
_KEPT = {"status", *logs.STREAMS, *(f"{stream}.{what}" for stream in logs.STREAMS for what in ("gap", "times"))}


class RunDirs:
    """The directories of the runs below `root`, by installation and name."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._spares: list[str] = []

    def path(self, installation: str, name: str) -> str:
        return f"{self.root}/{installation}/{name}"

    def make(self, path: str) -> None:
        """FileExistsError if a run has been there before; it must not run again then."""
        if self._spares:
            try:
                os.rename(self._spares.pop(), path)
                return
            except FileNotFoundError:
                pass  # someone tidied up
            except OSError:
                raise FileExistsError(path) from None
        os.mkdir(path, 0o700)

    def leave(self, path: str) -> None:
        """The run is forgotten: keep what it said, or nothing."""
        try:
            silent = all(_silent_and_closed(f"{path}/{stream}") for stream in logs.STREAMS)
            for name in set(os.listdir(path)) - _KEPT:
                _remove(f"{path}/{name}")
            short = silent and os.stat(f"{path}/status").st_size < STATUS_LIMIT
            if short and len(self._spares) < SPARES_KEPT:
                self._spares.append(path)
            elif silent:
                shutil.rmtree(path)
            else:
                os.unlink(f"{path}/status")
        except OSError:
            return  # was never born, or someone tidied up

    def with_status(self, known: Callable[[str], bool]) -> list[str]:
        """Directories in which a wrapper has begun to write, but for those of runs that are `known`
        (`installation/name`)."""
        return [
            self.path(installation, name)
            for installation in _subdirectories(self.root)
            for name in _subdirectories(f"{self.root}/{installation}")
            if not known(f"{installation}/{name}") and os.path.lexists(f"{self.path(installation, name)}/status")
        ]

    def prune(self, before_s: float, keep: set[str]) -> None:
        """Remove directories in which nothing was said since `before_s`, except those of the runs in `keep`
        (`installation/name`)."""
        kept = keep | {spare.removeprefix(f"{self.root}/") for spare in self._spares}
        for installation in _subdirectories(self.root):
            for name in _subdirectories(f"{self.root}/{installation}"):
                path = self.path(installation, name)
                if f"{installation}/{name}" not in kept and _last_said_s(path) < before_s:
                    shutil.rmtree(path, ignore_errors=True)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except IsADirectoryError:
        shutil.rmtree(path)


def _silent_and_closed(path: str) -> bool:
    """Empty, and open in no process: the kernel grants a write lease only then."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if os.fstat(fd).st_size:
            return False
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        return True
    finally:
        os.close(fd)


def _subdirectories(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _last_said_s(path: str) -> float:
    times = []
    for stream in logs.STREAMS:
        try:
            times.append(os.stat(f"{path}/{stream}", follow_symlinks=False).st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)
