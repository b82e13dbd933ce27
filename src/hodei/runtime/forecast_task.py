"""Looking ahead in real life: forecasts in the background, and answers to "what if?". Never on the loop, never for real.

All of it happens in forked children (see `runtime.fork_worker`), which see the controller as it is at that moment and give up when
their time is over. Those who make forecasts let others on the machine go first, and take a tenth of a core at most.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec
from msgspec import structs

from hodei.control.controller import Controller, Step
from hodei.control.explain.forecasts import Forecasts, Record
from hodei.control.explain.whatif import Question, what_if
from hodei.model.config import ForecastConfig, SchedulingConfig
from hodei.model.effects import Save, SaveJob, SaveValue
from hodei.model.errors import InvalidInput, Unavailable
from hodei.model.estimate import StartForecast
from hodei.model.explanation import WhatIf
from hodei.model.facts import Fact, StartsForecast
from hodei.model.ids import JobId, RunId
from hodei.model.job import JOB_ENDED, Job
from hodei.model.resources import parse_duration_ms
from hodei.ports import Clock, JobQuery, Store
from hodei.runtime.fork_worker import ForkWorker
from hodei.runtime.metrics import Metrics

log = logging.getLogger("hodei.foresight")
_NOTE = "forecasts"
# How many ended jobs are looked at, at start-up, to learn how long jobs run.
_HISTORY = 1000
# Whatever waits: forecasts may take this share of the time between them (of one core), an answer this long.
_SHARE = 0.1
_LEAST_S = 0.5
# Forecasts rest after so much work, as long as they worked, and let others go first: but not so far that an overloaded
# machine makes none at all.
_WORK_S = 0.005
_AFTER_ALL_OTHERS = 10
# Answers that a person waits for let the server itself go first.
_AFTER_THE_SERVER = 5
_AT_ONCE = 2
# Children that have not come to an end after so long are ended.
_TOO_LONG_S = 120.0
_WHAT_IF_S = 10.0
_SOON_S = 2.0
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
        self.aside = ForkWorker(_AT_ONCE, nice=_AFTER_THE_SERVER, limit_s=_TOO_LONG_S)
        self._foretelling = ForkWorker(1, nice=_AFTER_ALL_OTHERS, limit_s=self._every_s + _TOO_LONG_S)
        self._forecasts = Forecasts()
        self._metrics = metrics
        # Told when they will start, where a rule wants to know.
        self.tell: Callable[[Sequence[Fact]], None] | None = None
        # When runs will begin that wait in the lines of backends, by their own estimates.
        self.begins: Callable[[], dict[RunId, int]] = dict

    def close(self) -> None:
        self.aside.close()
        self._foretelling.close()

    # ------------------------------------------------------------------------------------------- forecasts

    def latest(self, job: JobId) -> StartForecast | None:
        return self._forecasts.latest(job)

    def stepped(self, step: Step) -> None:
        """What has been decided and stored: starts are graded, ends are learned from."""
        for save in step.saves:
            if isinstance(save, SaveJob):
                self._learn(save.job)

    def _learn(self, job: Job) -> None:
        self._forecasts.arrivals.arrived(job)
        kept = self._forecasts.of.get(job.id)
        # Also when it has ended by the time that we hear of it.
        if kept and job.scheduled_ms >= kept[0].made_ms:
            for grade in self._forecasts.started(job.id, job.scheduled_ms):
                self._metrics.forecast_graded.inc()
                self._metrics.forecast_covered.inc(grade.covered)
                self._metrics.forecast_error.observe(abs(grade.error_ms) / 1000)
        if job.state in JOB_ENDED:
            self._forecasts.ended(job)

    async def run(self, commit: Commit) -> None:
        """For ever: now and then a forecast for everyone who waits."""
        await self._recall()
        await asyncio.sleep(min(self._every_s, _SOON_S))
        while True:
            try:
                if await self._foretell():
                    await commit([SaveValue(_NOTE, msgspec.json.encode(self._forecasts.record()).decode())])
            except Unavailable as error:
                log.warning("forecasts could not be stored: %s", error)
            except Exception:
                log.exception("forecasts could not be made; the next try is in %g s", self._every_s)
            await asyncio.sleep(self._every_s)

    async def _foretell(self) -> bool:
        """Whether there was anyone to foretell for."""
        waiting = sum(self._controller.pending().values())
        if not 0 < waiting <= self._max_jobs:
            return False
        now_ms, begins = self._clock.now_ms(), self.begins()
        found = await self._foretelling.ask(
            lambda: self._forecasts.foresee(
                self._controller,
                now_ms,
                partial(_seeded, now_ms),
                begins=begins,
                go_on=_at_leisure(max(self._every_s * _SHARE, _LEAST_S), self._every_s),
            )
        )
        jobs = self._controller.cluster.jobs
        still = {id for id in found.keys() | self._forecasts.of.keys() if id in jobs and jobs[id].state in _WAITING}
        self._forecasts.keep({id: forecast for id, forecast in found.items() if id in still})
        self._forecasts.forget(still)
        if self.tell is not None and self._forecasts_are_used():
            self.tell([StartsForecast({id: found[id].p50_ms for id in sorted(still & found.keys())})])
        return True

    def _forecasts_are_used(self) -> bool:
        plugins = (plugin for profile in self._controller.engine.profiles.values() for plugin in profile.layouts)
        return any(getattr(plugin, "needs_forecasts", False) for plugin in plugins)

    async def _recall(self) -> None:
        """What was known before the restart."""
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
            log.warning("what was foretold before could not be read: %s", error)

    # --------------------------------------------------------------------------------------------- what if

    async def what_if(
        self,
        question: Question,
        policy: SchedulingConfig | None = None,
        *,
        make: Callable[[SchedulingConfig], Controller] | None = None,
    ) -> WhatIf:
        """`make`: what makes a controller of the policy, if not the one for whom anyone may ask."""
        make = make or self._make

        def answer() -> WhatIf:
            if policy is not None and make is None:
                raise InvalidInput("this server cannot try another policy")
            under = make(policy) if policy is not None and make is not None else None
            now_ms, unsaid_ms = self._clock.now_ms(), self._forecasts.run_times.usual_ms()
            go_on = _for_so_long(_WHAT_IF_S)
            return what_if(self._controller, question, now_ms, under=under, unsaid_ms=unsaid_ms, go_on=go_on)

        asked = (msgspec.msgpack.encode((structs.replace(question, first=0), policy)), id(make))
        return await self.aside.ask(answer, asked)


# --------------------------------------------------------------------------------------------- in the child


def _for_so_long(seconds: float) -> Callable[[], bool]:
    ends = time.monotonic() + seconds
    return lambda: time.monotonic() < ends


def _at_leisure(work_s: float, within_s: float) -> Callable[[], bool]:
    """For so long of its own work, with rests in between."""
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


def _seeded(now_ms: int, number: int) -> random.Random:
    return random.Random(now_ms * 1000 + number)
