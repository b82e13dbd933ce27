"""A command beside a run, by Docker's own exec: words as they are, no shell."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hodei.backends.docker.engine import ANSWER_S, DaemonError, Engine
from hodei.backends.docker.frames import STDOUT, frames
from hodei.model.backend import Executed
from hodei.model.errors import BackendRefused, NotFound

SAID_LIMIT = 1 << 20


async def execute(engine: Engine, container: str, command: Sequence[str], timeout_ms: int) -> Executed:
    """NotFound if the container does not run. One that is not over in time is left alone: Docker can not end it; it goes
    with its container at the latest."""
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
            return Executed(None, bytes(said[1]), bytes(said[2]), cut)
        for _ in range(int(ANSWER_S / 0.02)):
            told = await engine.ask_json("GET", f"exec/{made['Id']}/json")
            if not told.get("Running"):
                break
            await asyncio.sleep(0.02)  # its output has ended a moment before it is said to have
        code = told.get("ExitCode")
        return Executed(code, bytes(said[1]), bytes(said[2]), cut)
    except DaemonError as error:
        if error.status in (404, 409):
            raise NotFound(f"it does not run: {error.message}") from None
        if error.status == 400:
            # The command itself can not be started, which Docker says instead of an exit code.
            return Executed(127 if "not found" in error.message else 126, b"", error.message.encode())
        raise
