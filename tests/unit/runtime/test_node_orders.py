"""Orders for nodes: when they are sent, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from agent_host import until
from hodei.model.capacity import NO_CAPACITY
from hodei.model.effects import ReleaseNodes, WantNodes
from hodei.model.errors import IN_DOUBT, BackendError, BackendRefused
from hodei.model.facts import NodeRefused
from hodei.runtime import node_orders
from hodei.runtime.node_orders import NodeOrders


class Machines:
    """Records the calls. `fails`: what a call does with these nodes, once."""

    name = "metal"

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.fails: list[Callable[[], Any]] = []

    async def wanted(self, nodes: Sequence[str]) -> dict[str, Any]:
        self.calls.append(("wanted", list(nodes)))
        return (self.fails.pop()() or {}) if self.fails else {}

    async def release(self, nodes: Sequence[str]) -> None:
        self.calls.append(("release", list(nodes)))
        if self.fails:
            self.fails.pop()()


class Served:
    def __init__(self) -> None:
        self.machines, self.facts, self.is_open = Machines(), list[Any](), asyncio.Event()
        self.orders = NodeOrders(self.machines, self.facts.extend, self.is_open)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def served(is_open: bool = True) -> AsyncIterator[Served]:
    found = Served()
    if is_open:
        found.is_open.set()
    task = asyncio.create_task(found.orders.serve())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def repeat_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_orders, "_SHORTEST_PAUSE_S", 0.001)


def raises(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def test_orders_wait_until_the_backend_is_connected() -> None:
    async def check() -> None:
        async with served(is_open=False) as found:
            found.orders.act(WantNodes("metal", ("a",)))
            for _ in range(10):
                await asyncio.sleep(0)
            assert found.machines.calls == []
            found.is_open.set()
            await until(lambda: found.machines.calls == [("wanted", ["a"])])

    asyncio.run(check())


def test_a_release_that_fails_delays_no_start_and_is_repeated() -> None:
    async def check() -> None:
        async with served() as found:
            found.machines.fails = [raises(BackendError("its BMC is away"))]
            found.orders.act(WantNodes("metal", ("a",)))
            found.orders.act(ReleaseNodes("metal", ("b",)))
            expected = [("release", ["b"]), ("wanted", ["a"]), ("release", ["b"])]
            await until(lambda: found.machines.calls == expected, str(found.machines.calls))

    asyncio.run(check())


def test_a_start_in_doubt_is_repeated_and_one_that_is_refused_is_reported() -> None:
    async def check() -> None:
        async with served() as found:
            found.machines.fails = [
                lambda: {"a": BackendError("no answer", code=IN_DOUBT), "b": BackendError("full", code=NO_CAPACITY),
                         "c": BackendRefused("broken")}
            ]  # fmt: skip
            found.orders.act(WantNodes("metal", ("a", "b", "c", "d")))
            await until(lambda: len(found.machines.calls) == 2)
            assert found.machines.calls[1] == ("wanted", ["a"])
            assert found.facts == [
                NodeRefused("b", NO_CAPACITY, "full"), NodeRefused("c", "BACKEND_REFUSED", "broken", permanent=True)
            ]  # fmt: skip

    asyncio.run(check())


def test_the_last_order_for_a_node_counts() -> None:
    async def check() -> None:
        async with served(is_open=False) as found:
            found.orders.act(WantNodes("metal", ("a",)))
            found.orders.act(ReleaseNodes("metal", ("a",)))
            found.is_open.set()
            await until(lambda: found.machines.calls == [("release", ["a"])])

    asyncio.run(check())
