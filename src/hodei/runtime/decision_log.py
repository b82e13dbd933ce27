"""The decision log: facts and plan of every step as JSON lines, enough to replay them and compare the plans.

The first line holds the configuration, each further one {"now": ms, "facts": [...], "plan": {...}}.

The log consists of segments of a bounded total size. NAME is written to; when it is full it becomes NAME.1, NAME.2 and so
on, and the oldest are deleted. The state of the scheduler at the start of a continued segment is in NAME.n.state, written
by a forked child, so that each segment can be replayed alone. If the child was killed, the state is missing and the
segment is replayed together with the one before it.
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
# A segment that continues another; versions that know only format 1 would misread it.
CONTINUED = 2
MAX_BYTES = 256 << 20
_SEGMENTS = 8
# A segment is at least this many times the size of its state, up to a third of the total: states are expensive.
_SEGMENT_TO_STATE = 80
# Pause before a new segment is tried after a failed write.
_RETRY_S = 60.0
# Facts with values that must not be logged.
_WITH_SECRETS = (JobSubmitted, JobRestored, JobRequeued, Reconfigured)
_BUFFER = 1 << 16


class Segment(msgspec.Struct, frozen=True):
    """A closed file of the log. `number` counts all segments since the first."""

    path: Path
    number: int


def closed_segments(path: Path) -> list[Segment]:
    """The segments before the one at `path`, oldest first."""
    pattern = re.compile(re.escape(path.name) + r"\.(\d+)")
    found = [
        (int(match[1]), each) for each in path.parent.glob(f"{path.name}.*") if (match := pattern.fullmatch(each.name))
    ]
    return [Segment(each, number) for number, each in sorted(found)]


def state_path(path: Path, number: int) -> Path:
    """The file with the state at the start of segment `number`."""
    return path.with_name(f"{path.name}.{number}.state")


class DecisionLog:
    def __init__(self, path: Path, config: SchedulingConfig, last_event: int, *, max_bytes: int = MAX_BYTES) -> None:
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._path, self._config, self._max_bytes = path, config, max_bytes
        self._segment_bytes = max_bytes // _SEGMENTS
        self._bytes = 0
        self._closed = False
        self._failed_s: float | None = None
        self._state_worker = ForkWorker(1, nice=10, limit_s=600)
        self._writing_state: asyncio.Task[None] | None = None
        self._state_number = 0  # the segment whose state is written now or was written last
        path.parent.mkdir(parents=True, exist_ok=True)
        self._number = 1 + max((segment.number for segment in closed_segments(path)), default=0)
        if path.exists() and path.stat().st_size:
            # The log of an earlier server starts from another state: it becomes a closed segment.
            self._rotate()
        self._file = self._open()
        self._begin(FORMAT, last_event)
        self._prune()

    def step(self, now_ms: int, facts: Sequence[Fact], plan: Plan) -> None:
        run_to_end(self.write_in_slices(now_ms, facts, plan))

    def write_in_slices(self, now_ms: int, facts: Sequence[Fact], plan: Plan) -> Generator[None, None, None]:
        self._append(b'{"now":%d,"facts":' % now_ms)
        if len(facts) <= CHUNK_SIZE:
            self._encode(self._redact_all(facts))
        else:
            for number, part in enumerate(chunks(facts)):
                # Each slice is encoded as a list; its brackets are replaced to join it to the others.
                start = self._encode(self._redact_all(part))
                self._buffer[start] = ord("," if number else "[")
                del self._buffer[-1:]
                self._write_out()
                yield
            self._append(b"]")
        self._append(b',"plan":')
        self._encode(plan)
        self._append(b"}\n")
        self._write_out()

    def flush(self) -> None:
        self._write_out(force=True)

    def close(self) -> None:
        self._closed = True
        self._state_worker.close()
        self.flush()
        self._attempt(self._file.close)

    def _encode(self, it: object) -> int:
        """Appends to the buffer, which is reused because large allocations are expensive; returns where it starts."""
        start = len(self._buffer)
        self._encoder.encode_into(it, self._buffer, start)
        return start

    def _append(self, text: bytes) -> None:
        self._buffer += text

    def _write_out(self, *, force: bool = False) -> None:
        size = len(self._buffer)
        if not size or (size < _BUFFER and not force):
            return
        if self._failed_s is None:
            self._bytes += size
            self._attempt(partial(_write_all, self._file, self._buffer))
        self._buffer.clear()

    def _attempt(self, act: Callable[[], object]) -> None:
        """A segment ends at its first failed write: after a gap nothing could be replayed."""
        try:
            act()
        except OSError as error:
            if self._failed_s is None:
                log.error("cannot write the decision log: %s; a new segment is tried in %g s", error.strerror, _RETRY_S)
            self._failed_s = time.monotonic()

    @property
    def full(self) -> bool:
        """Whether the next segment is due; later while the state of this one is still being written."""
        if self._failed_s is not None:
            return time.monotonic() - self._failed_s >= _RETRY_S
        return self._bytes >= (
            max(self._segment_bytes, self._max_bytes // 3) if self._state_pending else self._segment_bytes
        )

    @property
    def _state_pending(self) -> bool:
        return self._writing_state is not None and not self._writing_state.done()

    def begin_segment(self, controller: Controller) -> None:
        """Starts the next segment from the current state. Call it between two steps, on the loop's thread."""
        self.flush()
        gap = self._failed_s is not None
        with suppress(OSError):
            self._file.close()
        try:
            self._rotate()
            self._file = self._open()
        except OSError as error:
            self._failed_s = time.monotonic()
            log.error("cannot start a new segment of the decision log: %s", error.strerror)
            return
        self._failed_s, self._bytes = None, 0
        self._begin(CONTINUED, controller.cluster.last_event, gap=gap)
        if not self._state_pending:
            state = self._state_worker.run_now(partial(dump, controller))
            self._state_number = self._number
            self._writing_state = asyncio.ensure_future(self._write_state(state, self._number))
        self._prune()

    async def _write_state(self, state: asyncio.Future[bytes], number: int) -> None:
        try:
            found = await state
            if len(found) > self._max_bytes // 2:
                log.warning("the state of the scheduler is too large for the decision log: %d bytes", len(found))
                return
            await asyncio.to_thread(_write_atomically, state_path(self._path, number), found)
        except (HodeiError, RuntimeError, OSError) as error:
            if not self._closed:
                log.warning("segment %d of the decision log has no state: %s", number, error)
            return
        self._segment_bytes = min(
            max(self._max_bytes // _SEGMENTS, _SEGMENT_TO_STATE * len(found)), max(self._max_bytes // 3, 1)
        )
        self._prune()

    def _begin(self, format: int, last_event: int, *, gap: bool = False) -> None:
        config = _redacted_config(self._config)
        header = {"hodei_decision_log": format, "config": config, "last_event": last_event, "segment": self._number}
        self._encode(header | ({"gap": True} if gap else {}))
        self._append(b"\n")
        self.flush()

    def _open(self) -> FileIO:
        file = self._path.open("wb", buffering=0)  # `_buffer` is the buffer
        self._path.chmod(0o600)
        return file

    def _rotate(self) -> None:
        self._path.replace(self._path.with_name(f"{self._path.name}.{self._number}"))
        self._number += 1

    def _prune(self) -> None:
        """Deletes the oldest segments, so that all of them stay within the bound when this one is full."""
        closed = closed_segments(self._path)
        kept = {self._number, *(segment.number for segment in closed)}
        for each in self._path.parent.glob(f"{self._path.name}.*.state*"):
            # States whose segment was deleted meanwhile, or that an earlier server left incomplete.
            number = each.name[len(self._path.name) + 1 :].partition(".state")[0]
            if number.isdecimal() and int(number) not in kept:
                self._attempt(partial(each.unlink, missing_ok=True))
        sizes = {segment: _size(segment.path) + _size(state_path(self._path, segment.number)) for segment in closed}
        budget = self._max_bytes - self._segment_bytes - _size(state_path(self._path, self._number))
        excess = sum(sizes.values()) - budget
        deleted = False
        for segment, size in sizes.items():
            # A segment without a state can be replayed only after the one before it, so it is deleted with that one.
            if excess <= 0 and not (deleted and self._needs_previous(segment)):
                break
            awaited = self._state_pending and segment.number + 1 == self._state_number
            if awaited and not state_path(self._path, self._state_number).exists():
                break  # until its state is written, which a stop prevents, the next segment needs this one
            for each in (segment.path, state_path(self._path, segment.number)):
                self._attempt(partial(each.unlink, missing_ok=True))
            excess -= size
            deleted = True

    def _needs_previous(self, segment: Segment) -> bool:
        """Whether a closed segment continues the one before it and has no state of its own."""
        if state_path(self._path, segment.number).exists():
            return False
        start = b'{"hodei_decision_log":%d,' % CONTINUED
        try:
            with segment.path.open("rb") as file:
                return file.read(len(start)) == start
        except OSError:
            return False

    def _redact_all(self, facts: Sequence[Fact]) -> list[Fact]:
        return [self._redact(fact) if type(fact) in _WITH_SECRETS else fact for fact in facts]

    def _redact(self, fact: Fact) -> Fact:
        """Without the values of environment variables, on which no decision depends."""
        match fact:
            case JobSubmitted(job=job) | JobRestored(job=job):
                redacted = _redacted(job)
                return fact if redacted is job else structs.replace(fact, job=redacted)
            case JobRequeued(record=Job() as record):
                return structs.replace(fact, record=_redacted(record))
            case Reconfigured(scheduling=config):
                self._config = config
                return structs.replace(fact, scheduling=_redacted_config(config))
        return fact


def _redacted(job: Job) -> Job:
    spec = without_env_values(job.spec)
    return job if spec is job.spec else structs.replace(job, spec=spec)


def _redacted_config(config: SchedulingConfig) -> SchedulingConfig:
    """Without plugin options whose names look secret."""
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


def _write_atomically(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.touch(mode=0o600)
    part.write_bytes(data)
    part.replace(path)
