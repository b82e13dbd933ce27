"""What Hodei keeps of a submitted run: its files on the shared file system, the record that its batch script writes there, its
entry in the server's journal, and its state in memory."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
from collections.abc import Collection
from pathlib import Path

import msgspec
from msgspec import Struct

from hodei.backends.hpc.ports import JobStatus, Phase
from hodei.backends.hpc.script import NOT_STARTED
from hodei.model.effects import Start
from hodei.model.errors import BackendError, NotFound
from hodei.model.facts import RunObserved
from hodei.model.ids import RunId, job_of
from hodei.model.job import Checkpoint, RunState
from hodei.model.usage import RunUsage
from hodei.ports import Stream
from hodei.supervision import signal_name

JOBS_PER_FOLDER = 1000
CHECKPOINT_SUFFIX, SCRIPT_SUFFIX = ".saved", ".sh"
_STREAM_SUFFIXES: dict[Stream, str] = {"stdout": ".out", "stderr": ".err"}


class Files:
    """Output and records of runs, below a folder that the server and the nodes see under the same path. `root` is the
    installation's folder, readable by its account alone. All methods block."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: set[Path] = set()

    def check(self) -> None:
        """BackendError if the folder is not writable."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self.root / ".probe"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise BackendError(
                f"the output folder {self.root} cannot be written: {error.strerror}",
                hint="set `output` to a folder that the server and all nodes share",
            ) from None

    def of(self, run: RunId) -> str:
        """The common prefix of the paths of a run's files. Creates their folder."""
        path = self._path(run)
        if path.parent not in self._made:
            try:
                path.parent.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise BackendError(f"the folder {path.parent} cannot be made: {error.strerror}") from None
            self._made.add(path.parent)
        return str(path)

    def _path(self, run: RunId) -> Path:
        return self.root / str(job_of(run) // JOBS_PER_FOLDER) / run

    def read(self, run: RunId, stream: Stream, offset: int, limit: int, known: bool) -> tuple[bytes, int]:
        try:
            fd = os.open(f"{self._path(run)}{_STREAM_SUFFIXES[stream]}", os.O_RDONLY | os.O_NOFOLLOW)
        except (OSError, ValueError) as error:
            if known and isinstance(error, FileNotFoundError):
                return b"", offset
            raise NotFound(
                f"there is no output of run {run}", hint="it may have been removed after its retention"
            ) from None
        with os.fdopen(fd, "rb") as file:
            data = os.pread(file.fileno(), limit, offset)
        return data, offset + len(data)

    @staticmethod
    def modified_ms(path: str) -> int:
        """0 if the file does not exist."""
        try:
            return os.stat(path).st_mtime_ns // 1_000_000
        except OSError:
            return 0

    @staticmethod
    def drop(files: str) -> None:
        """Remove what an ended run no longer needs, but not the record: the batch system may start it again."""
        for suffix in (CHECKPOINT_SUFFIX, SCRIPT_SUFFIX):
            with contextlib.suppress(OSError):
                os.unlink(files + suffix)

    def sweep(self, cutoff_s: float, keep: Collection[str]) -> int:
        """Remove files not written since `cutoff_s`, except those of the runs in `keep`; returns how many."""
        removed = 0
        for folder in self.root.glob("[0-9]*"):
            for path in folder.iterdir():
                with contextlib.suppress(OSError):
                    if str(path.with_suffix("")) not in keep and path.stat().st_mtime < cutoff_s:
                        path.unlink()
                        removed += 1
        return removed


_RECORD_LIMIT = 65_536
# The claim of a record made by the server, so that no script of the run can start.
SEALED = "sealed"
_TIME = re.compile(r"(\d{1,12})[.,](\d{3})\d*")
_CPU_TIME = re.compile(r"([0-9]{1,9})m([0-9]{1,2})[.,]([0-9]{1,9})s")


class Record(Struct, frozen=True):
    """What the batch script of a run has written. `claim`: which script owns it, SEALED if none may start. `started`: the
    script was about to run the command, as this job on this node. `job` is the id as the queue shows it, `raw_job` the one
    that the system's commands take. `pid` is the command's process on the node. `exit_code` None: it has not ended, or could
    not be recorded. `cpu_ms`: CPU time of the ended command, None if unknown. Times are the node's, 0 if its bash is too old to
    provide them."""

    claim: str = ""
    started: bool = False
    raw_job: str = ""
    job: str = ""
    node: str = ""
    started_ms: int = 0
    pid: int = 0
    exit_code: int | None = None
    ended_ms: int = 0
    no_workdir: bool = False
    cpu_ms: int | None = None


def read_record(files: str) -> Record:
    """The record of the latest start. Blocks: call it from a thread."""
    try:
        fd = os.open(f"{files}.status", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            return parse_record(file.read(_RECORD_LIMIT).decode(errors="replace"))
    except OSError:
        return Record()


def seal(files: str) -> bool:
    """Keep every script of this run from starting. False if one has started, or if that is unknown. Blocks."""
    try:
        fd = os.open(f"{files}.status", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(f"claim {SEALED}\n".encode())
    except FileExistsError:
        return read_record(files).claim == SEALED
    except OSError:
        return False
    return True


def parse_record(text: str) -> Record:
    out: dict[str, object] = {}
    for line in text.split("\n")[:-1]:  # a line without its end is torn
        match line.split(" "):
            case ["claim", claim]:
                out = {"claim": claim}
            case [user, system] if (parts := _parse_times(user, system)) is not None:
                # Of the shell, then of its children: the last line counts.
                out["cpu_ms"] = parts
            case ["started", job, node, at, *element]:
                out = {"claim": out.get("claim", ""), "started": True, "raw_job": job, "job": "".join(element) or job}
                out |= {"node": node, "started_ms": _parse_ms(at)}
            case ["pid", number] if number.isdigit():
                out["pid"] = int(number)
            case ["exit", number, at] if number.isdigit():
                out |= {"exit_code": int(number), "ended_ms": _parse_ms(at)}
            case ["error", "workdir"]:
                out["no_workdir"] = True
    return Record(**out)  # type: ignore[arg-type]


def _parse_times(*parts: str) -> int | None:
    """`0m1.234s`, with a comma in some locales; added up."""
    found = [_CPU_TIME.fullmatch(part) for part in parts]
    if not all(found):
        return None
    return sum(int(one[1]) * 60_000 + int(one[2]) * 1000 + int(one[3][:3].ljust(3, "0")) for one in found if one)


def _parse_ms(at: str) -> int:
    """`1794810068.123456`, with a comma in some locales."""
    found = _TIME.fullmatch(at)
    return int(found[1]) * 1000 + int(found[2]) if found else 0


class JournalEntry(Struct, frozen=True, omit_defaults=True):
    """What a restarted server must know of a run; one line of the journal. `job` "": it was about to be submitted.
    `submissions`: how often it was, or may have been, submitted; `other_marks`: its marks in the earlier ones."""

    run: str
    mark: str
    files: str
    submitted_ms: int
    job: str = ""
    workdir: str = ""
    checkpoint_file: str = ""
    timeout_ms: int = 0
    grace_ms: int = 0
    checkpoint: Checkpoint | None = None
    forgotten: bool = False
    submissions: int = 1
    other_marks: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.mark, *self.other_marks)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(JournalEntry).decode


class Journal:
    """`lock` is held by the server and by every command that submits a job. While a process of an earlier server holds it,
    a job of that server may still be on its way."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._path = home / "journal"
        self._file: int | None = None
        self.lock: int | None = None

    def open(self) -> dict[str, JournalEntry]:
        """The entries that are not forgotten. BlockingIOError: commands of an earlier server are still running. Blocks."""
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._home / "submit.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise
        self.lock = lock
        entries: dict[str, JournalEntry] = {}
        if self._path.exists():
            for line in self._path.read_bytes().splitlines():
                with contextlib.suppress(msgspec.MsgspecError):  # a torn line
                    entry = _decode(line)
                    entries.pop(entry.run, None)
                    if not entry.forgotten:
                        entries[entry.run] = entry
        compacted = self._path.with_suffix(".new")
        with open(os.open(compacted, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.writelines(_encode(entry) + b"\n" for entry in entries.values())
        compacted.rename(self._path)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        return entries

    def write(self, *entries: JournalEntry) -> None:
        assert self._file is not None
        os.write(self._file, b"".join(_encode(entry) + b"\n" for entry in entries))

    def close(self) -> None:
        for fd in (self._file, self.lock):
            if fd is not None:
                os.close(fd)
        self._file = self.lock = None


class TrackedRun:
    """A run in the batch system. `order` is kept until the run starts, to submit it again if the system forgets it.
    `reported` is the last observation, `final` the one of its end."""

    def __init__(self, entry: JournalEntry, order: Start | None = None) -> None:
        self.entry, self.order = entry, order
        self.job = entry.job
        self.phase: Phase = "pending"
        self.submit_s = 0
        self.started_ms = 0
        self.reported: RunObserved | None = None
        self.final: RunObserved | None = None
        self.ended = asyncio.Event()
        self.stop_code = ""  # stop, or timeout
        self.stop_reason = ""
        self.checkpoint_problem = ""  # of the checkpoint before the stop
        self.checkpoint_before_stop = False  # it is being taken, and TERM was not sent yet
        self.skip_checkpoint = False
        self.grace_s = 0.0
        self.kill_at_s = float("inf")  # on the loop's clock
        self.taking_checkpoint = False
        self.next_checkpoint_ms = 0
        self.missing_since_ms = 0
        self.resubmitted = False

    @property
    def run(self) -> str:
        return self.entry.run

    @property
    def files(self) -> str:
        return self.entry.files

    def finish(self, final: RunObserved) -> None:
        self.final = self.reported = final
        self.order = None
        self.ended.set()


def final_observation(
    tracked: TrackedRun, status: JobStatus, record: Record, now_ms: int, system_name: str, checkpoint_ms: int = 0
) -> RunObserved:
    """How a run ended. A stop by Hodei takes precedence, then the batch system's reason, then the command's exit code. The
    recorded exit code counts more than the system's, which is that of the outermost shell or of the signal that ended it."""
    code = record.exit_code if record.exit_code is not None else status.exit_code
    at_ms = record.ended_ms or min(status.end_s * 1000, now_ms) or now_ms
    at_ms = max(at_ms, tracked.started_ms, checkpoint_ms)

    def ended(state: RunState, reason_code: str = "", reason: str = "", code: int | None = code) -> RunObserved:
        return RunObserved(
            run=tracked.run, state=state, at_ms=at_ms, exit_code=code, reason_code=reason_code, reason=reason,
            checkpoint_ms=checkpoint_ms, started_ms=tracked.started_ms,
            usage=RunUsage(record.cpu_ms) if record.cpu_ms is not None else None,
        )  # fmt: skip

    if record.no_workdir:
        return ended("failed", "error", f"the working directory {tracked.entry.workdir} cannot be entered", None)
    stop_reason = "; ".join(filter(None, (tracked.stop_reason, tracked.checkpoint_problem)))
    if tracked.stop_code == "stop":
        # Before TERM was sent, exit code 0 is the command's own end.
        finished = tracked.checkpoint_before_stop and code == 0
        return ended("succeeded") if finished else ended("stopped", reason=stop_reason)
    if tracked.stop_code:
        return ended("failed", tracked.stop_code, stop_reason)
    if status.reason_code == "lost" and record.exit_code != 0:
        return ended("lost", "lost", f"{system_name} ended it: {status.state}", None)
    if status.reason_code == "killed" and record.exit_code == 0:
        # The kill came after the end: a controller that crashed cancels jobs that it does not know to have ended.
        return ended("succeeded")
    if status.reason_code and status.reason_code != "lost":
        return ended("failed", status.reason_code, status.reason or f"{system_name} ended it: {status.state}")
    if code is None:
        return ended("lost", "lost", f"its exit code is unknown; {system_name} reports {status.state}")
    if code == NOT_STARTED and record.started and record.exit_code is None:
        return ended(
            "lost", "lost", f"{system_name} started it a second time; how the first start ended is unknown", None
        )
    if code == NOT_STARTED and not record.started:
        reason = "its script could not write its record, so it did not start: is the output folder mounted on its node?"
        return ended("failed", "error", reason, None)
    if code == 0 and not record.started:
        return ended("lost", "lost", f"its script never started; {system_name} reports {status.state}", None)
    if code == 0:
        return ended("succeeded")
    if name := signal_name(code - 128):
        return ended("failed", "killed", f"it was ended by {name}")
    return ended("failed", reason=f"exit code {code}")
