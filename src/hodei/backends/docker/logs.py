"""What runs say, by byte offsets, from the daemon while the container is there and from a file after that.

A daemon knows lines and times, not offsets. So a bookmark is kept for each reader's place: the time of an entry and the
offset that it begins at; the next question begins there instead of at the very beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path

from hodei.agent.logs import RetentionClock
from hodei.backends.docker.engine import ANSWER_S, DaemonError, Engine, Response
from hodei.model.backend import ExecResult
from hodei.model.errors import BackendRefused, NotFound
from hodei.model.ids import RunId
from hodei.ports import Stream

# ---------------------------------------------------------------------------------------------- frames
# Docker's multiplexed streams: frames of one of two streams, each with a head of eight bytes.


STDOUT, STDERR = 1, 2
_HEAD = 8
# Far above any frame of Docker (16 KiB and a timestamp).
_LONGEST = 64 << 20


async def frames(response: Response) -> AsyncIterator[tuple[int, bytes]]:
    """(stream, data) until the end; a torn last frame is dropped."""
    buffer = bytearray()
    async for chunk in response:
        buffer += chunk
        at = 0
        while len(buffer) - at >= _HEAD:
            size = int.from_bytes(buffer[at + 4 : at + _HEAD], "big")
            if size > _LONGEST or buffer[at] > STDERR:
                raise ValueError("this is not one of Docker's streams")
            if len(buffer) - at < _HEAD + size:
                break
            yield buffer[at], bytes(buffer[at + _HEAD : at + _HEAD + size])
            at += _HEAD + size
        del buffer[:at]


def split_time(frame: bytes) -> tuple[bytes, bytes]:
    """(timestamp, data) of a log frame with timestamps."""
    time, space, said = frame.partition(b" ")
    return (time, said) if space else (b"", frame)


def since(time: bytes) -> str:
    """A log timestamp in the form of the `since` parameter: seconds, a dot, nine digits."""
    text = time.decode()
    whole, dot, fraction = text.removesuffix("Z").partition(".")
    seconds = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
    return f"{seconds}.{(fraction if dot else '')[:9]:0<9}"


# ----------------------------------------------------------------------------------------------------

SAID_LIMIT = 1 << 20


async def execute(engine: Engine, container: str, command: Sequence[str], timeout_ms: int) -> ExecResult:
    """NotFound if the container does not run. Docker cannot end an exec: one that exceeds its timeout ends with the container."""
    if not command or any("\0" in word for word in command):
        raise BackendRefused("the command is empty, or holds a NUL character")
    body = {"Cmd": list(command), "AttachStdout": True, "AttachStderr": True, "AttachStdin": False, "Tty": False}
    try:
        made = await engine.ask_json("POST", f"containers/{container}/exec", body=body)
        said = {1: bytearray(), 2: bytearray()}
        cut = False
        try:
            async with (
                asyncio.timeout(timeout_ms / 1000),
                engine.answer(
                    "POST", f"exec/{made['Id']}/start", body={"Detach": False, "Tty": False}, within_s=None
                ) as response,
            ):
                async for number, part in frames(response):
                    stream = said.get(number, said[STDOUT])
                    cut = cut or len(stream) + len(part) > SAID_LIMIT
                    stream += part[: SAID_LIMIT - len(stream)]
        except TimeoutError:
            return ExecResult(None, bytes(said[1]), bytes(said[2]), cut)
        for _ in range(int(ANSWER_S / 0.02)):
            told = await engine.ask_json("GET", f"exec/{made['Id']}/json")
            if not told.get("Running"):
                break
            await asyncio.sleep(0.02)  # the output may close before the exit code is known
        code = told.get("ExitCode")
        return ExecResult(code, bytes(said[1]), bytes(said[2]), cut)
    except DaemonError as error:
        if error.status in (404, 409):
            raise NotFound(f"it does not run: {error.message}") from None
        if error.status == 400:
            # The command cannot be started: Docker answers with a message instead of an exit code.
            return ExecResult(127 if "not found" in error.message else 126, b"", error.message.encode())
        raise


READ_LIMIT = 1 << 20
READ_S = 10.0
KEEP_S = 60.0
BOOKMARKS = 1000
STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")
_NUMBER = {"stdout": STDOUT, "stderr": STDERR}


class Logs:
    """`home`: where the logs of runs are kept whose containers are gone; `cap` bytes of each stream at most."""

    def __init__(self, home: Path, cap: int | None, keep_s: float) -> None:
        self._home, self._cap, self._retention = home, cap, RetentionClock(f"{home}.clock", keep_s)
        self._marks: OrderedDict[tuple[RunId, Stream], tuple[int, bytes]] = OrderedDict()

    # ------------------------------------------------------------------------------------- from a daemon

    async def read(
        self, engine: Engine, container: str, run: RunId, stream: Stream, offset: int, limit: int
    ) -> tuple[bytes, int]:
        limit = max(0, min(limit, READ_LIMIT))
        begin, mark = self._marks.get((run, stream), (0, b""))
        if offset < begin:
            begin, mark = 0, b""
        params = {"stdout": "0", "stderr": "0", "timestamps": "1", stream: "1"}
        if mark:
            params["since"] = since(mark)
        out, at = bytearray(), begin
        async with engine.answer("GET", f"containers/{container}/logs", params=params, within_s=READ_S) as response:
            async for _, frame in frames(response):
                entry_time, said = split_time(frame)
                if at <= offset and entry_time != mark and entry_time > mark:
                    # Entries of the same moment are told again together, so that only the first of them is a mark.
                    begin, mark = at, entry_time
                skip = max(offset + len(out) - at, 0)
                out += said[skip:][: limit - len(out)]
                at += len(said)
                if len(out) >= limit:
                    break
        if mark:
            self._marks[(run, stream)] = (begin, mark)
            self._marks.move_to_end((run, stream))
            if len(self._marks) > BOOKMARKS:
                self._marks.popitem(last=False)
        return bytes(out), offset + len(out)

    # -------------------------------------------------------------------------------------- from a file

    def kept(self, run: RunId) -> bool:
        return (self._home / run).is_dir()

    def read_kept(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        """NotFound if nothing is kept of it."""
        try:
            with open(self._home / run / stream, "rb") as file:
                file.seek(max(offset, 0))
                data = file.read(max(0, min(limit, READ_LIMIT)))
        except FileNotFoundError:
            raise NotFound(f"no log is kept of run {run}") from None
        return data, max(offset, 0) + len(data)

    async def keep(self, engine: Engine, container: str, run: RunId) -> None:
        """Copy both streams to files, so that the container can go. All or nothing, and once."""
        for stream in STREAMS:
            self._marks.pop((run, stream), None)
        if self.kept(run):
            return
        draft = self._home / f".{run}"
        params = {"stdout": "1", "stderr": "1"}
        async with engine.answer("GET", f"containers/{container}/logs", params=params, within_s=KEEP_S) as response:
            with _Draft(draft, self._cap or 1 << 62) as said:
                async for number, part in frames(response):
                    said.add(number, part)
        os.replace(draft, self._home / run)

    def prune(self) -> None:
        """Away with those that are older than they are kept for."""
        before = self._retention.cutoff_s()
        with contextlib.suppress(FileNotFoundError):
            for place in os.scandir(self._home):
                with contextlib.suppress(OSError):
                    if place.stat().st_mtime < before:
                        shutil.rmtree(place.path, ignore_errors=True)


class _Draft:
    """Two files that are being written, each up to `cap` bytes."""

    def __init__(self, place: Path, cap: int) -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(mode=0o700, parents=True)
        self._files = {number: open(place / name, "wb") for name, number in _NUMBER.items()}  # noqa: SIM115
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
