"""A fake for benchmarks and tests: every run is running, and then has succeeded, the moment it is ordered.

It proves nothing about processes, limits, output, crashes, timeouts or stops: no command is ever run. It keeps the
contract of `ports.Backend` where that makes sense without commands (idempotent starts, ends repeated until forgotten).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec import Struct

from hodei.backends.base import BackendContext, PlainBackend
from hodei.model.backend import Capabilities
from hodei.model.effects import Forget, Start, Stop, TakeCheckpoint
from hodei.model.errors import BackendError, BackendRefused
from hodei.model.facts import RunObserved
from hodei.model.ids import RunId
from hodei.model.node import Node
from hodei.model.resources import CPU, MEMORY, STORAGE
from hodei.ports import Clock, Stream


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """So many nodes without end."""

    nodes: int = 1


def make(name: str, settings: Settings, context: BackendContext) -> InstantBackend:
    huge = {CPU: 2**38, MEMORY: 2**48, STORAGE: 2**48}
    names = [name] if settings.nodes == 1 else [f"{name}-{number}" for number in range(settings.nodes)]
    return InstantBackend(name, [Node(each, name, "instant", huge) for each in names], context.clock)


class InstantBackend(PlainBackend):
    """`clock` stamps the observations; without one every observation is at 0 ms."""

    kind = "instant"
    capabilities = Capabilities(commands=False)

    def __init__(self, name: str, nodes: Sequence[Node], clock: Clock | None = None) -> None:
        super().__init__(name)
        self._nodes = list(nodes)
        self._clock = clock
        self._ended: dict[RunId, RunObserved] = {}
        self._news: list[RunObserved] = []
        self._something_new = asyncio.Event()

    async def open(self) -> None:
        self._news.extend(self._ended.values())
        if self._news:
            self._something_new.set()

    async def nodes(self) -> list[Node]:
        return list(self._nodes)

    async def start(self, orders: Sequence[Start]) -> dict[RunId, BackendError | BackendRefused]:
        now_ms = self._clock.now_ms() if self._clock else 0
        for order in orders:
            run = order.run.id
            if run in self._ended:
                continue
            end = self._ended[run] = RunObserved(run, "succeeded", now_ms, exit_code=0)
            self._news += (RunObserved(run, "running", now_ms), end)
        self._something_new.set()
        return {}

    async def stop(self, orders: Sequence[Stop]) -> None:
        """Too late by nature: whatever is to be stopped has ended."""

    async def checkpoint(self, orders: Sequence[TakeCheckpoint]) -> None:
        """Too late as well."""

    async def observe(self) -> list[RunObserved]:
        await self._something_new.wait()
        self._something_new.clear()
        news, self._news = self._news, []
        return news

    async def known(self) -> dict[RunId, RunObserved]:
        return dict(self._ended)

    async def forget(self, orders: Sequence[Forget]) -> None:
        for order in orders:
            self._ended.pop(order.run, None)

    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        return b"", offset
