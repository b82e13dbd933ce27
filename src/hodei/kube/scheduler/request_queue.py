"""Requests under way: as many at a time as the lane is wide, the others in order behind them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

_log = logging.getLogger(__name__)
Work = Callable[[], Coroutine[Any, Any, None]]


class RequestQueue:
    def __init__(self, width: int) -> None:
        self.width = width
        self._waiting: deque[Work] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self.drained = asyncio.Event()
        self.drained.set()
        # Called when hardly anybody waits any more.
        self.quiet: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        """How many are under way or waiting."""
        return len(self._waiting) + len(self._workers)

    def put(self, work: Work) -> None:
        self._waiting.append(work)
        self.drained.clear()
        if len(self._workers) < self.width:
            task = asyncio.create_task(self._serve())
            self._workers.add(task)
            task.add_done_callback(self._done)

    async def _serve(self) -> None:
        while self._waiting:
            work = self._waiting.popleft()
            try:
                await work()
            except asyncio.CancelledError:
                raise
            except Exception:
                _log.exception("a request to the cluster failed")  # the others go on
            if len(self._waiting) <= self.width:
                self.quiet()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._workers.discard(task)
        if not self._workers and not self._waiting:
            self.drained.set()

    async def finish(self, within_s: float) -> bool:
        """Wait until all are done; False if that takes too long."""
        try:
            async with asyncio.timeout(within_s):
                await self.drained.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self._waiting.clear()
        for task in list(self._workers):
            task.cancel()
