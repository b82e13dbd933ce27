"""Commands that somebody wants run beside a run, and what they say: answered when they are over."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Sequence
from typing import Any

from hodei.agent.exec import EXECUTE, ExecSessions
from hodei.agent.run import Run

SAID_LIMIT = 1 << 20


class Busy(Exception):
    """As many as there may be are at it."""


class Later:
    """An answer that is not there yet; whoever wants it sets `then`."""

    def __init__(self) -> None:
        self.then: Callable[[Any], None] = lambda _: None


class ExecRequests:
    def __init__(self, beside: ExecSessions) -> None:
        self._beside = beside
        self._taken: set[tuple[str, str]] = set()

    def start(self, run: Run, command: Sequence[str], timeout_ms: int) -> Later:
        """Busy, OSError or ValueError: nothing was started."""
        place = next((place for place in EXECUTE if (run.key, place) not in self._taken), "")
        if not place:
            raise Busy(f"{len(EXECUTE)} commands are at work beside {run.name} already")
        streams = (f"{place}.out", f"{place}.err")
        for name in streams:
            _remove(f"{run.directory}/{name}")
        answer = Later()

        def over(code: int | None) -> None:
            self._taken.discard((run.key, place))
            said = [_said(f"{run.directory}/{name}") for name in streams]
            for name in streams:
                _remove(f"{run.directory}/{name}")
            answer.then(
                {
                    "exit_code": code,
                    "stdout": base64.b64encode(said[0][0]).decode(),
                    "stderr": base64.b64encode(said[1][0]).decode(),
                    "cut": said[0][1] or said[1][1],
                }
            )

        self._beside.start(run, place, command, timeout_ms, lambda _: None, streams=streams, over=over)
        self._taken.add((run.key, place))
        return answer


def _said(path: str) -> tuple[bytes, bool]:
    """The beginning of what was said, and whether there was more."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b"", False
    with os.fdopen(fd, "rb") as file:
        data = file.read(SAID_LIMIT + 1)
    return data[:SAID_LIMIT], len(data) > SAID_LIMIT


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
