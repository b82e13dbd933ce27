"""The requests of the pod scheduler: bindings, conditions, Events, deletions. Each is guarded by the pod's uid, so it never
applies to another pod that was created later under the same name.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from hodei.kube.api.client import Api, ApiError
from hodei.kube.api.objects import BOUND_BY_US, SELECTED_NODE, Claim, Pod, Volume
from hodei.kube.scheduler import messages
from hodei.kube.scheduler.cache import KINDS, RefusedObject

_STRATEGIC_MERGE = "application/strategic-merge-patch+json"
_JSON_MERGE = "application/merge-patch+json"
_MAX_NAME = 253
# Field validation makes the API server parse every body twice; ours have no unknown fields.
_NO_VALIDATION = {"fieldValidation": "Ignore"}
_encode = msgspec.json.encode
_log = logging.getLogger(__name__)
Request = Callable[[], Coroutine[Any, Any, None]]


class PodApi:
    """`events`: post all Events, or only those of failures and preemptions."""

    def __init__(
        self,
        api: Api,
        scheduler: str,
        now: Callable[[], float] = time.time,
        *,
        events: Literal["all", "failures"] = "all",
        instance: str = "",
    ) -> None:
        self._api, self._scheduler, self._now = api, scheduler, now
        self._instance = instance or f"{scheduler}-{socket.gethostname()}"[:128]
        self.events = events
        # Event names must be unique across processes and restarts.
        self._event_number = int.from_bytes(os.urandom(6), "big") << 16

    async def bind(self, pod: Pod, node: str) -> None:
        meta = pod.metadata
        body = _encode(
            {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": meta.name, "namespace": meta.namespace, "uid": meta.uid},
                "target": {"apiVersion": "v1", "kind": "Node", "name": node},
            }
        )
        await self._api.request("POST", f"{_path(pod)}/binding", body, params=_NO_VALIDATION)

    async def record_scheduled(self, pod: Pod, node: str) -> None:
        if self.events == "all":
            text = messages.assigned(pod.metadata.namespace, pod.metadata.name, node)
            await self._event(pod, "Normal", "Scheduled", "Binding", text)

    async def record_failed(self, pod: Pod, text: str) -> None:
        await self._event(pod, "Warning", "FailedScheduling", "Scheduling", text)

    async def record_preempted(self, victim: Pod, by: Pod, node: str) -> None:
        text = messages.preempted(by.metadata.uid, node)
        await self._event(victim, "Normal", "Preempted", "Preempting", text, related=by)

    async def record_evicted(self, pod: Pod, why: str) -> None:
        await self._event(pod, "Normal", "Evicted", "Evicting", why)

    async def record_refused(self, refused: RefusedObject) -> None:
        """For an object of any kind. Events about objects without a namespace go to `default`."""
        *where, collection = refused.resource.strip("/").split("/")
        regarding = {
            "apiVersion": "/".join(where[1:]),
            "kind": KINDS.get(collection, collection),
            "namespace": refused.namespace,
            "name": refused.name,
            "uid": refused.uid,
        }
        text = f"{self._scheduler} cannot use this object: {refused.why}"
        place = refused.namespace or "default"
        await self._post_event(refused.name, place, "Warning", "Refused", "Scheduling", text, regarding)

    async def set_unscheduled(self, pod: Pod, reason: str, message: str, nominated: str | None = None) -> None:
        """Set the PodScheduled condition to False, and the nominated node unless `nominated` is None."""
        status: dict[str, Any] = {}
        if reason:
            status["conditions"] = [
                self._condition("PodScheduled", "False", reason, message, pod.metadata.generation)
            ]  # fmt: skip
        if nominated is not None:
            status["nominatedNodeName"] = nominated or None
        await self._patch_status(pod, status)

    async def preempt(self, victim: Pod) -> None:
        """As kube-scheduler does: a condition, then deletion with the pod's own grace period."""
        text = messages.preempting(self._scheduler)
        generation = victim.metadata.generation
        condition = self._condition("DisruptionTarget", "True", "PreemptionByScheduler", text, generation)
        await self._patch_status(victim, {"conditions": [condition]})
        await self._api.request("DELETE", _path(victim), _encode({"preconditions": {"uid": victim.metadata.uid}}))

    async def evict(self, pod: Pod) -> None:
        """Evict through the API, which enforces disruption budgets: ApiError 429 while one forbids it."""
        meta = pod.metadata
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": meta.name, "namespace": meta.namespace},
            "deleteOptions": {"preconditions": {"uid": meta.uid}},
        }
        await self._api.request("POST", f"{_path(pod)}/eviction", _encode(body))

    async def set_selected_node(self, claim: Claim, node: str) -> None:
        """Have a volume provisioned on the pod's node."""
        meta = claim.metadata
        body = {"metadata": {"uid": meta.uid, "annotations": {SELECTED_NODE: node}}}
        path = f"/api/v1/namespaces/{meta.namespace}/persistentvolumeclaims/{meta.name}"
        await self._api.request("PATCH", path, _encode(body), content_type=_JSON_MERGE)

    async def reserve_volume(self, volume: Volume, claim: Claim) -> None:
        """Reserve a free volume for the claim; the volume controller completes the binding."""
        ref = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "namespace": claim.metadata.namespace,
            "name": claim.metadata.name,
            "uid": claim.metadata.uid,
        }
        body = {
            "metadata": {"resourceVersion": volume.metadata.resource_version, "annotations": {BOUND_BY_US: "yes"}},
            "spec": {"claimRef": ref},
        }
        path = f"/api/v1/persistentvolumes/{volume.metadata.name}"
        await self._api.request("PATCH", path, _encode(body), content_type=_JSON_MERGE)

    async def _patch_status(self, pod: Pod, status: dict[str, Any]) -> None:
        body = _encode({"metadata": {"uid": pod.metadata.uid}, "status": status})
        await self._api.request("PATCH", f"{_path(pod)}/status", body, content_type=_STRATEGIC_MERGE)

    def _condition(self, type: str, status: str, reason: str, message: str, generation: int) -> dict[str, Any]:
        return {
            "type": type,
            "status": status,
            "reason": reason,
            "message": message,
            "lastProbeTime": None,
            "lastTransitionTime": datetime.fromtimestamp(self._now(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "observedGeneration": generation,
        }

    async def _event(
        self, pod: Pod, type: str, reason: str, action: str, text: str, *, related: Pod | None = None
    ) -> None:
        meta, other = pod.metadata, _reference(related) if related is not None else None
        await self._post_event(meta.name, meta.namespace, type, reason, action, text, _reference(pod), other)

    async def _post_event(
        self, name: str, namespace: str, type: str, reason: str, action: str, text: str, regarding: dict[str, str],
        related: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._event_number += 1
        tail = f".{self._event_number:016x}"
        body: dict[str, Any] = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": name[: _MAX_NAME - len(tail)] + tail, "namespace": namespace},
            "eventTime": datetime.fromtimestamp(self._now(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": self._scheduler,
            "reportingInstance": self._instance,
            "type": type,
            "reason": reason,
            "action": action,
            "note": messages.note(text),
            "regarding": regarding,
        }
        if related is not None:
            body["related"] = related
        path = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
        await self._api.request("POST", path, _encode(body), params=_NO_VALIDATION)


def _path(pod: Pod) -> str:
    return f"/api/v1/namespaces/{pod.metadata.namespace}/pods/{pod.metadata.name}"


def _reference(pod: Pod) -> dict[str, str]:
    meta = pod.metadata
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": meta.namespace,
        "name": meta.name,
        "uid": meta.uid,
        "resourceVersion": meta.resource_version,
    }


def is_already_bound(error: ApiError) -> bool:
    """Whether a binding came too late: the pod is bound already, or is being deleted."""
    return error.status == 409 and ("already assigned" in error.message or "is being deleted" in error.message)


def is_not_found(error: ApiError) -> bool:
    """Whether the object does not exist any more, or is a new one with the same name."""
    return error.status == 404 or (error.status == 409 and "uid" in error.message.lower())


class RequestQueue:
    """Sends up to `width` requests at a time, the others in order after them. `on_low`: few are left in the queue."""

    def __init__(self, width: int, on_low: Callable[[], None] = lambda: None) -> None:
        self.width, self._on_low = width, on_low
        self._waiting: deque[Request] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self.drained = asyncio.Event()
        self.drained.set()

    def __len__(self) -> int:
        """Requests under way and waiting."""
        return len(self._waiting) + len(self._workers)

    def put(self, request: Request) -> None:
        self._waiting.append(request)
        self.drained.clear()
        if len(self._workers) < self.width:
            task = asyncio.create_task(self._work())
            self._workers.add(task)
            task.add_done_callback(self._done)

    async def _work(self) -> None:
        while self._waiting:
            request = self._waiting.popleft()
            try:
                await request()
            except Exception:
                _log.exception("a request to the cluster failed")
            if len(self._waiting) <= self.width:
                self._on_low()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._workers.discard(task)
        if not self._workers and not self._waiting:
            self.drained.set()

    async def drain(self, within_s: float) -> bool:
        """Wait until all requests are done; False on a timeout."""
        try:
            async with asyncio.timeout(within_s):
                await self.drained.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self._waiting.clear()
        for task in list(self._workers):
            task.cancel()
