"""What the controller knows: jobs that have not ended, their runs, the nodes. And what changed since the last step.

Changes are collected here and handed out once per step, so that ten changes of one job are one row to write.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from msgspec import structs

from hodei.engine.availability import AvailabilityProfile
from hodei.engine.nodes import Table
from hodei.model.effects import Act, Event, Save, SaveEvent, SaveJob, SaveOverrides, SaveReservation, SaveRun
from hodei.model.ids import JobId, NodeName, RunId, job_of
from hodei.model.job import JOB_ENDED, RUN_ENDED, Job, JobSpec, JobState, Run, RunState, advance_job, advance_run
from hodei.model.node import Node, NodeOverrides
from hodei.model.reservation import Reservation

# ---------------------------------------------------------------------------------------------- chunks
# Long work in parts, so that whoever drives it can see to others in between. What it comes to does not depend on
# that.


T = TypeVar("T")
# So many facts, rows or jobs are one part: some 30 ms of work.
PART = 1000


def parts(many: Iterable[T], most: int = PART) -> Iterator[list[T]]:
    """All of them in order, no more than so many at a time."""
    rest = iter(many)
    while part := list(islice(rest, most)):
        yield part


def at_once(work: Generator[None, None, T]) -> T:
    """Without a break."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


# ----------------------------------------------------------------------------------------------------

# Past this many moves that nobody has asked for they are not told one by one any more.
_MOVES_KEPT = 50_000


class Signals:
    """What one part of the controller announces to others. A part subscribes in its constructor, with a method, as the
    state of a controller is written to snapshots. Subscribers are called in the order in which they subscribed."""

    def __init__(self) -> None:
        # A run begins to hold capacity, and ends; once each.
        self.run_opened: list[Callable[[Run, JobSpec], None]] = []
        self.run_closed: list[Callable[[Run, JobSpec], None]] = []
        self.checkpoint_saved: list[Callable[[JobId], None]] = []
        # A job begins (1) or ceases (-1) to be pending.
        self.job_pending: list[Callable[[Job, int], None]] = []
        self.job_suspended: list[Callable[[Job], None]] = []
        self.job_ended: list[Callable[[Job], None]] = []


def _declared_limit_ms(spec: JobSpec) -> int:
    return spec.estimate_ms or spec.timeout_ms


class ClusterState:
    """`limit_ms`: how long a job may hold its capacity, for one without an entry in `estimates`."""

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
        self.last_event = last_event
        # Runs whose stop order may have been withdrawn: if they must stop after all, the order is sent again.
        self.spared: set[RunId] = set()
        # Elements of arrays that ended or were held since the controller last asked.
        self.left_arrays: list[Job] = []
        # Whose act is being carried out, for the events that tell of it.
        self.by = ""
        # Jobs whose records were damaged: runs of theirs that nobody knows of any more are not stopped as strangers.
        self.damaged: set[JobId] = set()
        self._moved: dict[JobId, None] = {}
        self._all_moved = False
        self._new_jobs: set[JobId] = set()
        self._new_runs: set[RunId] = set()
        self._jobs: dict[JobId, Job] = {}
        self._runs: dict[RunId, Run] = {}
        self._marks: dict[NodeName, NodeOverrides] = {}
        self._reservations: dict[str, SaveReservation] = {}
        self._events: list[Event] = []
        self._acts: list[Act] = []

    # ---------------------------------------------------------------------------------------------- jobs

    def add_job(self, job: Job, *, new: bool) -> None:
        self.jobs[job.id] = job
        if job.state == "pending":
            for listener in self.signals.job_pending:
                listener(job, 1)
        if new:
            self._new_jobs.add(job.id)
            self._jobs[job.id] = job

    def change_job(self, job: Job, now_ms: int, *, to: JobState | None = None, **changes: Any) -> Job:
        """The one door for jobs: the state moves by the table, the version counts up, an ended job leaves the world."""
        state = job.state if to is None or to == job.state else advance_job(job.state, to)
        if (state == "pending") != (job.state == "pending"):
            for listener in self.signals.job_pending:
                listener(job, 1 if state == "pending" else -1)
        job = structs.replace(job, state=state, changed_ms=now_ms, version=job.version + 1, **changes)
        self._jobs[job.id] = job
        if job.spec.array is not None and (state in JOB_ENDED or state == "held"):
            self.left_arrays.append(job)
        if state in JOB_ENDED:
            self.jobs.pop(job.id, None)
            self.runs.pop(job.id, None)
            self.estimates.pop(job.id, None)
        else:
            self.jobs[job.id] = job
        return job

    # ---------------------------------------------------------------------------------------------- runs

    def add_run(self, run: Run, *, new: bool) -> None:
        self.runs.setdefault(run.job, {})[run.id] = run
        self._moved[run.job] = None
        if run.state not in RUN_ENDED:
            self.on_node.setdefault(run.node, set()).add(run.id)
            if self.tracks_availability:
                self._enter(run, self.availability)
            for listener in self.signals.run_opened:
                listener(run, self.jobs[run.job].spec)
        if new:
            self._new_runs.add(run.id)
            self._runs[run.id] = run

    def _enter(self, run: Run, availability: AvailabilityProfile) -> None:
        spec = self.jobs[run.job].spec
        limit_ms = self.estimates.get(run.job)
        if limit_ms is None:
            limit_ms = self.limit_ms(spec)
        request = spec.task_of(run.member).request
        availability.started(run.id, run.node, request, run.started_ms or run.placed_ms, limit_ms, spec.project)

    def build_availability(self) -> AvailabilityProfile:
        """The book as it would be if it had been kept all the time."""
        if self.tracks_availability:
            return self.availability
        return self._fill(AvailabilityProfile(self.table))

    def _fill(self, availability: AvailabilityProfile) -> AvailabilityProfile:
        for job in sorted(self.runs):
            for run in self.live_runs(job):
                self._enter(run, availability)
        return availability

    def track_availability(self) -> None:
        """From now on: someone has begun to reckon with time. Nobody who does so keeps it from the beginning on, because
        most houses never do."""
        if not self.tracks_availability:
            self._fill(self.availability)
            self.tracks_availability = True

    def change_run(self, run: Run, *, to: RunState | None = None, **changes: Any) -> Run:
        """The one door for runs. A run that ends gives its node back (its job's request is released by the caller)."""
        state = run.state if to is None or to == run.state else advance_run(run.state, to)
        run = structs.replace(run, state=state, **changes)
        self._runs[run.id] = run
        self.runs.setdefault(run.job, {})[run.id] = run
        self._moved[run.job] = None
        if state in RUN_ENDED:
            self.on_node.get(run.node, set()).discard(run.id)
            self.availability.ended(run.id)
            for listener in self.signals.run_closed:
                listener(run, self.jobs[run.job].spec)
        return run

    def run(self, run: RunId) -> Run | None:
        """None for a run of an attempt that is over, and for one that is not ours at all."""
        try:
            return self.runs.get(job_of(run), {}).get(run)
        except ValueError:
            return None

    def live_runs(self, job: JobId) -> list[Run]:
        return [run for run in self.runs.get(job, {}).values() if run.state not in RUN_ENDED]

    def moved(self, job: JobId) -> None:
        """Have its runs looked at again as if they had changed."""
        self._moved[job] = None

    def take_moved(self) -> list[JobId] | None:
        """The jobs whose runs came, changed or ended since this was last asked; None: any may have."""
        moved, self._moved = None if self._all_moved else list(self._moved), {}
        self._all_moved = False
        return moved

    def drop_run(self, run: Run) -> None:
        """One that has ended, and that nothing hangs on any more: it lives on in the store alone."""
        self.runs[run.job].pop(run.id, None)

    def drop_runs(self, job: JobId) -> None:
        """The attempt is over: its runs live on in the store alone."""
        self.runs.pop(job, None)
        self._moved[job] = None

    # --------------------------------------------------------------------------------------------- nodes

    def put_node(self, node: Node) -> None:
        self.nodes[node.name] = node
        overrides = self.overrides.get(node.name)
        self.table.put(overrides.apply_to(node) if overrides is not None else node)

    def remove_node(self, name: NodeName) -> None:
        self.nodes.pop(name, None)
        self.table.remove(name)

    def put_overrides(self, overrides: NodeOverrides, *, new: bool) -> None:
        self.overrides[overrides.node] = overrides
        if new:
            self._marks[overrides.node] = overrides
        if overrides.node in self.nodes:
            self.put_node(self.nodes[overrides.node])

    # ------------------------------------------------------------------------------------------- bookings

    def put_reservation(self, reservation: Reservation, *, new: bool) -> None:
        self.track_availability()
        self.availability.add_reservation(reservation)
        if new:
            self._reservations[reservation.name] = SaveReservation(reservation)

    def drop_reservation(self, name: str) -> Reservation | None:
        reservation = self.availability.remove_reservation(name)
        if reservation is not None:
            self._reservations[name] = SaveReservation(reservation, deleted=True)
        return reservation

    # ------------------------------------------------------------------------------------------- effects

    def act(self, act: Act) -> None:
        self._acts.append(act)

    def emit(self, kind: str, now_ms: int, *, job: JobId = 0, run: RunId = "", node: str = "", **detail: Any) -> None:
        self.last_event += 1
        if self.by:
            detail.setdefault("by", self.by)
        self._events.append(Event(self.last_event, now_ms, kind, job, run, node, detail))

    def taking_effects(self) -> Generator[None, None, tuple[list[Save], list[Act]]]:
        """All that has changed since this was last asked, in parts; nothing may change meanwhile."""
        saves: list[Save] = []
        for jobs in parts(self._jobs.items()):
            saves += [SaveJob(job, id in self._new_jobs) for id, job in jobs]
            if len(self._jobs) > PART:
                yield
        saves += [SaveRun(run, id in self._new_runs) for id, run in self._runs.items()]
        saves += [SaveOverrides(overrides) for overrides in self._marks.values()]
        saves += self._reservations.values()
        for events in parts(self._events):
            saves += [SaveEvent(event) for event in events]
            if len(self._events) > PART:
                yield
        acts = self._acts
        if len(self._moved) > _MOVES_KEPT:
            self._moved, self._all_moved = {}, True  # nobody may ever ask, where no line takes others' places
        self._new_jobs, self._new_runs = set(), set()
        self._jobs, self._runs, self._marks, self._reservations, self._events, self._acts = {}, {}, {}, {}, [], []
        return saves, acts


# ---------------------------------------------------------------------------------------------- timers
# Moments to come, by job. A moment that was set again or no longer matters is sorted out by whoever asks.


class Timers:
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
