"""Kubernetes' objects as far as scheduling reads them, decoded straight from the API's JSON; other fields are skipped.

Names are those of the API in our spelling (`node_selector` for `nodeSelector`). Storage is in `storage_objects`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

Quantity = str | int | float
Quantities = dict[str, Quantity]
_T = TypeVar("_T")
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


class Slim(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The base of all of them."""


class Owner(Slim, frozen=True):
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False
    api_version: str = ""


class Meta(Slim, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    owner_references: tuple[Owner, ...] = ()
    resource_version: str = ""
    generation: int = 0


class Expression(Slim, frozen=True):
    key: str = ""
    operator: str = ""
    values: tuple[str, ...] = ()


class LabelSelector(Slim, frozen=True):
    match_labels: dict[str, str] = {}
    match_expressions: tuple[Expression, ...] = ()


# ------------------------------------------------------------------------------------------------ affinity


class NodeSelectorTerm(Slim, frozen=True):
    match_expressions: tuple[Expression, ...] = ()
    match_fields: tuple[Expression, ...] = ()


class NodeSelector(Slim, frozen=True):
    node_selector_terms: tuple[NodeSelectorTerm, ...] = ()


class PreferredNodes(Slim, frozen=True):
    weight: int = 0
    preference: NodeSelectorTerm = NodeSelectorTerm()


class NodeAffinity(Slim, frozen=True):
    required: NodeSelector | None = field(default=None, name=_REQUIRED)
    preferred: tuple[PreferredNodes, ...] = field(default=(), name=_PREFERRED)


class PodAffinityTerm(Slim, frozen=True):
    topology_key: str = ""
    label_selector: LabelSelector | None = None
    namespaces: tuple[str, ...] = ()
    namespace_selector: LabelSelector | None = None
    match_label_keys: tuple[str, ...] = ()
    mismatch_label_keys: tuple[str, ...] = ()


class PreferredPods(Slim, frozen=True):
    weight: int = 0
    pod_affinity_term: PodAffinityTerm = PodAffinityTerm()


class PodAffinity(Slim, frozen=True):
    required: tuple[PodAffinityTerm, ...] = field(default=(), name=_REQUIRED)
    preferred: tuple[PreferredPods, ...] = field(default=(), name=_PREFERRED)


class Affinity(Slim, frozen=True):
    node_affinity: NodeAffinity = NodeAffinity()
    pod_affinity: PodAffinity = PodAffinity()
    pod_anti_affinity: PodAffinity = PodAffinity()


class Toleration(Slim, frozen=True):
    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""
    toleration_seconds: int | None = None


class TopologySpread(Slim, frozen=True):
    topology_key: str = ""
    max_skew: int = 1
    when_unsatisfiable: str = ""
    label_selector: LabelSelector | None = None
    min_domains: int | None = None
    node_affinity_policy: str | None = None
    node_taints_policy: str | None = None
    match_label_keys: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------ pods


class ClaimRef(Slim, frozen=True):
    name: str = ""


class Needs(Slim, frozen=True):
    requests: Quantities = {}
    limits: Quantities = {}
    claims: tuple[ClaimRef, ...] = ()


class Port(Slim, frozen=True):
    host_port: int = 0
    container_port: int = 0
    protocol: str = ""
    host_ip: str = field(default="", name="hostIP")


class Container(Slim, frozen=True):
    name: str = ""
    image: str = ""
    resources: Needs = Needs()
    ports: tuple[Port, ...] = ()
    restart_policy: str = ""


class ClaimSource(Slim, frozen=True):
    claim_name: str = ""
    read_only: bool = False


class Disk(Slim, frozen=True):
    """A disk that is named in the pod itself, of any of the kinds that cannot be shared: their names for the same thing."""

    pd_name: str = ""
    volume_id: str = field(default="", name="volumeID")
    iqn: str = ""
    lun: int = 0
    target_portal: str = ""
    monitors: tuple[str, ...] = ()
    image: str = ""
    pool: str = ""
    read_only: bool = False


class PodVolume(Slim, frozen=True):
    name: str = ""
    persistent_volume_claim: ClaimSource | None = None
    ephemeral: dict[str, Any] | None = None
    gce_persistent_disk: Disk | None = None
    aws_elastic_block_store: Disk | None = None
    iscsi: Disk | None = None
    rbd: Disk | None = None


class Gate(Slim, frozen=True):
    name: str = ""


class ResourceClaim(Slim, frozen=True):
    name: str = ""


class SchedulingGroup(Slim, frozen=True):
    pod_group_name: str | None = None


class WorkloadRef(Slim, frozen=True):
    name: str = ""
    pod_group: str = ""
    pod_group_replica_key: str = ""


class PodSpec(Slim, frozen=True):
    scheduler_name: str = ""
    node_name: str = ""
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    resources: Needs | None = None
    overhead: Quantities = {}
    node_selector: dict[str, str] = {}
    affinity: Affinity = Affinity()
    tolerations: tuple[Toleration, ...] = ()
    topology_spread_constraints: tuple[TopologySpread, ...] = ()
    scheduling_gates: tuple[Gate, ...] = ()
    priority: int | None = None
    priority_class_name: str = ""
    preemption_policy: str = ""
    volumes: tuple[PodVolume, ...] = ()
    resource_claims: tuple[ResourceClaim, ...] = ()
    active_deadline_seconds: int | None = None
    termination_grace_period_seconds: int | None = None
    host_network: bool = False
    scheduling_group: SchedulingGroup | None = None
    workload_ref: WorkloadRef | None = None


class Condition(Slim, frozen=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class ContainerStatus(Slim, frozen=True):
    name: str = ""
    allocated_resources: Quantities = {}
    resources: Needs | None = None


class PodStatus(Slim, frozen=True):
    phase: str = ""
    conditions: tuple[Condition, ...] = ()
    nominated_node_name: str = ""
    start_time: str | None = None
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    allocated_resources: Quantities = {}
    resources: Needs | None = None


class Pod(Slim, frozen=True):
    metadata: Meta = Meta()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    def condition(self, type: str) -> Condition | None:
        return next((one for one in self.status.conditions if one.type == type), None)

    @property
    def leaving(self) -> bool:
        return self.metadata.deletion_timestamp is not None

    @property
    def over(self) -> bool:
        """It holds nothing any more."""
        return self.status.phase in ("Succeeded", "Failed")


# ------------------------------------------------------------------------------------------------ the rest


class Taint(Slim, frozen=True):
    key: str = ""
    value: str = ""
    effect: str = ""


class NodeSpec(Slim, frozen=True):
    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()
    provider_id: str = field(default="", name="providerID")


class Image(Slim, frozen=True):
    names: tuple[str, ...] = ()
    size_bytes: int = 0


class NodeStatus(Slim, frozen=True):
    allocatable: Quantities = {}
    capacity: Quantities = {}
    conditions: tuple[Condition, ...] = ()
    images: tuple[Image, ...] = ()


class Node(Slim, frozen=True):
    metadata: Meta = Meta()
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class Namespace(Slim, frozen=True):
    metadata: Meta = Meta()


class PriorityClass(Slim, frozen=True):
    metadata: Meta = Meta()
    value: int = 0
    global_default: bool = False
    preemption_policy: str = ""


class BudgetSpec(Slim, frozen=True):
    selector: LabelSelector | None = None


class BudgetStatus(Slim, frozen=True):
    disruptions_allowed: int = 0
    disrupted_pods: dict[str, str] = {}


class PodDisruptionBudget(Slim, frozen=True):
    metadata: Meta = Meta()
    spec: BudgetSpec = BudgetSpec()
    status: BudgetStatus = BudgetStatus()


class Service(Slim, frozen=True):
    """A service, or a replication controller: whoever picks pods by plain labels."""

    class Spec(Slim, frozen=True):
        selector: dict[str, str] = {}

    metadata: Meta = Meta()
    spec: Spec = Spec()


class Workload(Slim, frozen=True):
    """A replica set, a stateful set or a job: whoever makes pods and picks them by a selector, and how many it wants."""

    class Spec(Slim, frozen=True):
        selector: LabelSelector | None = None
        replicas: int | None = None
        pod_management_policy: str = ""
        parallelism: int | None = None
        completions: int | None = None

    metadata: Meta = Meta()
    spec: Spec = Spec()


def decode(data: bytes | str, kind: type[_T]) -> _T:
    """An object from its JSON. A null where a list or a map belongs counts as absent: Go writes one for an empty list."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        return msgspec.convert(_without_nulls(msgspec.json.decode(data)), type=kind)


def from_plain(value: Any, kind: type[_T]) -> _T:
    """The same from what was decoded already."""
    return msgspec.convert(_without_nulls(value), type=kind)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
