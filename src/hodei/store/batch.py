"""The effect of one commit: its saves by kind, with only the last value of each record.

A job that is created, placed and started in one batch is one insert of its last value. Both stores write from this, so
a batch means the same in both. It does not depend on what is stored already.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from hodei.model.accounting import AccountPath, UsageRow
from hodei.model.audit import AuditEntry
from hodei.model.effects import (
    Event,
    Save,
    SaveAudit,
    SaveEvent,
    SaveJob,
    SaveKey,
    SaveNodeOrder,
    SaveOverrides,
    SavePeriodic,
    SaveReservation,
    SaveRun,
    SaveUsage,
    SaveValue,
)
from hodei.model.errors import Conflict, InvalidInput
from hodei.model.ids import JobId, NodeName, RunId, run_id
from hodei.model.job import Job, Run
from hodei.model.node import NodeOverrides


class Batch(Struct):
    """`new_*` must not be stored yet; the others must be stored already."""

    new_jobs: dict[JobId, Job] = {}
    jobs: dict[JobId, Job] = {}
    new_runs: dict[RunId, Run] = {}
    runs: dict[RunId, Run] = {}
    overrides: dict[NodeName, NodeOverrides] = {}
    reservations: dict[str, SaveReservation] = {}
    node_orders: dict[NodeName, SaveNodeOrder] = {}
    keys: dict[str, SaveKey] = {}
    notes: dict[str, str] = {}
    events: dict[int, Event] = {}
    periodics: dict[str, SavePeriodic] = {}
    audits: list[AuditEntry] = []
    usage: dict[tuple[AccountPath, str, int], UsageRow] = {}

    @property
    def last_job(self) -> JobId:
        return max(self.new_jobs, default=0)

    @property
    def last_event(self) -> int:
        return max(self.events, default=0)


def sort_saves(saves: Sequence[Save]) -> Batch:
    """Conflict if the batch creates one thing twice or changes it before creating it."""
    batch = Batch()
    # The most frequent kinds first: every row that the server writes passes through this loop.
    for save in saves:
        if isinstance(save, SaveEvent):
            event = save.event
            if event.seq in batch.events:
                raise Conflict(f"event {event.seq} is saved twice in one batch")
            batch.events[event.seq] = event
        elif isinstance(save, SaveJob):
            _add_job(batch, save)
        elif isinstance(save, SaveRun):
            _add_run(batch, save)
        elif isinstance(save, SaveOverrides):
            batch.overrides[save.overrides.node] = save.overrides
        elif isinstance(save, SaveAudit):
            batch.audits.append(save.entry)
        elif isinstance(save, SavePeriodic):
            batch.periodics[save.periodic.name] = save
        elif isinstance(save, SaveReservation):
            batch.reservations[save.reservation.name] = save
        elif isinstance(save, SaveNodeOrder):
            batch.node_orders[save.order.name] = save
        elif isinstance(save, SaveUsage):
            batch.usage |= {(row.path, row.resource, row.start_ms): row for row in save.rows}
        elif isinstance(save, SaveValue):
            batch.notes[save.name] = save.body
        elif isinstance(save, SaveKey):
            if save.key in batch.keys:
                raise Conflict(f"key {save.key!r} is saved twice in one batch")
            batch.keys[save.key] = save
        else:
            raise TypeError(f"{type(save).__name__} cannot be saved")
    return batch


def keep_spec(old: Job, new: Job) -> Job:
    """`new` with the spec of its creation: later saves never change it."""
    return new if new.spec is old.spec else structs.replace(new, spec=old.spec)


def keep_decision(old: Run, new: Run) -> Run:
    """`new` with the decision of its creation."""
    return new if new.decision is old.decision else structs.replace(new, decision=old.decision)


def _add_job(batch: Batch, save: SaveJob) -> None:
    job = save.job
    if save.new:
        if job.id in batch.new_jobs or job.id in batch.jobs:
            raise Conflict(f"job {job.id} is created after it was saved")
        batch.new_jobs[job.id] = job
    elif job.id in batch.new_jobs:
        batch.new_jobs[job.id] = keep_spec(batch.new_jobs[job.id], job)
    else:
        batch.jobs[job.id] = job


def _add_run(batch: Batch, save: SaveRun) -> None:
    run = save.run
    if save.new:
        if run.id != run_id(run.job, run.member, run.attempt):
            raise InvalidInput(f"run {run.id!r} is not named after its job, member and attempt")
        if run.id in batch.new_runs or run.id in batch.runs:
            raise Conflict(f"run {run.id} is created after it was saved")
        batch.new_runs[run.id] = run
    elif run.id in batch.new_runs:
        batch.new_runs[run.id] = keep_decision(batch.new_runs[run.id], run)
    else:
        batch.runs[run.id] = run
