"""Whoever the controller tells to go reaches the cluster, once, by the request that its cause calls for.

The API is played: it notes what it is asked. What comes of it in a real cluster is shown in tests/real/kubernetes.
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


class NotedApi:
    namespace = "ns"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: list[ApiError] = []
        self.heard = asyncio.Event()

    async def request(self, method: str, path: str, body: bytes | None = None, **how: Any) -> bytes:
        if path.endswith("/eviction") or method == "DELETE":
            if self.answers:
                raise self.answers.pop(0)
            self.heard.set()
            self.asked.append(f"{'evict' if method == 'POST' else 'delete'} {path.split('/pods/')[1].split('/')[0]}")
        return b"{}"


class Driven:
    """A town whose decisions are carried out on an API that only notes them."""

    def __init__(self, scheduling: dict[str, Any] | None = None) -> None:
        options = Options(scheduling=msgspec.convert(scheduling or {}, SchedulingConfig))
        self.cluster, self.api = FakeCluster(options), NotedApi()
        self.loop = make_loop(cast("Any", self.api), self.cluster.parts, options)
        self.loop._now_ms = lambda: self.cluster.now_ms

    async def settle(self) -> None:
        """Until nothing is left to decide or to do."""
        for _ in range(200):
            due = self.loop.controller.next_wakeup_ms(self.cluster.now_ms)
            if self.loop.pods.has_work or (due is not None and due <= self.cluster.now_ms):
                self.loop.step()
            await asyncio.sleep(0)

    async def bound(self, name: str, **fields: Any) -> None:
        self.cluster.pod(name, **fields)
        await self.settle()
        assert self.cluster.node_of(name)

    async def passes(self, ms: int) -> None:
        self.cluster.now_ms += ms
        await self.settle()


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 20))


async def lent(driven: Driven) -> None:
    """Four cores of which the borrower holds all, until the owner wants one back."""
    driven.cluster.node("a", cpu="4")
    for at in range(4):
        await driven.bound(f"b{at}", namespace="borrower")
    driven.cluster.pod("mine", namespace="owner")
    await driven.settle()


def test_what_was_lent_is_taken_back_by_eviction_once():
    async def story() -> None:
        driven = Driven(LENT)
        await lent(driven)
        await driven.settle()
        assert driven.api.asked == ["evict b3"]
        driven.cluster.delete("b3")
        await driven.settle()
        assert driven.cluster.node_of("mine") == "a"
        assert driven.api.asked == ["evict b3"]

    play(story)


@pytest.mark.parametrize("status", [429, 403, 500, 0])
def test_an_eviction_that_is_refused_is_asked_for_until_it_is_granted(status: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(binder, "FIRST_PAUSE_S", 0.0001)
    monkeypatch.setattr(binder, "FORBIDDEN_PAUSE_S", 0.001)
    monkeypatch.setattr(binder, "LONGEST_PAUSE_S", 0.001)

    async def story() -> None:
        driven = Driven(LENT)
        driven.api.answers = [ApiError(status, "No", "not now")] * 100
        await lent(driven)
        await asyncio.wait_for(driven.api.heard.wait(), 10)
        await driven.settle()
        assert driven.api.asked == ["evict b3"]

    play(story)


def test_evictions_that_wait_for_a_budget_keep_nobody_from_being_preempted():
    async def story() -> None:
        driven = Driven({"quotas": {name: {"hard": {"cpu": 40}, "cohort": "lab"} for name in ("owner", "borrower")}})
        driven.cluster.node("a", cpu="40")
        driven.cluster.node("c", cpu="40")
        for at in range(80):
            driven.cluster.pod(f"b{at}", namespace="borrower")
        await driven.settle()
        driven.api.answers = [ApiError(429, "TooManyRequests", "a budget", causes=("DisruptionBudget: no",))] * 40
        driven.cluster.pod("mine", cpu="40", namespace="owner")
        await driven.settle()
        assert driven.api.answers == []  # all of them were asked for, and wait
        driven.cluster.node("b", cpu="1")
        await driven.bound("low", nodeName="b", namespace="third")
        driven.cluster.pod("high", namespace="third", nodeSelector={"x": "y"}, priority=1000)
        driven.cluster.node("b", cpu="1", labels={"x": "y"})
        await driven.passes(2000)
        assert driven.api.asked == ["delete low"]

    play(story)


def test_who_is_preempted_while_the_api_is_away_is_deleted_when_it_is_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(binder, "FIRST_PAUSE_S", 0.0001)
    monkeypatch.setattr(binder, "LONGEST_PAUSE_S", 0.001)

    async def story() -> None:
        driven = Driven()
        driven.cluster.node("a", cpu="1")
        await driven.bound("low")
        driven.cluster.now_ms += 1000
        driven.api.answers = [ApiError(0, "Unreached", "nobody is there")] * 50
        driven.cluster.pod("high", priority=1000)
        await driven.settle()
        await asyncio.wait_for(driven.api.heard.wait(), 10)
        await driven.settle()
        assert driven.api.asked == ["delete low"]

    play(story)


def test_who_is_preempted_is_deleted_and_not_evicted():
    async def story() -> None:
        driven = Driven()
        driven.cluster.node("a", cpu="1")
        await driven.bound("low")
        driven.cluster.now_ms += 1000
        driven.cluster.pod("high", priority=1000)
        await driven.settle()
        assert driven.api.asked == ["delete low"]

    play(story)


def reservation(**rules: Any) -> ReservationSpec:
    return ReservationSpec(
        "demo", "owner", start_ms=NOW_MS - 1000, end_ms=NOW_MS + 3_600_000, count=1, request={"cpu": 4000}, **rules
    )


def test_who_is_in_a_reserved_place_when_the_scheduler_starts_is_evicted():
    async def story() -> None:
        driven = Driven()
        driven.cluster.node("a", cpu="4")
        driven.cluster.pod("other", nodeName="a", namespace="else")
        made = Reservations(
            [ConfiguredReservation(reservation(at_start="stop"))], driven.loop.controller, driven.loop.pods.take_facts,
            driven.loop.pods.add_facts, lambda: driven.cluster.now_ms, driven.loop.step,
        )  # fmt: skip
        await made.start()
        await driven.settle()
        assert driven.api.asked == ["evict other"]

    play(story)


def test_who_outstays_a_reservation_is_evicted_once():
    async def story() -> None:
        driven = Driven()
        driven.cluster.node("a", cpu="4")
        await driven.settle()
        wish = reservation(at_end="stop")
        driven.cluster.parts.pods.add_facts(
            [ReservationMade(reservation=choose_nodes(driven.loop.controller.cluster, wish, NOW_MS))]
        )
        await driven.settle()
        await driven.bound("own", namespace="owner")
        await driven.passes(3_600_001)
        await driven.passes(60_000)
        assert driven.api.asked == ["evict own"]

    play(story)


def test_who_overran_its_estimate_in_anothers_place_is_evicted_once():
    async def story() -> None:
        driven = Driven({"profiles": {"default": {"queue": "batch", "options": {"batch": {"overrun": "stop"}}}}})
        driven.cluster.node("a", cpu="4")
        await driven.bound("runs", cpu="3", estimate="1h")
        driven.cluster.pod("first", cpu="4", estimate="1h")
        await driven.settle()
        await driven.bound("short", cpu="1", estimate="10m")
        driven.cluster.delete("runs")
        await driven.settle()
        await driven.passes(3_600_000)
        await driven.passes(60_000)
        assert driven.api.asked == ["evict short"]

    play(story)


def test_who_goes_by_itself_is_not_told_to():
    async def story() -> None:
        driven = Driven()
        driven.cluster.node("a", cpu="4")
        await driven.bound("one")
        await driven.bound("two")
        driven.cluster.pod("one", nodeName="a", deleted=True)
        driven.cluster.delete("two")
        await driven.settle()
        assert driven.api.asked == []

    play(story)
