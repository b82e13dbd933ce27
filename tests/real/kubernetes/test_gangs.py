"""Gangs in a real cluster, by the conventions of each project: all or nothing, also when the scheduler is killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from real.kubernetes.api import ApiFailed
from real.kubernetes.cluster import Cluster
from real.kubernetes.group_kinds import served
from real.kubernetes.plane import Plane
from real.kubernetes.pod_scheduler import PodScheduler, PodSchedulers

pytestmark = pytest.mark.real

Fields = dict[str, Any]


def group_crd(group: str, version: str) -> dict[str, Any]:
    """A minimal definition of another project's PodGroup."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"podgroups.{group}",
            "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/scheduler-plugins"},
        },
        "spec": {
            "group": group,
            "names": {"plural": "podgroups", "singular": "podgroup", "kind": "PodGroup", "listKind": "PodGroupList"},
            "scope": "Namespaced",
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    }


PROJECTS = (("scheduling.x-k8s.io", "v1alpha1"), ("scheduling.volcano.sh", "v1beta1"))


@pytest.fixture(scope="module")
def other_pod_groups(plane: Plane) -> Iterator[None]:
    """The PodGroup definitions of scheduler-plugins and Volcano."""
    yield from served(plane, [group_crd(*one) for one in PROJECTS])


@pytest.fixture(scope="module")
def scheduler(other_pod_groups: None, hodei: PodScheduler) -> PodScheduler:
    """Started after the other PodGroups are defined, because new kinds are discovered only once a minute."""
    return hodei


def by_kubernetes(cluster: Cluster, size: int) -> Fields:
    cluster.apply(f"""
        apiVersion: scheduling.k8s.io/v1alpha2
        kind: PodGroup
        metadata: {{name: ring}}
        spec: {{schedulingPolicy: {{gang: {{minCount: {size}}}}}}}
    """)
    return {"schedulingGroup": {"podGroupName": "ring"}}


def by_scheduler_plugins(cluster: Cluster, size: int) -> Fields:
    cluster.apply(f"""
        {{apiVersion: scheduling.x-k8s.io/v1alpha1, kind: PodGroup, metadata: {{name: ring}}, spec: {{minMember: {size}}}}}
    """)
    return {"labels": {"scheduling.x-k8s.io/pod-group": "ring"}}


def by_volcano(cluster: Cluster, size: int) -> Fields:
    cluster.apply(f"""
        {{apiVersion: scheduling.volcano.sh/v1beta1, kind: PodGroup, metadata: {{name: ring}}, spec: {{minMember: {size}}}}}
    """)
    return {"annotations": {"scheduling.k8s.io/group-name": "ring"}}


def by_kueue(cluster: Cluster, size: int) -> Fields:
    return {
        "labels": {"kueue.x-k8s.io/pod-group-name": "ring"},
        "annotations": {"kueue.x-k8s.io/pod-group-total-count": str(size)},
    }


def by_yunikorn(cluster: Cluster, size: int) -> Fields:
    task = {"name": "workers", "minMember": size, "minResource": {"cpu": "2"}}
    return {
        "labels": {"yunikorn.apache.org/app-id": "ring"},
        "annotations": {
            "yunikorn.apache.org/task-group-name": "workers",
            "yunikorn.apache.org/task-groups": json.dumps([task]),
        },
    }


def by_annotation(cluster: Cluster, size: int) -> Fields:
    return {"annotations": {"pod-group": "ring", "pod-group-size": str(size)}}


CONVENTIONS = [by_kubernetes, by_scheduler_plugins, by_volcano, by_kueue, by_yunikorn, by_annotation]


def name_of(convention: Callable[..., Fields]) -> str:
    return convention.__name__.removeprefix("by_")


@pytest.mark.parametrize("convention", CONVENTIONS, ids=name_of)
def test_a_gang_is_bound_as_a_whole_or_not_at_all(
    convention: Callable[[Cluster, int], Fields], cluster: Cluster, scheduler: PodScheduler
):
    cluster.make_nodes(2)
    cluster.make_pod("filler", cpu="3")
    cluster.until_bound("filler")
    fields = convention(cluster, 3)
    cluster.make_pods(2, cpu="2", prefix="ring", **fields)
    for name in ("ring-0", "ring-1"):
        cluster.until_condition(name, "PodScheduled", "False", "WaitingForPodGroup")
    cluster.make_pod("ring-2", cpu="2", **fields)
    for name in ("ring-0", "ring-1", "ring-2"):
        cluster.until_condition(name, "PodScheduled", "False", "Unschedulable")
    assert set(cluster.bound()) == {"filler"}
    cluster.delete_pod("filler")
    cluster.until_bound("ring-0", "ring-1", "ring-2")


@pytest.mark.parametrize("convention", [by_kubernetes, by_scheduler_plugins, by_volcano], ids=name_of)
def test_pods_wait_for_a_missing_pod_group(
    convention: Callable[[Cluster, int], Fields], cluster: Cluster, scheduler: PodScheduler
):
    cluster.make_nodes(1)
    fields = convention(cluster, 2)
    path = next(
        f"{root}/namespaces/{cluster.namespace}/podgroups/ring"
        for root in ("/apis/scheduling.k8s.io/v1alpha2", *(f"/apis/{group}/{version}" for group, version in PROJECTS))
        if cluster.api.exists(f"{root}/namespaces/{cluster.namespace}/podgroups/ring")
    )
    cluster.delete(path)
    cluster.make_pods(2, prefix="ring", **fields)
    waits = cluster.until_condition("ring-1", "PodScheduled", "False", "WaitingForPodGroup")
    assert '"ring"' in waits["message"]
    convention(cluster, 2)
    cluster.until_bound("ring-0", "ring-1")


@pytest.mark.parametrize(
    "annotations", [{"pod-group": "ring"}, {"pod-group": "ring", "pod-group-size": "many"}], ids=["none", "no number"]
)
def test_a_gang_without_a_valid_size_is_not_bound(
    cluster: Cluster, scheduler: PodScheduler, annotations: dict[str, str]
):
    cluster.make_nodes(1)
    cluster.make_pods(3, prefix="ring", annotations=annotations)
    for at in range(3):
        condition = cluster.until_condition(f"ring-{at}", "PodScheduled", "False")
        assert "pod-group-size" in condition["message"]
    assert cluster.bound() == {}


def test_pods_beyond_the_minimum_are_bound_one_by_one(cluster: Cluster, scheduler: PodScheduler):
    cluster.make_nodes(1)
    fields = by_kubernetes(cluster, 2)
    cluster.make_pods(2, cpu="1", prefix="ring", **fields)
    cluster.until_bound("ring-0", "ring-1")
    cluster.make_pod("late", cpu="1", **fields)
    cluster.until_bound("late")


def test_pods_of_a_group_without_gang_policy_are_bound_one_by_one(cluster: Cluster, scheduler: PodScheduler):
    cluster.make_nodes(1)
    cluster.apply("""
        apiVersion: scheduling.k8s.io/v1alpha2
        kind: PodGroup
        metadata: {name: loose}
        spec: {schedulingPolicy: {basic: {}}}
    """)
    cluster.make_pod("one", schedulingGroup={"podGroupName": "loose"})
    cluster.until_bound("one")


def test_a_gang_whose_pod_is_gated_waits_for_it(cluster: Cluster, scheduler: PodScheduler):
    cluster.make_nodes(1)
    fields = by_annotation(cluster, 2)
    cluster.make_pod("ring-0", **fields)
    cluster.make_pod("ring-1", schedulingGates=[{"name": "example.com/later"}], **fields)
    cluster.until_condition("ring-0", "PodScheduled", "False", "WaitingForPodGroup")
    cluster.patch(f"{cluster.pods_path}/ring-1", {"spec": {"schedulingGates": None}})
    cluster.until_bound("ring-0", "ring-1")


def test_a_gang_starts_when_all_of_its_victims_have_ended(cluster: Cluster, scheduler: PodScheduler):
    cluster.make_nodes(3)
    cluster.apply("{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: five}, value: 5}")
    for at, stops_after in enumerate(("0s", "2s")):
        annotations = {"hodei.test/stops-after": stops_after}
        cluster.make_pod(f"low-{at}", cpu="3", scheduler="other", annotations=annotations)
        cluster.bind(f"low-{at}", f"node-{at}")
        cluster.until_phase(f"low-{at}", "Running")
    cluster.make_pods(3, cpu="3", prefix="ring", priorityClassName="five", **by_annotation(cluster, 3))

    cluster.wait(lambda: "low-0" not in cluster.holding(), "the first victim has ended")
    assert set(cluster.holding()) == {"low-1"}  # there is capacity for some members, but not for all
    cluster.until_bound("ring-0", "ring-1", "ring-2")
    assert set(cluster.holding()) == {"ring-0", "ring-1", "ring-2"}


def test_a_gang_that_would_not_fit_anyway_preempts_no_pod(cluster: Cluster, scheduler: PodScheduler):
    cluster.make_nodes(2)
    cluster.apply("{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: five}, value: 5}")
    cluster.make_pod("low", cpu="3", scheduler="other")
    cluster.bind("low", "node-0")
    cluster.make_pods(3, cpu="3", prefix="ring", priorityClassName="five", **by_annotation(cluster, 3))
    cluster.until_condition("ring-2", "PodScheduled", "False", "Unschedulable")
    assert "deletionTimestamp" not in cluster.pod("low")["metadata"]
    assert set(cluster.bound()) == {"low"}


def forbid_binding(cluster: Cluster, name: str) -> Callable[[], None]:
    """The API refuses to bind this pod until the returned function is called."""
    policy_name = f"no-binding-of-{name}"
    rules = [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/binding"]}]
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": policy_name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": rules},
            "validations": [{"expression": f"object.metadata.name != '{name}'", "message": "refused by the test"}],
        },
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": policy_name},
        "spec": {"policyName": policy_name, "validationActions": ["Deny"]},
    }
    paths = cluster.apply([policy, binding])

    def forbidden() -> bool:
        """A dry run, which binds nothing."""
        body = {"metadata": {"name": name}, "target": {"apiVersion": "v1", "kind": "Node", "name": "nowhere"}}
        try:
            cluster.api.request("POST", f"{cluster.pods_path}/{name}/binding", body, params={"dryRun": "All"})
        except ApiFailed as failed:
            return failed.status == 422  # 404 without the policy, because the pod does not exist yet
        return False

    cluster.wait(forbidden, f"binding of {name} is refused")

    def allow() -> None:
        for path in reversed(paths):
            cluster.delete(path)
        cluster.wait(lambda: not forbidden(), f"binding of {name} is allowed")

    return allow


def test_a_gang_is_completed_after_a_restart_and_no_capacity_leaks(cluster: Cluster, hodei_kube: PodSchedulers):
    """The scheduler is killed when all members but one are bound. After the restart, allocations equal those in the API."""
    scheduler = hodei_kube("killed")
    cluster.make_nodes(2)
    allow = forbid_binding(cluster, "ring-2")
    fields = by_annotation(cluster, 3)
    cluster.make_pods(3, cpu="2", prefix="ring", scheduler="killed", **fields)
    cluster.until_bound("ring-0", "ring-1")
    refused = cluster.until_condition("ring-2", "PodScheduled", "False", "SchedulerError")
    assert "refused by the test" in refused["message"]
    scheduler.kill()
    allow()
    scheduler.start()
    cluster.until_bound("ring-2")
    cluster.make_pods(2, cpu="1", prefix="last", scheduler="killed")
    cluster.until_bound("last-0", "last-1")
    cluster.make_pod("too-much", cpu="100m", scheduler="killed")
    cluster.until_condition("too-much", "PodScheduled", "False", "Unschedulable")
