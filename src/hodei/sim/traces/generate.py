"""`generate:NAME?jobs=10000&seed=1`: generated workloads, reproducible from their options.

| name | workload |
|---|---|
| lublin | rigid jobs of a parallel machine, after Lublin and Feitelson |
| ci | pushes that start many small jobs at once |
| gpu | training jobs, single and in gangs |
| mixed | all three on one cluster in which every fourth node has GPUs |
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import accumulate, count
from math import exp, lgamma, log, log2
from random import Random
from typing import Protocol

from msgspec import Struct, structs

from hodei.model.errors import InvalidInput
from hodei.model.job import JobSpec, TaskSpec
from hodei.model.node import Node
from hodei.model.resources import CPU, GPU, MEMORY, Resources
from hodei.sim.traces.workload import (
    BACKEND,
    WHOLE,
    Arrival,
    Estimates,
    JobSizes,
    LazyArrivals,
    ReadSettings,
    SpecCache,
    Workload,
    uniform_nodes,
)

_GIB = 2**30

BUCKETS = 48
BUCKET_S = 86_400 // BUCKETS
_TRIAL_JOBS = 10_000
# Requested times in seconds: round figures from five minutes to two weeks.
_ROUND_TIMES_S = (300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 28_800, 43_200, 64_800, 86_400, 129_600, 172_800, 259_200,
                   432_000, 604_800, 1_209_600)  # fmt: skip
_LEAST_ACCURACY = 0.05

# A job and its run time in milliseconds.
Drawn = tuple[JobSpec, int]


class Model(Protocol):
    """`day`: weights of the 48 half hours of a day, with a mean of 1. `gap_s`: seconds to the next batch at the mean rate. The
    jobs of a `batch` arrive together."""

    @property
    def name(self) -> str: ...

    @property
    def day(self) -> Sequence[float]: ...

    def gap_s(self, rng: Random) -> float: ...

    def batch(self, rng: Random) -> list[Drawn]: ...


def generate_arrivals(models: Sequence[tuple[Model, float]], seed: int) -> Iterator[Arrival]:
    """The endless arrivals of all models, in order; the gaps of each model are multiplied by its factor."""
    streams = [
        _stream(model, Random(f"{seed}/{model.name}"), factor, place) for place, (model, factor) in enumerate(models)
    ]
    # Simultaneous arrivals are ordered by the place of their model: specs cannot be compared.
    for id, (at_ms, _, (spec, run_ms)) in zip(count(1), merge(*streams, key=lambda entry: entry[:2]), strict=False):
        yield Arrival(at_ms, id, spec, run_ms)


def with_deadlines(found: Iterator[Arrival], percent: int, seed: int) -> Iterator[Arrival]:
    """Gives `percent` of the jobs a deadline, 1.2 to 5 times their estimate after submission."""
    if not percent:
        yield from found
        return
    rng = Random(f"{seed}/deadlines")
    for arrival in found:
        has_deadline, factor_percent = rng.randrange(100) < percent, rng.randint(120, 500)
        if has_deadline:
            deadline_ms = arrival.at_ms + arrival.spec.estimate_ms * factor_percent // 100
            arrival = structs.replace(arrival, spec=structs.replace(arrival.spec, deadline_ms=deadline_ms))
        yield arrival


def _stream(model: Model, rng: Random, factor: float, place: int) -> Iterator[tuple[int, int, Drawn]]:
    """A gap consumes the weights of the half hours that pass, so busy hours have more jobs."""
    passed, left = 0, 0.0
    while True:
        left += model.gap_s(rng) * factor / BUCKET_S
        while left > model.day[passed % BUCKETS]:
            left -= model.day[passed % BUCKETS]
            passed += 1
        at_ms = round(1000 * BUCKET_S * (passed + left / model.day[passed % BUCKETS]))
        for drawn in model.batch(rng):
            yield at_ms, place, drawn


def gap_factor(model: Model, nodes: Sequence[Node], load: float, seed: int) -> float:
    """The factor for gaps at which the model requests about `load` of the scarcest resource, found by a trial."""
    capacity: dict[str, int] = {}
    for node in nodes:
        for resource, amount in node.capacity.items():
            capacity[resource] = capacity.get(resource, 0) + amount
    rng = Random(f"{seed}/{model.name}/trial")
    requested, gaps_s, jobs = dict.fromkeys(capacity, 0), 0.0, 0
    while jobs < _TRIAL_JOBS:
        gaps_s += model.gap_s(rng)
        for spec, run_ms in model.batch(rng):
            jobs += 1
            for task in spec.tasks:
                for resource, amount in task.request.items():
                    requested[resource] = requested.get(resource, 0) + amount * task.count * run_ms
    needed_ms = max(amount / capacity[resource] for resource, amount in requested.items() if capacity.get(resource))
    return needed_ms / (1000 * gaps_s * load)


class Popularity:
    """Draws names with a Zipf distribution: the n-th is drawn 1/n times as often as the first."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._weights = list(accumulate(1 / place for place in range(1, len(names) + 1)))

    def draw(self, rng: Random) -> str:
        return self._names[bisect(self._weights, rng.random() * self._weights[-1])]


def draw_requested_ms(rng: Random, run_ms: int) -> int:
    """The time that a user requests: accuracy is spread evenly, as in the logs of the archive, and rounded up."""
    wanted_s = run_ms / 1000 / (1 - rng.random() * (1 - _LEAST_ACCURACY))
    return next(
        (figure * 1000 for figure in _ROUND_TIMES_S if figure >= wanted_s), max(run_ms, _ROUND_TIMES_S[-1] * 1000)
    )


def _user_names(users: int) -> Popularity:
    return Popularity([f"u{number}" for number in range(1, users + 1)])


# Lublin and Feitelson (1999; J. Parallel Distrib. Comput. 63(11), 2003), with the published parameters.

_LONGEST_RUN = 12.0  # logarithms of seconds: almost two days, and five
_LONGEST_GAP = 13.0
_FIRST_BUCKET = 11


class Parameters(Struct, frozen=True):
    """`below_top`: how far the largest job is below the machine; `middle`: how far the bend is below that; in powers of two."""

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
        self, name: str, parameters: Parameters, largest: int, users: int, sizes: JobSizes, estimates: Estimates
    ) -> None:
        self.name = name
        self._parameters = parameters
        self._largest = largest
        self._top = max(log2(largest) - parameters.below_top, parameters.low)
        self._bend = max(self._top - parameters.middle, parameters.low)
        self._users = _user_names(users)
        self._sizes, self._specs = sizes, SpecCache()
        self._estimates = estimates
        self.day = _day(*parameters.day)

    def gap_s(self, rng: Random) -> float:
        alpha, beta = self._parameters.gap
        while (gap := rng.gammavariate(alpha * self._parameters.rush_to_day, beta)) > _LONGEST_GAP:
            pass
        return exp(gap)

    def batch(self, rng: Random) -> list[Drawn]:
        size = self.size(rng)
        run_ms = self.run_s(rng, size) * 1000
        requested_ms = draw_requested_ms(rng, run_ms)
        estimate_ms = run_ms if self._estimates == "actual" else requested_ms
        user, tasks = self._users.draw(rng), self._sizes.tasks(size)
        return [
            (self._specs.spec(tasks, name=self.name, user=user, project="default", estimate_ms=estimate_ms), run_ms)
        ]

    def size(self, rng: Random) -> int:
        kind = rng.random()
        if kind <= self._parameters.serial:
            return 1
        low, high = (
            (self._parameters.low, self._bend) if rng.random() <= self._parameters.small else (self._bend, self._top)
        )
        exponent = rng.uniform(low, high)
        if kind <= self._parameters.serial + self._parameters.power_of_two:
            exponent = int(exponent + 0.5)
        return min(self._largest, int(2**exponent + 0.5))

    def run_s(self, rng: Random, size: int) -> int:
        slope, base = self._parameters.mix
        short, (a1, b1, a2, b2) = slope * size + base, self._parameters.run
        while True:
            found = rng.gammavariate(a1, b1) if rng.random() <= short else rng.gammavariate(a2, b2)
            if found <= _LONGEST_RUN:
                return max(1, int(exp(found)))


def _day(alpha: float, beta: float) -> list[float]:
    """The weight of each half hour of a day: a gamma distribution that wraps around midnight; the mean is 1."""
    weights = [0.0] * BUCKETS
    for bucket in range(_FIRST_BUCKET, BUCKETS + _FIRST_BUCKET):
        share = gamma_cdf(bucket + 0.5, alpha, beta) - gamma_cdf(bucket - 0.5, alpha, beta)
        weights[(bucket - 1) % BUCKETS] = share
    mean = sum(weights) / BUCKETS
    return [weight / mean for weight in weights]


def gamma_cdf(x: float, alpha: float, beta: float) -> float:
    """By its series, which is accurate while x is at most a few times alpha * beta, as here."""
    x /= beta
    total = term = 1 / alpha
    divisor = alpha
    while term > total * 1e-15:
        divisor += 1
        term *= x / divisor
        total += term
    return total * exp(alpha * log(x) - x - lgamma(alpha))


# Pushes by hour of the day: few at night, most between 9 and 18 UTC.
OFFICE_HOURS = (2, 2, 2, 2, 2, 3, 4, 6, 8, 10, 10, 9, 8, 9, 10, 10, 10, 9, 7, 6, 5, 4, 3, 2)
OFFICE_DAY = [hour * len(OFFICE_HOURS) / sum(OFFICE_HOURS) for hour in OFFICE_HOURS for _ in range(2)]
# (cores, Gi) of CI jobs and their frequency, roughly as in kubernetes/test-infra.
_CI_SHAPES = (((1, 2), 10), ((2, 4), 25), ((4, 6), 40), ((6, 10), 10), ((7, 9), 15))
_CI_JOBS_PER_PUSH = 12  # on average
_CI_TIMEOUTS_S = (1800, 3600, 5400, 7200, 10_800)
# GPUs of training jobs and their frequency, and the log-normal run times, measured on the Philly trace of 2017.
_GANG_SIZES = ((1, 93166), (2, 2210), (4, 2274), (8, 1998), (16, 242), (32, 81), (64, 29))
_TRAINING = (log(1144), 2.16)
_LONGEST_TRAINING_S = 14 * 86_400


def _cumulative_weights(pairs: Sequence[tuple[object, int]]) -> list[int]:
    return list(accumulate(weight for _, weight in pairs))


class CiBursts:
    """Pushes to repositories in office hours; each starts about a dozen jobs of some minutes at once."""

    name = "ci"
    day = OFFICE_DAY

    def __init__(self, users: int, largest: int, estimates: Estimates) -> None:
        shapes = [pair for pair in _CI_SHAPES if pair[0][0] <= largest] or [((1, 2), 1)]
        self._tasks = [(TaskSpec(request={CPU: cores * WHOLE, MEMORY: gib * _GIB}),) for (cores, gib), _ in shapes]
        self._weights = _cumulative_weights(shapes)
        self._users = _user_names(users)
        self._repos = Popularity([f"repo{number}" for number in range(1, 31)])
        self._estimates = estimates
        self._specs = SpecCache()

    def gap_s(self, rng: Random) -> float:
        return rng.expovariate(1 / 600)

    def batch(self, rng: Random) -> list[Drawn]:
        user, repo = self._users.draw(rng), self._repos.draw(rng)
        out = []
        for number in range(1 + int(rng.expovariate(1 / (_CI_JOBS_PER_PUSH - 0.5)))):
            tasks = rng.choices(self._tasks, cum_weights=self._weights)[0]
            timeout_ms = rng.choice(_CI_TIMEOUTS_S) * 1000
            run_ms = min(timeout_ms, 1000 * int(10 + rng.lognormvariate(log(480), 0.9)))
            estimate_ms = timeout_ms if self._estimates == "user" else run_ms
            name = f"{repo}-{number}"
            out.append((self._specs.spec(tasks, name=name, user=user, project=repo, estimate_ms=estimate_ms), run_ms))
        return out


class GpuGangs:
    """Training jobs: most request one GPU or a part of one; some request many, in members of at most a node."""

    name = "gpu"
    day = OFFICE_DAY

    def __init__(self, users: int, per_node: int, largest: int, shared_percent: int, estimates: Estimates) -> None:
        sizes = [pair for pair in _GANG_SIZES if pair[0] <= largest]
        self._sizes = [gpus for gpus, _ in sizes]
        self._weights = _cumulative_weights(sizes)
        self._shared_percent = shared_percent
        self._per_node = per_node
        self._tasks: dict[int, tuple[TaskSpec, ...]] = {}
        self._users = _user_names(users)
        self._teams = max(1, users // 5)
        self._estimates = estimates
        self._specs = SpecCache()

    def gap_s(self, rng: Random) -> float:
        return rng.expovariate(1 / 120)

    def batch(self, rng: Random) -> list[Drawn]:
        milli = rng.choices(self._sizes, cum_weights=self._weights)[0] * WHOLE
        if milli == WHOLE and rng.randrange(100) < self._shared_percent:
            milli = rng.choice((250, 500))
        while (run_s := rng.lognormvariate(*_TRAINING)) > _LONGEST_TRAINING_S:
            pass
        run_ms = 1000 * max(1, int(run_s))
        requested_ms = draw_requested_ms(rng, run_ms)
        estimate_ms = run_ms if self._estimates == "actual" else requested_ms
        user, tasks = self._users.draw(rng), self._tasks_of(milli)
        team = f"team{int(user[1:]) % self._teams + 1}"
        return [(self._specs.spec(tasks, name="train", user=user, project=team, estimate_ms=estimate_ms), run_ms)]

    def _tasks_of(self, milli: int) -> tuple[TaskSpec, ...]:
        if milli not in self._tasks:
            per_member = self._per_node * WHOLE
            full, rest = divmod(milli, per_member)
            full_nodes = (TaskSpec(count=full, request=_gpu_request(per_member)),) if full else ()
            remainder = (TaskSpec(name="rest" if full else "main", request=_gpu_request(rest)),) if rest else ()
            self._tasks[milli] = full_nodes + remainder
        return self._tasks[milli]


def _gpu_request(milli: int) -> Resources:
    """Eight cores and 64Gi per GPU."""
    return {CPU: milli * 8, MEMORY: milli * 64 * _GIB // WHOLE, GPU: milli}


NAMES = ("lublin", "ci", "gpu", "mixed")
# The model was fitted to machines of some hundred processors; jobs on larger ones are limited to this.
_LUBLIN_LARGEST = 1024
_DEFAULT_LOAD = 0.7
# Of Lublin, CI and GPU jobs; GPU jobs use cores too.
_MIXED_LOADS = (0.25, 0.25, 0.7)
_DRAWN_ESTIMATES = "user estimates are drawn: accuracy spread evenly, rounded up to round figures"


def generate(name: str, settings: ReadSettings) -> Workload:
    if name not in NAMES:
        raise InvalidInput(
            f"there is no generator {name!r}", hint=f"use one of {', '.join(NAMES)}: generate:lublin?jobs=1000&seed=1"
        )
    options = settings.options
    jobs, seed = options.integer("jobs", 10_000, most=1_000_000_000), options.integer("seed", 1, least=0)
    users = options.integer("users", 50, most=100_000)
    load = options.number("load", 0.0, most=100.0)
    deadline_percent = options.integer("deadline_percent", 0, least=0, most=100)
    build = {"lublin": _lublin, "ci": _ci, "gpu": _gpu, "mixed": _mixed}[name]
    models, nodes, notes = build(settings, users, load, seed)
    if deadline_percent:
        notes.append(
            f"{deadline_percent} % of the jobs have a deadline, 1.2 to 5 times their estimate after submission"
        )
    return Workload(
        f"{name}-{jobs}-seed{seed}",
        LazyArrivals(jobs, lambda: with_deadlines(generate_arrivals(models, seed), deadline_percent, seed)),
        nodes,
        [f"generated, seed {seed}", *notes],
    )


# Models with the factors of their gaps, nodes, notes.
Setup = tuple[list[tuple[Model, float]], list[Node], list[str]]


def _scaled(models: Sequence[Model], nodes: list[Node], loads: Sequence[float], seed: int) -> list[tuple[Model, float]]:
    return [(model, gap_factor(model, nodes, load, seed)) for model, load in zip(models, loads, strict=True)]


def _lublin(settings: ReadSettings, users: int, load: float, seed: int) -> Setup:
    """One pool of `procs`, or `nodes` of `cpus` each; `types=two` generates batch and interactive jobs separately."""
    options = settings.options
    types = options.choice("types", ("one", "two"))
    count = options.integer("nodes", 0, most=1_000_000)
    cpus = options.integer("cpus", settings.per_node or 64, most=100_000) if count else settings.per_node
    procs = options.integer("procs", settings.procs or 256, most=10_000_000)
    if count:
        procs = count * (cpus or 1)
    largest = min(procs, options.integer("largest", min(procs, _LUBLIN_LARGEST), most=10_000_000))
    sizes = JobSizes(per_node=cpus)
    kinds = [("job", ALL)] if types == "one" else [("batch", BATCH), ("interactive", INTERACTIVE)]
    models = [Lublin(kind, parameters, largest, users, sizes, settings.estimates) for kind, parameters in kinds]
    nodes = uniform_nodes(procs, per_node=cpus)
    notes = [f"Lublin-Feitelson model, jobs of up to {largest} of {procs} processors", _DRAWN_ESTIMATES]
    if not load:
        return [(model, 1.0) for model in models], nodes, [*notes, "arrivals at the published rate"]
    # One factor for both types keeps their ratio.
    factor = sum(gap_factor(model, nodes, load, seed) for model in models)
    return [(model, factor) for model in models], nodes, [*notes, _load_note(load)]


def _ci(settings: ReadSettings, users: int, load: float, seed: int) -> Setup:
    cpus = settings.options.integer("cpus", settings.per_node or 16, most=100_000)
    count = settings.options.integer("nodes", max(1, (settings.procs or 320) // cpus), most=1_000_000)
    nodes = uniform_nodes(count * cpus, per_node=cpus, per_unit={MEMORY: 4 * _GIB})
    notes = ["pushes in office hours (UTC), a dozen jobs each; a job's timeout is its estimate", _load_note(load)]
    return _scaled([CiBursts(users, cpus, settings.estimates)], nodes, [load or _DEFAULT_LOAD], seed), nodes, notes


def _gpu(settings: ReadSettings, users: int, load: float, seed: int) -> Setup:
    gpus = settings.options.integer("gpus", settings.per_node or 8, most=64)
    count = settings.options.integer("nodes", max(1, (settings.procs or 400) // gpus), most=1_000_000)
    shared = settings.options.integer("shared_percent", 0, least=0, most=100)
    nodes = uniform_nodes(count * gpus, GPU, gpus, {CPU: 12 * WHOLE, MEMORY: 96 * _GIB})
    notes = ["sizes and run times like those of the Philly trace", _DRAWN_ESTIMATES, _load_note(load)]
    model = GpuGangs(users, gpus, count * gpus, shared, settings.estimates)
    return _scaled([model], nodes, [load or _DEFAULT_LOAD], seed), nodes, notes


def _mixed(settings: ReadSettings, users: int, load: float, seed: int) -> Setup:
    cpus = settings.options.integer("cpus", settings.per_node or 64, least=16, most=100_000)
    count = settings.options.integer("nodes", max(4, (settings.procs or 1280) // cpus), least=4, most=1_000_000)
    width = len(str(count - 1))
    capacity = {CPU: cpus * WHOLE, MEMORY: cpus * 8 * _GIB}
    nodes = [
        Node(f"node-{number:0{width}}", BACKEND, BACKEND, capacity | ({GPU: 8 * WHOLE} if number % 4 == 0 else {}))
        for number in range(count)
    ]
    largest = min(count * cpus // 4, _LUBLIN_LARGEST)
    # A GPU needs eight cores, which limits the GPUs of a member.
    per_node = min(8, cpus // 8)
    models: list[Model] = [
        Lublin("job", ALL, largest, users, JobSizes(per_node=cpus), settings.estimates),
        CiBursts(users, cpus, settings.estimates),
        GpuGangs(users, per_node, max(1, (count + 3) // 4 * per_node // 2), 0, settings.estimates),
    ]
    share = (load or _DEFAULT_LOAD) / _DEFAULT_LOAD
    notes = ["Lublin jobs, CI bursts and GPU gangs; every fourth node has 8 GPUs", _DRAWN_ESTIMATES, _load_note(load)]
    return _scaled(models, nodes, [part * share for part in _MIXED_LOADS], seed), nodes, notes


def _load_note(load: float) -> str:
    return f"arrivals request about {load or _DEFAULT_LOAD:.0%} of the scarcest resource, by a trial of 10,000 jobs"
