"""`hodei kube why` and `hodei kube plan`: the live cluster is read once and the real engine explains; nothing is changed.

No scheduler of ours needs to run there: read access is enough, and `why` also explains pods of other schedulers.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Struct, structs

from hodei.control.explain.why import plan, why
from hodei.kube.api import objects as k8s
from hodei.kube.api.client import Access, Api, ApiError
from hodei.kube.scheduler.cache import Indexer
from hodei.kube.scheduler.gangs import as_job, assemble, creates_one_by_one, membership
from hodei.kube.scheduler.groups import Entry
from hodei.kube.scheduler.informers import Informers
from hodei.kube.scheduler.reservations import Reservations
from hodei.kube.scheduler.run import Options, PodScheduler, build_scheduler, connected
from hodei.kube.scheduler.selectors import matches_node
from hodei.kube.scheduler.translate import NODES_PATH, PODS_PATH, Reader, ReaderOptions
from hodei.model.errors import InvalidInput, NotFound
from hodei.model.explanation import Explanation
from hodei.model.job import JobSpec, TaskSpec
from hodei.model.node import Node
from hodei.runtime.clock import SystemClock

_READ_TIMEOUT_S = 60.0
_MAX_STEPS = 100
_JOB = re.compile(r"\bjob (\d+)")


class Answer(Struct, omit_defaults=True):
    """The answer about a pod, or about all pods of a workload (`kind`).

    `message`: as in the pod's condition; `explanation`: with the evidence. `names`: pods by the job numbers in it. `unread`:
    collections that may not be read, and are missing in the answer. Of a workload's `total` pods, so many would start `now` on
    these `nodes`, would preempt others, or would wait; the explanation is of the first that would not start now.
    """

    pod: str
    scheduler: str = ""
    node: str = ""
    message: str = ""
    explanation: Explanation | None = None
    names: dict[str, str] = {}
    unread: list[str] = []
    kind: str = ""
    note: str = ""
    total: int = 0
    now: int = 0
    preempting: int = 0
    waiting: int = 0
    nodes: dict[str, int] = {}


async def explain_pod(access: Access, options: Options, namespace: str, name: str) -> Answer:
    """Needs read access to the pod only; the answer names what else could not be read."""
    async with connected(access) as api:
        pod = await _pod(api, namespace, name)
        options = structs.replace(options, scheduler_name=pod.spec.scheduler_name or options.scheduler_name)
        scheduler, unread = await _read_cluster(api, options, namespace)
    entry = scheduler.pods.find(namespace, name)
    answer = Answer(f"{namespace}/{name}", pod.spec.scheduler_name, pod.spec.node_name, unread=unread)
    if pod.spec.node_name:
        phase = f", {pod.status.phase.lower()}" if pod.status.phase else ""
        answer.message, answer.unread = f"it is on node {pod.spec.node_name}{phase}", []
    elif pod.terminal or pod.terminating:
        answer.message = "it is being deleted" if pod.terminating else f"it has ended: {pod.status.phase}"
        answer.unread = []
    elif entry is not None and entry.info.gates:
        answer.message = f"waiting for its scheduling gates: {', '.join(entry.info.gates)}"
    elif any(path.startswith((NODES_PATH, PODS_PATH)) for path in unread):
        reasons = entry.reasons if entry is not None else ()
        certain = reasons and all(reason.kind != "volume" for reason in reasons)
        answer.message = scheduler.explainer.not_tried(reasons).message if certain else _last_condition(pod)
    elif entry is None:
        answer.message = "it appeared while the cluster was read; try again"
    elif entry.reasons:
        answer.message = scheduler.explainer.not_tried(entry.reasons).message
    else:
        _explain(scheduler, entry, answer)
    return answer


def _last_condition(pod: k8s.Pod) -> str:
    """Nothing can be tried without nodes; the last report of the pod's scheduler is still known."""
    condition = pod.condition("PodScheduled")
    if condition is None or not condition.message:
        return "it is pending, and its scheduler has not reported why yet"
    return f"its scheduler reported: {condition.reason}: {condition.message}"


async def plan_manifests(access: Access, options: Options, files: list[Path]) -> list[Answer]:
    """One answer for each workload."""
    async with connected(access) as api:
        manifests = read_manifests(files, api.namespace or "default")
        await set_priorities(api, manifests)
        scheduler, unread = await _read_cluster(api, options)
    for path in ("/api/v1/nodes", "/api/v1/pods"):
        if path in unread:
            hint = "grant the role hodei-scheduler of deploy/kubernetes/rbac.yaml; check with kubectl auth can-i --list"
            raise InvalidInput(f"planning needs read access to {path}", hint=hint)
    reader_options = ReaderOptions(one_per_node=options.one_pod_per_node)
    reader = Reader(scheduler.cache.context, reader_options, scheduler.refusals)
    return [
        _plan_answer(one, options, unread)
        for one in plan_workloads(scheduler, reader, manifests, SystemClock().now_ms())
    ]


def _plan_answer(planned: Planned, options: Options, unread: list[str]) -> Answer:
    workload, meta = planned.workload, planned.workload.pod.metadata
    answer = Answer(f"{meta.namespace}/{meta.name}", options.scheduler_name, explanation=planned.first, unread=unread)
    answer.message = planned.refused
    if workload.kind != "Pod":
        answer.kind, answer.note = workload.kind, workload.note
        answer.total, answer.now, answer.nodes = planned.total, planned.now, planned.nodes
        answer.preempting, answer.waiting = planned.preempting, planned.waiting
    return answer


async def _pod(api: Api, namespace: str, name: str) -> k8s.Pod:
    try:
        return k8s.decode(await api.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}"), k8s.Pod)
    except ApiError as error:
        if error.status == 404:
            hint = f"kubectl get pods -n {namespace}"
            raise NotFound(f"pod {namespace}/{name} does not exist", hint=hint) from None
        raise


async def _read_cluster(api: Api, options: Options, namespace: str = "") -> tuple[PodScheduler, list[str]]:
    """The cluster as it is now, and the collections that may not be read (or only in `namespace`)."""
    scheduler = build_scheduler(options, tries=0)
    if scheduler.uses_start_reservations:
        scheduler = build_scheduler(options)  # start reservations follow from decisions, which are not carried out here
    informers = Informers(
        api,
        scheduler.pods,
        scheduler.cache,
        lambda: None,
        scheduler.refusals,
        tolerate_forbidden=True,
        namespace=namespace,
    )
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            await informers.start()
    except TimeoutError:
        problems = "; ".join(informers.problems) or f"it takes longer than {_READ_TIMEOUT_S:g} s"
        raise InvalidInput(f"the cluster cannot be read: {problems}", hint="kubectl auth can-i --list") from None
    finally:
        unread = informers.denied
        await informers.stop()
    clock = SystemClock()
    if options.reservations:
        await Reservations(
            options.reservations, scheduler.controller, scheduler.pods.take_facts, scheduler.pods.add_facts, clock.now_ms
        ).start()  # fmt: skip
    scheduler.controller.step(clock.now_ms(), scheduler.pods.take_facts())
    for _ in range(_MAX_STEPS):
        due = scheduler.controller.next_wakeup_ms(clock.now_ms())
        if not scheduler.uses_start_reservations or due is None or due > clock.now_ms():
            break
        scheduler.controller.step(clock.now_ms(), [])
    return scheduler, unread


def _explain(scheduler: PodScheduler, entry: Entry, answer: Answer) -> None:
    controller, now_ms = scheduler.controller, SystemClock().now_ms()
    queue = next((queue for queue in controller.queues.values() if entry.id in queue.gangs), None)
    if queue is None:
        if scheduler.uses_start_reservations and entry.id in controller.cluster.jobs:
            answer.message = "it could start now; its scheduler has not tried it yet"
        return
    gang = queue.gangs[entry.id]
    answer.explanation = why(controller, entry.id, now_ms)
    answer.names = _pod_names(scheduler, answer.explanation)
    result = controller.engine.place(gang, controller.view(now_ms))
    if isinstance(result, list):
        controller.engine.withdraw(gang, result)
        answer.message = "it could start now; its scheduler has not tried it yet"
    else:
        answer.message = scheduler.explainer.refused(gang, result, now_ms).message


def _pod_names(scheduler: PodScheduler, explanation: Explanation | None) -> dict[str, str]:
    """The pods of the job numbers in an explanation."""
    numbers = {int(number) for number in _JOB.findall(msgspec.json.encode(explanation).decode())}
    numbers |= {hold.job for hold in explanation.held_for} if explanation is not None else set()
    return {str(number): name for number in sorted(numbers) if (name := scheduler.pods.name_of(number))}


# The pod template of kinds that do not keep it in `spec.template`.
_TEMPLATES = {
    "Pod": (),
    "PodTemplate": ("template",),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}
_DEFAULT_TEMPLATE = ("spec", "template")
_GROUPS: dict[tuple[str, str], type[Any]] = {
    ("scheduling.k8s.io", "PodGroup"): k8s.PodGroup,
    ("scheduling.k8s.io", "Workload"): k8s.GroupedWorkload,
    ("scheduling.x-k8s.io", "PodGroup"): k8s.MemberGroup,
    ("scheduling.volcano.sh", "PodGroup"): k8s.MemberGroup,
}
# More would take too long.
MAX_PODS = 20_000


class Workload(Struct):
    """`pod`: its template; `count`: pods at the same time (a DaemonSet has one per matching node)."""

    kind: str
    pod: k8s.Pod
    count: int = 1
    note: str = ""

    def pods(self) -> list[k8s.Pod]:
        """The pods with the names and owners that their controller would set."""
        meta = self.pod.metadata
        if self.kind == "Pod":
            return [structs.replace(self.pod, metadata=structs.replace(meta, uid=f"{meta.namespace}/{meta.name}"))]
        owner = (k8s.OwnerReference(self.kind, meta.name, "", True),)
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
    """The workloads of some files in their order, and their pod groups with the API group of each."""

    workloads: list[Workload]
    groups: list[tuple[str, Any]]


def read_manifests(files: list[Path], namespace: str = "") -> Manifests:
    """`namespace`: the default for objects without one."""
    found = Manifests([], [])
    for file in files:
        before = len(found.workloads)
        for number, document in enumerate(_read_documents(file)):
            if not isinstance(document, dict) or "kind" not in document:
                raise InvalidInput(
                    f"{file}, document {number + 1}: not a Kubernetes object", hint="every document needs a kind"
                )
            for one in document.get("items") or [] if document["kind"] == "List" else [document]:
                if isinstance(one, dict) and "kind" in one:
                    _add_object(one, file, namespace, found)
        if len(found.workloads) == before:
            hint = "give a Pod, Deployment, Job, StatefulSet, ..."
            raise InvalidInput(f"{file} contains no pod and no workload", hint=hint)
    if sum(one.count for one in found.workloads) > MAX_PODS:
        raise InvalidInput(f"the manifests have more than {MAX_PODS} pods", hint="plan them in parts")
    return found


def _read_documents(file: Path) -> list[Any]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text("utf-8")
        return [document for document in yaml.safe_load_all(text) if document]
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InvalidInput(f"cannot read {file}: {error}", hint="give a manifest of a pod or of a workload") from None


def _add_object(document: dict[str, Any], file: Path, namespace: str, found: Manifests) -> None:
    kind, metadata = str(document["kind"]), document.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    group = str(document.get("apiVersion", "")).rpartition("/")[0]
    template: Any = document
    for step in _TEMPLATES.get(kind, _DEFAULT_TEMPLATE):
        template = template.get(step) if isinstance(template, dict) else None
    try:
        if (group, kind) in _GROUPS:
            pod_group = k8s.from_builtins(document, _GROUPS[group, kind])
            meta = _with_namespace(pod_group.metadata, namespace)
            found.groups.append((group, structs.replace(pod_group, metadata=meta)))
            return
        if not isinstance(template, dict) or not isinstance(template.get("spec"), dict):
            return  # not a workload, such as a Service
        names = {"namespace": metadata.get("namespace"), "name": metadata.get("name") or metadata.get("generateName")}
        fields = {**(template.get("metadata") or {}), **{key: value for key, value in names.items() if value}}
        pod = k8s.from_builtins({"metadata": fields, "spec": template["spec"]}, k8s.Pod)
        count, note = _count(kind, document)
    except Exception as error:
        raise InvalidInput(f"{file}: the {kind} cannot be read: {error}", hint="kubectl explain pod.spec") from None
    pod = structs.replace(pod, metadata=_with_namespace(pod.metadata, namespace))
    found.workloads.append(Workload(kind, pod, count, note))


def _with_namespace(meta: k8s.Meta, namespace: str) -> k8s.Meta:
    return structs.replace(meta, namespace=meta.namespace or namespace, name=meta.name or "?")


def _count(kind: str, document: dict[str, Any]) -> tuple[int, str]:
    """The number of pods at the same time, and a note about it."""
    spec = document.get("spec")
    spec = spec if isinstance(spec, dict) else {}
    note = ""
    if kind == "CronJob":
        note = "at each of its times"
        if spec.get("suspend"):
            note = "it is suspended: only after it is resumed"
        spec = (spec.get("jobTemplate") or {}).get("spec") or {}
    if kind in ("Job", "CronJob"):
        parallelism, completions = _pod_count(spec.get("parallelism"), 1), _pod_count(spec.get("completions"), 0)
        if spec.get("suspend"):
            note = "it is suspended: only after it is resumed"
        elif completions > parallelism:
            note = f"{parallelism} at a time, until {completions} have succeeded"
        return (min(parallelism, completions) if completions else parallelism), note
    if kind == "StatefulSet" and spec.get("podManagementPolicy", "OrderedReady") == "OrderedReady":
        note = "one after the other, each when the previous one is ready"
    if kind in ("Pod", "PodTemplate", "DaemonSet"):
        return 1, note
    return _pod_count(spec.get("replicas"), 1), note


def _pod_count(value: Any, default: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a number of pods")
    return value


# The tolerations that the DaemonSet controller adds to every pod.
_DAEMON_TOLERATIONS = tuple(
    k8s.Toleration(f"node.kubernetes.io/{what}", "Exists", "", effect)
    for what, effect in (
        ("not-ready", "NoExecute"), ("unreachable", "NoExecute"), ("disk-pressure", "NoSchedule"),
        ("memory-pressure", "NoSchedule"), ("pid-pressure", "NoSchedule"), ("unschedulable", "NoSchedule"),
    )
)  # fmt: skip


class Planned(msgspec.Struct):
    """Of a workload's `total` pods, how many would start `now` and on which `nodes`, preempt others, or wait. `refused`: why none
    can be scheduled. `first`: the explanation of the first that would not start, else of the first."""

    workload: Workload
    total: int
    now: int = 0
    preempting: int = 0
    waiting: int = 0
    nodes: dict[str, int] = {}
    refused: str = ""
    first: Explanation | None = None


class _PlanRequest(msgspec.Struct):
    """One job for the engine. `of`: the workload number of each member; a gang may have pods of several workloads."""

    spec: JobSpec
    of: list[int]


def plan_workloads(scheduler: PodScheduler, reader: Reader, manifests: Manifests, now_ms: int) -> list[Planned]:
    out: list[Planned] = []
    for group, found in manifests.groups:
        _indexer(scheduler, group, found).changed("ADDED", found)
    requests: list[_PlanRequest] = []
    grouped: list[tuple[int, k8s.Pod]] = []
    for number, workload in enumerate(manifests.workloads):
        daemons = workload.kind == "DaemonSet"
        pods = _daemon_pods(workload.pod, scheduler, reader) if daemons else workload.pods()
        meta = workload.pod.metadata
        ordered = workload.kind == "StatefulSet" and workload.note and len(pods) > 1
        size = creates_one_by_one(f"{workload.kind}/{meta.name}") if ordered else len(pods)
        if not daemons:
            scheduler.cache.planned[meta.namespace, workload.kind, meta.name] = size
        planned = Planned(workload, len(pods))
        out.append(planned)
        if not pods:
            continue
        one = reader.pod(pods[0], ours=True)
        if one.refused:
            planned.waiting, planned.refused = len(pods), scheduler.explainer.not_tried(one.refused).message
        elif one.gates:
            planned.waiting = len(pods)
            planned.refused = f"waiting for its scheduling gates: {', '.join(one.gates)}"
        else:
            if membership(pods[0]) is not None:
                grouped += [(number, pod) for pod in pods]
            else:
                infos = [reader.pod(pod, ours=True) for pod in pods] if daemons else [one] * len(pods)
                requests += [_PlanRequest(info.job, [number]) for info in infos]
    requests += _gangs(scheduler, reader, grouped, out)
    _plan_requests(scheduler, requests, out, now_ms)
    return out


def _gangs(
    scheduler: PodScheduler, reader: Reader, grouped: list[tuple[int, k8s.Pod]], out: list[Planned]
) -> Iterator[_PlanRequest]:
    number_of = {pod.metadata.uid: number for number, pod in grouped}
    for assembly in assemble([pod for _, pod in grouped], scheduler.cache.groups):
        numbers = [number_of[pod.metadata.uid] for pod in assembly.pending]
        if assembly.reason is not None:
            for number in numbers:
                out[number].waiting += 1
                out[number].refused = scheduler.explainer.not_tried((assembly.reason,)).message
            continue
        read = [reader.pod(pod, ours=True) for pod in assembly.pending]
        if assembly.group is None:
            yield from (_PlanRequest(one.job, [number]) for one, number in zip(read, numbers, strict=True))
        else:
            spec, order = as_job(read, assembly.needed, assembly.group)
            yield _PlanRequest(spec, [numbers[at] for at in order])


def _plan_requests(scheduler: PodScheduler, requests: list[_PlanRequest], out: list[Planned], now_ms: int) -> None:
    explanations = plan(scheduler.controller, [request.spec for request in requests], now_ms)
    for request, explanation in zip(requests, explanations, strict=True):
        starts = {}
        if explanation.code == "WOULD_START":
            starts = {place.member: place.node for place in explanation.placements}
        for member, number in enumerate(request.of):
            planned, node = out[number], starts.get(member, "")
            if node:
                planned.now += 1
                planned.nodes[node] = planned.nodes.get(node, 0) + 1
            elif explanation.code == "WOULD_PREEMPT":
                planned.preempting += 1
            else:
                planned.waiting += 1
            if planned.first is None or (planned.first.code == "WOULD_START" and not node):
                planned.first = explanation


def _indexer(scheduler: PodScheduler, group: str, found: object) -> Indexer[Any]:
    cache = scheduler.cache
    if group == "scheduling.x-k8s.io":
        return cache.plugin_groups
    if group == "scheduling.volcano.sh":
        return cache.volcano_groups
    return cache.pod_groups if isinstance(found, k8s.PodGroup) else cache.grouped


def _daemon_pods(pod: k8s.Pod, scheduler: PodScheduler, reader: Reader) -> list[k8s.Pod]:
    """One pod for each matching node, as the DaemonSet controller creates them."""
    spec = structs.replace(pod.spec, tolerations=(*pod.spec.tolerations, *_DAEMON_TOLERATIONS))
    pod = structs.replace(pod, spec=spec)
    task = reader.pod(pod, ours=True).job.tasks[0]
    nodes = (node for _, node in sorted(scheduler.pods.nodes.items()))
    return [_on_node(pod, node) for node in nodes if _node_matches(task, reader.node(node, None))]


def _node_matches(task: TaskSpec, node: Node) -> bool:
    labels, required = node.labels, task.affinity.required
    if any(labels.get(key) != value for key, value in task.node_selector.items()):
        return False
    if required and not any(matches_node(term, node.name, labels) for term in required):
        return False
    return all(
        taint.effect == "PreferNoSchedule" or any(one.tolerates(taint) for one in task.tolerations)
        for taint in node.taints
    )


def _on_node(pod: k8s.Pod, node: k8s.Node) -> k8s.Pod:
    name = node.metadata.name
    only = k8s.NodeSelectorTerm((), (k8s.Expression("metadata.name", "In", (name,)),))
    affinity = structs.replace(
        pod.spec.affinity,
        node_affinity=k8s.NodeAffinity(k8s.NodeSelector((only,)), pod.spec.affinity.node_affinity.preferred),
    )
    meta = structs.replace(
        pod.metadata, name=f"{pod.metadata.name}-{name}", uid=f"DaemonSet/{pod.metadata.name}/{name}"
    )
    return structs.replace(pod, metadata=meta, spec=structs.replace(pod.spec, affinity=affinity))


class _Classes(msgspec.Struct):
    items: tuple[k8s.PriorityClass, ...] = ()


async def set_priorities(api: Api, manifests: Manifests) -> None:
    """Set the priorities that admission would set, if the classes may be read."""
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
