"""Every step's facts and plan as JSON lines: enough to decide all of it again, and to see whether the plans are the same.

The first line carries the configuration. Each further one: {"now": ms, "facts": [...], "plan": {...}}.

The log is kept in segments of a bounded total size. NAME is written to; when it is large enough it becomes NAME.1, NAME.2
and so on, and the oldest are deleted. A segment that goes on from another says `continues`; the state of the scheduler at
its beginning is in NAME.n.state, worked out in a forked child. So each segment can be decided again without those before
it. The state of one is missing if its child was ended: then it is decided again together with the segment before.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path

import msgspec
from msgspec import structs

from hodei.control.controller import Controller
from hodei.control.snapshot import dump
from hodei.control.state import CHUNK_SIZE, chunks, run_to_end
from hodei.engine.plan import Plan
from hodei.model.audit import mask_settings, without_env_values
from hodei.model.config import SchedulingConfig
from hodei.model.errors import HodeiError
from hodei.model.facts import Fact, JobRequeued, JobRestored, JobSubmitted, Reconfigured
from hodei.model.job import Job
from hodei.runtime.fork_worker import ForkWorker

log = logging.getLogger("hodei.decision_log")
FORMAT = 1
# A segment that continues another, which versions that know only the first format would misread.
CONTINUED = 2
MOST_BYTES = 256 << 20
_SEGMENTS = 8
# A segment is at least so many times as large as the state before it, up to a third of all: states are not for free.
_STATES = 80
# After the disk has refused a write, a new segment is tried so often.
_AGAIN_S = 60.0


# Facts that hold what is not written down.
_WITH_SECRETS = (JobSubmitted, JobRestored, JobRequeued, Reconfigured)
_BUFFER = 1 << 16


class Segment(msgspec.Struct, frozen=True):
    """A file of the log. `number` counts all segments that there ever were; of the one being written, 0."""

    path: Path
    number: int


def closed_segments(path: Path) -> list[Segment]:
    """Those before the one at `path`, the oldest first."""
    pattern = re.compile(re.escape(path.name) + r"\.(\d+)")
    found = [
        (int(match[1]), each) for each in path.parent.glob(f"{path.name}.*") if (match := pattern.fullmatch(each.name))
    ]
    return [Segment(each, number) for number, each in sorted(found)]


def state_path(path: Path, number: int) -> Path:
    """Where the state at the beginning of segment `number` is, whose log is called `path`."""
    return path.with_name(f"{path.name}.{number}.state")


class DecisionLog:
    def __init__(self, path: Path, config: SchedulingConfig, last_event: int, *, most_bytes: int = MOST_BYTES) -> None:
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._path, self._config, self._most_bytes = path, config, most_bytes
        self._segment_bytes = most_bytes // _SEGMENTS
        self._bytes = 0
        self._closed = False
        self._broken_s: float | None = None
        self._aside = ForkWorker(1, nice=10, limit_s=600)
        self._writing_state: asyncio.Task[None] | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._number = 1 + max((segment.number for segment in closed_segments(path)), default=0)
        if path.exists() and path.stat().st_size:
            # A log starts with the world as it was: that of an earlier server is kept as a segment of its own.
            self._set_aside()
        self._file = self._open()
        self._begin(FORMAT, last_event)
        self._prune()

    # --------------------------------------------------------------------------------------------- writing

    def step(self, now_ms: int, facts: Sequence[Fact], plan: Plan) -> None:
        run_to_end(self.writing(now_ms, facts, plan))

    def writing(self, now_ms: int, facts: Sequence[Fact], plan: Plan) -> Generator[None, None, None]:
        """The same in parts."""
        self._append(b'{"now":%d,"facts":' % now_ms)
        if len(facts) <= CHUNK_SIZE:
            self._encode(self._fit(facts))
        else:
            for number, part in enumerate(chunks(facts)):
                # A list of its own, of which only the middle counts.
                began = self._encode(self._fit(part))
                self._buffer[began] = ord("," if number else "[")
                del self._buffer[-1:]
                self._write_out()
                yield
            self._append(b"]")
        self._append(b',"plan":')
        self._encode(plan)
        self._append(b"}\n")
        self._write_out()

    def flush(self) -> None:
        self._write_out(every=True)

    def close(self) -> None:
        self._closed = True
        self._aside.close()
        self.flush()
        self._attempt(self._file.close)

    def _fit(self, facts: Sequence[Fact]) -> list[Fact]:
        return [self._fit_to_write(fact) if type(fact) in _WITH_SECRETS else fact for fact in facts]

    def _encode(self, it: object) -> int:
        """At the end of the buffer, which is used again and again: large pieces of memory are not for free. Where it began."""
        began = len(self._buffer)
        self._encoder.encode_into(it, self._buffer, began)
        return began

    def _append(self, text: bytes) -> None:
        self._buffer += text

    def _write_out(self, *, every: bool = False) -> None:
        size = len(self._buffer)
        if not size or (size < _BUFFER and not every):
            return
        if self._broken_s is None:
            self._bytes += size
            self._attempt(partial(_write_all, self._file, self._buffer))
        self._buffer.clear()

    def _attempt(self, act: Callable[[], object]) -> None:
        """A segment that cannot be written ends there: with a gap in it, what follows could not be decided again."""
        try:
            act()
        except OSError as error:
            if self._broken_s is None:
                log.error(
                    "the decision log ends here, it cannot be written: %s; a new part is tried in %g s",
                    error.strerror, _AGAIN_S,
                )  # fmt: skip
            self._broken_s = time.monotonic()

    # -------------------------------------------------------------------------------------------- segments

    @property
    def full(self) -> bool:
        """Whether the next segment is due. It is not while the state of this one is still being written."""
        if self._broken_s is not None:
            return time.monotonic() - self._broken_s >= _AGAIN_S
        busy = self._writing_state is not None and not self._writing_state.done()
        return self._bytes >= (max(self._segment_bytes, self._most_bytes // 3) if busy else self._segment_bytes)

    def begin_segment(self, controller: Controller) -> None:
        """The next segment, from the state of this moment: between two steps, and on the loop's own thread."""
        self.flush()
        gap = self._broken_s is not None
        with suppress(OSError):
            self._file.close()
        try:
            self._set_aside()
            self._file = self._open()
        except OSError as error:
            self._broken_s = time.monotonic()
            log.error("no new part of the decision log can be begun: %s", error.strerror)
            return
        self._broken_s, self._bytes = None, 0
        self._begin(CONTINUED, controller.cluster.last_event, gap=gap)
        self._prune()
        if self._writing_state is None or self._writing_state.done():
            state = self._aside.at_once(partial(dump, controller))
            self._writing_state = asyncio.ensure_future(self._keep_state(state, self._number))

    async def _keep_state(self, state: asyncio.Future[bytes], number: int) -> None:
        try:
            found = await state
            if len(found) > self._most_bytes // 2:
                log.warning("the state of the scheduler is too large for the decision log: %d bytes", len(found))
                return
            await asyncio.to_thread(_write_whole, state_path(self._path, number), found)
        except (HodeiError, RuntimeError, OSError) as error:
            if not self._closed:
                log.warning("part %d of the decision log has no state at its beginning: %s", number, error)
            return
        self._segment_bytes = min(
            max(self._most_bytes // _SEGMENTS, _STATES * len(found)), max(self._most_bytes // 3, 1)
        )
        self._prune()

    def _begin(self, format: int, last_event: int, *, gap: bool = False) -> None:
        config = _bare_config(self._config)
        header = {"hodei_decision_log": format, "config": config, "last_event": last_event, "segment": self._number}
        self._encode(header | ({"gap": True} if gap else {}))
        self._append(b"\n")
        self.flush()

    def _open(self) -> FileIO:
        file = self._path.open("wb", buffering=0)  # it is gathered here
        self._path.chmod(0o600)
        return file

    def _set_aside(self) -> None:
        self._path.replace(self._path.with_name(f"{self._path.name}.{self._number}"))
        self._number += 1

    def _prune(self) -> None:
        """The oldest go, so that all together, with what is still to come of this segment, stay within the bound."""
        sizes = {}
        closed = closed_segments(self._path)
        kept = {self._number, *(segment.number for segment in closed)}
        for each in self._path.parent.glob(f"{self._path.name}.*.state*"):
            # A state that came when its segment had gone already, or that a server left half written.
            number = each.name[len(self._path.name) + 1 :].partition(".state")[0]
            if number.isdecimal() and int(number) not in kept:
                self._attempt(partial(each.unlink, missing_ok=True))
        for segment in closed:
            files = (segment.path, state_path(self._path, segment.number))
            sizes[files] = sum(_size(each) for each in files)
        room = self._most_bytes - self._segment_bytes - _size(state_path(self._path, self._number))
        for files in list(sizes):
            if sum(sizes.values()) <= room:
                break
            for each in files:
                self._attempt(partial(each.unlink, missing_ok=True))
            del sizes[files]

    # --------------------------------------------------------------------------------------------- secrets

    def _fit_to_write(self, fact: Fact) -> Fact:
        """No decision depends on the values of a job's variables, so they are not told."""
        match fact:
            case JobSubmitted(job=job) | JobRestored(job=job):
                bare = _bare(job)
                return fact if bare is job else structs.replace(fact, job=bare)
            case JobRequeued(record=Job() as record):
                return structs.replace(fact, record=_bare(record))
            case Reconfigured(scheduling=config):
                self._config = config
                return structs.replace(fact, scheduling=_bare_config(config))
        return fact


def _bare(job: Job) -> Job:
    spec = without_env_values(job.spec)
    return job if spec is job.spec else structs.replace(job, spec=spec)


def _bare_config(config: SchedulingConfig) -> SchedulingConfig:
    """Options of plugins are anything: those whose names look secret are not told."""
    profiles = {
        name: structs.replace(profile, options=mask_settings(profile.options)) if profile.options else profile
        for name, profile in config.profiles.items()
    }
    return structs.replace(config, profiles=profiles)


def _write_all(file: FileIO, data: bytearray) -> None:
    with memoryview(data) as rest:
        done = 0
        while done < len(rest):
            done += file.write(rest[done:])


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _write_whole(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.touch(mode=0o600)
    part.write_bytes(data)
    part.replace(path)
