"""Groups with only a name: the size comes from the workload that creates the pods, where that is certain."""

from __future__ import annotations

from typing import Any

import pytest

from hodei.kube.api.objects import Workload, from_builtins
from hodei.kube.scheduler.run import Options
from unit.kube.fake_cluster import FakeCluster

API = {"Job": "batch/v1", "StatefulSet": "apps/v1", "ReplicaSet": "apps/v1"}


def owner(kind: str, name: str, api: str = "") -> list[dict[str, Any]]:
    reference = {
        "apiVersion": api or API.get(kind, "example.com/v1"),
        "kind": kind,
        "name": name,
        "uid": f"uid-{kind}-{name}",
    }
    return [{**reference, "controller": True}]


def workload(
    kind: str, name: str, owners: list[dict[str, Any]] | None = None, annotations: Any = None, **spec: Any
) -> Workload:
    meta = {"name": name, "namespace": "ns", "uid": f"uid-{kind}-{name}"}
    meta |= {"ownerReferences": owners or [], "annotations": annotations or {}}
    return from_builtins({"metadata": meta, "spec": spec}, Workload)


class GroupScheduler(FakeCluster):
    """A cluster with capacity for three pods."""

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self.node("a", cpu="3")

    def workload(self, kind: str, name: str, *owner_and_annotations: Any, **spec: Any) -> None:
        cache = self.parts.cache
        indexer = cache.jobs if kind == "Job" else cache.workloads[kind]
        indexer.changed("ADDED", workload(kind, name, *owner_and_annotations, **spec))

    def member(self, name: str, owners: list[dict[str, Any]] | None, *, label: bool = False, **fields: Any) -> None:
        group = {"labels" if label else "annotations": {"pod-group": "ring"}}
        self.pod(name, **({"owners": owners} if owners else {}), **group, **fields)

    def placed_pods(self) -> list[str]:
        return sorted(uid.removeprefix("uid-") for uid in self.pods if self.node_of(uid.removeprefix("uid-")))

    def waiting_reason(self, name: str) -> tuple[str, str]:
        (reason,) = self.parts.pods.entries[f"uid-{name}"].reasons
        return reason.code, reason.text


@pytest.mark.parametrize(
    ("kind", "owner_and_annotations", "spec"),
    [
        ("Job", (), {"parallelism": 3}),
        ("Job", (), {"parallelism": 5, "completions": 3}),
        ("Job", (owner("CronJob", "nightly", "batch/v1"),), {"parallelism": 3, "completions": 9}),
        ("StatefulSet", (), {"replicas": 3, "podManagementPolicy": "Parallel"}),
        ("ReplicaSet", (), {"replicas": 3}),
        (
            "ReplicaSet",
            (owner("Deployment", "web", "apps/v1"), {"deployment.kubernetes.io/desired-replicas": "3"}),
            {"replicas": 1},
        ),
    ],
    ids=["job", "job with few completions", "cron job", "stateful set", "replica set", "deployment"],
)
@pytest.mark.parametrize("first", ["owner", "pods"])
@pytest.mark.parametrize("label", [False, True], ids=["annotation", "label"])
def test_a_group_has_the_size_of_its_owner(kind, owner_and_annotations, spec, first, label):
    scheduler = GroupScheduler()
    if first == "owner":
        scheduler.workload(kind, "x", *owner_and_annotations, **spec)
    for index in range(2):
        scheduler.member(f"p{index}", owner(kind, "x"), label=label)
    scheduler.step()
    assert scheduler.placed_pods() == []
    if first == "pods":
        assert scheduler.waiting_reason("p0")[0] == "POD_GROUP_MISSING"
        scheduler.workload(kind, "x", *owner_and_annotations, **spec)
        scheduler.step()
    assert scheduler.waiting_reason("p0")[0] == "GANG_INCOMPLETE"
    scheduler.member("p2", owner(kind, "x"), label=label)
    scheduler.step()
    assert scheduler.placed_pods() == ["p0", "p1", "p2"]


def test_a_group_waits_if_only_a_part_of_it_fits():
    scheduler = GroupScheduler()
    scheduler.workload("Job", "x", parallelism=4)
    for index in range(4):
        scheduler.member(f"p{index}", owner("Job", "x"))
    scheduler.step()
    assert scheduler.placed_pods() == []
    scheduler.node("b", cpu="1")
    scheduler.step()
    assert len(scheduler.placed_pods()) == 4


def test_a_group_grows_and_shrinks_with_its_owner():
    scheduler = GroupScheduler()
    scheduler.workload("ReplicaSet", "x", replicas=4)
    scheduler.member("p0", owner("ReplicaSet", "x"))
    scheduler.step()
    assert scheduler.placed_pods() == []
    scheduler.workload("ReplicaSet", "x", replicas=1)
    assert scheduler.parts.pods.has_work
    scheduler.step()
    assert scheduler.placed_pods() == ["p0"]


@pytest.mark.parametrize(
    ("kind", "owner_and_annotations", "spec", "owners", "why"),
    [
        ("", (), {}, None, "has no owner"),
        ("StatefulSet", (), {"replicas": 3}, owner("StatefulSet", "x"), "StatefulSet/x creates its pods one after the other"),
        ("", (), {}, owner("DaemonSet", "x", "apps/v1"), "DaemonSet/x (apps/v1) is of a kind that does not define a size"),
        ("", (), {}, owner("Job", "x", "batch.volcano.sh/v1alpha1"), "Job/x (batch.volcano.sh/v1alpha1) is of a kind"),
        ("", (), {}, owner("PyTorchJob", "x", "kubeflow.org/v1"), "PyTorchJob/x (kubeflow.org/v1) is of a kind"),
        ("Job", (owner("JobSet", "s"),), {"parallelism": 1}, owner("Job", "x"), "Job/x belongs to JobSet/s"),
        ("ReplicaSet", (owner("Rollout", "r"),), {"replicas": 1}, owner("ReplicaSet", "x"), "belongs to Rollout/r"),
    ],
)  # fmt: skip
def test_a_group_of_uncertain_size_is_refused_with_the_cause(kind, owner_and_annotations, spec, owners, why):
    scheduler = GroupScheduler()
    if kind:
        scheduler.workload(kind, "x", *owner_and_annotations, **spec)
    scheduler.member("p0", owners)
    scheduler.step()
    assert scheduler.placed_pods() == []
    code, text = scheduler.waiting_reason("p0")
    assert code == "POD_GROUP_SIZE"
    assert text.startswith('the size of pod group "ring" is not declared (annotation pod-group-size)')
    assert why in text


def test_a_group_of_several_owners_is_refused_and_a_declared_size_helps():
    scheduler = GroupScheduler()
    for name in ("master", "worker"):
        scheduler.workload("Job", name, parallelism=2)
    scheduler.member("p0", owner("Job", "master"))
    scheduler.member("p1", owner("Job", "worker"))
    scheduler.step()
    assert "several owners: Job/master, Job/worker" in scheduler.waiting_reason("p0")[1]
    scheduler.member("p2", owner("Job", "worker"))
    scheduler.pod("p3", owners=owner("Job", "master"), annotations={"pod-group": "ring", "pod-group-size": "3"})
    scheduler.node("b")
    scheduler.step()
    assert len(scheduler.placed_pods()) == 4


def test_a_later_owner_of_the_same_name_does_not_count():
    scheduler = GroupScheduler()
    old = owner("Job", "x")
    old[0]["uid"] = "uid-before"
    scheduler.workload("Job", "x", parallelism=1)
    scheduler.member("p0", old)
    scheduler.step()
    assert scheduler.waiting_reason("p0")[0] == "POD_GROUP_MISSING"


def test_pods_of_an_updated_deployment_replace_each_other_one_by_one():
    scheduler = GroupScheduler()
    desired = {"deployment.kubernetes.io/desired-replicas": "3"}
    deployment = owner("Deployment", "web", "apps/v1")
    scheduler.workload("ReplicaSet", "old", deployment, desired, replicas=3)
    for index in range(3):
        scheduler.member(f"p{index}", owner("ReplicaSet", "old"))
    scheduler.step()
    assert len(scheduler.placed_pods()) == 3
    scheduler.workload("ReplicaSet", "new", deployment, desired, replicas=1)
    scheduler.member("n0", owner("ReplicaSet", "new"))
    scheduler.node("b", cpu="1")
    scheduler.step()
    assert scheduler.node_of("n0") == "b"


def test_a_later_pod_of_a_job_starts_alone_when_others_have_succeeded():
    scheduler = GroupScheduler()
    scheduler.workload("Job", "x", parallelism=2, completions=3)
    for index in range(2):
        scheduler.member(f"p{index}", owner("Job", "x"))
    scheduler.step()
    assert scheduler.placed_pods() == ["p0", "p1"]
    scheduler.member("p2", owner("Job", "x"))
    scheduler.step()
    assert scheduler.placed_pods() == ["p0", "p1", "p2"]


def test_a_group_name_on_pods_of_other_schedulers_forms_no_gang():
    scheduler = GroupScheduler()
    scheduler.workload("ReplicaSet", "x", replicas=2)
    scheduler.member("f0", owner("ReplicaSet", "x"), label=True, schedulerName="others", nodeName="a")
    scheduler.step()
    assert scheduler.parts.pods.entries["uid-f0"].group is None


def test_owners_are_dropped_with_the_last_member():
    scheduler = GroupScheduler()
    scheduler.workload("Job", "x", parallelism=2)
    for index in range(2):
        scheduler.member(f"p{index}", owner("Job", "x"))
    scheduler.step()
    assert scheduler.parts.cache.sizing_workloads
    for index in range(2):
        scheduler.delete(f"p{index}")
    scheduler.step()
    assert not scheduler.parts.cache.sizing_workloads


def test_spare_pods_of_a_gang_are_ordered_by_the_preferred_annotation():
    scheduler = GroupScheduler(Options(priority_annotation="rank", priority_preferred=True))
    links: list[tuple[list[int], list[int]]] = []
    scheduler.parts.pods.link_members = lambda key, core, spare: links.append((list(core), list(spare)))
    for index, rank in enumerate(("5", "1", "9")):
        annotations = {"pod-group": "ring", "pod-group-size": "2", "rank": rank}
        scheduler.pod(f"p{index}", annotations=annotations, priority=10 - index)
    scheduler.step()
    assert scheduler.placed_pods() == ["p0", "p1", "p2"]
    assert links[-1][1] == [scheduler.job("p1")]
