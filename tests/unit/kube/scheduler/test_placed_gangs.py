"""Gangs after they were placed: ended members, replacements of lost ones, and preemption."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from hodei.kube.api.objects import MemberGroup, Meta, PodGroup, PodStatus, from_builtins
from hodei.kube.scheduler.gangs import Membership
from hodei.model.effects import SaveEvent, Start
from hodei.model.facts import GangSplit
from unit.kube.fake_cluster import FakeCluster
from unit.kube.pod_factory import a_pod

OWNER = {"apiVersion": "batch/v1", "kind": "Job", "name": "ring", "uid": "job-1", "controller": True}


def ring(size: int = 3, **more: str) -> dict[str, Any]:
    return {"annotations": {"pod-group": "ring", "pod-group-size": str(size), **more}, "owners": [OWNER]}


def end_member(cluster: FakeCluster, name: str, phase: str = "Succeeded") -> None:
    """The pod leaves the watch of active pods and appears in that of ended ones."""
    ended = structs.replace(cluster.pods[f"uid-{name}"], status=PodStatus(phase))
    cluster.delete(name)
    cluster.parts.pods.ended_members.changed("ADDED", ended)


def a_cluster(nodes: int = 3, cpu: str = "1") -> FakeCluster:
    cluster = FakeCluster()
    for number in range(nodes):
        cluster.node(f"n{number}", cpu=cpu)
    return cluster


def place_ring(cluster: FakeCluster, count: int = 3, size: int = 3, **fields: Any) -> list[str]:
    names = [f"ring-{number}" for number in range(count)]
    for name in names:
        cluster.pod(name, **{**ring(size), **fields})
    cluster.step()
    assert all(cluster.node_of(name) for name in names)
    cluster.now_ms += 60_000
    return names


def test_a_placed_gang_is_split_into_jobs_without_a_cancellation_or_a_stop() -> None:
    cluster = a_cluster()
    for number in range(3):
        cluster.pod(f"ring-{number}", **ring())
    controller, pods = cluster.parts.controller, cluster.parts.pods
    placed = controller.step(cluster.now_ms, pods.take_facts())
    pods.place([act for act in placed.acts if isinstance(act, Start)], cluster.now_ms)
    facts = pods.take_facts()
    assert [type(fact) for fact in facts] == [GangSplit]
    split = controller.step(cluster.now_ms, facts)
    events = {save.event.kind for save in split.saves if isinstance(save, SaveEvent)}
    assert events == {"job.ended"}
    assert split.acts == []
    assert sorted(controller.cluster.jobs) == sorted(cluster.job(f"ring-{number}") for number in range(3))


def test_the_last_pod_of_a_job_starts_when_all_before_it_have_succeeded() -> None:
    cluster = a_cluster()
    for name in place_ring(cluster):
        end_member(cluster, name)
    cluster.pod("ring-3", **ring())
    cluster.step()
    assert cluster.node_of("ring-3")


def test_members_that_failed_do_not_count() -> None:
    cluster = a_cluster()
    for name in place_ring(cluster):
        end_member(cluster, name, "Failed")
    cluster.pod("ring-3", **ring())
    cluster.step()
    assert not cluster.node_of("ring-3")


def test_members_of_an_earlier_gang_of_the_same_name_do_not_count() -> None:
    cluster = a_cluster()
    for name in place_ring(cluster):
        end_member(cluster, name)
    cluster.pod("again-0", **{**ring(), "owners": [{**OWNER, "uid": "job-2"}]})
    cluster.step()
    assert not cluster.node_of("again-0")


@pytest.mark.parametrize(("group_created", "starts"), [("2026-01-01T00:00:00Z", True), ("2026-03-01T00:00:00Z", False)])
def test_pods_without_an_owner_count_if_the_group_is_older(group_created: str, starts: bool) -> None:
    cluster = a_cluster()
    group = MemberGroup(
        Meta("ring", "ns", creation_timestamp=group_created),
        from_builtins({"spec": {"minMember": 2}}, MemberGroup).spec,
    )
    cluster.parts.cache.plugin_groups.changed("ADDED", group)
    group_label = {"labels": {"scheduling.x-k8s.io/pod-group": "ring"}}
    ended = a_pod("ring-0", status={"phase": "Succeeded"}, **group_label)
    ended = structs.replace(ended, metadata=structs.replace(ended.metadata, creation_timestamp="2026-02-01T00:00:00Z"))
    cluster.parts.pods.ended_members.changed("ADDED", ended)
    cluster.pod("ring-1", **group_label)
    cluster.step()
    assert bool(cluster.node_of("ring-1")) == starts


def test_a_deleted_ended_member_does_not_count_any_more() -> None:
    cluster = a_cluster()
    place_ring(cluster)
    ended = structs.replace(cluster.pods["uid-ring-0"], status=PodStatus("Succeeded"))
    for name in ("ring-0", "ring-1", "ring-2"):
        end_member(cluster, name)
    ended_members = cluster.parts.pods.ended_members
    ended_members.changed("DELETED", ended)
    assert len(ended_members.of(("annotation", "ns", "ring"))) == 2
    ended_members.listed([])
    assert ended_members.of(("annotation", "ns", "ring")) == []


def test_a_replacement_of_a_lost_member_comes_before_all_others_of_its_priority() -> None:
    cluster = a_cluster()
    place_ring(cluster)
    cluster.pod("early")
    cluster.step()
    cluster.delete("ring-1")
    cluster.pod("ring-new", **ring())
    cluster.step()
    assert cluster.node_of("ring-new")
    assert not cluster.node_of("early")


def test_a_member_beyond_the_minimum_has_no_precedence() -> None:
    cluster = a_cluster(4)
    place_ring(cluster)
    cluster.pod("last")
    cluster.step()
    cluster.pod("early")
    cluster.step()
    cluster.pod("ring-more", **ring())
    cluster.step()
    cluster.delete("last")
    cluster.step()
    assert cluster.node_of("early")
    assert not cluster.node_of("ring-more")


def test_a_higher_pod_still_comes_before_a_replacement() -> None:
    cluster = a_cluster()
    place_ring(cluster, priority=5)
    cluster.pod("high", priority=6, preemptionPolicy="Never")
    cluster.step()
    cluster.delete("ring-1")
    cluster.pod("ring-new", priority=5, **ring())
    cluster.step()
    assert cluster.node_of("high")
    assert not cluster.node_of("ring-new")


def stopping_pods(cluster: FakeCluster) -> set[str]:
    """The pods that are being stopped."""
    state = cluster.parts.controller.cluster
    return {
        entry.pod.metadata.name
        for entry in cluster.parts.pods.entries.values()
        if entry.assigned and any(run.stop_reason for run in state.live_runs(entry.id))
    }


def test_a_gang_is_preempted_as_a_whole() -> None:
    cluster = a_cluster()
    place_ring(cluster)
    cluster.pod("high", priority=9)
    cluster.step()
    assert stopping_pods(cluster) == {"ring-0", "ring-1", "ring-2"}


def test_a_single_pod_is_preempted_rather_than_a_gang() -> None:
    cluster = a_cluster(4)
    place_ring(cluster)
    cluster.pod("alone")
    cluster.step()
    cluster.now_ms += 60_000
    cluster.pod("high", priority=9)
    cluster.step()
    assert stopping_pods(cluster) == {"alone"}


def test_a_spare_member_is_preempted_alone() -> None:
    cluster = a_cluster(4)
    place_ring(cluster, count=4)
    cluster.pod("high", priority=9)
    cluster.step()
    assert len(stopping_pods(cluster)) == 1


def test_spare_members_are_preempted_before_the_whole_gang() -> None:
    cluster = a_cluster(5)
    place_ring(cluster, count=5)
    for number in range(3):
        cluster.pod(f"high-{number}", priority=9)
    cluster.step()
    assert stopping_pods(cluster) == {f"ring-{number}" for number in range(5)}


def test_a_gang_with_a_member_of_higher_priority_is_not_preempted() -> None:
    cluster = a_cluster(2)
    fields = ring(2)
    cluster.pod("ring-0", priority=1, **fields)
    cluster.pod("ring-1", priority=9, **fields)
    cluster.step()
    cluster.now_ms += 60_000
    cluster.pod("middle", priority=5)
    cluster.step()
    assert stopping_pods(cluster) == set()


def test_finished_members_count_towards_the_minimum() -> None:
    cluster = a_cluster(4)
    place_ring(cluster, count=4)
    end_member(cluster, "ring-0")
    cluster.pod("filler", priority=9)
    cluster.step()
    cluster.pod("high", priority=9)
    cluster.step()
    assert len(stopping_pods(cluster)) == 1


def test_an_all_or_nothing_group_is_preempted_with_its_spare_members() -> None:
    cluster = a_cluster(3)
    spec = {"schedulingPolicy": {"gang": {"minCount": 2}}, "disruptionMode": "PodGroup"}
    group = from_builtins({"metadata": {"name": "ring", "namespace": "ns"}, "spec": spec}, PodGroup)
    cluster.parts.cache.pod_groups.changed("ADDED", group)
    for number in range(3):
        cluster.pod(f"ring-{number}", schedulingGroup={"podGroupName": "ring"})
    cluster.step()
    cluster.now_ms += 60_000
    cluster.pod("high", priority=9)
    cluster.step()
    assert stopping_pods(cluster) == {"ring-0", "ring-1", "ring-2"}


def test_each_task_of_a_gang_keeps_its_own_minimum() -> None:
    cluster = a_cluster(3)
    group = from_builtins(
        {"metadata": {"name": "ring", "namespace": "ns"}, "spec": {"minMember": 2, "minTaskMember": {"leader": 1}}},
        MemberGroup,
    )
    cluster.parts.cache.volcano_groups.changed("ADDED", group)
    for name, task in (("w-0", "worker"), ("w-1", "worker"), ("leader", "leader")):
        cluster.pod(name, annotations={"scheduling.k8s.io/group-name": "ring", "volcano.sh/task-spec": task})
    cluster.step()
    cluster.now_ms += 60_000
    cluster.pod("high", priority=9)
    cluster.step()
    assert len(stopping_pods(cluster)) == 1
    assert stopping_pods(cluster) < {"w-0", "w-1"}


def test_members_unlinked_from_their_gang_are_preempted_alone() -> None:
    cluster = a_cluster()
    place_ring(cluster)
    entry = cluster.parts.pods.entries["uid-ring-0"]
    assert isinstance(entry.group, Membership)
    cluster.parts.pods.link_members(entry.group.key, [], [])
    cluster.pod("high", priority=9)
    cluster.step()
    assert len(stopping_pods(cluster)) == 1


def codes(cluster: FakeCluster, name: str) -> list[str]:
    return [reason.code for reason in cluster.parts.pods.entries[f"uid-{name}"].reasons]


def test_a_gang_that_times_out_backs_off_and_returns() -> None:
    cluster = a_cluster(2)
    cluster.pod("low-0", nodeName="n0")
    cluster.pod("low-1", nodeName="n1")
    cluster.step()
    cluster.now_ms += 60_000
    fields = ring(2, **{"pod-group-timeout": "10s"})
    for number in range(2):
        cluster.pod(f"ring-{number}", priority=5, **fields)
    cluster.step()
    job = cluster.job("ring-0")
    assert job in cluster.parts.controller.preemption.holds
    cluster.now_ms += 10_000
    assert cluster.parts.pods.has_work
    cluster.step()
    assert not cluster.parts.controller.preemption.holds
    assert codes(cluster, "ring-0") == ["GANG_TIMEOUT"]
    assert "after waiting 10s" in cluster.parts.pods.entries["uid-ring-0"].reasons[0].text
    assert cluster.parts.pods.timeouts.next_ms() == cluster.now_ms + 1000
    cluster.now_ms += 1000
    cluster.step()
    assert cluster.job("ring-0") in cluster.parts.controller.preemption.holds


def test_an_incomplete_gang_that_times_out_leaves_its_capacity_to_others() -> None:
    cluster = a_cluster(2)
    group = from_builtins(
        {"metadata": {"name": "ring", "namespace": "ns"}, "spec": {"minMember": 2, "scheduleTimeoutSeconds": 5}},
        MemberGroup,
    )
    cluster.parts.cache.plugin_groups.changed("ADDED", group)
    group_label = {"labels": {"scheduling.x-k8s.io/pod-group": "ring"}}
    cluster.pod("ring-0", **group_label)
    cluster.step()
    cluster.now_ms += 5000
    cluster.step()
    reason = cluster.parts.pods.entries["uid-ring-0"].reasons[0]
    assert reason.code == "GANG_INCOMPLETE"
    assert reason.text.endswith('pod group "ring" rejected due to timeout after waiting 5s')
    cluster.pod("ring-1", **group_label)
    cluster.now_ms += 1000
    cluster.step()
    assert cluster.node_of("ring-0")
    assert cluster.node_of("ring-1")
    assert cluster.parts.pods.timeouts.next_ms() is None


def test_a_gang_without_a_declared_timeout_does_not_time_out() -> None:
    cluster = a_cluster(1)
    for number in range(2):
        cluster.pod(f"ring-{number}", **ring(2))
    cluster.step()
    job = cluster.job("ring-0")
    cluster.now_ms += 3_600_000
    cluster.step()
    assert cluster.job("ring-0") == job
    assert cluster.parts.pods.timeouts.next_ms() is None


def test_placed_members_that_are_not_bound_in_time_release_their_capacity() -> None:
    cluster = a_cluster(2)
    fields = ring(2, **{"pod-group-timeout": "10s"})
    for number in range(2):
        cluster.pod(f"ring-{number}", **fields)
    pods, controller = cluster.parts.pods, cluster.parts.controller
    starts = [act for act in controller.step(cluster.now_ms, pods.take_facts()).acts if isinstance(act, Start)]
    first, second = pods.place(starts, cluster.now_ms)
    controller.step(cluster.now_ms, pods.take_facts())
    pods.mark_bound(first.uid, first.run)
    cluster.now_ms += 10_000
    controller.step(cluster.now_ms, pods.take_facts())
    assert (first.stage, second.stage) == ("bound", "queued")
