"""Queries to backends: expected starts of runs in their own queues, and usage of their nodes.

The backend is a fake. Does not test what a real queueing system reports, or what a query costs.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from builders import NOW_MS, a_job_spec, a_node
from hodei.control.lifecycle.retry import CircuitPolicy
from hodei.model.backend import Capabilities, NodeUsage
from hodei.model.errors import BackendError
from hodei.model.explanation import BackendQueueEntry
from hodei.model.facts import RunObserved
from hodei.model.job import GangRules
from hodei.runtime import backend_manager
from hodei.runtime.backend_manager import BackendQuery
from hodei.runtime.watcher import HealthPolicy
from hodei.store.memory import MemoryStore
from unit.runtime.harness import FakeBackend, a_service, alive, until

MINUTE = 60_000
NEVER_ASKED = HealthPolicy(every_ms=0, circuit=CircuitPolicy(failures=1))


class Queue(FakeBackend):
    """Has a queue of its own, and measures its nodes."""

    capabilities = Capabilities(delegates=True, expects=True, usage=True)

    def __init__(self, name: str = "hpc", **options: Any) -> None:
        super().__init__(name, [a_node(f"{name}-main", 4, backend=name)], **options)
        self.starts: dict[str, int] = {}
        self.used: dict[str, NodeUsage] = {}
        self.asked: list[str] = []

    async def expected(self) -> dict[str, int]:
        self.asked.append("expected")
        return dict(self.starts)

    async def usage(self) -> dict[str, NodeUsage]:
        self.asked.append("usage")
        return dict(self.used)


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(backend_manager, "_QUEUE_INTERVAL_S", 0.005)
    monkeypatch.setattr(backend_manager, "_USAGE_INTERVAL_S", 0.005)


def test_why_shows_the_expected_start_of_a_run_in_the_backends_queue(often):
    async def main():
        backend = Queue()
        backend.starts = {"1.0.1": NOW_MS + MINUTE}
        backend.remembers = {"1.0.1": RunObserved("1.0.1", "placed", NOW_MS, reason="Slurm: Resources")}
        async with alive(a_service(MemoryStore(), backend, health=NEVER_ASKED)) as service:
            await service.submit([a_job_spec()])
            await until(service.backend_manager.expected_starts)
            answer = await service.why(1)
            assert answer.backend_queue == BackendQueueEntry("hpc", NOW_MS + MINUTE, "Slurm: Resources")
            assert answer.summary == "placed on hpc-main, waits in the queue of backend hpc"
            backend.say(RunObserved("1.0.1", "running", NOW_MS))
            await until(lambda: not service.backend_manager.expected_starts())
            answer = await service.why(1)
            assert (answer.status, answer.backend_queue) == ("running", None)

    asyncio.run(main())


def test_a_backend_is_not_queried_without_queued_runs_or_scrapes(often):
    async def main():
        backend = Queue()
        async with alive(a_service(MemoryStore(), backend, health=NEVER_ASKED)) as service:
            for _ in range(10):
                await asyncio.sleep(0.005)
            assert backend.asked == []
            await service.submit([a_job_spec()])
            await until(lambda: "expected" in backend.asked)
            assert "usage" not in backend.asked

    asyncio.run(main())


def test_the_backend_queue_is_shown_without_an_estimate():
    async def main():
        async with alive(a_service(MemoryStore(), Queue(), health=NEVER_ASKED)) as service:
            await service.submit([a_job_spec()])
            await until(lambda: service.controller.cluster.runs.get(1))
            assert (await service.why(1)).backend_queue == BackendQueueEntry("hpc")

    asyncio.run(main())


def test_a_backend_without_a_queue_shows_none():
    async def main():
        async with alive(a_service(MemoryStore(), FakeBackend(), health=NEVER_ASKED)) as service:
            await service.submit([a_job_spec()])
            await until(lambda: service.controller.cluster.runs.get(1))
            answer = await service.why(1)
            assert (answer.status, answer.backend_queue) == ("placed", None)
            assert answer.summary.endswith("about to start")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("starts", "begins_ms"),
    [
        pytest.param({"1.0.1": NOW_MS + MINUTE, "1.1.1": NOW_MS + 5 * MINUTE}, NOW_MS + 5 * MINUTE, id="of all"),
        pytest.param({"1.0.1": NOW_MS + MINUTE}, 0, id="of some only"),
    ],
)
def test_a_gang_starts_with_the_last_of_its_members(often, starts, begins_ms):
    async def main():
        backend = Queue()
        backend.starts = starts
        async with alive(a_service(MemoryStore(), backend, health=NEVER_ASKED)) as service:
            await service.submit([a_job_spec(count=2, gang=GangRules())])
            await until(service.backend_manager.expected_starts)
            assert (await service.why(1)).backend_queue == BackendQueueEntry("hpc", begins_ms)

    asyncio.run(main())


def test_forecasts_use_the_expected_starts_of_the_backend(often):
    async def main():
        backend = Queue()
        backend.starts = {"1.0.1": NOW_MS + 20 * MINUTE}
        async with alive(a_service(MemoryStore(), backend, health=NEVER_ASKED)) as service:
            await service.submit([a_job_spec(cpu="4", estimate_ms=10 * MINUTE) for _ in range(2)])
            await until(service.backend_manager.expected_starts)
            await service.forecasts._forecast()
            forecast = (await service.why(2)).forecast
            assert forecast is not None
            assert forecast.p50_ms == NOW_MS + 30 * MINUTE

    asyncio.run(main())


@pytest.mark.parametrize("trouble", [BackendError("no"), ValueError("odd"), None], ids=["refuses", "is odd", "hangs"])
def test_a_failed_query_clears_the_answer_until_the_next_one(monkeypatch, trouble):
    monkeypatch.setattr(backend_manager, "_QUERY_TIMEOUT_S", 0.01)
    answers: list[Any] = [{"1.0.1": 5}, trouble, {"1.0.1": 7}]

    async def ask() -> dict[str, int]:
        answer = answers.pop(0)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def main():
        inquiry = BackendQuery[int]("it", ask, lambda: True, 60)
        seen = []
        for _ in range(3):
            await inquiry.poll()
            seen.append(inquiry.answer)
        assert seen == [{"1.0.1": 5}, {}, {"1.0.1": 7}]

    asyncio.run(main())


def test_node_usage_is_a_metric_in_cores_and_bytes(often):
    async def main():
        backend = Queue()
        backend.used = {"hpc-main": NodeUsage({"cpu": 1500, "memory": 1024})}
        async with alive(a_service(MemoryStore(), backend, health=NEVER_ASKED)) as service:
            assert b"hodei_node_used{" not in service.metrics()
            await until(lambda: b"hodei_node_used{" in service.metrics())
            text = service.metrics().decode()
            assert 'hodei_node_used{backend="hpc",node="hpc-main",resource="cpu"} 1.5\n' in text
            assert 'hodei_node_used{backend="hpc",node="hpc-main",resource="memory"} 1024.0\n' in text

    asyncio.run(main())


@pytest.mark.parametrize("of", ["nodes in all", "nodes that were measured"])
def test_a_large_cluster_has_no_usage_metric_per_node(often, monkeypatch, of):
    async def main():
        backend = Queue()
        monkeypatch.setattr(backend_manager, "MAX_NODES", 1)
        if of == "nodes in all":
            backend.offered = [a_node(name, 4, backend="hpc") for name in ("a", "b")]
        backend.used = {name: NodeUsage({"cpu": 1}) for name in ("a", "b")}
        async with alive(a_service(MemoryStore(), backend, health=NEVER_ASKED)) as service:
            service.metrics()
            if of == "nodes that were measured":
                await until(lambda: backend.asked.count("usage") > 1)
            else:
                await asyncio.sleep(0.05)  # ten times the interval at which usage is read
                assert backend.asked == []
            assert b"hodei_node_used{" not in service.metrics()

    asyncio.run(main())
