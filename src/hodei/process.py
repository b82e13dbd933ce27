"""Starting a process that outlives this one, and stopping this one on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

# Reported when another part of this process has already collected the exit status.
UNKNOWN_EXIT_CODE = 255
_LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
# Python ignores these, and a child inherits that.
_DEFAULT_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)


class DetachedProcess:
    """Runs `command` in a session of its own, with stdout and stderr appended to `log`. OSError if it cannot start.

    `subprocess.Popen` does not fit the host agent and `hodei up -d`: it warns (ResourceWarning) when the handle of a
    running process is dropped, which is intended there.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        self.exit_code: int | None = None
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), _LOG_FLAGS, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            *((os.POSIX_SPAWN_CLOSE, fd) for fd in _inheritable_fds()),
        ]
        self.pid = os.posix_spawn(
            command[0], command, os.environ, file_actions=actions, setsid=True, setsigdef=_DEFAULT_SIGNALS
        )

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.exit_code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.exit_code = UNKNOWN_EXIT_CODE
            else:
                self.exit_code = os.waitstatus_to_exitcode(status) if pid else None
        return self.exit_code


def _inheritable_fds() -> list[int]:
    """Open files that this process inherited itself, such as a lock of the shell that started it."""
    found = []
    for fd in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            if fd > 2 and os.get_inheritable(fd):
                found.append(fd)
    return found


async def cancel_tasks(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Returns when they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def call_on_stop_signal(stop: Callable[[], object]) -> None:
    """Calls `stop` once, in the running event loop, on SIGTERM or SIGINT. Later ones are ignored: the process is about to
    exit, and an event loop that is being closed answers a signal with a traceback."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def on_signal() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
        stop()

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
