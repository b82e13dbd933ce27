"""Where things can run: a node is a place with capacity on one backend."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, structs

from hodei.model.affinity import NodeTerm
from hodei.model.errors import InvalidInput
from hodei.model.ids import NodeName
from hodei.model.resources import Resources

TaintEffect = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


class Taint(Struct, frozen=True, omit_defaults=True):
    key: str
    value: str = ""
    effect: TaintEffect = "NoSchedule"

    def __str__(self) -> str:
        return f"{self.key}{'=' + self.value if self.value else ''}:{self.effect}"


class Location(Struct, frozen=True, omit_defaults=True):
    """Where a node stands, from far to near; latitude and longitude in millionths of a degree."""

    region: str = ""
    zone: str = ""
    datacenter: str = ""
    rack: str = ""
    lat_micro: int | None = None
    lng_micro: int | None = None

    def with_coordinates(self, lat: float | None, lng: float | None) -> Location:
        """The same place with these degrees north and east, if they are given; InvalidInput if they are nowhere."""
        if lat is None and lng is None:
            return self
        if lat is None or lng is None:
            raise InvalidInput("lat and lng belong together", hint="give both or neither")
        for name, degrees, most in (("lat", lat, 90), ("lng", lng, 180)):
            if not -most <= degrees <= most:
                raise InvalidInput(f"{name} {degrees:g} is no place on earth", hint=f"degrees from -{most} to {most}")
        return structs.replace(self, lat_micro=round(lat * 1e6), lng_micro=round(lng * 1e6))


class Socket(Struct, frozen=True, omit_defaults=True):
    """A part of a node whose cores, memory and devices are near each other; numbers are the operating system's."""

    cpus: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()


class Grant(Struct, frozen=True, omit_defaults=True):
    """Which parts of a node are a run's own: cores by number, and of which GPU how many thousandths."""

    cpus: tuple[int, ...] = ()
    gpus: tuple[tuple[int, int], ...] = ()


class Pool(Struct, frozen=True, omit_defaults=True):
    """Machines that several nodes stand for, such as partitions that share them: `capacity` is what these machines have
    together, of which the runs on all those nodes together are given no more."""

    name: str
    capacity: tuple[tuple[str, int], ...] = ()


class Node(Struct, frozen=True, omit_defaults=True):
    """What a backend says of a place, with the operator's marks already laid over it.

    `data` names the data sets that it holds; `cost_milli` is what an hour of it costs, in thousandths;
    `overcommit_percent` is how much of a resource may be promised, 100 (or absent) being all that there is;
    `sockets` describe what it is made of, if that is known (else cores can not be bound, and GPUs are counted from 0);
    `address` is where members of one gang reach each other; `images` are those that it holds, with their bytes;
    `volume_limits` tells how many volumes of a kind can be attached to it. `not_ready_code`: the reason code if it is not
    ready for a cause of its own kind (its backend's). `cannot`: which needs of jobs its backend does not meet (`model.backend`).
    `pool`: the machines that it shares with other nodes.
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


# Of nodes whose machines all have GPUs, where others have none: only work that asks for GPUs, or tolerates it, goes there.
GPU_ONLY = "hodei.io/gpus"
# How the label ends that names the partition or queue of a node: `slurm.hodei.io/queue`.
QUEUE_LABEL_SUFFIX = ".hodei.io/queue"
# Label of a node that stands for many machines, of which another system chooses one.
DELEGATED = "hodei.io/delegated"


class NodeOverrides(Struct, frozen=True, omit_defaults=True):
    """What operators have said of a node; it outlives the node's own comings and goings."""

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
        """`node` as it counts for scheduling."""
        if self.empty:
            return node
        labels = {k: v for k, v in node.labels.items() if k not in self.removed_labels} | self.labels
        gone = {(taint.key, taint.effect) for taint in (*self.removed_taints, *self.taints)}
        taints = (*(t for t in node.taints if (t.key, t.effect) not in gone), *self.taints)
        return structs.replace(node, labels=labels, taints=taints, cordoned=node.cordoned or self.cordoned)


# ---------------------------------------------------------------------------------------------- volumes

# Where a volume is, where it could be made, where there is enough storage for it, and in which zone it is: the same demand,
# told apart for those who read why.
VolumeReachKind = Literal["there", "could_be", "space", "zone"]


class VolumeReach(Struct, frozen=True, omit_defaults=True):
    """From which nodes a volume can be reached: any one of `terms` must hold (none given: from no node)."""

    kind: VolumeReachKind
    terms: tuple[NodeTerm, ...] = ()


class VolumeCandidate(Struct, frozen=True, omit_defaults=True):
    """A free volume that one claim may have: its name, and from where it can be reached (no terms: from everywhere)."""

    name: str
    terms: tuple[NodeTerm, ...] = ()


class Volume(Struct, frozen=True, omit_defaults=True):
    """One volume of a member.

    `handle` tells volumes apart: one that several members of a node use is attached to it once. `reach`: all of these
    must hold. `limit`: the name under which a node says how many of the kind it can take ("": no limit is known of).
    `alone`: no other member may use it, on the same node or anywhere (`read_only` ones may share a node).
    `choices`: it is a claim that takes one of these free volumes, the best first, each of which only one claim can have;
    `made`: where a new one can be made instead (all of these must hold), None for nowhere.
    """

    handle: str
    reach: tuple[VolumeReach, ...] = ()
    limit: str = ""
    alone: Literal["", "node", "anywhere"] = ""
    read_only: bool = False
    choices: tuple[VolumeCandidate, ...] = ()
    made: tuple[VolumeReach, ...] | None = None
