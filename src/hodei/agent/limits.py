"""Limits of runs: by cgroup v2 where its controllers are delegated to us, else cgroup v1, else rlimits and CPU affinity.

`enforcement()` reports what this host can do. Cgroups are only created for a run that has a limit, so that a run without
limits costs nothing here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
CFS_PERIOD_US = 100_000
CFS_MIN_QUOTA_US = 1_000


@dataclass(frozen=True)
class Limits:
    """As ordered; 0 means no limit. `cpus` pins the run to these cores. `cpu_shares` is its CPU weight (1024 for a core, 0 for
    none of its own), `oom_score_adj` what the kernel adds to its OOM score (None: nothing)."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    cpus: tuple[int, ...] = ()
    cpu_shares: int = 0
    oom_score_adj: int | None = None


@dataclass(frozen=True)
class SpawnLimits:
    """What `spawn` applies: groups to join, an address space limit, cores to stay on, the OOM score adjustment."""

    groups: tuple[str, ...] = ()
    address_space_kib: int = 0
    cpus: tuple[int, ...] = ()
    oom_score_adj: int | None = None

    @property
    def join(self) -> tuple[str, ...]:
        return tuple(f"{group}/cgroup.procs" for group in self.groups)


@dataclass
class Cgroups:
    """Creates, inspects and removes the cgroups of one agent, all under its own `label` in the hierarchy."""

    label: str
    root: Path = CGROUP_ROOT
    _next_cpu: int = field(init=False, default=0)

    @cached_property
    def _found(self) -> tuple[int, dict[str, Path]]:
        # On first use only: an agent whose runs have no limits creates nothing in the hierarchy.
        for version, find in ((2, _v2_parents), (1, _v1_parents)):
            if parents := find(self.root, self.label):
                return version, parents
        return 0, {}

    @property
    def version(self) -> int:
        return self._found[0]

    @property
    def parents(self) -> dict[str, Path]:
        return self._found[1]

    def groups(self, name: str, limits: Limits) -> tuple[str, ...]:
        """The groups that `create` would make for these limits."""
        return tuple(dict.fromkeys(str(path) for path in self._wanted(name, limits).values()))

    def _wanted(self, name: str, limits: Limits) -> dict[str, Path]:
        amounts = {"memory": limits.memory_bytes, "cpu": limits.cpu_milli or limits.cpu_shares}
        if not any(amounts.values()):
            return {}
        return {kind: parent / name for kind, parent in self.parents.items() if amounts[kind]}

    def create(self, name: str, limits: Limits) -> SpawnLimits:
        """OSError if a group cannot be made; nothing is left behind then."""
        if limits == Limits():
            return SpawnLimits()
        wanted, groups = self._wanted(name, limits), self.groups(name, limits)
        try:
            for group in groups:
                os.makedirs(group, mode=0o755, exist_ok=True)
            if "memory" in wanted:
                self._limit_memory(wanted["memory"], limits.memory_bytes)
            if "cpu" in wanted and limits.cpu_milli:
                self._limit_cpu(wanted["cpu"], limits.cpu_milli)
            if "cpu" in wanted and limits.cpu_shares:
                self._set_cpu_weight(wanted["cpu"], limits.cpu_shares)
        except OSError:
            self.remove(groups)
            raise
        address_space = limits.memory_bytes // 1024 if "memory" not in wanted else 0
        # A virtual node may name cores that this host does not have; without any of its cores a run may use all.
        cpus = tuple(sorted(set(limits.cpus) & os.sched_getaffinity(0))) if limits.cpus else ()
        if not limits.cpus and limits.cpu_milli and "cpu" not in wanted:
            cpus = self._pick_cpus(-(-limits.cpu_milli // 1000))
        return SpawnLimits(groups, address_space, cpus, limits.oom_score_adj)

    def _limit_memory(self, group: Path, amount: int) -> None:
        if self.version == 2:
            _write(group / "memory.max", amount)
            if (group / "memory.swap.max").exists():
                _write(group / "memory.swap.max", 0)
            return
        _write(group / "memory.limit_in_bytes", amount)
        if (group / "memory.memsw.limit_in_bytes").exists():
            _write(group / "memory.memsw.limit_in_bytes", amount)

    def _limit_cpu(self, group: Path, milli: int) -> None:
        quota = max(CFS_MIN_QUOTA_US, milli * CFS_PERIOD_US // 1000)
        if self.version == 2:
            _write(group / "cpu.max", f"{quota} {CFS_PERIOD_US}")
            return
        _write(group / "cpu.cfs_period_us", CFS_PERIOD_US)
        _write(group / "cpu.cfs_quota_us", quota)

    def _set_cpu_weight(self, group: Path, shares: int) -> None:
        if self.version == 2:
            # 2 to 262144 shares are 1 to 10000 of weight, by the formula that the kubelet uses.
            _write(group / "cpu.weight", 1 + (shares - 2) * 9999 // 262_142)
        else:
            _write(group / "cpu.shares", shares)

    def _pick_cpus(self, count: int) -> tuple[int, ...]:
        usable = sorted(os.sched_getaffinity(0))
        if count >= len(usable):
            return ()
        chosen = tuple(usable[(self._next_cpu + step) % len(usable)] for step in range(count))
        self._next_cpu = (self._next_cpu + count) % len(usable)
        return chosen

    @staticmethod
    def ran_out_of_memory(groups: Sequence[str]) -> bool:
        """Whether the kernel's OOM killer has killed something in these groups."""
        for group in groups:
            for name in ("memory.events", "memory.oom_control"):
                try:
                    with open(f"{group}/{name}") as file:
                        pairs = [line.split() for line in file]
                except OSError:
                    continue
                if any(pair[0] == "oom_kill" and int(pair[1]) > 0 for pair in pairs):
                    return True
        return False

    @staticmethod
    def kill(groups: Sequence[str]) -> bool:
        """Send KILL to everything inside; True if there was any process."""
        found = False
        for group in groups:
            try:
                with open(f"{group}/cgroup.procs") as file:
                    pids = [int(line) for line in file]
            except OSError:
                continue
            for pid in pids:
                if pid > 1:
                    found = True
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except OSError:
                        pass
        return found

    @staticmethod
    def remove(groups: Sequence[str]) -> bool:
        """True when all are removed; False while a process in them is still exiting."""
        removed = True
        for group in groups:
            try:
                os.rmdir(group)
            except FileNotFoundError:
                continue
            except OSError:
                removed = False
        return removed

    def sweep(self, keep: frozenset[str]) -> None:
        """Remove the groups of earlier agents, except those in `keep`. Groups with processes in them stay."""
        for parent in set(self.parents.values()):
            try:
                names = [entry.path for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False)]
            except OSError:
                continue
            self.remove([name for name in names if name not in keep])

    def close(self) -> None:
        """Remove our own parent groups, if they are empty."""
        if "_found" in vars(self):
            self.remove(sorted({str(parent) for parent in self.parents.values()}))


def enforcement(root: Path = CGROUP_ROOT) -> dict[str, str]:
    """Which limits can be enforced here, and by what: {"memory": ..., "cpu": ..., "processes": ...}.

    Values: cgroup2 | cgroup1 | rlimit (memory: address space only) | affinity (cpu: whole cores only) |
    group (processes: one that leaves its process group is not found).
    """
    cgroups = Cgroups(f"hodei-probe-{os.getpid()}", root)
    try:
        by = f"cgroup{cgroups.version}"
        return {
            "memory": by if "memory" in cgroups.parents else "rlimit",
            "cpu": by if "cpu" in cgroups.parents else "affinity",
            "processes": by if cgroups.parents else "group",
        }
    finally:
        cgroups.close()


def own_groups() -> dict[str, str]:
    """Our own group in each hierarchy: {"memory": "/a/b", ..., "": "/v2/path"}."""
    out = {}
    try:
        with open("/proc/self/cgroup") as file:
            for line in file:
                _, controllers, path = line.rstrip("\n").split(":", 2)
                for controller in controllers.split(","):
                    out[controller] = path
    except OSError:
        pass
    return out


def _v1_parents(root: Path, label: str) -> dict[str, Path]:
    found = {}
    own = own_groups()
    for controller, probe in (("memory", "memory.limit_in_bytes"), ("cpu", "cpu.cfs_quota_us")):
        base = next((path for path in (root / controller, root / "cpu,cpuacct") if (path / probe).exists()), None)
        if base is None and (root / controller).is_dir():
            base = root / controller  # the root group of some kernels has no limit files of its own
        if base is None:
            continue
        inside = base / own.get(controller, "/").strip("/")
        # Inside a container our own path may not be visible under the mount; then its root is our group.
        parent = (inside if inside.is_dir() else base) / label
        try:
            parent.mkdir(exist_ok=True)
        except OSError:
            continue
        if (parent / probe).exists():
            found[controller] = parent
        else:
            Cgroups.remove([str(parent)])
    return found


def _v2_parents(root: Path, label: str) -> dict[str, Path]:
    """The nearest group above us that delegates memory and cpu to its children, with our own group in it."""
    if not (root / "cgroup.controllers").exists():
        return {}
    place = root / own_groups().get("", "/").strip("/")
    if not place.is_dir():
        place = root
    while True:
        parent = place / label
        try:
            delegated = (place / "cgroup.subtree_control").read_text().split()
            if "memory" in delegated and "cpu" in delegated:
                parent.mkdir(exist_ok=True)
                _write(parent / "cgroup.subtree_control", "+memory +cpu")
                return {"memory": parent, "cpu": parent}
        except OSError:
            Cgroups.remove([str(parent)])
        if place == root:
            return {}
        place = place.parent


def _write(path: Path, value: int | str) -> None:
    # Not write_text: these files must be opened without O_CREAT and O_TRUNC, and take one write.
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)
