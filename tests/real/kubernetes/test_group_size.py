"""Gangs with only a name, and priorities by a preferred annotation, in a real cluster: the cluster's own controllers create the
pods, and the scheduler has the permissions of the shipped role.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from real.kubernetes.cluster import Cluster, pod
from real.kubernetes.plane import Plane
from real.kubernetes.pod_scheduler import PodScheduler, PodSchedulers, kube_command

pytestmark = pytest.mark.real
GROUP = {"pod-group": "ring"}


def workload(kind: str, name: str = "ring", cpu: str = "2", *, label: bool = False, **spec: Any) -> dict[str, Any]:
    """A workload whose pods are in the group `ring`, by annotation or by `label`."""
    labels = {"app": name, **(GROUP if label else {})}
    template = {"metadata": {"labels": labels, "annotations": {} if label else GROUP}, "spec": pod("", cpu)["spec"]}
    if kind == "Job":
        template["spec"]["restartPolicy"] = "Never"
        return {
            "apiVersion": "batch/v1",
            "kind": kind,
            "metadata": {"name": name},
            "spec": {**spec, "template": template},
        }
    spec |= {"selector": {"matchLabels": {"app": name}}, "template": template}
    if kind == "StatefulSet":
        spec["serviceName"] = name
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


WORKLOADS = [
    pytest.param(workload("Job", parallelism=3, completions=6), id="job"),
    pytest.param(workload("Job", parallelism=3, label=True), id="job by label"),
    pytest.param(workload("StatefulSet", replicas=3, podManagementPolicy="Parallel"), id="stateful set"),
    pytest.param(workload("ReplicaSet", replicas=3), id="replica set"),
    pytest.param(workload("Deployment", replicas=3), id="deployment"),
]


def members(cluster: Cluster) -> list[str]:
    return sorted(one["metadata"]["name"] for one in cluster.pods() if one["metadata"]["name"].startswith("ring"))


def until_created(cluster: Cluster, count: int) -> list[str]:
    return cluster.wait(lambda: found if len(found := members(cluster)) == count else None, f"{count} pods are created")


@pytest.mark.parametrize("made", WORKLOADS)
def test_a_gang_has_the_size_of_its_owner_and_is_bound_whole_or_not_at_all(
    made: dict[str, Any], cluster: Cluster, hodei: PodScheduler
):
    cluster.make_nodes(2)
    cluster.make_pod("filler", cpu="3")
    cluster.until_bound("filler")
    cluster.apply([made])
    names = until_created(cluster, 3)
    for name in names:
        cluster.until_condition(name, "PodScheduled", "False", "Unschedulable")
    assert set(cluster.bound()) == {"filler"}
    cluster.delete_pod("filler")
    cluster.until_bound(*names)


def test_a_stateful_set_that_creates_its_pods_in_turn_is_refused_by_name(
    cluster: Cluster, plane: Plane, hodei: PodScheduler
):
    cluster.make_nodes(2)
    cluster.apply([workload("StatefulSet", replicas=3)])
    (name,) = until_created(cluster, 1)
    condition = cluster.until_condition(name, "PodScheduled", "False")
    assert 'the size of pod group "ring" is not declared (annotation pod-group-size)' in condition["message"]
    assert "StatefulSet/ring creates its pods one after the other" in condition["message"]
    assert condition["message"] in kube_command(plane, "why", f"{cluster.namespace}/{name}")
    assert cluster.bound() == {}


def test_two_jobs_of_one_group_must_declare_its_size(cluster: Cluster, hodei: PodScheduler):
    cluster.make_nodes(1, cpu="8")
    cluster.make_pod("filler", cpu="8")  # so that the first does not start before the second is created
    cluster.until_bound("filler")
    cluster.apply([workload("Job", f"ring-{name}", parallelism=1) for name in "ab"])
    for name in until_created(cluster, 2):
        cluster.wait(
            lambda name=name: "several owners: Job/ring-a, Job/ring-b" in cluster.condition(name).get("message", ""),
            f"the condition of {name} names both owners",
        )


def test_a_gang_shrinks_with_its_job_and_plan_knows_its_size(
    cluster: Cluster, plane: Plane, hodei: PodScheduler, tmp_path: Path
):
    cluster.make_nodes(1, cpu="8")
    wanted = workload("Job", parallelism=5)
    wanted["metadata"]["namespace"] = cluster.namespace
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(wanted))
    planned = kube_command(plane, "plan", file)
    assert "0 of 5 pods would start now" in planned
    cluster.apply([wanted])
    name = until_created(cluster, 5)[0]
    cluster.until_condition(name, "PodScheduled", "False", "Unschedulable")
    cluster.patch(f"/apis/batch/v1/namespaces/{cluster.namespace}/jobs/ring", {"spec": {"parallelism": 3}})
    cluster.until_bound(*until_created(cluster, 3))


def test_a_restarted_scheduler_finds_the_size_of_a_pending_gang(cluster: Cluster, hodei_kube: PodSchedulers):
    cluster.make_nodes(2)
    wanted = workload("Job", parallelism=3)
    wanted["spec"]["template"]["spec"]["schedulerName"] = "second"
    cluster.make_pod("filler", cpu="3", scheduler="second")
    first = hodei_kube("second")
    cluster.until_bound("filler")
    cluster.apply([wanted])
    names = until_created(cluster, 3)
    cluster.until_condition(names[0], "PodScheduled", "False", "Unschedulable")
    first.kill()
    cluster.delete_pod("filler")
    hodei_kube("second")
    cluster.until_bound(*names)


def test_a_preferred_annotation_overrides_the_priority_class_and_an_invalid_one_is_refused(
    cluster: Cluster, hodei_kube: PodSchedulers
):
    hodei_kube("annotated", ["--priority-annotation=priority", "--prefer-priority-annotation"])
    cluster.apply([
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": f"{cluster.namespace}-high"},
         "value": 5000},
    ])  # fmt: skip
    cluster.make_nodes(1)
    fields = {"scheduler": "annotated", "cpu": "3", "priorityClassName": f"{cluster.namespace}-high"}
    cluster.make_pod("low", **fields, annotations={"priority": "1"})
    cluster.until_bound("low")
    cluster.make_pod("wrong", **fields, annotations={"priority": "much"})
    condition = cluster.until_condition("wrong", "PodScheduled", "False")
    assert "a priority must be a whole number, not 'much'" in condition["message"]
    cluster.make_pod("higher", **fields, annotations={"priority": "10"})  # same class, other annotation
    cluster.until_bound("higher")
    cluster.until_deleted("low")
    cluster.make_pod("below", **fields | {"priorityClassName": ""}, annotations={"priority": "9"})
    cluster.until_condition("below", "PodScheduled", "False", "Unschedulable")
    assert cluster.bound_to("higher")


def test_without_the_option_the_priority_class_applies(cluster: Cluster, hodei_kube: PodSchedulers):
    hodei_kube("annotated", ["--priority-annotation=priority"])
    cluster.apply([
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": f"{cluster.namespace}-high"},
         "value": 5000},
    ])  # fmt: skip
    cluster.make_nodes(1)
    fields = {"scheduler": "annotated", "cpu": "3", "priorityClassName": f"{cluster.namespace}-high"}
    cluster.make_pod("first", **fields, annotations={"priority": "1"})
    cluster.until_bound("first")
    cluster.make_pod("second", **fields, annotations={"priority": "10"})
    cluster.until_condition("second", "PodScheduled", "False", "Unschedulable")
    assert cluster.bound_to("first")
