"""Job affinity, spread, host ports and soft taints, one rule per test."""

from __future__ import annotations

from typing import Any

import pytest

from builders import a_job_spec, a_node
from hodei.engine.cycle import Engine
from hodei.engine.nodes import Table
from hodei.engine.plan import Refusal
from hodei.engine.view import Member, gang_of
from hodei.model.affinity import HostPort, JobAffinity, JobTerm, SpreadRule, WeightedJobTerm, parse_selector
from hodei.model.job import Toleration
from hodei.model.node import Location, Taint
from hodei.plugins.job_affinity import JobAffinityPlugin
from hodei.plugins.ports import Ports
from hodei.plugins.registry import build_profile
from hodei.plugins.spread import Spread
from hodei.plugins.taints import Taints
from unit.plugins.plugin_helpers import VIEW, a_member, a_table, refused, scores

ZONES = [a_node(f"{zone}{i}", labels={"zone": zone}) for zone in "ab" for i in (1, 2)] + [a_node("x1")]


def term(match: str, topology: str = "zone", **more: Any) -> JobTerm:
    return JobTerm(topology, parse_selector(match), **more)


def needs(*terms: JobTerm) -> JobAffinity:
    return JobAffinity(terms)


def prefers(weight: int, wanted: JobTerm) -> JobAffinity:
    return JobAffinity((), (WeightedJobTerm(weight, wanted),))


def web(**fields: Any) -> Member:
    return a_member(labels={"app": "web"}, **fields)


def table_with(**where: Member) -> Table:
    table = a_table(ZONES)
    for name, member in where.items():
        table.place(table.row[name], {}, member)
    return table


def refused_nodes(plugin: Any, member: Member, table: Table) -> list[str]:
    return sorted({name for names in refused(plugin, member, table).values() for name in names})


@pytest.mark.parametrize(
    ("rule", "neighbour", "expected"),
    [
        (needs(term("app=web")), {}, ["b1", "b2", "x1"]),
        (needs(term("app=web", "host")), {}, ["a2", "b1", "b2", "x1"]),
        (needs(term("app=db")), {}, ["a1", "a2", "b1", "b2", "x1"]),
        (needs(term("app=web"), term("tier=1")), {}, ["a1", "a2", "b1", "b2", "x1"]),
        (needs(term("app=web")), {"project": "other"}, ["a1", "a2", "b1", "b2", "x1"]),
        (needs(term("app=web", projects=("other",))), {"project": "other"}, ["b1", "b2", "x1"]),
        (needs(term("app=web", project_selector=())), {"project": "other"}, ["b1", "b2", "x1"]),
        (needs(JobTerm("zone", None)), {}, ["a1", "a2", "b1", "b2", "x1"]),
        (needs(JobTerm("zone", ())), {}, ["b1", "b2", "x1"]),
    ],
)
def test_required_affinity_needs_a_job_that_meets_all_its_terms_in_the_same_domain(rule, neighbour, expected):
    table = table_with(a1=web(**neighbour))
    assert refused_nodes(JobAffinityPlugin(), a_member(job_affinity=rule), table) == expected


def test_the_first_member_of_a_self_selecting_group_may_use_any_domain():
    rules = needs(term("app=web"))
    assert refused_nodes(JobAffinityPlugin(), web(job_affinity=rules), table_with()) == ["x1"]
    assert refused_nodes(JobAffinityPlugin(), a_member(job_affinity=rules), table_with()) == [
        "a1",
        "a2",
        "b1",
        "b2",
        "x1",
    ]
    assert refused_nodes(JobAffinityPlugin(), web(job_affinity=rules), table_with(b1=web())) == ["a1", "a2", "x1"]


def test_anti_affinity_refuses_the_domain_and_allows_nodes_without_one():
    member = a_member(job_anti_affinity=needs(term("app=web")))
    assert refused(JobAffinityPlugin(), member, table_with(a1=web())) == {
        "JOB_ANTI_AFFINITY: job anti-affinity [app=web] by zone not met": ["a1", "a2"]
    }
    assert refused(JobAffinityPlugin(), member, table_with(x1=web())) == {}


def test_anti_affinity_of_placed_members_refuses_the_members_it_selects():
    guard = a_member(job_anti_affinity=needs(term("app=web")))
    table = table_with(a1=guard)
    assert refused(JobAffinityPlugin(), web(), table) == {
        "EXISTING_ANTI_AFFINITY: anti-affinity [app=web] by zone of jobs already there": ["a1", "a2"]
    }
    assert refused(JobAffinityPlugin(), a_member(), table) == {}
    assert refused(JobAffinityPlugin(), web(project="other"), table) == {}
    table.release(table.row["a1"], {}, guard)
    assert refused(JobAffinityPlugin(), web(), table) == {}


def test_regions_of_the_location_are_domains_too():
    nodes = [a_node(f"n{i}", location=Location(region=f"r{i}")) for i in (1, 2)]
    table = a_table(nodes)
    table.place(0, {}, web())
    member = a_member(job_affinity=needs(term("app=web", "region")))
    assert refused_nodes(JobAffinityPlugin(), member, table) == ["n2"]


@pytest.mark.parametrize(
    ("incoming", "resident", "best"),
    [
        ({"job_affinity": prefers(10, term("app=web"))}, {}, {"a1": 10_000, "b1": 0, "x1": 0}),
        ({"job_anti_affinity": prefers(10, term("app=web"))}, {}, {"a1": 0, "b1": 10_000, "x1": 10_000}),
        ({}, {"job_affinity": prefers(5, term("app=new"))}, {"a1": 10_000, "b1": 0, "x1": 0}),
        ({}, {"job_anti_affinity": prefers(5, term("app=new"))}, {"a1": 0, "b1": 10_000, "x1": 10_000}),
        ({}, {"job_affinity": needs(term("app=new"))}, {"a1": 10_000, "b1": 0, "x1": 0}),
    ],
)
def test_preferences_attract_and_repel_in_both_directions(incoming, resident, best):
    table = table_with(a1=web(**resident))
    found = scores(JobAffinityPlugin(), a_member(labels={"app": "new"}, **incoming), table)
    assert found is not None
    assert {name: found[name] for name in best} == best


def test_without_a_rule_about_the_member_there_is_no_opinion():
    assert scores(JobAffinityPlugin(), web(), table_with(a1=web())) is None
    assert (
        scores(JobAffinityPlugin(hard_weight=0), web(), table_with(a1=a_member(job_affinity=needs(term("app=web")))))
        is None
    )
    assert (
        JobAffinityPlugin().stamp(web(), table_with(a1=web()))
        == JobAffinityPlugin().stamp(a_member(), table_with())
        == 0
    )


def spread(topology: str = "zone", match: str = "app=web", **more: Any) -> SpreadRule:
    return SpreadRule(topology, selector=parse_selector(match), **more)


@pytest.mark.parametrize(
    ("rule", "placed", "expected"),
    [
        (spread(), ["a1"], ["a1", "a2", "x1"]),
        (spread(max_skew=2), ["a1"], ["x1"]),
        (spread(), ["a1", "b1"], ["x1"]),
        (spread(), [], ["x1"]),
        (spread(min_domains=3), ["a1"], ["a1", "a2", "x1"]),
        (spread(min_domains=3), ["a1", "b1"], ["a1", "a2", "b1", "b2", "x1"]),
        (spread(match="app=db"), ["a1", "a1"], ["x1"]),
        (spread("host"), ["a1"], ["a1"]),
    ],
)
def test_hard_spread_keeps_the_skew(rule, placed, expected):
    table = a_table(ZONES)
    for name in placed:
        table.place(table.row[name], {}, web())
    assert refused_nodes(Spread(), web(spread=(rule,)), table) == expected


def test_domains_that_the_member_cannot_use_are_not_counted_unless_configured():
    nodes = [a_node("a", labels={"zone": "a"}), a_node("b", labels={"zone": "b"}, taints=(Taint("gpu"),))]
    table = a_table(nodes)
    table.place(0, {}, web())
    selecting = {"node_selector": {"zone": "a"}}
    assert refused_nodes(Spread(), web(spread=(spread(),), **selecting), table) == []
    assert refused_nodes(Spread(), web(spread=(spread(honour_affinity=False),), **selecting), table) == ["a"]
    assert refused_nodes(Spread(), web(spread=(spread(),)), table) == ["a"]
    assert refused_nodes(Spread(), web(spread=(spread(honour_taints=True),)), table) == []


def test_soft_spread_prefers_the_emptier_domain():
    table = table_with(a1=web(), b1=a_member())
    found = scores(Spread(), web(spread=(spread(hard=False),)), table)
    assert found == {"a1": 0, "a2": 0, "b1": 10_000, "b2": 10_000, "x1": 0}


def test_members_of_one_gang_are_spread_among_themselves():
    profile = build_profile("default")
    table = a_table(ZONES)
    engine = Engine(table, {"default": profile})
    gang = gang_of(1, a_job_spec(labels={"app": "web"}, count=4, cpu="100m", spread=(spread(),)), 0)
    profile.admit(gang)
    placed = engine.try_gang(gang, VIEW)
    assert not isinstance(placed, Refusal)
    assert sorted(one.node.labels["zone"] for one in placed) == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("wanted", "clash"),
    [
        (HostPort(80), True),
        (HostPort(81), False),
        (HostPort(80, "UDP"), False),
        (HostPort(80, "TCP", "10.0.0.1"), True),
        (HostPort(80, "TCP", "10.0.0.2"), False),
    ],
)
def test_a_host_port_is_held_by_one_run_of_a_node(wanted, clash):
    table = table_with(a1=a_member(ports=(HostPort(80, "TCP", "10.0.0.1"),)))
    found = refused(Ports(), a_member(ports=(wanted,)), table)
    assert [name for names in found.values() for name in names] == (["a1"] if clash else [])
    assert all(key.startswith("PORT_TAKEN: host port ") for key in found)


def test_soft_taints_make_a_node_the_worse_choice():
    soft = [Taint(key, "", "PreferNoSchedule") for key in ("old", "slow")]
    nodes = [a_node("none"), a_node("one", taints=(soft[0],)), a_node("two", taints=tuple(soft))]
    assert scores(Taints(), a_member(), a_table(nodes)) == {"none": 10_000, "one": 5_000, "two": 0}
    tolerant = a_member(tolerations=(Toleration("old", "Exists"),))
    assert scores(Taints(), tolerant, a_table(nodes)) == {"none": 10_000, "one": 10_000, "two": 0}
    assert scores(Taints(), a_member(), a_table(nodes[:1])) is None
    assert refused(Taints(), a_member(), a_table(nodes)) == {}


def test_a_cached_ranking_follows_placements_and_releases():
    profile = build_profile("default")
    table = a_table([a_node(f"n{i}", labels={"zone": f"z{i}"}) for i in range(3)])
    engine = Engine(table, {"default": profile})

    def place(number: int, **fields: Any) -> Any:
        gang = gang_of(number, a_job_spec(cpu="10m", memory="1Mi", **fields), number)
        profile.admit(gang)
        return engine.try_gang(gang, VIEW)

    isolated = {"labels": {"app": "web"}, "job_anti_affinity": needs(term("app=web"))}
    placed = [place(number, **isolated) for number in range(3)]
    assert sorted(one[0].row for one in placed) == [0, 1, 2]
    full = place(4, **isolated)
    assert isinstance(full, Refusal)
    assert {verdict.reason.code for verdict in full.verdicts} == {"JOB_ANTI_AFFINITY", "EXISTING_ANTI_AFFINITY"}
    assert "run_placed" in full.requeue_on
    # Members without rules share a ranking, whatever their labels; the rules of placed members still apply by label.
    assert not isinstance(place(5, labels={"app": "other"}), Refusal)
    assert isinstance(place(6, labels={"app": "web"}), Refusal)
    assert not isinstance(place(7), Refusal)
    engine.undo(placed[1])
    assert place(8, labels={"app": "web"})[0].row == placed[1][0].row


def test_a_placement_requeues_only_gangs_refused_by_job_affinity():
    profile = build_profile("default")
    engine = Engine(a_table(ZONES), {"default": profile})
    gang = gang_of(1, a_job_spec(cpu="64"), 0)
    profile.admit(gang)
    refusal = engine.try_gang(gang, VIEW)
    assert isinstance(refusal, Refusal)
    assert "run_placed" not in refusal.requeue_on
