"""Who must go so that a gang can start: the least disruption that a full trial by all plugins finds sufficient.

The search works on the table itself and undoes everything, so that rules of every kind count (what a victim's leaving does
to affinity, spread or ports included), not resources alone. Nothing is evicted here: the answer names victims and places.

For each member that finds no node: of the nodes where the lowest possible classes could make room (`engine.preemption.candidates`) the
least harmful are tried. If room is not what stands in the way, all who could go are taken off a node and put back
one by one as long as the member is still welcome. At the end every victim whose stay would not matter is let off.
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
from hodei.engine.preemption.candidates import NodeCandidate
from hodei.engine.preemption.victim_cost import Breaches, Weighed, let_off_first, weighed
from hodei.engine.preemption.victims import LEAVING, VictimCandidate, VictimIndex
from hodei.engine.view import Gang, Member, View
from hodei.model.decision import Reason
from hodei.model.ids import JobId, NodeName
from hodei.model.job import JobSpec

# Nodes whose victims are counted exactly, of those that could make room at the lowest class; those with the fewest runs first.
_NODES_WEIGHED = 32
# The same where victims are weighed as pods are: what is known of a node then is kept for longer.
_NODES_WEIGHED_FOR_PODS = 64
# Nodes looked at for that, should the amounts free on the first ones not be of use (the cores or GPUs of the wrong ones).
_NODES_LOOKED_AT = 1024
# Nodes tried in full for one member, should rules other than room refuse the best ones.
_NODES_TRIED = 8
# Ways to lay a gang in which room is made.
_LAYOUTS_TRIED = 8
# Questions to all filters about one node, when it is not room that a member lacks.
_QUESTIONS = 500
# Letting off places the whole gang once per victim; past this much work the victims found stand.
_PLACINGS_TO_LET_OFF = 20_000
_PROSPECTS_KEPT = 128


class Victim(Struct, frozen=True):
    """A job that must go, or only `members` of it (none named: all), from `nodes`."""

    id: JobId
    job: JobSpec
    nodes: tuple[NodeName, ...]
    members: tuple[int, ...] = ()


class Preemption(Struct):
    """`victims` are to be told to go, `leaving` are going already; when all are gone the gang has `placements`."""

    victims: list[Victim]
    leaving: list[Victim]
    placements: list[Placed]


class NodeCandidates:
    """Those of all shapes in use, the least recently used let go."""

    def __init__(self, engine: Engine, tenancy: VictimIndex) -> None:
        self._engine, self._tenancy = engine, tenancy
        self._kept: OrderedDict[Hashable, NodeCandidate] = OrderedDict()

    def of(self, gang: Gang, kind: int, rank: int, view: View) -> NodeCandidate:
        member = gang.members[kind]
        if self._tenancy.by_number:
            # All numbers above the same tenants are alike.
            below = self._tenancy.ranks_below(rank)
            rank = below[-1] + 1 if below else LEAVING + 1
        key = (gang.shapes[kind], rank, member.task.binding)
        found = self._kept.get(key)
        if found is None:
            profile = self._engine.profile(gang)
            found = self._kept[key] = NodeCandidate(self._engine, self._tenancy, profile, rank)
            if len(self._kept) > _PROSPECTS_KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        found.refresh(member, view)
        return found


class Preemptions:
    """Looks for them. `too_soon`: the last look may do better later, when the protection of some tenants has run out."""

    def __init__(self, engine: Engine, tenancy: VictimIndex) -> None:
        self._engine, self._tenancy = engine, tenancy
        self._prospects = NodeCandidates(engine, tenancy)
        self.too_soon = False

    def find(self, gang: Gang, view: View) -> Preemption | None:
        """How `gang` could start at the cost of lower classes; None if it cannot. The table is as before."""
        self.too_soon = False
        if not self._tenancy.may_preempt(gang.job.priority, view.now_ms):
            return None
        search = _Search(self._engine, self._tenancy, self._prospects, gang, view)
        with self._engine.table.trial():
            try:
                return search.run()
            finally:
                search.restore(list(search.gone))
                self.too_soon = search.too_soon


class _Search:
    def __init__(self, engine: Engine, tenancy: VictimIndex, prospects: NodeCandidates, gang: Gang, view: View) -> None:
        self._engine, self._tenancy, self._prospects, self._gang, self._view = engine, tenancy, prospects, gang, view
        self._rank = tenancy.rank_of(gang.job.priority)
        self.gone: dict[VictimCandidate, None] = {}
        self.too_soon = False
        self._ruled = False
        self._began = 0
        self._first: list[NodeCandidate] = []
        # Whether the columns of the tenancy are looked at again after someone went.
        self._counts = True

    def run(self) -> Preemption | None:
        tenancy, gang = self._tenancy, self._gang
        tenancy.at(self._view.now_ms)
        self._began = len(self._engine.table.changes)
        self._first = [self._prospect(kind) for kind in range(len(gang.members))]
        self._ruled = any(prospect.ruled for prospect in self._first)
        self._counts = gang.size > 1 or self._ruled
        placements = None
        if self._ruled and tenancy.stopping:
            # Who goes anyway may stand in the way from afar; if only room matters, it is looked at node by node.
            self._evict(tenancy.stopping)
            placements = self._try()
        if placements is None:
            placements = self._made_room()
        if placements is not None:
            placements = self._let_off(placements)
        if placements is None:
            return None
        nodes = {placed.node.name for placed in placements}
        victims = _by_job(tenant for tenant in self.gone if not tenant.stopping)
        leaving = _by_job(t for t in self.gone if t.stopping and any(name in nodes for name in t.holds))
        self._engine.withdraw(gang, placements)
        return Preemption(victims, leaving, placements)

    # ----------------------------------------------------------------------------------------------- steps

    def _prospect(self, kind: int) -> NodeCandidate:
        return self._prospects.of(self._gang, kind, self._rank, self._view)

    def _try(self) -> list[Placed] | None:
        result = self._engine.place(self._gang, self._view, extras=False)
        return None if isinstance(result, Refusal) else result

    def _made_room(self) -> list[Placed] | None:
        """The gang placed in room that was made for it, in the first layout in which that can be done."""
        options: Sequence[Layout | None] = (None,)
        if self._engine.profile(self._gang).layouts:
            layouts = self._engine.layouts(self._gang, self._view)
            if isinstance(layouts, Reason):
                return None
            if isinstance(layouts, Layouts):
                options = list(islice(layouts.if_others_went(), _LAYOUTS_TRIED))
        before = len(self.gone)
        for layout in options:
            placements = self._try() if self._make_room(layout) else None
            if placements is not None:
                return placements
            self.restore(list(self.gone)[before:])
        return None

    def _make_room(self, layout: Layout | None) -> bool:
        """Place the members one after another, evicting what those without a node need; False if one can not be helped.
        The members are taken off again: the room is there now."""
        engine, gang, view = self._engine, self._gang, self._view
        placed, left, enough = [], gang.size, True
        for kind, _, member in gang.each():
            row = engine.best_row(gang, kind, view, layout)
            if row < 0:
                row = self._room_for(kind, member, layout)
            if row < 0:
                enough = False
                break
            left -= 1
            if left:
                placed.append((row, member, engine.table.place(row, member.task.request, member)))
        for row, member, grant in reversed(placed):
            engine.table.release(row, member.task.request, member, grant)
        return enough

    def _room_for(self, kind: int, member: Member, layout: Layout | None) -> int:
        """Evict whom it takes for one member, and return the row where it has room then; -1 if nothing helps."""
        untouched = len(self._engine.table.changes) == self._began
        prospect = self._first[kind] if untouched else self._prospect(kind)
        within = None if layout is None else layout.rows[kind]
        few = _NODES_WEIGHED_FOR_PODS if self._tenancy.by_order_of_pods else _NODES_WEIGHED
        found = prospect.best(self.gone, within, few, _NODES_LOOKED_AT)
        if found:
            row = self._room_by(kind, min(found, key=_harm), layout)
            if row >= 0:
                return row
            for best in sorted(found, key=_harm)[1:_NODES_TRIED]:
                row = self._room_by(kind, best, layout)
                if row >= 0:
                    return row
        rows = list(islice(prospect.rows(within), _NODES_TRIED))
        for best in self._weighed_by_rules(prospect, member, rows):
            row = self._room_by(kind, best, layout)
            if row >= 0:
                return row
        self.too_soon = self.too_soon or self._may_be_later(member)
        return -1

    def _room_by(self, kind: int, found: Weighed, layout: Layout | None) -> int:
        evicted = self._evict((*found.leaving, *found.needed))
        row = self._engine.best_row(self._gang, kind, self._view, layout)
        if row < 0:
            self.restore(evicted)
        return row

    def _weighed_by_rules(self, prospect: NodeCandidate, member: Member, rows: Sequence[int]) -> list[Weighed]:
        """Nodes that take the member when some of their tenants have gone, whatever the rule that kept it out."""
        out, questions = [], _QUESTIONS
        for row in rows:
            movable, leaving, _ = prospect.tenants(row, self.gone)
            if not movable:
                continue
            evicted = self._evict((*leaving, *movable))
            questions -= len(evicted) + 1
            if questions > 0 and self._welcome(row, member):
                needed, breaches = self._put_back(row, member, [tenant for tenant in evicted if not tenant.stopping])
                if needed:
                    out.append(weighed(self._tenancy, row, needed, leaving, self._view.now_ms, breaches))
            self.restore([tenant for tenant in evicted if tenant in self.gone])
        return sorted(out, key=_harm)

    def _put_back(
        self, row: int, member: Member, evicted: list[VictimCandidate]
    ) -> tuple[list[VictimCandidate], Breaches]:
        """Who may come back does, the most valuable first; those are left who must go."""
        needed = []
        order, breaches = let_off_first(self._tenancy, evicted, self.gone, self._view.now_ms)
        for tenant in order:
            if self._ends_with_its_gang(tenant):
                continue
            self.restore([tenant])
            if not self._welcome(row, member):
                self._evict([tenant])
                needed.append(tenant)
        return needed, breaches

    def _welcome(self, row: int, member: Member) -> bool:
        """Whether every filter lets the member onto that one node as things are."""
        engine, nodes = self._engine, self._engine.table.view(np.array([row]))
        for plugin in engine.profile(self._gang).filters:
            refused = engine.runner.refused(plugin, member, nodes, self._view)
            if refused is not None and refused[0]:
                return False
        return True

    def _may_be_later(self, member: Member) -> bool:
        """Whether those who are still protected could make room for it some day."""
        table, tenancy = self._engine.table, self._tenancy
        columns = [] if tenancy.many else [tenancy.held_by(rank) for rank in tenancy.ranks_below(self._rank)]
        for name, held in tenancy.safe_on(self._rank).items():
            for tenant in tenancy.lowest_first(name, self._rank) if tenancy.many else ():
                for resource, amount in () if tenant.stopping else tenant.holds[name].items():
                    held[resource] = held.get(resource, 0) + amount
            row = table.row.get(name)
            if row is not None and all(
                table.room[row].get(resource, 0) - table.holds[row].used.get(resource, 0) + held.get(resource, 0)
                + sum(column[resource].item(row) for column in columns if resource in column) >= amount
                for resource, amount in member.task.request.items() if amount
            ):  # fmt: skip
                return True
        return False

    def _let_off(self, placements: list[Placed]) -> list[Placed] | None:
        """Victims whose room is not needed in the end stay; each is tried by placing the whole gang beside it."""
        victims = [tenant for tenant in self.gone if not tenant.stopping]
        if len(victims) <= 1 or len(victims) * self._gang.size > _PLACINGS_TO_LET_OFF:
            return placements  # without the one the gang did not fit
        if self._gang.size == 1 and not self._ruled and all(len(victim.holds) == 1 for victim in victims):
            return placements  # those that make room for one member on one node are all needed for it
        for tenant in let_off_first(self._tenancy, victims, (), self._view.now_ms)[0]:
            if self._ends_with_its_gang(tenant):
                continue
            self._engine.withdraw(self._gang, placements)
            self.restore([tenant])
            again = self._try()
            if again is None:
                self._evict([tenant])
                again = self._try()
            if again is None:
                return None  # an order of turns in which it is not found any more
            placements = again
        return placements

    # ------------------------------------------------------------------------------------------- the table

    def _evict(self, tenants: Iterable[VictimCandidate]) -> list[VictimCandidate]:
        """Off the table, with all the members of gangs that end; those who went that had not gone before."""
        table, went = self._engine.table, list[VictimCandidate]()
        for tenant in tenants:
            whole = self._tenancy.of_job[tenant.id] if tenant.whole and not tenant.stopping else (tenant,)
            for each in whole:
                if each not in self.gone:
                    self.gone[each] = None
                    went.append(each)
                    if self._counts:
                        self._tenancy.set_aside(each, -1)
                    for name, member, grant in each.places:
                        table.let_go(name, member.task.request, member, grant)
        return went

    def restore(self, tenants: Iterable[VictimCandidate]) -> None:
        for tenant in tenants:
            del self.gone[tenant]
            if self._counts:
                self._tenancy.set_aside(tenant, 1)
            for name, member, grant in tenant.places:
                self._engine.table.hold(name, member.task.request, member, grant)

    def _ends_with_its_gang(self, tenant: VictimCandidate) -> bool:
        return not tenant.whole and any(other.whole and other in self.gone for other in self._tenancy.of_job[tenant.id])


_harm = attrgetter("harm")


def _by_job(tenants: Iterable[VictimCandidate]) -> list[Victim]:
    """One entry for each job: whole if its gang ends, else with the members that go."""
    jobs: dict[JobId, list[VictimCandidate]] = {}
    for tenant in tenants:
        jobs.setdefault(tenant.id, []).append(tenant)
    out = []
    for id, parts in sorted(jobs.items()):
        nodes = tuple(sorted({name for tenant in parts for name in tenant.holds}))
        members = () if any(t.whole for t in parts) else tuple(sorted(n for tenant in parts for n in tenant.members))
        out.append(Victim(id, parts[0].job, nodes, members))
    return out
