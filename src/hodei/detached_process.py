"""A process that outlives the one that starts it: the host agent, and the server of `hodei up -d`.

`subprocess.Popen` does not fit: it warns (ResourceWarning) when the handle of a running process is dropped, which is
intended here.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

# Reported when another part of this process has already collected the exit status.
UNKNOWN_EXIT_CODE = 255
_LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
# Python ignores these, and a child inherits that.
_DEFAULT_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)


class DetachedProcess:
    """Runs `command` in a session of its own, with stdout and stderr appended to `log`. OSError if it cannot start."""

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
