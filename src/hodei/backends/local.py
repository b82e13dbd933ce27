"""Processes on this machine, run by the host agent (`hodei.agent`) over its unix socket.

Translates between the agent and `ports.Backend`, and offers the machine as one node, or as the virtual nodes of the
configuration. After an outage every end that was not forgotten is reported again.
"""

from __future__ import annotations

import asyncio
import base64
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from hodei.backends import machine
from hodei.backends.agent_link import AgentSupervisor, Link, Observation, list_runs
from hodei.backends.base import (
    COMMAND_LIMIT,
    LOOPBACK,
    BackendContext,
    BaseBackend,
    check_size,
    resolve_health_check,
    run_env,
)
from hodei.model.backend import Capabilities, ExecResult, NodeUsage
from hodei.model.effects import Forget, Start, Stop, TakeCheckpoint
from hodei.model.errors import BackendError, BackendRefused, NotFound
from hodei.model.facts import RunObserved
from hodei.model.ids import NodeName, RunId
from hodei.model.job import Checkpoint, HealthCheck, Interactive, cpu_shares, oom_score_adj, qos
from hodei.model.node import Location, Node, Socket, Taint, architecture
from hodei.model.resources import CPU, MEMORY, Resources
from hodei.ports import Stream

ORDERS_PER_MESSAGE = 500
# Shorter than the timeout of clients, so that they get a reason.
READ_TIMEOUT_S = 10.0
# Of the whole machine, also for virtual nodes: the kernel scales OOM scores by the real memory.
_HOST_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class VirtualNode(Struct, frozen=True, omit_defaults=True):
    """A slice of this machine. Resources that are not given are those of the whole machine; `cpus` pins runs to these cores
    unless they have a grant of their own; an empty `arch` is the machine's own, an empty `address` the loopback."""

    name: NodeName
    capacity: Resources = {}
    labels: dict[str, str] = {}
    taints: tuple[Taint, ...] = ()
    arch: str = ""
    gpu_type: str = ""
    location: Location = Location()
    cpus: tuple[int, ...] = ()
    data: tuple[str, ...] = ()
    cost_milli: int = 0
    overcommit_percent: dict[str, int] = {}
    sockets: tuple[Socket, ...] = ()
    address: str = ""


class _Started(Struct):
    refused: dict[str, str]


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


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """No settings: one more agent on this machine, offered as one node with the backend's name."""


def make(name: str, settings: Settings, context: BackendContext) -> LocalBackend:
    return LocalBackend(
        name,
        home=context.home / name,
        installation=context.installation,
        epoch=context.epoch,
        nodes=(VirtualNode(name),),
        keep_logs_s=context.keep_logs_s,
        log_cap_bytes=context.log_cap_bytes,
    )


class LocalBackend(BaseBackend):
    """`ports.Backend` for this machine. `home` is the agent's; `installation` and `epoch` come from the store."""

    kind = "local"
    capabilities = Capabilities(
        gpu_shares=True,
        limits=True,
        checkpoint=True,
        health_checks=True,
        idle_timeouts=True,
        execute=True,
        node_execute=True,
        usage=True,
    )

    def __init__(
        self,
        name: str = "local",
        *,
        home: Path,
        installation: str,
        epoch: int,
        nodes: Sequence[VirtualNode] = (),
        linger_s: float = 30,
        keep_logs_s: float = 7 * 86_400,
        log_cap_bytes: int | None = None,
    ) -> None:
        super().__init__(name)
        self._home = home
        self._virtual_nodes = {node.name: node for node in nodes}
        self._log_cap_bytes = log_cap_bytes
        self._agent = AgentSupervisor(
            name,
            home,
            installation,
            epoch,
            linger_s=linger_s,
            keep_logs_s=keep_logs_s,
            on_observations=self._add_observations,
            on_outage=self._add_outage,
        )
        self._outage: BackendError | None = None
        self._observations: list[RunObserved] = []
        self._changed = asyncio.Event()
        self._capacity: Resources | None = None
        self._cpu_meter = machine.CpuMeter()

    async def open(self) -> None:
        await self._agent.open()

    async def close(self) -> None:
        await self._agent.close()

    def _add_observations(self, seen: list[Observation]) -> None:
        self._observations.extend(each.to_fact() for each in seen if each.state != "placed")
        if self._observations:
            self._changed.set()

    def _add_outage(self, error: BackendError) -> None:
        """`observe` raises it, and the caller reconciles when the agent is back."""
        self._outage = error
        self._changed.set()

    async def observe(self) -> list[RunObserved]:
        await self._changed.wait()
        if self._agent.superseded is not None:
            raise self._agent.superseded
        if self._observations:
            seen, self._observations = self._observations, []
            if self._outage is None:
                self._changed.clear()
            return seen
        self._changed.clear()
        outage, self._outage = self._outage, None
        if outage is not None:
            raise outage
        return []

    async def known(self) -> dict[RunId, RunObserved]:
        return {seen.run: seen.to_fact() for seen in await list_runs(await self._agent.responsive_link())}

    async def nodes(self) -> list[Node]:
        if self._capacity is None:
            # Once: free disk space changes with every write, which would change the node each time.
            self._capacity = machine.capacity(self._home if self._home.exists() else Path("/"))
        host = machine.hostname()
        virtual = list(self._virtual_nodes.values()) or [VirtualNode(host, sockets=machine.sockets())]
        return [
            Node(
                name=node.name,
                backend=self.name,
                kind=self.kind,
                capacity={**self._capacity, **node.capacity},
                labels={
                    "hodei.io/hostname": host,
                    "kubernetes.io/hostname": node.name,
                    "kubernetes.io/os": sys.platform,
                    "kubernetes.io/arch": architecture(node.arch or platform.machine()),
                    **node.labels,
                },
                taints=node.taints,
                arch=architecture(node.arch or platform.machine()),
                gpu_type=node.gpu_type,
                location=node.location,
                data=node.data,
                cost_milli=node.cost_milli,
                overcommit_percent=node.overcommit_percent,
                sockets=node.sockets,
                address=node.address or LOOPBACK,
            )
            for node in virtual
        ]

    async def ping(self) -> str:
        answer = msgspec.json.decode(await self._read("facts"))
        problem = answer.get("problem")
        return f"host agent, process {answer['pid']}" + (f"; {problem}" if problem else "")

    async def usage(self) -> dict[NodeName, NodeUsage]:
        """Of the whole machine; the usage of virtual nodes is not measured."""
        nodes = await self.nodes()
        if len(nodes) != 1:
            return {}
        return {nodes[0].name: NodeUsage({CPU: self._cpu_meter.milli(), MEMORY: machine.memory_used()})}

    async def start(self, orders: Sequence[Start]) -> dict[RunId, BackendError | BackendRefused]:
        link = await self._agent.responsive_link()
        refused: dict[RunId, BackendError | BackendRefused] = {}
        batch: list[Order] = []
        size = 0
        for order in orders:
            try:
                node = self._virtual_nodes.get(order.run.node)
                wire = start_order(
                    order,
                    cpus=node.cpus if node else (),
                    log_cap=self._log_cap_bytes,
                    address=node.address if node and node.address else LOOPBACK,
                    host_memory=_HOST_MEMORY,
                )
            except BackendRefused as error:
                refused[order.run.id] = error
                continue
            batch.append(wire)
            size += wire.size
            if len(batch) == ORDERS_PER_MESSAGE or size > COMMAND_LIMIT:
                refused |= await self._send(link, batch)
                batch, size = [], 0
        if batch:
            refused |= await self._send(link, batch)
        return refused

    @staticmethod
    async def _send(link: Link, orders: list[Order]) -> dict[RunId, BackendRefused]:
        answer = msgspec.json.decode(await link.request("start", runs=orders), type=_Started)
        return {run: BackendRefused(text) for run, text in answer.refused.items()}

    async def stop(self, orders: Sequence[Stop]) -> None:
        await self._order("stop", [stop_order(order) for order in orders])

    async def checkpoint(self, orders: Sequence[TakeCheckpoint]) -> None:
        await self._order("checkpoint", [{"run": order.run, "checkpoint": _hook(order.checkpoint)} for order in orders])

    async def forget(self, orders: Sequence[Forget]) -> None:
        await self._order("forget", [order.run for order in orders])

    async def _order(self, op: str, runs: Sequence[Any]) -> None:
        if runs:
            await (await self._agent.responsive_link()).request(op, runs=runs)

    async def _read(self, op: str, *, timeout_s: float = READ_TIMEOUT_S, **fields: Any) -> msgspec.Raw:
        link = await self._agent.responsive_link(wait_if_unresponsive=False)
        return await link.request(op, timeout_s=timeout_s, **fields)

    async def execute(self, run: RunId, command: Sequence[str], timeout_ms: int) -> ExecResult:
        try:
            answer = await self._read(
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

    async def execute_on(self, node: NodeName, command: Sequence[str], timeout_ms: int) -> ExecResult:
        """As the server's user: every node is this machine."""
        if node not in {each.name for each in await self.nodes()}:
            raise NotFound(f"there is no node {node} in backend {self.name}", hint="see `hodei nodes`")
        return await machine.execute(command, timeout_ms / 1000)

    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        try:
            answer = await self._read("logs", run=run, stream=stream, offset=offset, limit=limit)
        except BackendError as error:
            if error.code == "NO_LOG":
                raise NotFound(error.message) from None
            raise
        log = msgspec.json.decode(answer, type=_Log)
        return base64.b64decode(log.data), log.offset

    async def log_times(self, run: RunId, stream: Stream) -> list[tuple[int, int]]:
        try:
            answer = await self._read("log_times", run=run, stream=stream)
        except BackendError:
            return []  # an older agent, or none: the log is readable without times
        return msgspec.json.decode(answer, type=_LogTimes).marks


class Order(Struct, omit_defaults=True):
    """A start for the agent. `checkpoint_file`: None if the job takes no checkpoints, "" for the agent's default. `save`: the
    hook, if the agent takes checkpoints by itself."""

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
) -> Order:
    """`cpus` and `address` are the node's; a grant replaces the cores. BackendRefused if it can never run here."""
    run, spec, task = order.run, order.spec, order.task
    if task.image:
        raise BackendRefused(
            "local processes cannot run an image", hint="leave out `image`, or choose a backend with containers"
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
