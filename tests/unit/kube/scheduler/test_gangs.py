"""Pod groups by the conventions of all projects: group, size, timeout; and the gangs made from them."""

import pytest
from msgspec import structs

from hodei.kube.api.objects import GroupedWorkload, MemberGroup, PodGroup, from_builtins
from hodei.kube.scheduler import translate
from hodei.kube.scheduler.gangs import Group, Groups, Membership, as_job, assemble, group_of, membership, missing_count
from hodei.model.job import Reason
from unit.kube.pod_factory import a_pod

Y = "yunikorn.apache.org/"
TASK_GROUPS = '[{"name":"driver","minMember":1,"minResource":{"cpu":"1"}},{"name":"worker","minMember":3}]'
KUBERNETES = {"metadata": {"name": "g"}, "spec": {"schedulingPolicy": {"gang": {"minCount": 4}}}}
ONE_BY_ONE = {"spec": {"schedulingPolicy": {"basic": {}}}}
WHOLE_IN_ONE_RACK = {
    "spec": {
        "schedulingPolicy": {"gang": {"minCount": 2}},
        "disruptionMode": {"all": {}},
        "schedulingConstraints": {"topology": [{"key": "rack"}]},
    }
}
WORKLOAD = {
    "spec": {"podGroups": [{"name": "w", "policy": {"gang": {"minCount": 5}}}, {"name": "b", "policy": {"basic": {}}}]}
}


def _groups(kubernetes=KUBERNETES, plugins=None, volcano=None, workload=WORKLOAD) -> Groups:
    return Groups(
        {("ns", "g"): from_builtins(kubernetes, PodGroup)},
        {("ns", "wl"): from_builtins(workload, GroupedWorkload)},
        {("ns", "g"): from_builtins({"spec": plugins or {"minMember": 3}}, MemberGroup)},
        {("ns", "g"): from_builtins({"spec": volcano or {"minMember": 3, "queue": "q"}}, MemberGroup)},
    )


@pytest.mark.parametrize(
    ("fields", "groups", "expected"),
    [
        ({"schedulingGroup": {"podGroupName": "g"}}, _groups(), Group(("kubernetes", "ns", "g"), 4, timeout_ms=300_000)),
        (
            {"schedulingGroup": {"podGroupName": "g"}},
            _groups(WHOLE_IN_ONE_RACK),
            Group(("kubernetes", "ns", "g"), 2, timeout_ms=300_000, topology="rack", all_or_nothing=True),
        ),
        (
            {"workloadRef": {"name": "wl", "podGroup": "w", "podGroupReplicaKey": "0"}},
            _groups(),
            Group(("workload", "ns", "wl/w/0"), 5, timeout_ms=300_000),
        ),
        (
            {"labels": {"scheduling.x-k8s.io/pod-group": "g"}},
            _groups(),
            Group(("scheduler-plugins", "ns", "g"), 3, timeout_ms=60_000),
        ),
        (
            {"labels": {"scheduling.x-k8s.io/pod-group": "g"}},
            _groups(plugins={"minMember": 2, "scheduleTimeoutSeconds": 10}),
            Group(("scheduler-plugins", "ns", "g"), 2, timeout_ms=10_000, timed=True),
        ),
        ({"annotations": {"scheduling.k8s.io/group-name": "g"}}, _groups(), Group(("volcano", "ns", "g"), 3, queue="q")),
        (
            {"annotations": {"scheduling.k8s.io/group-name": "g", "volcano.sh/sla-waiting-time": "1h"}},
            _groups(volcano={"minMember": 3, "minTaskMember": {"ps": 1, "worker": 2}}),
            Group(("volcano", "ns", "g"), 3, (("ps", 1), ("worker", 2)), 3_600_000),
        ),
        (
            {"annotations": {"scheduling.volcano.sh/group-name": "x", "scheduling.volcano.sh/group-min-member": "6"}},
            _groups(),
            Group(("volcano", "ns", "x"), 6),
        ),
        (
            {
                "labels": {"kueue.x-k8s.io/pod-group-name": "g", "kueue.x-k8s.io/queue-name": "team"},
                "annotations": {"kueue.x-k8s.io/pod-group-total-count": "8"},
            },
            _groups(),
            Group(("kueue", "ns", "g"), 8, queue="team"),
        ),
        (
            {
                "labels": {f"{Y}app-id": "app", f"{Y}queue": "root.a"},
                "annotations": {
                    f"{Y}task-group-name": "driver", f"{Y}task-groups": TASK_GROUPS,
                    f"{Y}schedulingPolicyParameters": "placeholderTimeoutInSeconds=30 gangSchedulingStyle=Hard",
                },
            },
            _groups(),
            Group(("yunikorn", "ns", "app"), 4, (("driver", 1), ("worker", 3)), 30_000, "root.a", timed=True),
        ),
        (
            {"annotations": {"pod-group": "g", "pod-group-size": "2"}},
            _groups(),
            Group(("annotation", "ns", "g"), 2, timeout_ms=300_000),
        ),
        (
            {"annotations": {"pod-group": "g", "pod-group-size": "2", "pod-group-timeout": "30s"}},
            _groups(),
            Group(("annotation", "ns", "g"), 2, timeout_ms=30_000, timed=True),
        ),
    ],
    ids=[
        "Kubernetes' own", "Kubernetes' own, in one rack and evicted whole", "Kubernetes 1.35", "scheduler-plugins",
        "scheduler-plugins with a timeout", "Volcano", "Volcano with parts", "Volcano without an object", "Kueue",
        "YuniKorn", "the plain annotation", "the plain annotation with a timeout",
    ],
)  # fmt: skip
def test_a_pod_belongs_to_a_gang(fields, groups, expected):
    found = membership(a_pod(**fields))
    assert isinstance(found, Membership)
    assert group_of(found, groups) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"labels": {"kueue.x-k8s.io/queue-name": "team"}},
        {"labels": {f"{Y}app-id": "app"}},
        {"annotations": {"pod-group": ""}},
        {"schedulingGroup": {}},
    ],
    ids=["nothing declared", "has a queue", "has an app id", "an empty name", "an empty group"],
)
def test_a_pod_belongs_to_no_gang(fields):
    assert membership(a_pod(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "groups"),
    [
        ({"schedulingGroup": {"podGroupName": "g"}}, _groups(ONE_BY_ONE)),
        ({"workloadRef": {"name": "wl", "podGroup": "b"}}, _groups()),
    ],
    ids=["PodGroup", "Workload"],
)
def test_pods_of_a_basic_group_are_scheduled_one_by_one(fields, groups):
    assert group_of(membership(a_pod(**fields)), groups) is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"schedulingGroup": {"podGroupName": "x"}}, 'waiting for pods\'s pod group "x" to appear in scheduling queue'),
        ({"workloadRef": {"name": "x"}}, 'waiting for pods\'s workload "x" to appear in scheduling queue'),
        ({"workloadRef": {"name": "wl", "podGroup": "x"}}, 'pod group "x" doesn\'t exist for a workload "wl"'),
        ({"labels": {"scheduling.x-k8s.io/pod-group": "x"}}, 'waiting for the PodGroup "x"'),
        ({"annotations": {"scheduling.k8s.io/group-name": "x"}}, 'waiting for the PodGroup "x"'),
        ({"labels": {"kueue.x-k8s.io/pod-group-name": "x"}}, "annotation kueue.x-k8s.io/pod-group-total-count"),
        (
            {"labels": {f"{Y}app-id": "x"}, "annotations": {f"{Y}task-group-name": "t"}},
            f"annotation {Y}task-groups",
        ),
        ({"annotations": {"pod-group": "x"}}, 'the size of pod group "x" is not declared (annotation pod-group-size)'),
    ],
)
def test_a_gang_without_a_declared_size_waits_with_a_reason(fields, text):
    found = group_of(membership(a_pod(**fields)), _groups())
    assert isinstance(found, Reason)
    assert text in found.text


def test_a_nested_group_is_refused_as_unsupported():
    nested = {"spec": {"schedulingPolicy": {"gang": {}}, "parentCompositePodGroupName": "root"}}
    found = group_of(membership(a_pod(schedulingGroup={"podGroupName": "g"})), _groups(nested))
    assert isinstance(found, Reason)
    assert found.code == "UNSUPPORTED_FEATURE"


@pytest.mark.parametrize(
    "annotations",
    [
        {"pod-group": "g", "pod-group-size": "many"},
        {"pod-group": "g", "pod-group-size": "0"},
        {"pod-group": "g", "pod-group-size": "2", "pod-group-timeout": "soon"},
        {f"{Y}app-id": "a", f"{Y}task-groups": "[{"},
    ],
    ids=["not a number", "zero", "no duration", "no JSON"],
)
def test_an_unreadable_group_is_a_reason(annotations):
    found = membership(a_pod(annotations=annotations))
    assert isinstance(found, Reason)
    assert found.code == "INVALID_POD_GROUP"


def test_pods_that_declare_different_sizes_are_refused():
    one, other = (membership(a_pod(annotations={"pod-group": "g", "pod-group-size": size})) for size in ("2", "3"))
    found = group_of(one, siblings=(other,))
    assert isinstance(found, Reason)
    assert found.text.endswith("declare different sizes: 2, 3")


def test_only_one_pod_of_an_application_needs_to_carry_the_task_groups():
    driver = membership(a_pod(labels={f"{Y}app-id": "a"}, annotations={f"{Y}task-groups": TASK_GROUPS}))
    worker = membership(a_pod(labels={f"{Y}app-id": "a"}, annotations={f"{Y}task-group-name": "worker"}))
    found = group_of(worker, siblings=(driver,))
    assert isinstance(found, Group)
    assert (found.min_count, found.parts) == (4, (("driver", 1), ("worker", 3)))


def test_the_group_of_kubernetes_comes_before_all_others():
    both = a_pod(schedulingGroup={"podGroupName": "g"}, annotations={"pod-group": "x", "pod-group-size": "2"})
    assert membership(both).convention == "kubernetes"


def test_missing_members_are_counted_per_task_group():
    group = Group(("yunikorn", "ns", "a"), 4, (("driver", 1), ("worker", 3)))
    assert missing_count(group, {}) == 4
    assert missing_count(group, {"worker": 4}) == 1
    assert missing_count(group, {"driver": 1, "worker": 3}) == 0


def _in_group(name, size="3", **fields):
    return a_pod(name, annotations={"pod-group": "g", "pod-group-size": size}, **fields)


def test_a_gang_waits_until_enough_of_its_pods_are_there():
    gated = _in_group("c", schedulingGates=[{"name": "x"}])
    (few,) = assemble([_in_group("a"), _in_group("b"), gated, _in_group("d", deleted=True)])
    assert few.reason.text == "waiting for minCount pods from a gang to appear in scheduling queue"
    (all_,) = assemble([_in_group("a"), _in_group("b"), _in_group("c"), _in_group("d")])
    assert (all_.reason, all_.needed, len(all_.pending)) == (None, 3, 4)


def test_pods_that_are_bound_already_count():
    (left,) = assemble([_in_group("a", nodeName="n1"), _in_group("b", nodeName="n1"), _in_group("c"), _in_group("d")])
    assert (left.reason, left.bound, left.needed) == (None, 2, 1)
    assert assemble([_in_group("a", nodeName="n1")]) == []


def test_groups_of_different_namespaces_are_separate():
    found = assemble([_in_group("a", "2"), _in_group("a", "2", namespace="other"), a_pod("alone")])
    assert sorted(len(gang.pending) for gang in found) == [1, 1, 1]
    assert [gang.reason is None for gang in found] == [True, False, False]


def test_equal_pods_are_one_task_of_the_gangs_job():
    pods = [translate.pod(a_pod(name, requests={"cpu": "1"}, labels={"app": "x"})) for name in "abc"]
    pods.insert(1, translate.pod(a_pod("d", requests={"cpu": "2"}, labels={"app": "y"})))
    job, order = as_job([without_name(pod) for pod in pods], 4)
    assert [(task.request["cpu"], task.count, task.needed) for task in job.tasks] == [(1000, 3, 3), (2000, 1, 1)]
    assert [task.labels for task in job.tasks] == [{"app": "x"}, {"app": "y"}]
    assert order == [0, 2, 3, 1]


def test_spare_members_are_placed_if_capacity_is_left():
    pods = [translate.pod(a_pod(name, requests={"cpu": "1"})) for name in "abc"]
    pods.append(translate.pod(a_pod("d", requests={"cpu": "2"})))
    job, order = as_job([without_name(pod) for pod in pods], 2)
    assert [(task.count, task.needed) for task in job.tasks] == [(3, 2)]
    assert order == [0, 1, 2]


def test_index_labels_do_not_make_pods_of_a_set_different():
    index = "batch.kubernetes.io/job-completion-index"
    pods = [translate.pod(a_pod(str(n), labels={index: str(n), "app": "x"})) for n in range(3)]
    job, _ = as_job([without_name(pod) for pod in pods], 3)
    assert [(task.count, task.labels) for task in job.tasks] == [(3, {"app": "x"})]


def test_a_gang_has_the_priority_of_its_highest_pod():
    pods = [without_name(translate.pod(a_pod(str(n), priority=n))) for n in (3, 7, 5)]
    assert as_job(pods, 3)[0].priority == 7


def test_a_gang_has_the_topology_of_its_group():
    job, _ = as_job([translate.pod(a_pod())], 1, Group(("kubernetes", "ns", "g"), 1, topology="rack"))
    assert job.gang.topology == "rack"


def without_name(pod):
    """Without the pod's name, which scheduling does not read, as in a real cluster."""
    job = structs.replace(pod.job, tasks=(structs.replace(pod.job.tasks[0], name="pod"),))
    return structs.replace(pod, job=job)
