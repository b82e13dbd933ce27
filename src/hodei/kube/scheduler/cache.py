"""What pods refer to and the watches keep up to date: storage, those who pick pods, groups, namespaces, budgets.

`version` counts the changes after which a pod may read differently; `groups_version` those of groups alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hodei.kube.api.group_objects import GroupedWorkload, MemberGroup, PodGroup
from hodei.kube.api.objects import Namespace, PodDisruptionBudget, Service, Workload
from hodei.kube.api.requests import PLAIN, Counting
from hodei.kube.api.storage_objects import Claim, CsiDriver, CsiNode, StorageCapacity, StorageClass, Volume
from hodei.kube.scheduler.disruption_budgets import Budgets
from hodei.kube.scheduler.gangs import Groups
from hodei.kube.scheduler.indexer import Indexer, by_name, by_place
from hodei.kube.scheduler.owners import Owned, Place, says
from hodei.kube.scheduler.topology_spread import OF_THE_SYSTEM, Defaults, Owners
from hodei.kube.scheduler.translate import Surroundings
from hodei.kube.scheduler.volumes import Storage, check

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
