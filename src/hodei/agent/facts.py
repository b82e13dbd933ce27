"""What this host is: capacity, sockets, GPUs, names; and how much of it is used."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

from hodei.agent.limits import CGROUP_ROOT, own_groups

NUMA_ROOT = Path("/sys/devices/system/node")
PROBE_TIMEOUT_S = 5.0
_GPU_PROBES = (
    ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
    ("rocm-smi", "--showproductname", "--csv"),
)


def host_facts(home: Path) -> dict[str, Any]:
    """In plain numbers and texts. Takes a second where a GPU driver is slow."""
    gpus = gpu_names()
    return {
        "hostname": hostname(),
        "kernel": platform.release(),
        "os": platform.system().lower(),
        "arch": platform.machine(),
        "python": platform.python_version(),
        "cpu_milli": cpu_milli(),
        "memory_bytes": memory_bytes(),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "storage_bytes": shutil.disk_usage(home).free,
        "gpus": len(gpus) or gpu_count(),
        "gpu_type": gpus[0] if gpus and len(set(gpus)) == 1 else "",
        "sockets": socket_cpus(),
    }


def hostname() -> str:
    """A name that is also a valid label value; `local` if the machine has none."""
    name = re.sub(r"[^a-z0-9.-]+", "-", socket.gethostname().lower()).strip("-.")[:63].rstrip("-.")
    return name or "local"


def socket_cpus(root: Path = NUMA_ROOT) -> list[list[int]]:
    """For each NUMA node the cores that we may use; one with all of them if the system lists none."""
    usable = os.sched_getaffinity(0)
    found = []
    for place in sorted(root.glob("node[0-9]*"), key=lambda place: int(place.name[4:])):
        if cpus := sorted(usable & _cpu_list(_read(place / "cpulist"))):
            found.append(cpus)
    return found if set().union(*found) == usable else [sorted(usable)]


def gpu_count(root: Path = Path("/")) -> int:
    """NVIDIA GPUs that the driver lists; others are not detected and must be configured."""
    listed = len(list(root.glob("proc/driver/nvidia/gpus/*")))
    return listed or sum(1 for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def gpu_names(timeout_s: float = PROBE_TIMEOUT_S) -> list[str]:
    """One label value for each GPU, such as `nvidia-a100-sxm4-40gb`; empty if no tool of a driver answers."""
    for command in _GPU_PROBES:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        if command[0] == "rocm-smi":
            # A header, then `card0,NAME,...`.
            lines = [line.split(",")[1] for line in lines if re.match(r"card\d+,", line)]
        if lines:
            return [re.sub(r"[^a-z0-9.-]+", "-", line.lower()).strip("-.")[:63] for line in lines]
    return []


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


def cpu_milli(root: Path = CGROUP_ROOT) -> int:
    """Usable cores, within our own cgroup limits."""
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


def memory_bytes(root: Path = CGROUP_ROOT) -> int:
    """Memory, within our own cgroup limits."""
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
