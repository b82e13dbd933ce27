"""Background tasks of the scheduling loop (history, reservations, forecasts, status writers), and their supervision."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from hodei.control.controller import Step
from hodei.process import cancel_tasks

_log = logging.getLogger(__name__)
FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 300.0


class BackgroundTask:
    """Runs concurrently with the loop; every method does nothing unless overridden."""

    @property
    def name(self) -> str:
        return type(self).__name__

    async def start(self) -> None:
        """Called before the first decision; nothing is bound until it returns."""

    def on_step(self, step: Step) -> None:
        """Called after every step of the controller."""

    async def run(self) -> None:
        """Until there is nothing left to do. Called again after an exception."""

    async def stop(self) -> None:
        """Called after the last decision, while this process still leads."""


@contextlib.asynccontextmanager
async def run_in_background(
    tasks: Sequence[BackgroundTask], on_failure: Callable[[str], None] = lambda name: None
) -> AsyncIterator[None]:
    """Run all tasks while inside. One that fails is logged and restarted after a pause; scheduling continues.

    `on_failure` is called with the task's name."""
    for task in tasks:
        await task.start()
    running = [asyncio.create_task(_run_with_restarts(task, on_failure)) for task in tasks]
    try:
        yield
    finally:
        await cancel_tasks(running)
        for task in tasks:
            try:
                await task.stop()
            except Exception:
                _log.exception("%s did not stop cleanly", task.name)


async def _run_with_restarts(task: BackgroundTask, on_failure: Callable[[str], None]) -> None:
    failures = 0
    while True:
        began = time.monotonic()
        try:
            await task.run()
            return
        except Exception:
            # A failure after a long time without one counts as the first.
            failures = 0 if time.monotonic() - began > _LONGEST_PAUSE_S else failures + 1
            pause_s = min(FIRST_PAUSE_S * 2.0**failures, _LONGEST_PAUSE_S)
            _log.exception("%s has failed and restarts in %g s; pods are scheduled without it", task.name, pause_s)
            on_failure(task.name)
            await asyncio.sleep(pause_s)


class Supervisor:
    """Ends the process if a task ends that should run forever: `stop` is called and `failure` names the task.

    `closing`: tasks may end now."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self.failure = ""
        self.closing = False

    def watch(self, task: asyncio.Task[Any], name: str, *, may_return: bool = False) -> None:
        """`may_return`: only an exception is a failure. A cancelled task never is."""
        task.add_done_callback(lambda done: self._ended(done, name, may_return))

    def _ended(self, task: asyncio.Task[Any], name: str, may_return: bool) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None and (may_return or self.closing):
            return
        why = f"{type(error).__name__}: {error}" if error is not None else "it returned"
        _log.critical("%s has ended unexpectedly: %s; this process stops", name, why, exc_info=error)
        self.failure = self.failure or f"{name} has ended: {why}"
        self._stop()
