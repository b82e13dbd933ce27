"""Processes that do not outlive the tests: the kernel ends them with the test process, and the next tests clean up."""

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
    """What it says is added to `log`."""
    with log.open("ab") as said:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd=cwd, env=env, start_new_session=True,
            preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )  # fmt: skip


def folder_in_memory() -> Path:
    """For data that is worth nothing when the tests are over; on disk if memory cannot be had."""
    if not os.access(_MEMORY, os.W_OK):
        return Path(tempfile.mkdtemp(prefix=_PREFIX))
    for left in _MEMORY.glob(f"{_PREFIX}*"):
        owner = left.name.removeprefix(_PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_MEMORY))
