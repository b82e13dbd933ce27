"""What is done to the cluster: bindings, conditions, events, deletions. Each is one request that the API guards by the pod's
uid, so that a pod which was deleted and made again under the same name is never meant by mistake."""

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
from hodei.kube.scheduler.cache import KINDS, Refused

_MERGE = "application/strategic-merge-patch+json"
_PLAIN_MERGE = "application/merge-patch+json"
_LONGEST_NAME = 253
# The API reads every body twice to warn of fields that it does not know; ours have none, and there are many of them.
_UNCHECKED = {"fieldValidation": "Ignore"}
_encode = msgspec.json.encode


class PodApi:
    """`reports`: which Events are posted: all, or those of failures and preemptions alone."""

    def __init__(
        self,
        api: Api,
        scheduler: str,
        now: Callable[[], float] = time.time,
        *,
        reports: Literal["all", "failures"] = "all",
        instance: str = "",
    ) -> None:
        self._api, self._scheduler, self._now = api, scheduler, now
        self._instance = instance or f"{scheduler}-{socket.gethostname()}"[:128]
        self.reports = reports
        # Names of Events must not meet those of another process, nor of this one's past.
        self._turn = int.from_bytes(os.urandom(6), "big") << 16

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
        await self._api.request("POST", f"{_path(pod)}/binding", body, params=_UNCHECKED)

    async def say_scheduled(self, pod: Pod, node: str) -> None:
        if self.reports == "all":
            text = messages.assigned(pod.metadata.namespace, pod.metadata.name, node)
            await self._event(pod, "Normal", "Scheduled", "Binding", text)

    async def say_failed(self, pod: Pod, text: str) -> None:
        await self._event(pod, "Warning", "FailedScheduling", "Scheduling", text)

    async def say_preempted(self, victim: Pod, by: Pod, node: str) -> None:
        text = messages.preempted(by.metadata.uid, node)
        await self._event(victim, "Normal", "Preempted", "Preempting", text, related=by)

    async def say_evicted(self, pod: Pod, why: str) -> None:
        await self._event(pod, "Normal", "Evicted", "Evicting", why)

    async def say_refused(self, refused: Refused) -> None:
        """Of an object of any kind; Events about what has no namespace are in `default`."""
        *where, collection = refused.resource.strip("/").split("/")
        regarding = {
            "apiVersion": "/".join(where[1:]),
            "kind": KINDS.get(collection, collection),
            "namespace": refused.namespace,
            "name": refused.name,
            "uid": refused.uid,
        }
        text = f"{self._scheduler} cannot use it: {refused.why}"
        place = refused.namespace or "default"
        await self._post_event(refused.name, place, "Warning", "Refused", "Scheduling", text, regarding)

    async def set_unscheduled(self, pod: Pod, reason: str, message: str, nominated: str | None = None) -> None:
        """The condition that people, autoscalers and descheduling tools read; `nominated`: None to leave it."""
        status: dict[str, Any] = {}
        if reason:
            status["conditions"] = [
                self._condition("PodScheduled", "False", reason, message, pod.metadata.generation)
            ]  # fmt: skip
        if nominated is not None:
            status["nominatedNodeName"] = nominated or None
        await self._patch_status(pod, status)

    async def preempt(self, victim: Pod) -> None:
        """As kube-scheduler does: told why, then deleted with its own grace. Budgets were the choice's business."""
        text = messages.making_room(self._scheduler)
        generation = victim.metadata.generation
        condition = self._condition("DisruptionTarget", "True", "PreemptionByScheduler", text, generation)
        await self._patch_status(victim, {"conditions": [condition]})
        await self._api.request("DELETE", _path(victim), _encode({"preconditions": {"uid": victim.metadata.uid}}))

    async def evict(self, pod: Pod) -> None:
        """Asked to go by the eviction API: budgets are the API's to keep. ApiError 429 while one forbids it."""
        meta = pod.metadata
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": meta.name, "namespace": meta.namespace},
            "deleteOptions": {"preconditions": {"uid": meta.uid}},
        }
        await self._api.request("POST", f"{_path(pod)}/eviction", _encode(body))

    async def choose_node(self, claim: Claim, node: str) -> None:
        """A volume is to be made where the pod goes: whoever makes it looks for this."""
        meta = claim.metadata
        body = {"metadata": {"uid": meta.uid, "annotations": {SELECTED_NODE: node}}}
        path = f"/api/v1/namespaces/{meta.namespace}/persistentvolumeclaims/{meta.name}"
        await self._api.request("PATCH", path, _encode(body), content_type=_PLAIN_MERGE)

    async def promise_volume(self, volume: Volume, claim: Claim) -> None:
        """A free volume is the claim's from now on; the cluster's volume controller does the rest."""
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
        await self._api.request("PATCH", path, _encode(body), content_type=_PLAIN_MERGE)

    # ---------------------------------------------------------------------------------------------- inside

    async def _patch_status(self, pod: Pod, status: dict[str, Any]) -> None:
        body = _encode({"metadata": {"uid": pod.metadata.uid}, "status": status})
        await self._api.request("PATCH", f"{_path(pod)}/status", body, content_type=_MERGE)

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
        self._turn += 1
        tail = f".{self._turn:016x}"
        body: dict[str, Any] = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": name[: _LONGEST_NAME - len(tail)] + tail, "namespace": namespace},
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
        await self._api.request("POST", path, _encode(body), params=_UNCHECKED)


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


def is_settled(error: ApiError) -> bool:
    """Whether a binding came too late: somebody else has bound the pod, or it is being deleted."""
    return error.status == 409 and ("already assigned" in error.message or "is being deleted" in error.message)


def is_gone(error: ApiError) -> bool:
    """Whether what was asked about is not there any more, or is another by the same name."""
    return error.status == 404 or (error.status == 409 and "uid" in error.message.lower())


# --------------------------------------------------------------------------------------- request queue
# Requests under way: as many at a time as the lane is wide, the others in order behind them.


_log = logging.getLogger(__name__)
Work = Callable[[], Coroutine[Any, Any, None]]


class RequestQueue:
    def __init__(self, width: int) -> None:
        self.width = width
        self._waiting: deque[Work] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self.drained = asyncio.Event()
        self.drained.set()
        # Called when hardly anybody waits any more.
        self.quiet: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        """How many are under way or waiting."""
        return len(self._waiting) + len(self._workers)

    def put(self, work: Work) -> None:
        self._waiting.append(work)
        self.drained.clear()
        if len(self._workers) < self.width:
            task = asyncio.create_task(self._serve())
            self._workers.add(task)
            task.add_done_callback(self._done)

    async def _serve(self) -> None:
        while self._waiting:
            work = self._waiting.popleft()
            try:
                await work()
            except asyncio.CancelledError:
                raise
            except Exception:
                _log.exception("a request to the cluster failed")  # the others go on
            if len(self._waiting) <= self.width:
                self.quiet()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._workers.discard(task)
        if not self._workers and not self._waiting:
            self.drained.set()

    async def finish(self, within_s: float) -> bool:
        """Wait until all are done; False if that takes too long."""
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
