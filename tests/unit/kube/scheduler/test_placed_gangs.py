"""Gangs after they were placed: members that are over, lost ones and their replacements, and whose place may be taken."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from hodei.kube.api.objects import MemberGroup, Meta, PodGroup, PodStatus, from_plain
from hodei.kube.scheduler.gangs import Membership
from hodei.model.effects import Record, Start
from hodei.model.facts import GangSplit
from unit.kube.podding import a_pod
from unit.kube.town import Town

OWNER = {"apiVersion": "batch/v1", "kind": "Job", "name": "ring", "uid": "job-1", "controller": True}


def ring(size: int = 3, **more: str) -> dict[str, Any]:
    return {"annotations": {"pod-group": "ring", "pod-group-size": str(size), **more}, "owners": [OWNER]}


def over(town: Town, name: str, phase: str = "Succeeded") -> None:
    """As the two watches tell it: it leaves the one and comes into the other."""
    ended = structs.replace(town.pods[f"uid-{name}"], status=PodStatus(phase))
    town.gone(name)
    town.harness.pods.past.changed("ADDED", ended)


def a_town(nodes: int = 3, cpu: str = "1") -> Town:
    town = Town()
    for number in range(nodes):
        town.node(f"n{number}", cpu=cpu)
    return town


def the_ring(town: Town, count: int = 3, size: int = 3, **fields: Any) -> list[str]:
    names = [f"ring-{number}" for number in range(count)]
    for name in names:
        town.pod(name, **{**ring(size), **fields})
    town.step()
    assert all(town.where(name) for name in names)
    town.now_ms += 60_000
    return names


def test_a_placed_gang_is_split_into_jobs_without_a_cancellation_or_a_stop() -> None:
    town = a_town()
    for number in range(3):
        town.pod(f"ring-{number}", **ring())
    controller, pods = town.harness.controller, town.harness.pods
    placed = controller.step(town.now_ms, pods.take_facts())
    pods.placed([act for act in placed.acts if isinstance(act, Start)], town.now_ms)
    facts = pods.take_facts()
    assert [type(fact) for fact in facts] == [GangSplit]
    split = controller.step(town.now_ms, facts)
    events = {save.event.kind for save in split.saves if isinstance(save, Record)}
    assert events == {"job.ended"}
    assert split.acts == []
    assert sorted(controller.cluster.jobs) == sorted(town.job(f"ring-{number}") for number in range(3))


# ------------------------------------------------------------------------------------------- members that are over


def test_the_last_pod_of_a_job_starts_when_all_before_it_have_succeeded() -> None:
    town = a_town()
    for name in the_ring(town):
        over(town, name)
    town.pod("ring-3", **ring())
    town.step()
    assert town.where("ring-3")


def test_members_that_failed_do_not_count() -> None:
    town = a_town()
    for name in the_ring(town):
        over(town, name, "Failed")
    town.pod("ring-3", **ring())
    town.step()
    assert not town.where("ring-3")


def test_what_ran_under_the_same_name_before_does_not_count() -> None:
    town = a_town()
    for name in the_ring(town):
        over(town, name)
    town.pod("again-0", **{**ring(), "owners": [{**OWNER, "uid": "job-2"}]})
    town.step()
    assert not town.where("again-0")


@pytest.mark.parametrize(("made", "starts"), [("2026-01-01T00:00:00Z", True), ("2026-03-01T00:00:00Z", False)])
def test_pods_without_an_owner_count_if_the_group_is_older(made: str, starts: bool) -> None:
    town = a_town()
    group = MemberGroup(
        Meta("ring", "ns", creation_timestamp=made), from_plain({"spec": {"minMember": 2}}, MemberGroup).spec
    )
    town.harness.cache.plugin_groups.changed("ADDED", group)
    said = {"labels": {"scheduling.x-k8s.io/pod-group": "ring"}}
    ended = a_pod("ring-0", status={"phase": "Succeeded"}, **said)
    ended = structs.replace(ended, metadata=structs.replace(ended.metadata, creation_timestamp="2026-02-01T00:00:00Z"))
    town.harness.pods.past.changed("ADDED", ended)
    town.pod("ring-1", **said)
    town.step()
    assert bool(town.where("ring-1")) == starts


def test_a_member_that_the_cluster_has_forgotten_does_not_count_any_more() -> None:
    town = a_town()
    the_ring(town)
    ended = structs.replace(town.pods["uid-ring-0"], status=PodStatus("Succeeded"))
    for name in ("ring-0", "ring-1", "ring-2"):
        over(town, name)
    past = town.harness.pods.past
    past.changed("DELETED", ended)
    assert len(past.of(("annotation", "ns", "ring"))) == 2
    past.listed([])
    assert past.of(("annotation", "ns", "ring")) == []


# ------------------------------------------------------------------------------------------- replacements


def test_a_replacement_of_a_lost_member_comes_before_all_others_of_its_priority() -> None:
    town = a_town()
    the_ring(town)
    town.pod("early")
    town.step()
    town.gone("ring-1")
    town.pod("ring-new", **ring())
    town.step()
    assert town.where("ring-new")
    assert not town.where("early")


def test_a_pod_beyond_the_minimum_waits_for_its_turn() -> None:
    town = a_town(4)
    the_ring(town)
    town.pod("last")
    town.step()
    town.pod("early")
    town.step()
    town.pod("ring-more", **ring())
    town.step()
    town.gone("last")
    town.step()
    assert town.where("early")
    assert not town.where("ring-more")


def test_a_higher_pod_still_comes_before_a_replacement() -> None:
    town = a_town()
    the_ring(town, priority=5)
    town.pod("high", priority=6, preemptionPolicy="Never")
    town.step()
    town.gone("ring-1")
    town.pod("ring-new", priority=5, **ring())
    town.step()
    assert town.where("high")
    assert not town.where("ring-new")


# ------------------------------------------------------------------------------------------- whose place is taken


def stopped(town: Town) -> set[str]:
    """The pods that were told to go."""
    cluster = town.harness.controller.cluster
    return {
        entry.pod.metadata.name
        for entry in town.harness.pods.entries.values()
        if entry.holds and any(run.stop_reason for run in cluster.live_runs(entry.id))
    }


def test_a_gang_whose_member_must_go_goes_whole() -> None:
    town = a_town()
    the_ring(town)
    town.pod("high", priority=9)
    town.step()
    assert stopped(town) == {"ring-0", "ring-1", "ring-2"}


def test_one_that_is_alone_goes_rather_than_a_gang() -> None:
    town = a_town(4)
    the_ring(town)
    town.pod("alone")
    town.step()
    town.now_ms += 60_000
    town.pod("high", priority=9)
    town.step()
    assert stopped(town) == {"alone"}


def test_a_gang_with_more_than_it_needs_gives_up_one_that_it_can_do_without() -> None:
    town = a_town(4)
    the_ring(town, count=4)
    town.pod("high", priority=9)
    town.step()
    assert len(stopped(town)) == 1


def test_a_gang_gives_up_all_that_it_can_do_without_and_then_goes_whole() -> None:
    town = a_town(5)
    the_ring(town, count=5)
    for number in range(3):
        town.pod(f"high-{number}", priority=9)
    town.step()
    assert stopped(town) == {f"ring-{number}" for number in range(5)}


def test_nobody_takes_the_place_of_a_gang_with_a_member_that_is_too_high_for_him() -> None:
    town = a_town(2)
    said = ring(2)
    town.pod("ring-0", priority=1, **said)
    town.pod("ring-1", priority=9, **said)
    town.step()
    town.now_ms += 60_000
    town.pod("middle", priority=5)
    town.step()
    assert stopped(town) == set()


def test_finished_members_count_for_the_minimum_that_is_left() -> None:
    town = a_town(4)
    the_ring(town, count=4)
    over(town, "ring-0")
    town.pod("filler", priority=9)
    town.step()
    town.pod("high", priority=9)
    town.step()
    assert len(stopped(town)) == 1


def test_a_group_that_is_disrupted_together_goes_whole_also_beyond_its_minimum() -> None:
    town = a_town(3)
    spec = {"schedulingPolicy": {"gang": {"minCount": 2}}, "disruptionMode": "PodGroup"}
    group = from_plain({"metadata": {"name": "ring", "namespace": "ns"}, "spec": spec}, PodGroup)
    town.harness.cache.pod_groups.changed("ADDED", group)
    for number in range(3):
        town.pod(f"ring-{number}", schedulingGroup={"podGroupName": "ring"})
    town.step()
    town.now_ms += 60_000
    town.pod("high", priority=9)
    town.step()
    assert stopped(town) == {"ring-0", "ring-1", "ring-2"}


def test_parts_of_a_gang_keep_their_own_minimum() -> None:
    town = a_town(3)
    group = from_plain(
        {"metadata": {"name": "ring", "namespace": "ns"}, "spec": {"minMember": 2, "minTaskMember": {"boss": 1}}},
        MemberGroup,
    )
    town.harness.cache.volcano_groups.changed("ADDED", group)
    for name, part in (("w-0", "worker"), ("w-1", "worker"), ("boss", "boss")):
        town.pod(name, annotations={"scheduling.k8s.io/group-name": "ring", "volcano.sh/task-spec": part})
    town.step()
    town.now_ms += 60_000
    town.pod("high", priority=9)
    town.step()
    assert len(stopped(town)) == 1
    assert stopped(town) < {"w-0", "w-1"}


def test_pods_whose_gang_is_no_more_are_alone_again() -> None:
    town = a_town()
    the_ring(town)
    entry = town.harness.pods.entries["uid-ring-0"]
    assert isinstance(entry.group, Membership)
    town.harness.pods.tied(entry.group.key, [], [])
    town.pod("high", priority=9)
    town.step()
    assert len(stopped(town)) == 1


# ------------------------------------------------------------------------------------------------- time that is up


def codes(town: Town, name: str) -> list[str]:
    return [reason.code for reason in town.harness.pods.entries[f"uid-{name}"].reasons]


def test_a_gang_that_has_waited_for_as_long_as_it_may_steps_aside_and_comes_back() -> None:
    town = a_town(2)
    town.pod("low-0", nodeName="n0")
    town.pod("low-1", nodeName="n1")
    town.step()
    town.now_ms += 60_000
    said = ring(2, **{"pod-group-timeout": "10s"})
    for number in range(2):
        town.pod(f"ring-{number}", priority=5, **said)
    town.step()
    held = town.job("ring-0")
    assert held in town.harness.controller.preemption.holds
    town.now_ms += 10_000
    assert town.harness.pods.stirred
    town.step()
    assert not town.harness.controller.preemption.holds
    assert codes(town, "ring-0") == ["GANG_TIMEOUT"]
    assert "after waiting 10s" in town.harness.pods.entries["uid-ring-0"].reasons[0].text
    assert town.harness.pods.patience.next_ms() == town.now_ms + 1000
    town.now_ms += 1000
    town.step()
    assert town.job("ring-0") in town.harness.controller.preemption.holds


def test_a_gang_that_is_not_all_there_in_time_is_told_and_others_get_the_room_meanwhile() -> None:
    town = a_town(2)
    group = from_plain(
        {"metadata": {"name": "ring", "namespace": "ns"}, "spec": {"minMember": 2, "scheduleTimeoutSeconds": 5}},
        MemberGroup,
    )
    town.harness.cache.plugin_groups.changed("ADDED", group)
    said = {"labels": {"scheduling.x-k8s.io/pod-group": "ring"}}
    town.pod("ring-0", **said)
    town.step()
    town.now_ms += 5000
    town.step()
    reason = town.harness.pods.entries["uid-ring-0"].reasons[0]
    assert reason.code == "GANG_INCOMPLETE"
    assert reason.text.endswith('pod group "ring" rejected due to timeout after waiting 5s')
    town.pod("ring-1", **said)
    town.now_ms += 1000
    town.step()
    assert town.where("ring-0")
    assert town.where("ring-1")
    assert town.harness.pods.patience.next_ms() is None


def test_a_gang_of_which_nobody_says_how_long_it_may_wait_keeps_its_place() -> None:
    town = a_town(1)
    for number in range(2):
        town.pod(f"ring-{number}", **ring(2))
    town.step()
    job = town.job("ring-0")
    town.now_ms += 3_600_000
    town.step()
    assert town.job("ring-0") == job
    assert town.harness.pods.patience.next_ms() is None


def test_members_that_were_placed_and_are_not_bound_in_time_give_their_room_back() -> None:
    town = a_town(2)
    said = ring(2, **{"pod-group-timeout": "10s"})
    for number in range(2):
        town.pod(f"ring-{number}", **said)
    pods, controller = town.harness.pods, town.harness.controller
    orders = [act for act in controller.step(town.now_ms, pods.take_facts()).acts if isinstance(act, Start)]
    first, second = pods.placed(orders, town.now_ms)
    controller.step(town.now_ms, pods.take_facts())
    pods.bound(first.uid, first.run)
    town.now_ms += 10_000
    controller.step(town.now_ms, pods.take_facts())
    assert (first.stage, second.stage) == ("bound", "queued")
