"""How much of a gang the nodes of a place could hold now, by free resources alone: for plugins that lay gangs.

These are upper bounds, as every other rule can only make it less: a place that is too small by them need not be tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from hodei.engine.nodes import Ints, Mask, Table
from hodei.engine.points import Layout
from hodei.engine.view import Gang

# As good as without end, and small enough to be summed up over all nodes: members that ask for nothing.
_NO_LIMIT = 1 << 30


def has_several_members(gang: Gang) -> bool:
    """Whether there is more than one member whose places can be compared."""
    return sum(map(len, gang.needed)) + sum(map(len, gang.extra)) > 1


class DomainCapacity:
    """For each place (the rows with the same one of `ids`): how many of each kind of member it could hold by itself
    (`each`), and how much of each resource is free there (`free`). `empty`: as if nothing ran on the nodes."""

    def __init__(self, gang: Gang, table: Table, ids: NDArray[np.intp], places: int, *, empty: bool = False) -> None:
        self.needed = [len(numbers) for numbers in gang.needed]
        self.wanted = [len(more) + need for more, need in zip(gang.extra, self.needed, strict=True)]
        self.requests = [
            {resource: amount for resource, amount in member.task.request.items() if amount > 0}
            for member in gang.members
        ]
        nodes = table.view()
        amounts_of = nodes.capacity if empty else nodes.free
        free = {name: np.maximum(amounts_of(name), 0) for request in self.requests for name in request}
        self.free = {name: _by_place(amounts, ids, places) for name, amounts in free.items()}
        self.each: list[Ints] = []
        for request in self.requests:
            count = np.full(len(ids), _NO_LIMIT, dtype=np.int64)
            for name, amount in request.items():
                count = np.minimum(count, free[name] // amount)
            self.each.append(_by_place(count, ids, places))

    def holds(self, counts: Sequence[int]) -> Mask:
        """The places that could take so many of each kind, all together."""
        found = np.ones(len(self.each[0]) if self.each else 0, dtype=np.bool_)
        for each, count in zip(self.each, counts, strict=True):
            found &= each >= count
        for name, amount in self._total(counts).items():
            found &= self.free[name] >= amount
        return found

    def most(self) -> Ints:
        """How many of the needed members each place could take at the most."""
        found = np.zeros(len(self.each[0]) if self.each else 0, dtype=np.int64)
        for each, need in zip(self.each, self.needed, strict=True):
            found += np.minimum(each, need)
        return found

    def in_order(self, names: Sequence[str | None]) -> list[int]:
        """The places that could take the needed members, best first: where the extra ones could go too, the tightest
        first, so that large places stay whole; then the others, those that could take more first. Ties by name."""
        size = sum(self.wanted)
        roomy = np.full(len(names), _NO_LIMIT, dtype=np.int64)
        for each, want in zip(self.each, self.wanted, strict=True):
            if want:
                roomy = np.minimum(roomy, each * size // want)
        whole = self.holds(self.wanted).tolist()
        room = roomy.tolist()
        places = [place for place in np.flatnonzero(self.holds(self.needed)).tolist() if names[place] is not None]
        return sorted(places, key=lambda p: (not whole[p], room[p] if whole[p] else -room[p], names[p]))

    def _total(self, counts: Sequence[int]) -> dict[str, int]:
        total: dict[str, int] = {}
        for request, count in zip(self.requests, counts, strict=True):
            for name, amount in request.items():
                total[name] = total.get(name, 0) + amount * count
        return total


class DomainLayouts(Sequence[Layout]):
    """A layout for each of some places, the same for all members, made when asked for: there can be as many places as
    nodes. `wish`: ends with all rows for everyone."""

    def __init__(self, ids: NDArray[np.intp], places: Sequence[int], members: int, *, wish: bool = False) -> None:
        self._ids, self._places, self._members, self._wish = ids, places, members, wish

    def __len__(self) -> int:
        return len(self._places) + self._wish

    @overload
    def __getitem__(self, at: int) -> Layout: ...
    @overload
    def __getitem__(self, at: slice) -> list[Layout]: ...
    def __getitem__(self, at: int | slice) -> Layout | list[Layout]:
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        number = range(len(self))[at]
        if number == len(self._places):
            rows = np.ones(len(self._ids), dtype=np.bool_)
        else:
            rows = self._ids == self._places[number]
        return Layout((rows,) * self._members)


def _by_place(values: Ints, ids: NDArray[np.intp], places: int) -> Ints:
    total = np.zeros(places, dtype=np.int64)
    np.add.at(total, ids, values)
    return total
