"""No task of the pod scheduler ends unnoticed: what should go on for ever and does not ends the process, loudly.

Whoever starts the process again (a Deployment, a static pod) then has one that is whole, which no probe could tell of one
that is blind on one side.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)


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
