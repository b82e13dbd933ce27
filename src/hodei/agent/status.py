"""What the wrapper of a run wrote into its status file, read with distrust.

Lines: `RUN pid N N`, `RUN exit CODE CODE`, `RUN error KEY`. Numbers are written twice, so that a line that was damaged on
disk is not taken for another one. (Wrappers of older agents wrote them once; these say so in their first line.) The file
may hold lines of runs that had the directory before. Whatever is in the file, reading it neither fails nor waits.
"""

from __future__ import annotations

import os
import re
import stat as modes
from typing import NamedTuple

READ_LIMIT = 65_536
MAX_PID = 1 << 22
MAX_CODE = 255

ERRORS = {
    "workdir": "the working directory {workdir} cannot be entered",
    "memory": "the memory limit cannot be set",
    "group": "the control group cannot be joined",
    "status": "its status file cannot be written",
}
_LINE = re.compile(rb"([A-Za-z0-9._-]{1,100}) (pid|exit|error) ([0-9]{1,7}|[a-z]{1,20})(?: ([0-9]{1,7}))?")


class Status(NamedTuple):
    """`pid`: the wrapper's, 0 if it wrote none. `code`: the exit code, None if it wrote none. `error`: a key of ERRORS, or
    "". `exists`: there is something at that place. `sound`: all of it is whole lines of wrappers. `lines`: how many.
    `written_ms`: when the last one was written."""

    pid: int = 0
    code: int | None = None
    error: str = ""
    exists: bool = False
    sound: bool = True
    lines: int = 0
    written_ms: int = 0


def read_status(name: str, directory: str, status: str = "status") -> Status:
    """What the wrapper of run `name` wrote."""
    try:
        # Not to wait for the other end of a pipe that someone put there.
        fd = os.open(f"{directory}/{status}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return Status()
    except OSError:
        return Status(exists=True, sound=False)
    try:
        found = os.fstat(fd)
        if not modes.S_ISREG(found.st_mode):
            return Status(exists=True, sound=False)
        data = os.read(fd, READ_LIMIT)
    except OSError:
        return Status(exists=True, sound=False)
    finally:
        os.close(fd)
    return _parse(name.encode(), data)._replace(written_ms=found.st_mtime_ns // 1_000_000)


def _parse(name: bytes, data: bytes) -> Status:
    lines = data.split(b"\n")
    sound = not lines.pop()  # a last line without its end is torn
    pids, codes, errors = set[int](), set[int](), set[str]()
    once = False
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            sound = False
            continue
        run, kind, first, second = match.groups()
        if run != name:
            # The directory is handed on after an end only: a beginning in the last line is ours, with a damaged name.
            sound = sound and not (kind == b"pid" and line is lines[-1])
            continue
        if kind == b"error":
            errors.add(first.decode())
            sound = sound and first.decode() in ERRORS and second is None
            continue
        if not first.isdigit() or second not in (None, first) or int(first) > (MAX_PID if kind == b"pid" else MAX_CODE):
            sound = False
            continue
        if kind == b"pid":
            pids.add(int(first))
            once = second is None
        elif second is not None or once:
            codes.add(int(first))
        else:
            sound = False
    errors &= ERRORS.keys()
    # Two different words on the same thing: neither can be believed.
    if len(pids) > 1 or len(codes) > 1 or len(errors) > 1 or (codes and errors):
        return Status(exists=True, sound=False, lines=len(lines))
    return Status(
        pid=min(pids, default=0),
        code=min(codes, default=None),
        error=min(errors, default=""),
        exists=True,
        sound=sound,
        lines=len(lines),
    )
