"""Dominant-resource fairness: a tenant's share is its largest share of any resource. Exact fractions, in base units."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from msgspec import Struct

from hodei.model.errors import InvalidInput
from hodei.model.resources import Resources


class DominantShare(Struct, frozen=True):
    """`resource`: "" without usage. `shares`: the term of every resource."""

    resource: str
    share: Fraction
    shares: dict[str, Fraction]


def dominant_share(
    used: Resources, totals: Resources, *, weight: int = 1, resource_weights: Mapping[str, int] | None = None
) -> DominantShare:
    """The largest of used / total * resource weight / tenant weight.

    A resource without capacity does not count (its last node may be gone while runs still hold it). Ties go to the
    first name.
    """
    if weight < 1:
        raise InvalidInput(f"a weight of {weight}", hint="a whole number from 1")
    weights = resource_weights or {}
    shares = {
        name: Fraction(used[name] * weights.get(name, 1), totals[name] * weight)
        for name in sorted(used)
        if totals.get(name, 0) > 0
    }
    best = max(shares, key=lambda name: shares[name], default="")
    if not best or not shares[best]:
        return DominantShare("", Fraction(0), shares)
    return DominantShare(best, shares[best], shares)


def progressive_filling(
    tasks: Mapping[str, Resources], totals: Resources, *, weights: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Tasks per tenant when the tenant with the lowest dominant share is always served next.

    `tasks`: the needs of one task per tenant. A tenant whose next task does not fit is done. Ties by name.
    """
    for tenant, need in tasks.items():
        if not any(need.values()):
            raise InvalidInput(f"a task of {tenant} needs nothing", hint="endlessly many would fit")
    given = dict.fromkeys(sorted(tasks), 0)
    free = dict(totals)
    active = set(tasks)
    while active:
        tenant = min(active, key=lambda name: (_share(name, tasks, given, totals, weights), name))
        need = tasks[tenant]
        if all(free.get(resource, 0) >= amount for resource, amount in need.items()):
            for resource, amount in need.items():
                free[resource] = free.get(resource, 0) - amount
            given[tenant] += 1
        else:
            active.discard(tenant)
    return given


def _share(
    tenant: str, tasks: Mapping[str, Resources], given: Mapping[str, int], totals: Resources,
    weights: Mapping[str, int] | None,
) -> Fraction:  # fmt: skip
    used = {resource: amount * given[tenant] for resource, amount in tasks[tenant].items()}
    return dominant_share(used, totals, weight=(weights or {}).get(tenant, 1)).share
