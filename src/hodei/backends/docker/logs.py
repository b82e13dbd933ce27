"""Logs by byte offset, from the daemon while the container exists and from an archive after that; and exec.

The daemon knows timestamps, not offsets. So the last read of each stream leaves a bookmark, the timestamp of an entry and its
offset, and the next read begins there instead of at the start.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path

from hodei.backends.base import READ_LIMIT, LogArchive
from hodei.backends.docker.engine import REQUEST_TIMEOUT_S, DaemonError, Engine, Response
from hodei.model.backend import ExecResult
from hodei.model.errors import BackendRefused, NotFound
from hodei.model.ids import RunId
from hodei.ports import Stream

STDOUT, STDERR = 1, 2
_HEADER = 8
# Far above any frame of Docker (16 KiB and a timestamp).
_MAX_FRAME = 64 << 20


async def frames(response: Response) -> AsyncIterator[tuple[int, bytes]]:
    """(stream, data) of Docker's multiplexed output; an incomplete last frame is dropped."""
    buffer = bytearray()
    async for chunk in response:
        buffer += chunk
        at = 0
        while len(buffer) - at >= _HEADER:
            size = int.from_bytes(buffer[at + 4 : at + _HEADER], "big")
            if size > _MAX_FRAME or buffer[at] > STDERR:
                raise ValueError("not a multiplexed stream of Docker")
            if len(buffer) - at < _HEADER + size:
                break
            yield buffer[at], bytes(buffer[at + _HEADER : at + _HEADER + size])
            at += _HEADER + size
        del buffer[:at]


def split_time(frame: bytes) -> tuple[bytes, bytes]:
    """(timestamp, data) of a log frame with timestamps."""
    time, space, data = frame.partition(b" ")
    return (time, data) if space else (b"", frame)


def since_param(time: bytes) -> str:
    """A log timestamp in the form of the `since` parameter: seconds, a dot, nine digits."""
    text = time.decode()
    seconds_part, dot, fraction = text.removesuffix("Z").partition(".")
    seconds = int(datetime.fromisoformat(f"{seconds_part}+00:00").timestamp())
    return f"{seconds}.{(fraction if dot else '')[:9]:0<9}"


OUTPUT_LIMIT = 1 << 20


async def execute(engine: Engine, container: str, command: Sequence[str], timeout_ms: int) -> ExecResult:
    """NotFound if the container does not run. Docker cannot kill an exec: one that exceeds its timeout ends with the container."""
    if not command or any("\0" in word for word in command):
        raise BackendRefused("the command is empty, or holds a NUL character")
    body = {"Cmd": list(command), "AttachStdout": True, "AttachStderr": True, "AttachStdin": False, "Tty": False}
    try:
        created = await engine.request_json("POST", f"containers/{container}/exec", body=body)
        output = {STDOUT: bytearray(), STDERR: bytearray()}
        cut = False
        try:
            async with (
                asyncio.timeout(timeout_ms / 1000),
                engine.stream(
                    "POST", f"exec/{created['Id']}/start", body={"Detach": False, "Tty": False}, timeout_s=None
                ) as response,
            ):
                async for number, part in frames(response):
                    stream = output.get(number, output[STDOUT])
                    cut = cut or len(stream) + len(part) > OUTPUT_LIMIT
                    stream += part[: OUTPUT_LIMIT - len(stream)]
        except TimeoutError:
            return ExecResult(None, bytes(output[STDOUT]), bytes(output[STDERR]), cut)
        for _ in range(int(REQUEST_TIMEOUT_S / 0.02)):
            state = await engine.request_json("GET", f"exec/{created['Id']}/json")
            if not state.get("Running"):
                break
            await asyncio.sleep(0.02)  # the output may close before the exit code is known
        return ExecResult(state.get("ExitCode"), bytes(output[STDOUT]), bytes(output[STDERR]), cut)
    except DaemonError as error:
        if error.status in (404, 409):
            raise NotFound(f"it does not run: {error.message}") from None
        if error.status == 400:
            # The command cannot be started: Docker answers with a message instead of an exit code.
            return ExecResult(127 if "not found" in error.message else 126, b"", error.message.encode())
        raise


READ_TIMEOUT_S = 10.0
ARCHIVE_TIMEOUT_S = 60.0
BOOKMARKS = 1000
STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")
_NUMBER = {"stdout": STDOUT, "stderr": STDERR}


class Logs(LogArchive):
    """Archives at most `cap` bytes of each stream."""

    def __init__(self, home: Path, cap: int | None, keep_s: float) -> None:
        super().__init__(home, keep_s)
        self._cap = cap
        self._bookmarks: OrderedDict[tuple[RunId, Stream], tuple[int, bytes]] = OrderedDict()

    async def read(
        self, engine: Engine, container: str, run: RunId, stream: Stream, offset: int, limit: int
    ) -> tuple[bytes, int]:
        limit = max(0, min(limit, READ_LIMIT))
        begin, mark = self._bookmarks.get((run, stream), (0, b""))
        if offset < begin:
            begin, mark = 0, b""
        params = {"stdout": "0", "stderr": "0", "timestamps": "1", stream: "1"}
        if mark:
            params["since"] = since_param(mark)
        out, at = bytearray(), begin
        async with engine.stream(
            "GET", f"containers/{container}/logs", params=params, timeout_s=READ_TIMEOUT_S
        ) as response:
            async for _, frame in frames(response):
                entry_time, data = split_time(frame)
                if at <= offset and entry_time != mark and entry_time > mark:
                    # Entries with the same timestamp are sent again together, so only the first one can be a bookmark.
                    begin, mark = at, entry_time
                skip = max(offset + len(out) - at, 0)
                out += data[skip:][: limit - len(out)]
                at += len(data)
                if len(out) >= limit:
                    break
        if mark:
            self._bookmarks[(run, stream)] = (begin, mark)
            self._bookmarks.move_to_end((run, stream))
            if len(self._bookmarks) > BOOKMARKS:
                self._bookmarks.popitem(last=False)
        return bytes(out), offset + len(out)

    def read_archived(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        return self.read_file(run, Path(run) / stream, offset, limit)

    async def archive(self, engine: Engine, container: str, run: RunId) -> None:
        """Copy both streams to files, so that the container can be removed. Atomic and idempotent."""
        for stream in STREAMS:
            self._bookmarks.pop((run, stream), None)
        if self.has(run):
            return
        draft = self.home / f".{run}"
        params = {"stdout": "1", "stderr": "1"}
        async with engine.stream(
            "GET", f"containers/{container}/logs", params=params, timeout_s=ARCHIVE_TIMEOUT_S
        ) as response:
            with _Draft(draft, self._cap or 1 << 62) as files:
                async for number, part in frames(response):
                    files.add(number, part)
        os.replace(draft, self.home / run)


class _Draft:
    """Two output files, each up to `cap` bytes."""

    def __init__(self, directory: Path, cap: int) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True)
        self._files = {number: open(directory / name, "wb") for name, number in _NUMBER.items()}  # noqa: SIM115
        self._left = dict.fromkeys(self._files, cap)

    def add(self, number: int, part: bytes) -> None:
        if self._left.get(number, 0) > 0:
            self._files[number].write(part[: self._left[number]])
            self._left[number] -= len(part)

    def __enter__(self) -> _Draft:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
