"""Clocks: wall time behind the Clock port, a steady clock, and the time that retention may rely on."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from msgspec import Struct

from hodei.model.resources import format_duration

log = logging.getLogger("hodei.clock")
# A step back up to this is bridged: the clock stands still until the wall clock has caught up.
SMALL_STEP_MS = 10_000


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def steady_ms() -> int:
    """Independent of the wall clock. On Linux it also counts while the machine sleeps."""
    if sys.platform == "linux":
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
    return time.monotonic_ns() // 1_000_000


class SystemClock:
    """Wall time that bridges small steps back. After a larger one it stands still until the wall clock has caught up, or,
    if it `follows`, steps back too and counts it in `set_back_ms`: times that are now ahead have to be computed again."""

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


class TrustedTime(Struct, frozen=True):
    """Survives a restart. `held_ms`: for how long the wall clock has been `ahead_ms` ahead."""

    believed_ms: int
    held_ms: int = 0
    ahead_ms: int = 0


class RetentionClock:
    """Keeps a wrong wall clock from erasing history. A wall clock that jumps ahead by more than `bound_ms` is doubted; it is
    trusted again when it is back, or has kept that offset for `hold_ms`."""

    def __init__(self, time: TrustedTime, steady_ms: int, *, bound_ms: int, hold_ms: int) -> None:
        self.time = time
        self._steady_ms = steady_ms
        self._bound_ms, self._hold_ms = bound_ms, hold_ms

    @property
    def in_doubt(self) -> bool:
        return self.time.ahead_ms > 0

    @property
    def left_ms(self) -> int:
        """How much longer the wall clock is doubted."""
        return max(self._hold_ms - self.time.held_ms, 0) if self.in_doubt else 0

    def update(self, wall_ms: int, steady_ms: int) -> int:
        """Returns the time to use now."""
        passed = max(steady_ms - self._steady_ms, 0)
        self._steady_ms = steady_ms
        believed, before = self.time.believed_ms + passed, self.time
        ahead = wall_ms - believed
        if ahead <= self._bound_ms:
            if self.in_doubt:
                log.warning("the clock is back at the expected time: retention continues")
            self.time = TrustedTime(wall_ms)
        elif not self.in_doubt or abs(ahead - before.ahead_ms) > self._bound_ms:
            log.warning(
                "the clock is %s ahead of the expected time: retention does not trust it for now",
                format_duration(ahead // 1000 * 1000),
            )
            self.time = TrustedTime(believed, 0, ahead)
        elif before.held_ms + passed >= self._hold_ms:
            log.warning("the clock has kept its offset long enough: retention trusts it")
            self.time = TrustedTime(wall_ms)
        else:
            self.time = TrustedTime(believed, before.held_ms + passed, ahead)
        return self.time.believed_ms
