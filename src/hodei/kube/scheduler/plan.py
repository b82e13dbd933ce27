"""`hodei kube plan`: what would become of all pods of some manifests, each in what the ones before it leave."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Struct, structs

from hodei.control.explain.why import plan
from hodei.kube.api.client import Api, ApiError
from hodei.kube.api.objects import (
    Expression,
    GroupedWorkload,
    MemberGroup,
    Meta,
    NodeAffinity,
    NodeSelector,
    NodeSelectorTerm,
    Owner,
    Pod,
    PodGroup,
    PriorityClass,
    Toleration,
    from_plain,
)
from hodei.kube.api.objects import Node as KubeNode
from hodei.kube.scheduler.build import PodSchedulerParts
from hodei.kube.scheduler.cache import Indexer
from hodei.kube.scheduler.gangs import as_job, gather, membership
from hodei.kube.scheduler.owners import one_by_one
from hodei.kube.scheduler.pod_reader import Reader
from hodei.kube.scheduler.translate import Wanted
from hodei.model.affinity import NodeTerm, all_match
from hodei.model.errors import InvalidInput
from hodei.model.explanation import Explanation
from hodei.model.job import JobSpec, TaskSpec
from hodei.model.node import Node

# ------------------------------------------------------------------------------------------- manifests
# Manifests as the pods that the cluster's controllers would make of them: all of them, not one for each workload.


# Where kinds that make pods keep the template, below which field it says how many there are.
_TEMPLATES = {
    "Pod": (),
    "PodTemplate": ("template",),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}
_USUAL = ("spec", "template")
_GROUPS: dict[tuple[str, str], type[Any]] = {
    ("scheduling.k8s.io", "PodGroup"): PodGroup,
    ("scheduling.k8s.io", "Workload"): GroupedWorkload,
    ("scheduling.x-k8s.io", "PodGroup"): MemberGroup,
    ("scheduling.volcano.sh", "PodGroup"): MemberGroup,
}
# Nobody waits for an answer about more pods than this.
MOST_PODS = 20_000


class Workload(Struct):
    """`pod`: what each of its pods is; `count`: how many there would be at once (of a DaemonSet one for each node that it
    may be on). `note`: what else is to be said of it."""

    kind: str
    pod: Pod
    count: int = 1
    note: str = ""

    def pods(self) -> list[Pod]:
        """With names and owners as their controller would give them."""
        meta = self.pod.metadata
        if self.kind == "Pod":
            return [structs.replace(self.pod, metadata=structs.replace(meta, uid=f"{meta.namespace}/{meta.name}"))]
        owner = (Owner(self.kind, meta.name, "", True),)
        return [
            structs.replace(
                self.pod,
                metadata=structs.replace(
                    meta,
                    name=f"{meta.name}-{at}",
                    uid=f"{self.kind}/{meta.namespace}/{meta.name}-{at}",
                    owner_references=owner,
                ),
            )
            for at in range(self.count)
        ]


class Manifests(Struct):
    """All workloads of some files, in their order, and the groups of pods among them."""

    workloads: list[Workload]
    groups: list[tuple[str, Any]]  # with the API group of each


def read_manifests(files: list[Path], namespace: str = "") -> Manifests:
    """`namespace`: that of whatever names none."""
    found = Manifests([], [])
    for file in files:
        before = len(found.workloads)
        for number, document in enumerate(_documents(file)):
            if not isinstance(document, dict) or "kind" not in document:
                raise InvalidInput(f"{file}, document {number + 1}: not a Kubernetes object", hint="it needs a kind")
            for one in document.get("items") or [] if document["kind"] == "List" else [document]:
                if isinstance(one, dict) and "kind" in one:
                    _take(one, file, namespace, found)
        if len(found.workloads) == before:
            hint = "a Pod, Deployment, Job, StatefulSet, ..."
            raise InvalidInput(f"{file} holds no pod and no workload", hint=hint)
    if sum(one.count for one in found.workloads) > MOST_PODS:
        raise InvalidInput(f"these are more than {MOST_PODS} pods", hint="plan them in parts")
    return found


def _documents(file: Path) -> list[Any]:
    try:
        return [
            found
            for found in yaml.safe_load_all(sys.stdin.read() if str(file) == "-" else file.read_text("utf-8"))
            if found
        ]
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InvalidInput(f"cannot read {file}: {error}", hint="give a manifest of a pod or of a workload") from None


def _take(document: dict[str, Any], file: Path, namespace: str, found: Manifests) -> None:
    kind, about = str(document["kind"]), document.get("metadata")
    about = about if isinstance(about, dict) else {}
    group = str(document.get("apiVersion", "")).rpartition("/")[0]
    template: Any = document
    for step in _TEMPLATES.get(kind, _USUAL):
        template = template.get(step) if isinstance(template, dict) else None
    try:
        if (group, kind) in _GROUPS:
            made = from_plain(document, _GROUPS[group, kind])
            found.groups.append((group, structs.replace(made, metadata=_named(made.metadata, namespace))))
            return
        if not isinstance(template, dict) or not isinstance(template.get("spec"), dict):
            return  # a Service or a ConfigMap beside it
        own = {"namespace": about.get("namespace"), "name": about.get("name") or about.get("generateName")}
        meta = {**(template.get("metadata") or {}), **{key: value for key, value in own.items() if value}}
        pod = from_plain({"metadata": meta, "spec": template["spec"]}, Pod)
        count, note = _count(kind, document)
    except Exception as error:
        raise InvalidInput(f"{file}: the {kind} cannot be read: {error}", hint="kubectl explain pod.spec") from None
    pod = structs.replace(pod, metadata=_named(pod.metadata, namespace))
    found.workloads.append(Workload(kind, pod, count, note))


def _named(meta: Meta, namespace: str) -> Meta:
    return structs.replace(meta, namespace=meta.namespace or namespace, name=meta.name or "?")


def _count(kind: str, document: dict[str, Any]) -> tuple[int, str]:
    """How many pods there are at once, and what to say besides."""
    spec = document.get("spec")
    spec = spec if isinstance(spec, dict) else {}
    note = ""
    if kind == "CronJob":
        note = "each time that it is due"
        if spec.get("suspend"):
            note = "once it is resumed: it is suspended"
        spec = (spec.get("jobTemplate") or {}).get("spec") or {}
    if kind in ("Job", "CronJob"):
        parallelism, completions = _whole(spec.get("parallelism"), 1), _whole(spec.get("completions"), 0)
        if spec.get("suspend"):
            note = "once it is resumed: it is suspended"
        elif completions > parallelism:
            note = f"{parallelism} at a time, until {completions} have succeeded"
        return (min(parallelism, completions) if completions else parallelism), note
    if kind == "StatefulSet" and spec.get("podManagementPolicy", "OrderedReady") == "OrderedReady":
        note = "one after the other, each when the one before it is ready"
    if kind in ("Pod", "PodTemplate", "DaemonSet"):
        return 1, note
    return _whole(spec.get("replicas"), 1), note


def _whole(value: Any, otherwise: int) -> int:
    if value is None:
        return otherwise
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a number of pods")
    return value


# ----------------------------------------------------------------------------------------------------

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


def plan_all(scheduler: PodSchedulerParts, reader: Reader, manifests: Manifests, now_ms: int) -> list[Planned]:
    out: list[Planned] = []
    for group, made in manifests.groups:
        _indexer(scheduler, group, made).changed("ADDED", made)
    asks: list[_Ask] = []
    grouped: list[tuple[int, Pod]] = []
    for number, workload in enumerate(manifests.workloads):
        daemons = workload.kind == "DaemonSet"
        pods = _of_daemon_set(workload.pod, scheduler, reader) if daemons else workload.pods()
        meta = workload.pod.metadata
        ordered = workload.kind == "StatefulSet" and workload.note and len(pods) > 1
        size = one_by_one(f"{workload.kind}/{meta.name}") if ordered else len(pods)
        if not daemons:
            scheduler.cache.planned[meta.namespace, workload.kind, meta.name] = size
        planned = Planned(workload, len(pods))
        out.append(planned)
        if not pods:
            continue
        one = reader.pod(pods[0], ours=True)
        if one.refused:
            planned.waiting, planned.refused = len(pods), scheduler.explainer.aside(one.refused).message
        elif one.gates:
            planned.waiting = len(pods)
            planned.refused = f"held back by its scheduling gates: {', '.join(one.gates)}"
        else:
            if membership(pods[0]) is not None:
                grouped += [(number, pod) for pod in pods]
            else:
                asks += [_Ask(spec, [number]) for spec in _specs(workload, pods, reader, one)]
    asks += _gangs(scheduler, reader, grouped, out)
    _judge(scheduler, asks, out, now_ms)
    return out


def _specs(workload: Workload, pods: list[Pod], reader: Reader, first: Wanted) -> Iterator[JobSpec]:
    for pod in pods:
        yield first.job if workload.kind != "DaemonSet" else reader.pod(pod, ours=True).job


def _gangs(
    scheduler: PodSchedulerParts, reader: Reader, grouped: list[tuple[int, Pod]], out: list[Planned]
) -> Iterator[_Ask]:
    """Pods of several workloads may be one gang."""
    number_of = {pod.metadata.uid: number for number, pod in grouped}
    for gathering in gather([pod for _, pod in grouped], scheduler.cache.groups):
        numbers = [number_of[pod.metadata.uid] for pod in gathering.waiting]
        if gathering.reason is not None:
            for number in numbers:
                out[number].waiting += 1
                out[number].refused = scheduler.explainer.aside((gathering.reason,)).message
            continue
        read = [reader.pod(pod, ours=True) for pod in gathering.waiting]
        if gathering.group is None:
            yield from (_Ask(one.job, [number]) for one, number in zip(read, numbers, strict=True))
        else:
            spec, order = as_job(read, gathering.needed, gathering.group)
            yield _Ask(spec, [numbers[at] for at in order])


def _judge(scheduler: PodSchedulerParts, asks: list[_Ask], out: list[Planned], now_ms: int) -> None:
    for ask, told in zip(asks, plan(scheduler.controller, [ask.spec for ask in asks], now_ms), strict=True):
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


def _indexer(scheduler: PodSchedulerParts, group: str, made: object) -> Indexer[Any]:
    cache = scheduler.cache
    if group == "scheduling.x-k8s.io":
        return cache.plugin_groups
    if group == "scheduling.volcano.sh":
        return cache.volcano_groups
    return cache.pod_groups if isinstance(made, PodGroup) else cache.grouped


# ------------------------------------------------------------------------------------------------ daemon sets


def _of_daemon_set(pod: Pod, scheduler: PodSchedulerParts, reader: Reader) -> list[Pod]:
    """One for each node that it may be on, as its controller makes them."""
    spec = structs.replace(pod.spec, tolerations=(*pod.spec.tolerations, *_TOLERATED))
    pod = structs.replace(pod, spec=spec)
    task = reader.pod(pod, ours=True).job.tasks[0]
    nodes = (node for _, node in sorted(scheduler.pods.nodes.items()))
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
