"""Carries out decisions: binds placed pods, binds their volumes first, and removes pods that have to leave.

Each binding and removal is a request in a queue, so decisions never wait for the cluster. What comes of it is a fact for one
of the next steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from msgspec import Struct, structs

from hodei.engine.topology_index import AssumedVolumes
from hodei.kube.api.client import Api, ApiError
from hodei.kube.api.objects import NO_PROVISIONER, SELECTED_NODE, Claim, Pod, decode
from hodei.kube.scheduler.cache import ClusterCache
from hodei.kube.scheduler.groups import Entry
from hodei.kube.scheduler.metrics import Metrics
from hodei.kube.scheduler.pod_api import PodApi, Request, RequestQueue, is_already_bound, is_not_found
from hodei.kube.scheduler.pods import Pods
from hodei.kube.scheduler.status_reporter import StatusReporter
from hodei.kube.scheduler.volumes import claim_handle, claim_name, claims_to_bind, volume_on
from hodei.model.ids import RunId
from hodei.model.node import Volume as VolumeNeed

_log = logging.getLogger(__name__)
PROVISION_TIMEOUT_S = 600.0
_BIND_TRIES = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
# Rights are granted by people: retrying sooner only fills the cluster's audit log.
FORBIDDEN_PAUSE_S = 60.0
_LOG_EVERY = 20
_EVICTION_ROLE = "Grant the role hodei-reclaim (deploy/kubernetes/rbac-reclaim.yaml): it allows evictions."


class BindFailed(Exception):
    """The pod cannot be bound to this node; another node may work."""


class VolumeBinder:
    """Binds the claims that wait for their first consumer, before the pod itself is bound."""

    def __init__(self, cache: ClusterCache, pod_api: PodApi, pods: Pods, assumed: AssumedVolumes | None = None) -> None:
        self._cache, self._pod_api, self._pods = cache, pod_api, pods
        self._assumed = AssumedVolumes() if assumed is None else assumed
        self._changed = asyncio.Event()
        cache.storage_changed.append(self._storage_changed)

    def is_needed(self, pod: Pod) -> bool:
        return bool(pod.spec.volumes) and bool(claims_to_bind(pod, self._cache.context.storage))

    async def bind(self, pod: Pod, node: str) -> None:
        """Return when all claims of the pod are bound. Raises BindFailed or ApiError."""
        storage = self._cache.context.storage
        keys = {(claim.metadata.namespace, claim.metadata.name) for claim in claims_to_bind(pod, storage)}
        annotated: set[tuple[str, str]] = set()  # claims seen with the node's name on them
        try:
            for key in sorted(keys):
                await self._request(storage.claims[key], node)
            async with asyncio.timeout(PROVISION_TIMEOUT_S):
                while not all((claim := storage.claims.get(key)) is not None and claim.bound for key in keys):
                    self._check(keys, node, annotated)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise BindFailed(f"volumes were not provisioned within {PROVISION_TIMEOUT_S:g} s") from None

    def release_pod(self, pod: Pod) -> None:
        """The pod was not bound: other claims may use the volumes assumed for it."""
        for volume in pod.spec.volumes:
            if name := claim_name(pod, volume):
                self._assumed.release(f"claim/{pod.metadata.namespace}/{name}")

    def release(self, volumes: Iterable[VolumeNeed]) -> None:
        for volume in volumes:
            self._assumed.release(volume.handle)

    async def _request(self, claim: Claim, node: str) -> None:
        """Reserve a free volume for the claim, or have one provisioned."""
        known = self._pods.nodes.get(node)
        if known is None:
            raise BindFailed(f"node {node} was deleted")
        handle, storage = claim_handle(claim), self._cache.context.storage
        taken = {volume for other, volume in self._assumed.claims().items() if other != handle}
        volume = volume_on(known, claim, storage, taken, first=self._assumed.of(handle))
        if volume is not None:
            self._assumed.take(volume.metadata.name, handle)
            if volume.spec.claim_ref is None:
                await self._pod_api.reserve_volume(volume, claim)
        elif not self._can_be_provisioned(claim):
            raise BindFailed(f"no volume is left for the claim {_name(claim)} on node {node}")
        elif claim.metadata.annotations.get(SELECTED_NODE) != node:
            await self._pod_api.set_selected_node(claim, node)

    def _can_be_provisioned(self, claim: Claim) -> bool:
        cls = self._cache.classes.objects.get(claim.class_name)
        return cls is not None and cls.provisioner not in ("", NO_PROVISIONER)

    def _check(self, keys: set[tuple[str, str]], node: str, annotated: set[tuple[str, str]]) -> None:
        """Raise if a claim cannot be bound here: a provisioner that fails removes the node's name from the claim."""
        for key in keys:
            name, claim = "/".join(key), self._cache.claims.objects.get(key)
            if claim is None:
                raise BindFailed(f"the claim {name} was deleted")
            selected = claim.metadata.annotations.get(SELECTED_NODE)
            if selected == node:
                annotated.add(key)
            elif not claim.bound and selected is not None:
                raise BindFailed(f"the claim {name} is provisioned for node {selected}")
            elif not claim.bound and key in annotated:
                raise BindFailed(f"no volume can be provisioned for the claim {name} on node {node}")

    def _storage_changed(self) -> None:
        """Drop assumptions that the cluster now shows."""
        self._changed.set()
        claims, volumes = self._cache.claims.objects, self._cache.volumes.objects
        for handle, name in self._assumed.claims().items() if self._assumed else ():
            _, namespace, claim_name = handle.split("/", 2)
            volume = volumes.get(name)
            if volume is None or volume.spec.claim_ref is not None or (namespace, claim_name) not in claims:
                self._assumed.release(handle)


class Binder:
    """Binds pods through `queue`. `report`: queues a status report. `wake`: a binding failed, the loop should run."""

    def __init__(
        self,
        api: Api,
        pods: Pods,
        pod_api: PodApi,
        volumes: VolumeBinder,
        reporter: StatusReporter,
        metrics: Metrics,
        now_ms: Callable[[], int],
        queue: RequestQueue,
        report: Callable[[Request], None],
        wake: Callable[[], None],
    ) -> None:
        self._api, self._pods, self._pod_api, self.volumes = api, pods, pod_api, volumes
        self._reporter, self._metrics, self._now_ms = reporter, metrics, now_ms
        self._queue, self._report, self._wake = queue, report, wake

    def bind(self, entry: Entry) -> None:
        self._queue.put(partial(self._bind_with_volumes, entry, entry.run, entry.node))

    async def _bind_with_volumes(self, entry: Entry, run: RunId, node: str) -> None:
        try:
            await self._bind(entry.uid, run, node)
        finally:
            placed_again = entry.assigned and entry.run != run
            bound = entry.run == run and entry.stage == "bound"
            if entry.pod.spec.volumes and not placed_again and not bound:
                self.volumes.release_pod(entry.pod)

    async def _bind(self, uid: str, run: RunId, node: str) -> None:
        entry = self._pods.entries.get(uid)
        if entry is None or not _awaits_binding(entry, run):
            return
        pod, began = entry.pod, time.perf_counter()
        try:
            if self.volumes.is_needed(pod):
                await self.volumes.bind(pod, node)
                if not _awaits_binding(entry, run):
                    return  # its gang has timed out
            if node not in self._pods.nodes:
                raise BindFailed(f"node {node} was deleted")
            if resource := self._pods.lacking_resource(entry):
                raise BindFailed(f"other pods have taken the {resource} of node {node}")
            await self._reporter.wait_sent(uid)  # a condition must not arrive after the binding
            await self._post_binding(pod, node)
        except BindFailed as failed:
            self._not_bound(entry, run, str(failed), removed=False)
        except ApiError as error:
            self._not_bound(entry, run, error.message, removed=is_not_found(error) or is_already_bound(error))
        except Exception as error:  # the pod must not stay "placed" without a binding under way
            _log.exception("the binding of pod %s failed", entry.name)
            self._not_bound(entry, run, f"{type(error).__name__}: {error}", removed=False)
        else:
            self._pods.mark_bound(uid, run)
            self._metrics.bound(entry, self._now_ms(), time.perf_counter() - began)
            if self._pod_api.events == "all":
                self._report(lambda: log_failure(self._pod_api.record_scheduled(pod, node)))

    async def _post_binding(self, pod: Pod, node: str) -> None:
        """Post the binding; after an unknown outcome, check the pod before posting again."""
        for attempt in range(_BIND_TRIES):
            try:
                await self._pod_api.bind(pod, node)
                return
            except ApiError as error:
                if error.status == 409 and not is_not_found(error) and await self._is_on(pod, node):
                    return  # an earlier try succeeded
                if not error.retriable or attempt == _BIND_TRIES - 1:
                    raise
            await asyncio.sleep(min(0.05 * 2**attempt, 2.0))
            if await self._is_on(pod, node):
                return

    async def _is_on(self, pod: Pod, node: str) -> bool:
        meta = pod.metadata
        try:
            found = await self._api.request("GET", f"/api/v1/namespaces/{meta.namespace}/pods/{meta.name}")
        except ApiError as error:
            if is_not_found(error):
                raise
            return False
        current = decode(found, Pod)
        return current.metadata.uid == meta.uid and current.spec.node_name == node

    def _not_bound(self, entry: Entry, run: RunId, why: str, *, removed: bool) -> None:
        self._pods.mark_not_bound(entry.uid, run, why, removed=removed)
        self._metrics.failed()
        if not removed:
            _log.warning("pod %s was not bound and is queued again: %s", entry.name, why)
            self._report(self._reporter.not_bound(entry, why))
        self._wake()


def _awaits_binding(entry: Entry, run: RunId) -> bool:
    return entry.run == run and entry.stage in ("placed", "inactive")


def _name(claim: Claim) -> str:
    return f"{claim.metadata.namespace}/{claim.metadata.name}"


async def log_failure(request: Coroutine[Any, Any, None]) -> None:
    """Send a request whose loss does not matter, such as an Event."""
    try:
        await request
    except ApiError as error:
        if not is_not_found(error):
            _log.warning("an Event or a condition was not written: %s", error.message)


_PodRequest = Callable[[Pod], Coroutine[Any, Any, None]]


class _Removal(Struct, eq=False):
    """`remove` deletes or evicts the pod of `run`; `record` posts the Event afterwards."""

    uid: str
    run: RunId
    why: str
    remove: _PodRequest
    record: _PodRequest
    tries: int = 0
    sent: bool = False


class Removals:
    """Evicts and preempts pods, with retries. A removal that waits for its next try takes no place in the queue."""

    def __init__(self, pod_api: PodApi, pods: Pods, queue: RequestQueue) -> None:
        self._pod_api, self._pods, self._queue = pod_api, pods, queue
        self._active: dict[str, _Removal] = {}
        # By run; the controller may order the same removal again.
        self._cancelled: dict[RunId, _Removal] = {}

    def evict(self, entry: Entry, why: str) -> None:
        pod_api = self._pod_api
        self._put(_Removal(entry.uid, entry.run, why, pod_api.evict, partial(pod_api.record_evicted, why=why)))

    def preempt(self, victim: Entry, preemptors: list[Entry]) -> None:
        pod_api, node = self._pod_api, victim.node

        async def record(pod: Pod) -> None:
            if preemptors:
                await pod_api.record_preempted(pod, preemptors[0].pod, node)

        self._put(_Removal(victim.uid, victim.run, "preempted", pod_api.preempt, record))

    def cancel(self, run: RunId) -> bool:
        """Keep the pod after all; False if its removal was sent, or may have been."""
        removal = next((one for one in self._active.values() if one.run == run and not one.sent), None)
        if removal is None:
            return False
        del self._active[removal.uid]
        self._cancelled = {run: one for run, one in self._cancelled.items() if one.uid in self._pods.entries}
        self._cancelled[run] = removal
        return True

    def resume(self, run: RunId) -> bool:
        """Repeat a removal that was cancelled; False if there is none."""
        removal = self._cancelled.pop(run, None)
        if removal is not None:
            self._put(structs.replace(removal))
        return removal is not None

    def _put(self, removal: _Removal) -> None:
        self._cancelled.pop(removal.run, None)
        if removal.uid not in self._active:
            self._active[removal.uid] = removal
            self._queue.put(lambda: self._send(removal))

    async def _send(self, removal: _Removal) -> None:
        if self._active.get(removal.uid) is not removal:
            return  # cancelled
        removal.sent = True
        entry = self._pods.entries.get(removal.uid)
        if entry is None or entry.pod.terminating:
            del self._active[removal.uid]
            return
        try:
            await removal.remove(entry.pod)
        except ApiError as error:
            if is_not_found(error):
                del self._active[removal.uid]
            else:
                self._retry_later(entry, removal, error)
            return
        except Exception as error:
            _log.exception("the removal of pod %s failed", entry.name)
            self._retry_later(entry, removal, ApiError(0, "Failed", f"{type(error).__name__}: {error}"))
            return
        del self._active[removal.uid]
        _log.info("pod %s is removed: %s", entry.name, removal.why)
        await log_failure(removal.record(entry.pod))

    def _retry_later(self, entry: Entry, removal: _Removal, error: ApiError) -> None:
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(removal.tries, 20), LONGEST_PAUSE_S)
        if not error.retriable:
            pause_s = FORBIDDEN_PAUSE_S
        if removal.tries % _LOG_EVERY == 0:
            hint = _EVICTION_ROLE if error.status == 403 else error.hint
            _log.warning("pod %s cannot be removed yet, it is tried again: %s %s", entry.name, error.message, hint)
        removal.tries += 1
        asyncio.get_running_loop().call_later(pause_s, lambda: self._queue.put(lambda: self._send(removal)))
