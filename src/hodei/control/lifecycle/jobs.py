"""The life of runs and jobs after placing: what observations mean, when a job is over, when it starts again.

A job is concluded when the last run of its attempt has ended, from the states of those runs alone, so that a crash at any
moment leads to the same end. The first failure of a member stops its siblings, unless the gang can live with it
(see `control.lifecycle.gangs`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

from msgspec import structs

from hodei.control.lifecycle.gangs import (
    NEVER_BEGAN,
    NOT_REACHED_RUN,
    START_FAILED,
    Gangs,
    gang_goes_on,
    is_missing,
    latest,
    lost_together,
)
from hodei.control.lifecycle.retry import Backoff, RetryPolicy
from hodei.control.lifecycle.runs import nodes_of, stop_order
from hodei.control.state import ClusterState
from hodei.engine.points import Trigger
from hodei.engine.view import Member
from hodei.model.effects import Forget
from hodei.model.facts import RunObserved
from hodei.model.job import RUN_ENDED, Job, Run, RunState
from hodei.model.outcome import StopCode, StopReason, failure_class, job_code_of_run, may_retry
from hodei.model.resources import format_time

# ------------------------------------------------------------------------------------------ timestamps
# Times that are not now: those that lie ahead, and those that backends tell.


_OF_JOB = ("submitted_ms", "queued_ms", "scheduled_ms", "started_ms", "changed_ms")
_OF_RUN = ("placed_ms", "started_ms", "finished_ms", "checkpoint_ms")
# An event says when it really happened if we heard of it later than this.
_LATE_MS = 1000


def not_ahead(job: Job, now_ms: int) -> Job:
    """The job with no time of its past after `now_ms`; a pause before its next try is as long as it was meant to be."""
    if job.changed_ms <= now_ms and job.submitted_ms <= now_ms:
        return job  # nothing of it was written later than that
    changes = {name: now_ms for name in _OF_JOB if getattr(job, name) > now_ms}
    if job.not_before_ms > now_ms:
        changes["not_before_ms"] = now_ms + max(job.not_before_ms - max(job.changed_ms, now_ms), 0)
    return structs.replace(job, **changes)


def run_not_ahead(run: Run, now_ms: int) -> Run:
    changes = {name: now_ms for name in _OF_RUN if getattr(run, name) > now_ms}
    return structs.replace(run, **changes) if changes else run


def credible(at_ms: int, least_ms: int, now_ms: int) -> int:
    """What a backend says of a moment between `least_ms` and now. Clocks differ and are set; 0 or less is no moment at all,
    and then all that is known is that it was before now."""
    return max(min(at_ms, now_ms), least_ms) if at_ms > 0 else now_ms


def if_late(name: str, at_ms: int, now_ms: int) -> dict[str, str]:
    """For an event about something that we heard of late: when it was."""
    return {name: format_time(at_ms)} if now_ms - at_ms >= _LATE_MS else {}


# ----------------------------------------------------------------------------------------------------

# Slurm and PBS tell times in whole seconds.
_ROUNDING_MS = 2000
# Stops after which a job for every node goes on: each member that was stopped starts again, and no other.
_STOPS_MEMBERS: tuple[StopCode, ...] = ("preempted", "reclaimed", "cleared", "outstayed")

# How an attempt ended; see `JobLifecycle._ending`.
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
}


class JobLifecycle:
    """`backend_failed`: changes a job that is queued again because the backends of these names failed it."""

    def __init__(
        self,
        cluster: ClusterState,
        retry: RetryPolicy,
        gangs: Gangs,
        enqueue: Callable[[Job, int], None],
        wake: Callable[[Trigger], None],
        backend_failed: Callable[[Job, Collection[str], int], Job],
    ) -> None:
        self._cluster, self._signals = cluster, cluster.signals
        self._retry = retry
        self._gangs = gangs
        self._enqueue = enqueue
        self._wake = wake
        self._backend_failed = backend_failed

    def take_settings(self, other: JobLifecycle) -> None:
        self._retry = other._retry

    # ----------------------------------------------------------------------------------------- observations

    def observed(self, run: Run, fact: RunObserved, now_ms: int) -> None:
        """A backend's word about a run. Old news and repeats change nothing; a repeated end is only forgotten again."""
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
        if run.state == "placed" and fact.state not in ("placed", "lost") and fact.reason_code not in NEVER_BEGAN:
            # Also when its end is the first that we hear of it: it has run.
            started_ms = credible(fact.started_ms or fact.at_ms, run.placed_ms, now_ms)
            run = self._cluster.change_run(run, to="running", started_ms=started_ms)
            job = self._cluster.jobs[run.job]
            if job.state == "scheduled":
                self._cluster.change_job(job, now_ms, to="running", started_ms=started_ms)
                when = if_late("started_at", started_ms, now_ms)
                self._cluster.emit("job.started", now_ms, job=job.id, run=run.id, node=run.node, **when)
        if fact.state in RUN_ENDED:
            # A run that was told to stop has stopped, whichever way it went (one that made it first has made it);
            # one that was stopped by nobody here has failed.
            state: RunState = fact.state
            if state in ("failed", "stopped"):
                state = "stopped" if run.stop_reason else "failed"
            self._end(run, state, now_ms, fact)
            self._cluster.act(Forget(run.id, run.backend))

    def lost(self, run: Run, now_ms: int, reason: str) -> None:
        self._end(run, "lost", now_ms, RunObserved(run.id, "lost", now_ms, reason_code="lost", reason=reason))

    def hold_room(self, run: Run) -> None:
        """A restored run goes on holding its room, also before its node has joined again."""
        job = self._cluster.jobs[run.job].spec
        task = job.task_of(run.member)
        self._cluster.table.hold(run.node, task.request, Member(job, task), run.grant)

    def _end(self, run: Run, state: RunState, now_ms: int, fact: RunObserved) -> None:
        cluster = self._cluster
        job = cluster.jobs[run.job]
        task = job.spec.task_of(run.member)
        cluster.table.let_go(run.node, task.request, Member(job.spec, task), run.grant)
        stop_reason = run.stop_reason
        finished_ms = credible(fact.at_ms, run.started_ms or run.placed_ms, now_ms)
        if finished_ms != fact.at_ms:
            fact = structs.replace(fact, at_ms=finished_ms)
        if fact.reason_code == "timeout":
            fact = _in_our_words(job, run, fact)
        if stop_reason is None and state in ("failed", "lost"):
            stop_reason = self._gangs.mark_for(job, run, state, fact)
        run = cluster.change_run(
            run,
            to=state,
            stop_reason=stop_reason,
            finished_ms=finished_ms,
            exit_code=fact.exit_code,
            reason_code="permanent" if fact.permanent else fact.reason_code,
            reason=fact.reason,
        )
        cluster.emit(
            "run.ended", now_ms, job=job.id, run=run.id, node=run.node, state=state, exit_code=fact.exit_code,
            reason_code=fact.reason_code, **if_late("finished_at", finished_ms, now_ms),
        )  # fmt: skip
        self._wake("run_ended")
        if gang_goes_on(run):
            self._goes_on(job, run, now_ms)
        elif state in ("failed", "lost"):
            self.stop_all(job, StopReason("sibling_ended"), now_ms)
        elif job.spec.gang.per_node:
            self._gangs.look(job, now_ms)
        self.conclude(cluster.jobs[run.job], now_ms)

    def split(self, job: Job, at_ms: int, now_ms: int) -> None:
        """End a placed gang whose members continue as jobs of their own. No run is stopped: none has started."""
        for run in self._cluster.live_runs(job.id):
            task = job.spec.task_of(run.member)
            self._cluster.table.let_go(run.node, task.request, Member(job.spec, task), run.grant)
            self._cluster.change_run(run, to="stopped", finished_ms=at_ms)
        self._wake("run_ended")
        self.finish(job, "cancelled", now_ms, "GANG_SPLIT", "its members continue as jobs of their own")

    def _goes_on(self, job: Job, run: Run, now_ms: int) -> None:
        """The gang lives on: the member is replaced, counted like a retry of the whole, or done without."""
        failures, losses, pause_ms = job.failures, job.losses, 0
        if gang_goes_on(run) == "repair":
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
            why = run.stop_reason.text if run.stop_reason is not None else ""
            self._cluster.emit("gang.member_lost", now_ms, job=job.id, run=run.id, node=run.node, reason=why)
            places = nodes_of({other.node for other in self._cluster.live_runs(job.id)})
            if places and places != job.nodes:
                job = self._cluster.change_job(job, now_ms, nodes=places)
        self._gangs.look(job, now_ms, pause_ms=pause_ms)

    # ------------------------------------------------------------------------------------------------ ends

    def stop_all(self, job: Job, reason: StopReason, now_ms: int) -> None:
        if job.spec.gang.per_node and reason.code in _STOPS_MEMBERS:
            for run in self._cluster.live_runs(job.id):
                self.shrink(run, reason, now_ms)
            return
        for run in self._cluster.live_runs(job.id):
            # A cancel cuts short what runs that are stopping may be doing to save their work.
            cut_short = reason.code == "cancelled" and job.spec.checkpoint.has_hook
            stays = run.stop_reason is None or gang_goes_on(run) == "repair"
            if stays or cut_short or run.id in self._cluster.spared:
                self._stop(job, run, reason)
        self._gangs.forget(job.id)

    def shrink(self, run: Run, reason: StopReason, now_ms: int) -> None:
        """Stop one member; its gang goes on without it."""
        if run.stop_reason is None or run.id in self._cluster.spared:
            self._stop(self._cluster.jobs[run.job], run, structs.replace(reason, gang="shrink"))

    def leave(self, run: Run, reason: StopReason, now_ms: int) -> None:
        """A run must leave its node: alone if its gang replaces members, else the whole gang moves."""
        job = self._cluster.jobs[run.job]
        if job.spec.gang.per_node:
            self.shrink(run, reason, now_ms)
        elif job.spec.gang.on_failure != "repair" or job.spec.size == 1:
            self.stop_all(job, reason, now_ms)
        elif run.stop_reason is None or run.id in self._cluster.spared:
            self._stop(job, run, structs.replace(reason, gang="repair"))

    def check_assembly(self, job: Job, now_ms: int) -> None:
        """A gang whose members do not all run in time lets go of everything rather than hold it for ever."""
        patience_ms = job.spec.gang.assembly_timeout_ms
        live = self._cluster.live_runs(job.id)
        late = [run for run in live if run.state == "placed" and run.placed_ms + patience_ms <= now_ms]
        if late and patience_ms:
            names = ", ".join(f"member {run.member} on {run.node}" for run in late[:3])
            detail = f"not all members ran within {patience_ms / 1000:g} s: {names}"
            self.stop_all(job, StopReason("assembly", detail), now_ms)

    def fall_apart(self, job: Job, why: str, now_ms: int) -> None:
        """A gang that cannot be repaired starts again: when its last run has stopped, or now if all have."""
        if self._cluster.live_runs(job.id):
            self.stop_all(job, StopReason("assembly", why), now_ms)
        else:
            self._gangs.forget(job.id)
            self._after_loss(job, "ASSEMBLY_TIMEOUT", why, now_ms)

    def _stop(self, job: Job, run: Run, reason: StopReason) -> None:
        if run.stop_reason != reason:
            self._cluster.change_run(run, stop_reason=reason)
            self._cluster.act(stop_order(job, run, reason))

    def conclude(self, job: Job, now_ms: int) -> None:
        """If no run of the attempt is live any more, the job ends or starts again."""
        everyone = self._cluster.runs.get(job.id, {}).values()
        if not everyone or any(run.state not in RUN_ENDED for run in everyone):
            return
        if job.spec.gang.per_node and not self._all_were_stopped(job):
            self._gangs.look(job, now_ms)  # it is over when no node is left that suits it
            return
        if len(everyone) == 1 and not (job.cancel_requested or job.requeue_requested or job.spec.restart == "always"):
            (alone,) = everyone
            if alone.state == "succeeded":  # what happens most, and all that follows would say the same
                self.finish(job, "succeeded", now_ms, "", "", exit_code=0)
                return
        ending = self._ending(job, everyone)
        if ending is not None:
            _CONCLUSIONS[ending[0]](self, job, ending[1], now_ms)

    @staticmethod
    def _ending(job: Job, everyone: Collection[Run]) -> tuple[Ending, Run | None] | None:
        """How the attempt ended and the run that decided it; None while members are being replaced. A user's wish comes
        first, then the first run that failed, then the first that was lost, then the first that was moved."""
        of_members = everyone if len(everyone) == 1 else latest(everyone).values()
        missing = any(is_missing(run) for run in of_members)
        runs = [run for run in of_members if run.state == "succeeded" or not (is_missing(run) or _is_shrunk(run))]
        runs.sort(key=lambda run: (run.finished_ms, run.member))
        failed = next((run for run in runs if run.state == "failed"), None)
        lost = next((run for run in runs if run.state == "lost"), None)
        moved = [run for run in runs if run.stop_reason is not None and run.stop_reason.moves_job]
        # With members missing, a gang that succeeded before it stopped is not done, and starts again as a whole.
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
        """Of a job that runs on every node: whether it was told to go as a whole."""
        if job.cancel_requested or job.requeue_requested or job.suspend_requested:
            return True
        stops = [run.stop_reason for run in self._cluster.runs[job.id].values() if run.stop_reason is not None]
        return any(stop.moves_job for stop in stops)

    def _after_loss(self, job: Job, code: str, why: str, now_ms: int) -> None:
        losses, wanted = job.losses + 1, may_retry(job.spec.retry_on, failure_class(code))
        if job.spec.restart == "never" or not wanted or losses > self._retry.max_losses:
            self.finish(job, "failed", now_ms, code, why, losses=losses)
        else:
            pause = self._pause_ms(self._retry.failed_start, job, losses)
            self.again(job, now_ms, code, why, losses=losses, pause_ms=pause)

    def _start_failed(self, job: Job, run: Run | None, now_ms: int) -> None:
        self._after_loss(job, "START_FAILED", run.reason if run is not None else "", now_ms)

    def _lost(self, job: Job, run: Run | None, now_ms: int) -> None:
        self._after_loss(job, "LOST", run.reason if run is not None else "", now_ms)

    def _not_reached(self, job: Job, run: Run | None, now_ms: int) -> None:
        """Its backend was out of reach. Nothing began, so nothing is counted; but a gang of which some members ran did run."""
        why = run.reason if run is not None else ""
        if job.started_ms and job.spec.restart == "never":
            self._after_loss(job, "START_FAILED", why, now_ms)
        else:
            pause = self._pause_ms(self._retry.failed_start, job, 1)
            self.again(job, now_ms, "NOT_REACHED", why, pause_ms=pause)

    def _pause_ms(self, backoff: Backoff, job: Job, tries: int) -> int:
        """Gangs wait longer: they need more to come together."""
        return backoff.pause_ms(job.id, tries) * (self._retry.gang_factor if job.spec.size > 1 else 1)

    def _after_move(self, job: Job, moved: Run | None, now_ms: int) -> None:
        if job.suspend_requested:
            self.again(job, now_ms, "SUSPENDED", "suspended by a user")
            return
        if job.requeue_requested or moved is None or moved.stop_reason is None:
            self.again(job, now_ms, "REQUEUED", "requeued by a user")
            return
        stop = moved.stop_reason
        code, text, preemptions = _CODE_AFTER_STOP.get(stop.code, "REQUEUED"), stop.text, job.preemptions
        match stop.code:
            case "assembly":
                self._after_loss(job, "ASSEMBLY_TIMEOUT", stop.detail, now_ms)
                return
            case "overran" if not job.spec.checkpoint.has_hook:
                # As after a timeout: nothing of its work is left, and the next run would take no less.
                self._fail(job, code, text, moved.exit_code, now_ms)
                return
            case "preempted" | "reclaimed":
                preemptions += 1
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
        self.again(job, now_ms, code, text, preemptions=preemptions)

    def _after_failure(self, job: Job, failed: Run | None, now_ms: int) -> None:
        assert failed is not None
        code = job_code_of_run(failed.reason_code)
        text = failed.reason or f"member {failed.member} exited with {failed.exit_code}"
        self._fail(job, code, text, failed.exit_code, now_ms)

    def _fail(self, job: Job, code: str, text: str, exit_code: int | None, now_ms: int) -> None:
        """Once more if it has retries left."""
        spec, failures = job.spec, job.failures + 1
        wanted = may_retry(spec.retry_on, failure_class(code))
        if wanted and (spec.restart == "always" or (spec.restart == "on_failure" and failures <= spec.retries)):
            pause = self._pause_ms(self._retry.failed_run, job, failures)
            self.again(job, now_ms, code, f"{text}; retry {failures}", failures=failures, pause_ms=pause)
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
            failure=failure_class(code) if state == "failed" else "", suspend_requested=False, move="",
        )  # fmt: skip
        self._gangs.forget(job.id)
        self._cluster.emit(
            "job.ended", now_ms, job=job.id, state=state, exit_code=exit_code, reason_code=code,
            **if_late("finished_at", finished_ms, now_ms),
        )  # fmt: skip
        self._wake("job_ended")
        for listener in self._signals.job_ended:
            listener(ended)

    def _end_of_attempt(self, job: Job, now_ms: int) -> int:
        """A job has ended with the last of its runs, of which we may hear late. One that has none, or waits for members
        to be replaced, ends now."""
        runs = self._cluster.runs.get(job.id, {}).values()
        if not runs or any(run.state not in RUN_ENDED for run in runs):
            return now_ms
        if len(runs) > 1 and any(is_missing(run) for run in latest(runs).values()):
            return now_ms
        return max(run.finished_ms for run in runs) or now_ms

    def again(
        self,
        job: Job,
        now_ms: int,
        code: str,
        reason: str,
        *,
        failures: int | None = None,
        losses: int | None = None,
        preemptions: int | None = None,
        pause_ms: int = 0,
        fresh: bool = False,
    ) -> None:
        """Back into the line as a new attempt, or aside if it is to be suspended. `fresh`: a user asked for it, so past
        failures no longer count."""
        aside = job.suspend_requested and not fresh
        if not fresh and (code == "NOT_REACHED" or failure_class(code) in ("backend_error", "node_lost")):
            runs = self._cluster.runs.get(job.id, {}).values()
            job = self._backend_failed(job, {run.backend for run in runs if run.state in ("failed", "lost")}, now_ms)
        if aside and code != "SUSPENDED":
            code, reason = "SUSPENDED", f"suspended by a user; before that {reason}"
        job = self._cluster.change_job(
            job, now_ms, to="held" if aside else "pending", reason_code=code, reason=reason, requeue_requested=False, cancel_requested=False,
            failures=0 if fresh else (job.failures if failures is None else failures),
            losses=0 if fresh else (job.losses if losses is None else losses),
            preemptions=0 if fresh else (job.preemptions if preemptions is None else preemptions),
            not_before_ms=now_ms + pause_ms if pause_ms else 0, queued_ms=now_ms if job.attempt or not job.spec.after.of else 0, started_ms=0, finished_ms=0,
            exit_code=None, suspend_requested=False, failure="" if fresh else failure_class(code) or job.failure, nodes="",
            move="" if aside or fresh else job.move,
        )  # fmt: skip
        self._gangs.forget(job.id)
        self._cluster.drop_runs(job.id)
        if aside:
            self._cluster.emit("job.suspended", now_ms, job=job.id, reason=reason)
            for listener in self._signals.job_suspended:
                listener(job)
            return
        self._cluster.emit("job.requeued", now_ms, job=job.id, reason_code=code, reason=reason)
        self._enqueue(job, now_ms)


def _in_our_words(job: Job, run: Run, fact: RunObserved) -> RunObserved:
    """One wording for a timeout, whichever backend stopped it. One that ran for less was stopped by a limit of the backend's
    own, and that is what it says."""
    limit_ms, began_ms = job.spec.timeout_ms, run.started_ms or run.placed_ms
    if not limit_ms or fact.at_ms - began_ms < limit_ms - _ROUNDING_MS:
        return fact
    return structs.replace(fact, reason=f"it ran longer than its timeout of {limit_ms / 1000:g}s")


def _is_shrunk(run: Run) -> bool:
    return gang_goes_on(run) == "shrink"


def _cancelled(lifecycle: JobLifecycle, job: Job, run: Run | None, now_ms: int) -> None:
    exit_code = run.exit_code if run is not None else None
    lifecycle.finish(job, "cancelled", now_ms, "CANCELLED", job.reason, exit_code=exit_code)


def _refused(lifecycle: JobLifecycle, job: Job, run: Run | None, now_ms: int) -> None:
    lifecycle.finish(job, "failed", now_ms, "BACKEND_REFUSED", run.reason if run is not None else "")


def _restarts(lifecycle: JobLifecycle, job: Job, run: Run | None, now_ms: int) -> None:
    lifecycle.again(job, now_ms, "RESTARTED", "restarted after success (restart: always)", pause_ms=1000)


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
