"""What this machine has to offer: cores and their sockets, memory, disk, GPUs by count, and its name. Read only."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
from pathlib import Path

from hodei.agent.limits import CGROUP_ROOT, own_groups
from hodei.model.node import Socket
from hodei.model.resources import CPU, GPU, MEMORY, STORAGE, Resources

NUMA_ROOT = Path("/sys/devices/system/node")


def hostname() -> str:
    """A name that is also a valid label value; `local` if the machine has none."""
    name = re.sub(r"[^a-z0-9.-]+", "-", socket.gethostname().lower()).strip("-.")[:63].rstrip("-.")
    return name or "local"


def architecture() -> str:
    """In Kubernetes' words: amd64, arm64, ..."""
    machine = platform.machine().lower()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def capacity(home: Path, root: Path = CGROUP_ROOT) -> Resources:
    """What runs can share: usable cores, memory within the limits put on us, and the space free where they write."""
    found = {CPU: _cpu_milli(root), MEMORY: _memory_bytes(root), STORAGE: shutil.disk_usage(home).free}
    if gpus := gpu_count():
        found[GPU] = gpus * 1000
    return found


def sockets(root: Path = NUMA_ROOT) -> tuple[Socket, ...]:
    """The NUMA nodes with those of their cores that we may use; one with all of these if the system names none.
    GPUs are not assigned to them: their numbers in the system and in CUDA need not agree."""
    usable = os.sched_getaffinity(0)
    found = []
    for place in sorted(root.glob("node[0-9]*"), key=lambda place: int(place.name[4:])):
        if cpus := sorted(usable & _cpu_list(_read(place / "cpulist"))):
            found.append(Socket(cpus=tuple(cpus)))
    if set().union(*(socket.cpus for socket in found)) != usable:
        return (Socket(cpus=tuple(sorted(usable))),)
    return tuple(found)


def gpu_count(root: Path = Path("/")) -> int:
    """NVIDIA's by what its driver shows; others are not found, and must be named in the configuration."""
    listed = len(list(root.glob("proc/driver/nvidia/gpus/*")))
    return listed or sum(1 for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


class CpuMeter:
    """How many thousandths of a core this machine is using, since the look before (the first time: since its start)."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._stat = root / "proc/stat"
        self._busy = self._all = 0

    def milli(self) -> int:
        first = _read(self._stat).partition("\n")[0].split()
        ticks = [int(field) for field in first[1:9]]
        if len(ticks) < 8:
            return 0
        busy, everything = sum(ticks) - ticks[3] - ticks[4], sum(ticks)
        used, passed = busy - self._busy, everything - self._all
        self._busy, self._all = busy, everything
        return max(0, used * 1000 * (os.cpu_count() or 1) // passed) if passed > 0 else 0


def memory_used(root: Path = Path("/")) -> int:
    """Bytes that programs could not have now."""
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
    """Our own group and every group above it, in whichever hierarchy holds the controller."""
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
