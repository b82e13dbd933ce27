"""A command on this machine, for an operator: its own process group, a clean environment, an end at its time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence

from hodei.model.backend import Executed

OUTPUT_LIMIT = 1 << 20
# Not the server's own: that may hold secrets.
_HANDED_ON = ("PATH", "LANG", "TZ", "HOME", "USER", "LOGNAME")
NOT_FOUND, NOT_RUNNABLE = 127, 126


async def run_here(command: Sequence[str], timeout_s: float) -> Executed:
    """`exit_code` as a shell would tell it: 127 if there is no such program, 126 if it cannot be run."""
    env = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUNNABLE
        return Executed(code, stderr=f"{command[0]}: {error.strerror}\n".encode())
    assert process.stdout is not None
    assert process.stderr is not None
    reading = asyncio.gather(_read(process.stdout), _read(process.stderr))
    try:
        async with asyncio.timeout(timeout_s):
            (stdout, cut_out), (stderr, cut_err) = await reading
            code = await process.wait()
    except TimeoutError:
        return Executed(None)
    finally:
        # Also what it has left behind: nobody waits for that.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return Executed(128 - code if code < 0 else code, stdout, stderr, cut_out or cut_err)


async def _read(stream: asyncio.StreamReader) -> tuple[bytes, bool]:
    """The beginning of what is said, and whether there was more; all of it is read, so that nobody is stopped by it."""
    kept, cut = bytearray(), False
    while part := await stream.read(1 << 16):
        room = OUTPUT_LIMIT - len(kept)
        kept += part[:room]
        cut = cut or len(part) > room
    return bytes(kept), cut
