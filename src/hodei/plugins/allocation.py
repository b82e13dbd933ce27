"""Kubernetes' scores for node utilization, by its formulas: whole points from 0 to 100.

Each considers the configured resources with their weights (default: cpu and memory). A resource that a node lacks is
ignored for that node; one other than cpu, memory and storage is ignored for members that do not request it. `fit` uses
one of them as its score; each is also a plugin.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hodei.engine.nodes import Ints, Nodes, OneNode
from hodei.engine.points import MAX_SCORE, Reads
from hodei.engine.view import Member, View
from hodei.model.errors import InvalidInput
from hodei.model.resources import CPU, MEMORY, STORAGE

_POINT = MAX_SCORE // 100
_ALWAYS = (CPU, MEMORY, STORAGE)
_MAX_SHAPE_SCORE = 10


class _Allocation:
    name = ""
    reads: Reads = "usage"
    scalar = True

    def __init__(self, resources: Mapping[str, int] | None = None, assumed: Mapping[str, str] | None = None) -> None:
        """`resources`: weights from 1 to 100. `assumed`: for some of them a second resource with the assumed usage of
        members that request nothing; it affects only the score, not capacity."""
        self._assumed = dict(assumed or {})
        self._weights = dict({CPU: 1, MEMORY: 1} if resources is None else resources)
        for resource, weight in self._weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int) or not 1 <= weight <= 100:
                raise InvalidInput(f"the weight of {resource} must be a whole number from 1 to 100, not {weight!r}")

    def key(self, member: Member) -> Hashable:
        request = member.task.request
        return tuple(request.get(resource, 0) for resource in (*self._weights, *self._assumed.values()))

    def _assumed_usage(self, resource: str, member: Member, nodes: Nodes) -> Ints | int:
        other = self._assumed.get(resource)
        return 0 if other is None else nodes.used(other) + member.task.request.get(other, 0)

    def _counted(self, member: Member) -> list[tuple[str, int, int]]:
        """Resources considered for this member: name, requested amount, weight."""
        request = member.task.request
        return [
            (resource, request.get(resource, 0), weight)
            for resource, weight in self._weights.items()
            if resource in _ALWAYS or request.get(resource)
        ]


class LeastAllocated(_Allocation):
    """The free share after placement: spreads work."""

    name = "least_allocated"

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        points = weights = nodes.zeros()
        for resource, amount, weight in self._counted(member):
            there = nodes.capacity(resource)
            left = nodes.higher(nodes.free(resource) - self._assumed_usage(resource, member, nodes) - amount, 0)
            points = points + left * 100 // nodes.higher(there, 1) * weight
            weights = weights + nodes.lower(there, 1) * weight
        return points // nodes.higher(weights, 1) * _POINT


class MostAllocated(_Allocation):
    """The used share after placement: packs work."""

    name = "most_allocated"

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        points = weights = nodes.zeros()
        for resource, amount, weight in self._counted(member):
            there = nodes.capacity(resource)
            taken = nodes.lower(nodes.used(resource) + self._assumed_usage(resource, member, nodes) + amount, there)
            points = points + taken * 100 // nodes.higher(there, 1) * weight
            weights = weights + nodes.lower(there, 1) * weight
        return points // nodes.higher(weights, 1) * _POINT


class RequestedToCapacityRatio(_Allocation):
    """A piecewise linear function through points of (utilization in percent, score from 0 to 10); by default rising.

    A resource with score 0 does not count, and the mean is rounded to the nearest point, as in Kubernetes.
    """

    name = "requested_to_capacity_ratio"

    def __init__(
        self, shape: Sequence[Mapping[str, int]] | None = None, resources: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(resources)
        given = [{"utilization": 0, "score": 0}, {"utilization": 100, "score": 10}] if shape is None else shape
        self._points = np.array(_interpolate([_parse_point(point) for point in given]), dtype=np.int64)

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        points = weights = nodes.zeros()
        for resource, amount, weight in self._counted(member):
            there = nodes.capacity(resource)
            percent = nodes.lower(nodes.used(resource) + amount, there) * 100 // nodes.higher(there, 1)
            scored = self._points[percent] * nodes.lower(there, 1)
            points = points + scored * weight
            weights = weights + nodes.lower(scored, 1) * weight
        return (points * 2 + weights) // nodes.higher(weights * 2, 1) * _POINT


def _parse_point(point: Mapping[str, Any]) -> tuple[int, int]:
    if set(point) != {"utilization", "score"}:
        raise InvalidInput("each point of the shape has utilization and score", hint="{utilization = 0, score = 10}")
    utilization, score = point["utilization"], point["score"]
    for value, most in ((utilization, 100), (score, _MAX_SHAPE_SCORE)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise InvalidInput(f"{value!r} in the shape is not a whole number from 0 to {most}")
    return utilization, score * (100 // _MAX_SHAPE_SCORE)


def _interpolate(corners: Sequence[tuple[int, int]]) -> Iterable[int]:
    """The score at each whole percent; division truncates towards zero, as in Go."""
    places = [utilization for utilization, _ in corners]
    if not corners or places != sorted(set(places)):
        raise InvalidInput("the shape needs one point or more, in order of rising utilization")
    out = []
    for percent in range(101):
        last = next((i for i, place in enumerate(places) if percent <= place), None)
        if last is None:
            out.append(corners[-1][1])
        elif last == 0:
            out.append(corners[0][1])
        else:
            (from_x, from_y), (to_x, to_y) = corners[last - 1], corners[last]
            rise = (to_y - from_y) * (percent - from_x)
            step = abs(rise) // (to_x - from_x)
            out.append(from_y + (step if rise >= 0 else -step))
    return out


class BalancedAllocation(_Allocation):
    """Resources should be used to equal shares after placement: 100 minus their standard deviation in percent.

    No opinion on members that request none of the resources, so that they do not pile up on the best balanced node.
    """

    name = "balanced_allocation"

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        counted = self._counted(member)
        if not any(amount for _, amount, _ in counted):
            return None
        if isinstance(nodes, OneNode):
            return self._score_one(counted, nodes)
        # Floating point, operation by operation as in Kubernetes, so that results are identical.
        shares, there = [], []
        for resource, amount, _ in counted:
            whole = nodes.capacity(resource)
            there.append(np.minimum(whole, 1))
            shares.append(np.minimum((nodes.used(resource) + amount) / np.maximum(whole, 1), 1.0) * there[-1])
        number = np.maximum(_sum_in_order(there), 1)
        mean = _sum_in_order(shares) / number
        squares = _sum_in_order(
            [(share - mean) * (share - mean) * has for share, has in zip(shares, there, strict=True)]
        )
        highest, lowest = shares[0], shares[0] + (1 - there[0]) * 2
        for share, has in zip(shares[1:], there[1:], strict=True):
            highest, lowest = np.maximum(highest, share), np.minimum(lowest, share + (1 - has) * 2)
        of_two = np.abs((highest - lowest) / 2)
        deviation = np.where(number == 2, of_two, np.where(number > 2, np.sqrt(squares / number), 0.0))
        points: Ints = ((1 - deviation) * 100).astype(np.int64) * _POINT
        return points

    def _score_one(self, counted: list[tuple[str, int, int]], node: OneNode) -> Any:
        """The same operations on scalars: ten times faster for one node."""
        shares = [
            min((node.used(resource) + amount) / whole, 1.0)
            for resource, amount, _ in counted
            if (whole := node.capacity(resource)) > 0
        ]
        deviation = 0.0
        if len(shares) == 2:
            deviation = abs((max(shares) - min(shares)) / 2)
        elif len(shares) > 2:
            mean = _sum_in_order(shares) / len(shares)
            squares = _sum_in_order([(share - mean) * (share - mean) for share in shares])
            deviation = math.sqrt(squares / len(shares))
        return int((1 - deviation) * 100) * _POINT


def _sum_in_order(parts: Sequence[Any]) -> Any:
    """Floating-point sums depend on the order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


STRATEGIES: dict[str, type[Any]] = {
    strategy.name: strategy for strategy in (LeastAllocated, MostAllocated, RequestedToCapacityRatio)
}
