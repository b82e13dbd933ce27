"""The cluster as columns: one row per node in order of name, one column per resource.

Plugins see rows as arrays (`Nodes`, one entry per row, read-only by convention) or one row as integers (`OneNode`).

Placing and releasing change the usage columns in place and append to `Table.changes`, so that caches refresh only
changed rows. A change of a node itself (capacity, labels, taints, health) starts a new `generation`, which voids all
caches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from hodei.engine.device_slots import DeviceSlots, needs_devices
from hodei.engine.topology_index import Kind, TopologyIndex
from hodei.engine.view import Member
from hodei.model.affinity import Requirement
from hodei.model.ids import NodeName
from hodei.model.node import Grant, Node
from hodei.model.resources import GPU, MEMORY, STORAGE, Resources

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
Rows = slice | NDArray[np.intp]
ALL = slice(None)

_SCALE = 10_000
# Amounts that are shifted down before they are scaled, so that nothing overflows.
LARGE = frozenset({MEMORY, STORAGE})
# Start a new generation rather than let the trace grow without bound.
_MAX_TRACE = 1_000_000
# Larger sums are capped: absurd requests must not overflow 64 bits.
_LARGEST_SUM = 2**62


def allocatable(node: Node) -> Resources:
    """Allocatable resources: capacity times the overcommit ratio."""
    if not node.overcommit_percent:
        return node.capacity
    ratio = node.overcommit_percent
    return {resource: amount * ratio.get(resource, 100) // 100 for resource, amount in node.capacity.items()}


class _Usage:
    __slots__ = ("devices", "grants", "kinds", "last_placed", "runs", "used")

    def __init__(self) -> None:
        self.used: Resources = {}
        self.runs = 0
        self.last_placed = 0
        self.kinds: dict[Kind, int] = {}
        self.devices: DeviceSlots | None = None
        self.grants: dict[Grant, int] = {}  # count per grant, to rebuild the devices when the node changes


class Table:
    """All nodes. Usage changes only here."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.generation = 0
        self.changes: list[int] = []
        self.names: list[NodeName] = []
        self.nodes: list[Node] = []
        self.row: dict[NodeName, int] = {}
        self.column: dict[str, int] = {}
        self._capacity: Ints = np.zeros((0, 0), dtype=np.int64)
        self._free: Ints = np.zeros((0, 0), dtype=np.int64)
        self._runs: Ints = np.zeros(0, dtype=np.int64)
        self._last_placed: Ints = np.zeros(0, dtype=np.int64)
        self._placements = 0
        self._single_rows: list[OneNode | None] = []
        self._single_generation = -1
        self._trial_placements: list[tuple[int, int]] | None = None  # in a trial: (row, last_placed before)
        # Usage per row; the columns are updated when read.
        self.node_usage: list[_Usage] = []
        self._gpus: Ints = np.zeros((0, 0), dtype=np.int64)
        self._unwritten: set[int] = set()
        self.topology_index = TopologyIndex()
        self.allocatable: list[Resources] = []
        self._interned: dict[Hashable, Interned] = {}
        self._scales: dict[str, tuple[int, NDArray[np.float64]]] = {}
        self._by_name: dict[NodeName, Node] = {}
        self._offered: dict[NodeName, Node] = {}
        self._absent: dict[NodeName, list[tuple[Member, Grant | None]]] = {}
        self._stale = False
        for node in nodes:
            self.put(node)

    def put(self, node: Node) -> None:
        """Add or replace a node; its usage stays."""
        if self._by_name.get(node.name) != node:
            self._offered.pop(node.name, None)
            self._by_name[node.name] = node
            self._stale = True

    def remove(self, name: NodeName) -> None:
        self._offered.pop(name, None)
        if self._by_name.pop(name, None) is not None:
            self._stale = True

    def offer(self, node: Node) -> None:
        """A node that does not exist yet: only `at_best` has it."""
        self._by_name.pop(node.name, None)
        if self._offered.get(node.name) != node:
            self._offered[node.name] = node
            self._stale = True

    def node(self, name: NodeName) -> Node | None:
        return self._by_name.get(name)

    def settle(self) -> None:
        """Rebuild the columns if nodes were added, removed or changed; once per cycle."""
        if not self._stale and len(self.changes) <= _MAX_TRACE:
            return
        self._stale = False
        names = sorted(self._by_name)
        columns = dict(self.column)
        for name in names:
            for resource in self._by_name[name].capacity:
                columns.setdefault(resource, len(columns))
        available = [allocatable(self._by_name[name]) for name in names]
        capacity = np.zeros((len(columns), len(names)), dtype=np.int64)
        for new, amounts in enumerate(available):
            for resource, amount in amounts.items():
                capacity[columns[resource], new] = amount
        for name, row in self.row.items():
            if name not in self._by_name:
                for kind, number in self.node_usage[row].kinds.items():
                    self.topology_index.left(kind, number)
        self.node_usage = [self.node_usage[self.row[name]] if name in self.row else _Usage() for name in names]
        self.names, self.nodes, self.allocatable = names, [self._by_name[name] for name in names], available
        self.row = {name: row for row, name in enumerate(names)}
        self.column, self._capacity, self._free = columns, capacity, capacity.copy()
        self._runs, self._last_placed = np.zeros((2, len(names)), dtype=np.int64)
        self._unwritten = {row for row, held in enumerate(self.node_usage) if held.last_placed}
        self._rebuild_devices()
        self._new_generation()
        for name in [name for name in self._absent if name in self.row]:
            for member, grant in self._absent.pop(name):
                self.place(self.row[name], member.task.request, member, grant)

    def _rebuild_devices(self) -> None:
        """Rebuild free cores and GPUs of every node."""
        most = 0
        for node, held in zip(self.nodes, self.node_usage, strict=True):
            held.devices = DeviceSlots(node) if node.sockets or GPU in node.capacity else None
            if held.devices is not None:
                most = max(most, len(held.devices.gpus))
                for grant, times in held.grants.items():
                    for _ in range(times):
                        held.devices.take(grant)
        self._gpus = np.full((len(self.nodes), most), -1, dtype=np.int64)
        for row, held in enumerate(self.node_usage):
            if held.devices is not None:
                self._gpus[row, : len(held.devices.gpus)] = list(held.devices.gpus.values())

    def _new_generation(self) -> None:
        self.generation += 1
        self.changes.clear()
        self._interned.clear()
        self._scales.clear()

    def column_of(self, resource: str) -> int:
        """The column of a resource. An unknown one gets new arrays: call this before reading an array."""
        found = self.column.get(resource)
        if found is None:
            found = self.column[resource] = len(self.column)
            empty = np.zeros((1, self._capacity.shape[1]), dtype=np.int64)
            self._capacity = np.concatenate([self._capacity, empty])
            self._free = np.concatenate([self._free, empty])
        return found

    def place(
        self, row: int, request: Resources, member: Member | None = None, grant: Grant | None = None
    ) -> Grant | None:
        """Place a run. Returns its devices: `grant` if given, else newly chosen ones."""
        held = self.node_usage[row]
        used = held.used
        for resource, amount in request.items():
            used[resource] = used.get(resource, 0) + amount
        held.runs += 1
        self._placements += 1
        if self._trial_placements is not None:
            self._trial_placements.append((row, held.last_placed))
        held.last_placed = self._placements
        if member is not None:
            kind = self.topology_index.kind_of(member, self)
            held.kinds[kind] = held.kinds.get(kind, 0) + 1
            self.topology_index.moved(kind, row, 1, self)
            if held.devices is not None and grant is None and needs_devices(member.task):
                grant = held.devices.find(member.task)
        if grant is not None:
            held.grants[grant] = held.grants.get(grant, 0) + 1
            if held.devices is not None:
                held.devices.take(grant)
        self.changes.append(row)
        self._unwritten.add(row)
        return grant

    def release(self, row: int, request: Resources, member: Member | None = None, grant: Grant | None = None) -> None:
        """Undo `place`, with the grant that it returned."""
        held = self.node_usage[row]
        for resource, amount in request.items():
            held.used[resource] = held.used.get(resource, 0) - amount
        held.runs -= 1
        if member is not None:
            kind = self.topology_index.kind_of(member, self)
            held.kinds[kind] -= 1
            if not held.kinds[kind]:
                del held.kinds[kind]
            self.topology_index.moved(kind, row, -1, self)
        if grant is not None and held.grants.get(grant):
            held.grants[grant] -= 1
            if not held.grants[grant]:
                del held.grants[grant]
            if held.devices is not None:
                held.devices.give(grant, self.nodes[row])
        self.changes.append(row)
        self._unwritten.add(row)

    def _write(self) -> None:
        """Update the columns from the rows."""
        for row in self._unwritten:
            held = self.node_usage[row]
            for resource, amount in held.used.items():
                column = self.column_of(resource)
                self._free[column, row] = self._capacity[column, row] - (
                    amount if amount < _LARGEST_SUM else _LARGEST_SUM
                )
            self._runs[row] = held.runs
            self._last_placed[row] = held.last_placed
            if held.devices is not None and held.devices.gpus:
                self._gpus[row, : len(held.devices.gpus)] = list(held.devices.gpus.values())
        self._unwritten.clear()

    @property
    def free(self) -> Ints:
        if self._unwritten:
            self._write()
        return self._free

    @property
    def gpus(self) -> Ints:
        """Free thousandths of each GPU; -1 where a node has fewer GPUs."""
        if self._unwritten:
            self._write()
        return self._gpus

    @property
    def runs(self) -> Ints:
        if self._unwritten:
            self._write()
        return self._runs

    @property
    def last_placed(self) -> Ints:
        if self._unwritten:
            self._write()
        return self._last_placed

    def place_by_name(self, name: NodeName, member: Member, grant: Grant | None = None) -> Grant | None:
        """Account for an existing run, whose node may not have joined yet."""
        if name in self.row:
            return self.place(self.row[name], member.task.request, member, grant)
        self._absent.setdefault(name, []).append((member, grant))
        return grant

    def release_by_name(self, name: NodeName, member: Member, grant: Grant | None = None) -> None:
        """Undo `place_by_name`, or `place`; nothing happens for a removed node."""
        if name in self.row:
            self.release(self.row[name], member.task.request, member, grant)
        elif (member, grant) in self._absent.get(name, ()):
            self._absent[name].remove((member, grant))

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Changes inside are undone by the caller; this restores the placement order."""
        outer, before = self._trial_placements, list[tuple[int, int]]()
        placements, start, self._trial_placements = self._placements, len(self.changes), before
        try:
            yield
        finally:
            self._placements, self._trial_placements = placements, outer
            touched = sorted(set(self.changes[start:]))
            for row, last_placed in reversed(before):
                self.node_usage[row].last_placed = last_placed
            self._unwritten.update(touched)
            self.changes += touched

    def usage(self, row: int) -> Resources:
        return {resource: amount for resource, amount in self.node_usage[row].used.items() if amount}

    def idle_copy(self, *, backends_up: bool = False) -> Table:
        """A copy with no runs and every node healthy, also those that can be ordered. `backends_up`: without the nodes of backends that are down."""
        return Table(
            structs.replace(node, ready=True, not_ready_reason="", not_ready_code="", cordoned=False)
            for node in (*self._by_name.values(), *self._offered.values())
            if not (backends_up and node.not_ready_code)
        )

    def largest(self, resource: str) -> int:
        number = self.column_of(resource)
        column = self._capacity[number]
        return int(column.max()) if column.size else 0

    def scale_of(self, resource: str) -> tuple[int, NDArray[np.float64]]:
        """Right shift for amounts, and each node's shifted capacity (infinite where 0, so that its share is 0)."""
        found = self._scales.get(resource)
        if found is None:
            shift = 10 if resource in LARGE else 0
            column = self.column_of(resource)
            whole = (self._capacity[column] >> shift).astype(np.float64)
            whole[whole == 0] = np.inf
            found = self._scales[resource] = (shift, whole)
        return found

    def view(self, rows: Rows = ALL) -> Nodes:
        return Nodes(self, rows)

    def one_node(self, row: int) -> OneNode:
        """One row as integers; cached per generation."""
        if self._single_generation != self.generation:
            self._single_generation = self.generation
            self._single_rows = [None] * len(self.names)
        found = self._single_rows[row]
        if found is None:
            found = self._single_rows[row] = OneNode(self, row)
        return found

    def interned(self, key: Hashable, of: Callable[[Node], Hashable]) -> Interned:
        found = self._interned.get(key)
        if found is None:
            numbers: dict[Hashable, int] = {}
            ids = np.fromiter(
                (numbers.setdefault(of(node), len(numbers)) for node in self.nodes),
                dtype=np.intp,
                count=len(self.nodes),
            )
            found = self._interned[key] = Interned(ids, tuple(numbers))
        return found


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

    def as_list(self) -> list[Node]:
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

    def devices(self) -> list[DeviceSlots | None]:
        """Cores and GPUs of each node; None if unknown."""
        usage = self.table.node_usage
        rows = range(len(usage))[self._rows] if isinstance(self._rows, slice) else self._rows
        return [usage[row].devices for row in rows]

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
        self._used = table.node_usage[row].used

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
