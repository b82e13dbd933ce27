"""Effects: what the controller orders. The runtime executes them.

All saves of one step are one transaction. They are committed before any other effect of the step is executed.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from hodei.model.accounting import UsageRow
from hodei.model.audit import AuditEntry
from hodei.model.capacity import NodeOrder
from hodei.model.cron import Periodic
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.job import Checkpoint, Job, JobSpec, Run, TaskSpec
from hodei.model.node import NodeOverrides
from hodei.model.outcome import StopReason
from hodei.model.reservation import Reservation


class Event(Struct, frozen=True, omit_defaults=True, gc=False):
    """One entry of the history. `seq` has no gaps; streams resume after it."""

    seq: int
    at_ms: int
    kind: str
    job: JobId = 0
    run: RunId = ""
    node: NodeName = ""
    detail: dict[str, Any] = {}


class SaveJob(Struct, frozen=True, gc=False):
    """A `new` row includes the spec; later saves update only the state of the job."""

    job: Job
    new: bool = False


class SaveRun(Struct, frozen=True, gc=False):
    run: Run
    new: bool = False


class SaveOverrides(Struct, frozen=True):
    overrides: NodeOverrides


class SaveReservation(Struct, frozen=True):
    """`deleted`: it has ended or was cancelled."""

    reservation: Reservation
    deleted: bool = False


class SaveNodeOrder(Struct, frozen=True):
    """`deleted`: its backend has reported it stopped."""

    order: NodeOrder
    deleted: bool = False


class SaveKey(Struct, frozen=True):
    """An idempotency key, the fingerprint of the request that used it, and the jobs it created."""

    key: str
    fingerprint: str
    jobs: tuple[JobId, ...]
    at_ms: int


class SaveValue(Struct, frozen=True):
    """A named value that a component needs after a restart; the last one wins."""

    name: str
    body: str


class SavePeriodic(Struct, frozen=True):
    periodic: Periodic
    deleted: bool = False


class SaveAudit(Struct, frozen=True):
    """One audit entry; the store assigns its `seq`."""

    entry: AuditEntry


class SaveUsage(Struct, frozen=True):
    """Usage of accounts in the time buckets that changed."""

    rows: tuple[UsageRow, ...]


class SaveEvent(Struct, frozen=True, gc=False):
    event: Event


class Start(Struct, frozen=True):
    """Start `run`. Contains everything that a backend needs.

    `world_size`: number of members that start together (or that exist once this one has joined). `addresses`: their
    addresses by rank; only the first in very large gangs, none where a node has no address. `nodes`: their node names
    by rank; empty for a single member and in very large gangs.
    """

    run: Run
    spec: JobSpec
    task: TaskSpec
    world_size: int = 1
    addresses: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


class Stop(Struct, frozen=True):
    """The checkpoint hook, TERM, then KILL after the grace period. The observed end carries the text of `reason`."""

    run: RunId
    backend: str
    grace_ms: int
    reason: StopReason
    checkpoint: Checkpoint | None = None


class WithdrawStop(Struct, frozen=True):
    """The run need not stop after all. A stop that was not sent yet is dropped and reported as `StopWithdrawn`; one
    that was or may have been sent is not affected."""

    run: RunId
    backend: str


class TakeCheckpoint(Struct, frozen=True):
    """Take a checkpoint with the run's hook; the run continues."""

    run: RunId
    backend: str
    checkpoint: Checkpoint


class Forget(Struct, frozen=True):
    """The end of the run is stored; the backend may delete its own record of it."""

    run: RunId
    backend: str


class WantNodes(Struct, frozen=True):
    """Start these potential nodes. Idempotent by name."""

    backend: str
    nodes: tuple[NodeName, ...]


class ReleaseNodes(Struct, frozen=True):
    """Stop these nodes: nothing runs on them. Idempotent."""

    backend: str
    nodes: tuple[NodeName, ...]


Save = (
    SaveJob
    | SaveRun
    | SaveOverrides
    | SaveReservation
    | SaveNodeOrder
    | SaveKey
    | SaveValue
    | SaveUsage
    | SavePeriodic
    | SaveAudit
    | SaveEvent
)
RunAct = Start | Stop | WithdrawStop | TakeCheckpoint | Forget
NodeAct = WantNodes | ReleaseNodes
Act = RunAct | NodeAct
Effect = Save | Act
