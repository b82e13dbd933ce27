"""EFFECTS: what is to be done, in the imperative. The controller names them; the drivers carry them out.

Saves of one step are one transaction, and reach the store before any of the step's other effects is carried out.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from hodei.model.accounting import UsageRow
from hodei.model.audit import AuditEntry
from hodei.model.cron import Periodic
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.job import Checkpoint, Job, JobSpec, Run, TaskSpec
from hodei.model.node import NodeOverrides
from hodei.model.outcome import StopReason
from hodei.model.reservation import Reservation


class Event(Struct, frozen=True, omit_defaults=True, gc=False):
    """One line of history, counted by `seq` without gaps; streams resume after it."""

    seq: int
    at_ms: int
    kind: str
    job: JobId = 0
    run: RunId = ""
    node: NodeName = ""
    detail: dict[str, Any] = {}


class SaveJob(Struct, frozen=True, gc=False):
    """`new` rows carry the spec; later saves change only where the job stands."""

    job: Job
    new: bool = False


class SaveRun(Struct, frozen=True, gc=False):
    run: Run
    new: bool = False


class SaveOverrides(Struct, frozen=True):
    overrides: NodeOverrides


class SaveReservation(Struct, frozen=True):
    """`deleted`: it is over or was given up, and need not be remembered."""

    reservation: Reservation
    deleted: bool = False


class SaveKey(Struct, frozen=True):
    """An idempotency key, the fingerprint of the request that used it, and the jobs it made."""

    key: str
    fingerprint: str
    jobs: tuple[JobId, ...]
    at_ms: int


class SaveValue(Struct, frozen=True):
    """What a part of the house wants to find again after a restart, under a name of its own; the last one counts."""

    name: str
    body: str


class SavePeriodic(Struct, frozen=True):
    """`deleted`: it was removed."""

    periodic: Periodic
    deleted: bool = False


class SaveAudit(Struct, frozen=True):
    """One more row of the audit; the store gives it its number."""

    entry: AuditEntry


class SaveUsage(Struct, frozen=True):
    """What accounts have used by now, in the buckets of time that changed."""

    rows: tuple[UsageRow, ...]


class SaveEvent(Struct, frozen=True, gc=False):
    event: Event


class Start(Struct, frozen=True):
    """Begin `run`. Carries all that a backend needs, so that it need not ask.

    `world_size`: how many members start together (or are there once this one has joined), and `addresses`: where they
    are, in order of rank; only the first is given in very large gangs, none where a node has none. `nodes`: the names of
    their nodes in the same order; none for a job of one member and in very large gangs.
    """

    run: Run
    spec: JobSpec
    task: TaskSpec
    world_size: int = 1
    addresses: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


class Stop(Struct, frozen=True):
    """First the checkpoint's hook, if there is one; then TERM, then KILL after the grace period.
    The text of `reason` comes back with the observation."""

    run: RunId
    backend: str
    grace_ms: int
    reason: StopReason
    checkpoint: Checkpoint | None = None


class WithdrawStop(Struct, frozen=True):
    """The run need not stop after all. An order to stop it that was not sent yet is dropped, and `StopWithdrawn` says so; if
    it was sent, or may have been, nothing happens."""

    run: RunId
    backend: str


class TakeCheckpoint(Struct, frozen=True):
    """The run is to save its work as its checkpoint's hook says, and to go on."""

    run: RunId
    backend: str
    checkpoint: Checkpoint


class Forget(Struct, frozen=True):
    """The run's end is in the store: the backend may drop what it keeps about it."""

    run: RunId
    backend: str


Save = (
    SaveJob
    | SaveRun
    | SaveOverrides
    | SaveReservation
    | SaveKey
    | SaveValue
    | SaveUsage
    | SavePeriodic
    | SaveAudit
    | SaveEvent
)
Act = Start | Stop | WithdrawStop | TakeCheckpoint | Forget
Effect = Save | Act
