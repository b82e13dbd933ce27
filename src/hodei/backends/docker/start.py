"""From an order to a running container, exactly once: a container with the run's name is adopted, never created again.

Docker restarts an ended container on request, so a start request without an answer is never repeated. Its outcome is
read when the host answers again; if it had none, the container is removed before another is created, so that a late
request finds nothing to start.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import tarfile
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from hodei.backends.docker.container_spec import CHECKPOINT_DIR, INSTALLATION, RUN, Prepared
from hodei.backends.docker.engine import WORK_S, DaemonError, Engine
from hodei.backends.docker.run_table import Tracked
from hodei.backends.docker.states import State, could_not_run, end_of, gone, never_ran, not_started, state_of
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused
from hodei.model.facts import RunObserved

# ---------------------------------------------------------------------------------------------- images
# Images on a host: pulled by policy, each once at a time, with the operator's login if there is one.


_HUB = "https://index.docker.io/v1/"
# Permanent errors of a registry.
_NEVER = ("manifest unknown", "not found", "pull access denied", "unauthorized", "does not exist", "invalid reference")


class Images:
    def __init__(self, engine: Engine, within_s: float, auth_file: str = "") -> None:
        self._engine, self._within_s, self._auth_file = engine, within_s, auth_file
        self._coming: dict[str, asyncio.Task[None]] = {}

    async def pull(self, image: str) -> None:
        """BackendRefused if the image can never be pulled, BackendError if it cannot be pulled now."""
        task = self._coming.get(image)
        if task is None:
            task = asyncio.create_task(self._pull(image), name=f"pull {image} to {self._engine.host.name}")
            self._coming[image] = task
            task.add_done_callback(lambda _: self._coming.pop(image, None))
        await asyncio.shield(task)

    async def _pull(self, image: str) -> None:
        name, tag = split_image(image)
        params = {"fromImage": name} | ({"tag": tag} if tag else {})
        headers = {}
        if login := login_for(image, self._auth_file):
            headers["X-Registry-Auth"] = login
        try:
            async with self._engine.answer(
                "POST", "images/create", params=params, headers=headers, within_s=self._within_s
            ) as response:
                async for line in response.lines():
                    _raise_pull_error(line)
        except DaemonError as error:
            raise _in_words(image, error.message) from None

    async def close(self) -> None:
        for task in list(self._coming.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, BackendError, BackendRefused):
                await task


def _raise_pull_error(line: bytes) -> None:
    if b'"error' in line:
        told = msgspec.json.decode(line)
        raise DaemonError(500, str((told.get("errorDetail") or {}).get("message") or told.get("error")))


def _in_words(image: str, said: str) -> BackendError | BackendRefused:
    text = f"the image {image} cannot be fetched: {said}"
    if any(word in said for word in _NEVER):
        return BackendRefused(text, hint="check its name, and that the backend has a login for its registry")
    return BackendError(text, hint="load it on the host, or see that the host reaches the registry")


def split_image(image: str) -> tuple[str, str]:
    """(name, tag or digest): `host:5000/a:b` is (`host:5000/a`, `b`); without a tag it is `latest`."""
    name, at, digest = image.partition("@")
    if at:
        return name, digest
    head, colon, tag = name.rpartition(":")
    return (head, tag) if colon and "/" not in tag else (name, "latest")


def login_for(image: str, auth_file: str) -> str:
    """The header for the registry of this image, from a file like Docker's own config.json; "" if there is none."""
    if not auth_file:
        return ""
    first = image.partition("/")[0]
    registry = first if "/" in image and ("." in first or ":" in first or first == "localhost") else _HUB
    try:
        known: dict[str, Any] = msgspec.json.decode(Path(auth_file).read_bytes()).get("auths", {})
        found = known.get(registry) or known.get(f"https://{registry}") or {}
        user, _, password = base64.b64decode(found.get("auth", "")).decode().partition(":")
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise BackendError(f"the file of logins {auth_file} cannot be read: {type(error).__name__}") from None
    if not user:
        return ""
    header = {"username": user, "password": password, "serveraddress": registry}
    return base64.urlsafe_b64encode(msgspec.json.encode(header)).decode()


# ----------------------------------------------------------------------------------------------------

ADOPT_TRIES = 20
LOOK_AGAIN_S = 0.1
# Time limit for reading the past events of a container.
EVENTS_S = 5.0

Outcome = RunObserved | dict[str, Any] | None


class _Refusal(Exception):
    """The daemon will not run it; nothing of it has run."""

    def __init__(self, seen: RunObserved) -> None:
        super().__init__(seen.reason)
        self.seen = seen


class ContainerStarts:
    """Starts runs on one host. `reachable` waits for the host, or raises BackendError after a while; `answers` waits without
    a limit. `skew_ms`: how far the host's clock is ahead."""

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
        """None: started. An observation: it was refused, stopped before its start, or has ended. A dict: the inspected container,
        which an earlier request started."""
        try:
            if tracked.in_doubt:
                found = await self._look(prepared.name)
                tracked.in_doubt = found is not None  # without a container no late request can start it
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
                    # Unknown whether it was created. Try again when the host is back: a conflict of names tells.
                    asked = tracked.may_come_late = asked or error.sent
                    await asyncio.sleep(LOOK_AGAIN_S)

    async def _adopt(self, tracked: Tracked, prepared: Prepared) -> None:
        """Its name is taken."""
        for _ in range(ADOPT_TRIES):
            found = await self._look(prepared.name)
            if found is not None:
                self._take(tracked, prepared, found)
                return
            await asyncio.sleep(LOOK_AGAIN_S)  # the name is reserved before the container exists
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
        """Remove a container that the daemon refused to start."""
        id = tracked.voided = tracked.container
        while (found := await self._look(id)) is not None and not _has_run(found):
            with contextlib.suppress(DaemonError):
                await self._engine.ask("DELETE", f"containers/{id}", params={"v": "1"}, within_s=WORK_S)
                continue
            await asyncio.sleep(LOOK_AGAIN_S)
        if found is None:
            tracked.in_doubt, tracked.container = False, ""

    async def _look(self, name: str) -> dict[str, Any] | None:
        """Inspect a container, without a time limit: giving up would mean that the run did not start."""
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
                with contextlib.suppress(DaemonError):  # it runs by now, or there was no answer: inspect again
                    await self._engine.ask("DELETE", f"containers/{id}", params={"v": "1"}, within_s=WORK_S)
                    continue
            elif state_of(found).status != "removing":
                tracked.in_doubt, tracked.voided = False, ""
                return found
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _what_it_did(self, tracked: Tracked, id: str, *, by_us: bool) -> RunObserved | None:
        """Read the daemon's past events of a removed container."""
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
        """A directory for the checkpoint file, writable by every user in the container."""
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
