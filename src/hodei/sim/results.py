"""What a simulated run leaves behind: one `Outcome` per job and a `Sample` per change of load. Reports are made of these."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hodei.model.ids import JobId, NodeName
from hodei.model.resources import Resources

# How a job came to start: it was first in line, it filled a gap before one that had been promised its start, or it took
# room that no promise needed.
StartKind = Literal["head", "backfill", "spill"]


class Outcome(Struct, frozen=True):
    """How one job fared; times in milliseconds of simulated time, -1 for "never". `request` is for all members together."""

    id: JobId
    name: str
    user: str
    project: str
    submitted_ms: int
    started_ms: int
    ended_ms: int
    request: Resources
    size: int = 1
    nodes: tuple[NodeName, ...] = ()
    estimate_ms: int = 0
    kind: StartKind = "head"
    preemptions: int = 0
    deadline_ms: int = 0

    @property
    def wait_ms(self) -> int:
        return self.started_ms - self.submitted_ms

    @property
    def run_ms(self) -> int:
        return self.ended_ms - self.started_ms


class Sample(Struct, frozen=True):
    """The cluster at one moment. `fragmented`: the share of free GPU (cpu where nobody asks for GPU) that a
    typical job could not use, in thousandths."""

    at_ms: int
    used: Resources
    running: int
    waiting: int
    preemptions: int = 0
    fragmented: int = 0


class Result(Struct):
    """One policy over one workload. `seconds` is how long the simulator took; `capacity` is of all nodes together."""

    policy: str
    workload: str
    capacity: Resources
    outcomes: list[Outcome]
    samples: list[Sample]
    seconds: float = 0.0
    unplaced: int = 0
    promises_broken: int = 0
