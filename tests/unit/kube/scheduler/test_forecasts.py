"""When pods that wait will start, written on them, and what is learned from those that are over."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from hodei.kube.api.client import ApiError
from hodei.kube.scheduler.build import Options
from hodei.kube.scheduler.forecasts import EXPECTED, LATEST, PodForecasts, differs
from hodei.kube.scheduler.history import Finished, FinishedPod
from hodei.kube.scheduler.pod_reader import Reader, Reading
from hodei.model.config import ForecastConfig, ProfileConfig, SchedulingConfig
from hodei.model.job import JobSpec
from unit.kube.podding import a_pod
from unit.kube.town import NOW_MS, Town

MINUTE_MS = 60_000
BATCH = Options(scheduling=SchedulingConfig(profiles={"default": ProfileConfig(queue="batch")}))


class Patches:
    """Takes every patch, or refuses each in the same way."""

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
    def __init__(self, town: Town) -> None:
        self._town = town

    def now_ms(self) -> int:
        return self._town.now_ms


def _forecasting(town: Town, api: Patches) -> PodForecasts:
    harness = town.harness
    return PodForecasts(api, harness.controller, harness.pods, _Clock(town), ForecastConfig(), look_s=0.001)


def _waiting_town() -> Town:
    town = Town(BATCH)
    town.node("n1")
    town.pod("runs", "4", estimate="1h")
    town.step()
    town.pod("first", "4", estimate="1h")
    town.step()
    return town


def _round(forecasting: PodForecasts) -> bool:
    return asyncio.run(forecasting._write(list(forecasting._news())))


def test_a_promise_is_written_on_the_pod_once():
    town, api = _waiting_town(), Patches()
    forecasting = _forecasting(town, api)
    assert _round(forecasting)
    assert _round(forecasting)
    assert api.seen == [("first", {EXPECTED: "2026-09-21T15:13:20Z", LATEST: "2026-09-21T15:13:20Z"})]


def test_what_another_wrote_before_is_not_written_again():
    town, api = _waiting_town(), Patches()
    said = {"hodei.io/estimate": "1h", EXPECTED: "2026-09-21T15:13:00Z", LATEST: "2026-09-21T15:13:30Z"}
    town.gone("first")
    town.pod("first", "4", annotations=said)
    town.step()
    _round(_forecasting(town, api))
    assert api.seen == []


def test_who_has_no_promise_is_told_what_was_foreseen():
    town, api = _waiting_town(), Patches()
    town.pod("second", "4", estimate="1h")
    town.step()
    forecasting = _forecasting(town, api)
    asyncio.run(forecasting.foresight._foretell())
    _round(forecasting)
    asyncio.run(forecasting.end())
    told = dict(api.seen)
    assert told["second"][EXPECTED] == "2026-09-21T16:13:20Z"
    assert told["second"][LATEST] >= told["second"][EXPECTED]


def test_without_the_right_nothing_is_tried_for_a_while(caplog: pytest.LogCaptureFixture):
    town = _waiting_town()
    assert not _round(_forecasting(town, Patches(ApiError(403, "Forbidden", "pods is forbidden"))))
    assert "rbac-forecast.yaml" in caplog.text


@pytest.mark.parametrize(
    ("old_min", "new_min", "matters"),
    [(10, 10.9, False), (10, 11.5, True), (100, 105, False), (100, 120, True), (100, 60, True)],
    ids=["less than a minute", "more", "less than a tenth", "more than a tenth", "sooner"],
)
def test_small_changes_are_not_worth_a_patch(old_min: float, new_min: float, matters: bool):
    old, new = (NOW_MS + round(minutes * MINUTE_MS) for minutes in (old_min, new_min))
    assert differs(old, new, NOW_MS) is matters


def test_our_own_annotation_does_not_make_a_pod_another():
    town = _waiting_town()
    before = town.job("first")
    said = {"hodei.io/estimate": "1h", EXPECTED: "2026-09-21T15:13:20Z"}
    fields = {"requests": {"cpu": "4", "memory": "1Gi"}, "schedulerName": "hodei"}
    town.move(a_pod("first", annotations=said, **fields))
    assert not town.harness.pods.stirred
    assert town.job("first") == before
    town.move(a_pod("first", annotations={**said, "hodei.io/estimate": "2h"}, **fields))
    assert town.harness.pods.stirred


# ------------------------------------------------------------------------------------------------ finished pods


def _finished(name: str, *, seconds: int, scheduler: str = "hodei") -> FinishedPod:
    ended = f"2026-09-21T13:{seconds // 60:02}:{seconds % 60:02}Z"
    plain = {
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}",
                     "ownerReferences": [{"kind": "Job", "name": "nightly-3", "uid": "1", "controller": True}]},
        "spec": {"schedulerName": scheduler, "nodeName": "n1", "containers": [{"name": "main"}]},
        "status": {"phase": "Succeeded", "startTime": "2026-09-21T13:00:00Z",
                   "containerStatuses": [{"name": "main", "state": {"terminated": {"finishedAt": ended}}}]},
    }  # fmt: skip
    return msgspec.convert(plain, FinishedPod)


def test_pods_that_succeeded_are_learned_from_once_and_in_their_order():
    learned: list[tuple[str, int]] = []

    def learn(spec: JobSpec, ran_ms: int, ended_ms: int) -> None:
        learned.append((spec.name, ran_ms))

    town = Town()
    finished = Finished(None, "hodei", Reader(town.harness.cache, Reading()), learn)
    finished.listed([_finished("late", seconds=90), _finished("early", seconds=30)])
    finished.listed([_finished("late", seconds=90)])
    finished.changed("MODIFIED", _finished("late", seconds=90))
    finished.changed("ADDED", _finished("theirs", seconds=5, scheduler="default-scheduler"))
    finished.changed("DELETED", _finished("late", seconds=90))
    finished.changed("ADDED", _finished("new", seconds=60))
    assert learned == [("Job/nightly-3", 30_000), ("Job/nightly-3", 90_000), ("Job/nightly-3", 60_000)]


def test_forecasts_learn_from_them_too():
    town = _waiting_town()
    forecasting = _forecasting(town, Patches())
    spec = town.harness.pods.entries["uid-runs"].wanted.job
    for _ in range(6):
        forecasting.learn(spec, 1_800_000, NOW_MS)
    asyncio.run(forecasting.foresight._foretell())
    forecast = forecasting.foresight.latest(town.job("first"))
    asyncio.run(forecasting.end())
    assert forecast is not None
    assert forecast.p50_ms == NOW_MS + 1_800_000
