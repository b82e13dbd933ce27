"""PBS's words in ours: states of jobs, sizes, times, nodes. Built on what OpenPBS 23.06 prints with `-F json`."""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Mapping
from typing import Any

from hodei.backends.hpc.ports import Cluster, Line, Phase, Seen
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
# Negative exit statuses are PBS's own (JOB_EXEC_... in its job.h): a reason code, and what happened. `lost`: it was not the
# job's fault, and another try can go well; `error`: the site or the account is not as it must be.
_BY_PBS = {
    -1: ("error", "PBS could not start it, before its files were made"),
    -2: ("error", "PBS could not start it, after its files were made"),
    -3: ("lost", "PBS could not start it, and would try again"),
    -4: ("lost", "its node was started anew"),
    -5: ("lost", "its node was started anew"),
    -6: ("lost", "its node was started anew"),
    -7: ("lost", "PBS could not restart it from its checkpoint"),
    -8: ("lost", "PBS could not start it, and would try again"),
    -9: ("error", "PBS could not start it"),
    -10: ("error", "the account is not known on its node"),
    -11: ("lost", "PBS ended it to run it again"),
    -12: ("lost", "PBS checkpointed and ended it"),
    -13: ("error", "PBS has no valid password for the account"),
    -14: ("lost", "PBS lost the connection between its nodes"),
    -15: ("lost", "PBS took it back to restart it from its checkpoint"),
    -16: ("lost", "a hook of the site took it back"),
    -17: ("error", "a hook of the site refused it"),
    -18: ("lost", "a hook of the site took it back"),
    -19: ("killed", "a hook of the site deleted it"),
    -20: ("lost", "PBS lost the connection to its node"),
    -21: ("error", "PBS found its own folders unsafe on its node"),
    -22: ("lost", "a hook of the site failed, or took too long"),
    -23: ("error", "PBS had no Kerberos credentials for it"),
    -24: ("killed", "it used more CPUs at once than it asked for"),
    -25: ("killed", "it used more CPUs on average than it asked for"),
    -26: ("oom", "it went over its virtual memory limit in PBS"),
    -27: ("oom", "it went over its memory limit in PBS"),
    -28: ("timeout", "it used up the CPU time that it had in PBS"),
    -29: ("timeout", "it reached the time limit that it had in PBS"),
    -30: ("lost", "its nodes could not be brought together"),
    -31: ("oom", "it went over its huge page limit in PBS"),
    -32: ("lost", "PBS had lost sight of it, and took it back"),
}
_SIZE = re.compile(r"(\d+)\s*([kmgtp]?)([bw]?)", re.IGNORECASE)
_SCALE = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
_OUT = ("down", "state-unknown", "stale", "unresolvable", "init", "provisioning", "sleep")
_CLOSED = ("offline", "maintenance", "resv-exclusive")
FEATURES = ("arch", "host", "vnode", "ncpus", "mem", "vmem", "ngpus", "naccelerators", "hbmem", "accelerator_memory")
MARK = "HODEI_MARK"
DELETED = "terminated by"
# Said in the comment, by nodes that end a job with a signal: "walltime 65 exceeded limit 60", "exceeded resource mem".
_OVER = re.compile(
    r"\b(?P<a>walltime|cput|vmem|mem|ncpus)\b[^,;]*exceeded limit|exceeded resource (?P<b>\w+)", re.IGNORECASE
)
_LIMITS = {"walltime": -29, "cput": -28, "vmem": -26, "mem": -27, "ncpus": -25, "hpmem": -31}


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
        return None, *_BY_PBS.get(status, ("lost", f"PBS ended it with status {status}"))
    exit_code = 128 + status - 256 if status >= 256 else status
    if status and (over := _OVER.search(comment)) and (limit := _LIMITS.get((over["a"] or over["b"]).lower())):
        return exit_code, *_BY_PBS[limit]
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
    lines = []
    for name, queue in queues.items():
        ends, problem = destinations(name, queues)
        bounds = [minutes((queues[end].get("resources_max") or {}).get("walltime")) for end in (name, *ends)]
        # Its own bound if it has one, else that of the most patient queue that it leads to.
        bound = bounds[0] or (0 if 0 in bounds[1:] else max(bounds[1:], default=0))
        closed = "" if _works(queue) else "it is disabled or stopped in PBS"
        lines.append(
            Line(
                name, names, bound, name == default, not problem and not closed, largest,
                usable=not problem, why=problem or closed,
            )
        )  # fmt: skip
    return Cluster(tuple(ours), tuple(lines))


def destinations(name: str, queues: Mapping[str, Any]) -> tuple[list[str], str]:
    """The queues in which jobs that are handed in to this one may run, if it is one that leads elsewhere; and why it cannot be
    used at all, "" if it can."""
    queue = queues[name]
    if queue.get("queue_type") != "Route":
        if queue.get("from_route_only") != "True":
            return [], ""
        ways = [way for way in queues if way != name and name in _route(queues[way])]
        instead = f"; hand in to {' or '.join(sorted(ways))}" if ways else ", and none leads there"
        return [], f"it takes jobs from routing queues only{instead}"
    ends, seen, ahead = list[str](), {name}, _route(queue)
    while ahead:
        way = ahead.pop(0)
        if way in seen:
            continue
        seen.add(way)
        if way not in queues:
            return [], f"it is a routing queue that leads to {way}, where a job cannot be followed"
        if queues[way].get("queue_type") == "Route":
            ahead += _route(queues[way])
        elif _works(queues[way]):
            ends.append(way)
    return ends, "" if ends else "it is a routing queue, and no queue that it leads to takes jobs"


def _route(queue: Mapping[str, Any]) -> list[str]:
    told = queue.get("route_destinations") or ""
    words = told if isinstance(told, list) else str(told).split(",")
    return [str(word).strip() for word in words if str(word).strip()]


def _works(queue: Mapping[str, Any]) -> bool:
    return queue.get("enabled") == "True" and queue.get("started") == "True"


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
