"""Pods that have to stop are removed once, by the request that fits the cause.

The API only records requests; tests/real/kubernetes shows what a real cluster does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import msgspec
import pytest

from hodei.control.reservations.reservations import choose_nodes
from hodei.kube.api.client import ApiError
from hodei.kube.scheduler import binder
from hodei.kube.scheduler.reservations import ConfiguredReservation, Reservations
from hodei.kube.scheduler.run import Options, make_loop
from hodei.model.config import SchedulingConfig
from hodei.model.facts import ReservationMade
from hodei.model.reservation import ReservationSpec
from unit.kube.fake_cluster import NOW_MS, FakeCluster

LENT = {"quotas": {name: {"hard": {"cpu": 2}, "cohort": "lab"} for name in ("owner", "borrower")}}


class RecordingApi:
    namespace = "ns"

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.answers: list[ApiError] = []
        self.received = asyncio.Event()

    async def request(self, method: str, path: str, body: bytes | None = None, **options: Any) -> bytes:
        if path.endswith("/eviction") or method == "DELETE":
            if self.answers:
                raise self.answers.pop(0)
            self.received.set()
            self.requests.append(f"{'evict' if method == 'POST' else 'delete'} {path.split('/pods/')[1].split('/')[0]}")
        return b"{}"


class SchedulerRun:
    """A fake cluster whose decisions are carried out on an API that only records them."""

    def __init__(self, scheduling: dict[str, Any] | None = None) -> None:
        options = Options(scheduling=msgspec.convert(scheduling or {}, SchedulingConfig))
        self.cluster, self.api = FakeCluster(options), RecordingApi()
        self.loop = make_loop(cast("Any", self.api), self.cluster.parts, options)
        self.loop._now_ms = lambda: self.cluster.now_ms

    async def settle(self) -> None:
        """Run until nothing is left to decide or to send."""
        for _ in range(200):
            due = self.loop.controller.next_wakeup_ms(self.cluster.now_ms)
            if self.loop.pods.has_work or (due is not None and due <= self.cluster.now_ms):
                self.loop.step()
            await asyncio.sleep(0)

    async def bind(self, name: str, **fields: Any) -> None:
        self.cluster.pod(name, **fields)
        await self.settle()
        assert self.cluster.node_of(name)

    async def advance(self, ms: int) -> None:
        self.cluster.now_ms += ms
        await self.settle()


def run_scenario(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


async def lend_quota(scheduler: SchedulerRun) -> None:
    """The borrower holds all four cores and the owner needs one."""
    scheduler.cluster.node("a", cpu="4")
    for index in range(4):
        await scheduler.bind(f"b{index}", namespace="borrower")
    scheduler.cluster.pod("owner-pod", namespace="owner")
    await scheduler.settle()


def test_lent_quota_is_reclaimed_by_one_eviction():
    async def scenario() -> None:
        scheduler = SchedulerRun(LENT)
        await lend_quota(scheduler)
        await scheduler.settle()
        assert scheduler.api.requests == ["evict b3"]
        scheduler.cluster.delete("b3")
        await scheduler.settle()
        assert scheduler.cluster.node_of("owner-pod") == "a"
        assert scheduler.api.requests == ["evict b3"]

    run_scenario(scenario)


@pytest.mark.parametrize("status", [429, 403, 500, 0])
def test_a_refused_eviction_is_retried_until_it_is_granted(status: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(binder, "FIRST_PAUSE_S", 0.0001)
    monkeypatch.setattr(binder, "FORBIDDEN_PAUSE_S", 0.001)
    monkeypatch.setattr(binder, "LONGEST_PAUSE_S", 0.001)

    async def scenario() -> None:
        scheduler = SchedulerRun(LENT)
        scheduler.api.answers = [ApiError(status, "No", "later")] * 100
        await lend_quota(scheduler)
        await asyncio.wait_for(scheduler.api.received.wait(), 10)
        await scheduler.settle()
        assert scheduler.api.requests == ["evict b3"]

    run_scenario(scenario)


def test_evictions_that_wait_for_a_budget_do_not_delay_preemption():
    async def scenario() -> None:
        scheduler = SchedulerRun(
            {"quotas": {name: {"hard": {"cpu": 40}, "cohort": "lab"} for name in ("owner", "borrower")}}
        )
        scheduler.cluster.node("a", cpu="40")
        scheduler.cluster.node("c", cpu="40")
        for index in range(80):
            scheduler.cluster.pod(f"b{index}", namespace="borrower")
        await scheduler.settle()
        scheduler.api.answers = [ApiError(429, "TooManyRequests", "a budget", causes=("DisruptionBudget: no",))] * 40
        scheduler.cluster.pod("owner-pod", cpu="40", namespace="owner")
        await scheduler.settle()
        assert scheduler.api.answers == []  # all evictions were requested and wait
        scheduler.cluster.node("b", cpu="1")
        await scheduler.bind("low", nodeName="b", namespace="third")
        scheduler.cluster.pod("high", namespace="third", nodeSelector={"x": "y"}, priority=1000)
        scheduler.cluster.node("b", cpu="1", labels={"x": "y"})
        await scheduler.advance(2000)
        assert scheduler.api.requests == ["delete low"]

    run_scenario(scenario)


def test_a_victim_is_deleted_after_an_outage(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(binder, "FIRST_PAUSE_S", 0.0001)
    monkeypatch.setattr(binder, "LONGEST_PAUSE_S", 0.001)

    async def scenario() -> None:
        scheduler = SchedulerRun()
        scheduler.cluster.node("a", cpu="1")
        await scheduler.bind("low")
        scheduler.cluster.now_ms += 1000
        scheduler.api.answers = [ApiError(0, "Unreached", "connection refused")] * 50
        scheduler.cluster.pod("high", priority=1000)
        await scheduler.settle()
        await asyncio.wait_for(scheduler.api.received.wait(), 10)
        await scheduler.settle()
        assert scheduler.api.requests == ["delete low"]

    run_scenario(scenario)


def test_a_victim_is_deleted_and_not_evicted():
    async def scenario() -> None:
        scheduler = SchedulerRun()
        scheduler.cluster.node("a", cpu="1")
        await scheduler.bind("low")
        scheduler.cluster.now_ms += 1000
        scheduler.cluster.pod("high", priority=1000)
        await scheduler.settle()
        assert scheduler.api.requests == ["delete low"]

    run_scenario(scenario)


def reservation(**rules: Any) -> ReservationSpec:
    return ReservationSpec(
        "demo", "owner", start_ms=NOW_MS - 1000, end_ms=NOW_MS + 3_600_000, count=1, request={"cpu": 4000}, **rules
    )


def test_a_pod_on_reserved_nodes_is_evicted_when_the_reservation_starts():
    async def scenario() -> None:
        scheduler = SchedulerRun()
        scheduler.cluster.node("a", cpu="4")
        scheduler.cluster.pod("other", nodeName="a", namespace="else")
        reservations = Reservations(
            [ConfiguredReservation(reservation(at_start="stop"))], scheduler.loop.controller, scheduler.loop.pods.take_facts,
            scheduler.loop.pods.add_facts, lambda: scheduler.cluster.now_ms, scheduler.loop.step,
        )  # fmt: skip
        await reservations.start()
        await scheduler.settle()
        assert scheduler.api.requests == ["evict other"]

    run_scenario(scenario)


def test_a_pod_that_runs_past_its_reservation_is_evicted_once():
    async def scenario() -> None:
        scheduler = SchedulerRun()
        scheduler.cluster.node("a", cpu="4")
        await scheduler.settle()
        spec = reservation(at_end="stop")
        scheduler.cluster.parts.pods.add_facts(
            [ReservationMade(reservation=choose_nodes(scheduler.loop.controller.cluster, spec, NOW_MS))]
        )
        await scheduler.settle()
        await scheduler.bind("own", namespace="owner")
        await scheduler.advance(3_600_001)
        await scheduler.advance(60_000)
        assert scheduler.api.requests == ["evict own"]

    run_scenario(scenario)


def test_an_overrun_that_blocks_a_start_reservation_is_evicted_once():
    async def scenario() -> None:
        scheduler = SchedulerRun(
            {"profiles": {"default": {"queue": "batch", "options": {"batch": {"overrun": "stop"}}}}}
        )
        scheduler.cluster.node("a", cpu="4")
        await scheduler.bind("runs", cpu="3", estimate="1h")
        scheduler.cluster.pod("first", cpu="4", estimate="1h")
        await scheduler.settle()
        await scheduler.bind("short", cpu="1", estimate="10m")
        scheduler.cluster.delete("runs")
        await scheduler.settle()
        await scheduler.advance(3_600_000)
        await scheduler.advance(60_000)
        assert scheduler.api.requests == ["evict short"]

    run_scenario(scenario)


def test_a_terminating_pod_is_not_evicted():
    async def scenario() -> None:
        scheduler = SchedulerRun()
        scheduler.cluster.node("a", cpu="4")
        await scheduler.bind("one")
        await scheduler.bind("two")
        scheduler.cluster.pod("one", nodeName="a", deleted=True)
        scheduler.cluster.delete("two")
        await scheduler.settle()
        assert scheduler.api.requests == []

    run_scenario(scenario)
