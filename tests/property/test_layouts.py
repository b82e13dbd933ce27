"""Gangs that must lie in a certain way, on small random clusters: the engine finds room whenever a plain search over every
way finds some, the rule is never broken, and no way that has room is cheaper.

`HODEI_CASES` sets how many clusters are tried for each; a failure names its seed.
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
# Told a second time, plainly: what a node says of itself.
PLACES: dict[str, Any] = {
    "rack": lambda node: node.location.rack or None,
    "zone": lambda node: node.location.zone or None,
    "host": lambda node: node.name,
    "backend": lambda node: node.backend,
    "row": lambda node: node.labels.get("row"),
}


class _Scene:
    """A cluster with some of it in use."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.nodes = [self._node(number) for number in range(dice.randint(1, 6))]
        self.table = Table(self.nodes)
        self.table.settle()
        self.free = {node.name: node.capacity["cpu"] for node in self.nodes}
        for node in self.nodes:
            taken = dice.choice([0, 0, 1000, 2000, 5000])  # a node may have shrunk under its runs
            self.table.place(self.table.row[node.name], {"cpu": taken})
            self.free[node.name] -= taken
        self.engine = Engine(self.table, {"default": build_profile("default")})

    def _node(self, number: int) -> Node:
        dice = self.dice
        return a_node(
            f"n{number}",
            dice.randint(1, 5),
            backend=dice.choice(BACKENDS),
            location=Location(zone=dice.choice(["", "z1", "z2"]), rack=dice.choice(["", "r1", "r2", "r3"])),
            labels=dice.choice([{}, {"row": "a"}, {"row": "b"}]) | dice.choice([{}, {}, {"disk": "ssd"}]),
            cordoned=dice.random() < 0.1,
        )

    def task(self, name: str = "main", most: int = 6) -> TaskSpec:
        dice = self.dice
        count = dice.randint(1, most)
        return a_task(
            name,
            cpu=dice.choice(["500m", "1", "1", "2"]),
            memory=0,
            count=count,
            min_count=dice.choice([0, 0, dice.randint(1, count)]),
            node_selector=dice.choice([{}, {}, {}, {"disk": "ssd"}]),
            backends=dice.choice([(), (), ("east", "west"), ("north",)]),
        )

    def admit(self, spec: JobSpec) -> Gang:
        gang = gang_of(1, spec, 0)
        self.engine.profile(gang).admit(gang)
        return gang

    def place(self, gang: Gang) -> list[Placed] | None:
        """None for a refusal, which must leave no trace."""
        result = self.engine.try_gang(gang, VIEW)
        assert not self.engine.runner.faults
        if isinstance(result, Refusal):
            used = {node.name: self.table.usage(self.table.row[node.name]).get("cpu", 0) for node in self.nodes}
            assert used == {node.name: node.capacity["cpu"] - self.free[node.name] for node in self.nodes}
            return None
        return result

    def open_to(self, task: TaskSpec, nodes: Sequence[Node] | None = None) -> list[str]:
        return [
            node.name
            for node in (self.nodes if nodes is None else nodes)
            if not node.cordoned
            and (not task.node_selector or node.labels.get("disk") == "ssd")
            and (not task.backends or node.backend in task.backends)
        ]


def fits(wants: Sequence[tuple[int, Sequence[str]]], free: Mapping[str, int]) -> bool:
    """Whether all find room: every node is tried for every member."""
    if not wants:
        return True
    (cpu, nodes), *rest = wants
    return any(free[name] >= cpu and fits(rest, {**free, name: free[name] - cpu}) for name in nodes)


def needed(tasks: Sequence[TaskSpec], where: Sequence[Sequence[str]]) -> list[tuple[int, Sequence[str]]]:
    return [(task.request["cpu"], names) for task, names in zip(tasks, where, strict=True) for _ in range(task.needed)]


def places_of(scene: _Scene, topology: str) -> dict[str, list[Node]]:
    out: dict[str, list[Node]] = {}
    for node in scene.nodes:
        place = PLACES[topology](node)
        if place is not None:
            out.setdefault(place, []).append(node)
    return out


@pytest.mark.parametrize("tasks", [1, 2], ids=["equal members", "unequal members"])
@pytest.mark.parametrize("required", [True, False], ids=["required", "as a wish"])
def test_a_gang_is_in_one_place_whenever_some_place_has_room(tasks, required):
    for seed in range(CASES):
        scene = _Scene(seed)
        topology = scene.dice.choice(list(PLACES))
        parts = [scene.task(f"t{number}", most=6 // tasks) for number in range(tasks)]
        spec = a_job_spec(tasks=parts, gang=GangRules(topology=topology, topology_required=required))
        if spec.size == 1:
            continue
        able = {
            place
            for place, nodes in places_of(scene, topology).items()
            if fits(needed(parts, [scene.open_to(part, nodes) for part in parts]), scene.free)
        }
        placed = scene.place(scene.admit(spec))
        used = {PLACES[topology](one.node) for one in placed or ()}
        if able:
            assert placed, f"seed {seed}: {able} have room"
            assert used <= able, f"seed {seed}"
            assert len(used) == 1, f"seed {seed}"
        elif required:
            assert placed is None, f"seed {seed}: {used}"
        else:
            anywhere = fits(needed(parts, [scene.open_to(part) for part in parts]), scene.free)
            assert (placed is not None) == anywhere, f"seed {seed}"


def test_all_extra_members_come_along_if_some_place_has_room_for_all():
    for seed in range(CASES):
        scene = _Scene(seed)
        topology = scene.dice.choice(list(PLACES))
        # No rule but room: the order of places is by free resources alone.
        task = a_task(cpu=1, memory=0, count=scene.dice.randint(2, 6), min_count=1)
        nodes = [node for node in scene.nodes if not node.cordoned]
        if len(nodes) < len(scene.nodes):
            continue
        most = max(
            (sum(max(scene.free[node.name], 0) // 1000 for node in home) for home in places_of(scene, topology).values()),
            default=0,
        )  # fmt: skip
        placed = scene.place(scene.admit(a_job_spec(tasks=[task], gang=GangRules(topology=topology))))
        assert len(placed or ()) == min(most, task.count), f"seed {seed}"


def test_a_joining_member_follows_the_layout_of_its_gang_or_waits():
    for seed in range(CASES):
        scene = _Scene(seed)
        topology = scene.dice.choice(list(PLACES))
        home = scene.dice.choice(scene.nodes)
        spec = a_job_spec(tasks=[scene.task()], gang=GangRules(topology=topology))
        gang = gang_of(1, spec, 0)
        gang.needed, gang.extra, gang.is_joining, gang.running_nodes = ((0,),), ((),), True, (home.name,)
        scene.engine.profile(gang).admit(gang)
        place = PLACES[topology](home)
        near = [] if place is None else places_of(scene, topology)[place]
        able = fits([(spec.tasks[0].request["cpu"], scene.open_to(spec.tasks[0], near))], scene.free)
        placed = scene.place(gang)
        assert bool(placed) == able, f"seed {seed}"
        assert all(PLACES[topology](one.node) == place for one in placed or ()), f"seed {seed}"


@pytest.mark.parametrize("model", ["colocated", "distributed", "hub_and_spoke"])
def test_tasks_are_on_the_cheapest_backends_that_have_room(model):
    for seed in range(CASES):
        scene = _Scene(seed)
        parts = [scene.task(f"t{number}", most=3) for number in range(scene.dice.choice([1, 2, 3, 3]))]
        pairs = [("east", "north"), ("west", "east"), ("north", "west")][: scene.dice.randint(0, 3)]
        costs = tuple(TransferCost(pair, scene.dice.choice([0, 1, 2, 7])) for pair in pairs)
        spec = a_job_spec(tasks=parts, distribution=Distribution(model, scene.dice.choice(["t0", "t1"]), costs))
        if spec.size == 1:
            continue
        ways = {
            choice: cost(parts, choice, spec.distribution)
            for choice in product(BACKENDS, repeat=len(parts))
            if (model != "colocated" or len(set(choice)) == 1) and has_room(scene, parts, choice)
        }
        placed = scene.place(scene.admit(spec))
        assert bool(placed) == bool(ways), f"seed {seed}: {ways}"
        if placed:
            homes = {part.name: {one.node.backend for one in placed if one.member.task == part} for part in parts}
            assert all(len(backends) == 1 for backends in homes.values()), f"seed {seed}: {homes}"
            choice = tuple(homes[part.name].pop() for part in parts)
            assert ways[choice] == min(ways.values()), f"seed {seed}: {choice} of {ways}"


def test_every_repair_of_a_refused_gang_lets_it_start():
    for seed in range(CASES):
        scene = _Scene(seed)
        dice = scene.dice
        spec = a_job_spec(
            tasks=[scene.task(f"t{number}", most=4) for number in range(dice.choice([1, 1, 2]))],
            gang=GangRules(topology=dice.choice(["", *PLACES])),
            distribution=Distribution(dice.choice(["", "colocated", "distributed"])),
        )
        gang = scene.admit(spec)
        refusal = scene.engine.try_gang(gang, VIEW)
        if not isinstance(refusal, Refusal):
            continue
        with scene.table.trial():
            found = suggestions(scene.engine, gang, refusal, VIEW)
        if refusal.verdicts[0].reason.code == "GANG_TOPOLOGY" and not spec.distribution.model:
            assert any("as a preference" in repair.change for repair in found), f"seed {seed}"
        for repair in found:
            changed = scene.admit(repair.patch.applied_to(spec))
            placed = scene.place(changed)
            assert placed is not None, f"seed {seed}: {repair.change}"
            scene.engine.withdraw(changed, placed)


def has_room(scene: _Scene, parts: Sequence[TaskSpec], choice: Sequence[str]) -> bool:
    homes = [[node for node in scene.nodes if node.backend == backend] for backend in choice]
    open_to = [scene.open_to(part, nodes) for part, nodes in zip(parts, homes, strict=True)]
    return fits(needed(parts, open_to), scene.free)


def cost(parts: Sequence[TaskSpec], choice: Sequence[str], rules: Distribution) -> tuple[int, int]:
    """What moving data costs, and how many backends there are; of one backend none is cheaper than another."""
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
