"""What it costs if tenants go, and who is let off first: two orders, and only here do they differ.

By classes: the highest priority hit, the class of QoS (best-effort goes before burstable, guaranteed last), the work that is lost, how many gangs end. As Kubernetes does it with pods, where
priority numbers or budgets count: the fewest that pass a budget, the lowest highest priority, the smallest sum of
priorities, the fewest, and of those the ones that started last; those who would pass a budget are let off before others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

from hodei.engine.preemption.victims import Going, VictimCandidate, VictimIndex

# Of those who could go, who would pass a budget, and with how many members.
Breaches = Mapping[VictimCandidate, int]
NO_BREACHES: Breaches = {}
# Added to every priority, so that of two sums below zero the one of fewer tenants is the smaller.
_ABOVE_ZERO = 1 << 31


class Weighed(Struct):
    """Who on one node must go: `needed` of lower classes, and those who go anyway. The smallest `harm` is tried first."""

    harm: tuple[int, ...]
    needed: list[VictimCandidate]
    leaving: list[VictimCandidate]


def weighed(
    tenancy: VictimIndex,
    row: int,
    needed: list[VictimCandidate],
    leaving: list[VictimCandidate],
    now_ms: int,
    breaches: Breaches = NO_BREACHES,
) -> Weighed:
    """Harm: the highest priority hit, the class of QoS of those who have it, the work lost, how many gangs end, how many tenants go; then the youngest first.
    Or, in the order of pods, with what they breach before all."""
    if tenancy.by_order_of_pods:
        return Weighed((*_harm_to_pods(tenancy, needed, breaches), row), needed, leaving)
    highest, lost, ends, since = max((tenant.job.priority for tenant in needed), default=0), 0, 0, 0
    firmness = max((tenant.firmness for tenant in needed if tenant.job.priority == highest), default=0)
    for tenant in needed:
        lost += tenant.lost_ms(now_ms)
        ends += tenant.whole
        since = max(since, tenant.since_ms)
    # Nobody's harm comes before all priorities, also those below 0.
    return Weighed((bool(needed), highest, firmness, lost, ends, len(needed), -since, row), needed, leaving)


def let_off_first(
    tenancy: VictimIndex, tenants: list[VictimCandidate], gone: Collection[VictimCandidate], now_ms: int
) -> tuple[list[VictimCandidate], Breaches]:
    """The order in which those are let off who need not go, and who of them would pass a budget, on top of all others
    who are `gone` already."""
    if not tenancy.by_order_of_pods:
        if len(tenants) > 1:
            tenants = sorted(tenants, key=lambda tenant: tenant.worth(now_ms), reverse=True)
        return tenants, NO_BREACHES
    tenants = sorted(tenants, key=_importance, reverse=True)
    guard = tenancy.guard
    if guard is None or not any(guard.guarded(tenant.id) for tenant in tenants):
        return tenants, NO_BREACHES
    already = [_going(tenant) for tenant in gone if not tenant.stopping and tenant not in tenants]
    passed = guard.violations([*already, *map(_going, tenants)])[len(already) :]
    breaches = {tenant: count for tenant, count in zip(tenants, passed, strict=True) if count}
    return [*breaches, *(tenant for tenant in tenants if tenant not in breaches)], breaches


def _harm_to_pods(tenancy: VictimIndex, needed: list[VictimCandidate], breaches: Breaches) -> tuple[int, ...]:
    passed = highest = total = count = since = 0
    for number, tenant in enumerate(needed):
        priority = tenant.job.priority
        members = sum(len(one.places) for one in tenancy.of_job[tenant.id]) if tenant.whole else len(tenant.places)
        passed += breaches.get(tenant, 0)
        total += (priority + _ABOVE_ZERO) * members
        count += members
        if not number or priority > highest:
            highest, since = priority, tenant.since_ms
        elif priority == highest:
            since = min(since, tenant.since_ms)
    return passed, bool(needed), highest, total, count, -since


def _importance(tenant: VictimCandidate) -> tuple[int, ...]:
    """Higher priority, gangs as a whole, the older; of equals the one that came first."""
    return tenant.job.priority, tenant.whole, -tenant.since_ms, -tenant.id, -tenant.order


def _going(tenant: VictimCandidate) -> Going:
    return tenant.id, tenant.members
