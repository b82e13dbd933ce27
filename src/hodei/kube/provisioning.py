"""Volumes that wait for their first consumer: told which node it is, and waited for before the pod is bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hodei.kube.acting import Actor
from hodei.kube.around import Around
from hodei.kube.volumes import to_bind, volume_on
from hodei.kubeapi.objects import Node, Pod
from hodei.kubeapi.storage_objects import NO_PROVISIONER, SELECTED_NODE, Claim

PATIENCE_S = 600.0


class NotProvisioned(Exception):
    """The volumes did not come; the pod may do better elsewhere."""


class Provisioning:
    def __init__(self, around: Around, actor: Actor, node: Callable[[str], Node | None]) -> None:
        self._around, self._actor, self._node = around, actor, node
        self._moved = asyncio.Event()
        self._taken: dict[str, tuple[str, str]] = {}
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
        finally:
            self._taken = {name: key for name, key in self._taken.items() if key not in wanted}

    async def _begin(self, claim: Claim, node: str) -> None:
        known = self._node(node)
        if known is None:
            raise NotProvisioned(f"node {node} has gone")
        key = (claim.metadata.namespace, claim.metadata.name)
        volume = volume_on(known, claim, self._around.surroundings.storage, self._taken)
        if volume is not None:
            self._taken[volume.metadata.name] = key
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
