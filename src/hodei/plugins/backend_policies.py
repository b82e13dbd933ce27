"""Which backend first, then which of its nodes: a profile's `backend_policy`. Each is a score plugin by its own name.

A backend is scored by those of its nodes that could take the member, and all of them get its score: with the weight that
it usually has, the backend is chosen by this, and the node within it by everything else. No opinion while there is one
backend only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

import numpy as np

from hodei.engine.nodes import Ints, Mask, Nodes
from hodei.engine.points import MAX_SCORE, Reads
from hodei.engine.view import Member, View
from hodei.plugins.locality import DataLocality, Proximity
from hodei.plugins.strategies import free_share

# Which backend a node is of travels with what is said of it, in the lowest bits.
_BITS = 16
_WHICH = (1 << _BITS) - 1


class _OverBackends(ABC):
    reads: Reads = "static"
    usual_weight = 1000

    @abstractmethod
    def _of_node(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        """What is said of a node alone; not below 0."""

    def _of_backend(self, of_nodes: Ints) -> int:
        """What is said of a backend, from 0 to MAX_SCORE unless `_rank` has the last word."""
        return int(of_nodes.max())

    def _rank(self, of_backends: Ints) -> Ints:
        return of_backends

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        backends = nodes.by("backend", lambda node: node.backend)
        if len(backends.values) < 2 or len(backends.values) > _WHICH:
            return None
        said = self._of_node(member, nodes, view)
        if said is None:
            return None
        place = {name: number for number, name in enumerate(backends.values)}
        return (said << _BITS) | backends.numbers(lambda name: place[name])

    def normalize(self, raw: Ints, feasible: Mask) -> Ints:
        said, which = raw >> _BITS, raw & _WHICH
        out = np.zeros_like(raw)
        left = np.unique(which[feasible])
        if not left.size:
            return out
        found = np.array([self._of_backend(said[feasible & (which == one)]) for one in left], dtype=np.int64)
        for one, score in zip(left, self._rank(found), strict=True):
            out[which == one] = score
        return out


class CostOptimized(_OverBackends):
    """The backend whose cheapest node costs least."""

    name = "cost_optimized"

    def key(self, member: Member) -> Hashable:
        return None

    def _of_node(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        costs = nodes.by("cost", lambda node: node.cost_milli)
        return costs.numbers(int) if any(costs.values) else None

    def _of_backend(self, of_nodes: Ints) -> int:
        return int(of_nodes.min())

    def _rank(self, of_backends: Ints) -> Ints:
        low, high = int(of_backends.min()), int(of_backends.max())
        if low == high:
            return np.full_like(of_backends, MAX_SCORE)
        return (high - of_backends) * MAX_SCORE // (high - low)


class Performance(_OverBackends):
    """The backend with the most room left, as a share: there it is the least crowded."""

    name = "performance"
    reads: Reads = "usage"

    def key(self, member: Member) -> Hashable:
        return tuple(member.task.request.items())

    def _of_node(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        return free_share(member, nodes)

    def _of_backend(self, of_nodes: Ints) -> int:
        return int(of_nodes.sum()) // len(of_nodes)


class Locality(_OverBackends):
    """The backend that holds what the job reads, or has a node nearest to the place that it names."""

    name = "locality"

    def __init__(self) -> None:
        self._data, self._near = DataLocality(), Proximity()

    def key(self, member: Member) -> Hashable:
        return self._data.key(member), self._near.key(member)

    def _of_node(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        found = [score for by in (self._data, self._near) if (score := by.score(member, nodes, view)) is not None]
        return sum(found[1:], found[0]) // len(found) if found else None


class Cost:
    """No opinion while no node has a cost; a node without one among others that have one is free of charge."""

    name = "cost"
    reads: Reads = "static"

    def key(self, member: Member) -> Hashable:
        return None

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        costs = nodes.by("cost", lambda node: node.cost_milli)
        return costs.numbers(int) if any(costs.values) else None

    def normalize(self, raw: Ints, feasible: Mask) -> Ints:
        prices = raw[feasible]
        low, high = (int(prices.min()), int(prices.max())) if prices.size else (0, 0)
        if low == high:
            return np.full_like(raw, MAX_SCORE)
        return (high - raw) * MAX_SCORE // (high - low)
