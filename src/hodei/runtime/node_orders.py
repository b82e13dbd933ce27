"""Starts and stops nodes of one backend, apart from the runs: a machine that takes long to switch on delays no run.

The last order for a node counts. Orders are idempotent by name, so one whose reply was lost is sent again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from hodei.model.effects import NodeAct, WantNodes
from hodei.model.errors import IN_DOUBT, NOT_REACHED, BackendError, BackendRefused, StaleEpoch
from hodei.model.facts import Fact, NodeRefused
from hodei.model.ids import NodeName
from hodei.ports import Backend
from hodei.runtime.watcher import CALL_TIMEOUT_S

log = logging.getLogger("hodei.node_orders")
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class NodeOrders:
    """`is_open`: set once the backend is connected. Orders of an earlier server wait for that."""

    def __init__(self, backend: Backend, enqueue: Callable[[Sequence[Fact]], None], is_open: asyncio.Event) -> None:
        self._backend, self._enqueue, self._is_open = backend, enqueue, is_open
        self._wanted: dict[NodeName, bool] = {}  # in the order of the acts
        self._more = asyncio.Event()

    def act(self, act: NodeAct) -> None:
        for node in act.nodes:
            self._wanted.pop(node, None)
            self._wanted[node] = isinstance(act, WantNodes)
        self._more.set()

    async def serve(self) -> None:
        """Carries out the orders, forever."""
        pause_s = _SHORTEST_PAUSE_S
        await self._is_open.wait()
        while True:
            await self._more.wait()
            self._more.clear()
            try:
                await self._carry_out()
                pause_s = _SHORTEST_PAUSE_S
            except StaleEpoch:
                raise
            except Exception as error:
                if not isinstance(error, BackendError | OSError | TimeoutError):
                    log.exception("backend %s", self._backend.name)
                text = str(error) or f"no answer within {CALL_TIMEOUT_S:g} s"
                name, count = self._backend.name, len(self._wanted)
                log.warning("backend %s: %s; orders for %d nodes are sent again in %.1f s", name, text, count, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
                self._more.set()

    async def _carry_out(self) -> None:
        while self._wanted:
            # Releases first: they save money, and may make capacity for what is wanted. One that fails delays no start.
            problem: Exception | None = None
            if released := [node for node, wanted in self._wanted.items() if not wanted]:
                try:
                    async with asyncio.timeout(CALL_TIMEOUT_S):
                        await self._release(released)
                    self._done(released, wanted=False)
                except (BackendError, OSError, TimeoutError) as error:
                    problem = error
            if wanted := [node for node, is_wanted in self._wanted.items() if is_wanted]:
                await self._want(wanted)
            if problem is not None:
                raise problem

    async def _release(self, nodes: list[NodeName]) -> None:
        try:
            await self._backend.release(nodes)
        except BackendRefused as error:
            log.error("backend %s refuses to stop %s: %s", self._backend.name, ", ".join(nodes[:5]), error)

    async def _want(self, nodes: list[NodeName]) -> None:
        failed: dict[NodeName, BackendError | BackendRefused]
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                failed = dict(await self._backend.wanted(nodes))
        except BackendRefused as error:
            failed = dict.fromkeys(nodes, error)
        again = {
            node: error
            for node, error in failed.items()
            if isinstance(error, BackendError) and error.code in (IN_DOUBT, NOT_REACHED)
        }
        refused = {node: error for node, error in failed.items() if node not in again}
        self._done([node for node in nodes if node not in again], wanted=True)
        if refused:
            self._enqueue(
                [
                    NodeRefused(node, error.code, error.message, permanent=isinstance(error, BackendRefused))
                    for node, error in refused.items()
                ]
            )
        if again:
            raise next(iter(again.values()))

    def _done(self, nodes: list[NodeName], *, wanted: bool) -> None:
        """Unless the opposite was ordered meanwhile."""
        for node in nodes:
            if self._wanted.get(node) is wanted:
                del self._wanted[node]
