"""The plugins against kube-scheduler's own tests: the refused nodes, the reasons, whether preemption could help, and the scores
of the other nodes. Pods and nodes are translated as in a cluster."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from hodei.engine.nodes import OneNode, Table
from hodei.engine.runner import Runner
from hodei.engine.view import View
from hodei.kube.api.objects import Pod, from_builtins
from hodei.kube.scheduler import messages
from hodei.kube.scheduler.translate import CORDON_TAINT, UNSUPPORTED
from hodei.model.affinity import NodeTerm, Requirement
from hodei.model.job import Affinity
from hodei.plugins.affinity import NodeAffinity
from hodei.plugins.allocation import LeastAllocated, MostAllocated, RequestedToCapacityRatio
from hodei.plugins.fit import Fit
from hodei.plugins.health import Health
from hodei.plugins.job_affinity import JobAffinityPlugin
from hodei.plugins.ports import Ports
from hodei.plugins.spread import Spread
from hodei.plugins.taints import Taints
from vectors.kubernetes_cases import (
    FALLING,
    REMOVED,
    SHAPES,
    SKIPPED,
    Case,
    added_affinity,
    recorded,
    the_pod,
    the_table,
)

VIEW = View(0)
PLUGINS: dict[str, Any] = {
    "InterPodAffinity": JobAffinityPlugin,
    "PodTopologySpread": Spread,
    "NodePorts": Ports,
    "TaintToleration": Taints,
    "NodeUnschedulable": lambda: Health(cordon_taint=CORDON_TAINT),
    "Fit": Fit,
}
FILTERS, SCORES = recorded("filter"), recorded("score")


def required_node(pod: Pod) -> Affinity:
    """The node name of a pod as an affinity."""
    if not pod.spec.node_name:
        return Affinity()
    return Affinity((NodeTerm((), (Requirement("metadata.name", "In", (pod.spec.node_name,)),)),))


def the_plugin(case: Case) -> Any:
    if case["plugin"] == "NodeAffinity":
        return NodeAffinity(added_affinity(case))
    if case["plugin"] == "NodeName":
        return NodeAffinity(required_node(from_builtins(case["pod"], Pod)))
    if case["plugin"] == "InterPodAffinity":
        hard = re.search(r"HardPodAffinityWeight:(\d+)", str(case.get("cfg")))
        return JobAffinityPlugin(hard_weight=int(hard[1]) if hard else 1)
    return PLUGINS[case["plugin"]]()


def verdicts(case: Case, table: Table) -> dict[str, tuple[str, list[str]]]:
    """The code and the reasons of kube-scheduler for each node, from this plugin."""
    member, runner = the_pod(case).member, Runner()
    pairs = runner.refusals(the_plugin(case), member, table.view(), VIEW)
    assert not runner.faults
    found = messages.node_reasons(pairs, member, table)
    out = {}
    for name, row in table.row.items():
        reasons = sorted(text for text, mask in found.reasons.items() if mask[row])
        if case["plugin"] == "NodeName" and reasons:
            reasons = ["node(s) didn't match the requested node name"]
        refused = "Unschedulable" if found.preemptable[row] else "UnschedulableAndUnresolvable"
        out[name] = (refused if reasons else "Success", reasons)
    return out


@pytest.mark.parametrize("case", FILTERS)
def test_a_node_is_refused_with_the_reason_and_resolvability_of_kubernetes(case):
    ours = verdicts(case, the_table(case))
    theirs = {name: (status["code"], sorted(status.get("reasons", ()))) for name, status in case["filter"].items()}
    assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.parametrize("case", FILTERS)
def test_a_pod_is_refused_in_prefilter_where_kubernetes_does_so(case):
    prefilter = case.get("prefilter") or {}
    refused = [reason for reason in the_pod(case).refused if reason.code != UNSUPPORTED]
    unschedulable = prefilter.get("code", "Success") not in ("Success", "Skip")
    # Both report an invalid selector and contradicting terms.
    assert [reason.text for reason in refused] == (prefilter["reasons"] if unschedulable else [])
    if prefilter.get("code") == "Skip":
        assert not any(reasons for _, reasons in verdicts(case, the_table(case)).values())


OF_SPREAD = [param for param in FILTERS if param.values[0].get("plugin") == "PodTopologySpread"]


@pytest.mark.parametrize("case", [param for param in OF_SPREAD if "prefilter" in param.values[0]])
def test_spread_applies_to_the_same_pods_as_in_kubernetes(case):
    hard = [rule for rule in the_pod(case).job.tasks[0].spread if rule.hard]
    assert bool(hard) == (case["prefilter"]["code"] == "Success")


def the_scorer(case: Case) -> Any:
    if case["plugin"] != "Fit":
        return the_plugin(case)
    found = re.search(r"scorer=(\w+) \[(.*)\]", case["cfg"])
    assert found
    weights = {name: int(weight) for name, weight in re.findall(r"\{Name:(\S+) Weight:(\d+)\}", found[2])}
    if found[1] == "LeastAllocated":
        return LeastAllocated(weights)
    if found[1] == "MostAllocated":
        return MostAllocated(weights)
    shape = SHAPES.get(case["case"]) or SHAPES.get(case["case"].partition("/")[0], FALLING)
    return RequestedToCapacityRatio([{"utilization": x, "score": y} for x, y in shape], weights)


@pytest.mark.parametrize("case", SCORES)
def test_a_node_scores_what_kubernetes_gives_it(case):
    scoring = case["plugin"] == "Fit"
    table, member = the_table(case, scoring=scoring), the_pod(case, scoring=scoring).member
    scorer, runner = the_scorer(case), Runner()
    raw = runner.score(scorer, member, table.view(), VIEW)
    theirs = case.get("normalized") or case["raw"]
    if raw is None:
        assert len(set(theirs.values())) <= 1
        return
    if not hasattr(scorer, "normalize"):
        assert {name: int(raw[table.row[name]]) for name in theirs} == {n: 100 * points for n, points in theirs.items()}
        for name, points in theirs.items():
            assert runner.score_of_one(scorer, member, VIEW, OneNode(table, table.row[name])) == points * 100
        return
    if case["plugin"] in ("NodeAffinity", "TaintToleration", "InterPodAffinity"):
        assert {name: int(raw[table.row[name]]) for name in case["raw"]} == case["raw"]
    candidates = {one["node"]["metadata"]["name"] for one in case["candidate_nodes"]}
    ours = runner.normalize(scorer, raw, np.array([name in candidates for name in table.names]))
    assert not runner.faults
    # kube-scheduler rounds an inverted score up; ours has two more digits.
    up = 99 if case["plugin"] == "TaintToleration" else 0
    assert {name: (int(ours[table.row[name]]) + up) // 100 for name in theirs} == theirs


def test_every_skipped_case_exists():
    names = {param.values[0].get("case") for param in (*FILTERS, *SCORES)}
    if names == {None}:
        pytest.skip("the recordings are not part of the repository")
    assert set(SKIPPED) <= names
    assert any(REMOVED in name for name in names)
