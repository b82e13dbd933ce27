"""The cluster as columns: one row per node in order of name, one column per resource.

Plugins see `Nodes` (`engine.columns`), which may stand for all rows or for a few.
Placing and releasing change the usage columns in place and leave a trace in `Table.changes`, so that a cached
answer is refreshed only for the rows that changed. A change of a node's own nature (capacity, labels, taints, health)
starts a new `generation`, in which every cached answer is void.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from hodei.engine.columns import ALL, LARGE, Interned, Ints, Mask, Nodes, OneNode, Rows
from hodei.engine.device_slots import DeviceSlots, wants_parts
from hodei.engine.topology_index import Kind, TopologyIndex
from hodei.engine.view import Member
from hodei.model.ids import NodeName
from hodei.model.node import Grant, Node
from hodei.model.resources import GPU, Resources

__all__ = ["Interned", "Ints", "Mask", "Nodes", "OneNode", "Rows", "Table", "promised"]

# The trace is cut (by a new generation) rather than let grow for ever.
_MAX_TRACE = 1_000_000
# More than this counts as this: sums of absurd requests must not leave the columns' 64 bits.
_MOST = 2**62


def promised(node: Node) -> Resources:
    """How much of each resource may be given away: what there is, times the overcommit ratio."""
    if not node.overcommit_percent:
        return node.capacity
    ratio = node.overcommit_percent
    return {resource: amount * ratio.get(resource, 100) // 100 for resource, amount in node.capacity.items()}


class _Holding:
    """What the runs on one node take of it."""

    __slots__ = ("grants", "kinds", "last_placed", "parts", "runs", "used")

    def __init__(self) -> None:
        self.used: Resources = {}
        self.runs = 0
        self.last_placed = 0
        self.kinds: dict[Kind, int] = {}
        self.parts: DeviceSlots | None = None
        self.grants: dict[Grant, int] = {}  # how often each is held now, to lay the parts anew when the node changes


class Table:
    """All nodes, and the only place where their usage changes."""

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
        self._ones: list[OneNode | None] = []
        self._ones_of = -1
        self._turns: list[tuple[int, int]] | None = None  # in a trial: whose turn it was before
        # What each row holds, in plain numbers; the columns follow when someone looks at them.
        self.holds: list[_Holding] = []
        self._gpus: Ints = np.zeros((0, 0), dtype=np.int64)
        self._unwritten: set[int] = set()
        self.residents = TopologyIndex()
        self.room: list[Resources] = []
        self._interned: dict[Hashable, Interned] = {}
        self._scales: dict[str, tuple[int, NDArray[np.float64]]] = {}
        self._known: dict[NodeName, Node] = {}
        self._absent: dict[NodeName, list[tuple[Resources, Member | None, Grant | None]]] = {}
        self._stale = False
        for node in nodes:
            self.put(node)

    # ------------------------------------------------------------------------------------- membership

    def put(self, node: Node) -> None:
        """Add a node, or replace what is known of it; its usage stays."""
        if self._known.get(node.name) != node:
            self._known[node.name] = node
            self._stale = True

    def remove(self, name: NodeName) -> None:
        if self._known.pop(name, None) is not None:
            self._stale = True

    def node(self, name: NodeName) -> Node | None:
        return self._known.get(name)

    def settle(self) -> None:
        """Lay the columns anew if nodes came, went or changed: once per cycle, however many did."""
        if not self._stale and len(self.changes) <= _MAX_TRACE:
            return
        self._stale = False
        names = sorted(self._known)
        columns = dict(self.column)
        for name in names:
            for resource in self._known[name].capacity:
                columns.setdefault(resource, len(columns))
        room = [promised(self._known[name]) for name in names]
        capacity = np.zeros((len(columns), len(names)), dtype=np.int64)
        for new, amounts in enumerate(room):
            for resource, amount in amounts.items():
                capacity[columns[resource], new] = amount
        for name, row in self.row.items():
            if name not in self._known:
                for kind, number in self.holds[row].kinds.items():
                    self.residents.left(kind, number)
        self.holds = [self.holds[self.row[name]] if name in self.row else _Holding() for name in names]
        self.names, self.nodes, self.room = names, [self._known[name] for name in names], room
        self.row = {name: row for row, name in enumerate(names)}
        self.column, self._capacity, self._free = columns, capacity, capacity.copy()
        self._runs, self._last_placed = np.zeros((2, len(names)), dtype=np.int64)
        self._unwritten = {row for row, held in enumerate(self.holds) if held.last_placed}
        self._lay_parts()
        self._void()
        for name in [name for name in self._absent if name in self.row]:
            for request, member, grant in self._absent.pop(name):
                self.place(self.row[name], request, member, grant)

    def _lay_parts(self) -> None:
        """The cores and GPUs of every node, without those that are held."""
        most = 0
        for node, held in zip(self.nodes, self.holds, strict=True):
            held.parts = DeviceSlots(node) if node.sockets or GPU in node.capacity else None
            if held.parts is not None:
                most = max(most, len(held.parts.gpus))
                for grant, times in held.grants.items():
                    for _ in range(times):
                        held.parts.take(grant)
        self._gpus = np.full((len(self.nodes), most), -1, dtype=np.int64)
        for row, held in enumerate(self.holds):
            if held.parts is not None:
                self._gpus[row, : len(held.parts.gpus)] = list(held.parts.gpus.values())

    def _void(self) -> None:
        self.generation += 1
        self.changes.clear()
        self._interned.clear()
        self._scales.clear()

    def column_of(self, resource: str) -> int:
        """The column of a resource; a name that no node has gets an empty column of its own, in arrays laid anew: ask for
        the column first, then for the array."""
        found = self.column.get(resource)
        if found is None:
            found = self.column[resource] = len(self.column)
            empty = np.zeros((1, self._capacity.shape[1]), dtype=np.int64)
            self._capacity = np.concatenate([self._capacity, empty])
            self._free = np.concatenate([self._free, empty])
        return found

    # ------------------------------------------------------------------------------------------ usage

    def place(
        self, row: int, request: Resources, member: Member | None = None, grant: Grant | None = None
    ) -> Grant | None:
        """Room on a node, and the parts of it that are the member's own: `grant` if it has them already, else chosen."""
        held = self.holds[row]
        used = held.used
        for resource, amount in request.items():
            used[resource] = used.get(resource, 0) + amount
        held.runs += 1
        self._placements += 1
        if self._turns is not None:
            self._turns.append((row, held.last_placed))
        held.last_placed = self._placements
        if member is not None:
            kind = self.residents.kind_of(member, self)
            held.kinds[kind] = held.kinds.get(kind, 0) + 1
            self.residents.moved(kind, row, 1, self)
            if held.parts is not None and grant is None and wants_parts(member.task):
                grant = held.parts.find(member.task)
        if grant is not None:
            held.grants[grant] = held.grants.get(grant, 0) + 1
            if held.parts is not None:
                held.parts.take(grant)
        self.changes.append(row)
        self._unwritten.add(row)
        return grant

    def release(self, row: int, request: Resources, member: Member | None = None, grant: Grant | None = None) -> None:
        """The opposite of `place`, with what that returned."""
        held = self.holds[row]
        for resource, amount in request.items():
            held.used[resource] = held.used.get(resource, 0) - amount
        held.runs -= 1
        if member is not None:
            kind = self.residents.kind_of(member, self)
            held.kinds[kind] -= 1
            if not held.kinds[kind]:
                del held.kinds[kind]
            self.residents.moved(kind, row, -1, self)
        if grant is not None and held.grants.get(grant):
            held.grants[grant] -= 1
            if not held.grants[grant]:
                del held.grants[grant]
            if held.parts is not None:
                held.parts.give(grant, self.nodes[row])
        self.changes.append(row)
        self._unwritten.add(row)

    def _write(self) -> None:
        """Bring the columns up to what the rows hold."""
        for row in self._unwritten:
            held = self.holds[row]
            for resource, amount in held.used.items():
                column = self.column_of(resource)
                self._free[column, row] = self._capacity[column, row] - (amount if amount < _MOST else _MOST)
            self._runs[row] = held.runs
            self._last_placed[row] = held.last_placed
            if held.parts is not None and held.parts.gpus:
                self._gpus[row, : len(held.parts.gpus)] = list(held.parts.gpus.values())
        self._unwritten.clear()

    @property
    def free(self) -> Ints:
        if self._unwritten:
            self._write()
        return self._free

    @property
    def gpus(self) -> Ints:
        """What is free of each GPU of each node, in thousandths; -1 where a node has no more of them."""
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

    def hold(
        self, name: NodeName, request: Resources, member: Member | None = None, grant: Grant | None = None
    ) -> Grant | None:
        """A run known from before holds room on a node, which may not have joined yet."""
        if name in self.row:
            return self.place(self.row[name], request, member, grant)
        self._absent.setdefault(name, []).append((request, member, grant))
        return grant

    def let_go(
        self, name: NodeName, request: Resources, member: Member | None = None, grant: Grant | None = None
    ) -> None:
        """The opposite of `hold` and `place`, by name; a node that is gone has nothing to give back."""
        if name in self.row:
            self.release(self.row[name], request, member, grant)
        elif (request, member, grant) in self._absent.get(name, ()):
            self._absent[name].remove((request, member, grant))

    @contextmanager
    def trial(self) -> Iterator[None]:
        """What is placed and released inside leaves no mark, not even in the order of turns."""
        outer, turns = self._turns, list[tuple[int, int]]()
        placements, start, self._turns = self._placements, len(self.changes), turns
        try:
            yield
        finally:
            self._placements, self._turns = placements, outer
            touched = sorted(set(self.changes[start:]))
            for row, turn in reversed(turns):
                self.holds[row].last_placed = turn
            self._unwritten.update(touched)
            self.changes += touched

    def usage(self, row: int) -> Resources:
        return {resource: amount for resource, amount in self.holds[row].used.items() if amount}

    def at_best(self, *, backends_up: bool = False) -> Table:
        """A copy with nothing running on it and every node healthy: what the cluster could do at best. `backends_up`:
        without the nodes of backends that are down."""
        return Table(
            structs.replace(node, ready=True, not_ready_reason="", not_ready_code="", cordoned=False)
            for node in self._known.values()
            if not (backends_up and node.not_ready_code)
        )

    def largest(self, resource: str) -> int:
        number = self.column_of(resource)
        column = self._capacity[number]
        return int(column.max()) if column.size else 0

    def scale_of(self, resource: str) -> tuple[int, NDArray[np.float64]]:
        """How far amounts are shifted down before they are scaled, and each node's capacity after it (infinite where
        there is none, so that its share is 0)."""
        found = self._scales.get(resource)
        if found is None:
            shift = 10 if resource in LARGE else 0
            column = self.column_of(resource)
            whole = (self._capacity[column] >> shift).astype(np.float64)
            whole[whole == 0] = np.inf
            found = self._scales[resource] = (shift, whole)
        return found

    # ------------------------------------------------------------------------------------------ views

    def view(self, rows: Rows = ALL) -> Nodes:
        return Nodes(self, rows)

    def one(self, row: int) -> OneNode:
        """One row in plain numbers; made once for each row and layout."""
        if self._ones_of != self.generation:
            self._ones_of = self.generation
            self._ones = [None] * len(self.names)
        found = self._ones[row]
        if found is None:
            found = self._ones[row] = OneNode(self, row)
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
