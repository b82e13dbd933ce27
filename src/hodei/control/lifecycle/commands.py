"""What people ask of jobs: end (cancel), wait (hold), let go for a while (suspend), go on again, save your work, move.

A job that no longer can is left as it is; whoever asks is told so by `runtime`, before it becomes a fact. And what is
foretold of jobs, for the rules that ask for it.
"""

from __future__ import annotations

from collections.abc import Callable

from hodei.control.lifecycle.jobs import JobLifecycle
from hodei.control.lifecycle.relocation import Relocation
from hodei.control.state import ClusterState
from hodei.model.effects import TakeCheckpoint
from hodei.model.facts import (
    Fact,
    JobCancelled,
    JobCheckpointRequested,
    JobHeld,
    JobMigrated,
    JobRequeued,
    JobSuspended,
    StartsForecast,
)
from hodei.model.ids import JobId
from hodei.model.job import JOB_ENDED, Job
from hodei.model.outcome import StopReason

SUSPENDED = "suspended by a user"
# The facts that `UserCommands` learns.
ASKED = (JobCancelled, JobHeld, JobSuspended, JobMigrated, JobCheckpointRequested, JobRequeued, StartsForecast)


class UserCommands:
    """`afresh`: a job that had ended, as it is when it starts again."""

    def __init__(
        self,
        cluster: ClusterState,
        lifecycle: JobLifecycle,
        moving: Relocation,
        dequeue: Callable[[Job], None],
        afresh: Callable[[JobRequeued, Job], Job],
    ) -> None:
        self._cluster, self._lifecycle, self._moving = cluster, lifecycle, moving
        self._dequeue, self._afresh = dequeue, afresh

    def learn(self, fact: Fact, now_ms: int) -> None:
        match fact:
            case JobCancelled():
                self._cancel(fact, now_ms)
            case JobHeld(job=id):
                self._hold(id, now_ms, "HELD", "held by a user")
            case JobSuspended(job=id):
                self._suspend(id, now_ms)
            case JobCheckpointRequested(job=id):
                self._save_work(id, now_ms)
            case JobMigrated():
                self._moving.migrate(fact, now_ms)
            case JobRequeued():
                self._requeue(fact, now_ms)
            case StartsForecast(starts=starts):
                self._cluster.availability.forecasts = starts

    def _requeue(self, fact: JobRequeued, now_ms: int) -> None:
        job = self._cluster.jobs.get(fact.job)
        if job is not None:
            if job.state in ("scheduled", "running") and not job.cancel_requested:
                self._cluster.emit("job.requeue_requested", now_ms, job=job.id)
                job = self._cluster.change_job(job, now_ms, requeue_requested=True, suspend_requested=False)
                self._lifecycle.stop_all(job, StopReason("requeued"), now_ms)
                self._lifecycle.conclude(job, now_ms)
        elif fact.record is not None and fact.record.state in JOB_ENDED:
            afresh = self._afresh(fact, fact.record)
            self._lifecycle.again(afresh, now_ms, "REQUEUED", "requeued by a user", fresh=True)

    def _cancel(self, fact: JobCancelled, now_ms: int) -> None:
        job = self._cluster.jobs.get(fact.job)
        if job is None or job.cancel_requested:
            return
        reason = fact.reason or "cancelled by a user"
        self._cluster.emit("job.cancel_requested", now_ms, job=job.id, reason=reason)
        if job.state in ("pending", "held"):
            self._dequeue(job)
            self._lifecycle.finish(job, "cancelled", now_ms, "CANCELLED", reason)
            return
        job = self._cluster.change_job(job, now_ms, cancel_requested=True, reason_code="CANCELLED", reason=reason)
        self._lifecycle.stop_all(job, StopReason("cancelled"), now_ms)
        self._lifecycle.conclude(job, now_ms)

    def _hold(self, id: JobId, now_ms: int, code: str, reason: str) -> None:
        job = self._cluster.jobs.get(id)
        if job is not None and job.state == "pending":
            self._dequeue(job)
            # Whoever lets it go on lets it go anywhere: that it was being moved is over.
            self._cluster.change_job(job, now_ms, to="held", reason_code=code, reason=reason, move="")
            self._cluster.emit("job.held" if code == "HELD" else "job.suspended", now_ms, job=id)

    def _suspend(self, id: JobId, now_ms: int) -> None:
        """A waiting job is held at once; one that runs when its runs have saved their work and gone."""
        cluster, job = self._cluster, self._cluster.jobs.get(id)
        if job is None or job.cancel_requested or job.suspend_requested:
            return
        if job.state == "pending":
            self._hold(id, now_ms, "SUSPENDED", SUSPENDED)
        elif job.state in ("scheduled", "running"):
            cluster.emit("job.suspend_requested", now_ms, job=id)
            job = cluster.change_job(job, now_ms, suspend_requested=True, requeue_requested=False)
            self._lifecycle.stop_all(job, StopReason("suspended"), now_ms)
            self._lifecycle.conclude(job, now_ms)

    def resume(self, id: JobId, now_ms: int) -> None:
        """One that is still on its way out comes straight back into the line when it has gone."""
        job = self._cluster.jobs.get(id)
        if job is not None and job.suspend_requested:
            self._cluster.change_job(job, now_ms, suspend_requested=False)
            self._cluster.emit("job.released", now_ms, job=id)

    def _save_work(self, id: JobId, now_ms: int) -> None:
        job = self._cluster.jobs.get(id)
        if job is None or not job.spec.checkpoint.has_hook:
            return
        runs = [run for run in self._cluster.live_runs(id) if run.state == "running" and not run.stop_reason]
        for run in runs:
            self._cluster.act(TakeCheckpoint(run.id, run.backend, job.spec.checkpoint))
        if runs:
            self._cluster.emit("job.checkpoint_requested", now_ms, job=id, runs=len(runs))
