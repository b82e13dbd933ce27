"""The status of pod groups in the form of each project. tests/real/kubernetes shows that the API accepts it."""

from __future__ import annotations

from typing import Any

import pytest

from hodei.kube.api.objects import MemberGroup, PodGroup, from_builtins
from hodei.kube.scheduler.group_status import GroupStatus, kubernetes_status, scheduler_plugins_status, volcano_status

AT = "2026-09-21T14:13:20Z"


def a_group(least: int = 3, **status: Any) -> MemberGroup:
    return from_builtins({"metadata": {"name": "ring"}, "spec": {"minMember": least}, "status": status}, MemberGroup)


def own(least: int = 3, *conditions: dict[str, Any]) -> PodGroup:
    spec = {"schedulingPolicy": {"gang": {"minCount": least}}}
    meta = {"name": "ring", "generation": 4}
    return from_builtins({"metadata": meta, "spec": spec, "status": {"conditions": list(conditions)}}, PodGroup)


@pytest.mark.parametrize(
    ("now", "phase"),
    [
        (GroupStatus(pending=2), "Pending"),
        (GroupStatus(pending=3), "Scheduling"),
        (GroupStatus(placed=3, running=2), "Scheduling"),
        (GroupStatus(placed=3, running=3), "Running"),
        (GroupStatus(placed=2, running=2, succeeded=1), "Running"),
        (GroupStatus(placed=1, running=1, succeeded=1, failed=1), "Failed"),
        (GroupStatus(succeeded=3), "Finished"),
        (GroupStatus(succeeded=3, failed=1), "Finished"),
    ],
)
def test_phases_of_scheduler_plugins(now: GroupStatus, phase: str) -> None:
    said = scheduler_plugins_status(a_group(), now, AT)
    assert said is not None
    assert said["phase"] == phase
    assert (said["running"], said["succeeded"], said["failed"]) == (now.running, now.succeeded, now.failed)
    assert said["scheduled"] == now.placed + now.succeeded
    assert ("scheduleStartTime" in said) == (phase != "Pending")


def test_the_time_when_scheduling_began_is_kept_and_the_owner_is_named() -> None:
    said = scheduler_plugins_status(a_group(scheduleStartTime="then"), GroupStatus(pending=3, owners=("ns/job",)), AT)
    assert said is not None
    assert (said["scheduleStartTime"], said["occupiedBy"]) == ("then", "ns/job")


@pytest.mark.parametrize("phase", ["Finished", "Failed"])
def test_a_final_phase_of_scheduler_plugins_never_changes(phase: str) -> None:
    assert scheduler_plugins_status(a_group(phase=phase), GroupStatus(pending=3), AT) is None


@pytest.mark.parametrize(
    ("now", "phase", "condition"),
    [
        (GroupStatus(pending=1), "Inqueue", ""),
        (GroupStatus(pending=3, message="0/1 nodes", refused=True), "Inqueue", "Unschedulable"),
        (GroupStatus(placed=3), "Running", "Scheduled"),
        (GroupStatus(placed=3, running=3), "Running", "Scheduled"),
        (GroupStatus(pending=1, placed=2, running=2, message="no", refused=True), "Unknown", "Unschedulable"),
        (GroupStatus(placed=1, running=1, succeeded=2), "Running", "Scheduled"),
        (GroupStatus(succeeded=3), "Completed", "Scheduled"),
        (GroupStatus(pending=1, succeeded=3), "Running", "Scheduled"),
    ],
)
def test_phases_and_conditions_of_volcano(now: GroupStatus, phase: str, condition: str) -> None:
    said = volcano_status(a_group(), now, AT)
    assert said is not None
    assert (said["phase"], said["running"], said["succeeded"]) == (phase, now.running, now.succeeded)
    assert [one["type"] for one in said.get("conditions", [])] == ([condition] if condition else [])


def test_other_conditions_stay_and_an_unchanged_one_keeps_its_time() -> None:
    before = {"type": "Scheduled", "status": "True", "reason": "tasks in gang are ready to be scheduled", "message": "",
              "lastTransitionTime": "then"}  # fmt: skip
    other = {"type": "Unschedulable", "status": "True", "reason": "r", "message": "m", "lastTransitionTime": "long ago"}
    said = volcano_status(a_group(conditions=[before, other]), GroupStatus(placed=3), AT)
    assert said is not None
    assert [(one["type"], one["lastTransitionTime"]) for one in said["conditions"]] == [
        ("Unschedulable", "long ago"),
        ("Scheduled", "then"),
    ]


def test_the_condition_of_kubernetes() -> None:
    waits = GroupStatus(pending=3, message="0/1 nodes are available")
    said = kubernetes_status(own(), waits, AT, "PodGroupScheduled")
    assert said == {
        "conditions": [
            {
                "type": "PodGroupScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes are available",
                "lastTransitionTime": AT, "observedGeneration": 4,
            }
        ]
    }  # fmt: skip
    known = {**said["conditions"][0], "lastTransitionTime": "then"}
    assert kubernetes_status(own(3, known), waits, AT, "PodGroupScheduled") is None
    newer = kubernetes_status(own(3, known), GroupStatus(pending=3, message="other"), AT, "PodGroupScheduled")
    assert newer is not None
    assert newer["conditions"][0]["lastTransitionTime"] == "then"
    done = kubernetes_status(own(3, known), GroupStatus(placed=3), AT, "PodGroupScheduled")
    assert done is not None
    assert (done["conditions"][0]["status"], done["conditions"][0]["reason"]) == ("True", "Scheduled")
    assert kubernetes_status(own(3, done["conditions"][0]), waits, AT, "PodGroupScheduled") is None
    assert kubernetes_status(own(), GroupStatus(pending=1), AT, "PodGroupScheduled") is None
