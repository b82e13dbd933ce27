"""How many containers a host takes at once. Starts beyond that wait for their turn."""

from __future__ import annotations

import asyncio
from collections import deque

from hodei.backends.docker.run_table import Tracked


class ContainerSlots:
    """`most` places, 0 for no limit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        self._waiting: deque[tuple[Tracked, asyncio.Future[None]]] = deque()

    async def enter(self, tracked: Tracked) -> None:
        """Wait for a place; one that is told to stop meanwhile goes on without."""
        if self._taken >= self._most > 0 and tracked.stopping is None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((tracked, turn))
            await turn
        else:
            self.take(tracked)

    def take(self, tracked: Tracked) -> None:
        """It is there already, so that nobody asked."""
        if not tracked.has_place:
            tracked.has_place = True
            self._taken += 1

    def leave(self, tracked: Tracked) -> None:
        if tracked.has_place:
            tracked.has_place = False
            self._taken -= 1
        self.look()

    def look(self) -> None:
        """Let in whoever can, and out whoever is not wanted any more."""
        staying: deque[tuple[Tracked, asyncio.Future[None]]] = deque()
        while self._waiting:
            tracked, turn = self._waiting.popleft()
            if turn.done():
                continue
            if tracked.stopping is not None:
                turn.set_result(None)
            elif self._taken < self._most:
                self.take(tracked)
                turn.set_result(None)
            else:
                staying.append((tracked, turn))
        self._waiting = staying
