"""The scheduling cycle of one gang: all members or none, hardest members first when they block each other."""

from __future__ import annotations

import time

import pytest

from builders import a_job_spec, a_node, a_task
from hodei.engine.cycle import Engine
from hodei.engine.nodes import Table
from hodei.engine.plan import Refusal
from hodei.engine.view import View, gang_of
from hodei.plugins.registry import build_profile


def _engine(*nodes, **profile):
    table = Table(nodes)
    table.settle()
    return Engine(table, {"default": build_profile("default", **profile)})


def _try(engine, *tasks, **fields):
    gang = gang_of(1, a_job_spec(tasks=tasks, **fields), 0)
    engine.profile(gang).admit(gang)
    return engine.try_gang(gang, View(0))


def _usage(engine):
    return [engine.table.usage(row) for row in range(len(engine.table.names))]


def test_a_gang_is_placed_whole():
    placed = _try(_engine(a_node("a", 2), a_node("b", 2)), a_task(count=4, cpu="1"))
    assert sorted(p.node.name for p in placed) == ["a", "a", "b", "b"]
    assert [p.index for p in placed] == [0, 1, 2, 3]


def test_a_gang_that_does_not_fit_whole_is_refused_and_changes_nothing():
    engine = _engine(a_node("a", 2), a_node("b", 2))
    refusal = _try(engine, a_task(count=5, cpu="1"))
    assert isinstance(refusal, Refusal)
    assert (refusal.fitted, refusal.task, refusal.nodes) == (4, "main", 2)
    assert refusal.verdicts[0].reason.code == "INSUFFICIENT_CPU"
    assert refusal.verdicts[0].count == 2
    assert _usage(engine) == [{}, {}]


def test_unequal_members_are_placed_in_the_only_way_in_which_all_fit():
    """Placed first, the small member would take the only node where the large one fits."""
    engine = _engine(a_node("large", 4, "8Gi"), a_node("small", 1, "8Gi"))
    placed = _try(engine, a_task("small", cpu="1"), a_task("large", cpu="4"))
    assert {p.member.task.name: p.node.name for p in placed} == {"small": "small", "large": "large"}
    assert [p.index for p in placed] == [0, 1]


def test_a_failed_search_changes_nothing():
    engine = _engine(a_node("a", 4), a_node("b", 4))
    refusal = _try(engine, a_task("small", cpu="2"), a_task("large", cpu="4", count=2))
    assert isinstance(refusal, Refusal)
    assert _usage(engine) == [{}, {}]


def test_a_search_without_a_solution_on_many_nodes_is_bounded():
    engine = _engine(*(a_node(f"n{i:03}", 4) for i in range(200)))
    started = time.process_time()
    assert isinstance(_try(engine, a_task("a", cpu="3", count=30), a_task("b", cpu="5", count=30)), Refusal)
    assert isinstance(_try(engine, a_task("a", cpu="3", count=150), a_task("b", cpu="2", count=150)), Refusal)
    assert time.process_time() - started < 5


def test_ties_go_to_the_first_name():
    placed = _try(_engine(a_node("b"), a_node("a"), a_node("c")), a_task())
    assert placed[0].node.name == "a"


def test_a_decision_contains_the_runners_up_and_the_score_terms():
    engine = _engine(a_node("a", 4), a_node("b", 8), a_node("c", 2), a_node("d", "500m"))
    (placed,) = _try(engine, a_task(cpu="1"))
    decision = placed.decision
    assert decision.chosen.node == "b"
    assert [candidate.node for candidate in decision.runners_up] == ["a", "c"]
    assert (decision.feasible, decision.nodes, decision.profile) == (3, 4, "default")
    weights = {term.plugin: term.weight for term in decision.chosen.terms}
    assert weights == {"resource": 40, "load": 30}
    total = sum(term.score * term.weight for term in decision.chosen.terms)
    assert decision.chosen.score == total // sum(weights.values())


def test_the_refusal_names_every_failing_filter_of_every_node():
    engine = _engine(a_node("a", 1, cordoned=True), a_node("b", 1, labels={"disk": "hdd"}), a_node("c", 8))
    refusal = _try(engine, a_task(cpu="4", node_selector={"disk": "ssd"}))
    nodes_by_code = {verdict.reason.code: verdict.nodes for verdict in refusal.verdicts}
    assert nodes_by_code == {
        "SELECTOR_MISMATCH": ("a", "b", "c"),
        "INSUFFICIENT_CPU": ("a", "b"),
        "NODE_CORDONED": ("a",),
    }


def test_without_nodes_the_refusal_has_no_verdicts():
    refusal = _try(_engine(), a_task())
    assert refusal.verdicts == ()
    assert refusal.nodes == 0


@pytest.mark.parametrize("count", [1, 3])
def test_undo_restores_the_table(count):
    engine = _engine(a_node("a", 4), a_node("b", 4))
    placed = _try(engine, a_task(count=count))
    engine.undo(placed)
    assert _usage(engine) == [{}, {}]
    assert [p.node.name for p in _try(engine, a_task(count=count))] == [p.node.name for p in placed]
