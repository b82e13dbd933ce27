"""Runs the commands of a batch system: argument lists without a shell, a clean environment, and a timeout for each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
from collections.abc import Mapping, Sequence

from msgspec import Struct

from hodei.model.errors import NOT_REACHED, BackendError

# Passed on to commands, and through them to jobs. Variables of the batch systems are not: SQUEUE_FORMAT, SBATCH_PARTITION,
# PBS_DEFAULT and the like would change what a command does.
_PASSED_ON = ("PATH", "LANG", "TZ", "HOME", "USER", "LOGNAME")
_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
_OUTPUT_LIMIT = 256 << 20
MAX_CONCURRENT = 4
GRACE_S = 1.0


class CommandResult(Struct, frozen=True):
    """`code` None: it timed out and was killed; the output until then is kept."""

    code: int | None
    stdout: bytes
    stderr: bytes

    @property
    def message(self) -> str:
        """The error output on one line."""
        return " ".join((self.stderr or self.stdout).decode(errors="replace").split())[:500]


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    with contextlib.suppress(KeyError):
        account = pwd.getpwuid(os.getuid())
        env |= {"HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name}
    env.setdefault("PATH", _DEFAULT_PATH)
    return {**env, **extra}


class Commands:
    """Commands from PATH or from `directory`. The number of concurrent processes is limited."""

    def __init__(self, directory: str = "", env: Mapping[str, str] | None = None) -> None:
        self._directory = directory
        self.env = clean_environment(env or {})
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self.inherited_fds: tuple[int, ...] = ()  # kept open by every mutating command

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        mutating: bool = False,
    ) -> CommandResult:
        """BackendError if there is no such command. Cancelling this call leaves a `mutating` command running."""
        program = f"{self._directory}/{argv[0]}" if self._directory else argv[0]
        async with self._slots:
            try:
                process = await asyncio.create_subprocess_exec(
                    program,
                    *argv[1:],
                    stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env={**self.env, **(env or {})},
                    cwd="/",
                    limit=_OUTPUT_LIMIT,
                    pass_fds=self.inherited_fds if mutating else (),
                    start_new_session=mutating,
                )
            except OSError as error:
                raise BackendError(
                    f"{program} cannot be run: {error.strerror}",
                    hint="install it on the server's host, or set `commands` to its folder",
                    code=NOT_REACHED,
                ) from None
            output = asyncio.create_task(process.communicate(stdin or None))
            try:
                async with asyncio.timeout(timeout_s):
                    stdout, stderr = await asyncio.shield(output)
            except TimeoutError:
                await _terminate(process)
                await asyncio.wait({output}, timeout=GRACE_S)
                output.cancel()
                stdout, stderr = output.result() if output.done() else (b"", b"")
                timed_out = f"{argv[0]} did not answer within {timeout_s:g} s\n"
                return CommandResult(None, stdout, stderr + timed_out.encode())
            except asyncio.CancelledError:
                output.cancel()
                if not mutating:
                    await _terminate(process)
                raise
        return CommandResult(process.returncode, stdout, stderr)


async def _terminate(process: asyncio.subprocess.Process) -> None:
    """TERM first: some commands clean up after it."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GRACE_S):
            await process.wait()
            return
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
