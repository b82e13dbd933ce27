"""Who must go so that a gang can start: the least disruption that a full trial by all plugins finds sufficient.

The search works on the table itself and undoes everything, so that rules of every kind count (what a victim's leaving does
to affinity, spread or ports included), not resources alone. Nothing is evicted here: the answer names victims and places.

For each member that finds no node: the nodes are found on which the lowest possible class of tenants could make room, the
victims needed on each are counted, and the least harmful node is tried. At the end every victim whose stay would
not matter is let off, the most valuable first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import Struct

from hodei.engine.cycle import Engine
from hodei.engine.plan import Refusal
from hodei.engine.points import Placed
from hodei.engine.tenancy import Tenancy, Tenant, class_of, may_preempt
from hodei.engine.view import Gang, Member, View
from hodei.model.node import Grant

# Nodes whose victims are counted exactly, of those that could make room at the lowest class; those with the fewest runs first.
_NODES_WEIGHED = 32
# Nodes tried in full for one member, should rules other than room refuse the best ones.
_NODES_TRIED = 8
# Letting off places the whole gang once per victim; past this much work the victims found stand.
_PLACINGS_TO_LET_OFF = 20_000


class Preemption(Struct):
    """`victims` are to be told to go, `leaving` are going already; when all are gone the gang has `placements`."""

    victims: list[Tenant]
    leaving: list[Tenant]
    placements: list[Placed]


def find(
    engine: Engine, tenancy: Tenancy, gang: Gang, view: View, may_evict: Callable[[Tenant], bool]
) -> Preemption | None:
    """How `gang` could start at the cost of lower classes; None if it cannot. The table is as before."""
    if not may_preempt(gang.job.priority):
        return None
    search = _Search(engine, tenancy, gang, view, may_evict)
    with engine.table.trial():
        try:
            return search.run()
        finally:
            search.put_back()


class _Search:
    def __init__(
        self, engine: Engine, tenancy: Tenancy, gang: Gang, view: View, may_evict: Callable[[Tenant], bool]
    ) -> None:
        self._engine, self._tenancy, self._gang, self._view, self._may_evict = engine, tenancy, gang, view, may_evict
        self._rank = class_of(gang.job.priority)
        self._gone: dict[int, Tenant] = {}

    def run(self) -> Preemption | None:
        for tenant in list(self._tenancy.stopping.values()):
            self._evict(tenant)
        placements = self._try() if self._gone else None
        if placements is None:
            placements = self._try() if self._make_room() else None
        if placements is None:
            return None
        placements = self._let_off(placements)
        rows = {placed.node.name for placed in placements}
        leaving = [t for t in self._gone.values() if t.stopping and any(name in rows for name in t.holds)]
        victims = [t for t in self._gone.values() if not t.stopping]
        self._engine.withdraw(self._gang, placements)
        return Preemption(sorted(victims, key=_by_id), sorted(leaving, key=_by_id), placements)

    def put_back(self) -> None:
        for tenant in list(self._gone.values()):
            self._restore(tenant)

    # ----------------------------------------------------------------------------------------------- steps

    def _try(self) -> list[Placed] | None:
        result = self._engine.place(self._gang, self._view, extras=False)
        return None if isinstance(result, Refusal) else result

    def _make_room(self) -> bool:
        """Place the members one after another, evicting what those without a node need; False if one can not be helped.
        The members are taken off again: the room is there now."""
        engine, placed, enough = self._engine, list[tuple[int, Member, Grant | None]](), True
        for kind, _, member in self._gang.each():
            row = engine.best_row(self._gang, kind, self._view)
            if row < 0:
                row = self._room_for(kind, member)
            if row < 0:
                enough = False
                break
            grant = engine.table.place(row, member.task.request, member)
            placed.append((row, member, grant))
        for row, member, grant in reversed(placed):
            engine.table.release(row, member.task.request, member, grant)
        return enough

    def _room_for(self, kind: int, member: Member) -> int:
        for row in self._rows_by_harm(member):
            victims = self._needed(row, member)
            for victim in victims:
                self._evict(victim)
            best = self._engine.best_row(self._gang, kind, self._view)
            if best >= 0:
                return best
            for victim in victims:
                self._restore(victim)
        return -1

    def _rows_by_harm(self, member: Member) -> list[int]:
        """Rows where lower classes could make room, the least harmful first: no higher class is touched than need be."""
        table, request = self._engine.table, member.task.request
        open_rows = self._engine.open_to(self._gang, member, self._view)
        room = {resource: table.view().free(resource).copy() for resource, amount in request.items() if amount}
        for rank in self._tenancy.ranks_below(self._rank):
            enough = open_rows.copy()
            for resource, free in room.items():
                free += self._tenancy.held_by(rank, resource)
                enough &= free >= request[resource]
            rows = np.flatnonzero(enough)
            if len(rows):
                fewest = rows[np.argsort(table.runs[rows], kind="stable")[:_NODES_WEIGHED]]
                weighed = []
                for row in fewest.tolist():
                    victims = self._needed(row, member)
                    if victims:
                        weighed.append((self._harm(victims), row))
                if weighed:
                    return [row for _, row in sorted(weighed)[:_NODES_TRIED]]
        return []

    def _harm(self, victims: list[Tenant]) -> tuple[int, int, int, int]:
        now = self._view.now_ms
        worths = [victim.worth(now) for victim in victims]
        return (
            max(worth[0] for worth in worths), sum(worth[1] for worth in worths), len(victims),
            -max(victim.since_ms for victim in victims),
        )  # fmt: skip

    def _needed(self, row: int, member: Member) -> list[Tenant]:
        """The least valuable tenants of one node whose going gives the member room there; none if that is not enough."""
        table, name, request = self._engine.table, self._engine.table.names[row], member.task.request
        tenants = [
            tenant
            for id in self._tenancy.on_node.get(name, ())
            if (tenant := self._tenancy.tenants[id]).rank < self._rank
            and id not in self._gone
            and not tenant.stopping
            and self._may_evict(tenant)
        ]
        held = table.holds[row].used
        free = {r: table.room[row].get(r, 0) - held.get(r, 0) for r, amount in request.items() if amount}
        for tenant in tenants:
            part = tenant.holds[name]
            for resource in free:
                free[resource] += part.get(resource, 0)
        if any(free[resource] < request[resource] for resource in free):
            return []
        needed = []
        now = self._view.now_ms
        for tenant in sorted(tenants, key=lambda tenant: tenant.worth(now), reverse=True):
            part = tenant.holds[name]
            if all(free[resource] - part.get(resource, 0) >= request[resource] for resource in free):
                for resource in free:
                    free[resource] -= part.get(resource, 0)
            else:
                needed.append(tenant)
        return needed

    def _let_off(self, placements: list[Placed]) -> list[Placed]:
        """Victims whose room is not needed in the end stay; each is tried by placing the whole gang beside it."""
        victims = [tenant for tenant in self._gone.values() if not tenant.stopping]
        # Those that make room for one member on one node are all needed for it; with more members, or with those who are
        # leaving anyway counted in, some may not be.
        if self._gang.size == 1 or len(victims) * self._gang.size > _PLACINGS_TO_LET_OFF:
            return placements
        for tenant in sorted(victims, key=lambda tenant: tenant.worth(self._view.now_ms), reverse=True):
            if len(victims) == 1:
                break  # the gang did not fit before it went
            self._engine.withdraw(self._gang, placements)
            self._restore(tenant)
            again = self._try()
            if again is not None:
                placements = again
            else:
                self._evict(tenant)
                found = self._try()
                assert found is not None, "the gang fitted a moment ago"
                placements = found
        return placements

    # ------------------------------------------------------------------------------------------- the table

    def _evict(self, tenant: Tenant) -> None:
        self._gone[tenant.id] = tenant
        for name, member, grant in tenant.places:
            self._engine.table.let_go(name, member.task.request, member, grant)

    def _restore(self, tenant: Tenant) -> None:
        del self._gone[tenant.id]
        for name, member, grant in tenant.places:
            self._engine.table.hold(name, member.task.request, member, grant)


def _by_id(tenant: Tenant) -> int:
    return tenant.id
