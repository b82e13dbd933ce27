"""What ended long ago is forgotten: jobs with their runs and events, idempotency keys, rows of the audit; and the room that
they took is given back to the file system.

All of it in small bites between two commits, each of some milliseconds, until nothing is left to do. What counts as long
ago is said by `credible`, not by the wall clock alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from hodei.model.effects import SaveValue
from hodei.model.errors import Unavailable
from hodei.model.resources import format_duration, format_time
from hodei.ports import JobQuery
from hodei.runtime.clock import steady_ms

# ------------------------------------------------------------------------------------- retention clock
# Which time retention may reckon with. A wall clock that is wrong must not erase history.


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


# ----------------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from hodei.runtime.service import Service

log = logging.getLogger("hodei.retention")
_EVERY_S = 60.0
_NOTE = "clock"
_DAY_MS = 86_400_000
# One bite holds up commits for about so long; how much that is, the last bite has shown.
_BITE_S = 0.02
_SMALLEST, _FIRST, _LARGEST = 20, 200, 2000


class Retention:
    """`retention_ms` and `audit_retention_ms`: 0 keeps for ever. `trust_clock`: the wall clock is right, whatever it says."""

    def __init__(
        self,
        service: Service,
        *,
        retention_ms: int,
        audit_retention_ms: int,
        trust_clock: bool = False,
        steady_ms: Callable[[], int] = steady_ms,
    ) -> None:
        self._service, self._steady_ms, self._trust = service, steady_ms, trust_clock
        self._retention_ms, self._audit_retention_ms = retention_ms, audit_retention_ms
        self._shortest_ms = min((ms for ms in (retention_ms, audit_retention_ms) if ms), default=0)
        self.credible: RetentionClock | None = None

    @property
    def needed(self) -> bool:
        return self._shortest_ms > 0

    async def run(self) -> None:
        while True:
            try:
                await self.once()
            except Unavailable as error:
                log.warning("retention could not run: %s", error)
            except Exception:
                log.exception("retention has failed; the next try is in %g s", _EVERY_S)
            await asyncio.sleep(_EVERY_S)

    async def once(self) -> dict[str, int]:
        """Forget all that is due now; how much of each went."""
        service, store = self._service, self._service.store
        if self.credible is None:
            self.credible = await service.read(self._recall)
        before, now = self.credible.kept, self.credible.look(service.clock.now_ms(), self._steady_ms())
        service.prometheus.retention_held.set(self.credible.in_doubt)
        if self.credible.kept != before:
            await service.record(SaveValue(_NOTE, msgspec.json.encode(self.credible.kept).decode()))
        gone = dict.fromkeys(("jobs", "loose", "audit"), 0)
        if self._retention_ms:
            ended = now - self._retention_ms
            gone["jobs"] = await self._in_bites(lambda limit: len(store.prune(ended_before_ms=ended, limit=limit)))
            gone["loose"] = await self._in_bites(lambda limit: store.prune_unattached(before_ms=ended, limit=limit))
        if self._audit_retention_ms:
            old = now - self._audit_retention_ms
            gone["audit"] = await self._in_bites(lambda limit: store.prune_audit(before_ms=old, limit=limit))
        await self._in_bites(lambda limit: store.shrink(limit))
        for what, count in gone.items():
            service.prometheus.pruned.labels(what).inc(count)
        if any(gone.values()):
            log.info("forgotten: %d jobs, %d events and keys, %d rows of the audit", *gone.values())
        return gone

    async def _in_bites(self, bite: Callable[[int], int]) -> int:
        """`bite(limit)` says how much it did; as much as it might means that there may be more."""

        def timed(limit: int) -> tuple[int, float]:
            began = time.perf_counter()
            return bite(limit), time.perf_counter() - began

        done, limit = 0, _FIRST
        while True:
            some, took_s = await self._service.loop.write(partial(timed, limit))
            done += some
            if some < limit:
                return done
            await asyncio.sleep(took_s)  # as long as this has kept others waiting, they have the store for themselves
            limit = min(max(int(limit * _BITE_S / max(took_s, 0.0001)), _SMALLEST, limit // 2), _LARGEST, limit * 2)

    def _recall(self) -> RetentionClock:
        """From what the store knows of the time. Blocks."""
        bound_ms, hold_ms = min(_DAY_MS, self._shortest_ms // 4), min(_DAY_MS, self._shortest_ms)
        kept = None if self._trust else self._kept()
        return RetentionClock(
            kept or Kept(self._service.clock.now_ms()), self._steady_ms(), bound_ms=bound_ms, hold_ms=hold_ms
        )

    def _kept(self) -> Kept | None:
        store = self._service.store
        try:
            if text := store.note(_NOTE):
                return msgspec.json.decode(text, type=Kept)
        except msgspec.MsgspecError as error:
            log.error("what was known of the time cannot be read, the newest job counts: %s", error)
            store.mark_suspect("note", _NOTE, str(error))
        newest = store.jobs(JobQuery(limit=1)).jobs
        return Kept(newest[0].changed_ms) if newest else None

    def told(self) -> tuple[bool, str]:
        """For `doctor`: whether retention goes on as it should, and how it stands."""
        if not self.needed:
            return True, "everything is kept for ever"
        credible = self.credible
        if credible is None or not credible.in_doubt:
            return True, "goes on"
        kept = credible.kept
        return False, (
            f"reckons as if it were {format_time(kept.believed_ms)}: the clock is {format_duration(kept.ahead_ms // 1000 * 1000)} "
            f"ahead of what was expected (it was set, or the server was off); it is believed after "
            f"{format_duration(credible.left_ms // 1000 * 1000)} more"
        )
