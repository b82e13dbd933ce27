"""Pools: nodes that stand for the same machines, such as two partitions of a Slurm cluster. Together their runs hold no more
than the machines have, though each of the nodes alone may offer all of it."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from hodei.engine.columns import Interned
from hodei.engine.nodes import Ints, Mask, Nodes, Table
from hodei.engine.points import Reads, Refusals, Trigger
from hodei.engine.view import Member, View
from hodei.model.job import Reason
from hodei.model.node import Node, Pool


class Pools:
    name = "pools"
    reads: Reads = "cluster"
    requeue_on: tuple[Trigger, ...] = ("run_ended", "node_joined", "node_changed")

    def key(self, member: Member) -> Hashable:
        return tuple(member.task.request.items())

    def stamp(self, member: Member, table: Table) -> Hashable:
        pools = table.interned("pool", _pool)
        if not _any(pools):
            return 0
        return tuple(_used(table, pools, resource).tobytes() for resource in member.task.request)

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        pools = nodes.table.interned("pool", _pool)
        if not _any(pools):
            return ()
        here = pools.ids[nodes.rows]
        out: list[tuple[Mask, Reason]] = []
        for resource, amount in member.task.request.items():
            if not amount:
                continue
            used = _used(nodes.table, pools, resource)
            full: Mask = np.array(
                [
                    pool is not None and used[number] + amount > dict(pool.capacity).get(resource, 0)
                    for number, pool in enumerate(pools.values)
                ],
                dtype=np.bool_,
            )
            text = f"the machines that it shares with others have no {resource} left"
            out.append((full[here], Reason(self.name, "SHARED_MACHINES_FULL", text, evictable=True)))
        return out


def _pool(node: Node) -> Pool | None:
    return node.pool


def _any(pools: Interned) -> bool:
    return any(pool is not None for pool in pools.values)


def _used(table: Table, pools: Interned, resource: str) -> Ints:
    """What is used in each pool."""
    used = table.view().used(resource)
    out = np.zeros(len(pools.values), dtype=np.int64)
    np.add.at(out, pools.ids, used)
    return out
