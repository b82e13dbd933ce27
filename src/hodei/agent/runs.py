"""The lifecycle of runs: claimed, started, stopped, ended, forgotten. Single-threaded, driven by the event loop.

Every end is durable in the journal before `tell` is called with it; many ends share one sync. A run is claimed durably
before it is started, so it never starts twice. `recovery` fills the table after a restart.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hodei.agent import logs, proc
from hodei.agent.exec import ExecSessions, signal_group
from hodei.agent.journal import Journal, RunDirs, write_copy
from hodei.agent.limits import Fences
from hodei.agent.logs import LogTimes
from hodei.agent.probes import ProbeThread, Seen
from hodei.agent.run import BadOrder, Observation, Run, check_run_name
from hodei.agent.run_checks import Checkpoints, HealthChecks, Idles
from hodei.agent.spawn import ERRORS, NOT_TRIED, BadHook, Hook, Status, base_env, read_status, spawn
from hodei.agent.stops import Stops
from hodei.supervision import timeout_reason

# ----------------------------------------------------------------------------------------- exit status
# How and when a run ended, from the files that it left: also true if we were away, or stood still, at that time.


# An end that is seen later than this is looked up in what the wrapper wrote; looking at every one would be too dear.
PROMPT_MS = 200


def of_child(run: Run, code: int) -> tuple[str, int]:
    """Why a child of ours that ended with `code` could not even be tried ("" if it was), and when it ended."""
    error, at_ms = "", proc.now_ms()
    if code == NOT_TRIED or at_ms - _written_ms(run) > PROMPT_MS:
        status = read_status(run.name, run.directory)
        if code == NOT_TRIED:
            error = status.error or ("status" if status.sound and not status.pid else "")
        at_ms = _end_ms(run, status)
    return _in_words(run, error), at_ms


def of_stranger(run: Run) -> tuple[int | None, str, int]:
    """The same for a run that is gone and was not our child, with its exit code, None if nobody knows."""
    status = read_status(run.name, run.directory)
    at_ms = _end_ms(run, status)
    if not run.started_ms and status.pid:
        run.started_ms = min(max(_opened_ms(run), run.claimed_ms), at_ms)
    return status.code, _in_words(run, status.error), at_ms


def _in_words(run: Run, error: str) -> str:
    return ERRORS[error].format(workdir=run.workdir) if error else ""


def _written_ms(run: Run) -> int:
    """When its wrapper last wrote something; now if nobody can tell."""
    try:
        return os.stat(f"{run.directory}/status", follow_symlinks=False).st_mtime_ns // 1_000_000
    except OSError:
        return proc.now_ms()


def _end_ms(run: Run, status: Status) -> int:
    """As its wrapper wrote it down, else now, when it is seen."""
    now = proc.now_ms()
    if status.code is None and not status.error:
        return now
    return max(min(status.written_ms, now), run.started_ms, run.claimed_ms)


def _opened_ms(run: Run) -> int:
    """When it was born: the files for its output are opened then, and one that stayed empty still shows it."""
    try:
        return min(os.stat(f"{run.directory}/{stream}").st_mtime_ns for stream in logs.STREAMS) // 1_000_000
    except OSError:
        return 0


# ----------------------------------------------------------------------------------------------------

# Ends gather for this long to share one sync: far below what anyone notices, and the disk is asked 300 times a second
# at most.
GATHER_S = 0.003
BIRTHS_PER_TURN = 8
FORGOTTEN_KEPT = 20_000
RETRY_S = 1.0

Tell = Callable[[str, list[Observation]], None]


class Runs:
    """The table of all runs that are not forgotten, and everything that happens to them."""

    def __init__(self, home: str, journal: Journal, fences: Fences, tell: Tell) -> None:
        self.home, self.journal, self.fences = home, journal, fences
        self.places, self.epochs_path = RunDirs(f"{home}/runs"), f"{home}/epochs"
        self.boot = proc.boot_id()
        self.table: dict[str, Run] = {}
        self.epochs: dict[str, int] = {}
        self.forgotten: dict[str, None] = {}
        self.live: dict[int, Run] = {}
        self.log_times = LogTimes()
        self.trouble = ""  # what `recovery` could not read, as a message
        self._tell = tell
        self.loop = asyncio.get_running_loop()
        self._unborn: deque[Run] = deque()
        self._news: list[tuple[str, Observation]] = []
        self._when_durable: list[Callable[[], None]] = []
        self._looking: set[str] = set()
        self._flush_due = False
        self.looks = ProbeThread(self.loop)
        self.beside = ExecSessions(self.loop)
        self.stops, self.saves = Stops(self), Checkpoints(self)
        self.checks, self.idles = HealthChecks(self), Idles(self)
        self.base_env = base_env()

    @property
    def idle(self) -> bool:
        return not self.live and not self._unborn and not self._news

    def knows(self, key: str) -> bool:
        return key in self.table or key in self.forgotten

    # --------------------------------------------------------------------------------------------- birth

    def start(self, installation: str, orders: Iterable[Mapping[str, Any]]) -> dict[str, str]:
        """Claim these runs durably, then give birth to them one by one. The answer names those that never can run,
        and why. A run that is known already, in whatever state, is left as it is. OSError: none was claimed."""
        refused: dict[str, str] = {}
        claimed: list[Run] = []
        for order in orders:
            name = str(order.get("run"))
            try:
                run = Run(installation, check_run_name(name), self.places.path(installation, name))
                if run.key in self.table:
                    continue
                if run.key in self.forgotten:
                    raise BadOrder("it has ended, and its end was acknowledged")
                run.take_orders(order, self.base_env)
            except BadOrder as error:
                refused[name] = str(error)
                continue
            run.claimed_ms, run.boot = proc.now_ms(), self.boot
            run.cgroups = self.fences.groups(f"{installation}.{name}", run.limits)
            self.table[run.key] = run
            run.claim = self.journal.add(run.claimed_step())
            claimed.append(run)
        if not claimed:
            return refused
        try:
            self.journal.sync()
        except OSError:
            for run in claimed:
                del self.table[run.key]
                self.journal.add({"step": "unclaimed", "run": run.key})
            raise
        if not self._unborn:
            self.loop.call_soon(self._give_births)
        self._unborn.extend(claimed)
        return refused

    def _give_births(self) -> None:
        # A few per turn, so that ends are noticed and stops heard in between.
        for _ in range(min(BIRTHS_PER_TURN, len(self._unborn))):
            self._give_birth(self._unborn.popleft())
        if self._unborn:
            self.loop.call_soon(self._give_births)

    def leave(self) -> None:
        """Our last act: what was accepted is begun, what has ended is on disk."""
        while self._unborn:
            self._give_birth(self._unborn.popleft())
        self.flush()

    def _give_birth(self, run: Run) -> None:
        if run.stop_code:
            self._ended(run, code=None)
            return
        try:
            self.places.make(run.directory)
            fence = self.fences.build(f"{run.installation}.{run.name}", run.limits)
            run.pid = spawn(run.name, run.directory, run.argv, run.env, run.workdir, fence, claim=run.carried_claim())
        except FileExistsError:
            self._ended(run, code=None)  # a run of this name has been here before: never a second time
            return
        except (OSError, ValueError) as error:
            self._ended(run, code=None, error=f"it could not be started: {error}")
            return
        run.argv, run.env, run.claim = (), {}, ""
        run.started_ms, run.started_boot_ms = proc.now_ms(), proc.boot_clock_ms()
        self.live[run.pid] = run
        self.journal.add(run.started_step())
        self.report(run)
        self.watch_over(run)

    def watch_over(self, run: Run) -> None:
        """It lives: all that is done beside it begins, or goes on."""
        self._arm_timeout(run)
        self.checks.watch(run)
        self.saves.watch(run)

    def leave_alone(self, run: Run) -> None:
        """It is being stopped, or has ended: nothing is done beside it any more."""
        self.saves.end(run)
        self.beside.end(run)

    def later(self, run: Run, seconds: float, what: Callable[..., None], *args: Any) -> None:
        """`what(run, *args)` after a while, unless the run has ended by then."""
        now = self.loop.time()
        run.timers = [timer for timer in run.timers if timer.when() > now and not timer.cancelled()]
        run.timers.append(self.loop.call_later(seconds, what, run, *args))

    def _arm_timeout(self, run: Run) -> None:
        if run.timeout_ms:
            left_ms = run.started_boot_ms + run.timeout_ms - proc.boot_clock_ms()
            text = timeout_reason(run.timeout_ms)
            run.timers.append(
                self.loop.call_later(max(0, left_ms) / 1000, self.stops.order, run, "timeout", text, run.grace_ms)
            )

    # ---------------------------------------------------------------------------------------------- stop

    def stop(self, key: str, grace_ms: int, reason: str, hook: Mapping[str, Any] | None = None) -> None:
        """Let it save its work as `hook` says, then TERM, then KILL after the grace period. Idempotent."""
        run = self.table.get(key)
        if run is None:
            return
        try:
            self.stops.order(run, "stop", reason, grace_ms, Hook.from_order(hook))
        except BadHook as error:
            self.stops.order(run, "stop", reason, grace_ms, note=f"its checkpoint was left out: {error}")

    # ------------------------------------------------------------------------------------------ checkpoints

    def save_work(self, key: str, hook: Mapping[str, Any] | None) -> None:
        """Let it save its work as `hook` says, and go on. It is left alone if it does not run."""
        run = self.table.get(key)
        if run is None or not run.live or run.stop_code:
            return
        try:
            how = Hook.from_order(hook)
        except BadHook as error:
            self.report(run, checkpoint_error=str(error))
            return
        if how is not None:
            self.saves.order(run, how)

    def look_at_checkpoints(self) -> None:
        """When did each run last save its work? Answers come later, and are told if they are news."""
        for run in self.live.values():
            if run.watched and run.key not in self._looking:
                self._looking.add(run.key)
                self.looks.ask(run.checkpoint_file, functools.partial(self._looked_for, run))

    def _looked_for(self, run: Run, seen: Seen | None) -> None:
        self._looking.discard(run.key)
        self.looked(run, seen)

    def looked(self, run: Run, seen: Seen | None) -> None:
        """A run's checkpoint file stands like this."""
        if run.end is None and run.saved(seen, proc.now_ms()):
            self._saved(run)

    def saved(self, run: Run, at_ms: int) -> None:
        """Its work is known to be saved at this time, whatever its file says."""
        run.checkpoint_ms = max(run.checkpoint_ms, at_ms)
        self._saved(run)

    def _saved(self, run: Run) -> None:
        self.journal.add(run.saved_step())
        self.report(run)

    # ----------------------------------------------------------------------------------------------- end

    def reap(self) -> None:
        """Collect every child that has ended."""
        while True:
            try:
                # Look first: as long as the dead child is not collected, nobody else can have its number.
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if dead is None:
                return
            run = self.live.get(dead.si_pid)
            if run is not None or self.stops.is_command(dead.si_pid) or self.beside.has(dead.si_pid):
                signal_group(dead.si_pid, signal.SIGKILL)
            os.waitpid(dead.si_pid, 0)
            code = dead.si_status if dead.si_code == os.CLD_EXITED else 128 + dead.si_status
            if run is None:
                self.stops.child_ended(dead.si_pid, code)
                self.beside.child_ended(dead.si_pid, code)
            else:
                error, at_ms = of_child(run, code)
                self._ended(run, code=code, error=error, at_ms=at_ms)

    def ended_elsewhere(self, run: Run) -> None:
        """A run that is not our child is gone: what its wrapper wrote down is all there is to know."""
        code, error, at_ms = of_stranger(run)
        self._ended(run, code=code, error=error, at_ms=at_ms)

    def never_born(self, run: Run) -> bool:
        """It was claimed, and it is certain that its command has not begun and never will: as if it had not been claimed,
        so that the next order for it starts it. False if that cannot be had."""
        if run.stop_code:
            self._ended(run, code=None)
            return True
        try:
            shutil.rmtree(run.directory)
        except FileNotFoundError:
            pass
        except OSError:
            return False
        del self.table[run.key]
        self.journal.add({"step": "unclaimed", "run": run.key})
        return True

    def _ended(self, run: Run, *, code: int | None, error: str = "", at_ms: int = 0) -> None:
        for timer in run.timers:
            timer.cancel()
        run.timers.clear()
        if self.live.pop(run.pid, None) is not None:
            self.log_times.end(run.directory, at_ms or proc.now_ms())
        self.stops.ended(run)
        self.leave_alone(run)
        if run.pid and (run.watched or run.hook_begun):
            run.saved(self.looks.now(run.checkpoint_file), proc.now_ms())
        oom = bool(run.cgroups) and self.fences.ran_out_of_memory(run.cgroups)
        run.end = run.ended(code=code, error=error, oom=oom, at_ms=at_ms or proc.now_ms())
        run.argv, run.env = (), {}
        if run.cgroups:
            self.remove_groups(run.cgroups)
        self.trim_logs(run)
        self.journal.add(run.done_step())
        self.report(run)

    def remove_groups(self, groups: Sequence[str], tries: int = 200) -> None:
        self.fences.kill(groups)
        if not self.fences.remove(groups) and tries:
            self.loop.call_later(0.05, self.remove_groups, groups, tries - 1)

    @staticmethod
    def trim_logs(run: Run) -> None:
        for stream in logs.STREAMS:
            try:
                logs.trim(run.directory, stream, run.log_cap)
            except FileNotFoundError:
                continue
            except OSError as error:
                print(f"cannot trim {stream} of {run.key}: {error}", file=sys.stderr)

    # -------------------------------------------------------------------------------------------- memory

    def report(self, run: Run, **more: Any) -> None:
        """How it stands is news; `more` is told with it, once."""
        self._news.append((run.installation, {**run.observation(), **more} if more else run.observation()))
        self._flush_soon()

    def note(self, step: dict[str, Any]) -> None:
        """Into the journal, soon."""
        self.journal.add(step)
        self._flush_soon()

    def when_durable(self, what: Callable[[], None]) -> None:
        """Call `what` once all that was noted is on disk; also if the disk refuses, for no stop waits for a disk."""
        self._when_durable.append(what)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self.loop.call_later(GATHER_S, self.flush)

    def flush(self) -> None:
        """Make everything durable, then tell what is new."""
        self._flush_due = False
        try:
            self.journal.sync()
        except OSError as error:
            self._do_what_waited()
            print(f"the journal cannot be written, trying again: {error}", file=sys.stderr)
            self._flush_due = True
            self.loop.call_later(RETRY_S, self.flush)
            return
        news, self._news = self._news, []
        by_installation: dict[str, list[Observation]] = {}
        for installation, observation in news:
            by_installation.setdefault(installation, []).append(observation)
        for installation, observations in by_installation.items():
            self._tell(installation, observations)
        self._do_what_waited()
        if self.journal.has_grown:
            self.compact()

    def _do_what_waited(self) -> None:
        waited, self._when_durable = self._when_durable, []
        for what in waited:
            what()

    def forget(self, keys: Iterable[str]) -> None:
        """Drop what is kept about these ended runs, except what they said."""
        for key in keys:
            run = self.table.get(key)
            if run is None or run.end is None:
                continue
            del self.table[key]
            self.remember_forgotten(key)
            self.journal.add({"step": "forgotten", "run": key})
            self.places.leave(run.directory)
        self._flush_soon()

    def remember_forgotten(self, key: str) -> None:
        self.forgotten[key] = None
        if len(self.forgotten) > FORGOTTEN_KEPT:
            del self.forgotten[next(iter(self.forgotten))]

    def see_epoch(self, installation: str, epoch: int) -> bool:
        """False if a newer server has been here."""
        if epoch < self.epochs.get(installation, 0):
            return False
        if epoch > self.epochs.get(installation, 0):
            self.epochs[installation] = epoch
            self.journal.add({"step": "epoch", "installation": installation, "epoch": epoch})
            self.journal.sync()
            write_copy(self.epochs_path, self._epoch_steps())
        return True

    def compact(self) -> None:
        self.journal.compact(self._steps())

    def _epoch_steps(self) -> Iterable[dict[str, Any]]:
        return [{"step": "epoch", "installation": name, "epoch": epoch} for name, epoch in self.epochs.items()]

    def _steps(self) -> Iterable[dict[str, Any]]:
        yield from self._epoch_steps()
        for key in self.forgotten:
            yield {"step": "forgotten", "run": key}
        for run in self.table.values():
            yield run.claimed_step()
            if run.pid:
                yield run.started_step()
            if run.checkpoint_ms:
                yield run.saved_step()
            if run.stop_code:
                yield run.stopping_step()
            if run.end is not None:
                yield run.done_step()
