"""Gang topology: all members in one rack, zone, host, or other domain of a label.

A required rule refuses anything else; a preference ends with all nodes. Domains that are too small by free resources
are not tried. Nodes without the key are in no domain.
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
        if not rules.topology or not (has_several_members(gang) or gang.running_nodes):
            return None
        ids, names = domains(rules.topology, table)
        members, soft = len(gang.members), not rules.topology_required
        if gang.running_nodes:
            chosen = _domains_of_running_members(gang, table, names)
            reason = self._reason(_text_for_joining(rules.topology, [str(names[place]) for place in chosen], gang))
            return Layouts(DomainLayouts(ids, chosen, members, soft=soft), reason)
        capacity = DomainCapacity(gang, table, ids, len(names))
        chosen = capacity.in_order(names)

        def with_preemption() -> Sequence[Layout]:
            """Domains that are large enough when idle; fewest members to preempt first."""
            if soft:
                return ()  # a preference preempts nothing
            most = capacity.most().tolist()
            empty = DomainCapacity(gang, table, ids, len(names), empty=True)
            full = set(empty.in_order(names)) - set(chosen)
            return DomainLayouts(ids, sorted(full, key=lambda place: (-most[place], names[place])), members)

        reason = self._reason(_text(rules.topology, capacity, names))
        return Layouts(DomainLayouts(ids, chosen, members, soft=soft), reason, with_preemption)

    def _reason(self, text: str) -> Reason:
        return Reason(self.name, "GANG_TOPOLOGY", text, evictable=True)

    def suggest(self, member: Member, nodes: Nodes, view: View) -> Iterator[Change]:
        rules = member.job.gang
        if rules.topology and rules.topology_required:
            soft = structs.replace(rules, topology_required=False)
            without = structs.replace(rules, topology="")
            text = f"one {rules.topology} for all members as a preference only"
            yield Change("drop", text, {"gang": soft}, whole_job=True)
            yield Change("drop", f"drop gang topology {rules.topology}", {"gang": without}, whole_job=True, cut=10_000)


def _domains_of_running_members(gang: Gang, table: Table, names: Sequence[str | None]) -> list[int]:
    """Domains of the running members: one, unless labels have changed or the rule was a preference."""
    found: Counter[str] = Counter()
    for name in gang.running_nodes:
        node = table.node(name)
        domain = None if node is None else domain_of(node, gang.job.gang.topology)
        if domain is not None:
            found[domain] += 1
    by_number = sorted(found, key=lambda domain: (-found[domain], domain))
    return [names.index(domain) for domain in by_number if domain in names]


def _text_for_joining(topology: str, chosen: Sequence[str], gang: Gang) -> str:
    if not chosen:
        return f"the {topology} of its running members is unknown"
    more = "1 more member" if gang.size == 1 else f"{gang.size} more members"
    return f"no capacity for {more} in {topology} {' or '.join(chosen)}, where the others run"


def _text(topology: str, capacity: DomainCapacity, names: Sequence[str | None]) -> str:
    """The reason if no domain takes the gang, by free resources."""
    size = sum(capacity.needed)
    most = capacity.most().tolist()
    best = min((place for place, name in enumerate(names) if name is not None), default=None,
               key=lambda place: (-most[place], names[place]))  # fmt: skip
    if best is None:
        return f"all members must be in one {topology}, and no node has a {topology}"
    text = f"no {topology} has capacity for all {size} members"
    if most[best] < size:
        return f"{text}; the best one, {names[best]}, for {most[best]} or fewer"
    return f"{text} under all rules"
