"""The real clock, behind the Clock port."""

from __future__ import annotations

import time


class SystemClock:
    """Wall time that never goes back: after a step backwards it stands still until the wall has caught up."""

    def __init__(self) -> None:
        self._last = 0

    def now_ms(self) -> int:
        self._last = max(self._last, time.time_ns() // 1_000_000)
        return self._last
