"""When the cluster stays full, tries that nothing but the clock calls for are made less and less often.

Those who wait are woken by facts, and a fact that could help closes the breaker at once: nothing that has become possible
is put off. What is left to save is trying again every second because time alone might help. After `rounds` such rounds in
vain a line's breaker opens, and each further round in vain doubles its pause, up to `max_pause_ms`; but never beyond the
moment at which time is known to make a difference.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from hodei.control.lifecycle.retry import Backoff
from hodei.engine.points import Trigger

FREES_ROOM: frozenset[Trigger] = frozenset({"run_ended", "node_joined", "node_changed", "job_ended"})
TICK_MS = 1000


class BreakerPolicy(Struct, frozen=True):
    """`rounds` in vain within `within_ms` open it; the first pause is `pause_ms`. 0 rounds: it never opens."""

    rounds: int = 10
    within_ms: int = 60_000
    pause_ms: int = 2000
    max_pause_ms: int = 30_000


class Breaker(Struct):
    """Of one line. `until_ms`: no try before that for the clock's sake, while it is `open`. `opened`: how often it has.
    `faults` is for those whom a broken plugin keeps from being placed: all of a line pause until `mended_ms` together."""

    vain: int = 0
    first_ms: int = 0
    open: bool = False
    since_ms: int = 0
    pause_ms: int = 0
    until_ms: int = 0
    opened: int = 0
    faults: int = 0
    mended_ms: int = 0


class Breakers:
    def __init__(self, policy: BreakerPolicy | None = None) -> None:
        self.policy = policy or BreakerPolicy()
        self.of: dict[str, Breaker] = {}

    def woken(self, triggers: Collection[Trigger]) -> None:
        """Room may have become free, or the cluster is not what it was: all are closed."""
        if self.of and not FREES_ROOM.isdisjoint(triggers):
            for breaker in self.of.values():
                _close(breaker)

    def lets_try(self, line: str, now_ms: int) -> bool:
        """Whether a line may be tried again for no other reason than that time has passed."""
        breaker = self.of.get(line)
        return breaker is None or not breaker.open or breaker.until_ms <= now_ms

    def ticked(self, line: str, started: int, now_ms: int) -> None:
        """A round that the clock called for is over."""
        breaker = self.of.setdefault(line, Breaker())
        if started or not self.policy.rounds:
            _close(breaker)
            return
        if not breaker.vain or (not breaker.open and now_ms - breaker.first_ms > self.policy.within_ms):
            breaker.vain, breaker.first_ms = 0, now_ms
        breaker.vain += 1
        if breaker.open:
            breaker.pause_ms = min(breaker.pause_ms * 2, self.policy.max_pause_ms)
        elif breaker.vain >= self.policy.rounds:
            breaker.open, breaker.since_ms, breaker.pause_ms = True, now_ms, self.policy.pause_ms
            breaker.opened += 1

    def next_ms(self, line: str, now_ms: int, known_ms: int | None) -> int:
        """When the clock calls for the next try. `known_ms`: when time is known to make a difference (None: it is not
        known when, so that no pause is safe)."""
        breaker = self.of.get(line)
        if breaker is None or not breaker.open or known_ms is None:
            if breaker is not None:
                breaker.until_ms = now_ms + TICK_MS
            return now_ms + TICK_MS
        breaker.until_ms = max(min(now_ms + breaker.pause_ms, known_ms), now_ms + TICK_MS)
        return breaker.until_ms

    def resume_ms(self, now_ms: int) -> int | None:
        """When the first of the lines that are paused now is to be tried for the clock's sake."""
        return min((b.until_ms for b in self.of.values() if b.open and b.until_ms > now_ms), default=None)

    def after_fault(self, line: str, now_ms: int, backoff: Backoff) -> int:
        """Until when a gang that a broken plugin has refused steps aside. The pause belongs to the line and not to the
        gang: nobody is tried again sooner than one who came before it or counts for more."""
        breaker = self.of.setdefault(line, Breaker())
        if breaker.mended_ms <= now_ms:
            if now_ms - breaker.mended_ms > backoff.max_ms:
                breaker.faults = 0  # it has worked in between
            breaker.faults += 1
            breaker.mended_ms = now_ms + backoff.pause_ms(0, breaker.faults)
        return breaker.mended_ms

    def take_settings(self, other: Breakers) -> None:
        """From now on by another's settings, and all closed: what was in vain may not be any more."""
        self.policy = other.policy
        self.of.clear()


def _close(breaker: Breaker) -> None:
    breaker.vain, breaker.open, breaker.since_ms, breaker.pause_ms, breaker.until_ms = 0, False, 0, 0, 0
