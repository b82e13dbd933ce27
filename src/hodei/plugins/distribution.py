"""The tasks of a job over backends: all on one (`colocated`), or each task on one of those that it may use, the cheapest
way by what it costs to move data between them (`distributed`; `hub_and_spoke`: between the hub and each other task).

Moving data between two tasks on different backends costs the price of that pair of backends, once for each member of
either task. Pairs that are not named cost nothing. The cheapest choice with room wins; at equal cost the one with the
fewest backends, then by name. At most 256 choices are tried: the cheapest of all that have room by free resources. Only
for a job with many tasks and backends may a cheaper one be missed: choices are made task by task, and of more than 1024
beginnings the cheapest 1024 are followed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hodei.engine.explain import Change
from hodei.engine.nodes import Ints, Mask, Nodes, Table
from hodei.engine.points import NO_OPINION, Layout, Layouts, Trigger
from hodei.engine.view import Gang, Member, View
from hodei.model.job import Distribution as Rules
from hodei.model.job import Reason
from hodei.plugins.domain_capacity import DomainCapacity, has_several_members

CHOICES_TRIED = 256
_BEGINNINGS_KEPT = 1024


class Distribution:
    name = "distribution"
    requeue_on: tuple[Trigger, ...] = ("run_ended", "run_placed", "node_joined", "node_changed")

    def key(self, member: Member) -> Hashable:
        rules, task = member.job.distribution, member.task
        return (rules, task.backends, task.name == rules.hub) if rules.model else NO_OPINION

    def layouts(self, gang: Gang, table: Table, view: View) -> Layouts | None:
        rules = gang.job.distribution
        if not rules.model or not (has_several_members(gang) or gang.beside):
            return None
        column = table.interned("backend", lambda node: node.backend)
        backends: tuple[str, ...] = tuple(column.values)
        taken = {node.backend for name in gang.beside if (node := table.node(name)) is not None}
        choose, text = _apart, "no allowed choice of backends has room for every task"
        if rules.model == "colocated":
            choose, text = _together, "no single backend that all tasks allow has room for all of them"
        choices = choose(gang, DomainCapacity(gang, table, column.ids, len(backends)), backends, taken)

        def crowded() -> list[Layout]:
            empty = DomainCapacity(gang, table, column.ids, len(backends), empty=True)
            full = [choice for choice in choose(gang, empty, backends, taken) if choice not in choices]
            return [_layout(choice, column.ids) for choice in full]

        options = [_layout(choice, column.ids) for choice in choices]
        return Layouts(options, Reason(self.name, "DISTRIBUTION", text, evictable=True), crowded)

    def suggest(self, member: Member, nodes: Nodes, view: View) -> Iterator[Change]:
        rules = member.job.distribution
        if rules.model:
            text = f"drop distribution {rules.model.replace('_', ' ')}"
            yield Change("drop", text, {"distribution": Rules()}, whole_job=True)


def _layout(choice: Sequence[int], ids: NDArray[np.intp]) -> Layout:
    """Each kind of member on the backend that was chosen for it."""
    rows = {backend: ids == backend for backend in set(choice)}
    return Layout(tuple(rows[backend] for backend in choice))


def _allowed(member: Member, backends: Sequence[str]) -> list[int]:
    task, of_job = member.task, member.job.backend
    return [
        number
        for number, name in enumerate(backends)
        if (not task.backends or name in task.backends) and (of_job.mode != "specific" or name in of_job.names)
    ]


def _together(gang: Gang, room: DomainCapacity, backends: Sequence[str], taken: set[str]) -> list[tuple[int, ...]]:
    """One backend for all; the one where the others run if members join them."""
    for_all = set(range(len(backends)))
    for member in gang.members:
        for_all &= set(_allowed(member, backends))
    if taken:
        for_all = {number for number in for_all if backends[number] in taken}
    return [(number,) * len(gang.members) for number in room.in_order(backends) if number in for_all]


def _apart(gang: Gang, room: DomainCapacity, backends: Sequence[str], taken: set[str]) -> list[tuple[int, ...]]:
    """One backend for each task, the cheapest choice first. Members that join go to where others of their gang run,
    and only if that has no room to yet another backend."""
    found = _cheapest_first(gang, room, backends)
    if taken:
        found.sort(key=lambda choice: sum(backends[number] not in taken for number in choice))
    return found[:CHOICES_TRIED]


def _cheapest_first(gang: Gang, room: DomainCapacity, backends: Sequence[str]) -> list[tuple[int, ...]]:
    """Choices that have room by free resources, in order of cost, number of backends and names. Task by task: each
    beginning goes on with every backend that has room left, and the best of these beginnings are kept."""
    by_name = np.array(sorted(range(len(backends)), key=lambda number: backends[number]), dtype=np.intp)
    names = [backends[number] for number in by_name]
    rules, price = gang.job.distribution, _prices(gang.job.distribution, names)
    left = {resource: free[by_name][None, :] for resource, free in room.free.items()}
    choices: NDArray[np.intp] = np.zeros((1, 0), dtype=np.intp)
    used: Mask = np.zeros((1, len(names)), dtype=np.bool_)
    cost: Ints = np.zeros(1, dtype=np.int64)
    in_names: NDArray[np.intp] = np.zeros(1, dtype=np.intp)  # the place of each beginning in order of names
    for kind, member in enumerate(gang.members):
        asked = {name: amount * room.needed[kind] for name, amount in room.requests[kind].items()}
        able = np.zeros((len(choices), len(names)), dtype=np.bool_)
        able[:, _allowed(member, names)] = True
        able &= room.each[kind][by_name] >= room.needed[kind]
        for resource, amount in asked.items():
            able &= left[resource] >= amount
        moving = np.zeros(able.shape, dtype=np.int64)
        for other, earlier in enumerate(gang.members[:kind]):
            if rules.model == "distributed" or rules.hub in (member.task.name, earlier.task.name):
                moving += price[choices[:, other]] * (member.task.count + earlier.task.count)
        before, to = np.nonzero(able)
        total = cost[before] + moving[before, to]
        number = used[before].sum(axis=1) + ~used[before, to]
        best = np.lexsort((to, in_names[before], number, total))[:_BEGINNINGS_KEPT]
        before, to, cost = before[best], to[best], total[best]
        here = np.arange(len(best))
        alphabet = np.lexsort((to, in_names[before]))
        in_names = np.empty(len(best), dtype=np.intp)
        in_names[alphabet] = here
        choices = np.concatenate([choices[before], to[:, None]], axis=1)
        used = used[before]
        used[here, to] = True
        for resource in left:
            left[resource] = left[resource][before]
            left[resource][here, to] -= asked.get(resource, 0)
    return [tuple(choice) for choice in by_name[choices].tolist()]


def _prices(rules: Rules, backends: Sequence[str]) -> Ints:
    """What moving the data of one member costs, from each backend to each other."""
    numbers = {name: number for number, name in enumerate(backends)}
    price = np.zeros((len(backends), len(backends)), dtype=np.int64)
    for known in rules.transfer_costs:
        one, other = (numbers.get(name) for name in known.between)
        if one is not None and other is not None and one != other:
            price[one, other] = price[other, one] = known.cost_milli
    return price
