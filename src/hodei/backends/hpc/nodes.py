"""The nodes that a batch system offers. Mode `placed`: its own nodes, Hodei chooses among them. Mode `delegate`: one node for
each partition with the capacity of all its nodes, and the batch system chooses.

Names are `BACKEND-NAME`, so two clusters may both have a node n1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct, structs

from hodei.backends.hpc.ports import BatchSystem, Cluster, Partition
from hodei.model.backend import NodeUsage
from hodei.model.config import Span
from hodei.model.errors import BackendError, BackendRefused, InvalidInput
from hodei.model.ids import NodeName
from hodei.model.node import DELEGATED, GPU_ONLY, QUEUE_LABEL_SUFFIX, Node, Pool, Taint, TaintEffect
from hodei.model.resources import GPU, parse_duration_ms

Mode = Literal["placed", "delegate"]
# Whether jobs without GPUs may use partitions whose nodes all have GPUs, if there are other partitions (`delegate` mode).
CpuJobsOnGpus = Literal["never", "last", "any"]
_EFFECTS: dict[str, TaintEffect] = {"never": "NoSchedule", "last": "PreferNoSchedule"}


class ClusterSettings(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Keys of all batch systems. `output`: a folder that the server and all nodes see under the same path. `mode`: whether Hodei
    or the batch system chooses the node. `ahead`: how much of a partition's capacity may be submitted in `delegate` mode.
    `conf`: the batch system's configuration file. `commands`: the folder of its commands. `account`: for all jobs;
    `allow_accounts`: what jobs may use instead. `requeue`: let the batch system restart jobs itself."""

    output: str
    mode: Mode = "placed"
    ahead: float = 1.0
    cpu_jobs_on_gpus: CpuJobsOnGpus = "never"
    poll: Span = "2s"
    conf: str = ""
    commands: str = ""
    account: str = ""
    allow_accounts: tuple[str, ...] = ()
    workdir: str = ""
    env: dict[str, str] = {}
    requeue: bool = False


def check_settings(name: str, kind: str, settings: ClusterSettings, *problems: tuple[str, str]) -> None:
    """InvalidInput with all (key, problem) found."""
    found = list(problems)
    if not settings.output.startswith("/"):
        found.append(("output", "must be an absolute path, the same on the server and on all nodes"))
    if not 1 <= settings.ahead <= 100:
        found.append(("ahead", "must be a ratio from 1 to 100"))
    try:
        if not 50 <= parse_duration_ms(settings.poll) <= 600_000:
            found.append(("poll", "must be from 50ms to 10m"))
    except InvalidInput as error:
        found.append(("poll", error.message))
    if found:
        named = tuple((f"backends.{name}.{key}", text) for key, text in found)
        message = "; ".join(f"{path}: {text}" for path, text in named)
        raise InvalidInput(message, hint=f"docs/how-to/{kind}.md", problems=named)


class ClusterNodes:
    """A closed partition is cordoned; a node stays open while one of its partitions is."""

    def __init__(
        self, name: str, kind: str, system: BatchSystem, settings: ClusterSettings, partitions: Sequence[str]
    ) -> None:
        self._name, self._kind, self._system, self._configured = name, kind, system, tuple(partitions)
        self.mode, self._cpu_jobs_on_gpus = settings.mode, settings.cpu_jobs_on_gpus
        self._ahead_percent = round(settings.ahead * 100)
        self.cluster = Cluster((), ())

    async def refresh(self) -> list[Node]:
        self.cluster = await self._system.cluster()
        partitions = self.partitions()
        if not partitions:
            existing = ", ".join(partition.name for partition in self.cluster.partitions) or "none"
            raise BackendError(
                f"none of the configured partitions exists; the cluster has: {existing}",
                hint=f"correct the partitions or queues of backend {self._name} in the configuration",
            )
        if self.mode == "delegate":
            pools, gpu_only = self._pools(partitions), self._gpu_only(partitions)
            return [self._partition_node(each, pools.get(each.name), each.name in gpu_only) for each in partitions]
        usable = {node for partition in partitions for node in partition.nodes}
        return [self._placed_node(node) for node in self.cluster.nodes if node.name in usable]

    def partitions(self) -> list[Partition]:
        existing = {partition.name: partition for partition in self.cluster.partitions}
        if self._configured:
            return [existing[name] for name in self._configured if name in existing]
        return sorted(existing.values(), key=lambda partition: (not partition.default, partition.name))

    def resolve(self, name: NodeName) -> tuple[Partition, str]:
        """The partition and the node ("": the system chooses) of a node of this backend."""
        inner = name.removeprefix(f"{self._name}-")
        for partition in self.partitions():
            if self.mode == "delegate" and partition.name == inner:
                return self._require_usable(partition), ""
            if self.mode == "placed" and inner in partition.nodes:
                return self._require_usable(self._partition_of(inner)), inner
        raise BackendRefused(f"there is no node {name} in {self._name}", hint="see `hodei nodes`")

    def capacity(self, partition: Partition, node: str, resource: str) -> int:
        """Of the node; of the partition's largest node if the system chooses."""
        found = next((each for each in self.cluster.nodes if each.name == node), None)
        return partition.largest.get(resource, 0) if found is None else found.capacity.get(resource, 0)

    @staticmethod
    def _require_usable(partition: Partition) -> Partition:
        if not partition.usable:
            raise BackendRefused(f"{partition.name} cannot be used: {partition.reason}", hint="choose another queue")
        return partition

    def _placed_node(self, node: Node) -> Node:
        partition = self._partition_of(node.name)
        labels = {**node.labels, f"{self._kind}{QUEUE_LABEL_SUFFIX}": partition.name, "hodei.io/hostname": node.name}
        unusable = "" if partition.usable else f"{partition.name}: {partition.reason}"
        return structs.replace(
            node,
            name=f"{self._name}-{node.name}",
            backend=self._name,
            kind=self._kind,
            labels=labels,
            cordoned=node.cordoned or not partition.open,
            ready=node.ready and partition.usable,
            not_ready_reason=node.not_ready_reason or unusable,
        )

    def _partition_of(self, node: str) -> Partition:
        """The first open partition, else the first usable one, else the first."""
        partitions = [partition for partition in self.partitions() if node in partition.nodes]
        return min(partitions, key=lambda partition: (not partition.open, not partition.usable))

    def _pools(self, partitions: Sequence[Partition]) -> dict[str, Pool]:
        """By partition: the pool of all partitions that share nodes, directly or through others; each node counts once."""
        groups: list[tuple[list[Partition], set[str]]] = []
        for partition in partitions:
            group, nodes = [partition], set(partition.nodes)
            disjoint = []
            for other, other_nodes in groups:
                if nodes & other_nodes:
                    group, nodes = [*other, *group], nodes | other_nodes
                else:
                    disjoint.append((other, other_nodes))
            groups = [*disjoint, (group, nodes)]
        out: dict[str, Pool] = {}
        for group, nodes in groups:
            if len(group) > 1:
                total, percent = _sum(node for node in self.cluster.nodes if node.name in nodes), self._ahead_percent
                amounts = tuple(sorted((name, amount * percent // 100) for name, amount in total.items()))
                pool = Pool(f"{self._name}-{min(partition.name for partition in group)}", amounts)
                out |= {partition.name: pool for partition in group}
        return out

    def _gpu_only(self, partitions: Sequence[Partition]) -> set[str]:
        """Partitions whose nodes all have GPUs; none if there is no other usable partition. A closed one counts as other: CPU
        jobs wait for it instead of filling the GPU nodes."""
        gpu_nodes = {node.name for node in self.cluster.nodes if node.capacity.get(GPU)}
        found = {each.name for each in partitions if each.nodes and gpu_nodes.issuperset(each.nodes)}
        return found if any(each.name not in found and each.usable for each in partitions) else set()

    def _partition_node(self, partition: Partition, pool: Pool | None, gpu_only: bool) -> Node:
        """A node for a whole partition, with the capacity of its working nodes."""
        members = [node for node in self.cluster.nodes if node.name in partition.nodes]
        total = _sum(members)
        effect = _EFFECTS.get(self._cpu_jobs_on_gpus) if gpu_only else None
        gpu_types = {node.gpu_type for node in members if node.gpu_type}
        archs = {node.arch for node in members}
        labels = dict(set.intersection(*(set(node.labels.items()) for node in members))) if members else {}
        ready = partition.usable and any(node.ready and not node.cordoned for node in members)
        return Node(
            name=f"{self._name}-{partition.name}",
            backend=self._name,
            kind=self._kind,
            capacity=dict(total),
            labels={**labels, f"{self._kind}{QUEUE_LABEL_SUFFIX}": partition.name, DELEGATED: "true"},
            taints=(Taint(GPU_ONLY, effect=effect),) if effect else (),
            pool=pool,
            arch=min(archs) if len(archs) == 1 else "",
            gpu_type=min(gpu_types) if len(gpu_types) == 1 else "",
            overcommit_percent=dict.fromkeys(total, self._ahead_percent) if self._ahead_percent != 100 else {},
            cordoned=not partition.open,
            ready=ready,
            not_ready_reason="" if ready else (partition.reason or "none of its nodes can be used"),
        )

    async def usage(self) -> dict[NodeName, NodeUsage]:
        offered = {name for partition in self.partitions() for name in partition.nodes}
        used = await self._system.usage()
        return {f"{self._name}-{name}": NodeUsage(amounts) for name, amounts in used.items() if name in offered}


def _sum(nodes: Iterable[Node]) -> Counter[str]:
    """The capacity of the working nodes; of all nodes if none works."""
    members = list(nodes)
    total: Counter[str] = Counter()
    for node in [node for node in members if node.ready and not node.cordoned] or members:
        total.update(node.capacity)
    return total
