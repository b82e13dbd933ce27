"""Gang topology: which domain is chosen, what happens if there is none, and members that join later."""

from __future__ import annotations

import pytest
from msgspec import structs

from builders import a_job_spec, a_node, a_task
from hodei.engine.plan import Refusal
from hodei.engine.points import NO_OPINION
from hodei.engine.topology_index import domain_of
from hodei.model.job import Distribution, GangRules
from hodei.model.node import Location
from hodei.plugins.gang_topology import GangTopology
from unit.plugins.gang_helpers import a_gang, an_engine, on_backends, options, placed, racked
from unit.plugins.plugin_helpers import VIEW, a_member

REQUIRED = GangRules(topology="rack")
PREFERRED = GangRules(topology="rack", topology_required=False)
TWO_RACKS = {"r1": "a b", "r2": "c d"}


def test_all_members_go_to_one_rack():
    engine = an_engine(racked(TWO_RACKS), {"a": 1})
    assert placed(engine, a_gang(engine, a_job_spec(count=8, gang=REQUIRED))) == {"main": ["c"] * 4 + ["d"] * 4}


def test_without_a_topology_any_node_is_allowed():
    engine = an_engine(racked(TWO_RACKS))
    nodes_by_task = placed(engine, a_gang(engine, a_job_spec(count=4)))
    assert nodes_by_task == {"main": ["a", "b", "c", "d"]}


def test_the_tightest_rack_is_used_so_that_large_ones_stay_free():
    engine = an_engine(racked({"large": "a b c", "middle": "d e", "small": "f"}))
    assert placed(engine, a_gang(engine, a_job_spec(count=4, gang=REQUIRED))) == {"main": ["f"] * 4}
    assert placed(engine, a_gang(engine, a_job_spec(count=5, gang=REQUIRED)))["main"][0] in "de"


def test_equal_racks_are_taken_by_name():
    engine = an_engine(racked({"r2": "a", "r1": "b", "r3": "c"}))
    assert options(engine, a_gang(engine, a_job_spec(count=2, gang=REQUIRED))) == [["b"], ["a"], ["c"]]


def test_racks_that_are_too_small_are_not_tried():
    engine = an_engine(racked(TWO_RACKS), {"a": 1})
    assert options(engine, a_gang(engine, a_job_spec(count=8, gang=REQUIRED))) == [["c d"]]


def test_a_rack_with_capacity_whose_nodes_refuse_is_skipped():
    nodes = [structs.replace(node, cordoned=node.name in "ab") for node in racked(TWO_RACKS)]
    engine = an_engine(nodes)
    assert placed(engine, a_gang(engine, a_job_spec(count=3, gang=REQUIRED)))["main"][0] in "cd"


@pytest.mark.parametrize(
    ("nodes", "used", "reason"),
    [
        (racked(TWO_RACKS), {"a": 1, "b": 1, "c": 2, "d": 3},
         "no rack has capacity for all 8 members; the best one, r1, for 6 or fewer"),
        (racked({"": "a b"}, cpu=8), {}, "all members must be in one rack, and no node has a rack"),
        (racked({"": "a b", "r1": "c"}), {}, "no rack has capacity for all 8 members; the best one, r1, for 4 or fewer"),
        ([*racked({"r1": "a b"}), *racked({"r1": "c"}, cordoned=True), a_node("d", 4)], {"a": 1},
         "no rack has capacity for all 8 members under all rules"),
    ],
    ids=["no rack is large enough", "no node has the key", "nodes without the key are in no rack", "rules, not capacity"],
)  # fmt: skip
def test_a_gang_that_no_rack_can_hold_gets_that_reason_and_changes_nothing(nodes, used, reason):
    engine = an_engine([*nodes, *racked({"": "x y"})], used)
    gang = a_gang(engine, a_job_spec(count=8, gang=REQUIRED))
    before = [engine.table.usage(row) for row in range(len(engine.table.names))]
    assert placed(engine, gang) == f"GANG_TOPOLOGY: {reason}"
    assert [engine.table.usage(row) for row in range(len(engine.table.names))] == before


def test_the_refusal_is_evictable():
    engine = an_engine(racked(TWO_RACKS), {"a": 1, "c": 1})
    refusal = engine.try_gang(a_gang(engine, a_job_spec(count=8, gang=REQUIRED)), VIEW)
    assert isinstance(refusal, Refusal)
    assert refusal.verdicts[0].reason.evictable
    assert set(refusal.requeue_on) >= {"run_ended", "node_joined", "node_changed"}


def test_a_gang_that_fits_nowhere_is_refused_for_capacity_not_for_racks():
    engine = an_engine(racked(TWO_RACKS))
    assert placed(engine, a_gang(engine, a_job_spec(count=17, gang=REQUIRED))).startswith("INSUFFICIENT_CPU")


def test_a_preference_uses_one_rack_if_possible():
    engine = an_engine(racked(TWO_RACKS), {"a": 1})
    assert placed(engine, a_gang(engine, a_job_spec(count=8, gang=PREFERRED))) == {"main": ["c"] * 4 + ["d"] * 4}


def test_a_preference_allows_any_node_otherwise():
    engine = an_engine(racked(TWO_RACKS), {"a": 1, "c": 1})
    assert len(placed(engine, a_gang(engine, a_job_spec(count=14, gang=PREFERRED)))["main"]) == 14


@pytest.mark.parametrize("rules", [REQUIRED, PREFERRED], ids=["required", "preferred"])
def test_a_single_member_has_no_topology_rule(rules):
    engine = an_engine(racked({"": "a", "r1": "b"}), {"b": 4})
    assert placed(engine, a_gang(engine, a_job_spec(gang=rules))) == {"main": ["a"]}


def test_unequal_tasks_share_the_rack_too():
    nodes = [*racked({"r1": "a"}, cpu=8), *racked({"r2": "b"}, cpu=8, gpu=1)]
    engine = an_engine(nodes)
    tasks = (a_task("front", count=4), a_task("back", gpu=1))
    assert placed(engine, a_gang(engine, a_job_spec(tasks=tasks, gang=REQUIRED))) == {"front": ["b"] * 4, "back": ["b"]}


def test_a_rack_that_holds_each_task_but_not_both_is_not_tried():
    engine = an_engine(racked({"r1": "a", "r2": "b c"}))
    tasks = (a_task("front", count=3), a_task("back", count=3))
    assert options(engine, a_gang(engine, a_job_spec(tasks=tasks, gang=REQUIRED))) == [["b c", "b c"]]


def test_members_without_a_request_fit_in_every_rack():
    engine = an_engine(racked(TWO_RACKS))
    gang = a_gang(engine, a_job_spec(count=50, cpu=0, memory=0, gang=REQUIRED))
    assert options(engine, gang) == [["a b"], ["c d"]]
    assert len(placed(engine, gang)["main"]) == 50


def test_the_rack_where_the_extra_members_fit_too_comes_before_tighter_ones():
    engine = an_engine(racked({"large": "a b", "small": "c"}))
    gang = a_gang(engine, a_job_spec(count=6, min_count=3, gang=REQUIRED))
    assert options(engine, gang) == [["a b"], ["c"]]
    assert placed(engine, gang)["main"][0] in "ab"


def test_extra_members_stay_in_the_rack_even_if_other_racks_have_capacity():
    engine = an_engine(racked(TWO_RACKS), {"a": 1})
    assert placed(engine, a_gang(engine, a_job_spec(count=12, min_count=3, gang=REQUIRED))) == {
        "main": ["c"] * 4 + ["d"] * 4
    }


def joining(engine, rules, running_nodes, needed=1):
    spec = a_job_spec(count=8, gang=rules)
    return a_gang(
        engine, spec, needed=(tuple(range(needed)),), extra=((),), is_joining=True, running_nodes=running_nodes
    )


def test_members_that_join_a_running_gang_use_its_rack():
    engine = an_engine(racked(TWO_RACKS), {"a": 4, "b": 3})
    assert placed(engine, joining(engine, REQUIRED, ("a", "b"))) == {"main": ["b"]}


def test_members_that_join_wait_if_that_rack_is_full():
    engine = an_engine(racked(TWO_RACKS), {"a": 4, "b": 4})
    reason = "GANG_TOPOLOGY: no capacity for 1 more member in rack r1, where the others run"
    assert placed(engine, joining(engine, REQUIRED, ("a", "b"))) == reason


def test_with_a_preference_joining_members_use_the_rack_of_most_then_of_some_then_any():
    engine = an_engine(racked({**TWO_RACKS, "r0": "e"}))
    assert options(engine, joining(engine, PREFERRED, ("a", "c", "d"))) == [["c d"], ["a b"], ["a b c d e"]]


def test_the_rack_of_the_others_is_unknown_if_their_node_was_removed():
    engine = an_engine(racked(TWO_RACKS))
    reason = "GANG_TOPOLOGY: the rack of its running members is unknown"
    assert placed(engine, joining(engine, REQUIRED, ("removed",))) == reason


@pytest.mark.parametrize(
    ("topology", "value"),
    [
        ("region", "eu"), ("zone", "z1"), ("rack", "r1"), ("host", "n"), ("backend", "west"), ("row", "7"), ("hall", None),
    ],
)  # fmt: skip
def test_a_topology_is_a_location_level_or_a_label(topology, value):
    node = a_node("n", backend="west", location=Location(region="eu", zone="z1", rack="r1"), labels={"row": "7"})
    assert domain_of(node, topology) == value


def test_a_label_overrides_the_location_level():
    assert domain_of(a_node("n", backend="west", labels={"backend": "blue"}), "backend") == "blue"


@pytest.mark.parametrize(("topology", "nodes"), [("host", 1), ("backend", 2)])
def test_members_share_a_host_or_a_backend(topology, nodes):
    engine = an_engine(on_backends({"east": "a b", "west": "c d"}))
    gang = a_gang(engine, a_job_spec(count=4, gang=GangRules(topology=topology)))
    assert len(options(engine, gang)[0][0].split()) == nodes


def test_the_key_is_the_topology_alone():
    plugin = GangTopology()
    assert plugin.key(a_member()) == NO_OPINION
    keys = {
        plugin.key(a_member(gang=rules)) for rules in (REQUIRED, PREFERRED, GangRules(topology="zone"), GangRules())
    }
    assert len(keys) == 4
    repaired = structs.replace(REQUIRED, on_failure="repair")
    assert plugin.key(a_member(gang=REQUIRED)) == plugin.key(a_member(cpu=3, gang=repaired))


def test_a_disabled_plugin_is_not_called():
    engine = an_engine(racked(TWO_RACKS), {"a": 1, "c": 1}, disabled=("gang_topology",))
    assert len(placed(engine, a_gang(engine, a_job_spec(count=8, gang=REQUIRED)))["main"]) == 8


def test_a_preference_combined_with_a_backend_rule_refuses_nothing():
    nodes = [node for backend in ("east", "west")
             for node in racked({f"{backend}{rack}": f"{backend}-{rack}" for rack in range(6)}, 1, backend=backend)]  # fmt: skip
    engine = an_engine(nodes)
    spec = a_job_spec(count=6, gang=PREFERRED, distribution=Distribution("colocated"))
    nodes_by_task = placed(engine, a_gang(engine, spec))
    assert {name.split("-")[0] for name in nodes_by_task["main"]} == {"east"}


def test_a_preference_is_never_cut_off_by_the_number_of_combined_layouts():
    """1500 racks of one node each, on two backends; no rack takes two members, one backend takes all."""
    nodes = [a_node(f"n{number:04}", 1, backend="ew"[number % 2], labels={"rack": f"r{number:04}"})
             for number in range(1500)]  # fmt: skip
    engine = an_engine(nodes)
    spec = a_job_spec(cpu="500m", count=3, gang=PREFERRED, distribution=Distribution("colocated"))
    nodes_by_task = placed(engine, a_gang(engine, spec))
    assert len({engine.table.nodes[engine.table.row[name]].backend for name in nodes_by_task["main"]}) == 1


def test_of_two_rules_the_one_without_any_layout_is_reported():
    engine = an_engine(racked(TWO_RACKS))
    one_backend = Distribution("colocated")
    reason = placed(engine, a_gang(engine, a_job_spec(count=9, gang=REQUIRED, distribution=one_backend)))
    assert reason.startswith("GANG_TOPOLOGY")
    engine = an_engine(on_backends({"east": "a", "west": "b"}, labels={"rack": "r1"}))
    reason = placed(engine, a_gang(engine, a_job_spec(count=5, gang=REQUIRED, distribution=one_backend)))
    assert reason.startswith("DISTRIBUTION")
