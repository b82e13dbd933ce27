"""Pods as jobs of the controller: watch events, decisions and the results of bindings.

The controller is real; the test makes the events of the watches, so nothing here shows how an API server behaves.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from hodei.control.controller import Step
from hodei.kube.api.objects import Claim, Pod, StorageClass, Volume, from_builtins
from hodei.kube.scheduler.groups import Entry
from hodei.kube.scheduler.run import Options, build_scheduler
from hodei.model.effects import Start
from unit.kube.pod_factory import a_node, a_pod

RING = {"pod-group": "ring", "pod-group-size": "2"}


class PodScheduler:
    """A pod scheduler without a cluster; every step advances the clock by a second."""

    def __init__(self, **options: Any) -> None:
        self.parts = build_scheduler(Options(**options))
        self.pods = self.parts.pods
        self.now_ms = 1_800_000_000_000
        self.pods._now_ms = lambda: self.now_ms
        self._known: dict[str, Pod] = {}

    def node(self, name: str = "n1", **fields: Any) -> None:
        node = a_node(name, **fields)
        self.pods.node_changed(name, self.pods.nodes.get(name), node)

    def delete_node(self, name: str) -> None:
        self.pods.node_changed(name, self.pods.nodes.get(name), None)

    def pod(self, name: str, cpu: str = "1", **fields: Any) -> None:
        self.put(a_pod(name, requests={"cpu": cpu, "memory": "1Mi"}, **{"schedulerName": "hodei", **fields}))

    def put(self, pod: Pod) -> None:
        uid = pod.metadata.uid
        self.pods.pod_changed(uid, self._known.get(uid), pod)
        self._known[uid] = pod

    def delete(self, name: str) -> None:
        self.pods.pod_changed(f"uid-{name}", self._known.pop(f"uid-{name}"), None)

    def step(self) -> Step:
        self.now_ms += 1000
        return self.parts.controller.step(self.now_ms, self.pods.take_facts())

    def place(self) -> dict[str, str]:
        """Run a step; returns the node of each placed pod. Nothing is bound yet."""
        return {entry.pod.metadata.name: entry.node for entry in self.placed_entries()}

    def placed_entries(self) -> list[Entry]:
        step = self.step()
        return self.pods.place([act for act in step.acts if isinstance(act, Start)], self.now_ms)

    def bind(self, name: str) -> None:
        """The binding succeeds, and the watch shows it."""
        entry = self.entry(name)
        self.pods.mark_bound(entry.uid, entry.run)
        self.put(structs.replace(entry.pod, spec=structs.replace(entry.pod.spec, node_name=entry.node)))

    def entry(self, name: str) -> Entry:
        return self.pods.entries[f"uid-{name}"]

    def used(self, node: str = "n1") -> int:
        """Allocated milli-CPUs of a node."""
        self.step()
        table = self.parts.controller.cluster.table
        return int(table.node_usage[table.row[node]].used.get("cpu", 0))


@pytest.fixture
def scheduler() -> PodScheduler:
    scheduler = PodScheduler()
    scheduler.node()
    return scheduler


def test_a_placed_pod_counts_on_its_node(scheduler: PodScheduler):
    scheduler.pod("a")
    assert scheduler.place() == {"a": "n1"}
    assert scheduler.used() == 1000
    scheduler.bind("a")
    assert scheduler.used() == 1000
    assert scheduler.entry("a").stage == "bound"


@pytest.mark.parametrize(
    "fields",
    [{"schedulerName": "others"}, {"schedulingGates": [{"name": "x"}]}, {"deleted": True}],
    ids=["foreign", "gated", "terminating"],
)
def test_a_pod_is_not_scheduled_if_it_is(scheduler: PodScheduler, fields: dict[str, Any]):
    scheduler.pod("a", **fields)
    assert scheduler.place() == {}
    assert scheduler.used() == 0


def test_a_pod_counts_whichever_scheduler_bound_it_until_it_is_deleted(scheduler: PodScheduler):
    scheduler.pod("foreign", cpu="3", schedulerName="others", nodeName="n1")
    assert scheduler.used() == 3000
    scheduler.pod("foreign", cpu="3", schedulerName="others", nodeName="n1", deleted=True)
    assert scheduler.used() == 3000
    scheduler.delete("foreign")
    assert scheduler.used() == 0


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_an_ended_pod_holds_nothing(scheduler: PodScheduler, phase: str):
    scheduler.pod("a", nodeName="n1")
    assert scheduler.used() == 1000
    scheduler.pod("a", nodeName="n1", status={"phase": phase})
    assert scheduler.used() == 0


def test_a_pod_whose_gate_is_removed_is_placed(scheduler: PodScheduler):
    scheduler.pod("a", schedulingGates=[{"name": "x"}])
    assert scheduler.place() == {}
    scheduler.pod("a")
    assert scheduler.place() == {"a": "n1"}


def test_a_pod_deleted_before_its_binding_releases_its_capacity(scheduler: PodScheduler):
    scheduler.pod("a", cpu="4")
    scheduler.place()
    scheduler.delete("a")
    assert scheduler.used() == 0


def test_a_refused_binding_releases_the_capacity_and_queues_the_pod(scheduler: PodScheduler):
    scheduler.pod("a", cpu="4")
    scheduler.place()
    entry = scheduler.entry("a")
    scheduler.pods.mark_not_bound(entry.uid, entry.run, "no")
    assert scheduler.entry("a").stage == "queued"
    assert scheduler.used() == 0
    again = [scheduler.place() for _ in range(15)]
    assert {"a": "n1"} in again


def test_a_binding_of_a_deleted_pod_is_dropped(scheduler: PodScheduler):
    scheduler.pod("a")
    scheduler.place()
    entry = scheduler.entry("a")
    scheduler.pods.mark_not_bound(entry.uid, entry.run, "not found", removed=True)
    assert scheduler.used() == 0
    assert "uid-a" not in scheduler.pods.entries


def test_a_pod_bound_elsewhere_by_another_scheduler_counts_there(scheduler: PodScheduler):
    scheduler.node("n2")
    scheduler.pod("a", cpu="3")
    chosen = scheduler.place()["a"]
    other = {"n1": "n2", "n2": "n1"}[chosen]
    entry = scheduler.entry("a")
    scheduler.pod("a", cpu="3", nodeName=other)
    scheduler.pods.mark_not_bound(entry.uid, entry.run, "already assigned")
    assert (scheduler.used(chosen), scheduler.used(other)) == (0, 3000)


def test_pods_of_a_node_that_is_deleted_and_returns_count_again(scheduler: PodScheduler):
    scheduler.pod("a", cpu="3", nodeName="n1")
    scheduler.step()
    scheduler.delete_node("n1")
    scheduler.step()
    scheduler.node("n1")
    assert scheduler.used() == 3000
    scheduler.delete("a")
    assert scheduler.used() == 0


def test_a_pod_on_an_unknown_node_counts_when_the_node_joins(scheduler: PodScheduler):
    scheduler.pod("a", cpu="3", nodeName="late")
    scheduler.step()
    scheduler.node("late")
    assert scheduler.used("late") == 3000


def test_a_binding_confirmed_after_its_node_was_deleted_counts_when_the_node_returns(scheduler: PodScheduler):
    scheduler.pod("a", cpu="3")
    scheduler.place()
    entry = scheduler.entry("a")
    scheduler.delete_node("n1")
    scheduler.step()
    scheduler.pods.mark_bound(entry.uid, entry.run)
    scheduler.pod("a", cpu="3", nodeName="n1")
    scheduler.step()
    scheduler.node("n1")
    assert scheduler.used() == 3000


def test_a_binding_that_failed_with_its_node_is_tried_elsewhere(scheduler: PodScheduler):
    scheduler.pod("a", cpu="3")
    scheduler.place()
    entry = scheduler.entry("a")
    scheduler.delete_node("n1")
    scheduler.step()
    scheduler.pods.mark_not_bound(entry.uid, entry.run, "node n1 not found")
    scheduler.node("n2")
    assert scheduler.place() == {"a": "n2"}


def test_capacity_taken_by_another_scheduler_is_noticed_before_the_binding(scheduler: PodScheduler):
    scheduler.pod("a", cpu="3")
    scheduler.place()
    assert scheduler.pods.lacking_resource(scheduler.entry("a")) == ""
    scheduler.pod("small", cpu="1", schedulerName="others", nodeName="n1")
    assert scheduler.pods.lacking_resource(scheduler.entry("a")) == ""
    scheduler.pod("large", cpu="2", schedulerName="others", nodeName="n1")
    assert scheduler.pods.lacking_resource(scheduler.entry("a")) == "cpu"


def test_a_gang_waits_until_complete_and_is_then_split_into_jobs(scheduler: PodScheduler):
    scheduler.pod("a", annotations=RING)
    assert scheduler.place() == {}
    assert [reason.code for reason in scheduler.entry("a").reasons] == ["GANG_INCOMPLETE"]
    scheduler.pod("b", annotations=RING)
    assert scheduler.place() == {"a": "n1", "b": "n1"}
    assert scheduler.used() == 2000
    scheduler.delete("a")
    assert scheduler.used() == 1000


def test_after_a_restart_the_pods_that_were_bound_count_towards_the_gang(scheduler: PodScheduler):
    scheduler.pod("a", annotations=RING, nodeName="n1")
    scheduler.pod("b", annotations=RING)
    assert scheduler.place() == {"b": "n1"}
    assert scheduler.used() == 2000


def test_a_member_whose_binding_was_refused_is_tried_again(scheduler: PodScheduler):
    scheduler.pod("a", annotations=RING)
    scheduler.pod("b", annotations=RING)
    scheduler.place()
    scheduler.bind("a")
    entry = scheduler.entry("b")
    scheduler.pods.mark_not_bound(entry.uid, entry.run, "no")
    assert scheduler.used() == 1000
    assert {"b": "n1"} in [scheduler.place() for _ in range(15)]
    assert scheduler.used() == 2000


def test_a_gang_that_does_not_fit_takes_no_capacity(scheduler: PodScheduler):
    for name in ("a", "b"):
        scheduler.pod(name, cpu="3", annotations=RING)
    assert scheduler.place() == {}
    assert scheduler.used() == 0
    scheduler.node("n2")
    assert set(scheduler.place()) == {"a", "b"}


def test_groups_of_one_name_in_two_namespaces_are_separate(scheduler: PodScheduler):
    scheduler.pod("a", annotations=RING)
    scheduler.pod("b", annotations=RING, namespace="elsewhere")
    assert scheduler.place() == {}


def test_a_pod_with_claims_is_translated_again_when_storage_changes(scheduler: PodScheduler):
    cache = scheduler.parts.cache
    scheduler.pod("a", volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}])
    assert scheduler.place() == {}
    assert [reason.code for reason in scheduler.entry("a").reasons] == ["VOLUME_MISSING"]
    storage_class = {
        "metadata": {"name": "late-binding"},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    claim = {
        "metadata": {"name": "data", "namespace": "ns"},
        "spec": {"storageClassName": "late-binding", "accessModes": ["ReadWriteOnce"]},
    }
    cache.classes.changed("ADDED", from_builtins(storage_class, StorageClass))
    cache.claims.changed("ADDED", from_builtins(claim, Claim))
    assert scheduler.place() == {}
    assert scheduler.entry("a").stage == "queued"  # it was tried and found no volume
    volume = {
        "metadata": {"name": "pv"},
        "spec": {"storageClassName": "late-binding", "accessModes": ["ReadWriteOnce"]},
    }
    cache.volumes.changed("ADDED", from_builtins(volume, Volume))
    assert scheduler.place() == {"a": "n1"}


def pending_message(scheduler: PodScheduler, name: str) -> str:
    """The message that a pending pod would get."""
    entry = scheduler.entry(name)
    if entry.stage == "inactive":
        return scheduler.parts.explainer.not_tried(entry.reasons).message
    queue = next(iter(scheduler.parts.controller.queues.values()))
    gang = queue.gangs[entry.id]
    refusal = queue.refusal_of(gang)
    assert refusal is not None
    return scheduler.parts.explainer.refused(gang, refusal, scheduler.now_ms).message


def test_an_unschedulable_pod_has_the_message_of_kube_scheduler(scheduler: PodScheduler):
    scheduler.pod("a", cpu="8")
    scheduler.place()
    assert pending_message(scheduler, "a") == (
        "0/1 nodes are available: 1 Insufficient cpu."
        " preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling."
    )


def test_the_message_of_a_gang_has_the_number_of_its_pods_that_fit(scheduler: PodScheduler):
    for name in ("a", "b"):
        scheduler.pod(name, cpu="3", annotations=RING)
    scheduler.place()
    assert pending_message(scheduler, "a").startswith(
        "1 of 2 pods of the group fit; for the next one 0/1 nodes are available:"
    )


def test_a_pod_that_waits_for_its_group_is_not_unschedulable(scheduler: PodScheduler):
    """An autoscaler would add nodes for `Unschedulable`."""
    scheduler.pod("a", annotations=RING)
    scheduler.place()
    assert scheduler.parts.explainer.not_tried(scheduler.entry("a").reasons).reason == "WaitingForPodGroup"


def test_a_missing_claim_is_reported_before_any_node(scheduler: PodScheduler):
    scheduler.pod("a", volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}])
    scheduler.place()
    assert pending_message(scheduler, "a").startswith(
        '0/1 nodes are available: persistentvolumeclaim "data" not found.'
    )
