"""The agent's write-ahead journal, and the recovery of runs after a restart.

The journal is an append-only file of JSON lines, one per change of a run: `claimed` (before anything is started), `started`,
`saved`, `stopping`, `done`, `forgotten`, `unclaimed`; and `epoch` for each installation. Records are written together;
`sync` makes all of them durable with one fdatasync. Each line ends with a checksum. (Journals of older agents have none;
they are read too, and get theirs when they are compacted.) A torn last line was never acknowledged, and is dropped. Any
other line that cannot be read is damaged: it is counted in `unreadable`.

Recovery uses three sources, so that a damaged journal loses no run: the journal, the runs' directories and the live
processes. A process is a run of ours if it holds the run's status file open. The status file gives the exit code; without
one the run is lost. Recovery starts nothing.

A run that was claimed and never started is no loss: the claim is dropped, and the server, which never saw it run, orders
it again. It certainly never started if it was claimed in this boot of the host (so nothing written since is lost), no
process holds its status file, and its wrapper has not written its first line, which it does before anything else. A child
that an earlier agent was just spawning would still hold that agent's lock, which is ours now.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from hodei.agent import proc
from hodei.agent.run import BadOrder, Record, Run, check_installation, check_run_name
from hodei.agent.spawn import Status, parse_wrapper, read_status

if TYPE_CHECKING:
    from hodei.agent.runs import Runs

COMPACT_BYTES = 8 << 20
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Journal:
    """One writer only: the caller holds the lock of the agent's home. `fresh`: the file did not exist before."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._waiting: list[str] = []
        self._torn = False
        self.unreadable = 0
        self.fresh = not os.path.exists(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._compact_at = max(COMPACT_BYTES, self._size)

    def replay(self) -> Iterator[Record]:
        """Every record on disk, oldest first."""
        with open(self._path, "rb") as file:
            for line in file:
                record = _read(line.rstrip(b"\n"))
                self._torn = not line.endswith(b"\n")
                if record is not None:
                    yield record
                elif not self._torn and line != b"\n":
                    self.unreadable += 1

    def keep_copy(self) -> str:
        """Copy a damaged journal for later inspection; the path, "" if the disk is full."""
        copy = f"{self._path}.damaged"
        try:
            shutil.copyfile(self._path, copy)
        except OSError:
            return ""
        return copy

    def add(self, record: Record) -> str:
        """Buffer one record until the next `sync`; returns its text."""
        text = _encode(record)
        self._waiting.append(_with_checksum(text))
        return text

    def sync(self) -> None:
        """All buffered records are durable when this returns. OSError if the disk refuses; the records stay buffered."""
        if not self._waiting:
            return
        data = (("\n" if self._torn else "") + "\n".join(self._waiting) + "\n").encode()
        self._torn = True
        if os.write(self._fd, data) < len(data):
            self._truncate()
            raise OSError("the journal's disk is full")
        os.fdatasync(self._fd)
        self._torn = False
        self._size += len(data)
        self._waiting.clear()

    def _truncate(self) -> None:
        """Remove a half-written line, so that it does not count as damaged later."""
        try:
            os.ftruncate(self._fd, self._size)
            self._torn = False
        except OSError:
            pass

    @property
    def has_grown(self) -> bool:
        return self._size > self._compact_at

    def compact(self, records: Iterable[Record]) -> None:
        """Replace everything by `records`: at every moment the old or the new journal is complete on disk."""
        fresh = f"{self._path}.new"
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        with os.fdopen(os.dup(fd), "wb") as file:
            for record in records:
                file.write(_line(record).encode() + b"\n")
        os.fsync(fd)
        os.rename(fresh, self._path)
        _sync_directory(os.path.dirname(self._path))
        os.close(self._fd)
        self._fd = fd
        self._waiting.clear()
        self._torn = False
        self._size = os.fstat(fd).st_size
        self._compact_at = max(COMPACT_BYTES, 2 * self._size)

    def close(self) -> None:
        os.close(self._fd)


def write_copy(path: str, records: Iterable[Record]) -> None:
    """A second copy of a few records, in case the journal is damaged. OSError if the disk refuses."""
    fresh = f"{path}.new"
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write("".join(f"{_line(record)}\n" for record in records).encode())
        file.flush()
        os.fsync(file.fileno())
    os.rename(fresh, path)


def read_copy(path: str) -> list[Record]:
    """The records that can be read."""
    try:
        with open(path, "rb") as file:
            return [record for line in file if (record := _read(line.rstrip(b"\n"))) is not None]
    except OSError:
        return []


def _line(record: Record) -> str:
    return _with_checksum(_encode(record))


def _with_checksum(text: str) -> str:
    return f"{text} {zlib.crc32(text.encode()):08x}"


def _read(line: bytes) -> Record | None:
    """None if it is damaged."""
    if not line.endswith(b"}"):
        line, _, checksum = line.rpartition(b" ")
        if checksum != b"%08x" % zlib.crc32(line):
            return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), str) else None


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


POLL_S = 0.2


def recover(runs: Runs) -> None:
    """Fill the table before the agent listens: adopt live runs, record ends, drop claims that never started."""
    damaged = _replay(runs)
    # Before the status files are read: a run that ends in between has recorded its end there.
    wrappers = proc.holders(runs.dirs.root, "status")
    if runs.journal.fresh:
        # A holder of a deleted file belongs to a home that was removed. The others are ours: only the journal is lost.
        wrappers = {path: pid for path, pid in wrappers.items() if os.path.exists(path)}
    found = _find_others(runs, wrappers)
    dropped = 0
    groups: dict[int, list[int]] | None = None
    for run in list(runs.table.values()):
        if run.end is not None:
            if run.cgroups and any(os.path.isdir(group) for group in run.cgroups):
                runs.remove_groups(run.cgroups)
            continue
        pid = wrappers.get(f"{run.directory}/status", 0)
        if run.pid and not pid and run.boot != runs.boot:
            runs.end_from_status_file(run)  # the host was rebooted since
            continue
        status = read_status(run.name, run.directory)
        if not pid and run.pid and proc.holds_file(run.pid, f"{run.directory}/status"):
            pid = run.pid
        if pid and status.code is None and not status.error:
            _adopt(runs, run, pid)
        elif _never_started(runs, run, status) and runs.drop_claim(run):
            dropped += 1
        else:
            groups = proc.groups() if groups is None else groups
            run.pid = run.pid or status.pid
            runs.end_from_status_file(run)
            _kill_leftovers(run, groups)
    if any(run.cgroups for run in runs.table.values()):
        runs.cgroups.sweep(frozenset(group for run in runs.table.values() if run.end is None for group in run.cgroups))
    _print_summary(runs, damaged, found, dropped)
    runs.compact()


def _print_summary(runs: Runs, damaged: int, found: int, dropped: int) -> None:
    if damaged:
        copy = runs.journal.keep_copy()
        problem = f"{damaged} records of its journal could not be read"
        problem += f", {found} runs were found without it" if found else ""
        problem += f"; see {copy}" if copy else ""
        runs.journal_problem = problem
        print(problem, file=sys.stderr)
    elif found:
        print(f"{found} runs were found that are not in the journal", file=sys.stderr)
    if dropped:
        print(f"{dropped} runs were accepted and never started: the server orders them again", file=sys.stderr)


def _replay(runs: Runs) -> int:
    """Read the journal into the table. Returns how many of its records are damaged."""
    invalid = 0
    for record in chain(runs.journal.replay(), read_copy(runs.epochs_path)):
        try:
            _replay_one(runs, record["step"], record)
        except (KeyError, TypeError, ValueError):
            invalid += 1  # of an older agent, without a checksum
    return invalid + runs.journal.unreadable


def _replay_one(runs: Runs, kind: str, record: Record) -> None:
    if kind == "epoch":
        installation, epoch = check_installation(record["installation"]), record["epoch"]
        if not isinstance(epoch, int):
            raise TypeError(epoch)
        runs.epochs[installation] = max(epoch, runs.epochs.get(installation, 0))
        return
    key = record["run"]
    if not isinstance(key, str):
        raise TypeError(key)
    if kind == "forgotten":
        runs.table.pop(key, None)
        runs.mark_forgotten(key)
    elif kind == "unclaimed":
        runs.table.pop(key, None)
    elif key not in runs.forgotten:
        # Its claim may be unreadable, but the run is known.
        run = runs.table.get(key) or _new_run(runs, *key.split("/", 1))
        run.replay(record)
        runs.table[key] = run


def _new_run(runs: Runs, installation: str, name: str) -> Run:
    check_installation(installation)
    check_run_name(name)
    return Run(installation, name, runs.dirs.path(installation, name))


def _find_others(runs: Runs, wrappers: Iterable[str]) -> int:
    """Add runs that are not in the journal, by their processes and directories; returns how many.

    These include runs that were forgotten so long ago that even that is not remembered: the server forgets them again."""
    paths = {os.path.dirname(path) for path in wrappers}
    found = 0
    for path in sorted(paths | set(runs.dirs.with_status(runs.knows))):
        directory, name = os.path.split(path)
        installation = os.path.basename(directory)
        if runs.knows(f"{installation}/{name}") or runs.dirs.path(installation, name) != path:
            continue
        try:
            run = _new_run(runs, installation, name)
        except BadOrder:
            continue  # not of our making
        runs.table[run.key] = run
        found += 1
    return found


def _replay_claim(run: Run, pid: int) -> None:
    """Restore a run that is not in the journal from its wrapper's command line."""
    wrapper = parse_wrapper(proc.command_line(pid))
    if wrapper is None or wrapper.run != run.name:
        return
    run.workdir, run.cgroups = wrapper.workdir, wrapper.groups
    try:
        run.replay(json.loads(wrapper.claim))
    except (KeyError, TypeError, ValueError):
        return  # of an older agent


def _never_started(runs: Runs, run: Run, status: Status) -> bool:
    if run.pid or status.pid or status.code is not None or status.error or run.boot != runs.boot or not status.sound:
        return False
    # An empty file: the wrapper died before its first line, or the file was truncated since. Only an undamaged journal can
    # tell: it has no `started` record.
    return not status.exists or status.lines > 0 or not runs.journal.unreadable


def _adopt(runs: Runs, run: Run, pid: int) -> None:
    if not run.claimed_ms:
        _replay_claim(run, pid)
    if run.pid != pid or not run.started_ms:
        run.pid, run.boot = pid, runs.boot
        run.started_boot_ms = proc.started_boot_ms(pid)
        run.started_ms = proc.now_ms() - (proc.boot_clock_ms() - run.started_boot_ms)
        runs.journal.add(run.started_record())
    runs.live[pid] = run
    runs.exec.kill_orphans(run)
    runs.begin_supervision(run)
    runs.stops.carry_out(run)
    _watch(runs, run)


def _watch(runs: Runs, run: Run) -> None:
    loop = asyncio.get_running_loop()
    status = f"{run.directory}/status"
    try:
        pidfd = os.pidfd_open(run.pid)
    except OSError:
        pidfd = -1  # it has exited, or too many files are open: poll instead

    def ended() -> None:
        if pidfd >= 0:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        if proc.has_exited(run.pid):
            # Its pid has not been reused yet, so this group is still the run's.
            try:
                os.killpg(run.pid, signal.SIGKILL)
            except OSError:
                pass
        runs.end_from_status_file(run)

    def poll() -> None:
        if proc.holds_file(run.pid, status):
            loop.call_later(POLL_S, poll)
        else:
            ended()

    if pidfd >= 0 and proc.holds_file(run.pid, status):
        loop.add_reader(pidfd, ended)
    else:
        loop.call_soon(poll)


def _kill_leftovers(run: Run, groups: dict[int, list[int]]) -> None:
    """KILL processes of an ended run's group. The group id may be reused, so their environment must name the run."""
    for pid in groups.get(run.pid, ()):
        if proc.has_in_env(pid, "HODEI_RUN_ID", run.name):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
