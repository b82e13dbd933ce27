"""Agents on machines that are switched on and off: the basis of `bare_metal`, `command` and other kinds that scale.

A `MachineProvider` lists, starts and stops machines; the agent on a machine dials in when it has booted. A machine that is
off is a potential node. One that is on and whose agent has not connected yet is starting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct, structs

from hodei.backends.base import BackendContext
from hodei.backends.remote.backend import CAPABILITIES, OFFLINE, AgentBackend, Patience
from hodei.model.backend import Health
from hodei.model.errors import IN_DOUBT, BackendError, BackendRefused
from hodei.model.ids import NodeName
from hodei.model.node import Location, Node, Taint, architecture
from hodei.model.resources import Resources

log = logging.getLogger("hodei.machines")
MachineState = Literal["off", "starting", "on", "stopping"]
# How often machines are listed: while some change, and otherwise.
CHANGING_S, STEADY_S = 2.0, 30.0
TOKEN_TTL_MS = 3_600_000
CALL_TIMEOUT_S = 50.0


class Machine(Struct, frozen=True, omit_defaults=True):
    """A machine as its provider knows it. `group`: machines of one group are interchangeable. `startup_ms`: from the order
    until its agent has connected. `progress`: what it is doing while it starts. `problem`: why it cannot be started."""

    name: NodeName
    state: MachineState
    group: str = "machines"
    capacity: Resources = {}
    labels: dict[str, str] = {}
    taints: tuple[Taint, ...] = ()
    arch: str = ""
    gpu_type: str = ""
    location: Location = Location()
    startup_ms: int = 120_000
    cost_milli: int = 0
    spot: bool = False
    losses_milli: int = 0
    progress: str = ""
    problem: str = ""


class Join(Struct, frozen=True):
    """How the agent of a new machine joins. `token` is a secret, valid once and for this node."""

    node: NodeName
    url: str
    token: str


class MachineProvider(Protocol):
    """Calls raise BackendError, with IN_DOUBT if the outcome is unknown, and BackendRefused. Each returns within 50 s."""

    async def machines(self) -> list[Machine]:
        """All of them, in any state."""
        ...

    async def start(self, joins: Mapping[NodeName, Join]) -> dict[NodeName, BackendError | BackendRefused]:
        """As `ports.Scaler.wanted`. Idempotent by name."""
        ...

    async def stop(self, names: Sequence[NodeName]) -> None:
        """Idempotent."""
        ...


class MachineBackend(AgentBackend):
    """`url`: where the agents of new machines reach this server; "": machines have joined before."""

    capabilities = structs.replace(CAPABILITIES, scales=True, stops=True)

    def __init__(
        self, name: str, context: BackendContext, patience: Patience, provider: MachineProvider, *, url: str = ""
    ) -> None:
        super().__init__(name, context, patience)
        self._provider, self._url = provider, url
        self._machines: dict[NodeName, Machine] = {}
        self._booted: set[NodeName] = set()  # their agent has connected since they were started
        self._listing_error = ""
        self._poll_now = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """BackendError if the machines cannot be listed."""
        self._keep(await self._list())
        await super().open()
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll(), name=f"{self.name}: list the machines")

    async def close(self) -> None:
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
            self._poller = None
        await super().close()

    async def _list(self) -> list[Machine]:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await self._provider.machines()
        except TimeoutError:
            raise BackendError(f"the machines were not listed within {CALL_TIMEOUT_S:g} s") from None

    async def _poll(self) -> None:
        while True:
            changing = any(machine.state in ("starting", "stopping") for machine in self._machines.values())
            waiting = any(machine.state == "on" and not self._is_up(name) for name, machine in self._machines.items())
            try:
                async with asyncio.timeout(CHANGING_S if changing or waiting else STEADY_S):
                    await self._poll_now.wait()
            except TimeoutError:
                pass
            self._poll_now.clear()
            try:
                self._keep(await self._list())
                self._listing_error = ""
            except (BackendError, BackendRefused, OSError) as error:
                # The last list stays: a provider that is away has not switched anything off.
                if not self._listing_error:
                    log.warning("backend %s: the machines cannot be listed: %s", self.name, error)
                self._listing_error = str(error)

    def _keep(self, machines: Sequence[Machine]) -> None:
        known = {machine.name: machine for machine in machines}
        for name, machine in known.items():
            if machine.state in ("off", "stopping"):
                self._booted.discard(name)
        if known != self._machines:
            self._machines = known
            self._nodes_changed.set()

    def _is_up(self, name: NodeName) -> bool:
        agent = self._nodes.get(name)
        if agent is not None and agent.ready:
            self._booted.add(name)
        return name in self._booted

    async def nodes(self) -> list[Node]:
        return [self._node(machine) for _, machine in sorted(self._machines.items())]

    def _node(self, machine: Machine) -> Node:
        agent = self._nodes.get(machine.name)
        up = self._is_up(machine.name)
        node = self._offer(machine)
        if agent is not None and agent.joined.facts and machine.state == "on" and up:
            real = self.node_of(agent)
            node = structs.replace(
                real, labels={**real.labels, **machine.labels}, taints=(*real.taints, *machine.taints), phase="ready",
                gpu_type=real.gpu_type or machine.gpu_type, location=machine.location, group=machine.group,
                startup_ms=machine.startup_ms, cost_milli=machine.cost_milli, spot=machine.spot,
                losses_milli=machine.losses_milli,
            )  # fmt: skip
        elif machine.state == "off":
            code = "MACHINE_PROBLEM" if machine.problem else ""
            node = structs.replace(
                node, phase="potential", ready=not code, not_ready_code=code, not_ready_reason=machine.problem
            )
        elif machine.state == "stopping":
            node = structs.replace(node, phase="stopping")
        else:
            progress = machine.progress or ("its agent has not connected yet" if machine.state == "on" else "starting")
            node = structs.replace(
                node, phase="starting", ready=False, not_ready_code=OFFLINE,
                not_ready_reason=f"node {node.name}: {progress}",
            )  # fmt: skip
        return node

    def _offer(self, machine: Machine) -> Node:
        arch = architecture(machine.arch) if machine.arch else ""
        return Node(
            name=machine.name,
            backend=self.name,
            kind=self.kind,
            capacity=machine.capacity,
            labels={
                "kubernetes.io/hostname": machine.name,
                "kubernetes.io/os": "linux",
                **({"kubernetes.io/arch": arch} if arch else {}),
                **machine.labels,
            },
            taints=machine.taints,
            arch=arch,
            gpu_type=machine.gpu_type,
            location=machine.location,
            cost_milli=machine.cost_milli,
            group=machine.group,
            startup_ms=machine.startup_ms,
            spot=machine.spot,
            losses_milli=machine.losses_milli,
        )

    async def wanted(self, nodes: Sequence[NodeName]) -> dict[NodeName, BackendError | BackendRefused]:
        answer: dict[NodeName, BackendError | BackendRefused] = {}
        joins: dict[NodeName, Join] = {}
        for name in nodes:
            machine = self._machines.get(name)
            if machine is None:
                answer[name] = BackendRefused(f"backend {self.name} has no machine {name}")
            elif machine.problem:
                answer[name] = BackendRefused(machine.problem, code="MACHINE_PROBLEM")  # others of its group may start
            elif machine.state in ("off", "stopping"):
                joins[name] = Join(name, self._url, await self._token(name))
        if joins:
            for name in joins:
                self._booted.discard(name)
                agent = self._nodes.get(name)
                if agent is not None and agent.session is not None:
                    agent.session.close()  # of the time before: it would count as connected
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    answer |= await self._provider.start(joins)
            except TimeoutError:
                text = f"no answer to the start of {', '.join(list(joins)[:5])} within {CALL_TIMEOUT_S:g} s"
                raise BackendError(text, code=IN_DOUBT) from None
            finally:
                self._poll_now.set()
        return answer

    async def _token(self, name: NodeName) -> str:
        """A one-time token for a machine that has no credential of its own yet."""
        if not self._url:
            return ""
        secret, _ = await self._hub.registry.create_token(self.name, node=name, ttl_ms=TOKEN_TTL_MS)
        return secret

    async def release(self, nodes: Sequence[NodeName]) -> None:
        known = [name for name in nodes if name in self._machines and self._machines[name].state != "off"]
        try:
            if known:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await self._provider.stop(known)
        except TimeoutError:
            raise BackendError(f"no answer to the stop within {CALL_TIMEOUT_S:g} s", code=IN_DOUBT) from None
        finally:
            self._poll_now.set()

    async def health(self) -> Health:
        found = await super().health()
        if found.ok and self._listing_error:
            return Health(False, f"the machines cannot be listed: {self._listing_error}", found.took_ms)
        return found
