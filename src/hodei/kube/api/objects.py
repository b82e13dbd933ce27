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


class ResourceRequirements(Slim, frozen=True):
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
    resources: ResourceRequirements = ResourceRequirements()
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
    resources: ResourceRequirements | None = None
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
    resources: ResourceRequirements | None = None


class PodStatus(Slim, frozen=True):
    phase: str = ""
    conditions: tuple[Condition, ...] = ()
    nominated_node_name: str = ""
    start_time: str | None = None
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    allocated_resources: Quantities = {}
    resources: ResourceRequirements | None = None


class Pod(Slim, frozen=True):
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


def from_builtins(value: Any, kind: type[_T]) -> _T:
    """The same from what was decoded already."""
    return msgspec.convert(_without_nulls(value), type=kind)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


# --------------------------------------------------------------------------------------- group objects
# Everybody's objects for groups of pods, as far as scheduling reads them. Versions of these APIs come and go: only
# fields that stayed are read, and a group of any version decodes.


class GangPolicy(Slim, frozen=True):
    min_count: int = 1


class Policy(Slim, frozen=True):
    """Kubernetes' own: a group is a gang, or (basic) its pods go one by one."""

    gang: GangPolicy | None = None


class TopologyConstraint(Slim, frozen=True):
    key: str = ""


class Constraints(Slim, frozen=True):
    topology: tuple[TopologyConstraint, ...] = ()


class GroupSpec(Slim, frozen=True):
    scheduling_policy: Policy = Policy()
    scheduling_constraints: Constraints = Constraints()
    disruption_mode: dict[str, object] | str | None = None
    priority_class_name: str = ""
    parent_composite_pod_group_name: str | None = None


class GroupCondition(Slim, frozen=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class PodGroup(Slim, frozen=True):
    """`scheduling.k8s.io` PodGroup, from 1.36 on."""

    class Status(Slim, frozen=True):
        conditions: tuple[GroupCondition, ...] = ()

    metadata: Meta = Meta()
    spec: GroupSpec = GroupSpec()
    status: Status = Status()


class PartOfWorkload(Slim, frozen=True):
    name: str = ""
    policy: Policy = Policy()


class WorkloadSpec(Slim, frozen=True):
    pod_groups: tuple[PartOfWorkload, ...] = ()


class GroupedWorkload(Slim, frozen=True):
    """`scheduling.k8s.io` Workload, as in 1.35: groups by name inside it."""

    metadata: Meta = Meta()
    spec: WorkloadSpec = WorkloadSpec()


class MemberSpec(Slim, frozen=True):
    min_member: int = 0
    schedule_timeout_seconds: int | None = None
    min_task_member: dict[str, int] = {}
    queue: str = ""
    priority_class_name: str = ""


class MemberStatus(Slim, frozen=True):
    phase: str = ""
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    schedule_start_time: str | None = None
    conditions: tuple[GroupCondition, ...] = ()


class MemberGroup(Slim, frozen=True):
    """The PodGroup of scheduler-plugins (`scheduling.x-k8s.io`) or of Volcano (`scheduling.volcano.sh`)."""

    metadata: Meta = Meta()
    spec: MemberSpec = MemberSpec()
    status: MemberStatus = MemberStatus()


class TaskGroup(Slim, frozen=True):
    """One of YuniKorn's, as written in a pod's annotation."""

    name: str = ""
    min_member: int = 0


# ------------------------------------------------------------------------------------- storage objects
# Claims, volumes, classes and drivers of Kubernetes, as far as scheduling reads them.


NO_PROVISIONER = "kubernetes.io/no-provisioner"
BIND_COMPLETED = "pv.kubernetes.io/bind-completed"
SELECTED_NODE = "volume.kubernetes.io/selected-node"
BOUND_BY_US = "pv.kubernetes.io/bound-by-controller"
BETA_CLASS = "volume.beta.kubernetes.io/storage-class"


class ClaimSpec(Slim, frozen=True):
    volume_name: str = ""
    storage_class_name: str | None = None
    access_modes: tuple[str, ...] = ()
    resources: ResourceRequirements = ResourceRequirements()
    volume_mode: str = ""
    selector: LabelSelector | None = None


class Claim(Slim, frozen=True):
    """A PersistentVolumeClaim."""

    class Status(Slim, frozen=True):
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


class CsiSource(Slim, frozen=True):
    driver: str = ""
    volume_handle: str = ""


class VolumeNodes(Slim, frozen=True):
    required: NodeSelector | None = None


class ObjectRef(Slim, frozen=True):
    namespace: str = ""
    name: str = ""
    uid: str = ""


class VolumeSpec(Slim, frozen=True):
    capacity: Quantities = {}
    access_modes: tuple[str, ...] = ()
    claim_ref: ObjectRef | None = None
    storage_class_name: str = ""
    node_affinity: VolumeNodes | None = None
    csi: CsiSource | None = None
    volume_mode: str = ""


class Volume(Slim, frozen=True):
    """A PersistentVolume."""

    class Status(Slim, frozen=True):
        phase: str = ""

    metadata: Meta = Meta()
    spec: VolumeSpec = VolumeSpec()
    status: Status = Status()


class TopologyLabel(Slim, frozen=True):
    key: str = ""
    values: tuple[str, ...] = ()


class TopologyTerm(Slim, frozen=True):
    match_label_expressions: tuple[TopologyLabel, ...] = ()


class StorageClass(Slim, frozen=True):
    metadata: Meta = Meta()
    provisioner: str = ""
    volume_binding_mode: str = ""
    allowed_topologies: tuple[TopologyTerm, ...] = ()

    @property
    def waits_for_consumer(self) -> bool:
        return self.volume_binding_mode == "WaitForFirstConsumer"


class CsiDriver(Slim, frozen=True):
    """`storage_capacity`: it publishes how much storage is left where."""

    class Spec(Slim, frozen=True):
        storage_capacity: bool | None = None

    metadata: Meta = Meta()
    spec: Spec = Spec()


class StorageCapacity(Slim, frozen=True):
    """A CSIStorageCapacity: how much a class can still make in one place."""

    metadata: Meta = Meta()
    node_topology: LabelSelector | None = None
    storage_class_name: str = ""
    capacity: Quantity | None = None
    maximum_volume_size: Quantity | None = None

    @property
    def largest(self) -> Quantity | None:
        """The largest volume that can be made; the driver's own word about that is better than what is left."""
        return self.capacity if self.maximum_volume_size is None else self.maximum_volume_size


class Allocatable(Slim, frozen=True):
    count: int | None = None


class Driver(Slim, frozen=True):
    name: str = ""
    node_id: str = field(default="", name="nodeID")
    allocatable: Allocatable | None = None
    topology_keys: tuple[str, ...] = ()


class CsiNode(Slim, frozen=True):
    class Spec(Slim, frozen=True):
        drivers: tuple[Driver, ...] = ()

    metadata: Meta = Meta()
    spec: Spec = Spec()
