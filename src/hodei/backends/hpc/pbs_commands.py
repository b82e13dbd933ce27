"""PBS by its commands: qsub, qstat, qdel, qsig and pbsnodes, all with JSON for an answer.

A job is known again by a variable that it carries (`HODEI_MARK`, in its Variable_List). Nothing of a user's is on a command
line but what was checked before.

PBS runs a batch script below a login shell, which a TERM for the job ends at once; with it PBS takes the job for over, and kills
the rest of it: no grace. So PBS is given a program (`qsub -- ...`), which it makes the first process of the job itself: a login
shell that becomes the script, which lies beside the run's output and knows what to do with a TERM.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from hodei.backends.hpc import pbs_states
from hodei.backends.hpc.commands import Commands, Done
from hodei.backends.hpc.ports import Cluster, Doubtful, Seen, Submission
from hodei.backends.hpc.script import SHELL
from hodei.model.backend import ExecResult
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused
from hodei.model.resources import Resources

SUBMIT_TIMEOUT_S = 25.0
ASK_TIMEOUT_S = 20.0
MOST_NUMBERS = 200
# What qsub ends with: PBS's error codes modulo 256 (15010 is 162), or the system's own (ECONNREFUSED is 111).
# Asking again may help: a server that is not at its best, a queue that is closed or full, a credential that has expired.
_MAY_PASS = {162, 163, 171, 172, 173, 176, 196, 198}
# There was nobody to send it to: no connection to be had, or the server goes down.
_NOT_REACHED = {111, 113, 185, 186, 212}
_NO_CONNECTION = re.compile(r"cannot connect to server|connection refused|no route to host", re.IGNORECASE)
# It broke off half way: broken pipe, connection reset, timed out, a protocol error.
_IN_DOUBT = {32, 104, 110, 183, 208}
_BROKE_OFF = re.compile(
    r"communicat|connection|timed out|timeout|protocol|broken pipe|end of file|premature", re.IGNORECASE
)
_UNKNOWN, _FINISHED = 153, 35
# The login shell sets up what users of the cluster are used to, and becomes one that nothing of that can lead astray.
_MAKE_WAY = f'builtin shopt -q login_shell && builtin exec -- {SHELL} -p "$0" "$@"'
_NUMBER = re.compile(r"\d+(?:\[\d*\])?\.\S+")


class PbsCommands:
    """`queue.Queue` for PBS."""

    by_commands = True
    most_at_once = 1
    job_variable = "PBS_JOBID"
    node_variable = "HOSTNAME"
    element = ""

    def __init__(self, commands: Commands, *, requeue: bool = False) -> None:
        self._commands, self._requeue = commands, requeue

    def inherit(self, lock: int) -> None:
        self._commands.inherited = (lock,)

    async def close(self) -> None:
        """Nothing is kept open."""

    async def ping(self) -> str:
        servers = (await self._ask("qstat", "-B", "-f", "-F", "json")).get("Server") or {}
        for name, server in servers.items():
            return f"PBS server {name}, {server.get('pbs_version', '')}, {server.get('server_state', '')}"
        raise BackendError("the PBS server tells nothing of itself")

    async def cluster(self) -> Cluster:
        nodes = (await self._ask("pbsnodes", "-a", "-v", "-F", "json")).get("nodes") or {}
        queues = (await self._ask("qstat", "-Q", "-f", "-F", "json")).get("Queue") or {}
        server = (await self._ask("qstat", "-B", "-f", "-F", "json")).get("Server") or {}
        default = next((str(one.get("default_queue") or "") for one in server.values()), "")
        return pbs_states.cluster(nodes, queues, default)

    async def usage(self) -> dict[str, Resources]:
        return {}

    async def submit(self, wanted: Submission) -> str:
        await asyncio.to_thread(put_script, wanted)
        done = await self._commands.run(
            submit_words(wanted, requeue=self._requeue), timeout_s=SUBMIT_TIMEOUT_S, changes=True
        )
        number = done.stdout.decode(errors="replace").strip()
        if done.code == 0:
            if _NUMBER.fullmatch(number):
                return number
            raise Doubtful(f"qsub answered {number[:80]!r} and not with a number")
        if done.code is None or done.code < 0:
            raise Doubtful(f"qsub: {done.words}")
        if done.code in _NOT_REACHED or _NO_CONNECTION.search(done.words):
            raise BackendError(f"the PBS server is out of reach: {done.words}", code=NOT_REACHED)
        if done.code in _IN_DOUBT or _BROKE_OFF.search(done.words):
            raise Doubtful(f"qsub: {done.words}")
        if done.code in _MAY_PASS:
            raise BackendError(f"PBS did not take it: {done.words}")
        raise BackendRefused(f"PBS refuses it: {done.words}", hint="see docs/how-to/pbs.md")

    async def submit_many(self, wanted: Sequence[Submission], mark: str) -> list[str]:
        return [await self.submit(one) for one in wanted]

    async def look(self, jobs: Collection[str]) -> list[Seen]:
        if not jobs:
            return []
        which = jobs if len(jobs) <= MOST_NUMBERS else ()
        return [seen for seen in await self._qstat(*which) if seen.job in jobs]

    async def ours(self, prefix: str) -> list[Seen]:
        return [seen for seen in await self._qstat() if seen.mark.startswith(prefix)]

    async def _qstat(self, *jobs: str) -> list[Seen]:
        told = await self._ask("qstat", "-x", "-f", "-F", "json", *jobs, fine=(_UNKNOWN, _FINISHED))
        found = told.get("Jobs") or {}
        return [pbs_states.seen_of(number, job) for number, job in found.items()]

    async def remembered(self, jobs: Collection[str]) -> list[Seen]:
        return []  # `qstat -x` has looked there already

    async def expected(self) -> dict[str, int]:
        told = await self._ask("qstat", "-f", "-F", "json", fine=(_UNKNOWN, _FINISHED))
        begins = {
            number: pbs_states.seconds((job.get("estimated") or {}).get("start_time"))
            for number, job in (told.get("Jobs") or {}).items()
            if job.get("job_state") == "Q"
        }
        return {number: at_s * 1000 for number, at_s in begins.items() if at_s}

    async def cancel(self, jobs: Sequence[str]) -> None:
        for job in jobs:
            await self._act("qdel", job)

    async def signal(self, jobs: Sequence[str], signal: str) -> None:
        for job in jobs:
            await self._act("qsig", "-s", f"SIG{signal}", job)

    async def _act(self, *words: str) -> None:
        done = await self._commands.run(words, timeout_s=ASK_TIMEOUT_S)
        if done.code not in (0, _UNKNOWN, _FINISHED):
            raise BackendError(f"{words[0]}: {done.words}")

    async def execute_on(self, node: str, line: str, words: Sequence[str], timeout_s: float) -> ExecResult:
        raise BackendRefused("no command can be run on a node this way", hint="log in to the node")

    async def execute(self, job: str, words: Sequence[str], timeout_s: float) -> ExecResult:
        raise BackendRefused("PBS runs no command beside a run", hint="read the run's log instead")

    async def _ask(self, *words: str, fine: Sequence[int] = ()) -> dict[str, Any]:
        done = await self._commands.run(words, timeout_s=ASK_TIMEOUT_S, env={"TZ": "UTC"})
        if done.code not in (0, *fine):
            raise BackendError(f"{words[0]}: {done.words}", hint="is the PBS server up? see `qstat -B`")
        return parse(words[0], done)


def parse(command: str, done: Done) -> dict[str, Any]:
    """What it printed as JSON. Old ones write control characters of users' variables as they are."""
    text = re.sub(rb"[\x00-\x08\x0b-\x1f]", b" ", done.stdout[max(done.stdout.find(b"{"), 0) :])
    try:
        told = msgspec.json.decode(text)
    except msgspec.MsgspecError as error:
        raise BackendError(f"{command} did not answer in JSON: {error}") from None
    return told if isinstance(told, dict) else {}


def submit_words(wanted: Submission, *, requeue: bool) -> tuple[str, ...]:
    chunk = [f"ncpus={wanted.cpus}", f"mem={wanted.memory_mib}mb"]
    if wanted.gpus:
        chunk.append(f"ngpus={wanted.gpus}")
    chunk += [f"{name}={amount}" for name, amount in sorted(wanted.devices.items())]
    if wanted.node:
        chunk.append(f"vnode={wanted.node}")
    words = ["qsub", "-N", pbs_name(wanted.name), "-q", wanted.line, "-l", f"select=1:{':'.join(chunk)}"]
    if wanted.minutes:
        words += ["-l", f"walltime={wanted.minutes // 60:02}:{wanted.minutes % 60:02}:00"]
    words += ["-o", wanted.stdout, "-e", wanted.stderr, "-k", "doe", "-r", "y" if requeue else "n"]
    words += ["-m", "n", "-v", f"{pbs_states.MARK}={wanted.mark}"]
    for name, value in wanted.options:
        words += [f"-{name}", value] if value else [f"-{name}"]
    # No word that a shell, or PBS on the way, could take for more than itself.
    return (*words, "--", SHELL, "-l", wanted.script_file, wanted.claim)


def put_script(wanted: Submission) -> None:
    """Anew each time: the one from before may be half written. Blocks."""
    try:
        fresh = f"{wanted.script_file}.new"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            first, _, rest = wanted.script.partition("\n")
            file.write(f"{first}\n{_MAKE_WAY}\n{rest}".encode())
        os.rename(fresh, wanted.script_file)
    except OSError as error:
        raise BackendError(
            f"the script {wanted.script_file} cannot be written: {error.strerror}",
            hint="is the output folder there?",
            code=NOT_REACHED,
        ) from None


def pbs_name(name: str) -> str:
    """PBS takes no spaces in a name, and a letter or digit first."""
    return re.sub(r"^[^A-Za-z0-9]+", "", re.sub(r"[^A-Za-z0-9_.+-]", "_", name)) or "hodei"
