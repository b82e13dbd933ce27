"""Pods of a cluster as jobs of the controller: what the watches tell, what is decided, and what becomes of bindings.

The controller is the real one; the cluster is played by hand, so nothing here shows how an API server behaves."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from hodei.control.controller import Step
from hodei.kube.api.objects import Claim, Pod, StorageClass, Volume, from_plain
from hodei.kube.scheduler.build import Options, build_scheduler
from hodei.kube.scheduler.groups import Entry
from hodei.model.effects import Start
from unit.kube.podding import a_node, a_pod

RING = {"pod-group": "ring", "pod-group-size": "2"}


class Played:
    """A pod scheduler without a cluster: time goes on by a second with every step."""

    def __init__(self, **options: Any) -> None:
        self.harness = build_scheduler(Options(**options))
        self.pods = self.harness.pods
        self.now_ms = 1_800_000_000_000
        self.pods._now_ms = lambda: self.now_ms
        self._known: dict[str, Pod] = {}

    def node(self, name: str = "n1", **fields: Any) -> None:
        node = a_node(name, **fields)
        self.pods.node_moved(name, self.pods.node(name), node)

    def lose(self, name: str) -> None:
        self.pods.node_moved(name, self.pods.node(name), None)

    def pod(self, name: str, cpu: str = "1", **fields: Any) -> None:
        self.put(a_pod(name, requests={"cpu": cpu, "memory": "1Mi"}, **{"schedulerName": "hodei", **fields}))

    def put(self, pod: Pod) -> None:
        uid = pod.metadata.uid
        self.pods.moved(uid, self._known.get(uid), pod)
        self._known[uid] = pod

    def delete(self, name: str) -> None:
        self.pods.moved(f"uid-{name}", self._known.pop(f"uid-{name}"), None)

    def step(self) -> Step:
        self.now_ms += 1000
        return self.harness.controller.step(self.now_ms, self.pods.take_facts())

    def place(self) -> dict[str, str]:
        """A step, and what it placed: the node of each pod by its name. Nothing is bound yet."""
        return {entry.pod.metadata.name: entry.node for entry in self.placed()}

    def placed(self) -> list[Entry]:
        step = self.step()
        return self.pods.placed([act for act in step.acts if isinstance(act, Start)], self.now_ms)

    def bind(self, name: str) -> None:
        """The API has heard the binding, and the watch tells it."""
        entry = self.entry(name)
        self.pods.bound(entry.uid, entry.run)
        self.put(structs.replace(entry.pod, spec=structs.replace(entry.pod.spec, node_name=entry.node)))

    def entry(self, name: str) -> Entry:
        return self.pods.entries[f"uid-{name}"]

    def used(self, node: str = "n1") -> int:
        """Milli-CPUs that are taken on a node, once all is learnt."""
        self.step()
        table = self.harness.controller.cluster.table
        return int(table.holds[table.row[node]].used.get("cpu", 0))


@pytest.fixture
def played() -> Played:
    made = Played()
    made.node()
    return made


# --------------------------------------------------------------------------------------------------- one pod


def test_a_pod_of_ours_is_placed_and_counts_from_then_on(played: Played):
    played.pod("a")
    assert played.place() == {"a": "n1"}
    assert played.used() == 1000
    played.bind("a")
    assert played.used() == 1000
    assert played.entry("a").stage == "bound"


@pytest.mark.parametrize(
    "fields",
    [{"schedulerName": "others"}, {"schedulingGates": [{"name": "x"}]}, {"deleted": True}],
    ids=["foreign", "gated", "leaving"],
)
def test_a_pod_is_left_alone_that_is(played: Played, fields: dict[str, Any]):
    played.pod("a", **fields)
    assert played.place() == {}
    assert played.used() == 0


def test_a_pod_counts_whoever_bound_it_until_it_is_gone(played: Played):
    played.pod("theirs", cpu="3", schedulerName="others", nodeName="n1")
    assert played.used() == 3000
    played.pod("theirs", cpu="3", schedulerName="others", nodeName="n1", deleted=True)
    assert played.used() == 3000
    played.delete("theirs")
    assert played.used() == 0


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_is_over_holds_nothing(played: Played, phase: str):
    played.pod("a", nodeName="n1")
    assert played.used() == 1000
    played.pod("a", nodeName="n1", status={"phase": phase})
    assert played.used() == 0


def test_a_pod_whose_gate_is_lifted_is_placed(played: Played):
    played.pod("a", schedulingGates=[{"name": "x"}])
    assert played.place() == {}
    played.pod("a")
    assert played.place() == {"a": "n1"}


def test_a_pod_that_is_deleted_before_it_is_bound_leaves_its_room(played: Played):
    played.pod("a", cpu="4")
    played.place()
    played.delete("a")
    assert played.used() == 0


def test_a_binding_that_is_refused_frees_the_room_and_the_pod_waits_again(played: Played):
    played.pod("a", cpu="4")
    played.place()
    entry = played.entry("a")
    played.pods.not_bound(entry.uid, entry.run, "no")
    assert played.entry("a").stage == "queued"
    assert played.used() == 0
    again = [played.place() for _ in range(15)]
    assert {"a": "n1"} in again


def test_a_binding_of_a_pod_that_is_gone_is_forgotten(played: Played):
    played.pod("a")
    played.place()
    entry = played.entry("a")
    played.pods.not_bound(entry.uid, entry.run, "not found", gone=True)
    assert played.used() == 0
    assert "uid-a" not in played.pods.entries


def test_a_pod_that_somebody_else_bound_elsewhere_counts_there(played: Played):
    played.node("n2")
    played.pod("a", cpu="3")
    mine = played.place()["a"]
    other = {"n1": "n2", "n2": "n1"}[mine]
    entry = played.entry("a")
    played.pod("a", cpu="3", nodeName=other)
    played.pods.not_bound(entry.uid, entry.run, "already assigned")
    assert (played.used(mine), played.used(other)) == (0, 3000)


# ---------------------------------------------------------------------------------------------------- nodes


def test_pods_of_a_node_that_goes_and_comes_back_count_again(played: Played):
    played.pod("a", cpu="3", nodeName="n1")
    played.step()
    played.lose("n1")
    played.step()
    played.node("n1")
    assert played.used() == 3000
    played.delete("a")
    assert played.used() == 0


def test_a_pod_on_a_node_that_is_not_known_counts_when_it_comes(played: Played):
    played.pod("a", cpu="3", nodeName="late")
    played.step()
    played.node("late")
    assert played.used("late") == 3000


def test_a_binding_that_was_heard_after_its_node_went_counts_when_the_node_comes_back(played: Played):
    played.pod("a", cpu="3")
    played.place()
    entry = played.entry("a")
    played.lose("n1")
    played.step()
    played.pods.bound(entry.uid, entry.run)
    played.pod("a", cpu="3", nodeName="n1")
    played.step()
    played.node("n1")
    assert played.used() == 3000


def test_a_binding_that_failed_because_its_node_went_is_tried_elsewhere(played: Played):
    played.pod("a", cpu="3")
    played.place()
    entry = played.entry("a")
    played.lose("n1")
    played.step()
    played.pods.not_bound(entry.uid, entry.run, "node n1 has gone")
    played.node("n2")
    assert played.place() == {"a": "n2"}


def test_room_that_another_took_since_the_decision_is_seen_before_the_binding(played: Played):
    played.pod("a", cpu="3")
    played.place()
    assert played.pods.crowded(played.entry("a")) == ""
    played.pod("small", cpu="1", schedulerName="others", nodeName="n1")
    assert played.pods.crowded(played.entry("a")) == ""
    played.pod("large", cpu="2", schedulerName="others", nodeName="n1")
    assert played.pods.crowded(played.entry("a")) == "cpu"


# ---------------------------------------------------------------------------------------------------- gangs


def test_a_gang_waits_until_it_is_whole_and_its_pods_are_jobs_of_their_own_then(played: Played):
    played.pod("a", annotations=RING)
    assert played.place() == {}
    assert [reason.code for reason in played.entry("a").reasons] == ["GANG_INCOMPLETE"]
    played.pod("b", annotations=RING)
    assert played.place() == {"a": "n1", "b": "n1"}
    assert played.used() == 2000
    played.delete("a")
    assert played.used() == 1000


def test_after_a_restart_the_pods_that_were_bound_count_towards_the_gang(played: Played):
    played.pod("a", annotations=RING, nodeName="n1")
    played.pod("b", annotations=RING)
    assert played.place() == {"b": "n1"}
    assert played.used() == 2000


def test_a_member_whose_binding_was_refused_is_tried_again(played: Played):
    played.pod("a", annotations=RING)
    played.pod("b", annotations=RING)
    played.place()
    played.bind("a")
    entry = played.entry("b")
    played.pods.not_bound(entry.uid, entry.run, "no")
    assert played.used() == 1000
    assert {"b": "n1"} in [played.place() for _ in range(15)]
    assert played.used() == 2000


def test_a_gang_with_too_little_room_takes_none(played: Played):
    for name in ("a", "b"):
        played.pod(name, cpu="3", annotations=RING)
    assert played.place() == {}
    assert played.used() == 0
    played.node("n2")
    assert set(played.place()) == {"a", "b"}


def test_two_groups_of_one_name_in_two_namespaces_are_two(played: Played):
    played.pod("a", annotations=RING)
    played.pod("b", annotations=RING, namespace="elsewhere")
    assert played.place() == {}


# -------------------------------------------------------------------------------------------------- storage


def test_a_pod_with_claims_is_read_again_when_storage_changes(played: Played):
    cache = played.harness.cache
    played.pod("a", volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}])
    assert played.place() == {}
    assert [reason.code for reason in played.entry("a").reasons] == ["VOLUME_MISSING"]
    waits = {
        "metadata": {"name": "later"},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    claim = {
        "metadata": {"name": "data", "namespace": "ns"},
        "spec": {"storageClassName": "later", "accessModes": ["ReadWriteOnce"]},
    }
    cache.classes.changed("ADDED", from_plain(waits, StorageClass))
    cache.claims.changed("ADDED", from_plain(claim, Claim))
    assert played.place() == {}
    assert played.entry("a").stage == "queued"  # it is tried now, and finds no volume
    volume = {"metadata": {"name": "pv"}, "spec": {"storageClassName": "later", "accessModes": ["ReadWriteOnce"]}}
    cache.volumes.changed("ADDED", from_plain(volume, Volume))
    assert played.place() == {"a": "n1"}


# ------------------------------------------------------------------------------------------ what pods are told


def told(played: Played, name: str) -> str:
    """What a pod that was tried, or was not even tried, would be told."""
    entry = played.entry(name)
    if entry.stage == "aside":
        return played.harness.explainer.aside(entry.reasons).message
    line = next(iter(played.harness.controller.queues.values()))
    gang = line.gangs[entry.id]
    refusal = line.refusal_of(gang)
    assert refusal is not None
    return played.harness.explainer.refused(gang, refusal, played.now_ms).message


def test_a_pod_that_finds_no_room_is_told_in_upstream_s_words(played: Played):
    played.pod("a", cpu="8")
    played.place()
    assert told(played, "a") == (
        "0/1 nodes are available: 1 Insufficient cpu."
        " preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling."
    )


def test_a_gang_is_told_how_far_it_got(played: Played):
    for name in ("a", "b"):
        played.pod(name, cpu="3", annotations=RING)
    played.place()
    assert told(played, "a").startswith("1 of 2 pods of the group fit; for the next one 0/1 nodes are available:")


def test_who_waits_for_its_group_does_not_ask_for_nodes(played: Played):
    """An autoscaler would buy some for `Unschedulable`."""
    played.pod("a", annotations=RING)
    played.place()
    assert played.harness.explainer.aside(played.entry("a").reasons).reason == "WaitingForPodGroup"


def test_a_claim_that_is_missing_is_told_before_any_node(played: Played):
    played.pod("a", volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}])
    played.place()
    assert told(played, "a").startswith('0/1 nodes are available: persistentvolumeclaim "data" not found.')
