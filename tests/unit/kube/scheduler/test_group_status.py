"""The status of pod groups in the form of each project. tests/real/kubernetes shows that the API accepts it."""

from __future__ import annotations

from typing import Any

import pytest

from hodei.kube.api.objects import MemberGroup, PodGroup, from_builtins
from hodei.kube.scheduler.group_status import GroupStatus, kubernetes_status, scheduler_plugins_status, volcano_status

AT = "2026-09-21T14:13:20Z"


def a_group(min_count: int = 3, **status: Any) -> MemberGroup:
    return from_builtins(
        {"metadata": {"name": "ring"}, "spec": {"minMember": min_count}, "status": status}, MemberGroup
    )


def kubernetes_group(min_count: int = 3, *conditions: dict[str, Any]) -> PodGroup:
    spec = {"schedulingPolicy": {"gang": {"minCount": min_count}}}
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
    status = scheduler_plugins_status(a_group(), now, AT)
    assert status is not None
    assert status["phase"] == phase
    assert (status["running"], status["succeeded"], status["failed"]) == (now.running, now.succeeded, now.failed)
    assert status["scheduled"] == now.placed + now.succeeded
    assert ("scheduleStartTime" in status) == (phase != "Pending")


def test_the_time_when_scheduling_began_is_kept_and_the_owner_is_named() -> None:
    status = scheduler_plugins_status(a_group(scheduleStartTime="then"), GroupStatus(pending=3, owners=("ns/job",)), AT)
    assert status is not None
    assert (status["scheduleStartTime"], status["occupiedBy"]) == ("then", "ns/job")


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
    status = volcano_status(a_group(), now, AT)
    assert status is not None
    assert (status["phase"], status["running"], status["succeeded"]) == (phase, now.running, now.succeeded)
    assert [each["type"] for each in status.get("conditions", [])] == ([condition] if condition else [])


def test_other_conditions_stay_and_an_unchanged_one_keeps_its_time() -> None:
    before = {"type": "Scheduled", "status": "True", "reason": "tasks in gang are ready to be scheduled", "message": "",
              "lastTransitionTime": "then"}  # fmt: skip
    other = {"type": "Unschedulable", "status": "True", "reason": "r", "message": "m", "lastTransitionTime": "long ago"}
    status = volcano_status(a_group(conditions=[before, other]), GroupStatus(placed=3), AT)
    assert status is not None
    assert [(each["type"], each["lastTransitionTime"]) for each in status["conditions"]] == [
        ("Unschedulable", "long ago"),
        ("Scheduled", "then"),
    ]


def test_the_condition_of_kubernetes() -> None:
    pending = GroupStatus(pending=3, message="0/1 nodes are available")
    status = kubernetes_status(kubernetes_group(), pending, AT, "PodGroupScheduled")
    assert status == {
        "conditions": [
            {
                "type": "PodGroupScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes are available",
                "lastTransitionTime": AT, "observedGeneration": 4,
            }
        ]
    }  # fmt: skip
    known = {**status["conditions"][0], "lastTransitionTime": "then"}
    assert kubernetes_status(kubernetes_group(3, known), pending, AT, "PodGroupScheduled") is None
    newer = kubernetes_status(
        kubernetes_group(3, known), GroupStatus(pending=3, message="other"), AT, "PodGroupScheduled"
    )
    assert newer is not None
    assert newer["conditions"][0]["lastTransitionTime"] == "then"
    done = kubernetes_status(kubernetes_group(3, known), GroupStatus(placed=3), AT, "PodGroupScheduled")
    assert done is not None
    assert (done["conditions"][0]["status"], done["conditions"][0]["reason"]) == ("True", "Scheduled")
    assert kubernetes_status(kubernetes_group(3, done["conditions"][0]), pending, AT, "PodGroupScheduled") is None
    assert kubernetes_status(kubernetes_group(), GroupStatus(pending=1), AT, "PodGroupScheduled") is None
