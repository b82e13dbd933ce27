"""The recorded cases of kube-scheduler's own tests, with what the recordings lack.

The recordings are not part of the repository; without them the tests are skipped. What a recording lacks of its test (pods
on the nodes, services, arguments of the plugin) is added here.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hodei.engine.nodes import Table
from hodei.engine.view import Member
from hodei.kube.api.objects import Node, NodeAffinity, Pod, Service, TopologySpread, from_builtins
from hodei.kube.api.quantities import DEFAULT_REQUESTS, RequestOptions
from hodei.kube.scheduler import translate
from hodei.kube.scheduler.selectors import SelectorSources, SpreadDefaults
from hodei.kube.scheduler.translate import PodContext, PodInfo

VECTORS = Path(__file__).resolve().parents[3] / "shared" / "vectors"
Case = dict[str, Any]
_GATE = "records a disabled feature gate"
_INTERNAL = "records an error in the order of calls inside kube-scheduler, not a decision"
# The full name of a case (a few belong to several plugins) -> why it is not compared.
SKIPPED = {
    "TestPreFilterDisabled": _INTERNAL,
    "TestTaintTolerationFilterWithFeatureGate/Pod_with_Gt_toleration_cannot_be_scheduled_when_feature_gate_is_disabled": _GATE,
    "TestTaintTolerationFilterWithFeatureGate/Pod_with_Lt_toleration_cannot_be_scheduled_when_feature_gate_is_disabled": _GATE,
    "TestTaintTolerationFilterWithFeatureGate/Pod_with_mixed_tolerations,_Gt_toleration_needed_but_filtered_out_when"
    "_feature_gate_is_disabled": _GATE,
    "TestDeferredResizeFit/feature_gate_is_false_-_double_counting_causes_fit_failure": _GATE,
    "TestPodTopologySpreadScore/matchLabelKeys_ignored_when_feature_gate_disabled": _GATE,
}


def recorded(kind: str) -> list[Any]:
    path = VECTORS / f"kubernetes_{kind}.jsonl.gz"
    if not path.exists():
        return [
            pytest.param(
                {},
                marks=pytest.mark.skip(
                    reason=f"{path} is not available: the recordings are not part of the repository"
                ),
            )
        ]
    with gzip.open(path, "rt") as lines:
        cases = [json.loads(line) for line in lines]
    return [
        pytest.param(
            case,
            id=f"{case['plugin']}-{number}-{case['case']}",
            marks=[pytest.mark.skip(reason=SKIPPED[case["case"]])] if case["case"] in SKIPPED else [],
        )
        for number, case in enumerate(cases)
    ]


def _pod(node: str, sidecar: dict[str, str] | None = None, **requests: str) -> dict[str, Any]:
    spec: dict[str, Any] = {"nodeName": node, "containers": [{"resources": {"requests": requests}}]}
    if sidecar is not None:
        spec["initContainers"] = [{"restartPolicy": "Always", "resources": {"requests": sidecar}}]
    return {"spec": spec}


def _foo_bar(node: str, foo: str, bar: str | None = None) -> dict[str, Any]:
    return _pod(node, **{"intel.com/foo": foo} | ({"intel.com/bar": bar} if bar else {}))


_FULL, _HALF = {"cpu": "3000", "memory": "5000"}, {"cpu": "3000", "memory": "0"}
_ONE_EACH = [_pod("node1", **_HALF), _pod("node2", **_FULL)]
_TWO_EACH = [_pod("node1", **_HALF), _pod("node1", **_HALF), _pod("node2", **_HALF), _pod("node2", **_FULL)]
_FIT_SCORE = [_pod("node1", cpu="2000", memory="4000"), _pod("node2", cpu="1000", memory="2000")]
_THOUSANDS = {"cpu": "1000", "memory": "2000"}
_SIDECAR = [_pod("node1", sidecar=_THOUSANDS, **_THOUSANDS), _pod("node2", **_THOUSANDS)]
_LEAST, _MOST = "TestLeastAllocatedScoringStrategy", "TestMostAllocatedScoringStrategy"
_RATIO, _STRATEGY = "TestRequestedToCapacityRatioScoringStrategy", "TestFitScore/test_case_for_ScoringStrategy"
_WITH = "resources_requested,_pods_scheduled_with_resources"
_RUNNING = f"{_WITH},_on_node_with_existing_pod_running_"
# Pods on the nodes.
PODS = {
    f"{_LEAST}/no_{_WITH}": _TWO_EACH,
    f"{_LEAST}/{_WITH}": _ONE_EACH,
    f"{_LEAST}/{_WITH},_differently_sized_nodes": _ONE_EACH,
    f"{_LEAST}/requested_resources_exceed_node_capacity": _ONE_EACH,
    f"{_MOST}/no_{_WITH}": _TWO_EACH,
    f"{_MOST}/{_WITH}": _ONE_EACH,
    f"{_MOST}/no_resources_requested,_pods_scheduled,_nonzero_request_for_resource": [_pod("node1"), _pod("node1")],
    f"{_RATIO}/no_{_WITH}_(default_-_least_requested_nodes_have_priority)": [
        _pod("node1", **_FULL), _pod("node2", **_FULL),
    ],
    f"TestResourceBinPackingSingleExtended/{_RUNNING}": [_foo_bar("node2", "2")],
    f"TestResourceBinPackingMultipleExtended/{_RUNNING}": [_foo_bar("node2", "4", "2")],
    f"{_STRATEGY}_RequestedToCapacityRatio_case1": _FIT_SCORE,
    f"{_STRATEGY}_RequestedToCapacityRatio_case2": _FIT_SCORE,
    f"{_STRATEGY}_MostAllocated": _FIT_SCORE,
    f"{_STRATEGY}_LeastAllocated": _FIT_SCORE,
    f"{_STRATEGY}_MostAllocated_with_sidecar_container": _SIDECAR,
    f"{_STRATEGY}_LeastAllocated_with_sidecar_container": _SIDECAR,
}  # fmt: skip
_DEVICE = "extended.resource.dra.io/something"
# Devices of the nodes, which kube-scheduler counts from the slices that drivers publish.
_OFFERED = {"node1": {_DEVICE: 3}, "node2": {_DEVICE: 2}}
DEVICES = {
    f"{_STRATEGY}_LeastAllocated_with_Extended_resources": _OFFERED,
    f"{_STRATEGY}_LeastAllocated_with_Extended_resources_if_PreScore_is_not_called": _OFFERED,
}
# Extended resources backed by a device class: another plugin is responsible.
CLAIMED = {
    "TestEnoughRequests/extended_resource_backed_by_DRA": _DEVICE,
    "TestEnoughRequests/extended_resource_was_backed_by_Device_Plugin_(Allocatable:_0)": _DEVICE,
}
SERVICES = {
    "TestPreFilterState/default_constraints_and_a_service": {"foo": "bar"},
    "TestPreFilterState/default_constraints_and_a_service_that_doesn't_match": {"baz": "kep"},
    "TestPreFilterState/default_constraints_and_a_service,_but_pod_has_constraints": {"foo": "bar"},
    "TestPreFilterState/default_soft_constraints_and_a_service": {"foo": "bar"},
    "TestPodTopologySpreadScore/system_defaulting,_nodes_don't_have_zone,_pods_match_service": {"foo": ""},
}
_ON_NODE2 = {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node2"]}]}]}
_IN_ZONE = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["bar"]}]}]}
_REQUIRED, _PREFERRED = (
    "requiredDuringSchedulingIgnoredDuringExecution",
    "preferredDuringSchedulingIgnoredDuringExecution",
)


def _preferred(weight: int, key: str, value: str) -> dict[str, Any]:
    expression = {"key": key, "operator": "In", "values": [value]}
    return {"weight": weight, "preference": {"matchExpressions": [expression]}}


# Node affinity that the configuration of the scheduler adds to every pod.
ADDED = {
    "TestNodeAffinity/Matches_added_affinity_and_Pod's_node_affinity": {_REQUIRED: _ON_NODE2},
    "TestNodeAffinity/Matches_added_affinity_but_not_Pod's_node_affinity": {_REQUIRED: _ON_NODE2},
    "TestNodeAffinity/Doesn't_match_added_affinity": {_REQUIRED: _IN_ZONE},
    "TestNodeAffinityPriority/added_affinity": {_PREFERRED: [_preferred(2, "foo", "bar")]},
    "TestNodeAffinityPriority/added_affinity_and_pod_has_default_affinity": {
        _PREFERRED: [_preferred(3, "key", "value")]
    },
}  # fmt: skip
# Recorded after the removal of the pod on the node.
REMOVED = "TestRemovePodHostScopedAffinityCount"
# The shapes of utilization; by default the falling one.
FALLING = ((0, 10), (100, 0))
SHAPES = {
    f"{_STRATEGY}_RequestedToCapacityRatio_case2": ((0, 0), (100, 10)),
    "TestResourceBinPackingSingleExtended": ((0, 0), (100, 1)),
    "TestResourceBinPackingMultipleExtended": ((0, 0), (100, 1)),
}


def added_affinity(case: Case) -> Any:
    given = from_builtins(ADDED.get(case["case"], {}), NodeAffinity)
    return translate.node_affinity(given)


def pod_context(case: Case, *, scoring: bool = False) -> PodContext:
    config = case.get("cfg", "")
    ignored = set(re.findall(r"[\w./-]+(?=:\{\})", config)) | {CLAIMED.get(case["case"], "")} - {""}
    rules = tuple(
        TopologySpread(key, int(skew), when)
        for skew, key, when in re.findall(r"\{MaxSkew:(\d+) TopologyKey:(\S+) WhenUnsatisfiable:(\w+)", config)
    )
    services = {}
    if case["case"] in SERVICES:
        services = {"": (Service(spec=Service.Spec(SERVICES[case["case"]])),)}
    return PodContext(
        selector_sources=SelectorSources(services),
        spread=SpreadDefaults(rules, keyless="sys=true" in config),
        request_options=RequestOptions(frozenset(ignored), DEFAULT_REQUESTS if scoring else {}),
    )


def the_pod(case: Case, *, scoring: bool = False) -> PodInfo:
    return translate.pod(from_builtins(case["pod"], Pod), pod_context(case, scoring=scoring))


def the_table(case: Case, *, scoring: bool = False) -> Table:
    """All nodes of a case with their pods."""
    cache = pod_context(case, scoring=scoring)
    given = case.get("all_nodes") or case.get("nodes") or case.get("candidate_nodes") or []
    nodes = [(from_builtins(one.get("node") or {}, Node), one.get("pods") or []) for one in given]
    offered = DEVICES.get(case["case"], {})
    table = Table(translate.node(node, devices=offered.get(node.metadata.name)) for node, _ in nodes)
    table.settle()
    table.topology_index.projects = case.get("namespaces") or {}
    pod_of_case = from_builtins(case["pod"], Pod)
    placed = [(node.metadata.name, pod) for node, pods in nodes for pod in pods]
    placed += [(pod["spec"]["nodeName"], pod) for pod in PODS.get(case["case"], ())]
    for name, raw in placed:
        pod = from_builtins(raw, Pod)
        pending = pod_of_case.condition("PodResizePending")
        if pending is not None and pending.reason == "Deferred" and pod.metadata.uid == pod_of_case.metadata.uid:
            continue  # it already holds this itself
        resident = translate.pod(pod, cache)
        _place(table, table.row[name], resident.member, removed=REMOVED in case["case"])
    return table


def _place(table: Table, row: int, member: Member, *, removed: bool) -> None:
    table.place(row, member.task.request, member)
    if removed:
        table.view()
        table.release(row, member.task.request, member)
