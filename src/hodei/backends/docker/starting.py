"""From an order to a running container, once: whatever is found under the run's name is adopted, never made a second time."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Awaitable, Callable
from typing import Any

from hodei.backends.docker.ends import could_not_run, not_started, state_of
from hodei.backends.docker.engine import WORK_S, DaemonError, Engine
from hodei.backends.docker.images import Images
from hodei.backends.docker.order import CHECKPOINT_DIR, INSTALLATION, RUN, Prepared
from hodei.backends.docker.tracked import Tracked
from hodei.model.errors import BackendError, BackendRefused
from hodei.model.facts import RunObserved

ADOPT_TRIES = 20
# A start that a server before us asked for may still be in the daemon's hands for so long.
SETTLE_S = 0.5


class Starting:
    """Begins runs on one host. `reachable` waits until the host answers again, or raises BackendError when it has been
    silent for too long; `ended` takes the ends of those that never began."""

    def __init__(
        self,
        engine: Engine,
        images: Images,
        installation: str,
        at_once: int,
        reachable: Callable[[], Awaitable[None]],
        now_ms: Callable[[], int],
    ) -> None:
        self._engine, self._images, self._installation = engine, images, installation
        self._slots = asyncio.Semaphore(at_once)
        self._reachable, self._now_ms = reachable, now_ms

    async def begin(self, tracked: Tracked, prepared: Prepared) -> RunObserved | dict[str, Any] | None:
        """None: it has been asked to run. An observation: it never will, or was told to stop before. What the daemon says
        of the container, if there was one already."""
        run = tracked.run
        try:
            if prepared.wishes.pull == "always":
                await self._fetch(prepared.image)
            found = await self._create(tracked, prepared)
            if found is not None and not _is_new(found):
                return found
            if tracked.stopping is not None:
                return RunObserved(run, "stopped", self._now_ms(), reason=tracked.stopping.reason)
            return await self._start(tracked, prepared, mine=found is None)
        except BackendRefused as error:
            return not_started(run, self._now_ms(), error.message, permanent=True)
        except BackendError as error:
            return not_started(run, self._now_ms(), error.message)

    async def _fetch(self, image: str) -> None:
        await self._reachable()
        await self._images.pull(image)

    async def _create(self, tracked: Tracked, prepared: Prepared) -> dict[str, Any] | None:
        """Make the container; None if it is new, else what was there under its name already."""
        fetched = prepared.wishes.pull != "missing"
        while True:
            await self._reachable()
            if tracked.stopping is not None:
                return {"State": {"Status": "created"}}
            try:
                async with self._slots:
                    made = await self._engine.ask_json(
                        "POST", "containers/create", params={"name": prepared.name}, body=prepared.body, within_s=WORK_S
                    )
                tracked.container = made["Id"]
                return None
            except DaemonError as error:
                if error.status == 409:
                    return await self._adopt(tracked, prepared)
                if error.status == 404 and not fetched:
                    fetched = True
                    await self._images.pull(prepared.image)
                elif error.status == 404:
                    raise BackendError(f"{error.message} (pull policy: {prepared.wishes.pull})") from None
                elif error.status == 400:
                    raise BackendRefused(error.message) from None
                elif error.status:
                    raise
                # Nobody answered: it is unknown whether it was made. Ask again when the host is back; its name tells.

    async def _adopt(self, tracked: Tracked, prepared: Prepared) -> dict[str, Any]:
        for _ in range(ADOPT_TRIES):
            found = await self._engine.container(prepared.name)
            if found is None:
                await asyncio.sleep(0.1)  # the name is taken before the container is there
                continue
            labels = (found.get("Config") or {}).get("Labels") or {}
            if labels.get(INSTALLATION) != self._installation or labels.get(RUN) != prepared.run:
                raise BackendError(f"{self._engine.host.name} has a container {prepared.name} that is not ours")
            tracked.container = found["Id"]
            return found
        raise BackendError(f"{self._engine.host.name}: the name {prepared.name} is taken, and nothing has it")

    async def _start(self, tracked: Tracked, prepared: Prepared, *, mine: bool) -> RunObserved | dict[str, Any] | None:
        if not mine:
            # Starting a container that has ended would run it a second time: look once more after a while.
            await asyncio.sleep(SETTLE_S)
            again: dict[str, Any] = await self._engine.ask_json("GET", f"containers/{tracked.container}/json")
            if not _is_new(again):
                return again
        if prepared.care.checkpoint_file.startswith(CHECKPOINT_DIR):
            await self._make_checkpoint_dir(tracked)
        while True:
            try:
                async with self._slots:
                    await self._engine.ask("POST", f"containers/{tracked.container}/start", within_s=WORK_S)
                return None
            except DaemonError as error:
                if error.status == 304:
                    return None
                if error.status:
                    return self._refused_to_run(tracked, error)
            await self._reachable()
            state: dict[str, Any] = await self._engine.ask_json("GET", f"containers/{tracked.container}/json")
            if not _is_new(state):
                return state

    def _refused_to_run(self, tracked: Tracked, error: DaemonError) -> RunObserved:
        said = error.message
        if "docker-init" in said:
            said = f"{said}; install tini (docker-init) on the host, or set init = false for this backend"
        at_ms = self._now_ms()
        return could_not_run(tracked.run, at_ms, said) or not_started(tracked.run, at_ms, said)

    async def _make_checkpoint_dir(self, tracked: Tracked) -> None:
        """Where everybody in the container may write the file that tells of saved work."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            entry = tarfile.TarInfo(CHECKPOINT_DIR.strip("/"))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(entry)
        await self._engine.ask(
            "PUT",
            f"containers/{tracked.container}/archive",
            params={"path": "/"},
            body=packed.getvalue(),
            headers={"Content-Type": "application/x-tar"},
        )


def _is_new(found: dict[str, Any]) -> bool:
    state = state_of(found)
    return state.status in ("created", "configured", "initialized") and not state.error
