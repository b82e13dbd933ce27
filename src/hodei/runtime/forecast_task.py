"""Start forecasts in the background, and what-if queries. Both run ahead on a copy of the controller.

They run in forked children (`runtime.fork_worker`) that see the controller as it is at the fork and stop at their time
limit. Forecasts run at low priority and use at most a tenth of a core.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from msgspec import structs

from hodei.control.controller import Controller, Step
from hodei.control.explain.forecasts import Forecasts, Record
from hodei.control.explain.whatif import Question, what_if
from hodei.model.config import ForecastConfig, SchedulingConfig
from hodei.model.effects import Save, SaveJob, SaveValue
from hodei.model.errors import InvalidInput, Unavailable
from hodei.model.estimate import Forecast, StartForecast
from hodei.model.explanation import WhatIf
from hodei.model.facts import Fact, StartsForecast
from hodei.model.ids import JobId, RunId
from hodei.model.job import JOB_ENDED, Job
from hodei.model.resources import parse_duration_ms
from hodei.ports import Clock, JobQuery, Store
from hodei.runtime.fork_worker import ForkWorker
from hodei.runtime.metrics import Metrics

log = logging.getLogger("hodei.forecasts")
_NOTE = "forecasts"
# How many ended jobs are read at start-up to learn run times.
_HISTORY = 1000
# The share of one core that forecasts may use, but at least this long per round.
_CPU_SHARE = 0.1
_MIN_ROUND_S = 0.5
# Forecasts pause after this much work, for as long as it took. Their niceness still lets an overloaded machine make some.
_WORK_S = 0.005
_FORECAST_NICE = 10
# Interactive queries run below the priority of the server itself.
_QUERY_NICE = 5
_MAX_QUERIES = 2
# Children that run longer are killed.
_CHILD_LIMIT_S = 120.0
_WHAT_IF_S = 10.0
_FIRST_ROUND_S = 2.0
_WAITING = ("pending", "held")

Commit = Callable[[Sequence[Save]], Awaitable[None]]


class ForecastTask:
    def __init__(
        self,
        controller: Controller,
        store: Store,
        clock: Clock,
        metrics: Metrics,
        config: ForecastConfig,
        make: Callable[[SchedulingConfig], Controller] | None = None,
    ) -> None:
        self._controller, self._store, self._clock, self._make = controller, store, clock, make
        self._every_s = max(parse_duration_ms(config.every), 1000) / 1000
        self.enabled, self._max_jobs = config.enabled, config.max_jobs
        self.query_worker = ForkWorker(_MAX_QUERIES, nice=_QUERY_NICE, limit_s=_CHILD_LIMIT_S)
        self._forecast_worker = ForkWorker(1, nice=_FORECAST_NICE, limit_s=self._every_s + _CHILD_LIMIT_S)
        self._forecasts = Forecasts()
        self._metrics = metrics

    def close(self) -> None:
        self.query_worker.close()
        self._forecast_worker.close()

    def latest(self, job: JobId) -> StartForecast | None:
        return self._forecasts.latest(job)

    def observe(self, step: Step) -> None:
        """A committed step: grades the forecasts of started jobs, and learns run times from ended ones."""
        for save in step.saves:
            if isinstance(save, SaveJob):
                self._learn(save.job)

    def _learn(self, job: Job) -> None:
        self._forecasts.arrivals.arrived(job)
        kept = self._forecasts.of.get(job.id)
        # Also if the job has already ended by now.
        if kept and job.scheduled_ms >= kept[0].made_ms:
            for grade in self._forecasts.started(job.id, job.scheduled_ms):
                self._metrics.forecast_graded.inc()
                self._metrics.forecast_covered.inc(grade.covered)
                self._metrics.forecast_error.observe(abs(grade.error_ms) / 1000)
        if job.state in JOB_ENDED:
            self._forecasts.ended(job)

    async def run(
        self,
        commit: Commit,
        enqueue: Callable[[Sequence[Fact]], None] | None = None,
        expected_starts: Callable[[], dict[RunId, int]] = dict,
    ) -> None:
        """Forecasts all pending jobs at its interval, forever. `enqueue`: where forecasts go as facts, for plugins that use
        them. `expected_starts`: of runs in the backends' own queues."""
        await self._load()
        await asyncio.sleep(min(self._every_s, _FIRST_ROUND_S))
        while True:
            try:
                found = await self._forecast(expected_starts())
                if found is not None:
                    if enqueue is not None and self._forecasts_are_used():
                        enqueue([StartsForecast({id: found[id].p50_ms for id in sorted(found)})])
                    await commit([SaveValue(_NOTE, msgspec.json.encode(self._forecasts.record()).decode())])
            except Unavailable as error:
                log.warning("forecasts could not be stored: %s", error)
            except Exception:
                log.exception("forecasts failed; next try in %g s", self._every_s)
            await asyncio.sleep(self._every_s)

    async def _forecast(self, starts: dict[RunId, int]) -> dict[JobId, Forecast] | None:
        """The forecasts of jobs that still wait; None if there was nothing to forecast."""
        waiting = sum(self._controller.pending().values())
        if not 0 < waiting <= self._max_jobs:
            return None
        now_ms = self._clock.now_ms()
        found = await self._forecast_worker.run(
            lambda: self._forecasts.predict(
                self._controller,
                now_ms,
                lambda number: random.Random(now_ms * 1000 + number),
                begins=starts,
                go_on=_throttled(max(self._every_s * _CPU_SHARE, _MIN_ROUND_S), self._every_s),
            )
        )
        jobs = self._controller.cluster.jobs
        still = {id for id in found.keys() | self._forecasts.of.keys() if id in jobs and jobs[id].state in _WAITING}
        found = {id: forecast for id, forecast in found.items() if id in still}
        self._forecasts.keep(found)
        self._forecasts.forget(still)
        return found

    def _forecasts_are_used(self) -> bool:
        if self._controller.scaling.offers_nodes:
            return True
        plugins = (plugin for profile in self._controller.engine.profiles.values() for plugin in profile.layouts)
        return any(getattr(plugin, "needs_forecasts", False) for plugin in plugins)

    async def _load(self) -> None:
        """Restores the forecasts and learned run times from the store."""
        try:
            text, page = await asyncio.to_thread(
                lambda: (
                    self._store.note(_NOTE),
                    self._store.jobs(JobQuery(states=("succeeded",), limit=_HISTORY)),
                )
            )
            for job in sorted(page.jobs, key=lambda job: (job.finished_ms, job.id)):
                self._forecasts.ended(job)
            for job in sorted(page.jobs, key=lambda job: job.id):
                self._forecasts.arrivals.arrived(job)
            if text:
                self._forecasts.restore(msgspec.json.decode(text, type=Record))
        except (Unavailable, msgspec.MsgspecError) as error:
            log.warning("the stored forecasts cannot be read: %s", error)

    async def what_if(
        self,
        question: Question,
        policy: SchedulingConfig | None = None,
        *,
        make: Callable[[SchedulingConfig], Controller] | None = None,
    ) -> WhatIf:
        """`make` builds the controller for `policy`; the default loads only plugins in use, so any reader may ask."""
        make = make or self._make

        def answer() -> WhatIf:
            if policy is not None and make is None:
                raise InvalidInput("this server cannot simulate another policy")
            under = make(policy) if policy is not None and make is not None else None
            now_ms, default_ms = self._clock.now_ms(), self._forecasts.run_times.usual_ms()
            go_on = _until_timeout(_WHAT_IF_S)
            return what_if(self._controller, question, now_ms, under=under, default_ms=default_ms, go_on=go_on)

        key = (msgspec.msgpack.encode((structs.replace(question, first=0), policy)), id(make))
        return await self.query_worker.run(answer, key)


def _until_timeout(seconds: float) -> Callable[[], bool]:
    ends = time.monotonic() + seconds
    return lambda: time.monotonic() < ends


def _throttled(work_s: float, within_s: float) -> Callable[[], bool]:
    """True until `work_s` of CPU time or `within_s` are used; sleeps in between."""
    ends, worked_s, since = time.monotonic() + within_s, 0.0, time.thread_time()

    def go_on() -> bool:
        nonlocal worked_s, since
        spent = time.thread_time() - since
        if spent >= _WORK_S:
            time.sleep(spent)
            worked_s += spent
            since = time.thread_time()
        return worked_s < work_s and time.monotonic() < ends

    return go_on
