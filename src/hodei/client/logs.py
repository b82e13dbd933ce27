"""Reading what a job writes, while it writes: attempt after attempt, across a restart of the server.

The place is kept on this side (attempt and offset), so a reader never sees a byte twice and never misses one.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hodei.client.transport import Reply
from hodei.model.errors import HodeiError, NotFound
from hodei.model.job import JOB_ENDED, RUN_ENDED

if TYPE_CHECKING:
    from hodei.api.views import JobView, LogTimes
    from hodei.client.api import Client

CHUNK = 256 * 1024
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.03, 0.5


class LogReader:
    """One stream of one member. `attempt` 0 reads the newest attempt, and in `follow` every later one too.

    `read` gives the next bytes, b"" when there are none for now; `at_end` tells whether any can still come.
    `run_state` is empty until a run has been placed; `attempt` and `offset` say how far it has read.
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
        self._where = {"stream": stream, "member": str(member), "limit": str(CHUNK)}
        self.attempt = attempt
        self._one_attempt = attempt > 0
        self._follow = follow
        self.offset = 0
        self.run_state = ""
        self.at_end = False

    def read(self) -> bytes:
        if self.at_end:
            return b""
        reply = self._ask(self.attempt)
        self.attempt = self.attempt or _attempt_of(reply)
        told = reply.headers.get("Hodei-Next-Offset") or ""
        self.offset = int(told) if told.isascii() and told.isdigit() else self.offset + len(reply.body)
        self.run_state = reply.headers.get("Hodei-Run-State") or ""
        if not reply.body:
            self.at_end = not self._more_to_come(reply)
        return reply.body

    def _more_to_come(self, reply: Reply) -> bool:
        """This attempt has nothing more to say for now: can it still, or does another one follow?"""
        if not self._follow:
            return False
        if self.run_state and self.run_state not in RUN_ENDED:
            return True
        if not self.attempt or self._one_attempt:
            return not self.run_state and reply.headers.get("Hodei-Job-State") not in JOB_ENDED
        newest = self._ask(0)
        if _attempt_of(newest) > self.attempt:
            self.attempt, self.offset = _attempt_of(newest), 0
            return True
        return newest.headers.get("Hodei-Job-State") not in JOB_ENDED

    def _ask(self, attempt: int) -> Reply:
        return self._get(self._where | {"offset": str(self.offset), "attempt": str(attempt)})


class Pause:
    """How long to wait before asking again: short at first, longer while nothing comes."""

    def __init__(self) -> None:
        self._next_s = _SHORTEST_PAUSE_S

    def after(self, found: bool) -> float:
        """Seconds to wait now."""
        if found:
            self._next_s = _SHORTEST_PAUSE_S
            return 0.0
        pause = self._next_s
        self._next_s = min(_LONGEST_PAUSE_S, self._next_s * 1.5)
        return pause


def _attempt_of(reply: Reply) -> int:
    """`job.member.attempt` -> attempt; 0 when no run has started."""
    last = (reply.headers.get("Hodei-Run") or "").rpartition(".")[2]
    return int(last) if last.isdigit() else 0


# ------------------------------------------------------------------------------------------- many logs
# What many runs write, line by line and side by side: the elements of an array, the members of a gang.


STREAMS = ("stdout", "stderr")
# While an array is followed, so often it is asked which of its elements have started.
_LOOK_EVERY_S = 1.0


class Line(NamedTuple):
    """`who` is `sweep[3]`, of a gang `main[2]`; `text` ends with a newline unless the run stopped in the middle of one."""

    who: str
    stream: str
    at_ms: int
    text: bytes


class Wish(NamedTuple):
    """What is wanted of each run: `members` None for all, `attempt` 0 for the newest (and later ones, if it is followed),
    `tail` None for all lines, `since_ms` 0 for all times."""

    streams: Sequence[str] = STREAMS
    members: Sequence[int] | None = None
    attempt: int = 0
    tail: int | None = None
    since_ms: int = 0
    follow: bool = False


def lines_of(client: Client, view: JobView, wish: Wish) -> Iterator[Line]:
    """Of a whole array (`view` is its row) or of one job with all its members. Elements that have not started have no lines."""
    sources: dict[int, list[_Source]] = {}
    looked, pause, ended = 0.0, Pause(), False
    while True:
        if not ended and time.monotonic() - looked >= _LOOK_EVERY_S:
            jobs = _jobs(client, view)
            for job in jobs:
                if job.id not in sources and job.attempt:
                    sources[job.id] = _sources(client, job, wish, many=_is_row(view))
            ended, looked = all(job.state in JOB_ENDED for job in jobs), time.monotonic()
        found = False
        for of_job in sources.values():
            for source in of_job:
                for line in source.read():
                    found = True
                    yield line
        if (ended or not wish.follow) and all(source.at_end for of_job in sources.values() for source in of_job):
            return
        time.sleep(pause.after(found))


def _is_row(view: JobView) -> bool:
    return view.array is not None and bool(view.array.states)


def _jobs(client: Client, view: JobView) -> list[JobView]:
    if _is_row(view):
        return sorted(client.elements(view), key=lambda job: job.id)
    return [client.job(view.id).job]


def _sources(client: Client, job: JobView, wish: Wish, *, many: bool) -> list[_Source]:
    members = list(range(job.members)) if wish.members is None else list(wish.members)
    tasks: dict[int, str] = {}
    if len(members) > 1 or not many:
        tasks = {run.member: run.task for run in client.job(job.id).runs}
        if wish.members is None:  # a job for every node has more members than it says
            members = sorted({*members, *tasks})
    out = []
    for member in members:
        if wish.since_ms and _ended_before(client, job, member, wish):
            continue
        names = [f"{job.name}[{job.array.index}]"] if many and job.array is not None else []
        if len(members) > 1 or not many:
            names.append(f"{tasks.get(member, 'member')}[{member}]")
        out += [_Source(client, job.id, member, stream, " ".join(names), wish) for stream in wish.streams]
    return out


def _ended_before(client: Client, job: JobView, member: int, wish: Wish) -> bool:
    try:
        times = client.log_times(job.id, member=member, attempt=wish.attempt)
    except NotFound:
        return True
    return bool(times.finished_ms) and times.finished_ms < wish.since_ms


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class _Source:
    """One stream of one member, cut into lines. While it is followed, what was there at first is what has been, and the
    rest is what comes."""

    def __init__(self, client: Client, job: int, member: int, stream: str, who: str, wish: Wish) -> None:
        self._client, self._job, self._member, self._stream, self._who = client, job, member, stream, who
        self._reader: LogReader = client.log_reader(
            job, stream=stream, member=member, attempt=wish.attempt, follow=wish.follow
        )
        self._wish = wish
        self._rest = b""
        self._caught_up = False
        self._attempt = 0
        self._times: LogTimes | None = None

    @property
    def at_end(self) -> bool:
        return self._reader.at_end and not self._rest

    def read(self) -> Iterator[Line]:
        """What can be had now."""
        if not self._caught_up:
            yield from self._past()
            self._caught_up = True
            return
        if self._reader.at_end and not self._rest:
            return
        yield from self._cut(self._reader.read())

    def _past(self) -> Iterator[Line]:
        kept: deque[Line] = deque(maxlen=self._wish.tail)
        while True:
            try:
                data = self._reader.read()
            except NotFound:  # its log has been cleared away
                self._reader.at_end = True
                data = b""
            for line in self._cut(data):
                if not self._wish.since_ms or self._may_be_since(line):
                    if self._wish.tail is None:
                        yield line
                    else:
                        kept.append(line)
            if not data:
                yield from kept
                return

    def _cut(self, data: bytes) -> Iterator[Line]:
        if self._reader.attempt != self._attempt:  # another attempt writes a log of its own
            if self._rest and self._attempt:
                yield self._line(self._rest, 0)
            self._rest, self._times = b"", None
            self._attempt = self._reader.attempt
        *whole, rest = (self._rest + data).split(b"\n")
        left = sum(map(len, whole)) + len(whole) + len(rest)
        for text in whole:
            left -= len(text) + 1
            yield self._line(text + b"\n", self._reader.offset - left)
        self._rest = rest
        if rest and self._reader.at_end:
            self._rest = b""
            yield self._line(rest, self._reader.offset)

    def _line(self, text: bytes, end: int) -> Line:
        return Line(self._who, self._stream, self._when(end), text)

    def _when(self, end: int) -> int:
        """When the bytes before `end` were there."""
        if self._caught_up:
            return _now_ms()
        if self._times is None:
            self._times = self._ask_times()
        marks = self._times.marks
        if not marks and self._times.run and not self._times.started_ms:
            return _now_ms()  # it writes already, and the server has not heard yet that it began
        if not marks:
            return self._times.started_ms
        mark = bisect_left(marks, end, key=lambda mark: mark[0])
        return marks[mark][1] if mark < len(marks) else self._times.finished_ms or _now_ms()

    def _may_be_since(self, line: Line) -> bool:
        """Without marks it may have been written at any time until the run ended."""
        if self._times is not None and not self._times.marks and not self._caught_up:
            return (self._times.finished_ms or _now_ms()) >= self._wish.since_ms
        return line.at_ms >= self._wish.since_ms

    def _ask_times(self) -> LogTimes:
        from hodei.api.views import LogTimes

        try:
            return self._client.log_times(self._job, stream=self._stream, member=self._member, attempt=self._attempt)
        except HodeiError:
            return LogTimes()
