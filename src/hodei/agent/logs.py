"""What runs say: read from an offset, and kept within a cap without disturbing the writer.

A run writes straight into its own files, so its output survives us. Past the cap the middle is given back to the file
system (a hole between a kept head and a kept tail) and readers see one line in its place. Offsets always count every
byte that was ever written. A reader never follows a link, and never leaves the run's directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import time
from collections.abc import Iterable

STREAMS = ("stdout", "stderr")
READ_LIMIT = 1 << 20
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_libc = ctypes.CDLL(None, use_errno=True)


class LogError(Exception):
    """The log cannot be read; the message says why."""


class NoLog(LogError):
    """Nothing is kept of this run."""


class _Gap:
    """Bytes [start, end) were dropped; `moved` if the bytes behind them moved down (no hole could be punched)."""

    __slots__ = ("end", "moved", "start")

    def __init__(self, start: int, end: int, moved: bool) -> None:
        self.start, self.end, self.moved = start, end, moved

    @property
    def shift(self) -> int:
        return self.end - self.start if self.moved else 0


def read(directory: str, stream: str, offset: int, limit: int) -> tuple[bytes, int]:
    """Up to `limit` bytes from `offset` on, and the offset after them; a dropped stretch reads as one line."""
    if stream not in STREAMS:
        raise LogError(f"no such stream: {stream[:40]!r}; there are stdout and stderr")
    if offset < 0 or limit < 0:
        raise LogError("offset and limit start at 0")
    limit = min(limit, READ_LIMIT)
    try:
        dir_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise NoLog("no log is kept for this run") from None
    except OSError as error:
        raise LogError(f"the log cannot be opened: {error.strerror}") from None
    try:
        gap = _read_gap(dir_fd, stream)
        if gap and offset < gap.start:
            limit = min(limit, gap.start - offset)
        elif gap and offset < gap.end:
            return f"\n[... {gap.end - offset} bytes dropped ...]\n".encode(), gap.end
        shift = gap.shift if gap and offset >= gap.end else 0
        fd = _open_regular(dir_fd, stream)
        if fd is None:
            return b"", offset
        try:
            data = os.pread(fd, limit, offset - shift)
        finally:
            os.close(fd)
        return data, offset + len(data)
    finally:
        os.close(dir_fd)


def written(directory: str, stream: str) -> int:
    """How many bytes were ever written. OSError if there is no such file."""
    size = os.stat(f"{directory}/{stream}", follow_symlinks=False).st_size
    if not os.path.lexists(f"{directory}/{stream}.gap"):
        return size
    dir_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        gap = _read_gap(dir_fd, stream)
    finally:
        os.close(dir_fd)
    return size + gap.shift if gap else size


def trim(directory: str, stream: str, cap: int) -> None:
    """Keep at most about `cap` bytes of the file on disk: half of it from the beginning, half from the end."""
    path = f"{directory}/{stream}"
    size = os.stat(path, follow_symlinks=False).st_size
    if size <= cap:
        return
    dir_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        head = cap // 2
        old = _read_gap(dir_fd, stream)
        if old and old.moved:
            _cut(dir_fd, stream, head, old.end)
            return
        end = size - (cap - head)
        if old and end - old.end < max(4096, cap // 8):
            return  # too little to be worth the trouble
        fd = os.open(stream, os.O_RDWR | os.O_NOFOLLOW, dir_fd=dir_fd)
        try:
            _write_gap(dir_fd, stream, _Gap(head, end, False))
            start = old.end if old else head
            if not _punch(fd, start, end - start):
                _cut(dir_fd, stream, head, head)
        finally:
            os.close(fd)
    finally:
        os.close(dir_fd)


def _cut(dir_fd: int, stream: str, head: int, dropped_to: int) -> None:
    """Drop everything behind the head; the writer appends there, and offsets behind it are shifted."""
    fd = os.open(stream, os.O_RDWR | os.O_NOFOLLOW, dir_fd=dir_fd)
    try:
        size = os.fstat(fd).st_size
        _write_gap(dir_fd, stream, _Gap(head, dropped_to + max(0, size - head), True))
        os.ftruncate(fd, head)
    finally:
        os.close(fd)


def _punch(fd: int, start: int, length: int) -> bool:
    offset, size = ctypes.c_int64(start), ctypes.c_int64(length)
    fallocate = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
    if fallocate is None:
        return False
    return bool(fallocate(ctypes.c_int(fd), ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE), offset, size) == 0)


def _open_regular(dir_fd: int, name: str) -> int | None:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LogError(f"the log {name} cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise LogError(f"the log {name} is not a regular file")
    return fd


def _read_gap(dir_fd: int, stream: str) -> _Gap | None:
    """None if nothing was dropped, or if nobody can tell any more what was."""
    try:
        fd = _open_regular(dir_fd, f"{stream}.gap")
    except LogError:
        return None
    if fd is None:
        return None
    try:
        start, end, moved = os.read(fd, 100).split()
        gap = _Gap(int(start), int(end), moved == b"1")
    except (ValueError, OSError):
        return None
    finally:
        os.close(fd)
    if not 0 <= gap.start <= gap.end or moved not in (b"0", b"1"):
        return None
    try:
        beyond = not gap.moved and gap.end > os.stat(stream, dir_fd=dir_fd, follow_symlinks=False).st_size
    except OSError:
        return None
    return None if beyond else gap


def _write_gap(dir_fd: int, stream: str, gap: _Gap) -> None:
    name = f"{stream}.gap"
    fd = os.open(f"{name}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)
    try:
        os.write(fd, f"{gap.start} {gap.end} {int(gap.moved)}\n".encode())
    finally:
        os.close(fd)
    os.replace(f"{name}.new", name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


# ------------------------------------------------------------------------------------------- log times
# When runs said what: once a second, how long each log was, if it has grown.


# Beyond these half of them are dropped, so that those that are left are spread evenly over the time.
MAX_MARKS = 2048
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
            for stream in STREAMS:
                key = directory, stream
                try:
                    size = written(directory, stream)
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
        for stream in STREAMS:
            key = directory, stream
            seen = self._seen.pop(key, None)
            if seen is None:
                continue
            try:
                size = written(directory, stream)
                if size and size != seen:
                    _add(directory, stream, size, now_ms, self._marks.get(key, 0))
            except OSError:
                pass
            self._marks.pop(key, None)


def read_times(directory: str, stream: str) -> list[tuple[int, int]]:
    """(place, time in ms), both growing: all before the place had been written by then. Garbage reads as nothing."""
    if stream not in STREAMS:
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
    step_ms = max(1, (marks[-1][1] - marks[0][1]) // (MAX_MARKS // 2)) if marks else 1
    kept: list[tuple[int, int]] = []
    for mark in marks:
        if not kept or mark[1] - kept[-1][1] >= step_ms:
            kept.append(mark)
    return kept


def _add(directory: str, stream: str, place: int, at_ms: int, count: int) -> int:
    path = f"{directory}/{stream}.times"
    if count >= MAX_MARKS:
        kept = _evenly(read_times(directory, stream))
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


# ----------------------------------------------------------------------------------------------- aging
# When what was kept may go, by a wall clock that may be wrong: one that was set far ahead must not erase every
# output.


_DAY_S = 86_400.0


class Aging:
    """`path`: where what is believed is kept. `keep_s`: for how long things are kept."""

    def __init__(self, path: str, keep_s: float) -> None:
        self._path, self._keep_s = path, keep_s
        self._bound_s, self._hold_s = min(_DAY_S, keep_s / 4), min(_DAY_S, keep_s)
        self._steady_s = steady_s()
        self._believed_s, self._held_s, self._ahead_s = self._recall()

    def oldest_s(self) -> float:
        """What was last changed before this may go now."""
        wall_s, now_s = time.time(), steady_s()
        passed_s, self._steady_s = max(now_s - self._steady_s, 0.0), now_s
        believed_s, held_s = self._believed_s + passed_s, self._held_s + passed_s
        ahead_s = wall_s - believed_s
        if ahead_s <= self._bound_s or (self._same(ahead_s) and held_s >= self._hold_s):
            believed_s, held_s, ahead_s = wall_s, 0.0, 0.0
        elif not self._same(ahead_s):
            held_s = 0.0
        self._believed_s, self._held_s, self._ahead_s = believed_s, held_s, ahead_s
        with contextlib.suppress(OSError):
            self._keep()
        return believed_s - self._keep_s

    def _same(self, ahead_s: float) -> bool:
        """The wall clock is as far ahead as it was at the last look."""
        return self._ahead_s > 0 and abs(ahead_s - self._ahead_s) <= self._bound_s

    def _recall(self) -> tuple[float, float, float]:
        try:
            with open(self._path) as file:
                believed_s, held_s, ahead_s = map(float, file.read(200).split())
            if 0 <= believed_s < 1e12 and 0 <= held_s < 1e12 and 0 <= ahead_s < 1e12:
                return believed_s, held_s, ahead_s
        except (OSError, ValueError):
            pass
        return time.time(), 0.0, 0.0

    def _keep(self) -> None:
        fresh = f"{self._path}.new"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(f"{self._believed_s:.3f} {self._held_s:.3f} {self._ahead_s:.3f}\n")
        os.rename(fresh, self._path)


def steady_s() -> float:
    """Time that passes, whatever the wall clock is set to."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
