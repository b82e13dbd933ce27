"""Finding runs again after our own death: by the journal, by their directories, and by the living processes.

Three witnesses, so that a journal that has rotted in places takes no run along: a run that it does not know of is known by
its directory or by its process. A process is one of ours if it still holds the run's status file open. What the wrapper
wrote down is believed; what nobody wrote down is lost, and said so. Nothing is ever started here.

A run that was claimed and never born is no loss: the claim is dropped, and the server, which has not heard of it,
orders it again. That it was not born is certain if it was claimed in this boot of the host (what was written since is
still there to be read), no process holds its status file, and its wrapper has not written its first line, which it does
before all else. A child of an agent before us that was on its way would still hold that agent's lock, which is ours now.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterable
from itertools import chain

from hodei.agent import proc
from hodei.agent.journal import read_copy
from hodei.agent.run import BadOrder, Run, check_installation, check_run_name
from hodei.agent.runs import Runs
from hodei.agent.spawn import BadHook, Status, read_status, wrapper_of

POLL_S = 0.2


def recover(runs: Runs) -> None:
    """Fill the table, watch what lives, settle what has ended, drop what was never born. Call once, with the lock of our
    home and before the door opens."""
    damaged = _replay(runs)
    # Before the status files are read: who ends in between has written its end into them.
    wrappers = proc.holders(runs.places.root, "status")
    if runs.journal.fresh:
        # Who holds a file that is not there is of a home that was removed. Others are ours: only the journal is lost.
        wrappers = {path: pid for path, pid in wrappers.items() if os.path.exists(path)}
    found = _find_others(runs, wrappers)
    unborn = 0
    groups: dict[int, list[int]] | None = None
    for run in list(runs.table.values()):
        if run.end is not None:
            if run.cgroups and any(os.path.isdir(group) for group in run.cgroups):
                runs.remove_groups(run.cgroups)
            continue
        pid = wrappers.get(f"{run.directory}/status", 0)
        if run.pid and not pid and run.boot != runs.boot:
            runs.ended_elsewhere(run)  # the host was started anew: no process of that time can be alive
            continue
        status = read_status(run.name, run.directory)
        if not pid and run.pid and proc.holds_file(run.pid, f"{run.directory}/status"):
            pid = run.pid
        if pid and status.code is None and not status.error:
            _adopt(runs, run, pid)
        elif _was_never_born(runs, run, status) and runs.never_born(run):
            unborn += 1
        else:
            groups = proc.groups() if groups is None else groups
            run.pid = run.pid or status.pid
            runs.ended_elsewhere(run)
            _kill_left_behind(run, groups)
    if any(run.cgroups for run in runs.table.values()):
        runs.fences.sweep(frozenset(group for run in runs.table.values() if run.end is None for group in run.cgroups))
    _tell(runs, damaged, found, unborn)
    runs.compact()


def _tell(runs: Runs, damaged: int, found: int, unborn: int) -> None:
    if damaged:
        copy = runs.journal.keep_copy()
        runs.trouble = f"{damaged} records of its journal could not be read"
        runs.trouble += f", {found} runs were found without it" if found else ""
        runs.trouble += f"; see {copy}" if copy else ""
        print(runs.trouble, file=sys.stderr)
    elif found:
        print(f"{found} runs were found that are not in the journal", file=sys.stderr)
    if unborn:
        print(f"{unborn} runs were accepted and never begun: the server orders them again", file=sys.stderr)


def _replay(runs: Runs) -> int:
    """What the journal says. Returns how many of its records say nothing."""
    senseless = 0
    for step in chain(runs.journal.replay(), read_copy(runs.epochs_path)):
        try:
            _recall(runs, step["step"], step)
        except (KeyError, TypeError, ValueError, BadHook):
            senseless += 1  # of an older agent, without a checksum
    return senseless + runs.journal.unreadable


def _recall(runs: Runs, kind: str, step: dict[str, object]) -> None:
    if kind == "epoch":
        installation, epoch = check_installation(step["installation"]), step["epoch"]
        if not isinstance(epoch, int):
            raise TypeError(epoch)
        runs.epochs[installation] = max(epoch, runs.epochs.get(installation, 0))
        return
    key = step["run"]
    if not isinstance(key, str):
        raise TypeError(key)
    if kind == "forgotten":
        runs.table.pop(key, None)
        runs.remember_forgotten(key)
    elif kind == "unclaimed":
        runs.table.pop(key, None)
    elif key not in runs.forgotten:
        # Also if its claim cannot be read: it is known all the same.
        run = runs.table.get(key) or _a_run(runs, *key.split("/", 1))
        run.recall(step)
        runs.table[key] = run


def _a_run(runs: Runs, installation: str, name: str) -> Run:
    check_installation(installation)
    check_run_name(name)
    return Run(installation, name, runs.places.path(installation, name))


def _find_others(runs: Runs, wrappers: Iterable[str]) -> int:
    """Runs that the journal does not know of, by their processes and directories; how many there are.

    Also those whose end was acknowledged so long ago that we forgot about that too: the server says so again."""
    paths = {os.path.dirname(path) for path in wrappers}
    found = 0
    for path in sorted(paths | set(runs.places.with_status(runs.knows))):
        directory, name = os.path.split(path)
        installation = os.path.basename(directory)
        if runs.knows(f"{installation}/{name}") or runs.places.path(installation, name) != path:
            continue
        try:
            run = _a_run(runs, installation, name)
        except BadOrder:
            continue  # not of our making
        runs.table[run.key] = run
        found += 1
    return found


def _recall_from_process(run: Run, pid: int) -> None:
    wrapper = wrapper_of(proc.command_line(pid))
    if wrapper is None or wrapper.run != run.name:
        return
    run.workdir, run.cgroups = wrapper.workdir, wrapper.groups
    try:
        run.recall(json.loads(wrapper.claim))
    except (KeyError, TypeError, ValueError, BadHook):
        return  # of an older agent


def _was_never_born(runs: Runs, run: Run, status: Status) -> bool:
    if run.pid or status.pid or status.code is not None or status.error or run.boot != runs.boot or not status.sound:
        return False
    # An empty file is one whose writer died before its first word, or one that was emptied since. Only a journal that is
    # whole can tell: it has no `started` for it.
    return not status.exists or status.lines > 0 or not runs.journal.unreadable


def _adopt(runs: Runs, run: Run, pid: int) -> None:
    if not run.claimed_ms:
        _recall_from_process(run, pid)
    if run.pid != pid or not run.started_ms:
        run.pid, run.boot = pid, runs.boot
        run.started_boot_ms = proc.began_boot_ms(pid)
        run.started_ms = proc.now_ms() - (proc.boot_clock_ms() - run.started_boot_ms)
        runs.journal.add(run.started_step())
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
