"""What is watched of a cluster, and where each kind of object goes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from hodei.kube.around import Around
from hodei.kube.pods import Pods
from hodei.kube.shelf import Shelf, by_name, by_uid
from hodei.kubeapi.client import Api
from hodei.kubeapi.discovery import served_path
from hodei.kubeapi.group_objects import GroupedWorkload, MemberGroup, PodGroup
from hodei.kubeapi.objects import Namespace, Node, Pod, PodDisruptionBudget, Service, Workload
from hodei.kubeapi.reflector import Reflector, Resource
from hodei.kubeapi.storage_objects import Claim, CsiDriver, CsiNode, StorageCapacity, StorageClass, Volume

_log = logging.getLogger(__name__)
_UNFINISHED = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}


class Watching:
    def __init__(self, api: Api, reflectors: list[Reflector[Any]]) -> None:
        self.reflectors = reflectors
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def of(cls, api: Api, pods: Pods, around: Around, stir: Any) -> Watching:
        """All that scheduling reads. Groups of which the cluster knows nothing are left out or looked for now and then."""
        pod_shelf = Shelf[Pod](by_uid, pods.moved, stir)
        node_shelf = Shelf[Node](by_name, pods.node_moved, stir)
        kept: list[tuple[str, type[Any], Shelf[Any], dict[str, str]]] = [
            ("/api/v1/namespaces", Namespace, around.namespaces, {}),
            ("/api/v1/nodes", Node, node_shelf, {}),
            ("/api/v1/persistentvolumeclaims", Claim, around.claims, {}),
            ("/api/v1/persistentvolumes", Volume, around.volumes, {}),
            ("/apis/storage.k8s.io/v1/storageclasses", StorageClass, around.classes, {}),
            ("/apis/storage.k8s.io/v1/csinodes", CsiNode, around.drivers, {}),
            ("/apis/storage.k8s.io/v1/csidrivers", CsiDriver, around.csi_drivers, {}),
            ("/apis/storage.k8s.io/v1/csistoragecapacities", StorageCapacity, around.capacities, {}),
            ("/apis/policy/v1/poddisruptionbudgets", PodDisruptionBudget, around.disruption_budgets, {}),
            ("/api/v1/services", Service, around.services, {}),
            ("/api/v1/replicationcontrollers", Service, around.controllers, {}),
            ("/apis/apps/v1/replicasets", Workload, around.workloads["ReplicaSet"], {}),
            ("/apis/apps/v1/statefulsets", Workload, around.workloads["StatefulSet"], {}),
            ("/apis/scheduling.x-k8s.io/v1alpha1/podgroups", MemberGroup, around.plugin_groups, {}),
            ("/apis/scheduling.volcano.sh/v1beta1/podgroups", MemberGroup, around.volcano_groups, {}),
        ]
        # Kubernetes' own groups change their version with every release.
        for name, kind, shelf in (
            ("podgroups", PodGroup, around.pod_groups),
            ("workloads", GroupedWorkload, around.grouped),
        ):
            path = await served_path(api, "scheduling.k8s.io", name)
            if path:
                kept.append((path, kind, shelf, {}))
        # Pods may wait for what is in these; owners and services only tell how pods that come are to be read.
        for waited_for in (
            around.claims, around.volumes, around.classes, around.csi_drivers, around.capacities, around.drivers, around.disruption_budgets, around.namespaces,
            around.pod_groups, around.grouped, around.plugin_groups, around.volcano_groups,
        ):  # fmt: skip
            waited_for.flushed = stir
        kept.append(("/api/v1/pods", Pod, pod_shelf, _UNFINISHED))
        return cls(api, [Reflector(api, Resource(path, kind), shelf, selector=how) for path, kind, shelf, how in kept])

    async def start(self) -> None:
        """Returns when there is a first picture of everything; pods come last, so that what they refer to is there."""
        *others, pods = self.reflectors
        self._tasks += [asyncio.create_task(one.run()) for one in others]
        await asyncio.gather(*(one.synced.wait() for one in others))
        self._tasks.append(asyncio.create_task(pods.run()))
        await pods.synced.wait()

    @property
    def problems(self) -> list[str]:
        return [one.problem for one in self.reflectors if one.problem]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
