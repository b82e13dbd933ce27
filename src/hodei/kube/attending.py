"""What goes on beside the decisions of the pod scheduler: memory, reservations, forecasts. None of it where none is configured.

Each is told what every step decided, and does the rest in its own time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from hodei.control.controller import Step

_log = logging.getLogger(__name__)


class Attendant(Protocol):
    async def begin(self) -> None:
        """Before the first decision; nothing is bound until this returns."""

    def stepped(self, step: Step) -> None: ...

    async def run(self) -> None:
        """For ever, or until there is nothing left to do."""

    async def end(self) -> None:
        """After the last decision, while we still lead."""


class Plain:
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
async def attended(attendants: Sequence[Attendant]) -> AsyncIterator[None]:
    """All of them at work while inside. One that fails is named in the log; scheduling goes on without it."""
    for one in attendants:
        await one.begin()
    tasks = [asyncio.create_task(_lasting(one)) for one in attendants]
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


async def _lasting(one: Attendant) -> None:
    try:
        await one.run()
    except asyncio.CancelledError:
        raise
    except Exception:
        _log.exception("%s has failed; pods are scheduled without it", type(one).__name__)
