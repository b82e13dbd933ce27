"""Slurm's nodes and partitions in our words, from `scontrol --oneliner show` or from slurmrestd."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from msgspec import Struct

from hodei.backends.hpc.ports import Cluster, Line, Phase, Seen
from hodei.model.node import Node
from hodei.model.resources import CPU, GPU, MEMORY, STORAGE, Resources

MIB = 1 << 20
FEATURE = "slurm.hodei.io/feature-"
_PAIR = re.compile(r"([A-Z][\w:/]*)=(.*?)(?=\s+[A-Z][\w:/]*=|\s*$)")
_GRES = re.compile(
    r"(?P<name>[A-Za-z0-9_-]+)(?::(?P<type>[A-Za-z][\w.-]*))?:(?P<count>\d+)(?P<suffix>[KMGTP]?)(?:\(.*\))?"
)
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,40}[A-Za-z0-9])?")
_SCALE = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
# Words in a node's state, or behind a + in it.
_OUT = {"DOWN", "FAIL", "ERROR", "UNKNOWN", "NOT_RESPONDING", "FUTURE", "POWERED_DOWN", "POWERING_DOWN", "INVALID_REG"}
_CLOSED = {"DRAIN", "DRAINED", "DRAINING", "MAINT", "MAINTENANCE", "FAILING", "REBOOT_REQUESTED", "REBOOT_ISSUED"}


class SlurmNode(Struct, frozen=True):
    """What both ways of asking tell of a node."""

    name: str
    cpus: int
    memory_mib: int
    state: str
    partitions: tuple[str, ...]
    gres: str = ""
    features: str = ""
    disk_mib: int = 0
    arch: str = ""
    address: str = ""
    reason: str = ""
    load_percent: int = 0
    free_mib: int | None = None

    @property
    def words(self) -> set[str]:
        return set(re.split(r"[+*~#!%$@^-]+|\s+", self.state.upper().replace("*", "+NOT_RESPONDING"))) - {""}


class SlurmPartition(Struct, frozen=True):
    name: str
    up: bool = True
    default: bool = False
    minutes: int = 0


def pairs(line: str) -> dict[str, str]:
    """`Key=value` as scontrol prints it, where values may have spaces in them."""
    return {key: value.strip() for key, value in _PAIR.findall(line)}


def node_of(line: str) -> SlurmNode:
    told = pairs(line)
    return SlurmNode(
        name=told["NodeName"],
        cpus=_whole(told.get("CPUEfctv")) or _whole(told.get("CPUTot")),
        memory_mib=max(0, _whole(told.get("RealMemory")) - _whole(told.get("MemSpecLimit"))),
        state=told.get("State", "UNKNOWN"),
        partitions=tuple(filter(None, told.get("Partitions", "").split(","))),
        gres=_unless_null(told.get("Gres")),
        features=_unless_null(told.get("ActiveFeatures")),
        disk_mib=_whole(told.get("TmpDisk")),
        arch=told.get("Arch", ""),
        address=told.get("NodeAddr", ""),
        reason=told.get("Reason", "").partition(" [")[0],
        load_percent=_hundredths(told.get("CPULoad", "")),
        free_mib=_whole(told["FreeMem"]) if told.get("FreeMem", "").isdigit() else None,
    )


def partition_of(line: str) -> SlurmPartition:
    told = pairs(line)
    return SlurmPartition(
        told["PartitionName"], told.get("State") == "UP", told.get("Default") == "YES", minutes(told.get("MaxTime", ""))
    )


def cluster(nodes: Iterable[SlurmNode], partitions: Iterable[SlurmPartition]) -> Cluster:
    known = sorted(nodes, key=lambda node: node.name)
    ours = tuple(_node(node) for node in known)
    lines = []
    for partition in partitions:
        members = [node for node, told in zip(ours, known, strict=True) if partition.name in told.partitions]
        largest: Resources = {}
        for node in members:
            for resource, amount in node.capacity.items():
                largest[resource] = max(amount, largest.get(resource, 0))
        names = tuple(node.name for node in members)
        lines.append(Line(partition.name, names, partition.minutes, partition.default, partition.up, largest))
    return Cluster(ours, tuple(lines))


def usage(nodes: Iterable[SlurmNode]) -> dict[str, Resources]:
    out = {}
    for node in nodes:
        used = {CPU: node.load_percent * 10}
        if node.free_mib is not None:
            used[MEMORY] = max(0, node.memory_mib - node.free_mib) * MIB
        out[node.name] = used
    return out


def _node(told: SlurmNode) -> Node:
    devices, gpu_type = gres(told.gres)
    words = told.words
    capacity = {CPU: told.cpus * 1000, MEMORY: told.memory_mib * MIB, **devices}
    if told.disk_mib:
        capacity[STORAGE] = told.disk_mib * MIB
    out = sorted(words & _OUT)
    return Node(
        name=told.name,
        backend="",
        capacity=capacity,
        labels={FEATURE + name: "true" for name in told.features.split(",") if _LABEL.fullmatch(name)},
        arch=told.arch,
        gpu_type=gpu_type,
        address=told.address,
        ready=not out,
        not_ready_reason=f"Slurm: {', '.join(out).lower()}{': ' + told.reason if told.reason else ''}" if out else "",
        cordoned=bool(words & _CLOSED),
    )


def gres(text: str) -> tuple[Resources, str]:
    """`gpu:a100:2(S:0-1),fpga:1`: amounts by name, gpu in thousandths; and the type of the GPUs if there is one."""
    amounts: Resources = {}
    types = set()
    for part in re.split(r",(?![^(]*\))", text):
        if found := _GRES.fullmatch(part.strip()):
            name = found["name"]
            amount = int(found["count"]) * _SCALE[found["suffix"]] * (1000 if name == GPU else 1)
            amounts[name] = amounts.get(name, 0) + amount
            if name == GPU and found["type"]:
                types.add(found["type"])
    return amounts, min(types) if len(types) == 1 else ""


def minutes(text: str) -> int:
    """`1-02:30:00`, `01:00:00`, `UNLIMITED`; 0 for no bound."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if not found:
        return 0
    days, hours, mins, _ = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + mins


def rest_node(told: Mapping[str, object]) -> SlurmNode:
    """One of slurmrestd's `nodes`."""
    flags = told.get("state_flags") or []
    state = "+".join([str(told.get("state") or "unknown"), *(str(flag) for flag in flags)])  # type: ignore[attr-defined]
    free = told.get("free_memory")
    return SlurmNode(
        name=str(told["name"]),
        cpus=_number(told.get("cpus")),
        memory_mib=_number(told.get("real_memory")),
        state=state,
        partitions=tuple(str(name) for name in told.get("partitions") or ()),  # type: ignore[attr-defined]
        gres=str(told.get("gres") or ""),
        features=str(told.get("active_features") or told.get("features") or ""),
        disk_mib=_number(told.get("temporary_disk")),
        arch=str(told.get("architecture") or ""),
        address=str(told.get("address") or ""),
        reason=str(told.get("reason") or ""),
        load_percent=_number(told.get("cpu_load")),
        free_mib=_number(free) if isinstance(free, int) and 0 <= free < 2**60 else None,
    )


def rest_partition(told: Mapping[str, object]) -> SlurmPartition:
    longest = told.get("max_time_limit")
    flags = told.get("flags") or []
    return SlurmPartition(
        str(told["name"]),
        told.get("state") == "UP",
        "default" in flags,  # type: ignore[operator]
        longest if isinstance(longest, int) and 0 < longest < 2**31 - 1 else 0,
    )


def _number(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**60 else 0


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


def _hundredths(text: str) -> int:
    found = re.fullmatch(r"(\d+)\.(\d\d)", text)
    return int(found[1]) * 100 + int(found[2]) if found else 0


def _unless_null(text: str | None) -> str:
    return "" if text in (None, "(null)", "N/A") else text


# ---------------------------------------------------------------------------------------- slurm states
# Slurm's words for how a job stands, in ours.


# Those that are not here are taken for alive: a word that we do not know must not end a run.
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_ENDED = {
    "COMPLETED": "",
    "FAILED": "",
    "CANCELLED": "killed",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "oom",
    "NODE_FAIL": "lost",
    "BOOT_FAIL": "lost",
    "PREEMPTED": "lost",
    "REVOKED": "lost",
}
_REASONS = {
    "CANCELLED": "it was cancelled in Slurm, and not by Hodei",
    "TIMEOUT": "it reached the time limit that it had in Slurm",
    "DEADLINE": "it reached its deadline in Slurm",
    "OUT_OF_MEMORY": "it went over its memory limit in Slurm",
}
# Slurm writes this "signal" for a step that ran out of memory.
_OOM_SIGNAL = 125


def phase_of(state: str) -> Phase:
    if state in _ENDED:
        return "ended"
    return "waiting" if state in _WAITING else "running"


def exit_code(text: str) -> int | None:
    """`768` (a wait status: exit 3) or `3:0` (exit code : signal); 128 + the signal's number if one ended it."""
    code, colon, signal = text.strip().partition(":")
    if not code.isdigit() or (colon and not signal.isdigit()):
        return None
    left, number = (int(code), int(signal)) if colon else (int(code) >> 8, int(code) & 127)
    if number == _OOM_SIGNAL:
        return 137
    return 128 + number if number else left


def seen_of(
    *,
    job: str,
    mark: str,
    state: str,
    reason: str = "",
    code: str = "",
    start_s: int = 0,
    end_s: int = 0,
    submit_s: int = 0,
    restarts: int = 0,
) -> Seen:
    word = (state.split() or [""])[0].rstrip("+")  # sacct: "CANCELLED by 0"
    phase = phase_of(word)
    number = exit_code(code) if phase == "ended" else None
    if word == "CANCELLED" and number == 0:
        number = None  # it did not end well: it did not end by itself
    return Seen(
        job=job,
        mark=mark,
        phase=phase,
        state=word,
        reason=_REASONS.get(word, "") if phase == "ended" else ("" if reason == "None" else reason),
        code=number,
        reason_code=_ENDED.get(word, ""),
        start_s=start_s,
        end_s=end_s if phase == "ended" else 0,
        submit_s=submit_s,
        restarts=restarts,
    )
