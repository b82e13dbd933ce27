"""Search for the earliest start of a gang, by the availability profile and all filters.

The result of a request per node is cached, and recomputed for nodes that changed or where a run passed its estimate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import numpy as np

from hodei.engine.availability import FOREVER, AvailabilityProfile, StartReservation
from hodei.engine.cycle import Engine
from hodei.engine.nodes import Ints, Mask, Table
from hodei.engine.view import Gang, View
from hodei.model.ids import NodeName
from hodei.model.resources import Resources

_CACHED = 256
# Members may find nodes at different times: repeat until all agree on one start.
_ROUNDS = 50
# Below this many nodes plain Python is faster than arrays.
_FEW_NODES = 8


class _FreeTimes:
    """For one request: when each node has capacity, if nothing more starts; 0 for now, FOREVER for never."""

    __slots__ = ("_engine", "_generation", "_request", "_seen", "_until", "at_ms")

    def __init__(self, engine: Engine, request: Resources) -> None:
        self._engine, self._request = engine, request
        self._generation, self._seen = -1, 0
        self.at_ms: Ints = np.zeros(0, dtype=np.int64)
        self._until: Ints = np.zeros(0, dtype=np.int64)

    def refresh(self, availability: AvailabilityProfile, now_ms: int) -> None:
        table = self._engine.table
        if self._generation != table.generation:
            self._generation = table.generation
            self.at_ms, self._until = np.zeros((2, len(table.names)), dtype=np.int64)
            rows = set(range(len(table.names)))
        else:
            rows = set(table.changes[self._seen :])
            overdue = self._until < now_ms
            if overdue.any():
                rows.update(np.flatnonzero(overdue).tolist())
        self._seen = len(table.changes)
        for row in rows:
            self.at_ms[row], self._until[row] = availability.earliest_unclaimed(table.names[row], self._request, now_ms)


class StartSearch:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: OrderedDict[tuple[tuple[str, int], ...], _FreeTimes] = OrderedDict()

    def soonest(self, gang: Gang, view: View) -> StartReservation | None:
        """The earliest start at which every needed member has a node; None if no expected end frees enough capacity.

        Each member gets the node that is free first; all start together when the last has one. Affinity to other jobs
        at that time is unknown, so it is checked again at the start.
        """
        availability = view.availability
        assert availability is not None, "start reservations need an availability profile"
        duration_ms = gang.estimate_ms or FOREVER
        start_ms = view.now_ms
        for _ in range(_ROUNDS):
            found = self._together(gang, view, availability, duration_ms, start_ms)
            if found is None:
                return None
            at_ms, taken = found
            if at_ms <= start_ms or not availability.claimed:
                end_ms = min(at_ms + duration_ms, FOREVER)
                return StartReservation(gang.id, at_ms, end_ms, tuple(sorted(taken.items())), view.now_ms)
            start_ms = at_ms
        return None

    def _together(
        self, gang: Gang, view: View, availability: AvailabilityProfile, duration_ms: int, after_ms: int
    ) -> tuple[int, dict[NodeName, Resources]] | None:
        """Nodes for all needed members, none before `after_ms`, and the time when the last is free."""
        table, start_ms = self._engine.table, after_ms
        if gang.size == 1 and len(table.names) <= _FEW_NODES:
            return self._alone(gang, view, availability, duration_ms, after_ms)
        taken: dict[NodeName, Resources] = {}
        at: dict[int, Ints] = {}
        for kind, _, member in gang.needed_members():
            request = member.needs

            def on(row: int, request: Resources) -> int:
                name = table.names[row]
                found = availability.earliest(
                    name, request, duration_ms, view.now_ms, gang.id, gang.job.project, after_ms
                )
                return FOREVER if found is None else found

            if kind not in at:
                at[kind] = self._at(request, self._engine.open_rows(gang, kind, view), view, availability, after_ms)
                for name in availability.claimed:
                    row = table.row.get(name)
                    if row is not None and at[kind][row] < FOREVER:
                        at[kind][row] = on(row, request)
                for name, held in taken.items():
                    row = table.row[name]
                    if at[kind][row] < FOREVER:
                        at[kind][row] = on(row, _plus(request, held))
            times = at[kind]
            if not times.size:
                return None
            # The first by name that is free by then, else the one that is free first.
            row = int((times <= start_ms).argmax())
            if times[row] > start_ms:
                row = int(times.argmin())
            if times[row] >= FOREVER:
                return None
            start_ms = max(start_ms, int(times[row]))
            name = table.names[row]
            taken[name] = _plus(request, taken.get(name, {}))
            if gang.size > 1:
                for other, column in at.items():
                    request = {r: a for r, a in gang.members[other].task.request.items() if a}
                    if column[row] < FOREVER:
                        column[row] = on(row, _plus(request, taken[name]))
        return start_ms, taken

    def _alone(
        self, gang: Gang, view: View, availability: AvailabilityProfile, duration_ms: int, after_ms: int
    ) -> tuple[int, dict[NodeName, Resources]] | None:
        """The same for one member and few nodes; ties go to the first name."""
        ((kind, _, member),) = gang.needed_members()
        request = member.needs
        open_rows = self._engine.open_rows(gang, kind, view)
        best: tuple[int, NodeName] | None = None
        for row, name in enumerate(self._engine.table.names):
            if open_rows.item(row):
                at_ms = availability.earliest(
                    name, request, duration_ms, view.now_ms, gang.id, gang.job.project, after_ms
                )
                if at_ms is not None and (best is None or at_ms < best[0]):
                    best = (at_ms, name)
        return None if best is None else (best[0], {best[1]: request})

    def _at(
        self, request: Resources, open_rows: Mask, view: View, availability: AvailabilityProfile, after_ms: int
    ) -> Ints:
        key = tuple(sorted(request.items()))
        free_times = self._kept.get(key)
        if free_times is None:
            free_times = self._kept[key] = _FreeTimes(self._engine, request)
            if len(self._kept) > _CACHED:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        free_times.refresh(availability, view.now_ms)
        return np.where(open_rows, np.maximum(free_times.at_ms, after_ms), FOREVER)


def most_free(table: Table, resource: str, without: Collection[int] = ()) -> int:
    """The largest amount free on one node, except on the rows in `without`."""
    if len(table.names) <= _FEW_NODES:
        most = 0
        for row, allocatable in enumerate(table.allocatable):
            if row not in without:
                most = max(most, allocatable.get(resource, 0) - table.node_usage[row].used.get(resource, 0))
        return most
    column = table.column_of(resource)  # first: a new column replaces the array
    free = table.free[column]
    if without:
        free = free.copy()
        free[list(without)] = 0
    return int(free.max())


def _plus(some: Resources, more: Resources) -> Resources:
    return {resource: some.get(resource, 0) + more.get(resource, 0) for resource in {**some, **more}}
