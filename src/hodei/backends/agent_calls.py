"""Orders to a host agent and its answers, for every backend whose runs are started by agents.

`agent_link` carries them; the agent's side is `hodei.agent.service`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from hodei.backends.agent_link import Link
from hodei.backends.base import COMMAND_LIMIT, LOOPBACK, check_size, resolve_health_check, run_env
from hodei.model.backend import ExecResult
from hodei.model.effects import Start, Stop, TakeCheckpoint
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused, NotFound
from hodei.model.ids import RunId
from hodei.model.job import Checkpoint, HealthCheck, Interactive, cpu_shares, oom_score_adj, qos
from hodei.model.resources import CPU, MEMORY
from hodei.ports import Stream

ORDERS_PER_MESSAGE = 500
# Shorter than the timeout of clients, so that they get a reason.
READ_TIMEOUT_S = 10.0


class _Started(Struct):
    refused: dict[str, str]
    late: list[str] = []


class _Executed(Struct):
    exit_code: int | None
    stdout: str
    stderr: str
    cut: bool


class _Log(Struct):
    data: str
    offset: int


class _LogTimes(Struct):
    marks: list[tuple[int, int]]


class Order(Struct, omit_defaults=True):
    """A start for the agent. `checkpoint_file`: None if the job takes no checkpoints, "" for the agent's default. `save`: the
    hook, if the agent takes checkpoints by itself. `start_by_ms`: the agent refuses to start it after this time of the server's
    clock (0: no limit)."""

    run: str
    argv: tuple[str, ...]
    env: dict[str, str]
    workdir: str = ""
    cpu_milli: int = 0
    memory_bytes: int = 0
    cpus: tuple[int, ...] = ()
    cpu_shares: int = 0
    oom_score_adj: int | None = None
    timeout_ms: int = 0
    grace_ms: int | None = None
    log_cap: int | None = None
    checkpoint_file: str | None = None
    save: dict[str, Any] | None = None
    save_every_ms: int = 0
    health: HealthCheck | None = None
    idle_ms: int = 0
    start_by_ms: int = 0

    @property
    def size(self) -> int:
        return sum(map(len, self.argv)) + sum(len(name) + len(value) for name, value in self.env.items())


def start_order(
    order: Start,
    *,
    cpus: tuple[int, ...] = (),
    log_cap: int | None = None,
    address: str = LOOPBACK,
    host_memory: int = 0,
    start_by_ms: int = 0,
) -> Order:
    """`cpus` and `address` are the node's; a grant replaces the cores. BackendRefused if it can never run here."""
    run, spec, task = order.run, order.spec, order.task
    if task.image:
        raise BackendRefused(
            "processes of a host cannot run an image", hint="leave out `image`, or choose a backend with containers"
        )
    if not task.command:
        raise BackendRefused("the task has no command", hint="give it a `command`")
    if run.grant is not None and run.grant.cpus:
        cpus = run.grant.cpus
    env = {**task.env, **run_env(order, cpus)}
    idle_ms = spec.workload.idle_timeout_ms if type(spec.workload) is Interactive else 0
    check_size(task.command, env)
    return Order(
        run=run.id,
        argv=task.command,
        env=env,
        workdir=task.workdir,
        cpu_milli=task.limits.get(CPU, 0),
        memory_bytes=task.limits.get(MEMORY, 0),
        cpus=cpus,
        # A weight needs a cgroup, which costs time: only for runs that have one anyway, and for best-effort runs.
        cpu_shares=cpu_shares(task) if task.limits.get(CPU, 0) or qos(task) == "best-effort" else 0,
        oom_score_adj=oom_score_adj(task, host_memory),
        timeout_ms=spec.timeout_ms,
        grace_ms=spec.grace_ms,
        log_cap=log_cap,
        checkpoint_file=spec.checkpoint.file if spec.checkpoint != Checkpoint() else None,
        save=_hook(spec.checkpoint) if spec.checkpoint.every_ms or idle_ms else None,
        save_every_ms=spec.checkpoint.every_ms,
        health=resolve_health_check(spec.health, address) if spec.health.enabled else None,
        idle_ms=idle_ms,
        start_by_ms=start_by_ms,
    )


def stop_order(order: Stop) -> dict[str, Any]:
    wire: dict[str, Any] = {"run": order.run, "grace_ms": order.grace_ms, "reason": order.reason.text}
    if order.checkpoint is not None and (hook := _hook(order.checkpoint)) is not None:
        wire["checkpoint"] = hook
    return wire


def _hook(checkpoint: Checkpoint) -> dict[str, Any] | None:
    if not checkpoint.has_hook:
        return None
    return {"signal": checkpoint.signal, "command": checkpoint.command, "timeout_ms": checkpoint.timeout_ms}


async def send_starts(
    link: Link, orders: Sequence[Order], *, timeout_s: float | None = 60
) -> dict[RunId, BackendError | BackendRefused]:
    """What the agent refuses, by run: for good, or NOT_REACHED after `start_by_ms`. Messages of bounded size."""
    refused: dict[RunId, BackendError | BackendRefused] = {}
    batch: list[Order] = []
    size = 0
    for order in orders:
        batch.append(order)
        size += order.size
        if len(batch) == ORDERS_PER_MESSAGE or size > COMMAND_LIMIT:
            refused |= await _send_batch(link, batch, timeout_s)
            batch, size = [], 0
    return refused | await _send_batch(link, batch, timeout_s) if batch else refused


async def _send_batch(
    link: Link, orders: Sequence[Order], timeout_s: float | None
) -> dict[RunId, BackendError | BackendRefused]:
    answer = msgspec.json.decode(await link.request("start", timeout_s=timeout_s, runs=orders), type=_Started)
    late = BackendError("the order reached the host after its deadline", code=NOT_REACHED)
    refused: dict[RunId, BackendError | BackendRefused] = dict.fromkeys(answer.late, late)
    return refused | {run: BackendRefused(text) for run, text in answer.refused.items()}


def checkpoint_order(order: TakeCheckpoint) -> dict[str, Any]:
    return {"run": order.run, "checkpoint": _hook(order.checkpoint)}


async def execute(link: Link, run: RunId, command: Sequence[str], timeout_ms: int) -> ExecResult:
    """A command inside a run. NotFound if it does not run."""
    try:
        answer = await link.request(
            "execute", timeout_s=timeout_ms / 1000 + 10, run=run, command=command, timeout_ms=timeout_ms
        )
    except BackendError as error:
        if error.code == "NOT_RUNNING":
            raise NotFound(error.message, hint="commands need a running run") from None
        if error.code == "BAD_REQUEST":
            raise BackendRefused(error.message) from None
        raise
    done = msgspec.json.decode(answer, type=_Executed)
    return ExecResult(done.exit_code, base64.b64decode(done.stdout), base64.b64decode(done.stderr), done.cut)


async def read_log(link: Link, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
    """NotFound if the agent keeps no log of this run."""
    try:
        answer = await link.request(
            "logs", timeout_s=READ_TIMEOUT_S, run=run, stream=stream, offset=offset, limit=limit
        )
    except BackendError as error:
        if error.code == "NO_LOG":
            raise NotFound(error.message) from None
        raise
    log = msgspec.json.decode(answer, type=_Log)
    return base64.b64decode(log.data), log.offset


async def read_log_times(link: Link, run: RunId, stream: Stream) -> list[tuple[int, int]]:
    try:
        answer = await link.request("log_times", timeout_s=READ_TIMEOUT_S, run=run, stream=stream)
    except BackendError:
        return []  # an older agent, or none: the log is readable without times
    return msgspec.json.decode(answer, type=_LogTimes).marks
