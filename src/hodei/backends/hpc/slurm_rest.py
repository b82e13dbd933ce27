"""Slurm by slurmrestd (OpenAPI v0.0.38 and similar versions), on a unix socket or over TCP with a token.

A few jobs are requested one by one, many in one request, which slurmrestd answers with 304 if nothing has changed. Commands in
runs and the accounting history are not available: `slurm` has them.
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
from hodei.backends.hpc.ports import Cluster, JobStatus, OutcomeUnknown, Submission
from hodei.backends.hpc.slurm_parse import (
    SlurmNode,
    cluster,
    escape_path,
    gres_request,
    job_status,
    rejection,
    rest_node,
    rest_partition,
    usage,
)
from hodei.http_client import IDLE_S, Origin, Pool, Unreached, encode_request
from hodei.model.backend import ExecResult
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused
from hodei.model.resources import Resources

TIMEOUT_S = 25.0
CONNECTIONS = 4
# A connection used this recently has not been closed by the server. One that closes during a submission leaves its outcome open.
FRESH_S = 1.0
# Up to this many jobs are requested one by one.
FEW_JOBS = 8
# Clocks may differ by this much.
SKEW_S = 2
# A full job list is requested at least this often.
FULL_LIST_EVERY_S = 15
UNKNOWN_JOB = 2017
_ENDED_OR_UNKNOWN = (UNKNOWN_JOB, 2021)
ALREADY_SUSPENDED = "can not be altered now"
# Slurm's error numbers for a message that may have been sent and was not answered, and for one that could not be sent.
_OUTCOME_UNKNOWN = {1000, 1002, 1003, 1004, 1007, 1008, 1801, 1802, 1803, *range(5000, 5010)}
_NOT_REACHED = {1001, 1800}
# Statuses with which slurmrestd, or a proxy before it, rejects a request without passing it on.
_REJECTED_STATUSES = {400, 401, 403, 404, 405, 411, 413, 414, 415, 429}
# Fields of the REST API for options of jobs.
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

    @property
    def text(self) -> str:
        return ": ".join(filter(None, (self.error, self.description)))[:400]


class _Job(Struct):
    job_id: int
    job_state: str
    comment: str | None = ""
    state_reason: str | None = ""
    exit_code: int | None = 0
    start_time: int | None = 0
    end_time: int | None = 0
    submit_time: int | None = 0

    def status(self) -> JobStatus:
        return job_status(
            job=str(self.job_id),
            mark=self.comment or "",
            state=self.job_state,
            reason=self.state_reason or "",
            code=str(self.exit_code if self.exit_code is not None else ""),
            start_s=self.start_time or 0,
            end_s=self.end_time or 0,
            submit_s=self.submit_time or 0,
        )


class _Response(Struct):
    errors: list[_Error] = []
    jobs: list[_Job] = []
    job_id: int | None = None
    nodes: list[dict[str, Any]] = []
    partitions: list[dict[str, Any]] = []
    pings: list[dict[str, Any]] = []


_decode = msgspec.json.Decoder(_Response).decode


class SlurmRest:
    """`ports.BatchSystem` for Slurm. `token_file` is read again when it changes."""

    uses_commands = False
    max_array_size = 1
    job_variable = "SLURM_JOB_ID"
    node_variable = "SLURMD_NODENAME"
    element_id = ""

    def __init__(
        self, address: str, *, version: str, user: str = "", token_file: str = "", requeue: bool = False
    ) -> None:
        self._address = address
        self._pool: Pool | None = None
        self._root = f"/slurm/{version}/"
        self._user, self._token_file, self._requeue = user, token_file, requeue
        self._token = ("", 0)
        self._jobs: list[_Job] = []
        self._asked_s = self._full_list_s = 0

    def inherit(self, lock: int) -> None:
        """There are no commands."""

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    async def ping(self) -> str:
        pings = (await self._get("ping")).pings
        up = [ping for ping in pings if ping.get("ping") == "UP"]
        if not up:
            raise BackendError("slurmrestd answers, but slurmctld does not", hint="see `scontrol ping`")
        return f"slurmctld at {up[0].get('hostname')} is up"

    async def cluster(self) -> Cluster:
        partitions = (await self._get("partitions")).partitions
        return cluster(await self._nodes(), [rest_partition(fields) for fields in partitions])

    async def usage(self) -> dict[str, Resources]:
        return usage(await self._nodes())

    async def _nodes(self) -> list[SlurmNode]:
        return [rest_node(fields) for fields in (await self._get("nodes")).nodes]

    async def submit(self, submission: Submission) -> str:
        body = {"script": submission.script, "job": submit_fields(submission, requeue=self._requeue)}
        status, response = await self._request("POST", "job/submit", msgspec.json.encode(body), once=True)
        if response.job_id and not response.errors:
            return str(response.job_id)
        error = response.errors[0] if response.errors else _Error(f"HTTP status {status}")
        # A response without an error number is not Slurm's: a proxy may have lost Slurm's response.
        if error.number in _OUTCOME_UNKNOWN or not (error.number or status in _REJECTED_STATUSES):
            raise OutcomeUnknown(f"slurmrestd: {error.text}")
        if error.number in _NOT_REACHED:
            raise BackendError(f"slurmctld cannot be reached: {error.text}", code=NOT_REACHED)
        raise rejection(error.text)

    async def submit_array(self, submissions: Sequence[Submission], mark: str) -> list[str]:
        return [await self.submit(submission) for submission in submissions]

    async def status(self, jobs: Collection[str]) -> list[JobStatus]:
        if len(jobs) <= FEW_JOBS:
            found = await asyncio.gather(*(self._job(job) for job in jobs))
            return [job.status() for each in found for job in each]
        return [job.status() for job in await self._all_jobs() if str(job.job_id) in jobs]

    async def marked(self, prefix: str) -> list[JobStatus]:
        self._asked_s = 0
        return [job.status() for job in await self._all_jobs() if (job.comment or "").startswith(prefix)]

    async def _job(self, job: str) -> list[_Job]:
        _, response = await self._request("GET", f"job/{job}")
        if any(error.number == UNKNOWN_JOB for error in response.errors):
            return []
        _raise_errors(response)
        return response.jobs

    async def _all_jobs(self) -> list[_Job]:
        now_s = int(time.time())
        recent = now_s - self._full_list_s < FULL_LIST_EVERY_S and self._asked_s
        status, response = await self._request(
            "GET", f"jobs?update_time={self._asked_s - SKEW_S}" if recent else "jobs"
        )
        if status == 304:
            return self._jobs
        _raise_errors(response)
        self._asked_s = self._full_list_s = now_s
        self._jobs = response.jobs
        return response.jobs

    async def history(self, jobs: Collection[str]) -> list[JobStatus]:
        return []

    async def expected_starts(self) -> dict[str, int]:
        pending = (job for job in await self._all_jobs() if job.job_state == "PENDING" and job.start_time)
        return {str(job.job_id): job.start_time * 1000 for job in pending if job.start_time}

    async def cancel(self, jobs: Sequence[str]) -> None:
        for job in jobs:
            await self._delete(f"job/{job}")

    async def signal(self, jobs: Sequence[str], signal: str) -> None:
        for job in jobs:
            await self._delete(f"job/{job}?signal={signal}", ignore=ALREADY_SUSPENDED if signal == "STOP" else "")

    async def _delete(self, path: str, *, ignore: str = "") -> None:
        _, response = await self._request("DELETE", path)
        errors = [error for error in response.errors if error.number not in _ENDED_OR_UNKNOWN]
        _raise_errors(_Response([error for error in errors if not ignore or ignore not in error.text]))

    async def execute_on(self, node: str, partition: str, command: Sequence[str], timeout_s: float) -> ExecResult:
        raise BackendRefused("slurmrestd cannot run a command on a node", hint="log in to the node")

    async def execute(self, job: str, command: Sequence[str], timeout_s: float) -> ExecResult:
        raise BackendRefused("slurmrestd cannot run a command in a job", hint='set transport = "commands"')

    async def _get(self, path: str) -> _Response:
        _, response = await self._request("GET", path)
        _raise_errors(response)
        return response

    async def _request(self, method: str, path: str, body: bytes = b"", *, once: bool = False) -> tuple[int, _Response]:
        """`once`: it must not be repeated; OutcomeUnknown if it may have arrived without a response."""
        try:
            status, text = await self._exchange(method, self._root + path, body, FRESH_S if once else IDLE_S)
        except Unreached as failure:
            error = f"slurmrestd at {self._address}: {failure.why}"
            if failure.sent and once:
                raise OutcomeUnknown(error) from None
            hint = "check that slurmrestd is running; see docs/how-to/slurm.md"
            raise BackendError(error, hint=hint, code="" if failure.sent else NOT_REACHED) from None
        if status == 304 or not text:
            return status, _Response(errors=[] if status < 400 else [_Error(f"HTTP status {status}")])
        try:
            return status, _decode(text)
        except msgspec.MsgspecError:
            excerpt = text[:200].decode(errors="replace")
            return status, _Response(errors=[_Error(f"HTTP status {status}: {' '.join(excerpt.split())}")])

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


def submit_fields(submission: Submission, *, requeue: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": submission.name,
        "comment": submission.mark,
        "partition": submission.partition,
        "nodes": [1, 1],
        "tasks": 1,
        "cpus_per_task": submission.cpus,
        "memory_per_node": submission.memory_mib,
        "standard_output": escape_path(submission.stdout),
        "standard_error": escape_path(submission.stderr),
        "standard_input": "/dev/null",
        "open_mode": "append",
        "current_working_directory": "/",
        "environment": clean_environment({}),
        # Slurm reads `"requeue": false` as true.
        "requeue" if requeue else "no_requeue": True,
    }
    if submission.node:
        fields["nodelist"] = submission.node
    if submission.minutes:
        fields["time_limit"] = submission.minutes
    if submission.storage_mib:
        fields["temporary_disk_per_node"] = submission.storage_mib
    if gres := gres_request(submission):
        fields["gres"] = gres
    for name, value in submission.options:
        if name not in _FIELDS:
            raise BackendRefused(f"--{name} is not available by REST", hint='remove it, or set transport = "commands"')
        fields[_FIELDS[name]] = int(value) if name in _NUMBERS else value
    return fields


def _raise_errors(response: _Response) -> None:
    if response.errors:
        raise BackendError(f"slurmrestd: {response.errors[0].text}")
