"""Real processes on this machine, through the host agent on its unix socket.

The agent does the running (`hodei.agent`), `agent_reach` keeps it in reach. This file translates between it and
`ports.Backend`, and offers the machine as one node, or as the several virtual nodes that the configuration slices it
into. After an outage every end that was not yet forgotten is heard of again.
"""

from __future__ import annotations

import asyncio
import base64
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from hodei.agent.limits import enforcement
from hodei.backends import machine
from hodei.backends.agent_link import AgentSupervisor, Link, Told, known_to
from hodei.backends.base import BackendContext, PlainBackend
from hodei.backends.host_exec import run_here
from hodei.backends.local_order import COMMAND_LIMIT, LOOPBACK, Order, save_order, start_order, stop_order
from hodei.model.backend import Capabilities, ExecResult, NodeUsage
from hodei.model.effects import Forget, Start, Stop, TakeCheckpoint
from hodei.model.errors import BackendError, BackendRefused, NotFound
from hodei.model.facts import RunObserved
from hodei.model.ids import NodeName, RunId
from hodei.model.node import Location, Node, Socket, Taint
from hodei.model.resources import CPU, MEMORY, Resources
from hodei.ports import Stream

__all__ = ["LocalBackend", "NodeOffer", "enforcement"]

ORDERS_PER_MESSAGE = 500
# Shorter than a reader's own patience, so that he hears a reason.
LOGS_TIMEOUT_S = 10.0
# Of the whole machine, whatever its nodes are said to have: the kernel kills by what there really is.
_HOST_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class NodeOffer(Struct, frozen=True, omit_defaults=True):
    """A virtual node: a named slice of this machine. Resources that are not named are those of the whole machine;
    `cpus` pins its runs to these cores, unless they were given some of their own; `sockets` say what it is made of, if
    it is to be known; an empty `arch` is the machine's own, an empty `address` the loopback's."""

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


class _Times(Struct):
    marks: list[tuple[int, int]]


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing to set: one more agent on this machine, as one more node with the backend's name."""


def make(name: str, settings: Settings, context: BackendContext) -> LocalBackend:
    return LocalBackend(
        name,
        home=context.home / name,
        installation=context.installation,
        epoch=context.epoch,
        nodes=(NodeOffer(name),),
        keep_logs_s=context.keep_logs_s,
        log_cap_bytes=context.log_cap_bytes,
    )


class LocalBackend(PlainBackend):
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
        nodes: Sequence[NodeOffer] = (),
        linger_s: float = 30,
        keep_logs_s: float = 7 * 86_400,
        log_cap_bytes: int | None = None,
    ) -> None:
        super().__init__(name)
        self._home = home
        self._offers = {offer.name: offer for offer in nodes}
        self._log_cap_bytes = log_cap_bytes
        self._reach = AgentSupervisor(
            name, home, installation, epoch, (linger_s, keep_logs_s), self._hear, self._hear_of_outage
        )
        self._outage: BackendError | None = None
        self._news: list[RunObserved] = []
        self._something_new = asyncio.Event()
        self._whole: Resources | None = None
        self._cpu = machine.CpuMeter()

    async def open(self) -> None:
        await self._reach.open()

    async def close(self) -> None:
        await self._reach.close()

    # ------------------------------------------------------------------------------------------- reports

    def _hear(self, told: list[Told]) -> None:
        self._news.extend(each.observed() for each in told if each.state != "placed")
        if self._news:
            self._something_new.set()

    def _hear_of_outage(self, error: BackendError) -> None:
        """Whoever observes is told, and makes peace with the agent when it is back."""
        self._outage = error
        self._something_new.set()

    async def observe(self) -> list[RunObserved]:
        await self._something_new.wait()
        if self._reach.over is not None:
            raise self._reach.over
        if self._news:
            news, self._news = self._news, []
            if self._outage is None:
                self._something_new.clear()
            return news
        self._something_new.clear()
        outage, self._outage = self._outage, None
        if outage is not None:
            raise outage
        return []

    async def known(self) -> dict[RunId, RunObserved]:
        return {told.run: told.observed() for told in await known_to(await self._reach.agent())}

    async def nodes(self) -> list[Node]:
        if self._whole is None:
            # Once: free space that moved with every write would make a new node of it each time.
            self._whole = machine.capacity(self._home if self._home.exists() else Path("/"))
        whole = self._whole
        host = machine.hostname()
        offers = list(self._offers.values()) or [NodeOffer(host, sockets=machine.sockets())]
        return [
            Node(
                name=offer.name,
                backend=self.name,
                kind=self.kind,
                capacity={**whole, **offer.capacity},
                labels={
                    "hodei.io/hostname": host,
                    "kubernetes.io/hostname": offer.name,
                    "kubernetes.io/os": sys.platform,
                    "kubernetes.io/arch": offer.arch or machine.architecture(),
                    **offer.labels,
                },
                taints=offer.taints,
                arch=offer.arch or platform.machine(),
                gpu_type=offer.gpu_type,
                location=offer.location,
                data=offer.data,
                cost_milli=offer.cost_milli,
                overcommit_percent=offer.overcommit_percent,
                sockets=offer.sockets,
                address=offer.address or LOOPBACK,
            )
            for offer in offers
        ]

    async def ping(self) -> str:
        link = await self._reach.agent(patient=False)
        answer = msgspec.json.decode(await link.ask("facts", timeout_s=LOGS_TIMEOUT_S))
        trouble = answer.get("trouble")
        return f"host agent, process {answer['pid']}" + (f"; {trouble}" if trouble else "")

    async def usage(self) -> dict[NodeName, NodeUsage]:
        """Of the whole machine; what each of several slices of it uses, nobody measures."""
        nodes = await self.nodes()
        if len(nodes) != 1:
            return {}
        return {nodes[0].name: NodeUsage({CPU: self._cpu.milli(), MEMORY: machine.memory_used()})}

    # -------------------------------------------------------------------------------------------- orders

    async def start(self, orders: Sequence[Start]) -> dict[RunId, BackendError | BackendRefused]:
        link = await self._reach.agent()
        answer: dict[RunId, BackendError | BackendRefused] = {}
        accepted: list[Order] = []
        size = 0
        for order in orders:
            try:
                offer = self._offers.get(order.run.node)
                address = offer.address if offer and offer.address else LOOPBACK
                cpus = offer.cpus if offer else ()
                wire = start_order(
                    order, cpus=cpus, log_cap=self._log_cap_bytes, address=address, host_memory=_HOST_MEMORY
                )
            except BackendRefused as error:
                answer[order.run.id] = error
                continue
            accepted.append(wire)
            size += wire.size
            if len(accepted) == ORDERS_PER_MESSAGE or size > COMMAND_LIMIT:
                answer |= await self._send(link, accepted)
                accepted, size = [], 0
        if accepted:
            answer |= await self._send(link, accepted)
        return answer

    @staticmethod
    async def _send(link: Link, orders: list[Order]) -> dict[RunId, BackendRefused]:
        answer = msgspec.json.decode(await link.ask("start", runs=orders), type=_Started)
        return {run: BackendRefused(text) for run, text in answer.refused.items()}

    async def stop(self, orders: Sequence[Stop]) -> None:
        if orders:
            await (await self._reach.agent()).ask("stop", runs=[stop_order(order) for order in orders])

    async def checkpoint(self, orders: Sequence[TakeCheckpoint]) -> None:
        if orders:
            await (await self._reach.agent()).ask("checkpoint", runs=[save_order(order) for order in orders])

    async def forget(self, orders: Sequence[Forget]) -> None:
        if orders:
            await (await self._reach.agent()).ask("forget", runs=[order.run for order in orders])

    async def execute(self, run: RunId, command: Sequence[str], timeout_ms: int) -> ExecResult:
        try:
            link = await self._reach.agent(patient=False)
            answer = await link.ask(
                "execute", timeout_s=timeout_ms / 1000 + 10, run=run, command=command, timeout_ms=timeout_ms
            )
        except BackendError as error:
            if error.code == "NOT_RUNNING":
                raise NotFound(error.message, hint="only a running run takes commands") from None
            if error.code == "BAD_REQUEST":
                raise BackendRefused(error.message) from None
            raise
        seen = msgspec.json.decode(answer, type=_Executed)
        return ExecResult(seen.exit_code, base64.b64decode(seen.stdout), base64.b64decode(seen.stderr), seen.cut)

    async def execute_on(self, node: NodeName, command: Sequence[str], timeout_ms: int) -> ExecResult:
        """As whom the server runs: its nodes are this machine, whole or in slices."""
        if node not in {each.name for each in await self.nodes()}:
            raise NotFound(f"there is no node {node} in backend {self.name}", hint="see `hodei nodes`")
        return await run_here(command, timeout_ms / 1000)

    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        try:
            link = await self._reach.agent(patient=False)
            answer = await link.ask(
                "logs", timeout_s=LOGS_TIMEOUT_S, run=run, stream=stream, offset=offset, limit=limit
            )
        except BackendError as error:
            if error.code == "NO_LOG":
                raise NotFound(error.message) from None
            raise
        log = msgspec.json.decode(answer, type=_Log)
        return base64.b64decode(log.data), log.offset

    async def log_times(self, run: RunId, stream: Stream) -> list[tuple[int, int]]:
        try:
            link = await self._reach.agent(patient=False)
            answer = await link.ask("log_times", timeout_s=LOGS_TIMEOUT_S, run=run, stream=stream)
        except BackendError:
            return []  # an agent from before there were times, or none: the log is there without them
        return msgspec.json.decode(answer, type=_Times).marks
