"""Values of different resources in one unit: weights for fair share, prices for budgets.

Integers throughout: a rate is millionths per base units (`cpu` 1.0 is 1,000,000 per 1000 thousandths of a core;
`memory` 0.25/Gi is 250,000 per 2**30 bytes). Each term is rounded down to a millionth. Floats are for printing only.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Literal

from msgspec import Struct

from hodei.model.errors import InvalidInput
from hodei.model.resources import Resources, parse_quantity, parse_resources, scale_of

MICRO = 1_000_000
HOUR_MS = 3_600_000
# The resource name of bills (in millionths) in the ledger.
BILLING = "billing"

Mode = Literal["sum", "max"]


class Rate(Struct, frozen=True):
    """`micro` millionths for `per` base units of a resource."""

    micro: int
    per: int


class Bill(Struct, frozen=True):
    """`terms`: the part of each resource; `micro`: their sum or maximum."""

    micro: int
    terms: dict[str, int]


def parse_rates(given: Mapping[str, str | int | float]) -> dict[str, Rate]:
    """Rates by resource: `1.0` is per core, GPU or byte, `0.25/Gi` or `0.25/G` per that many.

    Suffixes as in all amounts: G is 10**9, Gi is 2**30.
    """
    rates: dict[str, Rate] = {}
    for name, text in given.items():
        (resource,) = parse_resources({name: 0})
        if resource in rates:
            raise InvalidInput(f"the rate of {resource} is given twice (also as {name!r})", hint="keep one of them")
        rates[resource] = _parse_rate(resource, str(text))
    return rates


def _parse_rate(resource: str, text: str) -> Rate:
    number, _, unit = text.strip().partition("/")
    try:
        micro = Decimal(number) * MICRO
    except InvalidOperation:
        micro = Decimal(-1)
    if not micro.is_finite() or not 0 <= micro <= 10**18 or micro != int(micro):
        raise InvalidInput(
            f"{text[:40]!r} is not a rate for {resource}",
            hint="a number with at most 6 decimals, such as 1.0 or 0.25/Gi",
        )
    unit = unit.strip()
    per = parse_quantity(f"1{unit}" if not unit[:1].isdigit() else unit, scale=scale_of(resource))
    if per < 1:
        raise InvalidInput(f"{text[:40]!r} is for an amount of nothing", hint="such as 0.25/Gi")
    return Rate(int(micro), per)


def bill(amounts: Resources, rates: Mapping[str, Rate], mode: Mode = "sum") -> Bill:
    """`max` counts only the most expensive resource (Slurm's MAX_TRES). A resource without a rate is free."""
    terms = {
        name: amounts[name] * rates[name].micro // rates[name].per for name in sorted(amounts) if name in rates
    }  # fmt: skip
    return Bill(sum(terms.values()) if mode == "sum" else max(terms.values(), default=0), terms)


def cost_micro(used: Resources, prices: Mapping[str, Rate]) -> int:
    """Cost in millionths of usage (base units times milliseconds); prices are per hour."""
    return sum(
        used[name] * prices[name].micro // (prices[name].per * HOUR_MS) for name in used if name in prices
    )  # fmt: skip


def hours(resource: str, used: int) -> float:
    """Base units times milliseconds as hours (GPU-hours, core-hours), for printing."""
    return used / (scale_of(resource) * HOUR_MS)


class Budget(Struct, frozen=True):
    """Limits of usage since `since_ms`.

    `unit_hours`: base units times hours (500 GPU-hours are {"gpu": 500_000}); `money_micro`: millionths of the
    currency of `prices` (per hour), None for no limit.
    """

    since_ms: int
    unit_hours: Resources = {}
    money_micro: int | None = None
    prices: dict[str, Rate] = {}


class Spent(Struct, frozen=True):
    """One limit of a budget: base units times milliseconds, or millionths for "money"."""

    name: str
    used: int
    limit: int

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)

    @property
    def exhausted(self) -> bool:
        return self.used >= self.limit


def spent(budget: Budget, used: Resources) -> list[Spent]:
    """Usage per limit. `used` comes from `Ledger.used_since(path, budget.since_ms, now)`."""
    found = [
        Spent(name, used.get(name, 0), limit * HOUR_MS) for name, limit in sorted(budget.unit_hours.items())
    ]  # fmt: skip
    if budget.money_micro is not None:
        found.append(Spent("money", cost_micro(used, budget.prices), budget.money_micro))
    return found
