"""Allocation scores by Kubernetes' formulas: small tables worked out by hand, and a reference implementation."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from builders import a_node
from hodei.engine.nodes import OneNode, Table
from hodei.engine.runner import Runner
from hodei.model.errors import InvalidInput
from hodei.model.node import Node
from hodei.plugins.allocation import BalancedAllocation, LeastAllocated, MostAllocated, RequestedToCapacityRatio
from hodei.plugins.fit import Fit
from hodei.plugins.registry import find_plugin
from unit.plugins.plugin_helpers import VIEW, a_member, a_table, scores

FALLING = [{"utilization": 0, "score": 10}, {"utilization": 100, "score": 0}]


def _points(plugin: Any, node: Node, used: dict[str, Any] | None = None, **fields: Any) -> float:
    found = scores(plugin, a_member(**fields), a_table([node], {node.name: used or {}}))
    assert found is not None
    return found[node.name] / 100


@pytest.mark.parametrize(
    ("cpu", "memory", "used", "least", "most"),
    [
        # 4 cores and 10Gi: (4-3)/4 = 25 and (10-5)/10 = 50 are free; 75 and 50 are used
        pytest.param("3", "5Gi", {}, 37, 62, id="an empty node"),
        # 3 more of 4 cores: 0 left; 2Gi more: 30 left
        pytest.param("3", "5Gi", {"cpu": "1", "memory": "2Gi"}, 15, 85, id="a node that is just full"),
        pytest.param("3", "5Gi", {"cpu": "3", "memory": "2Gi"}, 15, 85, id="more than the capacity counts as full"),
        pytest.param("0", "0", {}, 100, 0, id="no request, no usage"),
        # 1/4 = 25 and 1/10 = 10, truncated to whole points only once: (75 + 90) / 2 = 82
        pytest.param("1", "1Gi", {}, 82, 17, id="halves are truncated"),
    ],
)
def test_the_free_and_the_used_share(cpu, memory, used, least, most):
    node = a_node("n", 4, "10Gi")
    assert _points(LeastAllocated(), node, used, cpu=cpu, memory=memory) == least
    assert _points(MostAllocated(), node, used, cpu=cpu, memory=memory) == most


def test_resources_can_be_weighted():
    node = a_node("n", 4, "10Gi")
    # (25 + 2 x 50) / 3 = 41.67
    assert _points(LeastAllocated({"cpu": 1, "memory": 2}), node, cpu="3", memory="5Gi") == 41
    assert _points(MostAllocated({"cpu": 1, "memory": 2}), node, cpu="3", memory="5Gi") == 58


def test_a_resource_that_the_node_does_not_have_is_left_out():
    weights = {"cpu": 1, "memory": 1, "gpu": 8}
    assert _points(LeastAllocated(weights), a_node("n", 4, "10Gi"), cpu="3", memory="5Gi", gpu="1") == 37


def test_an_extended_resource_counts_only_if_it_is_requested():
    node, weights = a_node("n", 4, "10Gi", gpu="4"), {"cpu": 1, "memory": 1, "gpu": 1}
    used = {"cpu": 0, "gpu": "2"}
    assert _points(MostAllocated(weights), node, used, cpu="3", memory="5Gi") == 62
    assert _points(MostAllocated(weights), node, used, cpu="3", memory="5Gi", gpu="1") == (75 + 50 + 75) // 3


@pytest.mark.parametrize(
    ("shape", "cpu", "memory", "points"),
    [
        pytest.param(None, "3", "5Gi", 63, id="by default the fuller the better; 62.5 is rounded up"),
        pytest.param(FALLING, "3", "5Gi", 38, id="the emptier the better; 37.5 is rounded up"),
        pytest.param(FALLING, "4", "5Gi", 50, id="a score of zero does not count"),
        pytest.param([{"utilization": 50, "score": 3}], "3", "5Gi", 30, id="one point is a constant"),
        # cpu 75: 100 - 100 x 5 / 10 = 50; memory 50: 0 + 100 x 10 / 30 = 33.3, truncated to 33; 41.5 is rounded up
        pytest.param(
            [
                {"utilization": 40, "score": 0},
                {"utilization": 70, "score": 10},
                {"utilization": 80, "score": 0},
            ],
            "3", "5Gi", 42, id="up and down again",
        ),
        # memory 30: 100 - 100 x 30 / 70 = 57.1; Go truncates towards zero: 100 - 42 = 58
        pytest.param([{"utilization": 0, "score": 10}, {"utilization": 70, "score": 0}], "4", "3Gi", 58, id="truncated as in Go"),
    ],
)  # fmt: skip
def test_a_shape_is_interpolated_between_its_points(shape, cpu, memory, points):
    assert _points(RequestedToCapacityRatio(shape), a_node("n", 4, "10Gi"), cpu=cpu, memory=memory) == points


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        pytest.param([], "one point or more", id="no point"),
        pytest.param([*FALLING, *FALLING], "rising", id="not rising"),
        pytest.param([{"utilization": 101, "score": 1}], "from 0 to 100", id="above 100"),
        pytest.param([{"utilization": 1, "score": 11}], "from 0 to 10", id="above 10"),
        pytest.param([{"utilization": 1}], "utilization and score", id="a point without a score"),
    ],
)
def test_an_invalid_shape_is_refused_with_a_message(shape, message):
    with pytest.raises(InvalidInput, match=message):
        find_plugin("requested_to_capacity_ratio", {"shape": shape})


@pytest.mark.parametrize("weight", [0, 101, 1.5, True])
def test_an_invalid_weight_is_refused(weight):
    with pytest.raises(InvalidInput, match="from 1 to 100"):
        find_plugin("least_allocated", {"resources": {"cpu": weight}})


@pytest.mark.parametrize(
    ("cpu", "memory", "gpu", "points"),
    [
        pytest.param("2", "5Gi", "", 100, id="half and half"),
        # |0.75 - 0.5| / 2 = 0.125
        pytest.param("3", "5Gi", "", 87, id="three quarters and a half"),
        pytest.param("4", "0", "", 50, id="all of one, none of the other"),
        # 0.5, 0.5 and 1: mean 2/3, deviation sqrt(1/18) = 0.2357
        pytest.param("2", "5Gi", "4", 76, id="three resources"),
    ],
)
def test_balance_is_a_hundred_less_the_deviation(cpu, memory, gpu, points):
    plugin = BalancedAllocation({"cpu": 1, "memory": 1, "gpu": 1})
    assert _points(plugin, a_node("n", 4, "10Gi", gpu="4"), cpu=cpu, memory=memory, gpu=gpu) == points


def test_balance_has_no_opinion_without_a_request():
    assert scores(BalancedAllocation(), a_member(cpu="0", memory="0"), a_table([a_node()])) is None


def test_the_score_of_fit_uses_the_configured_strategy():
    node = a_node("n", 4, "10Gi")
    assert _points(Fit(), node, cpu="3", memory="5Gi") == 37
    assert _points(Fit(strategy="most_allocated", resources={"cpu": 1}), node, cpu="3", memory="5Gi") == 75
    with pytest.raises(InvalidInput, match="there is no strategy 'best'"):
        find_plugin("fit", {"strategy": "best"})


# Whole steps between the points, so that no division leaves a remainder.
V_SHAPE = [{"utilization": 0, "score": 10}, {"utilization": 50, "score": 0}, {"utilization": 100, "score": 5}]


def _naive(
    kind: str, weights: dict[str, int], requested: dict[str, int], used: dict[str, int], has: dict[str, int]
) -> int:
    """The reference: one node, one resource after the other."""
    counted = [r for r in weights if has.get(r) and (r in ("cpu", "memory") or requested.get(r))]
    if kind == "balanced_allocation":
        shares = [min((used.get(r, 0) + requested.get(r, 0)) / has[r], 1) for r in counted]
        if len(shares) < 2:
            return 100
        if len(shares) == 2:
            return int((1 - abs(shares[0] - shares[1]) / 2) * 100)
        mean = sum(shares) / len(shares)
        return int((1 - math.sqrt(sum((share - mean) ** 2 for share in shares) / len(shares))) * 100)
    total = weight = 0
    for resource in counted:
        after, capacity = used.get(resource, 0) + requested.get(resource, 0), has[resource]
        if kind == "least_allocated":
            total += max(capacity - after, 0) * 100 // capacity * weights[resource]
        elif kind == "requested_to_capacity_ratio":
            percent = min(after, capacity) * 100 // capacity
            height = 100 - 2 * percent if percent <= 50 else percent - 50
            total += height * weights[resource]
            if not height:
                continue
        else:
            total += min(after, capacity) * 100 // capacity * weights[resource]
        weight += weights[resource]
    if kind == "requested_to_capacity_ratio" and weight:
        return math.floor(total / weight + 0.5)
    return total // weight if weight else 0


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("least_allocated", {}), ("most_allocated", {}), ("balanced_allocation", {}),
        ("requested_to_capacity_ratio", {"shape": V_SHAPE}),
    ],
)  # fmt: skip
def test_ten_thousand_random_nodes_score_as_in_the_reference(kind, options):
    rng = random.Random(kind)
    runner = Runner()
    for _ in range(50):
        weights = {r: rng.randint(1, 5) for r in ("cpu", "memory", "gpu") if r != "gpu" or rng.random() < 0.5}
        nodes = [
            Node(f"n{i:03}", "b", capacity={
                "cpu": rng.choice((0, 1000, 3000, 64_000)), "memory": rng.choice((0, 2**30, 7 << 30, 10**9)),
                "gpu": rng.choice((0, 0, 1000, 8000)),
            })
            for i in range(200)
        ]  # fmt: skip
        table = Table(nodes)
        table.settle()
        used = [{r: rng.randint(0, max(has, 1)) for r, has in node.capacity.items()} for node in nodes]
        for row, placed in enumerate(used):
            table.place(row, placed)
        requested = {"cpu": rng.choice((0, 100, 1500)), "memory": rng.choice((0, 3 << 28)), "gpu": rng.choice((0, 500))}
        member = a_member(cpu=requested["cpu"] / 1000, memory=requested["memory"], gpu=f"{requested['gpu']}m")
        plugin = find_plugin(kind, {"resources": weights, **options})
        found = runner.score(plugin, member, table.view(), VIEW)
        if found is None:
            assert kind == "balanced_allocation"
            assert not any(requested[resource] for resource in weights)
            continue
        expected = [_naive(kind, weights, requested, used[row], node.capacity) * 100 for row, node in enumerate(nodes)]
        assert found.tolist() == expected
        assert [runner.score_of_one(plugin, member, VIEW, OneNode(table, row)) for row in range(200)] == expected
    assert not runner.faults
