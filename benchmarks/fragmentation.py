"""Fragmentation of a full cluster: jobs of mixed sizes arrive until many in a row are refused. The capacity that is still
free is unusable for jobs like these.

Each mix is drawn with a seed. `churn` is a cluster that has run for a while: jobs end at random while others arrive.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import click
from msgspec import Struct

from hodei.engine.cycle import Engine
from hodei.engine.nodes import Table
from hodei.engine.plan import Refusal
from hodei.engine.points import Placed
from hodei.engine.view import Gang, View, gang_of
from hodei.model.job import JobSpec, TaskSpec
from hodei.model.node import Node
from hodei.model.resources import CPU, MEMORY, Resources
from hodei.plugins.registry import build_profile

NODES = 100
REFUSALS = 60
SEEDS = 3
# While a cluster churns, this many jobs end when one is refused; it churns for this many jobs per node.
_ENDING = 10
_JOBS_A_NODE = 20

Draw = Callable[[random.Random], Resources]


class Mix(Struct, frozen=True):
    """`request` draws the request of the next job; every node has `cores` and `gib` of memory."""

    cores: int
    gib: int
    request: Draw
    churn: bool = False


def _cpu(*cores: int) -> Draw:
    return lambda draw: {CPU: draw.choice(cores) * 1000}


def _pairs(cores: Sequence[int], gib: Sequence[int]) -> Draw:
    return lambda draw: {CPU: draw.choice(cores) * 1000, MEMORY: draw.choice(gib) << 30}


def _shapes(draw: random.Random) -> Resources:
    """Like cloud instances: 2, 4 or 8 GiB per core."""
    cores = draw.choice((1, 1, 2, 2, 3, 4, 4, 6, 8, 12, 16))
    return {CPU: cores * 1000, MEMORY: (cores * draw.choice((2, 4, 4, 4, 8))) << 30}


MIXES = {
    "small": Mix(8, 32, _cpu(2, 3, 4)),  # two or three jobs fill a node
    "halves": Mix(8, 32, _cpu(3, 5, 5)),  # a pair that fits, and one that wastes
    "pairs": Mix(16, 64, _pairs((2, 4, 6, 8), (4, 8, 16, 24, 32))),  # cpu and memory are independent
    "shapes": Mix(32, 128, _shapes),
    "churn": Mix(32, 128, _shapes, churn=True),
}


class Filled(Struct, frozen=True):
    """A full cluster, in percent. `unusable`: the free part of the most used resource. `spread`: the nodes with work when
    half of that resource was in use."""

    unusable: float
    spread: float


def fill(
    selection: str = "", mix: str = "shapes", *, nodes: int = NODES, refusals: int = REFUSALS, seed: int = 1
) -> Filled:
    """Fill a cluster by the profile `default`, or one with that `worker_selection`, until `refusals` jobs in a row are
    refused."""
    draw, kind = random.Random(seed), MIXES[mix]
    capacity = {CPU: kind.cores * 1000, MEMORY: kind.gib << 30}
    table = Table(Node(f"node-{i:04}", "bench", capacity=capacity) for i in range(nodes))
    table.settle()
    profile = build_profile("default", worker_selection=selection)
    engine, view = Engine(table, {"default": profile}), View(0)
    running: list[tuple[Gang, list[Placed]]] = []
    spread, number, refused = 0.0, 0, 0
    churning = kind.churn
    while refused < refusals:
        number += 1
        gang = gang_of(number, JobSpec(name="job", tasks=(TaskSpec(request=kind.request(draw)),), project="a"), number)
        profile.admit(gang)
        placed = engine.try_gang(gang, view)
        if not isinstance(placed, Refusal):
            refused = 0
            running.append((gang, placed))
        elif churning:
            churning = number < _JOBS_A_NODE * nodes
            for _ in range(min(len(running), _ENDING)):
                engine.withdraw(*running.pop(draw.randrange(len(running))))
        else:
            refused += 1
        if not spread and _free(table) <= 50:
            spread = 100 * sum(bool(held.runs) for held in table.node_usage) / nodes
    return Filled(_free(table), spread)


def _free(table: Table) -> float:
    """Percent of the scarcest resource."""
    total = {resource: sum(room[resource] for room in table.allocatable) for resource in (CPU, MEMORY)}
    used = {resource: sum(held.used.get(resource, 0) for held in table.node_usage) for resource in total}
    return min(100 * (amount - used[resource]) / amount for resource, amount in total.items())


def unusable(selection: str = "", mix: str = "shapes", *, nodes: int = NODES, seeds: int = SEEDS) -> float:
    """The mean over several seeds, in percent: the figure of the target for fragmentation."""
    return round(sum(fill(selection, mix, nodes=nodes, seed=seed).unusable for seed in range(1, seeds + 1)) / seeds, 1)


ABOUT = "Fragmentation: the unusable part of a full cluster."
OPTIONS = (
    click.option("--mix", type=click.Choice(sorted(MIXES)), help="Mix of jobs [default: measure each]."),
    click.option("--nodes", type=int, default=NODES, show_default=True, help="Number of nodes."),
    click.option("--seeds", type=int, default=SEEDS, help="Number of draws for the mean.", show_default=True),
    click.option("--worker-selection", default="", help="Instead of the default of the profile."),
)


def measure(given: SimpleNamespace) -> dict[str, Any]:
    result: dict[str, Any] = {"nodes": given.nodes, "worker_selection": given.worker_selection or "default"}
    for mix in (given.mix,) if given.mix else MIXES:
        found = [fill(given.worker_selection, mix, nodes=given.nodes, seed=seed + 1) for seed in range(given.seeds)]
        result[f"{mix}_unusable_percent"] = round(sum(each.unusable for each in found) / len(found), 1)
        result[f"{mix}_nodes_in_use_at_half_percent"] = round(sum(each.spread for each in found) / len(found))
    return result
