"""Which pods get a report and how often, counted in requests. tests/real/kubernetes shows that they arrive."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from hodei.kube.api.objects import Pod
from hodei.kube.scheduler.messages import PendingStatus
from hodei.kube.scheduler.status_reporter import PAUSE_MS, StatusReporter
from unit.kube.fake_cluster import FakeCluster


class ReportingScheduler:
    """A cluster with a status reporter whose reports are recorded and not sent."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        parts = self.cluster.parts
        self.reporter = StatusReporter(parts.controller, parts.pods, cast("Any", None), parts.explainer)

    def step(self) -> int:
        """The number of reports of one step."""
        return len(list(self.reporter.reports_for(self.cluster.step(), self.cluster.now_ms)))

    def due_reports(self, after_ms: int) -> int:
        self.cluster.now_ms += after_ms
        return len(list(self.reporter.due_reports(self.cluster.now_ms)))

    def reported(self, name: str) -> str:
        return self.cluster.parts.pods.entries[f"uid-{name}"].reported or ""


def a_full_cluster() -> ReportingScheduler:
    scheduler = ReportingScheduler()
    scheduler.cluster.node("a", cpu="4")
    scheduler.cluster.pod("first", cpu="4", nodeName="a")
    scheduler.step()
    return scheduler


def test_all_pods_parked_behind_one_refusal_are_reported() -> None:
    scheduler = a_full_cluster()
    for name in ("x", "y", "z"):
        scheduler.cluster.pod(name, cpu="2")
    assert scheduler.step() == 3
    assert scheduler.reported("z") == scheduler.reported("x") != ""


def test_a_pod_parked_later_is_reported_too() -> None:
    scheduler = a_full_cluster()
    scheduler.cluster.pod("x", cpu="2")
    scheduler.step()
    scheduler.cluster.pod("y", cpu="2")
    assert scheduler.step() == 1
    assert scheduler.reported("y") == scheduler.reported("x")


def test_new_numbers_are_reported_after_a_pause_and_only_the_newest() -> None:
    scheduler = a_full_cluster()
    scheduler.cluster.pod("x", cpu="8")
    scheduler.step()
    first = scheduler.reported("x")
    for name in ("b", "c", "d"):
        scheduler.cluster.node(name, cpu="4")
        scheduler.cluster.now_ms += 100
        assert scheduler.step() == 0
    assert scheduler.reported("x") == first
    assert scheduler.due_reports(PAUSE_MS) == 1
    assert "0/4 nodes" in scheduler.reported("x")
    assert scheduler.due_reports(PAUSE_MS) == 0


def test_another_reason_is_reported_at_once() -> None:
    scheduler = a_full_cluster()
    annotations = {"pod-group": "ring", "pod-group-size": "2"}
    scheduler.cluster.pod("x", cpu="2", annotations=annotations)
    assert scheduler.step() == 1
    scheduler.cluster.pod("y", cpu="2", annotations=annotations)
    assert scheduler.step() == 2
    assert scheduler.reported("x") == scheduler.reported("y")


def test_a_pod_that_has_been_placed_gets_no_report() -> None:
    scheduler = a_full_cluster()
    scheduler.cluster.pod("x", cpu="2")
    scheduler.step()
    scheduler.cluster.node("b", cpu="1")
    scheduler.step()
    scheduler.cluster.node("c", cpu="4")
    scheduler.step()
    assert scheduler.cluster.node_of("x") == "c"
    assert scheduler.due_reports(PAUSE_MS) == 0


class SlowPodApi:
    """Each condition is written only when the test allows it."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.done: list[str] = []
        self.releases: list[asyncio.Event] = []

    async def set_unscheduled(self, pod: Pod, reason: str, message: str, nominated: str | None = None) -> None:
        condition = f"{message}@{nominated}" if nominated is not None else message
        self.started.append(condition)
        self.releases.append(asyncio.Event())
        await self.releases[-1].wait()
        self.done.append(condition)

    async def record_failed(self, pod: Pod, text: str) -> None:
        return


async def run_tasks() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def cluster_with_slow_api() -> tuple[ReportingScheduler, SlowPodApi]:
    scheduler, pod_api = a_full_cluster(), SlowPodApi()
    scheduler.cluster.pod("x", cpu="2")
    scheduler.step()
    parts = scheduler.cluster.parts
    scheduler.reporter = StatusReporter(parts.controller, parts.pods, cast("Any", pod_api), parts.explainer)
    return scheduler, pod_api


def test_conditions_of_a_pod_are_sent_in_order_and_superseded_ones_are_skipped():
    async def scenario() -> None:
        scheduler, pod_api = cluster_with_slow_api()
        id = scheduler.cluster.job("x")
        entry = scheduler.cluster.parts.pods.entries["uid-x"]
        tasks = []
        for index, text in enumerate(("first", "second", "third")):
            entry.reported_ms = 0
            for work in scheduler.reporter.report(id, PendingStatus(f"Reason{index}", text)):
                tasks.append(asyncio.create_task(work()))  # type: ignore[arg-type]
            await run_tasks()
        nomination = scheduler.reporter._enqueue(entry, None, "a")
        tasks.append(asyncio.create_task(nomination()))
        await run_tasks()
        assert pod_api.started == ["first"]
        pod_api.releases[0].set()
        await run_tasks()
        assert pod_api.started == ["first", "third@a"]  # the newest condition and the nomination are sent as one
        pod_api.releases[1].set()
        await asyncio.gather(*tasks)
        assert pod_api.done == ["first", "third@a"]

    asyncio.run(scenario())


def test_no_condition_arrives_after_the_binding():
    async def scenario() -> None:
        scheduler, pod_api = cluster_with_slow_api()
        id, entry = scheduler.cluster.job("x"), scheduler.cluster.parts.pods.entries["uid-x"]
        tasks = [asyncio.create_task(work()) for work in scheduler.reporter.report(id, PendingStatus("One", "first"))]  # type: ignore[arg-type]
        await run_tasks()
        assert pod_api.started == ["first"]
        due_reports = [*scheduler.reporter.report(id, PendingStatus("Two", "second"))]
        entry.stage, entry.node = "placed", "b"
        binding = asyncio.create_task(scheduler.reporter.wait_sent(entry.uid))
        tasks += [asyncio.create_task(work()) for work in due_reports]  # type: ignore[arg-type]
        await run_tasks()
        assert not binding.done()
        pod_api.releases[0].set()
        await binding
        await asyncio.gather(*tasks)
        assert pod_api.started == ["first"]

    asyncio.run(scenario())
