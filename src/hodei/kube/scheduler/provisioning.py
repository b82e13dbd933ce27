"""Volumes that wait for their first consumer: told which node it is, and waited for before the pod is bound.

Which free volume a claim takes was settled by the decision (`assumed`). It stays settled until the cluster shows the volume
as taken, or the pod is not bound after all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from hodei.engine.assumed_volumes import AssumedVolumes
from hodei.kube.api.objects import Node, Pod
from hodei.kube.api.storage_objects import NO_PROVISIONER, SELECTED_NODE, Claim
from hodei.kube.scheduler.cache import ClusterCache
from hodei.kube.scheduler.pod_api import PodApi
from hodei.kube.scheduler.volumes import claim_handle, claim_name, to_bind, volume_on
from hodei.model.volume import Volume as Needed

PATIENCE_S = 600.0


class NotProvisioned(Exception):
    """The volumes did not come; the pod may do better elsewhere."""


class Provisioning:
    def __init__(
        self,
        around: ClusterCache,
        actor: PodApi,
        node: Callable[[str], Node | None],
        assumed: AssumedVolumes | None = None,
    ) -> None:
        self._around, self._actor, self._node = around, actor, node
        self._moved = asyncio.Event()
        self._assumed = AssumedVolumes() if assumed is None else assumed
        around.storage_moved = self._storage_moved

    def needed(self, pod: Pod) -> bool:
        return bool(pod.spec.volumes) and bool(to_bind(pod, self._around.surroundings.storage))

    async def ready(self, pod: Pod, node: str) -> None:
        """Returns when all claims of the pod are bound. Raises NotProvisioned, or ApiError."""
        storage = self._around.surroundings.storage
        wanted = {(claim.metadata.namespace, claim.metadata.name) for claim in to_bind(pod, storage)}
        heard: set[tuple[str, str]] = set()  # the claims that have been seen to name the node
        try:
            for key in sorted(wanted):
                await self._begin(storage.claims[key], node)
            async with asyncio.timeout(PATIENCE_S):
                while not all((claim := storage.claims.get(key)) is not None and claim.bound for key in wanted):
                    self._check(wanted, node, heard)
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            raise NotProvisioned(f"volumes were not provisioned within {PATIENCE_S:g} s") from None

    def give_up(self, pod: Pod) -> None:
        """It was not bound after all: what its claims were to have is free for others."""
        for volume in pod.spec.volumes:
            if name := claim_name(pod, volume):
                self._assumed.release(f"claim/{pod.metadata.namespace}/{name}")

    def forget(self, volumes: Iterable[Needed]) -> None:
        """The same for one that is not there any more."""
        for volume in volumes:
            self._assumed.release(volume.handle)

    async def _begin(self, claim: Claim, node: str) -> None:
        known = self._node(node)
        if known is None:
            raise NotProvisioned(f"node {node} has gone")
        key = (claim.metadata.namespace, claim.metadata.name)
        handle, storage = claim_handle(claim), self._around.surroundings.storage
        of_others = {volume for other, volume in self._assumed.claims().items() if other != handle}
        volume = volume_on(known, claim, storage, of_others, first=self._assumed.of(handle))
        if volume is not None:
            self._assumed.take(volume.metadata.name, handle)
            if volume.spec.claim_ref is None:
                await self._actor.promise_volume(volume, claim)
        elif not self._can_be_made(claim):
            raise NotProvisioned(f"no volume is left for the claim {'/'.join(key)} on node {node}")
        elif claim.metadata.annotations.get(SELECTED_NODE) != node:
            await self._actor.choose_node(claim, node)

    def _can_be_made(self, claim: Claim) -> bool:
        cls = self._around.classes.all.get(claim.class_name)
        return cls is not None and cls.provisioner not in ("", NO_PROVISIONER)

    def _check(self, wanted: set[tuple[str, str]], node: str, heard: set[tuple[str, str]]) -> None:
        """Whoever makes volumes takes the node's name off a claim that it can make none for there."""
        claims = self._around.claims.all
        for key in wanted:
            claim = claims.get(key)
            if claim is None:
                raise NotProvisioned(f"the claim {'/'.join(key)} has gone")
            chosen = claim.metadata.annotations.get(SELECTED_NODE)
            if chosen == node:
                heard.add(key)
            elif not claim.bound and chosen is not None:
                raise NotProvisioned(f"the claim {'/'.join(key)} is made for node {chosen}")
            elif not claim.bound and key in heard:
                raise NotProvisioned(f"no volume can be made for the claim {'/'.join(key)} on node {node}")

    def _storage_moved(self, claim: Claim | None) -> None:
        self._moved.set()
        if self._assumed:
            self._see()

    def _see(self) -> None:
        """What the cluster shows need not be assumed any more."""
        claims, volumes = self._around.claims.all, self._around.volumes.all
        for handle, name in self._assumed.claims().items():
            _, namespace, claim = handle.split("/", 2)
            volume = volumes.get(name)
            if volume is None or volume.spec.claim_ref is not None or (namespace, claim) not in claims:
                self._assumed.release(handle)
