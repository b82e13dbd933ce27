"""The lifecycle of runs: claimed, started, stopped, ended, forgotten. Single-threaded, driven by the event loop.

Every end is durable in the journal before it is published; many ends share one sync. A run is claimed durably before it is
started, so it never starts twice. `journal.recover` fills the table after a restart.
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
from resource import struct_rusage
from typing import Any

from hodei.agent import logs, proc
from hodei.agent.exec import ExecSessions, signal_group
from hodei.agent.journal import Journal, write_copy
from hodei.agent.limits import Cgroups
from hodei.agent.logs import LogTimes
from hodei.agent.probes import FileProbes, FileStat
from hodei.agent.run import BadHook, BadOrder, Hook, Observation, Record, Run, check_run_name
from hodei.agent.spawn import ERRORS, NOT_TRIED, RunDirs, Status, base_env, read_status, spawn
from hodei.agent.supervision import Checkpoints, HealthChecks, IdleChecks, Stops
from hodei.agent.usage import Usage, UsageMeter, merge
from hodei.supervision import timeout_reason

# An end that is noticed later than this takes its time from the status file; reading it for every end would be too slow.
PROMPT_MS = 200
# Ends are collected for this long to share one sync: too short to notice, and at most 300 syncs a second.
SYNC_DELAY_S = 0.003
SPAWNS_PER_TURN = 8
FORGOTTEN_KEPT = 20_000
RETRY_S = 1.0

Publish = Callable[[str, list[Observation]], None]


class Runs:
    """The table of all runs that are not forgotten, and everything that happens to them."""

    def __init__(self, home: str, journal: Journal, cgroups: Cgroups, publish: Publish) -> None:
        self.home, self.journal, self.cgroups = home, journal, cgroups
        self.dirs, self.epochs_path = RunDirs(f"{home}/runs"), f"{home}/epochs"
        self.boot = proc.boot_id()
        self.table: dict[str, Run] = {}
        self.epochs: dict[str, int] = {}
        self.forgotten: dict[str, None] = {}
        self.live: dict[int, Run] = {}
        self.log_times = LogTimes()
        self.journal_problem = ""  # what `recover` could not read, as a message
        self._publish = publish
        self.loop = asyncio.get_running_loop()
        self._to_spawn: deque[Run] = deque()
        self._unpublished: list[tuple[str, Observation]] = []
        self._after_sync: list[Callable[[], None]] = []
        self._probing: set[str] = set()
        self._flush_due = False
        self.probes = FileProbes(self.loop)
        self.exec = ExecSessions(self.loop)
        self.stops, self.checkpoints = Stops(self), Checkpoints(self)
        self.health_checks, self.idle_checks = HealthChecks(self), IdleChecks(self)
        self.meter = UsageMeter(self.live)
        self.base_env = base_env()

    @property
    def idle(self) -> bool:
        return not self.live and not self._to_spawn and not self._unpublished

    def knows(self, key: str) -> bool:
        return key in self.table or key in self.forgotten

    def start(self, installation: str, orders: Iterable[Mapping[str, Any]]) -> dict[str, str]:
        """Claim these runs durably, then start them one by one. The answer names those that can never run, and why. A run that
        is known already, in whatever state, is left as it is. OSError: none was claimed."""
        refused: dict[str, str] = {}
        claimed: list[Run] = []
        for order in orders:
            name = str(order.get("run"))
            try:
                run = Run(installation, check_run_name(name), self.dirs.path(installation, name))
                if run.key in self.table:
                    continue
                if run.key in self.forgotten:
                    raise BadOrder("it has ended, and its end was acknowledged")
                run.apply_order(order, self.base_env)
            except BadOrder as error:
                refused[name] = str(error)
                continue
            run.claimed_ms, run.boot = proc.now_ms(), self.boot
            run.cgroups = self.cgroups.groups(f"{installation}.{name}", run.limits)
            self.table[run.key] = run
            run.claim = self.journal.add(run.claimed_record())
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
        if not self._to_spawn:
            self.loop.call_soon(self._spawn_some)
        self._to_spawn.extend(claimed)
        return refused

    def _spawn_some(self) -> None:
        # A few per turn, so that ends and stops are handled in between.
        for _ in range(min(SPAWNS_PER_TURN, len(self._to_spawn))):
            self._spawn(self._to_spawn.popleft())
        if self._to_spawn:
            self.loop.call_soon(self._spawn_some)

    def close(self) -> None:
        """Before the agent exits: start what was accepted, and make all ends durable."""
        while self._to_spawn:
            self._spawn(self._to_spawn.popleft())
        self.flush()

    def _spawn(self, run: Run) -> None:
        if run.stop is not None:
            self._ended(run, code=None)
            return
        try:
            self.dirs.make(run.directory)
            limits = self.cgroups.create(f"{run.installation}.{run.name}", run.limits)
            run.pid = spawn(run.name, run.directory, run.argv, run.env, run.workdir, limits, claim=run.wrapper_claim())
        except FileExistsError:
            self._ended(run, code=None)  # a run of this name was started before: never a second time
            return
        except (OSError, ValueError) as error:
            self._ended(run, code=None, error=f"it could not be started: {error}")
            return
        run.argv, run.env, run.claim = (), {}, ""
        run.started_ms, run.started_boot_ms = proc.now_ms(), proc.boot_clock_ms()
        self.live[run.pid] = run
        self.journal.add(run.started_record())
        self.report(run)
        self.begin_supervision(run)

    def begin_supervision(self, run: Run) -> None:
        """For a run that has just started or was recovered."""
        if run.timeout_ms:
            left_ms = run.started_boot_ms + run.timeout_ms - proc.boot_clock_ms()
            text = timeout_reason(run.timeout_ms)
            run.timers.append(
                self.loop.call_later(max(0, left_ms) / 1000, self.stops.order, run, "timeout", text, run.grace_ms)
            )
        self.health_checks.begin(run)
        self.checkpoints.begin(run)

    def end_supervision(self, run: Run) -> None:
        """The run is being stopped or has ended."""
        self.checkpoints.end(run)
        self.exec.kill(run)

    def call_later(self, run: Run, seconds: float, callback: Callable[..., None], *args: Any) -> None:
        """`callback(run, *args)` after a while, unless the run has ended by then."""
        now = self.loop.time()
        run.timers = [timer for timer in run.timers if timer.when() > now and not timer.cancelled()]
        run.timers.append(self.loop.call_later(seconds, callback, run, *args))

    def stop(self, key: str, grace_ms: int, reason: str, hook: Mapping[str, Any] | None = None) -> None:
        """Let it save its work as `hook` says, then TERM, then KILL after the grace period. Idempotent."""
        run = self.table.get(key)
        if run is None:
            return
        try:
            self.stops.order(run, "", reason, grace_ms, Hook.from_order(hook))
        except BadHook as error:
            self.stops.order(run, "", reason, grace_ms, note=f"its checkpoint was skipped: {error}")

    def checkpoint(self, key: str, hook: Mapping[str, Any] | None) -> None:
        """Let a running run save its work as `hook` says, and continue."""
        run = self.table.get(key)
        if run is None or not run.live or run.stop is not None:
            return
        try:
            parsed = Hook.from_order(hook)
        except BadHook as error:
            self.report(run, checkpoint_error=str(error))
            return
        if parsed is not None:
            self.checkpoints.order(run, parsed)

    def poll_checkpoint_files(self) -> None:
        """Probe the checkpoint files; new checkpoints are reported when the answers arrive."""
        for run in self.live.values():
            if run.checkpoint_watched and run.key not in self._probing:
                self._probing.add(run.key)
                self.probes.request(run.checkpoint_file, functools.partial(self._polled, run))

    def _polled(self, run: Run, seen: FileStat | None) -> None:
        self._probing.discard(run.key)
        self.checkpoint_file_seen(run, seen)

    def checkpoint_file_seen(self, run: Run, seen: FileStat | None) -> None:
        if run.end is None and run.update_checkpoint(seen, proc.now_ms()):
            self._report_checkpoint(run)

    def checkpoint_taken(self, run: Run, at_ms: int) -> None:
        """Its work is known to be saved at this time, whatever its file shows."""
        run.checkpoint_ms = max(run.checkpoint_ms, at_ms)
        self._report_checkpoint(run)

    def _report_checkpoint(self, run: Run) -> None:
        self.journal.add(run.checkpoint_record())
        self.report(run)

    def reap(self) -> None:
        """Collect every child that has ended."""
        while True:
            try:
                # Without collecting it: until then its pid cannot be reused, so its group can be signalled safely.
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if dead is None:
                return
            run = self.live.get(dead.si_pid)
            if run is not None or self.stops.is_command(dead.si_pid) or self.exec.has(dead.si_pid):
                signal_group(dead.si_pid, signal.SIGKILL)
            used = os.wait4(dead.si_pid, 0)[2]
            code = dead.si_status if dead.si_code == os.CLD_EXITED else 128 + dead.si_status
            if run is None:
                self.stops.child_ended(dead.si_pid, code)
                self.exec.child_ended(dead.si_pid, code)
            else:
                self._child_ended(run, code, used)

    def _child_ended(self, run: Run, code: int, used: struct_rusage) -> None:
        error, at_ms = "", proc.now_ms()
        if code == NOT_TRIED or at_ms - _status_written_ms(run) > PROMPT_MS:
            status = read_status(run.name, run.directory)
            if code == NOT_TRIED:
                error = status.error or ("status" if status.sound and not status.pid else "")
            at_ms = _end_ms(run, status)
        usage = self.meter.measure_end(run, used)
        self._ended(run, code=code, error=_error_text(run, error), at_ms=at_ms, usage=usage)

    def end_from_status_file(self, run: Run) -> None:
        """A run that is not our child has ended: only what its wrapper wrote is known."""
        status = read_status(run.name, run.directory)
        at_ms = _end_ms(run, status)
        if not run.started_ms and status.pid:
            run.started_ms = min(max(_output_opened_ms(run), run.claimed_ms), at_ms)
        usage = self.meter.measure_end(run, None)
        if status.cpu_ms is not None:
            usage = merge(usage, {"cpu_ms": status.cpu_ms})
        self._ended(run, code=status.code, error=_error_text(run, status.error), at_ms=at_ms, usage=usage)

    def drop_claim(self, run: Run) -> bool:
        """Undo the claim of a command that never started: it can be ordered again. False if its directory stays."""
        if run.stop is not None:
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

    def _ended(
        self, run: Run, *, code: int | None, error: str = "", at_ms: int = 0, usage: Usage | None = None
    ) -> None:
        for timer in run.timers:
            timer.cancel()
        run.timers.clear()
        if self.live.pop(run.pid, None) is not None:
            self.log_times.end(run.directory, at_ms or proc.now_ms())
        self.stops.ended(run)
        self.end_supervision(run)
        if run.pid and (run.checkpoint_watched or run.hook_started):
            run.update_checkpoint(self.probes.wait(run.checkpoint_file), proc.now_ms())
        oom = bool(run.cgroups) and self.cgroups.ran_out_of_memory(run.cgroups)
        run.end = run.describe_end(code=code, error=error, oom=oom, at_ms=at_ms or proc.now_ms(), usage=usage)
        run.argv, run.env = (), {}
        if run.cgroups:
            self.remove_groups(run.cgroups)
        self.trim_logs(run)
        self.journal.add(run.end_record())
        self.report(run)

    def remove_groups(self, groups: Sequence[str], tries: int = 200) -> None:
        self.cgroups.kill(groups)
        if not self.cgroups.remove(groups) and tries:
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

    def report(self, run: Run, **more: Any) -> None:
        """Publish its state after the next sync; `more` is added once."""
        self._unpublished.append((run.installation, {**run.observation(), **more} if more else run.observation()))
        self._flush_soon()

    def record(self, record: Record) -> None:
        """Write to the journal with the next sync."""
        self.journal.add(record)
        self._flush_soon()

    def after_sync(self, callback: Callable[[], None]) -> None:
        """Call `callback` once all records are on disk; also if the disk refuses, because a stop must not wait for a disk."""
        self._after_sync.append(callback)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self.loop.call_later(SYNC_DELAY_S, self.flush)

    def flush(self) -> None:
        """Make everything durable, then publish."""
        self._flush_due = False
        try:
            self.journal.sync()
        except OSError as error:
            self._call_after_sync()
            print(f"the journal cannot be written, trying again: {error}", file=sys.stderr)
            self._flush_due = True
            self.loop.call_later(RETRY_S, self.flush)
            return
        unpublished, self._unpublished = self._unpublished, []
        by_installation: dict[str, list[Observation]] = {}
        for installation, observation in unpublished:
            by_installation.setdefault(installation, []).append(observation)
        for installation, observations in by_installation.items():
            self._publish(installation, observations)
        self._call_after_sync()
        if self.journal.has_grown:
            self.compact()

    def _call_after_sync(self) -> None:
        callbacks, self._after_sync = self._after_sync, []
        for callback in callbacks:
            callback()

    def forget(self, keys: Iterable[str]) -> None:
        """Drop what is kept about these ended runs, except their output."""
        for key in keys:
            run = self.table.get(key)
            if run is None or run.end is None:
                continue
            del self.table[key]
            self.mark_forgotten(key)
            self.journal.add({"step": "forgotten", "run": key})
            self.dirs.release(run.directory)
        self._flush_soon()

    def mark_forgotten(self, key: str) -> None:
        self.forgotten[key] = None
        if len(self.forgotten) > FORGOTTEN_KEPT:
            del self.forgotten[next(iter(self.forgotten))]

    def accept_epoch(self, installation: str, epoch: int) -> bool:
        """False if a server with a newer epoch has connected before."""
        if epoch < self.epochs.get(installation, 0):
            return False
        if epoch > self.epochs.get(installation, 0):
            self.epochs[installation] = epoch
            self.journal.add({"step": "epoch", "installation": installation, "epoch": epoch})
            self.journal.sync()
            write_copy(self.epochs_path, self._epoch_records())
        return True

    def compact(self) -> None:
        self.journal.compact(self._records())

    def _epoch_records(self) -> Iterable[Record]:
        return [{"step": "epoch", "installation": name, "epoch": epoch} for name, epoch in self.epochs.items()]

    def _records(self) -> Iterable[Record]:
        yield from self._epoch_records()
        for key in self.forgotten:
            yield {"step": "forgotten", "run": key}
        for run in self.table.values():
            yield run.claimed_record()
            if run.pid:
                yield run.started_record()
            if run.checkpoint_ms:
                yield run.checkpoint_record()
            if run.stop is not None:
                yield run.stop_record(run.stop)
            if run.end is not None:
                yield run.end_record()


def _error_text(run: Run, error: str) -> str:
    return ERRORS[error].format(workdir=run.workdir) if error else ""


def _status_written_ms(run: Run) -> int:
    """When its wrapper last wrote; now without a status file."""
    try:
        return os.stat(f"{run.directory}/status", follow_symlinks=False).st_mtime_ns // 1_000_000
    except OSError:
        return proc.now_ms()


def _end_ms(run: Run, status: Status) -> int:
    """When its wrapper recorded the end; now if it did not."""
    now = proc.now_ms()
    if status.code is None and not status.error:
        return now
    return max(min(status.written_ms, now), run.started_ms, run.claimed_ms)


def _output_opened_ms(run: Run) -> int:
    """When it started: its output files are opened then, and one that stayed empty keeps that time."""
    try:
        return min(os.stat(f"{run.directory}/{stream}").st_mtime_ns for stream in logs.STREAMS) // 1_000_000
    except OSError:
        return 0
