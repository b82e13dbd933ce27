"""How good are forecasts? Replays a trace, forecasts the start of every pending job at intervals with the server's own
code, and compares each forecast with the actual start.

A forecast knows the past and the users' estimates, never the rest of the trace.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from hodei.control.controller import Controller, Step
from hodei.control.explain.forecasts import FUTURES, Forecasts
from hodei.control.explain.lookahead import clone_controller
from hodei.model.effects import SaveJob
from hodei.model.estimate import Forecast
from hodei.model.facts import Fact, JobSubmitted
from hodei.model.ids import JobId
from hodei.model.job import JOB_ENDED
from hodei.model.node import Node
from hodei.model.resources import format_duration
from hodei.sim.driver import OnProgress, Simulation
from hodei.sim.policies import policy
from hodei.sim.traces import Workload
from hodei.wiring import make_controller


class Comparison(Struct, frozen=True):
    """One forecast and the actual start; `started_ms` is -1 if the job had not started at the end of the replay."""

    job: JobId
    made_ms: int
    p50_ms: int
    p90_ms: int
    started_ms: int

    @property
    def covered(self) -> bool:
        return 0 <= self.started_ms <= self.p90_ms


class AccuracyGroup(Struct, frozen=True):
    """All forecasts of one job, or of one moment. `at_ms`: when the first was made. `by_p90`: percent."""

    job: JobId
    at_ms: int
    forecasts: int
    by_p90: float
    median_error_s: float


class ForecastAccuracy(Struct):
    """The forecasts of one replay. `starts`: jobs that waited long enough to get a forecast. `missing`: times that a
    pending job got none.

    Shares are percentages of forecasts whose job started by its P90: `covered` of all, `starts_covered` of the first one
    of each start. `per_job` and `per_moment` are means over jobs and over moments, so that a job that waits long, or a
    moment with a long queue, counts no more than others.
    """

    trace: str
    policy: str
    every: str
    jobs: int
    starts: int
    moments: int
    forecasts: int
    covered: float
    starts_covered: float
    per_job: float
    per_moment: float
    worst_moment: float
    median_error_s: float
    median_absolute_error_s: float
    median_wait_s: float
    missing: int
    seconds: float
    by_job: list[AccuracyGroup] = []
    by_moment: list[AccuracyGroup] = []


class ForecastSimulation(Simulation):
    """A simulation that forecasts the starts of all pending jobs every `every_ms`."""

    def __init__(
        self,
        workload: Workload,
        controller: Controller,
        nodes: Sequence[Node],
        every_ms: int,
        futures: int,
        policy: str,
        until_ms: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        super().__init__(workload, controller, nodes, policy=policy, until_ms=until_ms, on_progress=on_progress)
        self._every_ms, self._futures = every_ms, futures
        self._due_ms = -1
        self._last_ms = 0
        # A server keeps a few forecasts of each job; here all of them are compared.
        self._open: dict[JobId, list[Forecast]] = {}
        self.forecasts = Forecasts()
        self.compared: list[Comparison] = []
        self.first_of_start: list[Comparison] = []
        self.missing = 0

    def close_open_forecasts(self) -> None:
        """After the run: a job still waiting after its P90 was forecast wrongly; other open forecasts are dropped."""
        for job, kept in self._open.items():
            missed = [one for one in kept if one.p90_ms < self._last_ms]
            self._compare(job, missed, -1, first=bool(missed) and missed[0] is kept[0])
        self._open.clear()

    def _step(self, now_ms: int, facts: list[Fact]) -> Step:
        self._last_ms = now_ms
        if self._due_ms < 0:
            self._due_ms = now_ms + self._every_ms
        while self._due_ms < now_ms:
            # Nothing has happened since the last step, so the controller's state is the one at the due time. A forecast
            # that is due exactly now is made after everything that happens now.
            self._forecast(self._due_ms)
            self._due_ms += self._every_ms
        for fact in facts:
            if isinstance(fact, JobSubmitted):
                self.forecasts.arrivals.arrived(fact.job)
        step = super()._step(now_ms, facts)
        for job in dict.fromkeys(bind.job for bind in step.plan.binds):
            self.forecasts.started(job, now_ms)
            self._compare(job, self._open.pop(job, []), now_ms, first=True)
        for save in step.saves:
            if isinstance(save, SaveJob) and save.job.state in JOB_ENDED:
                self.forecasts.ended(save.job)
                self._open.pop(save.job.id, None)
        return step

    def _compare(self, job: JobId, kept: Iterable[Forecast], started_ms: int, *, first: bool) -> None:
        found = [Comparison(job, one.made_ms, one.p50_ms, one.p90_ms, started_ms) for one in kept]
        self.compared += found
        self.first_of_start += found[:1] if first else []

    def _forecast(self, at_ms: int) -> None:
        pending = sum(self._controller.pending().values())
        if pending:
            found = self.forecasts.predict(
                clone_controller(self._controller),
                at_ms,
                lambda number: random.Random(at_ms * 1000 + number),
                futures=self._futures,
            )
            self.missing += pending - len(found)
            self.forecasts.keep(found)
            for job, forecast in found.items():
                self._open.setdefault(job, []).append(forecast)


def measure_accuracy(
    workload: Workload,
    name: str,
    every_ms: int,
    futures: int = FUTURES,
    *,
    controller: Controller | None = None,
    nodes: Sequence[Node] = (),
    until_ms: int | None = None,
    on_progress: OnProgress | None = None,
) -> ForecastAccuracy:
    began = time.process_time()
    controller = controller or make_controller(policy(name))
    simulation = ForecastSimulation(workload, controller, nodes, every_ms, futures, name, until_ms, on_progress)
    simulation.run()
    simulation.close_open_forecasts()
    compared, first = simulation.compared, simulation.first_of_start
    by_job, by_moment = _group(compared, lambda one: one.job), _group(compared, lambda one: one.made_ms)
    errors = _errors(compared)
    waits = sorted(one.started_ms - one.made_ms for one in first if one.started_ms >= 0)
    return ForecastAccuracy(
        trace=workload.name,
        policy=name,
        every=format_duration(every_ms),
        jobs=len(workload.arrivals),
        starts=len(first),
        moments=len(by_moment),
        forecasts=len(compared),
        covered=_percent_covered(compared),
        starts_covered=_percent_covered(first),
        per_job=_mean([group.by_p90 for group in by_job]),
        per_moment=_mean([group.by_p90 for group in by_moment]),
        worst_moment=min((group.by_p90 for group in by_moment), default=0.0),
        median_error_s=_middle(errors) / 1000,
        median_absolute_error_s=_middle(sorted(map(abs, errors))) / 1000,
        median_wait_s=_middle(waits) / 1000,
        missing=simulation.missing,
        seconds=round(time.process_time() - began, 1),
        by_job=by_job,
        by_moment=by_moment,
    )


def _group(compared: Sequence[Comparison], key: Callable[[Comparison], int]) -> list[AccuracyGroup]:
    groups: dict[int, list[Comparison]] = {}
    for one in compared:
        groups.setdefault(key(one), []).append(one)
    found = []
    for _, group in sorted(groups.items()):
        job = group[0].job if len({one.job for one in group}) == 1 else 0
        at_ms = min(one.made_ms for one in group)
        found.append(AccuracyGroup(job, at_ms, len(group), _percent_covered(group), _middle(_errors(group)) / 1000))
    return found


def _errors(compared: Sequence[Comparison]) -> list[int]:
    return sorted(one.started_ms - one.p50_ms for one in compared if one.started_ms >= 0)


def _percent_covered(compared: Sequence[Comparison]) -> float:
    return round(100 * sum(one.covered for one in compared) / max(len(compared), 1), 2)


def _mean(shares: Sequence[float]) -> float:
    return round(sum(shares) / max(len(shares), 1), 2)


def _middle(numbers: Sequence[int]) -> int:
    return numbers[len(numbers) // 2] if numbers else 0
