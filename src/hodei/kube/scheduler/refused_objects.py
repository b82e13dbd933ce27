"""Objects of the cluster that cannot be used as they are: remembered by name, logged once for each new cause, and told.

One object must never stop the scheduler. Whoever reads objects calls `put` for one that cannot be read and goes on without
it; `clear` when it can be read again or is gone. Pods of ours are told by their condition besides.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from msgspec import Struct

from hodei.kube.api.objects import Meta

_log = logging.getLogger(__name__)
_LONGEST = 500
# Past so many, new ones are counted and no longer kept by name: memory is not for garbage.
_MOST = 10_000
# What an object of each collection is called, to speak of it in Events.
KINDS = {
    "namespaces": "Namespace",
    "nodes": "Node",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "persistentvolumes": "PersistentVolume",
    "storageclasses": "StorageClass",
    "csinodes": "CSINode",
    "csidrivers": "CSIDriver",
    "csistoragecapacities": "CSIStorageCapacity",
    "poddisruptionbudgets": "PodDisruptionBudget",
    "services": "Service",
    "replicationcontrollers": "ReplicationController",
    "replicasets": "ReplicaSet",
    "statefulsets": "StatefulSet",
    "jobs": "Job",
    "podgroups": "PodGroup",
    "workloads": "Workload",
    "pods": "Pod",
}


class Refused(Struct, frozen=True):
    """`resource`: the path of its collection, such as `/api/v1/nodes`."""

    resource: str
    namespace: str
    name: str
    uid: str
    why: str


class Refusals:
    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], str] = {}
        self.total: Counter[str] = Counter()
        # Called once for each new cause, to post an Event.
        self.told: Callable[[Refused], None] = lambda refused: None

    def put(self, resource: str, meta: Meta, why: str) -> None:
        key, why = (resource, meta.namespace, meta.name), " ".join(why.split())[:_LONGEST]
        if self._known.get(key) == why:
            return
        if key in self._known or len(self._known) < _MOST:
            self._known[key] = why
        self.total[resource] += 1
        name = f"{meta.namespace}/{meta.name}" if meta.namespace else meta.name
        _log.warning("%s of %s cannot be used as it is: %s", name or "an object without a name", resource, why)
        self.told(Refused(resource, meta.namespace, meta.name, meta.uid, why))

    def clear(self, resource: str, meta: Meta) -> None:
        if self._known:
            self._known.pop((resource, meta.namespace, meta.name), None)

    def now(self) -> Counter[str]:
        """How many of each resource cannot be used now."""
        return Counter(resource for resource, _, _ in self._known)


def said(error: BaseException) -> str:
    """An error in one line, with its kind where its text alone says little."""
    text = str(error)
    return text if text and isinstance(error, ValueError) else f"{type(error).__name__}: {text}".rstrip(": ")
