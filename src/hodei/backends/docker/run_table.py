"""One run on one host, as the backend remembers it, and which runs were sent to which host, as its disk does."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from hodei.backends.docker.container_spec import Care, Prepared
from hodei.backends.docker.states import Stopping
from hodei.model.facts import RunObserved
from hodei.model.ids import RunId
from hodei.model.lifecycle import RUN_ENDED


class Tracked:
    """`prepared` is there until the container is; `container` from then on. `seen` is what was last told of it; `ended` is
    set with its end, `hurry` when its stop is to come sooner. `has_place`: it counts among its host's
    containers. `saving`: it has been asked to save its work, and go on. `in_doubt`: a request to start it may have been sent,
    and nobody knows what became of it. `voided`: a container of its own that we remove because of that. `may_come_late`: the
    same of a request to make its container."""

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
        self.stopping: Stopping | None = None
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
    """An empty file for each run below its host's directory, from the moment that the host is asked for it until its end is
    stored: so that the runs of a host that is out of reach are known of, also by a server that has just begun. From then
    until its container is gone the file has a dot before its name: it is to be cleared away, and not to be told of."""

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
