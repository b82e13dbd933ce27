"""Runs one command for the server and kills everything that it started: when the command ends, after its timeout, or when the
server has died. Started by its path, as a process of its own; standard library only.

    subreaper.py SECONDS COMMAND...

The server holds the other end of its stdin: end of file means that the server has died or given up. A parent death signal
would not do, because it reaches only one process. Exits as a shell does: 127 if there is no such program, 126 if it cannot
be run, 128 and the number of the signal that ended it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

NOT_FOUND, NOT_RUNNABLE, TIMED_OUT = 127, 126, 124
_PR_SET_CHILD_SUBREAPER = 36
# How long to try. Processes of another user, or waiting for a dead disk, cannot be killed.
_KILL_S = 5.0


def main(seconds: float, command: list[str]) -> int:
    deadline_s = time.monotonic() + seconds
    # Orphaned descendants become our children, also after they have left our process group.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    # Handled, not ignored: the command would inherit an ignored signal.
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    os.environ.pop("LC_CTYPE", None)  # set by Python, not by the server
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode(errors="replace"))
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUNNABLE
    try:
        while (code := child.poll()) is None and (left_s := deadline_s - time.monotonic()) > 0:
            ready = select.select([0, woken], [], [], left_s)[0]
            if 0 in ready:
                break
            if ready:
                os.read(woken, 4096)
        # The command may have ended at the same moment: then its exit code is known.
        code = child.poll() if code is None else code
    finally:
        _kill_children()
    if code is None:
        return TIMED_OUT
    return 128 - code if code < 0 else code


def _kill_children() -> None:
    """KILL our children until there are none: the children of a killed one become ours."""
    deadline_s = time.monotonic() + _KILL_S
    while time.monotonic() < deadline_s:
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def _children() -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue
            if parent == os.getpid():
                found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
