"""Whoever the controller tells to go reaches the cluster, once, by the request that its cause calls for.

The API is played: it notes what it is asked. What comes of it in a real cluster is shown in tests/real/kubernetes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import msgspec
import pytest

from hodei.control.reservations.reservations import choose
from hodei.kube.api.client import ApiError
from hodei.kube.scheduler import loop
from hodei.kube.scheduler.build import Options, make_driver
from hodei.kube.scheduler.reservations import Reservations, Reserved
from hodei.model.config import SchedulingConfig
from hodei.model.facts import ReservationMade
from hodei.model.reservation import ReservationSpec
from unit.kube.town import NOW_MS, Town

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
        self.town, self.api = Town(options), NotedApi()
        self.driver = make_driver(cast("Any", self.api), self.town.harness, options)
        self.driver._now_ms = lambda: self.town.now_ms

    async def settle(self) -> None:
        """Until nothing is left to decide or to do."""
        for _ in range(200):
            due = self.driver.controller.next_wakeup_ms(self.town.now_ms)
            if self.driver.pods.stirred or (due is not None and due <= self.town.now_ms):
                self.driver.step()
            await asyncio.sleep(0)

    async def bound(self, name: str, **fields: Any) -> None:
        self.town.pod(name, **fields)
        await self.settle()
        assert self.town.where(name)

    async def passes(self, ms: int) -> None:
        self.town.now_ms += ms
        await self.settle()


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 20))


async def lent(driven: Driven) -> None:
    """Four cores of which the borrower holds all, until the owner wants one back."""
    driven.town.node("a", cpu="4")
    for at in range(4):
        await driven.bound(f"b{at}", namespace="borrower")
    driven.town.pod("mine", namespace="owner")
    await driven.settle()


def test_what_was_lent_is_taken_back_by_eviction_once():
    async def story() -> None:
        driven = Driven(LENT)
        await lent(driven)
        await driven.settle()
        assert driven.api.asked == ["evict b3"]
        driven.town.gone("b3")
        await driven.settle()
        assert driven.town.where("mine") == "a"
        assert driven.api.asked == ["evict b3"]

    play(story)


@pytest.mark.parametrize("status", [429, 403, 500, 0])
def test_an_eviction_that_is_refused_is_asked_for_until_it_is_granted(status: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop, "FIRST_PAUSE_S", 0.0001)
    monkeypatch.setattr(loop, "FORBIDDEN_S", 0.001)
    monkeypatch.setattr(loop, "LONGEST_PAUSE_S", 0.001)

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
        driven.town.node("a", cpu="40")
        driven.town.node("c", cpu="40")
        for at in range(80):
            driven.town.pod(f"b{at}", namespace="borrower")
        await driven.settle()
        driven.api.answers = [ApiError(429, "TooManyRequests", "a budget", causes=("DisruptionBudget: no",))] * 40
        driven.town.pod("mine", cpu="40", namespace="owner")
        await driven.settle()
        assert driven.api.answers == []  # all of them were asked for, and wait
        driven.town.node("b", cpu="1")
        await driven.bound("low", nodeName="b", namespace="third")
        driven.town.pod("high", namespace="third", nodeSelector={"x": "y"}, priority=1000)
        driven.town.node("b", cpu="1", labels={"x": "y"})
        await driven.passes(2000)
        assert driven.api.asked == ["delete low"]

    play(story)


def test_who_is_preempted_while_the_api_is_away_is_deleted_when_it_is_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop, "FIRST_PAUSE_S", 0.0001)
    monkeypatch.setattr(loop, "LONGEST_PAUSE_S", 0.001)

    async def story() -> None:
        driven = Driven()
        driven.town.node("a", cpu="1")
        await driven.bound("low")
        driven.town.now_ms += 1000
        driven.api.answers = [ApiError(0, "Unreached", "nobody is there")] * 50
        driven.town.pod("high", priority=1000)
        await driven.settle()
        await asyncio.wait_for(driven.api.heard.wait(), 10)
        await driven.settle()
        assert driven.api.asked == ["delete low"]

    play(story)


def test_who_is_preempted_is_deleted_and_not_evicted():
    async def story() -> None:
        driven = Driven()
        driven.town.node("a", cpu="1")
        await driven.bound("low")
        driven.town.now_ms += 1000
        driven.town.pod("high", priority=1000)
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
        driven.town.node("a", cpu="4")
        driven.town.pod("other", nodeName="a", namespace="else")
        made = Reservations(
            [Reserved(reservation(at_start="stop"))], driven.driver.controller, driven.driver.pods.take_facts,
            driven.driver.pods.give, lambda: driven.town.now_ms, driven.driver.decide,
        )  # fmt: skip
        await made.begin()
        await driven.settle()
        assert driven.api.asked == ["evict other"]

    play(story)


def test_who_outstays_a_reservation_is_evicted_once():
    async def story() -> None:
        driven = Driven()
        driven.town.node("a", cpu="4")
        await driven.settle()
        wish = reservation(at_end="stop")
        driven.town.harness.pods.give(
            [ReservationMade(reservation=choose(driven.driver.controller.cluster, wish, NOW_MS))]
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
        driven.town.node("a", cpu="4")
        await driven.bound("runs", cpu="3", estimate="1h")
        driven.town.pod("first", cpu="4", estimate="1h")
        await driven.settle()
        await driven.bound("short", cpu="1", estimate="10m")
        driven.town.gone("runs")
        await driven.settle()
        await driven.passes(3_600_000)
        await driven.passes(60_000)
        assert driven.api.asked == ["evict short"]

    play(story)


def test_who_goes_by_itself_is_not_told_to():
    async def story() -> None:
        driven = Driven()
        driven.town.node("a", cpu="4")
        await driven.bound("one")
        await driven.bound("two")
        driven.town.pod("one", nodeName="a", deleted=True)
        driven.town.gone("two")
        await driven.settle()
        assert driven.api.asked == []

    play(story)
