"""Room and fullness as kube-scheduler judges them: its own recorded cases through `fit` and the scores of fullness.

The recordings are not part of the project (see `VECTORS`); without them these tests are skipped. They were made with
Kubernetes' rules for what a pod asks for (init containers, sidecars, overhead, pod-level resources) and its stand-in
amounts for pods that ask for nothing, so the translation below follows those; the judgement is the plugins' own.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hodei.engine.nodes import OneNode, Table
from hodei.engine.runner import Runner
from hodei.engine.view import Member, View
from hodei.model.job import Affinity, JobSpec, NodeTerm, TaskSpec
from hodei.model.node import Node
from hodei.model.quantity import parse_quantity
from hodei.model.resources import CPU, MEMORY, Resources, scale_of
from hodei.model.selector import Requirement
from hodei.plugins.affinity import NodeAffinity
from hodei.plugins.allocation import LeastAllocated, MostAllocated, RequestedToCapacityRatio
from hodei.plugins.fit import Fit

VECTORS = Path(__file__).parents[3] / "shared" / "vectors"
VIEW = View(0)
Case = dict[str, Any]

_DRA = "resources behind device claims (DRA) are not known"
_RESIZE = "pods that are resized in place are not known"
_NO_PODS = "the recording lacks the pods that were on the nodes"
UNSUPPORTED_FILTERS = {
    "TestEnoughRequests/skip_checking_ignored_extended_resource": "resources that others look after cannot be named",
    "TestEnoughRequests/skip_checking_ignored_extended_resource_via_resource_groups": "as above, by their domain",
    "TestEnoughRequests/extended_resource_backed_by_DRA": _DRA,
    "TestEnoughRequests/extended_resource_backed_by_DRA,_nil_draManager": _DRA,
    "TestEnoughRequests/extended_resource_was_backed_by_Device_Plugin_(Allocatable:_0)": _DRA,
    "TestEnoughRequests/extended_resource_was_backed_by_Device_Plugin_(Allocatable:_0),_global_cache": _DRA,
    "TestPreFilterDisabled": "shows a mistake in the order of calls",
    "TestDeferredResizeFit/deferred_pod_resize_fits,_no_other_workloads": _RESIZE,
    "TestDeferredResizeFit/deferred_pod_resize_does_not_fit,_but_is_resolvable_via_preemption": _RESIZE,
    "TestNodeName_PreFilter/assigned_pod_with_nodeName_set,_prefilter_restricts_to_assigned_node": "judges no node",
    "TestNodeName_PreFilter/unassigned_pod_without_nodeName_set,_prefilter_returns_nil": "judges no node",
}
_LEAST, _MOST = "TestLeastAllocatedScoringStrategy", "TestMostAllocatedScoringStrategy"
_RATIO, _ON_ONE = "TestRequestedToCapacityRatioScoringStrategy", "resources_requested,_pods_scheduled_with_resources"
_RUNNING = "resources_requested,_pods_scheduled_with_resources,_on_node_with_existing_pod_running_"
UNSUPPORTED_SCORES = {
    "TestFitScore/test_case_for_ScoringStrategy_MostAllocated_with_sidecar_container": _NO_PODS,
    "TestFitScore/test_case_for_ScoringStrategy_LeastAllocated_with_sidecar_container": _NO_PODS,
    "TestFitScore/test_case_for_ScoringStrategy_LeastAllocated_with_Extended_resources": _DRA,
    "TestFitScore/test_case_for_ScoringStrategy_LeastAllocated_with_Extended_resources_if_PreScore_is_not_called": _DRA,
    f"{_LEAST}/no_{_ON_ONE}": _NO_PODS,
    f"{_LEAST}/{_ON_ONE}": _NO_PODS,
    f"{_LEAST}/{_ON_ONE},_differently_sized_nodes": _NO_PODS,
    f"{_LEAST}/requested_resources_exceed_node_capacity": _NO_PODS,
    f"{_MOST}/no_{_ON_ONE}": _NO_PODS,
    f"{_MOST}/{_ON_ONE}": _NO_PODS,
    f"{_MOST}/no_resources_requested,_pods_scheduled,_nonzero_request_for_resource": _NO_PODS,
    f"{_RATIO}/no_{_ON_ONE}_(default_-_least_requested_nodes_have_priority)": _NO_PODS,
    f"TestResourceBinPackingSingleExtended/{_RUNNING}": _NO_PODS,
    f"TestResourceBinPackingMultipleExtended/{_RUNNING}": _NO_PODS,
}
# Some are recorded twice, with and without the pods on the nodes: then the one lends its nodes to the other.
_STRATEGY, _AGAIN = "TestFitScore/test_case_for_ScoringStrategy_", "_if_PreScore_is_not_called"
LENT = {
    f"{_STRATEGY}RequestedToCapacityRatio_case1": f"{_STRATEGY}RequestedToCapacityRatio_case1{_AGAIN}",
    f"{_STRATEGY}RequestedToCapacityRatio_case2": f"{_STRATEGY}RequestedToCapacityRatio_case1{_AGAIN}",
    f"{_STRATEGY}MostAllocated": f"{_STRATEGY}MostAllocated{_AGAIN}",
    f"{_STRATEGY}LeastAllocated": f"{_STRATEGY}LeastAllocated{_AGAIN}",
}
# The recordings do not say the shape; these are the ones of the tests that they were made from.
SHAPES = {
    "TestFitScore/test_case_for_ScoringStrategy_RequestedToCapacityRatio_case2": ((0, 0), (100, 10)),
    "TestResourceBinPackingSingleExtended": ((0, 0), (100, 1)),
    "TestResourceBinPackingMultipleExtended": ((0, 0), (100, 1)),
}
FALLING = ((0, 10), (100, 0))
STAND_INS = {CPU: 100, MEMORY: 200 * 2**20}


def recorded(kind: str, *plugins: str) -> list[Any]:
    path = VECTORS / f"kubernetes_{kind}.jsonl.gz"
    if not path.exists():
        return [
            pytest.param(
                {}, marks=pytest.mark.skip(reason=f"{path} is not there: the recordings are no part of the project")
            )
        ]
    with gzip.open(path, "rt") as lines:
        cases = [json.loads(line) for line in lines]
    mine = [case for case in cases if case["plugin"] in plugins]
    return [pytest.param(case, id=f"{number}-{case['case']}") for number, case in enumerate(mine)]


# ------------------------------------------------------------------------------------------------ translation


def amounts(given: dict[str, str]) -> Resources:
    return {name: parse_quantity(amount, scale=scale_of(name)) for name, amount in given.items() if name != "pods"}


def added(a: Resources, b: Resources) -> Resources:
    return {name: a.get(name, 0) + b.get(name, 0) for name in (*a, *b)}


def larger(a: Resources, b: Resources) -> Resources:
    return {name: max(a.get(name, 0), b.get(name, 0)) for name in (*a, *b)}


def requests_of(pod: dict[str, Any], *, pod_level: bool, stand_ins: Resources | None = None) -> Resources:
    spec = pod.get("spec", {})

    def of(container: dict[str, Any]) -> Resources:
        return (stand_ins or {}) | amounts(container.get("resources", {}).get("requests", {}))

    running: Resources = {}
    for container in spec.get("containers", ()):
        running = added(running, of(container))
    sidecars: Resources = {}
    first: Resources = {}
    for container in spec.get("initContainers", ()):
        if container.get("restartPolicy") == "Always":
            sidecars = added(sidecars, of(container))
            first = larger(first, sidecars)
        else:
            first = larger(first, added(of(container), sidecars))
    whole = larger(added(running, sidecars), first)
    if pod_level:
        whole |= amounts(spec.get("resources", {}).get("requests", {}))
    return added(whole, amounts(spec.get("overhead", {})))


def a_table(case: Case, nodes: list[dict[str, Any]], stand_ins: Resources | None = None) -> Table:
    pod_level = "podlevel=true" in case.get("cfg", "")
    table = Table()
    for each in nodes:
        room = each["node"].get("status", {}).get("allocatable", {})
        pods = {"pods": int(room["pods"])} if "pods" in room else {"pods": 10**6}
        table.put(Node(each["node"].get("metadata", {}).get("name", ""), "kubernetes", capacity=amounts(room) | pods))
    table.settle()
    for each in nodes:
        row = table.row[each["node"].get("metadata", {}).get("name", "")]
        for pod in each.get("pods", ()):
            asked = requests_of(pod, pod_level=pod_level, stand_ins=stand_ins)
            table.place(row, asked | {"pods": 1})
    return table


def a_member(case: Case, stand_ins: Resources | None = None) -> Member:
    asked = requests_of(case["pod"], pod_level="podlevel=true" in case.get("cfg", ""), stand_ins=stand_ins)
    affinity = Affinity()
    if case["plugin"] == "NodeName" and (name := case["pod"].get("spec", {}).get("nodeName")):
        affinity = Affinity((NodeTerm((), (Requirement("metadata.name", "In", (name,)),)),))
    task = TaskSpec(request=asked | {"pods": 1}, affinity=affinity)
    return Member(JobSpec("pod", (task,)), task)


def a_scorer(case: Case) -> Any:
    found = re.search(r"scorer=(\w+) \[(.*)\]", case["cfg"])
    assert found
    weights = {name: int(weight) for name, weight in re.findall(r"\{Name:(\S+) Weight:(\d+)\}", found[2])}
    if found[1] == "LeastAllocated":
        return LeastAllocated(weights)
    if found[1] == "MostAllocated":
        return MostAllocated(weights)
    name = case["case"]
    shape = SHAPES.get(name) or SHAPES.get(name.partition("/")[0], FALLING)
    return RequestedToCapacityRatio([{"utilization": x, "score": y} for x, y in shape], weights)


def refusals(plugin: Any, member: Member, table: Table) -> Iterator[tuple[str, str]]:
    runner = Runner()
    for mask, reason in runner.refusals(plugin, member, table.view(), VIEW):
        for row in mask.nonzero()[0]:
            yield table.names[row], reason.text
    assert not runner.faults


# ------------------------------------------------------------------------------------------------ comparison


@pytest.mark.parametrize("case", recorded("filter", "Fit", "NodeName"))
def test_a_node_is_refused_for_the_resources_that_kubernetes_refuses_it_for(case):
    if case["case"] in UNSUPPORTED_FILTERS:
        pytest.skip(UNSUPPORTED_FILTERS[case["case"]])
    table, member = a_table(case, case["nodes"]), a_member(case)
    plugin = Fit() if case["plugin"] == "Fit" else NodeAffinity()
    ours: dict[str, set[str]] = {}
    for node, text in refusals(plugin, member, table):
        ours.setdefault(node, set()).add("Too many pods" if text == "Insufficient pods" else text)
    for node, verdict in case["filter"].items():
        if case["plugin"] == "Fit":
            assert ours.get(node, set()) == set(verdict.get("reasons", ()))
        else:
            assert (node in ours) == (verdict["code"] != "Success")


SCORES = recorded("score", "Fit")


@pytest.mark.parametrize("case", SCORES)
def test_a_node_scores_what_kubernetes_gives_it(case):
    if case["case"] in UNSUPPORTED_SCORES:
        pytest.skip(UNSUPPORTED_SCORES[case["case"]])
    nodes = case["candidate_nodes"]
    if case["case"] in LENT:
        nodes = next(p.values[0] for p in SCORES if p.values[0]["case"] == LENT[case["case"]])["candidate_nodes"]
    table, member = a_table(case, nodes, STAND_INS), a_member(case, STAND_INS)
    scorer, runner = a_scorer(case), Runner()
    found = runner.score(scorer, member, table.view(), VIEW)
    assert found is not None
    for node, points in case["raw"].items():
        row = table.row[node]
        assert found[row] == points * 100
        assert runner.score_of_one(scorer, member, VIEW, OneNode(table, row)) == points * 100
    assert not runner.faults
