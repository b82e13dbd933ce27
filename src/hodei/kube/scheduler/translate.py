"""Kubernetes' pods as jobs and its nodes as nodes: everything that scheduling reads of either, without a connection.

An unknown feature is never ignored silently: the pod is refused with `UNSUPPORTED_FEATURE` and the name of the field. What
kube-scheduler refuses before it looks at nodes is refused here with the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, TypeVar, cast

import msgspec
from msgspec import Struct, structs

from hodei.engine.view import Member
from hodei.kube.api import objects
from hodei.kube.api.objects import CsiNode, Pod
from hodei.kube.api.quantities import (
    DEFAULT_OPTIONS,
    DEFAULT_REQUESTS,
    MAX_INT32,
    PODS,
    UNDECLARED,
    RequestOptions,
    bounded,
    is_integer,
    read_seconds_ms,
    readable,
    requests_of,
    seconds_ms,
)
from hodei.kube.scheduler.selectors import (
    NEVER,
    NO_SELECTOR_SOURCES,
    NO_SPREAD,
    InvalidSelector,
    SelectorSources,
    SpreadDefaults,
    UnknownOperator,
    UnknownValue,
    node_term,
    own_label_requirements,
    selector,
    selectors_of,
    spread_of,
)
from hodei.kube.scheduler.volumes import NO_STORAGE, PodRefused, Storage, volume_limits, volumes_of
from hodei.model.affinity import HostPort, JobAffinity, JobTerm, NodeTerm, WeightedJobTerm
from hodei.model.errors import InvalidInput
from hodei.model.job import Affinity, JobSpec, PreferredTerm, Reason, TaskSpec, Toleration
from hodei.model.node import Node, Taint, TaintEffect
from hodei.model.resources import CPU, GPU, MAX_AMOUNT, MEMORY, Resources, parse_duration_ms

if TYPE_CHECKING:
    from hodei.kube.scheduler.cache import Refusals

UNSUPPORTED = "UNSUPPORTED_FEATURE"
CORDON_TAINT = "node.kubernetes.io/unschedulable"
ESTIMATE = "hodei.io/estimate"
MAX_EXEC_TIME = "kueue.x-k8s.io/max-exec-time-seconds"
MAX_USER_PRIORITY = 1_000_000_000  # higher ones belong to Kubernetes' own classes
_DEFAULT_GRACE_MS = 30_000
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_PROTOCOLS = ("TCP", "UDP", "SCTP")
_T = TypeVar("_T")


class PodContext(Struct, frozen=True):
    """What the translation of a pod depends on, apart from the pod: storage, objects that select it, and settings.

    `priority_annotation`: pods without a priority class may set their priority with it. Kubernetes does not check who may use
    it, so it is off ("") by default. `priority_preferred`: it also overrides a class.
    """

    storage: Storage = NO_STORAGE
    selector_sources: SelectorSources = NO_SELECTOR_SOURCES
    spread: SpreadDefaults = NO_SPREAD
    request_options: RequestOptions = DEFAULT_OPTIONS
    priority_annotation: str = ""
    priority_preferred: bool = False


NO_CONTEXT = PodContext()


class PodInfo(Struct, frozen=True):
    """A pod as a job. `refused`: why no node can take it. `gates`: its scheduling gates."""

    job: JobSpec
    refused: tuple[Reason, ...] = ()
    gates: tuple[str, ...] = ()
    terminating: bool = False

    @property
    def member(self) -> Member:
        return Member(self.job, self.job.tasks[0], self.terminating)

    @property
    def request(self) -> Resources:
        return self.job.tasks[0].request


def pod(given: objects.Pod, context: PodContext = NO_CONTEXT, *, profile: str = "default") -> PodInfo:
    """A pod as a job of one member. Never raises: unreadable parts become refusals."""
    parts = _PartReader(given)
    spec, meta = given.spec, given.metadata
    task = TaskSpec(
        name=meta.name or "pod",
        request=parts.of("spec.containers.resources", lambda: requests_of(given, context.request_options), {PODS: 1}),
        node_selector=spec.node_selector,
        affinity=parts.of("spec.affinity.nodeAffinity", lambda: node_affinity(spec.affinity.node_affinity), Affinity()),
        tolerations=parts.of("spec.tolerations", lambda: _tolerations(spec.tolerations), ()),
        job_affinity=parts.pod_affinity("Affinity", spec.affinity.pod_affinity),
        job_anti_affinity=parts.pod_affinity("AntiAffinity", spec.affinity.pod_anti_affinity),
        spread=parts.of(
            "spec.topologySpreadConstraints", lambda: spread_of(given, context.spread, context.selector_sources), ()
        ),
        ports=parts.of("spec.containers.ports", lambda: _ports(spec), ()),
        volumes=parts.of("spec.volumes", lambda: volumes_of(given, context.storage), ()),
        images=tuple(container.image for container in (*spec.init_containers, *spec.containers) if container.image),
    )
    parts.check()
    job = JobSpec(
        name=meta.name or "pod",
        tasks=(task,),
        project=meta.namespace,
        labels=meta.labels,
        annotations=meta.annotations,
        priority=parts.of(
            f"metadata.annotations[{context.priority_annotation}]",
            lambda: priority_of(given, context.priority_annotation, preferred=context.priority_preferred),
            priority_of(given),
        ),
        profile=profile,
        estimate_ms=parts.of(f"metadata.annotations[{ESTIMATE}]", lambda: estimate_ms(given), 0),
        timeout_ms=seconds_ms(spec.active_deadline_seconds),
        grace_ms=seconds_ms(spec.termination_grace_period_seconds, _DEFAULT_GRACE_MS),
        preempts=spec.preemption_policy != "Never",
    )
    gates = tuple(gate.name for gate in spec.scheduling_gates)
    return PodInfo(job, tuple(parts.refused), gates, given.terminating)


def node(given: objects.Node, csi: CsiNode | None = None, devices: Resources | None = None) -> Node:
    """A node. Its health is in its taints, as everywhere in Kubernetes: the node controller turns conditions into taints.

    `devices`: capacity from device classes. Unreadable amounts count as 0 (see `unreadable_amounts`).
    """
    meta, spec, status = given.metadata, given.spec, given.status
    capacity = {PODS: 0} | readable(status.allocatable)[0] | (devices or {})
    # Not a Kubernetes resource; the engine would treat it as single devices.
    capacity.pop(GPU, None)
    return Node(
        meta.name,
        "kubernetes",
        kind="kubernetes",
        capacity=capacity,
        labels=meta.labels,
        taints=tuple(
            Taint(one.key, one.value, cast("TaintEffect", one.effect)) for one in spec.taints if one.effect in _EFFECTS
        ),
        arch=meta.labels.get("kubernetes.io/arch", ""),
        not_ready_reason=", ".join(failing_conditions(given)),
        cordoned=spec.unschedulable,
        images={name: bounded(image.size_bytes, 0, MAX_AMOUNT) for image in status.images for name in image.names},
        volume_limits=volume_limits(csi),
    )


def unreadable_amounts(given: objects.Node) -> str:
    """The allocatable amounts that cannot be read; "" if all can."""
    problems = [f"status.allocatable.{text}" for text in readable(given.status.allocatable)[1]]
    return "; ".join(problems)


def unreadable(given: objects.Pod, why: str, *, profile: str = "default") -> PodInfo:
    """An unreadable pod: it takes one pod slot if it has a node, and is refused if it does not."""
    meta = given.metadata
    task = TaskSpec(name=meta.name or "pod", request={PODS: 1})
    job = JobSpec(name=meta.name or "pod", tasks=(task,), project=meta.namespace, profile=profile)
    gates = tuple(gate.name for gate in given.spec.scheduling_gates)
    return PodInfo(job, (Reason("translate", "INVALID_POD", why),), gates, terminating=given.terminating)


def failing_conditions(given: objects.Node) -> list[str]:
    """Conditions that indicate a problem, for people: only taints keep pods away."""
    return [
        one.type
        for one in given.status.conditions
        if (one.status != "True" if one.type == "Ready" else one.status == "True")
    ]


def estimate_ms(given: objects.Pod) -> int:
    """The expected run time: the annotation, Kueue's limit or the pod's deadline; 0 if unknown."""
    meta = given.metadata
    declared = meta.annotations.get(ESTIMATE)
    if declared is not None:
        return parse_duration_ms(declared)
    limit = meta.labels.get(MAX_EXEC_TIME) or meta.annotations.get(MAX_EXEC_TIME)
    if limit is not None:
        return read_seconds_ms(limit, MAX_EXEC_TIME)
    return seconds_ms(given.spec.active_deadline_seconds)


def priority_of(given: objects.Pod, annotation: str = "", *, preferred: bool = False) -> int:
    """The priority set by admission. A pod may set its own only with `annotation`, which overrides all classes but Kubernetes' own
    if `preferred`; it must then be an integer (InvalidInput)."""
    spec = given.spec
    declared = given.metadata.annotations.get(annotation, "") if annotation else ""
    if (
        preferred
        and annotation
        and annotation in given.metadata.annotations
        and (spec.priority or 0) <= MAX_USER_PRIORITY
    ):
        if not is_integer(declared):
            raise InvalidInput(f"a priority must be a whole number, not {declared[:40]!r}")
        return bounded(int(declared), -MAX_INT32, MAX_USER_PRIORITY)
    if declared and not spec.priority_class_name and not spec.priority and is_integer(declared):
        return bounded(int(declared), -MAX_INT32, MAX_USER_PRIORITY)
    return bounded(spec.priority, -MAX_INT32 - 1, MAX_INT32)


class _PartReader:
    """Translates a pod part by part, and collects what cannot be translated."""

    def __init__(self, given: objects.Pod) -> None:
        self.pod = given
        self.refused: list[Reason] = []

    def of(self, field: str, read: Callable[[], _T], default: _T) -> _T:
        try:
            return read()
        except PodRefused as refused:
            self.refused.append(refused.reason)
        except (UnknownOperator, UnknownValue) as error:
            self._unsupported(f"{field} {error}")
        except InvalidSelector as error:
            self.refused.append(Reason("translate", "INVALID_SELECTOR", f"{field}: {error}"))
        except InvalidInput as error:
            self.refused.append(Reason("translate", "INVALID_POD", f"{field}: {error.message}"))
        except Exception as error:
            text = f"{field} cannot be read: {type(error).__name__}: {error}"[:500]
            self.refused.append(Reason("translate", "INVALID_POD", text))
        return default

    def pod_affinity(self, name: str, given: objects.PodAffinity) -> JobAffinity:
        """Pod affinity, with kube-scheduler's text for invalid selectors."""
        field = f"spec.affinity.pod{name}"
        labels = self.pod.metadata.labels
        field_name = f"required{name}Terms"
        try:
            required = tuple(_job_term(term, labels) for term in given.required)
            field_name = f"preferred{name}Terms"
            preferred = tuple(
                WeightedJobTerm(_weight(w.weight), _job_term(w.pod_affinity_term, labels)) for w in given.preferred
            )
            return JobAffinity(required, preferred)
        except UnknownOperator as error:
            self._unsupported(f"{field} {error}")
        except InvalidSelector as error:
            self.refused.append(Reason("job_affinity", "INVALID_SELECTOR", f"parsing pod: {field_name}: {error}"))
        return JobAffinity()

    def check(self) -> None:
        """Unsupported features and contradictions."""
        spec = self.pod.spec
        containers = (*spec.init_containers, *spec.containers)
        if spec.resource_claims or any(container.resources.claims for container in containers):
            self._unsupported("spec.resourceClaims")
        if spec.preemption_policy not in ("", "Never", "PreemptLowerPriority"):
            self._unsupported(f"spec.preemptionPolicy {spec.preemption_policy}")
        if _conflict(spec.affinity.node_affinity):
            self.refused.append(Reason("affinity", "AFFINITY_CONFLICT", "pod affinity terms conflict"))

    def _unsupported(self, field: str) -> None:
        self.refused.append(Reason("translate", UNSUPPORTED, f"{field.strip()} is not supported by this scheduler"))


def node_affinity(given: objects.NodeAffinity) -> Affinity:
    """The node affinity of a pod, or the one that the operator adds to every pod."""
    required: tuple[NodeTerm, ...] = ()
    if given.required is not None:
        required = tuple(node_term(term) for term in given.required.node_selector_terms) or (NEVER,)
    preferred = (PreferredTerm(_weight(w.weight), node_term(w.preference)) for w in given.preferred)
    return Affinity(required, tuple(preferred))


def _weight(given: int) -> int:
    return bounded(given, 0, 100)


def _conflict(given: objects.NodeAffinity) -> bool:
    """Whether every term names nodes, and none can be matched."""
    terms = given.required.node_selector_terms if given.required is not None else ()
    for term in terms:
        named = [set(one.values) for one in term.match_fields if one.key == "metadata.name" and one.operator == "In"]
        if not named or set.intersection(*named):
            return False
    return bool(terms)


def _tolerations(given: tuple[objects.Toleration, ...]) -> tuple[Toleration, ...]:
    out = []
    for one in given:
        operator = one.operator or "Equal"
        if operator not in ("Equal", "Exists", "Gt", "Lt"):
            raise UnknownOperator(operator)
        if one.effect and one.effect not in _EFFECTS:
            raise UnknownValue(f"effect: {one.effect}")
        if operator in ("Gt", "Lt") and not is_integer(one.value):
            continue  # tolerates nothing without a number
        kind = cast("Literal['Equal', 'Exists', 'Gt', 'Lt']", operator)
        effect = cast("TaintEffect | Literal['']", one.effect)
        seconds = one.toleration_seconds
        tolerated_s = None if seconds is None else bounded(seconds, 0, MAX_INT32)
        out.append(Toleration(one.key, kind, one.value, effect, tolerated_s))
    return tuple(out)


def _job_term(given: objects.PodAffinityTerm, labels: Mapping[str, str]) -> JobTerm:
    own = (
        *own_label_requirements(given.match_label_keys, labels),
        *own_label_requirements(given.mismatch_label_keys, labels, differ=True),
    )
    return JobTerm(
        given.topology_key,
        selector(given.label_selector, own),
        tuple(given.namespaces),
        selector(given.namespace_selector),
    )


def _ports(spec: objects.PodSpec) -> tuple[HostPort, ...]:
    sidecars = (container for container in spec.init_containers if container.restart_policy == "Always")
    out = []
    for container in (*spec.containers, *sidecars):
        for port in container.ports:
            protocol = port.protocol or "TCP"
            if port.host_port and protocol not in _PROTOCOLS:
                raise UnknownValue(f"protocol: {protocol}")
            if not 0 <= port.host_port <= 65_535:
                raise UnknownValue(f"hostPort: {port.host_port}")
            if port.host_port:
                kind = cast("Literal['TCP', 'UDP', 'SCTP']", protocol)
                out.append(HostPort(port.host_port, kind, port.host_ip or "0.0.0.0"))
    return tuple(out)


# Undeclared requests only affect scores, never whether a pod fits.
_UNLIMITED = dict.fromkeys(UNDECLARED.values(), 1 << 50)
# One per node, with --one-pod-per-node.
SLOT = "hodei.io/slot"
_CACHE_SIZE = 20_000
PODS_PATH, NODES_PATH = "/api/v1/pods", "/api/v1/nodes"
_LATEST_MS = 1 << 48  # no timestamp of the API is later
# Pods of these do not end by themselves: start reservations must not count on their end.
_LONG_RUNNING = ("DaemonSet", "ReplicaSet", "ReplicationController", "StatefulSet")
LONG_RUNNING_MS = 10 * 365 * 86_400_000


class ReaderOptions(Struct, frozen=True):
    """`profile`: the profile of all pods. `one_per_node`: a node takes one pod of ours, whatever it requests."""

    profile: str = "default"
    one_per_node: bool = False
    long_running_ms: int = 0  # assumed run time of pods that do not end by themselves; 0 for unknown


class Reader:
    """Translation with a cache: most pods are one of many equal ones, which share one result."""

    def __init__(self, context: PodContext, options: ReaderOptions, refusals: Refusals) -> None:
        self._context, self._options, self._refusals = context, options, refusals
        self._translated: dict[bytes, PodInfo] = {}
        self._with_default_requests = RequestOptions(context.request_options.ignored, DEFAULT_REQUESTS)

    def pod(self, given: Pod, *, ours: bool) -> PodInfo:
        """Never raises: a pod that cannot be read is refused."""
        try:
            return self._translate_cached(given, ours)
        except Exception as error:
            why = f"the pod cannot be read: {describe_error(error)}"
            self._refusals.put(PODS_PATH, given.metadata, why)
            return unreadable(given, why, profile=self._options.profile)

    def _translate_cached(self, pod: Pod, ours: bool) -> PodInfo:
        key = self._key(pod, ours)
        if key is None:
            return self._translate(pod, ours)
        known = self._translated.get(key)
        if known is None:
            if len(self._translated) >= _CACHE_SIZE:
                self._translated.clear()
            known = self._translated[key] = self._translate(pod, ours)
        return known

    def node(self, given: objects.Node, drivers: CsiNode | None) -> Node:
        """Never raises: unreadable amounts count as 0, and a node that cannot be read takes no pod."""
        extra = {**_UNLIMITED, SLOT: 1} if self._options.one_per_node else _UNLIMITED
        try:
            found, problems = node(given, drivers, extra), unreadable_amounts(given)
        except Exception as error:
            problems = f"the node cannot be read: {describe_error(error)}"
            found = Node(given.metadata.name, "kubernetes", kind="kubernetes", capacity={**extra, PODS: 0})
        if problems:
            self._refusals.put(NODES_PATH, given.metadata, problems)
        else:
            self._refusals.clear(NODES_PATH, given.metadata)
        return found

    def _key(self, pod: Pod, ours: bool) -> bytes | None:
        """The cache key; None for pods with volumes of their own."""
        spec, meta = pod.spec, pod.metadata
        if any(
            volume.persistent_volume_claim or volume.ephemeral or volume.gce_persistent_disk
            or volume.aws_elastic_block_store or volume.iscsi or volume.rbd
            for volume in spec.volumes
        ):  # fmt: skip
            return None
        context = self._context
        annotations = meta.annotations
        wanted = (ESTIMATE, MAX_EXEC_TIME, context.priority_annotation)
        return msgspec.msgpack.encode(
            (
                ours,
                meta.namespace,
                owner_of(pod),
                sorted(meta.labels.items()),
                [annotations.get(name) for name in wanted],
                () if spec.topology_spread_constraints else selectors_of(pod, context.selector_sources),
                structs.replace(spec, node_name="", volumes=()),
                (pod.status.container_statuses, pod.status.init_container_statuses) if spec.node_name else (),
                [one for one in pod.status.conditions if one.type == "PodResizePending"],
            )
        )

    def _translate(self, given: Pod, ours: bool) -> PodInfo:
        wanted = pod(given, self._context, profile=self._options.profile)
        task = wanted.job.tasks[0]
        extra = self._undeclared(given, task.request)
        if ours and self._options.one_per_node:
            extra = {**extra, SLOT: 1}
        task = structs.replace(task, name="pod", request={**task.request, **extra})
        job = structs.replace(wanted.job, name=owner_of(given), tasks=(task,), annotations={})
        if self._options.long_running_ms and not job.estimate_ms and job.name.partition("/")[0] in _LONG_RUNNING:
            job = structs.replace(job, estimate_ms=self._options.long_running_ms)
        return structs.replace(wanted, job=job)

    def _undeclared(self, pod: Pod, request: Resources) -> Resources:
        if CPU in request and MEMORY in request and all(
            {CPU, MEMORY} <= (one.resources.requests.keys() | one.resources.limits.keys()) for one in pod.spec.containers
        ):  # fmt: skip
            return {}
        counted = requests_of(pod, self._with_default_requests)
        missing = {UNDECLARED[name]: counted.get(name, 0) - request.get(name, 0) for name in UNDECLARED}
        return {name: amount for name, amount in missing.items() if amount > 0}


def owner_of(pod: Pod) -> str:
    """The workload that created the pod, so that estimates are learned per workload."""
    owner = next((one for one in pod.metadata.owner_references if one.controller), None)
    return f"{owner.kind}/{owner.name}" if owner is not None else "pod"


def at_ms(stamp: str | None, default: int = 0) -> int:
    """A timestamp of the API in milliseconds; `default` if it is missing or invalid."""
    if not stamp:
        return default
    try:
        when = datetime.fromisoformat(stamp)
        found = round((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        return default
    return max(0, min(found, _LATEST_MS))


def describe_error(error: BaseException) -> str:
    """An error in one line, with its type unless it is a ValueError with a text."""
    text = str(error)
    return text if text and isinstance(error, ValueError) else f"{type(error).__name__}: {text}".rstrip(": ")
