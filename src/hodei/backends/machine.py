"""This machine: its capacity, sockets, usage and name, and commands on it for operators."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from hodei.agent.limits import CGROUP_ROOT, own_groups
from hodei.backends.subreaper import NOT_RUNNABLE
from hodei.model.backend import ExecResult
from hodei.model.node import Socket
from hodei.model.resources import CPU, GPU, MEMORY, STORAGE, Resources

NUMA_ROOT = Path("/sys/devices/system/node")


def hostname() -> str:
    """A name that is also a valid label value; `local` if the machine has none."""
    name = re.sub(r"[^a-z0-9.-]+", "-", socket.gethostname().lower()).strip("-.")[:63].rstrip("-.")
    return name or "local"


def capacity(home: Path, root: Path = CGROUP_ROOT) -> Resources:
    """What runs can share: usable cores and memory within our own cgroup limits, and free disk space in `home`."""
    found = {CPU: _cpu_milli(root), MEMORY: _memory_bytes(root), STORAGE: shutil.disk_usage(home).free}
    if gpus := gpu_count():
        found[GPU] = gpus * 1000
    return found


def sockets(root: Path = NUMA_ROOT) -> tuple[Socket, ...]:
    """The NUMA nodes with the cores that we may use; one with all of them if the system lists none. Without GPUs, because their
    numbers in the system and in CUDA may differ."""
    usable = os.sched_getaffinity(0)
    found = []
    for place in sorted(root.glob("node[0-9]*"), key=lambda place: int(place.name[4:])):
        if cpus := sorted(usable & _cpu_list(_read(place / "cpulist"))):
            found.append(Socket(cpus=tuple(cpus)))
    if set().union(*(socket.cpus for socket in found)) != usable:
        return (Socket(cpus=tuple(sorted(usable))),)
    return tuple(found)


def gpu_count(root: Path = Path("/")) -> int:
    """NVIDIA GPUs that the driver lists; others are not detected and must be configured."""
    listed = len(list(root.glob("proc/driver/nvidia/gpus/*")))
    return listed or sum(1 for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


class CpuMeter:
    """CPU usage of this machine in thousandths of a core since the last call; the first time since its boot."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._stat = root / "proc/stat"
        self._busy = self._total = 0

    def milli(self) -> int:
        first = _read(self._stat).partition("\n")[0].split()
        ticks = [int(field) for field in first[1:9]]
        if len(ticks) < 8:
            return 0
        busy, total = sum(ticks) - ticks[3] - ticks[4], sum(ticks)
        used, elapsed = busy - self._busy, total - self._total
        self._busy, self._total = busy, total
        return max(0, used * 1000 * (os.cpu_count() or 1) // elapsed) if elapsed > 0 else 0


def memory_used(root: Path = Path("/")) -> int:
    """Bytes that are not available to programs."""
    found = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    total, left = (int(found.get(name, "0").split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    return total - left


def _cpu_list(text: str) -> set[int]:
    """`0-3,8` is {0, 1, 2, 3, 8}."""
    out: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last.isdigit() or not last):
            out.update(range(int(first), int(last or first) + 1))
    return out


def _cpu_milli(root: Path) -> int:
    cores = len(os.sched_getaffinity(0)) * 1000
    quotas = [cores]
    for group in _groups_up(root, "cpu"):
        quota, period = _cpu_quota(group)
        if quota > 0 and period > 0:
            quotas.append(quota * 1000 // period)
    return max(1, min(quotas))


def _cpu_quota(group: Path) -> tuple[int, int]:
    both = _read(group / "cpu.max").split()
    if len(both) == 2 and both[0].isdigit():
        return int(both[0]), int(both[1])
    quota, period = _read(group / "cpu.cfs_quota_us").strip(), _read(group / "cpu.cfs_period_us").strip()
    return (int(quota), int(period)) if quota.isdigit() and period.isdigit() else (0, 0)


def _memory_bytes(root: Path) -> int:
    amounts = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _groups_up(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _read(group / name).strip()
            if limit.isdigit():
                amounts.append(int(limit))
    return min(amounts)


def _groups_up(root: Path, controller: str) -> list[Path]:
    """Our own group and its ancestors in the hierarchy of the controller."""
    own = own_groups()
    base, path = (root / controller, own[controller]) if controller in own else (root, own.get("", "/"))
    place = base / path.strip("/")
    out = []
    while place != base:
        out.append(place)
        place = place.parent
    return [*out, base]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


OUTPUT_LIMIT = 1 << 20
# Not the whole environment of the server: it may hold secrets.
_PASSED_ENV = ("PATH", "LANG", "TZ", "HOME", "USER", "LOGNAME")
_SUBREAPER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("subreaper.py")))
# How long the subreaper may take to kill what is left. Its own timeout is later than ours by this, in case we are suspended.
_KILL_S = 10.0
_DRAIN_S = 1.0


class _Output:
    """The beginning of a stream. All of it is read, so that a full pipe blocks no program."""

    def __init__(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        self.kept, self.cut = bytearray(), False
        self.task = asyncio.create_task(self._read(stream))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(1 << 16):
            room = OUTPUT_LIMIT - len(self.kept)
            self.kept += part[:room]
            self.cut = self.cut or len(part) > room


async def execute(command: Sequence[str], timeout_s: float) -> ExecResult:
    """Run a command in a session of its own with a clean environment. `exit_code` as in a shell: 127 if there is no such
    program, 126 if it cannot be run; None after the timeout. No process that it started is left."""
    env = {name: os.environ[name] for name in _PASSED_ENV if name in os.environ}
    try:
        process = await asyncio.create_subprocess_exec(
            *_SUBREAPER,
            str(timeout_s + _KILL_S),
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:  # a longer command than the system takes
        return ExecResult(NOT_RUNNABLE, stderr=f"{command[0][:80]}: {error.strerror}\n".encode())
    stdout, stderr = _Output(process.stdout), _Output(process.stderr)
    code = None
    try:
        async with asyncio.timeout(timeout_s):
            code = await process.wait()
    except TimeoutError:
        pass
    finally:
        await _kill(process)
        await asyncio.wait([stdout.task, stderr.task], timeout=_DRAIN_S)
        stdout.task.cancel()
        stderr.task.cancel()
    if code is not None and code < 0:
        code = 128 - code
    return ExecResult(code, bytes(stdout.kept), bytes(stderr.kept), stdout.cut or stderr.cut)


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Closing its stdin makes the subreaper kill everything; if it fails, kill at least its process group."""
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_KILL_S):
            await process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
