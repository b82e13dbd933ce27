"""Placed gangs in a real cluster: the status of their objects, finished members, replacements of lost members, and preemption of
the whole gang or of its spare members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from real.kubernetes import group_kinds
from real.kubernetes.cluster import Cluster
from real.kubernetes.plane import Plane
from real.kubernetes.pod_scheduler import PodScheduler, PodSchedulers

pytestmark = pytest.mark.real

Fields = dict[str, Any]
Convention = Callable[[Cluster, int], Fields]
ROOTS = {
    "kubernetes": "/apis/scheduling.k8s.io/v1alpha2",
    "plugins": "/apis/scheduling.x-k8s.io/v1alpha1",
    "volcano": "/apis/scheduling.volcano.sh/v1beta1",
}


@pytest.fixture(scope="module")
def kinds(plane: Plane) -> Iterator[None]:
    yield from group_kinds.defined(plane)


@pytest.fixture(scope="module")
def scheduler(kinds: None, hodei: PodScheduler) -> PodScheduler:
    """Started after the other PodGroups are defined, because new kinds are discovered only once a minute."""
    return hodei


@pytest.fixture
def priorities(cluster: Cluster) -> None:
    cluster.apply("{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: five}, value: 5}")


def by_kubernetes(cluster: Cluster, size: int, **spec: Any) -> Fields:
    policy = {"schedulingPolicy": {"gang": {"minCount": size}}, **spec}
    _apply(cluster, "scheduling.k8s.io/v1alpha2", policy)
    return {"schedulingGroup": {"podGroupName": "ring"}}


def by_plugins(cluster: Cluster, size: int, **spec: Any) -> Fields:
    _apply(cluster, "scheduling.x-k8s.io/v1alpha1", {"minMember": size, **spec})
    return {"labels": {"scheduling.x-k8s.io/pod-group": "ring"}}


def by_volcano(cluster: Cluster, size: int, **spec: Any) -> Fields:
    _apply(cluster, "scheduling.volcano.sh/v1beta1", {"minMember": size, **spec})
    return {"annotations": {"scheduling.k8s.io/group-name": "ring"}}


def by_annotation(cluster: Cluster, size: int) -> Fields:
    return {"annotations": {"pod-group": "ring", "pod-group-size": str(size)}}


def _apply(cluster: Cluster, version: str, spec: dict[str, Any]) -> None:
    cluster.apply([{"apiVersion": version, "kind": "PodGroup", "metadata": {"name": "ring"}, "spec": spec}])


def status(cluster: Cluster, convention: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.get(f"{ROOTS[convention]}/namespaces/{cluster.namespace}/podgroups/ring")
    return dict(found.get("status", {}))


def until_status(cluster: Cluster, convention: str, **wanted: Any) -> dict[str, Any]:
    def reached() -> dict[str, Any] | None:
        found = status(cluster, convention)
        return found if all(found.get(key, 0) == value for key, value in wanted.items()) else None

    try:
        return cluster.wait(reached, f"the group's status is {wanted}")
    except AssertionError as error:
        raise AssertionError(f"{error}; it is {status(cluster, convention)}") from None


def annotated(fields: Fields, **more: str) -> Fields:
    return {**fields, "annotations": {**fields.get("annotations", {}), **more}}


def job(cluster: Cluster, name: str, fields: Fields, *, completions: int, parallelism: int, runs_for: str) -> None:
    """A batch Job whose pods end by themselves."""
    fields = annotated(fields, **{"hodei.test/runs-for": runs_for})
    spec = {key: value for key, value in fields.items() if key not in ("labels", "annotations")}
    container = {"name": "main", "image": "busybox", "resources": {"requests": {"cpu": "1", "memory": "64Mi"}}}
    template = {
        "metadata": {"labels": fields.get("labels", {}), "annotations": fields["annotations"]},
        "spec": {"schedulerName": "hodei", "restartPolicy": "Never", "containers": [container], **spec},
    }
    wanted = {"completions": completions, "parallelism": parallelism, "template": template}
    cluster.apply([{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": wanted}])


def test_the_group_of_scheduler_plugins_has_its_status(cluster: Cluster, scheduler: PodScheduler):
    cluster.make_nodes(1, cpu="2")
    fields = annotated(by_plugins(cluster, 2), **{"hodei.test/runs-for": "2s"})
    cluster.make_pod("ring-0", cpu="1", **fields)
    until_status(cluster, "plugins", phase="Pending")
    cluster.make_pod("ring-1", cpu="1", **fields)
    began = until_status(cluster, "plugins", phase="Running", running=2)["scheduleStartTime"]
    ended = until_status(cluster, "plugins", phase="Finished", running=0, succeeded=2)
    assert ended["scheduleStartTime"] == began


def test_a_group_of_scheduler_plugins_without_capacity_is_scheduling(cluster: Cluster, scheduler: PodScheduler):
    cluster.make_nodes(1, cpu="1")
    cluster.make_pods(2, cpu="1", prefix="ring", **by_plugins(cluster, 2))
    until_status(cluster, "plugins", phase="Scheduling", running=0)


def test_the_group_of_volcano_has_its_status(cluster: Cluster, scheduler: PodScheduler):
    cluster.make_nodes(1, cpu="2")
    cluster.make_pod("filler", cpu="2")
    cluster.until_bound("filler")
    fields = annotated(by_volcano(cluster, 2), **{"hodei.test/runs-for": "2s"})
    cluster.make_pods(2, cpu="1", prefix="ring", **fields)
    until_status(cluster, "volcano", phase="Inqueue")
    cluster.wait(lambda: status(cluster, "volcano").get("conditions"), "the group has a condition")
    condition = status(cluster, "volcano")["conditions"][0]
    assert (condition["type"], condition["status"], condition["reason"]) == (
        "Unschedulable",
        "True",
        "NotEnoughResources",
    )
    assert "Insufficient cpu" in condition["message"]
    cluster.delete_pod("filler")
    running = until_status(cluster, "volcano", phase="Running", running=2)
    assert "Scheduled" in [one["type"] for one in running["conditions"]]
    until_status(cluster, "volcano", phase="Completed", running=0, succeeded=2)


def test_the_group_of_a_volcano_job_is_admitted_so_that_its_pods_are_created(cluster: Cluster, scheduler: PodScheduler):
    """The test acts as Volcano's controller: it creates the group first, and pods only once the group is admitted."""
    jobs = {}
    for name, scheduler_name in (("ours", "hodei"), ("others", "volcano")):
        body = {"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": {"name": name}}
        (path,) = cluster.apply([{**body, "spec": {"schedulerName": scheduler_name, "minAvailable": 1}}])
        jobs[name] = cluster.get(path)["metadata"]["uid"]
    for name, uid in jobs.items():
        owner = {"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "name": name, "uid": uid, "controller": True}
        meta = {"name": name, "ownerReferences": [owner]}
        body = {"apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "PodGroup", "metadata": meta}
        cluster.apply([{**body, "spec": {"minMember": 1}, "status": {"phase": "Pending"}}])

    def phase(name: str) -> str:
        path = f"{ROOTS['volcano']}/namespaces/{cluster.namespace}/podgroups/{name}"
        return str(cluster.get(path).get("status", {}).get("phase", ""))

    cluster.wait(lambda: phase("ours") == "Inqueue", "the group is admitted")
    assert phase("others") == "Pending"


def test_the_group_of_kubernetes_has_the_condition_of_kube_scheduler(cluster: Cluster, scheduler: PodScheduler):
    cluster.make_nodes(1, cpu="2")
    cluster.make_pod("filler", cpu="2")
    cluster.until_bound("filler")
    cluster.make_pods(2, cpu="1", prefix="ring", **by_kubernetes(cluster, 2))

    def condition(wanted: str) -> dict[str, Any] | None:
        found = status(cluster, "kubernetes").get("conditions", [])
        return next((one for one in found if one["type"] == "PodGroupScheduled" and one["status"] == wanted), None)

    pending = cluster.wait(lambda: condition("False"), "the group is reported as pending")
    assert pending["reason"] == "Unschedulable"
    cluster.wait(lambda: "Insufficient cpu" in (condition("False") or {}).get("message", ""), "the reason is reported")
    cluster.delete_pod("filler")
    scheduled = cluster.wait(lambda: condition("True"), "the group is reported as scheduled")
    assert scheduled["reason"] == "Scheduled"
    cluster.delete_pod("ring-0", grace=0)
    cluster.make_pod("ring-2", cpu="2", schedulingGroup={"podGroupName": "ring"})
    cluster.until_condition("ring-2", "PodScheduled", "False")
    assert condition("True") == scheduled  # the condition stays


@pytest.mark.parametrize("convention", [by_kubernetes, by_plugins, by_volcano, by_annotation])
def test_a_job_with_more_completions_than_its_gang_is_large_ends(
    convention: Convention, cluster: Cluster, scheduler: PodScheduler
):
    cluster.make_nodes(1)
    job(cluster, "ring", convention(cluster, 3), completions=4, parallelism=3, runs_for="1s")
    path = f"/apis/batch/v1/namespaces/{cluster.namespace}/jobs/ring"
    cluster.wait(lambda: cluster.get(path).get("status", {}).get("succeeded") == 4, "all four have succeeded")


def test_finished_members_are_known_after_a_restart(cluster: Cluster, kinds: None, hodei_kube: PodSchedulers):
    scheduler = hodei_kube("killed")
    cluster.make_nodes(1)
    fields = annotated(by_plugins(cluster, 2), **{"hodei.test/runs-for": "1s"})
    cluster.make_pods(2, prefix="ring", scheduler="killed", **fields)
    for name in ("ring-0", "ring-1"):
        cluster.until_phase(name, "Succeeded")
    scheduler.kill()
    scheduler.start()
    cluster.make_pod("ring-2", scheduler="killed", **fields)
    cluster.until_bound("ring-2")


@pytest.mark.parametrize("convention", [by_kubernetes, by_plugins, by_volcano, by_annotation])
def test_a_replacement_of_a_lost_member_is_placed_before_pods_of_equal_priority(
    convention: Convention, cluster: Cluster, scheduler: PodScheduler
):
    cluster.make_nodes(2, cpu="1")
    fields = convention(cluster, 2)
    cluster.make_pods(2, cpu="1", prefix="ring", **fields)
    cluster.until_bound("ring-0", "ring-1")
    cluster.make_pod("early", cpu="1")
    cluster.until_condition("early", "PodScheduled", "False", "Unschedulable")
    cluster.make_pod("ring-2", cpu="1", **fields)
    cluster.until_condition("ring-2", "PodScheduled", "False", "Unschedulable")
    cluster.delete_pod("ring-0", grace=0)
    cluster.until_bound("ring-2")
    assert cluster.bound_to("early") == ""


@pytest.mark.parametrize("convention", [by_kubernetes, by_plugins, by_volcano, by_annotation])
@pytest.mark.usefixtures("priorities")
def test_a_gang_is_preempted_as_a_whole(convention: Convention, cluster: Cluster, scheduler: PodScheduler):
    cluster.make_nodes(2, cpu="1")
    cluster.make_pods(2, cpu="1", prefix="ring", **convention(cluster, 2))
    cluster.until_bound("ring-0", "ring-1")
    cluster.make_pod("high", cpu="1", priorityClassName="five")
    cluster.until_bound("high")
    cluster.wait(lambda: set(cluster.holding()) == {"high"}, "all members have ended")


@pytest.mark.parametrize("convention", [by_kubernetes, by_plugins, by_volcano, by_annotation])
@pytest.mark.usefixtures("priorities")
def test_preemption_leaves_a_gang_its_minimum_if_that_is_enough(
    convention: Convention, cluster: Cluster, scheduler: PodScheduler
):
    cluster.make_nodes(3, cpu="1")
    cluster.make_pods(3, cpu="1", prefix="ring", **convention(cluster, 2))
    cluster.until_bound("ring-0", "ring-1", "ring-2")
    cluster.make_pod("high", cpu="1", priorityClassName="five")
    cluster.until_bound("high")
    assert len([name for name in cluster.holding() if name.startswith("ring")]) == 2


def test_a_gang_that_times_out_releases_its_capacity_and_reports_it(
    cluster: Cluster, scheduler: PodScheduler, priorities: None
):
    cluster.make_nodes(1, cpu="2")
    slow = {"annotations": {"hodei.test/stops-after": "60s"}, "terminationGracePeriodSeconds": 90}
    cluster.make_pod("low", cpu="2", scheduler="other", **slow)
    cluster.bind("low", "node-0")
    cluster.until_phase("low", "Running")
    fields = by_plugins(cluster, 2, scheduleTimeoutSeconds=2)
    cluster.make_pods(2, cpu="1", prefix="ring", priorityClassName="five", **fields)

    def timed_out() -> bool:
        found = [str(one.get("message")) for one in cluster.events_of("ring-0", "FailedScheduling")]
        return any("rejected due to timeout after waiting 2s" in one for one in found)

    cluster.wait(timed_out, "the timeout is reported")
    cluster.delete_pod("low", grace=0)
    cluster.until_bound("ring-0", "ring-1")


def test_an_incomplete_gang_that_times_out_is_reported(cluster: Cluster, scheduler: PodScheduler):
    cluster.make_nodes(1)
    fields = {"annotations": {"pod-group": "ring", "pod-group-size": "2", "pod-group-timeout": "1s"}}
    cluster.make_pod("ring-0", **fields)

    def timed_out() -> bool:
        return "rejected due to timeout after waiting 1s" in cluster.condition("ring-0").get("message", "")

    cluster.wait(timed_out, "the timeout is reported")
    cluster.make_pod("ring-1", **fields)
    cluster.until_bound("ring-0", "ring-1")
