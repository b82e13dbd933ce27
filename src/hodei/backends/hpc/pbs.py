"""PBS (OpenPBS, PBS Professional): settings, backend, and the batch system by its commands (qsub, qstat, qdel, qsig, pbsnodes).

All queries use `-F json`; parsing follows the output of OpenPBS 23.06. A job is identified by the variable HODEI_MARK in its
Variable_List. Command lines contain only checked text of users.

PBS runs a batch script below a login shell, which a TERM for the job ends at once. PBS then takes the job for ended and kills
the rest: no grace period. So PBS is given a program (`qsub -- ...`), which becomes the first process of the job: a login shell
that replaces itself with the script, which handles TERM. The script is stored next to the run's output.
See docs/how-to/pbs.md.
"""

from __future__ import annotations

import asyncio
import calendar
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from hodei.backends.base import BackendContext
from hodei.backends.hpc.backend import HpcBackend
from hodei.backends.hpc.batch_options import PbsOptions, pbs_minutes
from hodei.backends.hpc.commands import CommandResult, Commands
from hodei.backends.hpc.nodes import ClusterSettings, Mode, check_settings
from hodei.backends.hpc.ports import (
    Cluster,
    JobStatus,
    OutcomeUnknown,
    Partition,
    Phase,
    Submission,
    largest_capacity,
)
from hodei.backends.hpc.script import SHELL
from hodei.model.backend import Capabilities, ExecResult
from hodei.model.config import Span
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused
from hodei.model.node import Node
from hodei.model.resources import CPU, GPU, MEMORY, Resources


class Settings(ClusterSettings, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`queues`: those that jobs may use, in order of preference. `conf`: replaces /etc/pbs.conf."""

    mode: Mode = "delegate"
    poll: Span = "5s"
    queues: tuple[str, ...] = ()
    project: str = ""
    allow_projects: tuple[str, ...] = ()


def capabilities(mode: Mode) -> Capabilities:
    delegate = mode == "delegate"
    return Capabilities(gpus=True, limits=True, checkpoint=True, suspend=True, delegates=delegate, expects=delegate)


def make(name: str, settings: Settings, context: BackendContext) -> HpcBackend:
    """InvalidInput if the settings are invalid."""
    check_settings(name, "pbs", settings)
    env = {"PBS_CONF_FILE": settings.conf} if settings.conf else {}
    system = PbsCommands(Commands(settings.commands, env), requeue=settings.requeue)
    options = PbsOptions(
        fixed={"account": settings.account, "project": settings.project},
        allowed={"account": settings.allow_accounts, "project": settings.allow_projects},
    )
    available = capabilities(settings.mode)
    return HpcBackend(name, "pbs", "PBS", settings, context, system, settings.queues, options.of, available)


SUBMIT_TIMEOUT_S = 25.0
QUERY_TIMEOUT_S = 20.0
# For more jobs than this, all jobs are requested.
MAX_JOB_IDS = 200
MARK = "HODEI_MARK"
# Exit codes of qsub: PBS error codes modulo 256 (15010 is 162), or errno (ECONNREFUSED is 111).
# Temporary: the server is not ready, the queue is closed or full, a credential has expired.
_TEMPORARY = {162, 163, 171, 172, 173, 176, 196, 198}
# No connection, or the server is shutting down.
_NOT_REACHED = {111, 113, 185, 186, 212}
_NO_CONNECTION = re.compile(r"cannot connect to server|connection refused|no route to host", re.IGNORECASE)
# The connection broke: broken pipe, connection reset, timed out, a protocol error.
_OUTCOME_UNKNOWN = {32, 104, 110, 183, 208}
_CONNECTION_BROKE = re.compile(
    r"communicat|connection|timed out|timeout|protocol|broken pipe|end of file|premature", re.IGNORECASE
)
_UNKNOWN_JOB, _FINISHED_JOB = 153, 35
# The login shell reads the profile and replaces itself with a shell that ignores functions and aliases defined there.
_LEAVE_LOGIN_SHELL = f'builtin shopt -q login_shell && builtin exec -- {SHELL} -p "$0" "$@"'
_JOB_ID = re.compile(r"\d+(?:\[\d*\])?\.\S+")


class PbsCommands:
    """`ports.BatchSystem` for PBS."""

    uses_commands = True
    max_array_size = 1
    job_variable = "PBS_JOBID"
    node_variable = "HOSTNAME"
    element_id = ""

    def __init__(self, commands: Commands, *, requeue: bool = False) -> None:
        self._commands, self._requeue = commands, requeue

    def inherit(self, lock: int) -> None:
        self._commands.inherited_fds = (lock,)

    async def close(self) -> None:
        """Nothing is kept open."""

    async def ping(self) -> str:
        for name, server in (await self._query("Server", "qstat", "-B", "-f", "-F", "json")).items():
            return f"PBS server {name}, {server.get('pbs_version', '')}, {server.get('server_state', '')}"
        raise BackendError("qstat -B lists no PBS server", hint="check that the PBS server is up")

    async def cluster(self) -> Cluster:
        nodes = await self._query("nodes", "pbsnodes", "-a", "-v", "-F", "json")
        queues = await self._query("Queue", "qstat", "-Q", "-f", "-F", "json")
        servers = await self._query("Server", "qstat", "-B", "-f", "-F", "json")
        default = next((str(server.get("default_queue") or "") for server in servers.values()), "")
        return parse_cluster(nodes, queues, default)

    async def usage(self) -> dict[str, Resources]:
        return {}

    async def submit(self, submission: Submission) -> str:
        await asyncio.to_thread(write_script, submission)
        command = qsub_command(submission, requeue=self._requeue)
        done = await self._commands.run(command, timeout_s=SUBMIT_TIMEOUT_S, mutating=True)
        if done.code == 0:
            job = done.stdout.decode(errors="replace").strip()
            if _JOB_ID.fullmatch(job):
                return job
            raise OutcomeUnknown(f"qsub printed {job[:80]!r} instead of a job id")
        if done.code is None or done.code < 0:
            raise OutcomeUnknown(f"qsub: {done.message}")
        if done.code in _NOT_REACHED or _NO_CONNECTION.search(done.message):
            raise BackendError(f"the PBS server cannot be reached: {done.message}", code=NOT_REACHED)
        if done.code in _OUTCOME_UNKNOWN or _CONNECTION_BROKE.search(done.message):
            raise OutcomeUnknown(f"qsub: {done.message}")
        if done.code in _TEMPORARY:
            raise BackendError(f"PBS did not accept the job: {done.message}")
        raise BackendRefused(f"PBS refuses the job: {done.message}", hint="see docs/how-to/pbs.md")

    async def submit_array(self, submissions: Sequence[Submission], mark: str) -> list[str]:
        return [await self.submit(submission) for submission in submissions]

    async def status(self, jobs: Collection[str]) -> list[JobStatus]:
        if not jobs:
            return []
        ids = jobs if len(jobs) <= MAX_JOB_IDS else ()
        return [status for status in await self._qstat(*ids) if status.job in jobs]

    async def marked(self, prefix: str) -> list[JobStatus]:
        return [status for status in await self._qstat() if status.mark.startswith(prefix)]

    async def _qstat(self, *jobs: str) -> list[JobStatus]:
        found = await self._query("Jobs", "qstat", "-x", "-f", "-F", "json", *jobs)
        return [job_status(id, fields) for id, fields in found.items()]

    async def history(self, jobs: Collection[str]) -> list[JobStatus]:
        return []  # `qstat -x` includes it

    async def expected_starts(self) -> dict[str, int]:
        jobs = await self._query("Jobs", "qstat", "-f", "-F", "json")
        starts = {
            id: parse_time((fields.get("estimated") or {}).get("start_time"))
            for id, fields in jobs.items()
            if fields.get("job_state") == "Q"
        }
        return {id: at_s * 1000 for id, at_s in starts.items() if at_s}

    async def cancel(self, jobs: Sequence[str]) -> None:
        for job in jobs:
            await self._act("qdel", job)

    async def signal(self, jobs: Sequence[str], signal: str) -> None:
        for job in jobs:
            await self._act("qsig", "-s", f"SIG{signal}", job)

    async def _act(self, *command: str) -> None:
        done = await self._commands.run(command, timeout_s=QUERY_TIMEOUT_S)
        if done.code not in (0, _UNKNOWN_JOB, _FINISHED_JOB):
            raise BackendError(f"{command[0]}: {done.message}")

    async def execute_on(self, node: str, partition: str, command: Sequence[str], timeout_s: float) -> ExecResult:
        raise BackendRefused("PBS cannot run a command on a node", hint="log in to the node")

    async def execute(self, job: str, command: Sequence[str], timeout_s: float) -> ExecResult:
        raise BackendRefused("PBS cannot run a command in a job", hint="read the run's log instead")

    async def _query(self, key: str, *command: str) -> dict[str, Any]:
        """The objects under `key` in the output, by name. Unknown and finished jobs are not errors."""
        done = await self._commands.run(command, timeout_s=QUERY_TIMEOUT_S, env={"TZ": "UTC"})
        ignored = (_UNKNOWN_JOB, _FINISHED_JOB) if key == "Jobs" else ()
        if done.code not in (0, *ignored):
            raise BackendError(f"{command[0]}: {done.message}", hint="check that the PBS server is up: qstat -B")
        return parse_json(command[0], done).get(key) or {}


def parse_json(command: str, done: CommandResult) -> dict[str, Any]:
    """Old versions print control characters of users' variables unescaped."""
    text = re.sub(rb"[\x00-\x08\x0b-\x1f]", b" ", done.stdout[max(done.stdout.find(b"{"), 0) :])
    try:
        found = msgspec.json.decode(text)
    except msgspec.MsgspecError as error:
        raise BackendError(f"{command} did not print JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def qsub_command(submission: Submission, *, requeue: bool) -> tuple[str, ...]:
    chunk = [f"ncpus={submission.cpus}", f"mem={submission.memory_mib}mb"]
    if submission.gpus:
        chunk.append(f"ngpus={submission.gpus}")
    chunk += [f"{name}={amount}" for name, amount in sorted(submission.devices.items())]
    if submission.node:
        chunk.append(f"vnode={submission.node}")
    name, select = pbs_name(submission.name), f"select=1:{':'.join(chunk)}"
    command = ["qsub", "-N", name, "-q", submission.partition, "-l", select]
    if submission.minutes:
        command += ["-l", f"walltime={submission.minutes // 60:02}:{submission.minutes % 60:02}:00"]
    command += ["-o", submission.stdout, "-e", submission.stderr, "-k", "doe", "-r", "y" if requeue else "n"]
    command += ["-m", "n", "-v", f"{MARK}={submission.mark}"]
    for name, value in submission.options:
        command += [f"-{name}", value] if value else [f"-{name}"]
    # PBS joins these arguments for a shell, so they contain no character that a shell interprets.
    return (*command, "--", SHELL, "-l", submission.script_file, submission.claim)


def write_script(submission: Submission) -> None:
    """Replaces an earlier script, which may be half written. Blocks."""
    try:
        temporary = f"{submission.script_file}.new"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            first, _, rest = submission.script.partition("\n")
            file.write(f"{first}\n{_LEAVE_LOGIN_SHELL}\n{rest}".encode())
        os.rename(temporary, submission.script_file)
    except OSError as error:
        raise BackendError(
            f"the script {submission.script_file} cannot be written: {error.strerror}",
            hint="check that the output folder exists and is writable",
            code=NOT_REACHED,
        ) from None


def pbs_name(name: str) -> str:
    """PBS takes no spaces in a name, and a letter or digit first."""
    return re.sub(r"^[^A-Za-z0-9]+", "", re.sub(r"[^A-Za-z0-9_.+-]", "_", name)) or "hodei"


# States that are not listed count as running. M: moved to another server; X: an ended element of an array.
_PHASES: dict[str, Phase] = {
    **dict.fromkeys("QHWTM", "pending"), **dict.fromkeys("BRESU", "running"), **dict.fromkeys("FXC", "ended"),
}  # fmt: skip
_STATES = {
    "Q": "queued", "H": "held", "W": "waiting for its start time", "T": "in transit", "R": "running", "E": "exiting",
    "S": "suspended", "U": "suspended while the node is in use", "F": "finished", "M": "moved", "B": "begun",
}  # fmt: skip
# Negative exit statuses are PBS's own (JOB_EXEC_... in its job.h): a reason code, and what happened. `lost`: not the job's
# fault, another attempt may succeed; `error`: the site or the account must be repaired.
_PBS_STATUSES = {
    -1: ("error", "PBS could not start it, before its files were created"),
    -2: ("error", "PBS could not start it, after its files were created"),
    -3: ("lost", "PBS could not start it, and would retry"),
    -4: ("lost", "its node was restarted"),
    -5: ("lost", "its node was restarted"),
    -6: ("lost", "its node was restarted"),
    -7: ("lost", "PBS could not restart it from its checkpoint"),
    -8: ("lost", "PBS could not start it, and would retry"),
    -9: ("error", "PBS could not start it"),
    -10: ("error", "the account does not exist on its node"),
    -11: ("lost", "PBS ended it to rerun it"),
    -12: ("lost", "PBS checkpointed and ended it"),
    -13: ("error", "PBS has no valid password for the account"),
    -14: ("lost", "PBS lost the connection between its nodes"),
    -15: ("lost", "PBS requeued it to restart it from its checkpoint"),
    -16: ("lost", "a hook of the site requeued it"),
    -17: ("error", "a hook of the site refused it"),
    -18: ("lost", "a hook of the site requeued it"),
    -19: ("killed", "a hook of the site deleted it"),
    -20: ("lost", "PBS lost the connection to its node"),
    -21: ("error", "PBS found its own folders unsafe on its node"),
    -22: ("lost", "a hook of the site failed or timed out"),
    -23: ("error", "PBS had no Kerberos credentials for it"),
    -24: ("killed", "it used more CPUs at once than requested"),
    -25: ("killed", "it used more CPUs on average than requested"),
    -26: ("oom", "it exceeded its virtual memory limit in PBS"),
    -27: ("oom", "it exceeded its memory limit in PBS"),
    -28: ("timeout", "it exceeded its CPU time limit in PBS"),
    -29: ("timeout", "it reached its time limit in PBS"),
    -30: ("lost", "its nodes could not be joined"),
    -31: ("oom", "it exceeded its huge page limit in PBS"),
    -32: ("lost", "PBS lost track of it, and requeued it"),
}
_DELETED = "terminated by"
# In the comment, from nodes that end a job with a signal: "walltime 65 exceeded limit 60", "exceeded resource mem".
_EXCEEDED = re.compile(
    r"\b(?P<a>walltime|cput|vmem|mem|ncpus)\b[^,;]*exceeded limit|exceeded resource (?P<b>\w+)", re.IGNORECASE
)
_EXCEEDED_STATUSES = {"walltime": -29, "cput": -28, "vmem": -26, "mem": -27, "ncpus": -25, "hpmem": -31}


def job_status(job: str, fields: Mapping[str, Any]) -> JobStatus:
    state = str(fields.get("job_state", ""))
    phase = _PHASES.get(state, "running")
    variables = fields.get("Variable_List") or {}
    exit_code, reason_code, reason = None, "", str(fields.get("comment") or "")
    if phase == "ended":
        status = fields.get("Exit_status")
        exit_code, reason_code, reason = parse_exit(status if isinstance(status, int) else None, reason)
    return JobStatus(
        job=job,
        mark=str(variables.get(MARK) or "") if isinstance(variables, Mapping) else "",
        phase=phase,
        state=_STATES.get(state, state),
        reason=reason,
        exit_code=exit_code,
        reason_code=reason_code,
        start_s=parse_time(fields.get("stime")),
        end_s=parse_time(fields.get("obittime") or fields.get("mtime")) if phase == "ended" else 0,
        submit_s=parse_time(fields.get("ctime")),
    )


def parse_exit(status: int | None, comment: str) -> tuple[int | None, str, str]:
    """Exit code, reason code and reason of a finished job. 256 + n (on some systems 128 + n): signal n."""
    if status is None:
        return None, "killed", comment or "it was deleted in PBS before it started"
    if status < 0:
        return None, *_PBS_STATUSES.get(status, ("lost", f"PBS ended it with status {status}"))
    exit_code = 128 + status - 256 if status >= 256 else status
    if status and (found := _EXCEEDED.search(comment)):
        limit = _EXCEEDED_STATUSES.get((found["a"] or found["b"]).lower())
        if limit:
            return exit_code, *_PBS_STATUSES[limit]
    if _DELETED in comment and status >= 256:
        return exit_code, "killed", "it was deleted in PBS, not by Hodei"
    return exit_code, "", ""


def parse_time(text: object) -> int:
    """Seconds since the epoch of `Sun Nov 15 18:42:00 2026`, in the time zone of the command, which is UTC here."""
    if isinstance(text, int):
        return text
    try:
        return calendar.timegm(time.strptime(str(text or ""), "%a %b %d %H:%M:%S %Y"))
    except ValueError:
        return 0


_SIZE = re.compile(r"(\d+)\s*([kmgtp]?)([bw]?)", re.IGNORECASE)
_SCALE = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
_NOT_READY = ("down", "state-unknown", "stale", "unresolvable", "init", "provisioning", "sleep")
_CORDONED = ("offline", "maintenance", "resv-exclusive")
_NOT_DEVICES = (
    "arch",
    "host",
    "vnode",
    "ncpus",
    "mem",
    "vmem",
    "ngpus",
    "naccelerators",
    "hbmem",
    "accelerator_memory",
)


def parse_size(text: object) -> int:
    """`4592kb`, `4gb`, `500mb`; a bare number is bytes, and w is words of eight bytes."""
    found = _SIZE.fullmatch(str(text).strip())
    if not found:
        return 0
    return int(found[1]) * _SCALE[found[2].lower()] * (8 if found[3].lower() == "w" else 1)


def parse_cluster(nodes: Mapping[str, Any], queues: Mapping[str, Any], default: str = "") -> Cluster:
    """From `pbsnodes -av` and `qstat -Qf`. A vnode without ncpus only stands for its host and is left out."""
    found = []
    for name in sorted(nodes):
        fields = nodes[name]
        available = fields.get("resources_available") or {}
        if not _number(available.get("ncpus")):
            continue
        states = [state.strip() for state in str(fields.get("state", "")).split(",")]
        problems = [state for state in states if state in _NOT_READY]
        comment = f": {fields['comment']}" if fields.get("comment") else ""
        found.append(
            Node(
                name=name,
                backend="",
                capacity=_capacity(available),
                labels={"pbs.hodei.io/host": str(available.get("host") or fields.get("Mom") or name)},
                arch="amd64" if available.get("arch") == "linux" else "",
                address=str(fields.get("Mom") or ""),
                ready=not problems,
                not_ready_reason=f"PBS: {', '.join(problems)}{comment}" if problems else "",
                cordoned=any(state in _CORDONED for state in states),
            )
        )
    names, largest = tuple(node.name for node in found), largest_capacity(found)
    partitions = []
    for name, queue in queues.items():
        ends, problem = _destinations(name, queues)
        limits = [pbs_minutes((queues[each].get("resources_max") or {}).get("walltime")) for each in (name, *ends)]
        # The queue's own limit, else the longest of the queues behind it.
        limit = limits[0] or (0 if 0 in limits[1:] else max(limits[1:], default=0))
        reason = problem or ("" if _is_open(queue) else "it is disabled or stopped in PBS")
        partitions.append(
            Partition(name, names, limit, name == default, not reason, largest, usable=not problem, reason=reason)
        )
    return Cluster(tuple(found), tuple(partitions))


def _destinations(name: str, queues: Mapping[str, Any]) -> tuple[list[str], str]:
    """The execution queues behind a routing queue, and why the queue cannot be used, "" if it can."""
    queue = queues[name]
    if queue.get("queue_type") != "Route":
        if queue.get("from_route_only") != "True":
            return [], ""
        routes = [route for route in queues if route != name and name in _route(queues[route])]
        instead = f"; submit to {' or '.join(sorted(routes))}" if routes else ", and no routing queue leads to it"
        return [], f"it takes jobs only from routing queues{instead}"
    ends, visited, ahead = list[str](), {name}, _route(queue)
    while ahead:
        route = ahead.pop(0)
        if route in visited:
            continue
        visited.add(route)
        if route not in queues:
            return [], f"it is a routing queue to {route}, where Hodei cannot follow a job"
        if queues[route].get("queue_type") == "Route":
            ahead += _route(queues[route])
        elif _is_open(queues[route]):
            ends.append(route)
    return ends, "" if ends else "it is a routing queue, and none of its destinations accepts jobs"


def _route(queue: Mapping[str, Any]) -> list[str]:
    destinations = queue.get("route_destinations") or ""
    names = destinations if isinstance(destinations, list) else str(destinations).split(",")
    return [str(name).strip() for name in names if str(name).strip()]


def _is_open(queue: Mapping[str, Any]) -> bool:
    return queue.get("enabled") == "True" and queue.get("started") == "True"


def _capacity(available: Mapping[str, Any]) -> Resources:
    out = {CPU: _number(available.get("ncpus")) * 1000, MEMORY: parse_size(available.get("mem"))}
    if gpus := _number(available.get("ngpus")):
        out[GPU] = gpus * 1000
    for name, amount in available.items():
        if name not in _NOT_DEVICES and isinstance(amount, int) and amount > 0:
            out[name] = amount
    return out


def _number(value: object) -> int:
    return int(str(value)) if str(value).isdigit() else 0
