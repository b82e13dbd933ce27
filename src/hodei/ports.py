"""Contracts between the scheduler and the systems around it. Every implementation passes its suite in `hodei.testing`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from hodei.model.accounting import CostRow, UsageRow
from hodei.model.affinity import Requirement
from hodei.model.audit import AuditEntry, AuditQuery, DamagedRecord
from hodei.model.backend import Capabilities, ExecResult, Health, NodeUsage
from hodei.model.capacity import NodeOrder
from hodei.model.cron import Periodic
from hodei.model.effects import Event, Forget, Save, SaveKey, Start, Stop, TakeCheckpoint
from hodei.model.errors import BackendError, BackendRefused
from hodei.model.estimate import Estimate, RuntimeSample
from hodei.model.facts import RunObserved
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.job import Job, JobSpec, Run
from hodei.model.node import Node, NodeOverrides
from hodei.model.reservation import Reservation
from hodei.model.usage import RunUsage

Stream = Literal["stdout", "stderr"]


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since the epoch. It goes back within a process only if the machine's clock was set back by more
        than a few seconds."""
        ...


class Estimator(Protocol):
    """Estimates run times. Pure: the same answers after the same samples, no I/O.

    `learns`: whether it uses past runs; if so it gets the stored samples at start-up.
    """

    learns: bool

    def estimate(self, spec: JobSpec) -> Estimate:
        """Called before the job starts, each time it is queued. `expected_ms` never exceeds a known `limit_ms`."""
        ...

    def learn(self, ran: RuntimeSample) -> None:
        """A job ended by itself."""
        ...


class Opened(Struct, frozen=True):
    """The result of opening a store for writing."""

    installation: str
    epoch: int
    last_job: JobId
    last_event: int


class JobQuery(Struct, frozen=True):
    """Newest first. `after`: the id of the last job of the previous page (exclusive)."""

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
    """`after`: the `next_after` of the previous page."""

    node: NodeName
    since_ms: int = 0
    until_ms: int = 2**62
    after: RunKey | None = None
    limit: int = 100


class NodeRunsPage(Struct, frozen=True):
    """`next_after` is None at the end. A page may be short or even empty without being the last."""

    runs: list[Run]
    next_after: RunKey | None = None


class JobPage(Struct, frozen=True):
    jobs: list[Job]
    next_after: JobId = 0


def lost_key(key: str) -> SaveKey:
    """An idempotency key that was used, but whose record is damaged."""
    return SaveKey(key, "", (), 0)


class History(Protocol):
    """Committed jobs, runs and events. Calls block; they may run concurrently with a commit, from any thread, and see
    every commit that has returned."""

    def states_between(self, first: JobId, last: JobId) -> dict[str, int]:
        """Number of jobs per state among the ids `first` to `last`; states without jobs are absent."""
        ...

    def job(self, job: JobId) -> Job | None: ...

    def jobs(self, query: JobQuery) -> JobPage:
        """One page by keyset, newest first; the cost does not depend on the number of earlier pages."""
        ...

    def counts(self) -> dict[str, int]:
        """Number of jobs per state; cheap at any size."""
        ...

    def runs(self, job: JobId) -> list[Run]:
        """Every run of every attempt, in order of (attempt, member)."""
        ...

    def run(self, run: RunId) -> Run | None: ...

    def runs_on(self, query: NodeRunsQuery) -> NodeRunsPage:
        """One page of the runs that held capacity on a node in a time range, newest job first."""
        ...

    def costs(self, since_ms: int, until_ms: int) -> list[CostRow]:
        """Cost of runs on nodes with a price, within this time; by project, user and backend. It reads every such run, and
        may take seconds."""
        ...

    def events(self, *, after: int = 0, job: JobId = 0, limit: int = 1000) -> list[Event]:
        """Events with seq > `after`, oldest first; of one job if `job` is given."""
        ...

    def dependents(self, awaited: Sequence[JobId], limit: int = 10_000) -> list[tuple[JobId, JobId]]:
        """The jobs that wait or waited for these, as (awaited, dependent) in this order, up to `limit`."""
        ...

    def key(self, key: str) -> SaveKey | None:
        """`lost_key` if the key was used but its record is damaged."""
        ...

    def note(self, name: str) -> str:
        """The last SaveValue of that name; "" if there is none."""
        ...


class Audit(Protocol):
    """The audit log, with its own retention."""

    def audit(self, query: AuditQuery) -> list[AuditEntry]:
        """Entries in the order of the query. Every entry has its own `seq`, growing with time."""
        ...

    def prune_audit(self, *, before_ms: int, limit: int = 1000) -> int:
        """Delete up to `limit` of the oldest entries from before that time; returns how many. Counts as a commit."""
        ...


class DamagedRecords(Protocol):
    """An unreadable record breaks no query: what can be read of it is used in its place, or it is omitted. It is marked
    as a suspect, and `repair` moves it to quarantine."""

    @property
    def suspects(self) -> Sequence[tuple[str, JobId]]:
        """Suspects that are not repaired yet: kind, and the job it belongs to (0 for none)."""
        ...

    def mark_suspect(self, kind: str, key: JobId | str, reason: str) -> None:
        """Mark a record that the caller could not decode: a `job` by its id, a `note` by its name."""
        ...

    def repair_conflicts(self, saves: Sequence[Save], now_ms: int) -> list[DamagedRecord]:
        """After a commit of `saves` was refused (NotFound, Conflict): rewrite missing records and quarantine those in
        the way, so that the commit can be retried. An empty result means that the batch itself is wrong."""
        ...

    def repair(
        self, now_ms: int, known: Mapping[JobId, tuple[Job, Sequence[Run]]] | None = None
    ) -> list[DamagedRecord]:
        """Quarantine all suspects; each is kept as it is, and a readable replacement is written where possible. Jobs
        that are `known` in memory are rewritten from there. Counts as a commit."""
        ...

    def damaged(self) -> list[DamagedRecord]:
        """All quarantined records, oldest first (the latest thousand)."""
        ...

    def scan(self, kind: str, after: Any, limit: int) -> Any:
        """Read the next `limit` records of a kind (job, run, event, audit, key) to find damage that no query has met
        yet. Returns where to continue (`after` of the next call, None to begin), None at the end."""
        ...


class Store(History, Audit, DamagedRecords, Protocol):
    """Durable state. Calls block; the runtime makes them from its own threads.

    `commit` is called by one writer at a time. Unreachable or full storage raises Unavailable and changes nothing.
    """

    def open(self) -> Opened:
        """Migrate the schema and take the next epoch, which fences off every earlier writer. InvalidInput, without any
        change, if the schema is newer than this program."""
        ...

    def commit(self, saves: Sequence[Save]) -> None:
        """All or nothing, in the given order, durable on return (also against power loss). StaleEpoch if another writer
        has opened the store since."""
        ...

    def active(self) -> list[tuple[Job, tuple[Run, ...]]]:
        """Every job that has not ended, by id, with the runs since its `first_attempt`."""
        ...

    def overrides(self) -> list[NodeOverrides]: ...

    def reservations(self) -> list[Reservation]:
        """Every reservation that has not ended, by name."""
        ...

    def node_orders(self) -> list[NodeOrder]:
        """Every ordered node that was not reported stopped, by name."""
        ...

    def usage(self) -> list[UsageRow]:
        """Usage of all accounts by path, resource and time; rows whose amount became 0 are deleted."""
        ...

    def periodics(self) -> list[Periodic]:
        """Every periodic job that was not deleted, by name."""
        ...

    def prune(self, *, ended_before_ms: int, limit: int = 1000) -> list[JobId]:
        """Delete up to `limit` jobs that ended before that time, with their runs and events; returns their ids. Counts
        as a commit."""
        ...

    def prune_unattached(self, *, before_ms: int, limit: int = 1000) -> int:
        """Delete up to `limit` events without a job from before that time, and idempotency keys created more than a day
        before it (so that a key lives for at least 24 hours); returns how many. Counts as a commit."""
        ...

    def shrink(self, limit: int) -> int:
        """Return up to `limit` pieces of unused space to the system; returns how many."""
        ...

    def check_disk_space(self) -> None:
        """Unavailable if storage is full. Cheap, and no guarantee that the next commit succeeds."""
        ...

    def check(self) -> list[tuple[str, bool, str]]:
        """For `doctor`: (what was checked, whether it is healthy, what was found)."""
        ...

    def close(self) -> None: ...


# Optional capabilities. `capabilities` lists those of a backend; it refuses calls of the others with BackendRefused.


class GangReserver(Protocol):
    """`capabilities.reserve`."""

    async def reserve(self, orders: Sequence[Start]) -> None:
        """Reserve capacity for all of these runs or for none: the first half of starting a gang. Expires by itself
        unless `start` or `unreserve` follows. Idempotent. BackendError: no capacity now."""
        ...

    async def unreserve(self, runs: Sequence[RunId]) -> None:
        """Release reserved capacity; runs that have started meanwhile, and unknown ones, are not affected."""
        ...


class Executor(Protocol):
    """`capabilities.execute` and `node_execute`."""

    async def execute(self, run: RunId, command: Sequence[str], timeout_ms: int) -> ExecResult:
        """Run a command in the environment and as the user of a running run. Arguments are passed unchanged, without a
        shell. NotFound if the run is not running."""
        ...

    async def execute_on(self, node: NodeName, command: Sequence[str], timeout_ms: int) -> ExecResult:
        """Run a command on a node, outside any run, for an operator; the backend decides as which user. Arguments are
        passed unchanged, without a shell. NotFound if there is no such node."""
        ...


class UsageReporter(Protocol):
    """`capabilities.usage`."""

    async def usage(self) -> dict[NodeName, NodeUsage]:
        """Current usage of the nodes; nodes without a measurement are absent."""
        ...


class RunMeter(Protocol):
    """`capabilities.run_usage`."""

    async def run_usage(self, runs: Collection[RunId]) -> dict[RunId, RunUsage]:
        """What these runs have used so far. Runs that do not run or were not measured are absent."""
        ...


class Suspender(Protocol):
    """`capabilities.suspend`."""

    async def suspend(self, runs: Sequence[RunId]) -> None:
        """Pause these runs in place; they keep their resources. Idempotent; unknown and ended runs are ignored."""
        ...

    async def resume(self, runs: Sequence[RunId]) -> None:
        """Continue paused runs. Idempotent; others are ignored."""
        ...


class StartForecaster(Protocol):
    """`capabilities.expects`."""

    async def expected(self) -> dict[RunId, int]:
        """Expected start times of runs in the backend's own queue, in ms since the epoch, as far as it knows them."""
        ...


class Scaler(Protocol):
    """`capabilities.scales`. `nodes` includes the potential nodes, each with its `phase` and `group`; a node that was
    started or is being stopped is always in it, also after a restart of the server."""

    async def wanted(self, nodes: Sequence[NodeName]) -> dict[NodeName, BackendError | BackendRefused]:
        """Start these potential nodes. One without an error in the result is starting (or ready): it costs money, and
        `nodes` reports it from now on. Idempotent by name, across processes: a repeated order starts nothing twice, also
        if the reply to the first was lost.

        An error in the result guarantees that the node was not started: with the code NO_CAPACITY another group may have
        capacity, BackendRefused means that a retry never succeeds. If the outcome is unknown the call raises BackendError
        with IN_DOUBT, and is repeated."""
        ...

    async def release(self, nodes: Sequence[NodeName]) -> None:
        """Stop these nodes; nothing runs on them. Returns when the order is accepted: `nodes` reports `stopping`, then
        `potential`. Idempotent; potential and unknown nodes are ignored."""
        ...


class Backend(GangReserver, Executor, UsageReporter, RunMeter, Suspender, StartForecaster, Scaler, Protocol):
    """Runs jobs. There may be several backends of one kind; `name` identifies each.

    BackendError: nothing was done, a retry may succeed. With the code NOT_REACHED the connection failed and nothing of
    the call arrived (such starts may be placed elsewhere and do not count as attempts). With the code IN_DOUBT it is
    unknown whether it was done. BackendRefused: a retry never succeeds. Any other exception is a bug.

    No call precedes `open`. Calls may be concurrent. Each returns within a minute (except `observe` and
    `nodes_changed`, which wait), even if the other side is dead; after that the caller gives up. Secrets (values in a
    task's `env`) never appear on a command line, in a log or in an error. `hodei.backends.base.BaseBackend` provides
    defaults for everything that is optional.
    """

    name: str
    kind: str
    capabilities: Capabilities

    async def open(self) -> None:
        """Connect. BackendError if the other side is unreachable. Called again after every outage."""
        ...

    async def health(self) -> Health:
        """Check the other side, within ten seconds. Never raises: problems are in the result."""
        ...

    async def nodes(self) -> list[Node]:
        """All nodes that the backend offers now. Nodes that do not respond are included, not `ready` and with a reason;
        removed ones are not. Without a change, two calls return equal lists."""
        ...

    async def nodes_changed(self) -> None:
        """Return when `nodes` may have changed. Only a hint: `nodes` is polled every half minute anyway, so a backend
        without notifications may wait forever."""
        ...

    async def start(self, orders: Sequence[Start]) -> dict[RunId, BackendError | BackendRefused]:
        """Start these runs. A run without an error in the result was accepted, and its outcome arrives through
        `observe`. Idempotent by run id, across processes and after the run has ended: a repeated order changes nothing.

        An error in the result guarantees that the run has not started and never will, so the job may start elsewhere at
        once. Where that cannot be guaranteed (a lost reply that could not be verified, or an order of an earlier server
        that may still be in flight) the result is a BackendError with IN_DOUBT, never another one and never
        BackendRefused. The caller repeats such orders under the same id until the outcome is certain. NOT_REACHED in
        the result: the run's node is unreachable; the run is placed again without counting as an attempt.

        If the call itself raises, the whole backend is affected: with NOT_REACHED nothing arrived, and the call is
        repeated until the backend is marked unavailable; with any other BackendError all its runs are in doubt.
        """
        ...

    async def stop(self, orders: Sequence[Stop]) -> None:
        """Take the checkpoint of the order, if it has one; then TERM to the whole run, KILL after its grace period.
        Idempotent: a repeated order never restarts the sequence, and one with an earlier end shortens it. Unknown runs
        are ignored."""
        ...

    async def checkpoint(self, orders: Sequence[TakeCheckpoint]) -> None:
        """Take checkpoints of these runs, which continue. Returns at once: `observe` reports success (`checkpoint_ms`)
        or failure (`checkpoint_error`). An order for a run with a checkpoint in progress joins it; unknown, ended and
        stopping runs are ignored. A backend without checkpoints reports that error or does nothing."""
        ...

    async def observe(self) -> list[RunObserved]:
        """Wait for news, then return everything new. At-least-once: an observation may be repeated but is never lost;
        ends are repeated after a reconnect until they are forgotten. BackendError when the connection is lost: `open`
        follows. A run in the queue of a backend that `delegates` is `placed` until it runs, with the backend's reason.
        """
        ...

    async def known(self) -> dict[RunId, RunObserved]:
        """The current state of every run that the backend remembers. Absent means unknown, not ended."""
        ...

    def silent_nodes(self) -> frozenset[NodeName]:
        """Nodes that are out of reach for now, so that `known` may lack their runs, which continue."""
        ...

    def returned_nodes(self) -> frozenset[NodeName]:
        """Nodes that were silent, if only for a moment, and are back or given up since the last call, which `nodes_changed`
        announces. Their runs have to be compared with `known` again."""
        ...

    async def forget(self, orders: Sequence[Forget]) -> None:
        """The ends of these runs are stored durably."""
        ...

    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        """Up to `limit` bytes from `offset`, and the offset after them. Empty at the current end. NotFound if there is
        no such run or its logs were deleted."""
        ...

    async def close(self) -> None:
        """Disconnect; runs continue."""
        ...

    async def log_times(self, run: RunId, stream: Stream) -> list[tuple[int, int]]:
        """(offset, time in ms), both ascending: everything before the offset was written by that time. Empty if not
        recorded."""
        ...


class Collector(Protocol):
    """Metrics of an extension, read at each scrape in a thread of its own."""

    def collect(self) -> Iterable[Any]:
        """Metric families of prometheus_client."""
        ...


class EventSink(Protocol):
    """Implements any of `on_event(event)`, `on_job_queued(job, event)`, `on_job_scheduled`, `on_job_started`,
    `on_job_ended` and `on_job_preempted`. They are called after the commit, in order, in the sink's own thread, and at
    most once."""

    def on_event(self, event: Event) -> None: ...
