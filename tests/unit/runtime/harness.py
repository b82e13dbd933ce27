"""A service for one test: a store in memory, a backend under the control of the test, and a clock that the test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from builders import NOW_MS, a_node
from hodei.backends.base import BaseBackend
from hodei.control.admission.gate import AdmissionPolicy
from hodei.control.controller import Controller
from hodei.model.effects import Forget, Save, Start, Stop, TakeCheckpoint
from hodei.model.errors import BackendError, BackendRefused
from hodei.model.facts import RunObserved
from hodei.model.node import Node
from hodei.plugins.registry import build_profile
from hodei.ports import Backend
from hodei.runtime.service import Service
from hodei.store.memory import MemoryStore


class FakeClock:
    """A clock that advances only when a test sets it."""

    def __init__(self) -> None:
        self.ms = NOW_MS

    def now_ms(self) -> int:
        return self.ms


class CallLog:
    """Calls in order; shared by a store and a backend."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def record(self, kind: str, argument: Any) -> None:
        self.calls.append((kind, argument))


class RecordingStore(MemoryStore):
    """Records commits; each of `errors` fails one."""

    def __init__(self, log: CallLog | None = None, *, of: MemoryStore | None = None) -> None:
        super().__init__(of=of)
        self.log = log or CallLog()
        self.errors: list[Exception] = []
        self.hold: Callable[[], None] | None = None

    def commit(self, saves: Sequence[Save]) -> None:
        if self.errors:
            raise self.errors.pop(0)
        if self.hold is not None:
            self.hold()
        super().commit(saves)
        self.log.record("commit", list(saves))


class FakeBackend(BaseBackend):
    """Records orders and reports what the test passes to `report`. `start_errors` fail whole calls, `refuse` single runs."""

    kind = "fake"

    def __init__(self, name: str = "fake", nodes: Sequence[Node] = (), log: CallLog | None = None) -> None:
        super().__init__(name)
        self.offered = list(nodes) or [a_node("n1", 4, backend=name)]
        self.log = log or CallLog()
        self.known_runs: dict[str, RunObserved] = {}
        self.start_errors: list[Exception] = []
        self.refuse: dict[str, BackendError | BackendRefused] = {}
        self.opened = 0
        self.open_errors: list[Exception] = []
        self._reports: asyncio.Queue[list[RunObserved] | Exception] = asyncio.Queue()

    def report(self, *reports: RunObserved) -> None:
        self._reports.put_nowait(list(reports))

    def disconnect(self, error: str = "the connection is lost") -> None:
        self._reports.put_nowait(BackendError(error))

    async def open(self) -> None:
        if self.open_errors:
            raise self.open_errors.pop(0)
        self.opened += 1

    async def nodes(self) -> list[Node]:
        return list(self.offered)

    async def start(self, orders: Sequence[Start]) -> dict[str, BackendError | BackendRefused]:
        self.log.record("start", [order.run.id for order in orders])
        if self.start_errors:
            raise self.start_errors.pop(0)
        return {order.run.id: self.refuse[order.run.id] for order in orders if order.run.id in self.refuse}

    async def stop(self, orders: Sequence[Stop]) -> None:
        self.log.record("stop", [order.run for order in orders])

    async def checkpoint(self, orders: Sequence[TakeCheckpoint]) -> None:
        self.log.record("checkpoint", [order.run for order in orders])

    async def observe(self) -> list[RunObserved]:
        reports = await self._reports.get()
        if isinstance(reports, Exception):
            raise reports
        return reports

    async def known(self) -> dict[str, RunObserved]:
        self.log.record("known", None)
        return dict(self.known_runs)

    async def forget(self, orders: Sequence[Forget]) -> None:
        self.log.record("forget", [order.run for order in orders])

    async def logs(self, run: str, stream: Any, offset: int, limit: int) -> tuple[bytes, int]:
        return b"", offset

    async def close(self) -> None:
        self.log.record("close", None)


def a_service(store: MemoryStore, *backends: Backend, clock: FakeClock | None = None, **options: Any) -> Service:
    opened = store.open()
    controller = Controller(
        {"default": build_profile("default", **options.pop("profile", {}))},
        admission=AdmissionPolicy("wait"),
        accounts=options.pop("accounts", None),
        last_event=opened.last_event,
    )
    return Service(store, opened, controller, {b.name: b for b in backends}, clock or FakeClock(), **options)


@asynccontextmanager
async def alive(service: Service) -> AsyncIterator[Service]:
    async with asyncio.timeout(20):
        await service.start()
        assert await service.until_ready(5)
        try:
            yield service
        finally:
            await service.stop()


async def until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    """Poll the condition, for a bounded time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
