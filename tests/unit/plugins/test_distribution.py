"""Tasks of a job over backends: all on one, or each where transfers cost least and there is capacity."""

from __future__ import annotations

from itertools import product

import pytest

from builders import a_job_spec, a_task
from hodei.engine.points import NO_OPINION
from hodei.model.job import BackendChoice, Distribution, TransferCost
from hodei.plugins.distribution import CHOICES_TRIED
from hodei.plugins.distribution import Distribution as Plugin
from hodei.plugins.platform import Platform
from unit.plugins.gang_helpers import a_gang, an_engine, on_backends, options, placed
from unit.plugins.plugin_helpers import VIEW, a_member, a_table, refused

THREE = {"east": "e1 e2", "north": "n1 n2", "west": "w1 w2"}
COSTS = (
    TransferCost(("east", "north"), 100),
    TransferCost(("north", "west"), 10),
    TransferCost(("west", "east"), 1),
)


def a_spec(model, *tasks, costs=COSTS, hub="", **fields):
    return a_job_spec(tasks=tasks, distribution=Distribution(model, hub, costs), **fields)


def test_colocated_tasks_are_all_on_one_backend():
    engine = an_engine(on_backends(THREE), {"e1": 1, "n1": 1})
    gang = a_gang(engine, a_spec("colocated", a_task("a", count=4), a_task("b", count=4)))
    nodes_by_task = placed(engine, gang)
    assert {name[0] for names in nodes_by_task.values() for name in names} == {"w"}


def test_the_tightest_backend_with_capacity_is_tried_first():
    engine = an_engine(on_backends(THREE), {"w1": 2, "n1": 1})
    gang = a_gang(engine, a_spec("colocated", a_task(count=5)))
    assert options(engine, gang) == [["w1 w2"], ["n1 n2"], ["e1 e2"]]


def test_only_backends_that_every_task_allows_are_tried():
    engine = an_engine(on_backends(THREE))
    spec = a_spec("colocated", a_task("a", backends=("east", "west")), a_task("b", backends=("west", "north")))
    assert options(engine, a_gang(engine, spec)) == [["w1 w2", "w1 w2"]]


def test_the_backends_of_the_job_count_too():
    engine = an_engine(on_backends(THREE))
    spec = a_spec("colocated", a_task(count=2), backend=BackendChoice("specific", ("north",)))
    assert options(engine, a_gang(engine, spec)) == [["n1 n2"]]


def test_a_gang_that_no_single_backend_can_hold_gets_that_reason():
    engine = an_engine(on_backends(THREE))
    gang = a_gang(engine, a_spec("colocated", a_task(count=9)))
    reason = "DISTRIBUTION: no single backend that all tasks allow has capacity for all of them"
    assert placed(engine, gang) == reason


def test_members_that_join_a_colocated_gang_use_its_backend():
    engine = an_engine(on_backends(THREE), {"e1": 4})
    gang = a_gang(
        engine,
        a_spec("colocated", a_task(count=4)),
        needed=((3,),),
        extra=((),),
        is_joining=True,
        running_nodes=("e1",),
    )
    assert placed(engine, gang) == {"main": ["e2"]}


def test_tasks_that_do_not_fit_together_use_the_two_backends_with_the_lowest_transfer_cost():
    engine = an_engine(on_backends(THREE))
    nodes_by_task = placed(engine, a_gang(engine, a_spec("distributed", a_task("a", count=6), a_task("b", count=6))))
    assert {task: {name[0] for name in names} for task, names in nodes_by_task.items()} == {"a": {"e"}, "b": {"w"}}


def test_one_backend_for_all_costs_nothing_and_comes_first():
    engine = an_engine(on_backends(THREE))
    found = options(engine, a_gang(engine, a_spec("distributed", a_task("a"), a_task("b"))))
    assert found[:3] == [["e1 e2"] * 2, ["n1 n2"] * 2, ["w1 w2"] * 2]
    assert found[3:] == [
        ["e1 e2", "w1 w2"], ["w1 w2", "e1 e2"],
        ["n1 n2", "w1 w2"], ["w1 w2", "n1 n2"],
        ["e1 e2", "n1 n2"], ["n1 n2", "e1 e2"],
    ]  # fmt: skip


def test_other_tasks_are_placed_near_a_task_with_a_fixed_backend():
    engine = an_engine(on_backends(THREE), {"n1": 3, "n2": 4})
    spec = a_spec("distributed", a_task("store", backends=("north",)), a_task("work", count=4))
    nodes_by_task = placed(engine, a_gang(engine, spec))
    assert nodes_by_task["store"] == ["n1"]
    assert {name[0] for name in nodes_by_task["work"]} == {"w"}


def test_all_members_of_a_task_share_its_backend():
    engine = an_engine(on_backends(THREE))
    spec = a_spec("distributed", a_task("a", count=9), a_task("b"))
    reason = "DISTRIBUTION: no allowed choice of backends has capacity for every task"
    assert placed(engine, a_gang(engine, spec)) == reason


def test_pairs_without_a_cost_are_free_and_fewer_backends_come_first():
    engine = an_engine(on_backends({"east": "e1", "west": "w1"}))
    found = options(engine, a_gang(engine, a_spec("distributed", a_task("a"), a_task("b"), costs=())))
    assert found == [["e1", "e1"], ["w1", "w1"], ["e1", "w1"], ["w1", "e1"]]


def test_larger_tasks_weigh_more():
    """One task does not fit next to `store`: it is the one with fewer members."""
    engine = an_engine(on_backends({"east": "e1", "west": "w1"}, cpu=9))
    costs = (TransferCost(("east", "west"), 5),)
    tasks = (a_task("store", backends=("east",)), a_task("many", count=8), a_task("few", count=4))
    nodes_by_task = placed(engine, a_gang(engine, a_spec("distributed", *tasks, costs=costs)))
    assert {task: names[0][0] for task, names in nodes_by_task.items()} == {"store": "e", "many": "e", "few": "w"}


@pytest.mark.parametrize(("model", "backend"), [("hub_and_spoke", "w"), ("distributed", "n")])
def test_with_hub_and_spoke_only_transfers_to_the_hub_cost(model, backend):
    """West is nearer to the hub; the other spoke is in north, far from west."""
    engine = an_engine(on_backends(THREE), {"e1": 4, "e2": 3})
    costs = (
        TransferCost(("east", "north"), 5),
        TransferCost(("east", "west"), 4),
        TransferCost(("north", "west"), 100),
    )
    tasks = (a_task("hub", backends=("east",)), a_task("fixed", backends=("north",)), a_task("free"))
    found = placed(engine, a_gang(engine, a_spec(model, *tasks, costs=costs, hub="hub")))
    assert found["free"][0][0] == backend


def test_members_that_join_prefer_the_backends_of_their_gang():
    engine = an_engine(on_backends(THREE))
    spec = a_spec("distributed", a_task("a", count=4))
    gang = a_gang(engine, spec, needed=((3,),), extra=((),), is_joining=True, running_nodes=("w1",))
    assert options(engine, gang) == [["w1 w2"], ["e1 e2"], ["n1 n2"]]


@pytest.mark.parametrize("model", ["distributed", "hub_and_spoke"])
@pytest.mark.parametrize("tasks", [2, 3, 4])
def test_choices_come_in_order_of_cost_then_backends_then_names(model, tasks):
    """Against a reference: every choice with its cost, sorted."""
    engine = an_engine(on_backends(THREE, cpu=64))
    parts = [a_task(f"t{number}", count=number + 1) for number in range(tasks)]
    found = options(engine, a_gang(engine, a_spec(model, *parts, hub="t1")))
    backend = {" ".join(names): name for name, names in {n: v.split() for n, v in THREE.items()}.items()}
    price = {frozenset(cost.between): cost.cost_milli for cost in COSTS}

    def cost(choice):
        return sum(
            price.get(frozenset((choice[one], choice[other])), 0) * (parts[one].count + parts[other].count)
            for other in range(tasks)
            for one in range(other)
            if model == "distributed" or 1 in (one, other)
        )

    expected = sorted(product(sorted(THREE), repeat=tasks), key=lambda c: (cost(c), len(set(c)), c))
    assert [tuple(backend[rows] for rows in layout) for layout in found] == expected[:CHOICES_TRIED]


def test_a_job_of_many_tasks_over_many_backends_has_a_bounded_number_of_choices():
    nodes = on_backends({f"b{number:02}": f"n{number:02}" for number in range(12)})
    engine = an_engine(nodes)
    costs = tuple(TransferCost((f"b{one:02}", f"b{two:02}"), one + two) for two in range(12) for one in range(two))
    spec = a_spec("distributed", *(a_task(f"t{number}", cpu=2) for number in range(12)), costs=costs)
    gang = a_gang(engine, spec)
    assert len(options(engine, gang)) == CHOICES_TRIED
    assert len(placed(engine, gang)) == 12


def test_other_backends_than_those_of_the_task_are_refused():
    table = a_table(on_backends(THREE))
    reason = "OTHER_BACKEND: not on a backend of the task: east or west"
    assert refused(Platform(), a_member(backends=("east", "west")), table) == {reason: ["n1", "n2"]}


def test_both_the_job_and_the_task_must_allow_a_backend():
    engine = an_engine(on_backends(THREE))
    spec = a_job_spec(backends=("east", "west"), backend=BackendChoice("specific", ("west", "north")))
    assert placed(engine, a_gang(engine, spec))["main"][0] in ("w1", "w2")


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({"backends": ("south",)}, "drop backends south"),
        ({"backend": BackendChoice("specific", ("south",))}, "drop backend south"),
        ({"backends": ("south",), "backend": BackendChoice("specific", ("south",))}, None),
    ],
    ids=["of the task", "of the job", "both: no single change helps"],
)
def test_the_suggestion_names_the_blocking_rule(fields, change):
    table = a_table(on_backends(THREE))
    found = [one.text for one in Platform().suggest(a_member(**fields), table.view(), VIEW)]
    assert found == ([] if change is None else [change])


def test_keys_contain_what_the_choice_depends_on():
    plugin = Plugin()
    assert plugin.key(a_member()) == NO_OPINION
    members = [
        a_member(distribution=Distribution("colocated")),
        a_member(distribution=Distribution("distributed")),
        a_member(distribution=Distribution("distributed", transfer_costs=COSTS)),
        a_member(distribution=Distribution("distributed"), backends=("east",)),
        a_member(distribution=Distribution("hub_and_spoke", "main")),
        a_member(distribution=Distribution("hub_and_spoke", "other")),
    ]
    assert len({plugin.key(member) for member in members}) == len(members)
