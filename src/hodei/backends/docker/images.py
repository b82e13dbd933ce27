"""Images on a host: fetched as the policy says, each at most once at a time, with a login if the operator gave one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from pathlib import Path
from typing import Any

import msgspec

from hodei.backends.docker.engine import DaemonError, Engine
from hodei.model.errors import BackendError, BackendRefused

_HUB = "https://index.docker.io/v1/"
# A registry that says this will say it again.
_NEVER = ("manifest unknown", "not found", "pull access denied", "unauthorized", "does not exist", "invalid reference")


class Images:
    def __init__(self, engine: Engine, within_s: float, auth_file: str = "") -> None:
        self._engine, self._within_s, self._auth_file = engine, within_s, auth_file
        self._coming: dict[str, asyncio.Task[None]] = {}

    async def pull(self, image: str) -> None:
        """BackendRefused if no registry will ever give it, BackendError if it could not be had now."""
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
                rest = b""
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        _fail_if_told(line)
                _fail_if_told(rest)
        except DaemonError as error:
            raise _in_words(image, error.message) from None

    async def close(self) -> None:
        for task in list(self._coming.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, BackendError, BackendRefused):
                await task


def _fail_if_told(line: bytes) -> None:
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
