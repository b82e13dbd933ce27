"""Processes as /proc shows them, and the clocks of this host. Read only."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# What the kernel appends to the path of an open file that was deleted.
_DELETED = " (deleted)"


def now_ms() -> int:
    """Wall clock, for users and the server."""
    return time.time_ns() // 1_000_000


def boot_clock_ms() -> int:
    """Time since boot, sleep included: the same for every process until the next boot, so deadlines survive a restart."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def holds_file(pid: int, path: str) -> bool:
    """Whether process `pid` has the file at `path` open, also if it was deleted since. A pid may be reused, but no other process
    has a file of ours open, so this identifies a process better than a recorded start time."""
    try:
        fds = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    try:
        wanted = os.stat(path)
    except OSError:
        wanted = None
    return any(_is_file(f"/proc/{pid}/fd/{fd}", path, wanted) for fd in fds)


def _is_file(link: str, path: str, wanted: os.stat_result | None) -> bool:
    try:
        if wanted is not None and os.path.samestat(os.stat(link), wanted):
            return True
        return os.readlink(link).removesuffix(_DELETED) == path
    except OSError:
        return False


def holders(root: str, name: str) -> dict[str, int]:
    """Session leaders with a file of this name below `root` open, also a deleted one, by path. Reads every process."""
    out: dict[str, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := stat_fields(int(entry))) and fields[3] == entry.encode():
            for path in _open_files(entry):
                if path.startswith(f"{root}/") and path.endswith(f"/{name}"):
                    out[path] = int(entry)
    return out


def _open_files(pid: str) -> list[str]:
    out = []
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            out.append(os.readlink(f"/proc/{pid}/fd/{fd}").removesuffix(_DELETED))
    except OSError:
        pass
    return out


def command_line(pid: int) -> list[str]:
    """The arguments of process `pid`; none if it has exited."""
    return [os.fsdecode(word) for word in _cmdline(str(pid)).split(b"\0")[:-1]]


def started_boot_ms(pid: int) -> int:
    """When process `pid` started, on the boot clock, to a hundredth of a second; now if it has exited."""
    fields = stat_fields(pid)
    return int(fields[19]) * 1000 // TICKS_PER_S if fields else boot_clock_ms()


def has_exited(pid: int) -> bool:
    """No such process, or a zombie."""
    fields = stat_fields(pid)
    return not fields or fields[0] in (b"Z", b"X")


def groups() -> dict[int, list[int]]:
    """The members of every process group on this host. Reads every process."""
    out: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := stat_fields(int(name))):
            out.setdefault(int(fields[2]), []).append(int(name))
    return out


def cpu_ms(sessions: Mapping[int, Mapping[str, str]], ignored: frozenset[int] = frozenset()) -> dict[int, int]:
    """CPU time of the live processes of these sessions, with that of their ended children. A process that has left its session
    is recognised by the environment variables given for it. Sessions in `ignored` are not counted. Reads every process."""
    out = dict.fromkeys(sessions, 0)
    marks = {
        session: {f"{name}={value}".encode() for name, value in mark.items()} for session, mark in sessions.items()
    }
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or not (fields := stat_fields(int(entry))):
            continue
        session = int(fields[3])
        if session in ignored:
            continue
        if session not in out:
            env = _environment(entry)
            session = next((of for of, mark in marks.items() if mark <= env), 0)
        if session:
            out[session] += sum(map(int, fields[11:15])) * 1000 // TICKS_PER_S
    return out


def _environment(pid: str) -> set[bytes]:
    """NAME=value pairs that a process was started with; none if we may not read them."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except OSError:
        return set()


def has_in_env(pid: int, name: str, value: str) -> bool:
    """Whether process `pid` was started with this environment variable."""
    return f"{name}={value}".encode() in _environment(str(pid))


def child_has_started(pid: int) -> bool | None:
    """Whether a child of `pid` has called exec. None: this kernel does not list children."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = file.read().split()
    except ProcessLookupError:
        return True
    except OSError:
        return None if os.path.exists(f"/proc/{pid}") else True
    own = _cmdline(str(pid))
    return any(_cmdline(child) != own for child in children)


def child_of(pid: int) -> int:
    """The first child of `pid`; 0 without one. Reads every process where the kernel does not list children."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return int((file.read().split() or ["0"])[0])
    except ProcessLookupError:
        return 0
    except OSError:
        names = sorted((name for name in os.listdir("/proc") if name.isdigit()), key=int)
        return next((int(name) for name in names if (fields := stat_fields(int(name))) and int(fields[1]) == pid), 0)


def _cmdline(pid: str) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def stat_fields(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat after the command's name; none if it has exited."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return []
    # The command's name may contain spaces and brackets; the fields follow the last bracket.
    return stat[stat.rindex(b")") + 2 :].split()
