"""A command in the container of a run, by the API's `exec`: words as they are, no shell, output and exit code back.

The streams come over one WebSocket (`v5.channel.k8s.io`, or v4 from API servers before 1.29): the first byte of a message
names its channel. Channel 3 has the last word, a Status with the exit code. A command that is not over in time goes on in
its container: the API has no way to end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from hodei.agent.logs import RetentionClock
from hodei.backends.kubernetes.manifest import MAIN
from hodei.http_client import Unreached
from hodei.kube.api.client import Api, ApiError
from hodei.kube.api.websocket import WebSocket
from hodei.model.backend import ExecResult
from hodei.model.errors import IN_DOUBT, BackendError, BackendRefused, NotFound
from hodei.model.ids import RunId

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
SAID_LIMIT = 1 << 20
_STDOUT, _STDERR, _END = 1, 2, 3
_RIGHT = "the backend's account needs get and create on pods/exec: see deploy/backend-rbac.yaml"


class _Cause(Struct):
    reason: str = ""
    message: str = ""


class _Details(Struct):
    causes: tuple[_Cause, ...] = ()


class _Status(Struct):
    status: str = ""
    reason: str = ""
    message: str = ""
    details: _Details | None = None


class _Said:
    """What the command has said so far, up to a bound for each stream."""

    def __init__(self) -> None:
        self.streams = {_STDOUT: bytearray(), _STDERR: bytearray()}
        self.cut = False

    def add(self, channel: int, part: bytes) -> None:
        stream = self.streams[channel]
        self.cut = self.cut or len(stream) + len(part) > SAID_LIMIT
        stream += part[: SAID_LIMIT - len(stream)]

    def with_code(self, code: int | None, otherwise: str = "") -> ExecResult:
        """`otherwise`: told in the place of an empty stderr."""
        stdout, stderr = (bytes(self.streams[channel]) for channel in (_STDOUT, _STDERR))
        return ExecResult(code, stdout, stderr or otherwise.encode(), self.cut)


async def execute(api: Api, pod_path: str, command: Sequence[str], timeout_ms: int) -> ExecResult:
    """NotFound if the container does not run; BackendError if the API cannot do it now or how it ended is not known."""
    if not command or any("\0" in word for word in command):
        raise BackendRefused("the command is empty, or holds a NUL character")
    params = [("container", MAIN), ("stdout", "true"), ("stderr", "true"), *(("command", word) for word in command)]
    try:
        socket = await api.websocket(f"{pod_path}/exec", params, PROTOCOLS)
    except ApiError as error:
        raise _meaning(error) from error
    said = _Said()
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            ended = await _listen(socket, said)
    except TimeoutError:
        return said.with_code(None)
    except Unreached as failure:
        raise BackendError(f"how the command ended is not known: {failure.why}", code=IN_DOUBT) from failure
    finally:
        await socket.close()
    return _result(ended, said)


async def _listen(socket: WebSocket, said: _Said) -> _Status:
    """Until the last word, which is returned."""
    while (message := await socket.message()) is not None:
        channel, part = message[0] if message else 0, message[1:]
        if channel in said.streams:
            said.add(channel, part)
        elif channel == _END:
            try:
                return msgspec.json.decode(part, type=_Status)
            except msgspec.DecodeError:
                return _Status(message=part[:300].decode(errors="replace"))
    raise Unreached("the connection was closed before the command's exit code came")


def _result(ended: _Status, said: _Said) -> ExecResult:
    if ended.status == "Success":
        return said.with_code(0)
    causes = ended.details.causes if ended.details is not None else ()
    code = next((one.message for one in causes if one.reason == "ExitCode"), "")
    if code.isdigit():
        return said.with_code(int(code))
    text = ended.message
    # The command itself cannot be started, which comes instead of an exit code.
    if "executable file not found" in text or "no such file or directory" in text:
        return said.with_code(127, text)
    if "permission denied" in text or "exec format error" in text or "is a directory" in text:
        return said.with_code(126, text)
    if "container not found" in text or "not running" in text:
        raise NotFound(f"it does not run: {text[:500]}")
    raise BackendError(f"how the command ended is not known: {text[:500] or ended.reason}", code=IN_DOUBT)


def _meaning(error: ApiError) -> BackendError | BackendRefused | NotFound:
    text = error.message[:1000]
    if error.status == 404 or "container not found" in text or "not running" in text:
        return NotFound(f"it does not run: {text}")
    if error.status == 403:
        return BackendRefused(text, hint=_RIGHT)
    return BackendError(text, hint=error.hint)


READ_LIMIT = 1 << 20
READ_S = 20.0
KEEP_S = 25.0
DEFAULT_CAP = 16 << 20
_AT_ONCE = 8


class Logs:
    """`home`: where the logs of ended runs are kept, `cap` bytes of each at most, for `keep_s`."""

    def __init__(self, home: Path, cap: int | None, keep_s: float) -> None:
        self._home, self._cap, self._retention = home, cap or DEFAULT_CAP, RetentionClock(f"{home}.clock", keep_s)
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
        before = self._retention.cutoff_s()
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
