"""This machine: its capacity, sockets, usage and name, and commands on it for operators."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from hodei.agent import facts
from hodei.agent.facts import NUMA_ROOT, CpuMeter, gpu_count, hostname, memory_used
from hodei.agent.limits import CGROUP_ROOT
from hodei.backends.subreaper import NOT_RUNNABLE
from hodei.model.backend import ExecResult
from hodei.model.node import Socket
from hodei.model.resources import CPU, GPU, MEMORY, STORAGE, Resources

__all__ = ["CpuMeter", "capacity", "execute", "gpu_count", "gpus", "hostname", "memory_used", "sockets"]


def capacity(home: Path, root: Path = CGROUP_ROOT) -> Resources:
    """What runs can share: usable cores and memory within our own cgroup limits, and free disk space in `home`."""
    found = {CPU: facts.cpu_milli(root), MEMORY: facts.memory_bytes(root), STORAGE: shutil.disk_usage(home).free}
    if count := gpu_count():
        found[GPU] = count * 1000
    return found


def gpus(root: Path = Path("/")) -> tuple[int, str]:
    """The number of GPUs, and their type if all are equal. NVIDIA's driver lists its own; AMD's only its tool does."""
    listed = gpu_count(root)
    if not listed and not (root / "dev/kfd").exists():
        return 0, ""  # without a driver no tool has to be started
    names = facts.gpu_names()
    return len(names) or listed, names[0] if len(set(names)) == 1 else ""


def sockets(root: Path = NUMA_ROOT) -> tuple[Socket, ...]:
    """The NUMA nodes with the cores that we may use; one with all of them if the system lists none. Without GPUs, because their
    numbers in the system and in CUDA may differ."""
    return tuple(Socket(cpus=tuple(cpus)) for cpus in facts.socket_cpus(root))


OUTPUT_LIMIT = 1 << 20
# Not the whole environment of the server: it may hold secrets.
_PASSED_ENV = ("PATH", "LANG", "TZ", "HOME", "USER", "LOGNAME")
_SUBREAPER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("subreaper.py")))
# How long the subreaper may take to kill what is left. Its own timeout is later than ours by this, in case we are suspended.
_KILL_S = 10.0
_DRAIN_S = 1.0


class _Output:
    """The beginning of a stream. All of it is read, so that a full pipe blocks no program."""

    def __init__(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        self.kept, self.cut = bytearray(), False
        self.task = asyncio.create_task(self._read(stream))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(1 << 16):
            room = OUTPUT_LIMIT - len(self.kept)
            self.kept += part[:room]
            self.cut = self.cut or len(part) > room


async def execute(command: Sequence[str], timeout_s: float) -> ExecResult:
    """Run a command in a session of its own with a clean environment. `exit_code` as in a shell: 127 if there is no such
    program, 126 if it cannot be run; None after the timeout. No process that it started is left."""
    env = {name: os.environ[name] for name in _PASSED_ENV if name in os.environ}
    try:
        process = await asyncio.create_subprocess_exec(
            *_SUBREAPER,
            str(timeout_s + _KILL_S),
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:  # a longer command than the system takes
        return ExecResult(NOT_RUNNABLE, stderr=f"{command[0][:80]}: {error.strerror}\n".encode())
    stdout, stderr = _Output(process.stdout), _Output(process.stderr)
    code = None
    try:
        async with asyncio.timeout(timeout_s):
            code = await process.wait()
    except TimeoutError:
        pass
    finally:
        await _kill(process)
        await asyncio.wait([stdout.task, stderr.task], timeout=_DRAIN_S)
        stdout.task.cancel()
        stderr.task.cancel()
    if code is not None and code < 0:
        code = 128 - code
    return ExecResult(code, bytes(stdout.kept), bytes(stderr.kept), stdout.cut or stderr.cut)


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Closing its stdin makes the subreaper kill everything; if it fails, kill at least its process group."""
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_KILL_S):
            await process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
