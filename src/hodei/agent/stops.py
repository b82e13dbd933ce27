"""How a run is stopped: first it may save its work (its hook), then TERM, then KILL when its time has come.

Each part is on record before it begins, so that none is begun twice, by a second order or by an agent after us. All
waiting is done by timers; the hook's time and the grace period bound the whole.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from hodei.agent import proc
from hodei.agent.exec import signal_group, surroundings
from hodei.agent.journal import HOOK
from hodei.agent.probes import Seen
from hodei.agent.run import Run, signal_name
from hodei.agent.spawn import ERRORS, NOT_TRIED, Hook, read_status, spawn
from hodei.supervision import CUT_SHORT, is_checkpoint_complete

if TYPE_CHECKING:
    from hodei.agent.runs import Runs

BIRTH_LOOK_S = 0.01
LOOK_S = 0.1
# A command that was being born while an agent before us died needs a moment to write its first line.
SETTLE_LOOKS = 10


class Stops:
    """Conducts the stops of all runs in the table of `runs`."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._commands: dict[int, Run] = {}  # hook commands that are our children, by their wrapper's pid

    def order(self, run: Run, code: str, reason: str, grace_ms: int, hook: Hook | None = None, note: str = "") -> None:
        """Stop `run`. A second order counts only if it comes to an earlier end: it shortens what is left."""
        if run.end is not None:
            return
        hook_until = proc.boot_clock_ms() + (hook.timeout_ms if hook else 0)
        kill_at = hook_until + grace_ms
        if run.stop_code and kill_at >= run.kill_at_boot_ms:
            return
        first = not run.stop_code
        if first:
            self._runs.leave_alone(run)
            run.stop_code, run.stop_reason = code, reason
            run.hook, run.hook_until_boot_ms, run.hook_note = hook, hook_until, note
        elif run.hook is not None and hook_until < run.hook_until_boot_ms:
            run.hook_until_boot_ms, run.hook_note = hook_until, CUT_SHORT
        run.kill_at_boot_ms, run.stop_grace_ms = kill_at, grace_ms
        self._runs.note(run.stopping_step())
        if not run.live:
            return
        if first:
            self.carry_out(run)
        else:
            self._arm(run)

    def carry_out(self, run: Run) -> None:
        """Begin the stop of a living run, or go on where an agent before us was."""
        self._arm(run)
        if run.hook is None:
            self._term(run)
        elif run.hook_begun:
            self._look(run)
        else:
            self._begin_hook(run)

    def ended(self, run: Run) -> None:
        """The run is gone; whatever was asked to save its work goes too."""
        if run.hook_begun:
            self._end_command(run)

    def _arm(self, run: Run) -> None:
        now = proc.boot_clock_ms()
        self._runs.later(run, max(0, run.kill_at_boot_ms - now) / 1000, self._kill)
        if run.hook is not None:
            self._runs.later(run, max(0, run.hook_until_boot_ms - now) / 1000, self._hook_deadline)

    # ---------------------------------------------------------------------------------------------- hook

    def _begin_hook(self, run: Run) -> None:
        if run.hook is None or run.end is not None:
            return
        if not has_begun(run):
            self._runs.later(run, BIRTH_LOOK_S, self._begin_hook)
            return
        run.hook_begun = True
        if run.hook.signal:
            run.hook_before = self._runs.looks.now(run.checkpoint_file)
            self._runs.looked(run, run.hook_before)
        self._runs.note(run.stopping_step())
        self._runs.when_durable(lambda: self._hook(run))

    def _hook(self, run: Run) -> None:
        if run.hook is None or run.end is not None:
            return
        if run.hook.signal:
            signal_to_all(run, run.hook.number)
            self._look(run)
            return
        try:
            self._spawn_command(run, run.hook.command)
        except (OSError, ValueError) as error:
            self._hook_over(run, f"its checkpoint command could not be started: {error}")

    def _spawn_command(self, run: Run, command: tuple[str, ...]) -> None:
        env, fence = surroundings(run)
        self._commands[spawn(run.name, run.directory, command, env, run.workdir, fence, HOOK)] = run

    def _look(self, run: Run, looks_left: int = SETTLE_LOOKS) -> None:
        """Is the work saved? Asks again until it is; `_hook_deadline` ends the asking."""
        if run.hook is None or run.end is not None:
            return
        if run.hook.signal:
            self._runs.looks.ask(run.checkpoint_file, lambda seen: self._seen(run, seen))
        else:
            self._look_for_command(run, looks_left)

    def _seen(self, run: Run, seen: Seen | None) -> None:
        if run.hook is None or run.end is not None:
            return
        complete = is_checkpoint_complete(run.hook_before, run.seen, seen)
        self._runs.looked(run, seen)
        if complete:
            self._hook_over(run)
        else:
            self._runs.later(run, LOOK_S, self._look)

    def _look_for_command(self, run: Run, looks_left: int) -> None:
        """A command that an agent before us has started: it is not our child, so nobody tells us of its end."""
        status = read_status(run.name, run.directory, HOOK)
        pid, code, error = status.pid, status.code, status.error
        if code is None and not error:
            if pid and proc.holds_file(pid, f"{run.directory}/{HOOK}"):
                self._runs.later(run, LOOK_S, self._look)
                return
            if not pid and looks_left:
                self._runs.later(run, LOOK_S, self._look, looks_left - 1)
                return
            status = read_status(run.name, run.directory, HOOK)
            code, error = status.code, status.error
        if pid and proc.is_gone(pid):
            signal_group(pid, signal.SIGKILL)
        self._command_has_ended(run, code, error)

    def child_ended(self, pid: int, code: int) -> None:
        """A child of ours that is no run has been collected."""
        run = self._commands.pop(pid, None)
        if run is not None and run.hook is not None and run.end is None:
            error = read_status(run.name, run.directory, HOOK).error if code == NOT_TRIED else ""
            self._command_has_ended(run, code, error)

    def is_command(self, pid: int) -> bool:
        return pid in self._commands

    def _command_has_ended(self, run: Run, code: int | None, error: str) -> None:
        if error:
            self._hook_over(run, f"its checkpoint command failed: {ERRORS[error].format(workdir=run.workdir)}")
        elif code is None:
            self._hook_over(run, "nobody can tell how its checkpoint command ended")
        elif code:
            how = signal_name(code - 128) or f"exit code {code}"
            self._hook_over(run, f"its checkpoint command failed: {how}")
        else:
            self._runs.saved(run, proc.now_ms())
            self._hook_over(run)

    def _hook_deadline(self, run: Run) -> None:
        if run.hook is None or run.end is not None:
            return
        what = "its checkpoint command did not end" if run.hook.command else "no checkpoint was seen"
        self._hook_over(run, run.hook_note or f"{what} within {run.hook.timeout_ms / 1000:g}s")

    def _hook_over(self, run: Run, note: str = "") -> None:
        """Saved or not, the stop goes on."""
        self._end_command(run)
        run.hook, run.hook_note = None, note
        run.kill_at_boot_ms = min(run.kill_at_boot_ms, proc.boot_clock_ms() + run.stop_grace_ms)
        self._runs.note(run.stopping_step())
        self._arm(run)
        self._runs.when_durable(lambda: self._term(run))

    def _end_command(self, run: Run) -> None:
        pid = next((pid for pid, of in self._commands.items() if of is run), 0)
        if not pid:
            pid = read_status(run.name, run.directory, HOOK).pid
            if not pid or not proc.holds_file(pid, f"{run.directory}/{HOOK}"):
                return
        signal_group(pid, signal.SIGKILL)

    # ------------------------------------------------------------------------------------- TERM and KILL

    def _term(self, run: Run) -> None:
        """As soon as the command itself is there to hear it."""
        if run.end is not None:
            return
        if has_begun(run):
            signal_to_all(run, signal.SIGTERM)
        else:
            # The wrapper ignores TERM; sent now it would be lost to a command that is just being born.
            self._runs.later(run, BIRTH_LOOK_S, self._term)

    def _kill(self, run: Run) -> None:
        if run.end is not None:
            return
        signal_group(run.pid, signal.SIGKILL)
        self._runs.fences.kill(run.cgroups)
        self._runs.later(run, LOOK_S, self._kill)


def has_begun(run: Run) -> bool:
    """Is the command itself there to hear a signal? Before that only its wrapper is."""
    begun = proc.child_has_begun(run.pid)
    return begun if begun is not None else proc.boot_clock_ms() - run.started_boot_ms > 1000


def signal_to_all(run: Run, number: signal.Signals) -> None:
    signal_group(run.pid, number)
    signal_group(run.pid, signal.SIGCONT)  # a stopped process cannot hear the other one
