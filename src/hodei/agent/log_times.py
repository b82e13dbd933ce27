"""When runs said what: once a second, how long each log was, if it has grown.

A run writes straight into its files, so nobody sees a line come; a mark says that everything before that place had been
written by that time. One small file beside each log that has grown while it was watched. What a short run says needs no
mark: it was said between its start and its end. Any other gets a last mark when it ends, for what it said since the last look.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from hodei.agent import logs

# Beyond these half of them are dropped, so that those that are left are spread evenly over the time.
MOST_MARKS = 2048
_LONGEST_FILE = 256 * 1024


class LogTimes:
    """`live`: what is watched now; of others nothing is remembered here."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], int] = {}
        self._marks: dict[tuple[str, str], int] = {}

    def look(self, directories: Iterable[str], now_ms: int) -> None:
        """Note what has grown since the last look."""
        seen, marks = dict[tuple[str, str], int](), dict[tuple[str, str], int]()
        for directory in directories:
            for stream in logs.STREAMS:
                key = directory, stream
                try:
                    size = logs.written(directory, stream)
                    if size and size != self._seen.get(key):
                        marks[key] = _add(directory, stream, size, now_ms, self._marks.get(key, 0))
                    elif key in self._marks:
                        marks[key] = self._marks[key]
                except OSError:
                    continue  # it has gone, or the disk is full: a time that is missing harms nobody
                seen[key] = size
        self._seen, self._marks = seen, marks

    def end(self, directory: str, now_ms: int) -> None:
        """The run that writes there has ended. One that was never looked at gets no mark, so a short run costs no file."""
        for stream in logs.STREAMS:
            key = directory, stream
            seen = self._seen.pop(key, None)
            if seen is None:
                continue
            try:
                size = logs.written(directory, stream)
                if size and size != seen:
                    _add(directory, stream, size, now_ms, self._marks.get(key, 0))
            except OSError:
                pass
            self._marks.pop(key, None)


def read(directory: str, stream: str) -> list[tuple[int, int]]:
    """(place, time in ms), both growing: all before the place had been written by then. Garbage reads as nothing."""
    if stream not in logs.STREAMS:
        return []
    try:
        fd = os.open(f"{directory}/{stream}.times", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        data = os.read(fd, _LONGEST_FILE) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except OSError:
        data = b""
    finally:
        os.close(fd)
    out: list[tuple[int, int]] = []
    for line in data.splitlines():
        words = line.split()
        if len(words) == 2 and all(word.isdigit() and len(word) < 19 for word in words):
            place, at_ms = int(words[0]), int(words[1])
            if not out or (place > out[-1][0] and at_ms >= out[-1][1]):
                out.append((place, at_ms))
    return out


def _evenly(marks: list[tuple[int, int]]) -> list[tuple[int, int]]:
    step_ms = max(1, (marks[-1][1] - marks[0][1]) // (MOST_MARKS // 2)) if marks else 1
    kept: list[tuple[int, int]] = []
    for mark in marks:
        if not kept or mark[1] - kept[-1][1] >= step_ms:
            kept.append(mark)
    return kept


def _add(directory: str, stream: str, place: int, at_ms: int, count: int) -> int:
    path = f"{directory}/{stream}.times"
    if count >= MOST_MARKS:
        kept = _evenly(read(directory, stream))
        fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, b"".join(b"%d %d\n" % mark for mark in kept))
        finally:
            os.close(fd)
        os.replace(f"{path}.new", path)
        count = len(kept)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        os.write(fd, b"%d %d\n" % (place, at_ms))
    finally:
        os.close(fd)
    return count + 1
