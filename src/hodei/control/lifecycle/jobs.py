"""The life of runs and jobs after placing: what observations mean, when a job is over, when it starts again.

A job is concluded when the last run of its attempt has ended, from the states of those runs alone, so that a crash at any
moment leads to the same end. The first failure of a member stops its siblings, unless the gang can live with it
(see `control.lifecycle.gangs`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from typing import Literal

from msgspec import structs

from hodei.control.lifecycle.binding import nodes_of
from hodei.control.lifecycle.gangs import (
    NEVER_BEGAN,
    NOT_REACHED_RUN,
    REPAIR,
    SHRUNK,
    START_FAILED,
    Gangs,
    is_missing,
    latest,
    lost_together,
    marked,
)
from hodei.control.lifecycle.retry import Backoff, RetryPolicy
from hodei.control.lifecycle.run_orders import MOVED, stop_order
from hodei.control.lifecycle.timestamps import credible, if_late
from hodei.control.state import ClusterState
from hodei.engine.points import Trigger
from hodei.engine.view import Member
from hodei.model.effects import Forget
from hodei.model.facts import RunObserved
from hodei.model.failure import class_of, code_of_run, may_retry
from hodei.model.ids import JobId, RunId
from hodei.model.job import Job, Run
from hodei.model.lifecycle import RUN_ENDED, RunState

# Slurm and PBS tell times in whole seconds.
_ROUNDING_MS = 2000
# Why a job for every node leaves nodes and yet goes on: each member that had to go starts again, and no other.
_OF_EACH = ("preempted", "reclaimed", "cleared", "outstayed")


def _nothing(_: Job | JobId) -> None:
    """No lambda: the state of a controller is written down (`control.snapshot`)."""


def _as_it_is(job: Job, backends: Collection[str], now_ms: int) -> Job:
    return job


class JobLifecycle:
    def __init__(
        self,
        world: ClusterState,
        retry: RetryPolicy,
        gangs: Gangs,
        enqueue: Callable[[Job, int], None],
        wake: Callable[[Trigger], None],
    ) -> None:
        self._world = world
        self._retry = retry
        self._gangs = gangs
        self._enqueue = enqueue
        self._wake = wake
        # Called with every job that has ended.
        self.ended: Callable[[Job], None] = _nothing
        # Runs whose order to stop may have been dropped: they must be told again, should they have to stop after all.
        self.spared: Container[RunId] = ()
        # Called when a job needs no room any more that may be kept for it.
        self.wants_no_room: Callable[[JobId], None] = _nothing
        # The same for whoever waits for jobs, who also wants to know when one has saved its work.
        self.settled: Callable[[Job], None] = _nothing
        self.saved: Callable[[JobId], None] = _nothing
        # Called with a job that goes back into the line because backends failed it, and with their names.
        self.backend_failed: Callable[[Job, Collection[str], int], Job] = _as_it_is

    def take_settings(self, other: JobLifecycle) -> None:
        self._retry = other._retry

    # ----------------------------------------------------------------------------------------- observations

    def observed(self, run: Run, fact: RunObserved, now_ms: int) -> None:
        """A backend's word about a run. Old news and repeats change nothing; a repeated end is only forgotten again."""
        if run.state in RUN_ENDED:
            if fact.state in RUN_ENDED:
                self._world.act(Forget(run.id, run.backend))
            return
        if fact.checkpoint_ms > run.checkpoint_ms:
            run = self._world.change_run(run, checkpoint_ms=fact.checkpoint_ms)
            self.saved(run.job)
        if fact.health and fact.health != run.health:
            run = self._world.change_run(run, health=fact.health)
            self._world.tell(
                f"run.{'healthy' if fact.health == 'ok' else 'unhealthy'}", now_ms, job=run.job, run=run.id
            )
        if fact.checkpoint_error:
            self._world.tell(
                "run.checkpoint_failed", now_ms, job=run.job, run=run.id, node=run.node, reason=fact.checkpoint_error
            )
        if run.state == "placed" and fact.state not in ("placed", "lost") and fact.reason_code not in NEVER_BEGAN:
            # Also when its end is the first that we hear of it: it has run.
            started_ms = credible(fact.started_ms or fact.at_ms, run.placed_ms, now_ms)
            run = self._world.change_run(run, to="running", started_ms=started_ms)
            job = self._world.jobs[run.job]
            if job.state == "scheduled":
                self._world.change_job(job, now_ms, to="running", started_ms=started_ms)
                when = if_late("started_at", started_ms, now_ms)
                self._world.tell("job.started", now_ms, job=job.id, run=run.id, node=run.node, **when)
        if fact.state in RUN_ENDED:
            # A run that was told to stop has stopped, whichever way it went (one that made it first has made it);
            # one that was stopped by nobody here has failed.
            state: RunState = fact.state
            if state in ("failed", "stopped"):
                state = "stopped" if run.stop_requested else "failed"
            self._end(run, state, now_ms, fact)
            self._world.act(Forget(run.id, run.backend))

    def lost(self, run: Run, now_ms: int, reason: str) -> None:
        self._end(run, "lost", now_ms, RunObserved(run.id, "lost", now_ms, reason_code="lost", reason=reason))

    def hold_room(self, run: Run) -> None:
        """A restored run goes on holding its room, also before its node has joined again."""
        job = self._world.jobs[run.job].spec
        task = job.task_of(run.member)
        self._world.table.hold(run.node, task.request, Member(job, task), run.grant)

    def _end(self, run: Run, state: RunState, now_ms: int, fact: RunObserved) -> None:
        world = self._world
        job = world.jobs[run.job]
        task = job.spec.task_of(run.member)
        world.table.let_go(run.node, task.request, Member(job.spec, task), run.grant)
        mark = run.stop_requested
        finished_ms = credible(fact.at_ms, run.started_ms or run.placed_ms, now_ms)
        if finished_ms != fact.at_ms:
            fact = structs.replace(fact, at_ms=finished_ms)
        if fact.reason_code == "timeout":
            fact = _in_our_words(job, run, fact)
        if not mark and state in ("failed", "lost"):
            mark = self._gangs.mark_for(job, run, state, fact)
        run = world.change_run(
            run,
            to=state,
            stop_requested=mark,
            finished_ms=finished_ms,
            exit_code=fact.exit_code,
            reason_code="permanent" if fact.permanent else fact.reason_code,
            reason=fact.reason,
        )
        world.tell(
            "run.ended", now_ms, job=job.id, run=run.id, node=run.node, state=state, exit_code=fact.exit_code,
            reason_code=fact.reason_code, **if_late("finished_at", finished_ms, now_ms),
        )  # fmt: skip
        self._wake("run_ended")
        if mark and (marked(run, REPAIR) or marked(run, SHRUNK)):
            self._goes_on(job, run, now_ms)
        elif state in ("failed", "lost"):
            self.stop_all(job, "sibling ended", now_ms)
        elif job.spec.gang.per_node:
            self._gangs.look(job, now_ms)
        self.conclude(world.jobs[run.job], now_ms)

    def _goes_on(self, job: Job, run: Run, now_ms: int) -> None:
        """The gang lives on: the member is replaced, counted like a retry of the whole, or done without."""
        failures, losses, pause_ms = job.failures, job.losses, 0
        if marked(run, REPAIR) and run.reason_code == NOT_REACHED_RUN:
            pause_ms = self._retry.failed_start.pause_ms(job.id, 1)
        elif marked(run, REPAIR) and run.state == "failed" and run.reason_code != START_FAILED:
            failures += 1
            pause_ms = self._retry.failed_run.pause_ms(job.id, failures)
        elif marked(run, REPAIR) and run.state in ("failed", "lost"):
            siblings = [other for other in self._world.runs[job.id].values() if other.id != run.id]
            losses += not any(lost_together(other, run.finished_ms) for other in siblings)
        if (failures, losses) != (job.failures, job.losses):
            not_before = now_ms + pause_ms if pause_ms else job.not_before_ms
            job = self._world.change_job(job, now_ms, failures=failures, losses=losses, not_before_ms=not_before)
        if run.state != "succeeded":
            self._world.tell(
                "gang.member_gone", now_ms, job=job.id, run=run.id, node=run.node, reason=run.stop_requested
            )
            places = nodes_of({other.node for other in self._world.live_runs(job.id)})
            if places and places != job.nodes:
                job = self._world.change_job(job, now_ms, nodes=places)
        self._gangs.look(job, now_ms, pause_ms=pause_ms)

    # ------------------------------------------------------------------------------------------------ ends

    def stop_all(self, job: Job, reason: str, now_ms: int) -> None:
        if job.spec.gang.per_node and reason.partition(" ")[0] in _OF_EACH:
            for run in self._world.live_runs(job.id):
                self.shrink(run, f"{SHRUNK} {reason}", now_ms)
            return
        for run in self._world.live_runs(job.id):
            # A cancel cuts short what those who are going already may be doing to save their work.
            cut_short = reason == "cancelled" and job.spec.checkpoint.hooked
            if not run.stop_requested or marked(run, REPAIR) or cut_short or run.id in self.spared:
                self._stop(job, run, reason)
        self._gangs.forget(job.id)

    def shrink(self, run: Run, reason: str, now_ms: int) -> None:
        """One member goes, and its gang goes on without it. `reason` begins with the word for that."""
        assert reason.startswith(SHRUNK), reason
        if not run.stop_requested or run.id in self.spared:
            self._stop(self._world.jobs[run.job], run, reason)

    def leave(self, run: Run, reason: str, now_ms: int) -> None:
        """A run must leave its node: alone if its gang replaces members, else the whole gang moves."""
        job = self._world.jobs[run.job]
        if job.spec.gang.per_node:
            self.shrink(run, f"{SHRUNK} {reason}", now_ms)
        elif job.spec.gang.on_failure != "repair" or job.spec.size == 1:
            self.stop_all(job, reason, now_ms)
        elif not run.stop_requested or run.id in self.spared:
            self._stop(job, run, f"{REPAIR} {reason}")

    def check_assembly(self, job: Job, now_ms: int) -> None:
        """A gang whose members do not all run in time lets go of everything rather than hold it for ever."""
        patience_ms = job.spec.gang.assembly_timeout_ms
        live = self._world.live_runs(job.id)
        late = [run for run in live if run.state == "placed" and run.placed_ms + patience_ms <= now_ms]
        if late and patience_ms:
            names = ", ".join(f"member {run.member} on {run.node}" for run in late[:3])
            self.stop_all(job, f"assembly not all members ran within {patience_ms / 1000:g} s: {names}", now_ms)

    def fall_apart(self, job: Job, why: str, now_ms: int) -> None:
        """A gang that can not be made whole again starts anew: when its last run has gone, or now if all have."""
        if self._world.live_runs(job.id):
            self.stop_all(job, f"assembly {why}", now_ms)
        else:
            self._gangs.forget(job.id)
            self._after_loss(job, "ASSEMBLY_TIMEOUT", why, now_ms)

    def _stop(self, job: Job, run: Run, reason: str) -> None:
        if run.stop_requested != reason:
            self._world.change_run(run, stop_requested=reason)
            self._world.act(stop_order(job, run, reason))

    def conclude(self, job: Job, now_ms: int) -> None:
        """If no run of the attempt is live any more, the job ends or starts again."""
        everyone = self._world.runs.get(job.id, {}).values()
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
        of_members = everyone if len(everyone) == 1 else latest(everyone).values()
        missing = [run for run in of_members if is_missing(run)]
        runs = [run for run in of_members if run.state == "succeeded" or not (marked(run, SHRUNK) or is_missing(run))]
        runs.sort(key=lambda run: (run.finished_ms, run.member))
        spec = job.spec
        failed = next((run for run in runs if run.state == "failed"), None)
        lost = next((run for run in runs if run.state == "lost"), None)
        moved = next(
            (run for run in runs if run.state == "stopped" and run.stop_requested.partition(" ")[0] in MOVED), None
        )
        if missing and moved is None:
            # Told to go, and done before it went: with members missing the gang is not done, and starts again whole.
            moved = next((run for run in runs if run.stop_requested.partition(" ")[0] in MOVED), None)
        asked = job.cancel_requested or job.requeue_requested or job.suspend_requested
        if missing and not (failed or lost or moved or asked):
            return  # they are being brought back
        if job.cancel_requested:
            status = next((run.exit_code for run in runs if run.exit_code is not None), None)
            self.finish(job, "cancelled", now_ms, "CANCELLED", job.reason, exit_code=status)
        elif (
            job.requeue_requested
            or (moved is not None and failed is None and lost is None)
            or (missing and job.suspend_requested and failed is None and lost is None)
        ):
            self._after_move(job, moved, now_ms)
        elif failed is not None and failed.reason_code == "permanent":
            self.finish(job, "failed", now_ms, "BACKEND_REFUSED", failed.reason)
        elif failed is not None and failed.reason_code == NOT_REACHED_RUN:
            self._not_reached(job, failed.reason, now_ms)
        elif (failed is not None and failed.reason_code == START_FAILED) or (failed is None and lost is not None):
            culprit = failed or lost
            assert culprit is not None
            code = "START_FAILED" if failed else "LOST"
            self._after_loss(job, code, culprit.reason, now_ms)
        elif failed is not None:
            self._after_failure(job, failed, now_ms)
        elif spec.restart == "always":
            self.again(job, now_ms, "RESTARTED", "restarted after success (restart: always)", pause_ms=1000)
        else:
            self.finish(job, "succeeded", now_ms, "", "", exit_code=0)

    def _all_were_stopped(self, job: Job) -> bool:
        """Of a job that runs on every node: whether it was told to go as a whole."""
        if job.cancel_requested or job.requeue_requested or job.suspend_requested:
            return True
        return any(run.stop_requested.partition(" ")[0] in MOVED for run in self._world.runs[job.id].values())

    def _after_loss(self, job: Job, code: str, why: str, now_ms: int) -> None:
        losses, wanted = job.losses + 1, may_retry(job.spec.retry_on, class_of(code))
        if job.spec.restart == "never" or not wanted or losses > self._retry.max_losses:
            self.finish(job, "failed", now_ms, code, why, losses=losses)
        else:
            pause = self._pause_ms(self._retry.failed_start, job, losses)
            self.again(job, now_ms, code, why, losses=losses, pause_ms=pause)

    def _not_reached(self, job: Job, why: str, now_ms: int) -> None:
        """Its backend was out of reach. Nothing began, so nothing is counted; but a gang of which some members ran did run."""
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
        elif job.requeue_requested or moved is None:
            self.again(job, now_ms, "REQUEUED", "requeued by a user")
        elif moved.stop_requested == "suspended":
            self.again(job, now_ms, "RESUMED", "suspended by a user, and resumed before it had gone")
        elif moved.stop_requested.startswith("migrated"):
            self.again(job, now_ms, "MIGRATED", f"moved {moved.stop_requested.partition(' ')[2]} by a user")
        elif moved.stop_requested.startswith("drained"):
            node = moved.stop_requested.partition(" ")[2] or moved.node
            self.again(job, now_ms, "DRAINED", f"moved off node {node}, which is being drained")
        elif moved.stop_requested.startswith(("preempted", "reclaimed")):
            self.again(job, now_ms, "PREEMPTED", moved.stop_requested, preemptions=job.preemptions + 1)
        elif moved.stop_requested.startswith("assembly"):
            self._after_loss(job, "ASSEMBLY_TIMEOUT", moved.stop_requested.partition(" ")[2], now_ms)
        elif moved.stop_requested.startswith("overran") and not job.spec.checkpoint.hooked:
            # As after a timeout: nothing of its work is left, and the next time it would take no less.
            self._fail(job, "OVERRAN", moved.stop_requested, moved.exit_code, now_ms)
        elif moved.stop_requested.startswith(("overran", "cleared", "outstayed")):
            why = moved.stop_requested.partition(" ")[0]
            code = {"overran": "OVERRAN", "cleared": "CLEARED", "outstayed": "OUTSTAYED"}[why]
            self.again(job, now_ms, code, moved.stop_requested)
        elif moved.stop_requested == "tainted":
            self.again(job, now_ms, "TAINTED", f"node {moved.node} has a NoExecute taint that it does not tolerate")
        else:
            self.again(job, now_ms, "REQUEUED", f"moved off node {moved.node}")

    def _after_failure(self, job: Job, failed: Run, now_ms: int) -> None:
        code = code_of_run(failed.reason_code)
        text = failed.reason or f"member {failed.member} exited with {failed.exit_code}"
        self._fail(job, code, text, failed.exit_code, now_ms)

    def _fail(self, job: Job, code: str, text: str, exit_code: int | None, now_ms: int) -> None:
        """Once more if it has retries left."""
        spec, failures = job.spec, job.failures + 1
        wanted = may_retry(spec.retry_on, class_of(code))
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
        ended = self._world.change_job(
            job, now_ms, to=state, reason_code=code, reason=reason, finished_ms=finished_ms, exit_code=exit_code,
            failures=job.failures if failures is None else failures, losses=job.losses if losses is None else losses,
            failure=class_of(code) if state == "failed" else "", suspend_requested=False, move="",
        )  # fmt: skip
        self._gangs.forget(job.id)
        self.wants_no_room(job.id)
        self._world.tell(
            "job.ended", now_ms, job=job.id, state=state, exit_code=exit_code, reason_code=code,
            **if_late("finished_at", finished_ms, now_ms),
        )  # fmt: skip
        self._wake("job_ended")
        self.ended(ended)
        self.settled(ended)

    def _end_of_attempt(self, job: Job, now_ms: int) -> int:
        """A job has ended with the last of its runs, of which we may hear late. One that has none, or waits for members
        to be replaced, ends now."""
        runs = self._world.runs.get(job.id, {}).values()
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
        if not fresh and (code == "NOT_REACHED" or class_of(code) in ("backend_error", "node_lost")):
            runs = self._world.runs.get(job.id, {}).values()
            job = self.backend_failed(job, {run.backend for run in runs if run.state in ("failed", "lost")}, now_ms)
        if aside and code != "SUSPENDED":
            code, reason = "SUSPENDED", f"suspended by a user; before that {reason}"
        job = self._world.change_job(
            job, now_ms, to="held" if aside else "pending", reason_code=code, reason=reason, requeue_requested=False, cancel_requested=False,
            failures=0 if fresh else (job.failures if failures is None else failures),
            losses=0 if fresh else (job.losses if losses is None else losses),
            preemptions=0 if fresh else (job.preemptions if preemptions is None else preemptions),
            not_before_ms=now_ms + pause_ms if pause_ms else 0, queued_ms=now_ms if job.attempt or not job.spec.after.of else 0, started_ms=0, finished_ms=0,
            exit_code=None, suspend_requested=False, failure="" if fresh else class_of(code) or job.failure, nodes="",
            move="" if aside or fresh else job.move,
        )  # fmt: skip
        self._gangs.forget(job.id)
        self._world.drop_runs(job.id)
        if aside:
            self.wants_no_room(job.id)
            self._world.tell("job.suspended", now_ms, job=job.id, reason=reason)
            return
        self._world.tell("job.requeued", now_ms, job=job.id, reason_code=code, reason=reason)
        self._enqueue(job, now_ms)


def _in_our_words(job: Job, run: Run, fact: RunObserved) -> RunObserved:
    """One wording for a timeout, whichever backend stopped it. One that ran for less was stopped by a limit of the backend's
    own, and that is what it says."""
    limit_ms, began_ms = job.spec.timeout_ms, run.started_ms or run.placed_ms
    if not limit_ms or fact.at_ms - began_ms < limit_ms - _ROUNDING_MS:
        return fact
    return structs.replace(fact, reason=f"it ran longer than its timeout of {limit_ms / 1000:g}s")
