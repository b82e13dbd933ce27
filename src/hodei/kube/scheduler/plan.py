"""`hodei kube plan`: what would become of all pods of some manifests, each in what the ones before it leave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import structs

from hodei.control.explain.why import plan
from hodei.kube.api.client import Api, ApiError
from hodei.kube.api.group_objects import PodGroup
from hodei.kube.api.objects import (
    Expression,
    NodeAffinity,
    NodeSelector,
    NodeSelectorTerm,
    Pod,
    PriorityClass,
    Toleration,
)
from hodei.kube.api.objects import Node as KubeNode
from hodei.kube.scheduler.build import PodSchedulerParts
from hodei.kube.scheduler.gang_assembly import as_job, gather
from hodei.kube.scheduler.gangs import membership
from hodei.kube.scheduler.indexer import Indexer
from hodei.kube.scheduler.manifests import Manifests, Workload
from hodei.kube.scheduler.owners import one_by_one
from hodei.kube.scheduler.pod_reader import Reader
from hodei.kube.scheduler.translate import Wanted
from hodei.model.explanation import Explanation
from hodei.model.job import JobSpec, NodeTerm, TaskSpec
from hodei.model.node import Node
from hodei.model.selector import all_match

# What the DaemonSet controller has every one of its pods tolerate.
_TOLERATED = tuple(
    Toleration(f"node.kubernetes.io/{what}", "Exists", "", effect)
    for what, effect in (
        ("not-ready", "NoExecute"), ("unreachable", "NoExecute"), ("disk-pressure", "NoSchedule"),
        ("memory-pressure", "NoSchedule"), ("pid-pressure", "NoSchedule"), ("unschedulable", "NoSchedule"),
    )
)  # fmt: skip


class Planned(msgspec.Struct):
    """Of a workload's `total` pods, how many would start `now` and on which `nodes`, how many would take the place of
    others, and how many would wait. `refused`: why they cannot be scheduled at all. `first`: of the first that would not
    start, else of the first."""

    workload: Workload
    total: int
    now: int = 0
    preempting: int = 0
    waiting: int = 0
    nodes: dict[str, int] = {}
    refused: str = ""
    first: Explanation | None = None


class _Ask(msgspec.Struct):
    """One job for the engine: so many pods of one workload or, for a gang, of several."""

    spec: JobSpec
    of: list[int]  # for each of its members, the number of its workload


def plan_all(house: PodSchedulerParts, reader: Reader, manifests: Manifests, now_ms: int) -> list[Planned]:
    out: list[Planned] = []
    for group, made in manifests.groups:
        _shelf(house, group, made).changed("ADDED", made)
    asks: list[_Ask] = []
    grouped: list[tuple[int, Pod]] = []
    for number, workload in enumerate(manifests.workloads):
        daemons = workload.kind == "DaemonSet"
        pods = _of_daemon_set(workload.pod, house, reader) if daemons else workload.pods()
        meta = workload.pod.metadata
        ordered = workload.kind == "StatefulSet" and workload.note and len(pods) > 1
        size = one_by_one(f"{workload.kind}/{meta.name}") if ordered else len(pods)
        if not daemons:
            house.around.planned[meta.namespace, workload.kind, meta.name] = size
        planned = Planned(workload, len(pods))
        out.append(planned)
        if not pods:
            continue
        one = reader.pod(pods[0], ours=True)
        if one.refused:
            planned.waiting, planned.refused = len(pods), house.explaining.aside(one.refused).message
        elif one.gates:
            planned.waiting = len(pods)
            planned.refused = f"held back by its scheduling gates: {', '.join(one.gates)}"
        else:
            if membership(pods[0]) is not None:
                grouped += [(number, pod) for pod in pods]
            else:
                asks += [_Ask(spec, [number]) for spec in _specs(workload, pods, reader, one)]
    asks += _gangs(house, reader, grouped, out)
    _judge(house, asks, out, now_ms)
    return out


def _specs(workload: Workload, pods: list[Pod], reader: Reader, first: Wanted) -> Iterator[JobSpec]:
    for pod in pods:
        yield first.job if workload.kind != "DaemonSet" else reader.pod(pod, ours=True).job


def _gangs(
    house: PodSchedulerParts, reader: Reader, grouped: list[tuple[int, Pod]], out: list[Planned]
) -> Iterator[_Ask]:
    """Pods of several workloads may be one gang."""
    number_of = {pod.metadata.uid: number for number, pod in grouped}
    for gathering in gather([pod for _, pod in grouped], house.around.groups):
        numbers = [number_of[pod.metadata.uid] for pod in gathering.waiting]
        if gathering.reason is not None:
            for number in numbers:
                out[number].waiting += 1
                out[number].refused = house.explaining.aside((gathering.reason,)).message
            continue
        read = [reader.pod(pod, ours=True) for pod in gathering.waiting]
        if gathering.group is None:
            yield from (_Ask(one.job, [number]) for one, number in zip(read, numbers, strict=True))
        else:
            spec, order = as_job(read, gathering.needed, gathering.group)
            yield _Ask(spec, [numbers[at] for at in order])


def _judge(house: PodSchedulerParts, asks: list[_Ask], out: list[Planned], now_ms: int) -> None:
    for ask, told in zip(asks, plan(house.controller, [ask.spec for ask in asks], now_ms), strict=True):
        starts = {place.member: place.node for place in told.placements} if told.code == "WOULD_START" else {}
        for member, number in enumerate(ask.of):
            planned, node = out[number], starts.get(member, "")
            if node:
                planned.now += 1
                planned.nodes[node] = planned.nodes.get(node, 0) + 1
            elif told.code == "WOULD_PREEMPT":
                planned.preempting += 1
            else:
                planned.waiting += 1
            if planned.first is None or (planned.first.code == "WOULD_START" and not node):
                planned.first = told


def _shelf(house: PodSchedulerParts, group: str, made: object) -> Indexer[Any]:
    around = house.around
    if group == "scheduling.x-k8s.io":
        return around.plugin_groups
    if group == "scheduling.volcano.sh":
        return around.volcano_groups
    return around.pod_groups if isinstance(made, PodGroup) else around.grouped


# ------------------------------------------------------------------------------------------------ daemon sets


def _of_daemon_set(pod: Pod, house: PodSchedulerParts, reader: Reader) -> list[Pod]:
    """One for each node that it may be on, as its controller makes them."""
    spec = structs.replace(pod.spec, tolerations=(*pod.spec.tolerations, *_TOLERATED))
    pod = structs.replace(pod, spec=spec)
    task = reader.pod(pod, ours=True).job.tasks[0]
    nodes = (node for _, node in sorted(house.pods.nodes.items()))
    return [_pinned(pod, node) for node in nodes if _suits(task, reader.node(node, None))]


def _suits(task: TaskSpec, node: Node) -> bool:
    labels, required = node.labels, task.affinity.required
    if any(labels.get(key) != value for key, value in task.node_selector.items()):
        return False
    if required and not any(_met(term, node) for term in required):
        return False
    return all(
        taint.effect == "PreferNoSchedule" or any(one.tolerates(taint) for one in task.tolerations)
        for taint in node.taints
    )


def _met(term: NodeTerm, node: Node) -> bool:
    """A term without conditions is met by no node."""
    return bool(term.labels or term.fields) and (
        all_match(term.labels, node.labels) and all_match(term.fields, {"metadata.name": node.name})
    )


def _pinned(pod: Pod, node: KubeNode) -> Pod:
    name = node.metadata.name
    only = NodeSelectorTerm((), (Expression("metadata.name", "In", (name,)),))
    affinity = structs.replace(
        pod.spec.affinity,
        node_affinity=NodeAffinity(NodeSelector((only,)), pod.spec.affinity.node_affinity.preferred),
    )
    meta = structs.replace(
        pod.metadata, name=f"{pod.metadata.name}-{name}", uid=f"DaemonSet/{pod.metadata.name}/{name}"
    )
    return structs.replace(pod, metadata=meta, spec=structs.replace(pod.spec, affinity=affinity))


# ------------------------------------------------------------------------------------------------- priorities


class _Classes(msgspec.Struct):
    items: tuple[PriorityClass, ...] = ()


async def with_priorities(api: Api, manifests: Manifests) -> None:
    """The priority that admission would give each pod; none where the classes may not be read."""
    try:
        body = await api.request("GET", "/apis/scheduling.k8s.io/v1/priorityclasses")
    except ApiError:
        return
    classes = {one.metadata.name: one for one in msgspec.json.decode(body, type=_Classes).items}
    default = next((one for one in classes.values() if one.global_default), None)
    for workload in manifests.workloads:
        spec = workload.pod.spec
        found = classes.get(spec.priority_class_name) if spec.priority_class_name else default
        if found is not None and spec.priority is None:
            policy = spec.preemption_policy or found.preemption_policy
            spec = structs.replace(spec, priority=found.value, preemption_policy=policy)
            workload.pod = structs.replace(workload.pod, spec=spec)
