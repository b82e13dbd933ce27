"""Slurm by its commands: sbatch, squeue, scancel, scontrol, sacct and srun.

The output of `squeue --Format` is cut at fixed widths, so that no value can be taken for another; times are asked for in
seconds since the epoch. Fields that users fill (names) are not asked for at all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence

from msgspec import structs

from hodei.backends.hpc.commands import Commands, Done
from hodei.backends.hpc.ports import Cluster, Doubtful, Seen, Submission
from hodei.backends.hpc.script import array_script
from hodei.backends.hpc.slurm_nodes import SlurmNode, cluster, node_of, partition_of, seen_of, usage
from hodei.model.backend import ExecResult
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused
from hodei.model.resources import Resources

SUBMIT_TIMEOUT_S = 25.0
ASK_TIMEOUT_S = 20.0
PING_TIMEOUT_S = 8.0
EXECUTE_EXTRA_S = 0.0
# How long a command on a node may wait for its core.
IMMEDIATE_S = 10
_NO_ROOM_NOW = re.compile(
    r"unable to allocate resources|immediate execution impossible|allocation failure", re.IGNORECASE
)
OUTPUT_LIMIT = 1 << 20
# Beyond this many numbers, all jobs of the user are asked for.
MOST_NUMBERS = 5_000

_FIELDS = (
    ("ArrayJobID", 14), ("ArrayTaskID", 14), ("State", 24), ("Reason", 80), ("exit_code", 14), ("RestartCnt", 12), ("SubmitTime", 24),
    ("StartTime", 24), ("EndTime", 24), ("Comment", 200),
)  # fmt: skip
_FORMAT = ",".join(f"{name}:{width}" for name, width in _FIELDS)
_EPOCH = {"SLURM_TIME_FORMAT": "%s"}

# What asking again will not change, as Slurm says it. All else may pass.
NEVER = re.compile(
    r"invalid (partition|account|qos|generic resource|feature|wckey|node name|job id|time limit|license|reservation|"
    r"cluster)|requested node config|more processors requested|memory specification can ?not|time limit is invalid|"
    r"not permitted|access.*denied|requested partition configuration|node count specification|unrecognized option|"
    r"invalid option|unknown key|disabled key|contains DOS line|invalid argument|not valid|is invalid|requested gres option",
    re.IGNORECASE,
)
# The request may have gone out, and it was not answered; a controller that hung works it off when it goes on.
_IN_DOUBT = re.compile(
    r"timed out|zero bytes were transmitted|protocol authentication|(send|receive|shutdown) failure|unexpected message|"
    r"header lengths|insane message|connection reset|broken pipe|interrupted system call|unspecified error",
    re.IGNORECASE,
)
# There was nobody to send it to.
_NOT_REACHED = re.compile(r"connect failure|connection failure|connection refused|no route to host", re.IGNORECASE)
_UNKNOWN_JOB = re.compile(r"invalid job id|already completing or completed|job/step already", re.IGNORECASE)
_NO_HISTORY = re.compile(r"accounting storage is disabled|slurmdbd", re.IGNORECASE)


class SlurmCommands:
    """`queue.Queue` for Slurm. `requeue`: whether Slurm may start a job again by itself."""

    by_commands = True
    # Slurm's own bound (MaxArraySize) is 1001 unless the operator raised it.
    most_at_once = 500
    job_variable = "SLURM_JOB_ID"
    node_variable = "SLURMD_NODENAME"
    element = "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID-}}"

    def __init__(self, commands: Commands, *, requeue: bool = False) -> None:
        self._commands, self._requeue = commands, requeue
        self._user = str(os.getuid())
        self._history = True

    def inherit(self, lock: int) -> None:
        self._commands.inherited = (lock,)

    async def close(self) -> None:
        """Nothing is kept open."""

    async def ping(self) -> str:
        done = await self._commands.run(("scontrol", "ping"), timeout_s=PING_TIMEOUT_S)
        said = done.stdout.decode(errors="replace")
        if done.code != 0 or " is UP" not in said:
            raise BackendError(f"slurmctld does not answer: {' '.join(said.split())[:200] or done.words}")
        return " ".join(said.split())[:200]

    async def cluster(self) -> Cluster:
        partitions = await self._lines("scontrol", "--oneliner", "show", "partition")
        return cluster(await self._nodes(), [partition_of(line) for line in partitions if "PartitionName=" in line])

    async def usage(self) -> dict[str, Resources]:
        return usage(await self._nodes())

    async def _nodes(self) -> list[SlurmNode]:
        lines = await self._lines("scontrol", "--oneliner", "show", "node")
        return [node_of(line) for line in lines if line.startswith("NodeName=")]

    # --------------------------------------------------------------------------------------- handing in

    async def submit(self, wanted: Submission) -> str:
        return await self._sbatch(submit_words(wanted, requeue=self._requeue), wanted.script)

    async def submit_many(self, wanted: Sequence[Submission], mark: str) -> list[str]:
        one = structs.replace(wanted[0], mark=mark, stdout="/dev/null", stderr="/dev/null")
        script = array_script([(each.script, each.stdout, each.stderr) for each in wanted], "SLURM_ARRAY_TASK_ID")
        words = (*submit_words(one, requeue=self._requeue), f"--array=0-{len(wanted) - 1}")
        number = await self._sbatch(words, script)
        return [f"{number}_{place}" for place in range(len(wanted))]

    async def _sbatch(self, words: Sequence[str], script: str) -> str:
        done = await self._commands.run(words, timeout_s=SUBMIT_TIMEOUT_S, text=script.encode(), changes=True)
        if done.code == 0:
            number = done.stdout.decode(errors="replace").strip().partition(";")[0]
            if number.isdigit():
                return number
            raise Doubtful(f"sbatch answered {number[:80]!r} and not with a number")
        # Below 0: it was ended by a signal, half way through.
        if done.code is None or done.code < 0 or _IN_DOUBT.search(done.words):
            raise Doubtful(f"sbatch: {done.words}")
        if _NOT_REACHED.search(done.words):
            raise BackendError(f"slurmctld is out of reach: {_without_prefix(done.words)}", code=NOT_REACHED)
        if NEVER.search(done.words):
            raise BackendRefused(f"Slurm refuses it: {_without_prefix(done.words)}", hint="see docs/how-to/slurm.md")
        raise BackendError(f"Slurm did not take it: {_without_prefix(done.words)}")

    # ------------------------------------------------------------------------------------------ looking

    async def look(self, jobs: Collection[str]) -> list[Seen]:
        if len(jobs) > MOST_NUMBERS:
            return [seen for seen in await self._squeue(f"--user={self._user}") if seen.job in jobs]
        numbers = sorted({job.partition("_")[0] for job in jobs})
        found = await self._squeue(f"--jobs={','.join(numbers)}") if jobs else []
        return [seen for seen in found if seen.job in jobs]

    async def ours(self, prefix: str) -> list[Seen]:
        return [seen for seen in await self._squeue(f"--user={self._user}") if seen.mark.startswith(prefix)]

    async def _squeue(self, which: str) -> list[Seen]:
        words = ("squeue", "--noheader", "--array", "--states=all", f"--Format={_FORMAT}", which)
        done = await self._commands.run(words, timeout_s=ASK_TIMEOUT_S, env=_EPOCH)
        if done.code != 0 and _UNKNOWN_JOB.search(done.words):
            return []
        return parse_squeue(self._said(words, done))

    async def expected(self) -> dict[str, int]:
        words = (
            "squeue",
            "--noheader",
            "--array",
            "--states=PENDING",
            f"--user={self._user}",
            "--Format=ArrayJobID:20,ArrayTaskID:20,StartTime:24",
        )
        done = await self._commands.run(words, timeout_s=ASK_TIMEOUT_S, env=_EPOCH)
        rows = (line.split() for line in self._said(words, done).splitlines())
        told = [row for row in rows if len(row) == 3 and row[2].isdigit()]
        return {f"{job}_{place}" if place.isdigit() else job: int(at_s) * 1000 for job, place, at_s in told}

    async def remembered(self, jobs: Collection[str]) -> list[Seen]:
        if not self._history or not jobs:
            return []
        fields = "JobID,State,ExitCode,Submit,Start,End"
        words: tuple[str, ...] = (
            "sacct",
            "--noheader",
            "--parsable2",
            "--allocations",
            "--duplicates",
            f"--format={fields}",
        )
        words = (*words, f"--jobs={','.join(jobs)}")
        done = await self._commands.run(words, timeout_s=ASK_TIMEOUT_S, env=_EPOCH)
        if done.code != 0 and _NO_HISTORY.search(done.words):
            self._history = "disabled" not in done.words  # a database that is only away may come back
            return []
        return parse_sacct(self._said(words, done))

    # ------------------------------------------------------------------------------------------- acting

    async def cancel(self, jobs: Sequence[str]) -> None:
        if jobs:
            await self._scancel(*jobs)

    async def signal(self, jobs: Sequence[str], signal: str) -> None:
        if jobs:
            # A KILL is Slurm's own way to end a job: it comes after the cluster's KillWait. One for the script alone would
            # come at once, but processes that the cluster does not track by cgroups would be left behind.
            await self._scancel(f"--signal={signal}", "--full", *jobs)

    async def _scancel(self, *words: str) -> None:
        done = await self._commands.run(("scancel", *words), timeout_s=ASK_TIMEOUT_S)
        if done.code != 0 and not _UNKNOWN_JOB.search(done.words):
            raise BackendError(f"scancel: {_without_prefix(done.words)}")

    async def execute(self, job: str, words: Sequence[str], timeout_s: float) -> ExecResult:
        srun: tuple[str, ...] = (
            "srun",
            f"--jobid={job}",
            "--overlap",
            "--nodes=1",
            "--ntasks=1",
            "--cpus-per-task=1",
            "--mem=0",
        )
        srun = (*srun, "--quiet", "--input=none", "--chdir=/", "--export=ALL", "--mpi=none", "--", *words)
        done = await self._commands.run(srun, timeout_s=timeout_s)
        return _executed(done)

    async def execute_on(self, node: str, line: str, words: Sequence[str], timeout_s: float) -> ExecResult:
        minutes = max(1, -(-int(timeout_s) // 60)) + 1
        srun: tuple[str, ...] = (
            "srun", "--job-name=hodei-node-exec", f"--nodelist={node}", f"--partition={line}", "--nodes=1", "--ntasks=1",
            "--cpus-per-task=1", "--mem=64M", f"--time={minutes}", f"--immediate={IMMEDIATE_S}", "--quiet", "--input=none",
            "--chdir=/", "--export=ALL", "--mpi=none", "--", *words,
        )  # fmt: skip
        done = await self._commands.run(srun, timeout_s=timeout_s + IMMEDIATE_S)
        if done.code not in (None, 0) and _NO_ROOM_NOW.search(done.stderr.decode(errors="replace")):
            raise BackendError(
                f"Slurm has no room for a command on {node} now: {_without_prefix(done.words)}",
                hint="it needs one core and 64 MiB; try again when a run has ended",
            )
        return _executed(done)

    async def _lines(self, *words: str) -> list[str]:
        done = await self._commands.run(words, timeout_s=ASK_TIMEOUT_S)
        return self._said(words, done).splitlines()

    @staticmethod
    def _said(words: Sequence[str], done: Done) -> str:
        if done.code != 0:
            raise BackendError(
                f"{words[0]}: {_without_prefix(done.words)}", hint="is slurmctld up? see `scontrol ping`"
            )
        return done.stdout.decode(errors="replace")


def _executed(done: Done) -> ExecResult:
    cut = len(done.stdout) > OUTPUT_LIMIT or len(done.stderr) > OUTPUT_LIMIT
    code = 128 - done.code if done.code is not None and done.code < 0 else done.code
    return ExecResult(code, done.stdout[:OUTPUT_LIMIT], done.stderr[:OUTPUT_LIMIT], cut)


def submit_words(wanted: Submission, *, requeue: bool) -> tuple[str, ...]:
    """sbatch and its options, each with its value in one word; the script comes on stdin."""
    words = [
        "sbatch",
        "--parsable",
        "--ignore-pbs",
        f"--job-name={wanted.name}",
        f"--comment={wanted.mark}",
        f"--partition={wanted.line}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={wanted.cpus}",
        f"--mem={wanted.memory_mib}M",
        f"--output={_plain_path(wanted.stdout)}",
        f"--error={_plain_path(wanted.stderr)}",
        "--open-mode=append",
        "--input=/dev/null",
        "--chdir=/",
        "--export=ALL",
        "--requeue" if requeue else "--no-requeue",
    ]
    if wanted.node:
        words.append(f"--nodelist={wanted.node}")
    if wanted.minutes:
        words.append(f"--time={wanted.minutes}")
    if wanted.storage_mib:
        words.append(f"--tmp={wanted.storage_mib}M")
    if gres := gres_words(wanted):
        words.append(f"--gres={gres}")
    return (*words, *(f"--{name}={value}" if value else f"--{name}" for name, value in wanted.options))


def gres_words(wanted: Submission) -> str:
    parts = [f"{name}:{amount}" for name, amount in sorted(wanted.devices.items())]
    if wanted.gpus:
        parts.insert(0, ":".join(filter(None, ("gpu", wanted.gpu_type, str(wanted.gpus)))))
    return ",".join(parts)


def parse_squeue(text: str) -> list[Seen]:
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
            seen_of(
                job=f"{row['ArrayJobID']}_{place}" if place else row["ArrayJobID"],
                mark=f"{mark}#{place}" if place else mark,
                state=row["State"],
                reason=row["Reason"],
                code=row["exit_code"],
                start_s=_seconds(row["StartTime"]),
                end_s=_seconds(row["EndTime"]),
                submit_s=_seconds(row["SubmitTime"]),
                restarts=_seconds(row["RestartCnt"]),
            )
        )
    return out


def parse_sacct(text: str) -> list[Seen]:
    rows = (line.split("|") for line in text.splitlines())
    return [_remembered(row) for row in rows if len(row) == 6]


def _remembered(row: Iterable[str]) -> Seen:
    job, state, code, submit, start, end = row
    return seen_of(
        job=job,
        mark="",
        state=state,
        code=code,
        submit_s=_seconds(submit),
        start_s=_seconds(start),
        end_s=_seconds(end),
    )


def _seconds(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _plain_path(path: str) -> str:
    """Slurm fills in what stands behind a %."""
    return path.replace("%", "%%")


def _without_prefix(words: str) -> str:
    return re.sub(r"\b(sbatch|squeue|scancel|scontrol|sacct|srun): (error: )?", "", words)[:400]
