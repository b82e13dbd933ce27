"""Which time retention may reckon with. A wall clock that is wrong must not erase history.

What is believed goes on with the steady clock, and follows the wall clock as long as the two agree. When the wall clock is
suddenly far ahead (it was set, the machine came up with a wrong one, or the server was off for long), what is believed
stays behind until the wall clock has kept to its word for `hold_ms` of running, or an operator says that it is right.
It is kept in the store, so that a restart is no confirmation. A clock that goes back is believed at once: then nothing is
forgotten too early.
"""

from __future__ import annotations

import logging

from msgspec import Struct

from hodei.model.quantity import format_duration

log = logging.getLogger("hodei.retention")


class Kept(Struct, frozen=True):
    """What a restart must find again. `held_ms`: for how long the wall clock has been `ahead_ms` ahead."""

    believed_ms: int
    held_ms: int = 0
    ahead_ms: int = 0


class RetentionClock:
    """`bound_ms`: how far the wall clock may be ahead without doubt."""

    def __init__(self, kept: Kept, steady_ms: int, *, bound_ms: int, hold_ms: int) -> None:
        self.kept = kept
        self._steady_ms = steady_ms
        self._bound_ms, self._hold_ms = bound_ms, hold_ms

    @property
    def in_doubt(self) -> bool:
        return self.kept.ahead_ms > 0

    @property
    def left_ms(self) -> int:
        """How much longer the wall clock is doubted."""
        return max(self._hold_ms - self.kept.held_ms, 0) if self.in_doubt else 0

    def look(self, wall_ms: int, steady_ms: int) -> int:
        """The time to reckon with now."""
        passed = max(steady_ms - self._steady_ms, 0)
        self._steady_ms = steady_ms
        believed, kept = self.kept.believed_ms + passed, self.kept
        ahead = wall_ms - believed
        if ahead <= self._bound_ms:
            if self.in_doubt:
                log.warning("the clock is back where it was expected: retention goes on")
            self.kept = Kept(wall_ms)
        elif not self.in_doubt or abs(ahead - kept.ahead_ms) > self._bound_ms:
            log.warning(
                "the clock is %s ahead of what was expected: nothing is forgotten for that reason, for now",
                format_duration(ahead // 1000 * 1000),
            )
            self.kept = Kept(believed, 0, ahead)
        elif kept.held_ms + passed >= self._hold_ms:
            log.warning("the clock has kept to its word: retention goes on by it")
            self.kept = Kept(wall_ms)
        else:
            self.kept = Kept(believed, kept.held_ms + passed, ahead)
        return self.kept.believed_ms
