"""Clearing away: what a run said is kept in files, then its container goes. Goes on where a server before us was."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from hodei.backends.docker.engine import DaemonError, Engine
from hodei.backends.docker.logs import Logs
from hodei.backends.docker.run_table import Places
from hodei.model.errors import BackendError
from hodei.model.ids import RunId

log = logging.getLogger("hodei.docker")

AT_ONCE = 2
REMOVE_S = 60.0


class Cleanup:
    """`at_work`: runs that are forgotten, with their containers, which are still there."""

    def __init__(
        self,
        engine: Engine,
        logs: Logs,
        places: Places,
        up: asyncio.Event,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._engine, self._logs, self._places, self._up, self._spawn = engine, logs, places, up, spawn
        self._slots = asyncio.Semaphore(AT_ONCE)
        self.at_work: dict[RunId, str] = {}

    def forget(self, run: RunId, container: str) -> None:
        if container:
            self._places.forget(run)
            self._begin(run, container)
        elif run not in self.at_work:
            self._places.cleared(run)

    def go_on(self, there: dict[RunId, str]) -> None:
        """`there`: the containers on the host, by run. Those that were forgotten before are cleared away now."""
        for run in self._places.forgotten() - self.at_work.keys():
            if container := there.get(run):
                self._begin(run, container)
            else:
                self._places.cleared(run)

    def _begin(self, run: RunId, container: str) -> None:
        self.at_work[run] = container
        self._spawn(self._sweep(run, container))

    async def _sweep(self, run: RunId, container: str) -> None:
        while True:
            await self._up.wait()
            try:
                async with self._slots:
                    try:
                        await self._logs.keep(self._engine, container, run)
                    except DaemonError as error:
                        if not error.status:
                            raise
                    await self.remove(container)
                break
            except (BackendError, OSError) as error:
                log.warning("docker host %s: run %s is not cleared away yet: %s", self._engine.host.name, run, error)
                await asyncio.sleep(2)
        self._places.cleared(run)
        self.at_work.pop(run, None)

    async def remove(self, container: str, *, force: bool = True) -> None:
        params = {"force": "1", "v": "1"} if force else {"v": "1"}
        try:
            await self._engine.ask("DELETE", f"containers/{container}", params=params, within_s=REMOVE_S)
        except DaemonError as error:
            if error.status not in (404, 409):  # gone, or being removed
                raise
