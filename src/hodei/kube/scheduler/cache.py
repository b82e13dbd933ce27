"""The cluster as the watches show it: storage, services and workloads, pod groups, namespaces, disruption budgets.

`version` counts the storage changes after which a pod may be translated differently.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Generic, Literal, TypeVar

from msgspec import Struct

from hodei.kube.api import objects as k8s
from hodei.kube.api.quantities import DEFAULT_OPTIONS, RequestOptions
from hodei.kube.scheduler.disruption_budgets import Budgets
from hodei.kube.scheduler.gangs import Groups, WorkloadKey, Workloads, size_fields
from hodei.kube.scheduler.selectors import SYSTEM_SPREAD, SelectorSources, SpreadDefaults
from hodei.kube.scheduler.translate import PodContext, describe_error
from hodei.kube.scheduler.volumes import Storage, check_readable

_log = logging.getLogger(__name__)
_MAX_TEXT = 500
# More are counted, but not kept by name: memory is bounded.
_MAX_KEPT = 10_000
# The kind of each collection, for Events.
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


class RefusedObject(Struct, frozen=True):
    """An object that cannot be used. `resource`: the path of its collection, such as `/api/v1/nodes`."""

    resource: str
    namespace: str
    name: str
    uid: str
    why: str


class Refusals:
    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], str] = {}
        self.total: Counter[str] = Counter()
        # Called once for each new problem.
        self.listeners: list[Callable[[RefusedObject], None]] = []

    def put(self, resource: str, meta: k8s.Meta, why: str) -> None:
        key, why = (resource, meta.namespace, meta.name), " ".join(why.split())[:_MAX_TEXT]
        if self._known.get(key) == why:
            return
        if key in self._known or len(self._known) < _MAX_KEPT:
            self._known[key] = why
        self.total[resource] += 1
        name = f"{meta.namespace}/{meta.name}" if meta.namespace else meta.name
        _log.warning("%s of %s cannot be used, fix the object: %s", name or "an object without a name", resource, why)
        for listener in self.listeners:
            listener(RefusedObject(resource, meta.namespace, meta.name, meta.uid, why))

    def clear(self, resource: str, meta: k8s.Meta) -> None:
        if self._known:
            self._known.pop((resource, meta.namespace, meta.name), None)

    def now(self) -> Counter[str]:
        """How many objects of each resource cannot be used now."""
        return Counter(resource for resource, _, _ in self._known)


T = TypeVar("T")
OnChange = Callable[[Any, T | None, T | None], None]


def by_name(object: Any) -> str:
    name: str = object.metadata.name
    return name


def by_namespaced_name(object: Any) -> tuple[str, str]:
    return (object.metadata.namespace, object.metadata.name)


def by_uid(object: Any) -> str:
    uid: str = object.metadata.uid
    return uid


class _MetadataOnly(Struct, frozen=True):
    """What is known of an object that cannot be decoded."""

    metadata: k8s.Meta


class Indexer(Generic[T]):
    """The objects of one resource by key; the sink of a reflector. `on_change(key, before, after)`: None for an object that did not
    exist or is deleted. An exception in it refuses the object. `flushed` is called after each batch of changes."""

    def __init__(
        self, key: Callable[[T], Hashable], on_change: OnChange[T], flushed: Callable[[], None] = lambda: None
    ) -> None:
        self.objects: dict[Any, T] = {}
        self._key, self._on_change, self.flushed = key, on_change, flushed
        self.resource, self.refusals = "", Refusals()
        self._unreadable: set[Hashable] = set()
        self._refused: set[Hashable] = set()

    def listed(self, objects: Iterable[T]) -> None:
        """The full list. Objects that are not in it are deleted, unless they are only unreadable: those stay as last read."""
        fresh = {self._key(object): object for object in objects}
        for key in [key for key in self.objects if key not in fresh and key not in self._unreadable]:
            self._delete(key)
        self._unreadable.clear()
        for key, object in fresh.items():
            self._put(key, object)
        self.flushed()

    def changed(self, kind: Literal["ADDED", "MODIFIED", "DELETED"], object: T) -> None:
        key = self._key(object)
        if kind != "DELETED":
            self._put(key, object)
        else:
            self._delete(key)
            self._clear_refusal(key, object.metadata)  # type: ignore[attr-defined]

    def unreadable(self, kind: Literal["ADDED", "MODIFIED", "DELETED"], meta: k8s.Meta, why: str) -> None:
        """An object that cannot be decoded."""
        key = self._key(_MetadataOnly(meta))  # type: ignore[arg-type]
        if kind == "DELETED":
            self._delete(key)
            self._clear_refusal(key, meta)
        else:
            self._unreadable.add(key)
            self._refuse(key, meta, why)

    def _put(self, key: Hashable, object: T) -> None:
        meta: k8s.Meta = object.metadata  # type: ignore[attr-defined]
        if not meta.name or not (key[-1] if isinstance(key, tuple) else key):
            self._refuse(key, meta, "it has no name or no uid")
            return
        before = self.objects.get(key)
        self.objects[key] = object
        self._unreadable.discard(key)
        try:
            self._on_change(key, before, object)
        except Exception as error:
            _log.debug("while handling %s", key, exc_info=True)
            self._refuse(key, meta, describe_error(error))
        else:
            self._clear_refusal(key, meta)

    def _delete(self, key: Hashable) -> None:
        before = self.objects.pop(key, None)
        if before is None:
            return
        try:
            self._on_change(key, before, None)
        except Exception:
            _log.exception("the deletion of %s of %s could not be handled", key, self.resource)

    def _refuse(self, key: Hashable, meta: k8s.Meta, why: str) -> None:
        self._refused.add(key)
        self.refusals.put(self.resource, meta, why)

    def _clear_refusal(self, key: Hashable, meta: k8s.Meta) -> None:
        """Only clears a refusal made here; others may have refused the object for its content."""
        if self._refused and key in self._refused:
            self._refused.discard(key)
            self.refusals.clear(self.resource, meta)


# Workload kinds that select pods, as named in owner references.
SELECTING_KINDS = ("ReplicaSet", "StatefulSet")


class ClusterCache:
    """Others subscribe to its changes: `storage_changed`, `drivers_changed` (the CSI drivers of a node), and
    `pods_affected`, after a batch of changes that pending pods may depend on."""

    def __init__(
        self,
        *,
        request_options: RequestOptions = DEFAULT_OPTIONS,
        spread: SpreadDefaults = SYSTEM_SPREAD,
        priority_annotation: str = "",
        priority_preferred: bool = False,
    ) -> None:
        self.version = 0
        self.changed_groups: list[tuple[str, str]] = []
        # Workloads that define the size of a group, and those of them that have changed.
        self.sizing_workloads: dict[WorkloadKey, dict[Any, None]] = {}
        self.resized_workloads: list[WorkloadKey] = []
        self.planned: dict[WorkloadKey, int | str] = {}
        # Volcano groups that are not admitted yet (`Inqueue`).
        self.pending_volcano_groups: dict[tuple[str, str], None] = {}
        self.projects: dict[str, Mapping[str, str]] = {}
        self.budgets = Budgets()
        self.storage_changed: list[Callable[[], None]] = []
        self.drivers_changed: list[Callable[[str], None]] = []
        self.pods_affected: list[Callable[[], None]] = []
        self._services: dict[str, tuple[k8s.Service, ...]] = {}
        self._workloads: dict[WorkloadKey, k8s.Workload] = {}

        def storage(key: Any, before: Any, after: Any) -> None:
            self.version += 1
            for listener in self.storage_changed:
                listener()
            check_readable(after)

        def drivers(name: str, before: k8s.CsiNode | None, after: k8s.CsiNode | None) -> None:
            for listener in self.drivers_changed:
                listener(name)

        # Services and owners only affect how new pods are translated, so no pending pod is woken for them.
        flushed = self.announce
        self.claims = Indexer[k8s.Claim](by_namespaced_name, storage, flushed)
        self.volumes = Indexer[k8s.Volume](by_name, storage, flushed)
        self.classes = Indexer[k8s.StorageClass](by_name, storage, flushed)
        self.csi_drivers = Indexer[k8s.CsiDriver](by_name, storage, flushed)
        self.capacities = Indexer[k8s.StorageCapacity](by_namespaced_name, storage, flushed)
        self.drivers = Indexer[k8s.CsiNode](by_name, drivers, flushed)
        self.namespaces = Indexer[k8s.Namespace](by_name, self._namespace_changed, flushed)
        self.disruption_budgets = Indexer[k8s.PodDisruptionBudget](
            by_namespaced_name, lambda key, before, after: self.budgets.put(key, after), flushed
        )
        self.services = Indexer[k8s.Service](by_namespaced_name, self._service_changed)
        # Replication controllers select by plain labels, as services do.
        self.controllers = Indexer[k8s.Service](by_namespaced_name, self._service_changed)
        self.workloads = {
            kind: Indexer[k8s.Workload](by_namespaced_name, self._workload_handler(kind)) for kind in SELECTING_KINDS
        }
        self.jobs = Indexer[k8s.Workload](by_namespaced_name, self._job_changed)
        self.pod_groups = Indexer[k8s.PodGroup](by_namespaced_name, self._group_changed, flushed)
        self.grouped = Indexer[k8s.GroupedWorkload](by_namespaced_name, self._group_changed, flushed)
        self.plugin_groups = Indexer[k8s.MemberGroup](by_namespaced_name, self._group_changed, flushed)
        self.volcano_groups = Indexer[k8s.MemberGroup](by_namespaced_name, self._volcano_group_changed, flushed)
        self.groups = Groups(
            self.pod_groups.objects, self.grouped.objects, self.plugin_groups.objects, self.volcano_groups.objects,
            Workloads(self._workloads, self.jobs.objects, self.planned),
        )  # fmt: skip
        self.context = PodContext(
            Storage(
                self.claims.objects, self.volumes.objects, self.classes.objects, self.csi_drivers.objects,
                self.capacities.objects,
            ),
            SelectorSources(self._services, self._workloads),
            spread,
            request_options,
            priority_annotation,
            priority_preferred,
        )  # fmt: skip

    def announce(self) -> None:
        for listener in self.pods_affected:
            listener()

    def take_changed_groups(self) -> list[tuple[str, str]]:
        """The (namespace, name) of groups added, changed or deleted since the last call."""
        changed, self.changed_groups = self.changed_groups, []
        return changed

    def take_resized_workloads(self) -> list[WorkloadKey]:
        """The workloads resized since the last call, of those that define the size of a group."""
        resized, self.resized_workloads = self.resized_workloads, []
        return resized

    def _workload_resized(self, workload: WorkloadKey, before: k8s.Workload | None, after: k8s.Workload | None) -> None:
        if workload in self.sizing_workloads and size_fields(before) != size_fields(after):
            self.resized_workloads.append(workload)
            self.announce()

    def _job_changed(self, key: tuple[str, str], before: k8s.Workload | None, after: k8s.Workload | None) -> None:
        self._workload_resized((key[0], "Job", key[1]), before, after)

    def _namespace_changed(self, name: str, before: k8s.Namespace | None, after: k8s.Namespace | None) -> None:
        if after is None:
            self.projects.pop(name, None)
        else:
            self.projects[name] = after.metadata.labels

    def _service_changed(self, key: tuple[str, str], before: k8s.Service | None, after: k8s.Service | None) -> None:
        if (before.spec if before else None) == (after.spec if after else None):
            return
        namespace = key[0]
        selecting = (*self.services.objects.values(), *self.controllers.objects.values())
        self._services[namespace] = tuple(one for one in selecting if one.metadata.namespace == namespace)

    def _workload_handler(self, kind: str) -> Callable[[Any, k8s.Workload | None, k8s.Workload | None], None]:
        def on_change(key: tuple[str, str], before: k8s.Workload | None, after: k8s.Workload | None) -> None:
            workload = (key[0], kind, key[1])
            if after is None:
                self._workloads.pop(workload, None)
            else:
                self._workloads[workload] = after
            self._workload_resized(workload, before, after)

        return on_change

    def _volcano_group_changed(
        self, key: tuple[str, str], before: k8s.MemberGroup | None, after: k8s.MemberGroup | None
    ) -> None:
        self._group_changed(key, before, after)
        if after is not None and after.status.phase in ("", "Pending"):
            self.pending_volcano_groups[key] = None

    def _group_changed(self, key: tuple[str, str], before: Any, after: Any) -> None:
        if (before.spec if before else None) != (after.spec if after else None):
            self.changed_groups.append(key)
