"""Attached volumes per node, counted by kind, and volumes assumed for claims.

A volume that several members of a node use counts once. Counts are built on first use (and again for a new table
generation), then updated with each placement and release.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hodei.model.node import Volume

if TYPE_CHECKING:
    from hodei.engine.nodes import Table

Ints = NDArray[np.int64]


class Attachments:
    """Volumes attached to each node. `version` counts the changes."""

    __slots__ = ("_counts", "_size", "_users", "generation", "version")

    def __init__(self, table: Table) -> None:
        self.generation = table.generation
        self.version = 0
        self._size = len(table.names)
        self._users: dict[str, dict[int, int]] = {}  # by handle: members using it per row
        self._counts: dict[str, Ints] = {}  # by limit: volumes of that kind per row
        for row, held in enumerate(table.holds):
            for kind, number in held.kinds.items():
                if kind.volumes:
                    self.moved(kind.volumes, row, number)

    def moved(self, volumes: Iterable[Volume], row: int, by: int) -> None:
        """That many members with these volumes were placed on a row (below 0: released)."""
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
        """Volumes of that kind per node."""
        found = self._counts.get(limit)
        if found is None:
            found = self._counts[limit] = np.zeros(self._size, dtype=np.int64)
        return found

    def rows_of(self, handle: str) -> list[int]:
        return sorted(self._users.get(handle, ()))


class AssumedVolumes:
    """Free volumes assigned to claims by decisions, until the cluster shows the binding or the decision fails.
    `version` counts the changes."""

    def __init__(self) -> None:
        self.version = 0
        self._claim_of: dict[str, str] = {}
        self._volume_of: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._claim_of)

    def take(self, volume: str, claim: str) -> None:
        self.release(claim)
        self._claim_of[volume], self._volume_of[claim] = claim, volume
        self.version += 1

    def release(self, claim: str) -> None:
        volume = self._volume_of.pop(claim, None)
        if volume is not None:
            del self._claim_of[volume]
            self.version += 1

    def of(self, claim: str) -> str:
        """The volume assigned to a claim; "" for none."""
        return self._volume_of.get(claim, "")

    def is_free(self, volume: str, claim: str) -> bool:
        return self._claim_of.get(volume, claim) == claim

    def concerns(self, wanted: Volume) -> bool:
        """Whether one of its choices is assigned to another claim."""
        return any(not self.is_free(choice.name, wanted.handle) for choice in wanted.candidates)

    def claims(self) -> dict[str, str]:
        return dict(self._volume_of)
