"""When to try again: backoff of jobs, circuit breakers of backends, and breakers of queues whose retries start nothing."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from typing import Literal

from msgspec import Struct

from hodei.engine.points import Trigger
from hodei.model.ids import JobId


class Backoff(Struct, frozen=True):
    """`base` times `factor` for each earlier try, at most `max`, plus up to `jitter` of itself (in thousandths)."""

    base_ms: int = 1000
    factor: int = 2
    max_ms: int = 60_000
    jitter_milli: int = 100

    def pause_ms(self, job: JobId, tries: int) -> int:
        pause: int = min(self.base_ms * self.factor ** min(max(tries - 1, 0), 40), self.max_ms)
        spread = pause * self.jitter_milli // 1000
        # Jitter from a checksum instead of a random source: a replay computes the same pause.
        return pause + (zlib.crc32(f"{job}/{tries}".encode()) % (spread + 1) if spread else 0)


class RetryPolicy(Struct, frozen=True):
    """`max_losses`: how often a job is started again after its run was lost. `gang_factor`: gangs of several members
    pause this many times longer. `repair_timeout_ms`: how long a gang without an assembly timeout waits for a missing
    member before it starts again as a whole."""

    failed_run: Backoff = Backoff()
    failed_start: Backoff = Backoff(max_ms=30_000)
    failed_plugin: Backoff = Backoff(max_ms=10_000)
    max_losses: int = 3
    gang_factor: int = 3
    repair_timeout_ms: int = 600_000


State = Literal["closed", "open", "half-open"]


class CircuitPolicy(Struct, frozen=True):
    failures: int = 3
    pauses: Backoff = Backoff(base_ms=5000, max_ms=300_000, jitter_milli=0)


class Circuit:
    """A circuit breaker: after repeated failures, calls pause, then one is let through as a test.

    `since_ms`: the first failure since the last success (0: none); `text`: its message."""

    def __init__(self, policy: CircuitPolicy | None = None) -> None:
        self.policy = policy or CircuitPolicy()
        self.failures = 0
        self.since_ms = 0
        self.until_ms = 0
        self.text = ""
        self._opened = 0

    @property
    def broken(self) -> bool:
        """Open or half-open."""
        return self._opened > 0

    def state(self, now_ms: int) -> State:
        if not self.broken:
            return "closed"
        return "open" if now_ms < self.until_ms else "half-open"

    def succeeded(self) -> bool:
        """Returns whether this closed the circuit."""
        was_broken = self.broken
        self.failures = self._opened = self.since_ms = self.until_ms = 0
        self.text = ""
        return was_broken

    def failed(self, now_ms: int, text: str) -> bool:
        """Returns whether this opened the circuit."""
        if not self.failures:
            self.since_ms, self.text = now_ms, text
        self.failures += 1
        if self.failures < self.policy.failures or (self.broken and now_ms < self.until_ms):
            return False
        self._opened += 1
        self.until_ms = now_ms + self.policy.pauses.pause_ms(0, self._opened)
        return self._opened == 1

    def next_ms(self, now_ms: int, every_ms: int) -> int:
        """When to call next: at the end of the pause, soon after a failure, else after `every_ms`."""
        if self.broken:
            return max(self.until_ms, now_ms)
        return now_ms + (min(self.policy.pauses.base_ms, every_ms) if self.failures else every_ms)


# While the cluster stays full, retries that only the passing of time calls for become less frequent.

FREES_CAPACITY: frozenset[Trigger] = frozenset({"run_ended", "node_joined", "node_changed", "job_ended"})
TICK_MS = 1000


class BreakerPolicy(Struct, frozen=True):
    """The breaker opens after `rounds` without a start within `within_ms`; the first pause is `pause_ms`. 0 rounds: never."""

    rounds: int = 10
    within_ms: int = 60_000
    pause_ms: int = 2000
    max_pause_ms: int = 30_000


class Breaker(Struct):
    """The breaker of one queue. While `open`, there is no timed retry before `until_ms`. `opened` counts the openings.
    `faults`: rounds with a failed plugin; its gangs pause together, until `faulty_until_ms`."""

    futile_rounds: int = 0
    first_ms: int = 0
    open: bool = False
    since_ms: int = 0
    pause_ms: int = 0
    until_ms: int = 0
    opened: int = 0
    faults: int = 0
    faulty_until_ms: int = 0


class Breakers:
    def __init__(self, policy: BreakerPolicy | None = None) -> None:
        self.policy = policy or BreakerPolicy()
        self.of: dict[str, Breaker] = {}

    def woken(self, triggers: Collection[Trigger]) -> None:
        """Close all breakers if capacity may have become free."""
        if self.of and not FREES_CAPACITY.isdisjoint(triggers):
            for breaker in self.of.values():
                _close(breaker)

    def allows(self, queue: str, now_ms: int) -> bool:
        """Whether the queue may be retried only because time has passed."""
        breaker = self.of.get(queue)
        return breaker is None or not breaker.open or breaker.until_ms <= now_ms

    def ticked(self, queue: str, started: int, now_ms: int) -> None:
        """Count a timed round that started so many gangs."""
        breaker = self.of.setdefault(queue, Breaker())
        if started or not self.policy.rounds:
            _close(breaker)
            return
        if not breaker.futile_rounds or (not breaker.open and now_ms - breaker.first_ms > self.policy.within_ms):
            breaker.futile_rounds, breaker.first_ms = 0, now_ms
        breaker.futile_rounds += 1
        if breaker.open:
            breaker.pause_ms = min(breaker.pause_ms * 2, self.policy.max_pause_ms)
        elif breaker.futile_rounds >= self.policy.rounds:
            breaker.open, breaker.since_ms, breaker.pause_ms = True, now_ms, self.policy.pause_ms
            breaker.opened += 1

    def next_ms(self, queue: str, now_ms: int, known_ms: int | None) -> int:
        """The time of the next timed retry. `known_ms`: when time makes a difference; None: unknown, so that no pause
        is safe."""
        breaker = self.of.get(queue)
        if breaker is None or not breaker.open or known_ms is None:
            if breaker is not None:
                breaker.until_ms = now_ms + TICK_MS
            return now_ms + TICK_MS
        breaker.until_ms = max(min(now_ms + breaker.pause_ms, known_ms), now_ms + TICK_MS)
        return breaker.until_ms

    def resume_ms(self, now_ms: int) -> int | None:
        """When the first pause ends."""
        return min((b.until_ms for b in self.of.values() if b.open and b.until_ms > now_ms), default=None)

    def after_fault(self, queue: str, now_ms: int, backoff: Backoff) -> int:
        """Until when a gang refused by a failed plugin backs off; one pause per queue, so that no gang is overtaken."""
        breaker = self.of.setdefault(queue, Breaker())
        if breaker.faulty_until_ms <= now_ms:
            if now_ms - breaker.faulty_until_ms > backoff.max_ms:
                breaker.faults = 0  # it has worked in between
            breaker.faults += 1
            breaker.faulty_until_ms = now_ms + backoff.pause_ms(0, breaker.faults)
        return breaker.faulty_until_ms

    def take_settings(self, other: Breakers) -> None:
        """Use another policy, with all breakers closed: retries may succeed under it."""
        self.policy = other.policy
        self.of.clear()


def _close(breaker: Breaker) -> None:
    breaker.futile_rounds, breaker.open, breaker.since_ms, breaker.pause_ms, breaker.until_ms = 0, False, 0, 0, 0
