"""Runs that save their work and go on: when the server asks for it, and by themselves every so often.

The same hook as before a stop (`hook`). One at a time for each run; a stop that comes meanwhile goes first, and begins
its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hodei.agent import proc
from hodei.agent.exec import SAVE
from hodei.agent.hook import Hook
from hodei.agent.probes import Seen
from hodei.agent.run import Run
from hodei.agent.stops import LOOK_S, has_begun, signal_to_all

if TYPE_CHECKING:
    from hodei.agent.runs import Runs


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
            self._over(run, f"no checkpoint was seen within {hook.timeout_ms / 1000:g}s")
            return
        self._runs.looks.ask(run.checkpoint_file, lambda seen: self._seen(run, hook, before, seen))
        self._runs.later(run, LOOK_S, self._look, hook, before)

    def _seen(self, run: Run, hook: Hook, before: Seen | None, seen: Seen | None) -> None:
        at_rest = seen == run.seen  # twice the same: nobody is writing it just now
        self._runs.looked(run, seen)
        if run.key in self._until_ms and seen is not None and seen != before and at_rest:
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
