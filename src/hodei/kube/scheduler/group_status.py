"""How a group stands, in the words of those whose object it is, so that their controllers and tools go on: Volcano makes the pods
of a job once its group is `Inqueue`, scheduler-plugins tells its users by the phase, Kubernetes by a condition.

Nothing here opens a connection. What is said is what the present owner of each kind says itself; a final word is never
taken back.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from hodei.kube.api.group_objects import GroupCondition, MemberGroup, PodGroup

_MESSAGE = 1024


class GroupStatus(Struct, frozen=True):
    """The pods of a group: `waiting` without a node, `placed` with one (of these some are `running`), and those that are
    over. `message`: why those that wait do, "" if nobody was told; `refused`: it is nodes that they lack. `owners`: the
    workloads that the pods belong to, as "namespace/name"."""

    waiting: int = 0
    placed: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    message: str = ""
    refused: bool = False
    owners: tuple[str, ...] = ()

    @property
    def all(self) -> int:
        return self.waiting + self.placed + self.succeeded + self.failed


def of_scheduler_plugins(group: MemberGroup, now: GroupStatus, at: str) -> dict[str, Any] | None:
    """The phases of its own controller; None if nothing is to be said. A group that has Finished or Failed stays so."""
    if group.status.phase in ("Finished", "Failed"):
        return None
    least = group.spec.min_member
    if now.all < least:
        phase = "Pending"
    elif now.succeeded >= least:
        phase = "Finished"
    elif now.failed and now.failed + now.running + now.succeeded >= least:
        phase = "Failed"
    elif now.running + now.succeeded >= least:
        phase = "Running"
    else:
        phase = "Scheduling"
    said: dict[str, Any] = {
        "phase": phase,
        "scheduled": now.placed + now.succeeded,
        "running": now.running,
        "succeeded": now.succeeded,
        "failed": now.failed,
    }
    if phase != "Pending":
        said["scheduleStartTime"] = group.status.schedule_start_time or at
        if now.owners:
            said["occupiedBy"] = ",".join(now.owners)
    return said


def of_volcano(group: MemberGroup, now: GroupStatus, at: str) -> dict[str, Any] | None:
    """As Volcano's scheduler says it at the end of a session. A group of ours that cannot start yet is `Inqueue`: let in,
    and its pods may be made."""
    if group.status.phase == "Completed" and not (now.waiting or now.placed):
        return None
    least, there = group.spec.min_member, now.placed + now.succeeded
    lacks = now.refused and there < least
    if now.running and lacks:
        phase = "Unknown"
    elif there and there >= least:
        phase = "Running" if now.placed or now.waiting else "Completed"
    else:
        phase = "Inqueue"
    said: dict[str, Any] = {
        "phase": phase, "running": now.running, "succeeded": now.succeeded, "failed": now.failed
    }  # fmt: skip
    if there and there >= least:
        condition = _condition("Scheduled", "True", "tasks in gang are ready to be scheduled", "", at)
    elif lacks:
        text = f"{now.waiting}/{now.waiting + there} tasks in gang unschedulable: {now.message}"
        condition = _condition("Unschedulable", "True", "NotEnoughResources", text, at)
    else:
        return said
    said["conditions"] = _with(group.status.conditions, condition)
    return said


def of_kubernetes(group: PodGroup, now: GroupStatus, at: str, type: str) -> dict[str, Any] | None:
    """The one condition of kube-scheduler; once it was True it is never False again."""
    known = next((one for one in group.status.conditions if one.type == type), None)
    if known is not None and known.status == "True":
        return None
    gang = group.spec.scheduling_policy.gang
    least = gang.min_count if gang is not None else 1
    if now.placed + now.succeeded >= least:
        condition = _condition(type, "True", "Scheduled", "", at)
    elif now.waiting and now.message:
        condition = _condition(type, "False", "Unschedulable", now.message, at)
    else:
        return None
    condition["observedGeneration"] = group.metadata.generation
    if known is not None and (known.status, known.reason, known.message) == (
        condition["status"], condition["reason"], condition["message"],
    ):  # fmt: skip
        return None
    if known is not None and known.status == condition["status"]:
        condition["lastTransitionTime"] = known.last_transition_time or at
    return {"conditions": [condition]}


def _condition(type: str, status: str, reason: str, message: str, at: str) -> dict[str, Any]:
    return {
        "type": type, "status": status, "reason": reason, "message": message[:_MESSAGE], "lastTransitionTime": at
    }  # fmt: skip


def _with(known: tuple[GroupCondition, ...], new: dict[str, Any]) -> list[dict[str, Any]]:
    """A list is replaced as a whole: the other conditions stay in it. One that says the same keeps its time."""
    out = [
        {"type": one.type, "status": one.status, "reason": one.reason, "message": one.message,
         "lastTransitionTime": one.last_transition_time}
        for one in known
    ]  # fmt: skip
    before = next((one for one in out if one["type"] == new["type"]), None)
    if before is not None and all(before[field] == new[field] for field in ("status", "reason", "message")):
        new = {**new, "lastTransitionTime": before["lastTransitionTime"]}
    return [*(one for one in out if one["type"] != new["type"]), new]
