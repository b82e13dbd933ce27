"""Output of runs: read by offset, and kept within a cap without disturbing the writer.

A run writes straight into its own files, so its output survives the agent. Past the cap the middle is returned to the file
system (a hole between a kept head and a kept tail), and readers see one line in its place. Offsets count every byte ever
written. A reader never follows a link, and never leaves the run's directory.
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
    """Bytes [start, end) were dropped; `moved` if the bytes after them moved down (no hole could be punched)."""

    __slots__ = ("end", "moved", "start")

    def __init__(self, start: int, end: int, moved: bool) -> None:
        self.start, self.end, self.moved = start, end, moved

    @property
    def shift(self) -> int:
        return self.end - self.start if self.moved else 0


def read(directory: str, stream: str, offset: int, limit: int) -> tuple[bytes, int]:
    """Up to `limit` bytes from `offset`, and the offset after them; a dropped range reads as one line."""
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
            return  # too little to be worth a system call
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
    """Drop everything after the head; the writer appends there, and later offsets are shifted."""
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
    """None if nothing was dropped, or if the record of it is damaged."""
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


# Above this half of the marks are dropped, so that the rest stays spread evenly over time.
MAX_MARKS = 2048
_MAX_TIMES_BYTES = 256 * 1024


class LogTimes:
    """Records when output was written: once a second, the length of each log that has grown."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[str, str], int] = {}
        self._marks: dict[tuple[str, str], int] = {}

    def update(self, directories: Iterable[str], now_ms: int) -> None:
        """Mark logs that have grown. Directories that are not named any more are dropped from memory."""
        sizes, marks = dict[tuple[str, str], int](), dict[tuple[str, str], int]()
        for directory in directories:
            for stream in STREAMS:
                key = directory, stream
                try:
                    size = written(directory, stream)
                    if size and size != self._sizes.get(key):
                        marks[key] = _add_mark(directory, stream, size, now_ms, self._marks.get(key, 0))
                    elif key in self._marks:
                        marks[key] = self._marks[key]
                except OSError:
                    continue  # removed, or the disk is full: a mark may be missing
                sizes[key] = size
        self._sizes, self._marks = sizes, marks

    def end(self, directory: str, now_ms: int) -> None:
        """The run that writes there has ended. One that `update` never saw gets no mark, so a short run costs no file."""
        for stream in STREAMS:
            key = directory, stream
            last = self._sizes.pop(key, None)
            if last is None:
                continue
            try:
                size = written(directory, stream)
                if size and size != last:
                    _add_mark(directory, stream, size, now_ms, self._marks.get(key, 0))
            except OSError:
                pass
            self._marks.pop(key, None)


def read_times(directory: str, stream: str) -> list[tuple[int, int]]:
    """(offset, time in ms), both ascending: all before the offset was written by then. Damaged lines are skipped."""
    if stream not in STREAMS:
        return []
    try:
        fd = os.open(f"{directory}/{stream}.times", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        data = os.read(fd, _MAX_TIMES_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except OSError:
        data = b""
    finally:
        os.close(fd)
    out: list[tuple[int, int]] = []
    for line in data.splitlines():
        words = line.split()
        if len(words) == 2 and all(word.isdigit() and len(word) < 19 for word in words):
            offset, at_ms = int(words[0]), int(words[1])
            if not out or (offset > out[-1][0] and at_ms >= out[-1][1]):
                out.append((offset, at_ms))
    return out


def _thin_out(marks: list[tuple[int, int]]) -> list[tuple[int, int]]:
    step_ms = max(1, (marks[-1][1] - marks[0][1]) // (MAX_MARKS // 2)) if marks else 1
    kept: list[tuple[int, int]] = []
    for mark in marks:
        if not kept or mark[1] - kept[-1][1] >= step_ms:
            kept.append(mark)
    return kept


def _add_mark(directory: str, stream: str, offset: int, at_ms: int, count: int) -> int:
    path = f"{directory}/{stream}.times"
    if count >= MAX_MARKS:
        kept = _thin_out(read_times(directory, stream))
        fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, b"".join(b"%d %d\n" % mark for mark in kept))
        finally:
            os.close(fd)
        os.replace(f"{path}.new", path)
        count = len(kept)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        os.write(fd, b"%d %d\n" % (offset, at_ms))
    finally:
        os.close(fd)
    return count + 1


_DAY_S = 86_400.0


class RetentionClock:
    """Decides what is old enough to delete. A wall clock that jumps far ahead is not believed until it has held for a while,
    so that a wrong clock does not erase all output. `path`: where the believed time is stored. `keep_s`: retention."""

    def __init__(self, path: str, keep_s: float) -> None:
        self._path, self._keep_s = path, keep_s
        self._max_jump_s, self._hold_s = min(_DAY_S, keep_s / 4), min(_DAY_S, keep_s)
        self._steady_s = steady_s()
        self._believed_s, self._held_s, self._ahead_s = self._load()

    def cutoff_s(self) -> float:
        """What was last changed before this may be deleted now."""
        wall_s, now_s = time.time(), steady_s()
        elapsed_s, self._steady_s = max(now_s - self._steady_s, 0.0), now_s
        believed_s, held_s = self._believed_s + elapsed_s, self._held_s + elapsed_s
        ahead_s = wall_s - believed_s
        if ahead_s <= self._max_jump_s or (self._is_same_jump(ahead_s) and held_s >= self._hold_s):
            believed_s, held_s, ahead_s = wall_s, 0.0, 0.0
        elif not self._is_same_jump(ahead_s):
            held_s = 0.0
        self._believed_s, self._held_s, self._ahead_s = believed_s, held_s, ahead_s
        with contextlib.suppress(OSError):
            self._store()
        return believed_s - self._keep_s

    def _is_same_jump(self, ahead_s: float) -> bool:
        """The wall clock is as far ahead as it was at the last call."""
        return self._ahead_s > 0 and abs(ahead_s - self._ahead_s) <= self._max_jump_s

    def _load(self) -> tuple[float, float, float]:
        try:
            with open(self._path) as file:
                believed_s, held_s, ahead_s = map(float, file.read(200).split())
            if 0 <= believed_s < 1e12 and 0 <= held_s < 1e12 and 0 <= ahead_s < 1e12:
                return believed_s, held_s, ahead_s
        except (OSError, ValueError):
            pass
        return time.time(), 0.0, 0.0

    def _store(self) -> None:
        fresh = f"{self._path}.new"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(f"{self._believed_s:.3f} {self._held_s:.3f} {self._ahead_s:.3f}\n")
        os.rename(fresh, self._path)


def steady_s() -> float:
    """A clock that setting the wall clock does not change."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
