"""Looking at files of the runs' own, from a thread of its own: a disk that does not answer must hold up nobody else.

All other files that we touch are below our home. These may lie on any disk, one behind a dead network included; then
looks stay without an answer, and everything else goes on.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable

PATIENCE_S = 0.05

# Time of change in ns, number and size: what tells one state of a file from the next. None: there is no such file.
Seen = tuple[int, int, int]


class ProbeThread:
    """One thread, started with the first look."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asked: queue.SimpleQueue[tuple[str, Callable[[Seen | None], object]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._busy_since_s = 0.0

    def ask(self, path: str, tell: Callable[[Seen | None], None]) -> None:
        """`tell` is called in the loop, later; never if the disk does not answer."""

        def answer(seen: Seen | None) -> None:
            try:
                self._loop.call_soon_threadsafe(tell, seen)
            except RuntimeError:
                pass  # the loop has been closed: nobody wants to know any more

        self._put(path, answer)

    def now(self, path: str) -> Seen | None:
        """The answer at once; None also if the disk takes longer than anyone else should have to wait."""
        if self._busy_since_s and time.monotonic() - self._busy_since_s > PATIENCE_S:
            return None
        answer: queue.SimpleQueue[Seen | None] = queue.SimpleQueue()
        self._put(path, answer.put)
        try:
            return answer.get(timeout=PATIENCE_S)
        except queue.Empty:
            return None

    def _put(self, path: str, answer: Callable[[Seen | None], object]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="looks at checkpoints", daemon=True)
            self._thread.start()
        self._asked.put((path, answer))

    def _look(self) -> None:
        while True:
            path, answer = self._asked.get()
            self._busy_since_s = time.monotonic()
            seen = look(path)
            self._busy_since_s = 0.0
            answer(seen)


def look(path: str) -> Seen | None:
    try:
        stat = os.stat(path)
    except (OSError, ValueError):
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
