"""Writes how groups stand into their objects, and lets in the groups of Volcano's jobs so that their pods are made.

Only groups with a pod of ours are written to, or whose Volcano job names us as its scheduler. What was written last is not
written again, also if somebody else has changed it since: two controllers must not fight over it. One group is written to
once at a time, so that no two statuses arrive in the wrong order; what an API server that is away did not take is written
when it is back.
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
from hodei.kube.api.client import Api, ApiError
from hodei.kube.api.discovery import served_path, served_resources
from hodei.kube.api.group_objects import MemberGroup, PodGroup
from hodei.kube.api.objects import Pod
from hodei.kube.scheduler.background_task import NoBackground
from hodei.kube.scheduler.cache import ClusterCache
from hodei.kube.scheduler.entries import Entry, GroupKey
from hodei.kube.scheduler.explain import UNSCHEDULABLE
from hodei.kube.scheduler.gang_assembly import counted
from hodei.kube.scheduler.group_status import GroupStatus, of_kubernetes, of_scheduler_plugins, of_volcano
from hodei.kube.scheduler.pods import Pods
from hodei.kube.scheduler.request_queue import RequestQueue

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
    def __init__(self, api: Api, scheduler: str, pods: Pods, around: ClusterCache, now: Callable[[], float]) -> None:
        self._api, self._scheduler, self._pods, self._around, self._now = api, scheduler, pods, around, now
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
        fresh, self._around.not_let_in = self._around.not_let_in, {}
        for namespace, name in fresh:
            self._lane.put(partial(self._in_turn, ("volcano", namespace, name), self._let_in, self._not_let_in))

    def _touch(self, key: GroupKey) -> None:
        self._pods.touched[key] = None

    def _not_let_in(self, key: GroupKey) -> None:
        self._around.not_let_in[key[1], key[2]] = None

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
            group = self._around.groups.plugins.get(place)
            if group is not None:
                await self._write(convention, group, of_scheduler_plugins(group, now, at))
        elif convention == "volcano":
            group = self._around.groups.volcano.get(place)
            if group is not None:
                await self._write(convention, group, of_volcano(group, now, at))
        elif convention == "kubernetes" and self._own_path:
            own = self._around.groups.kubernetes.get(place)
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
        group = self._around.groups.volcano.get((namespace, name))
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
