"""Capacity of nodes: free resources (`fit`), machines shared by several nodes (`pools`), and overcommit."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

import numpy as np

from hodei.engine.explain import Change, lower_request
from hodei.engine.nodes import Interned, Ints, Mask, Nodes, Table
from hodei.engine.points import NO_OPINION, Reads, Refusals, Trigger
from hodei.engine.view import Member, View
from hodei.model.errors import InvalidInput
from hodei.model.job import Reason, qos
from hodei.model.node import Node
from hodei.model.resources import CPU, MEMORY, human_amount
from hodei.plugins.allocation import STRATEGIES


class Fit:
    name = "fit"
    reads: Reads = "usage"
    scalar = True
    checks_size = True
    requeue_on: tuple[Trigger, ...] = ("run_ended", "node_joined", "node_changed")

    def __init__(self, strategy: str = "least_allocated", **options: Any) -> None:
        """`strategy` and its options configure only the score, which a profile enables by a weight."""
        if strategy not in STRATEGIES:
            raise InvalidInput(f"there is no strategy {strategy!r}", hint=f"one of: {', '.join(STRATEGIES)}")
        self._strategy = STRATEGIES[strategy](**options)

    def key(self, member: Member) -> Hashable:
        return tuple(member.task.request.items())

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        points: Ints | None = self._strategy.score(member, nodes, view)
        return points

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        return [
            (nodes.free(resource) < amount, _insufficient(resource))
            for resource, amount in member.task.request.items()
            if amount
        ]

    def lacks(self, member: Member, nodes: Nodes, view: View) -> tuple[int, str]:
        """The shortage of one node in thousandths of the request, and as text."""
        size, texts = 0, []
        for resource, amount in member.task.request.items():
            free = int(nodes.free(resource)[0])
            short = amount - free
            if amount and short > 0:
                size += max(1, short * 1000 // amount)
                texts.append(
                    f"lacks {human_amount(resource, short)} {resource}"
                    f" ({human_amount(resource, max(free, 0))} of {human_amount(resource, int(nodes.capacity(resource)[0]))} free,"
                    f" {human_amount(resource, amount)} requested)"
                )
        return size, ", ".join(texts)

    def suggest(self, member: Member, nodes: Nodes, view: View) -> Iterator[Change]:
        """Less of one resource: as much as all needed members of the task can get, with the other requests unchanged."""
        task = member.task
        requested = {resource: amount for resource, amount in task.request.items() if amount}
        for resource, amount in requested.items():
            times = np.full(len(nodes), task.needed, dtype=np.int64)
            for other, much in requested.items():
                if other != resource:
                    times = np.minimum(times, np.maximum(nodes.free(other), 0) // much)
            most = _most_each(np.maximum(nodes.free(resource), 0), times, task.needed, amount)
            if most == amount and len(member.job.tasks) > 1:
                most -= 1  # it fits alone; less of it may leave capacity for the other tasks
            if most is not None and most < amount and (most or lower_request(task, resource, 0).kind == "drop"):
                yield lower_request(task, resource, most)


def _most_each(free: Ints, times: Ints, count: int, limit: int) -> int | None:
    """The most up to `limit` that `count` members can get, `times` per node; None if the nodes cannot take so many."""
    if int(times.sum()) < count:
        return None
    if count == 1:
        return min(int(free[times > 0].max()), limit)
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if int(np.minimum(times, free // middle).sum()) >= count:
            low = middle
        else:
            high = middle - 1
    return low


@lru_cache(maxsize=1024)
def _insufficient(resource: str) -> Reason:
    code = "INSUFFICIENT_" + "".join(c if c.isalnum() else "_" for c in resource.upper())
    return Reason("fit", code, f"Insufficient {resource}", evictable=True, resource=resource)


class Pools:
    """Nodes that share machines, such as overlapping partitions of Slurm: the runs on all of them together get no more
    than the machines have, although each node offers all of it."""

    name = "pools"
    reads: Reads = "cluster"
    requeue_on: tuple[Trigger, ...] = ("run_ended", "node_joined", "node_changed")

    def key(self, member: Member) -> Hashable:
        return tuple(member.task.request.items())

    def stamp(self, member: Member, table: Table) -> Hashable:
        pools = table.interned("pool", attrgetter("pool"))
        if not _has_pools(pools):
            return 0
        return tuple(_usage_by_pool(table, pools, resource).tobytes() for resource in member.task.request)

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        pools = nodes.table.interned("pool", attrgetter("pool"))
        if not _has_pools(pools):
            return ()
        here = pools.ids[nodes.rows]
        out: list[tuple[Mask, Reason]] = []
        for resource, amount in member.task.request.items():
            if not amount:
                continue
            used = _usage_by_pool(nodes.table, pools, resource)
            full: Mask = np.array(
                [
                    pool is not None and used[number] + amount > dict(pool.capacity).get(resource, 0)
                    for number, pool in enumerate(pools.values)
                ],
                dtype=np.bool_,
            )
            text = f"the machines that it shares with other nodes have no {resource} left"
            out.append((full[here], Reason(self.name, "SHARED_MACHINES_FULL", text, evictable=True)))
        return out


def _has_pools(pools: Interned) -> bool:
    return any(pool is not None for pool in pools.values)


def _usage_by_pool(table: Table, pools: Interned, resource: str) -> Ints:
    used = table.view().used(resource)
    out = np.zeros(len(pools.values), dtype=np.int64)
    np.add.at(out, pools.ids, used)
    return out


# Batch systems queue what does not fit, so nothing is overcommitted physical.
_QUEUES = ("slurm", "pbs")
_ENOUGH = 1 << 62


class Overcommit:
    """Guaranteed members (limits equal to requests) do not use overcommitted capacity."""

    name = "overcommit"
    reads: Reads = "usage"
    requeue_on: tuple[Trigger, ...] = ("run_ended", "node_joined", "node_changed")

    def key(self, member: Member) -> Hashable:
        task = member.task
        # Fast path: most tasks have no limits.
        if not task.limits or qos(task) != "guaranteed":
            return NO_OPINION
        return task.request.get(CPU, 0), task.request.get(MEMORY, 0)

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        task, out = member.task, []
        if qos(task) != "guaranteed" or not nodes.by("overcommits", _overcommits).where(bool).any():
            return ()
        for resource in (CPU, MEMORY):
            amount = task.request.get(resource, 0)
            physical = nodes.by(("physical capacity", resource), partial(_physical, resource)).numbers(int)
            # If not even the overcommitted capacity suffices, `fit` refuses.
            short = (physical - nodes.used(resource) < amount) & (nodes.free(resource) >= amount)
            text = f"only overcommitted {resource} is left"
            out.append((short, Reason(self.name, "ONLY_OVERCOMMITTED", text, evictable=True)))
        return out


def _physical(resource: str, node: Node) -> int:
    return node.capacity.get(resource, 0) if _overcommits(node) else _ENOUGH


def _overcommits(node: Node) -> bool:
    return node.kind not in _QUEUES and any(percent > 100 for percent in node.overcommit_percent.values())
