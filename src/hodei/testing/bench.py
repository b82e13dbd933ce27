"""The caller's side of a backend in a test: gives orders and records every observation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from hodei.backends.base import BackendContext
from hodei.model.effects import Start, Stop
from hodei.model.facts import RunObserved
from hodei.model.job import RUN_ENDED
from hodei.model.outcome import StopReason
from hodei.ports import Backend, Stream
from hodei.testing.builders import an_order

DEADLINE_S = 120.0  # only how long a failing test takes


class WallClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


def backend_context(home: Path, *, installation: str = "test", epoch: int = 1) -> BackendContext:
    """What a server passes to `make(name, settings, context)`."""
    return BackendContext(installation, epoch, home, WallClock())


class RunRecorder:
    """A backend and all that it has observed so far."""

    def __init__(self, backend: Backend, deadline_s: float = DEADLINE_S) -> None:
        self.backend = backend
        self.heard: list[RunObserved] = []
        self._deadline_s = deadline_s

    async def run(self, *orders: Start) -> list[RunObserved]:
        """Start these, and wait for their ends, in the same order."""
        assert await self.backend.start(orders) == {}
        return [await self.end_of(order.run.id) for order in orders]

    async def hear(self) -> None:
        self.heard += await self.backend.observe()

    async def first(self, run: str, states: frozenset[str]) -> RunObserved:
        async with asyncio.timeout(self._deadline_s):
            while True:
                for observation in self.heard:
                    if observation.run == run and observation.state in states:
                        return observation
                await self.hear()

    async def end_of(self, run: str) -> RunObserved:
        return await self.first(run, RUN_ENDED)

    async def running(self, run: str) -> RunObserved:
        return await self.first(run, frozenset({"running"}))

    async def stop(self, run: str, grace_ms: int = 10_000, reason: StopReason | None = None) -> None:
        reason = reason or StopReason("cancelled", "by the test")
        await self.backend.stop([Stop(run, self.backend.name, grace_ms, reason)])

    async def log(self, run: str, stream: Stream = "stdout") -> bytes:
        out, offset = b"", 0
        while True:
            data, offset = await self.backend.logs(run, stream, offset, 1 << 20)
            if not data:
                return out
            out += data

    async def log_has(self, run: str, text: bytes) -> bytes:
        """Wait until the run has written it."""
        for _ in range(int(self._deadline_s / 0.01)):
            if text in (said := await self.log(run)):
                return said
            await asyncio.sleep(0.01)
        raise AssertionError(f"{run} did not write {text!r}")


class Bench(RunRecorder):
    """An open backend under test. `make` makes another one for the same system, as a restarted server does."""

    def __init__(
        self, make: Callable[[], Backend], home: Path, *, fields: Mapping[str, Any], deadline_s: float
    ) -> None:
        super().__init__(make(), deadline_s)
        self.make, self.home, self._fields = make, home, fields
        self._node = ""

    async def order(self, job: int, *command: str, **fields: Any) -> Start:
        """As the controller gives it: for a node that the backend offers."""
        if not self._node:
            self._node = min(node.name for node in await self.backend.nodes() if node.ready)
        order = an_order(job, *command, **{**self._fields, **fields})
        return structs.replace(order, run=structs.replace(order.run, node=self._node, backend=self.backend.name))

    async def restart(self, *, after_s: float = 0) -> None:
        """The server ends, and after a while another one starts that remembers nothing."""
        await self.backend.close()
        await asyncio.sleep(after_s)
        self.heard.clear()
        self.backend = self.make()
        await self.backend.open()

    async def stop_all(self) -> None:
        left = [run for run, seen in (await self.backend.known()).items() if seen.state not in RUN_ENDED]
        for run in left:
            await self.stop(run, 0, StopReason("cancelled", "the test is over"))
