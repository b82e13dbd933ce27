"""A profile's `backend_policy`: choose the backend first, then the node within it. Each policy is a score plugin.

A backend is scored by its feasible nodes, and all its nodes get its score. With the usual weight this score decides the
backend, and all other scores decide the node. No opinion if there is only one backend.
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

# The lowest bits of a raw score are the number of the node's backend.
_BITS = 16
_BACKEND_MASK = (1 << _BITS) - 1


class _BackendPolicy(ABC):
    reads: Reads = "static"
    usual_weight = 1000

    @abstractmethod
    def _score_node(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        """The score of a single node; not negative."""

    def _score_backend(self, of_nodes: Ints) -> int:
        """The score of a backend, from 0 to MAX_SCORE unless `_rank` rescales it."""
        return int(of_nodes.max())

    def _rank(self, of_backends: Ints) -> Ints:
        return of_backends

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        backends = nodes.by("backend", lambda node: node.backend)
        if len(backends.values) < 2 or len(backends.values) > _BACKEND_MASK:
            return None
        scores = self._score_node(member, nodes, view)
        if scores is None:
            return None
        place = {name: number for number, name in enumerate(backends.values)}
        return (scores << _BITS) | backends.numbers(lambda name: place[name])

    def normalize(self, raw: Ints, feasible: Mask) -> Ints:
        scores, backend = raw >> _BITS, raw & _BACKEND_MASK
        out = np.zeros_like(raw)
        left = np.unique(backend[feasible])
        if not left.size:
            return out
        found = np.array([self._score_backend(scores[feasible & (backend == one)]) for one in left], dtype=np.int64)
        for one, score in zip(left, self._rank(found), strict=True):
            out[backend == one] = score
        return out


class CostOptimized(_BackendPolicy):
    """The backend with the cheapest node."""

    name = "cost_optimized"

    def key(self, member: Member) -> Hashable:
        return None

    def _score_node(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        return Cost().score(member, nodes, view)

    def _score_backend(self, of_nodes: Ints) -> int:
        return int(of_nodes.min())

    def _rank(self, of_backends: Ints) -> Ints:
        return Cost().normalize(of_backends, np.ones_like(of_backends, dtype=np.bool_))


class Performance(_BackendPolicy):
    """The backend with the largest free share."""

    name = "performance"
    reads: Reads = "usage"

    def key(self, member: Member) -> Hashable:
        return tuple(member.task.request.items())

    def _score_node(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        return free_share(member, nodes)

    def _score_backend(self, of_nodes: Ints) -> int:
        return int(of_nodes.sum()) // len(of_nodes)


class Locality(_BackendPolicy):
    """The backend that holds the job's inputs, or has the node nearest to its location."""

    name = "locality"

    def __init__(self) -> None:
        self._data, self._near = DataLocality(), Proximity()

    def key(self, member: Member) -> Hashable:
        return self._data.key(member), self._near.key(member)

    def _score_node(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        found = [score for by in (self._data, self._near) if (score := by.score(member, nodes, view)) is not None]
        return sum(found[1:], found[0]) // len(found) if found else None


class Cost:
    """The cheapest feasible node gets 100, the most expensive 0. No opinion while no node has a cost."""

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
