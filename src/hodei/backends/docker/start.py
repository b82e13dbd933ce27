"""From an order to a running container, once: whatever is found under the run's name is adopted, never made a second time.

Docker starts a container that has ended once more if it is asked to, so that a request to start that got no answer is never
repeated. What became of it is found out when the host answers again; if it has done nothing, its container is removed before
another is made, and a request that comes late finds nothing to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import tarfile
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from hodei.backends.docker.container_spec import CHECKPOINT_DIR, INSTALLATION, RUN, Prepared
from hodei.backends.docker.engine import WORK_S, DaemonError, Engine
from hodei.backends.docker.images import Images
from hodei.backends.docker.run_table import Tracked
from hodei.backends.docker.states import State, could_not_run, end_of, gone, never_ran, not_started, state_of
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused
from hodei.model.facts import RunObserved

ADOPT_TRIES = 20
LOOK_AGAIN_S = 0.1
# So long a daemon may take to tell what it did with a container.
EVENTS_S = 5.0

Outcome = RunObserved | dict[str, Any] | None


class _Refusal(Exception):
    """The daemon will not run it; nothing of it has run."""

    def __init__(self, seen: RunObserved) -> None:
        super().__init__(seen.reason)
        self.seen = seen


class ContainerStarts:
    """Begins runs on one host. `reachable` waits until the host answers again, or raises BackendError when it has been
    silent for too long; `answers` waits however long it takes. `skew_ms`: how far the host's clock is ahead."""

    def __init__(
        self,
        engine: Engine,
        images: Images,
        installation: str,
        at_once: int,
        reachable: Callable[[], Awaitable[None]],
        answers: Callable[[], Awaitable[object]],
        now_ms: Callable[[], int],
        skew_ms: Callable[[], int],
    ) -> None:
        self._engine, self._images, self._installation = engine, images, installation
        self._slots = asyncio.Semaphore(at_once)
        self._reachable, self._answers, self._now_ms, self._skew_ms = reachable, answers, now_ms, skew_ms

    async def begin(self, tracked: Tracked, prepared: Prepared) -> Outcome:
        """None: it has been asked to run. An observation: it never will, was told to stop before, or has ended. What the
        daemon says of the container, if it has run, or runs, by an earlier request."""
        try:
            if tracked.in_doubt:
                found = await self._look(prepared.name)
                tracked.in_doubt = found is not None  # without a container there is nothing that could start late
                outcome = await self._settle(self._take(tracked, prepared, found)) if found is not None else None
                if outcome is not None:
                    return outcome
            if prepared.wishes.pull == "always":
                await self._reachable()
                await self._images.pull(prepared.image)
            config = prepared.body["HostConfig"]
            protect = config["OomScoreAdj"] < 0
            while True:
                if tracked.stopping is not None:
                    return self._stopped(tracked)
                if not protect:
                    config["OomScoreAdj"] = max(config["OomScoreAdj"], 0)
                if await self._create(tracked, prepared):
                    await self._make_checkpoint_dir(tracked)
                    if await self._start(tracked, first_try=protect):
                        return None
                    # A daemon in a container of its own often may not protect a run from the kernel, and does not say so
                    # in words that could be relied on: what it refused is tried once more without.
                    protect = False
                if tracked.in_doubt and (outcome := await self._settle(tracked)) is not None:
                    return outcome
        except _Refusal as refusal:
            return refusal.seen
        except BackendRefused as error:
            return not_started(tracked.run, self._now_ms(), error.message, permanent=True)
        except BackendError as error:
            return not_started(tracked.run, self._now_ms(), error.message, reached=error.code != NOT_REACHED)

    def _stopped(self, tracked: Tracked) -> RunObserved:
        reason = tracked.stopping.reason if tracked.stopping is not None else ""
        return RunObserved(tracked.run, "stopped", self._now_ms(), reason=reason)

    # ------------------------------------------------------------------------------------- the container

    async def _create(self, tracked: Tracked, prepared: Prepared) -> bool:
        """Make the container. True: a new one, that nobody was asked to start. False: it is not wanted any more; or, if it
        is `in_doubt`, there was one under its name already."""
        fetched = prepared.wishes.pull != "missing"
        asked = False
        while True:
            # BackendError means that it may begin elsewhere. Nothing runs by being made, so that this is right even if a
            # request to make it was sent: what that makes late is removed (see `host`).
            await self._reachable()
            try:
                if tracked.stopping is not None:
                    found = await self._engine.container(prepared.name) if asked else None
                    tracked.in_doubt = found is not None
                    if found is not None:
                        self._take(tracked, prepared, found)
                    return False
                async with self._slots:
                    made = await self._engine.ask_json(
                        "POST", "containers/create", params={"name": prepared.name}, body=prepared.body, within_s=WORK_S
                    )
                tracked.container = made["Id"]
                return True
            except DaemonError as error:
                if error.status == 409:
                    tracked.in_doubt = True  # made by an earlier request, after which a start may have been sent
                    await self._adopt(tracked, prepared)
                    return False
                if error.status == 404 and not fetched:
                    fetched = True
                    await self._images.pull(prepared.image)
                elif error.status == 404:
                    raise BackendError(f"{error.message} (pull policy: {prepared.wishes.pull})") from None
                elif error.status == 400:
                    raise BackendRefused(error.message) from None
                elif error.status and not error.unknown:
                    raise
                else:
                    # It is unknown whether it was made. Ask again when the host is back; its name tells.
                    asked = tracked.may_come_late = asked or error.sent
                    await asyncio.sleep(LOOK_AGAIN_S)

    async def _adopt(self, tracked: Tracked, prepared: Prepared) -> None:
        """Its name is taken."""
        for _ in range(ADOPT_TRIES):
            found = await self._look(prepared.name)
            if found is not None:
                self._take(tracked, prepared, found)
                return
            await asyncio.sleep(LOOK_AGAIN_S)  # the name is taken before the container is there
        raise BackendError(f"{self._engine.host.name}: the name {prepared.name} is taken, and nothing has it")

    def _take(self, tracked: Tracked, prepared: Prepared, found: dict[str, Any]) -> Tracked:
        labels = (found.get("Config") or {}).get("Labels") or {}
        if labels.get(INSTALLATION) != self._installation or labels.get(RUN) != prepared.run:
            raise BackendError(f"{self._engine.host.name} has a container {prepared.name} that is not ours")
        tracked.container = found["Id"]
        return tracked

    # --------------------------------------------------------------------------------------- starting it

    async def _start(self, tracked: Tracked, *, first_try: bool) -> bool:
        """Ask once for the start of a container that nobody was asked to start before; False: nobody knows whether it
        began, or it is not wanted any more, or it was refused on the first of two tries."""
        while tracked.stopping is None:
            tracked.in_doubt = True
            try:
                async with self._slots:
                    await self._engine.ask("POST", f"containers/{tracked.container}/start", within_s=WORK_S)
            except DaemonError as error:
                if error.unknown:
                    return False
                if error.status >= 500:
                    found = await self._look(tracked.container)
                    if found is not None and _has_run(found):
                        return False
                    if first_try and error.sent:
                        await self._discard(tracked)
                        return False
                tracked.in_doubt = False
                if not error.sent:
                    await asyncio.sleep(LOOK_AGAIN_S)
                    await self._reachable()
                    continue
                if error.status != 304:
                    raise _Refusal(self._refused_to_run(tracked, error)) from None
            tracked.in_doubt = False
            return True
        return False

    async def _discard(self, tracked: Tracked) -> None:
        """Remove a container that the daemon has refused to start."""
        id = tracked.voided = tracked.container
        while (found := await self._look(id)) is not None and not _has_run(found):
            with contextlib.suppress(DaemonError):
                await self._engine.ask("DELETE", f"containers/{id}", params={"v": "1"}, within_s=WORK_S)
                continue
            await asyncio.sleep(LOOK_AGAIN_S)
        if found is None:
            tracked.in_doubt, tracked.container = False, ""

    async def _look(self, name: str) -> dict[str, Any] | None:
        """What the daemon says of a container, however long it takes to say it: whoever gave up here would say that the
        run did not begin."""
        while True:
            await self._answers()
            try:
                return await self._engine.container(name)
            except DaemonError:
                await asyncio.sleep(LOOK_AGAIN_S)

    async def _settle(self, tracked: Tracked) -> Outcome:
        """What became of a container that may have been started by a request without an answer. None: it has not run, and
        no request that comes late will make it run, because it is gone.

        The daemon does one thing at a time with a container: it refuses to remove one that runs, and to start one
        that it removes. One that ran and ended between our look and its removal is told by the daemon's events.
        """
        id, removing = tracked.container, False
        while True:
            found = await self._look(id)
            if found is None:
                outcome = await self._what_it_did(tracked, id, by_us=removing)
                tracked.in_doubt, tracked.container = False, ""
                return outcome
            if never_ran(found):
                tracked.voided, removing = id, True
                with contextlib.suppress(DaemonError):  # it runs by now, or nobody answered: look again
                    await self._engine.ask("DELETE", f"containers/{id}", params={"v": "1"}, within_s=WORK_S)
                    continue
            elif state_of(found).status != "removing":
                tracked.in_doubt, tracked.voided = False, ""
                return found
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _what_it_did(self, tracked: Tracked, id: str, *, by_us: bool) -> RunObserved | None:
        """The daemon remembers for a while what became of a container that is gone."""
        began_ms, ended = 0, None
        filters = msgspec.json.encode({"container": [id]}).decode()
        with contextlib.suppress(DaemonError, TimeoutError):
            async with (
                asyncio.timeout(EVENTS_S),
                aclosing(self._engine.lines("events", {"since": "1", "filters": filters})) as events,
            ):
                async for event in events:
                    at_ms = int(event.get("timeNano") or 0) // 1_000_000 - self._skew_ms()
                    action = str(event.get("Action") or event.get("status") or "")
                    if action == "start":
                        began_ms = at_ms
                    elif action == "die":
                        told = (event.get("Actor") or {}).get("Attributes") or {}
                        code = int(told.get("exitCode") or told.get("containerExitCode") or 0)
                        ended = State("exited", code, started_ms=began_ms, finished_ms=at_ms)
                    elif action in ("destroy", "remove"):
                        break
        if ended is not None:
            tracked.started_ms = began_ms
            return end_of(tracked.run, ended, tracked.stopping, timeout_ms=tracked.care.timeout_ms)
        if began_ms or not by_us:
            return gone(tracked.run, self._now_ms(), f"its container was removed from {self._engine.host.name}")
        return None

    def _refused_to_run(self, tracked: Tracked, error: DaemonError) -> RunObserved:
        said = error.message
        if "docker-init" in said:
            said = f"{said}; install tini (docker-init) on the host, or set init = false for this backend"
        at_ms = self._now_ms()
        return could_not_run(tracked.run, at_ms, said) or not_started(tracked.run, at_ms, said)

    async def _make_checkpoint_dir(self, tracked: Tracked) -> None:
        """Where everybody in the container may write the file that tells of saved work."""
        if not tracked.care.checkpoint_file.startswith(CHECKPOINT_DIR):
            return
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


def _has_run(found: dict[str, Any]) -> bool:
    state = state_of(found)
    return state.going or bool(state.ended and state.started_ms)
