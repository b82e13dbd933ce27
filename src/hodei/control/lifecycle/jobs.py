"""The lifecycle of jobs after placement: what observations of runs mean, when an attempt ends, and what follows.

An attempt is concluded when its last run has ended, from the states of its runs alone, so that a crash at any moment
leads to the same result. The first failure of a member stops its siblings, unless the gang goes on without it (see
`control.lifecycle.gangs`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

from msgspec import structs

from hodei.control.admission.escalation import Escalations
from hodei.control.lifecycle.gangs import Gangs
from hodei.control.lifecycle.retry import Backoff, RetryPolicy
from hodei.control.lifecycle.runs import (
    NEVER_STARTED,
    NOT_REACHED_RUN,
    START_FAILED,
    clamp_time,
    format_nodes,
    gang_action,
    is_missing,
    late_detail,
    latest_runs,
    lost_together,
    place_of,
    stop_order,
)
from hodei.control.state import ClusterState
from hodei.model.effects import Forget
from hodei.model.facts import RunObserved
from hodei.model.job import RUN_ENDED, Job, Run, RunState
from hodei.model.outcome import StopCode, StopReason, failure_class, job_code_of_run, may_retry

# Slurm and PBS report times in whole seconds.
_ROUNDING_MS = 2000
# A per-node job goes on after these: each stopped member starts again, and no other.
_STOPS_MEMBERS: tuple[StopCode, ...] = ("preempted", "reclaimed", "cleared", "outstayed", "node_reclaimed")

# How an attempt ended, see `JobLifecycle._ending`; `_CONCLUSIONS` has what follows.
Ending = Literal[
    "cancelled", "moved", "refused", "not_reached", "start_failed", "lost", "failed", "restarts", "succeeded"
]
_FAILED: dict[str, Ending] = {"permanent": "refused", NOT_REACHED_RUN: "not_reached", START_FAILED: "start_failed"}
# The reason code with which a job is queued again after a stop.
_CODE_AFTER_STOP: dict[StopCode, str] = {
    "suspended": "RESUMED",
    "migrated": "MIGRATED",
    "drained": "DRAINED",
    "tainted": "TAINT_EVICTED",
    "preempted": "PREEMPTED",
    "reclaimed": "PREEMPTED",
    "overran": "OVERRUN",
    "cleared": "RESERVATION_STARTED",
    "outstayed": "RESERVATION_ENDED",
    "node_reclaimed": "NODE_RECLAIMED",
}


class JobLifecycle:
    def __init__(self, cluster: ClusterState, retry: RetryPolicy, gangs: Gangs, escalations: Escalations) -> None:
        self._cluster, self._signals = cluster, cluster.signals
        self._retry, self._gangs, self._escalations = retry, gangs, escalations

    def take_settings(self, other: JobLifecycle) -> None:
        self._retry = other._retry

    def observe(self, run: Run, fact: RunObserved, now_ms: int) -> None:
        """Apply an observation of a run. Outdated and repeated ones change nothing; a repeated end is forgotten."""
        if run.state in RUN_ENDED:
            if fact.state in RUN_ENDED:
                self._cluster.act(Forget(run.id, run.backend))
            return
        if fact.checkpoint_ms > run.checkpoint_ms:
            run = self._cluster.change_run(run, checkpoint_ms=fact.checkpoint_ms)
            for listener in self._signals.checkpoint_saved:
                listener(run.job)
        if fact.health and fact.health != run.health:
            run = self._cluster.change_run(run, health=fact.health)
            self._cluster.emit(
                f"run.{'healthy' if fact.health == 'ok' else 'unhealthy'}", now_ms, job=run.job, run=run.id
            )
        if fact.checkpoint_error:
            self._cluster.emit(
                "run.checkpoint_failed", now_ms, job=run.job, run=run.id, node=run.node, reason=fact.checkpoint_error
            )
        if run.state == "placed" and fact.state not in ("placed", "lost") and fact.reason_code not in NEVER_STARTED:
            # Also if its end is the first observation: it has run.
            started_ms = clamp_time(fact.started_ms or fact.at_ms, run.placed_ms, now_ms)
            run = self._cluster.change_run(run, to="running", started_ms=started_ms)
            job = self._cluster.jobs[run.job]
            if job.state == "scheduled":
                self._cluster.change_job(job, now_ms, to="running", started_ms=started_ms)
                when = late_detail("started_at", started_ms, now_ms)
                self._cluster.emit("job.started", now_ms, job=job.id, run=run.id, node=run.node, **when)
        if fact.state in RUN_ENDED:
            # A run with a stop order has stopped, however it ended, unless it succeeded first. A run that stopped
            # without an order has failed.
            state: RunState = fact.state
            if state in ("failed", "stopped"):
                state = "stopped" if run.stop_reason else "failed"
            self._end(run, state, now_ms, fact)
            self._cluster.act(Forget(run.id, run.backend))

    def run_lost(self, run: Run, now_ms: int, reason: str) -> None:
        self._end(run, "lost", now_ms, RunObserved(run.id, "lost", now_ms, reason_code="lost", reason=reason))

    def run_reclaimed(self, run: Run, now_ms: int) -> None:
        """Its provider has taken back the node: the run has stopped, and the job is queued again without a failure."""
        self.evict(run, StopReason("node_reclaimed", run.node), now_ms)
        stopped = self._cluster.run(run.id)
        if stopped is not None and stopped.state not in RUN_ENDED:
            self._end(stopped, "stopped", now_ms, RunObserved(run.id, "stopped", now_ms))

    def hold_capacity(self, run: Run) -> None:
        """A restored run holds its capacity even before its node has joined again."""
        self._cluster.table.place_by_name(*place_of(self._cluster.jobs[run.job].spec, run))

    def _end(self, run: Run, state: RunState, now_ms: int, fact: RunObserved) -> None:
        cluster = self._cluster
        job = cluster.jobs[run.job]
        cluster.table.release_by_name(*place_of(job.spec, run))
        stop_reason = run.stop_reason
        finished_ms = clamp_time(fact.at_ms, run.since_ms, now_ms)
        if finished_ms != fact.at_ms:
            fact = structs.replace(fact, at_ms=finished_ms)
        if fact.reason_code == "timeout":
            fact = _normalize_timeout(job, run, fact)
        if stop_reason is None and state in ("failed", "lost"):
            stop_reason = self._gangs.after_end(job, run, state, fact)
        run = cluster.change_run(
            run,
            to=state,
            stop_reason=stop_reason,
            finished_ms=finished_ms,
            exit_code=fact.exit_code,
            reason_code="permanent" if fact.permanent else fact.reason_code,
            reason=fact.reason,
            usage=fact.usage,
        )
        cluster.emit(
            "run.ended", now_ms, job=job.id, run=run.id, node=run.node, state=state, exit_code=fact.exit_code,
            reason_code=fact.reason_code, **late_detail("finished_at", finished_ms, now_ms),
        )  # fmt: skip
        self._cluster.wake("run_ended")
        if gang_action(run):
            self._continue_gang(job, run, now_ms)
        elif state in ("failed", "lost"):
            self.stop_all(job, StopReason("sibling_ended"), now_ms)
        elif job.spec.gang.per_node:
            self._gangs.update(job, now_ms)
        self.conclude(cluster.jobs[run.job], now_ms)

    def _continue_gang(self, job: Job, run: Run, now_ms: int) -> None:
        """The gang goes on: the member is replaced, which counts like a retry of the job, or left out."""
        failures, losses, pause_ms = job.failures, job.losses, 0
        if gang_action(run) == "repair":
            if run.reason_code == NOT_REACHED_RUN:
                pause_ms = self._retry.failed_start.pause_ms(job.id, 1)
            elif run.state == "failed" and run.reason_code != START_FAILED:
                failures += 1
                pause_ms = self._retry.failed_run.pause_ms(job.id, failures)
            elif run.state in ("failed", "lost"):
                siblings = [other for other in self._cluster.runs[job.id].values() if other.id != run.id]
                losses += not any(lost_together(other, run.finished_ms) for other in siblings)
        if (failures, losses) != (job.failures, job.losses):
            not_before = now_ms + pause_ms if pause_ms else job.not_before_ms
            job = self._cluster.change_job(job, now_ms, failures=failures, losses=losses, not_before_ms=not_before)
        if run.state != "succeeded":
            reason = run.stop_reason.text if run.stop_reason is not None else ""
            self._cluster.emit("gang.member_lost", now_ms, job=job.id, run=run.id, node=run.node, reason=reason)
            places = format_nodes({other.node for other in self._cluster.live_runs(job.id)})
            if places and places != job.nodes:
                job = self._cluster.change_job(job, now_ms, nodes=places)
        self._gangs.update(job, now_ms, pause_ms=pause_ms)

    def stop_all(self, job: Job, reason: StopReason, now_ms: int) -> None:
        if job.spec.gang.per_node and reason.code in _STOPS_MEMBERS:
            for run in self._cluster.live_runs(job.id):
                self.shrink(run, reason)
            return
        for run in self._cluster.live_runs(job.id):
            # A cancel interrupts a checkpoint that a stopping run may be taking.
            interrupts = reason.code == "cancelled" and job.spec.checkpoint.has_hook
            staying = run.stop_reason is None or gang_action(run) == "repair"
            if staying or interrupts or run.id in self._cluster.withdrawn_stops:
                self._stop(job, run, reason)
        self._gangs.release(job.id)

    def split(self, job: Job, at_ms: int, now_ms: int) -> None:
        """End a placed gang whose members continue as jobs of their own. No run is stopped: none has started."""
        for run in self._cluster.live_runs(job.id):
            self._cluster.table.release_by_name(*place_of(job.spec, run))
            self._cluster.change_run(run, to="stopped", finished_ms=at_ms)
        self._cluster.wake("run_ended")
        self.finish(job, "cancelled", now_ms, "GANG_SPLIT", "its members continue as jobs of their own")

    def shrink(self, run: Run, reason: StopReason) -> None:
        """Stop one member; its gang goes on without it."""
        if run.stop_reason is None or run.id in self._cluster.withdrawn_stops:
            self._stop(self._cluster.jobs[run.job], run, structs.replace(reason, gang="shrink"))

    def evict(self, run: Run, reason: StopReason, now_ms: int) -> None:
        """Stop a run because of its node: alone if its gang replaces members, else with the whole gang."""
        job = self._cluster.jobs[run.job]
        if job.spec.gang.per_node:
            self.shrink(run, reason)
        elif job.spec.gang.on_failure != "repair" or job.spec.size == 1:
            self.stop_all(job, reason, now_ms)
        elif run.stop_reason is None or run.id in self._cluster.withdrawn_stops:
            self._stop(job, run, structs.replace(reason, gang="repair"))

    def check_assembly(self, job: Job, now_ms: int) -> None:
        """A gang whose members do not all run in time releases its capacity instead of holding it forever."""
        timeout_ms = job.spec.gang.assembly_timeout_ms
        live = self._cluster.live_runs(job.id)
        late = [run for run in live if run.state == "placed" and run.placed_ms + timeout_ms <= now_ms]
        if late and timeout_ms:
            names = ", ".join(f"member {run.member} on {run.node}" for run in late[:3])
            detail = f"not all members ran within {timeout_ms / 1000:g} s: {names}"
            self.stop_all(job, StopReason("assembly", detail), now_ms)

    def restart_gang(self, job: Job, why: str, now_ms: int) -> None:
        """A gang that cannot be repaired starts again: as soon as all of its runs have stopped."""
        if self._cluster.live_runs(job.id):
            self.stop_all(job, StopReason("assembly", why), now_ms)
        else:
            self._gangs.release(job.id)
            self._after_loss(job, "ASSEMBLY_TIMEOUT", why, now_ms)

    def _stop(self, job: Job, run: Run, reason: StopReason) -> None:
        if run.stop_reason != reason:
            self._cluster.change_run(run, stop_reason=reason)
            self._cluster.act(stop_order(job, run, reason))

    def conclude(self, job: Job, now_ms: int) -> None:
        """If no run of the attempt is live any more, the job ends or starts again."""
        runs = self._cluster.runs.get(job.id, {}).values()
        if not runs or any(run.state not in RUN_ENDED for run in runs):
            return
        if job.spec.gang.per_node and not self._all_were_stopped(job):
            self._gangs.update(job, now_ms)  # it ends when every matching node has had its run
            return
        if len(runs) == 1 and not (job.cancel_requested or job.requeue_requested or job.spec.restart == "always"):
            (only,) = runs
            if only.state == "succeeded":  # a short cut for the most frequent case
                self.finish(job, "succeeded", now_ms, "", "", exit_code=0)
                return
        ending = self._ending(job, runs)
        if ending is not None:
            _CONCLUSIONS[ending[0]](self, job, ending[1], now_ms)

    @staticmethod
    def _ending(job: Job, all_runs: Collection[Run]) -> tuple[Ending, Run | None] | None:
        """How the attempt ended and the run that decided it; None while members are being replaced. A request of a user
        comes first, then the first run that failed, then the first that was lost, then the first that was moved."""
        latest = all_runs if len(all_runs) == 1 else latest_runs(all_runs).values()
        missing = any(is_missing(run) for run in latest)
        runs = [run for run in latest if run.state == "succeeded" or not gang_action(run)]
        runs.sort(key=lambda run: (run.finished_ms, run.member))
        failed = next((run for run in runs if run.state == "failed"), None)
        lost = next((run for run in runs if run.state == "lost"), None)
        moved = [run for run in runs if run.stop_reason is not None and run.stop_reason.moves_job]
        # With members missing, a gang is not done even if others succeeded before they stopped: it starts again.
        mover = next((run for run in moved if run.state == "stopped"), moved[0] if missing and moved else None)
        if job.cancel_requested:
            return "cancelled", next((run for run in runs if run.exit_code is not None), None)
        if job.requeue_requested:
            return "moved", mover
        if failed is not None:
            return _FAILED.get(failed.reason_code, "failed"), failed
        if lost is not None:
            return "lost", lost
        if mover is not None or (missing and job.suspend_requested):
            return "moved", mover
        if missing:
            return None
        return ("restarts" if job.spec.restart == "always" else "succeeded"), None

    def _all_were_stopped(self, job: Job) -> bool:
        """Of a per-node job: whether it was stopped as a whole."""
        if job.stop_requested:
            return True
        stops = [run.stop_reason for run in self._cluster.runs[job.id].values() if run.stop_reason is not None]
        return any(stop.moves_job for stop in stops)

    def _after_loss(self, job: Job, code: str, why: str, now_ms: int) -> None:
        losses, wanted = job.losses + 1, may_retry(job.spec.retry_on, failure_class(code))
        if job.spec.restart == "never" or not wanted or losses > self._retry.max_losses:
            self.finish(job, "failed", now_ms, code, why, losses=losses)
        else:
            pause = self._pause_ms(self._retry.failed_start, job, losses)
            self.requeue(job, now_ms, code, why, losses=losses, pause_ms=pause)

    def _start_failed(self, job: Job, run: Run | None, now_ms: int) -> None:
        self._after_loss(job, "START_FAILED", run.reason if run is not None else "", now_ms)

    def _lost(self, job: Job, run: Run | None, now_ms: int) -> None:
        self._after_loss(job, "LOST", run.reason if run is not None else "", now_ms)

    def _not_reached(self, job: Job, run: Run | None, now_ms: int) -> None:
        """Its backend was unreachable. Nothing started, so nothing is counted, unless other members of the gang ran."""
        why = run.reason if run is not None else ""
        if job.started_ms and job.spec.restart == "never":
            self._after_loss(job, "START_FAILED", why, now_ms)
        else:
            pause = self._pause_ms(self._retry.failed_start, job, 1)
            self.requeue(job, now_ms, "NOT_REACHED", why, pause_ms=pause)

    def _pause_ms(self, backoff: Backoff, job: Job, tries: int) -> int:
        """Gangs pause longer: they need more free capacity at once."""
        return backoff.pause_ms(job.id, tries) * (self._retry.gang_factor if job.spec.size > 1 else 1)

    def _after_move(self, job: Job, moved: Run | None, now_ms: int) -> None:
        if job.suspend_requested:
            self.requeue(job, now_ms, "SUSPENDED", "suspended by a user")
            return
        if job.requeue_requested or moved is None or moved.stop_reason is None:
            self.requeue(job, now_ms, "REQUEUED", "requeued by a user")
            return
        stop = moved.stop_reason
        code, text = _CODE_AFTER_STOP.get(stop.code, "REQUEUED"), stop.text
        preemptions, last_preemption = job.preemptions, ""
        match stop.code:
            case "assembly":
                self._after_loss(job, "ASSEMBLY_TIMEOUT", stop.detail, now_ms)
                return
            case "overran" if not job.spec.checkpoint.has_hook:
                # As after a timeout: its work is lost, and the next run would take as long.
                self._fail(job, code, text, moved.exit_code, now_ms)
                return
            case "preempted" | "reclaimed":
                preemptions, last_preemption = preemptions + 1, stop.text
            case "suspended":
                text = "suspended by a user, and resumed before it had stopped"
            case "migrated":
                text = f"moved {stop.detail} by a user"
            case "drained":
                text = f"moved off node {stop.detail or moved.node}, which is being drained"
            case "tainted":
                text = f"node {moved.node} has a NoExecute taint that it does not tolerate"
            case "requeued":
                text = f"moved off node {moved.node}"
        self.requeue(job, now_ms, code, text, preemptions=preemptions, last_preemption=last_preemption)

    def _after_failure(self, job: Job, failed: Run | None, now_ms: int) -> None:
        assert failed is not None
        code = job_code_of_run(failed.reason_code)
        text = failed.reason or f"member {failed.member} exited with {failed.exit_code}"
        self._fail(job, code, text, failed.exit_code, now_ms)

    def _fail(self, job: Job, code: str, text: str, exit_code: int | None, now_ms: int) -> None:
        """Retry if it has retries left, else fail."""
        spec, failures = job.spec, job.failures + 1
        wanted = may_retry(spec.retry_on, failure_class(code))
        if wanted and (spec.restart == "always" or (spec.restart == "on_failure" and failures <= spec.retries)):
            pause = self._pause_ms(self._retry.failed_run, job, failures)
            self.requeue(job, now_ms, code, f"{text}; retry {failures}", failures=failures, pause_ms=pause)
        else:
            self.finish(job, "failed", now_ms, code, text, exit_code=exit_code, failures=failures)

    def finish(
        self,
        job: Job,
        state: Literal["succeeded", "failed", "cancelled"],
        now_ms: int,
        code: str,
        reason: str,
        *,
        exit_code: int | None = None,
        failures: int | None = None,
        losses: int | None = None,
    ) -> None:
        finished_ms = self._end_of_attempt(job, now_ms)
        ended = self._cluster.change_job(
            job, now_ms, to=state, reason_code=code, reason=reason, finished_ms=finished_ms, exit_code=exit_code,
            failures=job.failures if failures is None else failures, losses=job.losses if losses is None else losses,
            failure=failure_class(code) if state == "failed" else "", suspend_requested=False, move=None, last_preemption="",
        )  # fmt: skip
        self._gangs.release(job.id)
        self._cluster.emit(
            "job.ended", now_ms, job=job.id, state=state, exit_code=exit_code, reason_code=code,
            **late_detail("finished_at", finished_ms, now_ms),
        )  # fmt: skip
        self._cluster.wake("job_ended")
        for listener in self._signals.job_ended:
            listener(ended)

    def _end_of_attempt(self, job: Job, now_ms: int) -> int:
        """The end of its last run, which may be reported late; now, without runs or with members to replace."""
        runs = self._cluster.runs.get(job.id, {}).values()
        if not runs or any(run.state not in RUN_ENDED for run in runs):
            return now_ms
        if len(runs) > 1 and any(is_missing(run) for run in latest_runs(runs).values()):
            return now_ms
        return max(run.finished_ms for run in runs) or now_ms

    def requeue(
        self,
        job: Job,
        now_ms: int,
        code: str,
        reason: str,
        *,
        failures: int | None = None,
        losses: int | None = None,
        preemptions: int | None = None,
        last_preemption: str = "",
        pause_ms: int = 0,
        fresh: bool = False,
    ) -> None:
        """Queue the job for a new attempt, or hold it if a suspend was requested. `fresh`: a user requested the new
        attempt, so that past failures do not count any more."""
        suspended = job.suspend_requested and not fresh
        if not fresh and (code == "NOT_REACHED" or failure_class(code) in ("backend_error", "node_lost")):
            runs = self._cluster.runs.get(job.id, {}).values()
            failed_on = {run.backend for run in runs if run.state in ("failed", "lost")}
            job = self._escalations.backend_failed(job, failed_on, now_ms)
        if suspended and code != "SUSPENDED":
            code, reason = "SUSPENDED", f"suspended by a user; before that {reason}"
        job = self._cluster.change_job(
            job, now_ms, to="held" if suspended else "pending", reason_code=code, reason=reason,
            requeue_requested=False, cancel_requested=False, last_preemption="" if suspended else last_preemption,
            failures=0 if fresh else (job.failures if failures is None else failures),
            losses=0 if fresh else (job.losses if losses is None else losses),
            preemptions=0 if fresh else (job.preemptions if preemptions is None else preemptions),
            not_before_ms=now_ms + pause_ms if pause_ms else 0,
            queued_ms=now_ms if job.attempt or not job.spec.after.of else 0, started_ms=0, finished_ms=0,
            exit_code=None, suspend_requested=False, failure="" if fresh else failure_class(code) or job.failure, nodes="",
            move=None if suspended or fresh else job.move,
        )  # fmt: skip
        self._gangs.release(job.id)
        self._cluster.drop_runs(job.id)
        if suspended:
            self._cluster.emit("job.suspended", now_ms, job=job.id, reason=reason)
            for listener in self._signals.job_suspended:
                listener(job)
            return
        self._cluster.emit("job.requeued", now_ms, job=job.id, reason_code=code, reason=reason)
        self._cluster.enqueue(job, now_ms)


def _normalize_timeout(job: Job, run: Run, fact: RunObserved) -> RunObserved:
    """One text for timeouts on every backend. A shorter run hit a limit of the backend itself, and keeps its text."""
    limit_ms = job.spec.timeout_ms
    if not limit_ms or fact.at_ms - run.since_ms < limit_ms - _ROUNDING_MS:
        return fact
    return structs.replace(fact, reason=f"it ran longer than its timeout of {limit_ms / 1000:g}s")


def _cancelled(lifecycle: JobLifecycle, job: Job, run: Run | None, now_ms: int) -> None:
    exit_code = run.exit_code if run is not None else None
    lifecycle.finish(job, "cancelled", now_ms, "CANCELLED", job.reason, exit_code=exit_code)


def _refused(lifecycle: JobLifecycle, job: Job, run: Run | None, now_ms: int) -> None:
    lifecycle.finish(job, "failed", now_ms, "BACKEND_REFUSED", run.reason if run is not None else "")


def _restarts(lifecycle: JobLifecycle, job: Job, run: Run | None, now_ms: int) -> None:
    lifecycle.requeue(job, now_ms, "RESTARTED", "restarted after success (restart: always)", pause_ms=1000)


def _succeeded(lifecycle: JobLifecycle, job: Job, run: Run | None, now_ms: int) -> None:
    lifecycle.finish(job, "succeeded", now_ms, "", "", exit_code=0)


# What follows from how an attempt ended.
_CONCLUSIONS: dict[Ending, Callable[[JobLifecycle, Job, Run | None, int], None]] = {
    "cancelled": _cancelled,
    "moved": JobLifecycle._after_move,
    "refused": _refused,
    "not_reached": JobLifecycle._not_reached,
    "start_failed": JobLifecycle._start_failed,
    "lost": JobLifecycle._lost,
    "failed": JobLifecycle._after_failure,
    "restarts": _restarts,
    "succeeded": _succeeded,
}
