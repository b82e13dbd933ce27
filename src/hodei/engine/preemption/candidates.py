"""Where lower classes could make room for a member: every node that they could, those of the lowest class first.

Kept for each shape and class and refreshed for the rows that changed, as rankings are. What follows from it is worked out
for the best few only: who on a node would have to go (`weigh`), kept until something happens there. All of it is exact.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Hashable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from msgspec import Struct

from hodei.engine.cycle import Engine
from hodei.engine.device_slots import DeviceSlots, wants_parts
from hodei.engine.nodes import Ints, Mask, Nodes
from hodei.engine.points import SILENT, reads_of
from hodei.engine.preemption.victim_cost import Breaches, Weighed, let_off_first, weighed
from hodei.engine.preemption.victims import LEAVING, TENANTS, VictimCandidate, VictimIndex
from hodei.engine.profile import Profile, key_of
from hodei.engine.ranking import stamp_of
from hodei.engine.view import Member, View

# The best rows are kept in order, more of them than are looked at, so that some can drop out before all are sorted again.
_FRONT = 256
_FRONT_AT_LEAST = 64
# Past this many changed rows, working all of them out at once is cheaper than one by one.
_FEW_ROWS = 32
_NEVER = int(np.iinfo(np.int64).max)
# Runs of a node that are told apart in a key. Where each priority number is a class there is less room for them.
_RUNS = 1 << 20
_RUNS_BY_NUMBER = 1 << 10
_NUMBERS = 1 << 31


class NodeCandidate:
    """For members of one shape and one class. `ruled`: rules about other work refuse nodes too, not room alone."""

    def __init__(self, engine: Engine, tenancy: VictimIndex, profile: Profile, rank: int) -> None:
        self._engine, self._table, self._tenancy, self._profile, self._rank = (
            engine, engine.table, tenancy, profile, rank,
        )  # fmt: skip
        self._member: Member
        self._request: list[tuple[str, int]] = []
        self._generation = (-1, -1)
        self._seen = self._seen_tenants = 0
        self._live: list[Any] = []
        self._cluster: list[_Cluster] = []
        # Nodes that a plugin keeps the member from whoever goes: by what they are, by their own usage, by anything else.
        self._shut = self._shut_live = self._shut_cluster = self._table.view().none()
        self._keys: Ints = np.zeros(0, dtype=np.int64)
        self._front: list[int] = []
        self._limit = -1
        self._weighed: dict[int, Weighed | None] = {}
        self._weighed_ms = -1
        self._weighed_by: Hashable = None
        self._runs = _RUNS_BY_NUMBER if tenancy.by_number else _RUNS

    @property
    def ruled(self) -> bool:
        return any(rules.refuses for rules in self._cluster)

    # ------------------------------------------------------------------------------------------ keeping up

    def refresh(self, member: Member, view: View) -> None:
        table, tenancy, runner = self._table, self._tenancy, self._engine.runner
        self._member = member
        tenancy.at(view.now_ms)
        guard = tenancy.guard
        by = None if guard is None else (id(guard), guard.version)
        if self._weighed_ms != view.now_ms or self._weighed_by != by:
            if by != self._weighed_by or not tenancy.by_number:
                self._weighed.clear()  # work lost grows with time
            self._weighed_ms, self._weighed_by = view.now_ms, by
        failures = runner.failures
        if self._generation != (table.generation, tenancy.generation):
            self._build(view)
        else:
            rows = {*table.changes[self._seen :], *tenancy.changes[self._seen_tenants :]}
            if self._cluster_moved(view) or len(rows) > _FEW_ROWS:
                self._ask_live(view)
                self._lay()
            else:
                for row in rows:
                    self._update(row, view)
        self._seen, self._seen_tenants = len(table.changes), len(tenancy.changes)
        if runner.failures != failures:
            self._generation = (-1, -1)

    def _build(self, view: View) -> None:
        nodes = self._table.view()
        self._generation = (self._table.generation, self._tenancy.generation)
        self._request = [(resource, amount) for resource, amount in self._member.task.request.items() if amount]
        self._live, self._cluster, self._shut = [], [], nodes.none()
        for plugin in self._profile.filters:
            reads = reads_of(plugin)
            if key_of(plugin, self._member) == SILENT:
                continue
            if reads == "cluster":
                self._cluster.append(_Cluster(plugin, nodes.none()))
            elif reads == "usage":
                self._live.append(plugin)
            else:
                self._shut = self._shut | self._ask(plugin, nodes, view)[0]
        self._ask_live(view)
        self._shut_cluster = nodes.none()
        self._cluster_moved(view)
        self._lay()

    def _ask(self, plugin: Any, nodes: Nodes, view: View) -> tuple[Mask, bool]:
        """The nodes that a plugin refuses whoever goes, and whether it refuses any that could be helped."""
        shut, helped = nodes.none(), False
        for mask, reason in self._engine.runner.refusals(plugin, self._member, nodes, view):
            if reason.evictable:
                helped = helped or bool(mask.any())
            else:
                shut = shut | mask
        return shut, helped

    def _ask_live(self, view: View) -> None:
        nodes = self._table.view()
        self._shut_live = nodes.none()
        for plugin in self._live:
            self._shut_live = self._shut_live | self._ask(plugin, nodes, view)[0]

    def _cluster_moved(self, view: View) -> bool:
        """Ask those anew that look at the whole cluster, if their stamp says so; whether other nodes are shut now."""
        asked = False
        for rules in self._cluster:
            stamp = stamp_of(rules.plugin, self._member, self._table)
            if stamp is None or stamp != rules.stamp:
                rules.stamp, asked = stamp, True
                rules.shut, helped = self._ask(rules.plugin, self._table.view(), view)
                rules.refuses = helped or bool(rules.shut.any())
        if not asked:
            return False
        shut = self._table.view().none()
        for rules in self._cluster:
            shut = shut | rules.shut
        moved = not np.array_equal(shut, self._shut_cluster)
        self._shut_cluster = shut
        return moved

    # ------------------------------------------------------------------------------------------- the order

    def _lay(self) -> None:
        """The key of every row: the lowest class that could make room there, then how many runs it has."""
        table, tenancy = self._table, self._tenancy
        nodes, count = table.view(), len(table.names)
        room = {resource: nodes.free(resource).copy() for resource, _ in self._request}
        tenants = nodes.zeros()
        left = ~(self._shut | self._shut_live | self._shut_cluster)
        self._keys = np.full(count, _NEVER, dtype=np.int64)
        self._weighed.clear()
        if tenancy.many:
            for row in np.flatnonzero(left).tolist():
                self._keys[row] = self._key(row)
            self._sort()
            return
        for rank in (LEAVING, *tenancy.ranks_below(self._rank)):
            held = tenancy.held_by(rank)
            if TENANTS not in held:
                continue
            tenants += held[TENANTS]
            enough = left & (tenants > 0)
            for resource, amount in self._request:
                if resource in held:
                    room[resource] += held[resource]
                enough &= room[resource] >= amount
            rows = np.flatnonzero(enough)
            first, most = self._level(rank) * self._runs, self._runs - 1
            self._keys[rows] = (first + np.minimum(table.runs[rows], most)) * count + rows
            left &= ~enough
        self._sort()

    def _level(self, rank: int) -> int:
        """A class as keys have it, in 33 bits: those who go anyway first."""
        if rank == LEAVING:
            return 0
        return min(max(rank, -_NUMBERS), _NUMBERS) + _NUMBERS + 1 if self._tenancy.by_number else rank + 1

    def _sort(self) -> None:
        keys = self._keys
        best = np.sort(np.partition(keys, _FRONT - 1)[:_FRONT] if len(keys) > _FRONT else keys)
        self._front = best[best < _NEVER].tolist()
        # Every key up to this one is in front.
        self._limit = self._front[-1] if len(self._front) == _FRONT < len(keys) else _NEVER - 1

    def _update(self, row: int, view: View) -> None:
        """The same for one row."""
        self._weighed.pop(row, None)
        if self._live:
            self._shut_live[row] = any(self._shuts(plugin, row, view) for plugin in self._live)
        before, key, front = self._keys.item(row), self._key(row), self._front
        if key != before:
            self._keys[row] = key
            if before <= self._limit:
                del front[bisect_left(front, before)]
            if key <= self._limit:
                insort(front, key)
            if self._limit < _NEVER - 1 and not _FRONT_AT_LEAST <= len(front) <= 2 * _FRONT:
                self._sort()

    def _shuts(self, plugin: Any, row: int, view: View) -> bool:
        if getattr(plugin, "plain", False):
            try:
                pairs = plugin.filter(self._member, self._table.one(row), view)
                return any(refused and not reason.evictable for refused, reason in pairs)
            except Exception:
                pass  # asked again behind the fence, which reports it
        return bool(self._ask(plugin, self._table.view(np.array([row])), view)[0][0])

    def _key(self, row: int) -> int:
        if self._shut.item(row) or self._shut_live.item(row) or self._shut_cluster.item(row):
            return _NEVER
        table, tenancy = self._table, self._tenancy
        holding, room = table.holds[row], table.room[row]
        used = holding.used
        lacking = {
            resource: amount - room.get(resource, 0) + used.get(resource, 0) for resource, amount in self._request
        }
        if tenancy.many:
            return self._key_by_tenants(row, lacking)
        for rank in (LEAVING, *tenancy.ranks_below(self._rank)):
            held = tenancy.held_by(rank)
            if TENANTS in held and held[TENANTS].item(row) > 0:
                enough = True
                for resource, lack in lacking.items():
                    if lack > 0 and resource in held:
                        lack = lacking[resource] = lack - held[resource].item(row)
                    enough = enough and lack <= 0
                if enough:
                    return self._key_at(rank, row)
        return _NEVER

    def _key_at(self, rank: int, row: int) -> int:
        runs = min(self._table.holds[row].runs, self._runs - 1)
        return (self._level(rank) * self._runs + runs) * len(self._table.names) + row

    def _key_by_tenants(self, row: int, lacking: dict[str, int]) -> int:
        name = self._table.names[row]
        for tenant in self._tenancy.lowest_first(name, self._rank):
            held, enough = tenant.holds[name], True
            for resource in lacking:
                lacking[resource] -= held.get(resource, 0)
                enough = enough and lacking[resource] <= 0
            if enough:
                return self._key_at(LEAVING if tenant.stopping else tenant.rank, row)
        return _NEVER

    def rows(self, within: Mask | None = None) -> Iterator[int]:
        """Rows where room could be made, the lowest class first, then the fewest runs, then the name."""
        count = len(self._keys)
        if within is None:
            for key in self._front:
                yield key % count
            rest = self._keys[(self._keys > self._limit) & (self._keys < _NEVER)]
        else:
            rest = self._keys[within & (self._keys < _NEVER)]
        rest.sort()
        for key in rest:
            yield int(key) % count

    # --------------------------------------------------------------------------------------------- weighing

    def best(self, gone: Collection[VictimCandidate], within: Mask | None, few: int, most: int) -> list[Weighed]:
        """Who would have to go on the first `few` rows; if that helps on none of them, on the next of `most` where it
        does."""
        if self._tenancy.guard is not None:
            return self._best_within_budgets(gone, within, few, most)
        kept, count = self._weighed, len(self._keys)
        rows = [key % count for key in self._front[:few]] if within is None else list(islice(self.rows(within), few))
        weighed = [kept[row] if row in kept else self.weigh(row, gone) for row in rows]
        found = [here for here in weighed if here is not None]
        if not found and len(rows) == few:
            for row in islice(self.rows(within), few, most):
                here = self.weigh(row, gone)
                if here is not None:
                    return [here]
        return found

    def _best_within_budgets(
        self, gone: Collection[VictimCandidate], within: Mask | None, few: int, most: int
    ) -> list[Weighed]:
        """As `best`, looking on, up to `most` rows, as long as every way would pass a budget."""
        guard = self._tenancy.guard
        assert guard is not None
        # Who is gone already has taken from budgets, so that what is kept holds for the first member only.
        counts = any(not tenant.stopping and guard.guarded(tenant.id) for tenant in gone)
        rows, found = self.rows(within), list[Weighed]()
        for _ in range(most // few):
            batch = list(islice(rows, few))
            for row in batch:
                if counts:
                    self._weighed.pop(row, None)
                here = self.weigh(row, gone)
                if here is not None:
                    found.append(here)
                if counts:
                    self._weighed.pop(row, None)
            if len(batch) < few or any(not here.harm[0] for here in found):
                break
        return found

    def weigh(self, row: int, gone: Collection[VictimCandidate]) -> Weighed | None:
        """The least valuable tenants of one node whose going gives the member room; None if that is not enough, or if it
        is not room that the member lacks there."""
        if row in self._weighed:
            return self._weighed[row]
        found = self._weigh(row, gone)
        if found is not None and not (found.needed or found.leaving):
            found = None
        self._weighed[row] = found
        return found

    def tenants(
        self, row: int, gone: Collection[VictimCandidate]
    ) -> tuple[list[VictimCandidate], list[VictimCandidate], Breaches]:
        """Those on a row who could be made to go, the first to be let off first, those who go anyway, and who of the
        former would pass a budget."""
        here = [tenant for tenant in self._tenancy.on_node.get(self._table.names[row], ()) if tenant not in gone]
        leaving = [tenant for tenant in here if tenant.stopping]
        movable = [tenant for tenant in here if tenant.counted and tenant.rank < self._rank]
        movable, breaches = let_off_first(self._tenancy, movable, gone, self._weighed_ms)
        return movable, leaving, breaches

    def _weigh(self, row: int, gone: Collection[VictimCandidate]) -> Weighed | None:
        movable, leaving, breaches = self.tenants(row, gone)
        table, name = self._table, self._table.names[row]
        used, room = table.holds[row].used, table.room[row]
        # What is left of each resource that it asks for when all have gone and the member is there.
        spare = {resource: room.get(resource, 0) - used.get(resource, 0) - amount for resource, amount in self._request}
        for tenant in (*leaving, *movable):
            held = tenant.holds[name]
            for resource in spare:
                spare[resource] += held.get(resource, 0)
        for much in spare.values():
            if much < 0:
                return None
        parts = self._parts_without(row, (*leaving, *movable))
        if parts is not None and not parts.fits(self._member.task):
            return None
        needed: list[VictimCandidate] = []
        ending: set[int] = set()
        for tenant in movable:
            if tenant.id in ending:
                continue  # it goes with its gang
            held = tenant.holds[name]
            for resource, much in spare.items():
                if held.get(resource, 0) > much:
                    break
            else:
                if parts is None or self._may_stay(tenant, row, parts):
                    for resource in spare:
                        spare[resource] -= held.get(resource, 0)
                    continue
            needed.append(tenant)
            if tenant.whole:
                ending.add(tenant.id)
        return weighed(self._tenancy, row, needed, leaving, self._weighed_ms, breaches)

    def _parts_without(self, row: int, going: Collection[VictimCandidate]) -> DeviceSlots | None:
        """The cores and devices that are free when those have gone; None if that does not matter."""
        held = self._table.holds[row].parts
        if held is None or not wants_parts(self._member.task):
            return None
        parts, node = held.copy(), self._table.nodes[row]
        for tenant in going:
            for place in tenant.places:
                if place.node == node.name and place.grant is not None:
                    parts.give(place.grant, node)
        return parts

    def _may_stay(self, tenant: VictimCandidate, row: int, parts: DeviceSlots) -> bool:
        """Whether the member still finds parts that suit it beside the tenant's; they are the tenant's again then."""
        node = self._table.nodes[row]
        grants = [place.grant for place in tenant.places if place.node == node.name and place.grant is not None]
        for grant in grants:
            parts.take(grant)
        if parts.fits(self._member.task):
            return True
        for grant in grants:
            parts.give(grant, node)
        return False


class _Cluster(Struct):
    """What a plugin that looks at the whole cluster said last. `refuses`: it refuses nodes at all."""

    plugin: Any
    shut: Mask
    stamp: Hashable = None
    refuses: bool = False
