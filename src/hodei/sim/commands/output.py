"""What the commands of the simulator write: progress on a terminal, and files that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from msgspec import Struct

from hodei.model.errors import InvalidInput
from hodei.sim.metrics import Outcome, Result
from hodei.sim.report import why_no_pictures

_DAY_MS, _HOUR_MS = 86_400_000, 3_600_000
_REDRAW_S = 0.1


class _Run(Struct):
    """`status` is shown instead of numbers while it is set."""

    name: str
    now_ms: int = 0
    done: int = 0
    jobs: int = 0
    began_s: float = 0.0
    status: str = "waiting"


class _Format(Struct, frozen=True):
    """What a progress line shows. Narrow terminals get less, but always the time left."""

    bar: int = 0
    counted: bool = False
    per_second: str = " jobs/s"
    separator: str = "  "
    named: bool = True


_FORMATS = (
    _Format(bar=20, counted=True),
    _Format(bar=10, counted=True),
    _Format(bar=10),
    _Format(),
    _Format(per_second="/s", separator=" "),
    _Format(per_second="/s", separator=" ", named=False),
)


class Progress:
    """A line per run, redrawn in place; nothing is written unless `stream` is a terminal and `shown` is set."""

    def __init__(self, names: Sequence[str], stream: TextIO, *, shown: bool) -> None:
        self._runs = [_Run(name) for name in names]
        self._stream = stream
        self._shown = shown and stream.isatty() and os.environ.get("TERM") != "dumb"
        self._lines = 0
        self._drawn_s = 0.0

    def set_status(self, place: int, status: str) -> None:
        self._runs[place].status = status
        self._draw()

    def begin(self, place: int) -> None:
        self._runs[place].began_s = time.monotonic()
        self.set_status(place, "")

    def update(self, place: int, now_ms: int, done: int, jobs: int) -> None:
        run = self._runs[place]
        run.now_ms, run.done, run.jobs = now_ms, done, jobs
        if time.monotonic() - self._drawn_s > _REDRAW_S:
            self._draw()

    def describe(self, place: int) -> str:
        """After an interrupt: `day 12 03h of simulated time, 345 of 6,789 jobs done`."""
        run = self._runs[place]
        if run.status or not run.jobs:
            return run.status or "starting"
        return f"{simulated_time(run.now_ms)} of simulated time, {run.done:,} of {run.jobs:,} jobs done"

    def clear(self) -> None:
        if self._lines:
            self._stream.write(f"{self._to_first_line()}\x1b[J")
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
        width = width or 80  # some terminals report 0
        lines = progress_lines(self._runs, width - 1, self._drawn_s)
        self._stream.write(self._to_first_line() + "\n".join(f"{line}\x1b[K" for line in lines))
        self._stream.flush()
        self._lines = len(lines)

    def _to_first_line(self) -> str:
        return f"\r\x1b[{self._lines - 1}A" if self._lines > 1 else "\r"


def progress_lines(runs: Sequence[_Run], width: int, now_s: float) -> list[str]:
    """A line per run, all in the first format in which every line fits into `width`."""
    longest = max(len(run.name) for run in runs)
    lines: list[str] = []
    for format in _FORMATS:
        lines = [_progress_line(run, longest, now_s, format) for run in runs]
        if all(len(line) <= width for line in lines):
            return lines
    return [line[:width] for line in lines]


def _progress_line(run: _Run, longest: int, now_s: float, format: _Format) -> str:
    name = run.name.ljust(longest) + " " if format.named else ""
    if run.status or not run.jobs:
        return f"{name} {run.status or 'starting'}".strip()
    part = min(run.done / run.jobs, 1.0)
    full = round(part * format.bar)
    bar = f"[{'#' * full}{'.' * (format.bar - full)}] " if format.bar else ""
    rate = run.done / max(now_s - run.began_s, 1e-3)
    fields = [
        f"{name}{bar}{part:4.0%}",
        f"{run.done:,}/{run.jobs:,} jobs" if format.counted else "",
        simulated_time(run.now_ms),
        f"{rate:,.0f}{format.per_second}",
        f"{_short_time((run.jobs - run.done) / rate)} left" if run.done else "",
    ]
    return format.separator.join(field for field in fields if field)


def simulated_time(ms: int) -> str:
    return f"day {ms // _DAY_MS:,} {ms % _DAY_MS // _HOUR_MS:02}h"


def _short_time(seconds: float) -> str:
    seconds = round(seconds)
    if seconds < 100:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 6000 else f"{seconds // 3600} h {seconds % 3600 // 60} min"


def print_notes(notes: list[str], out: Path | None = None) -> None:
    missing = [why_no_pictures()] if out and why_no_pictures() else []
    for note in [*notes, *missing]:
        print(f"note: {note}", file=sys.stderr)


# The target is checked before the simulation starts, so that a wrong path is reported at once.


@contextmanager
def staged_directory(out: Path | None) -> Iterator[Path | None]:
    """A directory to write into that becomes `out` at the end. If `out` exists, files are moved into it one by one and
    replace those of the same name. After an exception nothing is left. None for None."""
    if out is None:
        yield None
        return
    target = out.resolve()
    made: list[Path] = []
    if target.exists() and not target.is_dir():
        raise InvalidInput(f"cannot write to {out}: it is not a directory", hint="choose another one with --out")
    staging = (target if target.is_dir() else target.parent) / f".{target.name}.{os.getpid()}.tmp"
    done = False
    try:
        try:
            if not target.is_dir():
                made = _make_parents(target.parent)
            staging.mkdir()
        except OSError as error:
            raise _unwritable(out, error, "--out") from error
        yield staging
        _move(staging, target)
        done = True
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if not done:
            _remove_empty(made)


@contextmanager
def staged_file(path: Path | None) -> Iterator[Path | None]:
    """As `staged_directory`, for one file. Anything but a regular file (a pipe, /dev/stdout) is written to directly."""
    if path is None:
        yield None
        return
    if path.is_dir():
        raise InvalidInput(f"cannot write to {path}: it is a directory", hint="name a file with --waits")
    if path.exists() and not path.is_file():
        yield path
        return
    target = path.resolve()
    staging = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            staging.touch()
        except OSError as error:
            raise _unwritable(path, error, "--waits") from error
        yield staging
        staging.replace(target)
    finally:
        staging.unlink(missing_ok=True)


def write_waits(path: Path, results: Sequence[Result]) -> None:
    """One result: `id,wait_s`. Several: `id` and a column per policy. Empty for a job that never started."""
    names = ["wait_s"] if len(results) == 1 else [result.policy for result in results]
    columns = [{outcome.id: _wait_s(outcome) for outcome in result.outcomes} for result in results]
    with path.open("w", encoding="utf-8") as file:
        file.write(f"id,{','.join(names)}\n")
        for id in sorted({id for column in columns for id in column}):
            file.write(f"{id},{','.join(column.get(id, '') for column in columns)}\n")


def _wait_s(outcome: Outcome) -> str:
    if outcome.started_ms < 0:
        return ""
    seconds, rest = divmod(outcome.wait_ms, 1000)
    return f"{seconds}.{rest:03}" if rest else str(seconds)


def _move(staging: Path, target: Path) -> None:
    if not target.is_dir():
        staging.rename(target)
        return
    # The page last, so that its pictures exist when it appears.
    for file in sorted(staging.iterdir(), key=lambda file: (file.suffix == ".html", file.name)):
        file.replace(target / file.name)


def _make_parents(directory: Path) -> list[Path]:
    """Returns the directories that were missing, the deepest first."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_empty(directories: list[Path]) -> None:
    for directory in directories:
        try:
            directory.rmdir()
        except OSError:
            return  # another program has written into it


def _unwritable(path: Path, error: OSError, option: str) -> InvalidInput:
    return InvalidInput(f"cannot write to {path}: {error.strerror}", hint=f"choose another path with {option}")
