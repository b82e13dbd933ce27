"""Nodes as plugins see them: rows of the table as arrays (`Nodes`), or one row as integers (`OneNode`).

Results have one entry per row. Arrays are read-only by convention.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hodei.engine.device_slots import DeviceSlots
from hodei.model.affinity import Requirement
from hodei.model.ids import NodeName
from hodei.model.node import Node
from hodei.model.resources import MEMORY, STORAGE, Resources

if TYPE_CHECKING:
    from hodei.engine.nodes import Table

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
Rows = slice | NDArray[np.intp]
ALL = slice(None)

_SCALE = 10_000
# Amounts that are shifted down before they are scaled, so that nothing overflows.
LARGE = frozenset({MEMORY, STORAGE})


class Interned:
    """A column of values stored as small ids: a predicate is evaluated once per distinct value."""

    __slots__ = ("_rows", "ids", "values")

    def __init__(self, ids: NDArray[np.intp], values: Sequence[Any], rows: Rows = ALL) -> None:
        self.ids = ids
        self.values = values
        self._rows = rows

    def where(self, predicate: Callable[[Any], bool]) -> Mask:
        hits = np.fromiter((predicate(value) for value in self.values), dtype=np.bool_, count=len(self.values))
        return hits[self.ids[self._rows]]

    def numbers(self, measure: Callable[[Any], int]) -> Ints:
        found = np.fromiter((measure(value) for value in self.values), dtype=np.int64, count=len(self.values))
        return found[self.ids[self._rows]]


class Nodes:
    __slots__ = ("_rows", "table")

    def __init__(self, table: Table, rows: Rows = ALL) -> None:
        self.table = table
        self._rows = rows

    def __len__(self) -> int:
        if isinstance(self._rows, slice):
            return len(range(*self._rows.indices(len(self.table.names))))
        return len(self._rows)

    @property
    def rows(self) -> Rows:
        """Rows of the table, to index results computed over all nodes."""
        return self._rows

    def each(self) -> list[Node]:
        if isinstance(self._rows, slice):
            return self.table.nodes[self._rows]
        return [self.table.nodes[row] for row in self._rows]

    def used_by(self, name: NodeName) -> Resources:
        return self.table.usage(self.table.row[name])

    def capacity(self, resource: str) -> Ints:
        column = self.table.column_of(resource)
        found: Ints = self.table._capacity[column][self._rows]
        return found

    def used(self, resource: str) -> Ints:
        column = self.table.column_of(resource)
        found: Ints = (self.table._capacity[column] - self.table.free[column])[self._rows]
        return found

    def share(self, part: Ints, resource: str) -> Ints:
        """`part` as a share of each node's capacity, 0 to 10,000; 0 where there is no capacity."""
        shift, whole = self.table.scale_of(resource)
        scaled = np.maximum(part, 0)
        if shift:
            scaled >>= shift
        # Exact: both sides are integers below 2**53, the divisor is below 2**39 and the quotient below 2**14.
        found = scaled.astype(np.float64)
        found *= _SCALE
        found /= whole[self._rows]
        return found.astype(np.int64)

    def gpus(self) -> Ints:
        """Free thousandths of each GPU; -1 where a node has fewer GPUs."""
        found: Ints = self.table.gpus[self._rows]
        return found

    def parts(self) -> list[DeviceSlots | None]:
        """Cores and GPUs of each node; None if unknown."""
        holds = self.table.holds
        rows = range(len(holds))[self._rows] if isinstance(self._rows, slice) else self._rows
        return [holds[row].parts for row in rows]

    def runs(self) -> Ints:
        found: Ints = self.table.runs[self._rows]
        return found

    def last_placed(self) -> Ints:
        """Placement counter at the node's last placement; 0 if never."""
        found: Ints = self.table.last_placed[self._rows]
        return found

    def free(self, resource: str) -> Ints:
        column = self.table.column_of(resource)
        found: Ints = self.table.free[column][self._rows]
        return found

    def largest(self, resource: str) -> int:
        """The largest capacity over all nodes, not only these rows."""
        return self.table.largest(resource)

    def higher(self, a: Ints, b: Ints | int) -> Ints:
        found: Ints = np.maximum(a, b)
        return found

    def lower(self, a: Ints, b: Ints | int) -> Ints:
        found: Ints = np.minimum(a, b)
        return found

    def by(self, key: Hashable, of: Callable[[Node], Hashable]) -> Interned:
        """A column of any property of a node; `key` names it in the cache."""
        whole = self.table.interned(key, of)
        return Interned(whole.ids, whole.values, self._rows)

    def matching(self, requirement: Requirement, *, field: bool = False) -> Mask:
        key = requirement.key
        if field:
            column = self.by(("field", key), lambda node: node.name if key == "metadata.name" else None)
        else:
            column = self.by(("label", key), lambda node: node.labels.get(key))
        return column.where(lambda value: requirement.matches({} if value is None else {key: value}))

    def none(self) -> Mask:
        return np.zeros(len(self), dtype=np.bool_)

    def zeros(self) -> Ints:
        return np.zeros(len(self), dtype=np.int64)


class OneNode:
    """A single row as integers, with the interface of `Nodes`, for plugins with `scalar = True`.

    Most calls concern the one node that changed, and small arrays are slow.
    """

    __slots__ = ("_capacity", "_used", "table")

    def __init__(self, table: Table, row: int) -> None:
        self.table = table
        self._capacity = table.allocatable[row]
        self._used = table.holds[row].used

    def capacity(self, resource: str) -> int:
        return self._capacity.get(resource, 0)

    def used(self, resource: str) -> int:
        return self._used.get(resource, 0)

    def free(self, resource: str) -> int:
        return self._capacity.get(resource, 0) - self._used.get(resource, 0)

    def share(self, part: int, resource: str) -> int:
        shift = 10 if resource in LARGE else 0
        whole = self._capacity.get(resource, 0) >> shift
        return (part >> shift) * _SCALE // whole if part > 0 and whole > 0 else 0

    def largest(self, resource: str) -> int:
        return self.table.largest(resource)

    def higher(self, a: int, b: int) -> int:
        return a if a >= b else b

    def lower(self, a: int, b: int) -> int:
        return a if a <= b else b

    def zeros(self) -> int:
        return 0
