"""Starts containers exactly once: a container with the run's name is adopted, never created again.

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

from hodei.backends.docker.container_spec import CHECKPOINT_DIR, INSTALLATION, RUN, ContainerSpec
from hodei.backends.docker.engine import CHANGE_TIMEOUT_S, DaemonError, Engine
from hodei.backends.docker.runs import (
    State,
    TrackedRun,
    end_of,
    exec_failure,
    has_run,
    lost,
    never_ran,
    not_started,
    state_of,
)
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused
from hodei.model.facts import RunObserved

_HUB = "https://index.docker.io/v1/"
# Permanent errors of a registry.
_PERMANENT = (
    "manifest unknown",
    "not found",
    "pull access denied",
    "unauthorized",
    "does not exist",
    "invalid reference",
)


class Images:
    """Images on a host: each is pulled once at a time, with the operator's login if there is one."""

    def __init__(self, engine: Engine, timeout_s: float, auth_file: str = "") -> None:
        self._engine, self._within_s, self._auth_file = engine, timeout_s, auth_file
        self._pulls: dict[str, asyncio.Task[None]] = {}

    async def pull(self, image: str) -> None:
        """BackendRefused if the image can never be pulled, BackendError if it cannot be pulled now."""
        task = self._pulls.get(image)
        if task is None:
            task = asyncio.create_task(self._pull(image), name=f"pull {image} to {self._engine.host.name}")
            self._pulls[image] = task
            task.add_done_callback(lambda _: self._pulls.pop(image, None))
        await asyncio.shield(task)

    async def _pull(self, image: str) -> None:
        name, tag = split_image(image)
        params = {"fromImage": name} | ({"tag": tag} if tag else {})
        headers = {}
        if login := login_for(image, self._auth_file):
            headers["X-Registry-Auth"] = login
        try:
            async with self._engine.stream(
                "POST", "images/create", params=params, headers=headers, timeout_s=self._within_s
            ) as response:
                async for line in response.lines():
                    if b'"error' in line:
                        answer = msgspec.json.decode(line)
                        detail = answer.get("errorDetail") or {}
                        raise DaemonError(500, str(detail.get("message") or answer.get("error")))
        except DaemonError as error:
            raise _pull_failure(image, error.message) from None

    async def held(self) -> dict[str, int]:
        """The images of the host by name, with their bytes."""
        held: dict[str, int] = {}
        for image in await self._engine.request_json("GET", "images/json"):
            for name in image.get("RepoTags") or ():
                if name != "<none>:<none>":
                    held[name] = int(image.get("Size") or 0)
        return dict(sorted(held.items()))

    async def close(self) -> None:
        for task in list(self._pulls.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, BackendError, BackendRefused):
                await task


def _pull_failure(image: str, error: str) -> BackendError | BackendRefused:
    text = f"the image {image} cannot be pulled: {error}"
    if any(words in error for words in _PERMANENT):
        return BackendRefused(text, hint="check its name, and that the backend has a login for its registry")
    return BackendError(text, hint="load it on the host, or check that the host reaches the registry")


def split_image(image: str) -> tuple[str, str]:
    """(name, tag or digest): `host:5000/a:b` is (`host:5000/a`, `b`); without a tag it is `latest`."""
    name, at, digest = image.partition("@")
    if at:
        return name, digest
    head, colon, tag = name.rpartition(":")
    return (head, tag) if colon and "/" not in tag else (name, "latest")


def login_for(image: str, auth_file: str) -> str:
    """The X-Registry-Auth header for an image, from a file like Docker's own config.json; "" without a login."""
    if not auth_file:
        return ""
    first = image.partition("/")[0]
    registry = first if "/" in image and ("." in first or ":" in first or first == "localhost") else _HUB
    try:
        known: dict[str, Any] = msgspec.json.decode(Path(auth_file).read_bytes()).get("auths", {})
        found = known.get(registry) or known.get(f"https://{registry}") or {}
        user, _, password = base64.b64decode(found.get("auth", "")).decode().partition(":")
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise BackendError(f"registry_auth {auth_file} cannot be read: {type(error).__name__}") from None
    if not user:
        return ""
    header = {"username": user, "password": password, "serveraddress": registry}
    return base64.urlsafe_b64encode(msgspec.json.encode(header)).decode()


ADOPT_TRIES = 20
RETRY_S = 0.1
# Timeout for reading the past events of a container.
EVENTS_S = 5.0

Outcome = RunObserved | dict[str, Any] | None


class _Refusal(Exception):
    """The daemon will not run it; nothing of it has run."""

    def __init__(self, observed: RunObserved) -> None:
        super().__init__(observed.reason)
        self.observed = observed


class ContainerStarts:
    """Starts runs on one host. `wait_reachable` waits for the host, or raises BackendError after a while; `wait_up` waits
    without a limit. `skew_ms`: how far the host's clock is ahead."""

    def __init__(
        self,
        engine: Engine,
        images: Images,
        installation: str,
        at_once: int,
        wait_reachable: Callable[[], Awaitable[None]],
        wait_up: Callable[[], Awaitable[object]],
        now_ms: Callable[[], int],
        skew_ms: Callable[[], int],
    ) -> None:
        self._engine, self._images, self._installation = engine, images, installation
        self._slots = asyncio.Semaphore(at_once)
        self._wait_reachable, self._wait_up, self._now_ms, self._skew_ms = wait_reachable, wait_up, now_ms, skew_ms

    async def begin(self, tracked: TrackedRun, spec: ContainerSpec) -> Outcome:
        """None: started. An observation: refused, or stopped, or ended. A dict: the container of an earlier request."""
        try:
            if tracked.in_doubt:
                found = await self._inspect(spec.name)
                tracked.in_doubt = found is not None  # without a container no late request can start it
                outcome = await self._resolve(self._adopt(tracked, spec, found)) if found is not None else None
                if outcome is not None:
                    return outcome
            if spec.options.pull == "always":
                await self._wait_reachable()
                await self._images.pull(spec.image)
            config = spec.body["HostConfig"]
            protect = config["OomScoreAdj"] < 0
            while True:
                if tracked.stop is not None:
                    return self._stopped(tracked)
                if not protect:
                    config["OomScoreAdj"] = max(config["OomScoreAdj"], 0)
                if await self._create(tracked, spec):
                    await self._make_checkpoint_dir(tracked)
                    if await self._start(tracked, first_try=protect):
                        return None
                    # A daemon that runs in a container often may not lower OOM scores, and its error does not say so
                    # clearly: try once more without.
                    protect = False
                if tracked.in_doubt and (outcome := await self._resolve(tracked)) is not None:
                    return outcome
        except _Refusal as refusal:
            return refusal.observed
        except BackendRefused as error:
            return not_started(tracked.run, self._now_ms(), error.message, permanent=True)
        except BackendError as error:
            return not_started(tracked.run, self._now_ms(), error.message, reached=error.code != NOT_REACHED)

    def _stopped(self, tracked: TrackedRun) -> RunObserved:
        reason = tracked.stop.reason if tracked.stop is not None else ""
        return RunObserved(tracked.run, "stopped", self._now_ms(), reason=reason)

    async def _create(self, tracked: TrackedRun, spec: ContainerSpec) -> bool:
        """True: the container is new, and no start was requested. False: the run is being stopped; or, if it is `in_doubt`,
        a container with its name exists."""
        pulled = spec.options.pull != "missing"
        sent = False
        while True:
            # BackendError lets the run start elsewhere. That is right even if a create request was sent: a created container
            # does not run, and one that appears late is removed (see `host`).
            await self._wait_reachable()
            try:
                if tracked.stop is not None:
                    found = await self._engine.container(spec.name) if sent else None
                    tracked.in_doubt = found is not None
                    if found is not None:
                        self._adopt(tracked, spec, found)
                    return False
                async with self._slots:
                    created = await self._engine.request_json(
                        "POST",
                        "containers/create",
                        params={"name": spec.name},
                        body=spec.body,
                        timeout_s=CHANGE_TIMEOUT_S,
                    )
                tracked.container = created["Id"]
                return True
            except DaemonError as error:
                if error.status == 409:
                    tracked.in_doubt = True  # created by an earlier request, after which a start may have been sent
                    await self._adopt_by_name(tracked, spec)
                    return False
                if error.status == 404 and not pulled:
                    pulled = True
                    await self._images.pull(spec.image)
                elif error.status == 404:
                    raise BackendError(f"{error.message} (pull policy: {spec.options.pull})") from None
                elif error.status == 400:
                    raise BackendRefused(error.message) from None
                elif error.status and not error.unknown:
                    raise
                else:
                    # Unknown whether it was created. Try again when the host is back: a name conflict shows that it was.
                    sent = tracked.create_in_doubt = sent or error.sent
                    await asyncio.sleep(RETRY_S)

    async def _adopt_by_name(self, tracked: TrackedRun, spec: ContainerSpec) -> None:
        for _ in range(ADOPT_TRIES):
            found = await self._inspect(spec.name)
            if found is not None:
                self._adopt(tracked, spec, found)
                return
            await asyncio.sleep(RETRY_S)  # the name is reserved before the container exists
        raise BackendError(f"{self._engine.host.name}: the name {spec.name} is taken, but there is no such container")

    def _adopt(self, tracked: TrackedRun, spec: ContainerSpec, found: dict[str, Any]) -> TrackedRun:
        labels = (found.get("Config") or {}).get("Labels") or {}
        if labels.get(INSTALLATION) != self._installation or labels.get(RUN) != spec.run:
            raise BackendError(f"{self._engine.host.name} has a container {spec.name} of another owner")
        tracked.container = found["Id"]
        return tracked

    async def _start(self, tracked: TrackedRun, *, first_try: bool) -> bool:
        """Request the start of a new container once. False: the outcome is unknown, or the run is being stopped, or the first of
        two tries was refused."""
        while tracked.stop is None:
            tracked.in_doubt = True
            try:
                async with self._slots:
                    await self._engine.request(
                        "POST", f"containers/{tracked.container}/start", timeout_s=CHANGE_TIMEOUT_S
                    )
            except DaemonError as error:
                if error.unknown:
                    return False
                if error.status >= 500:
                    found = await self._inspect(tracked.container)
                    if found is not None and has_run(found):
                        return False
                    if first_try and error.sent:
                        await self._discard(tracked)
                        return False
                tracked.in_doubt = False
                if not error.sent:
                    await asyncio.sleep(RETRY_S)
                    await self._wait_reachable()
                    continue
                if error.status != 304:
                    raise _Refusal(self._start_failure(tracked, error)) from None
            tracked.in_doubt = False
            return True
        return False

    async def _discard(self, tracked: TrackedRun) -> None:
        """Remove a container that the daemon refused to start."""
        id = tracked.discarded = tracked.container
        while (found := await self._inspect(id)) is not None and not has_run(found):
            with contextlib.suppress(DaemonError):
                await self._engine.request("DELETE", f"containers/{id}", params={"v": "1"}, timeout_s=CHANGE_TIMEOUT_S)
                continue
            await asyncio.sleep(RETRY_S)
        if found is None:
            tracked.in_doubt, tracked.container = False, ""

    async def _inspect(self, name: str) -> dict[str, Any] | None:
        """Inspect a container, without a timeout: giving up would mean that the run did not start."""
        while True:
            await self._wait_up()
            try:
                return await self._engine.container(name)
            except DaemonError:
                await asyncio.sleep(RETRY_S)

    async def _resolve(self, tracked: TrackedRun) -> Outcome:
        """The outcome of a start request without an answer. None: the container has not run, and is removed, so that a late
        request cannot start it.

        The daemon does one thing at a time with a container: it refuses to remove a running one, and to start one that is
        being removed. The daemon's events show a container that ran and ended between the inspection and its removal.
        """
        id, removing = tracked.container, False
        while True:
            found = await self._inspect(id)
            if found is None:
                outcome = await self._read_events(tracked, id, removed_by_us=removing)
                tracked.in_doubt, tracked.container = False, ""
                return outcome
            if never_ran(found):
                tracked.discarded, removing = id, True
                with contextlib.suppress(DaemonError):  # it runs by now, or there was no answer: inspect again
                    await self._engine.request(
                        "DELETE", f"containers/{id}", params={"v": "1"}, timeout_s=CHANGE_TIMEOUT_S
                    )
                    continue
            elif state_of(found).status != "removing":
                tracked.in_doubt, tracked.discarded = False, ""
                return found
            await asyncio.sleep(RETRY_S)

    async def _read_events(self, tracked: TrackedRun, id: str, *, removed_by_us: bool) -> RunObserved | None:
        """The end of a removed container, from the daemon's past events. None: it never ran."""
        started_ms, ended = 0, None
        filters = msgspec.json.encode({"container": [id]}).decode()
        with contextlib.suppress(DaemonError, TimeoutError):
            async with (
                asyncio.timeout(EVENTS_S),
                aclosing(self._engine.json_lines("events", {"since": "1", "filters": filters})) as events,
            ):
                async for event in events:
                    at_ms = int(event.get("timeNano") or 0) // 1_000_000 - self._skew_ms()
                    action = str(event.get("Action") or event.get("status") or "")
                    if action == "start":
                        started_ms = at_ms
                    elif action == "die":
                        attributes = (event.get("Actor") or {}).get("Attributes") or {}
                        code = int(attributes.get("exitCode") or attributes.get("containerExitCode") or 0)
                        ended = State("exited", code, started_ms=started_ms, finished_ms=at_ms)
                    elif action in ("destroy", "remove"):
                        break
        if ended is not None:
            tracked.started_ms = started_ms
            return end_of(tracked.run, ended, tracked.stop, timeout_ms=tracked.supervision.timeout_ms)
        if started_ms or not removed_by_us:
            return lost(tracked.run, self._now_ms(), f"its container was removed from {self._engine.host.name}")
        return None

    def _start_failure(self, tracked: TrackedRun, error: DaemonError) -> RunObserved:
        text = error.message
        if "docker-init" in text:
            text = f"{text}; install tini (docker-init) on the host, or set init = false for this backend"
        at_ms = self._now_ms()
        return exec_failure(tracked.run, at_ms, text) or not_started(tracked.run, at_ms, text)

    async def _make_checkpoint_dir(self, tracked: TrackedRun) -> None:
        """A directory for the checkpoint file, writable by every user in the container."""
        if not tracked.supervision.checkpoint_file.startswith(CHECKPOINT_DIR):
            return
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            entry = tarfile.TarInfo(CHECKPOINT_DIR.strip("/"))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(entry)
        await self._engine.request(
            "PUT",
            f"containers/{tracked.container}/archive",
            params={"path": "/"},
            body=packed.getvalue(),
            headers={"Content-Type": "application/x-tar"},
        )
