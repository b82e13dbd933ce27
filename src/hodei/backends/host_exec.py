"""A command on this machine, for an operator: in a session of its own, with a clean environment, ended at its time or with
the server. `supervise` sees to the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from hodei.backends.supervise import NOT_RUNNABLE
from hodei.model.backend import ExecResult

OUTPUT_LIMIT = 1 << 20
# Not the server's own: that may hold secrets.
_HANDED_ON = ("PATH", "LANG", "TZ", "HOME", "USER", "LOGNAME")
_SUPERVISOR = (sys.executable, "-I", "-S", str(Path(__file__).with_name("supervise.py")))
# How long the supervisor has to end what is left; and later than ours its own time is over, should we be stopped.
_ENDING_S = 10.0
_LAST_WORDS_S = 1.0


class _Said:
    """The beginning of what is said. All of it is read, so that a full pipe stops no program."""

    def __init__(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        self.kept, self.cut = bytearray(), False
        self.reading = asyncio.create_task(self._read(stream))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(1 << 16):
            room = OUTPUT_LIMIT - len(self.kept)
            self.kept += part[:room]
            self.cut = self.cut or len(part) > room


async def run_here(command: Sequence[str], timeout_s: float) -> ExecResult:
    """`exit_code` as a shell would tell it: 127 if there is no such program, 126 if it cannot be run. None if it was not
    over in time, with what it had said until then. Nothing that it started is left."""
    env = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
    try:
        process = await asyncio.create_subprocess_exec(
            *_SUPERVISOR,
            str(timeout_s + _ENDING_S),
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:  # more words than the system takes
        return ExecResult(NOT_RUNNABLE, stderr=f"{command[0][:80]}: {error.strerror}\n".encode())
    said = [_Said(process.stdout), _Said(process.stderr)]
    code = None
    try:
        async with asyncio.timeout(timeout_s):
            code = await process.wait()
    except TimeoutError:
        pass
    finally:
        await _end(process)
        await asyncio.wait([each.reading for each in said], timeout=_LAST_WORDS_S)
        for each in said:
            each.reading.cancel()
    if code is not None and code < 0:
        code = 128 - code
    return ExecResult(code, bytes(said[0].kept), bytes(said[1].kept), said[0].cut or said[1].cut)


async def _end(process: asyncio.subprocess.Process) -> None:
    """All of it, by the supervisor; should that fail, at least its process group."""
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ENDING_S):
            await process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
