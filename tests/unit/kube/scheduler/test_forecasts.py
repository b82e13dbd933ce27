"""Annotations with the expected start of pending pods, and learning from finished ones."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from hodei.kube.api.client import ApiError
from hodei.kube.scheduler.forecasts import EXPECTED, LATEST, PodForecasts, differs_noticeably
from hodei.kube.scheduler.history import FinishedPod, FinishedPodInformer
from hodei.kube.scheduler.run import Options
from hodei.kube.scheduler.translate import Reader, ReaderOptions
from hodei.model.config import ForecastConfig, ProfileConfig, SchedulingConfig
from hodei.model.job import JobSpec
from unit.kube.fake_cluster import NOW_MS, FakeCluster
from unit.kube.pod_factory import a_pod

MINUTE_MS = 60_000
BATCH = Options(scheduling=SchedulingConfig(profiles={"default": ProfileConfig(queue="batch")}))


class Patches:
    """Accepts every patch, or refuses each in the same way."""

    def __init__(self, refuses: ApiError | None = None) -> None:
        self.seen: list[tuple[str, dict[str, str]]] = []
        self._refuses = refuses

    async def request(self, method: str, path: str, body: bytes, **_: Any) -> bytes:
        if self._refuses is not None:
            raise self._refuses
        assert method == "PATCH"
        self.seen.append((path.rpartition("/")[2], json.loads(body)["metadata"]["annotations"]))
        return b"{}"


class _Clock:
    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    def now_ms(self) -> int:
        return self._cluster.now_ms


def _pod_forecasts(cluster: FakeCluster, api: Patches) -> PodForecasts:
    parts = cluster.parts
    return PodForecasts(api, parts.controller, parts.pods, _Clock(cluster), ForecastConfig(), check_every_s=0.001)


def _cluster_with_pending_pod() -> FakeCluster:
    cluster = FakeCluster(BATCH)
    cluster.node("n1")
    cluster.pod("runs", "4", estimate="1h")
    cluster.step()
    cluster.pod("first", "4", estimate="1h")
    cluster.step()
    return cluster


def _write_outdated(forecasts: PodForecasts) -> bool:
    return asyncio.run(forecasts._write(list(forecasts._outdated())))


def test_a_start_reservation_is_annotated_once():
    cluster, api = _cluster_with_pending_pod(), Patches()
    forecasts = _pod_forecasts(cluster, api)
    assert _write_outdated(forecasts)
    assert _write_outdated(forecasts)
    assert api.seen == [("first", {EXPECTED: "2026-09-21T15:13:20Z", LATEST: "2026-09-21T15:13:20Z"})]


def test_the_annotation_of_an_earlier_leader_is_not_written_again():
    cluster, api = _cluster_with_pending_pod(), Patches()
    annotations = {"hodei.io/estimate": "1h", EXPECTED: "2026-09-21T15:13:00Z", LATEST: "2026-09-21T15:13:30Z"}
    cluster.delete("first")
    cluster.pod("first", "4", annotations=annotations)
    cluster.step()
    _write_outdated(_pod_forecasts(cluster, api))
    assert api.seen == []


def test_a_pod_without_a_start_reservation_gets_the_forecast():
    cluster, api = _cluster_with_pending_pod(), Patches()
    cluster.pod("second", "4", estimate="1h")
    cluster.step()
    forecasts = _pod_forecasts(cluster, api)
    asyncio.run(forecasts.forecast_task._forecast({}))
    _write_outdated(forecasts)
    asyncio.run(forecasts.stop())
    written = dict(api.seen)
    assert written["second"][EXPECTED] == "2026-09-21T16:13:20Z"
    assert written["second"][LATEST] >= written["second"][EXPECTED]


def test_a_forbidden_annotation_pauses_further_tries(caplog: pytest.LogCaptureFixture):
    cluster = _cluster_with_pending_pod()
    assert not _write_outdated(_pod_forecasts(cluster, Patches(ApiError(403, "Forbidden", "pods is forbidden"))))
    assert "rbac-forecast.yaml" in caplog.text


@pytest.mark.parametrize(
    ("old_min", "new_min", "written"),
    [(10, 10.9, False), (10, 11.5, True), (100, 105, False), (100, 120, True), (100, 60, True)],
    ids=["less than a minute", "more", "less than a tenth", "more than a tenth", "sooner"],
)
def test_small_changes_are_not_written(old_min: float, new_min: float, written: bool):
    old, new = (NOW_MS + round(minutes * MINUTE_MS) for minutes in (old_min, new_min))
    assert differs_noticeably(old, new, NOW_MS) is written


def test_our_own_annotation_does_not_change_the_job_of_a_pod():
    cluster = _cluster_with_pending_pod()
    before = cluster.job("first")
    annotations = {"hodei.io/estimate": "1h", EXPECTED: "2026-09-21T15:13:20Z"}
    fields = {"requests": {"cpu": "4", "memory": "1Gi"}, "schedulerName": "hodei"}
    cluster.update(a_pod("first", annotations=annotations, **fields))
    assert not cluster.parts.pods.has_work
    assert cluster.job("first") == before
    cluster.update(a_pod("first", annotations={**annotations, "hodei.io/estimate": "2h"}, **fields))
    assert cluster.parts.pods.has_work


def _finished(name: str, *, seconds: int, scheduler: str = "hodei") -> FinishedPod:
    ended = f"2026-09-21T13:{seconds // 60:02}:{seconds % 60:02}Z"
    fields = {
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}",
                     "ownerReferences": [{"kind": "Job", "name": "nightly-3", "uid": "1", "controller": True}]},
        "spec": {"schedulerName": scheduler, "nodeName": "n1", "containers": [{"name": "main"}]},
        "status": {"phase": "Succeeded", "startTime": "2026-09-21T13:00:00Z",
                   "containerStatuses": [{"name": "main", "state": {"terminated": {"finishedAt": ended}}}]},
    }  # fmt: skip
    return msgspec.convert(fields, FinishedPod)


def test_run_times_of_finished_pods_are_learned_once_in_the_order_of_their_ends():
    learned: list[tuple[str, int]] = []

    def learn(spec: JobSpec, ran_ms: int, ended_ms: int) -> None:
        learned.append((spec.name, ran_ms))

    parts = FakeCluster().parts
    finished = FinishedPodInformer(
        None, "hodei", Reader(parts.cache.context, ReaderOptions(), parts.refusals), learn, parts.refusals
    )
    finished.listed([_finished("late", seconds=90), _finished("early", seconds=30)])
    finished.listed([_finished("late", seconds=90)])
    finished.changed("MODIFIED", _finished("late", seconds=90))
    finished.changed("ADDED", _finished("foreign", seconds=5, scheduler="default-scheduler"))
    finished.changed("DELETED", _finished("late", seconds=90))
    finished.changed("ADDED", _finished("new", seconds=60))
    assert learned == [("Job/nightly-3", 30_000), ("Job/nightly-3", 90_000), ("Job/nightly-3", 60_000)]


def test_forecasts_use_learned_run_times():
    cluster = _cluster_with_pending_pod()
    forecasts = _pod_forecasts(cluster, Patches())
    spec = cluster.parts.pods.entries["uid-runs"].info.job
    for _ in range(6):
        forecasts.learn(spec, 1_800_000, NOW_MS)
    asyncio.run(forecasts.forecast_task._forecast({}))
    forecast = forecasts.forecast_task.latest(cluster.job("first"))
    asyncio.run(forecasts.stop())
    assert forecast is not None
    assert forecast.p50_ms == NOW_MS + 1_800_000
