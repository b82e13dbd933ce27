"""Periodic checks of live runs: health, idle time and checkpoints."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from hodei.agent import logs, proc
from hodei.agent.exec import HEALTH, SAVE
from hodei.agent.health import Health, get_status
from hodei.agent.probes import Seen
from hodei.agent.run import Run
from hodei.agent.spawn import Hook
from hodei.agent.stops import LOOK_S, has_begun, signal_to_all
from hodei.supervision import IdleDetector, idle_reason, is_checkpoint_complete, no_checkpoint

if TYPE_CHECKING:
    from hodei.agent.runs import Runs


class HealthChecks:
    """Looks at all runs in the table of `runs` that asked for it."""

    def __init__(self, runs: Runs) -> None:
        self._runs, self._loop = runs, runs.loop
        self._calls: set[asyncio.Task[None]] = set()

    def watch(self, run: Run) -> None:
        """Begin with a run that has just been born, or go on with one of an agent before us."""
        if run.health is not None:
            begin_ms = run.started_boot_ms + run.health.after_ms + run.health.every_ms - proc.boot_clock_ms()
            self._runs.later(run, max(begin_ms, 0) / 1000, self._look)

    def _look(self, run: Run) -> None:
        health = run.health
        if health is None or run.end is not None or run.stop_code:
            return
        if health.command:
            try:
                self._runs.beside.start(
                    run, HEALTH, health.command, health.timeout_ms, lambda error: self._seen(run, error), quiet=True
                )
            except (OSError, ValueError) as error:
                self._seen(run, f"it could not be started: {error}")
        elif health.http:
            call = self._loop.create_task(self._call(run, health))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        else:
            self._look_at_file(run, health)

    def _look_at_file(self, run: Run, health: Health) -> None:
        answered = False

        def answer(seen: Seen | None) -> None:
            nonlocal answered
            if answered:
                return
            answered = True
            if seen is None:
                self._seen(run, f"there is no file {health.file}")
            elif seen == run.heartbeat:
                self._seen(run, f"{health.file} has not changed for {health.every_ms / 1000:g}s")
            else:
                run.heartbeat = seen
                self._seen(run, "")

        def too_late(_: Run) -> None:
            nonlocal answered
            if not answered:
                answered = True
                self._seen(run, f"its disk did not answer within {health.timeout_ms / 1000:g}s")

        self._runs.looks.ask(health.file, answer)
        self._runs.later(run, health.timeout_ms / 1000, too_late)

    async def _call(self, run: Run, health: Health) -> None:
        try:
            async with asyncio.timeout(health.timeout_ms / 1000):
                status = await get_status(health.http)
        except TimeoutError:
            self._seen(run, f"no answer within {health.timeout_ms / 1000:g}s")
        except (OSError, ValueError) as error:
            self._seen(run, f"no answer: {error}")
        else:
            self._seen(run, "" if 200 <= status < 400 else f"status {status}")

    def _seen(self, run: Run, error: str) -> None:
        """One look is over: count, tell if that is news, and look again or give it up."""
        health = run.health
        if health is None or run.end is not None or run.stop_code:
            return
        stop_reason = run.health_counter.observe(error, health.failures)
        state = "failing" if error else "ok"
        if state != run.health_state:
            run.health_state = state
            self._runs.report(run)
        if stop_reason:
            self._runs.stops.order(run, "unhealthy", stop_reason, run.grace_ms)
        else:
            self._runs.later(run, health.every_ms / 1000, self._look)


# ------------------------------------------------------------------------------------------------ idle
# An interactive run that uses no processor time and writes nothing for long enough is stopped.


class Idles:
    """Watches all runs in the table of `runs` that have an idle timeout."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._detectors: dict[str, IdleDetector] = {}

    def look(self) -> None:
        """Once a second or so."""
        now = proc.boot_clock_ms()
        watched = {run.key: run for run in self._runs.live.values() if run.idle_ms and not run.stop_code}
        self._detectors = {key: self._detectors.get(key) or IdleDetector(run.idle_ms) for key, run in watched.items()}
        due = [run for key, run in watched.items() if self._detectors[key].is_due(now)]
        if not due:
            return
        used_ms = proc.cpu_ms({run.pid: _mark(run) for run in due}, self._runs.beside.pids)
        for run in due:
            if self._detectors[run.key].observe(now, used_ms[run.pid], _output_size(run)):
                self._runs.stops.order(run, "idle", idle_reason(run.idle_ms), run.grace_ms, run.save_hook)


def _mark(run: Run) -> dict[str, str]:
    """Both together are like no other run's, of whatever installation."""
    return {"HODEI_RUN_ID": run.name, "HODEI_CHECKPOINT_FILE": run.checkpoint_file}


def _output_size(run: Run) -> int:
    total = 0
    for stream in logs.STREAMS:
        try:
            total += os.stat(f"{run.directory}/{stream}", follow_symlinks=False).st_size
        except OSError:
            continue
    return total


# ----------------------------------------------------------------------------------------- checkpoints
# Runs that save their work and go on: when the server asks for it, and by themselves every so often.


class Checkpoints:
    """Has all runs in the table of `runs` save their work in between."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._until_ms: dict[str, int] = {}  # by run: when the one on its way is given up, on the boot clock

    def watch(self, run: Run) -> None:
        """A run that has just been born or been found again: it saves its work every so often, if it asked for that."""
        if run.save_hook is not None and run.save_every_ms:
            self._runs.later(run, run.save_every_ms / 1000, self._due)

    def order(self, run: Run, hook: Hook) -> None:
        """Save now; if it is at it already, that is enough."""
        if run.live and not run.stop_code and run.key not in self._until_ms:
            self._begin(run, hook)

    def end(self, run: Run) -> None:
        """The run is being stopped or has ended."""
        self._until_ms.pop(run.key, None)

    def _due(self, run: Run) -> None:
        if run.end is not None or run.stop_code or run.save_hook is None:
            return
        if has_begun(run):
            self.order(run, run.save_hook)
        self.watch(run)

    def _begin(self, run: Run, hook: Hook) -> None:
        self._until_ms[run.key] = proc.boot_clock_ms() + hook.timeout_ms
        if hook.command:
            try:
                self._runs.beside.start(
                    run, SAVE, hook.command, hook.timeout_ms, lambda error: self._command_over(run, error)
                )
            except (OSError, ValueError) as error:
                self._over(run, f"the checkpoint command could not be started: {error}")
            return
        if not has_begun(run):
            self._over(run, "it has only just been started")
            return
        before = self._runs.looks.now(run.checkpoint_file)
        self._runs.looked(run, before)
        signal_to_all(run, hook.number)
        self._look(run, hook, before)

    def _look(self, run: Run, hook: Hook, before: Seen | None) -> None:
        if run.key not in self._until_ms:
            return
        if proc.boot_clock_ms() >= self._until_ms[run.key]:
            self._over(run, no_checkpoint(hook.timeout_ms))
            return
        self._runs.looks.ask(run.checkpoint_file, lambda seen: self._seen(run, hook, before, seen))
        self._runs.later(run, LOOK_S, self._look, hook, before)

    def _seen(self, run: Run, hook: Hook, before: Seen | None, seen: Seen | None) -> None:
        complete = is_checkpoint_complete(before, run.seen, seen)
        self._runs.looked(run, seen)
        if run.key in self._until_ms and complete:
            self._over(run)

    def _command_over(self, run: Run, error: str) -> None:
        if error:
            self._over(run, f"the checkpoint command failed: {error}")
        else:
            self._runs.saved(run, proc.now_ms())
            self._over(run)

    def _over(self, run: Run, error: str = "") -> None:
        if self._until_ms.pop(run.key, None) is not None and error and run.end is None:
            self._runs.report(run, checkpoint_error=error)
