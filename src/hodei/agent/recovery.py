"""Finding runs again after our own death: by the journal, by what their wrappers wrote, and by the living processes.

A process is one of ours if it still holds the run's status file open. What the wrapper wrote down is believed; what
nobody wrote down is lost, and said so. Nothing is ever started here.
"""

from __future__ import annotations

import asyncio
import os
import signal

from hodei.agent import proc
from hodei.agent.run import Run
from hodei.agent.runs import Runs
from hodei.agent.spawn import read_status

# A wrapper that was being born while we died needs a moment to write its first line.
SETTLE_TRIES = 40
SETTLE_S = 0.025
POLL_S = 0.2


def recover(runs: Runs) -> None:
    """Fill the table from the journal, watch what lives, settle what has ended. Call once, before the door opens."""
    boots = _replay(runs)
    groups: dict[int, list[int]] | None = None
    for run in list(runs.table.values()):
        if run.end is not None:
            if run.cgroups and any(os.path.isdir(group) for group in run.cgroups):
                runs.remove_groups(run.cgroups)
            continue
        if run.pid and boots.get(run.key) != runs.boot:
            runs.ended_elsewhere(run)  # the host was started anew: no process of that time can be alive
        elif not _settle(runs, run, SETTLE_TRIES):
            groups = proc.groups() if groups is None else groups
            _kill_left_behind(run, groups)
    if any(run.cgroups for run in runs.table.values()):
        # A run that is not settled yet may be about to join its groups.
        runs.fences.sweep(frozenset(group for run in runs.table.values() if run.end is None for group in run.cgroups))
    runs.compact()


def _replay(runs: Runs) -> dict[str, str]:
    """Returns the boot in which each run was started."""
    boots: dict[str, str] = {}
    for step in runs.journal.replay():
        kind, key = step["step"], step.get("run", "")
        if kind == "epoch":
            runs.epochs[step["installation"]] = step["epoch"]
        elif kind == "forgotten":
            runs.table.pop(key, None)
            runs.remember_forgotten(key)
        elif kind == "unclaimed":
            runs.table.pop(key, None)
        elif kind == "claimed" and key not in runs.table:
            installation, _, name = key.partition("/")
            run = runs.table[key] = Run(installation, name, runs.places.path(installation, name))
            run.recall(step)
        elif key in runs.table:
            runs.table[key].recall(step)
            if kind == "started":
                boots[key] = step["boot"]
    return boots


def _settle(runs: Runs, run: Run, tries: int) -> bool:
    """Watch `run` if it lives, else report its end. False: it has ended while nobody watched."""
    status = f"{run.directory}/status"
    pid, code, error = read_status(run.name, run.directory)
    pid = run.pid or pid
    if code is None and not error:
        if pid and proc.holds_file(pid, status):
            _adopt(runs, run, pid)
            return True
        if not pid and tries and os.path.isdir(run.directory):
            asyncio.get_running_loop().call_later(SETTLE_S, _settle, runs, run, tries - 1)
            return True
    run.pid = pid
    runs.ended_elsewhere(run)
    return False


def _adopt(runs: Runs, run: Run, pid: int) -> None:
    if not run.pid:
        run.pid, run.started_ms, run.started_boot_ms = pid, proc.now_ms(), proc.boot_clock_ms()
        runs.journal.add(run.started_step(runs.boot))
    runs.live[pid] = run
    runs.beside.end_those_before_us(run)
    runs.watch_over(run)
    if run.stop_code:
        runs.stops.carry_out(run)
    _watch(runs, run)


def _watch(runs: Runs, run: Run) -> None:
    loop = asyncio.get_running_loop()
    status = f"{run.directory}/status"
    try:
        pidfd = os.pidfd_open(run.pid)
    except OSError:
        pidfd = -1  # gone by now, or too many open files: look again now and then

    def gone() -> None:
        if pidfd >= 0:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        if proc.is_gone(run.pid):
            # Either not collected yet or just now: its number has not been given to anyone else.
            try:
                os.killpg(run.pid, signal.SIGKILL)
            except OSError:
                pass
        runs.ended_elsewhere(run)

    def look() -> None:
        if proc.holds_file(run.pid, status):
            loop.call_later(POLL_S, look)
        else:
            gone()

    if pidfd >= 0 and proc.holds_file(run.pid, status):
        loop.add_reader(pidfd, gone)
    else:
        loop.call_soon(look)


def _kill_left_behind(run: Run, groups: dict[int, list[int]]) -> None:
    """Processes of an ended run's group, known by their environment: the number may be someone else's by now."""
    for pid in groups.get(run.pid, ()):
        if proc.has_in_env(pid, "HODEI_RUN_ID", run.name):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
