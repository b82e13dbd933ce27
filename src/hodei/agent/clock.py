"""The server's clock as a joined agent knows it: bounds from exchanges, carried on by the clock of this host's boot."""

from __future__ import annotations

from collections.abc import Callable

from hodei.agent import proc

# Two clocks of computers drift apart by less than this.
DRIFT_PPM = 200
SLACK_MS = 5


class ServerClock:
    """Each exchange bounds the difference: the server read its clock after we sent, and before we received. A late answer
    only makes its bounds wider, so an agent that was suspended does not believe an old time."""

    def __init__(
        self, *, boot_ms: Callable[[], int] = proc.boot_clock_ms, wall_ms: Callable[[], int] = proc.now_ms
    ) -> None:
        self._boot_ms, self._wall_ms = boot_ms, wall_ms
        self._bounds: tuple[float, float] | None = None  # of server time minus boot clock
        self._at_ms = 0
        self._skew_ms = 0

    def observe(self, sent_boot_ms: int, server_ms: int) -> None:
        """An answer that was requested at `sent_boot_ms` has just arrived, with the server's time in it."""
        now = self._boot_ms()
        low, high = float(server_ms - now - SLACK_MS), float(server_ms - sent_boot_ms + SLACK_MS)
        if self._bounds is not None:
            drift = (now - self._at_ms) * DRIFT_PPM / 1e6
            before = self._bounds[0] - drift, self._bounds[1] + drift
            if max(before[0], low) <= min(before[1], high):  # else the server's clock was set
                low, high = max(before[0], low), min(before[1], high)
        self._bounds, self._at_ms = (low, high), now

    def latest_ms(self) -> int:
        """The server's time is certainly not later than this; our own clock's before the first exchange."""
        if self._bounds is None:
            return self._wall_ms()
        now = self._boot_ms()
        return round(now + self._bounds[1] + (now - self._at_ms) * DRIFT_PPM / 1e6)

    def skew_ms(self) -> int:
        """What to add to times of this host's clock. 0 as long as both clocks may agree."""
        if self._bounds is None:
            return 0
        ahead = self._boot_ms() - self._wall_ms()
        low, high = self._bounds[0] + ahead, self._bounds[1] + ahead
        if low <= 0 <= high:
            self._skew_ms = 0
        elif not low <= self._skew_ms <= high:
            self._skew_ms = round((low + high) / 2)
        return self._skew_ms
