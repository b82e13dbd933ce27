"""Follows one backend: its connection, nodes and runs (`Watcher`), and its health (`HealthMonitor`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct, structs

from hodei.control.admission.gate import DISABLED as DISABLED
from hodei.control.lifecycle.retry import Circuit, CircuitPolicy
from hodei.control.lifecycle.runs import NOT_WANTED, reconcile
from hodei.control.state import ClusterState
from hodei.model.backend import Health, unmet_by
from hodei.model.effects import Forget, RunAct, Stop
from hodei.model.errors import BackendError, StaleEpoch
from hodei.model.facts import BackendReported, Fact, NodeJoined, NodeLost, RunObserved
from hodei.model.ids import NodeName, RunId
from hodei.model.job import RUN_ENDED
from hodei.model.node import Node
from hodei.model.resources import format_time
from hodei.ports import Backend, Clock
from hodei.runtime.metrics import Metrics

log = logging.getLogger("hodei.watcher")
_NODES_INTERVAL_S = 30.0
# A call that takes longer has failed. Other backends are not delayed meanwhile.
CALL_TIMEOUT_S = 60.0
# The server becomes ready without a backend that has neither connected nor failed by then.
FIRST_TRY_S = 3.0
UNHEALTHY = "BACKEND_UNHEALTHY"


class Block(Struct, frozen=True):
    """Why nothing may start on a backend: a reason code and its text."""

    code: str
    text: str


class Watcher:
    """Connects to a backend, reconciles its runs with the controller's, and passes on what it observes."""

    def __init__(
        self,
        backend: Backend,
        cluster: ClusterState,
        clock: Clock,
        metrics: Metrics,
        enqueue: Callable[[Sequence[Fact]], None],
        act: Callable[[Sequence[RunAct]], None],
        step_lock: asyncio.Lock | None = None,
        node_owners: dict[str, str] | None = None,
        node_settings: Callable[[Node], Node] = lambda node: node,
        find_orphans: Callable[[Sequence[RunId]], Awaitable[set[RunId]]] | None = None,
        on_recovered: Callable[[], None] = lambda: None,
    ) -> None:
        """`step_lock` is held from a decision until it is stored. `node_owners`: the backend of each node, shared by all
        watchers. `node_settings` applies the configuration of the backend to a node. `find_orphans`: which of the runs that
        the controller does not know must not be stopped. `on_recovered`: the backend is reachable again after an outage."""
        self._backend = backend
        self._cluster = cluster
        self._clock = clock
        self._metrics = metrics
        self._enqueue = enqueue
        self._act = act
        self._step_lock = step_lock or asyncio.Lock()
        self._owners = {} if node_owners is None else node_owners
        self._node_settings = node_settings
        self._find_orphans = find_orphans
        self._offered: dict[str, Node] = {}
        self._reported: dict[str, Node] = {}
        self._outage: Block | None = None
        self._block: Block | None = None
        self._reported_outage = ""  # last BackendReported of a backend without nodes
        self._removed = False
        self.up = asyncio.Event()
        self.tried = asyncio.Event()
        self.last_error = ""
        self.down_since_ms = 0
        self._on_recovered = on_recovered

    @property
    def block(self) -> Block | None:
        """What keeps runs off its nodes. An outage wins over failed health checks, which it causes: it knows since when."""
        if self._outage is not None and (self._block is None or self._block.code == self._outage.code):
            return self._outage
        return self._block

    @property
    def nodes(self) -> int:
        return len(self._offered)

    async def run(self) -> None:
        """Forever: connect, reconcile, then observe; after an outage again from the start."""
        pause = 0.1
        asyncio.get_running_loop().call_later(FIRST_TRY_S, self.tried.set)
        while True:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await self._backend.open()
                await self._refresh_nodes()
                await self._reconcile()
                self._connected()
                pause = 0.1
                await self._observe()
            except StaleEpoch:
                raise
            except TimeoutError:
                self._disconnected(f"no answer within {CALL_TIMEOUT_S:g} s")
            except (BackendError, OSError) as error:
                self._disconnected(str(error))
            except Exception as error:
                log.exception("backend %s", self._backend.name)
                self._disconnected(str(error) or type(error).__name__)
            self.tried.set()
            await asyncio.sleep(pause)
            pause = min(pause * 2, 10.0)

    def _connected(self) -> None:
        if self.last_error:
            self._on_recovered()
        self.last_error, self.down_since_ms = "", 0
        self._outage = None
        self.up.set()
        self.tried.set()
        self._report_nodes()

    def _disconnected(self, error: str) -> None:
        self._metrics.backend_errors.labels(self._backend.name).inc()
        if self.last_error != error:
            log.warning("backend %s is unreachable: %s", self._backend.name, error)
        self.last_error = error
        if not self.down_since_ms:
            self.down_since_ms = self._clock.now_ms()
        if self._outage is None:
            since = format_time(self.down_since_ms)
            self._outage = Block(UNHEALTHY, f"backend {self._backend.name} is unreachable since {since}: {error[:200]}")
            self._report_nodes()

    async def _refresh_nodes(self) -> None:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            offered = await self._backend.nodes()
        found = {node.name: self._with_settings(node) for node in offered}
        name = self._backend.name
        for node in [node for node in found if self._owners.setdefault(node, name) != name]:
            log.error(
                "backend %s: node %s is ignored, backend %s has a node of that name", name, node, self._owners[node]
            )
            del found[node]
        # Includes nodes known only from stored runs, from before a restart with other nodes.
        used = {run.node for runs in self._cluster.runs.values() for run in runs.values() if run.backend == name}
        missing = sorted(node for node in used if node not in found and node not in self._offered)
        if missing:
            log.warning("active runs are on nodes that backend %s no longer offers: %s", name, ", ".join(missing))
        for node in self._offered.keys() - found.keys():
            self._owners.pop(node, None)
        self._offered, self._outage = found, None
        self._report_nodes()

    def _with_settings(self, node: Node) -> Node:
        node, cannot = self._node_settings(node), unmet_by(self._backend.capabilities)
        return structs.replace(node, cannot=cannot) if cannot and not node.cannot else node

    def _report_nodes(self, lost_reason: str = "no longer offered by its backend") -> None:
        """Enqueues what has changed. While the backend is blocked its nodes are not ready, whatever it reports."""
        block = self.block
        now = self._offered
        if block is not None:
            now = {
                name: structs.replace(node, ready=False, not_ready_reason=block.text, not_ready_code=block.code)
                for name, node in now.items()
            }
        facts: list[Fact] = [NodeJoined(node) for name, node in now.items() if self._reported.get(name) != node]
        facts += [NodeLost(name, lost_reason) for name in self._reported if name not in now]
        self._reported = now
        outage = block.text if block is not None and not now and not self._removed else ""
        if outage != self._reported_outage:
            self._reported_outage = outage
            facts.append(BackendReported(self._backend.name, outage, unmet_by(self._backend.capabilities)))
        if facts:
            self._enqueue(facts)

    def set_block(self, block: Block | None) -> None:
        """Nothing starts on its nodes while it is blocked; runs continue."""
        if block != self._block:
            self._block = block
            self._report_nodes()

    def remove_nodes(self, reason: str) -> None:
        """The backend was removed: its nodes are lost."""
        for node in self._offered:
            self._owners.pop(node, None)
        self._offered, self._removed = {}, True
        self._report_nodes(reason)

    async def _reconcile(self, only: frozenset[NodeName] | None = None) -> None:
        # Before `known`: a node that is back in between counts as silent once more.
        silent = self._backend.silent_nodes()
        async with asyncio.timeout(CALL_TIMEOUT_S):
            known = await self._backend.known()
        async with self._step_lock:
            facts, orders = reconcile(
                self._cluster, self._backend.name, known, self._clock.now_ms(), silent=silent, only=only
            )
            unknown = [order.run for order in orders if isinstance(order, Stop) and order.reason == NOT_WANTED]
            orphans = await self._orphans_among(unknown)
            orders = [order for order in orders if not (isinstance(order, Stop) and order.run in orphans)]
            if facts:
                self._enqueue(facts)
            if orders:
                self._act(orders)

    async def _observe(self) -> None:
        loop = asyncio.get_running_loop()
        refreshed, observation = loop.time(), asyncio.ensure_future(self._backend.observe())
        change = asyncio.ensure_future(self._backend.nodes_changed())
        try:
            while True:
                # Not wait_for: cancelling a reader that has just received something would lose it.
                left_s = max(refreshed + _NODES_INTERVAL_S - loop.time(), 0)
                await asyncio.wait({observation, change}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if observation.done():
                    facts = observation.result()
                    observation = asyncio.ensure_future(self._backend.observe())
                    if facts:
                        self._enqueue(facts)
                        await self._stop_unwanted(facts)
                if change.done() or loop.time() - refreshed >= _NODES_INTERVAL_S:
                    if change.done():
                        change.result()
                        change = asyncio.ensure_future(self._backend.nodes_changed())
                    await self._refresh_nodes()
                    if returned := self._backend.returned_nodes():
                        await self._reconcile(returned)
                    refreshed = loop.time()
        finally:
            observation.cancel()
            change.cancel()

    async def _stop_unwanted(self, seen: Sequence[RunObserved]) -> None:
        """Stops runs that the controller has given up, such as late starts, and forgets those that have ended."""
        if not any(self._is_unwanted(each) for each in seen):
            return
        async with self._step_lock:
            unwanted = [each for each in seen if self._is_unwanted(each)]
            orphans = await self._orphans_among([each.run for each in unwanted if each.state not in RUN_ENDED])
        name = self._backend.name
        self._act(
            [
                Forget(each.run, name) if each.state in RUN_ENDED else Stop(each.run, name, 0, NOT_WANTED)
                for each in unwanted
                if each.run not in orphans
            ]
        )

    async def _orphans_among(self, unknown: Sequence[RunId]) -> set[RunId]:
        return await self._find_orphans(unknown) if unknown and self._find_orphans is not None else set()

    def _is_unwanted(self, seen: RunObserved) -> bool:
        run = self._cluster.run(seen.run)
        return run is None or (run.state in RUN_ENDED and seen.state not in RUN_ENDED)


class HealthPolicy(Struct, frozen=True):
    every_ms: int = 30_000
    timeout_ms: int = 10_000
    circuit: CircuitPolicy = CircuitPolicy()


class HealthMonitor:
    """Checks the health of one backend and keeps its circuit breaker; `on_change` is called when that opens or closes.

    A failed check, no answer and a failed call (`call_failed`) count as failures. A backend whose circuit is open is checked
    again after the circuit's pause, or at once when it is reachable again (`check_now`); one success closes the circuit.
    """

    def __init__(self, backend: Backend, clock: Clock, policy: HealthPolicy, on_change: Callable[[], None]) -> None:
        self._backend, self._clock, self._policy, self._on_change = backend, clock, policy, on_change
        self.circuit = Circuit(policy.circuit)
        self.last: Health | None = None
        self._failed_calls = 0
        self._check_now = asyncio.Event()

    async def run(self) -> None:
        while True:
            now_ms = self._clock.now_ms()
            pause_ms = max(self.circuit.next_ms(now_ms, self._policy.every_ms) - now_ms, 100)
            try:
                await asyncio.wait_for(self._check_now.wait(), pause_ms / 1000)
            except TimeoutError:
                pass
            self._check_now.clear()
            await self.check()

    def check_now(self) -> None:
        """Does not wait for the end of the circuit's pause."""
        self._check_now.set()

    async def check(self) -> Health:
        timeout_ms = self._policy.timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                health = await self._backend.health()
        except TimeoutError:
            health = Health(False, f"no answer within {timeout_ms / 1000:g} s", timeout_ms)
        except Exception as error:  # against the contract of `health`
            health = Health(False, str(error) or type(error).__name__)
        self.last = health
        if not health.ok:
            self._failed(health.text)
        elif self.circuit.state(self._clock.now_ms()) == "half-open" or not self._failed_calls:
            self._succeeded()
        return health

    def call_failed(self, text: str) -> None:
        """A call failed, whatever the backend reports about its health."""
        self._failed_calls += 1
        self._failed(text)

    def call_succeeded(self) -> None:
        """A call succeeded after failures."""
        self._succeeded()

    def _failed(self, text: str) -> None:
        if self.circuit.failed(self._clock.now_ms(), text):
            log.warning("backend %s is unhealthy: %s", self._backend.name, text)
            self._on_change()

    def _succeeded(self) -> None:
        self._failed_calls = 0
        if self.circuit.succeeded():
            log.warning("backend %s is healthy again", self._backend.name)
            self._on_change()
