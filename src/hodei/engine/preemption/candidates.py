"""Nodes where preemption could free enough capacity for a member, the lowest victim class first.

Cached per shape and class and refreshed for changed rows, as rankings are. The victims of a node (`victims_on`) are
computed only for the best few nodes and cached until something changes there. All of it is exact.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Hashable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from msgspec import Struct

from hodei.engine.cycle import Engine
from hodei.engine.device_slots import DeviceSlots, needs_devices
from hodei.engine.nodes import Ints, Mask, Nodes
from hodei.engine.points import NO_OPINION, reads_of
from hodei.engine.preemption.victims import (
    COUNT,
    STOPPING,
    VictimCandidate,
    VictimIndex,
    VictimSet,
    Violations,
    reprieve_order,
    victim_set,
)
from hodei.engine.profile import Profile, key_of
from hodei.engine.ranking import stamp_of
from hodei.engine.view import Member, View

# The best rows are kept sorted, more than are used, so that some can drop out before a full sort.
_FRONT = 256
_FRONT_AT_LEAST = 64
# With more changed rows, recomputing all is cheaper.
_FEW_ROWS = 32
_NEVER = int(np.iinfo(np.int64).max)
# Limits of the run count in a sort key; smaller where each priority number is a class.
_RUNS = 1 << 20
_RUNS_BY_NUMBER = 1 << 10
_NUMBERS = 1 << 31


class NodeCandidates:
    """For members of one shape and one class. `blocked_by_rules`: rules other than capacity refuse nodes too."""

    def __init__(self, engine: Engine, victim_index: VictimIndex, profile: Profile, rank: int) -> None:
        self._engine, self._table, self._victim_index, self._profile, self._rank = (
            engine, engine.table, victim_index, profile, rank,
        )  # fmt: skip
        self._member: Member
        self._request: list[tuple[str, int]] = []
        self._generation = (-1, -1)
        self._seen = self._seen_tenants = 0
        self._live: list[Any] = []
        self._cluster: list[_Cluster] = []
        # Nodes that preemption cannot make feasible: by node properties, by usage, by other state.
        self._closed = self._closed_by_usage = self._closed_by_cluster = self._table.view().none()
        self._keys: Ints = np.zeros(0, dtype=np.int64)
        self._front: list[int] = []
        self._limit = -1
        self._victim_sets: dict[int, VictimSet | None] = {}
        self._computed_ms = -1
        self._computed_by: Hashable = None
        self._runs = _RUNS_BY_NUMBER if victim_index.by_number else _RUNS

    @property
    def blocked_by_rules(self) -> bool:
        return any(rules.refuses for rules in self._cluster)

    def refresh(self, member: Member, view: View) -> None:
        table, victim_index, runner = self._table, self._victim_index, self._engine.runner
        self._member = member
        victim_index.at(view.now_ms)
        guard = victim_index.guard
        by = None if guard is None else (id(guard), guard.version)
        if self._computed_ms != view.now_ms or self._computed_by != by:
            if by != self._computed_by or not victim_index.by_number:
                self._victim_sets.clear()  # lost work grows with time
            self._computed_ms, self._computed_by = view.now_ms, by
        failures = runner.failures
        if self._generation != (table.generation, victim_index.generation):
            self._build(view)
        else:
            rows = {*table.changes[self._seen :], *victim_index.changes[self._seen_tenants :]}
            if self._cluster_moved(view) or len(rows) > _FEW_ROWS:
                self._evaluate_usage(view)
                self._compute_keys()
            else:
                for row in rows:
                    self._update(row, view)
        self._seen, self._seen_tenants = len(table.changes), len(victim_index.changes)
        if runner.failures != failures:
            self._generation = (-1, -1)

    def _build(self, view: View) -> None:
        nodes = self._table.view()
        self._generation = (self._table.generation, self._victim_index.generation)
        self._request = [(resource, amount) for resource, amount in self._member.task.request.items() if amount]
        self._live, self._cluster, self._closed = [], [], nodes.none()
        for plugin in self._profile.filters:
            reads = reads_of(plugin)
            if key_of(plugin, self._member) == NO_OPINION:
                continue
            if reads == "cluster":
                self._cluster.append(_Cluster(plugin, nodes.none()))
            elif reads == "usage":
                self._live.append(plugin)
            else:
                self._closed = self._closed | self._evaluate(plugin, nodes, view)[0]
        self._evaluate_usage(view)
        self._closed_by_cluster = nodes.none()
        self._cluster_moved(view)
        self._compute_keys()

    def _evaluate(self, plugin: Any, nodes: Nodes, view: View) -> tuple[Mask, bool]:
        """Nodes that the plugin refuses whatever is preempted, and whether preemption could help on others."""
        shut, evictable = nodes.none(), False
        for mask, reason in self._engine.runner.refusals(plugin, self._member, nodes, view):
            if reason.evictable:
                evictable = evictable or bool(mask.any())
            else:
                shut = shut | mask
        return shut, evictable

    def _evaluate_usage(self, view: View) -> None:
        nodes = self._table.view()
        self._closed_by_usage = nodes.none()
        for plugin in self._live:
            self._closed_by_usage = self._closed_by_usage | self._evaluate(plugin, nodes, view)[0]

    def _cluster_moved(self, view: View) -> bool:
        """Call plugins that read the cluster again if their stamp changed; whether the infeasible nodes changed."""
        called = False
        for rules in self._cluster:
            stamp = stamp_of(rules.plugin, self._member, self._table)
            if stamp is None or stamp != rules.stamp:
                rules.stamp, called = stamp, True
                rules.closed, evictable = self._evaluate(rules.plugin, self._table.view(), view)
                rules.refuses = evictable or bool(rules.closed.any())
        if not called:
            return False
        shut = self._table.view().none()
        for rules in self._cluster:
            shut = shut | rules.closed
        moved = not np.array_equal(shut, self._closed_by_cluster)
        self._closed_by_cluster = shut
        return moved

    def _compute_keys(self) -> None:
        """The sort key of every row: the lowest class that could free enough, then the number of runs."""
        table, victim_index = self._table, self._victim_index
        nodes, count = table.view(), len(table.names)
        free = {resource: nodes.free(resource).copy() for resource, _ in self._request}
        victims = nodes.zeros()
        left = ~(self._closed | self._closed_by_usage | self._closed_by_cluster)
        self._keys = np.full(count, _NEVER, dtype=np.int64)
        self._victim_sets.clear()
        if victim_index.without_columns:
            for row in np.flatnonzero(left).tolist():
                self._keys[row] = self._key(row)
            self._sort()
            return
        for rank in (STOPPING, *victim_index.ranks_below(self._rank)):
            held = victim_index.held_by(rank)
            if COUNT not in held:
                continue
            victims += held[COUNT]
            enough = left & (victims > 0)
            for resource, amount in self._request:
                if resource in held:
                    free[resource] += held[resource]
                enough &= free[resource] >= amount
            rows = np.flatnonzero(enough)
            first, most = self._level(rank) * self._runs, self._runs - 1
            self._keys[rows] = (first + np.minimum(table.runs[rows], most)) * count + rows
            left &= ~enough
        self._sort()

    def _level(self, rank: int) -> int:
        """A class in 33 bits for the key; runs that are stopping already come first."""
        if rank == STOPPING:
            return 0
        return min(max(rank, -_NUMBERS), _NUMBERS) + _NUMBERS + 1 if self._victim_index.by_number else rank + 1

    def _sort(self) -> None:
        keys = self._keys
        best = np.sort(np.partition(keys, _FRONT - 1)[:_FRONT] if len(keys) > _FRONT else keys)
        self._front = best[best < _NEVER].tolist()
        # Every key up to this one is in `_front`.
        self._limit = self._front[-1] if len(self._front) == _FRONT < len(keys) else _NEVER - 1

    def _update(self, row: int, view: View) -> None:
        self._victim_sets.pop(row, None)
        if self._live:
            self._closed_by_usage[row] = any(self._closes(plugin, row, view) for plugin in self._live)
        before, key, front = self._keys.item(row), self._key(row), self._front
        if key != before:
            self._keys[row] = key
            if before <= self._limit:
                del front[bisect_left(front, before)]
            if key <= self._limit:
                insort(front, key)
            if self._limit < _NEVER - 1 and not _FRONT_AT_LEAST <= len(front) <= 2 * _FRONT:
                self._sort()

    def _closes(self, plugin: Any, row: int, view: View) -> bool:
        if getattr(plugin, "scalar", False):
            try:
                pairs = plugin.filter(self._member, self._table.one_node(row), view)
                return any(refused and not reason.evictable for refused, reason in pairs)
            except Exception:
                pass  # called again below by the runner, which reports the failure
        return bool(self._evaluate(plugin, self._table.view(np.array([row])), view)[0][0])

    def _key(self, row: int) -> int:
        if self._closed.item(row) or self._closed_by_usage.item(row) or self._closed_by_cluster.item(row):
            return _NEVER
        table, victim_index = self._table, self._victim_index
        used, allocatable = table.node_usage[row].used, table.allocatable[row]
        lacking = {
            resource: amount - allocatable.get(resource, 0) + used.get(resource, 0)
            for resource, amount in self._request
        }
        if victim_index.without_columns:
            return self._key_by_candidates(row, lacking)
        for rank in (STOPPING, *victim_index.ranks_below(self._rank)):
            held = victim_index.held_by(rank)
            if COUNT in held and held[COUNT].item(row) > 0:
                enough = True
                for resource, lack in lacking.items():
                    if lack > 0 and resource in held:
                        lack = lacking[resource] = lack - held[resource].item(row)
                    enough = enough and lack <= 0
                if enough:
                    return self._key_at(rank, row)
        return _NEVER

    def _key_at(self, rank: int, row: int) -> int:
        runs = min(self._table.node_usage[row].runs, self._runs - 1)
        return (self._level(rank) * self._runs + runs) * len(self._table.names) + row

    def _key_by_candidates(self, row: int, lacking: dict[str, int]) -> int:
        name = self._table.names[row]
        for victim in self._victim_index.lowest_first(name, self._rank):
            held, enough = victim.holds[name], True
            for resource in lacking:
                lacking[resource] -= held.get(resource, 0)
                enough = enough and lacking[resource] <= 0
            if enough:
                return self._key_at(STOPPING if victim.stopping else victim.rank, row)
        return _NEVER

    def rows(self, within: Mask | None = None) -> Iterator[int]:
        """Rows where preemption could help: lowest class first, then fewest runs, then name."""
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

    def best(self, removed: Collection[VictimCandidate], within: Mask | None, few: int, most: int) -> list[VictimSet]:
        """Victims on the first `few` rows; if none of them works, on the first of `most` rows that does."""
        if self._victim_index.guard is not None:
            return self._best_within_budgets(removed, within, few, most)
        kept, count = self._victim_sets, len(self._keys)
        rows = [key % count for key in self._front[:few]] if within is None else list(islice(self.rows(within), few))
        victim_set = [kept[row] if row in kept else self.victims_on(row, removed) for row in rows]
        found = [here for here in victim_set if here is not None]
        if not found and len(rows) == few:
            for row in islice(self.rows(within), few, most):
                here = self.victims_on(row, removed)
                if here is not None:
                    return [here]
        return found

    def _best_within_budgets(
        self, removed: Collection[VictimCandidate], within: Mask | None, few: int, most: int
    ) -> list[VictimSet]:
        """As `best`, continuing up to `most` rows while every choice would violate a disruption budget."""
        guard = self._victim_index.guard
        assert guard is not None
        # Victims removed already count against budgets, so cached results hold for the first member only.
        counts = any(not victim.stopping and guard.guarded(victim.id) for victim in removed)
        rows, found = self.rows(within), list[VictimSet]()
        for _ in range(most // few):
            batch = list(islice(rows, few))
            for row in batch:
                if counts:
                    self._victim_sets.pop(row, None)
                here = self.victims_on(row, removed)
                if here is not None:
                    found.append(here)
                if counts:
                    self._victim_sets.pop(row, None)
            if len(batch) < few or any(not here.cost[0] for here in found):
                break
        return found

    def victims_on(self, row: int, removed: Collection[VictimCandidate]) -> VictimSet | None:
        """The least important victims that free enough; None if they do not, or if capacity is not lacking."""
        if row in self._victim_sets:
            return self._victim_sets[row]
        found = self._find_victims(row, removed)
        if found is not None and not (found.needed or found.stopping):
            found = None
        self._victim_sets[row] = found
        return found

    def victims(
        self, row: int, removed: Collection[VictimCandidate]
    ) -> tuple[list[VictimCandidate], list[VictimCandidate], Violations]:
        """Possible victims on a row in reprieve order, runs that are stopping already, and budget violations."""
        here = [
            victim for victim in self._victim_index.on_node.get(self._table.names[row], ()) if victim not in removed
        ]
        stopping = [victim for victim in here if victim.stopping]
        movable = [victim for victim in here if victim.counted and victim.rank < self._rank]
        movable, violations = reprieve_order(self._victim_index, movable, removed, self._computed_ms)
        return movable, stopping, violations

    def _find_victims(self, row: int, removed: Collection[VictimCandidate]) -> VictimSet | None:
        movable, stopping, violations = self.victims(row, removed)
        table, name = self._table, self._table.names[row]
        used, allocatable = table.node_usage[row].used, table.allocatable[row]
        # Spare amounts when all victims have ended and the member is placed.
        spare = {
            resource: allocatable.get(resource, 0) - used.get(resource, 0) - amount
            for resource, amount in self._request
        }
        for victim in (*stopping, *movable):
            held = victim.holds[name]
            for resource in spare:
                spare[resource] += held.get(resource, 0)
        for much in spare.values():
            if much < 0:
                return None
        devices = self._devices_without(row, (*stopping, *movable))
        if devices is not None and not devices.fits(self._member.task):
            return None
        needed: list[VictimCandidate] = []
        ending: set[int] = set()
        for victim in movable:
            if victim.id in ending:
                continue  # stopped with its gang
            held = victim.holds[name]
            for resource, much in spare.items():
                if held.get(resource, 0) > much:
                    break
            else:
                if devices is None or self._can_keep(victim, row, devices):
                    for resource in spare:
                        spare[resource] -= held.get(resource, 0)
                    continue
            needed.append(victim)
            if victim.stops_gang:
                ending.add(victim.id)
        return victim_set(self._victim_index, row, needed, stopping, self._computed_ms, violations)

    def _devices_without(self, row: int, victims: Collection[VictimCandidate]) -> DeviceSlots | None:
        """Devices that are free without these victims; None if irrelevant."""
        held = self._table.node_usage[row].devices
        if held is None or not needs_devices(self._member.task):
            return None
        devices, node = held.copy(), self._table.nodes[row]
        for victim in victims:
            for place in victim.places:
                if place.node == node.name and place.grant is not None:
                    devices.give(place.grant, node)
        return devices

    def _can_keep(self, victim: VictimCandidate, row: int, devices: DeviceSlots) -> bool:
        """Whether the member still finds suitable devices beside this victim; if so, it keeps them."""
        node = self._table.nodes[row]
        grants = [place.grant for place in victim.places if place.node == node.name and place.grant is not None]
        for grant in grants:
            devices.take(grant)
        if devices.fits(self._member.task):
            return True
        for grant in grants:
            devices.give(grant, node)
        return False


class _Cluster(Struct):
    """The last answer of a plugin that reads the cluster. `refuses`: it refuses some nodes."""

    plugin: Any
    closed: Mask
    stamp: Hashable = None
    refuses: bool = False
