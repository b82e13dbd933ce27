"""What is remembered of a run that was handed to a queueing system, and how its end reads in our words."""

from __future__ import annotations

import asyncio
import os
import re
import signal

from msgspec import Struct

from hodei.backends.hpc.ports import Phase, Seen
from hodei.backends.hpc.script import NOT_TRIED
from hodei.model.effects import Start
from hodei.model.facts import RunObserved
from hodei.model.job import Checkpoint, RunState

# ------------------------------------------------------------------------------------------ run record
# What the batch script of a run has written down, beside the run's output on the shared file system.


_LIMIT = 65_536
# The claim of a record that the server made, so that no script can any more.
SEALED = "sealed"
_TIME = re.compile(r"(\d{1,12})[.,](\d{3})\d*")


class Record(Struct, frozen=True):
    """`claim`: whose the record is, SEALED if nothing is to run any more. `began`: the command was about to be tried, as this
    job (`number`: as the queue shows it), there, then; `pid` is its process on that node. `exit_code` None: it has not
    ended, or nobody could write it down. Times are the node's own, 0 if its bash is too old to tell."""

    claim: str = ""
    began: bool = False
    job: str = ""
    number: str = ""
    node: str = ""
    began_ms: int = 0
    pid: int = 0
    exit_code: int | None = None
    ended_ms: int = 0
    no_workdir: bool = False


def read_record(files: str) -> Record:
    """Of the latest try, if the system has tried several times. Blocks: call it from a thread."""
    try:
        fd = os.open(f"{files}.status", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            return parse_record(file.read(_LIMIT).decode(errors="replace"))
    except OSError:
        return Record()


def seal(files: str) -> bool:
    """From now on no script of this run runs anything. False if one has begun, or that cannot be told. Blocks."""
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
            case ["began", job, node, at, *element]:
                number = "".join(element) or job
                out = {
                    "claim": out.get("claim", ""),
                    "began": True,
                    "job": job,
                    "number": number,
                    "node": node,
                    "began_ms": _ms(at),
                }
            case ["pid", number] if number.isdigit():
                out["pid"] = int(number)
            case ["exit", number, at] if number.isdigit():
                out |= {"exit_code": int(number), "ended_ms": _ms(at)}
            case ["error", "workdir"]:
                out["no_workdir"] = True
    return Record(**out)  # type: ignore[arg-type]


def _ms(at: str) -> int:
    """`1794810068.123456`, with a comma in some languages."""
    found = _TIME.fullmatch(at)
    return int(found[1]) * 1000 + int(found[2]) if found else 0


# ----------------------------------------------------------------------------------------------------


class Entry(Struct, frozen=True, omit_defaults=True):
    """What a restarted server must know of a run; a line of the journal. `job` "": it was about to be handed in. `times`: how
    often it was handed in, or may have been; `also`: the marks that it had then."""

    run: str
    mark: str
    files: str
    at_ms: int
    job: str = ""
    workdir: str = ""
    saved: str = ""
    timeout_ms: int = 0
    grace_ms: int = 0
    hook: Checkpoint | None = None
    forgotten: bool = False
    times: int = 1
    also: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.mark, *self.also)


class TrackedRun:
    """A run in the system. `order` is kept until it has begun, to hand it in once more if the system forgets it."""

    def __init__(self, entry: Entry, order: Start | None = None) -> None:
        self.entry, self.order = entry, order
        self.job = entry.job
        self.phase: Phase = "waiting"
        self.submit_s = 0
        self.began_ms = 0
        self.said: RunObserved | None = None
        self.end: RunObserved | None = None
        self.ended = asyncio.Event()
        self.stop_code = ""  # stop, or timeout
        self.stop_reason = ""
        self.note = ""  # what became of saving the work before the stop
        self.has_hook = False
        self.in_a_hurry = False
        self.grace_s = 0.0
        self.kill_at_s = float("inf")  # on the loop's clock
        self.saving = False
        self.next_save_ms = 0
        self.missing_since_ms = 0
        self.handed_in_again = False

    @property
    def run(self) -> str:
        return self.entry.run

    @property
    def files(self) -> str:
        return self.entry.files

    def finish(self, end: RunObserved) -> None:
        self.end = self.said = end
        self.order = None
        self.ended.set()


def end_of(ticket: TrackedRun, seen: Seen, record: Record, now_ms: int, system: str, saved_ms: int = 0) -> RunObserved:
    """Our own doing first, then the system's, then the command's. What the run's own script has written down counts more than
    the system's exit code, which is that of the outermost shell, or of the signal that ended that."""
    code = record.exit_code if record.exit_code is not None else seen.code
    at_ms = record.ended_ms or min(seen.end_s * 1000, now_ms) or now_ms
    at_ms = max(at_ms, ticket.began_ms, saved_ms)

    def ended(state: RunState, reason_code: str = "", reason: str = "", code: int | None = code) -> RunObserved:
        return RunObserved(
            run=ticket.run, state=state, at_ms=at_ms, exit_code=code, reason_code=reason_code, reason=reason,
            checkpoint_ms=saved_ms, started_ms=ticket.began_ms,
        )  # fmt: skip

    if record.no_workdir:
        return ended("failed", "error", f"the working directory {ticket.entry.workdir} cannot be entered", None)
    because = "; ".join(filter(None, (ticket.stop_reason, ticket.note)))
    if ticket.stop_code == "stop":
        # Asked to save its work and not yet to end: then a good end is its own doing.
        return ended("succeeded") if ticket.has_hook and code == 0 else ended("stopped", reason=because)
    if ticket.stop_code:
        return ended("failed", ticket.stop_code, because)
    if seen.reason_code == "lost" and record.exit_code != 0:
        return ended("lost", "lost", f"{system} ended it: {seen.state}", None)
    if seen.reason_code == "killed" and record.exit_code == 0:
        # The kill came after the end: a controller that crashed cancels jobs that it does not know to be over.
        return ended("succeeded")
    if seen.reason_code and seen.reason_code != "lost":
        return ended("failed", seen.reason_code, seen.reason or f"{system} ended it: {seen.state}")
    if code is None:
        return ended("lost", "lost", f"{system} says {seen.state}, and nobody its exit code")
    if code == NOT_TRIED and record.began and record.exit_code is None:
        return ended("lost", "lost", f"{system} started it a second time, and nobody knows how the first ended", None)
    if code == NOT_TRIED and not record.began:
        why = "its script could not write its record, and ran nothing: is the output folder there on its node?"
        return ended("failed", "error", why, None)
    if code == 0 and not record.began:
        return ended("lost", "lost", f"{system} says {seen.state}, and its script never began", None)
    if code == 0:
        return ended("succeeded")
    if name := signal_name(code - 128):
        return ended("failed", "killed", f"it was ended by {name}")
    return ended("failed", reason=f"exit code {code}")


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""
