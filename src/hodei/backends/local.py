"""Real processes on this machine, through the host agent on its unix socket.

Starts the agent when none is there, finds it again when it is gone, and hears again of every end that was not yet
forgotten. The agent does the running (`hodei.agent`); this file translates between it and `ports.Backend`, and offers
the machine as one node, or as the several virtual nodes that the configuration slices it into.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from hodei.agent.limits import enforcement
from hodei.backends import machine
from hodei.backends.agent_link import Link, Told
from hodei.backends.base import House, PlainBackend
from hodei.backends.local_order import COMMAND_LIMIT, LOOPBACK, Order, save_order, start_order, stop_order
from hodei.model.backend import Capabilities, Executed, NodeUsage
from hodei.model.effects import Forget, SaveWork, Start, Stop
from hodei.model.errors import BackendError, BackendRefused, NotFound, StaleEpoch
from hodei.model.facts import RunObserved
from hodei.model.ids import NodeName, RunId
from hodei.model.node import Location, Node, Socket, Taint
from hodei.model.resources import CPU, MEMORY, Resources
from hodei.ports import Stream

__all__ = ["LocalBackend", "NodeOffer", "enforcement"]

BIRTH_TIMEOUT_S = 15.0
RECONNECT_MAX_S = 2.0
ORDERS_PER_MESSAGE = 500
# Shorter than a reader's own patience, so that he hears a reason.
LOGS_TIMEOUT_S = 10.0


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


class _Known(Struct):
    runs: list[Told]
    more: bool


class _Executed(Struct):
    exit_code: int | None
    stdout: str
    stderr: str
    cut: bool


class _Log(Struct):
    data: str
    offset: int


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing to set: one more agent on this machine, as one more node with the backend's name."""


def make(name: str, settings: Settings, house: House) -> LocalBackend:
    return LocalBackend(
        name,
        home=house.home / name,
        installation=house.installation,
        epoch=house.epoch,
        nodes=(NodeOffer(name),),
        keep_logs_s=house.keep_logs_s,
        log_cap_bytes=house.log_cap_bytes,
    )


class LocalBackend(PlainBackend):
    """`ports.Backend` for this machine. `home` is the agent's; `installation` and `epoch` come from the store."""

    kind = "local"
    capabilities = Capabilities(limits=True, checkpoint=True, health_checks=True, execute=True, usage=True)

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
        self._home, self._installation, self._epoch = home, installation, epoch
        self._offers = {offer.name: offer for offer in nodes}
        self._linger_s, self._keep_logs_s, self._log_cap_bytes = linger_s, keep_logs_s, log_cap_bytes
        self._link: Link | None = None
        self._connected = asyncio.Event()
        self._agent: subprocess.Popen[bytes] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._news: list[RunObserved] = []
        self._something_new = asyncio.Event()
        self._over: StaleEpoch | None = None
        self._whole: Resources | None = None
        self._cpu = machine.CpuMeter()

    # ---------------------------------------------------------------------------------------- connection

    async def open(self) -> None:
        if self._keeper is None:
            await self._connect()
            self._keeper = asyncio.create_task(self._keep_connected(), name=f"{self.name}: keep the agent in reach")

    async def _connect(self) -> None:
        """Reach the agent, starting it if need be, and hear how everything stands."""
        deadline = asyncio.get_running_loop().time() + BIRTH_TIMEOUT_S
        pause_s = 0.01
        while True:
            try:
                link = await Link.to(self._home, self._hear)
                break
            except OSError as error:
                self._start_agent_unless_running()
                if asyncio.get_running_loop().time() > deadline:
                    raise BackendError(
                        f"the host agent does not come up: {error}{self._last_words()}",
                        hint=f"see {self._home}/agent.log",
                    ) from error
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.2)
        try:
            await link.ask("hello", installation=self._installation, epoch=self._epoch)
            self._hear(await self._known_to(link))
        except (BackendError, StaleEpoch):
            link.close()
            raise
        self._link = link
        self._connected.set()

    def _start_agent_unless_running(self) -> None:
        if self._agent is not None and self._agent.poll() is None:
            return
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(self._home / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            # A session of its own, so that it outlives us and our terminal. If another agent is at home, it leaves.
            self._agent = subprocess.Popen(
                [
                    *(sys.executable, "-m", "hodei.agent", "--home", str(self._home)),
                    *("--linger", f"{self._linger_s:g}", "--keep-logs", f"{self._keep_logs_s:g}"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _last_words(self) -> str:
        try:
            lines = (self._home / "agent.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f"; its last words: {lines[-1][:300]}" if lines else ""

    async def _keep_connected(self) -> None:
        pause_s = 0.05
        while True:
            if self._link is not None:
                await self._link.closed.wait()
                self._connected.clear()
                self._link = None
            try:
                await self._connect()
                pause_s = 0.05
            except StaleEpoch as error:
                self._over = error
                self._something_new.set()
                self._connected.set()
                return
            except (BackendError, OSError):
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, RECONNECT_MAX_S)

    async def _reach(self) -> Link:
        """The agent, waiting for it to come back if it is gone."""
        if self._keeper is None:
            raise BackendError("the backend is not open")
        try:
            async with asyncio.timeout(BIRTH_TIMEOUT_S):
                while True:
                    if self._over is not None:
                        raise self._over
                    if self._link is not None and not self._link.closed.is_set():
                        return self._link
                    self._connected.clear()  # the keeper is about to notice, and brings a new link
                    await self._connected.wait()
        except TimeoutError:
            raise BackendError("the host agent is out of reach", hint=f"see {self._home}/agent.log") from None

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None
        if self._link is not None:
            self._link.close()
            self._link = None
        self._connected.clear()

    # ------------------------------------------------------------------------------------------- reports

    def _hear(self, told: list[Told]) -> None:
        self._news.extend(each.observed() for each in told if each.state != "placed")
        if self._news:
            self._something_new.set()

    async def observe(self) -> list[RunObserved]:
        await self._something_new.wait()
        if self._over is not None:
            raise self._over
        self._something_new.clear()
        news, self._news = self._news, []
        return news

    async def known(self) -> dict[RunId, RunObserved]:
        return {told.run: told.observed() for told in await self._known_to(await self._reach())}

    @staticmethod
    async def _known_to(link: Link) -> list[Told]:
        out: list[Told] = []
        more = True
        while more:
            page = msgspec.json.decode(await link.ask("known", after=out[-1].run if out else ""), type=_Known)
            out += page.runs
            more = page.more
        return out

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
        answer = msgspec.json.decode(await (await self._reach()).ask("facts", timeout_s=LOGS_TIMEOUT_S))
        return f"host agent, process {answer['pid']}"

    async def usage(self) -> dict[NodeName, NodeUsage]:
        """Of the whole machine; what each of several slices of it uses, nobody measures."""
        nodes = await self.nodes()
        if len(nodes) != 1:
            return {}
        return {nodes[0].name: NodeUsage({CPU: self._cpu.milli(), MEMORY: machine.memory_used()})}

    # -------------------------------------------------------------------------------------------- orders

    async def start(self, orders: Sequence[Start]) -> dict[RunId, BackendError | BackendRefused]:
        link = await self._reach()
        answer: dict[RunId, BackendError | BackendRefused] = {}
        accepted: list[Order] = []
        size = 0
        for order in orders:
            try:
                offer = self._offers.get(order.run.node)
                address = offer.address if offer and offer.address else LOOPBACK
                cpus = offer.cpus if offer else ()
                wire = start_order(order, cpus=cpus, log_cap=self._log_cap_bytes, address=address)
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
            await (await self._reach()).ask("stop", runs=[stop_order(order) for order in orders])

    async def checkpoint(self, orders: Sequence[SaveWork]) -> None:
        if orders:
            await (await self._reach()).ask("checkpoint", runs=[save_order(order) for order in orders])

    async def forget(self, orders: Sequence[Forget]) -> None:
        if orders:
            await (await self._reach()).ask("forget", runs=[order.run for order in orders])

    async def execute(self, run: RunId, command: Sequence[str], timeout_ms: int) -> Executed:
        try:
            link = await self._reach()
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
        return Executed(seen.exit_code, base64.b64decode(seen.stdout), base64.b64decode(seen.stderr), seen.cut)

    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        try:
            link = await self._reach()
            answer = await link.ask(
                "logs", timeout_s=LOGS_TIMEOUT_S, run=run, stream=stream, offset=offset, limit=limit
            )
        except BackendError as error:
            if error.code == "NO_LOG":
                raise NotFound(error.message) from None
            raise
        log = msgspec.json.decode(answer, type=_Log)
        return base64.b64decode(log.data), log.offset
