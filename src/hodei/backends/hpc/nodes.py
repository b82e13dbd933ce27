"""What a queueing system has, as nodes. *Placed*: its nodes, and Hodei chooses among them. *Delegate*: one node for each
line (a partition, a queue) with all that its nodes have together, and the system chooses.

Names are `BACKEND-NAME`, so that two clusters may both have a node n1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import structs

from hodei.backends.hpc.ports import Cluster, Line, Queue
from hodei.model.backend import NodeUsage
from hodei.model.errors import BackendError, BackendRefused
from hodei.model.ids import NodeName
from hodei.model.node import DELEGATED, GPU_ONLY, QUEUE_LABEL_SUFFIX, Node, Pool, Taint, TaintEffect
from hodei.model.resources import GPU

Mode = Literal["placed", "delegate"]


# What jobs without GPUs may do in lines whose nodes all have some, if there are other lines: stay off, go there if nothing else
# is free, go there like anywhere else. For *delegate*.
CpuJobsOnGpus = Literal["never", "last", "any"]
_EFFECTS: dict[str, TaintEffect] = {"never": "NoSchedule", "last": "PreferNoSchedule"}


class ClusterNodes:
    """`lines` are those that may be used, in this order of preference; none named: all. A line that is closed takes nothing
    new: its nodes are cordoned, unless they are in another that is open. `ahead_percent`: how
    much may be promised of a line, so that the system has something to choose from."""

    def __init__(
        self, name: str, kind: str, queue: Queue, mode: Mode, lines: Sequence[str], ahead_percent: int = 100,
        cpu_jobs_on_gpus: CpuJobsOnGpus = "never",
    ) -> None:  # fmt: skip
        self._name, self._kind, self._queue = name, kind, queue
        self._wanted, self._ahead_percent = tuple(lines), ahead_percent
        self.mode, self._cpu_jobs_on_gpus = mode, cpu_jobs_on_gpus
        self.cluster = Cluster((), ())

    async def refresh(self) -> list[Node]:
        self.cluster = await self._queue.cluster()
        lines = self.lines()
        if not lines:
            there = ", ".join(line.name for line in self.cluster.lines) or "none"
            raise BackendError(f"none of the lines that may be used is there; there are: {there}")
        if self.mode == "delegate":
            pools, for_gpus = self._pools(lines), self._for_gpus(lines)
            return [self._whole(line, pools.get(line.name), line.name in for_gpus) for line in lines]
        usable = {node for line in lines for node in line.nodes}
        return [self._own(node) for node in self.cluster.nodes if node.name in usable]

    def lines(self) -> list[Line]:
        there = {line.name: line for line in self.cluster.lines}
        if self._wanted:
            return [there[name] for name in self._wanted if name in there]
        return sorted(there.values(), key=lambda line: (not line.default, line.name))

    def place(self, name: NodeName) -> tuple[Line, str]:
        """The line and the node ("": the system chooses) that a node's name stands for."""
        inner = name.removeprefix(f"{self._name}-")
        for line in self.lines():
            if self.mode == "delegate" and line.name == inner:
                return self._must_be_usable(line), ""
            if self.mode == "placed" and inner in line.nodes:
                return self._must_be_usable(self._line_of(inner)), inner
        raise BackendRefused(f"there is no node {name} in {self._name}", hint="see `hodei nodes`")

    def most(self, line: Line, node: str, resource: str) -> int:
        """What the node has of a resource; the largest of the line if the system chooses."""
        found = next((each for each in self.cluster.nodes if each.name == node), None)
        return line.largest.get(resource, 0) if found is None else found.capacity.get(resource, 0)

    @staticmethod
    def _must_be_usable(line: Line) -> Line:
        if not line.usable:
            raise BackendRefused(f"{line.name} cannot be used: {line.why}", hint="choose another queue")
        return line

    def _own(self, node: Node) -> Node:
        line = self._line_of(node.name)
        labels = {**node.labels, f"{self._kind}{QUEUE_LABEL_SUFFIX}": line.name, "hodei.io/hostname": node.name}
        return structs.replace(
            node,
            name=f"{self._name}-{node.name}",
            backend=self._name,
            kind=self._kind,
            labels=labels,
            cordoned=node.cordoned or not line.open,
            ready=node.ready and line.usable,
            not_ready_reason=node.not_ready_reason or ("" if line.usable else f"{line.name}: {line.why}"),
        )

    def _line_of(self, node: str) -> Line:
        """The first that is open, else the first that is usable, else the first."""
        lines = [line for line in self.lines() if node in line.nodes]
        return min(lines, key=lambda line: (not line.open, not line.usable))

    def _pools(self, lines: Sequence[Line]) -> dict[str, Pool]:
        """By line: the machines of all lines that share some with it, directly or through others; each counts once."""
        groups: list[tuple[list[Line], set[str]]] = []
        for line in lines:
            with_it, names = [line], set(line.nodes)
            apart = []
            for others, theirs in groups:
                if names & theirs:
                    with_it, names = [*others, *with_it], names | theirs
                else:
                    apart.append((others, theirs))
            groups = [*apart, (with_it, names)]
        out: dict[str, Pool] = {}
        for together, names in groups:
            if len(together) > 1:
                total, percent = _sum(node for node in self.cluster.nodes if node.name in names), self._ahead_percent
                amounts = tuple(sorted((name, amount * percent // 100) for name, amount in total.items()))
                pool = Pool(f"{self._name}-{min(line.name for line in together)}", amounts)
                out |= {line.name: pool for line in together}
        return out

    def _for_gpus(self, lines: Sequence[Line]) -> set[str]:
        """The lines in which every node has GPUs; none if there is no other line. Another that is closed for a while counts:
        the jobs without GPUs wait for it, and do not fill the GPU nodes meanwhile."""
        has = {node.name for node in self.cluster.nodes if node.capacity.get(GPU)}
        found = {line.name for line in lines if line.nodes and has.issuperset(line.nodes)}
        return found if any(line.name not in found and line.usable for line in lines) else set()

    def _whole(self, line: Line, pool: Pool | None, for_gpus: bool) -> Node:
        """What is out of order counts for nothing."""
        members = [node for node in self.cluster.nodes if node.name in line.nodes]
        working = [node for node in members if node.ready and not node.cordoned]
        total = _sum(members)
        effect = _EFFECTS.get(self._cpu_jobs_on_gpus) if for_gpus else None
        kinds = {node.gpu_type for node in members if node.gpu_type}
        shared = dict(set.intersection(*(set(node.labels.items()) for node in members))) if members else {}
        ready = bool(working) and line.usable
        overcommit = dict.fromkeys(total, self._ahead_percent) if self._ahead_percent != 100 else {}
        return Node(
            name=f"{self._name}-{line.name}",
            backend=self._name,
            kind=self._kind,
            capacity=dict(total),
            labels={**shared, f"{self._kind}{QUEUE_LABEL_SUFFIX}": line.name, DELEGATED: "true"},
            taints=(Taint(GPU_ONLY, effect=effect),) if effect else (),
            pool=pool,
            arch=min({node.arch for node in members}) if len({node.arch for node in members}) == 1 else "",
            gpu_type=min(kinds) if len(kinds) == 1 else "",
            overcommit_percent=overcommit,
            cordoned=not line.open,
            ready=ready,
            not_ready_reason="" if ready else (line.why or "none of its nodes can be used"),
        )

    async def usage(self) -> dict[NodeName, NodeUsage]:
        used = await self._queue.usage()
        offered = {node.name for line in self.lines() for node in self.cluster.nodes if node.name in line.nodes}
        return {f"{self._name}-{name}": NodeUsage(amounts) for name, amounts in used.items() if name in offered}


def _sum(nodes: Iterable[Node]) -> Counter[str]:
    """What those that work have together; what all have, if none works."""
    members = list(nodes)
    total: Counter[str] = Counter()
    for node in [node for node in members if node.ready and not node.cordoned] or members:
        total.update(node.capacity)
    return total
