"""Tasks of a job over backends: all on one (`colocated`), or each on one of its backends at the lowest transfer cost
(`distributed`; `hub_and_spoke`: only between the hub and each other task).

Tasks on different backends cost the price of that pair of backends, once per member of either task; unnamed pairs are
free. The cheapest choice with capacity wins; ties go to the fewest backends, then by name. At most 256 choices are
tried: the cheapest that fit by free resources. The search extends partial choices task by task and keeps the best 1024,
so only jobs with many tasks and backends may miss a cheaper one.
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
_PARTIAL_CHOICES_KEPT = 1024


class Distribution:
    name = "distribution"
    requeue_on: tuple[Trigger, ...] = ("run_ended", "run_placed", "node_joined", "node_changed")

    def key(self, member: Member) -> Hashable:
        rules, task = member.job.distribution, member.task
        return (rules, task.backends, task.name == rules.hub) if rules.model else NO_OPINION

    def layouts(self, gang: Gang, table: Table, view: View) -> Layouts | None:
        rules = gang.job.distribution
        if not rules.model or not (has_several_members(gang) or gang.running_nodes):
            return None
        column = table.interned("backend", lambda node: node.backend)
        backends: tuple[str, ...] = tuple(column.values)
        occupied = {node.backend for name in gang.running_nodes if (node := table.node(name)) is not None}
        choose, text = _distributed, "no allowed choice of backends has capacity for every task"
        if rules.model == "colocated":
            choose, text = _colocated, "no single backend that all tasks allow has capacity for all of them"
        choices = choose(gang, DomainCapacity(gang, table, column.ids, len(backends)), backends, occupied)

        def with_preemption() -> list[Layout]:
            empty = DomainCapacity(gang, table, column.ids, len(backends), empty=True)
            full = [choice for choice in choose(gang, empty, backends, occupied) if choice not in choices]
            return [_layout(choice, column.ids) for choice in full]

        options = [_layout(choice, column.ids) for choice in choices]
        return Layouts(options, Reason(self.name, "DISTRIBUTION", text, evictable=True), with_preemption)

    def suggest(self, member: Member, nodes: Nodes, view: View) -> Iterator[Change]:
        rules = member.job.distribution
        if rules.model:
            text = f"drop distribution {rules.model.replace('_', ' ')}"
            yield Change("drop", text, {"distribution": Rules()}, whole_job=True)


def _layout(choice: Sequence[int], ids: NDArray[np.intp]) -> Layout:
    """Each kind of member on the backend chosen for it."""
    rows = {backend: ids == backend for backend in set(choice)}
    return Layout(tuple(rows[backend] for backend in choice))


def _allowed(member: Member, backends: Sequence[str]) -> list[int]:
    task, of_job = member.task, member.job.backend
    return [
        number
        for number, name in enumerate(backends)
        if (not task.backends or name in task.backends) and (of_job.mode != "specific" or name in of_job.names)
    ]


def _colocated(
    gang: Gang, capacity: DomainCapacity, backends: Sequence[str], occupied: set[str]
) -> list[tuple[int, ...]]:
    """One backend for all; members that join use that of the others."""
    for_all = set(range(len(backends)))
    for member in gang.members:
        for_all &= set(_allowed(member, backends))
    if occupied:
        for_all = {number for number in for_all if backends[number] in occupied}
    return [(number,) * len(gang.members) for number in capacity.in_order(backends) if number in for_all]


def _distributed(
    gang: Gang, capacity: DomainCapacity, backends: Sequence[str], occupied: set[str]
) -> list[tuple[int, ...]]:
    """One backend per task, cheapest choice first. Members that join prefer backends where their gang already runs."""
    found = _cheapest_first(gang, capacity, backends)
    if occupied:
        found.sort(key=lambda choice: sum(backends[number] not in occupied for number in choice))
    return found[:CHOICES_TRIED]


def _cheapest_first(gang: Gang, capacity: DomainCapacity, backends: Sequence[str]) -> list[tuple[int, ...]]:
    """Choices that fit by free resources, ordered by cost, number of backends and names. Extends each partial choice by
    every backend with capacity left and keeps the best."""
    by_name = np.array(sorted(range(len(backends)), key=lambda number: backends[number]), dtype=np.intp)
    names = [backends[number] for number in by_name]
    rules, price = gang.job.distribution, _prices(gang.job.distribution, names)
    left = {resource: free[by_name][None, :] for resource, free in capacity.free.items()}
    choices: NDArray[np.intp] = np.zeros((1, 0), dtype=np.intp)
    used: Mask = np.zeros((1, len(names)), dtype=np.bool_)
    cost: Ints = np.zeros(1, dtype=np.int64)
    in_names: NDArray[np.intp] = np.zeros(1, dtype=np.intp)  # position of each partial choice in order of names
    for kind, member in enumerate(gang.members):
        requested = {name: amount * capacity.needed[kind] for name, amount in capacity.requests[kind].items()}
        able = np.zeros((len(choices), len(names)), dtype=np.bool_)
        able[:, _allowed(member, names)] = True
        able &= capacity.per_kind[kind][by_name] >= capacity.needed[kind]
        for resource, amount in requested.items():
            able &= left[resource] >= amount
        transfer = np.zeros(able.shape, dtype=np.int64)
        for other, earlier in enumerate(gang.members[:kind]):
            if rules.model == "distributed" or rules.hub in (member.task.name, earlier.task.name):
                transfer += price[choices[:, other]] * (member.task.count + earlier.task.count)
        before, to = np.nonzero(able)
        total = cost[before] + transfer[before, to]
        number = used[before].sum(axis=1) + ~used[before, to]
        best = np.lexsort((to, in_names[before], number, total))[:_PARTIAL_CHOICES_KEPT]
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
            left[resource][here, to] -= requested.get(resource, 0)
    return [tuple(choice) for choice in by_name[choices].tolist()]


def _prices(rules: Rules, backends: Sequence[str]) -> Ints:
    """Transfer cost of one member's data between each pair of backends."""
    numbers = {name: number for number, name in enumerate(backends)}
    price = np.zeros((len(backends), len(backends)), dtype=np.int64)
    for known in rules.transfer_costs:
        one, other = (numbers.get(name) for name in known.between)
        if one is not None and other is not None and one != other:
            price[one, other] = price[other, one] = known.cost_milli
    return price
