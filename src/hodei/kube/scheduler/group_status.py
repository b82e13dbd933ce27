"""How a group stands, in the words of those whose object it is, so that their controllers and tools go on: Volcano makes the pods
of a job once its group is `Inqueue`, scheduler-plugins tells its users by the phase, Kubernetes by a condition.

Nothing here opens a connection. What is said is what the present owner of each kind says itself; a final word is never
taken back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from hodei.control.controller import Step
from hodei.kube.api.client import Api, ApiError, served_path, served_resources
from hodei.kube.api.objects import GroupCondition, MemberGroup, Pod, PodGroup
from hodei.kube.scheduler.background import NoBackground
from hodei.kube.scheduler.cache import ClusterCache
from hodei.kube.scheduler.gangs import counted
from hodei.kube.scheduler.groups import Entry, GroupKey
from hodei.kube.scheduler.messages import UNSCHEDULABLE
from hodei.kube.scheduler.pod_api import RequestQueue
from hodei.kube.scheduler.pods import Pods

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


# --------------------------------------------------------------------------------- group status writer
# Writes how groups stand into their objects, and lets in the groups of Volcano's jobs so that their pods are made.


_log = logging.getLogger(__name__)
EVERY_S = 0.25
AGAIN_S = 5.0
_AT_ONCE = 8
_MERGE, _STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"
_PATHS = {
    "scheduler-plugins": "/apis/scheduling.x-k8s.io/v1alpha1/podgroups",
    "volcano": "/apis/scheduling.volcano.sh/v1beta1/podgroups",
}


class _Job(Struct):
    class Spec(Struct):
        scheduler: str = msgspec.field(default="", name="schedulerName")

    spec: Spec = msgspec.field(default_factory=Spec)


class GroupStatusWriter(NoBackground):
    def __init__(self, api: Api, scheduler: str, pods: Pods, cache: ClusterCache, now: Callable[[], float]) -> None:
        self._api, self._scheduler, self._pods, self._cache, self._now = api, scheduler, pods, cache, now
        self._lane = RequestQueue(_AT_ONCE)
        # By uid of the object: what was written last.
        self._written: dict[str, dict[str, Any]] = {}
        self._subresource: dict[str, bool] = {}
        self._own_path = ""
        self._warned: set[str] = set()
        # Groups that are being written to.
        self._writing: set[GroupKey] = set()

    def stepped(self, step: Step) -> None:
        for refusal in step.plan.refusals:
            key = self._pods.of_gang.get(refusal.job)
            if key is not None:
                self._pods.touched[key] = None

    async def run(self) -> None:
        self._own_path = await served_path(self._api, "scheduling.k8s.io", "podgroups")
        while True:
            await asyncio.sleep(EVERY_S)
            self.look()

    def look(self) -> None:
        touched, self._pods.touched = self._pods.touched, {}
        for key in touched:
            self._lane.put(partial(self._in_turn, key, self._tell, self._touch))
        fresh, self._cache.not_let_in = self._cache.not_let_in, {}
        for namespace, name in fresh:
            self._lane.put(partial(self._in_turn, ("volcano", namespace, name), self._let_in, self._not_let_in))

    def _touch(self, key: GroupKey) -> None:
        self._pods.touched[key] = None

    def _not_let_in(self, key: GroupKey) -> None:
        self._cache.not_let_in[key[1], key[2]] = None

    async def end(self) -> None:
        self.look()
        await self._lane.finish(2)
        self._lane.close()

    # --------------------------------------------------------------------------------------------- telling

    def standing(self, key: GroupKey) -> GroupStatus | None:
        """None if no pod of the group is ours."""
        members, over = self._pods.members(key), self._pods.past.of(key)
        if not over and not any(entry.pod.spec.scheduler_name == self._scheduler for entry in members):
            return None
        # When all are over the last that came tells which of them belong together.
        pods = [entry.pod for entry in members] or sorted(over, key=_made)[-1:]
        group = self._pods.group(key)
        over = counted(over, pods, group) if group is not None else over
        waiting = [entry for entry in members if not entry.holds and not entry.wanted.gates]
        told = next((entry for entry in waiting if entry.told), None)
        return GroupStatus(
            len(waiting),
            sum(entry.stage == "bound" for entry in members),
            sum(entry.holds and entry.pod.status.phase == "Running" for entry in members),
            sum(pod.status.phase == "Succeeded" for pod in over),
            sum(pod.status.phase == "Failed" for pod in over),
            told.told or "" if told is not None else "",
            told is not None and told.told_reason == UNSCHEDULABLE,
            _owners(members),
        )

    async def _tell(self, key: GroupKey) -> None:
        convention, namespace, name = key
        now, at = self.standing(key), self._stamp()
        if now is None:
            return
        place = (namespace, name)
        if convention == "scheduler-plugins":
            group = self._cache.groups.plugins.get(place)
            if group is not None:
                await self._write(convention, group, of_scheduler_plugins(group, now, at))
        elif convention == "volcano":
            group = self._cache.groups.volcano.get(place)
            if group is not None:
                await self._write(convention, group, of_volcano(group, now, at))
        elif convention == "kubernetes" and self._own_path:
            own = self._cache.groups.kubernetes.get(place)
            type = "PodGroupScheduled" if "/v1alpha2/" in self._own_path else "PodGroupInitiallyScheduled"
            if own is not None:
                await self._write(convention, own, of_kubernetes(own, now, at, type))

    async def _write(self, convention: str, group: MemberGroup | PodGroup, said: dict[str, Any] | None) -> None:
        meta = group.metadata
        if said is None or _same(self._written.get(meta.uid), said):
            return
        path = await self._path(convention, meta.namespace, meta.name)
        how = _STRATEGIC if convention == "kubernetes" else _MERGE
        body = msgspec.json.encode({"metadata": {"uid": meta.uid}, "status": said})
        await self._api.request("PATCH", path, body, content_type=how)
        if len(self._written) > 10_000:
            self._written.clear()
        self._written[meta.uid] = said

    async def _path(self, convention: str, namespace: str, name: str) -> str:
        """Volcano's groups have no status of their own to write to: there the object itself is changed."""
        collection = _PATHS.get(convention) or self._own_path
        if convention not in self._subresource:
            group, version = collection.split("/")[2:4]
            self._subresource[convention] = "podgroups/status" in await served_resources(self._api, group, version)
        root = collection.removesuffix("/podgroups")
        tail = "/status" if self._subresource[convention] else ""
        return f"{root}/namespaces/{namespace}/podgroups/{name}{tail}"

    # ------------------------------------------------------------------------------------------- letting in

    async def _let_in(self, key: GroupKey) -> None:
        """A group without pods: Volcano makes those of its job when the group is let in."""
        _, namespace, name = key
        group = self._cache.groups.volcano.get((namespace, name))
        if group is None or group.status.phase not in ("", "Pending"):
            return
        owner = next((o for o in group.metadata.owner_references if o.controller and o.kind == "Job"), None)
        if owner is None or self._pods.members(key):
            return
        path = f"/apis/batch.volcano.sh/v1alpha1/namespaces/{namespace}/jobs/{owner.name}"
        job = msgspec.json.decode(await self._api.request("GET", path), type=_Job)
        if job.spec.scheduler == self._scheduler:
            await self._write("volcano", group, {"phase": "Inqueue"})

    # ---------------------------------------------------------------------------------------------- inside

    async def _in_turn(
        self, key: GroupKey, work: Callable[[GroupKey], Awaitable[None]], again: Callable[[GroupKey], None]
    ) -> None:
        """`work`, unless the group is being written to: then it is looked at `again` afterwards, as after an outage."""
        if key in self._writing:
            again(key)
            return
        self._writing.add(key)
        try:
            await work(key)
        except ApiError as error:
            if error.status not in (404, 409) and key[0] not in self._warned:
                self._warned.add(key[0])  # once: nobody's start depends on it
                _log.warning("the status of %s groups cannot be written: %s %s", key[0], error.message, error.hint)
            if error.passing:
                asyncio.get_running_loop().call_later(AGAIN_S, again, key)
        finally:
            self._writing.discard(key)

    def _stamp(self) -> str:
        return datetime.fromtimestamp(self._now(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _same(before: dict[str, Any] | None, now: dict[str, Any]) -> bool:
    """Whether nothing but a time is new."""
    return before is not None and _timeless(before) == _timeless(now)


def _timeless(said: dict[str, Any]) -> dict[str, Any]:
    conditions = [{**one, "lastTransitionTime": None} for one in said.get("conditions", ())]
    return {**said, "conditions": conditions, "scheduleStartTime": None}


def _made(pod: Pod) -> str:
    return pod.metadata.creation_timestamp or ""


def _owners(members: list[Entry]) -> tuple[str, ...]:
    meta = [entry.pod.metadata for entry in members]
    return tuple(sorted({f"{one.namespace}/{owner.name}" for one in meta for owner in one.owner_references}))
