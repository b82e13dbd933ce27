"""Which volumes are attached where: for each node the different volumes that its members use, counted by kind.

A volume that several members of a node use counts once. The counts are made from all residents when somebody first asks
(and again when the nodes were laid anew), and then kept up with each placing and release.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hodei.model.volume import Volume

if TYPE_CHECKING:
    from hodei.engine.nodes import Table

Ints = NDArray[np.int64]


class Attachments:
    """What the residents of a table have attached to each node. `version` counts the changes."""

    __slots__ = ("_counts", "_size", "_users", "generation", "version")

    def __init__(self, table: Table) -> None:
        self.generation = table.generation
        self.version = 0
        self._size = len(table.names)
        self._users: dict[str, dict[int, int]] = {}  # by handle: how many members use it on which row
        self._counts: dict[str, Ints] = {}  # by limit: how many of the kind each row has
        for row, held in enumerate(table.holds):
            for kind, number in held.kinds.items():
                if kind.volumes:
                    self.moved(kind.volumes, row, number)

    def moved(self, volumes: Iterable[Volume], row: int, by: int) -> None:
        """So many members with these volumes came to a row (below 0: left it)."""
        self.version += 1
        for volume in volumes:
            users = self._users.setdefault(volume.handle, {})
            before = users.get(row, 0)
            users[row] = before + by
            if not users[row]:
                del users[row]
            if volume.limit and bool(before) != bool(before + by):
                self.attached(volume.limit)[row] += 1 if by > 0 else -1
            if not users:
                del self._users[volume.handle]

    def attached(self, limit: str) -> Ints:
        """How many volumes of that kind each node has."""
        found = self._counts.get(limit)
        if found is None:
            found = self._counts[limit] = np.zeros(self._size, dtype=np.int64)
        return found

    def rows_of(self, handle: str) -> list[int]:
        """The nodes on which this one is in use."""
        return sorted(self._users.get(handle, ()))
