"""The model of rigid jobs by Lublin and Feitelson (1999; J. Parallel Distrib. Comput. 63(11), 2003), published parameters.

Sizes: serial, a power of two, or any, the logarithm from two uniform parts. Run times: the logarithm from one of two
gammas, large jobs more often from the longer one. Gaps: the logarithm from a gamma; the day has a rush.
"""

from __future__ import annotations

from math import exp, lgamma, log, log2
from random import Random

from msgspec import Struct

from hodei.sim.traces.stream import BUCKETS, Drawn, Popularity, asked_ms
from hodei.sim.traces.workload import Estimates, Shapes

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
