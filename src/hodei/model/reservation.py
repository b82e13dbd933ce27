"""Capacity that belongs to a project for a window of time."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.resources import Resources

# What becomes of runs that hold reserved room when they should not: they go on, or are stopped and queue again.
OverstayPolicy = Literal["let", "stop"]


class Reservation(Struct, frozen=True, omit_defaults=True):
    """From `start_ms` until `end_ms` the amounts in `places` are for jobs of `project` alone, whoever else asks.

    `by` and `made_ms`: who made it, and when. `at_start`: what becomes of others' runs that are still in the way when it
    begins; `at_end`: of the project's own runs when it is over.
    """

    name: str
    project: str
    start_ms: int
    end_ms: int
    places: tuple[tuple[NodeName, Resources], ...]
    by: str = ""
    made_ms: int = 0
    at_start: OverstayPolicy = "let"
    at_end: OverstayPolicy = "let"


class ReservationSpec(Struct, frozen=True):
    """What someone wants to reserve: `count` nodes of the scheduler's choice, or those `named`; of each the amounts
    in `request`, or all of it if none are given."""

    name: str
    project: str
    start_ms: int
    end_ms: int
    count: int = 0
    named: tuple[NodeName, ...] = ()
    request: Resources = {}
    by: str = ""
    at_start: OverstayPolicy = "let"
    at_end: OverstayPolicy = "let"


class LateRun(Struct, frozen=True):
    """A run that is not expected to be over when a reservation begins that needs its room; `end_ms` 0: nobody knows."""

    node: NodeName
    run: RunId
    end_ms: int = 0


class CapacityHold(Struct, frozen=True, omit_defaults=True):
    """Room of a node that is spoken for: promised to `job` from `start_ms` on, or reserved for `project` under `name`."""

    node: NodeName
    start_ms: int
    end_ms: int
    request: Resources
    job: JobId = 0
    name: str = ""
    project: str = ""
