"""Pods and nodes read for a live cluster: equal pods share one reading, because most pods are one of many alike.

A pod's name is not part of it, nor are the labels and volumes that the cluster itself makes different for each.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from msgspec import Struct, structs

from hodei.kube.api.objects import CsiNode, Pod
from hodei.kube.api.objects import Node as KubeNode
from hodei.kube.api.quantities import PODS, STAND_INS, UNSAID, Counting, requests_of
from hodei.kube.scheduler import translate
from hodei.kube.scheduler.cache import ClusterCache, Refusals, said
from hodei.kube.scheduler.selectors import picked_by
from hodei.kube.scheduler.translate import ESTIMATE, MAX_EXEC_TIME, Wanted
from hodei.model.node import Node
from hodei.model.resources import CPU, MEMORY, Resources

# Room for what is not said: nobody is refused for it.
_BOUNDLESS = dict.fromkeys(UNSAID.values(), 1 << 50)
# One of these per node, where each takes one pod of ours and no more.
SLOT = "hodei.io/slot"
_KEPT = 20_000
PODS_PATH, NODES_PATH = "/api/v1/pods", "/api/v1/nodes"
_LATEST_MS = 1 << 48  # no time of the API is later: thousands of years from now
# Pods of these do not end by themselves; where starts are promised nobody may count on their end.
_SERVICES = ("DaemonSet", "ReplicaSet", "ReplicationController", "StatefulSet")
SERVICES_LAST_MS = 10 * 365 * 86_400_000


class Reading(Struct, frozen=True):
    """`profile`: the line that all pods wait in. `one_per_node`: a node takes one pod of ours, whatever it asks for."""

    profile: str = "default"
    one_per_node: bool = False
    services_last_ms: int = 0  # how long those run that end only when someone ends them; 0 for "nobody knows"


class Reader:
    def __init__(self, cache: ClusterCache, reading: Reading) -> None:
        self._cache, self._reading = cache, reading
        self.refusals = Refusals()
        self._known: dict[bytes, Wanted] = {}
        counting = cache.surroundings.counting
        self._with_stand_ins = Counting(counting.ignored, STAND_INS)

    def pod(self, pod: Pod, *, ours: bool) -> Wanted:
        """It never raises, whatever the pod says: one that cannot be read is refused."""
        try:
            return self._known_or_read(pod, ours)
        except Exception as error:
            why = f"the pod cannot be read: {said(error)}"
            self.refusals.put(PODS_PATH, pod.metadata, why)
            return translate.unreadable(pod, why, profile=self._reading.profile)

    def _known_or_read(self, pod: Pod, ours: bool) -> Wanted:
        key = self._key(pod, ours)
        if key is None:
            return self._read(pod, ours)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            known = self._known[key] = self._read(pod, ours)
        return known

    def node(self, node: KubeNode, drivers: CsiNode | None) -> Node:
        """It never raises either: what cannot be read of a node is not there, and one that cannot be read takes no pod."""
        more = {**_BOUNDLESS, SLOT: 1} if self._reading.one_per_node else _BOUNDLESS
        try:
            found, wrong = translate.node(node, drivers, more), translate.wrong_with(node)
        except Exception as error:
            wrong = f"the node cannot be read: {said(error)}"
            found = Node(node.metadata.name, "kubernetes", kind="kubernetes", capacity={**more, PODS: 0})
        if wrong:
            self.refusals.put(NODES_PATH, node.metadata, wrong)
        else:
            self.refusals.clear(NODES_PATH, node.metadata)
        return found

    def _key(self, pod: Pod, ours: bool) -> bytes | None:
        """What a pod is read by; None for one that is like no other, by its storage."""
        spec, meta = pod.spec, pod.metadata
        if any(
            volume.persistent_volume_claim or volume.ephemeral or volume.gce_persistent_disk
            or volume.aws_elastic_block_store or volume.iscsi or volume.rbd
            for volume in spec.volumes
        ):  # fmt: skip
            return None
        cache = self._cache.surroundings
        said = meta.annotations
        wanted = (ESTIMATE, MAX_EXEC_TIME, cache.priority_annotation)
        return msgspec.msgpack.encode(
            (
                ours,
                meta.namespace,
                owner_of(pod),
                sorted(meta.labels.items()),
                [said.get(name) for name in wanted],
                () if spec.topology_spread_constraints else picked_by(pod, cache.owners),
                structs.replace(spec, node_name="", volumes=()),
                (pod.status.container_statuses, pod.status.init_container_statuses) if spec.node_name else (),
                [one for one in pod.status.conditions if one.type == "PodResizePending"],
            )
        )

    def _read(self, pod: Pod, ours: bool) -> Wanted:
        wanted = translate.pod(pod, self._cache.surroundings, profile=self._reading.profile)
        task = wanted.job.tasks[0]
        more = self._unsaid(pod, task.request)
        if ours and self._reading.one_per_node:
            more = {**more, SLOT: 1}
        task = structs.replace(task, name="pod", request={**task.request, **more})
        job = structs.replace(wanted.job, name=owner_of(pod), tasks=(task,), annotations={})
        if self._reading.services_last_ms and not job.estimate_ms and job.name.partition("/")[0] in _SERVICES:
            job = structs.replace(job, estimate_ms=self._reading.services_last_ms)
        return structs.replace(wanted, job=job)

    def _unsaid(self, pod: Pod, request: Resources) -> Resources:
        if CPU in request and MEMORY in request and all(
            {CPU, MEMORY} <= (one.resources.requests.keys() | one.resources.limits.keys()) for one in pod.spec.containers
        ):  # fmt: skip
            return {}
        taken = requests_of(pod, self._with_stand_ins)
        lacking = {UNSAID[name]: taken.get(name, 0) - request.get(name, 0) for name in UNSAID}
        return {name: amount for name, amount in lacking.items() if amount > 0}


def owner_of(pod: Pod) -> str:
    """Whose pod it is, to know its like by: the workload that made it, else its own name."""
    owner = next((one for one in pod.metadata.owner_references if one.controller), None)
    return f"{owner.kind}/{owner.name}" if owner is not None else "pod"


def at_ms(stamp: str | None, otherwise: int = 0) -> int:
    """A time of the API in milliseconds; `otherwise` for what is none."""
    if not stamp:
        return otherwise
    try:
        when = datetime.fromisoformat(stamp)
        found = round((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        return otherwise
    return max(0, min(found, _LATEST_MS))
