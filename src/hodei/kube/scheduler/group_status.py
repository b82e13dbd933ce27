"""The status of pod groups in the form of each project, so that their controllers and tools work: Volcano creates the pods of a
job when its group is `Inqueue`, scheduler-plugins shows a phase, Kubernetes a condition.

Each status is what the project's own controller would write. A final status is never changed.
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
from hodei.kube.scheduler.background import BackgroundTask
from hodei.kube.scheduler.cache import ClusterCache
from hodei.kube.scheduler.gangs import of_this_gang
from hodei.kube.scheduler.groups import Entry, GroupKey
from hodei.kube.scheduler.messages import UNSCHEDULABLE
from hodei.kube.scheduler.pod_api import RequestQueue
from hodei.kube.scheduler.pods import Pods

_MESSAGE = 1024


class GroupStatus(Struct, frozen=True):
    """The pods of a group: `pending` without a node, `placed` with one (some are `running`), and those that have ended.

    `message`: why pods are pending, "" if not reported; `refused`: nodes lack capacity for them. `owners`: their workloads.
    """

    pending: int = 0
    placed: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    message: str = ""
    refused: bool = False
    owners: tuple[str, ...] = ()

    @property
    def all(self) -> int:
        return self.pending + self.placed + self.succeeded + self.failed


def scheduler_plugins_status(group: MemberGroup, pods: GroupStatus, at: str) -> dict[str, Any] | None:
    """None if nothing has to be written. A group that has Finished or Failed stays so."""
    if group.status.phase in ("Finished", "Failed"):
        return None
    min_count = group.spec.min_member
    if pods.all < min_count:
        phase = "Pending"
    elif pods.succeeded >= min_count:
        phase = "Finished"
    elif pods.failed and pods.failed + pods.running + pods.succeeded >= min_count:
        phase = "Failed"
    elif pods.running + pods.succeeded >= min_count:
        phase = "Running"
    else:
        phase = "Scheduling"
    status: dict[str, Any] = {
        "phase": phase,
        "scheduled": pods.placed + pods.succeeded,
        "running": pods.running,
        "succeeded": pods.succeeded,
        "failed": pods.failed,
    }
    if phase != "Pending":
        status["scheduleStartTime"] = group.status.schedule_start_time or at
        if pods.owners:
            status["occupiedBy"] = ",".join(pods.owners)
    return status


def volcano_status(group: MemberGroup, pods: GroupStatus, at: str) -> dict[str, Any] | None:
    """As Volcano's scheduler writes it. A group that cannot start yet is `Inqueue`: admitted, its pods may be created."""
    if group.status.phase == "Completed" and not (pods.pending or pods.placed):
        return None
    min_count, started = group.spec.min_member, pods.placed + pods.succeeded
    unschedulable = pods.refused and started < min_count
    if pods.running and unschedulable:
        phase = "Unknown"
    elif started and started >= min_count:
        phase = "Running" if pods.placed or pods.pending else "Completed"
    else:
        phase = "Inqueue"
    status: dict[str, Any] = {
        "phase": phase, "running": pods.running, "succeeded": pods.succeeded, "failed": pods.failed
    }  # fmt: skip
    if started and started >= min_count:
        condition = _condition("Scheduled", "True", "tasks in gang are ready to be scheduled", "", at)
    elif unschedulable:
        text = f"{pods.pending}/{pods.pending + started} tasks in gang unschedulable: {pods.message}"
        condition = _condition("Unschedulable", "True", "NotEnoughResources", text, at)
    else:
        return status
    status["conditions"] = _merge_condition(group.status.conditions, condition)
    return status


def kubernetes_status(group: PodGroup, pods: GroupStatus, at: str, type: str) -> dict[str, Any] | None:
    """kube-scheduler's condition. Once True, it never becomes False."""
    before = next((one for one in group.status.conditions if one.type == type), None)
    if before is not None and before.status == "True":
        return None
    gang = group.spec.scheduling_policy.gang
    min_count = gang.min_count if gang is not None else 1
    if pods.placed + pods.succeeded >= min_count:
        condition = _condition(type, "True", "Scheduled", "", at)
    elif pods.pending and pods.message:
        condition = _condition(type, "False", "Unschedulable", pods.message, at)
    else:
        return None
    condition["observedGeneration"] = group.metadata.generation
    if before is not None and (before.status, before.reason, before.message) == (
        condition["status"], condition["reason"], condition["message"],
    ):  # fmt: skip
        return None
    if before is not None and before.status == condition["status"]:
        condition["lastTransitionTime"] = before.last_transition_time or at
    return {"conditions": [condition]}


def _condition(type: str, status: str, reason: str, message: str, at: str) -> dict[str, Any]:
    return {
        "type": type, "status": status, "reason": reason, "message": message[:_MESSAGE], "lastTransitionTime": at
    }  # fmt: skip


def _merge_condition(known: tuple[GroupCondition, ...], new: dict[str, Any]) -> list[dict[str, Any]]:
    """A merge patch replaces the whole list, so the other conditions stay in it. An unchanged condition keeps its time."""
    out = [
        {"type": one.type, "status": one.status, "reason": one.reason, "message": one.message,
         "lastTransitionTime": one.last_transition_time}
        for one in known
    ]  # fmt: skip
    before = next((one for one in out if one["type"] == new["type"]), None)
    if before is not None and all(before[field] == new[field] for field in ("status", "reason", "message")):
        new = {**new, "lastTransitionTime": before["lastTransitionTime"]}
    return [*(one for one in out if one["type"] != new["type"]), new]


_log = logging.getLogger(__name__)
WRITE_EVERY_S = 0.25
RETRY_S = 5.0
_CONNECTIONS = 8
_MERGE, _STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"
_PATHS = {
    "scheduler-plugins": "/apis/scheduling.x-k8s.io/v1alpha1/podgroups",
    "volcano": "/apis/scheduling.volcano.sh/v1beta1/podgroups",
}


class _Job(Struct):
    class Spec(Struct):
        scheduler: str = msgspec.field(default="", name="schedulerName")

    spec: Spec = msgspec.field(default_factory=Spec)


class GroupStatusWriter(BackgroundTask):
    """Writes the status of group objects, and admits the groups of Volcano jobs so that their pods are created."""

    def __init__(self, api: Api, scheduler: str, pods: Pods, cache: ClusterCache, now: Callable[[], float]) -> None:
        self._api, self._scheduler, self._pods, self._cache, self._now = api, scheduler, pods, cache, now
        self._queue = RequestQueue(_CONNECTIONS)
        # The last status written, by uid.
        self._last_written: dict[str, dict[str, Any]] = {}
        self._has_status: dict[str, bool] = {}
        self._kubernetes_path = ""
        self._warned: set[str] = set()
        # Groups with a write under way.
        self._writing: set[GroupKey] = set()

    def on_step(self, step: Step) -> None:
        for refusal in step.plan.refusals:
            key = self._pods.group_of_job.get(refusal.job)
            if key is not None:
                self._pods.status_dirty[key] = None

    async def run(self) -> None:
        self._kubernetes_path = await served_path(self._api, "scheduling.k8s.io", "podgroups")
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            self.check()

    def check(self) -> None:
        dirty, self._pods.status_dirty = self._pods.status_dirty, {}
        for key in dirty:
            self._queue.put(partial(self._serialize, key, self._write_status, self._write_again))
        unadmitted, self._cache.pending_volcano_groups = self._cache.pending_volcano_groups, {}
        for namespace, name in unadmitted:
            self._queue.put(
                partial(self._serialize, ("volcano", namespace, name), self._admit_volcano_group, self._admit_again)
            )

    def _write_again(self, key: GroupKey) -> None:
        self._pods.status_dirty[key] = None

    def _admit_again(self, key: GroupKey) -> None:
        self._cache.pending_volcano_groups[key[1], key[2]] = None

    async def stop(self) -> None:
        self.check()
        await self._queue.drain(2)
        self._queue.close()

    def group_status(self, key: GroupKey) -> GroupStatus | None:
        """None if no pod of the group is ours."""
        members, ended = self._pods.members(key), self._pods.ended_members.of(key)
        if not ended and not any(entry.pod.spec.scheduler_name == self._scheduler for entry in members):
            return None
        # If all have ended, the newest pod shows which of them form the last gang.
        pods = [entry.pod for entry in members] or sorted(ended, key=_created)[-1:]
        group = self._pods.group(key)
        ended = of_this_gang(ended, pods, group) if group is not None else ended
        pending = [entry for entry in members if not entry.assigned and not entry.info.gates]
        reported = next((entry for entry in pending if entry.reported), None)
        return GroupStatus(
            len(pending),
            sum(entry.stage == "bound" for entry in members),
            sum(entry.assigned and entry.pod.status.phase == "Running" for entry in members),
            sum(pod.status.phase == "Succeeded" for pod in ended),
            sum(pod.status.phase == "Failed" for pod in ended),
            reported.reported or "" if reported is not None else "",
            reported is not None and reported.reported_reason == UNSCHEDULABLE,
            _owner_names(members),
        )

    async def _write_status(self, key: GroupKey) -> None:
        convention, namespace, name = key
        pods, at = self.group_status(key), self._timestamp()
        if pods is None:
            return
        group_key = (namespace, name)
        if convention == "scheduler-plugins":
            group = self._cache.groups.plugins.get(group_key)
            if group is not None:
                await self._write(convention, group, scheduler_plugins_status(group, pods, at))
        elif convention == "volcano":
            group = self._cache.groups.volcano.get(group_key)
            if group is not None:
                await self._write(convention, group, volcano_status(group, pods, at))
        elif convention == "kubernetes" and self._kubernetes_path:
            pod_group = self._cache.groups.kubernetes.get(group_key)
            type = "PodGroupScheduled" if "/v1alpha2/" in self._kubernetes_path else "PodGroupInitiallyScheduled"
            if pod_group is not None:
                await self._write(convention, pod_group, kubernetes_status(pod_group, pods, at, type))

    async def _write(self, convention: str, group: MemberGroup | PodGroup, status: dict[str, Any] | None) -> None:
        meta = group.metadata
        before = self._last_written.get(meta.uid)
        if status is None or (before is not None and _without_times(before) == _without_times(status)):
            return
        path = await self._path(convention, meta.namespace, meta.name)
        content_type = _STRATEGIC if convention == "kubernetes" else _MERGE
        body = msgspec.json.encode({"metadata": {"uid": meta.uid}, "status": status})
        await self._api.request("PATCH", path, body, content_type=content_type)
        if len(self._last_written) > 10_000:
            self._last_written.clear()
        self._last_written[meta.uid] = status

    async def _path(self, convention: str, namespace: str, name: str) -> str:
        """Groups of Volcano have no status subresource: the object itself is patched."""
        collection = _PATHS.get(convention) or self._kubernetes_path
        if convention not in self._has_status:
            group, version = collection.split("/")[2:4]
            self._has_status[convention] = "podgroups/status" in await served_resources(self._api, group, version)
        root = collection.removesuffix("/podgroups")
        tail = "/status" if self._has_status[convention] else ""
        return f"{root}/namespaces/{namespace}/podgroups/{name}{tail}"

    async def _admit_volcano_group(self, key: GroupKey) -> None:
        """Admit a group without pods: Volcano then creates the pods of its job."""
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

    async def _serialize(
        self, key: GroupKey, work: Callable[[GroupKey], Awaitable[None]], retry: Callable[[GroupKey], None]
    ) -> None:
        """Run `work` unless the group has a write under way; then, and after an outage, `retry` marks the group again."""
        if key in self._writing:
            retry(key)
            return
        self._writing.add(key)
        try:
            await work(key)
        except ApiError as error:
            if error.status not in (404, 409) and key[0] not in self._warned:
                self._warned.add(key[0])  # log once: no decision depends on it
                _log.warning(
                    "the status of %s groups cannot be written; their pods are scheduled all the same: %s %s",
                    key[0],
                    error.message,
                    error.hint,
                )
            if error.retriable:
                asyncio.get_running_loop().call_later(RETRY_S, retry, key)
        finally:
            self._writing.discard(key)

    def _timestamp(self) -> str:
        return datetime.fromtimestamp(self._now(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _without_times(status: dict[str, Any]) -> dict[str, Any]:
    conditions = [{**one, "lastTransitionTime": None} for one in status.get("conditions", ())]
    return {**status, "conditions": conditions, "scheduleStartTime": None}


def _created(pod: Pod) -> str:
    return pod.metadata.creation_timestamp or ""


def _owner_names(members: list[Entry]) -> tuple[str, ...]:
    meta = [entry.pod.metadata for entry in members]
    return tuple(sorted({f"{one.namespace}/{owner.name}" for one in meta for owner in one.owner_references}))
