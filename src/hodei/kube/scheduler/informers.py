"""The watches of the pod scheduler, and where each kind of object goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from msgspec import Struct

from hodei.kube.api import objects as k8s
from hodei.kube.api.client import Api, served_path
from hodei.kube.api.reflector import Reflector, Resource
from hodei.kube.scheduler.background import BackgroundTask, Supervisor
from hodei.kube.scheduler.cache import ClusterCache, Indexer, Refusals, by_name, by_uid
from hodei.kube.scheduler.groups import EndedMembers
from hodei.kube.scheduler.pods import Pods
from hodei.process import cancel_tasks

_ACTIVE_PODS = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}
# A watch without any activity for this long hangs: the timeout of a list is shorter.
STUCK_S = 900.0
PODS_PATH, JOBS_PATH = "/api/v1/pods", "/apis/batch/v1/jobs"
_CLUSTER_SCOPED = ("namespaces", "nodes", "persistentvolumes", "storageclasses", "csinodes", "csidrivers")


class _Watch(Struct):
    """`optional`: a type that not every cluster serves; the start does not wait for it."""

    path: str
    kind: type[Any]
    indexer: Indexer[Any]
    optional: bool = False
    selector: dict[str, str] = {}
    locate: Callable[[], Awaitable[str]] | None = None


class LazyInformer(BackgroundTask):
    """A watch that starts only when `wanted` is set, because most clusters never need it."""

    def __init__(self, reflector: Reflector[Any], wanted: asyncio.Event) -> None:
        self._reflector, self._wanted = reflector, wanted

    @property
    def name(self) -> str:
        return f"the watch of {self._reflector.path}"

    async def run(self) -> None:
        await self._wanted.wait()
        await self._reflector.run()


def job_informer(api: Api, cache: ClusterCache, refusals: Refusals, wanted: asyncio.Event) -> LazyInformer:
    """Jobs, for groups whose size only a Job defines."""
    cache.jobs.resource, cache.jobs.refusals = JOBS_PATH, refusals
    return LazyInformer(Reflector(api, Resource(JOBS_PATH, k8s.Workload), cache.jobs, optional=True), wanted)


def ended_members_informer(api: Api, scheduler: str, members: EndedMembers, wanted: asyncio.Event) -> LazyInformer:
    """Ended pods of ours, for groups that count them."""
    phases = ",".join(f"status.phase!={phase}" for phase in ("Pending", "Running", "Unknown"))
    selector = {"fieldSelector": f"spec.schedulerName={scheduler},{phases}"}
    return LazyInformer(Reflector(api, Resource(PODS_PATH, k8s.Pod), members, selector=selector), wanted)


class Informers:
    def __init__(
        self,
        api: Api,
        pods: Pods,
        cache: ClusterCache,
        wake: Callable[[], None],
        refusals: Refusals | None = None,
        *,
        tolerate_forbidden: bool = False,
        namespace: str = "",
    ) -> None:
        """Everything that scheduling reads. `tolerate_forbidden`: skip what may not be read outside `namespace`."""
        self.tasks: list[asyncio.Task[None]] = []
        self._started_at = time.monotonic()
        cache.pods_affected.append(wake)
        watches = _watches(api, cache)
        if tolerate_forbidden:  # a one-time reading includes Jobs; a scheduler watches them on demand (`job_informer`)
            watches.append(_Watch(JOBS_PATH, k8s.Workload, cache.jobs))
        watches.append(_Watch("/api/v1/nodes", k8s.Node, Indexer[k8s.Node](by_name, pods.node_changed, wake)))
        pod_indexer = Indexer[k8s.Pod](by_uid, pods.pod_changed, wake)
        watches.append(_Watch(PODS_PATH, k8s.Pod, pod_indexer, selector=_ACTIVE_PODS))
        self.reflectors: list[Reflector[Any]] = []
        for one in watches:
            one.indexer.resource = one.path
            if refusals is not None:
                one.indexer.refusals = refusals
            self.reflectors.append(
                Reflector(
                    api,
                    Resource(one.path, one.kind),
                    one.indexer,
                    selector=one.selector,
                    optional=one.optional or tolerate_forbidden,
                    locate=one.locate,
                    fallback=_namespaced_path(one.path, namespace) if tolerate_forbidden and namespace else "",
                )
            )

    async def start(self, supervisor: Supervisor | None = None) -> None:
        """Return when everything was listed once. Pods come last, because they refer to the others."""
        *others, pods = self.reflectors
        for one in others:
            self._run(one, supervisor)
        await asyncio.gather(*(one.synced.wait() for one in others))
        self._run(pods, supervisor)
        await pods.synced.wait()

    def _run(self, one: Reflector[Any], supervisor: Supervisor | None) -> None:
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
            one.requested_path if one.denied else f"{one.requested_path} of other namespaces"
            for one in self.reflectors
            if one.denied or one.namespace_only
        ]

    def ages(self) -> dict[str, float]:
        """Seconds since the last contact about each collection, without those that the API does not serve."""
        now = time.monotonic()
        return {
            one.path: now - (one.last_contact or self._started_at)
            for one in self.reflectors
            if one.last_contact or one.problem
        }

    def stuck(self) -> list[str]:
        """Problems of watches that hang."""
        now, out = time.monotonic(), []
        for one in self.reflectors:
            idle_s = now - one.last_activity
            if one.last_activity and idle_s > STUCK_S:
                out.append(f"the watch of {one.path} has done nothing for {idle_s:.0f} s")
        return out

    async def stop(self) -> None:
        await cancel_tasks(self.tasks)


def _watches(api: Api, cache: ClusterCache) -> list[_Watch]:
    """Everything but nodes and pods."""
    watches = [
        _Watch("/api/v1/namespaces", k8s.Namespace, cache.namespaces),
        _Watch("/api/v1/persistentvolumeclaims", k8s.Claim, cache.claims),
        _Watch("/api/v1/persistentvolumes", k8s.Volume, cache.volumes),
        _Watch("/apis/storage.k8s.io/v1/storageclasses", k8s.StorageClass, cache.classes),
        _Watch("/apis/storage.k8s.io/v1/csinodes", k8s.CsiNode, cache.drivers),
        _Watch("/apis/storage.k8s.io/v1/csidrivers", k8s.CsiDriver, cache.csi_drivers),
        _Watch("/apis/storage.k8s.io/v1/csistoragecapacities", k8s.StorageCapacity, cache.capacities),
        _Watch("/apis/policy/v1/poddisruptionbudgets", k8s.PodDisruptionBudget, cache.disruption_budgets),
        _Watch("/api/v1/services", k8s.Service, cache.services),
        _Watch("/api/v1/replicationcontrollers", k8s.Service, cache.controllers),
        _Watch("/apis/apps/v1/replicasets", k8s.Workload, cache.workloads["ReplicaSet"]),
        _Watch("/apis/apps/v1/statefulsets", k8s.Workload, cache.workloads["StatefulSet"]),
        _Watch("/apis/scheduling.x-k8s.io/v1alpha1/podgroups", k8s.MemberGroup, cache.plugin_groups, True),
        _Watch("/apis/scheduling.volcano.sh/v1beta1/podgroups", k8s.MemberGroup, cache.volcano_groups, True),
    ]
    # The version of Kubernetes' own groups changes with every release.
    own: tuple[tuple[str, type[Any], Indexer[Any]], ...] = (
        ("podgroups", k8s.PodGroup, cache.pod_groups),
        ("workloads", k8s.GroupedWorkload, cache.grouped),
    )
    for name, kind, indexer in own:
        locate = partial(served_path, api, "scheduling.k8s.io", name)
        watches.append(_Watch(f"/apis/scheduling.k8s.io/{name}", kind, indexer, True, locate=locate))
    return watches


def _namespaced_path(path: str, namespace: str) -> str:
    """The part of a collection in a namespace; "" for cluster-scoped ones."""
    parent, _, resource = path.rpartition("/")
    return "" if resource in _CLUSTER_SCOPED else f"{parent}/namespaces/{namespace}/{resource}"
