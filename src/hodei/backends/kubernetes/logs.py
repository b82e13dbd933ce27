"""What runs say, by byte offsets: from the cluster while the pod is there, from a file after that.

Both streams are one in a pod's log; it is stdout here. A node keeps only the last part of a very long log (10 MiB by its
usual settings), and only that can be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from pathlib import Path

from hodei.agent.aging import Aging
from hodei.backends.kubernetes.manifest import MAIN
from hodei.kube.api.client import Api, ApiError
from hodei.model.errors import BackendError, NotFound
from hodei.model.ids import RunId

READ_LIMIT = 1 << 20
READ_S = 20.0
KEEP_S = 25.0
DEFAULT_CAP = 16 << 20
_AT_ONCE = 8


class Logs:
    """`home`: where the logs of ended runs are kept, `cap` bytes of each at most, for `keep_s`."""

    def __init__(self, home: Path, cap: int | None, keep_s: float) -> None:
        self._home, self._cap, self._aging = home, cap or DEFAULT_CAP, Aging(f"{home}.clock", keep_s)
        self._gate = asyncio.Semaphore(_AT_ONCE)

    async def read(self, api: Api, pod_path: str, run: RunId, offset: int, limit: int) -> tuple[bytes, int]:
        """From the cluster; NotFound if there is no such pod. The API knows no offsets: what is before is thrown away."""
        limit, skip = max(0, min(limit, READ_LIMIT)), offset
        out = bytearray()
        try:
            async with asyncio.timeout(READ_S), contextlib.aclosing(_pieces(api, pod_path, offset + limit)) as pieces:
                async for piece in pieces:
                    out += piece[skip:] if skip else piece
                    skip = max(0, skip - len(piece))
        except TimeoutError:
            raise BackendError(f"the log of run {run} did not come within {READ_S:g} s") from None
        except ApiError as error:
            if error.status == 400:  # its container has not begun
                return b"", offset
            if error.status == 404:
                raise NotFound(f"no log is kept of run {run}") from None
            raise BackendError(error.message[:1000], hint=error.hint) from error
        return bytes(out[:limit]), offset + min(len(out), limit)

    async def keep(self, api: Api, pod_path: str, run: RunId) -> None:
        """Copy it to a file, so that the pod can go. All or nothing, and once. ApiError, TimeoutError or OSError."""
        if self.kept(run):
            return
        async with self._gate, asyncio.timeout(KEEP_S):
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = self._home / f".{run}"
            with draft.open("wb") as file:
                async with contextlib.aclosing(_pieces(api, pod_path, self._cap)) as pieces:
                    async for piece in pieces:
                        file.write(piece)
            os.replace(draft, self._home / run)

    def kept(self, run: RunId) -> bool:
        return (self._home / run).is_file()

    def read_kept(self, run: RunId, offset: int, limit: int) -> tuple[bytes, int]:
        try:
            with (self._home / run).open("rb") as file:
                file.seek(offset)
                data = file.read(max(0, min(limit, READ_LIMIT)))
        except FileNotFoundError:
            raise NotFound(f"no log is kept of run {run}") from None
        return data, offset + len(data)

    def prune(self) -> None:
        """Away with those that are older than they are kept for."""
        before = self._aging.oldest_s()
        with contextlib.suppress(FileNotFoundError):
            for place in os.scandir(self._home):
                with contextlib.suppress(OSError):
                    if place.stat().st_mtime < before:
                        os.unlink(place.path)


async def _pieces(api: Api, pod_path: str, limit: int) -> AsyncGenerator[bytes, None]:
    params = {"container": MAIN, "limitBytes": str(max(limit, 1))}
    stream = api.stream(f"{pod_path}/log", params, lines=False, quiet_s=READ_S)
    try:
        async for chunks in stream:
            for chunk in chunks:
                yield chunk
    finally:
        await stream.aclose()
