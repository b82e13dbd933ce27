"""Kubernetes' own scores for how full a node would be, by its formulas: whole points from 0 to 100.

Each looks at the resources it was told (cpu and memory if nothing was said) with a weight for each. A resource that a node
does not have is left out for that node; one that is neither cpu, memory nor storage is left out for members that do not
ask for it. `fit` uses one of them as its score; each can also be named on its own.
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

    def __init__(self, resources: Mapping[str, int] | None = None, unsaid: Mapping[str, str] | None = None) -> None:
        """`resources`: how much each counts, from 1 to 100. `unsaid`: for some of them a second resource that holds what
        those are taken to use who ask for nothing; it counts in the score and never as room."""
        self._unsaid = dict(unsaid or {})
        self._weights = dict({CPU: 1, MEMORY: 1} if resources is None else resources)
        for resource, weight in self._weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int) or not 1 <= weight <= 100:
                raise InvalidInput(f"the weight of {resource} must be a whole number from 1 to 100, not {weight!r}")

    def key(self, member: Member) -> Hashable:
        request = member.task.request
        return tuple(request.get(resource, 0) for resource in (*self._weights, *self._unsaid.values()))

    def _unspoken(self, resource: str, member: Member, nodes: Nodes) -> Ints | int:
        """What is taken to be used of it besides, with the member there."""
        other = self._unsaid.get(resource)
        return 0 if other is None else nodes.used(other) + member.task.request.get(other, 0)

    def _counted(self, member: Member) -> list[tuple[str, int, int]]:
        """What is looked at for this member: resource, how much it asks for, and the resource's weight."""
        request = member.task.request
        return [
            (resource, request.get(resource, 0), weight)
            for resource, weight in self._weights.items()
            if resource in _ALWAYS or request.get(resource)
        ]


class LeastAllocated(_Allocation):
    """The share that stays free after placing: spreads work."""

    name = "least_allocated"

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        points = weights = nodes.zeros()
        for resource, amount, weight in self._counted(member):
            there = nodes.capacity(resource)
            left = nodes.higher(nodes.free(resource) - self._unspoken(resource, member, nodes) - amount, 0)
            points = points + left * 100 // nodes.higher(there, 1) * weight
            weights = weights + nodes.lower(there, 1) * weight
        return points // nodes.higher(weights, 1) * _POINT


class MostAllocated(_Allocation):
    """The share that is taken after placing: packs work."""

    name = "most_allocated"

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        points = weights = nodes.zeros()
        for resource, amount, weight in self._counted(member):
            there = nodes.capacity(resource)
            taken = nodes.lower(nodes.used(resource) + self._unspoken(resource, member, nodes) + amount, there)
            points = points + taken * 100 // nodes.higher(there, 1) * weight
            weights = weights + nodes.lower(there, 1) * weight
        return points // nodes.higher(weights, 1) * _POINT


class RequestedToCapacityRatio(_Allocation):
    """Any line through points of (utilization in percent, score from 0 to 10); by default the fuller the better.

    A resource whose score is 0 does not count, and the mean is rounded to the nearest point, as in Kubernetes.
    """

    name = "requested_to_capacity_ratio"

    def __init__(
        self, shape: Sequence[Mapping[str, int]] | None = None, resources: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(resources)
        given = [{"utilization": 0, "score": 0}, {"utilization": 100, "score": 10}] if shape is None else shape
        self._points = np.array(_line([_corner(corner) for corner in given]), dtype=np.int64)

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        points = weights = nodes.zeros()
        for resource, amount, weight in self._counted(member):
            there = nodes.capacity(resource)
            percent = nodes.lower(nodes.used(resource) + amount, there) * 100 // nodes.higher(there, 1)
            scored = self._points[percent] * nodes.lower(there, 1)
            points = points + scored * weight
            weights = weights + nodes.lower(scored, 1) * weight
        return (points * 2 + weights) // nodes.higher(weights * 2, 1) * _POINT


def _corner(corner: Mapping[str, Any]) -> tuple[int, int]:
    if set(corner) != {"utilization", "score"}:
        raise InvalidInput("each point of the shape has utilization and score", hint="{utilization = 0, score = 10}")
    utilization, score = corner["utilization"], corner["score"]
    for value, most in ((utilization, 100), (score, _MAX_SHAPE_SCORE)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise InvalidInput(f"{value!r} in the shape is not a whole number from 0 to {most}")
    return utilization, score * (100 // _MAX_SHAPE_SCORE)


def _line(corners: Sequence[tuple[int, int]]) -> Iterable[int]:
    """The height of the broken line at each whole percent; divisions are cut towards zero, as in Go."""
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
    """After placing, the resources should be taken to equal shares: 100 less their standard deviation in percent.

    No opinion on members that ask for none of the resources, so that they do not pile up on the best balanced node.
    """

    name = "balanced_allocation"

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        counted = self._counted(member)
        if not any(amount for _, amount, _ in counted):
            return None
        if isinstance(nodes, OneNode):
            return self._of_one(counted, nodes)
        # In floating point, operation by operation as in Kubernetes, so that the last digit is the same.
        shares, there = [], []
        for resource, amount, _ in counted:
            whole = nodes.capacity(resource)
            there.append(np.minimum(whole, 1))
            shares.append(np.minimum((nodes.used(resource) + amount) / np.maximum(whole, 1), 1.0) * there[-1])
        number = np.maximum(_total(there), 1)
        mean = _total(shares) / number
        squares = _total([(share - mean) * (share - mean) * has for share, has in zip(shares, there, strict=True)])
        highest, lowest = shares[0], shares[0] + (1 - there[0]) * 2
        for share, has in zip(shares[1:], there[1:], strict=True):
            highest, lowest = np.maximum(highest, share), np.minimum(lowest, share + (1 - has) * 2)
        of_two = np.abs((highest - lowest) / 2)
        deviation = np.where(number == 2, of_two, np.where(number > 2, np.sqrt(squares / number), 0.0))
        points: Ints = ((1 - deviation) * 100).astype(np.int64) * _POINT
        return points

    def _of_one(self, counted: list[tuple[str, int, int]], node: OneNode) -> Any:
        """The same operations in plain numbers, which for one node take a tenth of the time."""
        shares = [
            min((node.used(resource) + amount) / whole, 1.0)
            for resource, amount, _ in counted
            if (whole := node.capacity(resource)) > 0
        ]
        deviation = 0.0
        if len(shares) == 2:
            deviation = abs((max(shares) - min(shares)) / 2)
        elif len(shares) > 2:
            mean = _total(shares) / len(shares)
            squares = _total([(share - mean) * (share - mean) for share in shares])
            deviation = math.sqrt(squares / len(shares))
        return int((1 - deviation) * 100) * _POINT


def _total(parts: Sequence[Any]) -> Any:
    """Added up one after the other, which for floating point is not the same as in any other order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


STRATEGIES: dict[str, type[Any]] = {
    strategy.name: strategy for strategy in (LeastAllocated, MostAllocated, RequestedToCapacityRatio)
}
