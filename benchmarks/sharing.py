"""Many jobs of many projects in one line by points: what one more job, one end and each question about them cost.

Every project has several users and jobs of several sizes; shares and a quota for each project are on. CPU time of this
process, so that others on the machine do not count.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import click
import msgspec

from hodei.control.controller import Controller, Step
from hodei.control.explain.why import priority_breakdown, why
from hodei.model.config import SchedulingConfig
from hodei.model.facts import Fact, JobSubmitted, NodeJoined, RunObserved
from hodei.model.ids import JobId
from hodei.model.job import Job, JobSpec, TaskSpec
from hodei.model.node import Node
from hodei.model.resources import CPU, MEMORY
from hodei.wiring import make_controller

_CONFIG = {
    "profiles": {"default": {"queue": "multifactor"}},
    "shares": {"enabled": True},
    "quotas": {"*": {"hard": {"cpu": 50}}},
}
_BEGIN_MS = 1_700_000_000_000
_USERS, _SIZES = 7, 3
_TIMES = 200
_QUESTIONS = 5


ABOUT = "A line by points with many projects in it."
OPTIONS = (
    click.option("--jobs", type=int, default=100000),
    click.option("--projects", type=int, default=1000),
    click.option("--nodes", type=int, default=100),
    click.option("--json", is_flag=True),
)


def measure(given: SimpleNamespace) -> dict[str, Any]:
    gc.set_threshold(50_000, 20, 50)  # as the server runs
    line = _Line(given.nodes, given.projects)
    submitted, controller = line.submit(given.jobs), line.controller
    one_more = [line.took([line.one_more()], 50) for _ in range(_TIMES)]
    ends = [line.took([line.one_end()], 50) for _ in range(_TIMES)]
    last = line.last
    rounds = [line.took([], 60_000) for _ in range(_QUESTIONS)]
    now_ms = line.now_ms
    return {
        "jobs": given.jobs,
        "projects": given.projects,
        "accounts": len(controller.accounts.sharing.rows(now_ms)) if controller.accounts.sharing else 0,
        "submit_us_per_job": round(submitted * 1e6 / given.jobs, 1),
        "one_more_p50_ms": _middle(one_more),
        "one_more_p99_ms": _late(one_more),
        "one_end_p50_ms": _middle(ends),
        "one_end_p99_ms": _late(ends),
        "factors_worked_out_anew_ms": _middle(rounds),
        "share_report_ms": _middle(_asked(lambda: msgspec.json.encode(controller.accounts.share_report(now_ms)))),
        "why_ms": _middle(_asked(lambda: why(controller, last, now_ms))),
        "priority_ms": _middle(_asked(lambda: priority_breakdown(controller, last, now_ms))),
    }


class _Line:
    """A cluster that is full, and the jobs that wait for it."""

    def __init__(self, nodes: int, projects: int) -> None:
        self.controller: Controller = make_controller(msgspec.convert(_CONFIG, SchedulingConfig))
        self.now_ms, self.last = _BEGIN_MS, 0
        kinds = projects * _USERS * _SIZES
        self._specs = [_spec(i, projects) for i in range(kinds)]
        self._live: list[JobId] = []
        self.step([NodeJoined(_node(i)) for i in range(nodes)])

    def step(self, facts: Sequence[Fact]) -> Step:
        done = self.controller.step(self.now_ms, facts)
        self._live += [bind.job for bind in done.plan.binds]
        return done

    def submit(self, jobs: int) -> float:
        began = time.process_time()
        while self.last < jobs:
            self.step([self.one_more() for _ in range(min(1000, jobs - self.last))])
        return time.process_time() - began

    def took(self, facts: Sequence[Fact], later_ms: int) -> float:
        """Seconds for one step, so much later."""
        self.now_ms += later_ms
        began = time.process_time()
        self.step(facts)
        return time.process_time() - began

    def one_more(self) -> Fact:
        self.last += 1
        spec = self._specs[self.last % len(self._specs)]
        return JobSubmitted(Job(self.last, spec, "pending", self.now_ms, self.now_ms, queued_ms=self.now_ms))

    def one_end(self) -> Fact:
        (run,) = self.controller.cluster.live_runs(self._live.pop(0))
        return RunObserved(run.id, "succeeded", self.now_ms, 0)


def _spec(i: int, projects: int) -> JobSpec:
    request = {CPU: 1000 * (1 + i % _SIZES), MEMORY: 1 << 30}
    return JobSpec(
        name="job", tasks=(TaskSpec(request=request),), project=f"project-{i % projects}", user=f"user-{i % _USERS}"
    )


def _node(i: int) -> Node:
    return Node(f"node-{i:04}", "bench", capacity={CPU: 16_000, MEMORY: 64 << 30, "pods": 1000})


def _asked(question: Callable[[], object]) -> list[float]:
    took = []
    for _ in range(_QUESTIONS):
        began = time.process_time()
        question()
        took.append(time.process_time() - began)
    return took


def _middle(took: list[float]) -> float:
    return round(sorted(took)[len(took) // 2] * 1000, 3)


def _late(took: list[float]) -> float:
    return round(sorted(took)[len(took) * 99 // 100] * 1000, 3)
