"""The real clock, behind the Clock port; and a steady one that nobody can set."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

log = logging.getLogger("hodei.clock")
# A step back of up to so much is waited out: times stand still that long, and nothing that follows is before it.
SMALL_STEP_MS = 10_000


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def steady_ms() -> int:
    """Time that passes, whatever the wall clock is set to; a machine that sleeps goes on counting where that is known."""
    if sys.platform == "linux":
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
    return time.monotonic_ns() // 1_000_000


class SystemClock:
    """Wall time. A small step back is waited out. After a larger one it stands still until the wall has caught up, or,
    if it `follows`, goes back with the wall at once and says by how much in `set_back_ms`: whoever reckons with times
    that were ahead begins anew then."""

    def __init__(self, *, follows: bool = False, wall_ms: Callable[[], int] = wall_ms) -> None:
        self._wall_ms, self._follows = wall_ms, follows
        self._last = 0
        self.set_back_ms = 0

    def now_ms(self) -> int:
        now = self._wall_ms()
        back = self._last - now
        if back > 0:
            if not self._follows or back <= SMALL_STEP_MS:
                return self._last
            self.set_back_ms += back
            log.warning("the clock was set back by %d s", back // 1000)
        self._last = now
        return now
