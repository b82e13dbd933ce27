"""Claims, volumes, classes and drivers of Kubernetes, as far as scheduling reads them."""

from __future__ import annotations

from msgspec import field

from hodei.kube.api.objects import LabelSelector, Meta, Needs, NodeSelector, Quantities, Quantity, Slim

NO_PROVISIONER = "kubernetes.io/no-provisioner"
BIND_COMPLETED = "pv.kubernetes.io/bind-completed"
SELECTED_NODE = "volume.kubernetes.io/selected-node"
BOUND_BY_US = "pv.kubernetes.io/bound-by-controller"
BETA_CLASS = "volume.beta.kubernetes.io/storage-class"


class ClaimSpec(Slim, frozen=True):
    volume_name: str = ""
    storage_class_name: str | None = None
    access_modes: tuple[str, ...] = ()
    resources: Needs = Needs()
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
    def waits(self) -> bool:
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
