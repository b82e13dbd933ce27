"""Pods into jobs and nodes into nodes: the whole of what scheduling reads of either, and nothing that needs a cluster.

What is not known here is never passed over in silence: the pod is refused with `UNSUPPORTED_FEATURE` and the field's name.
What upstream refuses before it looks at any node is refused here, in its words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeVar, cast

from msgspec import Struct

from hodei.engine.view import Member
from hodei.kube.api import objects
from hodei.kube.api.objects import CsiNode
from hodei.kube.api.quantities import (
    MAX_INT32,
    PLAIN,
    PODS,
    Counting,
    bounded,
    is_whole,
    read_seconds_ms,
    readable,
    requests_of,
    seconds_ms,
)
from hodei.kube.scheduler.selectors import (
    NEVER,
    NO_DEFAULTS,
    NO_OWNERS,
    BadSelector,
    Defaults,
    Owners,
    UnknownOperator,
    UnknownValue,
    node_term,
    of_own_labels,
    selector,
    spread_of,
)
from hodei.kube.scheduler.volumes import NO_STORAGE, Refused, Storage, volume_limits, volumes_of
from hodei.model.affinity import HostPort, JobAffinity, JobTerm, NodeTerm, Requirement, WeightedJobTerm
from hodei.model.errors import InvalidInput
from hodei.model.job import Affinity, JobSpec, PreferredTerm, Reason, TaskSpec, Toleration
from hodei.model.node import Node, Taint, TaintEffect
from hodei.model.resources import GPU, MAX_AMOUNT, Resources, parse_duration_ms

UNSUPPORTED = "UNSUPPORTED_FEATURE"
CORDON_TAINT = "node.kubernetes.io/unschedulable"
ESTIMATE = "hodei.io/estimate"
MAX_EXEC_TIME = "kueue.x-k8s.io/max-exec-time-seconds"
MAX_OWN_PRIORITY = 1_000_000_000  # above it are Kubernetes' own classes
_DEFAULT_GRACE_MS = 30_000
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_PROTOCOLS = ("TCP", "UDP", "SCTP")
_T = TypeVar("_T")


class Surroundings(Struct, frozen=True):
    """What a pod's own text refers to: storage, those who pick it, and how the operator counts.

    `priority_annotation`: a name under which pods without a priority class may give a priority themselves. Nobody checks
    who may give which, so it is off ("") unless the operator wants it. `priority_preferred`: it counts before a class too.
    """

    storage: Storage = NO_STORAGE
    owners: Owners = NO_OWNERS
    spread: Defaults = NO_DEFAULTS
    counting: Counting = PLAIN
    priority_annotation: str = ""
    priority_preferred: bool = False


ALONE = Surroundings()


class Wanted(Struct, frozen=True):
    """A pod as the engine sees it. `refused`: why it can not be scheduled whatever the nodes. `gates`: who holds it back.
    `preempts`: whether it may take the place of others."""

    job: JobSpec
    refused: tuple[Reason, ...] = ()
    gates: tuple[str, ...] = ()
    preempts: bool = True
    leaving: bool = False

    @property
    def member(self) -> Member:
        return Member(self.job, self.job.tasks[0], self.leaving)

    @property
    def request(self) -> Resources:
        return self.job.tasks[0].request


def pod(given: objects.Pod, cache: Surroundings = ALONE, *, profile: str = "default") -> Wanted:
    """A pod as a job of one member; it never raises, whatever the pod says."""
    reading = _Reading(given)
    spec, meta = given.spec, given.metadata
    unset: JobAffinity = JobAffinity()
    task = TaskSpec(
        name=meta.name or "pod",
        request=reading.of("spec.containers.resources", lambda: requests_of(given, cache.counting), {PODS: 1}),
        node_selector=spec.node_selector,
        affinity=reading.of(
            "spec.affinity.nodeAffinity", lambda: node_affinity(spec.affinity.node_affinity), Affinity()
        ),
        tolerations=reading.of("spec.tolerations", lambda: _tolerations(spec.tolerations), ()),
        job_affinity=reading.company("Affinity", spec.affinity.pod_affinity, unset),
        job_anti_affinity=reading.company("AntiAffinity", spec.affinity.pod_anti_affinity, unset),
        spread=reading.of("spec.topologySpreadConstraints", lambda: spread_of(given, cache.spread, cache.owners), ()),
        ports=reading.of("spec.containers.ports", lambda: _ports(spec), ()),
        volumes=reading.of("spec.volumes", lambda: volumes_of(given, cache.storage), ()),
        images=tuple(container.image for container in (*spec.init_containers, *spec.containers) if container.image),
    )
    reading.check()
    job = JobSpec(
        meta.name or "pod",
        (task,),
        meta.namespace,
        labels=meta.labels,
        annotations=meta.annotations,
        priority=reading.of(
            f"metadata.annotations[{cache.priority_annotation}]",
            lambda: priority_of(given, cache.priority_annotation, preferred=cache.priority_preferred),
            priority_of(given),
        ),
        profile=profile,
        estimate_ms=reading.of(f"metadata.annotations[{ESTIMATE}]", lambda: estimate_ms(given), 0),
        timeout_ms=seconds_ms(spec.active_deadline_seconds),
        grace_ms=seconds_ms(spec.termination_grace_period_seconds, _DEFAULT_GRACE_MS),
        preempts=spec.preemption_policy != "Never",
    )
    gates = tuple(gate.name for gate in spec.scheduling_gates)
    return Wanted(job, tuple(reading.refused), gates, job.preempts, given.leaving)


def node(given: objects.Node, csi: CsiNode | None = None, devices: Resources | None = None) -> Node:
    """A node. Whether it is healthy is told by its taints, as everywhere in Kubernetes: the node controller turns
    conditions into taints, which pods may tolerate. `devices`: what device classes offer of extended resources. An amount
    that cannot be read counts as none (`wrong_with` says which)."""
    meta, spec, status = given.metadata, given.spec, given.status
    capacity = {PODS: 0} | readable(status.allocatable)[0] | (devices or {})
    # Kubernetes knows no such thing, and to the engine it is one device after the other.
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
        not_ready_reason=", ".join(troubles(given)),
        cordoned=spec.unschedulable,
        images={name: bounded(image.size_bytes, 0, MAX_AMOUNT) for image in status.images for name in image.names},
        volume_limits=volume_limits(csi),
    )


def wrong_with(given: objects.Node) -> str:
    """What of a node cannot be read; "" if all can."""
    wrong = [f"status.allocatable.{text}" for text in readable(given.status.allocatable)[1]]
    return "; ".join(wrong)


def unreadable(given: objects.Pod, why: str, *, profile: str = "default") -> Wanted:
    """A pod that cannot be read at all: it takes one of its node's places if it has a node, and is refused if it wants one."""
    meta = given.metadata
    task = TaskSpec(name=meta.name or "pod", request={PODS: 1})
    job = JobSpec(meta.name or "pod", (task,), meta.namespace, profile=profile)
    gates = tuple(gate.name for gate in given.spec.scheduling_gates)
    return Wanted(job, (Reason("translate", "INVALID_POD", why),), gates, leaving=given.leaving)


def troubles(given: objects.Node) -> list[str]:
    """The conditions that speak against a node, for people: it is refused by its taints alone."""
    return [
        one.type
        for one in given.status.conditions
        if (one.status != "True" if one.type == "Ready" else one.status == "True")
    ]


def pinned(given: objects.Pod) -> Affinity:
    """The node that a pod names itself, as a demand on nodes; no demand if it names none."""
    if not given.spec.node_name:
        return Affinity()
    return Affinity((NodeTerm((), (Requirement("metadata.name", "In", (given.spec.node_name,)),)),))


def estimate_ms(given: objects.Pod) -> int:
    """How long a pod is said to run: by its annotation, by Kueue's limit, by its own deadline; 0 if nobody says."""
    meta = given.metadata
    said = meta.annotations.get(ESTIMATE)
    if said is not None:
        return parse_duration_ms(said)
    limit = meta.labels.get(MAX_EXEC_TIME) or meta.annotations.get(MAX_EXEC_TIME)
    if limit is not None:
        return read_seconds_ms(limit, MAX_EXEC_TIME)
    return seconds_ms(given.spec.active_deadline_seconds)


def priority_of(given: objects.Pod, annotation: str = "", *, preferred: bool = False) -> int:
    """The priority that admission gave the pod; one of its own choice only where `annotation` allows that. `preferred`: that
    one counts before any class but Kubernetes' own, and must be a number (InvalidInput)."""
    spec = given.spec
    said = given.metadata.annotations.get(annotation, "") if annotation else ""
    if (
        preferred
        and annotation
        and annotation in given.metadata.annotations
        and (spec.priority or 0) <= MAX_OWN_PRIORITY
    ):
        if not is_whole(said):
            raise InvalidInput(f"a priority must be a whole number, not {said[:40]!r}")
        return bounded(int(said), -MAX_INT32, MAX_OWN_PRIORITY)
    if said and not spec.priority_class_name and not spec.priority and is_whole(said):
        return bounded(int(said), -MAX_INT32, MAX_OWN_PRIORITY)
    return bounded(spec.priority, -MAX_INT32 - 1, MAX_INT32)


# ------------------------------------------------------------------------------------------------ the parts


class _Reading:
    """Reads a pod part by part, and keeps what could not be read."""

    def __init__(self, given: objects.Pod) -> None:
        self.pod = given
        self.refused: list[Reason] = []

    def of(self, field: str, read: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return read()
        except Refused as refused:
            self.refused.append(refused.reason)
        except (UnknownOperator, UnknownValue) as unknown:
            self._unsupported(f"{field} {unknown}")
        except BadSelector as bad:
            self.refused.append(Reason("translate", "INVALID_SELECTOR", f"{field}: {bad}"))
        except InvalidInput as bad:
            self.refused.append(Reason("translate", "INVALID_POD", f"{field}: {bad.message}"))
        except Exception as fault:
            text = f"{field} cannot be read: {type(fault).__name__}: {fault}"[:500]
            self.refused.append(Reason("translate", "INVALID_POD", text))
        return otherwise

    def company(self, name: str, given: objects.PodAffinity, otherwise: JobAffinity) -> JobAffinity:
        """Pod affinity; what cannot be parsed is said as upstream says it."""
        field = f"spec.affinity.pod{name}"
        labels = self.pod.metadata.labels
        which = f"required{name}Terms"
        try:
            required = tuple(_job_term(term, labels) for term in given.required)
            which = f"preferred{name}Terms"
            preferred = tuple(
                WeightedJobTerm(_weight(w.weight), _job_term(w.pod_affinity_term, labels)) for w in given.preferred
            )
            return JobAffinity(required, preferred)
        except UnknownOperator as unknown:
            self._unsupported(f"{field} {unknown}")
        except BadSelector as bad:
            self.refused.append(Reason("job_affinity", "INVALID_SELECTOR", f"parsing pod: {which}: {bad}"))
        return otherwise

    def check(self) -> None:
        """Features that have no counterpart here, and demands that contradict themselves."""
        spec = self.pod.spec
        everyone = (*spec.init_containers, *spec.containers)
        if spec.resource_claims or any(container.resources.claims for container in everyone):
            self._unsupported("spec.resourceClaims")
        if spec.preemption_policy not in ("", "Never", "PreemptLowerPriority"):
            self._unsupported(f"spec.preemptionPolicy {spec.preemption_policy}")
        if _conflict(spec.affinity.node_affinity):
            self.refused.append(Reason("affinity", "AFFINITY_CONFLICT", "pod affinity terms conflict"))

    def _unsupported(self, field: str) -> None:
        self.refused.append(Reason("translate", UNSUPPORTED, f"{field.strip()} is not supported by this scheduler"))


def node_affinity(given: objects.NodeAffinity) -> Affinity:
    """A pod's, or what the operator adds to every pod's."""
    required: tuple[NodeTerm, ...] = ()
    if given.required is not None:
        required = tuple(node_term(term) for term in given.required.node_selector_terms) or (NEVER,)
    preferred = (PreferredTerm(_weight(w.weight), node_term(w.preference)) for w in given.preferred)
    return Affinity(required, tuple(preferred))


def _weight(given: int) -> int:
    """As the API has it: from 1 to 100."""
    return bounded(given, 0, 100)


def _conflict(given: objects.NodeAffinity) -> bool:
    """Whether every term names nodes, and none names one that all its conditions allow."""
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
        if operator in ("Gt", "Lt") and not is_whole(one.value):
            continue  # compares with nothing, so it tolerates nothing
        kind = cast("Literal['Equal', 'Exists', 'Gt', 'Lt']", operator)
        effect = cast("TaintEffect | Literal['']", one.effect)
        seconds = one.toleration_seconds
        patience = None if seconds is None else bounded(seconds, 0, MAX_INT32)
        out.append(Toleration(one.key, kind, one.value, effect, patience))
    return tuple(out)


def _job_term(given: objects.PodAffinityTerm, labels: Mapping[str, str]) -> JobTerm:
    own = (
        *of_own_labels(given.match_label_keys, labels),
        *of_own_labels(given.mismatch_label_keys, labels, differ=True),
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
