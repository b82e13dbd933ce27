"""The controller: facts in, plan and effects out. The server, the simulator and a replay take the same steps.

`step` learns all facts, then lets the engine decide for the gangs that are ready. It reads no clock and never fails on a
fact: one that does not apply any more (a late observation, a second cancel) changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from hodei.control.accounting.accounts import Accounts, AccountsPolicy
from hodei.control.admission import routing
from hodei.control.admission.gate import UNAVAILABLE, AdmissionPolicy, BackendAvailability, Gate, UnreachedBackends
from hodei.control.admission.routing import ProfileRouter
from hodei.control.capacity.scaling import CapacityPolicy, NodeScaling
from hodei.control.estimates import UserEstimates
from hodei.control.lifecycle.arrays import Arrays
from hodei.control.lifecycle.commands import COMMANDS, UserCommands
from hodei.control.lifecycle.dependencies import Dependencies, PriorityInheritance
from hodei.control.lifecycle.gangs import Gangs
from hodei.control.lifecycle.jobs import JobLifecycle
from hodei.control.lifecycle.nodes import NODE_FACTS, NodeEvents, Relocation, TaintEviction
from hodei.control.lifecycle.per_node import PerNode, failure_of
from hodei.control.lifecycle.preemption import PreemptionControl, PreemptionPolicy, with_last_preemption
from hodei.control.lifecycle.retry import RetryPolicy
from hodei.control.lifecycle.runs import bind
from hodei.control.lifecycle.victims import Hold
from hodei.control.queue.backfill import BackfillQueue, needs_availability
from hodei.control.queue.base import SchedulingQueue
from hodei.control.queue.multifactor import MultifactorQueue
from hodei.control.queue.selection import ProfileQueue, next_gangs
from hodei.control.reconfigure import reconfigure, requeue_displaced
from hodei.control.reservations.overruns import OverrunEnforcement, ReservationWindows
from hodei.control.reservations.reservations import Reservations, StartReservationAudit
from hodei.control.state import CHUNK_SIZE, ClusterState, Timers, chunks, run_to_end
from hodei.engine.cycle import Engine
from hodei.engine.explain import summary
from hodei.engine.plan import Plan, Refusal
from hodei.engine.points import Placed
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
    JobRestored,
    JobSubmitted,
    OverridesRestored,
    Reconfigured,
    ReservationDeleted,
    ReservationMade,
    RunObserved,
    StartsForecast,
    StopWithdrawn,
    UsageRestored,
)
from hodei.model.ids import JobId, NodeName
from hodei.model.job import RUN_ENDED, Job, JobSpec, Run
from hodei.ports import Estimator


class Step(Struct):
    """The decisions of a step, and their effects: first all `saves` in one commit, then the `acts`."""

    plan: Plan
    saves: list[Save]
    acts: list[Act]

    @property
    def empty(self) -> bool:
        return self.plan.empty and not self.saves and not self.acts


class Controller:
    """`rebuild`: builds a controller from other settings, for `Reconfigured`."""

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
        capacity: CapacityPolicy | None = None,
        last_event: int = 0,
        max_tries: int = 5000,
        rebuild: Callable[[SchedulingConfig], Controller] | None = None,
    ) -> None:
        self.retry = retry = retry or RetryPolicy()
        self.estimator: Estimator = estimator or UserEstimates()
        self.cluster = cluster = ClusterState(last_event, self._limit_ms)
        cluster.signals.job_queued.append(self._enqueue)
        cluster.signals.job_dequeued.append(self._dequeue)
        cluster.signals.job_ended.append(self._job_ended)
        self._timers = Timers()
        # Admission: the profile of a job, and whether it is admitted.
        self.engine = engine = Engine(cluster.table, profiles)
        self.queues = {name: self.queue_for(profile) for name, profile in sorted(profiles.items())}
        if any(map(needs_availability, self.queues.values())):
            cluster.track_availability()
        self.gate = Gate(engine, admission or AdmissionPolicy(), UnreachedBackends())
        self.backend_availability = BackendAvailability(engine, self.gate)
        self.profile_router = profile_router or ProfileRouter()
        self.profile_router.bind(cluster, self.queues, self.gate)
        # The lifecycle of jobs, runs and nodes.
        self.per_node = PerNode(cluster, engine, retry)
        self.gangs = Gangs(cluster, engine.profiles, retry, self.per_node)
        self._lifecycle = lifecycle = JobLifecycle(cluster, retry, self.gangs, self.profile_router.escalations)
        self.arrays = Arrays(cluster)
        self.dependencies = Dependencies(cluster, lifecycle)
        self.priority_inheritance = PriorityInheritance(cluster, self.dependencies, self.queues)
        self.accounts = Accounts(accounts or AccountsPolicy(), cluster, lifecycle)
        self.preemption = PreemptionControl(cluster, engine, self.gangs, lifecycle, preemption or PreemptionPolicy())
        self.relocation = Relocation(cluster, engine, lifecycle, self.preemption, self.accounts, self.gang)
        self.evictions = TaintEviction(cluster, lifecycle)
        self.scaling = NodeScaling(cluster, capacity or CapacityPolicy(), self._is_held)
        self._node_events = NodeEvents(
            cluster, lifecycle, self.gangs, self.evictions, self.preemption, self.relocation, self.scaling
        )
        self._commands = UserCommands(cluster, lifecycle, self.relocation, self.dependencies)
        # Reservations.
        self.reservation_audit = StartReservationAudit(cluster)
        self.reservations = Reservations(cluster, ReservationWindows(cluster, lifecycle))
        self._overruns = OverrunEnforcement(cluster, lifecycle, self.queues)
        self.rebuild = rebuild
        self.beat_ms = 0
        self._max_tries = max_tries
        # Gangs of queues that a new configuration has replaced.
        self.displaced: dict[JobId, Gang] = {}
        self._retried_lost_reservation = False

    def queue_for(self, profile: Profile) -> SchedulingQueue | BackfillQueue:
        if hasattr(profile.queue, "reservation_depth"):
            return BackfillQueue(profile, self.engine)
        return MultifactorQueue(profile) if hasattr(profile.queue, "rank_milli") else SchedulingQueue(profile)

    def view(self, now_ms: int) -> View:
        return self.accounts.view(now_ms)

    def step(self, now_ms: int, facts: Sequence[Fact] = ()) -> Step:
        return run_to_end(self.step_in_chunks(now_ms, facts))

    def step_in_chunks(self, now_ms: int, facts: Sequence[Fact] = ()) -> Generator[None, None, Step]:
        """A step with breaks. During a break the controller may be read, but not changed or stepped."""
        long = len(facts) > CHUNK_SIZE
        # 1. Learn the facts.
        self.reservation_audit.check(now_ms)
        yield from self._learn_all(facts, now_ms)
        if long:
            yield
        # 2. Do what is due by the clock.
        self._expire(now_ms)
        # 3. Queue jobs whose dependencies are met, and the next elements of arrays.
        yield from self.dependencies.resolve(now_ms)
        self.priority_inheritance.update()
        yield from self.arrays.queue_next(now_ms)
        if long:
            yield
        # 4. Decide what starts, what is preempted and what waits.
        plan = self._decide(now_ms)
        # 5. Stop overruns that block a start reservation made in this step.
        self._overruns.enforce(now_ms)
        self.beat_ms = now_ms
        if long:
            yield
        # 6. Return what to commit and what to do after the commit.
        saves, acts = yield from self.cluster.take_effects()
        return Step(plan, saves + self.accounts.saves(), acts)

    def next_wakeup_ms(self, now_ms: int) -> int | None:
        """When `step` has to be called even if nothing happens; None for never."""
        if self.cluster.unfinished:
            return now_ms
        paused = self.profile_router.routing.availability.paused
        due = [queue.next_due_ms() for name, queue in self.queues.items() if queue.gangs and name not in paused]
        due += [
            self._timers.next_ms(),
            self.relocation.next_ms(),
            self.evictions.next_ms(),
            self.profile_router.next_ms(),
            self.dependencies.next_ms(),
            self.cluster.availability.next_start_ms(now_ms),
            self._overruns.next_ms(),
            self.accounts.next_ms(),
            self.per_node.next_ms(),
            self.scaling.next_ms(),
        ]
        if self.gangs.repairs:
            due.append(self.gangs.next_ms())
        if self.cluster.availability.reservations:
            due.append(self.reservations.next_ms())
        return min([at for at in due if at is not None], default=None)

    def pending(self) -> dict[str, int]:
        """The number of pending jobs by profile."""
        held = [hold.gang.job.profile for hold in self.preemption.holds.values()]
        outside = self.arrays.waiting + self.dependencies.in_profile
        return {name: len(queue) + held.count(name) + outside[name] for name, queue in self.queues.items()}

    def _learn_all(self, facts: Sequence[Fact], now_ms: int) -> Generator[None, None, None]:
        for number, chunk in enumerate(chunks(facts)):
            if number:
                yield
            for fact in chunk:
                self._learn(fact, now_ms)
        self.cluster.actor = ""
        if self.displaced:
            yield from requeue_displaced(self, now_ms)

    def _learn(self, fact: Fact, now_ms: int) -> None:
        self.cluster.actor = fact.by
        handler = _HANDLERS.get(type(fact))
        if handler is None:
            raise TypeError(f"unknown fact {fact!r}")
        handler(self, fact, now_ms)

    def _submit(self, fact: JobSubmitted, now_ms: int) -> None:
        cluster, job = self.cluster, self.profile_router.route(fact.job)
        if job.spec.after.of:
            job = self.dependencies.submitted(job, fact.dependency_statuses)
        cluster.add_job(job, new=True)
        cluster.actor = job.spec.user
        cluster.emit("job.submitted", now_ms, job=job.id, name=job.spec.name, project=job.spec.project)
        if job.state == "pending":
            self._enqueue(job, now_ms)

    def _observe(self, fact: RunObserved, now_ms: int) -> None:
        run = self.cluster.run(fact.run)
        if run is not None:
            self._lifecycle.observe(run, fact, now_ms)

    def _backend_reported(self, fact: BackendReported, now_ms: int) -> None:
        self.gate.unreached.reported(fact)
        self.cluster.wake("node_changed")  # the reasons of pending jobs may name it

    def _set_forecasts(self, fact: StartsForecast, now_ms: int) -> None:
        self.cluster.availability.forecasts = fact.starts

    def _restore_job(self, fact: JobRestored, now_ms: int) -> None:
        self.dependencies.restored(fact.job, fact.dependency_statuses)
        self._restore(fact.job, fact.runs, now_ms)

    def _restore_history(self, fact: HistoryRestored, now_ms: int) -> None:
        for sample in fact.samples:
            self._learn_runtime(sample)

    def _split_gang(self, fact: GangSplit, now_ms: int) -> None:
        job = self.cluster.jobs.get(fact.job)
        if job is not None:
            self._lifecycle.split(job, fact.at_ms, now_ms)
        for member, run in fact.members:
            self._restore(member, (run,), now_ms)

    def _restore(self, job: Job, runs: Sequence[Run], now_ms: int) -> None:
        job = self.profile_router.restore(job)
        self.cluster.add_job(job, new=False)
        self.arrays.restored(job)
        for run in runs:
            self.cluster.add_run(run, new=False)
            if run.state not in RUN_ENDED:
                self._lifecycle.hold_capacity(run)
        self._overruns.watch(job)
        if job.state == "pending":
            self._enqueue(job, now_ms)
        elif job.state in ("scheduled", "running"):
            self._watch_assembly(job, max((run.placed_ms for run in runs), default=now_ms))
            if job.spec.size > 1 or job.spec.gang.per_node:
                job = self.gangs.update(job, now_ms, pause_ms=max(job.not_before_ms - now_ms, 0))
            self._lifecycle.conclude(job, now_ms)

    def _enqueue(self, job: Job, now_ms: int) -> None:
        availability = self.profile_router.routing.availability
        if not availability.idle:
            job = self.profile_router.escalations.leave_profile(job, now_ms)
            if job.spec.profile in availability.paused:
                paused = availability.problem(job.spec.profile)
                job = self.cluster.change_job(job, now_ms, reason_code="PROFILE_PAUSED", reason=paused)
        if job.spec.profile not in self.queues:
            # The configuration has changed since it was admitted: it is held for an operator instead of failed.
            reason = f"its profile {job.spec.profile!r} is not configured any more"
            self.cluster.change_job(job, now_ms, to="held", reason_code="UNKNOWN_PROFILE", reason=reason)
            self.cluster.emit("job.held", now_ms, job=job.id, reason=reason)
            return
        if job.spec.after.of and not (job.queued_ms or job.attempt):
            self.dependencies.arrive(job)
            return
        if job.spec.array is not None and not self.arrays.admits(job, now_ms):
            return
        gang = self.gang(job.id, job.spec, job.submitted_ms)
        gang.queued_ms = job.submitted_ms
        gang.inherited_priority = self.priority_inheritance.inherited.get(job.id)
        if self.relocation.queued(gang, job):
            return
        self.queues[job.spec.profile].add(gang, not_before_ms=job.not_before_ms, now_ms=now_ms)
        if job.spec.scheduling_timeout_ms or job.spec.max_queue_time_ms:
            due_ms = routing.wait_deadline_ms(job)
            if due_ms is not None:
                self._timers.set(due_ms, job.id)
        self.profile_router.escalations.watch(job, now_ms)

    def _dequeue(self, job: Job) -> None:
        if self.cluster.availability.remove_start_reservation(job.id) is not None:
            self.cluster.wake("run_ended")
        self.preemption.release(job.id)
        queue = self.queues.get(job.spec.profile)
        if queue is not None:
            queue.remove(job.id)

    def gang(self, id: JobId, spec: JobSpec, submitted_ms: int) -> Gang:
        """The gang of a job, with its run time limit and expected run time."""
        gang, estimate = gang_of(id, spec, submitted_ms), self.estimator.estimate(spec)
        gang.estimate_ms, gang.expected_ms = estimate.limit_ms, estimate.expected_ms
        queue = self.queues.get(spec.profile)
        if not gang.estimate_ms and isinstance(queue, BackfillQueue):
            gang.estimate_ms = queue.queue.estimate_ms(gang)
        gang.expected_ms = gang.expected_ms or gang.estimate_ms
        return gang

    def _limit_ms(self, spec: JobSpec) -> int:
        return self.gang(0, spec, 0).estimate_ms

    def _job_ended(self, job: Job) -> None:
        if self.estimator.learns and (runtime := runtime_sample(job)) is not None:
            self._learn_runtime(runtime)

    def _learn_runtime(self, runtime: RuntimeSample) -> None:
        self.estimator.learn(runtime)
        for queue in self.queues.values():
            if isinstance(queue, BackfillQueue):
                queue.reestimate(runtime.user, self.estimator.estimate)

    def _expire(self, now_ms: int) -> None:
        if self.profile_router.expire(now_ms):
            self.cluster.wake("time")
        if self.accounts.expire(now_ms):
            self.cluster.wake("job_ended")
        self.evictions.expire(now_ms)
        if self.cluster.availability.reservations:
            self.reservations.expire(now_ms)
        self._overruns.enforce(now_ms)
        for id in self.gangs.expired_repairs(now_ms) if self.gangs.repairs else ():
            self._lifecycle.restart_gang(self.cluster.jobs[id], "no node was found for a missing member", now_ms)
        self.relocation.expire(now_ms)
        self.scaling.expire(now_ms)
        for id in self._timers.due(now_ms):
            job = self.cluster.jobs.get(id)
            if job is not None and job.state in ("scheduled", "running"):
                self._lifecycle.check_assembly(job, now_ms)
            elif job is not None and job.state == "pending":
                queue = self.queues.get(job.spec.profile)
                gang = queue.gangs.get(id) if queue is not None else None
                refusal = queue.refusal_of(gang) if queue is not None and gang is not None else None
                exceeded = routing.wait_exceeded(job, now_ms, refusal)
                if exceeded is not None:
                    self._dequeue(job)
                    self._lifecycle.finish(job, "failed", now_ms, *exceeded)

    def _is_held(self, node: NodeName) -> bool:
        """Whether the table counts more on a node than its runs: capacity held for a job that starts there."""
        row = self.cluster.table.row.get(node)
        return row is not None and self.cluster.table.node_usage[row].runs > len(self.cluster.on_node.get(node, ()))

    def _watch_assembly(self, job: Job, placed_ms: int) -> None:
        if job.spec.gang.assembly_timeout_ms:
            self._timers.set(placed_ms + job.spec.gang.assembly_timeout_ms, job.id)

    def _decide(self, now_ms: int) -> Plan:
        cluster, plan, view = self.cluster, Plan([], [], [], []), self.view(now_ms)
        woken = bool(cluster.triggers)
        refused = set[Hashable]()  # kinds of gangs that found no capacity in this step
        cluster.table.settle()
        # 1. Keep victims whose stop orders have all been withdrawn.
        self.preemption.withdrawals.settle(now_ms)
        # 2. Place gangs whose victims have stopped.
        if self.preemption.holds:
            self._place_holds(plan, view, refused)
        # 3. Replace missing members of running gangs, and find open nodes for per-node jobs.
        if self.gangs.repairs:
            self._repair_gangs(plan, view, woken)
        self._check_per_node_jobs(view, woken)
        # 4. Wake the parked gangs that a trigger may unblock.
        ticked = self.profile_router.wake(cluster.triggers, now_ms) if cluster.triggers else ()
        cluster.triggers.clear()
        cluster.unfinished = False
        # 5. Try the gangs of all queues, in one order.
        queues = self._active_queues(now_ms)
        self._try_queues(queues, plan, view, refused)
        self._end_round(queues, ticked, now_ms)
        # 6. Let elastic gangs grow into what is left.
        if self.gangs.growing:
            self._grow_gangs(plan, view, woken or bool(cluster.triggers))
        # 7. Set reasons, withdraw stop orders that are not needed, report failed plugins.
        cluster.unfinished |= self.per_node.finish(view, self.profile_router.routing.availability)
        self.preemption.withdrawals.request()
        self._report_faults(plan, now_ms)
        return plan

    def _place_holds(self, plan: Plan, view: View, refused: set[Hashable]) -> None:
        self.preemption.wake(self.cluster.triggers)
        for gang in self.preemption.take_ready():
            result = self.engine.try_gang(gang, view)
            if isinstance(result, Refusal):  # it does not fit any more: a node was lost
                self.preemption.abandon(gang, summary(result.verdicts, result.nodes), view.now_ms)
            else:
                self._bind(gang, result, plan, view.now_ms)
        for hold in self.preemption.awake(joins=True):
            self._place_elsewhere(hold, plan, view, refused)

    def _place_elsewhere(self, hold: Hold, plan: Plan, view: View, refused: set[Hashable]) -> None:
        """A gang that waits for its victims starts on other capacity that was freed meanwhile."""
        placed = self.preemption.place_elsewhere(hold, view, refused)
        if placed is not None:
            self._bind(hold.gang, placed, plan, view.now_ms)
            self.cluster.wake("run_ended")  # what was held for it is free, for queues that may have had their turn
            self.cluster.unfinished = True

    def _repair_gangs(self, plan: Plan, view: View, woken: bool) -> None:
        """Running gangs that lack a member come before pending gangs."""
        for gang in self.gangs.due_repairs(view.now_ms, woken=woken):
            if gang.id in self.preemption.holds:
                continue
            self.cluster.wake("run_ended")  # what was kept for it is free, wherever it is placed
            result = self.preemption.try_gang(gang, view)
            if not isinstance(result, Refusal):
                self._bind(gang, result, plan, view.now_ms)
                continue
            evictions = self.preemption.preempt(gang, view, result)
            if evictions is not None:
                plan.evictions += evictions
            else:
                plan.refusals.append(result)

    def _check_per_node_jobs(self, view: View, woken: bool) -> None:
        for job, failed in self.per_node.begin(view, woken):
            if failed is None:
                self._lifecycle.finish(job, "succeeded", view.now_ms, "", "", exit_code=0)
            else:
                code, text = failure_of(failed)
                self._lifecycle.finish(job, "failed", view.now_ms, code, text, exit_code=failed.exit_code)

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

    def _try_queues(self, queues: list[ProfileQueue], plan: Plan, view: View, refused: set[Hashable]) -> None:
        tries = 0
        for source, item in next_gangs(queues, view):
            if isinstance(item, Hold):
                self._place_elsewhere(item, plan, view, refused)
            elif item.is_joining:
                self._place_on_node(item, plan, view)
            elif tries >= self._max_tries:
                # New facts are waiting too; the others are tried in the next step, which follows at once.
                self.cluster.unfinished = True
                break
            else:
                tries += 1
                self._try_gang(source, item, plan, view)

    def _try_gang(self, source: ProfileQueue, gang: Gang, plan: Plan, view: View) -> None:
        """Start the gang, preempt others for it, or park it with a reason."""
        queue, now_ms = source.queue, view.now_ms
        source.tried += 1
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
        evictions = self.preemption.preempt(gang, view, result)
        if evictions is not None:
            queue.started(gang)
            plan.evictions += evictions
            return
        self._park(queue, gang, result, now_ms)
        plan.refusals.append(result)
        source.refused += 1

    def _place_on_node(self, gang: Gang, plan: Plan, view: View) -> None:
        """A member of a per-node job. It preempts nothing."""
        result = self.engine.place(gang, view)
        if isinstance(result, Refusal):
            self.per_node.refused(gang, result)
        else:
            self._bind(gang, result, plan, view.now_ms)

    def _end_round(self, queues: list[ProfileQueue], ticked: Collection[str], now_ms: int) -> None:
        retried, self._retried_lost_reservation = self._retried_lost_reservation, False
        for source in queues:
            if isinstance(source.queue, BackfillQueue) and source.queue.reservation_lost and len(self.queues) > 1:
                # The lost start reservation may be all that blocked a gang in a queue that has had its turn.
                self.cluster.wake("job_ended")
                self._retried_lost_reservation = not retried
                self.cluster.unfinished |= self._retried_lost_reservation
            if source.name in ticked:
                self.profile_router.ticked(source.name, source.tried, source.refused, now_ms)

    def _grow_gangs(self, plan: Plan, view: View, woken: bool) -> None:
        """Only if no pending gang needs capacity."""
        unfinished = self.cluster.unfinished
        if unfinished or self.preemption.holds or any(queue.needs_capacity() for queue in self.queues.values()):
            return
        for gang in self.gangs.due_growth(woken=woken):
            result = self.engine.place(gang, view)
            if not isinstance(result, Refusal):
                self._bind(gang, result, plan, view.now_ms)

    def _report_faults(self, plan: Plan, now_ms: int) -> None:
        plan.faults = self.engine.runner.take_faults()
        for fault in plan.faults:
            self.cluster.emit(
                "plugin.failed", now_ms, job=fault.job, plugin=fault.plugin, point=fault.point, error=fault.error
            )

    def _park(self, queue: SchedulingQueue | BackfillQueue, gang: Gang, refusal: Refusal, now_ms: int) -> None:
        """Set the reason of a refused gang; it waits for a trigger, or backs off if a plugin failed."""
        job, router = self.cluster.jobs[gang.id], self.profile_router
        text = summary(refusal.verdicts, refusal.nodes)
        code = refusal.verdicts[0].reason.code if refusal.verdicts else "NO_NODES"
        if refusal.fitted and refusal.verdicts and refusal.verdicts[0].count:
            text = f"{refusal.fitted} of {gang.size} members fit; for the next one {text}"
        if down := self.backend_availability.problem(gang, refusal):
            code, text = UNAVAILABLE, down
        text = with_last_preemption(job, text)
        self.cluster.set_reason(job, code, text, now_ms)
        if any(verdict.reason.code == PLUGIN_FAILED for verdict in refusal.verdicts):
            until_ms = router.after_fault(gang.job.profile, now_ms, self.retry.failed_plugin)
            if not self._leave_broken_profile(queue, job, text, now_ms):
                queue.back_off(gang, until_ms)
            return
        self.accounts.refused(gang, refusal, now_ms)
        known_ms = None if "time" in refusal.requeue_on else self.preemption.next_change_ms()
        if self.preemption.retry_later and known_ms is not None:
            refusal = structs.replace(refusal, requeue_on=(*refusal.requeue_on, "time"))
        queue.refused(gang, refusal)
        if "time" in refusal.requeue_on:
            router.schedule_retry(gang.job.profile, now_ms, known_ms)

    def _leave_broken_profile(self, queue: SchedulingQueue | BackfillQueue, job: Job, text: str, now_ms: int) -> bool:
        """Move a job whose profile has a plugin that keeps failing to another profile, if allowed; whether it moved."""
        if not self.profile_router.is_broken(job.spec.profile):
            return False
        problem = f"a plugin of profile {job.spec.profile} fails: {text}"
        moved = self.profile_router.escalations.leave_profile(self.cluster.jobs[job.id], now_ms, problem)
        if moved.spec.profile == job.spec.profile:
            return False
        queue.remove(job.id)
        self._enqueue(moved, now_ms)
        self.cluster.unfinished = True  # the other queue may have had its turn
        return True

    def _bind(self, gang: Gang, placements: Sequence[Placed], plan: Plan, now_ms: int) -> None:
        job = bind(self.cluster, gang, placements, plan, now_ms)
        self._watch_assembly(job, now_ms)
        if gang.kind == "backfill":  # only backfilled runs delay others when they take longer
            self._overruns.watch(job)
        if gang.is_joining or any(gang.extra) or job.spec.gang.per_node:
            self.gangs.update(job, now_ms)
        self.cluster.wake("run_placed")


_HANDLERS: dict[type[Fact], Callable[[Controller, Any, int], None]] = {
    JobSubmitted: Controller._submit,
    RunObserved: Controller._observe,
    **dict.fromkeys(COMMANDS, lambda self, fact, now_ms: self._commands.apply(fact, now_ms)),
    **dict.fromkeys(NODE_FACTS, lambda self, fact, now_ms: self._node_events.apply(fact, now_ms)),
    GangSplit: Controller._split_gang,
    StopWithdrawn: lambda self, fact, now_ms: self.preemption.withdrawals.order_dropped(fact.run),
    DataAppeared: lambda self, fact, now_ms: self.dependencies.data_appeared(fact.what),
    BackendReported: Controller._backend_reported,
    StartsForecast: Controller._set_forecasts,
    JobRestored: Controller._restore_job,
    OverridesRestored: lambda self, fact, now_ms: self.cluster.put_overrides(fact.overrides, new=False),
    ReservationMade: lambda self, fact, now_ms: self.reservations.made(
        fact.reservation, now_ms, restored=fact.restored
    ),
    ReservationDeleted: lambda self, fact, now_ms: self.reservations.deleted(fact.name, fact.by, now_ms),
    EventNoted: lambda self, fact, now_ms: self.cluster.emit(fact.kind, now_ms, job=fact.job, **fact.detail),
    UsageRestored: lambda self, fact, now_ms: self.accounts.restore(fact.rows),
    HistoryRestored: Controller._restore_history,
    Reconfigured: reconfigure,
}
