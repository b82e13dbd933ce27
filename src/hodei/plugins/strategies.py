"""Worker selection: which feasible node to prefer. Each strategy is a score plugin.

All consider the resources that the member requests (cpu and memory if it requests none), before or after placement.
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
_DEFAULT = [(CPU, 0), (MEMORY, 0)]
# Penalty for a remainder smaller than the member: enough to distinguish equal nodes, too little to prevent spreading.
_SMALL_REST = 15 * MAX_SCORE // 100


class _Strategy:
    name = ""
    reads: Reads = "usage"
    scalar = True

    def key(self, member: Member) -> Hashable:
        return tuple(member.task.request.items())


def _requested(member: Member) -> list[tuple[str, int]]:
    """What the member requests of cpu, memory and GPUs; of all resources if it requests none of those."""
    requested = [(resource, amount) for resource, amount in member.task.request.items() if amount]
    return [pair for pair in requested if pair[0] in _USUAL] or requested or _DEFAULT


def free_share(member: Member, nodes: Nodes) -> Ints:
    """The share of the requested resources that stays free after placement; 0 without capacity."""
    requested = _requested(member)
    total = nodes.zeros()
    for resource, amount in requested:
        total = total + nodes.share(nodes.free(resource) - amount, resource)
    return total // len(requested)


class Resource(_Strategy):
    """Spreads while there is capacity, packs when it is scarce: the free share after placement, or, once that is below
    half, the used share. Nodes are first filled to half evenly, then filled up one by one, so that the others keep half
    free for larger members.

    Two penalties for remainders that are hard to use: unequal use of resources (the gap between the highest and the
    lowest share), and a remainder smaller than this member. `hodei bench fragmentation` measures their value.
    """

    name = "resource"

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        requested = _requested(member)
        shares: list[Any] = []
        small: Any = False
        for resource, amount in requested:
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
    """How idle a node is now: the busier of cpu and memory decides. The same for every member."""

    name = "load"

    def key(self, member: Member) -> Hashable:
        return None

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        busy = nodes.higher(nodes.share(nodes.used(CPU), CPU), nodes.share(nodes.used(MEMORY), MEMORY))
        return MAX_SCORE - nodes.lower(busy, MAX_SCORE)


class LeastLoaded(Load):
    name = "least_loaded"


class MostFree(_Strategy):
    """The largest free amount relative to the largest node: large empty nodes first."""

    name = "most_free"

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        requested = _requested(member)
        total = nodes.zeros()
        for resource, _ in requested:
            shift = 10 if resource == MEMORY else 0  # avoids overflow of 64 bits
            free = nodes.higher(nodes.free(resource), 0) >> shift
            total = total + free * MAX_SCORE // max(nodes.largest(resource) >> shift, 1)
        return total // len(requested)


class ResourceBalance(_Strategy):
    """The node's resources should be used to equal shares after placement, so that none is stranded."""

    name = "resource_balance"

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        request = member.task.request
        counted = [resource for resource, _ in _requested(member)]
        counted = counted if len(counted) > 1 else [CPU, MEMORY]
        shares = [nodes.share(nodes.used(resource) + request.get(resource, 0), resource) for resource in counted]
        high = low = shares[0]
        for share in shares[1:]:
            high, low = nodes.higher(high, share), nodes.lower(low, share)
        return MAX_SCORE - nodes.lower(high - low, MAX_SCORE)


class BinPacking(_Strategy):
    """Best fit: the node that is fullest after placement, to keep others free for large members."""

    name = "bin_packing"

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        requested = _requested(member)
        total = nodes.zeros()
        for resource, amount in requested:
            total = total + nodes.lower(nodes.share(nodes.used(resource) + amount, resource), MAX_SCORE)
        return total // len(requested)


class RoundRobin(_Strategy):
    """The node whose last placement is longest ago."""

    name = "round_robin"
    scalar = False

    def key(self, member: Member) -> Hashable:
        return None

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        return nodes.last_placed()

    def normalize(self, raw: Ints, feasible: Mask) -> Ints:
        # Ranks: only the order matters.
        stages, ranks = np.unique(raw[feasible], return_inverse=True)
        out = np.zeros_like(raw)
        out[feasible] = MAX_SCORE - ranks * MAX_SCORE // max(len(stages), 1)
        return out
