"""What is watched of a cluster, and where each kind of object goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from msgspec import Struct

from hodei.kube.api.client import Api, served_path
from hodei.kube.api.objects import (
    Claim,
    CsiDriver,
    CsiNode,
    GroupedWorkload,
    MemberGroup,
    Namespace,
    Node,
    Pod,
    PodDisruptionBudget,
    PodGroup,
    Service,
    StorageCapacity,
    StorageClass,
    Volume,
    Workload,
)
from hodei.kube.api.reflector import Reflector, Resource
from hodei.kube.scheduler.background import NoBackground, Supervisor
from hodei.kube.scheduler.cache import ClusterCache, Indexer, Refusals, by_name, by_uid
from hodei.kube.scheduler.pods import Pods

_UNFINISHED = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}
# A watch that has neither heard nor tried anything for so long hangs: the longest patience with a list is shorter.
STUCK_S = 900.0
JOBS_PATH = "/apis/batch/v1/jobs"
_OF_NO_NAMESPACE = ("namespaces", "nodes", "persistentvolumes", "storageclasses", "csinodes", "csidrivers")


class _Watched(Struct):
    """`optional`: other projects' types, and ones that come and go with the version of Kubernetes: nobody waits for them."""

    path: str
    kind: type[Any]
    indexer: Indexer[Any]
    optional: bool = False
    selector: dict[str, str] = {}
    locate: Callable[[], Awaitable[str]] | None = None


class WatchingJobs(NoBackground):
    """Keeps Jobs, once a group is there whose size only a Job tells: most clusters have none, and Jobs may be many."""

    def __init__(self, api: Api, cache: ClusterCache, refusals: Refusals, wanted: asyncio.Event) -> None:
        self._wanted = wanted
        self._reflector = Reflector(api, Resource(JOBS_PATH, Workload), cache.jobs, optional=True)
        cache.jobs.resource, cache.jobs.refusals = JOBS_PATH, refusals

    async def run(self) -> None:
        await self._wanted.wait()
        await self._reflector.run()


class Informers:
    def __init__(self, reflectors: list[Reflector[Any]]) -> None:
        self.reflectors = reflectors
        self.tasks: list[asyncio.Task[None]] = []
        self._began = time.monotonic()

    @classmethod
    def of(
        cls,
        api: Api,
        pods: Pods,
        cache: ClusterCache,
        stir: Any,
        refusals: Refusals | None = None,
        *,
        lenient: bool = False,
        within: str = "",
    ) -> Informers:
        """All that scheduling reads. `lenient`: whatever may not be read is done without, and what may be read `within` one
        namespace alone is read there."""
        pod_indexer = Indexer[Pod](by_uid, pods.moved, stir)
        node_indexer = Indexer[Node](by_name, pods.node_moved, stir)
        kept = [
            _Watched("/api/v1/namespaces", Namespace, cache.namespaces),
            _Watched("/api/v1/nodes", Node, node_indexer),
            _Watched("/api/v1/persistentvolumeclaims", Claim, cache.claims),
            _Watched("/api/v1/persistentvolumes", Volume, cache.volumes),
            _Watched("/apis/storage.k8s.io/v1/storageclasses", StorageClass, cache.classes),
            _Watched("/apis/storage.k8s.io/v1/csinodes", CsiNode, cache.drivers),
            _Watched("/apis/storage.k8s.io/v1/csidrivers", CsiDriver, cache.csi_drivers),
            _Watched("/apis/storage.k8s.io/v1/csistoragecapacities", StorageCapacity, cache.capacities),
            _Watched("/apis/policy/v1/poddisruptionbudgets", PodDisruptionBudget, cache.disruption_budgets),
            _Watched("/api/v1/services", Service, cache.services),
            _Watched("/api/v1/replicationcontrollers", Service, cache.controllers),
            _Watched("/apis/apps/v1/replicasets", Workload, cache.workloads["ReplicaSet"]),
            _Watched("/apis/apps/v1/statefulsets", Workload, cache.workloads["StatefulSet"]),
            _Watched("/apis/scheduling.x-k8s.io/v1alpha1/podgroups", MemberGroup, cache.plugin_groups, True),
            _Watched("/apis/scheduling.volcano.sh/v1beta1/podgroups", MemberGroup, cache.volcano_groups, True),
        ]
        if (
            lenient
        ):  # whoever looks once reads them all; a scheduler watches them when a group needs it (`WatchingJobs`)
            kept.append(_Watched(JOBS_PATH, Workload, cache.jobs))
        cache.stir = stir
        # Kubernetes' own groups change their version with every release.
        for name, kind, indexer in (
            ("podgroups", PodGroup, cache.pod_groups),
            ("workloads", GroupedWorkload, cache.grouped),
        ):
            locate = partial(served_path, api, "scheduling.k8s.io", name)
            kept.append(_Watched(f"/apis/scheduling.k8s.io/{name}", kind, indexer, True, locate=locate))
        # Pods may wait for what is in these; owners and services only tell how pods that come are to be read.
        for waited_for in (
            cache.claims, cache.volumes, cache.classes, cache.csi_drivers, cache.capacities, cache.drivers, cache.disruption_budgets, cache.namespaces,
            cache.pod_groups, cache.grouped, cache.plugin_groups, cache.volcano_groups,
        ):  # fmt: skip
            waited_for.flushed = stir
        kept.append(_Watched("/api/v1/pods", Pod, pod_indexer, selector=_UNFINISHED))
        reflectors = []
        for one in kept:
            one.indexer.resource = one.path
            if refusals is not None:
                one.indexer.refusals = refusals
            instead = _within(one.path, within) if lenient and within else ""
            reflectors.append(
                Reflector(
                    api,
                    Resource(one.path, one.kind),
                    one.indexer,
                    selector=one.selector,
                    optional=one.optional or lenient,
                    locate=one.locate,
                    instead=instead,
                )
            )
        return cls(reflectors)

    async def start(self, supervisor: Supervisor | None = None) -> None:
        """Returns when there is a first picture of everything; pods come last, so that what they refer to is there."""
        *others, pods = self.reflectors
        for one in others:
            self._begin(one, supervisor)
        await asyncio.gather(*(one.synced.wait() for one in others))
        self._begin(pods, supervisor)
        await pods.synced.wait()

    def _begin(self, one: Reflector[Any], supervisor: Supervisor | None) -> None:
        task = asyncio.create_task(one.run())
        self.tasks.append(task)
        if supervisor is not None:
            supervisor.watch(task, f"the watch of {one.path}")

    @property
    def problems(self) -> list[str]:
        return [one.problem for one in self.reflectors if one.problem]

    @property
    def denied(self) -> list[str]:
        """The collections that may not be read, or in one namespace only."""
        return [
            one.wanted if one.denied else f"{one.wanted} of other namespaces"
            for one in self.reflectors
            if one.denied or one.narrowed
        ]

    def ages(self) -> dict[str, float]:
        """For each collection how many seconds ago the API was last heard about it. None for those that it does not have."""
        now = time.monotonic()
        return {one.path: now - (one.heard_at or self._began) for one in self.reflectors if one.heard_at or one.problem}

    def stuck(self) -> list[str]:
        """What is wrong with watches that do nothing at all any more."""
        now, out = time.monotonic(), []
        for one in self.reflectors:
            idle_s = now - one.active_at
            if one.active_at and idle_s > STUCK_S:
                out.append(f"the watch of {one.path} has done nothing for {idle_s:.0f} s")
        return out

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def _within(path: str, namespace: str) -> str:
    """The part of a collection that is in a namespace; "" for what is in none."""
    where, _, what = path.rpartition("/")
    return "" if what in _OF_NO_NAMESPACE else f"{where}/namespaces/{namespace}/{what}"
