"""What Linux tells about processes, and the clocks of this host.

Read only: nothing here starts, signals or changes anything.
"""

from __future__ import annotations

import os
import time


def now_ms() -> int:
    """Wall clock, for people and for the server."""
    return time.time_ns() // 1_000_000


def boot_clock_ms() -> int:
    """Time since boot, sleep included: the same for every process until the next boot, so deadlines survive us."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def holds_file(pid: int, path: str) -> bool:
    """Does process `pid` have the file at `path` open? A pid may be reused; an open file of ours cannot be had by
    accident, so this names a process more surely than its start time, and works without having noted one."""
    try:
        wanted = os.stat(path)
        return any(_same(f"/proc/{pid}/fd/{fd}", wanted) for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def _same(link: str, wanted: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(link), wanted)
    except OSError:
        return False


def is_gone(pid: int) -> bool:
    """No such process, or a dead one that nobody has collected yet."""
    fields = _stat(pid)
    return not fields or fields[0] in (b"Z", b"X")


def groups() -> dict[int, list[int]]:
    """The members of every process group on this host. Costs a look at every process."""
    out: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            out.setdefault(int(fields[2]), []).append(int(name))
    return out


def has_in_env(pid: int, name: str, value: str) -> bool:
    """Was process `pid` started with this environment variable?"""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{name}={value}".encode() in file.read().split(b"\0")
    except OSError:
        return False


def child_has_begun(pid: int) -> bool | None:
    """Has a child of `pid` become a program of its own (left its parent's image)? None: this kernel cannot tell."""
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
    """The first child of `pid`; 0 if it has none. Costs a look at every process where the kernel keeps no list."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return int((file.read().split() or ["0"])[0])
    except ProcessLookupError:
        return 0
    except OSError:
        names = sorted((name for name in os.listdir("/proc") if name.isdigit()), key=int)
        return next((int(name) for name in names if (fields := _stat(int(name))) and int(fields[1]) == pid), 0)


def _cmdline(pid: str) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _stat(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return []
    # The command's name may hold spaces and brackets; the fields after the last bracket are plain.
    return stat[stat.rindex(b")") + 2 :].split()
