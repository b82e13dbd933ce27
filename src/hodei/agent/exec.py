"""Commands beside a run: in its environment, directory and limits, ended by their timeout or with the run.

Used for health checks, checkpoints and `hodei exec`. Commands of an earlier agent are killed when their run is recovered.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Callable, Sequence

from hodei.agent import proc
from hodei.agent.limits import Fence
from hodei.agent.run import Run, signal_name
from hodei.agent.spawn import ERRORS, NOT_TRIED, env_of, read_status, spawn

# What a command is started for is also the name of the file that its wrapper holds open.
SAVE, HEALTH = "save", "health"
EXECUTE = tuple(f"execute{number}" for number in range(8))
WORDS_KEPT = 300

# Called with "" if the command ended well, else with what went wrong.
Done = Callable[[str], None]
# Called with the exit code, None if it was not over in time; also if the run ends first (128 + KILL).
Over = Callable[[int | None], None]


class _Command:
    __slots__ = ("done", "over", "purpose", "run", "timer")

    def __init__(self, run: Run, purpose: str, done: Done, timer: asyncio.TimerHandle, over: Over | None) -> None:
        self.run, self.purpose, self.done, self.timer, self.over = run, purpose, done, timer, over


class ExecSessions:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._commands: dict[int, _Command] = {}

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
        done: Done,
        *,
        quiet: bool = False,
        streams: tuple[str, str] | None = None,
        over: Over | None = None,
    ) -> None:
        """`done` is called once, never if the run ends first. `quiet`: what it says is not the run's to say; the end of
        it is in what `done` is told. `streams`: the files for what it says; `over` is called instead of `done`.
        OSError or ValueError: nothing was started."""
        for name in (purpose, _output(purpose)):
            _remove(f"{run.directory}/{name}")
        env, fence = surroundings(run)
        streams = streams or ((_output(purpose),) * 2 if quiet else ("stdout", "stderr"))
        pid = spawn(run.name, run.directory, command, env, run.workdir, fence, purpose, streams)
        timer = self._loop.call_later(timeout_ms / 1000, self._too_late, pid, timeout_ms)
        self._commands[pid] = _Command(run, purpose, done, timer, over)

    def end(self, run: Run, purpose: str = "") -> None:
        """KILL the commands of this run (for this purpose); only `over` is called."""
        for pid, command in list(self._commands.items()):
            if command.run is run and purpose in ("", command.purpose):
                self._forget(pid)
                signal_group(pid, signal.SIGKILL)
                if command.over is not None:
                    command.over(128 + signal.SIGKILL)

    def end_those_before_us(self, run: Run) -> None:
        for purpose in (SAVE, HEALTH, *EXECUTE):
            pid = read_status(run.name, run.directory, purpose).pid
            if pid and proc.holds_file(pid, f"{run.directory}/{purpose}"):
                signal_group(pid, signal.SIGKILL)

    def child_ended(self, pid: int, code: int) -> None:
        """A child has been collected; it may be one of ours."""
        command = self._forget(pid)
        if command is None:
            return
        run = command.run
        if command.over is not None:
            command.over(code)
            return
        error = read_status(run.name, run.directory, command.purpose).error if code == NOT_TRIED else ""
        if error:
            command.done(ERRORS[error].format(workdir=run.workdir))
        elif code:
            said = _last_words(f"{run.directory}/{_output(command.purpose)}")
            how = signal_name(code - 128) or f"exit code {code}"
            command.done(f"{how}: {said}" if said else how)
        else:
            command.done("")

    def _too_late(self, pid: int, timeout_ms: int) -> None:
        command = self._forget(pid)
        if command is not None:
            signal_group(pid, signal.SIGKILL)
            if command.over is not None:
                command.over(None)
                return
            command.done(f"it did not end within {timeout_ms / 1000:g}s")

    def _forget(self, pid: int) -> _Command | None:
        command = self._commands.pop(pid, None)
        if command is not None:
            command.timer.cancel()
        return command


def surroundings(run: Run) -> tuple[dict[str, str], Fence]:
    """Environment and limits of the run, read from its live wrapper. OSError if that is gone."""
    env = {**env_of(run.pid), "HODEI_RUN_ID": run.name, "HODEI_PID": str(proc.child_of(run.pid))}
    address_space = resource.prlimit(run.pid, resource.RLIMIT_AS)[0]
    cpus = os.sched_getaffinity(run.pid)
    fence = Fence(
        run.cgroups,
        address_space // 1024 if address_space != resource.RLIM_INFINITY else 0,
        tuple(sorted(cpus)) if cpus != os.sched_getaffinity(0) else (),
    )
    return env, fence


def signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except OSError:
        pass


def _output(purpose: str) -> str:
    return f"{purpose}.out"


def _last_words(path: str) -> str:
    """The last line of what a quiet command said."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        size = os.fstat(fd).st_size
        text = os.pread(fd, WORDS_KEPT, max(0, size - WORDS_KEPT)).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
