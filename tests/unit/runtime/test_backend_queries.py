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
NO_HEALTH_CHECKS = HealthPolicy(every_ms=0, circuit=CircuitPolicy(failures=1))


class QueueingBackend(FakeBackend):
    """A backend with its own queue that measures its nodes."""

    capabilities = Capabilities(delegates=True, expects=True, usage=True)

    def __init__(self, name: str = "hpc", **options: Any) -> None:
        super().__init__(name, [a_node(f"{name}-main", 4, backend=name)], **options)
        self.starts: dict[str, int] = {}
        self.used: dict[str, NodeUsage] = {}
        self.queries: list[str] = []

    async def expected(self) -> dict[str, int]:
        self.queries.append("expected")
        return dict(self.starts)

    async def usage(self) -> dict[str, NodeUsage]:
        self.queries.append("usage")
        return dict(self.used)


@pytest.fixture
def short_intervals(monkeypatch):
    monkeypatch.setattr(backend_manager, "_QUEUE_INTERVAL_S", 0.005)
    monkeypatch.setattr(backend_manager, "_USAGE_INTERVAL_S", 0.005)


def test_why_shows_the_expected_start_of_a_run_in_the_queue_of_its_backend(short_intervals):
    async def main():
        backend = QueueingBackend()
        backend.starts = {"1.0.1": NOW_MS + MINUTE}
        backend.known_runs = {"1.0.1": RunObserved("1.0.1", "placed", NOW_MS, reason="Slurm: Resources")}
        async with alive(a_service(MemoryStore(), backend, health=NO_HEALTH_CHECKS)) as service:
            await service.submit([a_job_spec()])
            await until(service.backend_manager.expected_starts)
            answer = await service.why(1)
            assert answer.backend_queue == BackendQueueEntry("hpc", NOW_MS + MINUTE, "Slurm: Resources")
            assert answer.summary == "placed on hpc-main, waits in the queue of backend hpc"
            backend.report(RunObserved("1.0.1", "running", NOW_MS))
            await until(lambda: not service.backend_manager.expected_starts())
            answer = await service.why(1)
            assert (answer.status, answer.backend_queue) == ("running", None)

    asyncio.run(main())


def test_a_backend_is_not_queried_without_queued_runs_or_scrapes(short_intervals):
    async def main():
        backend = QueueingBackend()
        async with alive(a_service(MemoryStore(), backend, health=NO_HEALTH_CHECKS)) as service:
            for _ in range(10):
                await asyncio.sleep(0.005)
            assert backend.queries == []
            await service.submit([a_job_spec()])
            await until(lambda: "expected" in backend.queries)
            assert "usage" not in backend.queries

    asyncio.run(main())


def test_the_backend_queue_is_shown_without_an_expected_start():
    async def main():
        async with alive(a_service(MemoryStore(), QueueingBackend(), health=NO_HEALTH_CHECKS)) as service:
            await service.submit([a_job_spec()])
            await until(lambda: service.controller.cluster.runs.get(1))
            assert (await service.why(1)).backend_queue == BackendQueueEntry("hpc")

    asyncio.run(main())


def test_a_backend_without_a_queue_shows_none():
    async def main():
        async with alive(a_service(MemoryStore(), FakeBackend(), health=NO_HEALTH_CHECKS)) as service:
            await service.submit([a_job_spec()])
            await until(lambda: service.controller.cluster.runs.get(1))
            answer = await service.why(1)
            assert (answer.status, answer.backend_queue) == ("placed", None)
            assert answer.summary.endswith("about to start")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("starts", "begins_ms"),
    [
        pytest.param({"1.0.1": NOW_MS + MINUTE, "1.1.1": NOW_MS + 5 * MINUTE}, NOW_MS + 5 * MINUTE, id="all expected"),
        pytest.param({"1.0.1": NOW_MS + MINUTE}, 0, id="one unknown"),
    ],
)
def test_a_gang_starts_with_the_last_of_its_members(short_intervals, starts, begins_ms):
    async def main():
        backend = QueueingBackend()
        backend.starts = starts
        async with alive(a_service(MemoryStore(), backend, health=NO_HEALTH_CHECKS)) as service:
            await service.submit([a_job_spec(count=2, gang=GangRules())])
            await until(service.backend_manager.expected_starts)
            assert (await service.why(1)).backend_queue == BackendQueueEntry("hpc", begins_ms)

    asyncio.run(main())


def test_forecasts_use_the_expected_starts_of_the_backend(short_intervals):
    async def main():
        backend = QueueingBackend()
        backend.starts = {"1.0.1": NOW_MS + 20 * MINUTE}
        async with alive(a_service(MemoryStore(), backend, health=NO_HEALTH_CHECKS)) as service:
            await service.submit([a_job_spec(cpu="4", estimate_ms=10 * MINUTE) for _ in range(2)])
            await until(service.backend_manager.expected_starts)
            await service.forecasts._forecast(service.backend_manager.expected_starts())
            forecast = (await service.why(2)).forecast
            assert forecast is not None
            assert forecast.p50_ms == NOW_MS + 30 * MINUTE

    asyncio.run(main())


@pytest.mark.parametrize("failure", [BackendError("no"), ValueError("odd"), None], ids=["refuses", "is odd", "hangs"])
def test_a_failed_query_clears_the_answer_until_the_next_one(monkeypatch, failure):
    monkeypatch.setattr(backend_manager, "_QUERY_TIMEOUT_S", 0.01)
    answers: list[Any] = [{"1.0.1": 5}, failure, {"1.0.1": 7}]

    async def query_backend() -> dict[str, int]:
        answer = answers.pop(0)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def main():
        query = BackendQuery[int]("it", query_backend, lambda: True, 60)
        seen = []
        for _ in range(3):
            await query.poll()
            seen.append(query.answer)
        assert seen == [{"1.0.1": 5}, {}, {"1.0.1": 7}]

    asyncio.run(main())


def test_node_usage_is_a_metric_in_cores_and_bytes(short_intervals):
    async def main():
        backend = QueueingBackend()
        backend.used = {"hpc-main": NodeUsage({"cpu": 1500, "memory": 1024})}
        async with alive(a_service(MemoryStore(), backend, health=NO_HEALTH_CHECKS)) as service:
            assert b"hodei_node_used{" not in service.metrics()
            await until(lambda: b"hodei_node_used{" in service.metrics())
            text = service.metrics().decode()
            assert 'hodei_node_used{backend="hpc",node="hpc-main",resource="cpu"} 1.5\n' in text
            assert 'hodei_node_used{backend="hpc",node="hpc-main",resource="memory"} 1024.0\n' in text

    asyncio.run(main())


@pytest.mark.parametrize("of", ["all nodes", "measured nodes"])
def test_a_large_cluster_has_no_usage_metric_per_node(short_intervals, monkeypatch, of):
    async def main():
        backend = QueueingBackend()
        monkeypatch.setattr(backend_manager, "MAX_NODES", 1)
        if of == "all nodes":
            backend.offered = [a_node(name, 4, backend="hpc") for name in ("a", "b")]
        backend.used = {name: NodeUsage({"cpu": 1}) for name in ("a", "b")}
        async with alive(a_service(MemoryStore(), backend, health=NO_HEALTH_CHECKS)) as service:
            service.metrics()
            if of == "measured nodes":
                await until(lambda: backend.queries.count("usage") > 1)
            else:
                await asyncio.sleep(0.05)  # ten times the shortened interval of usage queries
                assert backend.queries == []
            assert b"hodei_node_used{" not in service.metrics()

    asyncio.run(main())
