"""The agent's memory: an append-only file of JSON lines, one per step in the life of a run.

Steps: `claimed` (before anything is started), `started`, `saved`, `stopping`, `done`, `forgotten`; and `epoch` for each
installation. Lines are gathered and written together; `sync` makes all of them durable with one fdatasync.

Each line ends with a checksum of it. (Journals of older agents have none; they are read too, and get theirs when they are
compacted.) A torn last line was never told to anyone, and is dropped. A line in the middle that cannot be read has rotted
on disk: it is counted in `unreadable`, and `recovery` uses other sources.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hodei.agent import logs

COMPACT_BYTES = 8 << 20
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Journal:
    """One writer only: the caller holds the lock of the agent's home. `fresh`: there was none before."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._waiting: list[str] = []
        self._torn = False
        self.unreadable = 0
        self.fresh = not os.path.exists(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._compact_at = max(COMPACT_BYTES, self._size)

    def replay(self) -> Iterator[dict[str, Any]]:
        """Every step that is on disk, oldest first."""
        with open(self._path, "rb") as file:
            for line in file:
                step = _read(line.rstrip(b"\n"))
                self._torn = not line.endswith(b"\n")
                if step is not None:
                    yield step
                elif not self._torn and line != b"\n":
                    self.unreadable += 1

    def keep_copy(self) -> str:
        """Copy a damaged journal for later inspection; its path, "" if the disk is full."""
        copy = f"{self._path}.damaged"
        try:
            shutil.copyfile(self._path, copy)
        except OSError:
            return ""
        return copy

    def add(self, step: dict[str, Any]) -> str:
        """Gather one step; it reaches the disk with the next `sync`. Its text."""
        text = _encode(step)
        self._waiting.append(_with_sum(text))
        return text

    def sync(self) -> None:
        """All gathered steps are durable when this returns. OSError if the disk refuses; nothing is lost from the
        gathered steps then, and the call may be repeated."""
        if not self._waiting:
            return
        data = (("\n" if self._torn else "") + "\n".join(self._waiting) + "\n").encode()
        self._torn = True
        if os.write(self._fd, data) < len(data):
            self._cut_off()
            raise OSError("the journal's disk is full")
        os.fdatasync(self._fd)
        self._torn = False
        self._size += len(data)
        self._waiting.clear()

    def _cut_off(self) -> None:
        """Take away a line that was half written, so that it is not taken for a rotten one later."""
        try:
            os.ftruncate(self._fd, self._size)
            self._torn = False
        except OSError:
            pass

    @property
    def has_grown(self) -> bool:
        return self._size > self._compact_at

    def compact(self, steps: Iterable[dict[str, Any]]) -> None:
        """Replace everything by `steps`: at every moment either the old or the new journal is whole on disk."""
        fresh = f"{self._path}.new"
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        with os.fdopen(os.dup(fd), "wb") as file:
            for step in steps:
                file.write(_line(step).encode() + b"\n")
        os.fsync(fd)
        os.rename(fresh, self._path)
        _sync_directory(os.path.dirname(self._path))
        os.close(self._fd)
        self._fd = fd
        self._waiting.clear()
        self._torn = False
        self._size = os.fstat(fd).st_size
        self._compact_at = max(COMPACT_BYTES, 2 * self._size)

    def close(self) -> None:
        os.close(self._fd)


def write_copy(path: str, steps: Iterable[dict[str, Any]]) -> None:
    """A few steps once more in a file of their own, for the case that the journal rots. OSError if the disk refuses."""
    fresh = f"{path}.new"
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write("".join(f"{_line(step)}\n" for step in steps).encode())
        file.flush()
        os.fsync(file.fileno())
    os.rename(fresh, path)


def read_copy(path: str) -> list[dict[str, Any]]:
    """Those of them that can be read."""
    try:
        with open(path, "rb") as file:
            return [step for line in file if (step := _read(line.rstrip(b"\n"))) is not None]
    except OSError:
        return []


def _line(step: dict[str, Any]) -> str:
    return _with_sum(_encode(step))


def _with_sum(text: str) -> str:
    return f"{text} {zlib.crc32(text.encode()):08x}"


def _read(line: bytes) -> dict[str, Any] | None:
    """None if it is not as it was written."""
    if not line.endswith(b"}"):
        line, _, sum = line.rpartition(b" ")
        if sum != b"%08x" % zlib.crc32(line):
            return None
    try:
        step = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return step if isinstance(step, dict) and isinstance(step.get("step"), str) else None


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -------------------------------------------------------------------------------------------- run dirs
# Directories for runs: one each, made at birth, kept for what the run said, used again if it said nothing.


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
                pass  # removed by hand
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
