"""Cost: the cheapest of the nodes that could take a member gets 100, the dearest 0."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from hodei.engine.nodes import Ints, Mask, Nodes
from hodei.engine.points import MAX_SCORE, Reads
from hodei.engine.view import Member, View


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
