"""Generated load of teams at work: CI bursts (every push starts many small jobs) and GPU training in gangs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import log
from random import Random

from hodei.model.job import JobSpec, TaskSpec
from hodei.model.resources import CPU, GPU, MEMORY, Resources
from hodei.sim.traces.stream import Drawn, Popularity, asked_ms
from hodei.sim.traces.workload import WHOLE, Estimates

_GIB = 2**30
_HOURS = (2, 2, 2, 2, 2, 3, 4, 6, 8, 10, 10, 9, 8, 9, 10, 10, 10, 9, 7, 6, 5, 4, 3, 2)
_MOST_SPECS = 65_536
OFFICE_DAY = [hour * len(_HOURS) / sum(_HOURS) for hour in _HOURS for _ in range(2)]
# Cores and Gi of CI jobs with how often they come, roughly as in kubernetes/test-infra.
_CI_SHAPES = (((1, 2), 10), ((2, 4), 25), ((4, 6), 40), ((6, 10), 10), ((7, 9), 15))
_CI_PUSH = 12  # jobs of a push, on average
_CI_TIMEOUTS_S = (1800, 3600, 5400, 7200, 10_800)
# GPUs of a training job with how often they come, and the run times' logarithm, measured on the Philly trace of 2017.
_GANGS = ((1, 93166), (2, 2210), (4, 2274), (8, 1998), (16, 242), (32, 81), (64, 29))
_TRAINING = (log(1144), 2.16)
_LONGEST_TRAINING_S = 14 * 86_400


def _cumulated(pairs: Sequence[tuple[object, int]]) -> list[int]:
    return list(accumulate(weight for _, weight in pairs))


class _Specs:
    """One spec for equal jobs, as long as there are not too many of them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], JobSpec] = {}

    def of(self, tasks: tuple[TaskSpec, ...], name: str, user: str, project: str, estimate_ms: int) -> JobSpec:
        key = (id(tasks), name, user, project, estimate_ms)
        if key not in self._kept:
            if len(self._kept) >= _MOST_SPECS:
                self._kept.clear()
            self._kept[key] = JobSpec(name=name, tasks=tasks, project=project, user=user, estimate_ms=estimate_ms)
        return self._kept[key]


class CiBursts:
    """Pushes to repositories in office hours; each starts about a dozen jobs at once, which take minutes."""

    name = "ci"
    day = OFFICE_DAY

    def __init__(self, users: int, largest: int, estimates: Estimates) -> None:
        shapes = [pair for pair in _CI_SHAPES if pair[0][0] <= largest] or [((1, 2), 1)]
        self._tasks = [(TaskSpec(request={CPU: cores * WHOLE, MEMORY: gib * _GIB}),) for (cores, gib), _ in shapes]
        self._frequent = _cumulated(shapes)
        self._users = Popularity([f"u{number}" for number in range(1, users + 1)])
        self._repos = Popularity([f"repo{number}" for number in range(1, 31)])
        self._estimates = estimates
        self._specs = _Specs()

    def gap_s(self, rng: Random) -> float:
        return rng.expovariate(1 / 600)

    def batch(self, rng: Random) -> list[Drawn]:
        user, repo = self._users.draw(rng), self._repos.draw(rng)
        out = []
        for number in range(1 + int(rng.expovariate(1 / (_CI_PUSH - 0.5)))):
            tasks = rng.choices(self._tasks, cum_weights=self._frequent)[0]
            timeout_ms = rng.choice(_CI_TIMEOUTS_S) * 1000
            run_ms = min(timeout_ms, 1000 * int(10 + rng.lognormvariate(log(480), 0.9)))
            estimate_ms = timeout_ms if self._estimates == "user" else run_ms
            out.append((self._specs.of(tasks, f"{repo}-{number}", user, repo, estimate_ms), run_ms))
        return out


class GpuGangs:
    """Training jobs: most ask for one GPU, or for a part of one; some for many, in members of at most a node's."""

    name = "gpu"
    day = OFFICE_DAY

    def __init__(self, users: int, per_node: int, largest: int, shared_percent: int, estimates: Estimates) -> None:
        sizes = [pair for pair in _GANGS if pair[0] <= largest]
        self._sizes = [gpus for gpus, _ in sizes]
        self._frequent = _cumulated(sizes)
        self._shared_percent = shared_percent
        self._per_node = per_node
        self._tasks: dict[int, tuple[TaskSpec, ...]] = {}
        self._users = Popularity([f"u{number}" for number in range(1, users + 1)])
        self._teams = max(1, users // 5)
        self._estimates = estimates
        self._specs = _Specs()

    def gap_s(self, rng: Random) -> float:
        return rng.expovariate(1 / 120)

    def batch(self, rng: Random) -> list[Drawn]:
        milli = rng.choices(self._sizes, cum_weights=self._frequent)[0] * WHOLE
        if milli == WHOLE and rng.randrange(100) < self._shared_percent:
            milli = rng.choice((250, 500))
        while (run_s := rng.lognormvariate(*_TRAINING)) > _LONGEST_TRAINING_S:
            pass
        run_ms = 1000 * max(1, int(run_s))
        estimate_ms = asked_ms(rng, run_ms)
        if self._estimates == "actual":
            estimate_ms = run_ms
        user = self._users.draw(rng)
        team = f"team{int(user[1:]) % self._teams + 1}"
        return [(self._specs.of(self._tasks_of(milli), "train", user, team, estimate_ms), run_ms)]

    def _tasks_of(self, milli: int) -> tuple[TaskSpec, ...]:
        if milli not in self._tasks:
            most = self._per_node * WHOLE
            full, rest = divmod(milli, most)
            whole = (TaskSpec(count=full, request=gpu_request(most)),) if full else ()
            part = (TaskSpec(name="rest" if full else "main", request=gpu_request(rest)),) if rest else ()
            self._tasks[milli] = whole + part
        return self._tasks[milli]


def gpu_request(milli: int) -> Resources:
    """Eight cores and 64Gi go with a GPU, and as much less with a part of it."""
    return {CPU: milli * 8, MEMORY: milli * 64 * _GIB // WHOLE, GPU: milli}
