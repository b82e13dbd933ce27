"""What runs use: CPU time, peak memory, I/O.

The end of a run is measured by its control groups, if it has some, and by the resource usage of its process tree, which
the kernel adds up as parents wait for their children (`wait4`). Samples of /proc measure live runs, and keep what that
misses: runs that are killed whole, processes that were never waited for, and runs of an earlier agent. A sample costs
time for every process of the host, so samples are rare, and the rarer the more they cost.

Amounts only grow, so of several measurements of a run the largest one counts. What was not measured is absent.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from hodei.agent import proc

if TYPE_CHECKING:
    from hodei.agent.run import Run

# Keys: cpu_ms, peak_memory, read_bytes, write_bytes, as in `hodei.model.usage.RunUsage`.
Usage = dict[str, int]

SAMPLE_EVERY_MS = 10_000
# Many kills at once, or requests of several servers, share a sample. CPU usage is a rate between two requests of a server.
FRESH_MS, FRESH_FOR_SERVERS_MS = 500, 100
# Time between samples, as a multiple of what the last one took: they use at most a two-hundredth of the agent's time.
SAMPLE_COST = 200
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SECTOR = 512  # the unit of ru_inblock and ru_oublock
_READ_LIMIT = 8192
# How far the kernel's own count of a process's memory may be off.
_FLOOR_MARGIN = 4 << 20
_HAS_IO = os.path.exists("/proc/self/io")
_NUMBER = re.compile(rb"\s*(\d{1,19})\s*")


def merge(first: Usage, second: Mapping[str, int]) -> Usage:
    """The larger amounts of two measurements of one run."""
    out = dict(first)
    for name, amount in second.items():
        if amount > out.get(name, -1):
            out[name] = amount
    return out


def of_process(used: resource.struct_rusage, floor: int) -> Usage:
    """Of a process that has ended, with the descendants that were waited for. The memory is that of the largest process.

    A process inherits the peak of the one that spawned it: below `floor`, that of this agent, its own peak is unknown.
    """
    out = {"cpu_ms": round((used.ru_utime + used.ru_stime) * 1000)}
    if used.ru_maxrss << 10 > floor:
        out["peak_memory"] = used.ru_maxrss << 10
    if _HAS_IO:
        out |= {"read_bytes": used.ru_inblock * _SECTOR, "write_bytes": used.ru_oublock * _SECTOR}
    return out


def of_groups(groups: Sequence[str]) -> Usage:
    """Of control groups of either version, with everything that ever was in them. Their memory includes cached files."""
    out: Usage = {}
    for group in groups:
        if (text := _read(f"{group}/cpu.stat")) and (cpu_us := _value(text, b"usage_usec")) is not None:
            out["cpu_ms"] = cpu_us // 1000
        elif (cpu_ns := _number(_read(f"{group}/cpuacct.usage"))) is not None:
            out["cpu_ms"] = cpu_ns // 1_000_000
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            if (peak := _number(_read(f"{group}/{name}"))) is not None:
                out["peak_memory"] = peak
        if text := _read(f"{group}/io.stat"):
            out |= {"read_bytes": _io(text, b"rbytes"), "write_bytes": _io(text, b"wbytes")}
    return out


def of_sessions(sessions: Collection[int]) -> dict[int, Usage]:
    """Of the live processes of these sessions, with the children that they have waited for. The memory is what they have
    now, or the peak of the largest one. Reads every process."""
    out: dict[int, Usage] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or not (fields := proc.stat_fields(int(entry))):
            continue
        session = int(fields[3])
        if session not in sessions:
            continue
        used = out.setdefault(session, {"cpu_ms": 0, "now": 0, "peak_memory": 0})
        used["cpu_ms"] += sum(map(int, fields[11:15])) * 1000 // proc.TICKS_PER_S
        used["now"] += int(fields[21]) * _PAGE
        used["peak_memory"] = max(used["peak_memory"], (_value(_read(f"/proc/{entry}/status"), b"VmHWM:") or 0) << 10)
        if _HAS_IO and (text := _read(f"/proc/{entry}/io")):
            for name in ("read_bytes", "write_bytes"):
                used[name] = used.get(name, 0) + (_value(text, name.encode() + b":") or 0)
    for used in out.values():
        used["peak_memory"] = max(used["peak_memory"], used.pop("now"))
    return out


class UsageMeter:
    """Measures the runs in `live`, by the pid of their wrapper. `Run.usage` holds the largest amounts seen so far."""

    def __init__(self, live: Mapping[int, Run]) -> None:
        self._live = live
        self._sampled_ms = self._took_ms = 0
        self._floor = 0

    def sample(self, fresh_ms: int = FRESH_MS) -> None:
        """Measure every live run, unless that was done within `fresh_ms`."""
        began = proc.boot_clock_ms()
        if not self._live or began - self._sampled_ms < fresh_ms:
            return
        found = of_sessions(self._live.keys())
        for pid, used in found.items():
            if run := self._live.get(pid):
                run.usage = merge(merge(run.usage, used), of_groups(run.cgroups))
        self._sampled_ms = proc.boot_clock_ms()
        self._took_ms = self._sampled_ms - began

    def sample_if_due(self) -> None:
        """Called about once a second."""
        if proc.boot_clock_ms() - self._sampled_ms >= max(SAMPLE_EVERY_MS, self._took_ms * SAMPLE_COST):
            self.sample()

    def measure_end(self, run: Run, used: resource.struct_rusage | None) -> Usage:
        """Of a run that has ended; its groups still exist. `used`: None if it is not our child."""
        usage = run.usage
        if used is not None:
            # Only a run that is larger than this agent was is worth a look at how large that is now.
            if used.ru_maxrss << 10 > self._floor:
                self._floor = own_peak() + _FLOOR_MARGIN
            usage = merge(usage, of_process(used, self._floor))
        return merge(usage, of_groups(run.cgroups)) if run.cgroups else usage


def own_peak() -> int:
    """The largest memory that this process ever had."""
    return (_value(_read("/proc/self/status"), b"VmHWM:") or 0) << 10


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(fd, _READ_LIMIT)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _number(text: bytes) -> int | None:
    return int(found[1]) if (found := _NUMBER.fullmatch(text)) else None


def _value(text: bytes, name: bytes) -> int | None:
    """The number after `name` at the beginning of a line."""
    for line in text.split(b"\n"):
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return _number(words[1])
    return None


def _io(text: bytes, key: bytes) -> int:
    """Added up over all devices: `8:0 rbytes=1 wbytes=2 rios=3 ...`"""
    pairs = (word.partition(b"=") for word in text.split())
    return sum(_number(value) or 0 for name, _, value in pairs if name == key)
