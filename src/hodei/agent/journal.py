"""The agent's memory: an append-only file of JSON lines, one per step in the life of a run.

Steps: `claimed` (before anything is started), `started`, `saved`, `stopping`, `done`, `forgotten`; and `epoch` for each
installation. Lines are gathered and written together; `sync` makes all of them durable with one fdatasync.

Each line ends with a checksum of it. (Journals of older agents have none; they are read too, and get theirs when they are
compacted.) A torn last line was never told to anyone, and is dropped. A line in the middle that cannot be read has rotted
on disk: it is counted in `unreadable`, and means nothing but that we do not know. `recovery` then asks other witnesses.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

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
        """The journal as it is, for someone to look at later; the path of it, "" if there is no room for it."""
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
