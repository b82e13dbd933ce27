"""FACTS: what has happened, in the past tense. They are all that the controller ever learns from.

They are written to the decision log as tagged JSON, so a field is only ever added, with a default.
"""

from __future__ import annotations

from msgspec import Struct

from hodei.model.booking import Booking
from hodei.model.estimate import Ran
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.job import Job, Run
from hodei.model.lifecycle import RunState
from hodei.model.node import Node, NodeMarks, Taint


class Fact(Struct, frozen=True, tag_field="fact", tag=True, omit_defaults=True):
    """The root of all facts."""


class JobSubmitted(Fact, frozen=True):
    job: Job


class JobRestored(Fact, frozen=True):
    """Read from the store at start-up: the job as it stood, with the runs since its `first_attempt`."""

    job: Job
    runs: tuple[Run, ...] = ()


class MarksRestored(Fact, frozen=True):
    marks: NodeMarks


class JobCancelled(Fact, frozen=True):
    """Someone asked for the job to end."""

    job: JobId
    reason: str = ""


class JobHeld(Fact, frozen=True):
    job: JobId


class JobReleased(Fact, frozen=True):
    job: JobId


class JobRequeued(Fact, frozen=True):
    """Someone asked for the job to start again from the beginning. `record`: the job as stored, if it had ended."""

    job: JobId
    record: Job | None = None


class RunObserved(Fact, frozen=True):
    """A backend says how a run stands. `exit_code` is 128 + the signal's number if a signal ended it.

    `reason_code`: "" for the run's own doing, else timeout | oom | killed | lost | refused | error.
    `permanent` (with `refused` or `error`): asking again can never help.
    `checkpoint_ms`: when its work was last saved, 0 if it never said.
    """

    run: RunId
    state: RunState
    at_ms: int
    exit_code: int | None = None
    reason_code: str = ""
    reason: str = ""
    permanent: bool = False
    checkpoint_ms: int = 0


class NodeJoined(Fact, frozen=True):
    """A node is there, new or changed."""

    node: Node


class NodeLost(Fact, frozen=True):
    """A node is gone for good, or its backend has given it up: its runs are lost."""

    node: NodeName
    reason: str = ""


class NodeMarked(Fact, frozen=True):
    """An operator said something about a node. `labels` with None removes; `drain` moves its work elsewhere."""

    node: NodeName
    cordon: bool | None = None
    labels: dict[str, str | None] = {}
    add_taints: tuple[Taint, ...] = ()
    remove_taints: tuple[Taint, ...] = ()
    drain: bool = False


class BookingMade(Fact, frozen=True):
    """Someone has reserved capacity; the nodes are chosen and it was checked that there is room. Also read from the store
    at start-up (`restored`)."""

    booking: Booking
    restored: bool = False


class BookingCancelled(Fact, frozen=True):
    """A reservation was given up, or is no longer wanted while it lasts."""

    name: str
    by: str = ""


class HistoryRestored(Fact, frozen=True):
    """How long jobs ran that ended before this process began, the oldest first."""

    ran: tuple[Ran, ...]


AnyFact = (
    JobSubmitted
    | JobRestored
    | MarksRestored
    | JobCancelled
    | JobHeld
    | JobReleased
    | JobRequeued
    | RunObserved
    | NodeJoined
    | NodeLost
    | NodeMarked
    | BookingMade
    | BookingCancelled
    | HistoryRestored
)
