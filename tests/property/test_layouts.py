"""Gangs with a topology or distribution rule on small random clusters: the engine finds a placement whenever a brute-force
search does, the rule is never broken, and no other placement is cheaper.

`HODEI_CASES` sets how many clusters are tried per test; a failure names its seed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest

from builders import a_job_spec, a_node, a_task
from hodei.control.explain.suggestions import suggestions
from hodei.engine.cycle import Engine
from hodei.engine.nodes import Table
from hodei.engine.plan import Refusal
from hodei.engine.points import Placed
from hodei.engine.view import Gang, View, gang_of
from hodei.model.job import Distribution, GangRules, JobSpec, TaskSpec, TransferCost
from hodei.model.node import Location, Node
from hodei.plugins.registry import build_profile

CASES = int(os.environ.get("HODEI_CASES", "600"))
VIEW = View(0)
BACKENDS = ("east", "north", "west")
# A second implementation: the place of a node by topology.
PLACES: dict[str, Any] = {
    "rack": lambda node: node.location.rack or None,
    "zone": lambda node: node.location.zone or None,
    "host": lambda node: node.name,
    "backend": lambda node: node.backend,
    "row": lambda node: node.labels.get("row"),
}


class _Cluster:
    """A random cluster, partly in use."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.nodes = [self._node(number) for number in range(rng.randint(1, 6))]
        self.table = Table(self.nodes)
        self.table.settle()
        self.free = {node.name: node.capacity["cpu"] for node in self.nodes}
        for node in self.nodes:
            taken = rng.choice([0, 0, 1000, 2000, 5000])  # a node may have shrunk under its runs
            self.table.place(self.table.row[node.name], {"cpu": taken})
            self.free[node.name] -= taken
        self.engine = Engine(self.table, {"default": build_profile("default")})

    def _node(self, number: int) -> Node:
        rng = self.rng
        return a_node(
            f"n{number}",
            rng.randint(1, 5),
            backend=rng.choice(BACKENDS),
            location=Location(zone=rng.choice(["", "z1", "z2"]), rack=rng.choice(["", "r1", "r2", "r3"])),
            labels=rng.choice([{}, {"row": "a"}, {"row": "b"}]) | rng.choice([{}, {}, {"disk": "ssd"}]),
            cordoned=rng.random() < 0.1,
        )

    def task(self, name: str = "main", most: int = 6) -> TaskSpec:
        rng = self.rng
        count = rng.randint(1, most)
        return a_task(
            name,
            cpu=rng.choice(["500m", "1", "1", "2"]),
            memory=0,
            count=count,
            min_count=rng.choice([0, 0, rng.randint(1, count)]),
            node_selector=rng.choice([{}, {}, {}, {"disk": "ssd"}]),
            backends=rng.choice([(), (), ("east", "west"), ("north",)]),
        )

    def admit(self, spec: JobSpec) -> Gang:
        gang = gang_of(1, spec, 0)
        self.engine.profile(gang).admit(gang)
        return gang

    def place(self, gang: Gang) -> list[Placed] | None:
        """None for a refusal, which must not change the state."""
        result = self.engine.try_gang(gang, VIEW)
        assert not self.engine.runner.faults
        if isinstance(result, Refusal):
            used = {node.name: self.table.usage(self.table.row[node.name]).get("cpu", 0) for node in self.nodes}
            assert used == {node.name: node.capacity["cpu"] - self.free[node.name] for node in self.nodes}
            return None
        return result

    def allowed_nodes(self, task: TaskSpec, nodes: Sequence[Node] | None = None) -> list[str]:
        return [
            node.name
            for node in (self.nodes if nodes is None else nodes)
            if not node.cordoned
            and (not task.node_selector or node.labels.get("disk") == "ssd")
            and (not task.backends or node.backend in task.backends)
        ]


def fits(requests: Sequence[tuple[int, Sequence[str]]], free: Mapping[str, int]) -> bool:
    """Whether all members fit: every node is tried for every member."""
    if not requests:
        return True
    (cpu, nodes), *rest = requests
    return any(free[name] >= cpu and fits(rest, {**free, name: free[name] - cpu}) for name in nodes)


def needed(tasks: Sequence[TaskSpec], where: Sequence[Sequence[str]]) -> list[tuple[int, Sequence[str]]]:
    return [(task.request["cpu"], names) for task, names in zip(tasks, where, strict=True) for _ in range(task.needed)]


def places_of(cluster: _Cluster, topology: str) -> dict[str, list[Node]]:
    out: dict[str, list[Node]] = {}
    for node in cluster.nodes:
        place = PLACES[topology](node)
        if place is not None:
            out.setdefault(place, []).append(node)
    return out


@pytest.mark.parametrize("tasks", [1, 2], ids=["equal members", "unequal members"])
@pytest.mark.parametrize("required", [True, False], ids=["required", "preferred"])
def test_a_gang_is_in_one_place_whenever_it_fits_in_one(tasks, required):
    for seed in range(CASES):
        cluster = _Cluster(seed)
        topology = cluster.rng.choice(list(PLACES))
        parts = [cluster.task(f"t{number}", most=6 // tasks) for number in range(tasks)]
        spec = a_job_spec(tasks=parts, gang=GangRules(topology=topology, topology_required=required))
        if spec.size == 1:
            continue
        possible = {
            place
            for place, nodes in places_of(cluster, topology).items()
            if fits(needed(parts, [cluster.allowed_nodes(part, nodes) for part in parts]), cluster.free)
        }
        placed = cluster.place(cluster.admit(spec))
        used = {PLACES[topology](one.node) for one in placed or ()}
        if possible:
            assert placed, f"seed {seed}: it fits in {possible}"
            assert used <= possible, f"seed {seed}"
            assert len(used) == 1, f"seed {seed}"
        elif required:
            assert placed is None, f"seed {seed}: {used}"
        else:
            fits_anywhere = fits(needed(parts, [cluster.allowed_nodes(part) for part in parts]), cluster.free)
            assert (placed is not None) == fits_anywhere, f"seed {seed}"


def test_all_extra_members_start_if_they_fit_in_one_place():
    for seed in range(CASES):
        cluster = _Cluster(seed)
        topology = cluster.rng.choice(list(PLACES))
        # Without other rules places are ordered by free resources alone.
        task = a_task(cpu=1, memory=0, count=cluster.rng.randint(2, 6), min_count=1)
        nodes = [node for node in cluster.nodes if not node.cordoned]
        if len(nodes) < len(cluster.nodes):
            continue
        largest = max(
            (sum(max(cluster.free[node.name], 0) // 1000 for node in home) for home in places_of(cluster, topology).values()),
            default=0,
        )  # fmt: skip
        placed = cluster.place(cluster.admit(a_job_spec(tasks=[task], gang=GangRules(topology=topology))))
        assert len(placed or ()) == min(largest, task.count), f"seed {seed}"


def test_a_joining_member_follows_the_layout_of_its_gang_or_waits():
    for seed in range(CASES):
        cluster = _Cluster(seed)
        topology = cluster.rng.choice(list(PLACES))
        home = cluster.rng.choice(cluster.nodes)
        spec = a_job_spec(tasks=[cluster.task()], gang=GangRules(topology=topology))
        gang = gang_of(1, spec, 0)
        gang.needed, gang.extra, gang.is_joining, gang.running_nodes = ((0,),), ((),), True, (home.name,)
        cluster.engine.profile(gang).admit(gang)
        place = PLACES[topology](home)
        near = [] if place is None else places_of(cluster, topology)[place]
        possible = fits([(spec.tasks[0].request["cpu"], cluster.allowed_nodes(spec.tasks[0], near))], cluster.free)
        placed = cluster.place(gang)
        assert bool(placed) == possible, f"seed {seed}"
        assert all(PLACES[topology](one.node) == place for one in placed or ()), f"seed {seed}"


@pytest.mark.parametrize("model", ["colocated", "distributed", "hub_and_spoke"])
def test_tasks_are_on_the_cheapest_backends_that_fit(model):
    for seed in range(CASES):
        cluster = _Cluster(seed)
        parts = [cluster.task(f"t{number}", most=3) for number in range(cluster.rng.choice([1, 2, 3, 3]))]
        pairs = [("east", "north"), ("west", "east"), ("north", "west")][: cluster.rng.randint(0, 3)]
        costs = tuple(TransferCost(pair, cluster.rng.choice([0, 1, 2, 7])) for pair in pairs)
        spec = a_job_spec(tasks=parts, distribution=Distribution(model, cluster.rng.choice(["t0", "t1"]), costs))
        if spec.size == 1:
            continue
        costs_by_choice = {
            choice: cost(parts, choice, spec.distribution)
            for choice in product(BACKENDS, repeat=len(parts))
            if (model != "colocated" or len(set(choice)) == 1) and fits_on(cluster, parts, choice)
        }
        placed = cluster.place(cluster.admit(spec))
        assert bool(placed) == bool(costs_by_choice), f"seed {seed}: {costs_by_choice}"
        if placed:
            backends_of = {part.name: {one.node.backend for one in placed if one.member.task == part} for part in parts}
            assert all(len(backends) == 1 for backends in backends_of.values()), f"seed {seed}: {backends_of}"
            choice = tuple(backends_of[part.name].pop() for part in parts)
            assert costs_by_choice[choice] == min(costs_by_choice.values()), (
                f"seed {seed}: {choice} of {costs_by_choice}"
            )


def test_every_suggestion_for_a_refused_gang_lets_it_start():
    for seed in range(CASES):
        cluster = _Cluster(seed)
        rng = cluster.rng
        spec = a_job_spec(
            tasks=[cluster.task(f"t{number}", most=4) for number in range(rng.choice([1, 1, 2]))],
            gang=GangRules(topology=rng.choice(["", *PLACES])),
            distribution=Distribution(rng.choice(["", "colocated", "distributed"])),
        )
        gang = cluster.admit(spec)
        refusal = cluster.engine.try_gang(gang, VIEW)
        if not isinstance(refusal, Refusal):
            continue
        with cluster.table.trial():
            found = suggestions(cluster.engine, gang, refusal, VIEW)
        if refusal.verdicts[0].reason.code == "GANG_TOPOLOGY" and not spec.distribution.model:
            assert any("as a preference" in suggestion.change for suggestion in found), f"seed {seed}"
        for suggestion in found:
            changed = cluster.admit(suggestion.patch.applied_to(spec))
            placed = cluster.place(changed)
            assert placed is not None, f"seed {seed}: {suggestion.change}"
            cluster.engine.withdraw(changed, placed)


def fits_on(cluster: _Cluster, parts: Sequence[TaskSpec], choice: Sequence[str]) -> bool:
    nodes_by_task = [[node for node in cluster.nodes if node.backend == backend] for backend in choice]
    allowed_nodes = [cluster.allowed_nodes(part, nodes) for part, nodes in zip(parts, nodes_by_task, strict=True)]
    return fits(needed(parts, allowed_nodes), cluster.free)


def cost(parts: Sequence[TaskSpec], choice: Sequence[str], rules: Distribution) -> tuple[int, int]:
    """The cost of data transfers, and the number of backends. A single backend costs the same whichever it is."""
    if rules.model == "colocated":
        return (0, 1)
    price = {frozenset(known.between): known.cost_milli for known in rules.transfer_costs}
    total = 0
    for other in range(len(parts)):
        for one in range(other):
            if rules.model == "distributed" or rules.hub in (parts[one].name, parts[other].name):
                each = price.get(frozenset((choice[one], choice[other])), 0)
                total += each * (parts[one].count + parts[other].count)
    return total, len(set(choice))
