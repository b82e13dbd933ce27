"""More capacity never hurts: a gang that can be placed can still be placed when a node is added."""

from __future__ import annotations

from hypothesis import assume, given, note
from hypothesis import strategies as st

from builders import a_job_spec, a_node, a_task
from hodei.engine.cycle import Engine
from hodei.engine.nodes import Table
from hodei.engine.plan import Refusal
from hodei.engine.view import View, gang_of
from property import reference_rules as naive
from property.clusters import clusters, nodes, profiles, specs
from property.examples import examples

held = st.lists(st.tuples(st.integers(0, 3), st.sampled_from((500, 1000, 2000))), max_size=3)

# Unequal members that just fill the nodes: greedy placement often fails although a placement exists.
cores = st.integers(1, 4)
tight_gangs = st.lists(st.tuples(cores, st.integers(1, 2), st.booleans()), min_size=2, max_size=3).map(
    lambda parts: a_job_spec(
        "tight",
        tasks=[
            a_task(f"t{i}", cpu=cpu, memory=0, count=count, node_selector={"disk": "ssd"} if picky else {})
            for i, (cpu, count, picky) in enumerate(parts)
        ],
    )
)
tight_clusters = st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=2, max_size=4).map(
    lambda sizes: [a_node(f"n{i}", cpu, labels={"disk": "ssd"} if ssd else {}) for i, (cpu, ssd) in enumerate(sizes, 1)]
)


def _try(cluster, spec, taken):
    table = Table(cluster)
    table.settle()
    used = {node.name: {} for node in cluster}
    for index, cpu in taken:
        name = f"n{index + 1}"
        if name in used:
            table.place(table.row[name], {"cpu": cpu})
            used[name]["cpu"] = used[name].get("cpu", 0) + cpu
    engine = Engine(table, profiles())
    gang = gang_of(1, spec, 0)
    engine.profile(gang).admit(gang)
    return engine.try_gang(gang, View(0)), used


@examples(80)
@given(st.one_of(clusters(), tight_clusters), st.one_of(specs(), tight_gangs), held, nodes("n0"))
def test_adding_a_node_never_makes_a_placeable_gang_unplaceable(cluster, spec, taken, more):
    before, _ = _try(cluster, spec, taken)
    assume(not isinstance(before, Refusal))
    after, _ = _try([*cluster, more], spec, taken)
    note(f"placed on {[placed.node.name for placed in before]}, then {after}")
    assert not isinstance(after, Refusal)


@examples(80)
@given(clusters(), specs(), held)
def test_a_gang_is_placed_exactly_when_a_placement_exists(cluster, spec, taken):
    result, used = _try(cluster, spec, taken)
    assert isinstance(result, Refusal) != naive.can_start(spec, cluster, used)


@examples(200)
@given(tight_clusters, tight_gangs)
def test_unequal_members_are_placed_whenever_a_placement_exists(cluster, spec):
    result, used = _try(cluster, spec, [])
    assert isinstance(result, Refusal) != naive.can_start(spec, cluster, used)
