"""Is anybody still at it? An interactive run that uses no processor and says nothing for long enough is stopped.

Looked at now and then, a tenth of that time apart (between one and fifteen seconds). Quiet is: less than a hundredth of
one core since the last look, by all processes of the run, and no word of output. Our own death starts the count anew.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hodei.agent import logs, proc
from hodei.agent.run import Run

if TYPE_CHECKING:
    from hodei.agent.runs import Runs

SHORTEST_MS, LONGEST_MS = 1_000, 15_000
# One part in so many of a core is as good as nothing.
BUSY_PART = 100


@dataclass
class _Watched:
    looked_ms: int
    quiet_since_ms: int
    cpu_ms: int
    said: int


class Idles:
    """Watches all runs in the table of `runs` that may be idle for so long only."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._watched: dict[str, _Watched] = {}

    def look(self) -> None:
        """Once a second or so."""
        now = proc.boot_clock_ms()
        due = [run for run in self._runs.live.values() if run.idle_ms and not run.stop_code and self._is_due(run, now)]
        if self._watched:
            live = {run.key for run in self._runs.live.values()}
            self._watched = {key: watched for key, watched in self._watched.items() if key in live}
        if not due:
            return
        used_ms = proc.cpu_ms({run.pid: _mark(run) for run in due}, self._runs.beside.pids)
        for run in due:
            self._judge(run, now, used_ms[run.pid])

    def _is_due(self, run: Run, now: int) -> bool:
        watched = self._watched.get(run.key)
        step_ms = min(max(run.idle_ms // 10, SHORTEST_MS), LONGEST_MS)
        return watched is None or now - watched.looked_ms >= step_ms

    def _judge(self, run: Run, now: int, cpu_ms: int) -> None:
        said = _said(run)
        before = self._watched.get(run.key)
        if before is None:
            self._watched[run.key] = _Watched(now, now, cpu_ms, said)
            return
        # A process that has gone takes its time with it: less than before is no sign of life.
        busy = (cpu_ms - before.cpu_ms) * BUSY_PART >= now - before.looked_ms
        if busy or said != before.said:
            before.quiet_since_ms = now
        before.looked_ms, before.cpu_ms, before.said = now, cpu_ms, said
        if now - before.quiet_since_ms >= run.idle_ms:
            text = f"nothing happened in it for {run.idle_ms / 1000:g}s"
            self._runs.stops.order(run, "idle", text, run.grace_ms, run.save_hook)


def _mark(run: Run) -> dict[str, str]:
    """Both together are like no other run's, of whatever installation."""
    return {"HODEI_RUN_ID": run.name, "HODEI_CHECKPOINT_FILE": run.checkpoint_file}


def _said(run: Run) -> int:
    total = 0
    for stream in logs.STREAMS:
        try:
            total += os.stat(f"{run.directory}/{stream}", follow_symlinks=False).st_size
        except OSError:
            continue
    return total
