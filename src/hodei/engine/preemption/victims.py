"""Gangs that run now, as those see them who may take their place: where they are, since when, and what they are worth.

A gang goes whole, but for the members that an elastic one can do without: each of those is a tenant of its own. What the
tenants of each class hold of every node is kept in columns, so that "could anything lower make room here?" is one
comparison over all nodes; `changes` names the rows where the answer may have changed since.

Where the priority number itself is what counts, each number is a class of its own. While they are few all is as above; if
they are `many` there are no columns, and each node is looked at by its tenants.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import count as counter
from typing import Literal, NamedTuple, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from hodei.engine.nodes import Table
from hodei.engine.view import Member
from hodei.model.ids import JobId, NodeName
from hodei.model.job import PRIORITY_CLASSES, JobSpec
from hodei.model.node import Grant
from hodei.model.qos import FIRMNESS, job_qos
from hodei.model.resources import Resources

Ints = NDArray[np.int64]
_FLOORS = sorted(PRIORITY_CLASSES.values())
# Low, batch and scavenger work takes nobody's place.
_TIMID = PRIORITY_CLASSES["low"]
# A protection that does not run out.
FOR_EVER = 1 << 62
# The "class" of those who go anyway, below all others, and the "resource" that counts tenants.
LEAVING = -(1 << 62)
TENANTS = ""
# The trace is cut rather than let grow for ever.
_MAX_TRACE = 1_000_000
# So many priority numbers have columns; beyond that, and until they are half as many again, nobody has.
_MOST_COLUMNS = 64
_BELOW_KEPT = 256

# What makes a class: the named ones, or each priority number.
By = Literal["class", "number"]
# A job, and those of its members that would go; none named: all.
Going = tuple[JobId, tuple[int, ...]]


class Guard(Protocol):
    """Budgets of how many may go at a time, which are respected where that can be done. `version` changes whenever an
    answer may have."""

    version: int

    def guarded(self, job: JobId) -> bool:
        """Whether there is a budget that counts it at all. Asked often."""

    def violations(self, going: Sequence[Going]) -> list[int]:
        """If these went in this order: of each, how many members pass a budget."""


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


class VictimCandidate(Struct, eq=False):
    """A placed gang, or one member of it that it can do without (its number is in `members`, its rank in `order`).

    `since_ms`: since when the gang runs. `unsaved_ms`: for each member that would go with it, since when its work is not
    saved; none for those who lose nothing. `stopping`: told to go already, the room will be free without further harm.
    `safe_until_ms`: nobody may take its place before that.
    """

    id: JobId
    job: JobSpec
    places: tuple[Place, ...]
    since_ms: int
    unsaved_ms: tuple[int, ...] = ()
    stopping: bool = False
    safe_until_ms: int = 0
    members: tuple[int, ...] = ()
    order: int = 0
    # Worked out here:
    holds: dict[NodeName, Resources] = {}
    rank: int = 0
    firm: int = -1
    counted: bool = False  # it is in the columns of its class: its place can be taken

    def __post_init__(self) -> None:
        """What it holds of each node, added up once."""
        held: dict[NodeName, Resources] = {}
        for name, member, _ in self.places:
            sums = held.get(name)
            if sums is None:
                held[name] = {**member.task.request, TENANTS: 1}
                continue
            for resource, amount in member.task.request.items():
                sums[resource] = sums.get(resource, 0) + amount
        self.holds = held
        self.rank = class_of(self.job.priority)

    @property
    def whole(self) -> bool:
        """If it goes, all of its gang goes."""
        return not self.members

    @property
    def firmness(self) -> int:
        """How firmly its resources were promised; looked up when somebody asks, as few do."""
        if self.firm < 0:
            self.firm = FIRMNESS[job_qos(self.job)]
        return self.firm

    def lost_ms(self, now_ms: int) -> int:
        lost = 0
        for at in self.unsaved_ms:
            if at < now_ms:
                lost += now_ms - at
        return lost

    def worth(self, now_ms: int) -> tuple[int, ...]:
        """Small goes first: lower priority, the lower class of QoS, members that can be spared, less work lost, fewer
        members, the youngest."""
        return (
            self.job.priority, self.firmness, self.whole, self.lost_ms(now_ms), len(self.places), -self.since_ms, -self.id, -self.order
        )  # fmt: skip


class VictimIndex:
    def __init__(self, table: Table, by: By = "class") -> None:
        self._table = table
        self.by_number = by == "number"
        self.guard: Guard | None = None
        self.many = False
        self._aside: set[VictimCandidate] = set()
        self._generation = -1
        self._held: dict[int, dict[str, Ints]] = {}
        self.of_job: dict[JobId, tuple[VictimCandidate, ...]] = {}
        self.on_node: dict[NodeName, dict[VictimCandidate, None]] = {}
        self.stopping: dict[VictimCandidate, None] = {}
        self._ranks: Counter[int] = Counter()
        self._below: dict[int, list[int]] = {}
        self._safe: list[
            tuple[int, int, VictimCandidate]
        ] = []  # those whose protection runs out, the first to do so first
        self._turn = counter()
        self.changes: list[int] = []
        self.generation = 0

    # ----------------------------------------------------------------------------------- coming and going

    def put(self, id: JobId, tenants: Iterable[VictimCandidate]) -> None:
        """All that is known of a gang; what was known of it before is forgotten."""
        self.remove(id)
        units = self.of_job[id] = tuple(tenants)
        for tenant in units:
            if self.by_number:
                tenant.rank = tenant.job.priority
            for name in tenant.holds:
                self.on_node.setdefault(name, {})[tenant] = None
            if tenant.stopping:
                self.stopping[tenant] = None
                self._count(tenant, LEAVING, 1)
            elif tenant.safe_until_ms:
                if tenant.safe_until_ms < FOR_EVER:
                    heapq.heappush(self._safe, (tenant.safe_until_ms, next(self._turn), tenant))
            else:
                self._admit(tenant)
        if len(self._safe) > 2 * len(self.of_job) + 1000:
            self._safe = [kept for kept in self._safe if kept[0] == kept[2].safe_until_ms]
            heapq.heapify(self._safe)

    def remove(self, id: JobId) -> None:
        for tenant in self.of_job.pop(id, ()):
            for name in tenant.holds:
                here = self.on_node[name]
                del here[tenant]
                if not here:
                    del self.on_node[name]
            if tenant.stopping:
                del self.stopping[tenant]
                self._count(tenant, LEAVING, -1)
            elif tenant.counted:
                self._ranks[tenant.rank] -= 1
                tenant.counted = False
                self._count(tenant, tenant.rank, -1)
                if not self._ranks[tenant.rank]:
                    self._extinct(tenant.rank)
            tenant.safe_until_ms = FOR_EVER  # if it is among the safe still, it is passed over there

    def at(self, now_ms: int) -> None:
        """Let those in whose protection has run out by now, and lay the columns anew if the table was."""
        if self._generation != self._table.generation or len(self.changes) > _MAX_TRACE:
            self._lay()
        while self._safe and self._safe[0][0] <= now_ms:
            until, _, tenant = heapq.heappop(self._safe)
            if tenant.safe_until_ms == until:
                self._admit(tenant)

    def _admit(self, tenant: VictimCandidate) -> None:
        tenant.counted = True
        if not self._ranks[tenant.rank]:
            self._below.clear()
        self._ranks[tenant.rank] += 1
        self._count(tenant, tenant.rank, 1)
        if self.by_number and not self.many and len(self._ranks) > _MOST_COLUMNS:
            self.many = True
            self._held = {}
            self.generation += 1

    def _extinct(self, rank: int) -> None:
        """Nobody of that class is left."""
        self._below.clear()
        if self.by_number:
            del self._ranks[rank]
            self._held.pop(rank, None)
            if self.many and len(self._ranks) <= _MOST_COLUMNS // 2:
                self.many = False
                self._generation = -1  # columns again, when someone asks

    def set_aside(self, tenant: VictimCandidate, by: int) -> None:
        """In a trial: it is gone (-1) or back again (+1), and its room is counted as free or as its own."""
        if tenant.stopping or tenant.counted:
            if self.many:
                (self._aside.add if by < 0 else self._aside.discard)(tenant)
            self._count(tenant, LEAVING if tenant.stopping else tenant.rank, by)

    # --------------------------------------------------------------------------------------------- reading

    def rank_of(self, priority: int) -> int:
        return priority if self.by_number else class_of(priority)

    def may_preempt(self, priority: int, now_ms: int) -> bool:
        """Whether it is worth looking for somebody whose place one of this priority could take."""
        if not self.by_number:
            return may_preempt(priority)
        self.at(now_ms)
        if self.ranks_below(priority):
            return True
        others = [*self.stopping, *(tenant for until, _, tenant in self._safe if tenant.safe_until_ms == until)]
        return any(tenant.rank < priority for tenant in others)

    @property
    def by_order_of_pods(self) -> bool:
        """Victims are weighed as Kubernetes weighs pods: by budgets and priorities, not by the work that is lost."""
        return self.by_number or self.guard is not None

    def lowest_first(self, node: NodeName, rank: int) -> list[VictimCandidate]:
        """Who on a node could make room for one of that class: those who go anyway, then the lowest classes."""
        here = [t for t in self.on_node.get(node, ()) if (t.stopping or (t.counted and t.rank < rank))]
        if self._aside:
            here = [tenant for tenant in here if tenant not in self._aside]
        here.sort(key=_lowest)
        return here

    def ranks_below(self, rank: int) -> list[int]:
        """The classes under that one that somebody here belongs to, the lowest first."""
        found = self._below.get(rank)
        if found is None:
            if len(self._below) > _BELOW_KEPT:
                self._below.clear()
            found = self._below[rank] = sorted([r for r, number in self._ranks.items() if number > 0 and r < rank])
        return found

    def held_by(self, rank: int) -> dict[str, Ints]:
        """How much of each resource the tenants of one class hold on each node; none of what is not named."""
        return self._held.get(rank, {})

    def next_unsafe_ms(self, now_ms: int) -> int:
        """When the first protection runs out that has not yet; FOR_EVER if none does."""
        return self._safe[0][0] if self._safe else FOR_EVER

    def safe_on(self, rank: int) -> dict[NodeName, Resources]:
        """What those of lower classes hold whose protection will run out, by node."""
        out: dict[NodeName, Resources] = {}
        for until, _, tenant in self._safe:
            if tenant.safe_until_ms == until and tenant.rank < rank:
                for name, held in tenant.holds.items():
                    sums = out.setdefault(name, {})
                    for resource, amount in held.items():
                        sums[resource] = sums.get(resource, 0) + amount
        return out

    # ------------------------------------------------------------------------------------------- the columns

    def _lay(self) -> None:
        self._generation = self._table.generation
        self.generation += 1
        self.changes.clear()
        self._held = {}
        for tenants in self.of_job.values():
            for tenant in tenants:
                if tenant.stopping or tenant.counted:
                    self._count(tenant, LEAVING if tenant.stopping else tenant.rank, 1)

    def _count(self, tenant: VictimCandidate, rank: int, by: int) -> None:
        if self._generation != self._table.generation:
            return  # made anew when someone asks
        of_class = self._held.get(rank)
        if of_class is None and not self.many:
            of_class = self._held[rank] = {}
        for name, held in tenant.holds.items():
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


def _lowest(tenant: VictimCandidate) -> int:
    return LEAVING if tenant.stopping else tenant.rank
