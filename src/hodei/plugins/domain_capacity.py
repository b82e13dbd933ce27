"""How much of a gang each topology domain could hold, by free resources alone; for layout plugins.

These are upper bounds, as other rules can only reduce them: a domain that is too small need not be tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from hodei.engine.nodes import Ints, Mask, Table
from hodei.engine.points import Layout
from hodei.engine.view import Gang

# Members that request nothing: effectively unlimited, and sums over all nodes do not overflow.
_NO_LIMIT = 1 << 30


def has_several_members(gang: Gang) -> bool:
    """Whether there is more than one member to place together."""
    return sum(map(len, gang.needed)) + sum(map(len, gang.extra)) > 1


class DomainCapacity:
    """Per domain (rows with the same id in `ids`): how many of each kind of member it could hold (`per_kind`), and the free
    amount of each resource (`free`). `empty`: as if nothing ran on the nodes."""

    def __init__(self, gang: Gang, table: Table, ids: NDArray[np.intp], domains: int, *, empty: bool = False) -> None:
        self.needed = [len(numbers) for numbers in gang.needed]
        self.members = [len(more) + need for more, need in zip(gang.extra, self.needed, strict=True)]
        self.requests = [
            {resource: amount for resource, amount in member.task.request.items() if amount > 0}
            for member in gang.members
        ]
        nodes = table.view()
        amounts_of = nodes.capacity if empty else nodes.free
        free = {name: np.maximum(amounts_of(name), 0) for request in self.requests for name in request}
        self.free = {name: _sum_by_domain(amounts, ids, domains) for name, amounts in free.items()}
        self.per_kind: list[Ints] = []
        for request in self.requests:
            count = np.full(len(ids), _NO_LIMIT, dtype=np.int64)
            for name, amount in request.items():
                count = np.minimum(count, free[name] // amount)
            self.per_kind.append(_sum_by_domain(count, ids, domains))

    def could_hold(self, counts: Sequence[int]) -> Mask:
        """The domains that could hold that many of each kind together."""
        found = np.ones(len(self.per_kind[0]) if self.per_kind else 0, dtype=np.bool_)
        for fitting, count in zip(self.per_kind, counts, strict=True):
            found &= fitting >= count
        for name, amount in self._total(counts).items():
            found &= self.free[name] >= amount
        return found

    def most(self) -> Ints:
        """How many needed members each domain could hold at most."""
        found = np.zeros(len(self.per_kind[0]) if self.per_kind else 0, dtype=np.int64)
        for fitting, need in zip(self.per_kind, self.needed, strict=True):
            found += np.minimum(fitting, need)
        return found

    def in_order(self, names: Sequence[str | None]) -> list[int]:
        """The domains that could hold the needed members, best first: those that also hold the extra ones, tightest
        first to keep large domains free; then the others, largest first. Ties by name."""
        size = sum(self.members)
        total = np.full(len(names), _NO_LIMIT, dtype=np.int64)
        for fitting, count in zip(self.per_kind, self.members, strict=True):
            if count:
                total = np.minimum(total, fitting * size // count)
        all_fit = self.could_hold(self.members).tolist()
        capacity = total.tolist()
        domains = [
            domain for domain in np.flatnonzero(self.could_hold(self.needed)).tolist() if names[domain] is not None
        ]
        return sorted(domains, key=lambda p: (not all_fit[p], capacity[p] if all_fit[p] else -capacity[p], names[p]))

    def _total(self, counts: Sequence[int]) -> dict[str, int]:
        total: dict[str, int] = {}
        for request, count in zip(self.requests, counts, strict=True):
            for name, amount in request.items():
                total[name] = total.get(name, 0) + amount * count
        return total


class DomainLayouts(Sequence[Layout]):
    """One layout per domain, built on demand, because there can be many. `soft`: the last one has all rows."""

    def __init__(self, ids: NDArray[np.intp], domains: Sequence[int], members: int, *, soft: bool = False) -> None:
        self._ids, self._domains, self._members, self._soft = ids, domains, members, soft

    def __len__(self) -> int:
        return len(self._domains) + self._soft

    @overload
    def __getitem__(self, at: int) -> Layout: ...
    @overload
    def __getitem__(self, at: slice) -> list[Layout]: ...
    def __getitem__(self, at: int | slice) -> Layout | list[Layout]:
        if isinstance(at, slice):
            return [self[domain] for domain in range(*at.indices(len(self)))]
        number = range(len(self))[at]
        if number == len(self._domains):
            rows = np.ones(len(self._ids), dtype=np.bool_)
        else:
            rows = self._ids == self._domains[number]
        return Layout((rows,) * self._members)


def _sum_by_domain(values: Ints, ids: NDArray[np.intp], domains: int) -> Ints:
    total = np.zeros(domains, dtype=np.int64)
    np.add.at(total, ids, values)
    return total
