"""FACTS: what has happened, in the past tense. They are all that the controller ever learns from.

They are written to the decision log as tagged JSON, so a field is only ever added, with a default.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from hodei.model.accounting import UsageRow
from hodei.model.config import SchedulingConfig
from hodei.model.dependency import DependencyStatus
from hodei.model.estimate import RuntimeSample
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.job import HealthState, Job, Run, RunState
from hodei.model.node import Node, NodeOverrides, Taint
from hodei.model.reservation import Reservation


class Fact(Struct, frozen=True, tag_field="fact", tag=True, omit_defaults=True, kw_only=True):
    """The root of all facts. `by`: whose act it was, if it was somebody's; what follows from it at once is told with it."""

    by: str = ""


class JobSubmitted(Fact, frozen=True, gc=False):
    """`dependency_statuses`: how the jobs stand that it waits for, as far as they had ended before."""

    job: Job
    dependency_statuses: tuple[DependencyStatus, ...] = ()


class JobRestored(Fact, frozen=True, gc=False):
    """Read from the store at start-up: the job as it stood, with the runs since its `first_attempt`."""

    job: Job
    runs: tuple[Run, ...] = ()
    dependency_statuses: tuple[DependencyStatus, ...] = ()


class OverridesRestored(Fact, frozen=True):
    overrides: NodeOverrides


class JobCancelled(Fact, frozen=True, gc=False):
    """Someone asked for the job to end."""

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
    """Someone asked for the job to save its work, let go of its nodes and wait until it is released."""

    job: JobId


class JobMigrated(Fact, frozen=True):
    """Someone asked for a running job to leave its nodes, for the node `to` or any others. Unless `force`, it stays if
    nobody else can take it."""

    job: JobId
    to: NodeName = ""
    force: bool = False


class JobCheckpointRequested(Fact, frozen=True):
    """Someone asked for the job's runs to save their work now, and to go on."""

    job: JobId


class JobRequeued(Fact, frozen=True):
    """Someone asked for the job to start again from the beginning. `record`: the job as stored, if it had ended."""

    job: JobId
    record: Job | None = None
    dependency_statuses: tuple[DependencyStatus, ...] = ()


class RunObserved(Fact, frozen=True):
    """A backend says how a run stands. `exit_code` is 128 + the signal's number if a signal ended it.

    `reason_code`: "" for the run's own doing, else timeout | oom | killed | lost | refused | error | unhealthy | idle; for runs
    that never began start_failed, or not_reached if the backend was out of reach.
    `permanent` (with `refused` or `error`): asking again can never help.
    `checkpoint_ms`: when its work was last saved, 0 if it never said; `checkpoint_error`: it was asked to and did not.
    `health`: what the latest looks at it found, "" if nobody looks.
    `started_ms`: with an end, when the run began, 0 if the backend does not know.
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


class StopWithdrawn(Fact, frozen=True):
    """An order to stop this run was dropped before it was sent."""

    run: RunId


class DataAppeared(Fact, frozen=True):
    """A file or an address that jobs wait for is there."""

    what: str


class NodeJoined(Fact, frozen=True):
    """A node is there, new or changed."""

    node: Node


class BackendReported(Fact, frozen=True):
    """A backend of which no node is known: `down` is why ("": it is reached now, or was removed). `cannot`: the needs of jobs
    that it does not meet (`model.backend`)."""

    backend: str
    down: str = ""
    cannot: tuple[str, ...] = ()


class NodeLost(Fact, frozen=True):
    """A node is gone for good, or its backend has given it up: its runs are lost."""

    node: NodeName
    reason: str = ""


class NodeOverridden(Fact, frozen=True):
    """An operator said something about a node. `labels` with None removes; `drain` moves its work elsewhere."""

    node: NodeName
    cordon: bool | None = None
    labels: dict[str, str | None] = {}
    add_taints: tuple[Taint, ...] = ()
    remove_taints: tuple[Taint, ...] = ()
    drain: bool = False


class ReservationMade(Fact, frozen=True):
    """Someone has reserved capacity; the nodes are chosen and it was checked that there is room. Also read from the store
    at start-up (`restored`)."""

    reservation: Reservation
    restored: bool = False


class ReservationCancelled(Fact, frozen=True):
    """A reservation was given up, or is no longer wanted while it lasts."""

    name: str


class UsageRestored(Fact, frozen=True):
    """What accounts had used before this process began, but for the runs that are still going on."""

    rows: tuple[UsageRow, ...]


class HistoryRestored(Fact, frozen=True):
    """How long jobs ran that ended before this process began, the oldest first."""

    samples: tuple[RuntimeSample, ...]


class Reconfigured(Fact, frozen=True):
    """Other settings are in force, checked beforehand. `number`: which in the history of them, `how` they came."""

    scheduling: SchedulingConfig
    number: int = 0
    how: str = ""


class StartsForecast(Fact, frozen=True):
    """When those who wait will probably start, in ms since the epoch; whoever is not named, nobody knows of."""

    starts: dict[JobId, int]


class EventNoted(Fact, frozen=True):
    """Something to be told among the events that no decision depends on."""

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
    | BackendReported
    | NodeOverridden
    | ReservationMade
    | ReservationCancelled
    | StartsForecast
    | EventNoted
    | HistoryRestored
    | UsageRestored
    | Reconfigured
)
