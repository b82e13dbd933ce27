"""Gangs that run now, as those see them who may take their place: where they are, since when, and what they are worth.

What each class of priority holds of every node is kept in columns, so that "could anything lower make room here?" is
one comparison over all nodes.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from hodei.engine.nodes import Table
from hodei.engine.view import Member
from hodei.model.ids import JobId, NodeName
from hodei.model.job import PRIORITY_CLASSES, JobSpec
from hodei.model.node import Grant
from hodei.model.resources import Resources

Ints = NDArray[np.int64]
_FLOORS = sorted(PRIORITY_CLASSES.values())
# Low, batch and scavenger work takes nobody's place.
_TIMID = PRIORITY_CLASSES["low"]


@lru_cache(maxsize=4096)
def class_of(priority: int) -> int:
    """The class that a whole number belongs to: the highest one that it reaches; the lowest for all below."""
    return max((floor for floor in _FLOORS if floor <= priority), default=_FLOORS[0])


def may_preempt(priority: int) -> bool:
    return class_of(priority) > _TIMID


NO_PARTS = Grant()


class Place(NamedTuple):
    """Where a member is. `grant`: the parts of the node that it holds, NO_PARTS for room without any."""

    node: NodeName
    member: Member
    grant: Grant | None = None


class Tenant(Struct):
    """A placed gang. `stopping`: it has been told to go already, its room will be free without further harm."""

    id: JobId
    job: JobSpec
    places: tuple[Place, ...]
    since_ms: int
    preemptions: int = 0
    stopping: bool = False
    holds: dict[NodeName, Resources] = {}

    def __post_init__(self) -> None:
        """What it holds of each node, added up once."""
        held: dict[NodeName, Resources] = {}
        for name, member, _ in self.places:
            sums = held.setdefault(name, {})
            for resource, amount in member.task.request.items():
                sums[resource] = sums.get(resource, 0) + amount
        self.holds = held

    @property
    def rank(self) -> int:
        return class_of(self.job.priority)

    def worth(self, now_ms: int) -> tuple[int, int, int, int]:
        """Small goes first: lower priority, less work lost, fewer members, and of equals the youngest."""
        lost = max(now_ms - self.since_ms, 0) * len(self.places)
        return (self.job.priority, lost, len(self.places), -self.id)


class Tenancy:
    def __init__(self, table: Table) -> None:
        self._table = table
        self._generation = -1
        self._held: dict[int, dict[str, Ints]] = {}
        self.tenants: dict[JobId, Tenant] = {}
        self.on_node: dict[NodeName, set[JobId]] = {}
        self.stopping: dict[JobId, Tenant] = {}
        self._ranks: Counter[int] = Counter()

    def add(self, tenant: Tenant) -> None:
        self.remove(tenant.id)
        self.tenants[tenant.id] = tenant
        self._ranks[tenant.rank] += 1
        if tenant.stopping:
            self.stopping[tenant.id] = tenant
        for name in tenant.holds:
            self.on_node.setdefault(name, set()).add(tenant.id)
        self._count(tenant, 1)

    def remove(self, id: JobId) -> Tenant | None:
        tenant = self.tenants.pop(id, None)
        if tenant is not None:
            self._ranks[tenant.rank] -= 1
            self.stopping.pop(id, None)
            for name in tenant.holds:
                self.on_node.get(name, set()).discard(id)
            self._count(tenant, -1)
        return tenant

    def ranks_below(self, rank: int) -> list[int]:
        """The classes under that one that somebody here belongs to, the lowest first."""
        return sorted(lower for lower, number in self._ranks.items() if number and lower < rank)

    def held_by(self, rank: int, resource: str) -> Ints:
        """How much of a resource the tenants of one class hold on each node."""
        if self._generation != self._table.generation:
            self._generation = self._table.generation
            self._held = {}
            for tenant in self.tenants.values():
                self._count(tenant, 1)
        found = self._held.get(rank, {}).get(resource)
        return found if found is not None else np.zeros(len(self._table.names), dtype=np.int64)

    def _count(self, tenant: Tenant, by: int) -> None:
        if self._generation != self._table.generation:
            return  # made anew when someone asks
        of_class = self._held.setdefault(tenant.rank, {})
        for name, held in tenant.holds.items():
            row = self._table.row.get(name)
            if row is None:
                continue
            for resource, amount in held.items():
                column = of_class.get(resource)
                if column is None:
                    column = of_class[resource] = np.zeros(len(self._table.names), dtype=np.int64)
                column[row] += by * amount
