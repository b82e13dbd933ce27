"""PBS's words in ours: states of jobs, sizes, times, nodes. Built on what OpenPBS 23.06 prints with `-F json`."""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Mapping
from typing import Any

from hodei.backends.hpc.queue import Cluster, Line, Phase, Seen
from hodei.model.node import Node
from hodei.model.resources import CPU, GPU, MEMORY, Resources

# Those that are not here are taken for alive. M: moved to another server; X: an ended element of an array.
_PHASES: dict[str, Phase] = {
    "Q": "waiting", "H": "waiting", "W": "waiting", "T": "waiting", "M": "waiting", "B": "running", "R": "running",
    "E": "running", "S": "running", "U": "running", "F": "ended", "X": "ended", "C": "ended",
}  # fmt: skip
_WORDS = {
    "Q": "queued", "H": "held", "W": "waiting for its time", "T": "being moved", "R": "running", "E": "exiting",
    "S": "suspended", "U": "suspended while the node is in use", "F": "finished", "M": "moved", "B": "begun",
}  # fmt: skip
# PBS ended it, and the job itself could do nothing about it.
_FOR_US = {
    -1: ("failed", "error", "PBS could not start it: the job's files"),
    -2: ("failed", "error", "PBS could not start it: after its files were made"),
    -3: ("lost", "lost", "PBS could not start it, and would try again"),
    -4: ("lost", "lost", "its node was restarted"),
    -5: ("lost", "lost", "its node was restarted"),
    -6: ("lost", "lost", "its node was restarted"),
    -10: ("failed", "error", "PBS could not start it: the account is not known on the node"),
    -11: ("lost", "lost", "PBS ended it to run it again"),
    -12: ("failed", "error", "PBS could not start it: its output could not be opened"),
    -13: ("failed", "error", "PBS could not start it: there was no room for its files"),
    -16: ("lost", "lost", "its node failed"),
    -23: ("lost", "lost", "its node failed"),
    -29: ("failed", "timeout", "it reached the time limit that it had in PBS"),
}
_SIZE = re.compile(r"(\d+)\s*([kmgtp]?)([bw]?)", re.IGNORECASE)
_SCALE = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
_OUT = ("down", "state-unknown", "stale", "unresolvable", "init", "provisioning", "sleep")
_CLOSED = ("offline", "maintenance", "resv-exclusive")
FEATURES = ("arch", "host", "vnode", "ncpus", "mem", "vmem", "ngpus", "naccelerators", "hbmem", "accelerator_memory")
MARK = "HODEI_MARK"
DELETED = "terminated by"
WALLTIME = re.compile(r"walltime .*exceeded limit", re.IGNORECASE)
MEMORY_EXCEEDED = re.compile(r"(mem|vmem) .*exceeded limit", re.IGNORECASE)


def seen_of(number: str, job: Mapping[str, Any]) -> Seen:
    state = str(job.get("job_state", ""))
    phase = _PHASES.get(state, "running")
    variables = job.get("Variable_List") or {}
    comment = str(job.get("comment") or "")
    status = job.get("Exit_status")
    code, reason_code, reason = None, "", comment
    if phase == "ended":
        code, reason_code, reason = ended(status if isinstance(status, int) else None, comment)
    return Seen(
        job=number,
        mark=str(variables.get(MARK) or "") if isinstance(variables, Mapping) else "",
        phase=phase,
        state=_WORDS.get(state, state),
        reason=reason,
        code=code,
        reason_code=reason_code,
        start_s=seconds(job.get("stime")),
        end_s=seconds(job.get("obittime") or job.get("mtime")) if phase == "ended" else 0,
        submit_s=seconds(job.get("ctime")),
        restarts=max(0, int(job.get("run_count") or 1) - 1),
    )


def ended(status: int | None, comment: str) -> tuple[int | None, str, str]:
    """Exit code, reason code and reason of a job that PBS has finished. 256 + n (on some systems 128 + n): signal n."""
    if status is None:
        # It never ran: somebody deleted it while it waited.
        return None, "killed", comment or "it was deleted in PBS before it began"
    if status < 0:
        _, code, reason = _FOR_US.get(status, ("lost", "lost", f"PBS ended it with status {status}"))
        return None, code, reason
    exit_code = 128 + status - 256 if status >= 256 else status
    if WALLTIME.search(comment):
        return exit_code, "timeout", "it reached the time limit that it had in PBS"
    if MEMORY_EXCEEDED.search(comment):
        return exit_code, "oom", "it went over its memory limit in PBS"
    if DELETED in comment and status >= 256:
        return exit_code, "killed", "it was deleted in PBS, and not by Hodei"
    return exit_code, "", ""


def seconds(text: object) -> int:
    """`Sun Nov 15 18:42:00 2026`, in the time zone in which the command was run: ours runs in UTC."""
    if isinstance(text, int):
        return text
    try:
        return calendar.timegm(time.strptime(str(text or ""), "%a %b %d %H:%M:%S %Y"))
    except ValueError:
        return 0


def size(text: object) -> int:
    """`4592kb`, `4gb`, `500mb`; a bare number is bytes, and w words of eight."""
    found = _SIZE.fullmatch(str(text).strip())
    if not found:
        return 0
    return int(found[1]) * _SCALE[found[2].lower()] * (8 if found[3].lower() == "w" else 1)


def cluster(nodes: Mapping[str, Any], queues: Mapping[str, Any], default: str = "") -> Cluster:
    """From `pbsnodes -av` and `qstat -Qf`. Vnodes that stand for a host of several (no ncpus of its own) are left out."""
    ours = []
    for name in sorted(nodes):
        told = nodes[name]
        has = told.get("resources_available") or {}
        if not _number(has.get("ncpus")):
            continue
        words = [word.strip() for word in str(told.get("state", "")).split(",")]
        out = [word for word in words if word in _OUT]
        comment = f": {told['comment']}" if told.get("comment") else ""
        ours.append(
            Node(
                name=name,
                backend="",
                capacity=capacity(has),
                labels={"pbs.hodei.io/host": str(has.get("host") or told.get("Mom") or name)},
                arch="x86_64" if has.get("arch") == "linux" else "",
                address=str(told.get("Mom") or ""),
                ready=not out,
                not_ready_reason=f"PBS: {', '.join(out)}{comment}" if out else "",
                cordoned=any(word in _CLOSED for word in words),
            )
        )
    largest: Resources = {}
    for node in ours:
        for resource, amount in node.capacity.items():
            largest[resource] = max(amount, largest.get(resource, 0))
    names = tuple(node.name for node in ours)
    lines = tuple(
        Line(
            name,
            names,
            minutes((queue.get("resources_max") or {}).get("walltime")),
            name == default,
            queue.get("enabled") == "True"
            and queue.get("started") == "True"
            and queue.get("queue_type") == "Execution",
            largest,
        )
        for name, queue in queues.items()
    )
    return Cluster(tuple(ours), lines)


def capacity(has: Mapping[str, Any]) -> Resources:
    out = {CPU: _number(has.get("ncpus")) * 1000, MEMORY: size(has.get("mem"))}
    if gpus := _number(has.get("ngpus")):
        out[GPU] = gpus * 1000
    for name, amount in has.items():
        if name not in FEATURES and isinstance(amount, int) and amount > 0:
            out[name] = amount
    return out


def minutes(text: object) -> int:
    """`01:00:00` or seconds; 0 for no bound."""
    parts = str(text or "").split(":")
    if not all(part.isdigit() for part in parts):
        return 0
    total = 0
    for part in parts:
        total = total * 60 + int(part)
    return total // 60


def _number(value: object) -> int:
    return int(str(value)) if str(value).isdigit() else 0
