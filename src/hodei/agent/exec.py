"""Commands inside a run: with its environment, directory and limits, ended by their timeout or with the run.

Used for health checks, checkpoints and `hodei exec`. Commands of an earlier agent are killed when their run is recovered.
"""

from __future__ import annotations

import asyncio
import base64
import os
import resource
import signal
from collections.abc import Callable, Sequence
from typing import Any

from hodei.agent import proc
from hodei.agent.limits import SpawnLimits
from hodei.agent.run import Run
from hodei.agent.spawn import ERRORS, NOT_TRIED, read_env, read_status, remove_file, spawn
from hodei.supervision import signal_name

# The purpose of a command is also the name of the status file that its wrapper holds open.
CHECKPOINT_COMMAND, HEALTH_COMMAND = "save", "health"
EXEC_SLOTS = tuple(f"execute{number}" for number in range(8))
ERROR_LIMIT = 300
OUTPUT_LIMIT = 1 << 20

# Called with "" if the command succeeded, else with what went wrong.
OnResult = Callable[[str], None]
# Called with the exit code; None after the timeout, 128 + KILL if the run ended first.
OnExit = Callable[[int | None], None]


class Busy(Exception):
    """Every exec slot of the run is in use."""


class _Command:
    __slots__ = ("on_exit", "on_result", "purpose", "run", "timer")

    def __init__(
        self, run: Run, purpose: str, timer: asyncio.TimerHandle, on_result: OnResult | None, on_exit: OnExit | None
    ) -> None:
        self.run, self.purpose, self.timer = run, purpose, timer
        self.on_result, self.on_exit = on_result, on_exit


class ExecSessions:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._commands: dict[int, _Command] = {}
        self._slots_in_use: set[tuple[str, str]] = set()

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(self._commands)

    def has(self, pid: int) -> bool:
        return pid in self._commands

    def start(
        self,
        run: Run,
        purpose: str,
        command: Sequence[str],
        timeout_ms: int,
        *,
        on_result: OnResult | None = None,
        on_exit: OnExit | None = None,
        streams: tuple[str, str] = ("stdout", "stderr"),
    ) -> None:
        """Calls `on_result` once, but never if the run ends first, or `on_exit` in any case. `streams`: the files in the run's
        directory that get the output; an error quotes the last line of `stream_of(purpose)`. OSError or ValueError: nothing
        was started."""
        for name in (purpose, stream_of(purpose)):
            remove_file(f"{run.directory}/{name}")
        env, limits = run_context(run)
        pid = spawn(run.name, run.directory, command, env, run.workdir, limits, purpose, streams)
        timer = self._loop.call_later(timeout_ms / 1000, self._timed_out, pid, timeout_ms)
        self._commands[pid] = _Command(run, purpose, timer, on_result, on_exit)

    def execute(
        self, run: Run, command: Sequence[str], timeout_ms: int, callback: Callable[[dict[str, Any]], None]
    ) -> None:
        """Run a command for `hodei exec`; `callback` gets its result. Busy, OSError, ValueError: it was not started."""
        slot = next((slot for slot in EXEC_SLOTS if (run.key, slot) not in self._slots_in_use), "")
        if not slot:
            raise Busy(f"{len(EXEC_SLOTS)} commands already run in {run.name}")
        streams = (f"{slot}.out", f"{slot}.err")
        for name in streams:
            remove_file(f"{run.directory}/{name}")

        def finish(code: int | None) -> None:
            self._slots_in_use.discard((run.key, slot))
            (out, out_cut), (err, err_cut) = (_read_output(f"{run.directory}/{name}") for name in streams)
            for name in streams:
                remove_file(f"{run.directory}/{name}")
            stdout, stderr = base64.b64encode(out).decode(), base64.b64encode(err).decode()
            callback({"exit_code": code, "stdout": stdout, "stderr": stderr, "cut": out_cut or err_cut})

        self.start(run, slot, command, timeout_ms, on_exit=finish, streams=streams)
        self._slots_in_use.add((run.key, slot))

    def kill(self, run: Run) -> None:
        """KILL the commands of this run. Only `on_exit` is called."""
        for pid, command in list(self._commands.items()):
            if command.run is run:
                self._forget(pid)
                signal_group(pid, signal.SIGKILL)
                if command.on_exit is not None:
                    command.on_exit(128 + signal.SIGKILL)

    def kill_orphans(self, run: Run) -> None:
        """KILL commands of this run that an earlier agent started."""
        for purpose in (CHECKPOINT_COMMAND, HEALTH_COMMAND, *EXEC_SLOTS):
            pid = read_status(run.name, run.directory, purpose).pid
            if pid and proc.holds_file(pid, f"{run.directory}/{purpose}"):
                signal_group(pid, signal.SIGKILL)

    def child_ended(self, pid: int, code: int) -> None:
        command = self._forget(pid)
        if command is None:
            return
        run = command.run
        if command.on_exit is not None:
            command.on_exit(code)
        elif command.on_result is not None:
            error = read_status(run.name, run.directory, command.purpose).error if code == NOT_TRIED else ""
            if error:
                command.on_result(ERRORS[error].format(workdir=run.workdir))
            elif code:
                line = _last_line(f"{run.directory}/{stream_of(command.purpose)}")
                how = signal_name(code - 128) or f"exit code {code}"
                command.on_result(f"{how}: {line}" if line else how)
            else:
                command.on_result("")

    def _timed_out(self, pid: int, timeout_ms: int) -> None:
        command = self._forget(pid)
        if command is None:
            return
        signal_group(pid, signal.SIGKILL)
        if command.on_exit is not None:
            command.on_exit(None)
        elif command.on_result is not None:
            command.on_result(f"it did not end within {timeout_ms / 1000:g}s")

    def _forget(self, pid: int) -> _Command | None:
        command = self._commands.pop(pid, None)
        if command is not None:
            command.timer.cancel()
        return command


def run_context(run: Run) -> tuple[dict[str, str], SpawnLimits]:
    """Environment and limits of the run, read from its live wrapper. OSError if the wrapper has exited."""
    env = {**read_env(run.pid), "HODEI_RUN_ID": run.name, "HODEI_PID": str(proc.child_of(run.pid))}
    address_space = resource.prlimit(run.pid, resource.RLIMIT_AS)[0]
    cpus = os.sched_getaffinity(run.pid)
    limits = SpawnLimits(
        run.cgroups,
        address_space // 1024 if address_space != resource.RLIM_INFINITY else 0,
        tuple(sorted(cpus)) if cpus != os.sched_getaffinity(0) else (),
    )
    return env, limits


def signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except OSError:
        pass


def stream_of(purpose: str) -> str:
    return f"{purpose}.out"


def _read_output(path: str) -> tuple[bytes, bool]:
    """The beginning of the output, and whether there was more."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b"", False
    with os.fdopen(fd, "rb") as file:
        data = file.read(OUTPUT_LIMIT + 1)
    return data[:OUTPUT_LIMIT], len(data) > OUTPUT_LIMIT


def _last_line(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        size = os.fstat(fd).st_size
        text = os.pread(fd, ERROR_LIMIT, max(0, size - ERROR_LIMIT)).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
