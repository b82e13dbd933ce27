"""The open connections, by the place that they come from. One place has its share and no more; when that is used up, its
connection that has been idle longest makes room, and only if none is idle is the new one turned away.

So a client that opens connections and lets them lie takes the room from itself alone, and a client that works keeps its own.
"""

from __future__ import annotations

from typing import Protocol


class Connected(Protocol):
    @property
    def idle(self) -> bool:
        """Whether no request is being answered on it."""

    def drop(self) -> None:
        """Close it now. It leaves the crowd by itself, a little later."""


class OpenConnections:
    """`each` 0: no limit for one place; the place "" (a Unix socket) has none."""

    def __init__(self, total: int, each: int) -> None:
        self.total, self.each = total, each
        self._of: dict[str, dict[Connected, None]] = {}  # in the order of their latest requests
        self.count = 0

    def enter(self, connection: Connected, place: str) -> bool:
        """False if there is no room for it; it is not in the crowd then."""
        mine = self._of.get(place, {})
        if self.each and place and len(mine) >= self.each and not self._drop_one(place):
            return False
        if self.count >= self.total:
            largest = max(self._of, key=lambda of: len(self._of[of]))
            # A place with fewer connections than the largest has a better claim; one of the largest itself has none.
            if not self._drop_one(largest):
                return False
        self._of.setdefault(place, {})[connection] = None
        self.count += 1
        return True

    def worked(self, connection: Connected, place: str) -> None:
        """A request has come on it: it is the last to make room now."""
        mine = self._of.get(place)
        if mine is not None and connection in mine:
            del mine[connection]
            mine[connection] = None

    def leave(self, connection: Connected, place: str) -> None:
        mine = self._of.get(place)
        if mine is not None and connection in mine:
            del mine[connection]
            self.count -= 1
            if not mine:
                del self._of[place]

    def _drop_one(self, place: str) -> bool:
        for connection in self._of.get(place, ()):
            if connection.idle:
                self.leave(connection, place)
                connection.drop()
                return True
        return False
