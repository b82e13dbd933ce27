"""Gangs in a real cluster, by the conventions of all projects: all or nothing, also when the scheduler is killed."""

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
    """The least that a PodGroup of others needs to be served."""
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


OTHERS = (("scheduling.x-k8s.io", "v1alpha1"), ("scheduling.volcano.sh", "v1beta1"))


@pytest.fixture(scope="module")
def groups_of_others(plane: Plane) -> Iterator[None]:
    """What scheduler-plugins and Volcano install."""
    yield from served(plane, [group_crd(*one) for one in OTHERS])


@pytest.fixture(scope="module")
def scheduler(groups_of_others: None, hodei: PodScheduler) -> PodScheduler:
    """Started after the kinds of others were defined: new kinds are looked for once a minute only."""
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
def test_a_gang_is_bound_whole_or_not_at_all(
    convention: Callable[[Cluster, int], Fields], cluster: Cluster, scheduler: PodScheduler
):
    cluster.make_nodes(2)
    cluster.make_pod("filler", cpu="3")
    cluster.until_bound("filler")
    said = convention(cluster, 3)
    cluster.make_pods(2, cpu="2", prefix="ring", **said)
    for name in ("ring-0", "ring-1"):
        cluster.until_condition(name, "PodScheduled", "False", "WaitingForPodGroup")
    cluster.make_pod("ring-2", cpu="2", **said)
    for name in ("ring-0", "ring-1", "ring-2"):
        cluster.until_condition(name, "PodScheduled", "False", "Unschedulable")
    assert set(cluster.bound()) == {"filler"}
    cluster.delete_pod("filler")
    cluster.until_bound("ring-0", "ring-1", "ring-2")


@pytest.mark.parametrize("convention", [by_kubernetes, by_scheduler_plugins, by_volcano], ids=name_of)
def test_pods_whose_group_is_not_there_yet_wait_for_it(
    convention: Callable[[Cluster, int], Fields], cluster: Cluster, scheduler: PodScheduler
):
    cluster.make_nodes(1)
    said = convention(cluster, 2)
    path = next(
        f"{root}/namespaces/{cluster.namespace}/podgroups/ring"
        for root in ("/apis/scheduling.k8s.io/v1alpha2", *(f"/apis/{group}/{version}" for group, version in OTHERS))
        if cluster.api.exists(f"{root}/namespaces/{cluster.namespace}/podgroups/ring")
    )
    cluster.delete(path)
    cluster.make_pods(2, prefix="ring", **said)
    waits = cluster.until_condition("ring-1", "PodScheduled", "False", "WaitingForPodGroup")
    assert '"ring"' in waits["message"]
    convention(cluster, 2)
    cluster.until_bound("ring-0", "ring-1")


@pytest.mark.parametrize(
    "said", [{"pod-group": "ring"}, {"pod-group": "ring", "pod-group-size": "many"}], ids=["none", "no number"]
)
def test_the_size_is_never_guessed(cluster: Cluster, scheduler: PodScheduler, said: dict[str, str]):
    cluster.make_nodes(1)
    cluster.make_pods(3, prefix="ring", annotations=said)
    for at in range(3):
        told = cluster.until_condition(f"ring-{at}", "PodScheduled", "False")
        assert "pod-group-size" in told["message"]
    assert cluster.bound() == {}


def test_pods_beyond_the_least_join_one_by_one(cluster: Cluster, scheduler: PodScheduler):
    cluster.make_nodes(1)
    said = by_kubernetes(cluster, 2)
    cluster.make_pods(2, cpu="1", prefix="ring", **said)
    cluster.until_bound("ring-0", "ring-1")
    cluster.make_pod("late", cpu="1", **said)
    cluster.until_bound("late")


def test_pods_of_a_group_without_a_gang_go_one_by_one(cluster: Cluster, scheduler: PodScheduler):
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
    said = by_annotation(cluster, 2)
    cluster.make_pod("ring-0", **said)
    cluster.make_pod("ring-1", schedulingGates=[{"name": "example.com/later"}], **said)
    cluster.until_condition("ring-0", "PodScheduled", "False", "WaitingForPodGroup")
    cluster.patch(f"{cluster.pods_path}/ring-1", {"spec": {"schedulingGates": None}})
    cluster.until_bound("ring-0", "ring-1")


def test_a_gang_starts_when_all_of_its_victims_have_ended(cluster: Cluster, scheduler: PodScheduler):
    cluster.make_nodes(3)
    cluster.apply("{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: five}, value: 5}")
    for at, takes in enumerate(("0s", "2s")):
        said = {"hodei.test/stops-after": takes}
        cluster.make_pod(f"low-{at}", cpu="3", scheduler="somebody", annotations=said)
        cluster.bind(f"low-{at}", f"node-{at}")
        cluster.until_phase(f"low-{at}", "Running")
    cluster.make_pods(3, cpu="3", prefix="ring", priorityClassName="five", **by_annotation(cluster, 3))

    def holders() -> dict[str, str]:
        return cluster.holding()

    cluster.wait(lambda: "low-0" not in holders(), "the first is gone")
    assert set(holders()) == {"low-1"}  # room is there for some, but not for all
    cluster.until_bound("ring-0", "ring-1", "ring-2")
    assert set(holders()) == {"ring-0", "ring-1", "ring-2"}


def test_a_gang_that_would_not_fit_anyway_preempts_no_pod(cluster: Cluster, scheduler: PodScheduler):
    cluster.make_nodes(2)
    cluster.apply("{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: five}, value: 5}")
    cluster.make_pod("low", cpu="3", scheduler="somebody")
    cluster.bind("low", "node-0")
    cluster.make_pods(3, cpu="3", prefix="ring", priorityClassName="five", **by_annotation(cluster, 3))
    cluster.until_condition("ring-2", "PodScheduled", "False", "Unschedulable")
    assert "deletionTimestamp" not in cluster.pod("low")["metadata"]
    assert set(cluster.bound()) == {"low"}


def forbid_binding(cluster: Cluster, name: str) -> Callable[[], None]:
    """The API refuses to bind this one pod, until what is returned is called."""
    known = f"no-binding-of-{name}"
    rules = [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/binding"]}]
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": known},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": rules},
            "validations": [{"expression": f"object.metadata.name != '{name}'", "message": "not this one"}],
        },
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": known},
        "spec": {"policyName": known, "validationActions": ["Deny"]},
    }
    paths = cluster.apply([policy, binding])

    def forbidden() -> bool:
        """Only asked: nothing is bound by it."""
        body = {"metadata": {"name": name}, "target": {"apiVersion": "v1", "kind": "Node", "name": "nowhere"}}
        try:
            cluster.api.request("POST", f"{cluster.pods_path}/{name}/binding", body, params={"dryRun": "All"})
        except ApiFailed as failed:
            return failed.status == 422  # 404 as long as nobody objects: there is no such pod yet
        return False

    cluster.wait(forbidden, f"binding of {name} is refused")

    def allow() -> None:
        for path in reversed(paths):
            cluster.delete(path)
        cluster.wait(lambda: not forbidden(), f"binding of {name} is allowed")

    return allow


def test_a_gang_is_completed_by_the_next_life_and_nothing_leaks(cluster: Cluster, hodei_kube: PodSchedulers):
    """Killed when all but one are bound; the room that its next life counts is what the API says, no more and no less."""
    mine = hodei_kube("mortal")
    cluster.make_nodes(2)
    allow = forbid_binding(cluster, "ring-2")
    said = by_annotation(cluster, 3)
    cluster.make_pods(3, cpu="2", prefix="ring", scheduler="mortal", **said)
    cluster.until_bound("ring-0", "ring-1")
    refused = cluster.until_condition("ring-2", "PodScheduled", "False", "SchedulerError")
    assert "not this one" in refused["message"]
    mine.kill()
    allow()
    mine.start()
    cluster.until_bound("ring-2")
    cluster.make_pods(2, cpu="1", prefix="last", scheduler="mortal")
    cluster.until_bound("last-0", "last-1")
    cluster.make_pod("too-much", cpu="100m", scheduler="mortal")
    cluster.until_condition("too-much", "PodScheduled", "False", "Unschedulable")
