"""The state of the controller: active jobs, their runs, the nodes; and the changes since the last step.

Changes are collected here and taken once per step, so that ten changes of one job are one row to write.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from msgspec import structs

from hodei.engine.availability import AvailabilityProfile
from hodei.engine.nodes import Table
from hodei.engine.points import Trigger
from hodei.model.capacity import NodeOrder
from hodei.model.effects import (
    Act,
    Event,
    Save,
    SaveEvent,
    SaveJob,
    SaveNodeOrder,
    SaveOverrides,
    SaveReservation,
    SaveRun,
)
from hodei.model.ids import JobId, NodeName, RunId, job_of
from hodei.model.job import JOB_ENDED, RUN_ENDED, Job, JobSpec, JobState, Run, RunState, advance_job, advance_run
from hodei.model.node import Node, NodeOverrides
from hodei.model.reservation import Reservation

T = TypeVar("T")
# Long work is done in chunks of this many facts, rows or jobs (about 30 ms), so that the event loop can do other work
# in between. The result does not depend on the chunks.
CHUNK_SIZE = 1000


def chunks(items: Iterable[T], size: int = CHUNK_SIZE) -> Iterator[list[T]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk


def run_to_end(work: Generator[None, None, T]) -> T:
    """The result of chunked work, without a break."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


# Above this many changed jobs, `take_changed_runs` reports "any".
_MAX_CHANGED = 50_000


class Signals:
    """What one part of the controller announces to others. A part subscribes in its constructor, with a method, because
    snapshots cannot store functions. Subscribers are called in the order in which they subscribed."""

    def __init__(self) -> None:
        # A pending job has to join its queue, or to leave it (cancelled, held, moved to another profile).
        self.job_queued: list[Callable[[Job, int], None]] = []
        self.job_dequeued: list[Callable[[Job], None]] = []
        # A job becomes pending (1) or stops being pending (-1).
        self.job_pending: list[Callable[[Job, int], None]] = []
        self.job_suspended: list[Callable[[Job], None]] = []
        self.job_ended: list[Callable[[Job], None]] = []
        # An element of an array ended or was held.
        self.element_left: list[Callable[[Job], None]] = []
        # A run starts to hold capacity, and stops holding it; once each.
        self.run_opened: list[Callable[[Run, JobSpec], None]] = []
        self.run_closed: list[Callable[[Run, JobSpec], None]] = []
        self.checkpoint_saved: list[Callable[[JobId], None]] = []
        # A gang stops, ends or starts again: capacity held for its missing members is not needed any more.
        self.gang_released: list[Callable[[JobId], None]] = []


def _declared_limit_ms(spec: JobSpec) -> int:
    return spec.estimate_ms or spec.timeout_ms


class ClusterState:
    """`limit_ms`: how long a job may hold its capacity, if it has no entry in `estimates`."""

    def __init__(self, last_event: int = 0, limit_ms: Callable[[JobSpec], int] = _declared_limit_ms) -> None:
        self.signals = Signals()
        self.table = Table()
        self.availability = AvailabilityProfile(self.table)
        self.tracks_availability = False
        # How long running jobs may hold their capacity, as estimated when they started.
        self.estimates: dict[JobId, int] = {}
        self.limit_ms = limit_ms
        self.jobs: dict[JobId, Job] = {}
        self.runs: dict[JobId, dict[RunId, Run]] = {}
        self.on_node: dict[NodeName, set[RunId]] = {}
        self.nodes: dict[NodeName, Node] = {}
        self.overrides: dict[NodeName, NodeOverrides] = {}
        self.node_orders: dict[NodeName, NodeOrder] = {}
        self.last_event = last_event
        # Runs whose stop order may have been withdrawn: if they must stop after all, the order is sent again.
        self.withdrawn_stops: set[RunId] = set()
        # The user whose request is being carried out; events carry it.
        self.actor = ""
        # Jobs whose records are damaged: their unknown runs are not stopped as orphans.
        self.damaged: set[JobId] = set()
        # What has happened that could unblock pending gangs.
        self.triggers: set[Trigger] = set()
        # More can be decided right now: the next step follows at once.
        self.unfinished = False
        # Jobs whose runs changed, for `take_changed_runs`.
        self._changed: dict[JobId, None] = {}
        self._any_changed = False
        # What the next commit writes.
        self._new_jobs: set[JobId] = set()
        self._new_runs: set[RunId] = set()
        self._jobs: dict[JobId, Job] = {}
        self._runs: dict[RunId, Run] = {}
        self._overrides: dict[NodeName, NodeOverrides] = {}
        self._reservations: dict[str, SaveReservation] = {}
        self._node_orders: dict[NodeName, SaveNodeOrder] = {}
        self._events: list[Event] = []
        self._acts: list[Act] = []

    def enqueue(self, job: Job, now_ms: int) -> None:
        for listener in self.signals.job_queued:
            listener(job, now_ms)

    def dequeue(self, job: Job) -> None:
        for listener in self.signals.job_dequeued:
            listener(job)

    def wake(self, trigger: Trigger) -> None:
        """Retry the pending gangs that this could unblock."""
        self.triggers.add(trigger)

    def add_job(self, job: Job, *, new: bool) -> None:
        self.jobs[job.id] = job
        if job.state == "pending":
            for listener in self.signals.job_pending:
                listener(job, 1)
        if new:
            self._new_jobs.add(job.id)
            self._jobs[job.id] = job

    def change_job(self, job: Job, now_ms: int, *, to: JobState | None = None, **changes: Any) -> Job:
        """The only place that changes a job: checks the transition, counts the version, and drops ended jobs."""
        state = job.state if to is None or to == job.state else advance_job(job.state, to)
        if (state == "pending") != (job.state == "pending"):
            for listener in self.signals.job_pending:
                listener(job, 1 if state == "pending" else -1)
        job = structs.replace(job, state=state, changed_ms=now_ms, version=job.version + 1, **changes)
        self._jobs[job.id] = job
        if job.spec.array is not None and (state in JOB_ENDED or state == "held"):
            for left in self.signals.element_left:
                left(job)
        if state in JOB_ENDED:
            self.jobs.pop(job.id, None)
            self.runs.pop(job.id, None)
            self.estimates.pop(job.id, None)
        else:
            self.jobs[job.id] = job
        return job

    def set_reason(self, job: Job, code: str, text: str, now_ms: int) -> Job:
        if (job.reason_code, job.reason) == (code, text):
            return job
        return self.change_job(job, now_ms, reason_code=code, reason=text)

    def add_run(self, run: Run, *, new: bool) -> None:
        self.runs.setdefault(run.job, {})[run.id] = run
        self._changed[run.job] = None
        if run.state not in RUN_ENDED:
            self.on_node.setdefault(run.node, set()).add(run.id)
            if self.tracks_availability:
                self._add_span(run, self.availability)
            for listener in self.signals.run_opened:
                listener(run, self.jobs[run.job].spec)
        if new:
            self._new_runs.add(run.id)
            self._runs[run.id] = run

    def _add_span(self, run: Run, availability: AvailabilityProfile) -> None:
        spec = self.jobs[run.job].spec
        limit_ms = self.estimates.get(run.job)
        if limit_ms is None:
            limit_ms = self.limit_ms(spec)
        request = spec.task_of(run.member).request
        availability.started(run.id, run.node, request, run.since_ms, limit_ms, spec.project)

    def build_availability(self) -> AvailabilityProfile:
        """The availability profile of now, even if it is not tracked."""
        if self.tracks_availability:
            return self.availability
        return self._fill(AvailabilityProfile(self.table))

    def _fill(self, availability: AvailabilityProfile) -> AvailabilityProfile:
        for job in sorted(self.runs):
            for run in self.live_runs(job):
                self._add_span(run, availability)
        return availability

    def track_availability(self) -> None:
        """Start tracking expected end times. Off by default: most installations do not need it."""
        if not self.tracks_availability:
            self._fill(self.availability)
            self.tracks_availability = True

    def change_run(self, run: Run, *, to: RunState | None = None, **changes: Any) -> Run:
        """Every change of a run goes through here. The caller releases the capacity of a run that ends."""
        state = run.state if to is None or to == run.state else advance_run(run.state, to)
        run = structs.replace(run, state=state, **changes)
        self._runs[run.id] = run
        self.runs.setdefault(run.job, {})[run.id] = run
        self._changed[run.job] = None
        if state in RUN_ENDED:
            self.on_node.get(run.node, set()).discard(run.id)
            self.availability.ended(run.id)
            for listener in self.signals.run_closed:
                listener(run, self.jobs[run.job].spec)
        return run

    def run(self, run: RunId) -> Run | None:
        """None for a run of an earlier attempt, and for one that is not of this installation."""
        try:
            return self.runs.get(job_of(run), {}).get(run)
        except ValueError:
            return None

    def live_runs(self, job: JobId) -> list[Run]:
        return [run for run in self.runs.get(job, {}).values() if run.state not in RUN_ENDED]

    def mark_changed(self, job: JobId) -> None:
        """Report the job in `take_changed_runs`."""
        self._changed[job] = None

    def take_changed_runs(self) -> list[JobId] | None:
        """The jobs whose runs were added, changed or ended since the last call; None: any job."""
        changed, self._changed = None if self._any_changed else list(self._changed), {}
        self._any_changed = False
        return changed

    def drop_run(self, run: Run) -> None:
        """Forget an ended run that no decision needs; it stays in the store."""
        self.runs[run.job].pop(run.id, None)

    def drop_runs(self, job: JobId) -> None:
        """Forget the runs of an attempt that is over; they stay in the store."""
        self.runs.pop(job, None)
        self._changed[job] = None

    def put_node(self, node: Node) -> None:
        """Only `ready` and `draining` nodes are in the table, and no run is placed on the latter."""
        self.nodes[node.name] = node
        if node.phase not in ("ready", "draining"):
            self.table.offer(node)
            return
        if node.phase == "draining":
            node = structs.replace(node, cordoned=True)
        overrides = self.overrides.get(node.name)
        self.table.put(overrides.apply_to(node) if overrides is not None else node)

    def remove_node(self, name: NodeName) -> None:
        self.nodes.pop(name, None)
        self.table.remove(name)

    def put_overrides(self, overrides: NodeOverrides, *, new: bool) -> None:
        self.overrides[overrides.node] = overrides
        if new:
            self._overrides[overrides.node] = overrides
        if overrides.node in self.nodes:
            self.put_node(self.nodes[overrides.node])

    def put_reservation(self, reservation: Reservation, *, new: bool) -> None:
        self.track_availability()
        self.availability.add_reservation(reservation)
        if new:
            self._reservations[reservation.name] = SaveReservation(reservation)

    def put_node_order(self, order: NodeOrder, *, deleted: bool = False) -> None:
        if deleted:
            self.node_orders.pop(order.name, None)
        else:
            self.node_orders[order.name] = order
        self._node_orders[order.name] = SaveNodeOrder(order, deleted)

    def drop_reservation(self, name: str) -> Reservation | None:
        reservation = self.availability.remove_reservation(name)
        if reservation is not None:
            self._reservations[name] = SaveReservation(reservation, deleted=True)
        return reservation

    def act(self, act: Act) -> None:
        self._acts.append(act)

    def emit(self, kind: str, now_ms: int, *, job: JobId = 0, run: RunId = "", node: str = "", **detail: Any) -> None:
        self.last_event += 1
        if self.actor:
            detail.setdefault("by", self.actor)
        self._events.append(Event(self.last_event, now_ms, kind, job, run, node, detail))

    def take_effects(self) -> Generator[None, None, tuple[list[Save], list[Act]]]:
        """All changes since the last call, in chunks; nothing may change in between."""
        saves: list[Save] = []
        for jobs in chunks(self._jobs.items()):
            saves += [SaveJob(job, id in self._new_jobs) for id, job in jobs]
            if len(self._jobs) > CHUNK_SIZE:
                yield
        saves += [SaveRun(run, id in self._new_runs) for id, run in self._runs.items()]
        saves += [SaveOverrides(overrides) for overrides in self._overrides.values()]
        saves += self._reservations.values()
        saves += self._node_orders.values()
        for events in chunks(self._events):
            saves += [SaveEvent(event) for event in events]
            if len(self._events) > CHUNK_SIZE:
                yield
        acts = self._acts
        if len(self._changed) > _MAX_CHANGED:
            self._changed, self._any_changed = {}, True  # without preemption nothing ever takes them
        self._new_jobs, self._new_runs = set(), set()
        self._jobs, self._runs, self._overrides, self._events, self._acts = {}, {}, {}, [], []
        self._reservations, self._node_orders = {}, {}
        return saves, acts


class Timers:
    """Due times by job. A timer that was set again or is obsolete still fires; the caller checks the job."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, JobId]] = []

    def set(self, at_ms: int, job: JobId) -> None:
        heapq.heappush(self._heap, (at_ms, job))

    def due(self, now_ms: int) -> list[JobId]:
        out = []
        while self._heap and self._heap[0][0] <= now_ms:
            out.append(heapq.heappop(self._heap)[1])
        return out

    def next_ms(self) -> int | None:
        return self._heap[0][0] if self._heap else None
