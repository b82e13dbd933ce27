"""Translation with a cache: most pods are one of many equal ones, which share one result.

The key leaves out the pod's name, and volumes that need no lookup.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from msgspec import Struct, structs

from hodei.kube.api.objects import CsiNode, Pod
from hodei.kube.api.objects import Node as KubeNode
from hodei.kube.api.quantities import DEFAULT_REQUESTS, PODS, UNDECLARED, RequestOptions, requests_of
from hodei.kube.scheduler import translate
from hodei.kube.scheduler.cache import ClusterCache, Refusals, describe_error
from hodei.kube.scheduler.selectors import selectors_of
from hodei.kube.scheduler.translate import ESTIMATE, MAX_EXEC_TIME, PodInfo
from hodei.model.node import Node
from hodei.model.resources import CPU, MEMORY, Resources

# Undeclared requests only affect scores, never whether a pod fits.
_UNLIMITED = dict.fromkeys(UNDECLARED.values(), 1 << 50)
# One per node, with --one-pod-per-node.
SLOT = "hodei.io/slot"
_CACHE_SIZE = 20_000
PODS_PATH, NODES_PATH = "/api/v1/pods", "/api/v1/nodes"
_LATEST_MS = 1 << 48  # no timestamp of the API is later
# Pods of these do not end by themselves: start reservations must not count on their end.
_LONG_RUNNING = ("DaemonSet", "ReplicaSet", "ReplicationController", "StatefulSet")
LONG_RUNNING_MS = 10 * 365 * 86_400_000


class ReaderOptions(Struct, frozen=True):
    """`profile`: the profile of all pods. `one_per_node`: a node takes one pod of ours, whatever it requests."""

    profile: str = "default"
    one_per_node: bool = False
    long_running_ms: int = 0  # assumed run time of pods that do not end by themselves; 0 for unknown


class Reader:
    def __init__(self, cache: ClusterCache, options: ReaderOptions) -> None:
        self._cache, self._options = cache, options
        self.refusals = Refusals()
        self._translated: dict[bytes, PodInfo] = {}
        request_options = cache.context.request_options
        self._with_default_requests = RequestOptions(request_options.ignored, DEFAULT_REQUESTS)

    def pod(self, pod: Pod, *, ours: bool) -> PodInfo:
        """Never raises: a pod that cannot be read is refused."""
        try:
            return self._translate_cached(pod, ours)
        except Exception as error:
            why = f"the pod cannot be read: {describe_error(error)}"
            self.refusals.put(PODS_PATH, pod.metadata, why)
            return translate.unreadable(pod, why, profile=self._options.profile)

    def _translate_cached(self, pod: Pod, ours: bool) -> PodInfo:
        key = self._key(pod, ours)
        if key is None:
            return self._translate(pod, ours)
        known = self._translated.get(key)
        if known is None:
            if len(self._translated) >= _CACHE_SIZE:
                self._translated.clear()
            known = self._translated[key] = self._translate(pod, ours)
        return known

    def node(self, node: KubeNode, drivers: CsiNode | None) -> Node:
        """Never raises: unreadable amounts count as 0, and a node that cannot be read takes no pod."""
        extra = {**_UNLIMITED, SLOT: 1} if self._options.one_per_node else _UNLIMITED
        try:
            found, problems = translate.node(node, drivers, extra), translate.unreadable_amounts(node)
        except Exception as error:
            problems = f"the node cannot be read: {describe_error(error)}"
            found = Node(node.metadata.name, "kubernetes", kind="kubernetes", capacity={**extra, PODS: 0})
        if problems:
            self.refusals.put(NODES_PATH, node.metadata, problems)
        else:
            self.refusals.clear(NODES_PATH, node.metadata)
        return found

    def _key(self, pod: Pod, ours: bool) -> bytes | None:
        """The cache key; None for pods with volumes of their own."""
        spec, meta = pod.spec, pod.metadata
        if any(
            volume.persistent_volume_claim or volume.ephemeral or volume.gce_persistent_disk
            or volume.aws_elastic_block_store or volume.iscsi or volume.rbd
            for volume in spec.volumes
        ):  # fmt: skip
            return None
        cache = self._cache.context
        annotations = meta.annotations
        wanted = (ESTIMATE, MAX_EXEC_TIME, cache.priority_annotation)
        return msgspec.msgpack.encode(
            (
                ours,
                meta.namespace,
                owner_of(pod),
                sorted(meta.labels.items()),
                [annotations.get(name) for name in wanted],
                () if spec.topology_spread_constraints else selectors_of(pod, cache.selector_sources),
                structs.replace(spec, node_name="", volumes=()),
                (pod.status.container_statuses, pod.status.init_container_statuses) if spec.node_name else (),
                [one for one in pod.status.conditions if one.type == "PodResizePending"],
            )
        )

    def _translate(self, pod: Pod, ours: bool) -> PodInfo:
        wanted = translate.pod(pod, self._cache.context, profile=self._options.profile)
        task = wanted.job.tasks[0]
        extra = self._undeclared(pod, task.request)
        if ours and self._options.one_per_node:
            extra = {**extra, SLOT: 1}
        task = structs.replace(task, name="pod", request={**task.request, **extra})
        job = structs.replace(wanted.job, name=owner_of(pod), tasks=(task,), annotations={})
        if self._options.long_running_ms and not job.estimate_ms and job.name.partition("/")[0] in _LONG_RUNNING:
            job = structs.replace(job, estimate_ms=self._options.long_running_ms)
        return structs.replace(wanted, job=job)

    def _undeclared(self, pod: Pod, request: Resources) -> Resources:
        if CPU in request and MEMORY in request and all(
            {CPU, MEMORY} <= (one.resources.requests.keys() | one.resources.limits.keys()) for one in pod.spec.containers
        ):  # fmt: skip
            return {}
        counted = requests_of(pod, self._with_default_requests)
        missing = {UNDECLARED[name]: counted.get(name, 0) - request.get(name, 0) for name in UNDECLARED}
        return {name: amount for name, amount in missing.items() if amount > 0}


def owner_of(pod: Pod) -> str:
    """The workload that created the pod, so that estimates are learned per workload."""
    owner = next((one for one in pod.metadata.owner_references if one.controller), None)
    return f"{owner.kind}/{owner.name}" if owner is not None else "pod"


def at_ms(stamp: str | None, default: int = 0) -> int:
    """A timestamp of the API in milliseconds; `default` if it is missing or invalid."""
    if not stamp:
        return default
    try:
        when = datetime.fromisoformat(stamp)
        found = round((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        return default
    return max(0, min(found, _LATEST_MS))
