"""Runs the commands of a queueing system: plain lists of words, an environment of our own making, and a time by which
each is over. No shell has a part in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
from collections.abc import Mapping, Sequence

from msgspec import Struct

from hodei.model.errors import NOT_REACHED, BackendError

# What the commands, and through them the jobs, get of our own environment. The systems' own variables are not among it:
# SQUEUE_FORMAT, SBATCH_PARTITION, PBS_DEFAULT and their like would change what a command does.
_HANDED_ON = ("PATH", "LANG", "TZ", "HOME", "USER", "LOGNAME")
_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
_OUTPUT_LIMIT = 256 << 20
AT_ONCE = 4
GRACE_S = 1.0


class Done(Struct, frozen=True):
    """`code` None: it did not end in time, and was killed; with what it had said until then."""

    code: int | None
    stdout: bytes
    stderr: bytes

    @property
    def words(self) -> str:
        """What it said was wrong, on one line."""
        return " ".join((self.stderr or self.stdout).decode(errors="replace").split())[:500]


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    env = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
    with contextlib.suppress(KeyError):
        account = pwd.getpwuid(os.getuid())
        env |= {"HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name}
    env.setdefault("PATH", _DEFAULT_PATH)
    return {**env, **extra}


class Commands:
    """A system's commands, found along PATH or in `directory`. Few run at once: each is a process."""

    def __init__(self, directory: str = "", env: Mapping[str, str] | None = None) -> None:
        self._directory = directory
        self.env = clean_environment(env or {})
        self._slots = asyncio.Semaphore(AT_ONCE)
        self.inherited: tuple[int, ...] = ()  # open files that commands which change something keep open

    async def run(
        self,
        words: Sequence[str],
        *,
        timeout_s: float,
        text: bytes = b"",
        env: Mapping[str, str] | None = None,
        changes: bool = False,
    ) -> Done:
        """How it went; BackendError if there is no such command. `text` is its stdin. Who gives up on a command that
        `changes` something leaves it running: it is half way through."""
        program = f"{self._directory}/{words[0]}" if self._directory else words[0]
        async with self._slots:
            try:
                process = await asyncio.create_subprocess_exec(
                    program,
                    *words[1:],
                    stdin=asyncio.subprocess.PIPE if text else asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env={**self.env, **(env or {})},
                    cwd="/",
                    limit=_OUTPUT_LIMIT,
                    pass_fds=self.inherited if changes else (),
                    start_new_session=changes,
                )
            except OSError as error:
                raise BackendError(
                    f"{program} cannot be run: {error.strerror}",
                    hint="is it installed on the server's host?",
                    code=NOT_REACHED,
                ) from None
            talking = asyncio.create_task(process.communicate(text or None))
            try:
                async with asyncio.timeout(timeout_s):
                    stdout, stderr = await asyncio.shield(talking)
            except TimeoutError:
                await _end(process)
                await asyncio.wait({talking}, timeout=GRACE_S)
                talking.cancel()
                stdout, stderr = talking.result() if talking.done() else (b"", b"")
                return Done(None, stdout, stderr + f"{words[0]} did not answer within {timeout_s:g} s\n".encode())
            except asyncio.CancelledError:
                talking.cancel()
                if not changes:
                    await _end(process)
                raise
        return Done(process.returncode, stdout, stderr)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Some clean up behind them when they are asked to go."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GRACE_S):
            await process.wait()
            return
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
