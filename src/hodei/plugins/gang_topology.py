"""All members of a gang in one place: one rack, one zone, one host, or whatever shares the value of a label.

Required, it is that or nothing; as a wish, all nodes come last. Places that are too small by their free resources are
not tried. Nodes without the key are in no place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from msgspec import structs

from hodei.engine.explain import Change
from hodei.engine.nodes import Nodes, Table
from hodei.engine.points import NO_OPINION, Layout, Layouts, Trigger
from hodei.engine.topology_index import domain_of, domains
from hodei.engine.view import Gang, Member, View
from hodei.model.job import Reason
from hodei.plugins.domain_capacity import DomainCapacity, DomainLayouts, has_several_members


class GangTopology:
    name = "gang_topology"
    requeue_on: tuple[Trigger, ...] = ("run_ended", "run_placed", "node_joined", "node_changed")

    def key(self, member: Member) -> Hashable:
        rules = member.job.gang
        return (rules.topology, rules.topology_required) if rules.topology else NO_OPINION

    def layouts(self, gang: Gang, table: Table, view: View) -> Layouts | None:
        rules = gang.job.gang
        if not rules.topology or not (has_several_members(gang) or gang.beside):
            return None
        ids, names = domains(rules.topology, table)
        members, wish = len(gang.members), not rules.topology_required
        if gang.beside:
            places = _where_the_others_are(gang, table, names)
            reason = self._reason(_no_room_beside(rules.topology, [str(names[place]) for place in places], gang))
            return Layouts(DomainLayouts(ids, places, members, wish=wish), reason)
        room = DomainCapacity(gang, table, ids, len(names))
        places = room.in_order(names)

        def crowded() -> Sequence[Layout]:
            """Places that are large enough, those first in which the fewest would have to make room."""
            if wish:
                return ()  # there is a way for all that they need not go for
            most = room.most().tolist()
            empty = DomainCapacity(gang, table, ids, len(names), empty=True)
            full = set(empty.in_order(names)) - set(places)
            return DomainLayouts(ids, sorted(full, key=lambda place: (-most[place], names[place])), members)

        reason = self._reason(_no_room(rules.topology, room, names))
        return Layouts(DomainLayouts(ids, places, members, wish=wish), reason, crowded)

    def _reason(self, text: str) -> Reason:
        return Reason(self.name, "GANG_TOPOLOGY", text, evictable=True)

    def suggest(self, member: Member, nodes: Nodes, view: View) -> Iterator[Change]:
        rules = member.job.gang
        if rules.topology and rules.topology_required:
            wish = structs.replace(rules, topology_required=False)
            without = structs.replace(rules, topology="")
            text = f"one {rules.topology} for all members as a wish only"
            yield Change("drop", text, {"gang": wish}, whole_job=True)
            yield Change("drop", f"drop gang topology {rules.topology}", {"gang": without}, whole_job=True, cut=10_000)


def _where_the_others_are(gang: Gang, table: Table, names: Sequence[str | None]) -> list[int]:
    """The places of the members that run already: one, unless labels have changed under them or it was a wish."""
    found: Counter[str] = Counter()
    for name in gang.beside:
        node = table.node(name)
        domain = None if node is None else domain_of(node, gang.job.gang.topology)
        if domain is not None:
            found[domain] += 1
    by_number = sorted(found, key=lambda domain: (-found[domain], domain))
    return [names.index(domain) for domain in by_number if domain in names]


def _no_room_beside(topology: str, places: Sequence[str], gang: Gang) -> str:
    if not places:
        return f"it is not known in which {topology} its other members run"
    more = "1 more member" if gang.size == 1 else f"{gang.size} more members"
    return f"no room for {more} in {topology} {' or '.join(places)}, where the others run"


def _no_room(topology: str, room: DomainCapacity, names: Sequence[str | None]) -> str:
    """Said if no place takes the gang; by free resources, which are known already."""
    size = sum(room.needed)
    most = room.most().tolist()
    best = min((place for place, name in enumerate(names) if name is not None), default=None,
               key=lambda place: (-most[place], names[place]))  # fmt: skip
    if best is None:
        return f"all members must be in one {topology}, and no node says in which it is"
    text = f"no {topology} has room for all {size} members"
    if most[best] < size:
        return f"{text}; the best one, {names[best]}, for {most[best]} or fewer"
    return f"{text} once every rule is counted"
