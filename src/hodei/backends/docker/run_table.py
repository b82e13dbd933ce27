"""The runs of a host: in memory, as marker files on disk, their slots and their cleanup."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from hodei.backends.docker.container_spec import Care, Prepared
from hodei.backends.docker.engine import DaemonError, Engine
from hodei.backends.docker.logs import Logs
from hodei.model.errors import BackendError
from hodei.model.facts import RunObserved
from hodei.model.ids import RunId
from hodei.model.job import RUN_ENDED
from hodei.supervision import StopPlan


class Tracked:
    """`prepared` is set until the container exists; `seen` is the last report; `ended` is set at the end, `hurry` when a stop
    is shortened. `has_place`: it holds a container slot. `saving`: a checkpoint is under way. `in_doubt`: a start request
    may have been sent and its outcome is unknown; `voided`: the container that is removed because of that.
    `may_come_late`: the same for a create request."""

    __slots__ = (
        "care", "container", "ended", "has_place", "hurry", "in_doubt", "may_come_late", "memory", "prepared", "run", "saving",
        "seen", "started_ms", "stopping", "tasks", "voided",
    )  # fmt: skip

    def __init__(self, run: RunId, care: Care, prepared: Prepared | None = None) -> None:
        self.run, self.care, self.prepared = run, care, prepared
        self.container = self.voided = ""
        self.seen: RunObserved | None = None
        self.started_ms = self.memory = 0
        self.has_place = self.saving = self.in_doubt = self.may_come_late = False
        self.stopping: StopPlan | None = None
        self.ended, self.hurry = asyncio.Event(), asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def over(self) -> bool:
        return self.ended.is_set()

    @property
    def running(self) -> bool:
        return self.seen is not None and self.seen.state == "running"

    def end(self, seen: RunObserved) -> None:
        assert seen.state in RUN_ENDED
        self.seen = seen
        self.prepared = None
        self.ended.set()
        self.hurry.set()


class Places:
    """An empty file per run, from the first request until its end is stored, so that a restarted server knows the runs of an
    unreachable host. After that, until the container is removed, the file name begins with a dot."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._made = False

    def has(self, run: RunId) -> bool:
        return (self._home / run).exists()

    def add(self, run: RunId) -> None:
        self._touch(run)

    def forget(self, run: RunId) -> None:
        self._touch(f".{run}")
        self._unlink(run)

    def cleared(self, run: RunId) -> None:
        self._unlink(f".{run}")
        self._unlink(run)

    def all(self) -> list[RunId]:
        return [name for name in self._names() if not name.startswith(".")]

    def forgotten(self) -> set[RunId]:
        return {name[1:] for name in self._names() if name.startswith(".")}

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self._home))
        except FileNotFoundError:
            return []

    def _touch(self, name: str) -> None:
        if not self._made:
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._made = True
        os.close(os.open(self._home / name, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._home / name)


# --------------------------------------------------------------------------------------------- cleanup
# Cleanup of a forgotten run: keep its log in files, then remove its container. Resumes after a restart.


log = logging.getLogger("hodei.docker")

AT_ONCE = 2
REMOVE_S = 60.0


class Cleanup:
    """`at_work`: forgotten runs whose containers are not removed yet."""

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
        """Resume the cleanup of forgotten runs. `there`: the containers on the host, by run."""
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


# ----------------------------------------------------------------------------------------------- slots
# How many containers a host runs at once. Further starts wait.


class ContainerSlots:
    """`most` slots, 0 for no limit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        self._waiting: deque[tuple[Tracked, asyncio.Future[None]]] = deque()

    async def enter(self, tracked: Tracked) -> None:
        """Wait for a slot; a run that is stopped meanwhile proceeds without one."""
        if self._taken >= self._most > 0 and tracked.stopping is None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((tracked, turn))
            await turn
        else:
            self.take(tracked)

    def take(self, tracked: Tracked) -> None:
        """The container exists already: count it without waiting."""
        if not tracked.has_place:
            tracked.has_place = True
            self._taken += 1

    def leave(self, tracked: Tracked) -> None:
        if tracked.has_place:
            tracked.has_place = False
            self._taken -= 1
        self.look()

    def look(self) -> None:
        """Wake starts that have a slot now or are being stopped."""
        staying: deque[tuple[Tracked, asyncio.Future[None]]] = deque()
        while self._waiting:
            tracked, turn = self._waiting.popleft()
            if turn.done():
                continue
            if tracked.stopping is not None:
                turn.set_result(None)
            elif self._taken < self._most:
                self.take(tracked)
                turn.set_result(None)
            else:
                staying.append((tracked, turn))
        self._waiting = staying
