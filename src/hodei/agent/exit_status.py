"""How and when a run ended, from the files that it left: also true if we were away, or stood still, at that time."""

from __future__ import annotations

import os

from hodei.agent import logs, proc
from hodei.agent.run import Run
from hodei.agent.spawn import NOT_TRIED
from hodei.agent.status import ERRORS, Status, read_status

# An end that is seen later than this is looked up in what the wrapper wrote; looking at every one would be too dear.
PROMPT_MS = 200


def of_child(run: Run, code: int) -> tuple[str, int]:
    """Why a child of ours that ended with `code` could not even be tried ("" if it was), and when it ended."""
    error, at_ms = "", proc.now_ms()
    if code == NOT_TRIED or at_ms - _written_ms(run) > PROMPT_MS:
        status = read_status(run.name, run.directory)
        if code == NOT_TRIED:
            error = status.error or ("status" if status.sound and not status.pid else "")
        at_ms = _end_ms(run, status)
    return _in_words(run, error), at_ms


def of_stranger(run: Run) -> tuple[int | None, str, int]:
    """The same for a run that is gone and was not our child, with its exit code, None if nobody knows."""
    status = read_status(run.name, run.directory)
    at_ms = _end_ms(run, status)
    if not run.started_ms and status.pid:
        run.started_ms = min(max(_opened_ms(run), run.claimed_ms), at_ms)
    return status.code, _in_words(run, status.error), at_ms


def _in_words(run: Run, error: str) -> str:
    return ERRORS[error].format(workdir=run.workdir) if error else ""


def _written_ms(run: Run) -> int:
    """When its wrapper last wrote something; now if nobody can tell."""
    try:
        return os.stat(f"{run.directory}/status", follow_symlinks=False).st_mtime_ns // 1_000_000
    except OSError:
        return proc.now_ms()


def _end_ms(run: Run, status: Status) -> int:
    """As its wrapper wrote it down, else now, when it is seen."""
    now = proc.now_ms()
    if status.code is None and not status.error:
        return now
    return max(min(status.written_ms, now), run.started_ms, run.claimed_ms)


def _opened_ms(run: Run) -> int:
    """When it was born: the files for its output are opened then, and one that stayed empty still shows it."""
    try:
        return min(os.stat(f"{run.directory}/{stream}").st_mtime_ns for stream in logs.STREAMS) // 1_000_000
    except OSError:
        return 0
