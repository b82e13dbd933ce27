"""The status of groups is written in order, and again after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from hodei.kube.api.client import ApiError
from hodei.kube.api.objects import MemberGroup, from_builtins
from hodei.kube.scheduler import group_status
from hodei.kube.scheduler.group_status import GroupStatusWriter
from unit.kube.fake_cluster import FakeCluster

PLUGINS = "scheduling.x-k8s.io/pod-group"


class SlowApi:
    """Delays every status until it is released, and records them in order."""

    def __init__(self) -> None:
        self.patches: list[asyncio.Future[None]] = []
        self.written: list[dict[str, Any]] = []

    async def request(self, method: str, path: str, body: bytes | None = None, **options: Any) -> bytes:
        if method != "PATCH" or body is None:
            if "batch.volcano.sh" in path:
                return b'{"spec":{"schedulerName":"hodei"}}'
            return b'{"resources":[{"name":"podgroups"},{"name":"podgroups/status"}]}'
        released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.patches.append(released)
        await released
        self.written.append(msgspec.json.decode(body)["status"])
        return b"{}"


class SlowStatusWriter:
    def __init__(self) -> None:
        self.cluster, self.api = FakeCluster(), SlowApi()
        parts = self.cluster.parts
        self.writer = GroupStatusWriter(self.api, "hodei", parts.pods, parts.cache, lambda: 1_790_000_000.0)  # type: ignore[arg-type]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.writer.check()
                await asyncio.sleep(0.001)


def run(body: Callable[[SlowStatusWriter], Awaitable[None]]) -> None:
    async def main() -> None:
        await body(SlowStatusWriter())

    asyncio.run(main())


def a_gang(slow: SlowStatusWriter) -> None:
    meta = {"name": "ring", "namespace": "ns", "uid": "group-1"}
    group = from_builtins({"metadata": meta, "spec": {"minMember": 2}}, MemberGroup)
    slow.cluster.parts.cache.plugin_groups.changed("ADDED", group)
    for name in ("a", "b"):
        slow.cluster.pod(name, labels={PLUGINS: "ring"})
    slow.cluster.step()


def test_the_status_of_a_group_is_written_one_at_a_time() -> None:
    async def body(slow: SlowStatusWriter) -> None:
        a_gang(slow)
        await slow.until(lambda: len(slow.api.patches) == 1)
        slow.cluster.node("n0")
        slow.cluster.step()  # both are placed now
        for _ in range(20):
            slow.writer.check()
            await asyncio.sleep(0)
        assert len(slow.api.patches) == 1
        slow.api.patches[0].set_result(None)
        await slow.until(lambda: len(slow.api.patches) == 2)
        slow.api.patches[1].set_result(None)
        await slow.until(lambda: len(slow.api.written) == 2)
        assert [status["scheduled"] for status in slow.api.written] == [0, 2]

    run(body)


def test_a_status_is_written_again_after_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_status, "RETRY_S", 0.01)

    async def body(slow: SlowStatusWriter) -> None:
        a_gang(slow)
        await slow.until(lambda: len(slow.api.patches) == 1)
        slow.api.patches[0].set_exception(ApiError(503, "ServiceUnavailable", "unavailable"))
        await slow.until(lambda: len(slow.api.patches) == 2)
        slow.api.patches[1].set_result(None)
        await slow.until(lambda: len(slow.api.written) == 1)

    run(body)


def test_a_volcano_group_is_admitted_after_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_status, "RETRY_S", 0.01)
    owner = {
        "kind": "Job",
        "name": "train",
        "uid": "job-1",
        "controller": True,
        "apiVersion": "batch.volcano.sh/v1alpha1",
    }

    async def body(slow: SlowStatusWriter) -> None:
        meta = {"name": "ring", "namespace": "ns", "uid": "group-1", "ownerReferences": [owner]}
        group = from_builtins({"metadata": meta, "spec": {"minMember": 2}}, MemberGroup)
        slow.cluster.parts.cache.volcano_groups.changed("ADDED", group)
        await slow.until(lambda: len(slow.api.patches) == 1)
        slow.api.patches[0].set_exception(ApiError(0, "Unreachable", "unavailable"))
        await slow.until(lambda: len(slow.api.patches) == 2)
        slow.api.patches[1].set_result(None)
        await slow.until(lambda: slow.api.written == [{"phase": "Inqueue"}])

    run(body)
