"""`generate:NAME?jobs=10000&seed=1`: invented workloads, always the same for the same words.

| name | what |
|---|---|
| lublin | rigid jobs of a parallel machine, after Lublin and Feitelson |
| ci | pushes that start many small jobs at once |
| gpu | training jobs, single and in gangs |
| mixed | all three on one cluster of which every fourth node has GPUs |
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import exp, lgamma, log, log2
from random import Random

from msgspec import Struct

from hodei.model.errors import InvalidInput
from hodei.model.job import JobSpec, TaskSpec
from hodei.model.node import Node
from hodei.model.resources import CPU, GPU, MEMORY, Resources
from hodei.sim.traces.source import (
    BUCKETS,
    Drawn,
    Model,
    Popularity,
    Reading,
    arrivals,
    asked_ms,
    pace_for,
    with_deadlines,
)
from hodei.sim.traces.workload import BACKEND, WHOLE, Estimates, Lazy, Shapes, Workload, machine

# ---------------------------------------------------------------------------------------------- lublin
# The model of rigid jobs by Lublin and Feitelson (1999; J. Parallel Distrib. Comput. 63(11), 2003), published
# parameters.


_LONGEST_RUN = 12.0  # logarithms of seconds: not quite two days, and five
_LONGEST_GAP = 13.0
_DAY_BEGINS = 11


class Parameters(Struct, frozen=True):
    """`below_top` and `middle`: how far the largest job is below the machine, and the bend below that, in doublings."""

    serial: float
    power_of_two: float
    low: float
    below_top: float
    middle: float
    small: float
    run: tuple[float, float, float, float]
    mix: tuple[float, float]
    gap: tuple[float, float]
    rush_to_day: float
    day: tuple[float, float]


ALL = Parameters(0.244, 0.576, 0.8, 0, 2.5, 0.86, (4.2, 0.94, 312, 0.03), (-0.0054, 0.78),
                 (10.2303, 0.4871), 1.0225, (8.1737, 3.9631))  # fmt: skip
BATCH = Parameters(0.2927, 0.6686, 1.2, 0, 2, 0.875, (6.57, 0.823, 639.1, 0.0156), (-0.003, 0.6986),
                   (6.0415, 0.8531), 1.0519, (6.1271, 5.2740))  # fmt: skip
INTERACTIVE = Parameters(0.1541, 0.625, 1, 1.5, 2.5, 0.705, (3.8351, 0.6605, 7.073, 0.6856), (-0.0118, 0.9156),
                         (6.5510, 0.6621), 0.9797, (8.9186, 3.6680))  # fmt: skip


class Lublin:
    def __init__(
        self, name: str, parameters: Parameters, largest: int, users: int, shapes: Shapes, estimates: Estimates
    ) -> None:
        self.name = name
        self._of = parameters
        self._largest = largest
        self._top = max(log2(largest) - parameters.below_top, parameters.low)
        self._bend = max(self._top - parameters.middle, parameters.low)
        self._users = Popularity([f"u{number}" for number in range(1, users + 1)])
        self._shapes = shapes
        self._estimates = estimates
        self.day = _day(*parameters.day)

    def gap_s(self, rng: Random) -> float:
        alpha, beta = self._of.gap
        while (gap := rng.gammavariate(alpha * self._of.rush_to_day, beta)) > _LONGEST_GAP:
            pass
        return exp(gap)

    def batch(self, rng: Random) -> list[Drawn]:
        size = self.size(rng)
        run_ms = self.run_s(rng, size) * 1000
        estimate_ms = asked_ms(rng, run_ms)
        if self._estimates == "actual":
            estimate_ms = run_ms
        user = self._users.draw(rng)
        spec = self._shapes.spec(size, name=self.name, user=user, project="default", estimate_ms=estimate_ms)
        return [(spec, run_ms)]

    def size(self, rng: Random) -> int:
        kind = rng.random()
        if kind <= self._of.serial:
            return 1
        low, high = (self._of.low, self._bend) if rng.random() <= self._of.small else (self._bend, self._top)
        doublings = rng.uniform(low, high)
        if kind <= self._of.serial + self._of.power_of_two:
            doublings = int(doublings + 0.5)
        return min(self._largest, int(2**doublings + 0.5))

    def run_s(self, rng: Random, size: int) -> int:
        slope, base = self._of.mix
        short, (a1, b1, a2, b2) = slope * size + base, self._of.run
        while True:
            found = rng.gammavariate(a1, b1) if rng.random() <= short else rng.gammavariate(a2, b2)
            if found <= _LONGEST_RUN:
                return max(1, int(exp(found)))


def _day(alpha: float, beta: float) -> list[float]:
    """How many jobs each half hour sees: a gamma over the day, laid around midnight; the mean is 1."""
    weights = [0.0] * BUCKETS
    for bucket in range(_DAY_BEGINS, BUCKETS + _DAY_BEGINS):
        share = gamma_cdf(bucket + 0.5, alpha, beta) - gamma_cdf(bucket - 0.5, alpha, beta)
        weights[(bucket - 1) % BUCKETS] = share
    mean = sum(weights) / BUCKETS
    return [weight / mean for weight in weights]


def gamma_cdf(x: float, alpha: float, beta: float) -> float:
    """By its series, which is exact enough where x is at most a few times alpha * beta, as it is here."""
    x /= beta
    total = term = 1 / alpha
    divisor = alpha
    while term > total * 1e-15:
        divisor += 1
        term *= x / divisor
        total += term
    return total * exp(alpha * log(x) - x - lgamma(alpha))


# ----------------------------------------------------------------------------------------------------


# ---------------------------------------------------------------------------------------------- bursts
# Generated load of teams at work: CI bursts (every push starts many small jobs) and GPU training in gangs.


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


# ----------------------------------------------------------------------------------------------------

NAMES = ("lublin", "ci", "gpu", "mixed")
_GIB = 2**30
# The model was fitted to machines of up to some hundred processors; on larger ones jobs do not grow without end.
_LUBLIN_LARGEST = 1024
_USUAL_LOAD = 0.7
# GPU jobs take their part of the cores too.
_MIXED_LOADS = (0.25, 0.25, 0.7)
_ASKED = "user estimates are drawn: accuracy spread evenly, rounded up to figures that people write"


def generate(name: str, how: Reading) -> Workload:
    if name not in NAMES:
        raise InvalidInput(
            f"there is no generator {name!r}", hint=f"there are {', '.join(NAMES)}: generate:lublin?jobs=1000&seed=1"
        )
    options = how.options
    jobs, seed = options.whole("jobs", 10_000, most=1_000_000_000), options.whole("seed", 1, least=0)
    users = options.whole("users", 50, most=100_000)
    load = options.number("load", 0.0, most=100.0)
    in_haste = options.whole("deadline_percent", 0, least=0, most=100)
    if name == "lublin":
        parts, nodes, notes = _lublin(how, users, load, seed)
    elif name == "ci":
        parts, nodes, notes = _ci(how, users, load, seed)
    elif name == "gpu":
        parts, nodes, notes = _gpu(how, users, load, seed)
    else:
        parts, nodes, notes = _mixed(how, users, load, seed)
    if in_haste:
        notes = [*notes, f"{in_haste} % of the jobs have a deadline, 1.2 to 5 times their estimate after submission"]
    return Workload(
        f"{name}-{jobs}-seed{seed}",
        Lazy(jobs, lambda: with_deadlines(arrivals(parts, seed), in_haste, seed)),
        nodes,
        [f"generated, seed {seed}", *notes],
    )


Made = tuple[list[tuple[Model, float]], list[Node], list[str]]


def _paced(models: Sequence[Model], nodes: list[Node], loads: Sequence[float], seed: int) -> list[tuple[Model, float]]:
    return [(model, pace_for(model, nodes, load, seed)) for model, load in zip(models, loads, strict=True)]


def _lublin(how: Reading, users: int, load: float, seed: int) -> Made:
    """One pool of `procs`, or `nodes` of `cpus` each; `types=two` keeps batch and interactive jobs apart."""
    options = how.options
    types = options.choice("types", ("one", "two"))
    count = options.whole("nodes", 0, most=1_000_000)
    cpus = options.whole("cpus", how.per_node or 64, most=100_000) if count else how.per_node
    procs = options.whole("procs", how.procs or 256, most=10_000_000)
    if count:
        procs = count * (cpus or 1)
    largest = min(procs, options.whole("largest", min(procs, _LUBLIN_LARGEST), most=10_000_000))
    shapes = Shapes(per_node=cpus)
    kinds = [("job", ALL)] if types == "one" else [("batch", BATCH), ("interactive", INTERACTIVE)]
    models = [Lublin(kind, of, largest, users, shapes, how.estimates) for kind, of in kinds]
    nodes = machine(procs, per_node=cpus)
    notes = [f"Lublin-Feitelson model, jobs of up to {largest} of {procs} processors", _ASKED]
    if not load:
        return [(model, 1.0) for model in models], nodes, [*notes, "arrivals at the published rate"]
    # One pace for all, so that the types stay as frequent among each other as they are.
    pace = sum(pace_for(model, nodes, load, seed) for model in models)
    return [(model, pace) for model in models], nodes, [*notes, _about(load)]


def _ci(how: Reading, users: int, load: float, seed: int) -> Made:
    cpus = how.options.whole("cpus", how.per_node or 16, most=100_000)
    count = how.options.whole("nodes", max(1, (how.procs or 320) // cpus), most=1_000_000)
    nodes = machine(count * cpus, per_node=cpus, more={MEMORY: 4 * _GIB})
    notes = ["pushes in office hours (UTC), a dozen jobs each; a job's timeout is its estimate", _about(load)]
    return _paced([CiBursts(users, cpus, how.estimates)], nodes, [load or _USUAL_LOAD], seed), nodes, notes


def _gpu(how: Reading, users: int, load: float, seed: int) -> Made:
    gpus = how.options.whole("gpus", how.per_node or 8, most=64)
    count = how.options.whole("nodes", max(1, (how.procs or 400) // gpus), most=1_000_000)
    shared = how.options.whole("shared_percent", 0, least=0, most=100)
    nodes = machine(count * gpus, GPU, gpus, {CPU: 12 * WHOLE, MEMORY: 96 * _GIB})
    notes = ["sizes and run times like those of the Philly trace", _ASKED, _about(load)]
    model = GpuGangs(users, gpus, count * gpus, shared, how.estimates)
    return _paced([model], nodes, [load or _USUAL_LOAD], seed), nodes, notes


def _mixed(how: Reading, users: int, load: float, seed: int) -> Made:
    cpus = how.options.whole("cpus", how.per_node or 64, least=16, most=100_000)
    count = how.options.whole("nodes", max(4, (how.procs or 1280) // cpus), least=4, most=1_000_000)
    width = len(str(count - 1))
    plain = {CPU: cpus * WHOLE, MEMORY: cpus * 8 * _GIB}
    nodes = [
        Node(f"node-{number:0{width}}", BACKEND, BACKEND, plain | ({GPU: 8 * WHOLE} if number % 4 == 0 else {}))
        for number in range(count)
    ]
    largest = min(count * cpus // 4, _LUBLIN_LARGEST)
    # A GPU brings eight cores with it: gangs of as many GPUs as fit the cores of a node.
    per_node = min(8, cpus // 8)
    models: list[Model] = [
        Lublin("job", ALL, largest, users, Shapes(per_node=cpus), how.estimates),
        CiBursts(users, cpus, how.estimates),
        GpuGangs(users, per_node, max(1, (count + 3) // 4 * per_node // 2), 0, how.estimates),
    ]
    share = (load or _USUAL_LOAD) / _USUAL_LOAD
    notes = ["Lublin jobs, CI bursts and GPU gangs; every fourth node has 8 GPUs", _ASKED, _about(load)]
    return _paced(models, nodes, [part * share for part in _MIXED_LOADS], seed), nodes, notes


def _about(load: float) -> str:
    return f"arrivals ask for about {load or _USUAL_LOAD:.0%} of the scarcest resource, by a trial of 10,000 jobs"
