"""Read the output of jobs while they write it: through later attempts and restarts of the server.

The position (attempt and offset) is kept by the reader, so it never sees a byte twice and never misses one.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hodei.api.views import LogTimes
from hodei.client.transport import Reply
from hodei.model.errors import HodeiError, NotFound
from hodei.model.job import JOB_ENDED, RUN_ENDED

if TYPE_CHECKING:
    from hodei.api.views import JobView
    from hodei.client.api import Client

CHUNK = 256 * 1024
STREAMS = ("stdout", "stderr")
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.03, 0.5
# How often a followed array is polled for elements that have started.
_ELEMENTS_POLL_S = 1.0


class LogReader:
    """One stream of one member. `attempt` 0 reads the newest attempt, and with `follow` every later one too.

    `read` returns the next bytes, b"" if there are none yet; `at_end` is true when no more can come.
    `run_state` is empty until a run is placed; `attempt` and `offset` are the current position.
    """

    def __init__(
        self,
        get: Callable[[dict[str, str]], Reply],
        *,
        stream: str,
        member: int,
        attempt: int = 0,
        follow: bool = False,
    ) -> None:
        self._get = get
        self._query = {"stream": stream, "member": str(member), "limit": str(CHUNK)}
        self.attempt = attempt
        self._one_attempt = attempt > 0
        self._follow = follow
        self.offset = 0
        self.run_state = ""
        self.at_end = False

    def read(self) -> bytes:
        if self.at_end:
            return b""
        reply = self._request(self.attempt)
        self.attempt = self.attempt or _attempt_of(reply)
        next_offset = reply.headers.get("Hodei-Next-Offset") or ""
        valid = next_offset.isascii() and next_offset.isdigit()
        self.offset = int(next_offset) if valid else self.offset + len(reply.body)
        self.run_state = reply.headers.get("Hodei-Run-State") or ""
        if not reply.body:
            self.at_end = not self._more_to_come(reply)
        return reply.body

    def _more_to_come(self, reply: Reply) -> bool:
        """This attempt has no output right now: can it still write, or is there a later attempt?"""
        if not self._follow:
            return False
        if self.run_state and self.run_state not in RUN_ENDED:
            return True
        if not self.attempt or self._one_attempt:
            return not self.run_state and reply.headers.get("Hodei-Job-State") not in JOB_ENDED
        newest = self._request(0)
        if _attempt_of(newest) > self.attempt:
            self.attempt, self.offset = _attempt_of(newest), 0
            return True
        return newest.headers.get("Hodei-Job-State") not in JOB_ENDED

    def _request(self, attempt: int) -> Reply:
        return self._get(self._query | {"offset": str(self.offset), "attempt": str(attempt)})


class Backoff:
    """Pause between polls: short at first, longer while nothing happens."""

    def __init__(self) -> None:
        self._next_s = _MIN_BACKOFF_S

    def next_s(self, reset: bool = False) -> float:
        """Seconds to sleep now; `reset`: something was found, so none."""
        if reset:
            self._next_s = _MIN_BACKOFF_S
            return 0.0
        pause = self._next_s
        self._next_s = min(_MAX_BACKOFF_S, self._next_s * 1.5)
        return pause


def _attempt_of(reply: Reply) -> int:
    """`job.member.attempt` -> attempt; 0 if no run has started."""
    last = (reply.headers.get("Hodei-Run") or "").rpartition(".")[2]
    return int(last) if last.isdigit() else 0


class Line(NamedTuple):
    """`source` is `sweep[3]`, in a gang `main[2]`; `text` ends with a newline unless the run ended within a line."""

    source: str
    stream: str
    at_ms: int
    text: bytes


class LogOptions(NamedTuple):
    """`members` None, `tail` None and `since_ms` 0: all; `attempt` 0: the newest, and later ones if followed."""

    streams: Sequence[str] = STREAMS
    members: Sequence[int] | None = None
    attempt: int = 0
    tail: int | None = None
    since_ms: int = 0
    follow: bool = False


def read_lines(client: Client, view: JobView, options: LogOptions) -> Iterator[Line]:
    """The lines of an array (`view` is its row) or of all members of a job. Elements that have not started have none."""
    readers: dict[int, list[_LineReader]] = {}
    polled, backoff, ended = 0.0, Backoff(), False
    while True:
        if not ended and time.monotonic() - polled >= _ELEMENTS_POLL_S:
            jobs = _jobs(client, view)
            for job in jobs:
                if job.id not in readers and job.attempt:
                    readers[job.id] = _line_readers(client, job, options, in_array=_is_array_row(view))
            ended, polled = all(job.state in JOB_ENDED for job in jobs), time.monotonic()
        found = False
        for of_job in readers.values():
            for reader in of_job:
                for line in reader.read():
                    found = True
                    yield line
        if (ended or not options.follow) and all(reader.at_end for of_job in readers.values() for reader in of_job):
            return
        time.sleep(backoff.next_s(reset=found))


def _is_array_row(view: JobView) -> bool:
    return view.array is not None and bool(view.array.states)


def _jobs(client: Client, view: JobView) -> list[JobView]:
    if _is_array_row(view):
        return sorted(client.elements(view), key=lambda job: job.id)
    return [client.job(view.id).job]


def _line_readers(client: Client, job: JobView, options: LogOptions, *, in_array: bool) -> list[_LineReader]:
    members = list(range(job.members)) if options.members is None else list(options.members)
    tasks: dict[int, str] = {}
    if len(members) > 1 or not in_array:
        tasks = {run.member: run.task for run in client.job(job.id).runs}
        if options.members is None:  # a per-node job has one member for each node
            members = sorted({*members, *tasks})
    out = []
    for member in members:
        if options.since_ms and _ended_before(client, job, member, options):
            continue
        names = [f"{job.name}[{job.array.index}]"] if in_array and job.array is not None else []
        if len(members) > 1 or not in_array:
            names.append(f"{tasks.get(member, 'member')}[{member}]")
        out += [_LineReader(client, job.id, member, stream, " ".join(names), options) for stream in options.streams]
    return out


def _ended_before(client: Client, job: JobView, member: int, options: LogOptions) -> bool:
    try:
        times = client.log_times(job.id, member=member, attempt=options.attempt)
    except NotFound:
        return True
    return bool(times.finished_ms) and times.finished_ms < options.since_ms


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class _LineReader:
    """One stream of one member, split into lines. The first read returns the existing output, to which `tail` and
    `since_ms` apply; later reads return what is new."""

    def __init__(self, client: Client, job: int, member: int, stream: str, source: str, options: LogOptions) -> None:
        self._client, self._job, self._member, self._stream, self._source = client, job, member, stream, source
        self._reader: LogReader = client.log_reader(
            job, stream=stream, member=member, attempt=options.attempt, follow=options.follow
        )
        self._options = options
        self._rest = b""
        self._caught_up = False
        self._attempt = 0
        self._times: LogTimes | None = None

    @property
    def at_end(self) -> bool:
        return self._reader.at_end and not self._rest

    def read(self) -> Iterator[Line]:
        """The lines that are available now."""
        if not self._caught_up:
            yield from self._existing()
            self._caught_up = True
        elif not self.at_end:
            yield from self._split(self._reader.read())

    def _existing(self) -> Iterator[Line]:
        kept: deque[Line] = deque(maxlen=self._options.tail)
        while True:
            try:
                data = self._reader.read()
            except NotFound:  # its log has been deleted
                self._reader.at_end = True
                data = b""
            for line in self._split(data):
                if not self._options.since_ms or self._may_be_since(line):
                    if self._options.tail is None:
                        yield line
                    else:
                        kept.append(line)
            if not data:
                yield from kept
                return

    def _split(self, data: bytes) -> Iterator[Line]:
        if self._reader.attempt != self._attempt:  # each attempt has its own log
            if self._rest and self._attempt:
                yield self._line(self._rest, 0)
            self._rest, self._times = b"", None
            self._attempt = self._reader.attempt
        *complete, rest = (self._rest + data).split(b"\n")
        left = sum(map(len, complete)) + len(complete) + len(rest)
        for text in complete:
            left -= len(text) + 1
            yield self._line(text + b"\n", self._reader.offset - left)
        self._rest = rest
        if rest and self._reader.at_end:
            self._rest = b""
            yield self._line(rest, self._reader.offset)

    def _line(self, text: bytes, end: int) -> Line:
        return Line(self._source, self._stream, self._written_ms(end), text)

    def _written_ms(self, end: int) -> int:
        """When the bytes before `end` had been written."""
        if self._caught_up:
            return _now_ms()
        if self._times is None:
            try:
                self._times = self._client.log_times(
                    self._job, stream=self._stream, member=self._member, attempt=self._attempt
                )
            except HodeiError:
                self._times = LogTimes()
        marks = self._times.marks
        if not marks and self._times.run and not self._times.started_ms:
            return _now_ms()  # the run writes already, but its start has not been reported yet
        if not marks:
            return self._times.started_ms
        mark = bisect_left(marks, end, key=lambda mark: mark[0])
        return marks[mark][1] if mark < len(marks) else self._times.finished_ms or _now_ms()

    def _may_be_since(self, line: Line) -> bool:
        """Without marks a line may have been written at any time before the run ended."""
        if self._times is not None and not self._times.marks and not self._caught_up:
            return (self._times.finished_ms or _now_ms()) >= self._options.since_ms
        return line.at_ms >= self._options.since_ms
