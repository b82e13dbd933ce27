"""The expected start of pending pods, written as annotations: its start reservation, else a forecast.

    hodei.io/expected-start           start reservation, or even odds
    hodei.io/expected-start-latest    nine in ten

It needs the right to patch pods, so it is off by default.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import msgspec

from hodei.control.controller import Controller, Step
from hodei.engine.plan import Plan
from hodei.kube.api.client import Api, ApiError
from hodei.kube.scheduler.background import BackgroundTask
from hodei.kube.scheduler.groups import Entry
from hodei.kube.scheduler.pods import Pods
from hodei.model.config import ForecastConfig
from hodei.model.effects import Save, SaveJob
from hodei.model.ids import JobId
from hodei.model.job import JOB_ENDED, Job, JobSpec
from hodei.model.resources import parse_duration_ms
from hodei.ports import Clock, JobPage, JobQuery
from hodei.runtime.forecast_task import ForecastTask
from hodei.runtime.metrics import Metrics

_log = logging.getLogger(__name__)
EXPECTED, LATEST = "hodei.io/expected-start", "hodei.io/expected-start-latest"
# The shortest interval between forecasts, and how often annotations are checked.
_MIN_INTERVAL_MS = 30_000
_CHECK_EVERY_S = 2.0
# The most pods annotated in one round, and at a time.
_MAX_PATCHES, _PARALLEL = 200, 8
_MINUTE_MS = 60_000
_FORBIDDEN_PAUSE_S = 300.0
_MERGE = "application/merge-patch+json"


class _NoStore:
    """Nothing is kept between processes: history comes from `history.FinishedPodInformer`."""

    def note(self, name: str) -> str:
        return ""

    def jobs(self, query: JobQuery) -> JobPage:
        return JobPage([])


async def _discard(saves: Sequence[Save]) -> None:
    return


class PodForecasts(BackgroundTask):
    def __init__(
        self,
        api: Api,
        controller: Controller,
        pods: Pods,
        clock: Clock,
        config: ForecastConfig,
        *,
        check_every_s: float = _CHECK_EVERY_S,
    ) -> None:
        self._api, self._controller, self._pods, self._clock, self._check_every_s = (
            api,
            controller,
            pods,
            clock,
            check_every_s,
        )
        every_ms = max(parse_duration_ms(config.every), _MIN_INTERVAL_MS)
        config = msgspec.structs.replace(config, every=f"{every_ms}ms")
        self.forecast_task = ForecastTask(controller, _NoStore(), clock, Metrics(), config)  # type: ignore[arg-type]
        self._forecasts_enabled = config.enabled
        self._arrived: set[JobId] = set()
        self._written: dict[str, tuple[int, int]] = {}  # by uid

    def on_step(self, step: Step) -> None:
        """Only submitted jobs count as arrivals, not pods that were bound before or split from a gang."""
        if not self._forecasts_enabled:
            return
        saves: list[Save] = []
        for save in step.saves:
            if isinstance(save, SaveJob) and (save.new or save.job.id in self._arrived):
                (self._arrived.discard if save.job.state in JOB_ENDED else self._arrived.add)(save.job.id)
                saves.append(save)
        if saves:
            self.forecast_task.observe(Step(Plan(), saves, []))

    def learn(self, spec: JobSpec, ran_ms: int, ended_ms: int) -> None:
        """A pod has succeeded. Its job number 0 is never used, so it does not count as an arrival."""
        job = Job(0, spec, "succeeded", ended_ms, ended_ms, scheduled_ms=ended_ms - ran_ms, finished_ms=ended_ms)
        self.forecast_task.observe(Step(Plan(), [SaveJob(job)], []))

    async def run(self) -> None:
        forecasting = asyncio.create_task(self.forecast_task.run(_discard)) if self._forecasts_enabled else None
        try:
            while True:
                await asyncio.sleep(self._check_every_s)
                if forecasting is not None and forecasting.done():
                    forecasting.result()  # raises what ended it
                    raise RuntimeError("the forecasts have ended")
                if not await self._write(list(self._outdated())[:_MAX_PATCHES]):
                    await asyncio.sleep(_FORBIDDEN_PAUSE_S)
        finally:
            if forecasting is not None:
                forecasting.cancel()

    async def stop(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.forecast_task.close)

    def _outdated(self) -> Iterator[tuple[Entry, int, int]]:
        """Pending pods whose annotation differs noticeably from the expected start."""
        now_ms = self._clock.now_ms()
        waiting: set[str] = set()
        for queue in self._controller.queues.values():
            for id in list(queue.gangs):
                expected = self.expected(id)
                for entry in self._pods.entries_of(id):
                    waiting.add(entry.uid)
                    if expected is not None and self._is_outdated(entry, expected, now_ms):
                        yield entry, *expected
        for uid in [uid for uid in self._written if uid not in waiting]:
            del self._written[uid]

    def expected(self, id: JobId) -> tuple[int, int] | None:
        """The expected and the latest start."""
        start_reservation = self._controller.cluster.availability.start_reservations.get(id)
        found = self.forecast_task.latest(id) if self._forecasts_enabled else None
        if start_reservation is not None:
            # A start reservation assumes that run times match their estimates; a forecast knows how well they do.
            return start_reservation.start_ms, max(start_reservation.start_ms, found.p90_ms if found is not None else 0)
        return (found.p50_ms, found.p90_ms) if found is not None else None

    def _is_outdated(self, entry: Entry, expected: tuple[int, int], now_ms: int) -> bool:
        known = self._written.get(entry.uid) or _annotated(entry)
        return known is None or any(
            differs_noticeably(old, new, now_ms) for old, new in zip(known, expected, strict=True)
        )

    async def _write(self, outdated: Sequence[tuple[Entry, int, int]]) -> bool:
        """False if it is forbidden."""
        allowed = True
        for at in range(0, len(outdated), _PARALLEL):
            batch = outdated[at : at + _PARALLEL]
            allowed_each = await asyncio.gather(*(self._patch(*each) for each in batch))
            allowed &= all(allowed_each)
            if not allowed:
                _log.error(
                    "pods cannot be annotated with their expected start: apply deploy/kubernetes/rbac-forecast.yaml"
                )
                break
        return allowed

    async def _patch(self, entry: Entry, expected_ms: int, latest_ms: int) -> bool:
        meta = entry.pod.metadata
        annotations = {EXPECTED: _timestamp(expected_ms), LATEST: _timestamp(latest_ms)}
        body = msgspec.json.encode({"metadata": {"uid": meta.uid, "annotations": annotations}})
        path = f"/api/v1/namespaces/{meta.namespace}/pods/{meta.name}"
        try:
            await self._api.request("PATCH", path, body, content_type=_MERGE)
        except ApiError as error:
            if error.status == 403:
                return False
            if error.status not in (404, 409):
                _log.warning("the expected start of pod %s could not be written: %s", entry.name, error.message)
            return True
        self._written[entry.uid] = (expected_ms, latest_ms)
        return True


def differs_noticeably(old_ms: int, new_ms: int, now_ms: int) -> bool:
    """Whether the difference is more than a minute and more than a tenth of the wait."""
    return abs(new_ms - old_ms) > max(_MINUTE_MS, abs(new_ms - now_ms) // 10)


def _annotated(entry: Entry) -> tuple[int, int] | None:
    """The annotations of an earlier leader."""
    annotations = entry.pod.metadata.annotations
    try:
        both = [datetime.fromisoformat(annotations[name]) for name in (EXPECTED, LATEST)]
        first, last = (round(when.timestamp() * 1000) for when in both)
    except (KeyError, ValueError):
        return None
    return first, last


def _timestamp(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
