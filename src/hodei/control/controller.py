"""Facts in, plan and effects out. The same steps in the server, the simulator and a replay.

`step` learns every fact, then lets the engine decide for all gangs that are ready. It never reads a clock and never fails
on a fact: one that no longer applies (a late observation, a second cancel) changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from typing import Literal

from msgspec import Struct, structs

from hodei.control.accounting.accounts import Accounts, AccountsPolicy
from hodei.control.admission import routing
from hodei.control.admission.backend_availability import UNAVAILABLE, BackendAvailability
from hodei.control.admission.gate import AdmissionPolicy, Gate, UnreachedBackends
from hodei.control.admission.profile_router import ProfileRouter
from hodei.control.estimates import UserEstimates
from hodei.control.lifecycle.arrays import Arrays
from hodei.control.lifecycle.commands import ASKED, UserCommands
from hodei.control.lifecycle.dependencies import Dependencies, PriorityInheritance
from hodei.control.lifecycle.gangs import Gangs
from hodei.control.lifecycle.jobs import JobLifecycle
from hodei.control.lifecycle.nodes import NodeEvents, TaintEviction
from hodei.control.lifecycle.per_node import PerNode, end_of
from hodei.control.lifecycle.preemption import Hold, PreemptionControl, PreemptionPolicy, with_past
from hodei.control.lifecycle.relocation import Relocation
from hodei.control.lifecycle.retry import RetryPolicy
from hodei.control.lifecycle.runs import bind
from hodei.control.queue.backfill import BackfillQueue, needs_availability
from hodei.control.queue.base import SchedulingQueue
from hodei.control.queue.multifactor import MultifactorQueue
from hodei.control.queue.selection import ProfileQueue, next_gangs
from hodei.control.reconfigure import reconfigure, requeue_displaced
from hodei.control.reservations.audit import StartReservationAudit
from hodei.control.reservations.overruns import OverrunEnforcement, ReservationWindows
from hodei.control.reservations.reservations import Reservations
from hodei.control.state import PART, ClusterState, Timers, at_once, parts
from hodei.engine.cycle import Engine
from hodei.engine.explain import summary
from hodei.engine.plan import Plan, Refusal
from hodei.engine.points import Placed, Trigger
from hodei.engine.profile import Profile
from hodei.engine.runner import PLUGIN_FAILED
from hodei.engine.view import Gang, View, gang_of
from hodei.model.config import SchedulingConfig
from hodei.model.effects import Act, Save
from hodei.model.estimate import RuntimeSample, runtime_sample
from hodei.model.facts import (
    BackendReported,
    DataAppeared,
    EventNoted,
    Fact,
    GangSplit,
    HistoryRestored,
    JobReleased,
    JobRequeued,
    JobRestored,
    JobSubmitted,
    JobWithdrawn,
    NodeJoined,
    NodeLost,
    NodeOverridden,
    OverridesRestored,
    Reconfigured,
    ReservationCancelled,
    ReservationMade,
    RunObserved,
    StopWithdrawn,
    UsageRestored,
)
from hodei.model.ids import JobId
from hodei.model.job import RUN_ENDED, Job, JobSpec, Run
from hodei.ports import Estimator

# ------------------------------------------------------------------------------------------------ step
# The result of a step, and what its refusals mean.


class Step(Struct):
    """The decisions of a step, and their effects: first all `saves` in one commit, then the `acts`."""

    plan: Plan
    saves: list[Save]
    acts: list[Act]

    @property
    def empty(self) -> bool:
        return self.plan.empty and not self.saves and not self.acts


def preemption_cannot_help(refusal: Refusal) -> bool:
    """A plugin failed, or it is not capacity that is missing."""
    return any(verdict.reason.code == PLUGIN_FAILED or verdict.reason.plugin == "quota" for verdict in refusal.verdicts)


def failed(refusal: Refusal) -> bool:
    return any(verdict.reason.code == PLUGIN_FAILED for verdict in refusal.verdicts)


# ----------------------------------------------------------------------------------------------------

Remake = Callable[[SchedulingConfig], "Controller"]


class Controller:
    def __init__(
        self,
        profiles: Mapping[str, Profile],
        *,
        retry: RetryPolicy | None = None,
        admission: AdmissionPolicy | None = None,
        preemption: PreemptionPolicy | None = None,
        estimator: Estimator | None = None,
        profile_router: ProfileRouter | None = None,
        accounts: AccountsPolicy | None = None,
        last_event: int = 0,
        max_tries: int = 5000,
    ) -> None:
        self.retry = retry = retry or RetryPolicy()
        self.estimator: Estimator = estimator or UserEstimates()
        self.cluster = cluster = ClusterState(last_event, self._limit_ms)
        cluster.signals.job_ended.append(self._job_ended)
        self._timers = Timers()
        # Admission: which profile a job goes to, and whether it may come in.
        self.engine = Engine(cluster.table, profiles)
        self.queues = {name: self.queue_for(profile) for name, profile in sorted(profiles.items())}
        if any(map(needs_availability, self.queues.values())):
            cluster.track_availability()
        self.gate = Gate(self.engine, admission or AdmissionPolicy(), UnreachedBackends())
        self.backend_availability = BackendAvailability(self.engine, self.gate)
        self.profile_router = profile_router or ProfileRouter()
        self.profile_router.bind(cluster, self.queues, self.gate, self._enqueue, self._dequeue)
        # What becomes of jobs, runs and nodes.
        self.per_node = PerNode(cluster, self.engine, retry)
        self.gangs = Gangs(cluster, self.engine.profiles, retry, self._drop_hold, self.per_node.look)
        self._lifecycle = lifecycle = JobLifecycle(
            cluster, retry, self.gangs, self._enqueue, self._wake, self.profile_router.escalations.backend_failed
        )
        self.arrays = Arrays(cluster, self._enqueue)
        self.dependencies = Dependencies(cluster, lifecycle, self._enqueue)
        self.priority_inheritance = PriorityInheritance(cluster, self.dependencies, self.queues)
        self.evictions = TaintEviction(cluster, lifecycle)
        self.preemption = PreemptionControl(
            cluster, self.engine, lifecycle, preemption or PreemptionPolicy(), self._abandon_preemption
        )
        self.relocation = Relocation(
            cluster, self.engine, lifecycle, self.preemption, self.gang, self.view,
            self._dequeue, self._enqueue, self._timers,
        )  # fmt: skip
        self._node_events = NodeEvents(
            cluster, lifecycle, self.gangs, self.evictions, self.preemption, self.relocation,
            self._abandon_preemption, self._wake,
        )  # fmt: skip
        self._commands = UserCommands(cluster, lifecycle, self.relocation, self._dequeue, self._reset_for_requeue)
        # Reservations and accounts.
        self.reservation_audit = StartReservationAudit(cluster)
        self.reservations = Reservations(cluster, ReservationWindows(cluster, lifecycle), self._wake)
        self._overruns = OverrunEnforcement(cluster, lifecycle, self._overrun)
        self.accounts = Accounts(accounts or AccountsPolicy(), cluster, lifecycle)
        self.remake: Remake | None = None
        self.beat_ms = 0
        self._max_tries = max_tries
        # Gangs of queues that a new configuration has replaced.
        self.displaced: dict[JobId, Gang] = {}
        self._triggers: set[Trigger] = set()
        self._unfinished = self._once_more = False

    def queue_for(self, profile: Profile) -> SchedulingQueue | BackfillQueue:
        if hasattr(profile.queue, "reservation_depth"):
            return BackfillQueue(profile, self.engine)
        return MultifactorQueue(profile) if hasattr(profile.queue, "rank_milli") else SchedulingQueue(profile)

    def view(self, now_ms: int) -> View:
        accounts = self.accounts
        return View(now_ms, self.cluster.availability, accounts.shares(now_ms), accounts.bounds)

    # -------------------------------------------------------------------------------------------- driving

    def step(self, now_ms: int, facts: Sequence[Fact] = ()) -> Step:
        return at_once(self.stepping(now_ms, facts))

    def stepping(self, now_ms: int, facts: Sequence[Fact] = ()) -> Generator[None, None, Step]:
        """A step in parts. Between two parts the controller may be read, but not changed or stepped."""
        long = len(facts) > PART
        # 1. Learn the facts.
        self.reservation_audit.judge(now_ms)
        yield from self._learn_all(facts, now_ms)
        if long:
            yield
        # 2. Do what is due by the clock.
        self._expire(now_ms)
        # 3. Queue jobs whose dependencies are met, and array elements whose turn has come.
        yield from self.dependencies.settling(now_ms)
        self.priority_inheritance.follow()
        yield from self.arrays.turning(now_ms)
        if long:
            yield
        # 4. Decide what starts, what is preempted and what waits.
        plan = self._decide(now_ms)
        # 5. Stop overruns that block a start reservation made in this very step.
        self._overruns.look(now_ms)
        self.beat_ms = now_ms
        if long:
            yield
        # 6. Hand out what to commit and what to do afterwards.
        saves, acts = yield from self.cluster.taking_effects()
        return Step(plan, saves + self.accounts.saves(), acts)

    def _learn_all(self, facts: Sequence[Fact], now_ms: int) -> Generator[None, None, None]:
        for number, part in enumerate(parts(facts)):
            if number:
                yield
            for fact in part:
                self._learn(fact, now_ms)
        self.cluster.by = ""
        if self.displaced:
            yield from requeue_displaced(self, now_ms)

    def next_wakeup_ms(self, now_ms: int) -> int | None:
        """When `step` should be called even if nothing happens; None for never."""
        if self._unfinished:
            return now_ms
        paused = self.profile_router.routing.availability.paused
        due = [queue.next_due_ms() for name, queue in self.queues.items() if queue.gangs and name not in paused]
        due += [
            self._timers.next_ms(),
            self.evictions.next_ms(),
            self.profile_router.next_ms(),
            self.dependencies.next_ms(),
        ]
        due += [self.cluster.availability.next_start_ms(now_ms), self._overruns.next_ms(), self.accounts.next_ms()]
        due.append(self.per_node.next_ms())
        if self.gangs.repairs:
            due.append(self.gangs.next_ms())
        if self.cluster.availability.reservations:
            due.append(self.reservations.next_ms())
        return min([at for at in due if at is not None], default=None)

    def pending(self) -> dict[str, int]:
        held = [hold.gang.job.profile for hold in self.preemption.holds.values()]
        outside = self.arrays.waiting + self.dependencies.in_profile
        return {name: len(queue) + held.count(name) + outside[name] for name, queue in self.queues.items()}

    # ------------------------------------------------------------------------------------------- learning

    def _learn(self, fact: Fact, now_ms: int) -> None:
        cluster = self.cluster
        cluster.by = fact.by
        match fact:
            case JobSubmitted(job=job):
                job = self.profile_router.routed(job)
                if job.spec.after.of:
                    job = self.dependencies.submitted(job, fact.dependency_statuses)
                cluster.add_job(job, new=True)
                cluster.by = job.spec.user
                cluster.emit("job.submitted", now_ms, job=job.id, name=job.spec.name, project=job.spec.project)
                if job.state == "pending":
                    self._enqueue(job, now_ms)
            case RunObserved():
                run = cluster.run(fact.run)
                if run is not None:
                    self._lifecycle.observed(run, fact, now_ms)
            case StopWithdrawn(run=id):
                self.preemption.sparing.dropped(id)
            case DataAppeared(what=what):
                self.dependencies.appeared(what)
            case _ if isinstance(fact, ASKED):
                self._commands.learn(fact, now_ms)
            case JobWithdrawn() | GangSplit():
                self._replace(fact, now_ms)
            case JobReleased(job=id):
                self._commands.resume(id, now_ms)
                held = cluster.jobs.get(id)
                if held is not None and held.state == "held":
                    queued_ms = 0 if id in self.dependencies else now_ms
                    freed = cluster.change_job(
                        held, now_ms, to="pending", reason_code="", reason="", queued_ms=queued_ms
                    )
                    cluster.emit("job.released", now_ms, job=id)
                    self._enqueue(freed, now_ms)
            case NodeJoined():
                self._node_events.joined(fact, now_ms)
            case NodeLost():
                self._node_events.lost(fact, now_ms)
            case BackendReported():
                self.gate.unreached.reported(fact)
                self._wake("node_changed")  # so that the reasons of pending jobs name it
            case NodeOverridden():
                self._node_events.marked(fact, now_ms)
            case JobRestored(job=job, runs=runs):
                self.dependencies.restored(job, fact.dependency_statuses)
                self._restore(job, runs, now_ms)
            case OverridesRestored(overrides=overrides):
                cluster.put_overrides(overrides, new=False)
            case ReservationMade():
                self.reservations.made(fact.reservation, now_ms, restored=fact.restored)
            case EventNoted():
                cluster.emit(fact.kind, now_ms, job=fact.job, **fact.detail)
            case ReservationCancelled():
                self.reservations.cancelled(fact.name, fact.by, now_ms)
            case UsageRestored(rows=rows):
                self.accounts.restore(rows)
            case HistoryRestored(samples=many):
                for each in many:
                    self._learn_runtime(each)
            case Reconfigured():
                reconfigure(self, fact, now_ms)
            case _:
                raise TypeError(f"unknown fact {fact!r}")

    def _replace(self, fact: JobWithdrawn | GangSplit, now_ms: int) -> None:
        job = self.cluster.jobs.get(fact.job)
        if isinstance(fact, GangSplit):
            if job is not None:
                self._lifecycle.split(job, fact.at_ms, now_ms)
            for member, run in fact.members:
                self._restore(member, (run,), now_ms)
        elif job is not None and job.state in ("pending", "held"):
            self._dequeue(job)
            self._lifecycle.finish(job, "cancelled", now_ms, "WITHDRAWN", fact.reason)

    def _restore(self, job: Job, runs: Sequence[Run], now_ms: int) -> None:
        job = self.profile_router.restored(job)
        self.cluster.add_job(job, new=False)
        self.arrays.restored(job)
        for run in runs:
            self.cluster.add_run(run, new=False)
            if run.state not in RUN_ENDED:
                self._lifecycle.hold_room(run)
        self._overruns.watch(job)
        if job.state == "pending":
            self._enqueue(job, now_ms)
        elif job.state in ("scheduled", "running"):
            self._watch_assembly(job, max((run.placed_ms for run in runs), default=now_ms))
            if job.spec.size > 1 or job.spec.gang.per_node:
                job = self.gangs.look(job, now_ms, pause_ms=max(job.not_before_ms - now_ms, 0))
            self._lifecycle.conclude(job, now_ms)

    # --------------------------------------------------------------------------------------------- queueing

    def _enqueue(self, job: Job, now_ms: int) -> None:
        availability = self.profile_router.routing.availability
        if not availability.idle:
            job = self.profile_router.escalations.relocated(job, now_ms)
            if job.spec.profile in availability.paused:
                paused = availability.problem(job.spec.profile)
                job = self.cluster.change_job(job, now_ms, reason_code="PROFILE_PAUSED", reason=paused)
        if job.spec.profile not in self.queues:
            # The configuration has changed since it was admitted; it is held for an operator rather than failed.
            reason = f"its profile {job.spec.profile!r} is not configured any more"
            self.cluster.change_job(job, now_ms, to="held", reason_code="UNKNOWN_PROFILE", reason=reason)
            self.cluster.emit("job.held", now_ms, job=job.id, reason=reason)
            return
        if job.spec.after.of and not (job.queued_ms or job.attempt):
            self.dependencies.arrive(job)
            return
        if job.spec.array is not None and not self.arrays.lets_in(job, now_ms):
            return
        gang = self.gang(job.id, job.spec, job.submitted_ms)
        gang.queued_ms = job.submitted_ms
        gang.inherited_priority = self.priority_inheritance.lifts.get(job.id)
        if self.relocation.arrive(gang, job):
            return
        self.queues[job.spec.profile].add(gang, not_before_ms=job.not_before_ms, now_ms=now_ms)
        if job.spec.scheduling_timeout_ms or job.spec.max_queue_time_ms:
            due_ms = routing.due_ms(job)
            if due_ms is not None:
                self._timers.set(due_ms, job.id)
        self.profile_router.escalations.watch(job, now_ms)

    def gang(self, id: JobId, spec: JobSpec, submitted_ms: int) -> Gang:
        """All members of a job, with how long they may and are expected to run."""
        gang, estimate = gang_of(id, spec, submitted_ms), self.estimator.estimate(spec)
        gang.estimate_ms, gang.expected_ms = estimate.limit_ms, estimate.expected_ms
        queue = self.queues.get(spec.profile)
        if not gang.estimate_ms and isinstance(queue, BackfillQueue):
            gang.estimate_ms = queue.queue.estimate_ms(gang)
        gang.expected_ms = gang.expected_ms or gang.estimate_ms
        return gang

    def _job_ended(self, job: Job) -> None:
        if self.estimator.learns and (runtime := runtime_sample(job)) is not None:
            self._learn_runtime(runtime)

    def _learn_runtime(self, runtime: RuntimeSample) -> None:
        self.estimator.learn(runtime)
        for queue in self.queues.values():
            if isinstance(queue, BackfillQueue):
                queue.reconsider(runtime.user, self.estimator.estimate)

    def _limit_ms(self, spec: JobSpec) -> int:
        return self.gang(0, spec, 0).estimate_ms

    def _overrun(self, profile: str) -> str:
        queue = self.queues.get(profile)
        return "let" if queue is None else getattr(queue.profile.queue, "overrun", "let")

    def _reset_for_requeue(self, fact: JobRequeued, record: Job) -> Job:
        self.dependencies.note(fact.dependency_statuses)
        return self.profile_router.afresh(record)

    def _dequeue(self, job: Job) -> None:
        if self.cluster.availability.remove_start_reservation(job.id) is not None:
            self._wake("run_ended")
        self._drop_hold(job.id)
        queue = self.queues.get(job.spec.profile)
        if queue is not None:
            queue.remove(job.id)

    def _drop_hold(self, job: JobId) -> None:
        if self.preemption.drop(job):
            self._wake("run_ended")

    def _wake(self, trigger: Trigger) -> None:
        self._triggers.add(trigger)

    def _expire(self, now_ms: int) -> None:
        if self.profile_router.turn(now_ms):
            self._wake("time")
        if self.accounts.turn(now_ms):
            self._wake("job_ended")
        self.evictions.run_out(now_ms)
        if self.cluster.availability.reservations:
            self.reservations.turn(now_ms)
        self._overruns.look(now_ms)
        for id in self.gangs.hopeless(now_ms) if self.gangs.repairs else ():
            self._lifecycle.fall_apart(self.cluster.jobs[id], "no place was found for a missing member", now_ms)
        for id in self._timers.due(now_ms):
            self.relocation.lapse(id, now_ms)
            job = self.cluster.jobs.get(id)
            if job is not None and job.state in ("scheduled", "running"):
                self._lifecycle.check_assembly(job, now_ms)
            elif job is not None and job.state == "pending":
                queue = self.queues.get(job.spec.profile)
                gang = queue.gangs.get(id) if queue is not None else None
                refusal = queue.refusal_of(gang) if queue is not None and gang is not None else None
                late = routing.overdue(job, now_ms, refusal)
                if late is not None:
                    self._dequeue(job)
                    self._lifecycle.finish(job, "failed", now_ms, *late)

    def _watch_assembly(self, job: Job, placed_ms: int) -> None:
        if job.spec.gang.assembly_timeout_ms:
            self._timers.set(placed_ms + job.spec.gang.assembly_timeout_ms, job.id)

    # --------------------------------------------------------------------------------------------- deciding

    def _decide(self, now_ms: int) -> Plan:
        plan, view, woken = Plan([], [], [], []), self.view(now_ms), bool(self._triggers)
        refused = set[Hashable]()  # kinds of gangs that found no capacity in this step
        self.cluster.table.settle()
        # 1. Keep victims whose stop orders have all been withdrawn.
        self.preemption.sparing.settle(now_ms)
        # 2. Place gangs for which others were preempted.
        if self.preemption.holds:
            self._place_holds(plan, view, refused)
        # 3. Replace missing members of running gangs, and find nodes for jobs that run on every node.
        if self.gangs.repairs:
            self._repair_gangs(plan, view, woken)
        self._sync_per_node(view, woken)
        # 4. Wake the pending gangs that a change may help.
        ticked = self.profile_router.wake(self._triggers, now_ms) if self._triggers else ()
        self._triggers.clear()
        again, self._once_more, self._unfinished = self._once_more, False, False
        # 5. Try the gangs of all queues, in one order.
        turns = self._active_queues(now_ms)
        self._try_queues(turns, plan, view, refused)
        self._end_turns(turns, ticked, again, now_ms)
        # 6. Let elastic gangs grow into what is left.
        if self.gangs.growing:
            self._grow_gangs(plan, view, woken or bool(self._triggers))
        # 7. Write reasons, withdraw stop orders that help no gang, report failed plugins.
        self._unfinished |= self.per_node.finish(view, self.profile_router.routing.availability)
        self.preemption.sparing.ask()
        self._report_faults(plan, now_ms)
        return plan

    def _place_holds(self, plan: Plan, view: View, refused: set[Hashable]) -> None:
        self.preemption.wake(self._triggers)
        self._place_ready_holds(plan, view)
        for hold in self.preemption.awake(joins=True):
            self._place_elsewhere(hold, plan, view, refused)

    def _try_queues(self, turns: list[ProfileQueue], plan: Plan, view: View, refused: set[Hashable]) -> None:
        tries = 0
        for turn, item in next_gangs(turns, view):
            if isinstance(item, Hold):
                self._place_elsewhere(item, plan, view, refused)
            elif item.joins:
                self._place_on_node(item, plan, view)
            elif tries >= self._max_tries:
                # Facts are waiting too; the others are tried in the next step, which follows at once.
                self._unfinished = True
                break
            else:
                tries += 1
                self._try_gang(turn, item, plan, view)

    def _try_gang(self, turn: ProfileQueue, gang: Gang, plan: Plan, view: View) -> None:
        """Start the gang, preempt others for it, or note why it waits."""
        queue, now_ms = turn.line, view.now_ms
        turn.tried += 1
        gang.attempts += 1
        gang.last_attempt_ms = now_ms
        if isinstance(queue, BackfillQueue):
            queue.begin(gang, view)
        result = self.preemption.try_gang(gang, view)
        if not isinstance(result, Refusal):
            queue.started(gang)
            gang.kind = queue.kind if isinstance(queue, BackfillQueue) else ""
            self._bind(gang, result, plan, now_ms)
            return
        evictions = None if preemption_cannot_help(result) else self.preemption.attempt(gang, view, result)
        if evictions is not None:
            queue.started(gang)
            plan.evictions += evictions
            return
        self._refused(queue, gang, result, now_ms)
        plan.refusals.append(result)
        turn.refused += 1

    def _end_turns(self, turns: list[ProfileQueue], ticked: Collection[str], again: bool, now_ms: int) -> None:
        for turn in turns:
            if isinstance(turn.line, BackfillQueue) and turn.line.lapsed and len(self.queues) > 1:
                # The lapsed start reservation may be all that blocked a gang in a queue that has had its turn.
                self._wake("job_ended")
                self._once_more = not again
                self._unfinished |= self._once_more
            if turn.name in ticked:
                self.profile_router.ticked(turn.name, turn.tried, turn.refused, now_ms)

    def _report_faults(self, plan: Plan, now_ms: int) -> None:
        plan.faults = self.engine.runner.take_faults()
        for fault in plan.faults:
            self.cluster.emit(
                "plugin.failed", now_ms, job=fault.job, plugin=fault.plugin, point=fault.point, error=fault.error
            )

    def _active_queues(self, now_ms: int) -> list[ProfileQueue]:
        """The queues with something to try."""
        out, paused = [], self.profile_router.routing.availability.paused
        for name, queue in self.queues.items():
            if name in paused:
                continue
            holds = self.preemption.awake(name) if self.preemption.holds else []
            if queue.gangs or holds or self.per_node.first(name) is not None:
                queue.wake_due(now_ms)
                out.append(ProfileQueue(name, queue, holds, self.per_node))
        return out

    def _place_ready_holds(self, plan: Plan, view: View) -> None:
        """Start gangs whose victims have ended; one that does not fit any more (a node was lost) is queued again."""
        for gang in self.preemption.ripe():
            result = self.engine.try_gang(gang, view)
            if isinstance(result, Refusal):
                self._abandon_preemption(gang, summary(result.verdicts, result.nodes), view.now_ms)
            else:
                self._bind(gang, result, plan, view.now_ms)

    def _place_elsewhere(self, hold: Hold, plan: Plan, view: View, refused: set[Hashable]) -> None:
        """A gang that waits for its victims starts on other capacity that was freed meanwhile."""
        placed = self.preemption.elsewhere(hold, view, refused)
        if placed is not None:
            self._bind(hold.gang, placed, plan, view.now_ms)
            self._wake("run_ended")  # what was held for it is free now, for queues that may have had their turn
            self._unfinished = True

    def _repair_gangs(self, plan: Plan, view: View, woken: bool) -> None:
        """Running gangs that lack a member come before pending gangs."""
        for gang in self.gangs.due(view.now_ms, woken=woken):
            if gang.id in self.preemption.holds:
                continue
            self._wake("run_ended")  # what was kept for it is free now, wherever it is placed
            result = self.preemption.try_gang(gang, view)
            if not isinstance(result, Refusal):
                self._bind(gang, result, plan, view.now_ms)
                continue
            evictions = None if preemption_cannot_help(result) else self.preemption.attempt(gang, view, result)
            if evictions is not None:
                plan.evictions += evictions
            else:
                plan.refusals.append(result)

    def _sync_per_node(self, view: View, woken: bool) -> None:
        """A job that runs on every node ends when each node has had its run, and asks for the nodes without one."""

        def end(job: Job, state: Literal["succeeded", "failed"], failed: Run | None) -> None:
            code, text = end_of(failed) if failed is not None else ("", "")
            exit_code = failed.exit_code if failed is not None else 0
            self._lifecycle.finish(job, state, view.now_ms, code, text, exit_code=exit_code)

        self.per_node.begin(view, woken, end)

    def _place_on_node(self, gang: Gang, plan: Plan, view: View) -> None:
        """A member of a job that runs on every node. It preempts nothing."""
        result = self.engine.place(gang, view)
        if isinstance(result, Refusal):
            self.per_node.refused(gang, result)
        else:
            self._bind(gang, result, plan, view.now_ms)

    def _grow_gangs(self, plan: Plan, view: View, woken: bool) -> None:
        """Only when no pending gang needs capacity."""
        if self._unfinished or self.preemption.holds or any(queue.needs_capacity() for queue in self.queues.values()):
            return
        for gang in self.gangs.may_grow(woken=woken):
            result = self.engine.place(gang, view)
            if not isinstance(result, Refusal):
                self._bind(gang, result, plan, view.now_ms)

    def _abandon_preemption(self, gang: Gang, why: str, now_ms: int) -> None:
        reason = f"the room made for it came to nothing: {why}"
        self.cluster.emit("job.preemption_abandoned", now_ms, job=gang.id, reason=reason)
        self._wake("run_ended")
        job = self.cluster.change_job(
            self.cluster.jobs[gang.id], now_ms, reason_code="PREEMPTION_ABANDONED", reason=reason
        )
        self._unfinished = True  # its queue may have had its turn
        (self.gangs.look if gang.joins else self._enqueue)(job, now_ms)

    def _refused(self, queue: SchedulingQueue | BackfillQueue, gang: Gang, refusal: Refusal, now_ms: int) -> None:
        job = self.cluster.jobs[gang.id]
        text = summary(refusal.verdicts, refusal.nodes)
        code = refusal.verdicts[0].reason.code if refusal.verdicts else "NO_NODES"
        if refusal.fitted and refusal.verdicts and refusal.verdicts[0].count:
            text = f"{refusal.fitted} of {gang.size} members fit; for the next one {text}"
        if down := self.backend_availability.text(gang, refusal):
            code, text = UNAVAILABLE, down
        text = with_past(job, text)
        if (job.reason_code, job.reason) != (code, text):
            self.cluster.change_job(job, now_ms, reason_code=code, reason=text)
        if failed(refusal):
            until_ms = self.profile_router.after_fault(gang.job.profile, now_ms, self.retry.failed_plugin)
            if not self._leave_broken_profile(queue, job, text, now_ms):
                queue.back_off(gang, until_ms)
        else:
            self.accounts.refused(gang, refusal, now_ms)
            known_ms = None if "time" in refusal.requeue_on else self.preemption.next_change_ms(now_ms)
            if self.preemption.too_soon and known_ms is not None:
                refusal = structs.replace(refusal, requeue_on=(*refusal.requeue_on, "time"))
            queue.refused(gang, refusal)
            if "time" in refusal.requeue_on:
                self.profile_router.call_again(gang.job.profile, now_ms, known_ms)

    def _leave_broken_profile(self, queue: SchedulingQueue | BackfillQueue, job: Job, text: str, now_ms: int) -> bool:
        """Move a job whose profile has a plugin that keeps failing to another profile, if allowed; whether it moved."""
        if not self.profile_router.is_broken(job.spec.profile):
            return False
        problem = f"a plugin of profile {job.spec.profile} fails: {text}"
        moved = self.profile_router.escalations.relocated(self.cluster.jobs[job.id], now_ms, problem)
        if moved.spec.profile == job.spec.profile:
            return False
        queue.remove(job.id)
        self._enqueue(moved, now_ms)
        self._unfinished = True  # the other queue may have had its turn
        return True

    def _bind(self, gang: Gang, placements: Sequence[Placed], plan: Plan, now_ms: int) -> None:
        job = bind(self.cluster, gang, placements, plan, now_ms)
        self._watch_assembly(job, now_ms)
        if gang.kind == "backfill":  # only backfilled runs delay others when they take longer
            self._overruns.watch(job)
        if gang.joins or any(gang.extra) or job.spec.gang.per_node:
            self.gangs.look(job, now_ms)
        self._wake("run_placed")
