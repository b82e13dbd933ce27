"""The cost of a job with many pending ones: the scheduler with one pool, and queues of several depths.

In each round a run ends, jobs start, and a new job arrives, so that the queue keeps its depth.
"""

from __future__ import annotations

import gc
import heapq
import random
import time
from types import SimpleNamespace
from typing import Any

import click

from hodei.control.controller import Controller
from hodei.model.effects import Start
from hodei.model.facts import Fact, JobSubmitted, NodeJoined, RunObserved
from hodei.model.job import Job, JobSpec, TaskSpec
from hodei.model.resources import CPU
from hodei.sim.policies import policy
from hodei.sim.traces.workload import uniform_nodes
from hodei.wiring import make_controller

DEPTHS = (100, 1_000, 10_000, 100_000)
_PROCS = 256
_HOUR_MS = 3_600_000


class _Pool:
    """One pool that is always full, and its runs."""

    def __init__(self, controller: Controller, seed: int) -> None:
        self._controller, self._draw = controller, random.Random(seed)
        self._running: list[tuple[int, str]] = []
        self._last = 0
        self._now_ms = 0
        self._step([NodeJoined(node) for node in uniform_nodes(_PROCS)])

    def submit(self, count: int) -> None:
        self._step([JobSubmitted(self._job()) for _ in range(count)])
        while self._controller.next_wakeup_ms(self._now_ms) == self._now_ms:
            self._step([])

    def next_round(self) -> None:
        """The next run ends, and a new job arrives."""
        self._now_ms, run = heapq.heappop(self._running)
        self._step([RunObserved(run, "succeeded", self._now_ms, 0)])
        self._step([JobSubmitted(self._job())])

    def _job(self) -> Job:
        self._last += 1
        cpus, hours = self._draw.choice((1, 1, 2, 4, 8, 16, 32)), self._draw.choice((0.1, 0.5, 1, 2, 6, 12))
        task = TaskSpec(request={CPU: cpus * 1000})
        spec = JobSpec(
            name=f"job-{self._last}", tasks=(task,), user=f"u{self._last % 50}", estimate_ms=int(hours * _HOUR_MS)
        )
        return Job(self._last, spec, "pending", self._now_ms, self._now_ms, queued_ms=self._now_ms)

    def _step(self, facts: list[Fact]) -> None:
        for act in self._controller.step(self._now_ms, facts).acts:
            if isinstance(act, Start):
                takes_ms = int(act.spec.estimate_ms * self._draw.uniform(0.2, 1))
                heapq.heappush(self._running, (self._now_ms + takes_ms, act.run.id))


def cpu_us_per_job(name: str, depth: int, rounds: int) -> float:
    """Microseconds of CPU for one job from arrival to end, with `depth` pending jobs."""
    pool = _Pool(make_controller(policy(name)), seed=depth)
    pool.submit(depth)
    for _ in range(rounds // 10):
        pool.next_round()
    gc.collect()
    gc.disable()
    began = time.process_time()
    for _ in range(rounds):
        pool.next_round()
    spent = time.process_time() - began
    gc.enable()
    return spent * 1e6 / rounds


def measure(given: SimpleNamespace) -> dict[str, Any]:
    found = {depth: cpu_us_per_job(given.policy, depth, given.rounds) for depth in given.depths}
    return {f"{depth:,} pending, µs of CPU per job": round(spent) for depth, spent in found.items()}


ABOUT = "The cost of a job with many pending ones."
OPTIONS = (
    click.option("--policy", default="easy", help="A policy of `hodei sim policies`.", show_default=True),
    click.option(
        "--depths",
        multiple=True,
        type=int,
        default=DEPTHS,
        metavar="N",
        help="Numbers of pending jobs; may be repeated.",
        show_default=True,
    ),
    click.option("--rounds", type=int, default=2000, help="Jobs per measurement.", show_default=True),
)
