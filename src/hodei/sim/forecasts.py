"""`python -m hodei.sim.forecasts TRACE`: how good are forecasts? A trace is replayed; at intervals the start of every job
that waits is foretold, by the code that a server uses, and graded when the job starts.

The forecasts know of the past and of what users say, never of what the trace will bring.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from hodei.control.ahead import twin
from hodei.control.controller import Controller, Step
from hodei.control.forecasts import FUTURES, Forecasts, Grade
from hodei.model.effects import SaveJob
from hodei.model.errors import HodeiError
from hodei.model.facts import Fact, JobSubmitted
from hodei.model.lifecycle import JOB_ENDED
from hodei.model.node import Node
from hodei.model.quantity import format_duration, parse_duration_ms
from hodei.sim.driver import Simulation
from hodei.sim.policies import policy
from hodei.sim.traces import Workload, open_workload
from hodei.wiring import make_controller


class Graded(Struct):
    """`starts`: jobs that waited long enough to be foretold; `forecasts`: all of theirs, several for most.
    `covered` of the forecasts, `starts_covered` of the first ones of each start, came true by their P90, in percent."""

    trace: str
    policy: str
    every: str
    jobs: int
    starts: int
    forecasts: int
    covered: float
    starts_covered: float
    median_error_s: float
    median_absolute_error_s: float
    median_wait_s: float
    untold: int
    seconds: float


class Watched(Simulation):
    """A simulation in which every `every_ms` the starts of those who wait are foretold."""

    def __init__(
        self,
        workload: Workload,
        controller: Controller,
        nodes: Sequence[Node],
        every_ms: int,
        futures: int,
        policy: str,
    ) -> None:
        super().__init__(workload, controller, nodes, policy=policy)
        self._watching, self._every_ms, self._futures = controller, every_ms, futures
        self._due_ms = -1
        self.forecasts = Forecasts()
        self.grades: list[Grade] = []
        self.firsts: list[Grade] = []
        self.waits_ms: list[int] = []
        self.untold = 0

    def _step(self, now_ms: int, facts: list[Fact]) -> Step:
        if self._due_ms < 0:
            self._due_ms = now_ms + self._every_ms
        elif self._due_ms <= now_ms:
            # Nothing has happened since the last step, so the controller stands as it stood when it was due.
            self._foretell(self._due_ms)
            self._due_ms += ((now_ms - self._due_ms) // self._every_ms + 1) * self._every_ms
        for fact in facts:
            if isinstance(fact, JobSubmitted):
                self.forecasts.newcomers.arrived(fact.job)
        step = super()._step(now_ms, facts)
        for job in dict.fromkeys(bind.job for bind in step.plan.binds):
            kept = self.forecasts.of.get(job, [])
            grades = self.forecasts.started(job, now_ms)
            if grades:
                self.grades += grades
                self.firsts.append(grades[0])
                self.waits_ms.append(now_ms - kept[0].made_ms)
        for save in step.saves:
            if isinstance(save, SaveJob) and save.job.state in JOB_ENDED:
                self.forecasts.ended(save.job)
        return step

    def _foretell(self, at_ms: int) -> None:
        waiting = sum(self._watching.pending().values())
        if waiting:
            found = self.forecasts.foresee(
                twin(self._watching), at_ms, lambda number: random.Random(at_ms * 1000 + number), futures=self._futures
            )
            self.untold += waiting - len(found)
            self.forecasts.keep(found)


def grade(workload: Workload, name: str, every_ms: int, futures: int = FUTURES) -> Graded:
    began = time.process_time()
    simulation = Watched(workload, make_controller(policy(name)), workload.nodes, every_ms, futures, name)
    simulation.run()
    errors = sorted(grade.error_ms for grade in simulation.grades)
    return Graded(
        trace=workload.name,
        policy=name,
        every=format_duration(every_ms),
        jobs=len(workload.arrivals),
        starts=len(simulation.firsts),
        forecasts=len(simulation.grades),
        covered=_share(simulation.grades),
        starts_covered=_share(simulation.firsts),
        median_error_s=_middle(errors) / 1000,
        median_absolute_error_s=_middle(sorted(map(abs, errors))) / 1000,
        median_wait_s=_middle(sorted(simulation.waits_ms)) / 1000,
        untold=simulation.untold,
        seconds=round(time.process_time() - began, 1),
    )


def _share(grades: Sequence[Grade]) -> float:
    return round(100 * sum(grade.covered for grade in grades) / max(len(grades), 1), 2)


def _middle(numbers: Sequence[int]) -> int:
    return numbers[len(numbers) // 2] if numbers else 0


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hodei.sim.forecasts", description=__doc__)
    parser.add_argument("trace", help="a file, or generate:NAME; see: hodei sim traces")
    parser.add_argument("--policy", default="easy", help="the policy to replay it under [default: easy]")
    parser.add_argument("--procs", type=int, help="one pool of so many processors")
    parser.add_argument("--every", default="6h", help="how often to foretell [default: 6h]")
    parser.add_argument("--first", type=int, default=0, help="only so many jobs, from the start of the trace")
    parser.add_argument("--futures", type=int, default=FUTURES, help=f"runs ahead per forecast [default: {FUTURES}]")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    given = parser.parse_args(args)
    try:
        workload = open_workload(given.trace, procs=given.procs)
        if given.first:
            workload = workload.window(0, given.first)
        found = grade(workload, given.policy, max(parse_duration_ms(given.every), 1000), given.futures)
    except HodeiError as error:
        print(
            f"error: {error.message}\n  next: {error.hint}" if error.hint else f"error: {error.message}",
            file=sys.stderr,
        )
        return 2
    if given.json:
        print(msgspec.json.encode(found).decode())
    else:
        print(f"{found.trace} under {found.policy}, forecasts every {found.every}, {found.jobs} jobs")
        print(
            f"  {found.starts} starts were foretold, {found.forecasts} forecasts; none could be made {found.untold} times"
        )
        print(f"  {found.covered} % of all forecasts, {found.starts_covered} % of the first ones: start by P90")
        print(f"  median error of P50 {found.median_error_s} s (absolute {found.median_absolute_error_s} s), ", end="")
        print(f"median wait after the first forecast {found.median_wait_s} s; took {found.seconds} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
