"""Worker selection: which of the nodes that could take a member should. Each strategy is a score plugin by its own name.

All of them look at the resources that the member asks for (cpu and memory if it asks for none), before or after placing it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from hodei.engine.nodes import Ints, Mask, Nodes
from hodei.engine.points import MAX_SCORE, Reads
from hodei.engine.view import Member, View
from hodei.model.resources import CPU, GPU, MEMORY

_USUAL = (CPU, MEMORY, GPU)
_COMMON = [(CPU, 0), (MEMORY, 0)]
# What a rest that is smaller than the member costs. Enough to tell equal nodes apart, too little to undo the spreading.
_SMALL_REST = 15 * MAX_SCORE // 100


class _Strategy:
    name = ""
    reads: Reads = "usage"
    scalar = True

    def key(self, member: Member) -> Hashable:
        return tuple(member.task.request.items())


def _asked(member: Member) -> list[tuple[str, int]]:
    """What the member asks of the usual resources; of all resources if it asks for none of those."""
    asked = [(resource, amount) for resource, amount in member.task.request.items() if amount]
    return [pair for pair in asked if pair[0] in _USUAL] or asked or _COMMON


def free_share(member: Member, nodes: Nodes) -> Ints:
    """The share of the asked resources that stays free after placing the member; 0 where it has no room."""
    asked = _asked(member)
    total = nodes.zeros()
    for resource, amount in asked:
        total = total + nodes.share(nodes.free(resource) - amount, resource)
    return total // len(asked)


class Resource(_Strategy):
    """Spreads while there is room, packs when it is tight. The share of the asked resources that stays free after placing,
    or once that is less than half the share that is taken: so nodes are first half filled evenly, then filled up one by one,
    and the others keep their free half in one piece for larger members.

    Two things take points away, because they leave a rest that is hard to use: resources that are taken to unequal shares
    (the gap between the highest and the lowest), and a rest that is smaller than this member itself. How much this is worth
    is measured by `hodei bench fragmentation`.
    """

    name = "resource"

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        asked = _asked(member)
        shares: list[Any] = []
        small: Any = False
        for resource, amount in asked:
            left = nodes.free(resource) - amount
            shares.append(nodes.share(left, resource))
            small = small | ((left < amount) & (left > 0))
        free: Any = shares[0]
        gap: Any = 0
        if len(shares) == 2:
            free, gap = (free + shares[1]) // 2, abs(free - shares[1])
        elif len(shares) > 2:
            most = least = free
            for share in shares[1:]:
                free, most, least = free + share, nodes.higher(most, share), nodes.lower(least, share)
            free, gap = free // len(shares), most - least
        return nodes.higher(nodes.higher(free, MAX_SCORE - free) - gap - small * _SMALL_REST, 0)


class Load(_Strategy):
    """How idle a node is now: the busier of its cpu and memory decides. The same for every member."""

    name = "load"

    def key(self, member: Member) -> Hashable:
        return None

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        busy = nodes.higher(nodes.share(nodes.used(CPU), CPU), nodes.share(nodes.used(MEMORY), MEMORY))
        return MAX_SCORE - nodes.lower(busy, MAX_SCORE)


class LeastLoaded(Load):
    name = "least_loaded"


class MostFree(_Strategy):
    """The largest free amount, measured against the largest node: big empty machines first."""

    name = "most_free"

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        asked = _asked(member)
        total = nodes.zeros()
        for resource, _ in asked:
            shift = 10 if resource == MEMORY else 0  # bytes times the scale could pass 64 bits
            free = nodes.higher(nodes.free(resource), 0) >> shift
            total = total + free * MAX_SCORE // max(nodes.largest(resource) >> shift, 1)
        return total // len(asked)


class ResourceBalance(_Strategy):
    """After placing, the node's resources should be used to equal shares, so that none is stranded."""

    name = "resource_balance"

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        request = member.task.request
        counted = [resource for resource, _ in _asked(member)]
        counted = counted if len(counted) > 1 else [CPU, MEMORY]
        shares = [nodes.share(nodes.used(resource) + request.get(resource, 0), resource) for resource in counted]
        high = low = shares[0]
        for share in shares[1:]:
            high, low = nodes.higher(high, share), nodes.lower(low, share)
        return MAX_SCORE - nodes.lower(high - low, MAX_SCORE)


class BinPacking(_Strategy):
    """Best fit: the node that is fullest after placing the member, to keep others whole for what is large."""

    name = "bin_packing"

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        asked = _asked(member)
        total = nodes.zeros()
        for resource, amount in asked:
            total = total + nodes.lower(nodes.share(nodes.used(resource) + amount, resource), MAX_SCORE)
        return total // len(asked)


class RoundRobin(_Strategy):
    """The node that has waited longest for work."""

    name = "round_robin"
    scalar = False

    def key(self, member: Member) -> Hashable:
        return None

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        return nodes.last_placed()

    def normalize(self, raw: Ints, feasible: Mask) -> Ints:
        # Ranks, not amounts: the order is what matters, however long ago it was.
        stages, ranks = np.unique(raw[feasible], return_inverse=True)
        out = np.zeros_like(raw)
        out[feasible] = MAX_SCORE - ranks * MAX_SCORE // max(len(stages), 1)
        return out
