"""Processes that do not outlive the tests: the kernel kills them with the test process; leftover data is removed by the next run."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_MEMORY = Path("/dev/shm")
_PREFIX = "hodei-etcd-"


def spawn(
    command: Sequence[str | Path], log: Path, *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process; its output is appended to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=cwd, env=env, start_new_session=True,
            preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )  # fmt: skip


def folder_in_memory() -> Path:
    """A folder for temporary data, on disk if there is no writable /dev/shm."""
    if not os.access(_MEMORY, os.W_OK):
        return Path(tempfile.mkdtemp(prefix=_PREFIX))
    for leftover in _MEMORY.glob(f"{_PREFIX}*"):
        owner = leftover.name.removeprefix(_PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(leftover, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_MEMORY))
