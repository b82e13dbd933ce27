"""Translation of pods and nodes: every field that scheduling reads, and a refusal for unknown features."""

import pytest

from hodei.kube.api.objects import CsiNode, Service, Workload, from_builtins
from hodei.kube.scheduler import translate
from hodei.kube.scheduler.selectors import SYSTEM_SPREAD, SelectorSources
from hodei.kube.scheduler.translate import PodContext
from hodei.model.affinity import HostPort, NodeTerm, Requirement
from hodei.model.job import Toleration
from hodei.model.node import Taint
from unit.kube.pod_factory import a_node, a_pod, pod_info

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def _nodes(*expressions, fields=()):
    term = {"matchExpressions": list(expressions), "matchFields": list(fields)}
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [term]}}}


def _expression(key, operator, *values):
    return {"key": key, "operator": operator, "values": list(values)}


def test_a_pod_is_a_job_of_one_member_in_its_namespace():
    pod = pod_info(name="p", namespace="team", labels={"a": "b"}, requests={"cpu": "2"}, priority=7)
    job = pod.job
    assert (job.name, job.project, job.labels, job.priority, job.size) == ("p", "team", {"a": "b"}, 7, 1)
    assert pod.request == {"cpu": 2000, "pods": 1}
    assert pod.refused == ()


def test_all_operators_of_node_affinity():
    fields = _nodes(
        _expression("a", "In", "1", "2"), _expression("b", "NotIn", "1"), _expression("c", "Exists"),
        _expression("d", "DoesNotExist"), _expression("e", "Gt", "5"), _expression("f", "Lt", "5"),
        fields=[_expression("metadata.name", "In", "n1")],
    )  # fmt: skip
    term = pod_info(affinity=fields).job.tasks[0].affinity.required[0]
    assert [str(each) for each in term.labels] == ["a in (1, 2)", "b notin (1)", "c", "!d", "e>5", "f<5"]
    assert term.fields == (Requirement("metadata.name", "In", ("n1",)),)


@pytest.mark.parametrize(
    "expression",
    [
        _expression("a", "Gt", "x"),
        _expression("a", "Gt", "1", "2"),
        _expression("a", "In"),
        _expression("a", "In", "@#"),
    ],
    ids=["not a number", "two numbers", "no value", "not a label"],
)
def test_an_invalid_term_matches_no_node(expression):
    assert pod_info(affinity=_nodes(expression)).job.tasks[0].affinity.required == (NodeTerm(),)


def test_a_required_affinity_without_terms_matches_no_node():
    fields = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": []}}}
    assert pod_info(affinity=fields).job.tasks[0].affinity.required == (NodeTerm(),)


def test_names_that_contradict_each_other_are_refused_at_once():
    both = [_expression("metadata.name", "In", "n1"), _expression("metadata.name", "In", "n2")]
    refused = pod_info(affinity=_nodes(fields=both)).refused
    assert [(each.code, each.text) for each in refused] == [("AFFINITY_CONFLICT", "pod affinity terms conflict")]


def test_pod_affinity_with_namespaces_and_the_pods_own_labels():
    term = {
        "topologyKey": "zone",
        "labelSelector": {"matchLabels": {"app": "db"}, "matchExpressions": [_expression("x", "Exists")]},
        "namespaces": ["other"],
        "namespaceSelector": {"matchLabels": {"team": "a"}},
        "matchLabelKeys": ["rev", "absent"],
        "mismatchLabelKeys": ["tenant"],
    }
    affinity = {"podAntiAffinity": {PREFERRED: [{"weight": 5, "podAffinityTerm": term}]}}
    rule = pod_info(affinity=affinity, labels={"rev": "1", "tenant": "t"}).job.tasks[0].job_anti_affinity.preferred[0]
    assert rule.weight == 5
    assert [str(each) for each in rule.term.selector or ()] == ["app=db", "x", "rev=1", "tenant notin (t)"]
    assert rule.term.projects == ("other",)
    assert [str(each) for each in rule.term.project_selector or ()] == ["team=a"]


@pytest.mark.parametrize(
    ("fields", "expected"), [({}, None), ({"labelSelector": {}}, ())], ids=["no selector: none", "empty selector: all"]
)
def test_no_selector_and_an_empty_one_differ(fields, expected):
    affinity = {"podAffinity": {REQUIRED: [{"topologyKey": "zone", **fields}]}}
    assert pod_info(affinity=affinity).job.tasks[0].job_affinity.required[0].selector == expected


def test_topology_spread_with_all_its_fields():
    rule = {
        "topologyKey": "zone", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule", "minDomains": 3,
        "labelSelector": {"matchLabels": {"a": "b"}}, "matchLabelKeys": ["rev"],
        "nodeAffinityPolicy": "Ignore", "nodeTaintsPolicy": "Honor",
    }  # fmt: skip
    spread = pod_info(topologySpreadConstraints=[rule], labels={"rev": "1"}).job.tasks[0].spread[0]
    assert (spread.topology, spread.max_skew, spread.hard, spread.min_domains) == ("zone", 2, True, 3)
    assert (spread.honour_affinity, spread.honour_taints) == (False, True)
    assert [str(each) for each in spread.selector or ()] == ["a=b", "rev=1"]


def test_pods_without_rules_are_spread_by_their_services_and_workloads():
    owners = SelectorSources(
        {"ns": (Service(spec=Service.Spec({"app": "web"})), Service(spec=Service.Spec({"app": "db"})))},
        {("ns", "ReplicaSet", "rs"): from_builtins({"spec": {"selector": {"matchLabels": {"rev": "1"}}}}, Workload)},
    )
    cache = PodContext(selector_sources=owners, spread=SYSTEM_SPREAD)
    owner = {"kind": "ReplicaSet", "name": "rs", "controller": True}
    rules = pod_info(cache, labels={"app": "web", "rev": "1"}, owners=[owner]).job.tasks[0].spread
    assert [(rule.topology, rule.max_skew, rule.hard, rule.keyless) for rule in rules] == [
        ("kubernetes.io/hostname", 3, False, True), ("topology.kubernetes.io/zone", 5, False, True),
    ]  # fmt: skip
    assert [str(each) for each in rules[0].selector or ()] == ["app=web", "rev=1"]
    assert pod_info(cache, labels={"app": "other"}).job.tasks[0].spread == ()


def test_tolerations_with_every_operator():
    fields = [
        {"operator": "Exists"},
        {"key": "a", "value": "b", "effect": "NoExecute", "tolerationSeconds": 5},
        {"key": "sla", "operator": "Gt", "value": "900"},
        {"key": "sla", "operator": "Lt", "value": "high"},
    ]
    assert pod_info(tolerations=fields).job.tasks[0].tolerations == (
        Toleration(operator="Exists"), Toleration("a", "Equal", "b", "NoExecute", 5), Toleration("sla", "Gt", "900"),
    )  # fmt: skip


def test_host_ports_of_containers_and_sidecars():
    port = {"hostPort": 80}
    pod = pod_info(
        containers=[{"ports": [port, {"containerPort": 9}]}],
        initContainers=[
            {"ports": [{"hostPort": 53, "protocol": "UDP", "hostIP": "10.0.0.1"}], "restartPolicy": "Always"},
            {"ports": [{"hostPort": 99}]},
        ],
    )
    assert pod.job.tasks[0].ports == (HostPort(80), HostPort(53, "UDP", "10.0.0.1"))


def test_gates_preemption_policy_and_times():
    pod = pod_info(
        schedulingGates=[{"name": "a"}, {"name": "b"}], preemptionPolicy="Never", activeDeadlineSeconds=60,
        terminationGracePeriodSeconds=5,
    )  # fmt: skip
    assert pod.gates == ("a", "b")
    assert not pod.job.preempts
    assert (pod.job.timeout_ms, pod.job.estimate_ms, pod.job.grace_ms) == (60_000, 60_000, 5_000)


@pytest.mark.parametrize(
    ("allowed", "fields", "priority"),
    [
        ("", {}, 0),
        ("priority", {}, 100),
        ("priority", {"priority": 7}, 7),
        ("priority", {"priorityClassName": "batch", "priority": 0}, 0),
        ("priority", {"annotations": {"priority": "much"}}, 0),
        ("priority", {"annotations": {"priority": "2000000000"}}, 1_000_000_000),
    ],
    ids=[
        "off",
        "on",
        "a priority of admission",
        "a priority of a class",
        "not a number",
        "not above system priorities",
    ],
)
def test_a_priority_annotation_counts_only_if_the_operator_allows_it(allowed, fields, priority):
    pod = pod_info(PodContext(priority_annotation=allowed), **{"annotations": {"priority": "100"}} | fields)
    assert pod.job.priority == priority


@pytest.mark.parametrize(
    ("fields", "priority", "codes"),
    [
        ({}, 100, []),
        ({"priority": 7}, 100, []),
        ({"priorityClassName": "batch", "priority": 5000}, 100, []),
        ({"priorityClassName": "system-node-critical", "priority": 2_000_001_000}, 2_000_001_000, []),
        ({"annotations": {}, "priority": 7}, 7, []),
        ({"annotations": {"priority": "-5"}, "priority": 7}, -5, []),
        ({"annotations": {"priority": "2000000000"}}, 1_000_000_000, []),
        ({"annotations": {"priority": "much"}, "priority": 7}, 7, ["INVALID_POD"]),
        ({"annotations": {"priority": ""}, "priority": 7}, 7, ["INVALID_POD"]),
    ],
    ids=[
        "alone", "before the priority of admission", "before a class", "not before a system class", "absent", "negative",
        "not above system priorities", "not a number", "empty",
    ],
)  # fmt: skip
def test_a_preferred_annotation_counts_before_the_class_and_must_be_a_number(fields, priority, codes):
    cache = PodContext(priority_annotation="priority", priority_preferred=True)
    pod = pod_info(cache, **{"annotations": {"priority": "100"}} | fields)
    assert (pod.job.priority, [reason.code for reason in pod.refused]) == (priority, codes)


@pytest.mark.parametrize(
    ("fields", "expected_ms"),
    [
        ({}, 0),
        ({"activeDeadlineSeconds": 60}, 60_000),
        ({"activeDeadlineSeconds": 60, "labels": {"kueue.x-k8s.io/max-exec-time-seconds": "30"}}, 30_000),
        ({"activeDeadlineSeconds": 60, "annotations": {"hodei.io/estimate": "1h"}}, 3_600_000),
    ],
    ids=["not declared", "the deadline", "Kueue's limit before it", "the annotation before all"],
)
def test_the_estimate_of_a_pod(fields, expected_ms):
    assert pod_info(**fields).job.estimate_ms == expected_ms


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"resourceClaims": [{"name": "gpu"}]}, "spec.resourceClaims"),
        ({"containers": [{"resources": {"claims": [{"name": "gpu"}]}}]}, "spec.resourceClaims"),
        ({"affinity": _nodes(_expression("a", "Near", "1"))}, "spec.affinity.nodeAffinity Near"),
        ({"tolerations": [{"key": "a", "operator": "Like"}]}, "spec.tolerations Like"),
        ({"tolerations": [{"key": "a", "effect": "NoAdmit"}]}, "spec.tolerations effect: NoAdmit"),
        ({"preemptionPolicy": "Sometimes"}, "spec.preemptionPolicy Sometimes"),
        (
            {"topologySpreadConstraints": [{"topologyKey": "z", "whenUnsatisfiable": "Wait"}]},
            "spec.topologySpreadConstraints whenUnsatisfiable: Wait",
        ),
        (
            {"affinity": {"podAffinity": {REQUIRED: [{"labelSelector": {"matchExpressions": [_expression("a", "Gt", "1")]}}]}}},
            "spec.affinity.podAffinity Gt",
        ),
        ({"containers": [{"ports": [{"hostPort": 1, "protocol": "QUIC"}]}]}, "spec.containers.ports protocol: QUIC"),
    ],
)  # fmt: skip
def test_an_unknown_feature_is_refused_with_the_name_of_the_field(fields, field):
    refused = pod_info(**fields).refused
    assert [(each.code, each.text) for each in refused] == [
        ("UNSUPPORTED_FEATURE", f"{field} is not supported by this scheduler")
    ]


def test_an_invalid_amount_is_refused_and_not_raised():
    refused = pod_info(requests={"cpu": "much"}).refused
    assert [each.code for each in refused] == ["INVALID_POD"]


def test_a_node_with_all_that_scheduling_reads():
    fields = a_node(
        "n1",
        labels={"kubernetes.io/arch": "arm64"},
        unschedulable=True,
        taints=[{"key": "a", "value": "b", "effect": "NoSchedule"}],
        status={
            "images": [{"names": ["x:1", "x@sha"], "sizeBytes": 5}],
            "conditions": [{"type": "Ready", "status": "False"}, {"type": "DiskPressure", "status": "True"}],
        },
    )
    csi = from_builtins({"spec": {"drivers": [{"name": "d", "allocatable": {"count": 2}}, {"name": "e"}]}}, CsiNode)
    node = translate.node(fields, csi, devices={"dev.io/x": 1})
    assert node.capacity == {"cpu": 4000, "memory": 8 * 2**30, "pods": 110, "dev.io/x": 1}
    assert (node.arch, node.cordoned, node.taints) == ("arm64", True, (Taint("a", "b"),))
    assert node.images == {"x:1": 5, "x@sha": 5}
    assert node.volume_limits == {"d": 2}
    # Ready all the same: the node controller adds taints for these conditions, and pods may tolerate them.
    assert (node.ready, node.not_ready_reason) == (True, "Ready, DiskPressure")


def test_a_node_without_a_pod_limit_takes_none():
    assert translate.node(a_node(allocatable={"cpu": "1"})).capacity == {"cpu": 1000, "pods": 0}


def test_a_deleted_pod_is_terminating():
    assert translate.pod(a_pod(deleted=True)).member.stopping
