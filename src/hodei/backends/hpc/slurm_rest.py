"""Slurm by slurmrestd (OpenAPI v0.0.38 and near ones): on a unix socket as the caller's own account, or over TCP with a token.

A few jobs are asked for one by one; many in one question, which is answered with "nothing new" (304) as long as nothing
changed. There is no way to run a command beside a run, and no history here: see `slurm_commands` for these.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from hodei.backends.hpc.commands import clean_environment
from hodei.backends.hpc.ports import Cluster, Doubtful, Seen, Submission
from hodei.backends.hpc.slurm_commands import NEVER, gres_words
from hodei.backends.hpc.slurm_nodes import SlurmNode, cluster, rest_node, rest_partition, seen_of, usage
from hodei.http_client import IDLE_S, Origin, Pool, Unreached, encode_request
from hodei.model.backend import ExecResult
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused
from hodei.model.resources import Resources

TIMEOUT_S = 25.0
CONNECTIONS = 4
# The server has not closed a connection that was in use this recently. One that closes under a submission leaves doubt.
FRESH_S = 1.0
FEW = 8
# Clocks may differ by this much; and a full answer is taken at least so often.
SKEW_S = 2
FULL_EVERY_S = 15
UNKNOWN_JOB = 2017
# Ended meanwhile, or never there.
_NOT_THERE = (UNKNOWN_JOB, 2021)
ALREADY_FROZEN = "can not be altered now"
# Slurm's numbers for a message that may have gone out and was not answered, and for one that had nowhere to go.
_IN_DOUBT = {1000, 1002, 1003, 1004, 1007, 1008, 1801, 1802, 1803, *range(5000, 5010)}
_NOT_REACHED = {1001, 1800}
# What slurmrestd itself, or a proxy before it, answers to a request that it did not hand on.
_TURNED_AWAY = {400, 401, 403, 404, 405, 411, 413, 414, 415, 429}
# Options that jobs may have, by their names here.
_FIELDS = {
    "account": "account", "qos": "qos", "reservation": "reservation", "constraint": "constraints", "licenses": "licenses",
    "nice": "nice", "exclude": "exclude_nodes", "nodelist": "nodelist", "distribution": "distribution",
    "threads-per-core": "threads_per_core", "cores-per-socket": "cores_per_socket", "wckey": "wckey",
}  # fmt: skip
_NUMBERS = {"nice", "threads-per-core", "cores-per-socket"}


class _Error(Struct):
    error: str = ""
    description: str = ""
    error_number: int = 0
    error_code: int = 0

    @property
    def number(self) -> int:
        return self.error_number or self.error_code


class _Job(Struct):
    job_id: int
    job_state: str
    comment: str | None = ""
    state_reason: str | None = ""
    exit_code: int | None = 0
    start_time: int | None = 0
    end_time: int | None = 0
    submit_time: int | None = 0
    restart_cnt: int | None = 0
    user_id: int | None = None

    def seen(self) -> Seen:
        return seen_of(
            job=str(self.job_id),
            mark=self.comment or "",
            state=self.job_state,
            reason=self.state_reason or "",
            code=str(self.exit_code if self.exit_code is not None else ""),
            start_s=self.start_time or 0,
            end_s=self.end_time or 0,
            submit_s=self.submit_time or 0,
            restarts=self.restart_cnt or 0,
        )


class _Answer(Struct):
    errors: list[_Error] = []
    jobs: list[_Job] = []
    job_id: int | None = None
    nodes: list[dict[str, Any]] = []
    partitions: list[dict[str, Any]] = []
    pings: list[dict[str, Any]] = []


_decode = msgspec.json.Decoder(_Answer).decode


class SlurmRest:
    """`queue.Queue` for Slurm. `token_file` is read anew when it changes."""

    by_commands = False
    most_at_once = 1
    job_variable = "SLURM_JOB_ID"
    node_variable = "SLURMD_NODENAME"
    element = ""

    def __init__(
        self, address: str, *, version: str, user: str = "", token_file: str = "", requeue: bool = False
    ) -> None:
        self._address = address
        self._pool: Pool | None = None
        self._root = f"/slurm/{version}/"
        self._user, self._token_file, self._requeue = user, token_file, requeue
        self._token = ("", 0)
        self._jobs: list[_Job] = []
        self._asked_s = self._full_s = 0

    def inherit(self, lock: int) -> None:
        """No commands, no heirs."""

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    async def ping(self) -> str:
        pings = (await self._get("ping")).pings
        up = [ping for ping in pings if ping.get("ping") == "UP"]
        if not up:
            raise BackendError("slurmrestd answers, slurmctld does not", hint="see `scontrol ping`")
        return f"slurmctld at {up[0].get('hostname')} is up"

    async def cluster(self) -> Cluster:
        partitions = (await self._get("partitions")).partitions
        return cluster(await self._nodes(), [rest_partition(told) for told in partitions])

    async def usage(self) -> dict[str, Resources]:
        return usage(await self._nodes())

    async def _nodes(self) -> list[SlurmNode]:
        return [rest_node(told) for told in (await self._get("nodes")).nodes]

    # --------------------------------------------------------------------------------------- handing in

    async def submit(self, wanted: Submission) -> str:
        body = msgspec.json.encode({"script": wanted.script, "job": submit_fields(wanted, requeue=self._requeue)})
        status, answer = await self._ask("POST", "job/submit", body, once=True)
        if answer.job_id and not answer.errors:
            return str(answer.job_id)
        error = answer.errors[0] if answer.errors else _Error(f"HTTP status {status}")
        # An answer without a number of Slurm's is not Slurm's: a proxy may have lost that one.
        if error.number in _IN_DOUBT or not (error.number or status in _TURNED_AWAY):
            raise Doubtful(f"slurmrestd: {_said(error)}")
        if error.number in _NOT_REACHED:
            raise BackendError(f"slurmctld is out of reach: {_said(error)}", code=NOT_REACHED)
        if NEVER.search(_said(error)):
            raise BackendRefused(f"Slurm refuses it: {_said(error)}", hint="see docs/how-to/slurm.md")
        raise BackendError(f"Slurm did not take it: {_said(error)}")

    # ------------------------------------------------------------------------------------------ looking

    async def submit_many(self, wanted: Sequence[Submission], mark: str) -> list[str]:
        return [await self.submit(one) for one in wanted]

    async def look(self, jobs: Collection[str]) -> list[Seen]:
        if len(jobs) <= FEW:
            found = await asyncio.gather(*(self._job(job) for job in jobs))
            return [job.seen() for each in found for job in each]
        return [job.seen() for job in await self._all() if str(job.job_id) in jobs]

    async def ours(self, prefix: str) -> list[Seen]:
        self._asked_s = 0
        return [job.seen() for job in await self._all() if (job.comment or "").startswith(prefix)]

    async def _job(self, job: str) -> list[_Job]:
        _, answer = await self._ask("GET", f"job/{job}")
        if any(error.number == UNKNOWN_JOB for error in answer.errors):
            return []
        _raise_if_wrong(answer)
        return answer.jobs

    async def _all(self) -> list[_Job]:
        now_s = int(time.time())
        recent = now_s - self._full_s < FULL_EVERY_S and self._asked_s
        status, answer = await self._ask("GET", f"jobs?update_time={self._asked_s - SKEW_S}" if recent else "jobs")
        if status == 304:
            return self._jobs
        _raise_if_wrong(answer)
        self._asked_s = self._full_s = now_s
        self._jobs = answer.jobs
        return answer.jobs

    async def remembered(self, jobs: Collection[str]) -> list[Seen]:
        return []

    async def expected(self) -> dict[str, int]:
        waiting = (job for job in await self._all() if job.job_state == "PENDING" and job.start_time)
        return {str(job.job_id): job.start_time * 1000 for job in waiting if job.start_time}

    # ------------------------------------------------------------------------------------------- acting

    async def cancel(self, jobs: Sequence[str]) -> None:
        for job in jobs:
            await self._delete(f"job/{job}")

    async def signal(self, jobs: Sequence[str], signal: str) -> None:
        for job in jobs:
            await self._delete(f"job/{job}?signal={signal}", fine=ALREADY_FROZEN if signal == "STOP" else "")

    async def _delete(self, path: str, *, fine: str = "") -> None:
        _, answer = await self._ask("DELETE", path)
        wrong = [error for error in answer.errors if error.number not in _NOT_THERE]
        _raise_if_wrong(_Answer([error for error in wrong if not fine or fine not in _said(error)]))

    async def execute_on(self, node: str, line: str, words: Sequence[str], timeout_s: float) -> ExecResult:
        raise BackendRefused("no command can be run on a node this way", hint="log in to the node")

    async def execute(self, job: str, words: Sequence[str], timeout_s: float) -> ExecResult:
        raise BackendRefused("slurmrestd runs no command beside a run", hint='set transport = "commands"')

    # ---------------------------------------------------------------------------------------- speaking

    async def _get(self, what: str) -> _Answer:
        _, answer = await self._ask("GET", what)
        _raise_if_wrong(answer)
        return answer

    async def _ask(self, method: str, what: str, body: bytes = b"", *, once: bool = False) -> tuple[int, _Answer]:
        """`once`: never repeat it; Doubtful if the request may have arrived without an answer."""
        try:
            status, text = await self._exchange(method, self._root + what, body, FRESH_S if once else IDLE_S)
        except Unreached as failure:
            error = f"slurmrestd at {self._address}: {failure.why}"
            if failure.sent and once:
                raise Doubtful(error) from None
            hint = "is slurmrestd up? see docs/how-to/slurm.md"
            raise BackendError(error, hint=hint, code="" if failure.sent else NOT_REACHED) from None
        if status == 304 or not text:
            return status, _Answer(errors=[] if status < 400 else [_Error(f"HTTP status {status}")])
        try:
            return status, _decode(text)
        except msgspec.MsgspecError:
            excerpt = text[:200].decode(errors="replace")
            return status, _Answer(errors=[_Error(f"HTTP status {status}: {' '.join(excerpt.split())}")])

    async def _exchange(self, method: str, target: str, body: bytes, idle_s: float) -> tuple[int, bytes]:
        if self._pool is None:
            self._pool = Pool(_origin(self._address), CONNECTIONS)
        headers = {"Connection": "keep-alive", "Accept": "application/json", **self._headers()}
        if body:
            headers["Content-Type"] = "application/json"
        data = encode_request(self._pool.origin, method, target, headers, body or None)
        reply = await self._pool.exchange(method, data, TIMEOUT_S, idle_s=idle_s)
        return reply.status, reply.body

    def _headers(self) -> dict[str, str]:
        if not self._token_file:
            return {}
        try:
            changed = os.stat(self._token_file).st_mtime_ns
            if changed != self._token[1]:
                text = Path(self._token_file).read_text().strip().removeprefix("SLURM_JWT=")
                self._token = (text, changed)
        except OSError as error:
            raise BackendError(f"the token file {self._token_file} cannot be read: {error.strerror}") from None
        return {"X-SLURM-USER-NAME": self._user or clean_environment({})["USER"], "X-SLURM-USER-TOKEN": self._token[0]}


def _origin(address: str) -> Origin:
    """`address`: unix:/path, http://host:port or https://host:port."""
    if address.startswith("unix:"):
        return Origin(unix=address.removeprefix("unix:").removeprefix("//"))
    url = urlsplit(address)
    tls = ssl.create_default_context() if url.scheme == "https" else None
    return Origin(url.hostname or "localhost", url.port or (443 if tls else 6820), tls)


def submit_fields(wanted: Submission, *, requeue: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": wanted.name,
        "comment": wanted.mark,
        "partition": wanted.line,
        "nodes": [1, 1],
        "tasks": 1,
        "cpus_per_task": wanted.cpus,
        "memory_per_node": wanted.memory_mib,
        "standard_output": wanted.stdout.replace("%", "%%"),
        "standard_error": wanted.stderr.replace("%", "%%"),
        "standard_input": "/dev/null",
        "open_mode": "append",
        "current_working_directory": "/",
        "environment": clean_environment({}),
        # `"requeue": false` would be taken for yes.
        "requeue" if requeue else "no_requeue": True,
    }
    if wanted.node:
        fields["nodelist"] = wanted.node
    if wanted.minutes:
        fields["time_limit"] = wanted.minutes
    if wanted.storage_mib:
        fields["temporary_disk_per_node"] = wanted.storage_mib
    if gres := gres_words(wanted):
        fields["gres"] = gres
    for name, value in wanted.options:
        if name not in _FIELDS:
            raise BackendRefused(f"--{name} cannot be said by REST", hint='leave it out, or set transport = "commands"')
        fields[_FIELDS[name]] = int(value) if name in _NUMBERS else value
    return fields


def _raise_if_wrong(answer: _Answer) -> None:
    if answer.errors:
        raise BackendError(f"slurmrestd: {_said(answer.errors[0])}")


def _said(error: _Error) -> str:
    return ": ".join(filter(None, (error.error, error.description)))[:400]
