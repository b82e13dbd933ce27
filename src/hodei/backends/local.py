"""Processes on this machine, run by the host agent (`hodei.agent`) over its unix socket.

Translates between the agent and `ports.Backend`, and offers the machine as one node, or as the virtual nodes of the
configuration. After an outage every end that was not forgotten is reported again.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from hodei.backends import machine
from hodei.backends.agent_calls import (
    READ_TIMEOUT_S,
    Order,
    checkpoint_order,
    execute,
    read_log,
    read_log_times,
    send_starts,
    start_order,
    stop_order,
)
from hodei.backends.agent_link import AgentSupervisor, Link, Observation, list_runs, read_usage
from hodei.backends.base import LOOPBACK, BackendContext, BaseBackend
from hodei.model.backend import Capabilities, ExecResult, NodeUsage
from hodei.model.effects import Forget, Start, Stop, TakeCheckpoint
from hodei.model.errors import BackendError, BackendRefused, NotFound
from hodei.model.facts import RunObserved
from hodei.model.ids import NodeName, RunId
from hodei.model.node import Location, Node, Socket, Taint, architecture
from hodei.model.resources import CPU, GPU, MEMORY, Resources
from hodei.model.usage import RunUsage
from hodei.ports import Stream

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
        run_usage=True,
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
        self._gpu_type = ""
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
            capacity = machine.capacity(self._home if self._home.exists() else Path("/"))
            gpus, self._gpu_type = await asyncio.to_thread(machine.gpus)
            self._capacity = {**capacity, GPU: gpus * 1000} if gpus else capacity
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
                gpu_type=node.gpu_type or (self._gpu_type if node.capacity.get(GPU, 1) else ""),
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
        answer = msgspec.json.decode(await (await self._readable_link()).request("facts", timeout_s=READ_TIMEOUT_S))
        problem = answer.get("problem")
        return f"host agent, process {answer['pid']}" + (f"; {problem}" if problem else "")

    async def usage(self) -> dict[NodeName, NodeUsage]:
        """Of the whole machine; the usage of virtual nodes is not measured."""
        nodes = await self.nodes()
        if len(nodes) != 1:
            return {}
        return {nodes[0].name: NodeUsage({CPU: self._cpu_meter.milli(), MEMORY: machine.memory_used()})}

    async def run_usage(self, runs: Collection[RunId]) -> dict[RunId, RunUsage]:
        return await read_usage(await self._agent.responsive_link(wait_if_unresponsive=False), runs)

    async def start(self, orders: Sequence[Start]) -> dict[RunId, BackendError | BackendRefused]:
        link = await self._agent.responsive_link()
        refused: dict[RunId, BackendError | BackendRefused] = {}
        accepted: list[Order] = []
        for order in orders:
            node = self._virtual_nodes.get(order.run.node)
            try:
                accepted.append(
                    start_order(
                        order,
                        cpus=node.cpus if node else (),
                        log_cap=self._log_cap_bytes,
                        address=node.address if node and node.address else LOOPBACK,
                        host_memory=_HOST_MEMORY,
                    )
                )
            except BackendRefused as error:
                refused[order.run.id] = error
        return {**refused, **await send_starts(link, accepted)}

    async def stop(self, orders: Sequence[Stop]) -> None:
        await self._order("stop", [stop_order(order) for order in orders])

    async def checkpoint(self, orders: Sequence[TakeCheckpoint]) -> None:
        await self._order("checkpoint", [checkpoint_order(order) for order in orders])

    async def forget(self, orders: Sequence[Forget]) -> None:
        await self._order("forget", [order.run for order in orders])

    async def _order(self, op: str, runs: Sequence[Any]) -> None:
        if runs:
            await (await self._agent.responsive_link()).request(op, runs=runs)

    async def _readable_link(self) -> Link:
        return await self._agent.responsive_link(wait_if_unresponsive=False)

    async def execute(self, run: RunId, command: Sequence[str], timeout_ms: int) -> ExecResult:
        return await execute(await self._readable_link(), run, command, timeout_ms)

    async def execute_on(self, node: NodeName, command: Sequence[str], timeout_ms: int) -> ExecResult:
        """As the server's user: every node is this machine."""
        if node not in {each.name for each in await self.nodes()}:
            raise NotFound(f"there is no node {node} in backend {self.name}", hint="see `hodei nodes`")
        return await machine.execute(command, timeout_ms / 1000)

    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        return await read_log(await self._readable_link(), run, stream, offset, limit)

    async def log_times(self, run: RunId, stream: Stream) -> list[tuple[int, int]]:
        try:
            return await read_log_times(await self._readable_link(), run, stream)
        except BackendError:
            return []
