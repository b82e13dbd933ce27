"""How good are forecasts? A trace is replayed; at intervals the start of every job that waits is forecast, by the code that
a server uses, and compared with the start that it gets. `commands.forecasts` is its terminal.

The forecasts know of the past and of what users say, never of what the trace will bring.
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
from hodei.sim.driver import Simulation, Tell
from hodei.sim.policies import policy
from hodei.sim.traces import Workload
from hodei.wiring import make_controller


class Told(Struct, frozen=True):
    """One forecast and what came of it. `started_ms` is -1 for a job that had not started when the replay was stopped."""

    job: JobId
    made_ms: int
    p50_ms: int
    p90_ms: int
    started_ms: int

    @property
    def covered(self) -> bool:
        return 0 <= self.started_ms <= self.p90_ms


class Group(Struct, frozen=True):
    """The forecasts of one job, or those made at one moment. `at_ms` is when the first was made; `by_p90` in percent."""

    job: JobId
    at_ms: int
    forecasts: int
    by_p90: float
    median_error_s: float


class Graded(Struct):
    """How the forecasts of one replay came out. `starts`: jobs that waited long enough to get a forecast; `forecasts`: all of
    theirs, several for most. Shares are in percent, of forecasts whose job started by their P90: `covered` of all,
    `starts_covered` of the first one of each start, `per_job` the mean over jobs and `per_moment` over the moments at which
    forecasts were made, so that neither a job that waits long nor a moment with a long queue counts more than others."""

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
    untold: int
    seconds: float
    by_job: list[Group] = []
    by_moment: list[Group] = []


class Watched(Simulation):
    """A simulation in which every `every_ms` the starts of the jobs that wait are forecast."""

    def __init__(
        self,
        workload: Workload,
        controller: Controller,
        nodes: Sequence[Node],
        every_ms: int,
        futures: int,
        policy: str,
        until_ms: int | None = None,
        tell: Tell | None = None,
    ) -> None:
        super().__init__(workload, controller, nodes, policy=policy, until_ms=until_ms, tell=tell)
        self._watching, self._every_ms, self._futures = controller, every_ms, futures
        self._due_ms = -1
        self._last_ms = 0
        # A server keeps some forecasts of each job to learn from; here all of them are graded.
        self._open: dict[JobId, list[Forecast]] = {}
        self.forecasts = Forecasts()
        self.told: list[Told] = []
        self.firsts: list[Told] = []
        self.untold = 0

    def settle(self) -> None:
        """After the run: a job that still waits although its P90 has passed was not forecast well. What may still come true
        is left out."""
        for job, kept in self._open.items():
            missed = [one for one in kept if one.p90_ms < self._last_ms]
            self._grade(job, missed, -1, first=bool(missed) and missed[0] is kept[0])
        self._open.clear()

    def _step(self, now_ms: int, facts: list[Fact]) -> Step:
        self._last_ms = now_ms
        if self._due_ms < 0:
            self._due_ms = now_ms + self._every_ms
        while self._due_ms < now_ms:
            # Nothing has happened since the last step, so the controller stands as it stood when it was due. What is due
            # right now comes after all that happens now.
            self._forecast(self._due_ms)
            self._due_ms += self._every_ms
        for fact in facts:
            if isinstance(fact, JobSubmitted):
                self.forecasts.arrivals.arrived(fact.job)
        step = super()._step(now_ms, facts)
        for job in dict.fromkeys(bind.job for bind in step.plan.binds):
            self.forecasts.started(job, now_ms)
            self._grade(job, self._open.pop(job, []), now_ms, first=True)
        for save in step.saves:
            if isinstance(save, SaveJob) and save.job.state in JOB_ENDED:
                self.forecasts.ended(save.job)
                self._open.pop(save.job.id, None)
        return step

    def _grade(self, job: JobId, kept: Iterable[Forecast], at_ms: int, *, first: bool) -> None:
        found = [Told(job, one.made_ms, one.p50_ms, one.p90_ms, at_ms) for one in kept]
        self.told += found
        self.firsts += found[:1] if first else []

    def _forecast(self, at_ms: int) -> None:
        waiting = sum(self._watching.pending().values())
        if waiting:
            found = self.forecasts.foresee(
                clone_controller(self._watching),
                at_ms,
                lambda number: random.Random(at_ms * 1000 + number),
                futures=self._futures,
            )
            self.untold += waiting - len(found)
            self.forecasts.keep(found)
            for job, forecast in found.items():
                self._open.setdefault(job, []).append(forecast)


def grade(
    workload: Workload,
    name: str,
    every_ms: int,
    futures: int = FUTURES,
    *,
    controller: Controller | None = None,
    nodes: Sequence[Node] = (),
    until_ms: int | None = None,
    tell: Tell | None = None,
) -> Graded:
    began = time.process_time()
    controller = controller or make_controller(policy(name))
    simulation = Watched(workload, controller, nodes, every_ms, futures, name, until_ms, tell)
    simulation.run()
    simulation.settle()
    told = simulation.told
    by_job, by_moment = _grouped(told, lambda one: one.job), _grouped(told, lambda one: one.made_ms)
    errors = sorted(one.started_ms - one.p50_ms for one in told if one.started_ms >= 0)
    waits = sorted(one.started_ms - one.made_ms for one in simulation.firsts if one.started_ms >= 0)
    return Graded(
        trace=workload.name,
        policy=name,
        every=format_duration(every_ms),
        jobs=len(workload.arrivals),
        starts=len(simulation.firsts),
        moments=len(by_moment),
        forecasts=len(told),
        covered=_share(told),
        starts_covered=_share(simulation.firsts),
        per_job=_mean([group.by_p90 for group in by_job]),
        per_moment=_mean([group.by_p90 for group in by_moment]),
        worst_moment=min((group.by_p90 for group in by_moment), default=0.0),
        median_error_s=_middle(errors) / 1000,
        median_absolute_error_s=_middle(sorted(map(abs, errors))) / 1000,
        median_wait_s=_middle(waits) / 1000,
        untold=simulation.untold,
        seconds=round(time.process_time() - began, 1),
        by_job=by_job,
        by_moment=by_moment,
    )


def _grouped(told: Sequence[Told], key: Callable[[Told], int]) -> list[Group]:
    groups: dict[int, list[Told]] = {}
    for one in told:
        groups.setdefault(key(one), []).append(one)
    found = []
    for name in sorted(groups):
        of = groups[name]
        errors = sorted(one.started_ms - one.p50_ms for one in of if one.started_ms >= 0)
        job = of[0].job if len({one.job for one in of}) == 1 else 0
        at_ms = min(one.made_ms for one in of)
        found.append(Group(job, at_ms, len(of), _share(of), _middle(errors) / 1000))
    return found


def _share(told: Sequence[Told]) -> float:
    return round(100 * sum(one.covered for one in told) / max(len(told), 1), 2)


def _mean(shares: Sequence[float]) -> float:
    return round(sum(shares) / max(len(shares), 1), 2)


def _middle(numbers: Sequence[int]) -> int:
    return numbers[len(numbers) // 2] if numbers else 0
