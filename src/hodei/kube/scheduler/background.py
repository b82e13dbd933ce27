"""What goes on beside the decisions of the pod scheduler: memory, reservations, forecasts. None of it where none is configured.

Each is told what every step decided, and does the rest in its own time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from hodei.control.controller import Step

_log = logging.getLogger(__name__)
FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 300.0


class BackgroundTask(Protocol):
    async def begin(self) -> None:
        """Before the first decision; nothing is bound until this returns."""

    def stepped(self, step: Step) -> None: ...

    async def run(self) -> None:
        """For ever, or until there is nothing left to do. It is called again if it has raised."""

    async def end(self) -> None:
        """After the last decision, while we still lead."""


class NoBackground:
    """An attendant with nothing to do; others say what they do."""

    async def begin(self) -> None:
        return

    def stepped(self, step: Step) -> None:
        return

    async def run(self) -> None:
        return

    async def end(self) -> None:
        return


@contextlib.asynccontextmanager
async def attended(
    attendants: Sequence[BackgroundTask], failed: Callable[[str], None] = lambda name: None
) -> AsyncIterator[None]:
    """All of them at work while inside. One that fails is named in the log and begins again after a pause; scheduling goes
    on meanwhile. `failed` is called with its name each time."""
    for one in attendants:
        await one.begin()
    tasks = [asyncio.create_task(_lasting(one, failed)) for one in attendants]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in attendants:
            try:
                await one.end()
            except Exception:
                _log.exception("%s did not end as it should", type(one).__name__)


async def _lasting(one: BackgroundTask, failed: Callable[[str], None]) -> None:
    """Until it has nothing left to do. A failure after a long time of peace is a first one again."""
    failures = 0
    while True:
        began = time.monotonic()
        try:
            await one.run()
            return
        except asyncio.CancelledError:
            raise
        except Exception:
            failures = 0 if time.monotonic() - began > _LONGEST_PAUSE_S else failures + 1
            pause_s = min(FIRST_PAUSE_S * 2.0**failures, _LONGEST_PAUSE_S)
            name = type(one).__name__
            _log.exception("%s has failed; pods are scheduled without it, and it begins again in %g s", name, pause_s)
            failed(name)
            await asyncio.sleep(pause_s)


# ------------------------------------------------------------------------------------------ supervisor
# No task of the pod scheduler ends unnoticed: what should go on for ever and does not ends the process, loudly.


class Supervisor:
    """`stop` is called when a task has ended that should not have; `failure` says which, and why. `closing`: all are to
    end now."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self.failure = ""
        self.closing = False

    def watch(self, task: asyncio.Task[Any], name: str, *, may_return: bool = False) -> None:
        """`may_return`: only an exception is a failure. One that is cancelled was told to end."""
        task.add_done_callback(lambda done: self._ended(done, name, may_return))

    def _ended(self, task: asyncio.Task[Any], name: str, may_return: bool) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None and (may_return or self.closing):
            return
        why = f"{type(error).__name__}: {error}" if error is not None else "it returned"
        _log.critical("%s has ended, which it never should: %s; this process ends with it", name, why, exc_info=error)
        self.failure = self.failure or f"{name} has ended: {why}"
        self._stop()
