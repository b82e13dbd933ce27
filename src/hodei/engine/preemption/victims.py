"""Running gangs as preemption candidates: nodes, start time, protection, and cost of stopping them.

A gang stops as a whole, except members that an elastic gang can spare: each is a candidate of its own. The resources
held per class and node are kept in columns, so that "could lower classes free enough here?" is one comparison over
all nodes; `changes` lists the rows that changed.

With preemption by priority number each number is a class. With too many numbers (`without_columns`) there are no columns, and
each node is evaluated by its candidates.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import count as counter
from typing import Literal, NamedTuple, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from hodei.engine.nodes import Table
from hodei.engine.view import Member
from hodei.model.ids import JobId, NodeName
from hodei.model.job import PRIORITY_CLASSES, QOS_RANK, JobSpec, job_qos
from hodei.model.node import Grant
from hodei.model.resources import Resources

Ints = NDArray[np.int64]
_FLOORS = sorted(PRIORITY_CLASSES.values())
# Low, batch and scavenger work does not preempt.
_NON_PREEMPTING = PRIORITY_CLASSES["low"]
# No expiry.
FOREVER = 1 << 62
# The class of runs that are stopping already, below all others; and the column that counts candidates.
STOPPING = -(1 << 62)
COUNT = ""
# Rebuild rather than let the trace grow without bound.
_MAX_TRACE = 1_000_000
# Up to this many priority numbers have columns; beyond, none has until half as many are left.
_MOST_COLUMNS = 64
_BELOW_KEPT = 256

# By named class, or by priority number.
By = Literal["class", "number"]
# A job, and those of its members that stop (empty: all).
Disruption = tuple[JobId, tuple[int, ...]]


class Guard(Protocol):
    """Disruption budgets, respected where possible. `version` changes whenever an answer may have changed."""

    version: int

    def guarded(self, job: JobId) -> bool:
        """Whether a budget covers the job. Called often."""

    def violations(self, disruptions: Sequence[Disruption]) -> list[int]:
        """If these stop in this order: for each, how many members violate a budget."""


@lru_cache(maxsize=4096)
def class_of(priority: int) -> int:
    """The highest class that the priority reaches; the lowest for all below."""
    return max((floor for floor in _FLOORS if floor <= priority), default=_FLOORS[0])


def may_preempt(priority: int) -> bool:
    return class_of(priority) > _NON_PREEMPTING


NO_DEVICES = Grant()


class Place(NamedTuple):
    """The node of a member. `grant`: its devices, NO_DEVICES for none."""

    node: NodeName
    member: Member
    grant: Grant | None = None


class VictimCandidate(Struct, eq=False):
    """A placed gang, or one member that it can spare (its number in `members`, its rank in `order`).

    `since_ms`: start of the gang. `unsaved_ms`: for each member, since when its work is not saved; empty if nothing
    is lost. `stopping`: its capacity will be free without preemption. `protected_until_ms`: not preempted before
    that.
    """

    id: JobId
    job: JobSpec
    places: tuple[Place, ...]
    since_ms: int
    unsaved_ms: tuple[int, ...] = ()
    stopping: bool = False
    protected_until_ms: int = 0
    members: tuple[int, ...] = ()
    order: int = 0
    # Computed:
    holds: dict[NodeName, Resources] = {}
    rank: int = 0
    cached_qos: int = -1
    counted: bool = False  # may be preempted now and is in the columns of its class

    def __post_init__(self) -> None:
        held: dict[NodeName, Resources] = {}
        for name, member, _ in self.places:
            sums = held.get(name)
            if sums is None:
                held[name] = {**member.task.request, COUNT: 1}
                continue
            for resource, amount in member.task.request.items():
                sums[resource] = sums.get(resource, 0) + amount
        self.holds = held
        self.rank = class_of(self.job.priority)

    @property
    def stops_gang(self) -> bool:
        return not self.members

    @property
    def qos_order(self) -> int:
        """Rank of its QoS class; computed on demand."""
        if self.cached_qos < 0:
            self.cached_qos = QOS_RANK[job_qos(self.job)]
        return self.cached_qos

    def lost_ms(self, now_ms: int) -> int:
        lost = 0
        for at in self.unsaved_ms:
            if at < now_ms:
                lost += now_ms - at
        return lost

    def worth(self, now_ms: int) -> tuple[int, ...]:
        """Sort key, least important first: priority, QoS, spare members, lost work, size, youngest."""
        return (
            self.job.priority, self.qos_order, self.stops_gang, self.lost_ms(now_ms), len(self.places), -self.since_ms, -self.id, -self.order
        )  # fmt: skip


class VictimIndex:
    def __init__(self, table: Table, by: By = "class") -> None:
        self._table = table
        self.by_number = by == "number"
        self.guard: Guard | None = None
        self.without_columns = False
        self._aside: set[VictimCandidate] = set()
        self._generation = -1
        self._held: dict[int, dict[str, Ints]] = {}
        self.of_job: dict[JobId, tuple[VictimCandidate, ...]] = {}
        self.on_node: dict[NodeName, dict[VictimCandidate, None]] = {}
        self.stopping: dict[VictimCandidate, None] = {}
        self._ranks: Counter[int] = Counter()
        self._below: dict[int, list[int]] = {}
        self._protected: list[tuple[int, int, VictimCandidate]] = []  # heap by end of protection
        self._turn = counter()
        self.changes: list[int] = []
        self.generation = 0

    def put(self, id: JobId, victims: Iterable[VictimCandidate]) -> None:
        self.remove(id)
        units = self.of_job[id] = tuple(victims)
        for victim in units:
            if self.by_number:
                victim.rank = victim.job.priority
            for name in victim.holds:
                self.on_node.setdefault(name, {})[victim] = None
            if victim.stopping:
                self.stopping[victim] = None
                self._count(victim, STOPPING, 1)
            elif victim.protected_until_ms:
                if victim.protected_until_ms < FOREVER:
                    heapq.heappush(self._protected, (victim.protected_until_ms, next(self._turn), victim))
            else:
                self._admit(victim)
        if len(self._protected) > 2 * len(self.of_job) + 1000:
            self._protected = [kept for kept in self._protected if kept[0] == kept[2].protected_until_ms]
            heapq.heapify(self._protected)

    def remove(self, id: JobId) -> None:
        for victim in self.of_job.pop(id, ()):
            for name in victim.holds:
                here = self.on_node[name]
                del here[victim]
                if not here:
                    del self.on_node[name]
            if victim.stopping:
                del self.stopping[victim]
                self._count(victim, STOPPING, -1)
            elif victim.counted:
                self._ranks[victim.rank] -= 1
                victim.counted = False
                self._count(victim, victim.rank, -1)
                if not self._ranks[victim.rank]:
                    self._remove_class(victim.rank)
            victim.protected_until_ms = FOREVER  # a stale heap entry is skipped

    def at(self, now_ms: int) -> None:
        """Admit candidates whose protection has expired, and rebuild the columns for a new table."""
        if self._generation != self._table.generation or len(self.changes) > _MAX_TRACE:
            self._rebuild()
        while self._protected and self._protected[0][0] <= now_ms:
            until, _, victim = heapq.heappop(self._protected)
            if victim.protected_until_ms == until:
                self._admit(victim)

    def _admit(self, victim: VictimCandidate) -> None:
        victim.counted = True
        if not self._ranks[victim.rank]:
            self._below.clear()
        self._ranks[victim.rank] += 1
        self._count(victim, victim.rank, 1)
        if self.by_number and not self.without_columns and len(self._ranks) > _MOST_COLUMNS:
            self.without_columns = True
            self._held = {}
            self.generation += 1

    def _remove_class(self, rank: int) -> None:
        self._below.clear()
        if self.by_number:
            del self._ranks[rank]
            self._held.pop(rank, None)
            if self.without_columns and len(self._ranks) <= _MOST_COLUMNS // 2:
                self.without_columns = False
                self._generation = -1  # rebuilt on demand

    def set_aside(self, victim: VictimCandidate, by: int) -> None:
        """In a trial: removed (-1) or restored (+1)."""
        if victim.stopping or victim.counted:
            if self.without_columns:
                (self._aside.add if by < 0 else self._aside.discard)(victim)
            self._count(victim, STOPPING if victim.stopping else victim.rank, by)

    def rank_of(self, priority: int) -> int:
        return priority if self.by_number else class_of(priority)

    def may_preempt(self, priority: int, now_ms: int) -> bool:
        """Whether any candidate could be preempted at this priority."""
        if not self.by_number:
            return may_preempt(priority)
        self.at(now_ms)
        if self.ranks_below(priority):
            return True
        others = [
            *self.stopping,
            *(victim for until, _, victim in self._protected if victim.protected_until_ms == until),
        ]
        return any(victim.rank < priority for victim in others)

    @property
    def by_order_of_pods(self) -> bool:
        """Compare victims as Kubernetes does: by budgets and priorities, not by lost work."""
        return self.by_number or self.guard is not None

    def lowest_first(self, node: NodeName, rank: int) -> list[VictimCandidate]:
        """Candidates on a node below that class: stopping ones first, then the lowest classes."""
        here = [t for t in self.on_node.get(node, ()) if (t.stopping or (t.counted and t.rank < rank))]
        if self._aside:
            here = [victim for victim in here if victim not in self._aside]
        here.sort(key=lambda victim: STOPPING if victim.stopping else victim.rank)
        return here

    def ranks_below(self, rank: int) -> list[int]:
        """Classes with candidates below that one, ascending."""
        found = self._below.get(rank)
        if found is None:
            if len(self._below) > _BELOW_KEPT:
                self._below.clear()
            found = self._below[rank] = sorted([r for r, number in self._ranks.items() if number > 0 and r < rank])
        return found

    def held_by(self, rank: int) -> dict[str, Ints]:
        """Resources held per node by one class; absent means 0."""
        return self._held.get(rank, {})

    def next_unprotected_ms(self) -> int:
        """When the next protection expires; FOREVER if none does."""
        return self._protected[0][0] if self._protected else FOREVER

    def protected_on(self, rank: int) -> dict[NodeName, Resources]:
        """Resources per node of lower classes whose protection will expire."""
        out: dict[NodeName, Resources] = {}
        for until, _, victim in self._protected:
            if victim.protected_until_ms == until and victim.rank < rank:
                for name, held in victim.holds.items():
                    sums = out.setdefault(name, {})
                    for resource, amount in held.items():
                        sums[resource] = sums.get(resource, 0) + amount
        return out

    def _rebuild(self) -> None:
        self._generation = self._table.generation
        self.generation += 1
        self.changes.clear()
        self._held = {}
        for victims in self.of_job.values():
            for victim in victims:
                if victim.stopping or victim.counted:
                    self._count(victim, STOPPING if victim.stopping else victim.rank, 1)

    def _count(self, victim: VictimCandidate, rank: int, by: int) -> None:
        if self._generation != self._table.generation:
            return  # rebuilt on demand
        of_class = self._held.get(rank)
        if of_class is None and not self.without_columns:
            of_class = self._held[rank] = {}
        for name, held in victim.holds.items():
            row = self._table.row.get(name)
            if row is None:
                continue
            self.changes.append(row)
            if of_class is None:
                continue
            for resource, amount in held.items():
                column = of_class.get(resource)
                if column is None:
                    column = of_class[resource] = np.zeros(len(self._table.names), dtype=np.int64)
                column[row] += by * amount


# Budget violations per victim, in members.
Violations = Mapping[VictimCandidate, int]
NO_VIOLATIONS: Violations = {}
# Makes priorities positive, so that fewer victims have the smaller sum.
_ABOVE_ZERO = 1 << 31


class VictimSet(Struct):
    """Victims on one node: `needed`, and `stopping` which already stop. The smallest `cost` is tried first."""

    cost: tuple[int, ...]
    needed: list[VictimCandidate]
    stopping: list[VictimCandidate]


def victim_set(
    victim_index: VictimIndex,
    row: int,
    needed: list[VictimCandidate],
    stopping: list[VictimCandidate],
    now_ms: int,
    violations: Violations = NO_VIOLATIONS,
) -> VictimSet:
    """Cost, compared in this order: highest priority, its QoS, lost work, gangs stopped, victims; then the youngest.
    In pod order budget violations come first."""
    if victim_index.by_order_of_pods:
        return VictimSet((*_pod_cost(victim_index, needed, violations), row), needed, stopping)
    highest, lost, ends, since = max((victim.job.priority for victim in needed), default=0), 0, 0, 0
    qos_order = max((victim.qos_order for victim in needed if victim.job.priority == highest), default=0)
    for victim in needed:
        lost += victim.lost_ms(now_ms)
        ends += victim.stops_gang
        since = max(since, victim.since_ms)
    # No victims sorts first, even against negative priorities.
    return VictimSet((bool(needed), highest, qos_order, lost, ends, len(needed), -since, row), needed, stopping)


def reprieve_order(
    victim_index: VictimIndex, victims: list[VictimCandidate], removed: Collection[VictimCandidate], now_ms: int
) -> tuple[list[VictimCandidate], Violations]:
    """Reprieve order, most important first, and budget violations on top of those in `removed`."""
    if not victim_index.by_order_of_pods:
        if len(victims) > 1:
            victims = sorted(victims, key=lambda victim: victim.worth(now_ms), reverse=True)
        return victims, NO_VIOLATIONS
    victims = sorted(victims, key=_importance, reverse=True)
    guard = victim_index.guard
    if guard is None or not any(guard.guarded(victim.id) for victim in victims):
        return victims, NO_VIOLATIONS
    already = [_disruption(victim) for victim in removed if not victim.stopping and victim not in victims]
    passed = guard.violations([*already, *map(_disruption, victims)])[len(already) :]
    violations = {victim: count for victim, count in zip(victims, passed, strict=True) if count}
    return [*violations, *(victim for victim in victims if victim not in violations)], violations


def _pod_cost(victim_index: VictimIndex, needed: list[VictimCandidate], violations: Violations) -> tuple[int, ...]:
    passed = highest = total = count = since = 0
    for number, victim in enumerate(needed):
        priority = victim.job.priority
        members = (
            sum(len(one.places) for one in victim_index.of_job[victim.id]) if victim.stops_gang else len(victim.places)
        )
        passed += violations.get(victim, 0)
        total += (priority + _ABOVE_ZERO) * members
        count += members
        if not number or priority > highest:
            highest, since = priority, victim.since_ms
        elif priority == highest:
            since = min(since, victim.since_ms)
    return passed, bool(needed), highest, total, count, -since


def _importance(victim: VictimCandidate) -> tuple[int, ...]:
    """Higher priority, whole gangs, older; ties to the first submitted."""
    return victim.job.priority, victim.stops_gang, -victim.since_ms, -victim.id, -victim.order


def _disruption(victim: VictimCandidate) -> Disruption:
    return victim.id, victim.members
