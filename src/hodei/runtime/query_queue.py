"""Questions whose answer costs the loop some time: one after another, and never more than half of it.

After each answer the loop has as long for everyone else as the answer took, so that people who look do not keep those who
submit waiting. Who asks what others ask already gets the same answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")
# What one answer may cost without a rest after it: shorter ones would wait for the timer longer than they take.
_SHORT_S = 0.0005


class QueryQueue:
    def __init__(self) -> None:
        self._waiting: deque[tuple[Hashable, Callable[[], Any]]] = deque()
        self._asked: dict[Hashable, asyncio.Future[Any]] = {}
        self._task: asyncio.Task[None] | None = None

    async def ask(self, key: Hashable, answer: Callable[[], T]) -> T:
        """What `answer` returns or raises, at its turn. `key`: what is asked; equal ones that wait share one answer."""
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = asyncio.get_running_loop().create_future()
            self._waiting.append((key, answer))
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._serve())
        # One who gives up leaves it to the others.
        return await asyncio.shield(asked)

    async def _serve(self) -> None:
        while self._waiting:
            key, answer = self._waiting.popleft()
            asked = self._asked.pop(key)
            began = time.thread_time()
            try:
                asked.set_result(answer())
            except Exception as error:
                asked.set_exception(error)
                asked.exception()  # so that nobody is warned of it when all who asked have gone
            spent = time.thread_time() - began
            await asyncio.sleep(spent if spent > _SHORT_S else 0)
