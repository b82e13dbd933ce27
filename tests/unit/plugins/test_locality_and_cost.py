"""Data locality, node costs, and the weights of the built-in profiles."""

from __future__ import annotations

import random

import pytest

from builders import NOW_MS, a_job, a_node
from hodei.control.controller import Controller
from hodei.model.config import ProfileConfig, SchedulingConfig
from hodei.model.facts import JobSubmitted, NodeJoined
from hodei.model.node import Location
from hodei.plugins.backend_policies import Cost
from hodei.plugins.locality import DataLocality
from hodei.plugins.registry import build_profiles, find_plugin
from unit.plugins.plugin_helpers import a_member, a_table, scores

NODES = [
    a_node("holder", data=("imagenet", "words"), location=Location("eu", "eu-1")),
    a_node("neighbour", location=Location("eu", "eu-1")),
    a_node("same-region", data=("maps",), location=Location("eu", "eu-2")),
    a_node("namesake", location=Location("us", "eu-1")),
    a_node("unlocated"),
]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        pytest.param(("imagenet",), (100, 60, 30, 0, 0), id="one data set"),
        pytest.param(("imagenet", "words"), (100, 60, 30, 0, 0), id="both in one place"),
        # maps: 30 from the holder's region, 30 for its neighbour, 100 where it is
        pytest.param(("imagenet", "maps"), (65, 45, 65, 0, 0), id="two places"),
        pytest.param(("imagenet", "maps", "unknown"), (43.33, 30, 43.33, 0, 0), id="one that no node holds"),
        pytest.param(("unknown",), (0, 0, 0, 0, 0), id="only one that no node holds"),
    ],
)
def test_the_score_is_the_share_of_near_inputs(inputs, expected):
    found = scores(DataLocality(), a_member(inputs=inputs), a_table(NODES))
    names = [node.name for node in NODES]
    assert found == {name: round(points * 100) for name, points in zip(names, expected, strict=True)}


def test_without_inputs_there_is_no_opinion():
    assert scores(DataLocality(), a_member(), a_table(NODES)) is None


def test_a_zone_or_region_can_hold_data_that_is_on_none_of_its_nodes():
    plugin = find_plugin("data_locality", {"zones": {"eu-2": ["lake"]}, "regions": {"us": ["lake"]}})
    found = scores(plugin, a_member(inputs=("lake",)), a_table(NODES))
    assert found == {"holder": 0, "neighbour": 0, "same-region": 6_000, "namesake": 3_000, "unlocated": 0}


def test_a_part_of_the_rows_gets_the_same_scores():
    table, member = a_table(NODES), a_member(inputs=("imagenet", "maps"))
    all_rows = DataLocality().score(member, table.view(), None)
    assert DataLocality().score(member, table.view(slice(1, 3)), None).tolist() == all_rows.tolist()[1:3]


def test_ten_thousand_random_nodes_score_as_in_the_reference():
    rng = random.Random(7)
    for _ in range(100):
        nodes = [
            a_node(f"n{i:03}", data=tuple(rng.sample("pqrs", rng.choice((0, 0, 0, 1, 2)))),
                   location=Location(rng.choice(("", "eu", "us")), rng.choice(("", "1", "2"))))
            for i in range(100)
        ]  # fmt: skip
        inputs = tuple(rng.sample("pqrs", rng.randint(1, 3)))
        expected = {}
        for node in nodes:
            location, points = node.location, 0
            for name in inputs:
                holders = [other.location for other in nodes if name in other.data]
                if name in node.data:
                    points += 10_000
                elif location.zone and any(
                    (holder.region, holder.zone) == (location.region, location.zone) for holder in holders
                ):
                    points += 6_000
                elif location.region and any(holder.region == location.region for holder in holders):
                    points += 3_000
            expected[node.name] = points // len(inputs)
        assert scores(DataLocality(), a_member(inputs=inputs), a_table(nodes)) == expected


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        pytest.param((350, 100, 600), (5_000, 10_000, 0), id="between cheapest and most expensive"),
        pytest.param((350, 350, 350), (10_000, 10_000, 10_000), id="all the same"),
        pytest.param((0, 100, 400), (10_000, 7_500, 0), id="no cost counts as zero"),
    ],
)
def test_cheaper_nodes_score_higher(costs, expected):
    nodes = [a_node(name, cost_milli=cost) for name, cost in zip("abc", costs, strict=True)]
    assert scores(Cost(), a_member(), a_table(nodes)) == dict(zip("abc", expected, strict=True))


def test_without_any_cost_there_is_no_opinion():
    assert scores(Cost(), a_member(), a_table([a_node()])) is None


def test_only_nodes_that_could_take_it_are_compared():
    table = a_table([a_node(name, cost_milli=cost) for name, cost in (("a", 100), ("b", 200), ("c", 300))])
    raw = Cost().score(a_member(), table.view(), None)
    feasible = table.view().none()
    feasible[1:] = True
    assert Cost().normalize(raw, feasible)[1:].tolist() == [10_000, 0]


def _weights(name: str, **configured: ProfileConfig) -> dict[str, int]:
    return {w.plugin.name: w.weight for w in build_profiles(SchedulingConfig(profiles=configured))[name].scores}


DEFAULT = {"resource": 40, "load": 30, "affinity": 20, "proximity": 10}
COMPUTE = {"fit": 30, "affinity": 20, "load": 20, "data_locality": 20, "cost": 10}


def test_two_profiles_exist_without_configuration():
    assert _weights("default").items() >= DEFAULT.items()
    assert not {"fit", "data_locality", "cost"} & _weights("default").keys()
    assert _weights("compute").items() >= COMPUTE.items()
    assert not {"resource", "proximity"} & _weights("compute").keys()


def test_other_plugins_have_the_same_weight_in_both_profiles():
    rest = {name: weight for name, weight in _weights("default").items() if name not in DEFAULT}
    assert rest == {name: weight for name, weight in _weights("compute").items() if name not in COMPUTE}
    assert "platform" in rest


def test_a_profile_starts_from_the_one_it_names():
    assert _weights("own", own=ProfileConfig(base="compute")) == _weights("compute")
    assert _weights("own", own=ProfileConfig()) == _weights("default")


def test_a_section_for_a_built_in_profile_keeps_its_weights():
    assert _weights("compute", compute=ProfileConfig(queue="fair")) == _weights("compute")


def test_a_strategy_takes_the_place_of_fit_and_load():
    weights = _weights("own", own=ProfileConfig(base="compute", worker_selection="most_allocated"))
    assert weights["most_allocated"] == 50
    assert not {"fit", "load"} & weights.keys()


def test_a_job_goes_to_the_node_with_its_inputs_and_the_decision_says_so():
    controller = Controller(build_profiles(SchedulingConfig()))
    nodes = [a_node(name, cost_milli=cost, data=data) for name, cost, data in (("a", 100, ()), ("b", 100, ("words",)))]
    controller.step(NOW_MS, [NodeJoined(node) for node in nodes])
    plan = controller.step(NOW_MS, [JobSubmitted(a_job(1, profile="compute", inputs=("words",)))]).plan
    (bind,) = plan.binds
    assert bind.node == "b"
    terms = {term.plugin: term.score for term in bind.decision.chosen.terms}
    assert terms["data_locality"] == 10_000
    assert terms["cost"] == 10_000
