"""Worker selection: seven strategies, each with a small example worked out by hand."""

from __future__ import annotations

import pytest

from builders import NOW_MS, a_job, a_node
from hodei.control.controller import Controller
from hodei.control.explain.why import plan, why
from hodei.engine.points import MAX_SCORE
from hodei.model.facts import JobSubmitted, NodeJoined
from hodei.model.job import BackendChoice
from hodei.model.node import Location, Node
from hodei.plugins.locality import LocalityAware, Proximity, distance_km, nearness
from hodei.plugins.registry import build_profile
from hodei.plugins.strategies import BinPacking, LeastLoaded, Load, MostFree, Resource, ResourceBalance, RoundRobin
from unit.plugins.plugin_helpers import a_member, a_table, best, scores

TEN = [a_node(name, 10, "10Gi") for name in ("a", "b", "c")]
BUSY = {"a": {"cpu": 8, "memory": "8Gi"}, "b": {"cpu": 4, "memory": "4Gi"}, "c": {"cpu": 6, "memory": "6Gi"}}


def test_least_loaded_of_80_40_and_60_percent_is_the_one_at_40():
    assert scores(LeastLoaded(), a_member(), a_table(TEN, BUSY)) == {"a": 2_000, "b": 6_000, "c": 4_000}
    assert best(LeastLoaded(), a_member(), a_table(TEN, BUSY)) == "b"


def test_the_busier_of_cpu_and_memory_is_the_load():
    table = a_table(TEN, {"a": {"cpu": 1, "memory": "9Gi"}, "b": {"cpu": 5, "memory": "5Gi"}, "c": {"cpu": 10}})
    assert scores(Load(), a_member(), table) == {"a": 1_000, "b": 5_000, "c": 0}


def test_load_is_the_same_for_every_member():
    assert Load().key(a_member(cpu="1")) == Load().key(a_member(cpu="9", project="other"))


def test_resource_leaves_the_largest_share_free_after_placing():
    table = a_table([a_node("large", 20, "20Gi"), a_node("small", 10, "10Gi")])
    assert scores(Resource(), a_member(cpu="5", memory="5Gi"), table) == {"large": 7_500, "small": 5_000}


def test_resource_packs_once_less_than_half_of_a_node_would_stay_free():
    table = a_table(TEN, BUSY)
    # 0, 4 and 2 of 10 stay free: the node that is filled up exactly is the best, the one that keeps most the worst.
    assert scores(Resource(), a_member(cpu="2", memory="2Gi"), table) == {"a": 10_000, "b": 6_000, "c": 8_000}


def test_resource_deducts_points_for_imbalance_and_for_a_remainder_smaller_than_the_member():
    table = a_table(
        TEN, {"a": {"cpu": 3, "memory": "0"}, "b": {"cpu": 3, "memory": "3Gi"}, "c": {"cpu": 5, "memory": "5Gi"}}
    )
    # After placing 60 % and 90 % are free of a, 60 % of both of b (and 1 of the 4 that c has left is less than 3).
    assert scores(Resource(), a_member(cpu="1", memory="1Gi"), table) == {"a": 4_500, "b": 6_000, "c": 6_000}
    assert scores(Resource(), a_member(cpu="3", memory="3Gi"), table)["c"] == 8_000 - 1_500


def test_resource_answers_for_one_node_as_it_does_for_all():
    table = a_table([*TEN, a_node("d", 8, "30Gi")], BUSY)
    for fields in (
        {"cpu": "2", "memory": "2Gi"},
        {"cpu": "3", "memory": "0"},
        {"cpu": "0", "memory": "0"},
        {"cpu": "9"},
    ):
        member = a_member(**fields)
        found = scores(Resource(), member, table)
        assert {name: Resource().score(member, table.one_node(row), None) for name, row in table.row.items()} == found


def test_most_free_chooses_the_largest_free_amount_whatever_its_share():
    nodes = [a_node("huge", 100, "100Gi"), a_node("tiny", 2, "2Gi")]
    table = a_table(nodes, {"huge": {"cpu": 90, "memory": "90Gi"}})
    assert scores(MostFree(), a_member(), table) == {"huge": 1_000, "tiny": 200}
    assert best(LeastLoaded(), a_member(), table) == "tiny"


def test_resource_balance_places_cpu_jobs_where_memory_is_used():
    table = a_table(TEN, {"a": {"memory": "5Gi"}, "b": {"cpu": 5}})
    member = a_member(cpu="5", memory="0")
    assert scores(ResourceBalance(), member, table) == {"a": 10_000, "b": 0, "c": 5_000}


def test_bin_packing_is_best_fit():
    table = a_table(TEN, BUSY)
    assert scores(BinPacking(), a_member(cpu="2", memory="2Gi"), table) == {"a": 10_000, "b": 6_000, "c": 8_000}
    assert best(BinPacking(), a_member(cpu="2", memory="2Gi"), table) == "a"


def test_bin_packing_fills_one_node_before_the_next():
    controller = _controller("bin_packing", nodes=3, cpu=2)
    assert _nodes_of(controller, jobs=5) == ["n1", "n1", "n2", "n2", "n3"]


def test_least_loaded_spreads():
    controller = _controller("least_loaded", nodes=3, cpu=2)
    assert _nodes_of(controller, jobs=5) == ["n1", "n2", "n3", "n1", "n2"]


def test_round_robin_alternates_in_order_of_name():
    controller = _controller("round_robin", nodes=3, cpu=9)
    assert _nodes_of(controller, jobs=7) == ["n1", "n2", "n3", "n1", "n2", "n3", "n1"]


def test_a_trial_does_not_advance_round_robin():
    controller = _controller("round_robin", nodes=3, cpu=9)
    assert _nodes_of(controller, jobs=1) == ["n1"]
    spec = a_job(99, cpu="1", profile="default").spec
    for _ in range(5):
        assert [place.node for place in plan(controller, [spec], NOW_MS)[0].placements] == ["n2"]
        assert why(controller, 1, NOW_MS).status == "placed"
    assert _nodes_of(controller, jobs=2, first=2) == ["n2", "n3"]


def test_round_robin_uses_a_new_node_next():
    controller = _controller("round_robin", nodes=2, cpu=9)
    assert _nodes_of(controller, jobs=2) == ["n1", "n2"]
    controller.step(NOW_MS, [NodeJoined(a_node("n0", 9, "64Gi"))])
    assert _nodes_of(controller, jobs=3, first=10) == ["n0", "n1", "n2"]


def test_round_robin_ranks_by_order_not_by_how_long_ago():
    table = a_table(TEN, {"b": {"cpu": 1}})
    assert scores(RoundRobin(), a_member(), table) == {"a": 10_000, "b": 5_000, "c": 10_000}


EU = Location(region="eu", zone="eu-1", datacenter="dc1", rack="r1", lat_micro=52_500_000, lng_micro=13_400_000)


@pytest.mark.parametrize(
    ("here", "score"),
    [
        pytest.param(Location("eu", "eu-1", "dc1", "r1"), 10_000, id="the same rack"),
        pytest.param(Location("eu", "eu-1", "dc1", "r2"), 8_000, id="the same datacenter"),
        pytest.param(Location("eu", "eu-1", "dc2"), 6_000, id="the same zone"),
        pytest.param(Location("eu", "eu-2"), 4_000, id="the same region"),
        pytest.param(Location("us"), 0, id="another region, place unknown"),
        pytest.param(Location("us", lat_micro=52_500_000, lng_micro=13_400_000), 3_000, id="no distance at all"),
        pytest.param(Location(lat_micro=-52_500_000, lng_micro=-166_600_000), 0, id="the antipodes"),
        pytest.param(Location(), 0, id="nothing known"),
    ],
)
def test_nearness_depends_on_topology_first_and_then_on_distance(here, score):
    assert nearness(EU, here) == score


def test_distance_is_in_whole_kilometres():
    berlin = Location(lat_micro=52_520_000, lng_micro=13_405_000)
    paris = Location(lat_micro=48_857_000, lng_micro=2_352_000)
    assert distance_km(berlin, paris) == pytest.approx(878, abs=2)
    assert distance_km(berlin, Location()) is None


def test_locality_prefers_the_near_node_and_has_no_opinion_without_a_location():
    table = a_table([a_node("far", location=Location("us")), a_node("near", location=Location("eu", "eu-1"))])
    member = a_member(near=Location("eu", "eu-1"))
    assert scores(LocalityAware(), member, table) == {"far": 0, "near": 6_000}
    assert scores(Proximity(), a_member(), table) is None


def test_strategies_consider_cpu_and_memory_without_a_request():
    table = a_table(TEN, BUSY)
    for strategy in (Resource, MostFree, ResourceBalance, BinPacking):
        found = scores(strategy(), a_member(cpu=0, memory=0), table)
        assert found is not None
        assert all(0 <= score <= MAX_SCORE for score in found.values())


def test_a_strategy_works_without_known_memory():
    bare = Node("n1", "local", capacity={"cpu": 4000})
    for strategy in (Resource, Load, LeastLoaded, MostFree, ResourceBalance, BinPacking):
        assert scores(strategy(), a_member(cpu="1", memory=0), a_table([bare])) is not None


def test_a_preferred_backend_counts_in_addition_to_the_strategy():
    profile = build_profile("default")
    weights = {weighted.plugin.name: weighted.weight for weighted in profile.scores}
    assert weights.items() >= {"resource": 40, "load": 30, "affinity": 20, "proximity": 10, "platform": 20}.items()
    controller = Controller({"default": profile})
    controller.step(NOW_MS, [NodeJoined(a_node("a", backend="east")), NodeJoined(a_node("b", backend="west"))])
    spec = a_job(1, backend=BackendChoice("preferred", ("west",)))
    (bind,) = controller.step(NOW_MS, [JobSubmitted(spec)]).plan.binds
    assert bind.node == "b"


def _controller(strategy: str, nodes: int, cpu: int) -> Controller:
    controller = Controller({"default": build_profile("default", queue="fifo", worker_selection=strategy)})
    controller.step(NOW_MS, [NodeJoined(a_node(f"n{i + 1}", cpu, "64Gi")) for i in range(nodes)])
    return controller


def _nodes_of(controller: Controller, jobs: int, first: int = 1) -> list[str]:
    done = controller.step(NOW_MS, [JobSubmitted(a_job(first + i, cpu="1", memory="1Gi")) for i in range(jobs)])
    return [bind.node for bind in done.plan.binds]
