"""Which runs were handed to a queueing system and are not yet forgotten: a file of lines that outlives the server.

A line is written before a job is handed in, and one when its number is known: whoever comes after a crash knows which
runs he has to look for. Losing the file (or the power, within seconds of a write) loses no run: the jobs carry marks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import msgspec

from hodei.backends.hpc.tracked_run import Entry

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Entry).decode


class Journal:
    """`lock` is a file that we, and every command which hands in a job, hold open: as long as anybody of an earlier server
    does, a job of his may still be on its way."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._path = home / "journal"
        self._file: int | None = None
        self.lock: int | None = None

    def open(self) -> dict[str, Entry]:
        """The runs in it that are not forgotten. BlockingIOError: an earlier server's commands
        are still under way. Blocks for the time of reading a file."""
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._home / "handing-in.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise
        self.lock = lock
        entries: dict[str, Entry] = {}
        if self._path.exists():
            for line in self._path.read_bytes().splitlines():
                with contextlib.suppress(msgspec.MsgspecError):  # a torn line
                    entry = _decode(line)
                    entries.pop(entry.run, None)
                    if not entry.forgotten:
                        entries[entry.run] = entry
        fresh = self._path.with_suffix(".new")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.writelines(_encode(entry) + b"\n" for entry in entries.values())
        fresh.rename(self._path)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        return entries

    def write(self, *entries: Entry) -> None:
        assert self._file is not None
        os.write(self._file, b"".join(_encode(entry) + b"\n" for entry in entries))

    def close(self) -> None:
        for fd in (self._file, self.lock):
            if fd is not None:
                os.close(fd)
        self._file = self.lock = None
