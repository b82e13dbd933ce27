"""A service for one test: a store in memory, a backend under the control of the test, and a clock that the test moves."""

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
    """It moves when it is told to."""

    def __init__(self) -> None:
        self.ms = NOW_MS

    def now_ms(self) -> int:
        return self.ms


class CallLog:
    """What happened, in order; shared by a store and a backend."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, Any]] = []

    def write(self, what: str, which: Any) -> None:
        self.lines.append((what, which))


class RecordingStore(MemoryStore):
    """Writes commits into a diary, and fails them as long as `errors` lasts."""

    def __init__(self, diary: CallLog | None = None, *, of: MemoryStore | None = None) -> None:
        super().__init__(of=of)
        self.diary = diary or CallLog()
        self.errors: list[Exception] = []
        self.hold: Callable[[], None] | None = None

    def commit(self, saves: Sequence[Save]) -> None:
        if self.errors:
            raise self.errors.pop(0)
        if self.hold is not None:
            self.hold()
        super().commit(saves)
        self.diary.write("commit", list(saves))


class FakeBackend(BaseBackend):
    """Keeps orders and says what it is told to say. `start_errors` fail whole calls, `refuse` single runs."""

    kind = "obedient"

    def __init__(self, name: str = "obedient", nodes: Sequence[Node] = (), diary: CallLog | None = None) -> None:
        super().__init__(name)
        self.offered = list(nodes) or [a_node("n1", 4, backend=name)]
        self.diary = diary or CallLog()
        self.remembers: dict[str, RunObserved] = {}
        self.start_errors: list[Exception] = []
        self.refuse: dict[str, BackendError | BackendRefused] = {}
        self.opened = 0
        self.open_errors: list[Exception] = []
        self._news: asyncio.Queue[list[RunObserved] | Exception] = asyncio.Queue()

    def say(self, *news: RunObserved) -> None:
        self._news.put_nowait(list(news))

    def fall_over(self, error: str = "the line is cut") -> None:
        self._news.put_nowait(BackendError(error))

    async def open(self) -> None:
        if self.open_errors:
            raise self.open_errors.pop(0)
        self.opened += 1

    async def nodes(self) -> list[Node]:
        return list(self.offered)

    async def start(self, orders: Sequence[Start]) -> dict[str, BackendError | BackendRefused]:
        self.diary.write("start", [order.run.id for order in orders])
        if self.start_errors:
            raise self.start_errors.pop(0)
        return {order.run.id: self.refuse[order.run.id] for order in orders if order.run.id in self.refuse}

    async def stop(self, orders: Sequence[Stop]) -> None:
        self.diary.write("stop", [order.run for order in orders])

    async def checkpoint(self, orders: Sequence[TakeCheckpoint]) -> None:
        self.diary.write("checkpoint", [order.run for order in orders])

    async def observe(self) -> list[RunObserved]:
        news = await self._news.get()
        if isinstance(news, Exception):
            raise news
        return news

    async def known(self) -> dict[str, RunObserved]:
        self.diary.write("known", None)
        return dict(self.remembers)

    async def forget(self, orders: Sequence[Forget]) -> None:
        self.diary.write("forget", [order.run for order in orders])

    async def logs(self, run: str, stream: Any, offset: int, limit: int) -> tuple[bytes, int]:
        return b"", offset

    async def close(self) -> None:
        self.diary.write("close", None)


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
    """Looks again and again, for a bounded time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
