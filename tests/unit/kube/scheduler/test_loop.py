"""Preemption in the scheduling loop: which pods are deleted and which stay. The API only records requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from hodei.kube.api.objects import Pod
from hodei.kube.scheduler.loop import REMOVALS, SchedulerLoop
from hodei.kube.scheduler.status_reporter import StatusReporter
from unit.kube.fake_cluster import FakeCluster


class RecordingPodApi:
    """A PodApi that records its calls and does nothing."""

    reports = "all"

    def __init__(self) -> None:
        self.deleted: list[str] = []
        self.bound: dict[str, str] = {}

    async def bind(self, pod: Pod, node: str) -> None:
        self.bound[pod.metadata.name] = node

    async def preempt(self, victim: Pod) -> None:
        self.deleted.append(victim.metadata.name)

    def __getattr__(self, name: str) -> Any:
        async def noop(*args: Any) -> None:
            return

        return noop


class Loop:
    """A fake cluster with a real scheduling loop."""

    def __init__(self) -> None:
        self.cluster, self.pod_api = FakeCluster(), RecordingPodApi()
        parts, pod_api = self.cluster.parts, cast("Any", self.pod_api)
        reporter = StatusReporter(parts.controller, parts.pods, pod_api, parts.explainer)
        self.loop = SchedulerLoop(
            cast("Any", None), parts.controller, parts.pods, parts.cache, pod_api, reporter, parts.metrics,
            lambda: self.cluster.now_ms,
        )  # fmt: skip

    def step(self) -> None:
        while self.loop._has_work():
            self.loop.step()

    async def settle(self) -> None:
        for _ in range(20):
            self.step()
            await asyncio.sleep(0)

    def block_removals(self, blocked: bool) -> None:
        """Block deletions, as if many others were queued."""
        queue = self.loop._removal_requests
        queue.width = 0 if blocked else REMOVALS
        if not blocked:
            queue.put(_nothing)


async def _nothing() -> None:
    return


def _run(scenario: Callable[[Loop], Awaitable[None]]) -> None:
    async def main() -> None:
        loop = Loop()
        loop.cluster.node("a", cpu="4")
        loop.cluster.pod("low", cpu="4", nodeName="a")
        loop.step()
        loop.cluster.now_ms += 60_000
        await scenario(loop)

    asyncio.run(main())


def test_a_victim_is_deleted() -> None:
    async def scenario(loop: Loop) -> None:
        loop.cluster.pod("high", cpu="4", priority=5)
        await loop.settle()
        assert loop.pod_api.deleted == ["low"]

    _run(scenario)


def test_a_victim_not_yet_deleted_keeps_running_when_its_preemptor_starts_elsewhere() -> None:
    async def scenario(loop: Loop) -> None:
        loop.block_removals(True)
        loop.cluster.pod("high", cpu="4", priority=5)
        await loop.settle()
        loop.cluster.node("b", cpu="4")
        await loop.settle()
        assert loop.pod_api.bound == {"high": "b"}
        loop.block_removals(False)
        await loop.settle()
        assert loop.pod_api.deleted == []
        run = loop.cluster.parts.controller.cluster.live_runs(loop.cluster.job("low"))[0]
        assert run.stop_reason is None

    _run(scenario)


def test_a_spared_victim_is_deleted_for_a_later_preemptor() -> None:
    async def scenario(loop: Loop) -> None:
        loop.block_removals(True)
        loop.cluster.pod("high", cpu="4", priority=5)
        await loop.settle()
        loop.cluster.node("b", cpu="4")
        loop.step()
        loop.cluster.now_ms += 60_000
        loop.cluster.pod("next", cpu="4", priority=4)
        await loop.settle()
        loop.block_removals(False)
        await loop.settle()
        assert loop.pod_api.deleted == ["low"]

    _run(scenario)
