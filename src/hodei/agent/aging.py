"""When what was kept may go, by a wall clock that may be wrong: one that was set far ahead must not erase every output.

What is believed goes on with a clock that nobody can set, and follows the wall clock as long as the two agree. When that is
suddenly far ahead (it was set, or nobody was here for long), what is believed stays behind until the wall clock has kept to
its word for a day of running. It is kept in a file, so that a restart is no confirmation. (The server does the same for its
history, in `runtime.retention_clock`; the agent stands alone.)
"""

from __future__ import annotations

import contextlib
import os
import time

_DAY_S = 86_400.0


class Aging:
    """`path`: where what is believed is kept. `keep_s`: for how long things are kept."""

    def __init__(self, path: str, keep_s: float) -> None:
        self._path, self._keep_s = path, keep_s
        self._bound_s, self._hold_s = min(_DAY_S, keep_s / 4), min(_DAY_S, keep_s)
        self._steady_s = steady_s()
        self._believed_s, self._held_s, self._ahead_s = self._recall()

    def oldest_s(self) -> float:
        """What was last changed before this may go now."""
        wall_s, now_s = time.time(), steady_s()
        passed_s, self._steady_s = max(now_s - self._steady_s, 0.0), now_s
        believed_s, held_s = self._believed_s + passed_s, self._held_s + passed_s
        ahead_s = wall_s - believed_s
        if ahead_s <= self._bound_s or (self._same(ahead_s) and held_s >= self._hold_s):
            believed_s, held_s, ahead_s = wall_s, 0.0, 0.0
        elif not self._same(ahead_s):
            held_s = 0.0
        self._believed_s, self._held_s, self._ahead_s = believed_s, held_s, ahead_s
        with contextlib.suppress(OSError):
            self._keep()
        return believed_s - self._keep_s

    def _same(self, ahead_s: float) -> bool:
        """The wall clock is as far ahead as it was at the last look."""
        return self._ahead_s > 0 and abs(ahead_s - self._ahead_s) <= self._bound_s

    def _recall(self) -> tuple[float, float, float]:
        try:
            with open(self._path) as file:
                believed_s, held_s, ahead_s = map(float, file.read(200).split())
            if 0 <= believed_s < 1e12 and 0 <= held_s < 1e12 and 0 <= ahead_s < 1e12:
                return believed_s, held_s, ahead_s
        except (OSError, ValueError):
            pass
        return time.time(), 0.0, 0.0

    def _keep(self) -> None:
        fresh = f"{self._path}.new"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(f"{self._believed_s:.3f} {self._held_s:.3f} {self._ahead_s:.3f}\n")
        os.rename(fresh, self._path)


def steady_s() -> float:
    """Time that passes, whatever the wall clock is set to."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
