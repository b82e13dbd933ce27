"""Supervision of live runs: stops, health checks, idle time and checkpoints.

A stop lets the run save its work (its hook), then sends TERM, and KILL after the grace period. Each stage is recorded before
it begins, so that neither a second order nor the next agent repeats it. All waiting is done by timers; the hook's timeout
and the grace period bound the stop.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

from hodei.agent import logs, proc
from hodei.agent.exec import CHECKPOINT_COMMAND, HEALTH_COMMAND, run_context, signal_group, stream_of
from hodei.agent.probes import FileStat, HealthCheck, get_status
from hodei.agent.run import Hook, Run
from hodei.agent.spawn import ERRORS, HOOK, NOT_TRIED, read_status, spawn
from hodei.supervision import (
    IdleDetector,
    StopPlan,
    command_problem,
    idle_reason,
    is_checkpoint_complete,
    no_checkpoint,
    signal_name,
)

if TYPE_CHECKING:
    from hodei.agent.runs import Runs

START_POLL_S = 0.01
POLL_S = 0.1
# A hook command whose agent died during its spawn needs a moment to write its first line.
SETTLE_POLLS = 10


class Stops:
    """Carries out the stops of all runs in the table of `runs`."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._commands: dict[int, Run] = {}  # hook commands that are our children, by their wrapper's pid

    def order(self, run: Run, code: str, reason: str, grace_ms: int, hook: Hook | None = None, note: str = "") -> None:
        """Stop `run`; `code` is "" for an order of the server. A second order counts only if it ends the run earlier."""
        if run.end is not None:
            return
        now, save_ms = proc.boot_clock_ms(), hook.timeout_ms if hook else 0
        if run.stop is not None:
            if run.stop.shorten(now, grace_ms, save_ms):
                self._runs.record(run.stop_record(run.stop))
                if run.live:
                    self._arm(run, run.stop)
            return
        self._runs.end_supervision(run)
        run.stop, run.hook = StopPlan.begin(code, reason, now, grace_ms, save_ms), hook
        run.stop.note = note
        self._runs.record(run.stop_record(run.stop))
        if run.live:
            self.carry_out(run)

    def carry_out(self, run: Run) -> None:
        """Begin the stop of a live run, or continue the one of an earlier agent."""
        if run.stop is None:
            return
        self._arm(run, run.stop)
        if run.hook is None:
            self._term(run)
        elif run.hook_started:
            self._poll(run)
        else:
            self._start_hook(run)

    def ended(self, run: Run) -> None:
        """The run has ended: kill its hook command."""
        if run.hook_started:
            self._kill_command(run)

    def _arm(self, run: Run, stop: StopPlan) -> None:
        now = proc.boot_clock_ms()
        self._runs.call_later(run, max(0, stop.kill_at - now) / 1000, self._kill)
        if run.hook is not None:
            self._runs.call_later(run, max(0, stop.save_until - now) / 1000, self._hook_timed_out)

    def _start_hook(self, run: Run) -> None:
        if run.hook is None or run.stop is None or run.end is not None:
            return
        if not has_started(run):
            self._runs.call_later(run, START_POLL_S, self._start_hook)
            return
        run.hook_started = True
        if run.hook.signal:
            run.hook_before = self._runs.probes.wait(run.checkpoint_file)
            self._runs.checkpoint_file_seen(run, run.hook_before)
        self._runs.record(run.stop_record(run.stop))
        self._runs.after_sync(lambda: self._run_hook(run))

    def _run_hook(self, run: Run) -> None:
        if run.hook is None or run.end is not None:
            return
        if run.hook.signal:
            signal_run(run, run.hook.number)
            self._poll(run)
            return
        try:
            env, limits = run_context(run)
            pid = spawn(run.name, run.directory, run.hook.command, env, run.workdir, limits, HOOK)
        except (OSError, ValueError) as error:
            self._hook_done(run, f"its checkpoint command could not be started: {error}")
        else:
            self._commands[pid] = run

    def _poll(self, run: Run, polls_left: int = SETTLE_POLLS) -> None:
        """Check whether the work is saved, until it is; `_hook_timed_out` ends this."""
        if run.hook is None or run.end is not None:
            return
        if run.hook.signal:
            self._runs.probes.request(run.checkpoint_file, lambda seen: self._file_seen(run, seen))
        else:
            self._poll_orphan(run, polls_left)

    def _file_seen(self, run: Run, seen: FileStat | None) -> None:
        if run.hook is None or run.end is not None:
            return
        complete = is_checkpoint_complete(run.hook_before, run.checkpoint_stat, seen)
        self._runs.checkpoint_file_seen(run, seen)
        if complete:
            self._hook_done(run)
        else:
            self._runs.call_later(run, POLL_S, self._poll)

    def _poll_orphan(self, run: Run, polls_left: int) -> None:
        """A hook command of an earlier agent is not our child: its status file shows its end."""
        status = read_status(run.name, run.directory, HOOK)
        pid, code, error = status.pid, status.code, status.error
        if code is None and not error:
            if pid and proc.holds_file(pid, f"{run.directory}/{HOOK}"):
                self._runs.call_later(run, POLL_S, self._poll)
                return
            if not pid and polls_left:
                self._runs.call_later(run, POLL_S, self._poll, polls_left - 1)
                return
            status = read_status(run.name, run.directory, HOOK)
            code, error = status.code, status.error
        if pid and proc.has_exited(pid):
            signal_group(pid, signal.SIGKILL)
        self._command_ended(run, code, error)

    def child_ended(self, pid: int, code: int) -> None:
        run = self._commands.pop(pid, None)
        if run is not None and run.hook is not None and run.end is None:
            error = read_status(run.name, run.directory, HOOK).error if code == NOT_TRIED else ""
            self._command_ended(run, code, error)

    def is_command(self, pid: int) -> bool:
        return pid in self._commands

    def _command_ended(self, run: Run, code: int | None, error: str) -> None:
        if error:
            self._hook_done(run, f"its checkpoint command failed: {ERRORS[error].format(workdir=run.workdir)}")
        elif code is None:
            self._hook_done(run, "the exit code of its checkpoint command is lost")
        elif code:
            how = signal_name(code - 128) or f"exit code {code}"
            self._hook_done(run, f"its checkpoint command failed: {how}")
        else:
            self._runs.checkpoint_taken(run, proc.now_ms())
            self._hook_done(run)

    def _hook_timed_out(self, run: Run) -> None:
        if run.hook is None or run.stop is None or run.end is not None:
            return
        timeout_ms = run.hook.timeout_ms
        problem = command_problem(None, timeout_ms) if run.hook.command else no_checkpoint(timeout_ms)
        self._hook_done(run, run.stop.note or problem)

    def _hook_done(self, run: Run, problem: str = "") -> None:
        """Saved or not, the stop continues."""
        self._kill_command(run)
        run.hook = None
        if run.stop is not None:
            run.stop.finish_saving(proc.boot_clock_ms(), problem)
            self._runs.record(run.stop_record(run.stop))
            self._arm(run, run.stop)
        self._runs.after_sync(lambda: self._term(run))

    def _kill_command(self, run: Run) -> None:
        pid = next((pid for pid, of in self._commands.items() if of is run), 0)
        if not pid:
            pid = read_status(run.name, run.directory, HOOK).pid
            if not pid or not proc.holds_file(pid, f"{run.directory}/{HOOK}"):
                return
        signal_group(pid, signal.SIGKILL)

    def _term(self, run: Run) -> None:
        if run.end is not None:
            return
        if has_started(run):
            signal_run(run, signal.SIGTERM)
        else:
            # The wrapper ignores TERM: sent now, it would not reach a command that is just being started.
            self._runs.call_later(run, START_POLL_S, self._term)

    def _kill(self, run: Run) -> None:
        if run.end is not None:
            return
        self._runs.meter.sample()  # what its processes have used is lost with a wrapper that cannot wait for them
        signal_group(run.pid, signal.SIGKILL)
        self._runs.cgroups.kill(run.cgroups)
        self._runs.call_later(run, POLL_S, self._kill)


def has_started(run: Run) -> bool:
    """Whether the command itself can receive a signal, not only its wrapper."""
    started = proc.child_has_started(run.pid)
    return started if started is not None else proc.boot_clock_ms() - run.started_boot_ms > 1000


def signal_run(run: Run, number: signal.Signals) -> None:
    signal_group(run.pid, number)
    signal_group(run.pid, signal.SIGCONT)  # a stopped process would not receive the other one


class HealthChecks:
    """Checks all runs in the table of `runs` that have a health check."""

    def __init__(self, runs: Runs) -> None:
        self._runs, self._loop = runs, runs.loop
        self._calls: set[asyncio.Task[None]] = set()

    def begin(self, run: Run) -> None:
        """For a run that has just started or was recovered."""
        check = run.health_check
        if check is not None:
            first_ms = run.started_boot_ms + check.after_ms + check.every_ms - proc.boot_clock_ms()
            self._runs.call_later(run, max(first_ms, 0) / 1000, self._check)

    def _check(self, run: Run) -> None:
        check = run.health_check
        if check is None or run.end is not None or run.stop is not None:
            return
        if check.command:
            try:
                self._runs.exec.start(
                    run,
                    HEALTH_COMMAND,
                    check.command,
                    check.timeout_ms,
                    on_result=lambda error: self._checked(run, error),
                    streams=(stream_of(HEALTH_COMMAND),) * 2,  # not into the run's own output
                )
            except (OSError, ValueError) as error:
                self._checked(run, f"it could not be started: {error}")
        elif check.http:
            call = self._loop.create_task(self._call(run, check))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        else:
            self._probe_file(run, check)

    def _probe_file(self, run: Run, check: HealthCheck) -> None:
        answered = False

        def answer(error: str) -> None:
            nonlocal answered
            if not answered:
                answered = True
                self._checked(run, error)

        def seen(stat: FileStat | None) -> None:
            if stat is None:
                answer(f"there is no file {check.file}")
            elif stat == run.heartbeat_stat:
                answer(f"{check.file} has not changed for {check.every_ms / 1000:g}s")
            else:
                if not answered:
                    run.heartbeat_stat = stat
                answer("")

        self._runs.probes.request(check.file, seen)
        text = f"its disk did not answer within {check.timeout_ms / 1000:g}s"
        self._runs.call_later(run, check.timeout_ms / 1000, lambda _: answer(text))

    async def _call(self, run: Run, check: HealthCheck) -> None:
        try:
            async with asyncio.timeout(check.timeout_ms / 1000):
                status = await get_status(check.http)
        except TimeoutError:
            self._checked(run, f"no answer within {check.timeout_ms / 1000:g}s")
        except (OSError, ValueError) as error:
            self._checked(run, f"no answer: {error}")
        else:
            self._checked(run, "" if 200 <= status < 400 else f"status {status}")

    def _checked(self, run: Run, error: str) -> None:
        """One check is over: count it, report a changed state, then schedule the next one or stop the run."""
        check = run.health_check
        if check is None or run.end is not None or run.stop is not None:
            return
        stop_reason = run.health_counter.observe(error, check.failures)
        state = "failing" if error else "ok"
        if state != run.health_state:
            run.health_state = state
            self._runs.report(run)
        if stop_reason:
            self._runs.stops.order(run, "unhealthy", stop_reason, run.grace_ms)
        else:
            self._runs.call_later(run, check.every_ms / 1000, self._check)


class IdleChecks:
    """Stops interactive runs that use no processor time and write nothing for their idle timeout."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._detectors: dict[str, IdleDetector] = {}

    def check(self) -> None:
        """Called about once a second."""
        now = proc.boot_clock_ms()
        watched = {run.key: run for run in self._runs.live.values() if run.idle_ms and run.stop is None}
        self._detectors = {key: self._detectors.get(key) or IdleDetector(run.idle_ms) for key, run in watched.items()}
        due = [run for key, run in watched.items() if self._detectors[key].is_due(now)]
        if not due:
            return
        # The two variables together identify one run, of whatever installation.
        marks = {run.pid: {"HODEI_RUN_ID": run.name, "HODEI_CHECKPOINT_FILE": run.checkpoint_file} for run in due}
        used_ms = proc.cpu_ms(marks, self._runs.exec.pids)
        for run in due:
            if self._detectors[run.key].observe(now, used_ms[run.pid], _output_size(run)):
                self._runs.stops.order(run, "idle", idle_reason(run.idle_ms), run.grace_ms, run.save_hook)


def _output_size(run: Run) -> int:
    total = 0
    for stream in logs.STREAMS:
        try:
            total += os.stat(f"{run.directory}/{stream}", follow_symlinks=False).st_size
        except OSError:
            continue
    return total


class Checkpoints:
    """Checkpoints without a stop: ordered by the server, or at the run's own interval."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._deadline_ms: dict[str, int] = {}  # of the checkpoint under way, by run, on the boot clock

    def begin(self, run: Run) -> None:
        """For a run that has just started or was recovered."""
        if run.save_hook is not None and run.save_every_ms:
            self._runs.call_later(run, run.save_every_ms / 1000, self._due)

    def order(self, run: Run, hook: Hook) -> None:
        """Take a checkpoint now, unless one is under way."""
        if run.live and run.stop is None and run.key not in self._deadline_ms:
            self._start(run, hook)

    def end(self, run: Run) -> None:
        """The run is being stopped or has ended."""
        self._deadline_ms.pop(run.key, None)

    def _due(self, run: Run) -> None:
        if run.end is not None or run.stop is not None or run.save_hook is None:
            return
        if has_started(run):
            self.order(run, run.save_hook)
        self.begin(run)

    def _start(self, run: Run, hook: Hook) -> None:
        self._deadline_ms[run.key] = proc.boot_clock_ms() + hook.timeout_ms
        if hook.command:
            try:
                self._runs.exec.start(
                    run,
                    CHECKPOINT_COMMAND,
                    hook.command,
                    hook.timeout_ms,
                    on_result=lambda error: self._command_ended(run, error),
                )
            except (OSError, ValueError) as error:
                self._finish(run, f"the checkpoint command could not be started: {error}")
            return
        if not has_started(run):
            self._finish(run, "it has only just been started")
            return
        before = self._runs.probes.wait(run.checkpoint_file)
        self._runs.checkpoint_file_seen(run, before)
        signal_run(run, hook.number)
        self._poll(run, hook, before)

    def _poll(self, run: Run, hook: Hook, before: FileStat | None) -> None:
        if run.key not in self._deadline_ms:
            return
        if proc.boot_clock_ms() >= self._deadline_ms[run.key]:
            self._finish(run, no_checkpoint(hook.timeout_ms))
            return
        self._runs.probes.request(run.checkpoint_file, lambda seen: self._file_seen(run, before, seen))
        self._runs.call_later(run, POLL_S, self._poll, hook, before)

    def _file_seen(self, run: Run, before: FileStat | None, seen: FileStat | None) -> None:
        complete = is_checkpoint_complete(before, run.checkpoint_stat, seen)
        self._runs.checkpoint_file_seen(run, seen)
        if complete:
            self._finish(run)

    def _command_ended(self, run: Run, error: str) -> None:
        if error:
            self._finish(run, f"the checkpoint command failed: {error}")
        else:
            self._runs.checkpoint_taken(run, proc.now_ms())
            self._finish(run)

    def _finish(self, run: Run, error: str = "") -> None:
        if self._deadline_ms.pop(run.key, None) is not None and error and run.end is None:
            self._runs.report(run, checkpoint_error=error)
