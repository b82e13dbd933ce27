"""Contracts between the scheduler and the systems around it. An implementation passes its suite in `hodei.testing`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from hodei.model.accounting import UsageRow
from hodei.model.affinity import Requirement
from hodei.model.audit import AuditEntry, AuditQuery, DamagedRecord
from hodei.model.backend import Capabilities, ExecResult, Health, NodeUsage
from hodei.model.cron import Periodic
from hodei.model.effects import Event, Forget, Save, SaveKey, Start, Stop, TakeCheckpoint
from hodei.model.errors import BackendError, BackendRefused
from hodei.model.estimate import Estimate, RuntimeSample
from hodei.model.facts import RunObserved
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.job import Job, JobSpec, Run
from hodei.model.node import Node, NodeOverrides
from hodei.model.reservation import Reservation

Stream = Literal["stdout", "stderr"]


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since the epoch. Goes back within one process only if the machine's clock was set back by more
        than some seconds."""
        ...


# ------------------------------------------------------------------------------------------ estimator


class Estimator(Protocol):
    """Says how long jobs run. Pure: the same answers to the same questions after the same lessons, and no I/O.

    `learns`: whether the past is of use to it; if so it is told at start-up what the store remembers.
    """

    learns: bool

    def estimate(self, spec: JobSpec) -> Estimate:
        """Before the job starts, each time it enters a line. `expected_ms` is never above `limit_ms` if that is known."""
        ...

    def learn(self, ran: RuntimeSample) -> None:
        """A job has come to its own end."""
        ...


# ---------------------------------------------------------------------------------------------- store


class Opened(Struct, frozen=True):
    """What a store says when it is opened for writing."""

    installation: str
    epoch: int
    last_job: JobId
    last_event: int


class JobQuery(Struct, frozen=True):
    """Newest first. `after` is the id of the last job of the page before (exclusive)."""

    states: tuple[str, ...] = ()
    project: str = ""
    user: str = ""
    name: str = ""
    labels: tuple[Requirement, ...] = ()
    ids: tuple[JobId, ...] = ()
    since_ms: int = 0
    after: JobId = 0
    limit: int = 100


# (job, attempt, member)
RunKey = tuple[int, int, int]


class NodeRunsQuery(Struct, frozen=True):
    """`after`: the `next_after` of the page before."""

    node: NodeName
    since_ms: int = 0
    until_ms: int = 2**62
    after: RunKey | None = None
    limit: int = 100


class NodeRunsPage(Struct, frozen=True):
    """`next_after` is None at the end. A page may be short, even empty, and not be the last."""

    runs: list[Run]
    next_after: RunKey | None = None


class JobPage(Struct, frozen=True):
    jobs: list[Job]
    next_after: JobId = 0


def lost_key(key: str) -> SaveKey:
    """What is known of an idempotency key whose record is damaged: that it was used."""
    return SaveKey(key, "", (), 0)


class History(Protocol):
    """Jobs, runs and events as they were committed. Calls block; they may run beside a commit, from any thread, and see
    every commit that has returned."""

    def states_between(self, first: JobId, last: JobId) -> dict[str, int]:
        """How many of the jobs from `first` to `last` stand in each state; states without any are left out."""
        ...

    def job(self, job: JobId) -> Job | None: ...

    def jobs(self, query: JobQuery) -> JobPage:
        """One page by keyset, newest first; cost does not grow with the pages before it."""
        ...

    def counts(self) -> dict[str, int]:
        """How many jobs stand in each state; cheap at any size."""
        ...

    def runs(self, job: JobId) -> list[Run]:
        """Every run of every attempt, in order of (attempt, member)."""
        ...

    def run(self, run: RunId) -> Run | None: ...

    def runs_on(self, query: NodeRunsQuery) -> NodeRunsPage:
        """One page of the runs that held room on a node in a span of time, the newest job first."""
        ...

    def events(self, *, after: int = 0, job: JobId = 0, limit: int = 1000) -> list[Event]:
        """Events with seq > `after`, oldest first; of one job if `job` is given."""
        ...

    def dependents(self, awaited: Sequence[JobId], limit: int = 10_000) -> list[tuple[JobId, JobId]]:
        """Which jobs wait, or waited, for these: (awaited, who waits), in this order, up to `limit` of them."""
        ...

    def key(self, key: str) -> SaveKey | None:
        """`lost_key` if it was used, and nobody can tell for what any more."""
        ...

    def note(self, name: str) -> str:
        """The last SaveValue of that name; "" if there is none."""
        ...


class Audit(Protocol):
    """Who did what, kept apart from jobs and for a time of its own."""

    def audit(self, query: AuditQuery) -> list[AuditEntry]:
        """Rows in the order of the query; each row has its own `seq`, later rows higher ones."""
        ...

    def prune_audit(self, *, before_ms: int, limit: int = 1000) -> int:
        """Forget up to `limit` of the oldest rows of the audit, if older than that; how many. Counts as a commit."""
        ...


class DamagedRecords(Protocol):
    """An unreadable record spoils no answer: what is left of it is used in its place, or it is left out. It is noted, and
    `mend` sets it aside for good."""

    @property
    def suspects(self) -> Sequence[tuple[str, JobId]]:
        """What was noted and is not mended yet: its kind, and the job that it is of (0 for none)."""
        ...

    def suspect(self, kind: str, key: JobId | str, reason: str) -> None:
        """Note one that the caller could not make sense of: a `job` by its number, a `note` by its name."""
        ...

    def make_way(self, saves: Sequence[Save], now_ms: int) -> list[DamagedRecord]:
        """After a commit of these was refused (NotFound, Conflict): what is gone is written anew, what is in the way set
        aside, so that it can be tried again. Nothing found: it is the batch that is wrong."""
        ...

    def mend(self, now_ms: int, known: Mapping[JobId, tuple[Job, Sequence[Run]]] | None = None) -> list[DamagedRecord]:
        """Set aside all that was noted: each is kept as it is, and something readable takes its place where there is
        something. Jobs that are `known` from memory are written anew from there. Counts as a commit."""
        ...

    def damaged(self) -> list[DamagedRecord]:
        """All that was ever set aside, oldest first (the latest thousand)."""
        ...

    def look_over(self, kind: str, after: Any, limit: int) -> Any:
        """Read the next `limit` records of a kind (job, run, event, audit, key), so that damage is noted that nobody has
        come across; where to go on (`after` of the next call, None to begin), None at the end."""
        ...


class Store(History, Audit, DamagedRecords, Protocol):
    """Durable state. Calls block; the runtime makes them from threads of its own.

    `commit` is called by one writer at a time. Unreachable or full storage raises Unavailable; nothing was changed then.
    """

    def open(self) -> Opened:
        """Bring the schema up to date and take the next epoch: every older writer is shut out from now on.
        A schema newer than this program is refused with InvalidInput; nothing was changed then."""
        ...

    def commit(self, saves: Sequence[Save]) -> None:
        """All or nothing, durable when it returns (power loss included), in the order given.
        StaleEpoch if another writer has opened the store since."""
        ...

    def active(self) -> list[tuple[Job, tuple[Run, ...]]]:
        """Every job that has not ended, in order of id, with the runs since its `first_attempt`."""
        ...

    def overrides(self) -> list[NodeOverrides]: ...

    def reservations(self) -> list[Reservation]:
        """Every reservation that is not over, by name."""
        ...

    def usage(self) -> list[UsageRow]:
        """All that accounts have used, by path, resource and time; rows whose amount became 0 are gone."""
        ...

    def periodics(self) -> list[Periodic]:
        """Every periodic job that was not removed, by name."""
        ...

    def prune(self, *, ended_before_ms: int, limit: int = 1000) -> list[JobId]:
        """Forget up to `limit` ended jobs older than that, with their runs and events; their ids. Counts as a commit."""
        ...

    def prune_loose(self, *, before_ms: int, limit: int = 1000) -> int:
        """Forget up to `limit` events of no job from before that time, and idempotency keys made more than a day before
        it (so that a key lives for 24 hours at the very least); how many. Counts as a commit."""
        ...

    def shrink(self, limit: int) -> int:
        """Give up to `limit` pieces of room that is not needed any more back to the system; how many."""
        ...

    def check_room(self) -> None:
        """Unavailable if there is no room for anything more. Cheap, and no promise that the next commit works."""
        ...

    def check(self) -> list[tuple[str, bool, str]]:
        """For `doctor`: (what was checked, is it well, what was found)."""
        ...

    def close(self) -> None: ...


# -------------------------------------------------------------------------------------------- backend


# Verbs that not every system has. `capabilities` says which a backend has; it refuses the others with BackendRefused.


class GangReserver(Protocol):
    """`capabilities.reserve`."""

    async def reserve(self, orders: Sequence[Start]) -> None:
        """Set aside what these runs will need, for all or for none: the first half of starting a gang. Lapses by itself if
        neither `start` nor `unreserve` follows. Idempotent. BackendError: there is no room now."""
        ...

    async def unreserve(self, runs: Sequence[RunId]) -> None:
        """Give back what was set aside; what has started meanwhile, or is unknown, is left alone."""
        ...


class Executor(Protocol):
    """`capabilities.execute` and `node_execute`."""

    async def execute(self, run: RunId, command: Sequence[str], timeout_ms: int) -> ExecResult:
        """Run a command beside a running run, where it is and as whom it is. The words reach the program as they are, no
        shell reads them. NotFound if it does not run."""
        ...

    async def execute_on(self, node: NodeName, command: Sequence[str], timeout_ms: int) -> ExecResult:
        """Run a command on a node, beside all runs, for an operator; as whom is the backend's to say. The words reach the
        program as they are, no shell reads them. NotFound if there is no such node."""
        ...


class UsageReporter(Protocol):
    """`capabilities.usage`."""

    async def usage(self) -> dict[NodeName, NodeUsage]:
        """What is used on the nodes now; nodes that nobody measured are left out."""
        ...


class Suspender(Protocol):
    """`capabilities.suspend`."""

    async def suspend(self, runs: Sequence[RunId]) -> None:
        """Freeze these runs in their places; they keep what they have. Idempotent; unknown and ended runs are ignored."""
        ...

    async def resume(self, runs: Sequence[RunId]) -> None:
        """Let frozen runs go on. Idempotent; others are ignored."""
        ...


class StartForecaster(Protocol):
    """`capabilities.expects`."""

    async def expected(self) -> dict[RunId, int]:
        """When those that wait in the system's own line will begin, in ms since the epoch, as far as it can tell."""
        ...


class Backend(GangReserver, Executor, UsageReporter, Suspender, StartForecaster, Protocol):
    """Runs things. Several of one kind may exist; each is known by `name`, which is not the kind's.

    BackendError: nothing was done, asking again may help. With the code NOT_REACHED the other side was out of reach: nothing
    of the call arrived (starts may then be placed elsewhere, and do not count as attempts). With the code IN_DOUBT it is
    unknown whether it was done. BackendRefused: asking again never helps. Any other exception is a bug.
    Nothing is done before `open`; calls may come at the same time, and each ends by itself within a minute (but for
    `observe` and `nodes_changed`, which wait), however dead the other side is: the caller gives up on it then.
    Secrets (values in a task's `env`) are never put on a command line, in a log or in an error.
    `hodei.backends.base.BaseBackend` has a default for all that `capabilities` may leave out.
    """

    name: str
    kind: str
    capabilities: Capabilities

    async def open(self) -> None:
        """Connect. BackendError if the other side is out of reach. Called again after every outage."""
        ...

    async def health(self) -> Health:
        """Ask the other side for a sign of life, within ten seconds. Never raises: what is wrong is in the answer."""
        ...

    async def nodes(self) -> list[Node]:
        """The full picture: every node that the backend offers now. Those that do not answer are in it, not `ready` and
        with a reason; those that were taken away are not. Two looks with no change between them are equal."""
        ...

    async def nodes_changed(self) -> None:
        """Return when `nodes` may have something new to say. A hint and no more: the full picture is taken every half
        minute anyway, so that a backend that is not told of changes may wait here for ever."""
        ...

    async def start(self, orders: Sequence[Start]) -> dict[RunId, BackendError | BackendRefused]:
        """Begin these runs; what is not in the answer was accepted, and its outcome arrives through `observe`.
        Idempotent by run id, also between processes and after the run has ended: a second order for the same run changes
        nothing.

        An error in the answer is a promise that this run has not begun and never will: the job may start elsewhere at once.
        Where that cannot be promised (a reply was lost, and so was the look at what became of it; an earlier server's
        order may still be on its way) the answer is a BackendError with IN_DOUBT, never a plain one, and never
        BackendRefused. The caller orders such runs again, under the same id, until the answer is certain. NOT_REACHED in the
        answer: the run's own place is out of reach, and it starts elsewhere or later, without that being an attempt. If
        the call itself raises, the backend as a whole is: with NOT_REACHED nothing of it arrived, and it is sent again until
        the backend is barred; with any other BackendError all of its runs are in doubt."""
        ...

    async def stop(self, orders: Sequence[Stop]) -> None:
        """Let the run save its work as the order's checkpoint says, if it says so; then TERM to the whole run, KILL
        after its grace period. Idempotent: a second order never begins anew, one that comes to an earlier end
        shortens what is left. Unknown runs are ignored."""
        ...

    async def checkpoint(self, orders: Sequence[TakeCheckpoint]) -> None:
        """Let these runs save their work, and go on. Returns at once: `observe` tells when they did (`checkpoint_ms`), or
        that they did not (`checkpoint_error`). An order for a run that is at it joins in; runs that are unknown, ended
        or being stopped are left alone. A backend that can not do it says so by that error, or does nothing."""
        ...

    async def observe(self) -> list[RunObserved]:
        """Wait until something is new, then everything new. An observation may come twice, never not at all:
        ends are repeated after a reconnect until they are forgotten. BackendError when the other side is gone: `open`
        comes next. A run in the line of a system that `delegates` is `placed` until it runs, its `reason` that system's."""
        ...

    async def known(self) -> dict[RunId, RunObserved]:
        """How every run that the backend remembers stands now. Absent means unknown, not finished."""
        ...

    async def forget(self, orders: Sequence[Forget]) -> None:
        """The ends of these runs are safely stored."""
        ...

    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        """Up to `limit` bytes from `offset` on, and the offset after them. Empty at the end (so far). NotFound if there is
        no such run, or its logs are gone."""
        ...

    async def close(self) -> None:
        """Let go; runs go on."""
        ...

    async def log_times(self, run: RunId, stream: Stream) -> list[tuple[int, int]]:
        """(place, time in ms), both growing: what is before the place in the log had been written by then. Empty where
        nobody noted it."""
        ...


# ------------------------------------------------------------------------------------------ observers


class Collector(Protocol):
    """Metrics of an extension, read at each scrape on a thread of its own."""

    def collect(self) -> Iterable[Any]:
        """Metric families of prometheus_client."""
        ...


class EventSink(Protocol):
    """Any of `on_event(event)`, `on_job_queued(job, event)`, `on_job_scheduled`, `on_job_started`, `on_job_ended` and
    `on_job_preempted`. They are called after the commit, in order, on a thread of the sink's own, and at most once."""

    def on_event(self, event: Event) -> None: ...
