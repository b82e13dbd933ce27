"""Generated arrivals: a model says what arrives and how far apart, a clock lays it over the hours of the day.

Everything is drawn from one seed and made while it is read.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import accumulate, count
from random import Random
from typing import Protocol

from msgspec import structs

from hodei.model.job import JobSpec
from hodei.model.node import Node
from hodei.sim.traces.workload import Arrival

BUCKETS = 48
BUCKET_S = 86_400 // BUCKETS
_PILOT = 10_000
# What people ask for, in seconds: round figures from five minutes to two weeks.
_ROUND = (300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 28_800, 43_200, 64_800, 86_400, 129_600, 172_800, 259_200,
          432_000, 604_800, 1_209_600)  # fmt: skip
_LEAST_ACCURACY = 0.05

Drawn = tuple[JobSpec, int]
"""A job and its run time in milliseconds."""


class Model(Protocol):
    """`day` weighs the 48 half hours of a day, their mean being 1. Jobs of one `batch` arrive together.

    `gap_s`: seconds to the next batch at mean load.
    """

    @property
    def name(self) -> str: ...

    @property
    def day(self) -> Sequence[float]: ...

    def gap_s(self, rng: Random) -> float: ...

    def batch(self, rng: Random) -> list[Drawn]: ...


def arrivals(parts: Sequence[tuple[Model, float]], seed: int) -> Iterator[Arrival]:
    """All that the models bring, without end, in order; each model's gaps are multiplied by its pace."""
    streams = [_stream(model, Random(f"{seed}/{model.name}"), pace, place) for place, (model, pace) in enumerate(parts)]
    # By place in equal moments: specs have no order.
    for id, (at_ms, _, (spec, run_ms)) in zip(count(1), merge(*streams, key=lambda entry: entry[:2]), strict=False):
        yield Arrival(at_ms, id, spec, run_ms)


def with_deadlines(found: Iterator[Arrival], percent: int, seed: int) -> Iterator[Arrival]:
    """So many of a hundred jobs have to be done by some time after their submission: 1.2 to 5 times their estimate."""
    if not percent:
        yield from found
        return
    rng = Random(f"{seed}/deadlines")
    for arrival in found:
        hurried, times = rng.randrange(100) < percent, rng.randint(120, 500)
        if hurried:
            deadline_ms = arrival.at_ms + arrival.spec.estimate_ms * times // 100
            arrival = structs.replace(arrival, spec=structs.replace(arrival.spec, deadline_ms=deadline_ms))
        yield arrival


def _stream(model: Model, rng: Random, pace: float, place: int) -> Iterator[tuple[int, int, Drawn]]:
    """A gap is paid with the weights of the half hours that pass: many jobs in busy ones, few at night."""
    passed, left = 0, 0.0
    while True:
        left += model.gap_s(rng) * pace / BUCKET_S
        while left > model.day[passed % BUCKETS]:
            left -= model.day[passed % BUCKETS]
            passed += 1
        at_ms = round(1000 * BUCKET_S * (passed + left / model.day[passed % BUCKETS]))
        for drawn in model.batch(rng):
            yield at_ms, place, drawn


def pace_for(model: Model, nodes: Sequence[Node], load: float, seed: int) -> float:
    """The pace at which the model asks for about `load` of the nodes' scarcest resource, by a trial of its own."""
    capacity: dict[str, int] = {}
    for node in nodes:
        for resource, amount in node.capacity.items():
            capacity[resource] = capacity.get(resource, 0) + amount
    rng = Random(f"{seed}/{model.name}/trial")
    asked, gaps_s, jobs = dict.fromkeys(capacity, 0), 0.0, 0
    while jobs < _PILOT:
        gaps_s += model.gap_s(rng)
        for spec, run_ms in model.batch(rng):
            jobs += 1
            for task in spec.tasks:
                for resource, amount in task.request.items():
                    asked[resource] = asked.get(resource, 0) + amount * task.count * run_ms
    needed_ms = max(amount / capacity[resource] for resource, amount in asked.items() if capacity.get(resource))
    return needed_ms / (1000 * gaps_s * load)


class Popularity:
    """Names of which a few are frequent and most are rare: the n-th comes up 1/n as often as the first."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._weights = list(accumulate(1 / place for place in range(1, len(names) + 1)))

    def draw(self, rng: Random) -> str:
        return self._names[bisect(self._weights, rng.random() * self._weights[-1])]


def asked_ms(rng: Random, run_ms: int) -> int:
    """What a user would ask for: accuracy is spread evenly, as in the archive's logs, and people like round figures."""
    wanted_s = run_ms / 1000 / (1 - rng.random() * (1 - _LEAST_ACCURACY))
    return next((figure * 1000 for figure in _ROUND if figure >= wanted_s), max(run_ms, _ROUND[-1] * 1000))
