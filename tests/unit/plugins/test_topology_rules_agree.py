"""The plugins that keep counts incrementally agree with the reference implementation of the rules.

Each case is a small random cluster in which members are placed, released and evaluated, so that cached counts must stay
right. `HODEI_CASES` sets the number of evaluations per rule.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from builders import a_job_spec, a_node, a_task
from hodei.engine.nodes import Table
from hodei.engine.ranking import Rankings
from hodei.engine.runner import Runner
from hodei.engine.view import Member, gang_of
from hodei.model.affinity import HostPort, JobAffinity, JobTerm, NodeTerm, Requirement, SpreadRule, WeightedJobTerm
from hodei.model.job import Affinity, Toleration
from hodei.model.node import Location, Node, Taint
from hodei.plugins.job_affinity import JobAffinityPlugin
from hodei.plugins.ports import Ports
from hodei.plugins.registry import build_profile
from hodei.plugins.spread import Spread
from unit.plugins import naive_topology_rules as naive
from unit.plugins.plugin_helpers import VIEW

CASES = int(os.environ.get("HODEI_CASES", "600"))
PROJECTS = {"a": {"team": "x"}, "b": {"team": "y"}, "c": {}}
SELECTORS: list[tuple[Requirement, ...] | None] = [
    None,
    (),
    (Requirement("app", "In", ("web",)),),
    (Requirement("app", "In", ("web", "db")),),
    (Requirement("app", "NotIn", ("web",)),),
    (Requirement("tier", "Exists"),),
    (Requirement("app", "In", ("db",)), Requirement("tier", "DoesNotExist")),
]
TOPOLOGIES = ["zone", "rack", "host", "kubernetes.io/hostname", "region"]


def _term(rng: random.Random) -> JobTerm:
    return JobTerm(
        rng.choice(TOPOLOGIES),
        rng.choice(SELECTORS),
        rng.choice([(), (), ("b",), ("a", "c")]),
        rng.choice([None, None, None, (), (Requirement("team", "In", ("y",)),)]),
    )


def _affinity(rng: random.Random) -> JobAffinity:
    if rng.random() < 0.5:
        return JobAffinity()
    return JobAffinity(
        tuple(_term(rng) for _ in range(rng.choice([0, 0, 1, 2]))),
        tuple(WeightedJobTerm(rng.randint(1, 100), _term(rng)) for _ in range(rng.choice([0, 1, 2]))),
    )


def _spread_rule(rng: random.Random) -> SpreadRule:
    return SpreadRule(
        rng.choice(TOPOLOGIES), rng.randint(1, 3), rng.random() < 0.5, rng.choice(SELECTORS),
        rng.choice([1, 1, 2, 3, 5]), rng.random() < 0.7, rng.random() < 0.4,
    )  # fmt: skip


def _member(rng: random.Random) -> Member:
    labels = {
        key: value for key, value in (("app", rng.choice(["web", "db", "x"])), ("tier", "1")) if rng.random() < 0.7
    }
    ports = [
        HostPort(rng.choice([80, 81]), rng.choice(["TCP", "UDP"]), rng.choice(["0.0.0.0", "10.0.0.1", "10.0.0.2"]))
    ]
    spec = a_job_spec(
        project=rng.choice("aabc"),
        labels=labels,
        job_affinity=_affinity(rng),
        job_anti_affinity=_affinity(rng),
        spread=tuple(_spread_rule(rng) for _ in range(rng.choice([0, 1, 2, 3]))),
        ports=tuple(ports) if rng.random() < 0.4 else (),
        node_selector=rng.choice([{}, {}, {"disk": "ssd"}]),
        affinity=rng.choice([Affinity(), Affinity((NodeTerm((Requirement("zone", "NotIn", ("z1",)),)),))]),
        tolerations=rng.choice([(), (Toleration("gpu", "Exists"),)]),
    )
    return Member(spec, spec.tasks[0])


def _node(rng: random.Random, number: int) -> Node:
    labels = {"zone": f"z{rng.randint(0, 2)}", "rack": f"r{rng.randint(0, 3)}", "disk": rng.choice(["ssd", "hdd"])}
    labels["kubernetes.io/hostname"] = f"n{number}"
    return a_node(
        f"n{number}",
        labels={key: value for key, value in labels.items() if rng.random() < 0.85},
        taints=rng.choice(
            [(), (), (Taint("gpu"),), (Taint("old", "", "NoExecute"),), (Taint("x", "", "PreferNoSchedule"),)]
        ),
        location=Location(region=rng.choice(["", "r1", "r2"])),
    )


class _RandomCluster:
    """A cluster with random changes, applied to the table incrementally and to the reference as a whole."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.nodes = [_node(rng, number) for number in range(rng.randint(1, 7))]
        self.kinds = [_member(rng) for _ in range(4)]
        self.table = Table(self.nodes)
        self.table.settle()
        self.table.topology_index.projects = PROJECTS
        self.placed: list[tuple[Node, Member]] = []

    def change(self) -> None:
        rng = self.rng
        for _ in range(rng.randint(0, 6)):
            if self.placed and rng.random() < 0.35:
                node, member = self.placed.pop(rng.randrange(len(self.placed)))
                self.table.release(self.table.row[node.name], {}, member)
            else:
                node, member = rng.choice(self.nodes), rng.choice([*self.kinds, _member(rng)])
                self.table.place(self.table.row[node.name], {}, member)
                self.placed.append((node, member))
        if rng.random() < 0.1:
            old = rng.choice(self.nodes)
            self.nodes[self.nodes.index(old)] = new = _node(rng, int(old.name[1:]))
            self.placed = [(new if home is old else home, member) for home, member in self.placed]
            self.table.put(new)
            self.table.settle()

    @property
    def reference(self) -> naive.Cluster:
        return naive.Cluster(self.nodes, self.placed, PROJECTS)


def _random_clusters(rule: int):
    for seed in range(-(-CASES // 10)):
        cluster = _RandomCluster(seed * 7 + rule)
        for _ in range(10):
            cluster.change()
            yield cluster, cluster.rng.choice([*cluster.kinds, _member(cluster.rng)])


def _refused(plugin: Any, member: Member, table: Table, codes: tuple[str, ...] = ()) -> set[str]:
    runner = Runner()
    out: set[str] = set()
    for mask, reason in runner.refusals(plugin, member, table.view(), VIEW):
        if not codes or reason.code in codes:
            out |= {table.names[row] for row in mask.nonzero()[0]}
    assert not runner.faults, runner.faults
    return out


@pytest.mark.parametrize(
    ("number", "code", "rule"),
    [
        (1, "JOB_AFFINITY", naive.refused_by_affinity),
        (2, "JOB_ANTI_AFFINITY", naive.refused_by_anti_affinity),
        (3, "EXISTING_ANTI_AFFINITY", naive.refused_by_residents),
        (4, "SPREAD", naive.refused_by_spread),
        (5, "PORT_TAKEN", naive.port_taken),
    ],
)
def test_the_same_nodes_are_refused(number, code, rule):
    plugin: Any = {"SPREAD": Spread, "PORT_TAKEN": Ports}.get(code, JobAffinityPlugin)()
    for cluster, member in _random_clusters(number):
        expected = {node.name for node in cluster.nodes if rule(member, node, cluster.reference)}
        assert _refused(plugin, member, cluster.table, (code,)) == expected


def test_job_affinity_scores_the_same():
    plugin = JobAffinityPlugin(hard_weight=3)
    for cluster, member in _random_clusters(6):
        runner = Runner()
        raw = runner.score(plugin, member, cluster.table.view(), VIEW)
        expected = {node.name: naive.attraction(member, node, cluster.reference, 3) for node in cluster.nodes}
        found = [0] * len(cluster.nodes) if raw is None else raw.tolist()
        assert dict(zip(cluster.table.names, found, strict=True)) == expected


def test_spread_scores_the_same_whichever_nodes_remain():
    plugin = Spread()
    for cluster, member in _random_clusters(7):
        runner, table = Runner(), cluster.table
        raw = runner.score(plugin, member, table.view(), VIEW)
        remaining = [node for node in cluster.nodes if cluster.rng.random() < 0.7]
        if raw is None:
            assert all(rule.hard for rule in member.task.spread)
            continue
        names = {node.name for node in remaining}
        feasible = np.array([name in names for name in table.names])
        points = runner.normalize(plugin, raw, feasible)
        assert not runner.faults
        found = {name: int(value) for name, value in zip(table.names, points, strict=True) if name in names}
        assert found == naive.spread_points(member, remaining, cluster.reference)


@pytest.mark.parametrize("plugin", [JobAffinityPlugin(), Spread(), Ports()], ids=lambda plugin: plugin.name)
def test_an_equal_stamp_means_an_equal_answer(plugin):
    seen: dict[Any, Any] = {}
    for cluster, member in _random_clusters(8):
        stamp = plugin.stamp(member, cluster.table)
        answer: list[Any] = [
            (mask.tolist(), reason) for mask, reason in plugin.filter(member, cluster.table.view(), VIEW)
        ]
        if hasattr(plugin, "score"):
            raw = plugin.score(member, cluster.table.view(), VIEW)
            answer.append(None if raw is None else raw.tolist())
        key = (id(cluster.table), cluster.table.generation, plugin.key(member), stamp)
        assert seen.setdefault(key, (cluster.table, answer))[1] == answer


def test_a_cached_ranking_equals_a_fresh_one():
    profile, cached = build_profile("default"), {}
    for cluster, member in _random_clusters(9):
        table = cluster.table
        gang = gang_of(1, member.job, 0)
        profile.admit(gang)
        if id(table) not in cached:
            cached = {id(table): (table, Rankings(table, Runner()))}
        old = cached[id(table)][1].of(profile, member, gang.shapes[0], VIEW)
        new = Rankings(table, Runner()).of(profile, member, gang.shapes[0], VIEW)
        assert old.order().tolist() == new.order().tolist()
        assert (old.feasible, old.best()) == (new.feasible, new.best())
        plain = gang_of(2, structs.replace(member.job, tasks=(a_task(),)), 0)
        profile.admit(plain)
        old = cached[id(table)][1].of(profile, plain.members[0], plain.shapes[0], VIEW)
        new = Rankings(table, Runner()).of(profile, plain.members[0], plain.shapes[0], VIEW)
        assert old.order().tolist() == new.order().tolist()
