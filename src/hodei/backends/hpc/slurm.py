"""Slurm: settings, backend, and the batch system by its commands (sbatch, squeue, scancel, scontrol, sacct, srun).

`slurm_rest` is the batch system by slurmrestd. See docs/how-to/slurm.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from typing import Literal

from msgspec import structs

from hodei.backends.base import BackendContext
from hodei.backends.hpc.backend import HpcBackend
from hodei.backends.hpc.batch_options import SlurmOptions
from hodei.backends.hpc.commands import CommandResult, Commands
from hodei.backends.hpc.nodes import ClusterSettings, Mode, check_settings
from hodei.backends.hpc.ports import BatchSystem, Cluster, JobStatus, OutcomeUnknown, Submission
from hodei.backends.hpc.script import array_script
from hodei.backends.hpc.slurm_parse import (
    SlurmNode,
    cluster,
    escape_path,
    gres_request,
    job_status,
    parse_node,
    parse_partition,
    rejection,
    usage,
)
from hodei.backends.hpc.slurm_rest import SlurmRest
from hodei.model.backend import Capabilities, ExecResult
from hodei.model.errors import NOT_REACHED, BackendError
from hodei.model.resources import Resources


class Settings(ClusterSettings, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`partitions`: those that jobs may use, in order of preference. `qos`, `reservation` and `allow_*` as for accounts."""

    transport: Literal["commands", "rest"] = "commands"
    partitions: tuple[str, ...] = ()
    rest: str = ""
    rest_version: str = "v0.0.38"
    rest_user: str = ""
    rest_token_file: str = ""
    qos: str = ""
    reservation: str = ""
    allow_qos: tuple[str, ...] = ()
    allow_reservations: tuple[str, ...] = ()
    allow_options: tuple[str, ...] = ()


def capabilities(mode: Mode, transport: str) -> Capabilities:
    delegate, commands = mode == "delegate", transport == "commands"
    return Capabilities(
        gpus=True,
        limits=True,
        checkpoint=True,
        suspend=True,
        execute=commands,
        node_execute=commands and not delegate,  # a partition is not a machine
        usage=not delegate,
        delegates=delegate,
        expects=delegate,
    )


def make(name: str, settings: Settings, context: BackendContext) -> HpcBackend:
    """InvalidInput if the settings are invalid."""
    problems = []
    if settings.transport == "rest" and not settings.rest.startswith(("unix:", "http://", "https://")):
        problems.append(("rest", "must be the address of slurmrestd: unix:/path or http://host:port"))
    check_settings(name, "slurm", settings, *problems)
    system: BatchSystem
    if settings.transport == "rest":
        system = SlurmRest(
            settings.rest,
            version=settings.rest_version,
            user=settings.rest_user,
            token_file=settings.rest_token_file,
            requeue=settings.requeue,
        )
    else:
        env = {"SLURM_CONF": settings.conf} if settings.conf else {}
        system = SlurmCommands(Commands(settings.commands, env), requeue=settings.requeue)
    allowed = {
        "account": settings.allow_accounts, "qos": settings.allow_qos, "reservation": settings.allow_reservations,
    }  # fmt: skip
    options = SlurmOptions(
        placed=settings.mode == "placed",
        fixed={"account": settings.account, "qos": settings.qos, "reservation": settings.reservation},
        allowed=allowed,
        also=settings.allow_options,
    )
    available = capabilities(settings.mode, settings.transport)
    return HpcBackend(name, "slurm", "Slurm", settings, context, system, settings.partitions, options.of, available)


SUBMIT_TIMEOUT_S = 25.0
QUERY_TIMEOUT_S = 20.0
PING_TIMEOUT_S = 8.0
# How long a command on a node may wait for its core.
IMMEDIATE_S = 10
OUTPUT_LIMIT = 1 << 20
# For more jobs than this, all jobs of the user are requested.
MAX_JOB_IDS = 5_000

# The columns of `squeue --Format` have fixed widths, so that no value is taken for another. Fields that users fill (names) are
# not requested. Times are in seconds since the epoch.
_FIELDS = (
    ("ArrayJobID", 14), ("ArrayTaskID", 14), ("State", 24), ("Reason", 80), ("exit_code", 14), ("SubmitTime", 24),
    ("StartTime", 24), ("EndTime", 24), ("Comment", 200),
)  # fmt: skip
_FORMAT = ",".join(f"{name}:{width}" for name, width in _FIELDS)
_EPOCH = {"SLURM_TIME_FORMAT": "%s"}

# The request may have been sent and was not answered; a controller that hung processes it when it resumes.
_OUTCOME_UNKNOWN = re.compile(
    r"timed out|zero bytes were transmitted|protocol authentication|(send|receive|shutdown) failure|unexpected message|"
    r"header lengths|insane message|connection reset|broken pipe|interrupted system call|unspecified error",
    re.IGNORECASE,
)
_NOT_REACHED = re.compile(r"connect failure|connection failure|connection refused|no route to host", re.IGNORECASE)
_UNKNOWN_JOB = re.compile(r"invalid job id|already completing or completed|job/step already", re.IGNORECASE)
_NO_HISTORY = re.compile(r"accounting storage is disabled|slurmdbd", re.IGNORECASE)
_NO_CAPACITY = re.compile(
    r"unable to allocate resources|immediate execution impossible|allocation failure", re.IGNORECASE
)  # fmt: skip


class SlurmCommands:
    """`ports.BatchSystem` for Slurm. `requeue`: Slurm may restart a job by itself."""

    uses_commands = True
    # Slurm's limit (MaxArraySize) is 1001 unless the operator raised it.
    max_array_size = 500
    job_variable = "SLURM_JOB_ID"
    node_variable = "SLURMD_NODENAME"
    element_id = "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID-}}"

    def __init__(self, commands: Commands, *, requeue: bool = False) -> None:
        self._commands, self._requeue = commands, requeue
        self._user = str(os.getuid())
        self._has_history = True

    def inherit(self, lock: int) -> None:
        self._commands.inherited_fds = (lock,)

    async def close(self) -> None:
        """Nothing is kept open."""

    async def ping(self) -> str:
        done = await self._commands.run(("scontrol", "ping"), timeout_s=PING_TIMEOUT_S)
        text = " ".join(done.stdout.decode(errors="replace").split())[:200]
        if done.code != 0 or " is UP" not in text:
            raise BackendError(f"slurmctld does not answer: {text or done.message}")
        return text

    async def cluster(self) -> Cluster:
        lines = (await self._query("scontrol", "--oneliner", "show", "partition")).splitlines()
        return cluster(await self._nodes(), [parse_partition(line) for line in lines if "PartitionName=" in line])

    async def usage(self) -> dict[str, Resources]:
        return usage(await self._nodes())

    async def _nodes(self) -> list[SlurmNode]:
        lines = (await self._query("scontrol", "--oneliner", "show", "node")).splitlines()
        return [parse_node(line) for line in lines if line.startswith("NodeName=")]

    async def submit(self, submission: Submission) -> str:
        return await self._sbatch(sbatch_command(submission, requeue=self._requeue), submission.script)

    async def submit_array(self, submissions: Sequence[Submission], mark: str) -> list[str]:
        array = structs.replace(submissions[0], mark=mark, stdout="/dev/null", stderr="/dev/null")
        script = array_script([(each.script, each.stdout, each.stderr) for each in submissions], "SLURM_ARRAY_TASK_ID")
        command = (*sbatch_command(array, requeue=self._requeue), f"--array=0-{len(submissions) - 1}")
        job = await self._sbatch(command, script)
        return [f"{job}_{place}" for place in range(len(submissions))]

    async def _sbatch(self, command: Sequence[str], script: str) -> str:
        done = await self._commands.run(command, timeout_s=SUBMIT_TIMEOUT_S, stdin=script.encode(), mutating=True)
        if done.code == 0:
            job = done.stdout.decode(errors="replace").strip().partition(";")[0]
            if job.isdigit():
                return job
            raise OutcomeUnknown(f"sbatch printed {job[:80]!r} instead of a job id")
        # A negative code: a signal ended it half way.
        if done.code is None or done.code < 0 or _OUTCOME_UNKNOWN.search(done.message):
            raise OutcomeUnknown(f"sbatch: {done.message}")
        if _NOT_REACHED.search(done.message):
            raise BackendError(f"slurmctld cannot be reached: {_without_prefix(done.message)}", code=NOT_REACHED)
        raise rejection(_without_prefix(done.message))

    async def status(self, jobs: Collection[str]) -> list[JobStatus]:
        if not jobs:
            return []
        ids = sorted({job.partition("_")[0] for job in jobs})
        which = f"--jobs={','.join(ids)}" if len(jobs) <= MAX_JOB_IDS else f"--user={self._user}"
        return [status for status in await self._squeue(which) if status.job in jobs]

    async def marked(self, prefix: str) -> list[JobStatus]:
        return [status for status in await self._squeue(f"--user={self._user}") if status.mark.startswith(prefix)]

    async def _squeue(self, which: str) -> list[JobStatus]:
        command = ("squeue", "--noheader", "--array", "--states=all", f"--Format={_FORMAT}", which)
        done = await self._commands.run(command, timeout_s=QUERY_TIMEOUT_S, env=_EPOCH)
        if done.code != 0 and _UNKNOWN_JOB.search(done.message):
            return []
        return parse_squeue(_stdout("squeue", done))

    async def expected_starts(self) -> dict[str, int]:
        columns = "--Format=ArrayJobID:20,ArrayTaskID:20,StartTime:24"
        text = await self._query("squeue", "--noheader", "--array", "--states=PENDING", f"--user={self._user}", columns)
        rows = [row for row in (line.split() for line in text.splitlines()) if len(row) == 3 and row[2].isdigit()]
        return {f"{job}_{place}" if place.isdigit() else job: int(at_s) * 1000 for job, place, at_s in rows}

    async def history(self, jobs: Collection[str]) -> list[JobStatus]:
        if not self._has_history or not jobs:
            return []
        columns = "--format=JobID,State,ExitCode,Submit,Start,End"
        flags = ("--noheader", "--parsable2", "--allocations", "--duplicates")
        done = await self._commands.run(
            ("sacct", *flags, columns, f"--jobs={','.join(jobs)}"), timeout_s=QUERY_TIMEOUT_S, env=_EPOCH
        )  # fmt: skip
        if done.code != 0 and _NO_HISTORY.search(done.message):
            self._has_history = "disabled" not in done.message  # a database that is only down may come back
            return []
        return parse_sacct(_stdout("sacct", done))

    async def _query(self, *command: str) -> str:
        return _stdout(command[0], await self._commands.run(command, timeout_s=QUERY_TIMEOUT_S, env=_EPOCH))

    async def cancel(self, jobs: Sequence[str]) -> None:
        if jobs:
            await self._scancel(*jobs)

    async def signal(self, jobs: Sequence[str], signal: str) -> None:
        if jobs:
            # For Slurm a KILL is the end of the job, after the cluster's KillWait. A KILL for the script alone would come at
            # once, but leave processes behind that the cluster does not track by cgroups.
            await self._scancel(f"--signal={signal}", "--full", *jobs)

    async def _scancel(self, *arguments: str) -> None:
        done = await self._commands.run(("scancel", *arguments), timeout_s=QUERY_TIMEOUT_S)
        if done.code != 0 and not _UNKNOWN_JOB.search(done.message):
            raise BackendError(f"scancel: {_without_prefix(done.message)}")

    async def execute(self, job: str, command: Sequence[str], timeout_s: float) -> ExecResult:
        options = (f"--jobid={job}", "--overlap", "--mem=0")
        return executed(await self._srun(options, command, timeout_s))

    async def execute_on(self, node: str, partition: str, command: Sequence[str], timeout_s: float) -> ExecResult:
        minutes = max(1, -(-int(timeout_s) // 60)) + 1
        options = (
            "--job-name=hodei-node-exec", f"--nodelist={node}", f"--partition={partition}", "--mem=64M", f"--time={minutes}",
            f"--immediate={IMMEDIATE_S}",
        )  # fmt: skip
        done = await self._srun(options, command, timeout_s + IMMEDIATE_S)
        if done.code not in (None, 0) and _NO_CAPACITY.search(done.stderr.decode(errors="replace")):
            raise BackendError(
                f"Slurm has no capacity for a command on {node} now: {_without_prefix(done.message)}",
                hint="it needs one core and 64 MiB; try again when a run has ended",
            )
        return executed(done)

    async def _srun(self, options: Sequence[str], command: Sequence[str], timeout_s: float) -> CommandResult:
        single = ("--nodes=1", "--ntasks=1", "--cpus-per-task=1")
        rest = ("--quiet", "--input=none", "--chdir=/", "--export=ALL", "--mpi=none", "--")
        return await self._commands.run(("srun", *options, *single, *rest, *command), timeout_s=timeout_s)


def _stdout(program: str, done: CommandResult) -> str:
    if done.code != 0:
        message = f"{program}: {_without_prefix(done.message)}"
        raise BackendError(message, hint="check that slurmctld is up: scontrol ping")
    return done.stdout.decode(errors="replace")


def executed(done: CommandResult) -> ExecResult:
    truncated = len(done.stdout) > OUTPUT_LIMIT or len(done.stderr) > OUTPUT_LIMIT
    code = 128 - done.code if done.code is not None and done.code < 0 else done.code
    return ExecResult(code, done.stdout[:OUTPUT_LIMIT], done.stderr[:OUTPUT_LIMIT], truncated)


def sbatch_command(submission: Submission, *, requeue: bool) -> tuple[str, ...]:
    """sbatch with every option and its value in one argument; the script is passed on stdin."""
    command = [
        "sbatch",
        "--parsable",
        "--ignore-pbs",
        f"--job-name={submission.name}",
        f"--comment={submission.mark}",
        f"--partition={submission.partition}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={submission.cpus}",
        f"--mem={submission.memory_mib}M",
        f"--output={escape_path(submission.stdout)}",
        f"--error={escape_path(submission.stderr)}",
        "--open-mode=append",
        "--input=/dev/null",
        "--chdir=/",
        "--export=ALL",
        "--requeue" if requeue else "--no-requeue",
    ]
    if submission.node:
        command.append(f"--nodelist={submission.node}")
    if submission.minutes:
        command.append(f"--time={submission.minutes}")
    if submission.storage_mib:
        command.append(f"--tmp={submission.storage_mib}M")
    if gres := gres_request(submission):
        command.append(f"--gres={gres}")
    return (*command, *(f"--{name}={value}" if value else f"--{name}" for name, value in submission.options))


def parse_squeue(text: str) -> list[JobStatus]:
    out = []
    for line in text.splitlines():
        row, at = {}, 0
        for name, width in _FIELDS:
            row[name] = line[at : at + width].strip()
            at += width
        if not row["ArrayJobID"].isdigit():
            continue
        mark = "" if row["Comment"] == "(null)" else row["Comment"]
        place = row["ArrayTaskID"] if row["ArrayTaskID"].isdigit() else ""
        out.append(
            job_status(
                job=f"{row['ArrayJobID']}_{place}" if place else row["ArrayJobID"],
                mark=f"{mark}#{place}" if place else mark,
                state=row["State"],
                reason=row["Reason"],
                code=row["exit_code"],
                start_s=_seconds(row["StartTime"]),
                end_s=_seconds(row["EndTime"]),
                submit_s=_seconds(row["SubmitTime"]),
            )
        )
    return out


def parse_sacct(text: str) -> list[JobStatus]:
    out = []
    for row in (line.split("|") for line in text.splitlines()):
        if len(row) == 6:
            job, state, code, *times = row
            submit_s, start_s, end_s = map(_seconds, times)
            out.append(
                job_status(job=job, mark="", state=state, code=code, submit_s=submit_s, start_s=start_s, end_s=end_s)
            )
    return out


def _seconds(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _without_prefix(message: str) -> str:
    return re.sub(r"\b(sbatch|squeue|scancel|scontrol|sacct|srun): (error: )?", "", message)[:400]
