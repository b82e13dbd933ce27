"""The watcher keeps in touch with one backend: its nodes, its runs, and peace between what it says and what we believe."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct, structs

from hodei.control.admission.gate import DISABLED as DISABLED
from hodei.control.lifecycle.runs import NOT_WANTED, reconcile
from hodei.control.state import ClusterState
from hodei.model.backend import unmet_by
from hodei.model.effects import Act, Forget, Stop
from hodei.model.errors import BackendError, StaleEpoch
from hodei.model.facts import BackendReported, Fact, NodeJoined, NodeLost, RunObserved
from hodei.model.ids import RunId
from hodei.model.job import RUN_ENDED
from hodei.model.node import Node
from hodei.model.resources import format_time
from hodei.ports import Backend, Clock
from hodei.runtime.metrics import Metrics

log = logging.getLogger("hodei.watcher")
_NODES_EVERY_S = 30.0
# A backend answers within a minute or is given up; others are not held up meanwhile.
CALL_TIMEOUT_S = 60.0
# The server is ready without a backend that has not even failed by then.
FIRST_LOOK_S = 3.0
UNHEALTHY = "BACKEND_UNHEALTHY"


class Bar(Struct, frozen=True):
    """Why nothing may start on a backend for now: a reason code and the words to it."""

    code: str
    text: str


class Watcher:
    def __init__(
        self,
        backend: Backend,
        cluster: ClusterState,
        clock: Clock,
        metrics: Metrics,
        tell: Callable[[Sequence[Fact]], None],
        act: Callable[[Sequence[Act]], None],
        quiet: asyncio.Lock | None = None,
        owners: dict[str, str] | None = None,
        dress: Callable[[Node], Node] = lambda node: node,
        spared: Callable[[Sequence[RunId]], Awaitable[set[RunId]]] | None = None,
    ) -> None:
        """`quiet` is held while something is decided and not stored yet. `owners`: which backend each node is of, shared
        by all watchers. `dress` adds what the configuration says of all nodes of this backend. `spared`: which of the runs
        that nobody here knows are not to be stopped all the same."""
        self._backend = backend
        self._cluster = cluster
        self._clock = clock
        self._metrics = metrics
        self._tell = tell
        self._act = act
        self._quiet = quiet or asyncio.Lock()
        self._owners = {} if owners is None else owners
        self._dress = dress
        self._spared = spared
        self._offered: dict[str, Node] = {}
        self._told: dict[str, Node] = {}
        self._outage: Bar | None = None
        self._barred: Bar | None = None
        self._silent = ""  # what was told of a backend without nodes
        self._left = False
        self.up = asyncio.Event()
        self.tried = asyncio.Event()
        self.last_error = ""
        self.down_since_ms = 0
        # Called when it is back after an outage.
        self.came_back: Callable[[], None] = lambda: None

    @property
    def bar(self) -> Bar | None:
        """What keeps runs off its nodes now. Of a backend that cannot be reached that is told, since when it is so; that it
        does not answer questions about its health either came later."""
        if self._outage is not None and (self._barred is None or self._barred.code == self._outage.code):
            return self._outage
        return self._barred

    @property
    def nodes(self) -> int:
        return len(self._offered)

    async def watch(self) -> None:
        """For ever: connect, settle what happened meanwhile, then listen; after an outage all over again."""
        pause = 0.1
        asyncio.get_running_loop().call_later(FIRST_LOOK_S, self.tried.set)
        while True:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await self._backend.open()
                await self._look_at_nodes()
                await self._make_peace()
                self._came_up()
                pause = 0.1
                await self._listen()
            except StaleEpoch:
                raise
            except TimeoutError:
                self._went_down(f"no answer within {CALL_TIMEOUT_S:g} s")
            except (BackendError, OSError) as error:
                self._went_down(str(error))
            except Exception as error:
                log.exception("backend %s", self._backend.name)
                self._went_down(str(error) or type(error).__name__)
            self.tried.set()
            await asyncio.sleep(pause)
            pause = min(pause * 2, 10.0)

    def _came_up(self) -> None:
        if self.last_error:
            self.came_back()
        self.last_error, self.down_since_ms = "", 0
        self._outage = None
        self.up.set()
        self.tried.set()
        self._tell_nodes()

    async def _look_at_nodes(self) -> None:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            offered = await self._backend.nodes()
        found = {node.name: self._dressed(node) for node in offered}
        name = self._backend.name
        for node in [node for node in found if self._owners.setdefault(node, name) != name]:
            log.error(
                "backend %s: node %s is left out, backend %s has one of that name", name, node, self._owners[node]
            )
            del found[node]
        # Also those that only the store remembers, from before a restart with other nodes.
        mine = {run.node for runs in self._cluster.runs.values() for run in runs.values() if run.backend == name}
        missing = sorted(node for node in mine if node not in found and node not in self._offered)
        if missing:
            log.warning("runs wait for nodes that are not offered any more: %s", ", ".join(missing))
        for node in self._offered.keys() - found.keys():
            self._owners.pop(node, None)
        self._offered, self._outage = found, None
        self._tell_nodes()

    def _dressed(self, node: Node) -> Node:
        """With what the configuration says of all nodes of the backend, and what the backend cannot do."""
        node, cannot = self._dress(node), unmet_by(self._backend.capabilities)
        return structs.replace(node, cannot=cannot) if cannot and not node.cannot else node

    def _tell_nodes(self, gone: str = "no longer offered by its backend") -> None:
        """What has changed of its nodes, as they count: barred ones are not ready, whatever the backend says."""
        bar = self.bar
        now = self._offered
        if bar is not None:
            now = {
                name: structs.replace(node, ready=False, not_ready_reason=bar.text, not_ready_code=bar.code)
                for name, node in now.items()
            }
        facts: list[Fact] = [NodeJoined(node) for name, node in now.items() if self._told.get(name) != node]
        facts += [NodeLost(name, gone) for name in self._told if name not in now]
        self._told = now
        silent = bar.text if bar is not None and not now and not self._left else ""
        if silent != self._silent:
            self._silent = silent
            facts.append(BackendReported(self._backend.name, silent, unmet_by(self._backend.capabilities)))
        if facts:
            self._tell(facts)

    def bar_with(self, bar: Bar | None) -> None:
        """Nothing starts on its nodes while there is a bar; what runs goes on."""
        if bar != self._barred:
            self._barred = bar
            self._tell_nodes()

    def leave(self, reason: str) -> None:
        """The backend is no more ours: its nodes are lost."""
        for node in self._offered:
            self._owners.pop(node, None)
        self._offered, self._left = {}, True
        self._tell_nodes(reason)

    async def _make_peace(self) -> None:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            known = await self._backend.known()
        async with self._quiet:
            facts, orders = reconcile(self._cluster, self._backend.name, known, self._clock.now_ms())
            strangers = [order.run for order in orders if isinstance(order, Stop) and order.reason == NOT_WANTED]
            spared = await self._left_alone(strangers)
            orders = [order for order in orders if not (isinstance(order, Stop) and order.run in spared)]
            if facts:
                self._tell(facts)
            if orders:
                self._act(orders)

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        looked, hearing = loop.time(), asyncio.ensure_future(self._backend.observe())
        changing = asyncio.ensure_future(self._backend.nodes_changed())
        try:
            while True:
                # Not wait_for: cancelling a reader that has just been given something would lose it.
                left_s = max(looked + _NODES_EVERY_S - loop.time(), 0)
                await asyncio.wait({hearing, changing}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if hearing.done():
                    facts = hearing.result()
                    hearing = asyncio.ensure_future(self._backend.observe())
                    if facts:
                        self._tell(facts)
                        await self._turn_away(facts)
                if changing.done() or loop.time() - looked >= _NODES_EVERY_S:
                    if changing.done():
                        changing.result()
                        changing = asyncio.ensure_future(self._backend.nodes_changed())
                    await self._look_at_nodes()
                    looked = loop.time()
        finally:
            hearing.cancel()
            changing.cancel()

    async def _turn_away(self, seen: Sequence[RunObserved]) -> None:
        """Runs that nobody here wants any more, such as those that began late by an order that was given up: they are
        stopped, and their ends forgotten."""
        if not any(self._unwanted(each) for each in seen):
            return
        async with self._quiet:
            unwanted = [each for each in seen if self._unwanted(each)]
            spared = await self._left_alone([each.run for each in unwanted if each.state not in RUN_ENDED])
        name = self._backend.name
        self._act(
            [
                Forget(each.run, name) if each.state in RUN_ENDED else Stop(each.run, name, 0, NOT_WANTED)
                for each in unwanted
                if each.run not in spared
            ]
        )

    async def _left_alone(self, strangers: Sequence[RunId]) -> set[RunId]:
        """Which of these runs go on although nothing is known of them here: their records are damaged."""
        return await self._spared(strangers) if strangers and self._spared is not None else set()

    def _unwanted(self, seen: RunObserved) -> bool:
        run = self._cluster.run(seen.run)
        return run is None or (run.state in RUN_ENDED and seen.state not in RUN_ENDED)

    def _went_down(self, error: str) -> None:
        self._metrics.backend_errors.labels(self._backend.name).inc()
        if self.last_error != error:
            log.warning("backend %s is out of reach: %s", self._backend.name, error)
        self.last_error = error
        if not self.down_since_ms:
            self.down_since_ms = self._clock.now_ms()
        if self._outage is None:
            since = format_time(self.down_since_ms)
            text = f"backend {self._backend.name} is out of reach since {since}: {error[:200]}"
            self._outage = Bar(UNHEALTHY, text)
            self._tell_nodes()
