"""The agent's memory: an append-only file of JSON lines, one per step in the life of a run.

Steps: `claimed` (before anything is started), `started`, `saved`, `stopping`, `done`, `forgotten`; and `epoch` for each
installation. Lines are gathered and written together; `sync` makes all of them durable with one fdatasync.
A torn or foreign line is skipped: it was never told to anyone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

COMPACT_BYTES = 8 << 20
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Journal:
    """One writer only: the caller holds the lock of the agent's home."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._waiting: list[str] = []
        self._torn = False
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._compact_at = max(COMPACT_BYTES, self._size)

    def replay(self) -> Iterator[dict[str, Any]]:
        """Every step that is on disk, oldest first."""
        with open(self._path, "rb") as file:
            for line in file:
                try:
                    step = json.loads(line)
                except ValueError:
                    self._torn = not line.endswith(b"\n")
                    continue
                self._torn = not line.endswith(b"\n")
                if isinstance(step, dict) and "step" in step:
                    yield step

    def add(self, step: dict[str, Any]) -> None:
        """Gather one step; it reaches the disk with the next `sync`."""
        self._waiting.append(_encode(step))

    def sync(self) -> None:
        """All gathered steps are durable when this returns. OSError if the disk refuses; nothing is lost from the
        gathered steps then, and the call may be repeated."""
        if not self._waiting:
            return
        data = (("\n" if self._torn else "") + "\n".join(self._waiting) + "\n").encode()
        self._torn = True
        if os.write(self._fd, data) < len(data):
            raise OSError("the journal's disk is full")
        os.fdatasync(self._fd)
        self._torn = False
        self._size += len(data)
        self._waiting.clear()

    @property
    def has_grown(self) -> bool:
        return self._size > self._compact_at

    def compact(self, steps: Iterable[dict[str, Any]]) -> None:
        """Replace everything by `steps`: at every moment either the old or the new journal is whole on disk."""
        fresh = f"{self._path}.new"
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        with os.fdopen(os.dup(fd), "wb") as file:
            for step in steps:
                file.write(_encode(step).encode() + b"\n")
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


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
