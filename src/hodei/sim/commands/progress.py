"""How far simulated runs are, on a terminal: a line for each run, drawn over again. Elsewhere nothing is written."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TextIO

from msgspec import Struct

_DAY_MS, _HOUR_MS = 86_400_000, 3_600_000
_AGAIN_S = 0.1


class _Run(Struct):
    name: str
    now_ms: int = 0
    done: int = 0
    jobs: int = 0
    began_s: float = 0.0
    words: str = "waits"


class _Form(Struct, frozen=True):
    """How much is said: a narrow terminal gets less of what can be spared, and still the time left."""

    bar: int = 0
    counted: bool = False
    per_second: str = " jobs/s"
    between: str = "  "
    named: bool = True


_FORMS = (
    _Form(bar=20, counted=True),
    _Form(bar=10, counted=True),
    _Form(bar=10),
    _Form(),
    _Form(per_second="/s", between=" "),
    _Form(per_second="/s", between=" ", named=False),
)


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
        lines = lines_of(self._runs, width - 1, self._drawn_s)
        self._stream.write(self._home() + "\n".join(f"{line}\x1b[K" for line in lines))
        self._stream.flush()
        self._lines = len(lines)

    def _home(self) -> str:
        return f"\r\x1b[{self._lines - 1}A" if self._lines > 1 else "\r"


def lines_of(runs: Sequence[_Run], width: int, now_s: float) -> list[str]:
    """A line for each, none longer than `width`: all in the first of the forms that has room for all of them."""
    longest = max(len(run.name) for run in runs)
    lines: list[str] = []
    for form in _FORMS:
        lines = [_line(run, longest, now_s, form) for run in runs]
        if all(len(line) <= width for line in lines):
            return lines
    return [line[:width] for line in lines]


def _line(run: _Run, longest: int, now_s: float, form: _Form) -> str:
    name = run.name.ljust(longest) + " " if form.named else ""
    if run.words or not run.jobs:
        return f"{name} {run.words or 'begins'}".strip() if name else run.words or "begins"
    part = min(run.done / run.jobs, 1.0)
    full = round(part * form.bar)
    bar = f"[{'#' * full}{'.' * (form.bar - full)}] " if form.bar else ""
    rate = run.done / max(now_s - run.began_s, 1e-3)
    said = [
        f"{name}{bar}{part:4.0%}",
        f"{run.done:,}/{run.jobs:,} jobs" if form.counted else "",
        simulated(run.now_ms),
        f"{rate:,.0f}{form.per_second}",
        f"{_short((run.jobs - run.done) / rate)} left" if run.done else "",
    ]
    return form.between.join(word for word in said if word)


def simulated(ms: int) -> str:
    return f"day {ms // _DAY_MS:,} {ms % _DAY_MS // _HOUR_MS:02}h"


def _short(seconds: float) -> str:
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 6000 else f"{whole // 3600} h {whole % 3600 // 60} min"
