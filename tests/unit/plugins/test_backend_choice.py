"""Choice of backends: weighted preferences, backends to avoid, backend policies, data rules and spill rules."""

from __future__ import annotations

import pytest

from builders import NOW_MS, a_job_spec, a_node
from hodei.configuration import check_scheduling
from hodei.engine.availability import AvailabilityProfile
from hodei.engine.view import View, gang_of
from hodei.model.config import DataRuleConfig, ProfileConfig, SchedulingConfig, SpillConfig
from hodei.model.errors import InvalidInput
from hodei.model.job import BackendChoice
from hodei.model.node import Location
from hodei.plugins.backend_policies import CostOptimized, Locality, Performance
from hodei.plugins.locality import DataRules
from hodei.plugins.platform import Platform
from hodei.plugins.registry import build_profiles
from hodei.plugins.spill import Spill, SpillRule
from unit.plugins.plugin_helpers import a_member, a_table, refused, scores

MINUTE_MS, HOUR_MS = 60_000, 3_600_000
THREE = [a_node("a", backend="a"), a_node("b", backend="b"), a_node("c", backend="c")]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        pytest.param(BackendChoice("preferred", ("a", "b")), {"a": 10_000, "b": 5000, "c": 0}, id="in their order"),
        pytest.param(
            BackendChoice("preferred", ("a", "b"), (20, 80)), {"a": 2500, "b": 10_000, "c": 0}, id="by their weights"
        ),
        pytest.param(BackendChoice(avoid=("b",)), {"a": 5000, "b": 0, "c": 5000}, id="one is avoided"),
        pytest.param(
            BackendChoice("preferred", ("a", "b"), avoid=("b",)),
            {"a": 10_000, "b": 0, "c": 5000},
            id="one is preferred, one avoided",
        ),
        pytest.param(BackendChoice(), None, id="no opinion"),
    ],
)
def test_preferences_about_backends_are_scores(choice, expected):
    assert scores(Platform(), a_member(backend=choice), a_table(THREE)) == expected


@pytest.mark.parametrize("policy", [CostOptimized(), Performance(), Locality()], ids=lambda policy: policy.name)
def test_with_one_backend_no_policy_has_an_opinion(policy):
    table = a_table([a_node("n1", cost_milli=3), a_node("n2")])
    assert scores(policy, a_member(inputs=("imagenet",)), table) is None


def test_the_backend_with_the_cheapest_node_is_the_cheapest_and_its_nodes_are_equal():
    table = a_table(
        [
            a_node("a1", backend="a", cost_milli=100),
            a_node("a2", backend="a", cost_milli=900),
            a_node("b1", backend="b", cost_milli=500),
            a_node("c1", backend="c", cost_milli=300),
        ]
    )
    assert scores(CostOptimized(), a_member(), table) == {"a1": 10_000, "a2": 10_000, "b1": 0, "c1": 5000}


def test_the_backend_with_the_largest_free_share_scores_best():
    nodes = [
        a_node("a1", 4, "4Gi", backend="a"),
        a_node("a2", 4, "4Gi", backend="a"),
        a_node("b1", 4, "4Gi", backend="b"),
    ]
    table = a_table(nodes, {"a1": {"cpu": "3", "memory": "3Gi"}, "b1": {"cpu": "1", "memory": "1Gi"}})
    found = scores(Performance(), a_member(cpu="1", memory="1Gi"), table)
    assert found["a1"] == found["a2"] == 3750
    assert found["b1"] == 5000


def test_the_backend_that_holds_the_data_or_is_near_has_locality():
    table = a_table(
        [
            a_node("a1", backend="a", data=("imagenet",)),
            a_node("a2", backend="a"),
            a_node("b1", backend="b", location=Location("eu")),
        ]
    )
    by_data = scores(Locality(), a_member(inputs=("imagenet",)), table)
    assert by_data == {"a1": 10_000, "a2": 10_000, "b1": 0}
    by_place = scores(Locality(), a_member(near=Location("eu")), table)
    assert by_place["b1"] > by_place["a1"] == by_place["a2"]
    assert scores(Locality(), a_member(), table) is None


def test_a_data_set_stays_where_it_must():
    table = a_table(
        [
            a_node("region", location=Location("eu")),
            a_node("zone", location=Location("eu-west", "eu-west-1")),
            a_node("other", location=Location("us")),
            a_node("europa", location=Location("europa")),
            a_node("unknown"),
            a_node("by-backend", backend="lab"),
        ]
    )
    rules = DataRules({"patients": ["eu", "lab"]})
    assert refused(rules, a_member(inputs=("patients", "imagenet")), table) == {
        "DATA_MUST_STAY: data set patients must stay in eu or lab": ["europa", "other", "unknown"]
    }
    assert refused(rules, a_member(inputs=("imagenet",)), table) == {}


HOME, CLOUD = a_node("home-1", 4, backend="home"), a_node("cloud-1", 4, backend="cloud", cost_milli=10_000)
RULE = SpillRule("cloud", 30 * MINUTE_MS, 20_000)


def a_gang(*, waited_ms: int = 0, estimate_ms: int = HOUR_MS, **fields):
    return gang_of(1, a_job_spec(estimate_ms=estimate_ms, cpu="4", **fields), NOW_MS - waited_ms)


def allowed_nodes(
    rule: SpillRule, gang, *, busy_ms: int = 0, forecasts=None, nodes=(HOME, CLOUD)
) -> tuple[list[str], str]:
    """The nodes of the last layout of the gang, and the reason against the others."""
    table = a_table(list(nodes))
    availability = AvailabilityProfile(table)
    if busy_ms:
        table.place(table.row["home-1"], {"cpu": 4000})
        availability.started("9.0.1", "home-1", {"cpu": 4000}, NOW_MS, busy_ms)
    availability.forecasts = forecasts or {}
    found = Spill([rule]).layouts(gang, table, View(NOW_MS, availability))
    assert [name for name, may in zip(table.names, found.options[0].rows[0], strict=True) if may] == ["home-1"]
    rows = found.options[-1].rows[0]
    return [name for name, may in zip(table.names, rows, strict=True) if may], found.reason.text


@pytest.mark.parametrize(
    ("situation", "spills"),
    [
        pytest.param({}, False, id="home is free now"),
        pytest.param({"busy_ms": 30 * MINUTE_MS}, False, id="home is free at the bound"),
        pytest.param({"busy_ms": 30 * MINUTE_MS + 1}, True, id="home is free just after the bound"),
        pytest.param({"busy_ms": HOUR_MS, "forecasts": {1: NOW_MS + MINUTE_MS}}, False, id="the forecast knows better"),
        pytest.param({"forecasts": {1: NOW_MS + HOUR_MS}}, True, id="others are ahead in the queue"),
    ],
)
def test_a_job_spills_only_if_it_waits_longer_elsewhere_than_the_bound(situation, spills):
    rows, text = allowed_nodes(RULE, a_gang(), **situation)
    assert rows == (["cloud-1", "home-1"] if spills else ["home-1"])
    assert spills or "spills only if that exceeds 30m" in text


def test_time_already_waited_counts():
    assert allowed_nodes(RULE, a_gang(waited_ms=31 * MINUTE_MS))[0] == ["cloud-1", "home-1"]
    assert allowed_nodes(RULE, a_gang(waited_ms=29 * MINUTE_MS))[0] == ["home-1"]


@pytest.mark.parametrize(
    ("estimate_ms", "count", "spills", "message"),
    [
        pytest.param(2 * HOUR_MS, 1, True, "", id="exactly the limit"),
        pytest.param(2 * HOUR_MS + 1000, 1, False, "would cost 20.01, over 20.00", id="slightly above the limit"),
        pytest.param(HOUR_MS, 3, False, "would cost 30.00", id="three members cost three times as much"),
        pytest.param(0, 1, False, "has no estimate", id="an unknown cost"),
    ],
)
def test_a_job_spills_only_within_its_cost_limit(estimate_ms, count, spills, message):
    gang = a_gang(waited_ms=HOUR_MS, estimate_ms=estimate_ms, count=count)
    rows, text = allowed_nodes(RULE, gang)
    assert ("cloud-1" in rows) == spills
    assert message in text


def test_a_job_restricted_to_the_overflow_backend_need_not_wait():
    gang = a_gang(backend=BackendChoice("specific", ("cloud",)))
    assert "cloud-1" in allowed_nodes(RULE, gang)[0]


def test_a_job_that_never_fits_elsewhere_need_not_wait():
    gang = gang_of(1, a_job_spec(estimate_ms=HOUR_MS, cpu="64"), NOW_MS)
    assert "cloud-1" in allowed_nodes(RULE, gang)[0]


def test_only_the_backends_in_from_determine_the_wait():
    busy, other = a_node("home-1", 4, backend="home"), a_node("home-2", 4, backend="other")
    table = a_table([busy, other, CLOUD], {"home-1": {"cpu": "4"}})
    availability = AvailabilityProfile(table)
    availability.started("9.0.1", "home-1", {"cpu": 4000}, NOW_MS, HOUR_MS)
    for home, layouts in (((), 1), (("home",), 2)):
        rule = SpillRule("cloud", 30 * MINUTE_MS, None, home)
        assert len(Spill([rule]).layouts(a_gang(), table, View(NOW_MS, availability)).options) == layouts


def test_without_nodes_to_spill_to_there_is_no_opinion():
    assert Spill([RULE]).layouts(a_gang(), a_table([HOME]), View(NOW_MS)) is None


def test_rules_and_policies_become_plugins_only_if_they_are_configured():
    plain = build_profiles(SchedulingConfig())["default"]
    names = {plugin.name for plugin in (*plain.layouts, *plain.gang_plugins)}
    assert not names & {"spill", "data_rules", "cost_optimized"}
    config = SchedulingConfig(
        profiles={"default": ProfileConfig(backend_policy="cost_optimized")},
        spill=(SpillConfig("cloud", "30m", 20.0),),
        data_rules=(DataRuleConfig("D", ("eu",)),),
    )
    configured = build_profiles(config)["default"]
    assert "spill" in {plugin.name for plugin in configured.layouts}


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(SpillConfig("", "30m"), id="no target"),
        pytest.param(SpillConfig("cloud", home=("cloud",)), id="the target is also the source"),
        pytest.param(SpillConfig("cloud", max_cost=-1), id="a negative cost"),
        pytest.param(SpillConfig("cloud", "soon"), id="an invalid duration"),
    ],
)
def test_an_invalid_spill_rule_is_refused(rule):
    with pytest.raises(InvalidInput, match=r"^scheduling\.spill\[0\]"):
        check_scheduling(SchedulingConfig(spill=(rule,)))
