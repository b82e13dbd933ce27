"""When a pod that waits will probably start, written on it: what it was promised, else what runs ahead of time foresee.

    hodei.io/expected-start           as likely as not by then, or promised for then
    hodei.io/expected-start-latest    in nine of ten cases by then

Whoever wants this on pods gives Hodei the right to patch them, so it is off unless asked for.
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
from hodei.kube.scheduler.background import NoBackground
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
# Forecasts are made no more often than this, and so often it is looked whether pods should be told something new.
_LEAST_MS = 30_000
_LOOK_S = 2.0
# At most so many pods are written on in one round, so many at a time.
_PATCHES, _AT_ONCE = 200, 8
_MINUTE_MS = 60_000
_FORBIDDEN_S = 300.0
_MERGE = "application/merge-patch+json"


class _NoStore:
    """What forecasts are told at start is what `finished` reads from the cluster; nothing is kept between processes."""

    def note(self, name: str) -> str:
        return ""

    def jobs(self, query: JobQuery) -> JobPage:
        return JobPage([])


async def _keep_nothing(saves: Sequence[Save]) -> None:
    return


class PodForecasts(NoBackground):
    def __init__(
        self,
        api: Api,
        controller: Controller,
        pods: Pods,
        clock: Clock,
        config: ForecastConfig,
        *,
        look_s: float = _LOOK_S,
    ) -> None:
        self._api, self._controller, self._pods, self._clock, self._look_s = api, controller, pods, clock, look_s
        every_ms = max(parse_duration_ms(config.every), _LEAST_MS)
        config = msgspec.structs.replace(config, every=f"{every_ms}ms")
        self.foresight = ForecastTask(controller, _NoStore(), clock, Metrics(), config)  # type: ignore[arg-type]
        self._foresees = config.enabled
        self._came: set[JobId] = set()
        self._said: dict[str, tuple[int, int]] = {}  # what each pod was told, by uid

    def stepped(self, step: Step) -> None:
        """Only those who came to wait count: pods that were bound before, or that were of a gang, come from nowhere."""
        if not self._foresees:
            return
        saves: list[Save] = []
        for save in step.saves:
            if isinstance(save, SaveJob) and (save.new or save.job.id in self._came):
                (self._came.discard if save.job.state in JOB_ENDED else self._came.add)(save.job.id)
                saves.append(save)
        if saves:
            self.foresight.stepped(Step(Plan(), saves, []))

    def learn(self, spec: JobSpec, ran_ms: int, ended_ms: int) -> None:
        """A pod has succeeded. Its number is none that comes again, so it counts as nobody who arrives."""
        job = Job(0, spec, "succeeded", ended_ms, ended_ms, scheduled_ms=ended_ms - ran_ms, finished_ms=ended_ms)
        self.foresight.stepped(Step(Plan(), [SaveJob(job)], []))

    async def run(self) -> None:
        foreseeing = asyncio.create_task(self.foresight.run(_keep_nothing)) if self._foresees else None
        try:
            while True:
                await asyncio.sleep(self._look_s)
                if foreseeing is not None and foreseeing.done():
                    foreseeing.result()  # why it ended
                    raise RuntimeError("the forecasts have ended")
                if not await self._write(list(self._news())[:_PATCHES]):
                    await asyncio.sleep(_FORBIDDEN_S)
        finally:
            if foreseeing is not None:
                foreseeing.cancel()

    async def end(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.foresight.close)

    # ------------------------------------------------------------------------------------------ what to say

    def _news(self) -> Iterator[tuple[Entry, int, int]]:
        """Pods that wait, and what they should be told now, if that is not what they were told."""
        now_ms = self._clock.now_ms()
        waiting: set[str] = set()
        for line in self._controller.queues.values():
            for id in list(line.gangs):
                expected = self.expected(id)
                for entry in self._pods.of_job(id):
                    waiting.add(entry.uid)
                    if expected is not None and self._is_news(entry, expected, now_ms):
                        yield entry, *expected
        for uid in [uid for uid in self._said if uid not in waiting]:
            del self._said[uid]

    def expected(self, id: JobId) -> tuple[int, int] | None:
        """When the job will start, and by when at the latest."""
        start_reservation = self._controller.cluster.availability.start_reservations.get(id)
        found = self.foresight.latest(id) if self._foresees else None
        if start_reservation is not None:
            # What is promised is kept if all keep their word; a forecast knows how they have kept it.
            return start_reservation.start_ms, max(start_reservation.start_ms, found.p90_ms if found is not None else 0)
        return (found.p50_ms, found.p90_ms) if found is not None else None

    def _is_news(self, entry: Entry, expected: tuple[int, int], now_ms: int) -> bool:
        said = self._said.get(entry.uid) or _written_on(entry)
        return said is None or any(differs(old, new, now_ms) for old, new in zip(said, expected, strict=True))

    # ----------------------------------------------------------------------------------------- saying it

    async def _write(self, news: Sequence[tuple[Entry, int, int]]) -> bool:
        """Whether we may."""
        allowed = True
        for at in range(0, len(news), _AT_ONCE):
            several = news[at : at + _AT_ONCE]
            answers = await asyncio.gather(*(self._patch(*each) for each in several))
            allowed &= all(answers)
            if not allowed:
                _log.error("pods cannot be told when they will start: it needs deploy/kubernetes/rbac-forecast.yaml")
                break
        return allowed

    async def _patch(self, entry: Entry, expected_ms: int, latest_ms: int) -> bool:
        meta = entry.pod.metadata
        said = {EXPECTED: _stamp(expected_ms), LATEST: _stamp(latest_ms)}
        body = msgspec.json.encode({"metadata": {"uid": meta.uid, "annotations": said}})
        path = f"/api/v1/namespaces/{meta.namespace}/pods/{meta.name}"
        try:
            await self._api.request("PATCH", path, body, content_type=_MERGE)
        except ApiError as error:
            if error.status == 403:
                return False
            if error.status not in (404, 409):
                _log.warning("pod %s is not told when it will start: %s", entry.name, error.message)
            return True
        self._said[entry.uid] = (expected_ms, latest_ms)
        return True


def differs(old_ms: int, new_ms: int, now_ms: int) -> bool:
    """Whether the difference matters to whoever waits: more than a minute, and more than a tenth of the wait."""
    return abs(new_ms - old_ms) > max(_MINUTE_MS, abs(new_ms - now_ms) // 10)


def _written_on(entry: Entry) -> tuple[int, int] | None:
    """What it was told by one who led before us."""
    said = entry.pod.metadata.annotations
    try:
        both = [datetime.fromisoformat(said[name]) for name in (EXPECTED, LATEST)]
        first, last = (round(when.timestamp() * 1000) for when in both)
    except (KeyError, ValueError):
        return None
    return first, last


def _stamp(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
