"""Quotas that projects of a cohort lend each other, and who gives back first.

A project's nominal quota is its own. What it does not use of it, up to its lending limit, is in the cohort's pool; others
may use it up to their borrowing limits, until the owner wants it back. Amounts are whole numbers in the base units of
`model.resources` and come in through one parser (`quota_of`), so thousandths never meet wholes. A count of jobs is a resource
like any other (`jobs`). Nothing here remembers: every answer follows from quotas and usage.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from msgspec import Struct

from hodei.engine.fairness.tree import PARENT, Account, Path
from hodei.model.errors import InvalidInput
from hodei.model.resources import Resources, parse_resources

Amounts = Mapping[str, str | int | float]
Cohort = Mapping[str, "Quota"]
Usage = Mapping[str, Resources]

# The share of who may not borrow at all and does (weight 0), or uses without any guarantee.
ENDLESS = 2**63 - 1


class Quota(Struct, frozen=True):
    """`nominal` is the project's own; a resource it does not name is not limited (name it with 0 to let it only borrow).
    `borrowing_limit`: at most so much above nominal; `lending_limit`: at most so much of nominal is in the pool. A resource
    that a limit does not name is not limited by it. A `weight` twice as large may borrow twice as much."""

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
        """How much of the nominal quota others may use while it is not in use."""
        nominal = self.nominal.get(resource, 0)
        return min(nominal, self.lending_limit.get(resource, nominal))


def quota_of(
    nominal: Amounts, *, borrowing_limit: Amounts | None = None, lending_limit: Amounts | None = None, weight: int = 1
) -> Quota:
    """A quota from amounts as people write them: `4` cores, `500m`, `8Gi`."""
    limits = parse_resources(borrowing_limit or {}), parse_resources(lending_limit or {})
    return Quota(parse_resources(nominal), *limits, weight)


class Allowance(Struct, frozen=True):
    """How one project stands with one resource. It may use `more` now, `free_of_own` of it without borrowing.

    `kept` of nominal is never lent; `pool` is what the cohort lends, `pool_used` what of it is in use by anyone (the owners
    too); `ceiling` is nominal plus what may be borrowed, None for no bound. `limited_by` says what sets `more`:
    "borrowing limit", "pool", or "" where the two allow the same.
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

    @property
    def free_of_own(self) -> int:
        return min(self.more, max(0, self.nominal - self.used))


def allowance(project: str, resource: str, cohort: Cohort, used: Usage) -> Allowance:
    """All terms of what `project` may use of a resource that its quota names."""
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


def may_use(project: str, cohort: Cohort, used: Usage) -> Resources:
    """How much more the project may use right now of each resource its quota names; others are not limited by it."""
    return {resource: allowance(project, resource, cohort, used).more for resource in sorted(cohort[project].nominal)}


class BorrowShare(Struct, frozen=True):
    """`milli` thousandths of what the cohort lends, by weight, are borrowed of `resource` ("" for who borrows nothing)."""

    milli: int
    resource: str


def borrow_share(used: Resources, nominal: Resources, lendable: Resources, weight: int = 1) -> BorrowShare:
    """Kueue's share: the most over resources of (used above nominal) * 1000 / lendable / weight, rounded up."""
    worst, of = Fraction(0), ""
    for resource in sorted(nominal):
        above = used.get(resource, 0) - nominal[resource]
        if above > 0:
            pool = lendable.get(resource, 0) * weight
            share = Fraction(above * 1000, pool) if pool > 0 else Fraction(ENDLESS)
            if share > worst:
                worst, of = share, resource
    return BorrowShare(min(ENDLESS, -(-worst.numerator // worst.denominator)), of)


def lendable(cohort: Cohort) -> Resources:
    """What the projects of a cohort lend together."""
    names = sorted({resource for quota in cohort.values() for resource in quota.nominal})
    return {resource: sum(quota.lends(resource) for quota in cohort.values()) for resource in names}


def share_of(project: str, cohort: Cohort, used: Usage) -> BorrowShare:
    quota = cohort[project]
    return borrow_share(used.get(project, {}), quota.nominal, lendable(cohort), quota.weight)


class Reclaim(Struct, frozen=True):
    """Take so much back from this borrower, whose share was `share_milli`."""

    project: str
    amounts: Resources
    share_milli: int


def reclaim_from(owner: str, wants: Resources, cohort: Cohort, used: Usage) -> list[Reclaim] | None:
    """From whom to take so that `owner` can use `wants` more, the largest borrower share first, ties by name.

    [] when nothing is short. None when the owner would not stay within its nominal quota: only one's own can be
    reclaimed; borrowing waits. Never takes more than is short, nor what a project has within its own quota.
    """
    quota = cohort[owner]
    short: Resources = {}
    for resource in sorted(wants):
        if resource not in quota.nominal or not wants[resource]:
            continue
        stands = allowance(owner, resource, cohort, used)
        if wants[resource] <= stands.more:
            continue
        if stands.used + wants[resource] > stands.nominal:
            return None
        # The pool may be overdrawn (a quota was cut while in use): then that is short too.
        from_pool = wants[resource] - max(0, stands.kept - stands.used)
        short[resource] = from_pool - (stands.pool - stands.pool_used)
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


def split(amount: int, weights: Mapping[str, int], wants: Mapping[str, int] | None = None) -> dict[str, int]:
    """An amount shared out by weight. Nobody gets more than it wants; what that leaves goes to the others.

    What does not divide goes to the largest remainders, ties by name.
    """
    given = dict.fromkeys(sorted(weights), 0)
    left, hungry = amount, {name: weight for name, weight in sorted(weights.items()) if weight > 0}
    if wants is not None:
        while modest := [
            name for name, weight in hungry.items() if wants.get(name, 0) * sum(hungry.values()) <= left * weight
        ]:
            for name in modest:
                given[name] = wants.get(name, 0)
                del hungry[name]
            left = amount - sum(given.values())
    whole = sum(hungry.values())
    for name, weight in hungry.items():
        given[name] = left * weight // whole
    rest = left - sum(given[name] for name in hungry)
    for name in sorted(hungry, key=lambda name: (-(left * hungry[name] % whole), name))[:rest]:
        given[name] += 1
    return given


def split_down(amount: int, tree: Account, path: Path = ()) -> dict[Path, int]:
    """An amount shared out by shares at every level of a tree of cohorts and projects; "parent" counts as no share."""
    shares = {child.name: 0 if child.shares == PARENT else child.shares for child in tree.children}
    found: dict[Path, int] = {}
    for name, part in split(amount, shares).items():
        child = tree.find((name,))
        found[(*path, name)] = part
        if child is not None:
            found.update(split_down(part, child, (*path, name)))
    return found


def guaranteed_share(allocated: Resources, guaranteed: Resources) -> Fraction:
    """YuniKorn's share: the most over resources of allocated / guaranteed.

    A resource without a guarantee does not count, but who has something and is guaranteed nothing comes last.
    """
    backed = [Fraction(amount, guaranteed[name]) for name, amount in allocated.items() if guaranteed.get(name, 0) > 0]
    if not backed and any(allocated.values()):
        return Fraction(ENDLESS)
    return max(backed, default=Fraction(0))


def _used(used: Usage, project: str, resource: str) -> int:
    return used.get(project, {}).get(resource, 0)
