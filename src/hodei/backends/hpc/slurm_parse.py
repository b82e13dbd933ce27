"""Parses nodes, partitions and jobs of Slurm, as printed by its commands or sent by slurmrestd."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from msgspec import Struct

from hodei.backends.hpc.batch_options import slurm_seconds
from hodei.backends.hpc.ports import Cluster, JobStatus, Partition, Phase, Submission, largest_capacity
from hodei.model.errors import BackendError, BackendRefused
from hodei.model.node import Node, architecture
from hodei.model.resources import CPU, GPU, MEMORY, STORAGE, Resources

MIB = 1 << 20
FEATURE = "slurm.hodei.io/feature-"
_PAIR = re.compile(r"([A-Z][\w:/]*)=(.*?)(?=\s+[A-Z][\w:/]*=|\s*$)")
_GRES = re.compile(
    r"(?P<name>[A-Za-z0-9_-]+)(?::(?P<type>[A-Za-z][\w.-]*))?:(?P<count>\d+)(?P<suffix>[KMGTP]?)(?:\(.*\))?"
)
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,40}[A-Za-z0-9])?")
_SCALE = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
# Parts of a node's state, such as IDLE+DRAIN.
_NOT_READY = {
    "DOWN",
    "FAIL",
    "ERROR",
    "UNKNOWN",
    "NOT_RESPONDING",
    "FUTURE",
    "POWERED_DOWN",
    "POWERING_DOWN",
    "INVALID_REG",
}
_CORDONED = {"DRAIN", "DRAINED", "DRAINING", "MAINT", "MAINTENANCE", "FAILING", "REBOOT_REQUESTED", "REBOOT_ISSUED"}


class SlurmNode(Struct, frozen=True):
    """The fields that commands and REST both provide."""

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
    def states(self) -> set[str]:
        return set(re.split(r"[+*~#!%$@^-]+|\s+", self.state.upper().replace("*", "+NOT_RESPONDING"))) - {""}


class SlurmPartition(Struct, frozen=True):
    name: str
    up: bool = True
    default: bool = False
    max_minutes: int = 0


def _pairs(line: str) -> dict[str, str]:
    """`Key=value` pairs of scontrol; values may contain spaces."""
    return {key: value.strip() for key, value in _PAIR.findall(line)}


def parse_node(line: str) -> SlurmNode:
    """A line of `scontrol --oneliner show node`."""
    fields = _pairs(line)
    return SlurmNode(
        name=fields["NodeName"],
        cpus=_integer(fields.get("CPUEfctv")) or _integer(fields.get("CPUTot")),
        memory_mib=max(0, _integer(fields.get("RealMemory")) - _integer(fields.get("MemSpecLimit"))),
        state=fields.get("State", "UNKNOWN"),
        partitions=tuple(filter(None, fields.get("Partitions", "").split(","))),
        gres=_unless_null(fields.get("Gres")),
        features=_unless_null(fields.get("ActiveFeatures")),
        disk_mib=_integer(fields.get("TmpDisk")),
        arch=architecture(fields.get("Arch", "")),
        address=fields.get("NodeAddr", ""),
        reason=fields.get("Reason", "").partition(" [")[0],
        load_percent=_hundredths(fields.get("CPULoad", "")),
        free_mib=_integer(fields["FreeMem"]) if fields.get("FreeMem", "").isdigit() else None,
    )


def parse_partition(line: str) -> SlurmPartition:
    """A line of `scontrol --oneliner show partition`."""
    fields = _pairs(line)
    minutes = (slurm_seconds(fields.get("MaxTime", "")) or 0) // 60
    return SlurmPartition(fields["PartitionName"], fields.get("State") == "UP", fields.get("Default") == "YES", minutes)


def cluster(nodes: Iterable[SlurmNode], partitions: Iterable[SlurmPartition]) -> Cluster:
    slurm_nodes = sorted(nodes, key=lambda node: node.name)
    converted = tuple(_node(node) for node in slurm_nodes)
    out = []
    for each in partitions:
        members = [node for node, slurm in zip(converted, slurm_nodes, strict=True) if each.name in slurm.partitions]
        names = tuple(node.name for node in members)
        out.append(Partition(each.name, names, each.max_minutes, each.default, each.up, largest_capacity(members)))
    return Cluster(converted, tuple(out))


def usage(nodes: Iterable[SlurmNode]) -> dict[str, Resources]:
    out = {}
    for node in nodes:
        used = {CPU: node.load_percent * 10}
        if node.free_mib is not None:
            used[MEMORY] = max(0, node.memory_mib - node.free_mib) * MIB
        out[node.name] = used
    return out


def _node(node: SlurmNode) -> Node:
    devices, gpu_type = parse_gres(node.gres)
    capacity = {CPU: node.cpus * 1000, MEMORY: node.memory_mib * MIB, **devices}
    if node.disk_mib:
        capacity[STORAGE] = node.disk_mib * MIB
    problems = sorted(node.states & _NOT_READY)
    reason = f"Slurm: {', '.join(problems).lower()}{': ' + node.reason if node.reason else ''}"
    return Node(
        name=node.name,
        backend="",
        capacity=capacity,
        labels={FEATURE + name: "true" for name in node.features.split(",") if _LABEL.fullmatch(name)},
        arch=node.arch,
        gpu_type=gpu_type,
        address=node.address,
        ready=not problems,
        not_ready_reason=reason if problems else "",
        cordoned=bool(node.states & _CORDONED),
    )


def parse_gres(text: str) -> tuple[Resources, str]:
    """`gpu:a100:2(S:0-1),fpga:1`: amounts by name, gpu in thousandths, and the GPU type if there is exactly one."""
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


def rest_node(fields: Mapping[str, object]) -> SlurmNode:
    """One of slurmrestd's `nodes`."""
    flags = fields.get("state_flags") or []
    state = "+".join([str(fields.get("state") or "unknown"), *(str(flag) for flag in flags)])  # type: ignore[attr-defined]
    free = fields.get("free_memory")
    return SlurmNode(
        name=str(fields["name"]),
        cpus=_number(fields.get("cpus")),
        memory_mib=_number(fields.get("real_memory")),
        state=state,
        partitions=tuple(str(name) for name in fields.get("partitions") or ()),  # type: ignore[attr-defined]
        gres=str(fields.get("gres") or ""),
        features=str(fields.get("active_features") or fields.get("features") or ""),
        disk_mib=_number(fields.get("temporary_disk")),
        arch=architecture(str(fields.get("architecture") or "")),
        address=str(fields.get("address") or ""),
        reason=str(fields.get("reason") or ""),
        load_percent=_number(fields.get("cpu_load")),
        free_mib=_number(free) if isinstance(free, int) and 0 <= free < 2**60 else None,
    )


def rest_partition(fields: Mapping[str, object]) -> SlurmPartition:
    limit = fields.get("max_time_limit")
    return SlurmPartition(
        str(fields["name"]),
        fields.get("state") == "UP",
        "default" in (fields.get("flags") or []),  # type: ignore[operator]
        limit if isinstance(limit, int) and 0 < limit < 2**31 - 1 else 0,
    )


def _number(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**60 else 0


def _integer(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


def _hundredths(text: str) -> int:
    found = re.fullmatch(r"(\d+)\.(\d\d)", text)
    return int(found[1]) * 100 + int(found[2]) if found else 0


def _unless_null(text: str | None) -> str:
    return "" if text in (None, "(null)", "N/A") else text


# States that are not listed count as running: an unknown state must not end a run.
_PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_ENDED = {
    "COMPLETED": "", "FAILED": "", "CANCELLED": "killed", "TIMEOUT": "timeout", "DEADLINE": "timeout", "OUT_OF_MEMORY": "oom",
    "NODE_FAIL": "lost", "BOOT_FAIL": "lost", "PREEMPTED": "lost", "REVOKED": "lost",
}  # fmt: skip
_REASONS = {
    "CANCELLED": "it was cancelled in Slurm, not by Hodei",
    "TIMEOUT": "it reached its time limit in Slurm",
    "DEADLINE": "it reached its deadline in Slurm",
    "OUT_OF_MEMORY": "it exceeded its memory limit in Slurm",
}
# Slurm reports this "signal" for a step that ran out of memory.
_OOM_SIGNAL = 125


def phase_of(state: str) -> Phase:
    if state in _ENDED:
        return "ended"
    return "pending" if state in _PENDING else "running"


def parse_exit_code(text: str) -> int | None:
    """`768` (a wait status: exit 3) or `3:0` (exit code : signal); 128 + n for signal n."""
    code, colon, signal = text.strip().partition(":")
    if not code.isdigit() or (colon and not signal.isdigit()):
        return None
    left, number = (int(code), int(signal)) if colon else (int(code) >> 8, int(code) & 127)
    if number == _OOM_SIGNAL:
        return 137
    return 128 + number if number else left


def job_status(
    *,
    job: str,
    mark: str,
    state: str,
    reason: str = "",
    code: str = "",
    start_s: int = 0,
    end_s: int = 0,
    submit_s: int = 0,
) -> JobStatus:
    name = (state.split() or [""])[0].rstrip("+")  # sacct: "CANCELLED by 0"
    phase = phase_of(name)
    exit_code = parse_exit_code(code) if phase == "ended" else None
    if name == "CANCELLED" and exit_code == 0:
        exit_code = None  # it was cancelled before it could exit
    return JobStatus(
        job=job,
        mark=mark,
        phase=phase,
        state=name,
        reason=_REASONS.get(name, "") if phase == "ended" else ("" if reason == "None" else reason),
        exit_code=exit_code,
        reason_code=_ENDED.get(name, ""),
        start_s=start_s,
        end_s=end_s if phase == "ended" else 0,
        submit_s=submit_s,
    )


# Errors of a submission that a retry does not change. All others may pass.
_PERMANENT = re.compile(
    r"invalid (partition|account|qos|generic resource|feature|wckey|node name|job id|time limit|license|reservation|"
    r"cluster)|requested node config|more processors requested|memory specification can ?not|time limit is invalid|"
    r"not permitted|access.*denied|requested partition configuration|node count specification|unrecognized option|"
    r"invalid option|unknown key|disabled key|contains DOS line|invalid argument|not valid|is invalid|requested gres option",
    re.IGNORECASE,
)


def rejection(message: str) -> BackendError | BackendRefused:
    """The error for a submission that slurmctld did not accept."""
    if _PERMANENT.search(message):
        return BackendRefused(f"Slurm refuses the job: {message}", hint="see docs/how-to/slurm.md")
    return BackendError(f"Slurm did not accept the job: {message}")


def gres_request(submission: Submission) -> str:
    parts = [f"{name}:{amount}" for name, amount in sorted(submission.devices.items())]
    if submission.gpus:
        parts.insert(0, ":".join(filter(None, ("gpu", submission.gpu_type, str(submission.gpus)))))
    return ",".join(parts)


def escape_path(path: str) -> str:
    """Slurm expands patterns that begin with %."""
    return path.replace("%", "%%")
