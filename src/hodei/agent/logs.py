"""What runs say: read from an offset, and kept within a cap without disturbing the writer.

A run writes straight into its own files, so its output survives us. Past the cap the middle is given back to the file
system (a hole between a kept head and a kept tail) and readers see one line in its place. Offsets always count every
byte that was ever written. A reader never follows a link, and never leaves the run's directory.
"""

from __future__ import annotations

import ctypes
import os
import stat

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
