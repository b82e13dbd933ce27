"""The node table: rows ordered by name, usage that follows its node, views as long as their rows."""

from __future__ import annotations

import numpy as np
import pytest

from builders import a_job_spec, a_node, a_task, amounts
from hodei.engine.nodes import OneNode, Table
from hodei.engine.profile import make_profile
from hodei.engine.ranking import Rankings
from hodei.engine.runner import Runner
from hodei.engine.view import Member, View, gang_of
from hodei.model.affinity import Requirement
from hodei.model.job import JobSpec, TaskSpec
from hodei.plugins.fit import Fit
from hodei.plugins.queues import Fifo


def _member(cpu: int) -> Member:
    task = TaskSpec(request=amounts(cpu=cpu))
    return Member(JobSpec("job", (task,)), task)


def _table(*nodes):
    table = Table(nodes)
    table.settle()
    return table


def test_rows_are_in_order_of_name():
    assert _table(a_node("b"), a_node("a"), a_node("c")).names == ["a", "b", "c"]


def test_usage_follows_its_node_when_others_join_and_leave():
    table = _table(a_node("b"), a_node("d"))
    table.place(table.row["b"], amounts(cpu=1))
    table.place(table.row["d"], amounts(cpu=2))
    table.put(a_node("a"))
    table.put(a_node("c"))
    table.remove("b")
    table.settle()
    assert {name: table.usage(table.row[name]) for name in table.names} == {"a": {}, "c": {}, "d": {"cpu": 2000}}
    assert table.runs.tolist() == [0, 0, 1]


def test_a_changed_node_keeps_its_usage():
    table = _table(a_node("a", 4))
    table.place(0, amounts(cpu=3))
    table.put(a_node("a", 2))
    table.settle()
    assert table.view().free("cpu").tolist() == [-1000]
    table.release(0, amounts(cpu=3))
    assert table.view().free("cpu").tolist() == [2000]


def test_capacity_is_held_on_a_node_that_has_not_joined_yet():
    table = _table()
    table.place_by_name("a", _member(1))
    table.place_by_name("a", _member(2))
    table.release_by_name("a", _member(1))
    table.put(a_node("a", 4))
    table.settle()
    assert table.usage(0) == {"cpu": 2000}
    table.release_by_name("a", _member(2))
    assert table.usage(0) == {}


def test_release_on_a_removed_node_does_nothing():
    table = _table(a_node("a"))
    table.remove("a")
    table.settle()
    table.release_by_name("a", _member(1))
    table.put(a_node("a"))
    table.settle()
    assert table.usage(0) == {}


def test_a_resource_that_no_node_has_is_free_nowhere():
    table = _table(a_node("a"), a_node("b"))
    for amount in ("free", "used", "capacity"):
        assert getattr(table.view(), amount)(f"example.com/{amount}").tolist() == [0, 0]
    assert table.largest("example.com/largest") == 0
    assert table.view().share(np.zeros(2, dtype=np.int64), "example.com/share").tolist() == [0, 0]


def test_usage_of_a_resource_that_its_node_does_not_have_is_not_forgotten():
    table = _table(a_node("a"))
    table.place(0, {"example.com/fpga": 2})
    assert table.view().used("example.com/fpga").tolist() == [2]
    assert table.view().free("example.com/fpga").tolist() == [-2]
    assert OneNode(table, 0).free("example.com/fpga") == -2


def test_a_trial_changes_nothing():
    table = _table(a_node("a"), a_node("b"))
    table.place(0, amounts(cpu=1))
    before = (table.last_placed.tolist(), table.runs.tolist(), table.usage(0))
    with table.trial():
        table.place(1, amounts(cpu=1))
        table.release(1, amounts(cpu=1))
    assert (table.last_placed.tolist(), table.runs.tolist(), table.usage(0)) == before
    table.place(1, amounts(cpu=1))
    assert table.last_placed.tolist() == [1, 2]


def test_a_generation_starts_only_when_a_node_really_changes():
    table = _table(a_node("a"))
    generation = table.generation
    table.put(a_node("a"))
    table.settle()
    table.place(0, amounts(cpu=1))
    assert table.generation == generation
    table.put(a_node("a", labels={"x": "y"}))
    table.settle()
    assert table.generation == generation + 1


def test_a_view_of_some_rows_is_as_long_as_those_rows():
    table = _table(*(a_node(name, labels={"zone": name}) for name in "abcd"))
    rows = np.array([1, 3])
    view = table.view(rows)
    assert len(view) == 2
    assert [node.name for node in view.as_list()] == ["b", "d"]
    assert view.matching(Requirement("zone", "In", ("d",))).tolist() == [False, True]
    assert view.matching(Requirement("metadata.name", "In", ("b",)), field=True).tolist() == [True, False]
    assert len(view.free("cpu")) == len(view.none()) == len(view.zeros()) == len(view.runs()) == 2


@pytest.mark.parametrize(("part", "share"), [(-5, 0), (0, 0), (1, 2), (2000, 5000), (4000, 10_000), (8000, 20_000)])
def test_a_share_is_in_ten_thousandths_and_never_negative(part, share):
    table = _table(a_node("a", 4))
    assert table.view().share(np.array([part]), "cpu").tolist() == [share]
    assert OneNode(table, 0).share(part, "cpu") == share


def test_the_ideal_table_is_idle_and_healthy():
    table = _table(a_node("a", cordoned=True), a_node("b", ready=False, not_ready_reason="unreachable"))
    table.place(0, amounts(cpu=1))
    best = table.idle_copy()
    best.settle()
    assert all(node.ready and not node.cordoned for node in best.nodes)
    assert best.usage(0) == {}


def test_members_without_a_key_never_share_answers():
    """Also when the second is at the memory address of the first, which was freed."""

    class Named:
        name = "named"
        reads = "static"

        def score(self, member, nodes, view):
            return nodes.zeros() + (10_000 if member.job.name == "good" else 0)

    table = _table(a_node("a"))
    profile = make_profile("default", Fifo(), [Fit(), Named()], {"named": 1})
    rankings = Rankings(table, Runner())
    for turn in range(200):
        name = "good" if turn % 2 else "bad"
        gang = gang_of(turn, a_job_spec(name, tasks=[a_task()]), 0)
        profile.admit(gang)
        ranking = rankings.of(profile, gang.members[0], gang.shapes[0], View(0))
        assert ranking.order()[0] == (10_000 if name == "good" else 0)
