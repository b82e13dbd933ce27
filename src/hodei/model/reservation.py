"""Reservations: capacity that belongs to a project for a time window."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.resources import Resources

# Runs that occupy reserved capacity when they should not: let them run, or stop and requeue them.
OverstayPolicy = Literal["let", "stop"]


class Reservation(Struct, frozen=True, omit_defaults=True):
    """From `start_ms` to `end_ms` the amounts in `places` are only for jobs of `project`.

    `by`, `made_ms`: who made it, and when. `at_start`: what happens to runs of others that still occupy it when it
    begins; `at_end`: to the project's own runs when it ends.
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
    """`count` nodes of the scheduler's choice, or those `named`; on each the amounts in `request`, or all of it."""

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
    """A run that is not expected to end before a reservation that needs its capacity; `end_ms` 0: unknown."""

    node: NodeName
    run: RunId
    end_ms: int = 0


class CapacityHold(Struct, frozen=True, omit_defaults=True):
    """Capacity of a node that is taken: by a start reservation of `job`, or by the reservation `name` of `project`."""

    node: NodeName
    start_ms: int
    end_ms: int
    request: Resources
    job: JobId = 0
    name: str = ""
    project: str = ""
