"""The watcher keeps in touch with one backend: its nodes, its runs, and peace between what it says and what we believe."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from msgspec import structs

from hodei.control.recovery import reconcile
from hodei.control.world import World
from hodei.model.effects import Act
from hodei.model.errors import BackendError
from hodei.model.facts import Fact, NodeJoined, NodeLost
from hodei.model.node import Node
from hodei.ports import Backend, Clock
from hodei.runtime.metrics import Metrics

log = logging.getLogger("hodei.watcher")
_NODES_EVERY_S = 30.0


class Watcher:
    def __init__(
        self,
        backend: Backend,
        world: World,
        clock: Clock,
        metrics: Metrics,
        tell: Callable[[Sequence[Fact]], None],
        act: Callable[[Sequence[Act]], None],
        quiet: asyncio.Lock | None = None,
    ) -> None:
        """`quiet` is held while something is decided and not stored yet."""
        self._backend = backend
        self._world = world
        self._clock = clock
        self._metrics = metrics
        self._tell = tell
        self._act = act
        self._quiet = quiet or asyncio.Lock()
        self._nodes: dict[str, Node] = {}
        self.up = asyncio.Event()
        self.last_error = ""

    async def watch(self) -> None:
        """For ever: connect, settle what happened meanwhile, then listen; after an outage all over again."""
        pause = 0.1
        while True:
            try:
                await self._backend.open()
                await self._look_at_nodes()
                await self._make_peace()
                self.up.set()
                self.last_error, pause = "", 0.1
                await self._listen()
            except (BackendError, OSError, TimeoutError) as error:
                self._went_down(str(error))
                await asyncio.sleep(pause)
                pause = min(pause * 2, 10.0)

    async def _look_at_nodes(self) -> None:
        found = {node.name: node for node in await self._backend.nodes()}
        facts: list[Fact] = [NodeJoined(node) for name, node in found.items() if self._nodes.get(name) != node]
        # Also those that only the store remembers, from before a restart with other nodes.
        mine = {
            run.node for runs in self._world.runs.values() for run in runs.values() if run.backend == self._backend.name
        }
        facts += [NodeLost(name, "no longer offered by its backend") for name in self._nodes if name not in found]
        missing = sorted(name for name in mine if name not in found and name not in self._nodes)
        if missing:
            log.warning("runs wait for nodes that are not offered any more: %s", ", ".join(missing))
        self._nodes = found
        if facts:
            self._tell(facts)

    async def _make_peace(self) -> None:
        known = await self._backend.known()
        async with self._quiet:
            facts, orders = reconcile(self._world, self._backend.name, known, self._clock.now_ms())
            if facts:
                self._tell(facts)
            if orders:
                self._act(orders)

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        looked, hearing = loop.time(), asyncio.ensure_future(self._backend.observe())
        try:
            while True:
                # Not wait_for: cancelling a reader that has just been given something would lose it.
                await asyncio.wait({hearing}, timeout=max(looked + _NODES_EVERY_S - loop.time(), 0))
                if hearing.done():
                    facts = hearing.result()
                    hearing = asyncio.ensure_future(self._backend.observe())
                    if facts:
                        self._tell(facts)
                if loop.time() - looked >= _NODES_EVERY_S:
                    await self._look_at_nodes()
                    looked = loop.time()
        finally:
            hearing.cancel()

    def _went_down(self, error: str) -> None:
        self._metrics.backend_errors.labels(self._backend.name).inc()
        if self.last_error != error:
            log.warning("backend %s is out of reach: %s", self._backend.name, error)
        self.last_error = error
        down = {
            name: structs.replace(node, ready=False, not_ready_reason=f"backend {self._backend.name} is out of reach")
            for name, node in self._nodes.items()
        }
        facts: list[Fact] = [NodeJoined(node) for name, node in down.items() if self._nodes[name] != node]
        self._nodes = down
        if facts:
            self._tell(facts)
