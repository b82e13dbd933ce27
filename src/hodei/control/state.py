"""What the controller knows: jobs that have not ended, their runs, the nodes. And what changed since the last step.

Changes are collected here and handed out once per step, so that ten changes of one job are one row to write.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol

from msgspec import structs

from hodei.control.chunks import PART, parts
from hodei.engine.availability import AvailabilityProfile
from hodei.engine.nodes import Table
from hodei.model.effects import Act, Event, Record, Save, SaveJob, SaveOverrides, SaveReservation, SaveRun
from hodei.model.ids import JobId, NodeName, RunId, job_of
from hodei.model.job import Job, JobSpec, Run
from hodei.model.lifecycle import JOB_ENDED, RUN_ENDED, JobState, RunState, advance_job, advance_run
from hodei.model.node import Node, NodeOverrides
from hodei.model.reservation import Reservation

# Past this many moves that nobody has asked for they are not told one by one any more.
_MOVES_KEPT = 50_000


class Accountant(Protocol):
    """Is told of every run that comes to hold something, and of its end, once each."""

    def opened(self, run: Run, spec: JobSpec) -> None: ...

    def closed(self, run: Run, spec: JobSpec) -> None: ...


class ClusterState:
    def __init__(self, last_event: int = 0) -> None:
        self.table = Table()
        self.book = AvailabilityProfile(self.table)
        self.keeps_book = False
        # How long jobs may hold what they got, and what to think of one that was not asked about when it started.
        self.estimates: dict[JobId, int] = {}
        self.limit_ms: Callable[[JobSpec], int] = lambda spec: spec.estimate_ms or spec.timeout_ms
        self.jobs: dict[JobId, Job] = {}
        self.runs: dict[JobId, dict[RunId, Run]] = {}
        self.on_node: dict[NodeName, set[RunId]] = {}
        self.nodes: dict[NodeName, Node] = {}
        self.marks: dict[NodeName, NodeOverrides] = {}
        self.last_event = last_event
        # Who keeps account of what runs hold (quotas, fair share); nobody, in most houses.
        self.accountants: tuple[Accountant, ...] = ()
        # Is told of each job that begins (1) or ceases (-1) to be pending; nobody, where no quota asks how many are.
        self.on_pending: Callable[[Job, int], None] | None = None
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
        self._bookings: dict[str, SaveReservation] = {}
        self._events: list[Event] = []
        self._acts: list[Act] = []

    # ---------------------------------------------------------------------------------------------- jobs

    def add_job(self, job: Job, *, new: bool) -> None:
        self.jobs[job.id] = job
        if self.on_pending is not None and job.state == "pending":
            self.on_pending(job, 1)
        if new:
            self._new_jobs.add(job.id)
            self._jobs[job.id] = job

    def change_job(self, job: Job, now_ms: int, *, to: JobState | None = None, **changes: Any) -> Job:
        """The one door for jobs: the state moves by the table, the version counts up, an ended job leaves the world."""
        state = job.state if to is None or to == job.state else advance_job(job.state, to)
        if self.on_pending is not None and (state == "pending") != (job.state == "pending"):
            self.on_pending(job, 1 if state == "pending" else -1)
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
            if self.keeps_book:
                self._enter(run, self.book)
            for accountant in self.accountants:
                accountant.opened(run, self.jobs[run.job].spec)
        if new:
            self._new_runs.add(run.id)
            self._runs[run.id] = run

    def _enter(self, run: Run, book: AvailabilityProfile) -> None:
        spec = self.jobs[run.job].spec
        limit_ms = self.estimates.get(run.job)
        if limit_ms is None:
            limit_ms = self.limit_ms(spec)
        request = spec.task_of(run.member).request
        book.started(run.id, run.node, request, run.started_ms or run.placed_ms, limit_ms, spec.project)

    def drawn_up(self) -> AvailabilityProfile:
        """The book as it would be if it had been kept all the time."""
        if self.keeps_book:
            return self.book
        return self._fill(AvailabilityProfile(self.table))

    def _fill(self, book: AvailabilityProfile) -> AvailabilityProfile:
        for job in sorted(self.runs):
            for run in self.live_runs(job):
                self._enter(run, book)
        return book

    def keep_book(self) -> None:
        """From now on: someone has begun to reckon with time. Nobody who does so keeps it from the beginning on, because
        most houses never do."""
        if not self.keeps_book:
            self._fill(self.book)
            self.keeps_book = True

    def change_run(self, run: Run, *, to: RunState | None = None, **changes: Any) -> Run:
        """The one door for runs. A run that ends gives its node back (its job's request is released by the caller)."""
        state = run.state if to is None or to == run.state else advance_run(run.state, to)
        run = structs.replace(run, state=state, **changes)
        self._runs[run.id] = run
        self.runs.setdefault(run.job, {})[run.id] = run
        self._moved[run.job] = None
        if state in RUN_ENDED:
            self.on_node.get(run.node, set()).discard(run.id)
            self.book.ended(run.id)
            for accountant in self.accountants:
                accountant.closed(run, self.jobs[run.job].spec)
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
        marks = self.marks.get(node.name)
        self.table.put(marks.over(node) if marks is not None else node)

    def remove_node(self, name: NodeName) -> None:
        self.nodes.pop(name, None)
        self.table.remove(name)

    def put_marks(self, marks: NodeOverrides, *, new: bool) -> None:
        self.marks[marks.node] = marks
        if new:
            self._marks[marks.node] = marks
        if marks.node in self.nodes:
            self.put_node(self.nodes[marks.node])

    # ------------------------------------------------------------------------------------------- bookings

    def put_booking(self, booking: Reservation, *, new: bool) -> None:
        self.keep_book()
        self.book.book(booking)
        if new:
            self._bookings[booking.name] = SaveReservation(booking)

    def drop_booking(self, name: str) -> Reservation | None:
        booking = self.book.unbook(name)
        if booking is not None:
            self._bookings[name] = SaveReservation(booking, gone=True)
        return booking

    # ------------------------------------------------------------------------------------------- effects

    def act(self, act: Act) -> None:
        self._acts.append(act)

    def tell(self, kind: str, now_ms: int, *, job: JobId = 0, run: RunId = "", node: str = "", **detail: Any) -> None:
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
        saves += [SaveOverrides(marks) for marks in self._marks.values()]
        saves += self._bookings.values()
        for events in parts(self._events):
            saves += [Record(event) for event in events]
            if len(self._events) > PART:
                yield
        acts = self._acts
        if len(self._moved) > _MOVES_KEPT:
            self._moved, self._all_moved = {}, True  # nobody may ever ask, where no line takes others' places
        self._new_jobs, self._new_runs = set(), set()
        self._jobs, self._runs, self._marks, self._bookings, self._events, self._acts = {}, {}, {}, {}, [], []
        return saves, acts
