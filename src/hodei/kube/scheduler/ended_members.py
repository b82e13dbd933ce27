"""Members of groups that are over: a gang counts those that succeeded, and a group's status tells of all.

The watch of pods that hold room leaves out those that are over and cannot tell how one ended. So these are watched for
themselves, from the moment on when the first group is seen: most clusters have none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Literal

from msgspec import structs

from hodei.kube.api.client import Api
from hodei.kube.api.objects import Pod, PodSpec, PodStatus
from hodei.kube.api.reflector import Reflector, Resource
from hodei.kube.scheduler.background_task import NoBackground
from hodei.kube.scheduler.gangs import Membership, membership

GroupKey = tuple[str, str, str]


class EndedMembers:
    """`moved` is called with the key of each group of which a member ended, or was forgotten by the cluster."""

    def __init__(self, moved: Callable[[GroupKey], None]) -> None:
        self._moved = moved
        self._groups: dict[GroupKey, dict[str, Pod]] = {}
        self._key: dict[str, GroupKey] = {}

    def of(self, key: GroupKey) -> list[Pod]:
        return list(self._groups.get(key, {}).values())

    # ------------------------------------------------------------------------------------- the reflector's sink

    def listed(self, objects: Iterable[Pod], /) -> None:
        there = set()
        for pod in objects:
            there.add(pod.metadata.uid)
            self._put(pod)
        for uid in [uid for uid in self._key if uid not in there]:
            self._forget(uid)

    def changed(self, kind: Literal["ADDED", "MODIFIED", "DELETED"], pod: Pod, /) -> None:
        if kind == "DELETED":
            self._forget(pod.metadata.uid)
        else:
            self._put(pod)

    def _put(self, pod: Pod) -> None:
        uid, found = pod.metadata.uid, membership(pod)
        if not isinstance(found, Membership):
            return
        here = self._groups.setdefault(found.key, {})
        if uid not in here or here[uid].status.phase != pod.status.phase:
            self._key[uid] = found.key
            said = PodSpec(scheduling_group=pod.spec.scheduling_group, workload_ref=pod.spec.workload_ref)
            here[uid] = structs.replace(pod, spec=said, status=PodStatus(pod.status.phase))
            self._moved(found.key)

    def _forget(self, uid: str) -> None:
        key = self._key.pop(uid, None)
        if key is not None:
            here = self._groups[key]
            del here[uid]
            if not here:
                del self._groups[key]
            self._moved(key)


class EndedMembersInformer(NoBackground):
    """Has `past` told, once `wanted`; `stir` is called when there is something new."""

    def __init__(
        self, api: Api, scheduler: str, past: EndedMembers, wanted: asyncio.Event, stir: Callable[[], None]
    ) -> None:
        self._past, self._wanted, self._stir = past, wanted, stir
        phases = ",".join(f"status.phase!={phase}" for phase in ("Pending", "Running", "Unknown"))
        over = {"fieldSelector": f"spec.schedulerName={scheduler},{phases}"}
        self._reflector = Reflector(api, Resource("/api/v1/pods", Pod), self, selector=over)

    async def run(self) -> None:
        await self._wanted.wait()
        await self._reflector.run()

    def listed(self, objects: Iterable[Pod], /) -> None:
        self._past.listed(objects)

    def changed(self, kind: Literal["ADDED", "MODIFIED", "DELETED"], pod: Pod, /) -> None:
        self._past.changed(kind, pod)

    def flushed(self) -> None:
        self._stir()
