"""Every step's facts and plan as JSON lines: enough to decide all of it again, and to see whether the plans are the same.

The first line carries the configuration. Each further one: {"now": ms, "facts": [...], "plan": {...}}.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import structs

from hodei.control.parts import PART, at_once, parts
from hodei.engine.plan import Plan
from hodei.model.config import SchedulingConfig
from hodei.model.facts import Fact, JobRequeued, JobRestored, JobSubmitted
from hodei.model.job import Job
from hodei.model.secrets import without_values

log = logging.getLogger("hodei.decision_log")
FORMAT = 1


class DecisionLog:
    def __init__(self, path: Path, config: SchedulingConfig, last_event: int) -> None:
        self._encoder = msgspec.json.Encoder()
        self._broken = False
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            # A log starts with the world as it was: an old one is kept beside the new.
            path.replace(path.with_name(path.name + ".1"))
        self._file: BinaryIO = path.open("wb")
        path.chmod(0o600)
        self._write({"hodei_decision_log": FORMAT, "config": config, "last_event": last_event})

    def step(self, now_ms: int, facts: Sequence[Fact], plan: Plan) -> None:
        at_once(self.writing(now_ms, facts, plan))

    def writing(self, now_ms: int, facts: Sequence[Fact], plan: Plan) -> Generator[None, None, None]:
        """The same in parts."""
        if len(facts) <= PART:
            self._write({"now": now_ms, "facts": [_fit_to_write(fact) for fact in facts], "plan": plan})
            return
        encode = self._encoder.encode
        self._put(b'{"now":%d,"facts":[' % now_ms)
        for number, part in enumerate(parts(facts)):
            self._put((b"," if number else b"") + b",".join([encode(_fit_to_write(fact)) for fact in part]))
            yield
        self._put(b'],"plan":%b}\n' % encode(plan))

    def flush(self) -> None:
        self._attempt(self._file.flush)

    def close(self) -> None:
        self._attempt(self._file.close)

    def _write(self, line: object) -> None:
        self._put(self._encoder.encode(line) + b"\n")

    def _put(self, text: bytes) -> None:
        if not self._broken:
            self._attempt(lambda: self._file.write(text))

    def _attempt(self, act: Callable[[], object]) -> None:
        """A log that cannot be written ends there: with a gap in it, what follows could not be decided again."""
        try:
            act()
        except OSError as error:
            if not self._broken:
                log.error("the decision log ends here, it cannot be written: %s", error.strerror)
            self._broken = True


def _fit_to_write(fact: Fact) -> Fact:
    """No decision depends on the values of a job's variables, so they are not told."""
    match fact:
        case JobSubmitted(job=job) | JobRestored(job=job):
            return structs.replace(fact, job=_bare(job))
        case JobRequeued(record=Job() as record):
            return structs.replace(fact, record=_bare(record))
    return fact


def _bare(job: Job) -> Job:
    spec = without_values(job.spec)
    return job if spec is job.spec else structs.replace(job, spec=spec)
