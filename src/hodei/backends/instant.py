"""A fake for benchmarks and tests: every run starts and succeeds the moment it is ordered. No command is ever run.

It keeps the contract of `ports.Backend` where that makes sense without commands: starts are idempotent, ends are repeated
until they are forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from hodei.backends.base import BackendContext, BaseBackend
from hodei.model.backend import Capabilities
from hodei.model.effects import Forget, Start, Stop
from hodei.model.errors import BackendError, BackendRefused
from hodei.model.facts import RunObserved
from hodei.model.ids import RunId
from hodei.model.node import Node
from hodei.model.resources import CPU, MEMORY, STORAGE
from hodei.ports import Clock, Stream


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """`nodes`: how many nodes, each with practically unlimited capacity."""

    nodes: Annotated[int, Meta(ge=1, le=100_000)] = 1


def make(name: str, settings: Settings, context: BackendContext) -> InstantBackend:
    huge = {CPU: 2**38, MEMORY: 2**48, STORAGE: 2**48}
    names = [name] if settings.nodes == 1 else [f"{name}-{number}" for number in range(settings.nodes)]
    return InstantBackend(name, [Node(each, name, "instant", huge) for each in names], context.clock)


class InstantBackend(BaseBackend):
    """`clock` stamps the observations; without one every observation is at 0 ms."""

    kind = "instant"
    capabilities = Capabilities(commands=False)

    def __init__(self, name: str, nodes: Sequence[Node], clock: Clock | None = None) -> None:
        super().__init__(name)
        self._nodes = list(nodes)
        self._clock = clock
        self._ended: dict[RunId, RunObserved] = {}
        self._observations: list[RunObserved] = []
        self._changed = asyncio.Event()

    async def open(self) -> None:
        self._observations.extend(self._ended.values())
        if self._observations:
            self._changed.set()

    async def nodes(self) -> list[Node]:
        return list(self._nodes)

    async def start(self, orders: Sequence[Start]) -> dict[RunId, BackendError | BackendRefused]:
        now_ms = self._clock.now_ms() if self._clock else 0
        for order in orders:
            run = order.run.id
            if run in self._ended:
                continue
            end = self._ended[run] = RunObserved(run, "succeeded", now_ms, exit_code=0)
            self._observations += (RunObserved(run, "running", now_ms), end)
        self._changed.set()
        return {}

    async def stop(self, orders: Sequence[Stop]) -> None:
        """Every run has ended already."""

    async def observe(self) -> list[RunObserved]:
        await self._changed.wait()
        self._changed.clear()
        seen, self._observations = self._observations, []
        return seen

    async def known(self) -> dict[RunId, RunObserved]:
        return dict(self._ended)

    async def forget(self, orders: Sequence[Forget]) -> None:
        for order in orders:
            self._ended.pop(order.run, None)

    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        return b"", offset
