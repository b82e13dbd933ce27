"""The basis of every backend whose nodes are agents that dial out.

Orders go through the session of the node; those to a node that is out of reach wait for it. What the agents know is kept up
to date here from what they report, so `known` asks no one. A node that stays away for `lost_after` is given up: its runs
are lost, and when it comes back it is told to stop them. Starts carry a deadline before that, which the agent checks, so
an old order starts nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from hodei.backends.agent_calls import (
    Order,
    checkpoint_order,
    execute,
    read_log,
    read_log_times,
    send_starts,
    start_order,
    stop_order,
)
from hodei.backends.agent_link import Link, Observation, list_runs, read_usage
from hodei.backends.base import BackendContext, BaseBackend
from hodei.backends.remote.hub import AgentHub, AgentSession, node_taints
from hodei.backends.remote.registry import JoinedNode
from hodei.model.backend import Capabilities, ExecResult, NodeUsage
from hodei.model.effects import Forget, Start, Stop, TakeCheckpoint
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused, InvalidInput, NotFound, StaleEpoch
from hodei.model.facts import RunObserved
from hodei.model.ids import NodeName, RunId
from hodei.model.job import RUN_ENDED
from hodei.model.node import Node, Socket, architecture
from hodei.model.resources import CPU, GPU, MEMORY, STORAGE, format_time
from hodei.model.usage import RunUsage
from hodei.ports import Stream
from hodei.process import cancel_tasks

log = logging.getLogger("hodei.agents")
OFFLINE = "AGENT_OFFLINE"
HELLO_TIMEOUT_S = 30.0
USAGE_TIMEOUT_S = 5.0
# An answer that takes longer is not waited for: the outcome arrives through `observe`.
ANSWER_S = 2.0
# A start is certainly refused by the agent so long after its deadline.
START_MARGIN_MS = 5_000
MAX_LOCATIONS = 100_000
# An agent that was restarted has a new session after so long.
REOPEN_S = 3.0
T = TypeVar("T")
NOT_REACHED_RUN, START_FAILED = "not_reached", "start_failed"

CAPABILITIES = Capabilities(
    gpus=True,
    gpu_shares=True,
    limits=True,
    checkpoint=True,
    health_checks=True,
    idle_timeouts=True,
    execute=True,
    usage=True,
    run_usage=True,
)


class Patience(Struct, frozen=True):
    """How long a node may be silent: until it is not ready, and until its runs are given up (0: never)."""

    away_ms: int = 60_000
    lost_ms: int = 600_000

    def check(self, name: str) -> None:
        if self.away_ms < 1000:
            raise InvalidInput(f"backends.{name}.away_after is at least 1s")
        if self.lost_ms and self.lost_ms < 2 * self.away_ms:
            raise InvalidInput(
                f"backends.{name}.lost_after must be at least twice away_after",
                hint="0s means that runs are never given up",
            )


class _Start:
    """An order to start. `sent`: an agent may have got it. `start_by_ms`: the deadline of a start on an offline node."""

    __slots__ = ("order", "sent", "start_by_ms")

    def __init__(self, order: Order, start_by_ms: int = 0) -> None:
        self.order, self.start_by_ms, self.sent = order, start_by_ms, False


class AgentNode:
    """One node. `ready`: its session is established, and its agent is heard of. `given_up`: it was silent for too long.
    `missed`: it did not return before the deadline of a start."""

    def __init__(self, joined: JoinedNode, now_s: float, seen_ms: int) -> None:
        self.joined = joined
        self.session: AgentSession | None = None
        self.greeted = self.ready = self.given_up = self.missed = False
        self.silent_since_s, self.last_seen_ms = now_s, seen_ms
        self.known: dict[RunId, RunObserved] = {}
        self.starts: dict[RunId, _Start] = {}
        self.stops: dict[RunId, dict[str, Any]] = {}
        self.not_reached: set[RunId] = set()

    @property
    def name(self) -> NodeName:
        return self.joined.name

    @property
    def link(self) -> Link:
        """BackendError without one."""
        if self.session is None or not self.ready:
            raise BackendError(
                f"node {self.name} is out of reach{self._since}", hint="its runs continue; try again when it is back",
                code=NOT_REACHED,
            )  # fmt: skip
        return self.session.link

    @property
    def _since(self) -> str:
        return f" since {format_time(self.last_seen_ms)}" if self.last_seen_ms else ""

    @property
    def problem(self) -> tuple[str, str]:
        """Code and text of why it is not ready; ("", "") if it is."""
        if self.joined.revoked_ms:
            text = f"its credential was revoked at {format_time(self.joined.revoked_ms)}"
            code = "NODE_REVOKED"
            return code, f"node {self.name}: {text}"
        if not self.ready:
            code = "AGENT_OFFLINE"
            return code, f"the agent of node {self.name} has been out of reach{self._since}"
        return "", ""


class AgentBackend(BaseBackend):
    """`ports.Backend` over the agents that have joined it."""

    kind = "hosts"
    capabilities = CAPABILITIES

    def __init__(self, name: str, context: BackendContext, patience: Patience) -> None:
        super().__init__(name)
        patience.check(name)
        if context.agents is None:
            raise InvalidInput(f"backends.{name}: this program takes no connections of agents")
        self._context, self._patience = context, patience
        self._hub: AgentHub = context.agents
        self._nodes: dict[NodeName, AgentNode] = {}
        self._location: dict[RunId, NodeName] = {}
        self._observations: list[RunObserved] = []
        self._changed, self._nodes_changed = asyncio.Event(), asyncio.Event()
        self._returned: set[NodeName] = set()
        self._opened_ms = 0
        self._superseded: StaleEpoch | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    # Sessions

    @property
    def hold_ms(self) -> int:
        return max(200, self._patience.away_ms * 6 // 10)

    async def open(self) -> None:
        if self._ticker is not None:
            return
        for joined in self._hub.registry.nodes.values():
            if joined.backend == self.name:
                self._nodes[joined.name] = AgentNode(joined, self._now_s(), joined.seen_ms)
        self._opened_ms = self._now_ms()
        self._hub.add_backend(self)
        self._ticker = asyncio.create_task(self._tick(), name=f"{self.name}: watch the agents")

    async def close(self) -> None:
        self._hub.remove_backend(self)
        tasks = [*self._tasks, *([self._ticker] if self._ticker else [])]
        self._ticker = None
        await cancel_tasks(tasks)
        self._nodes.clear()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, StaleEpoch):
                self._superseded = error
                self._changed.set()
            elif not isinstance(error, BackendError | TimeoutError):
                log.error("backend %s", self.name, exc_info=error)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()

    def _now_ms(self) -> int:
        return self._context.clock.now_ms()

    def changed(self, node: NodeName) -> None:
        joined = self._hub.registry.nodes.get(node)
        if joined is None or joined.backend != self.name:
            if removed := self._nodes.pop(node, None):
                live = [run for run, seen in removed.known.items() if seen.state not in RUN_ENDED]
                for run in [*live, *removed.starts]:
                    self._observe_end(removed, run, "lost", "lost", f"node {node} was removed")
        elif node in self._nodes:
            self._nodes[node].joined = joined
        else:
            self._nodes[node] = AgentNode(joined, self._now_s(), joined.seen_ms)
        self._nodes_changed.set()

    def connected(self, session: AgentSession, joined: JoinedNode) -> None:
        node = self._nodes.setdefault(joined.name, AgentNode(joined, self._now_s(), joined.seen_ms))
        node.joined, node.session, node.greeted = joined, session, False
        session.on_observations = lambda seen: self._seen(node, session, seen)
        session.on_closed = lambda: self._disconnected(node, session)
        self._spawn(self._greet(node, session))

    def _disconnected(self, node: AgentNode, session: AgentSession) -> None:
        """It is not ready from now on, and silent since its last request."""
        if node.session is session:
            node.session, node.greeted = None, False
            self._set_ready(node, False, session.last_seen_s)

    async def _greet(self, node: AgentNode, session: AgentSession) -> None:
        """Like a new connection to a local agent: say who we are, and learn what it knows. Then send what waits."""
        link, context = session.link, self._context
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await link.request("hello", timeout_s=None, installation=context.installation, epoch=context.epoch)
                listed = session.corrected(await list_runs(link))
        except (BackendError, TimeoutError):
            session.close()  # the agent opens a new one
            raise
        if node.session is not session:
            return
        node.known = {}
        self._seen(node, session, listed)
        node.greeted, node.given_up, node.missed = True, False, False
        node.not_reached.clear()
        waiting = [start for run, start in node.starts.items() if run not in node.known]
        node.starts = {start.order.run: start for start in waiting}
        if waiting:
            self._spawn(self._send_starts(node, session, waiting))
        if node.stops:
            self._spawn(self._send_stops(node, session, list(node.stops.values())))
        self._returned.add(node.name)
        self._set_ready(node, True, session.last_seen_s)
        self._nodes_changed.set()

    def _set_ready(self, node: AgentNode, ready: bool, seen_s: float) -> None:
        if node.ready and not ready:
            node.silent_since_s = seen_s
            node.last_seen_ms = self._now_ms() - round((self._now_s() - seen_s) * 1000)
        if node.ready != ready:
            node.ready = ready
            self._nodes_changed.set()

    async def _tick(self) -> None:
        pause_s = min(1.0, self._patience.away_ms / 10_000)
        while True:
            await asyncio.sleep(pause_s)
            now_s = self._now_s()
            for node in self._nodes.values():
                if node.session is not None and node.greeted:
                    silent_s = now_s - node.session.last_seen_s
                    self._set_ready(node, silent_s * 1000 < self._patience.away_ms, node.session.last_seen_s)
                if not node.ready:
                    self._check_absent(node, now_s)

    def _check_absent(self, node: AgentNode, now_s: float) -> None:
        late = [s for s in node.starts.values() if s.start_by_ms and not s.sent]
        for start in [s for s in late if self._now_ms() > s.start_by_ms + START_MARGIN_MS]:
            text = f"node {node.name} did not come back before the job's deadline for a start there"
            self._observe_end(node, start.order.run, "failed", NOT_REACHED_RUN, text)
            node.missed = True  # the job goes elsewhere, and not here again
            self._nodes_changed.set()
        lost_ms = self.lost_ms(node)
        if not lost_ms or node.given_up or (now_s - node.silent_since_s) * 1000 < lost_ms:
            return
        node.given_up = True
        log.warning("node %s has been out of reach for too long: its runs are given up", node.name)
        text = f"node {node.name} has been out of reach since {format_time(node.last_seen_ms)}"
        for run, start in list(node.starts.items()):
            if not start.sent:
                self._observe_end(node, run, "failed", NOT_REACHED_RUN, text)
        for run in [run for run, seen in node.known.items() if seen.state not in RUN_ENDED] + list(node.starts):
            self._observe_end(node, run, "lost", "lost", text)
        if node.session is not None:
            node.session.close()  # with the orders in it, which are void now
        self._returned.add(node.name)
        self._nodes_changed.set()

    def offline_ok_ms(self, joined: JoinedNode) -> int:
        """How long the node may normally be offline."""
        return joined.offline_ok_ms

    def lost_ms(self, node: AgentNode) -> int:
        """After how long its runs are given up; later for a node that is normally offline."""
        return max(self._patience.lost_ms, self.offline_ok_ms(node.joined)) if self._patience.lost_ms else 0

    def _observe_end(self, node: AgentNode, run: RunId, state: Any, code: str, text: str, **more: Any) -> None:
        node.known.pop(run, None)
        node.starts.pop(run, None)
        node.stops.pop(run, None)
        self._add(RunObserved(run, state, self._now_ms(), reason_code=code, reason=text, **more))

    # What the agents report

    def _seen(self, node: AgentNode, session: AgentSession, seen: list[Observation]) -> None:
        if node.session is not session:
            return
        for one in seen:
            fact = one.to_fact()
            self._locate(fact.run, node.name)
            node.known[fact.run] = fact
            if fact.state != "placed":
                node.starts.pop(fact.run, None)
                self._add(fact)
            if fact.state in RUN_ENDED:
                node.stops.pop(fact.run, None)

    def _locate(self, run: RunId, node: NodeName) -> None:
        self._location[run] = node
        if len(self._location) > MAX_LOCATIONS:
            del self._location[next(iter(self._location))]

    def _add(self, fact: RunObserved) -> None:
        self._observations.append(fact)
        self._changed.set()

    async def observe(self) -> list[RunObserved]:
        await self._changed.wait()
        if self._superseded is not None:
            raise self._superseded
        self._changed.clear()
        seen, self._observations = self._observations, []
        return seen

    async def known(self) -> dict[RunId, RunObserved]:
        return {run: seen for node in self._nodes.values() for run, seen in node.known.items()}

    def silent_nodes(self) -> frozenset[NodeName]:
        return frozenset(node.name for node in self._nodes.values() if not node.ready and not node.given_up)

    def returned_nodes(self) -> frozenset[NodeName]:
        returned, self._returned = frozenset(self._returned), set()
        return returned

    # Nodes

    async def nodes(self) -> list[Node]:
        return [self.node_of(node) for node in self._nodes.values() if node.joined.facts]

    async def nodes_changed(self) -> None:
        await self._nodes_changed.wait()
        self._nodes_changed.clear()

    def node_of(self, node: AgentNode) -> Node:
        joined, facts = node.joined, node.joined.facts
        code, text = node.problem
        capacity = {CPU: "cpu_milli", MEMORY: "memory_bytes", STORAGE: "storage_bytes"}
        amounts = {resource: _number(facts.get(fact)) for resource, fact in capacity.items()}
        if gpus := _number(facts.get("gpus")):
            amounts[GPU] = gpus * 1000
        machine = architecture(str(facts.get("arch", "")))
        sockets = facts.get("sockets")
        return Node(
            name=node.name,
            backend=self.name,
            kind=self.kind,
            capacity=amounts,
            labels={
                "hodei.io/hostname": str(facts.get("hostname", node.name)),
                "kubernetes.io/hostname": node.name,
                "kubernetes.io/os": str(facts.get("os", "linux")),
                "kubernetes.io/arch": machine,
                **joined.labels,
            },
            taints=node_taints(joined),
            arch=machine,
            gpu_type=str(facts.get("gpu_type", "")),
            sockets=tuple(Socket(cpus=tuple(cpus)) for cpus in sockets) if isinstance(sockets, list) else (),
            version=f"agent {joined.version}",
            address=str(facts.get("hostname", "")),
            ready=not code,
            not_ready_code=code,
            not_ready_reason=text,
            offline_ok=code == OFFLINE and self.offline_ok_ms(joined) > 0 and not node.given_up and not node.missed,
            last_seen_ms=node.last_seen_ms if code == OFFLINE else 0,
        )

    async def ping(self) -> str:
        if self._ticker is None:
            raise BackendError("the backend is not open")
        ready = sum(node.ready for node in self._nodes.values())
        return f"{ready} of {len(self._nodes)} agents are connected"

    async def usage(self) -> dict[NodeName, NodeUsage]:
        ready = [node for node in self._nodes.values() if node.ready]
        answers = await asyncio.gather(
            *(node.link.request("host_usage", timeout_s=USAGE_TIMEOUT_S) for node in ready), return_exceptions=True
        )
        out = {}
        for node, answer in zip(ready, answers, strict=True):
            if not isinstance(answer, BaseException):
                used = msgspec.json.decode(answer)
                out[node.name] = NodeUsage({CPU: int(used["cpu_milli"]), MEMORY: int(used["memory_bytes"])})
            elif not isinstance(answer, BackendError):
                raise answer
        return out

    async def run_usage(self, runs: Collection[RunId]) -> dict[RunId, RunUsage]:
        by_node: dict[NodeName, list[RunId]] = {}
        for run in runs:
            by_node.setdefault(self._location.get(run, ""), []).append(run)
        asked = [(node, found) for name, found in by_node.items() if (node := self._nodes.get(name)) and node.ready]
        answers = await asyncio.gather(*(read_usage(node.link, found) for node, found in asked), return_exceptions=True)
        out: dict[RunId, RunUsage] = {}
        for answer in answers:
            if isinstance(answer, dict):
                out |= answer
            elif not isinstance(answer, BackendError):
                raise answer
        return out

    # Orders

    async def start(self, orders: Sequence[Start]) -> dict[RunId, BackendError | BackendRefused]:
        answer: dict[RunId, BackendError | BackendRefused] = {}
        to_send: dict[NodeName, list[_Start]] = {}
        for order in orders:
            try:
                if start := self._accept(order):
                    to_send.setdefault(order.run.node, []).append(start)
            except (BackendError, BackendRefused) as error:
                answer[order.run.id] = error
        tasks = []
        for name, starts in to_send.items():
            node = self._nodes[name]
            assert node.session is not None
            tasks.append(self._spawn(self._send_starts(node, node.session, starts, answer)))
        if tasks:
            await asyncio.wait(tasks, timeout=ANSWER_S)
        return dict(answer)

    def _accept(self, order: Start) -> _Start | None:
        """What is to be sent now; None if nothing is, because it was sent before or waits for its node."""
        run, node = order.run.id, self._nodes.get(order.run.node)
        if node is None:
            raise BackendRefused(f"node {order.run.node} is not part of backend {self.name} any more")
        if run in node.starts or run in node.known:
            return None
        wire = start_order(
            order,
            log_cap=self._context.log_cap_bytes,
            address=str(node.joined.facts.get("hostname", "")),
            host_memory=_number(node.joined.facts.get("host_memory_bytes")),
        )
        self._locate(run, node.name)
        start = _Start(wire, self.start_by_ms(order, node))
        if not node.ready:
            self._accept_absent(order, node, start)
            return None
        node.starts[run] = start
        return start

    def start_by_ms(self, order: Start, node: AgentNode) -> int:
        """The job's own deadline for a start on a node that is normally offline; 0 if it allows none."""
        offline_ms = order.spec.backend.offline_ms
        return order.run.placed_ms + offline_ms if offline_ms and self.offline_ok_ms(node.joined) else 0

    def _accept_absent(self, order: Start, node: AgentNode, start: _Start) -> None:
        run = order.run.id
        if self._now_ms() < start.start_by_ms and not node.given_up and not node.joined.revoked_ms:
            # An earlier server may have sent it: then only its agent knows whether it has started.
            start.sent = order.run.placed_ms < self._opened_ms
            node.starts[run] = start
            return
        if node.given_up and run in node.not_reached:
            # Repeated, so an earlier server may have sent it: it counts as lost with the others.
            node.not_reached.discard(run)
            self._observe_end(node, run, "lost", "lost", f"node {node.name} has been out of reach for too long")
            return
        node.not_reached.add(run)
        raise BackendError(node.problem[1], code=NOT_REACHED)

    async def _send_starts(
        self,
        node: AgentNode,
        session: AgentSession,
        starts: Sequence[_Start],
        answer: dict[RunId, BackendError | BackendRefused] | None = None,
    ) -> None:
        """If the session ends first, they are sent again in the next one, unless the agent knows them."""
        latest_ms = self._now_ms() + max(1000, (self.lost_ms(node) - self._patience.away_ms) * 8 // 10)
        wires = []
        for start in starts:
            deadlines = [ms for ms in (start.start_by_ms, latest_ms if self.lost_ms(node) else 0) if ms]
            start.sent = True
            wires.append(structs.replace(start.order, start_by_ms=min(deadlines, default=0)))
        waiting = answer is not None
        task = asyncio.ensure_future(send_starts(session.link, wires, timeout_s=None))
        try:
            await asyncio.wait({task}, timeout=ANSWER_S - 0.5 if waiting else None)
            in_time = task.done()
            refused = await task
        finally:
            task.cancel()
        for start in starts:
            run = start.order.run
            error = refused.get(run)
            if node.starts.get(run) is not start:
                continue
            del node.starts[run]
            if error is None:
                node.known.setdefault(run, RunObserved(run, "placed", self._now_ms()))
            elif answer is not None and in_time:
                answer[run] = error
            else:
                code = NOT_REACHED_RUN if error.code == NOT_REACHED else START_FAILED
                permanent = isinstance(error, BackendRefused)
                self._observe_end(node, run, "failed", code, error.message, permanent=permanent)

    async def stop(self, orders: Sequence[Stop]) -> None:
        by_node: dict[NodeName, list[dict[str, Any]]] = {}
        for order in orders:
            node = self._nodes.get(self._location.get(order.run, ""))
            if node is None:
                continue
            start = node.starts.get(order.run)
            if start is not None and not start.sent:
                self._observe_end(node, order.run, "stopped", "", order.reason.text)
                continue
            if order.run not in node.known and start is None:
                continue
            wire = stop_order(order)
            node.stops[order.run] = wire
            by_node.setdefault(node.name, []).append(wire)
        await self._order(by_node, self._send_stops)

    async def _send_stops(self, node: AgentNode, session: AgentSession, wires: list[dict[str, Any]]) -> None:
        await session.link.request("stop", timeout_s=None, runs=wires)
        for wire in wires:
            if node.stops.get(wire["run"]) is wire:
                del node.stops[wire["run"]]

    async def checkpoint(self, orders: Sequence[TakeCheckpoint]) -> None:
        """A node that is out of reach takes none: it is no use later."""
        by_node: dict[NodeName, list[dict[str, Any]]] = {}
        for order in orders:
            by_node.setdefault(self._location.get(order.run, ""), []).append(checkpoint_order(order))

        async def send(node: AgentNode, session: AgentSession, wires: list[dict[str, Any]]) -> None:
            await session.link.request("checkpoint", timeout_s=None, runs=wires)

        await self._order(by_node, send)

    async def forget(self, orders: Sequence[Forget]) -> None:
        """A node that is out of reach reports its ends again, and is then told to forget them."""
        by_node: dict[NodeName, list[RunId]] = {}
        for order in orders:
            by_node.setdefault(self._location.get(order.run, ""), []).append(order.run)
            for node in self._nodes.values() if order.run not in self._location else ():
                node.not_reached.discard(order.run)

        async def send(node: AgentNode, session: AgentSession, runs: list[RunId]) -> None:
            for run in runs:
                seen = node.known.get(run)
                if seen is not None and seen.state in RUN_ENDED:
                    del node.known[run]
            await session.link.request("forget", timeout_s=None, runs=runs)

        await self._order(by_node, send)

    async def _order(
        self,
        by_node: dict[NodeName, list[Any]],
        send: Callable[[AgentNode, AgentSession, list[Any]], Coroutine[Any, Any, None]],
    ) -> None:
        tasks = []
        for name, orders in by_node.items():
            node = self._nodes.get(name)
            if node is not None and node.ready and node.session is not None:
                tasks.append(self._spawn(send(node, node.session, orders)))
        if tasks:
            await asyncio.wait(tasks, timeout=ANSWER_S)

    # Reading

    async def _link(self, node: AgentNode) -> Link:
        """Waits a moment for a session that is just being opened again."""
        deadline_s = self._now_s() + REOPEN_S
        while not node.ready and self._now_s() < min(deadline_s, node.silent_since_s + 2 * REOPEN_S):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return node.link

    async def _read(self, node: AgentNode, call: Callable[[Link], Awaitable[T]]) -> T:
        """Once more if the session ends meanwhile: reading changes nothing."""
        link = await self._link(node)
        try:
            return await call(link)
        except BackendError:
            if not link.closed.is_set():
                raise
            return await call(await self._link(node))

    async def execute(self, run: RunId, command: Sequence[str], timeout_ms: int) -> ExecResult:
        node = self._nodes.get(self._location.get(run, ""))
        if node is None or run not in node.known:
            raise NotFound(f"run {run} does not run", hint="commands need a running run")
        return await execute(await self._link(node), run, command, timeout_ms)

    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        node = self._nodes.get(self._location.get(run, ""))
        if node is not None:
            if run in node.starts and not node.starts[run].sent:
                return b"", offset
            return await self._read(node, lambda link: read_log(link, run, stream, offset, limit))
        # Of an earlier server: one of the nodes has it.
        ready = [node for node in self._nodes.values() if node.ready]
        answers = await asyncio.gather(
            *(read_log(node.link, run, stream, offset, limit) for node in ready), return_exceptions=True
        )
        for node, answer in zip(ready, answers, strict=True):
            if isinstance(answer, tuple):
                self._locate(run, node.name)
                return answer
        away = [node.name for node in self._nodes.values() if not node.ready]
        if away:
            raise BackendError(f"the log of run {run} may be on a node that is out of reach: {', '.join(away[:5])}")
        raise NotFound(f"no node of backend {self.name} has a log of run {run}")

    async def log_times(self, run: RunId, stream: Stream) -> list[tuple[int, int]]:
        node = self._nodes.get(self._location.get(run, ""))
        if node is None or not node.ready or node.session is None:
            return []
        marks = await read_log_times(node.link, run, stream)
        skew_ms = node.session.skew_ms
        return [(offset, at_ms + skew_ms) for offset, at_ms in marks]


def _number(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
