"""A circuit breaker: whoever fails again and again is left alone for a while, then tried once, and trusted again if it went well.

Closed: all is well. Open: after `failures` in a row nothing is asked of it until its pause is over. Half-open: the pause is
over, and the next answer decides; one more failure doubles the pause.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hodei.control.lifecycle.retry import Backoff

State = Literal["closed", "open", "half-open"]


class CircuitPolicy(Struct, frozen=True):
    failures: int = 3
    pauses: Backoff = Backoff(base_ms=5000, max_ms=300_000, jitter_milli=0)


class Circuit:
    """`since_ms`: since when there is nothing but failures, 0 if the last answer was a good one; `text`: what the first of
    them said."""

    def __init__(self, policy: CircuitPolicy | None = None) -> None:
        self.policy = policy or CircuitPolicy()
        self.failures = 0
        self.since_ms = 0
        self.until_ms = 0
        self.text = ""
        self._opened = 0

    @property
    def broken(self) -> bool:
        """Open or half-open: not to be relied on."""
        return self._opened > 0

    def state(self, now_ms: int) -> State:
        if not self.broken:
            return "closed"
        return "open" if now_ms < self.until_ms else "half-open"

    def succeeded(self) -> bool:
        """True if it was broken until now."""
        mended = self.broken
        self.failures = self._opened = self.since_ms = self.until_ms = 0
        self.text = ""
        return mended

    def failed(self, now_ms: int, text: str) -> bool:
        """True if it is broken from now on."""
        if not self.failures:
            self.since_ms, self.text = now_ms, text
        self.failures += 1
        if self.failures < self.policy.failures or (self.broken and now_ms < self.until_ms):
            return False
        self._opened += 1
        self.until_ms = now_ms + self.policy.pauses.pause_ms(0, self._opened)
        return self._opened == 1

    def next_ms(self, now_ms: int, every_ms: int) -> int:
        """When to ask next: at the end of its pause, soon after a failure, else after the usual time."""
        if self.broken:
            return max(self.until_ms, now_ms)
        return now_ms + (min(self.policy.pauses.base_ms, every_ms) if self.failures else every_ms)
