"""A multifactor queue with many jobs of many projects: the cost of one more job, one end and each query.

Every project has several users and jobs of several sizes; shares are enabled, and each project has a quota. Times are CPU
times of this process, so other work on the machine does not count.
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
_STEPS = 200
_REPEATS = 5


ABOUT = "A multifactor queue with many projects."
OPTIONS = (
    click.option("--jobs", type=int, default=100000, show_default=True, help="Number of jobs."),
    click.option("--projects", type=int, default=1000, show_default=True, help="Number of projects."),
    click.option("--nodes", type=int, default=100, show_default=True, help="Number of nodes."),
)


def measure(given: SimpleNamespace) -> dict[str, Any]:
    gc.set_threshold(50_000, 20, 50)  # as the server runs
    cluster = _FullCluster(given.nodes, given.projects)
    submitted, controller = cluster.submit(given.jobs), cluster.controller
    one_more = [cluster.time_step([cluster.one_more()], 50) for _ in range(_STEPS)]
    ends = [cluster.time_step([cluster.one_end()], 50) for _ in range(_STEPS)]
    last = cluster.last
    rounds = [cluster.time_step([], 60_000) for _ in range(_REPEATS)]
    now_ms = cluster.now_ms
    return {
        "jobs": given.jobs,
        "projects": given.projects,
        "accounts": len(controller.accounts.sharing.rows(now_ms)) if controller.accounts.sharing else 0,
        "submit_us_per_job": round(submitted * 1e6 / given.jobs, 1),
        "one_more_p50_ms": _median(one_more),
        "one_more_p99_ms": _p99(one_more),
        "one_end_p50_ms": _median(ends),
        "one_end_p99_ms": _p99(ends),
        "factors_recomputed_ms": _median(rounds),
        "share_report_ms": _median(_time_query(lambda: msgspec.json.encode(controller.accounts.share_report(now_ms)))),
        "why_ms": _median(_time_query(lambda: why(controller, last, now_ms))),
        "priority_ms": _median(_time_query(lambda: priority_breakdown(controller, last, now_ms))),
    }


class _FullCluster:
    """A full cluster and its pending jobs."""

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

    def time_step(self, facts: Sequence[Fact], later_ms: int) -> float:
        """Seconds of CPU for one step, `later_ms` after the last one."""
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


def _time_query(query: Callable[[], object]) -> list[float]:
    took = []
    for _ in range(_REPEATS):
        began = time.process_time()
        query()
        took.append(time.process_time() - began)
    return took


def _median(took: list[float]) -> float:
    return round(sorted(took)[len(took) // 2] * 1000, 3)


def _p99(took: list[float]) -> float:
    return round(sorted(took)[len(took) * 99 // 100] * 1000, 3)
