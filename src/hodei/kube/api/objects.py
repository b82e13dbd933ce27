"""Kubernetes' objects, with the fields that scheduling reads. Other fields are skipped while decoding.

Field names are those of the API in snake case (`node_selector` for `nodeSelector`).
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


class ApiStruct(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The base of all objects."""


class OwnerReference(ApiStruct, frozen=True):
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False
    api_version: str = ""


class Meta(ApiStruct, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    owner_references: tuple[OwnerReference, ...] = ()
    resource_version: str = ""
    generation: int = 0


class Expression(ApiStruct, frozen=True):
    key: str = ""
    operator: str = ""
    values: tuple[str, ...] = ()


class LabelSelector(ApiStruct, frozen=True):
    match_labels: dict[str, str] = {}
    match_expressions: tuple[Expression, ...] = ()


class NodeSelectorTerm(ApiStruct, frozen=True):
    match_expressions: tuple[Expression, ...] = ()
    match_fields: tuple[Expression, ...] = ()


class NodeSelector(ApiStruct, frozen=True):
    node_selector_terms: tuple[NodeSelectorTerm, ...] = ()


class PreferredSchedulingTerm(ApiStruct, frozen=True):
    weight: int = 0
    preference: NodeSelectorTerm = NodeSelectorTerm()


class NodeAffinity(ApiStruct, frozen=True):
    required: NodeSelector | None = field(default=None, name=_REQUIRED)
    preferred: tuple[PreferredSchedulingTerm, ...] = field(default=(), name=_PREFERRED)


class PodAffinityTerm(ApiStruct, frozen=True):
    topology_key: str = ""
    label_selector: LabelSelector | None = None
    namespaces: tuple[str, ...] = ()
    namespace_selector: LabelSelector | None = None
    match_label_keys: tuple[str, ...] = ()
    mismatch_label_keys: tuple[str, ...] = ()


class WeightedPodAffinityTerm(ApiStruct, frozen=True):
    weight: int = 0
    pod_affinity_term: PodAffinityTerm = PodAffinityTerm()


class PodAffinity(ApiStruct, frozen=True):
    required: tuple[PodAffinityTerm, ...] = field(default=(), name=_REQUIRED)
    preferred: tuple[WeightedPodAffinityTerm, ...] = field(default=(), name=_PREFERRED)


class Affinity(ApiStruct, frozen=True):
    node_affinity: NodeAffinity = NodeAffinity()
    pod_affinity: PodAffinity = PodAffinity()
    pod_anti_affinity: PodAffinity = PodAffinity()


class Toleration(ApiStruct, frozen=True):
    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""
    toleration_seconds: int | None = None


class TopologySpread(ApiStruct, frozen=True):
    topology_key: str = ""
    max_skew: int = 1
    when_unsatisfiable: str = ""
    label_selector: LabelSelector | None = None
    min_domains: int | None = None
    node_affinity_policy: str | None = None
    node_taints_policy: str | None = None
    match_label_keys: tuple[str, ...] = ()


class ClaimRef(ApiStruct, frozen=True):
    name: str = ""


class ResourceRequirements(ApiStruct, frozen=True):
    requests: Quantities = {}
    limits: Quantities = {}
    claims: tuple[ClaimRef, ...] = ()


class Port(ApiStruct, frozen=True):
    host_port: int = 0
    protocol: str = ""
    host_ip: str = field(default="", name="hostIP")


class Container(ApiStruct, frozen=True):
    name: str = ""
    image: str = ""
    resources: ResourceRequirements = ResourceRequirements()
    ports: tuple[Port, ...] = ()
    restart_policy: str = ""


class ClaimSource(ApiStruct, frozen=True):
    claim_name: str = ""


class Disk(ApiStruct, frozen=True):
    """A disk named in the pod, of any kind that cannot be shared; each kind uses some of the fields."""

    pd_name: str = ""
    volume_id: str = field(default="", name="volumeID")
    iqn: str = ""
    monitors: tuple[str, ...] = ()
    image: str = ""
    pool: str = ""
    read_only: bool = False


class PodVolume(ApiStruct, frozen=True):
    name: str = ""
    persistent_volume_claim: ClaimSource | None = None
    ephemeral: dict[str, Any] | None = None
    gce_persistent_disk: Disk | None = None
    aws_elastic_block_store: Disk | None = None
    iscsi: Disk | None = None
    rbd: Disk | None = None


class SchedulingGate(ApiStruct, frozen=True):
    name: str = ""


class ResourceClaim(ApiStruct, frozen=True):
    name: str = ""


class SchedulingGroup(ApiStruct, frozen=True):
    pod_group_name: str | None = None


class WorkloadRef(ApiStruct, frozen=True):
    name: str = ""
    pod_group: str = ""
    pod_group_replica_key: str = ""


class PodSpec(ApiStruct, frozen=True):
    scheduler_name: str = ""
    node_name: str = ""
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    resources: ResourceRequirements | None = None
    overhead: Quantities = {}
    node_selector: dict[str, str] = {}
    affinity: Affinity = Affinity()
    tolerations: tuple[Toleration, ...] = ()
    topology_spread_constraints: tuple[TopologySpread, ...] = ()
    scheduling_gates: tuple[SchedulingGate, ...] = ()
    priority: int | None = None
    priority_class_name: str = ""
    preemption_policy: str = ""
    volumes: tuple[PodVolume, ...] = ()
    resource_claims: tuple[ResourceClaim, ...] = ()
    active_deadline_seconds: int | None = None
    termination_grace_period_seconds: int | None = None
    scheduling_group: SchedulingGroup | None = None
    workload_ref: WorkloadRef | None = None


class Condition(ApiStruct, frozen=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class ContainerStatus(ApiStruct, frozen=True):
    name: str = ""
    allocated_resources: Quantities = {}
    resources: ResourceRequirements | None = None


class PodStatus(ApiStruct, frozen=True):
    phase: str = ""
    conditions: tuple[Condition, ...] = ()
    nominated_node_name: str = ""
    start_time: str | None = None
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(ApiStruct, frozen=True):
    metadata: Meta = Meta()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    def condition(self, type: str) -> Condition | None:
        return next((one for one in self.status.conditions if one.type == type), None)

    @property
    def terminating(self) -> bool:
        return self.metadata.deletion_timestamp is not None

    @property
    def terminal(self) -> bool:
        return self.status.phase in ("Succeeded", "Failed")


class Taint(ApiStruct, frozen=True):
    key: str = ""
    value: str = ""
    effect: str = ""


class NodeSpec(ApiStruct, frozen=True):
    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class Image(ApiStruct, frozen=True):
    names: tuple[str, ...] = ()
    size_bytes: int = 0


class NodeStatus(ApiStruct, frozen=True):
    allocatable: Quantities = {}
    conditions: tuple[Condition, ...] = ()
    images: tuple[Image, ...] = ()


class Node(ApiStruct, frozen=True):
    metadata: Meta = Meta()
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class Namespace(ApiStruct, frozen=True):
    metadata: Meta = Meta()


class PriorityClass(ApiStruct, frozen=True):
    metadata: Meta = Meta()
    value: int = 0
    global_default: bool = False
    preemption_policy: str = ""


class BudgetSpec(ApiStruct, frozen=True):
    selector: LabelSelector | None = None


class BudgetStatus(ApiStruct, frozen=True):
    disruptions_allowed: int = 0
    disrupted_pods: dict[str, str] = {}


class PodDisruptionBudget(ApiStruct, frozen=True):
    metadata: Meta = Meta()
    spec: BudgetSpec = BudgetSpec()
    status: BudgetStatus = BudgetStatus()


class Service(ApiStruct, frozen=True):
    """A Service or ReplicationController: it selects pods by plain labels."""

    class Spec(ApiStruct, frozen=True):
        selector: dict[str, str] = {}

    metadata: Meta = Meta()
    spec: Spec = Spec()


class Workload(ApiStruct, frozen=True):
    """A ReplicaSet, StatefulSet or Job: it creates pods, selects them, and defines their number."""

    class Spec(ApiStruct, frozen=True):
        selector: LabelSelector | None = None
        replicas: int | None = None
        pod_management_policy: str = ""
        parallelism: int | None = None
        completions: int | None = None

    metadata: Meta = Meta()
    spec: Spec = Spec()


def decode(data: bytes | str, kind: type[_T]) -> _T:
    """Decode an object from JSON. A null instead of a list or map counts as absent: Go writes it for an empty list."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        return msgspec.convert(_without_nulls(msgspec.json.decode(data)), type=kind)


def from_builtins(value: Any, kind: type[_T]) -> _T:
    """The same from Python values."""
    return msgspec.convert(_without_nulls(value), type=kind)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


# Pod groups of several projects. Only fields that exist in all versions of these APIs are read.


class GangPolicy(ApiStruct, frozen=True):
    min_count: int = 1


class Policy(ApiStruct, frozen=True):
    """Kubernetes' own: a group is a gang, or (basic) its pods are scheduled one by one."""

    gang: GangPolicy | None = None


class TopologyConstraint(ApiStruct, frozen=True):
    key: str = ""


class Constraints(ApiStruct, frozen=True):
    topology: tuple[TopologyConstraint, ...] = ()


class GroupSpec(ApiStruct, frozen=True):
    scheduling_policy: Policy = Policy()
    scheduling_constraints: Constraints = Constraints()
    disruption_mode: dict[str, object] | str | None = None
    parent_composite_pod_group_name: str | None = None


class GroupCondition(ApiStruct, frozen=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class PodGroup(ApiStruct, frozen=True):
    """`scheduling.k8s.io` PodGroup, since 1.36."""

    class Status(ApiStruct, frozen=True):
        conditions: tuple[GroupCondition, ...] = ()

    metadata: Meta = Meta()
    spec: GroupSpec = GroupSpec()
    status: Status = Status()


class WorkloadPodGroup(ApiStruct, frozen=True):
    name: str = ""
    policy: Policy = Policy()


class WorkloadSpec(ApiStruct, frozen=True):
    pod_groups: tuple[WorkloadPodGroup, ...] = ()


class GroupedWorkload(ApiStruct, frozen=True):
    """`scheduling.k8s.io` Workload of 1.35, which contains its groups."""

    metadata: Meta = Meta()
    spec: WorkloadSpec = WorkloadSpec()


class MemberSpec(ApiStruct, frozen=True):
    min_member: int = 0
    schedule_timeout_seconds: int | None = None
    min_task_member: dict[str, int] = {}
    queue: str = ""


class MemberStatus(ApiStruct, frozen=True):
    phase: str = ""
    schedule_start_time: str | None = None
    conditions: tuple[GroupCondition, ...] = ()


class MemberGroup(ApiStruct, frozen=True):
    """The PodGroup of scheduler-plugins (`scheduling.x-k8s.io`) or of Volcano (`scheduling.volcano.sh`)."""

    metadata: Meta = Meta()
    spec: MemberSpec = MemberSpec()
    status: MemberStatus = MemberStatus()


class TaskGroup(ApiStruct, frozen=True):
    """A task group of YuniKorn, from a pod's annotation."""

    name: str = ""
    min_member: int = 0


NO_PROVISIONER = "kubernetes.io/no-provisioner"
BIND_COMPLETED = "pv.kubernetes.io/bind-completed"
SELECTED_NODE = "volume.kubernetes.io/selected-node"
BOUND_BY_US = "pv.kubernetes.io/bound-by-controller"
BETA_CLASS = "volume.beta.kubernetes.io/storage-class"


class ClaimSpec(ApiStruct, frozen=True):
    volume_name: str = ""
    storage_class_name: str | None = None
    access_modes: tuple[str, ...] = ()
    resources: ResourceRequirements = ResourceRequirements()
    volume_mode: str = ""
    selector: LabelSelector | None = None


class Claim(ApiStruct, frozen=True):
    """A PersistentVolumeClaim."""

    class Status(ApiStruct, frozen=True):
        phase: str = ""

    metadata: Meta = Meta()
    spec: ClaimSpec = ClaimSpec()
    status: Status = Status()

    @property
    def bound(self) -> bool:
        return bool(self.spec.volume_name) and BIND_COMPLETED in self.metadata.annotations

    @property
    def class_name(self) -> str:
        return self.metadata.annotations.get(BETA_CLASS) or self.spec.storage_class_name or ""


class CsiSource(ApiStruct, frozen=True):
    driver: str = ""
    volume_handle: str = ""


class VolumeNodeAffinity(ApiStruct, frozen=True):
    required: NodeSelector | None = None


class ObjectRef(ApiStruct, frozen=True):
    namespace: str = ""
    name: str = ""
    uid: str = ""


class VolumeSpec(ApiStruct, frozen=True):
    capacity: Quantities = {}
    access_modes: tuple[str, ...] = ()
    claim_ref: ObjectRef | None = None
    storage_class_name: str = ""
    node_affinity: VolumeNodeAffinity | None = None
    csi: CsiSource | None = None
    volume_mode: str = ""


class Volume(ApiStruct, frozen=True):
    """A PersistentVolume."""

    class Status(ApiStruct, frozen=True):
        phase: str = ""

    metadata: Meta = Meta()
    spec: VolumeSpec = VolumeSpec()
    status: Status = Status()


class TopologyLabel(ApiStruct, frozen=True):
    key: str = ""
    values: tuple[str, ...] = ()


class TopologyTerm(ApiStruct, frozen=True):
    match_label_expressions: tuple[TopologyLabel, ...] = ()


class StorageClass(ApiStruct, frozen=True):
    metadata: Meta = Meta()
    provisioner: str = ""
    volume_binding_mode: str = ""
    allowed_topologies: tuple[TopologyTerm, ...] = ()

    @property
    def waits_for_consumer(self) -> bool:
        return self.volume_binding_mode == "WaitForFirstConsumer"


class CsiDriver(ApiStruct, frozen=True):
    """`storage_capacity`: it publishes free capacity as CSIStorageCapacity objects."""

    class Spec(ApiStruct, frozen=True):
        storage_capacity: bool | None = None

    metadata: Meta = Meta()
    spec: Spec = Spec()


class StorageCapacity(ApiStruct, frozen=True):
    """A CSIStorageCapacity: the capacity that is left for a class in one topology."""

    metadata: Meta = Meta()
    node_topology: LabelSelector | None = None
    storage_class_name: str = ""
    capacity: Quantity | None = None
    maximum_volume_size: Quantity | None = None

    @property
    def largest(self) -> Quantity | None:
        """The largest volume that can be provisioned."""
        return self.capacity if self.maximum_volume_size is None else self.maximum_volume_size


class Allocatable(ApiStruct, frozen=True):
    count: int | None = None


class Driver(ApiStruct, frozen=True):
    name: str = ""
    allocatable: Allocatable | None = None


class CsiNode(ApiStruct, frozen=True):
    class Spec(ApiStruct, frozen=True):
        drivers: tuple[Driver, ...] = ()

    metadata: Meta = Meta()
    spec: Spec = Spec()
