"""Rarely used rules of Kubernetes: numeric tolerations, tolerated cordons, affinity added by the operator, terminating
members, keyless spread, non-preempting members."""

import pytest

from builders import a_job_spec, a_task
from hodei.engine.nodes import Table
from hodei.engine.profile import Profile
from hodei.engine.view import Member, gang_of
from hodei.model.affinity import NodeTerm, Requirement, SpreadRule
from hodei.model.job import Affinity, PreferredTerm, Toleration
from hodei.model.node import Node, Taint
from hodei.plugins.affinity import NodeAffinity
from hodei.plugins.health import Health
from hodei.plugins.queues import Priority
from hodei.plugins.spread import Spread
from unit.plugins.plugin_helpers import a_member, a_table, refused, scores

ZONE_A = NodeTerm((Requirement("zone", "In", ("a",)),))


@pytest.mark.parametrize(
    ("operator", "value", "taint", "tolerated"),
    [
        ("Gt", "750", "950", True), ("Gt", "950", "950", False), ("Gt", "950", "high", False), ("Gt", "-5", "0", True),
        ("Lt", "950", "800", True), ("Lt", "800", "950", False), ("Lt", "950", "", False),
    ],
)  # fmt: skip
def test_a_toleration_may_compare_numbers(operator, value, taint, tolerated):
    assert Toleration("sla", operator, value).tolerates(Taint("sla", taint)) is tolerated
    assert not Toleration("other", operator, value).tolerates(Taint("sla", taint))


def test_a_cordon_applies_to_all_unless_its_taint_is_tolerated():
    table = a_table([Node("n1", "test", cordoned=True)])
    tolerant = a_member(tolerations=(Toleration("cordon", "Exists"),))
    assert refused(Health(), tolerant, table)
    assert not refused(Health(cordon_taint="cordon"), tolerant, table)
    assert refused(Health(cordon_taint="cordon"), a_member(), table)
    assert Health(cordon_taint="cordon").key(tolerant) != Health(cordon_taint="cordon").key(a_member())


def test_the_operator_may_add_required_and_preferred_affinity():
    table = a_table([Node("n1", "test", labels={"zone": "a"}), Node("n2", "test", labels={"zone": "b"})])
    with_required = NodeAffinity(Affinity((ZONE_A,)))
    assert refused(with_required, a_member(), table) == {
        "ADDED_AFFINITY: not one of the nodes that this scheduler may use": ["n2"]
    }
    assert not list(with_required.suggest(a_member(), table.view(), None))
    assert scores(NodeAffinity(Affinity(preferred=(PreferredTerm(5, ZONE_A),))), a_member(), table) == {
        "n1": 10_000, "n2": 0,
    }  # fmt: skip
    from_file = {"required": [{"labels": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}
    assert refused(NodeAffinity(added=from_file), a_member(), table)


def _spreading(*rules: SpreadRule, leaving: bool = False) -> Member:
    spec = a_job_spec("s", labels={"app": "x"}, tasks=(a_task(spread=rules),))
    return Member(spec, spec.tasks[0], leaving)


def _rule(topology: str, *, hard: bool = True, keyless: bool = False) -> SpreadRule:
    return SpreadRule(topology, 1, hard, (Requirement("app", "In", ("x",)),), keyless=keyless)


def test_members_that_are_leaving_do_not_count_for_spread():
    table = Table([Node("n1", "test"), Node("n2", "test")])
    table.settle()
    table.place(0, {}, _spreading(leaving=True))
    assert not refused(Spread(), _spreading(_rule("host")), table)
    table.place(0, {}, _spreading())
    assert list(refused(Spread(), _spreading(_rule("host")), table).values()) == [["n1"]]


def test_a_keyless_preference_keeps_nodes_in_the_other_rules():
    table = Table([Node("n1", "test"), Node("n2", "test")])
    table.settle()
    table.place(0, {}, _spreading())
    strict = _spreading(_rule("host", hard=False), _rule("zone", hard=False))
    assert scores(Spread(), strict, table) == {"n1": 0, "n2": 0}
    lenient = _spreading(_rule("host", hard=False, keyless=True), _rule("zone", hard=False, keyless=True))
    assert scores(Spread(), lenient, table) == {"n1": 0, "n2": 10_000}


def test_non_preempting_gangs_are_grouped_apart():
    profile = Profile("p", Priority())
    non_preempting, preempting = (
        gang_of(id, a_job_spec("j", preempts=preempts), 0) for id, preempts in ((1, False), (2, True))
    )
    for gang in (non_preempting, preempting):
        profile.admit(gang)
    assert non_preempting.group != preempting.group
