"""What pods refer to and the watches keep up to date: storage, those who pick pods, groups, namespaces, budgets.

`version` counts the changes after which a pod may read differently; `groups_version` those of groups alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Generic, Literal, TypeVar

from msgspec import Struct

from hodei.kube.api.objects import (
    Claim,
    CsiDriver,
    CsiNode,
    GroupedWorkload,
    MemberGroup,
    Meta,
    Namespace,
    PodDisruptionBudget,
    PodGroup,
    Service,
    StorageCapacity,
    StorageClass,
    Volume,
    Workload,
)
from hodei.kube.api.quantities import PLAIN, Counting
from hodei.kube.scheduler.disruption_budgets import Budgets
from hodei.kube.scheduler.gangs import Groups
from hodei.kube.scheduler.owners import Owned, Place, says
from hodei.kube.scheduler.selectors import OF_THE_SYSTEM, Defaults, Owners
from hodei.kube.scheduler.translate import Surroundings
from hodei.kube.scheduler.volumes import Storage, check

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


# --------------------------------------------------------------------------------------------- indexer
# Objects of one resource by key, as the watches bring them; whoever cares is told what each was and is.


_log = logging.getLogger(__name__)
T = TypeVar("T")
Moved = Callable[[Any, T | None, T | None], None]


def by_name(thing: Any) -> str:
    name: str = thing.metadata.name
    return name


def by_place(thing: Any) -> tuple[str, str]:
    return (thing.metadata.namespace, thing.metadata.name)


def by_uid(thing: Any) -> str:
    uid: str = thing.metadata.uid
    return uid


class _Named(Struct, frozen=True):
    """All that is known of an object that cannot be decoded."""

    metadata: Meta


class Indexer(Generic[T]):
    """The sink of a reflector. `moved(key, before, after)`: None for what was not there, or is not any more."""

    def __init__(self, key: Callable[[T], Hashable], moved: Moved[T], flushed: Callable[[], None]) -> None:
        self.all: dict[Any, T] = {}
        self._key, self._moved, self.flushed = key, moved, flushed
        self.resource, self.refusals = "", Refusals()
        self._unreadable: set[Hashable] = set()
        self._refused: set[Hashable] = set()

    def listed(self, objects: Iterable[T]) -> None:
        """A full picture: whatever is not in it has gone. What cannot be read any more stays as it was last read."""
        fresh = {self._key(thing): thing for thing in objects}
        for key in [key for key in self.all if key not in fresh and key not in self._unreadable]:
            self._gone(key)
        self._unreadable.clear()
        for key, thing in fresh.items():
            self._put(key, thing)
        self.flushed()

    def changed(self, kind: Literal["ADDED", "MODIFIED", "DELETED"], thing: T) -> None:
        key = self._key(thing)
        if kind != "DELETED":
            self._put(key, thing)
        else:
            self._gone(key)
            self._accept(key, thing.metadata)  # type: ignore[attr-defined]

    def unreadable(self, kind: Literal["ADDED", "MODIFIED", "DELETED"], meta: Meta, why: str) -> None:
        """One that is there, or was, and cannot be decoded."""
        key = self._key(_Named(meta))  # type: ignore[arg-type]
        if kind == "DELETED":
            self._gone(key)
            self._accept(key, meta)
        else:
            self._unreadable.add(key)
            self._refuse(key, meta, why)

    def _put(self, key: Hashable, thing: T) -> None:
        meta: Meta = thing.metadata  # type: ignore[attr-defined]
        if not meta.name or not (key[-1] if isinstance(key, tuple) else key):
            self._refuse(key, meta, "it has no name or no uid")
            return
        before = self.all.get(key)
        self.all[key] = thing
        self._unreadable.discard(key)
        try:
            self._moved(key, before, thing)
        except Exception as error:
            _log.debug("while %s was taken in", key, exc_info=True)
            self._refuse(key, meta, said(error))
        else:
            self._accept(key, meta)

    def _gone(self, key: Hashable) -> None:
        before = self.all.pop(key, None)
        if before is None:
            return
        try:
            self._moved(key, before, None)
        except Exception:
            _log.exception("%s of %s is gone, and that could not be taken in", key, self.resource)

    def _refuse(self, key: Hashable, meta: Meta, why: str) -> None:
        self._refused.add(key)
        self.refusals.put(self.resource, meta, why)

    def _accept(self, key: Hashable, meta: Meta) -> None:
        """Whoever reads its parts may have refused it besides: only what was refused here is taken back here."""
        if self._refused and key in self._refused:
            self._refused.discard(key)
            self.refusals.clear(self.resource, meta)


# ----------------------------------------------------------------------------------------------------

# Whoever owns pods and picks them by a selector, by the kind that pods name.
WORKLOADS = ("ReplicaSet", "StatefulSet")


class ClusterCache:
    def __init__(
        self,
        flushed: Callable[[], None] = lambda: None,
        *,
        counting: Counting = PLAIN,
        spread: Defaults = OF_THE_SYSTEM,
        priority_annotation: str = "",
        priority_preferred: bool = False,
    ) -> None:
        self.version = self.owners_version = 0
        self.groups_moved: list[tuple[str, str]] = []
        # Workloads that tell the size of a group, by the groups; those of them that came, changed or went; and whoever
        # acts on that.
        self.sizes_wanted: dict[Place, Any] = {}
        self.sizes_moved: list[Place] = []
        self.planned: dict[Place, int | str] = {}
        self.stir: Callable[[], None] = lambda: None
        # Groups of Volcano that nobody has let in yet.
        self.not_let_in: dict[tuple[str, str], None] = {}
        self.projects: dict[str, Mapping[str, str]] = {}
        self.budgets = Budgets()
        # Called when volumes, claims or classes change, with the claim if it was one; and when a node's drivers do.
        self.storage_moved: Callable[[Claim | None], None] = lambda claim: None
        self.drivers_moved: Callable[[str], None] = lambda node: None
        self._services: dict[str, tuple[Service, ...]] = {}
        self._workloads: dict[Place, Workload] = {}

        def storage(key: Any, before: Any, after: Any) -> None:
            self.version += 1
            self.storage_moved(after if isinstance(after, Claim) else None)
            check(after)

        self.claims = Indexer[Claim](by_place, storage, flushed)
        self.volumes = Indexer[Volume](by_name, storage, flushed)
        self.classes = Indexer[StorageClass](by_name, storage, flushed)
        self.csi_drivers = Indexer[CsiDriver](by_name, storage, flushed)
        self.capacities = Indexer[StorageCapacity](by_place, storage, flushed)
        self.drivers = Indexer[CsiNode](by_name, lambda name, before, after: self.drivers_moved(name), flushed)
        self.namespaces = Indexer[Namespace](by_name, self._namespace, flushed)
        self.disruption_budgets = Indexer[PodDisruptionBudget](by_place, self._budget, flushed)
        self.services = Indexer[Service](by_place, self._service, flushed)
        # Replication controllers pick by plain labels, as services do.
        self.controllers = Indexer[Service](by_place, self._service, flushed)
        self.workloads = {kind: Indexer[Workload](by_place, self._workload(kind), flushed) for kind in WORKLOADS}
        self.jobs = Indexer[Workload](by_place, self._job, flushed)
        self.pod_groups = Indexer[PodGroup](by_place, self._group, flushed)
        self.grouped = Indexer[GroupedWorkload](by_place, self._group, flushed)
        self.plugin_groups = Indexer[MemberGroup](by_place, self._group, flushed)
        self.volcano_groups = Indexer[MemberGroup](by_place, self._volcano_group, flushed)
        self.groups = Groups(
            self.pod_groups.all, self.grouped.all, self.plugin_groups.all, self.volcano_groups.all,
            Owned(self._workloads, self.jobs.all, self.planned),
        )  # fmt: skip
        self.surroundings = Surroundings(
            Storage(self.claims.all, self.volumes.all, self.classes.all, self.csi_drivers.all, self.capacities.all),
            Owners(self._services, self._workloads),
            spread,
            counting,
            priority_annotation,
            priority_preferred,
        )

    def take_groups(self) -> list[tuple[str, str]]:
        """The (namespace, name) of groups that came, changed or went since this was last asked."""
        moved, self.groups_moved = self.groups_moved, []
        return moved

    def take_sizes(self) -> list[Place]:
        """The workloads whose size may be another since this was last asked, of those that anybody wants to know of."""
        moved, self.sizes_moved = self.sizes_moved, []
        return moved

    def _size(self, place: Place, before: Workload | None, after: Workload | None) -> None:
        if place in self.sizes_wanted and says(before) != says(after):
            self.sizes_moved.append(place)
            self.stir()

    def _job(self, key: tuple[str, str], before: Workload | None, after: Workload | None) -> None:
        self._size((key[0], "Job", key[1]), before, after)

    def _namespace(self, name: str, before: Namespace | None, after: Namespace | None) -> None:
        if after is None:
            self.projects.pop(name, None)
        else:
            self.projects[name] = after.metadata.labels

    def _budget(self, key: Any, before: PodDisruptionBudget | None, after: PodDisruptionBudget | None) -> None:
        self.budgets.put(key, after)

    def _service(self, key: tuple[str, str], before: Service | None, after: Service | None) -> None:
        if (before.spec if before else None) == (after.spec if after else None):
            return
        self.owners_version += 1
        namespace = key[0]
        here = (*self.services.all.values(), *self.controllers.all.values())
        self._services[namespace] = tuple(one for one in here if one.metadata.namespace == namespace)

    def _workload(self, kind: str) -> Callable[[Any, Workload | None, Workload | None], None]:
        def moved(key: tuple[str, str], before: Workload | None, after: Workload | None) -> None:
            place = (key[0], kind, key[1])
            if after is None:
                self._workloads.pop(place, None)
            else:
                self._workloads[place] = after
            self._size(place, before, after)
            if (before.spec.selector if before else None) != (after.spec.selector if after else None):
                self.owners_version += 1

        return moved

    def _volcano_group(self, key: tuple[str, str], before: MemberGroup | None, after: MemberGroup | None) -> None:
        self._group(key, before, after)
        if after is not None and after.status.phase in ("", "Pending"):
            self.not_let_in[key] = None

    def _group(self, key: tuple[str, str], before: Any, after: Any) -> None:
        if (before.spec if before else None) != (after.spec if after else None):
            self.groups_moved.append(key)
