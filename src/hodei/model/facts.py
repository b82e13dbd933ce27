"""Facts: what has happened. They are the only input of the controller.

The decision log stores them as tagged JSON, so fields are only ever added, with a default.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from hodei.model.accounting import UsageRow
from hodei.model.capacity import CapacityPlan, NodeOrder
from hodei.model.config import SchedulingConfig
from hodei.model.dependency import DependencyStatus
from hodei.model.estimate import RuntimeSample
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.job import HealthState, Job, Run, RunState
from hodei.model.node import Node, NodeOverrides, Taint
from hodei.model.reservation import Reservation
from hodei.model.usage import RunUsage


class Fact(Struct, frozen=True, tag_field="fact", tag=True, omit_defaults=True, kw_only=True):
    """Base class. `by`: the caller who caused it, if any; the events that follow from it carry the name."""

    by: str = ""


class JobSubmitted(Fact, frozen=True, gc=False):
    """`dependency_statuses`: its dependencies that had already ended."""

    job: Job
    dependency_statuses: tuple[DependencyStatus, ...] = ()


class JobRestored(Fact, frozen=True, gc=False):
    """Read from the store at start-up: the job with the runs since its `first_attempt`."""

    job: Job
    runs: tuple[Run, ...] = ()
    dependency_statuses: tuple[DependencyStatus, ...] = ()


class OverridesRestored(Fact, frozen=True):
    overrides: NodeOverrides


class JobCancelled(Fact, frozen=True, gc=False):
    """A caller cancelled the job."""

    job: JobId
    reason: str = ""


class JobWithdrawn(Fact, frozen=True, gc=False):
    """A pending job leaves the queue because what it was made from has changed; another job may replace it."""

    job: JobId
    reason: str = ""


class GangSplit(Fact, frozen=True):
    """A placed gang continues as jobs of one member each, on the nodes chosen for it: its members start together but end
    one by one. Its own runs never started and end at `at_ms`. `members`: the new jobs, each with its run."""

    job: JobId
    at_ms: int
    members: tuple[tuple[Job, Run], ...]


class JobHeld(Fact, frozen=True):
    job: JobId


class JobReleased(Fact, frozen=True):
    job: JobId


class JobSuspended(Fact, frozen=True):
    """A caller suspended the job: take a checkpoint, release the nodes, wait for release."""

    job: JobId


class JobMigrated(Fact, frozen=True):
    """Move a running job to the node `to` or any other. Unless `force`, it stays if no other node can run it."""

    job: JobId
    to: NodeName = ""
    force: bool = False


class JobCheckpointRequested(Fact, frozen=True):
    """A caller requested a checkpoint of the job's runs; they continue."""

    job: JobId


class JobRequeued(Fact, frozen=True):
    """A caller restarted the job from the beginning. `record`: the job as stored, if it had ended."""

    job: JobId
    record: Job | None = None
    dependency_statuses: tuple[DependencyStatus, ...] = ()


class RunObserved(Fact, frozen=True):
    """A backend reports the state of a run. `exit_code` is 128 + signal number if a signal ended it.

    `reason_code`: "" for the run itself, else timeout | oom | killed | lost | refused | error | unhealthy | idle; for
    runs that never started start_failed, or not_reached if the backend was unreachable. `permanent` (with `refused` or
    `error`): a retry can never succeed. `checkpoint_ms`: time of the last checkpoint, 0 if none; `checkpoint_error`: a
    requested checkpoint failed. `health`: result of the latest health checks, "" without one. `started_ms`: with an
    end, when the run started, 0 if unknown. `usage`: with an end, what the run used, None if unknown.
    """

    run: RunId
    state: RunState
    at_ms: int
    exit_code: int | None = None
    reason_code: str = ""
    reason: str = ""
    permanent: bool = False
    checkpoint_ms: int = 0
    health: HealthState = ""
    checkpoint_error: str = ""
    started_ms: int = 0
    usage: RunUsage | None = None


class StopWithdrawn(Fact, frozen=True):
    """A stop of this run was dropped before it was sent."""

    run: RunId


class DataAppeared(Fact, frozen=True):
    """A file or URL that jobs wait for exists."""

    what: str


class NodeJoined(Fact, frozen=True):
    """A node is available, or has changed."""

    node: Node


class BackendReported(Fact, frozen=True):
    """The state of a backend without known nodes: `down` is why ("": reachable, or removed). `cannot`: needs of jobs
    that it does not meet (`model.backend`)."""

    backend: str
    down: str = ""
    cannot: tuple[str, ...] = ()


class NodeLost(Fact, frozen=True):
    """A node was removed, or its backend gave it up: its runs are lost. `reclaimed`: its provider took it back, and its
    runs have stopped."""

    node: NodeName
    reason: str = ""
    reclaimed: bool = False


class NodeOrderRestored(Fact, frozen=True):
    """Read from the store at start-up."""

    order: NodeOrder


class NodeRefused(Fact, frozen=True):
    """A backend did not start a node that was ordered, and it costs nothing. `code`: NO_CAPACITY, or that of the error.
    `permanent`: a retry cannot succeed."""

    node: NodeName
    code: str
    reason: str = ""
    permanent: bool = False


class CapacityPlanned(Fact, frozen=True):
    """The capacity planner has compared the pending jobs with what can be ordered."""

    plan: CapacityPlan


class NodeOverridden(Fact, frozen=True):
    """An operator changed a node. A label with None is removed; `drain` moves its work elsewhere."""

    node: NodeName
    cordon: bool | None = None
    labels: dict[str, str | None] = {}
    add_taints: tuple[Taint, ...] = ()
    remove_taints: tuple[Taint, ...] = ()
    drain: bool = False


class ReservationMade(Fact, frozen=True):
    """A reservation with its nodes, checked to fit; or (`restored`) one read from the store at start-up."""

    reservation: Reservation
    restored: bool = False


class ReservationDeleted(Fact, frozen=True):
    """A reservation was deleted, before or during its window."""

    name: str


class UsageRestored(Fact, frozen=True):
    """Usage of accounts before this process started, without runs that still run."""

    rows: tuple[UsageRow, ...]


class HistoryRestored(Fact, frozen=True):
    """Run times of jobs that ended before this process started, oldest first."""

    samples: tuple[RuntimeSample, ...]


class Reconfigured(Fact, frozen=True):
    """Another configuration is active; it was validated before. `number` and `how`: its version and origin."""

    scheduling: SchedulingConfig
    number: int = 0
    how: str = ""


class StartsForecast(Fact, frozen=True):
    """Probable start times in ms since the epoch; jobs without an entry are unknown."""

    starts: dict[JobId, int]


class EventNoted(Fact, frozen=True):
    """An event for the history that no decision depends on."""

    kind: str
    job: JobId = 0
    detail: dict[str, Any] = {}


AnyFact = (
    JobSubmitted
    | JobRestored
    | OverridesRestored
    | JobCancelled
    | JobWithdrawn
    | GangSplit
    | JobHeld
    | JobReleased
    | JobSuspended
    | JobMigrated
    | JobCheckpointRequested
    | JobRequeued
    | RunObserved
    | StopWithdrawn
    | DataAppeared
    | NodeJoined
    | NodeLost
    | NodeOrderRestored
    | NodeRefused
    | CapacityPlanned
    | BackendReported
    | NodeOverridden
    | ReservationMade
    | ReservationDeleted
    | StartsForecast
    | EventNoted
    | HistoryRestored
    | UsageRestored
    | Reconfigured
)
