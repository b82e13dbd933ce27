"""Translation of pods and nodes: every field that scheduling reads, and a refusal for unknown features."""

import pytest

from hodei.kube.api.objects import CsiNode, Service, Workload, from_builtins
from hodei.kube.scheduler import translate
from hodei.kube.scheduler.selectors import SYSTEM_SPREAD, SelectorSources
from hodei.kube.scheduler.translate import PodContext
from hodei.model.affinity import HostPort, NodeTerm, Requirement
from hodei.model.job import Toleration
from hodei.model.node import Taint
from unit.kube.pod_factory import a_node, a_pod, wanted

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def _nodes(*expressions, fields=()):
    term = {"matchExpressions": list(expressions), "matchFields": list(fields)}
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [term]}}}


def _expression(key, operator, *values):
    return {"key": key, "operator": operator, "values": list(values)}


def test_a_pod_is_a_job_of_one_member_in_its_namespace():
    pod = wanted(name="p", namespace="team", labels={"a": "b"}, requests={"cpu": "2"}, priority=7)
    job = pod.job
    assert (job.name, job.project, job.labels, job.priority, job.size) == ("p", "team", {"a": "b"}, 7, 1)
    assert pod.request == {"cpu": 2000, "pods": 1}
    assert pod.refused == ()


def test_all_operators_of_node_affinity():
    given = _nodes(
        _expression("a", "In", "1", "2"), _expression("b", "NotIn", "1"), _expression("c", "Exists"),
        _expression("d", "DoesNotExist"), _expression("e", "Gt", "5"), _expression("f", "Lt", "5"),
        fields=[_expression("metadata.name", "In", "n1")],
    )  # fmt: skip
    term = wanted(affinity=given).job.tasks[0].affinity.required[0]
    assert [str(one) for one in term.labels] == ["a in (1, 2)", "b notin (1)", "c", "!d", "e>5", "f<5"]
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
    assert wanted(affinity=_nodes(expression)).job.tasks[0].affinity.required == (NodeTerm(),)


def test_a_required_affinity_without_terms_matches_no_node():
    given = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": []}}}
    assert wanted(affinity=given).job.tasks[0].affinity.required == (NodeTerm(),)


def test_names_that_contradict_each_other_are_refused_at_once():
    both = [_expression("metadata.name", "In", "n1"), _expression("metadata.name", "In", "n2")]
    refused = wanted(affinity=_nodes(fields=both)).refused
    assert [(one.code, one.text) for one in refused] == [("AFFINITY_CONFLICT", "pod affinity terms conflict")]


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
    made = wanted(affinity=affinity, labels={"rev": "1", "tenant": "t"}).job.tasks[0].job_anti_affinity.preferred[0]
    assert made.weight == 5
    assert [str(one) for one in made.term.selector or ()] == ["app=db", "x", "rev=1", "tenant notin (t)"]
    assert made.term.projects == ("other",)
    assert [str(one) for one in made.term.project_selector or ()] == ["team=a"]


@pytest.mark.parametrize(
    ("given", "expected"), [({}, None), ({"labelSelector": {}}, ())], ids=["no selector: none", "empty selector: all"]
)
def test_no_selector_and_an_empty_one_are_not_the_same(given, expected):
    affinity = {"podAffinity": {REQUIRED: [{"topologyKey": "zone", **given}]}}
    assert wanted(affinity=affinity).job.tasks[0].job_affinity.required[0].selector == expected


def test_topology_spread_with_all_its_fields():
    rule = {
        "topologyKey": "zone", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule", "minDomains": 3,
        "labelSelector": {"matchLabels": {"a": "b"}}, "matchLabelKeys": ["rev"],
        "nodeAffinityPolicy": "Ignore", "nodeTaintsPolicy": "Honor",
    }  # fmt: skip
    made = wanted(topologySpreadConstraints=[rule], labels={"rev": "1"}).job.tasks[0].spread[0]
    assert (made.topology, made.max_skew, made.hard, made.min_domains) == ("zone", 2, True, 3)
    assert (made.honour_affinity, made.honour_taints) == (False, True)
    assert [str(one) for one in made.selector or ()] == ["a=b", "rev=1"]


def test_pods_without_rules_are_spread_by_their_services_and_workloads():
    owners = SelectorSources(
        {"ns": (Service(spec=Service.Spec({"app": "web"})), Service(spec=Service.Spec({"app": "db"})))},
        {("ns", "ReplicaSet", "rs"): from_builtins({"spec": {"selector": {"matchLabels": {"rev": "1"}}}}, Workload)},
    )
    cache = PodContext(selector_sources=owners, spread=SYSTEM_SPREAD)
    owner = {"kind": "ReplicaSet", "name": "rs", "controller": True}
    rules = wanted(cache, labels={"app": "web", "rev": "1"}, owners=[owner]).job.tasks[0].spread
    assert [(rule.topology, rule.max_skew, rule.hard, rule.keyless) for rule in rules] == [
        ("kubernetes.io/hostname", 3, False, True), ("topology.kubernetes.io/zone", 5, False, True),
    ]  # fmt: skip
    assert [str(one) for one in rules[0].selector or ()] == ["app=web", "rev=1"]
    assert wanted(cache, labels={"app": "other"}).job.tasks[0].spread == ()


def test_tolerations_with_every_operator():
    given = [
        {"operator": "Exists"},
        {"key": "a", "value": "b", "effect": "NoExecute", "tolerationSeconds": 5},
        {"key": "sla", "operator": "Gt", "value": "900"},
        {"key": "sla", "operator": "Lt", "value": "high"},
    ]
    assert wanted(tolerations=given).job.tasks[0].tolerations == (
        Toleration(operator="Exists"), Toleration("a", "Equal", "b", "NoExecute", 5), Toleration("sla", "Gt", "900"),
    )  # fmt: skip


def test_host_ports_of_containers_and_sidecars():
    port = {"hostPort": 80}
    pod = wanted(
        containers=[{"ports": [port, {"containerPort": 9}]}],
        initContainers=[
            {"ports": [{"hostPort": 53, "protocol": "UDP", "hostIP": "10.0.0.1"}], "restartPolicy": "Always"},
            {"ports": [{"hostPort": 99}]},
        ],
    )
    assert pod.job.tasks[0].ports == (HostPort(80), HostPort(53, "UDP", "10.0.0.1"))


def test_gates_preemption_policy_and_times():
    pod = wanted(
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
    ids=["off", "on", "admission gave one", "a class gave one", "no number", "never above the system's own"],
)
def test_a_priority_of_the_pods_own_choice_counts_only_where_the_operator_allows_it(allowed, fields, priority):
    pod = wanted(PodContext(priority_annotation=allowed), **{"annotations": {"priority": "100"}} | fields)
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
        "alone", "before what admission gave", "before a class", "not before Kubernetes' own", "absent", "negative",
        "never above the system's own", "no number", "empty",
    ],
)  # fmt: skip
def test_a_preferred_annotation_counts_before_the_class_and_must_be_a_number(fields, priority, codes):
    cache = PodContext(priority_annotation="priority", priority_preferred=True)
    pod = wanted(cache, **{"annotations": {"priority": "100"}} | fields)
    assert (pod.job.priority, [reason.code for reason in pod.refused]) == (priority, codes)


@pytest.mark.parametrize(
    ("fields", "expected_ms"),
    [
        ({}, 0),
        ({"activeDeadlineSeconds": 60}, 60_000),
        ({"activeDeadlineSeconds": 60, "labels": {"kueue.x-k8s.io/max-exec-time-seconds": "30"}}, 30_000),
        ({"activeDeadlineSeconds": 60, "annotations": {"hodei.io/estimate": "1h"}}, 3_600_000),
    ],
    ids=["nobody says", "the deadline", "Kueue's limit before it", "the annotation before all"],
)
def test_the_estimate_of_a_pod(fields, expected_ms):
    assert wanted(**fields).job.estimate_ms == expected_ms


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
    refused = wanted(**fields).refused
    assert [(one.code, one.text) for one in refused] == [
        ("UNSUPPORTED_FEATURE", f"{field} is not supported by this scheduler")
    ]


def test_an_invalid_amount_is_refused_and_not_raised():
    refused = wanted(requests={"cpu": "much"}).refused
    assert [one.code for one in refused] == ["INVALID_POD"]


def test_a_node_with_all_that_scheduling_reads():
    given = a_node(
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
    node = translate.node(given, csi, devices={"dev.io/x": 1})
    assert node.capacity == {"cpu": 4000, "memory": 8 * 2**30, "pods": 110, "dev.io/x": 1}
    assert (node.arch, node.cordoned, node.taints) == ("arm64", True, (Taint("a", "b"),))
    assert node.images == {"x:1": 5, "x@sha": 5}
    assert node.volume_limits == {"d": 2}
    # Not refused for it: the node controller says so by taints, which may be tolerated.
    assert (node.ready, node.not_ready_reason) == (True, "Ready, DiskPressure")


def test_a_node_without_a_pod_limit_takes_none():
    assert translate.node(a_node(allocatable={"cpu": "1"})).capacity == {"cpu": 1000, "pods": 0}


def test_a_deleted_pod_is_terminating():
    assert translate.pod(a_pod(deleted=True)).member.leaving
