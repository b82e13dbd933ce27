"""Lending of quotas between the projects of a cohort, and the order of reclaim.

The unused part of a project's nominal quota, up to its lending limit, is in the cohort's pool; other projects may
borrow it up to their borrowing limits until the owner reclaims it. Amounts are integers in base units, parsed by
`quota_of`. The number of jobs is a resource as well (`jobs`). Stateless.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from msgspec import Struct

from hodei.model.errors import InvalidInput
from hodei.model.resources import Resources, parse_resources

Amounts = Mapping[str, str | int | float]
Cohort = Mapping[str, "Quota"]
Usage = Mapping[str, Resources]

# The share of a borrower with weight 0, or without any guarantee.
UNBOUNDED = 2**63 - 1


class Quota(Struct, frozen=True):
    """`nominal`: the own quota; a resource that it does not name is unlimited (0: may only be borrowed).
    `borrowing_limit`: at most that much above nominal; `lending_limit`: at most that much is in the pool; unnamed
    resources have no limit. `weight`: borrowing in proportion to it."""

    nominal: Resources
    borrowing_limit: Resources = {}
    lending_limit: Resources = {}
    weight: int = 1

    def __post_init__(self) -> None:
        if type(self.weight) is not int or self.weight < 0:
            raise InvalidInput(f"a weight of {self.weight!r}", hint="a whole number from 0")
        for amounts in (self.nominal, self.borrowing_limit, self.lending_limit):
            for resource, amount in amounts.items():
                # A float here would be an amount in the wrong unit (2.5 cores are 2500 thousandths).
                if type(amount) is not int or amount < 0:
                    raise InvalidInput(f"a quota of {amount!r} {resource}", hint="whole base units; see quota_of")
        for resource in (*self.borrowing_limit, *self.lending_limit):
            if resource not in self.nominal:
                raise InvalidInput(f"a limit on {resource} without a nominal quota", hint="name it there, 0 if need be")

    def lends(self, resource: str) -> int:
        """How much of the nominal quota others may borrow."""
        nominal = self.nominal.get(resource, 0)
        return min(nominal, self.lending_limit.get(resource, nominal))


def quota_of(
    nominal: Amounts, *, borrowing_limit: Amounts | None = None, lending_limit: Amounts | None = None, weight: int = 1
) -> Quota:
    """Parses amounts: `4` cores, `500m`, `8Gi`."""
    limits = parse_resources(borrowing_limit or {}), parse_resources(lending_limit or {})
    return Quota(parse_resources(nominal), *limits, weight)


class Allowance(Struct, frozen=True):
    """A project's allowance of one resource: `more` it may use now.

    `kept`: nominal quota that is never lent; `pool`: what the cohort lends, `pool_used` of it by any project;
    `ceiling`: nominal plus borrowing limit, None for none. `limited_by`: "borrowing limit", "pool", or "" if both
    allow the same.
    """

    resource: str
    used: int
    nominal: int
    kept: int
    pool: int
    pool_used: int
    ceiling: int | None
    more: int
    limited_by: str

    @property
    def borrowed(self) -> int:
        return max(0, self.used - self.nominal)


def allowance(project: str, resource: str, cohort: Cohort, used: Usage) -> Allowance:
    """The project's allowance of a resource that its quota names."""
    quota = cohort[project]
    mine, nominal = _used(used, project, resource), quota.nominal[resource]
    kept = nominal - quota.lends(resource)
    pool = pool_used = 0
    for name, other in cohort.items():
        if resource in other.nominal:
            lends = other.lends(resource)
            pool += lends
            pool_used += max(0, _used(used, name, resource) - (other.nominal[resource] - lends))
    by_pool = max(0, kept - mine) + max(0, pool - pool_used)
    limit = quota.borrowing_limit.get(resource)
    if limit is None:
        return Allowance(resource, mine, nominal, kept, pool, pool_used, None, by_pool, "pool")
    ceiling = nominal + limit
    by_limit = max(0, ceiling - mine)
    limited_by = "pool" if by_pool < by_limit else "borrowing limit" if by_limit < by_pool else ""
    return Allowance(resource, mine, nominal, kept, pool, pool_used, ceiling, min(by_pool, by_limit), limited_by)


class BorrowShare(Struct, frozen=True):
    """`milli` thousandths of the lendable amount, by weight, are borrowed of `resource` ("" for none)."""

    milli: int
    resource: str


def borrow_share(used: Resources, nominal: Resources, lendable: Resources, weight: int = 1) -> BorrowShare:
    """Kueue's share: the maximum over resources of (used above nominal) * 1000 / lendable / weight, rounded up."""
    worst, of = Fraction(0), ""
    for resource in sorted(nominal):
        above = used.get(resource, 0) - nominal[resource]
        if above > 0:
            pool = lendable.get(resource, 0) * weight
            share = Fraction(above * 1000, pool) if pool > 0 else Fraction(UNBOUNDED)
            if share > worst:
                worst, of = share, resource
    return BorrowShare(min(UNBOUNDED, -(-worst.numerator // worst.denominator)), of)


def lendable(cohort: Cohort) -> Resources:
    names = sorted({resource for quota in cohort.values() for resource in quota.nominal})
    return {resource: sum(quota.lends(resource) for quota in cohort.values()) for resource in names}


def share_of(project: str, cohort: Cohort, used: Usage) -> BorrowShare:
    quota = cohort[project]
    return borrow_share(used.get(project, {}), quota.nominal, lendable(cohort), quota.weight)


class Reclaim(Struct, frozen=True):
    """Reclaim these amounts from a borrower whose share was `share_milli`."""

    project: str
    amounts: Resources
    share_milli: int


def reclaim_from(owner: str, wants: Resources, cohort: Cohort, used: Usage) -> list[Reclaim] | None:
    """What to reclaim so that `owner` can use `wants` more, largest borrower share first, ties by name.

    [] if nothing is short. None if the owner would exceed its nominal quota: only that can be reclaimed. Never
    reclaims more than is short, nor from within a project's own quota.
    """
    quota = cohort[owner]
    short: Resources = {}
    for resource in sorted(wants):
        if resource not in quota.nominal or not wants[resource]:
            continue
        allowed = allowance(owner, resource, cohort, used)
        if wants[resource] <= allowed.more:
            continue
        if allowed.used + wants[resource] > allowed.nominal:
            return None
        # A quota may have been lowered while in use: then the pool is overdrawn.
        from_pool = wants[resource] - max(0, allowed.kept - allowed.used)
        short[resource] = from_pool - (allowed.pool - allowed.pool_used)
    borrowers = [(share_of(name, cohort, used).milli, name) for name in cohort if name != owner]
    found: list[Reclaim] = []
    for share, name in sorted(borrowers, key=lambda entry: (-entry[0], entry[1])):
        taken: Resources = {}
        for resource, missing in short.items():
            nominal = cohort[name].nominal.get(resource)
            above = 0 if nominal is None else max(0, _used(used, name, resource) - nominal)
            if amount := min(missing, above):
                taken[resource] = amount
                short[resource] -= amount
        if taken:
            found.append(Reclaim(name, taken, share))
    return found


def _used(used: Usage, project: str, resource: str) -> int:
    return used.get(project, {}).get(resource, 0)
