"""When to try again: growing pauses with a little spread, the same for the same job and attempt on every replay."""

from __future__ import annotations

import zlib

from msgspec import Struct

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
        # Spread without a random source: a checksum of who and how often, so that a replay gives the same pause.
        return pause + (zlib.crc32(f"{job}/{tries}".encode()) % (spread + 1) if spread else 0)


class RetryPolicy(Struct, frozen=True):
    """`max_losses`: how often a job may be started again after its run was lost through no fault of its own.
    `gang_factor`: how many times longer gangs of several members pause. `repair_patience_ms`: how long a gang without an
    assembly timeout of its own may wait for a place for a missing member before it starts again as a whole."""

    failed_run: Backoff = Backoff()
    failed_start: Backoff = Backoff(max_ms=30_000)
    failed_plugin: Backoff = Backoff(max_ms=10_000)
    max_losses: int = 3
    gang_factor: int = 3
    repair_patience_ms: int = 600_000
