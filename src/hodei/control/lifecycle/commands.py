"""User commands on jobs: cancel, hold, release, suspend, resume, checkpoint, migrate, requeue.

A command that does not apply any more changes nothing; `runtime` reports that to the user before it becomes a fact.
"""

from __future__ import annotations

from msgspec import structs

from hodei.control.lifecycle.dependencies import Dependencies
from hodei.control.lifecycle.jobs import JobLifecycle
from hodei.control.lifecycle.nodes import Relocation
from hodei.control.state import ClusterState
from hodei.model.effects import TakeCheckpoint
from hodei.model.facts import (
    Fact,
    JobCancelled,
    JobCheckpointRequested,
    JobHeld,
    JobMigrated,
    JobReleased,
    JobRequeued,
    JobSuspended,
    JobWithdrawn,
)
from hodei.model.ids import JobId
from hodei.model.job import JOB_ENDED, NOT_ESCALATED
from hodei.model.outcome import StopReason

# The facts that `UserCommands` applies.
COMMANDS = (
    JobCancelled,
    JobHeld,
    JobReleased,
    JobSuspended,
    JobMigrated,
    JobCheckpointRequested,
    JobRequeued,
    JobWithdrawn,
)


class UserCommands:
    def __init__(
        self, cluster: ClusterState, lifecycle: JobLifecycle, relocation: Relocation, dependencies: Dependencies
    ) -> None:
        self._cluster, self._lifecycle = cluster, lifecycle
        self._relocation, self._dependencies = relocation, dependencies

    def apply(self, fact: Fact, now_ms: int) -> None:
        match fact:
            case JobCancelled():
                self._cancel(fact, now_ms)
            case JobHeld(job=id):
                self._hold(id, now_ms, "HELD", "held by a user", "job.held")
            case JobReleased(job=id):
                self._release(id, now_ms)
            case JobSuspended(job=id):
                self._suspend(id, now_ms)
            case JobCheckpointRequested(job=id):
                self._checkpoint(id, now_ms)
            case JobMigrated():
                self._relocation.migrate(fact, now_ms)
            case JobRequeued():
                self._requeue(fact, now_ms)
            case JobWithdrawn(job=id):
                job = self._cluster.jobs.get(id)
                if job is not None and job.state in ("pending", "held"):
                    self._cluster.dequeue(job)
                    self._lifecycle.finish(job, "cancelled", now_ms, "WITHDRAWN", fact.reason)

    def _requeue(self, fact: JobRequeued, now_ms: int) -> None:
        job = self._cluster.jobs.get(fact.job)
        if job is not None:
            if job.state in ("scheduled", "running") and not job.cancel_requested:
                self._cluster.emit("job.requeue_requested", now_ms, job=job.id)
                job = self._cluster.change_job(job, now_ms, requeue_requested=True, suspend_requested=False)
                self._lifecycle.stop_all(job, StopReason("requeued"), now_ms)
                self._lifecycle.conclude(job, now_ms)
        elif fact.record is not None and fact.record.state in JOB_ENDED:
            self._dependencies.note(fact.dependency_statuses)
            # The job starts as the user submitted it, without escalations.
            submitted = structs.replace(fact.record, escalation_state=NOT_ESCALATED)
            self._lifecycle.requeue(submitted, now_ms, "REQUEUED", "requeued by a user", fresh=True)

    def _cancel(self, fact: JobCancelled, now_ms: int) -> None:
        job = self._cluster.jobs.get(fact.job)
        if job is None or job.cancel_requested:
            return
        reason = fact.reason or "cancelled by a user"
        self._cluster.emit("job.cancel_requested", now_ms, job=job.id, reason=reason)
        if job.state in ("pending", "held"):
            self._cluster.dequeue(job)
            self._lifecycle.finish(job, "cancelled", now_ms, "CANCELLED", reason)
            return
        job = self._cluster.change_job(job, now_ms, cancel_requested=True, reason_code="CANCELLED", reason=reason)
        self._lifecycle.stop_all(job, StopReason("cancelled"), now_ms)
        self._lifecycle.conclude(job, now_ms)

    def _hold(self, id: JobId, now_ms: int, code: str, reason: str, event: str) -> None:
        job = self._cluster.jobs.get(id)
        if job is not None and job.state == "pending":
            self._cluster.dequeue(job)
            # A held job is not being moved any more: after its release it may go anywhere.
            self._cluster.change_job(job, now_ms, to="held", reason_code=code, reason=reason, move=None)
            self._cluster.emit(event, now_ms, job=id)

    def _release(self, id: JobId, now_ms: int) -> None:
        """Release a held job; one that is still stopping for a suspend is queued again when it has stopped."""
        cluster, job = self._cluster, self._cluster.jobs.get(id)
        if job is None:
            return
        if job.suspend_requested:
            cluster.change_job(job, now_ms, suspend_requested=False)
            cluster.emit("job.resumed", now_ms, job=id)
        if job.state == "held":
            queued_ms = 0 if id in self._dependencies else now_ms
            event = "job.resumed" if job.reason_code == "SUSPENDED" else "job.released"
            job = cluster.change_job(job, now_ms, to="pending", reason_code="", reason="", queued_ms=queued_ms)
            cluster.emit(event, now_ms, job=id)
            cluster.enqueue(job, now_ms)

    def _suspend(self, id: JobId, now_ms: int) -> None:
        """Hold a pending job at once, a running one when its runs have saved their work and stopped."""
        cluster, job = self._cluster, self._cluster.jobs.get(id)
        if job is None or job.cancel_requested or job.suspend_requested:
            return
        if job.state == "pending":
            self._hold(id, now_ms, "SUSPENDED", "suspended by a user", "job.suspended")
        elif job.state in ("scheduled", "running"):
            cluster.emit("job.suspend_requested", now_ms, job=id)
            job = cluster.change_job(job, now_ms, suspend_requested=True, requeue_requested=False)
            self._lifecycle.stop_all(job, StopReason("suspended"), now_ms)
            self._lifecycle.conclude(job, now_ms)

    def _checkpoint(self, id: JobId, now_ms: int) -> None:
        job = self._cluster.jobs.get(id)
        if job is None or not job.spec.checkpoint.has_hook:
            return
        runs = [run for run in self._cluster.live_runs(id) if run.state == "running" and not run.stop_reason]
        for run in runs:
            self._cluster.act(TakeCheckpoint(run.id, run.backend, job.spec.checkpoint))
        if runs:
            self._cluster.emit("job.checkpoint_requested", now_ms, job=id, runs=len(runs))
