"""Nodes: places with capacity on one backend, what operators override, and volumes."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, structs

from hodei.model.affinity import NodeTerm
from hodei.model.errors import InvalidInput
from hodei.model.ids import NodeName
from hodei.model.resources import Resources

TaintEffect = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]
# A `potential` node does not exist or is switched off, and can be ordered from its backend. Jobs are placed on `ready`
# nodes only; a `draining` one is being emptied, a `stopping` one was released.
NodePhase = Literal["ready", "potential", "starting", "draining", "stopping"]
_ARCHITECTURES = {"x86_64": "amd64", "x64": "amd64", "aarch64": "arm64"}


def architecture(name: str) -> str:
    """One name per architecture, the one of Kubernetes: `amd64` for `x86_64`."""
    return _ARCHITECTURES.get(name.lower(), name.lower())


class Taint(Struct, frozen=True, omit_defaults=True):
    key: str
    value: str = ""
    effect: TaintEffect = "NoSchedule"

    def __str__(self) -> str:
        return f"{self.key}{'=' + self.value if self.value else ''}:{self.effect}"


class Location(Struct, frozen=True, omit_defaults=True):
    """From far to near; latitude and longitude in millionths of a degree."""

    region: str = ""
    zone: str = ""
    datacenter: str = ""
    rack: str = ""
    lat_micro: int | None = None
    lng_micro: int | None = None

    def with_coordinates(self, lat: float | None, lng: float | None) -> Location:
        """The location with these degrees north and east, if given; InvalidInput if they are out of range."""
        if lat is None and lng is None:
            return self
        if lat is None or lng is None:
            raise InvalidInput("lat and lng belong together", hint="give both or neither")
        for name, degrees, most in (("lat", lat, 90), ("lng", lng, 180)):
            if not -most <= degrees <= most:
                raise InvalidInput(f"{name} {degrees:g} is no place on earth", hint=f"degrees from -{most} to {most}")
        return structs.replace(self, lat_micro=round(lat * 1e6), lng_micro=round(lng * 1e6))


class Socket(Struct, frozen=True, omit_defaults=True):
    """A part of a node with its own cores, memory and devices, numbered as in the operating system."""

    cpus: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()


class Grant(Struct, frozen=True, omit_defaults=True):
    """The cores of a node that belong to a run, and for each of its GPUs how many thousandths."""

    cpus: tuple[int, ...] = ()
    gpus: tuple[tuple[int, int], ...] = ()


class Pool(Struct, frozen=True, omit_defaults=True):
    """Machines that several nodes share, such as overlapping partitions: all their runs get at most `capacity`."""

    name: str
    capacity: tuple[tuple[str, int], ...] = ()


class Node(Struct, frozen=True, omit_defaults=True):
    """A node as its backend reports it, with the node overrides applied.

    `data`: data sets that it holds. `cost_milli`: price per hour in thousandths. `overcommit_percent`: how much of a
    resource may be allocated, default 100. `sockets`: its hardware, if known (otherwise cores cannot be bound, and GPUs
    are numbered from 0). `address`: where members of a gang reach each other. `images`: the images it holds, with their
    bytes. `volume_limits`: how many volumes of a kind can be attached. `not_ready_code`: the reason code, if it is not
    ready for a reason specific to its backend. `cannot`: needs of jobs that its backend does not meet
    (`model.backend`). `pool`: machines that it shares with other nodes. `offline_ok`: it is normal that it is offline, and it
    takes jobs that allow it even then.

    Of nodes that the backend can start and stop: `phase`; `group`: nodes of one group are interchangeable; `startup_ms`:
    from the order until it is ready; `spot`: the provider may take it back, on average `losses_milli` times in a thousand
    hours. `call_cost_nano`, `gb_second_cost_nano`: prices of serverless nodes, in billionths.
    `max_runs`: how many runs it takes at once (0: no limit); `max_runtime_ms`: the longest run (0: no limit).
    `last_seen_ms`: when it was last heard of, while it is offline.
    """

    name: NodeName
    backend: str
    kind: str = "local"
    capacity: Resources = {}
    labels: dict[str, str] = {}
    taints: tuple[Taint, ...] = ()
    arch: str = ""
    gpu_type: str = ""
    location: Location = Location()
    data: tuple[str, ...] = ()
    cost_milli: int = 0
    overcommit_percent: dict[str, int] = {}
    ready: bool = True
    not_ready_reason: str = ""
    cordoned: bool = False
    version: str = ""
    sockets: tuple[Socket, ...] = ()
    address: str = ""
    images: dict[str, int] = {}
    volume_limits: dict[str, int] = {}
    not_ready_code: str = ""
    cannot: tuple[str, ...] = ()
    pool: Pool | None = None
    offline_ok: bool = False
    phase: NodePhase = "ready"
    group: str = ""
    startup_ms: int = 0
    spot: bool = False
    losses_milli: int = 0
    call_cost_nano: int = 0
    gb_second_cost_nano: int = 0
    max_runs: int = 0
    max_runtime_ms: int = 0
    last_seen_ms: int = 0


# Taint of GPU nodes where other nodes have none: only jobs that request GPUs or tolerate it are placed there.
GPU_ONLY = "hodei.io/gpus"
# Suffix of the label that names the partition or queue of a node: `slurm.hodei.io/queue`.
QUEUE_LABEL_SUFFIX = ".hodei.io/queue"
# Label of a node that represents many machines, where another system chooses one.
DELEGATED = "hodei.io/delegated"


class NodeOverrides(Struct, frozen=True, omit_defaults=True):
    """What operators have set on a node; it survives restarts and the removal of the node."""

    node: NodeName
    cordoned: bool = False
    labels: dict[str, str] = {}
    removed_labels: tuple[str, ...] = ()
    taints: tuple[Taint, ...] = ()
    removed_taints: tuple[Taint, ...] = ()

    @property
    def empty(self) -> bool:
        return self == NodeOverrides(self.node)

    def apply_to(self, node: Node) -> Node:
        """`node` as the scheduler sees it."""
        if self.empty:
            return node
        labels = {k: v for k, v in node.labels.items() if k not in self.removed_labels} | self.labels
        replaced = {(taint.key, taint.effect) for taint in (*self.removed_taints, *self.taints)}
        taints = (*(t for t in node.taints if (t.key, t.effect) not in replaced), *self.taints)
        return structs.replace(node, labels=labels, taints=taints, cordoned=node.cordoned or self.cordoned)


# Where a volume is, where it could be created, where there is enough storage, and its zone. All restrict the nodes in
# the same way; the kind serves explanations.
VolumeReachKind = Literal["exists", "creatable", "space", "zone"]


class VolumeReach(Struct, frozen=True, omit_defaults=True):
    """The nodes that can reach a volume: at least one of `terms` must hold (empty: no node)."""

    kind: VolumeReachKind
    terms: tuple[NodeTerm, ...] = ()


class VolumeCandidate(Struct, frozen=True, omit_defaults=True):
    """A free volume that one claim may bind, and where it can be reached (no terms: everywhere)."""

    name: str
    terms: tuple[NodeTerm, ...] = ()


class Volume(Struct, frozen=True, omit_defaults=True):
    """`handle` identifies the volume: several members on a node that use it need one attachment. `reach`: all of these
    must hold. `limit`: the key in `Node.volume_limits` ("": unlimited). `exclusive`: no other member may use it, on the
    same node or anywhere (`read_only` users may share a node). `candidates`: it is a claim that binds one of these free
    volumes, best first; each serves one claim. `creatable`: where a new volume can be created instead (all must hold), None
    for nowhere."""

    handle: str
    reach: tuple[VolumeReach, ...] = ()
    limit: str = ""
    exclusive: Literal["", "node", "anywhere"] = ""
    read_only: bool = False
    candidates: tuple[VolumeCandidate, ...] = ()
    creatable: tuple[VolumeReach, ...] | None = None
