"""Preemption search: the least disruptive set of victims that a full trial placement proves sufficient.

The search works on the table itself and undoes everything, so that all rules count (affinity, spread, ports), not
only resources. Nothing is evicted here.

For each infeasible member the cheapest nodes of `engine.preemption.candidates` are tried. If capacity is not the
obstacle, all possible victims of a node are removed and reprieved one by one while the member stays feasible. At the
end every victim that turns out not to be needed is reprieved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from operator import attrgetter

import numpy as np
from msgspec import Struct

from hodei.engine.cycle import Engine
from hodei.engine.plan import Refusal
from hodei.engine.points import Layout, Layouts, Placed
from hodei.engine.preemption.candidates import NodeCandidates
from hodei.engine.preemption.victims import (
    STOPPING,
    VictimCandidate,
    VictimIndex,
    VictimSet,
    Violations,
    reprieve_order,
    victim_set,
)
from hodei.engine.view import Gang, Member, View
from hodei.model.ids import JobId, NodeName
from hodei.model.job import JobSpec, Reason

# Nodes whose victims are computed exactly, of those with the lowest class and the fewest runs.
_NODES_COMPARED = 32
# The same in pod order, where results are cached longer.
_NODES_COMPARED_FOR_PODS = 64
# Upper bound of these, if the first ones free the wrong cores or GPUs.
_NODES_LOOKED_AT = 1024
# Full trials per member, if rules other than capacity refuse the best nodes.
_NODES_TRIED = 8
# Layouts tried.
_LAYOUTS_TRIED = 8
# Filter calls about one node when capacity is not the obstacle.
_QUESTIONS = 500
# Each reprieve places the whole gang; beyond this much work the victims stay.
_PLACINGS_TO_REPRIEVE = 20_000
_CACHED = 128


class Victim(Struct, frozen=True):
    """A job to preempt, or only `members` of it (empty: all), on `nodes`."""

    id: JobId
    job: JobSpec
    nodes: tuple[NodeName, ...]
    members: tuple[int, ...] = ()


class Preemption(Struct):
    """`victims` are to be stopped, `stopping` already stop; then the gang has `placements`."""

    victims: list[Victim]
    stopping: list[Victim]
    placements: list[Placed]


class CandidateCache:
    """Node candidates of all shapes in use; least recently used are dropped."""

    def __init__(self, engine: Engine, victim_index: VictimIndex) -> None:
        self._engine, self._victim_index = engine, victim_index
        self._kept: OrderedDict[Hashable, NodeCandidates] = OrderedDict()

    def of(self, gang: Gang, kind: int, rank: int, view: View) -> NodeCandidates:
        member = gang.members[kind]
        if self._victim_index.by_number:
            # Priorities above the same victims are equivalent.
            below = self._victim_index.ranks_below(rank)
            rank = below[-1] + 1 if below else STOPPING + 1
        key = (gang.shapes[kind], rank, member.task.binding)
        found = self._kept.get(key)
        if found is None:
            profile = self._engine.profile(gang)
            found = self._kept[key] = NodeCandidates(self._engine, self._victim_index, profile, rank)
            if len(self._kept) > _CACHED:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        found.refresh(member, view)
        return found


class Preemptions:
    """`retry_later`: a later search may succeed, when the protection of some victims has expired."""

    def __init__(self, engine: Engine, victim_index: VictimIndex) -> None:
        self._engine, self._victim_index = engine, victim_index
        self._candidates = CandidateCache(engine, victim_index)
        self.retry_later = False

    def find(self, gang: Gang, view: View) -> Preemption | None:
        """How `gang` could start by preemption; None if it cannot. The table is unchanged."""
        self.retry_later = False
        if not self._victim_index.may_preempt(gang.job.priority, view.now_ms):
            return None
        search = _Search(self._engine, self._victim_index, self._candidates, gang, view)
        with self._engine.table.trial():
            try:
                return search.run()
            finally:
                search.restore(list(search.removed))
                self.retry_later = search.retry_later


class _Search:
    def __init__(
        self, engine: Engine, victim_index: VictimIndex, candidates: CandidateCache, gang: Gang, view: View
    ) -> None:
        self._engine, self._victim_index, self._candidates = engine, victim_index, candidates
        self._gang, self._view = gang, view
        self._rank = victim_index.rank_of(gang.job.priority)
        self.removed: dict[VictimCandidate, None] = {}
        self.retry_later = False
        self._blocked_by_rules = False
        self._began = 0
        self._first: list[NodeCandidates] = []
        # Whether removed victims must be subtracted from the index.
        self._counts = True

    def run(self) -> Preemption | None:
        victim_index, gang = self._victim_index, self._gang
        victim_index.at(self._view.now_ms)
        self._began = len(self._engine.table.changes)
        self._first = [self._candidates_for(kind) for kind in range(len(gang.members))]
        self._blocked_by_rules = any(candidates.blocked_by_rules for candidates in self._first)
        self._counts = gang.size > 1 or self._blocked_by_rules
        placements = None
        if self._blocked_by_rules and victim_index.stopping:
            # Runs that are stopping may block the gang by rules from other nodes; capacity is checked per node.
            self._evict(victim_index.stopping)
            placements = self._place()
        if placements is None:
            placements = self._preempt()
        if placements is not None:
            placements = self._reprieve(placements)
        if placements is None:
            return None
        nodes = {placed.node.name for placed in placements}
        victims = _by_job(victim for victim in self.removed if not victim.stopping)
        stopping = _by_job(t for t in self.removed if t.stopping and any(name in nodes for name in t.holds))
        self._engine.withdraw(gang, placements)
        return Preemption(victims, stopping, placements)

    def _candidates_for(self, kind: int) -> NodeCandidates:
        return self._candidates.of(self._gang, kind, self._rank, self._view)

    def _place(self) -> list[Placed] | None:
        result = self._engine.place(self._gang, self._view, extras=False)
        return None if isinstance(result, Refusal) else result

    def _preempt(self) -> list[Placed] | None:
        """The gang placed after preemption, in the first layout where that works."""
        options: Sequence[Layout | None] = (None,)
        if self._engine.profile(self._gang).layouts:
            layouts = self._engine.layouts(self._gang, self._view)
            if isinstance(layouts, Reason):
                return None
            if isinstance(layouts, Layouts):
                options = list(islice(layouts.with_preemption(), _LAYOUTS_TRIED))
        before = len(self.removed)
        for layout in options:
            placements = self._place() if self._free_capacity(layout) else None
            if placements is not None:
                return placements
            self.restore(list(self.removed)[before:])
        return None

    def _free_capacity(self, layout: Layout | None) -> bool:
        """Place the members in turn, removing victims where needed, then release them; False if one fails."""
        engine, gang, view = self._engine, self._gang, self._view
        placed, left, enough = [], gang.size, True
        for kind, _, member in gang.needed_members():
            row = engine.best_row(gang, kind, view, layout)
            if row < 0:
                row = self._free_node(kind, member, layout)
            if row < 0:
                enough = False
                break
            left -= 1
            if left:
                placed.append((row, member, engine.table.place(row, member.task.request, member)))
        for row, member, grant in reversed(placed):
            engine.table.release(row, member.task.request, member, grant)
        return enough

    def _free_node(self, kind: int, member: Member, layout: Layout | None) -> int:
        """Remove the victims for one member and return its row; -1 if nothing helps."""
        untouched = len(self._engine.table.changes) == self._began
        candidates = self._first[kind] if untouched else self._candidates_for(kind)
        within = None if layout is None else layout.rows[kind]
        few = _NODES_COMPARED_FOR_PODS if self._victim_index.by_order_of_pods else _NODES_COMPARED
        found = candidates.best(self.removed, within, few, _NODES_LOOKED_AT)
        if found:
            row = self._try_victims(kind, min(found, key=_cost), layout)
            if row >= 0:
                return row
            for best in sorted(found, key=_cost)[1:_NODES_TRIED]:
                row = self._try_victims(kind, best, layout)
                if row >= 0:
                    return row
        rows = list(islice(candidates.rows(within), _NODES_TRIED))
        for best in self._victims_by_rules(candidates, member, rows):
            row = self._try_victims(kind, best, layout)
            if row >= 0:
                return row
        self.retry_later = self.retry_later or self._may_fit_later(member)
        return -1

    def _try_victims(self, kind: int, found: VictimSet, layout: Layout | None) -> int:
        evicted = self._evict((*found.stopping, *found.needed))
        row = self._engine.best_row(self._gang, kind, self._view, layout)
        if row < 0:
            self.restore(evicted)
        return row

    def _victims_by_rules(self, candidates: NodeCandidates, member: Member, rows: Sequence[int]) -> list[VictimSet]:
        """Nodes that become feasible without some of their runs, whatever the rule."""
        out, questions = [], _QUESTIONS
        for row in rows:
            movable, stopping, _ = candidates.victims(row, self.removed)
            if not movable:
                continue
            evicted = self._evict((*stopping, *movable))
            questions -= len(evicted) + 1
            if questions > 0 and self._is_feasible(row, member):
                needed, violations = self._reprieve_on_node(
                    row, member, [victim for victim in evicted if not victim.stopping]
                )
                if needed:
                    out.append(victim_set(self._victim_index, row, needed, stopping, self._view.now_ms, violations))
            self.restore([victim for victim in evicted if victim in self.removed])
        return sorted(out, key=_cost)

    def _reprieve_on_node(
        self, row: int, member: Member, evicted: list[VictimCandidate]
    ) -> tuple[list[VictimCandidate], Violations]:
        """Reprieve victims, the most important first; returns those that must stop."""
        needed = []
        order, violations = reprieve_order(self._victim_index, evicted, self.removed, self._view.now_ms)
        for victim in order:
            if self._stops_with_gang(victim):
                continue
            self.restore([victim])
            if not self._is_feasible(row, member):
                self._evict([victim])
                needed.append(victim)
        return needed, violations

    def _is_feasible(self, row: int, member: Member) -> bool:
        engine, nodes = self._engine, self._engine.table.view(np.array([row]))
        for plugin in engine.profile(self._gang).filters:
            refused = engine.runner.refused(plugin, member, nodes, self._view)
            if refused is not None and refused[0]:
                return False
        return True

    def _may_fit_later(self, member: Member) -> bool:
        """Whether victims that are still protected could free enough later."""
        table, victim_index = self._engine.table, self._victim_index
        columns = (
            []
            if victim_index.without_columns
            else [victim_index.held_by(rank) for rank in victim_index.ranks_below(self._rank)]
        )
        for name, held in victim_index.protected_on(self._rank).items():
            for victim in victim_index.lowest_first(name, self._rank) if victim_index.without_columns else ():
                for resource, amount in () if victim.stopping else victim.holds[name].items():
                    held[resource] = held.get(resource, 0) + amount
            row = table.row.get(name)
            if row is not None and all(
                table.allocatable[row].get(resource, 0) - table.node_usage[row].used.get(resource, 0) + held.get(resource, 0)
                + sum(column[resource].item(row) for column in columns if resource in column) >= amount
                for resource, amount in member.task.request.items() if amount
            ):  # fmt: skip
                return True
        return False

    def _reprieve(self, placements: list[Placed]) -> list[Placed] | None:
        """Reprieve victims that are not needed; each is tried by placing the whole gang beside it."""
        victims = [victim for victim in self.removed if not victim.stopping]
        if len(victims) <= 1 or len(victims) * self._gang.size > _PLACINGS_TO_REPRIEVE:
            return placements  # it is needed
        if self._gang.size == 1 and not self._blocked_by_rules and all(len(victim.holds) == 1 for victim in victims):
            return placements  # all are needed
        for victim in reprieve_order(self._victim_index, victims, (), self._view.now_ms)[0]:
            if self._stops_with_gang(victim):
                continue
            self._engine.withdraw(self._gang, placements)
            self.restore([victim])
            again = self._place()
            if again is None:
                self._evict([victim])
                again = self._place()
            if again is None:
                return None  # the changed placement order finds no placement
            placements = again
        return placements

    def _evict(self, victims: Iterable[VictimCandidate]) -> list[VictimCandidate]:
        """Remove victims, with all members of gangs that stop; returns those newly removed."""
        table, went = self._engine.table, list[VictimCandidate]()
        for victim in victims:
            members = self._victim_index.of_job[victim.id] if victim.stops_gang and not victim.stopping else (victim,)
            for each in members:
                if each not in self.removed:
                    self.removed[each] = None
                    went.append(each)
                    if self._counts:
                        self._victim_index.set_aside(each, -1)
                    for place in each.places:
                        table.release_by_name(*place)
        return went

    def restore(self, victims: Iterable[VictimCandidate]) -> None:
        for victim in victims:
            del self.removed[victim]
            if self._counts:
                self._victim_index.set_aside(victim, 1)
            for place in victim.places:
                self._engine.table.place_by_name(*place)

    def _stops_with_gang(self, victim: VictimCandidate) -> bool:
        return not victim.stops_gang and any(
            other.stops_gang and other in self.removed for other in self._victim_index.of_job[victim.id]
        )


_cost = attrgetter("cost")


def _by_job(victims: Iterable[VictimCandidate]) -> list[Victim]:
    """One entry per job: all of it if its gang stops, else the members."""
    jobs: dict[JobId, list[VictimCandidate]] = {}
    for victim in victims:
        jobs.setdefault(victim.id, []).append(victim)
    out = []
    for id, parts in sorted(jobs.items()):
        nodes = tuple(sorted({name for victim in parts for name in victim.holds}))
        members = (
            () if any(t.stops_gang for t in parts) else tuple(sorted(n for victim in parts for n in victim.members))
        )
        out.append(Victim(id, parts[0].job, nodes, members))
    return out
