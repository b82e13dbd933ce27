"""How far simulated runs are, on a terminal: a line for each run, drawn over again. Elsewhere nothing is written."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TextIO

from msgspec import Struct

_BAR = 20
_DAY_MS, _HOUR_MS = 86_400_000, 3_600_000
_AGAIN_S = 0.1


class _Run(Struct):
    name: str
    now_ms: int = 0
    done: int = 0
    jobs: int = 0
    began_s: float = 0.0
    words: str = "waits"


class Progress:
    """`shown` says whether there is anyone to look at it; how far each run is, is known in any case."""

    def __init__(self, names: Sequence[str], stream: TextIO, *, shown: bool) -> None:
        self._runs = [_Run(name) for name in names]
        self._stream = stream
        self._shown = shown and stream.isatty() and os.environ.get("TERM") != "dumb"
        self._lines = 0
        self._drawn_s = 0.0

    def say(self, place: int, words: str) -> None:
        """What a run does that has no jobs to count."""
        self._runs[place].words = words
        self._draw()

    def begin(self, place: int) -> None:
        self._runs[place].began_s = time.monotonic()
        self.say(place, "")

    def tell(self, place: int, now_ms: int, done: int, jobs: int) -> None:
        run = self._runs[place]
        run.now_ms, run.done, run.jobs = now_ms, done, jobs
        if time.monotonic() - self._drawn_s > _AGAIN_S:
            self._draw()

    def how_far(self, place: int) -> str:
        """For whoever is interrupted: `day 12, 345 of 6,789 jobs done`."""
        run = self._runs[place]
        if run.words or not run.jobs:
            return f"{run.words or 'at its very beginning'}"
        return f"{simulated(run.now_ms)} of simulated time, {run.done:,} of {run.jobs:,} jobs done"

    def clear(self) -> None:
        """Nothing of it stays on the screen."""
        if self._lines:
            self._stream.write(f"{self._home()}\x1b[J")
            self._stream.flush()
            self._lines = 0

    def _draw(self) -> None:
        if not self._shown:
            return
        self._drawn_s = time.monotonic()
        try:
            width = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            width = 80
        width = width or 80  # some terminals say 0
        longest = max(len(run.name) for run in self._runs)
        lines = [line_of(run, longest, self._drawn_s)[: width - 1] for run in self._runs]
        self._stream.write(self._home() + "\n".join(f"{line}\x1b[K" for line in lines))
        self._stream.flush()
        self._lines = len(lines)

    def _home(self) -> str:
        return f"\r\x1b[{self._lines - 1}A" if self._lines > 1 else "\r"


def line_of(run: _Run, longest: int, now_s: float) -> str:
    name = run.name.ljust(longest)
    if run.words or not run.jobs:
        return f"{name}  {run.words or 'begins'}"
    part = min(run.done / run.jobs, 1.0)
    full = round(part * _BAR)
    took_s = max(now_s - run.began_s, 1e-3)
    rate = run.done / took_s
    left = f"{_short((run.jobs - run.done) / rate)} left" if run.done else ""
    return (
        f"{name} [{'#' * full}{'.' * (_BAR - full)}] {part:4.0%}  {run.done:,}/{run.jobs:,} jobs  "
        f"{simulated(run.now_ms)}  {rate:,.0f} jobs/s  {left}"
    ).rstrip()


def simulated(ms: int) -> str:
    return f"day {ms // _DAY_MS:,} {ms % _DAY_MS // _HOUR_MS:02}h"


def _short(seconds: float) -> str:
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 6000 else f"{whole // 3600} h {whole % 3600 // 60} min"
