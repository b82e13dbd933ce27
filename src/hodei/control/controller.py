"""Facts in, plan and effects out. The same steps in the server, the simulator and a replay.

`step` learns every fact, then lets the engine decide for all gangs that are ready. It never reads a clock and never fails
on a fact: what no longer applies (a late observation, a second cancel) changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from typing import Literal

from msgspec import structs

from hodei.control.accounting.accounts import Accounts, AccountsPolicy
from hodei.control.admission import wait_limits
from hodei.control.admission.backend_availability import UNAVAILABLE, BackendAvailability
from hodei.control.admission.gate import AdmissionPolicy, Gate
from hodei.control.admission.profile_router import ProfileRouter
from hodei.control.chunks import PART, at_once, parts
from hodei.control.estimates import UserEstimates
from hodei.control.lifecycle.arrays import Arrays
from hodei.control.lifecycle.binding import bind
from hodei.control.lifecycle.commands import ASKED, UserCommands
from hodei.control.lifecycle.dependencies import Dependencies
from hodei.control.lifecycle.gangs import Gangs
from hodei.control.lifecycle.jobs import JobLifecycle
from hodei.control.lifecycle.nodes import NodeEvents
from hodei.control.lifecycle.per_node import PerNode, end_of
from hodei.control.lifecycle.preemption import Hold, PreemptionControl, PreemptionPolicy, with_past
from hodei.control.lifecycle.priority_inheritance import PriorityInheritance
from hodei.control.lifecycle.relocation import Relocation
from hodei.control.lifecycle.retry import RetryPolicy
from hodei.control.lifecycle.taint_eviction import TaintEviction
from hodei.control.queue.backfill import BackfillQueue, reckons_with_time
from hodei.control.queue.base import SchedulingQueue
from hodei.control.queue.multifactor import MultifactorQueue
from hodei.control.queue.selection import ProfileQueue, next_gangs
from hodei.control.reconfigure import reconfigure, returning
from hodei.control.reservations.audit import StartReservationAudit
from hodei.control.reservations.overruns import OverrunEnforcement, ReservationWindows
from hodei.control.reservations.reservations import Reservations
from hodei.control.state import ClusterState
from hodei.control.step import Step as Step
from hodei.control.step import beyond_help, failed
from hodei.control.timers import Timers
from hodei.engine.cycle import Engine
from hodei.engine.explain import summary
from hodei.engine.plan import Plan, Refusal
from hodei.engine.points import Placed, Trigger
from hodei.engine.profile import Profile
from hodei.engine.view import Gang, View, gang_of
from hodei.model.config import SchedulingConfig
from hodei.model.estimate import Ran, ran
from hodei.model.facts import (
    BackendReported,
    DataAppeared,
    Fact,
    HistoryRestored,
    JobReleased,
    JobRequeued,
    JobRestored,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    NodeOverridden,
    Noted,
    OverridesRestored,
    Reconfigured,
    ReservationCancelled,
    ReservationMade,
    RunObserved,
    RunSpared,
    UsageRestored,
)
from hodei.model.ids import JobId
from hodei.model.job import Job, JobSpec, Run
from hodei.model.lifecycle import RUN_ENDED
from hodei.ports import Estimator

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
        steering: ProfileRouter | None = None,
        accounts: AccountsPolicy | None = None,
        last_event: int = 0,
        max_tries: int = 5000,
    ) -> None:
        self.world = ClusterState(last_event)
        self.engine = Engine(self.world.table, profiles)
        self.lines = {name: self.line_for(profile) for name, profile in sorted(profiles.items())}
        self.world.keeps_book = any(map(reckons_with_time, self.lines.values()))
        self.estimator: Estimator = estimator or UserEstimates()
        self.world.limit_ms = self._limit_ms
        self.keeping = StartReservationAudit(self.world)
        self.gate = Gate(self.engine, admission or AdmissionPolicy())
        self.backend_availability = BackendAvailability(self.engine, self.gate)
        self.gate.unknown = self.backend_availability.unknown
        self.retry = retry or RetryPolicy()
        self.beat_ms = 0
        self._timers = Timers()
        self.gangs = Gangs(self.world, self.engine.profiles, self.retry)
        self._lives = JobLifecycle(self.world, self.retry, self.gangs, self._enqueue, self._wake)
        if self.estimator.learns:
            self._lives.ended = self._remember
        self.arrays = Arrays(self.world, self._enqueue)
        self.dependencies = Dependencies(self.world, self._lives, self._enqueue)
        self.inheriting = PriorityInheritance(self.world, self.dependencies, self.lines)
        self.evictions = TaintEviction(self.world, self._lives)
        self.bookings = Reservations(self.world, ReservationWindows(self.world, self._lives), self._wake)
        self._overrunning = OverrunEnforcement(self.world, self._lives, self._overrun)
        self.accounts = Accounts(accounts or AccountsPolicy(), self.world, self._lives)
        self.preempting = PreemptionControl(
            self.world, self.engine, self._lives, preemption or PreemptionPolicy(), self._void
        )
        self.steering = steering or ProfileRouter()
        self.steering.bind(self.world, self.lines, self.gate, self._enqueue, self._dequeue)
        self.remake: Remake | None = None
        self.moving = Relocation(self.world, self.engine, self._lives, self.preempting, self.gang, self.view)
        self.moving.queueing(self._dequeue, self._enqueue, self._timers.set)
        self._places = NodeEvents(
            self.world, self._lives, self.gangs, self.evictions, self.preempting, self.moving, self._void, self._wake
        )
        self._asked = UserCommands(self.world, self._lives, self.moving, self._dequeue, self._afresh)
        self.gangs.given_up = self._give_up_room
        self._lives.backend_failed = self.steering.recourses.backend_failed
        self.per_node = PerNode(self.world, self.engine, self.retry)
        self.gangs.spread = self.per_node.look
        self._max_tries = max_tries
        # Those who waited in lines that new settings have taken away.
        self.returning: dict[JobId, Gang] = {}
        self._triggers: set[Trigger] = set()
        self._unfinished = self._once_more = False

    def line_for(self, profile: Profile) -> SchedulingQueue | BackfillQueue:
        if hasattr(profile.queue, "promises"):
            return BackfillQueue(profile, self.engine)
        return MultifactorQueue(profile) if hasattr(profile.queue, "rank_milli") else SchedulingQueue(profile)

    def view(self, now_ms: int) -> View:
        accounts = self.accounts
        return View(now_ms, self.world.book, accounts.shares(now_ms), accounts.bounds)

    # -------------------------------------------------------------------------------------------- driving

    def step(self, now_ms: int, facts: Sequence[Fact] = ()) -> Step:
        return at_once(self.stepping(now_ms, facts))

    def stepping(self, now_ms: int, facts: Sequence[Fact] = ()) -> Generator[None, None, Step]:
        """The same in parts. Between two of them the controller may be asked, but not be told or stepped."""
        self.keeping.judge(now_ms)
        for number, part in enumerate(parts(facts)):
            if number:
                yield
            for fact in part:
                self._learn(fact, now_ms)
        self.world.by = ""
        if self.returning:
            yield from returning(self, now_ms)
        long = len(facts) > PART
        if long:
            yield
        self._expire(now_ms)
        yield from self.dependencies.settling(now_ms)
        self.inheriting.follow()
        yield from self.arrays.turning(now_ms)
        if long:
            yield
        plan = self._decide(now_ms)
        self._overrunning.look(now_ms)  # once more: promises may have been made just now
        self.beat_ms = now_ms
        if long:
            yield
        saves, acts = yield from self.world.taking_effects()
        return Step(plan, saves + self.accounts.saves(), acts)

    def next_wakeup_ms(self, now_ms: int) -> int | None:
        """When `step` should be called even if nothing happens; None for never."""
        if self._unfinished:
            return now_ms
        paused = self.steering.routing.availability.paused
        due = [line.next_due_ms() for name, line in self.lines.items() if line.gangs and name not in paused]
        due += [self._timers.next_ms(), self.evictions.next_ms(), self.steering.next_ms(), self.dependencies.next_ms()]
        due += [self.world.book.next_start_ms(now_ms), self._overrunning.next_ms(), self.accounts.next_ms()]
        due.append(self.per_node.next_ms())
        if self.gangs.repairs:
            due.append(self.gangs.next_ms())
        if self.world.book.bookings:
            due.append(self.bookings.next_ms())
        return min([at for at in due if at is not None], default=None)

    def pending(self) -> dict[str, int]:
        held = [hold.gang.job.profile for hold in self.preempting.holds.values()]
        outside = self.arrays.waiting + self.dependencies.in_profile
        return {name: len(line) + held.count(name) + outside[name] for name, line in self.lines.items()}

    # ------------------------------------------------------------------------------------------- learning

    def _learn(self, fact: Fact, now_ms: int) -> None:
        world = self.world
        world.by = fact.by
        match fact:
            case JobSubmitted(job=job):
                job = self.steering.routed(job)
                if job.spec.after.of:
                    job = self.dependencies.submitted(job, fact.standings)
                world.add_job(job, new=True)
                world.by = job.spec.user
                world.tell("job.submitted", now_ms, job=job.id, name=job.spec.name, project=job.spec.project)
                if job.state == "pending":
                    self._enqueue(job, now_ms)
            case RunObserved():
                run = world.run(fact.run)
                if run is not None:
                    self._lives.observed(run, fact, now_ms)
            case RunSpared(run=id):
                self.preempting.sparing.dropped(id)
            case DataAppeared(what=what):
                self.dependencies.appeared(what)
            case _ if isinstance(fact, ASKED):
                self._asked.learn(fact, now_ms)
            case JobReleased(job=id):
                self._asked.resume(id, now_ms)
                held = world.jobs.get(id)
                if held is not None and held.state == "held":
                    queued_ms = 0 if id in self.dependencies else now_ms
                    freed = world.change_job(held, now_ms, to="pending", reason_code="", reason="", queued_ms=queued_ms)
                    world.tell("job.released", now_ms, job=id)
                    self._enqueue(freed, now_ms)
            case NodeJoined():
                self._places.joined(fact, now_ms)
            case NodeLost():
                self._places.lost(fact, now_ms)
            case BackendReported():
                self.backend_availability.reported(fact)
                self._wake("node_changed")  # those who wait are told why
            case NodeOverridden():
                self._places.marked(fact, now_ms)
            case JobRestored(job=job, runs=runs):
                self.dependencies.restored(job, fact.standings)
                self._restore(job, runs, now_ms)
            case OverridesRestored(marks=marks):
                world.put_marks(marks, new=False)
            case ReservationMade():
                self.bookings.made(fact.booking, now_ms, restored=fact.restored)
            case Noted():
                world.tell(fact.kind, now_ms, job=fact.job, **fact.detail)
            case ReservationCancelled():
                self.bookings.cancelled(fact.name, fact.by, now_ms)
            case UsageRestored(rows=rows):
                self.accounts.restore(rows)
            case HistoryRestored(ran=many):
                for each in many:
                    self._remember(each)
            case Reconfigured():
                reconfigure(self, fact, now_ms)
            case _:
                raise TypeError(f"unknown fact {fact!r}")

    def _restore(self, job: Job, runs: Sequence[Run], now_ms: int) -> None:
        job = self.steering.restored(job)
        self.world.add_job(job, new=False)
        self.arrays.restored(job)
        for run in runs:
            self.world.add_run(run, new=False)
            if run.state not in RUN_ENDED:
                self._lives.hold_room(run)
        self._overrunning.watch(job)
        if job.state == "pending":
            self._enqueue(job, now_ms)
        elif job.state in ("scheduled", "running"):
            self._watch_assembly(job, max((run.placed_ms for run in runs), default=now_ms))
            if job.spec.size > 1 or job.spec.gang.per_node:
                job = self.gangs.look(job, now_ms, pause_ms=max(job.not_before_ms - now_ms, 0))
            self._lives.conclude(job, now_ms)

    # --------------------------------------------------------------------------------------------- queueing

    def _enqueue(self, job: Job, now_ms: int) -> None:
        availability = self.steering.routing.availability
        if not availability.idle:
            job = self.steering.recourses.relocated(job, now_ms)
            if job.spec.profile in availability.paused:
                paused = availability.problem(job.spec.profile)
                job = self.world.change_job(job, now_ms, reason_code="PROFILE_PAUSED", reason=paused)
        if job.spec.profile not in self.lines:
            # The configuration has changed since it was let in; it waits for a person rather than being thrown away.
            reason = f"its profile {job.spec.profile!r} is not configured any more"
            self.world.change_job(job, now_ms, to="held", reason_code="UNKNOWN_PROFILE", reason=reason)
            self.world.tell("job.held", now_ms, job=job.id, reason=reason)
            return
        if job.spec.after.of and not (job.queued_ms or job.attempt):
            self.dependencies.arrive(job)
            return
        if job.spec.array is not None and not self.arrays.lets_in(job, now_ms):
            return
        gang = self.gang(job.id, job.spec, job.submitted_ms)
        gang.queued_ms = job.submitted_ms
        gang.lifted = self.inheriting.lifts.get(job.id)
        if self.moving.arrive(gang, job):
            return
        self.lines[job.spec.profile].add(gang, not_before_ms=job.not_before_ms, now_ms=now_ms)
        if job.spec.scheduling_timeout_ms or job.spec.max_queue_time_ms:
            due_ms = wait_limits.due_ms(job)
            if due_ms is not None:
                self._timers.set(due_ms, job.id)
        self.steering.recourses.watch(job, now_ms)

    def gang(self, id: JobId, spec: JobSpec, submitted_ms: int) -> Gang:
        """All members of a job, with how long they may and are expected to run."""
        gang, estimate = gang_of(id, spec, submitted_ms), self.estimator.estimate(spec)
        gang.estimate_ms, gang.expected_ms = estimate.limit_ms, estimate.expected_ms
        line = self.lines.get(spec.profile)
        if not gang.estimate_ms and isinstance(line, BackfillQueue):
            gang.estimate_ms = line.queue.estimate_ms(gang)
        gang.expected_ms = gang.expected_ms or gang.estimate_ms
        return gang

    def _remember(self, ended: Job | Ran) -> None:
        told = ended if isinstance(ended, Ran) else ran(ended)
        if told is not None:
            self.estimator.learn(told)
            for line in self.lines.values():
                if isinstance(line, BackfillQueue):
                    line.reconsider(told.user, self.estimator.estimate)

    def _limit_ms(self, spec: JobSpec) -> int:
        return self.gang(0, spec, 0).estimate_ms

    def _overrun(self, profile: str) -> str:
        line = self.lines.get(profile)
        return "let" if line is None else getattr(line.profile.queue, "overrun", "let")

    def _afresh(self, fact: JobRequeued, record: Job) -> Job:
        self.dependencies.note(fact.standings)
        return self.steering.afresh(record)

    def _dequeue(self, job: Job) -> None:
        if self.world.book.withdraw(job.id) is not None:
            self._wake("run_ended")
        self._give_up_room(job.id)
        line = self.lines.get(job.spec.profile)
        if line is not None:
            line.remove(job.id)

    def _give_up_room(self, job: JobId) -> None:
        if self.preempting.drop(job):
            self._wake("run_ended")

    def _wake(self, trigger: Trigger) -> None:
        self._triggers.add(trigger)

    def _expire(self, now_ms: int) -> None:
        if self.steering.turn(now_ms):
            self._wake("time")
        if self.accounts.turn(now_ms):
            self._wake("job_ended")
        self.evictions.run_out(now_ms)
        if self.world.book.bookings:
            self.bookings.turn(now_ms)
        self._overrunning.look(now_ms)
        for id in self.gangs.hopeless(now_ms) if self.gangs.repairs else ():
            self._lives.fall_apart(self.world.jobs[id], "no place was found for a missing member", now_ms)
        for id in self._timers.due(now_ms):
            self.moving.lapse(id, now_ms)
            job = self.world.jobs.get(id)
            if job is not None and job.state in ("scheduled", "running"):
                self._lives.check_assembly(job, now_ms)
            elif job is not None and job.state == "pending":
                line = self.lines.get(job.spec.profile)
                gang = line.gangs.get(id) if line is not None else None
                refusal = line.refusal_of(gang) if line is not None and gang is not None else None
                late = wait_limits.overdue(job, now_ms, refusal)
                if late is not None:
                    self._dequeue(job)
                    self._lives.finish(job, "failed", now_ms, *late)

    def _watch_assembly(self, job: Job, placed_ms: int) -> None:
        if job.spec.gang.assembly_timeout_ms:
            self._timers.set(placed_ms + job.spec.gang.assembly_timeout_ms, job.id)

    # --------------------------------------------------------------------------------------------- deciding

    def _decide(self, now_ms: int) -> Plan:
        plan, view, tries = Plan([], [], [], []), self.view(now_ms), 0
        self.world.table.settle()
        woken = bool(self._triggers)
        self.preempting.sparing.settle(now_ms)
        refused = set[Hashable]()
        if self.preempting.holds:
            self.preempting.wake(self._triggers)
            self._take_places(plan, view)
            for hold in self.preempting.awake(joins=True):
                self._start_elsewhere(hold, plan, view, refused)
        if self.gangs.repairs:
            self._repair_gangs(plan, view, woken)
        self._look_at_per_node(view, woken)
        ticked = self.steering.wake(self._triggers, now_ms) if self._triggers else ()
        self._triggers.clear()
        again, self._once_more, self._unfinished = self._once_more, False, False
        turns = self._turns(now_ms)
        for turn, item in next_gangs(turns, view):
            if isinstance(item, Hold):
                self._start_elsewhere(item, plan, view, refused)
                continue
            line, gang = turn.line, item
            if gang.joins:
                self._spread(gang, plan, view)
                continue
            if tries >= self._max_tries:
                # Facts are waiting too; the others are tried in the next step, which comes at once.
                self._unfinished = True
                break
            tries += 1
            turn.tried += 1
            gang.attempts += 1
            gang.last_attempt_ms = now_ms
            if isinstance(line, BackfillQueue):
                line.begin(gang, view)
            result = self.preempting.try_gang(gang, view)
            if isinstance(result, Refusal):
                evictions = None if beyond_help(result) else self.preempting.attempt(gang, view, result)
                if evictions is not None:
                    line.started(gang)
                    plan.evictions += evictions
                    continue
                self._refused(line, gang, result, now_ms)
                plan.refusals.append(result)
                turn.refused += 1
            else:
                line.started(gang)
                gang.kind = line.kind if isinstance(line, BackfillQueue) else ""
                self._bind(gang, result, plan, now_ms)
        for turn in turns:
            if isinstance(turn.line, BackfillQueue) and turn.line.lapsed and len(self.lines) > 1:
                # That promise may be all that kept someone waiting in a line that has had its turn.
                self._wake("job_ended")
                self._once_more = not again
                self._unfinished |= self._once_more
            if turn.name in ticked:
                self.steering.ticked(turn.name, turn.tried, turn.refused, now_ms)
        if self.gangs.growing:
            self._grow_gangs(plan, view, woken or bool(self._triggers))
        self._unfinished |= self.per_node.finish(view, self.steering.routing.availability)
        self.preempting.sparing.ask()
        plan.faults = self.engine.runner.take_faults()
        for fault in plan.faults:
            self.world.tell(
                "plugin.failed", now_ms, job=fault.job, plugin=fault.plugin, point=fault.point, error=fault.error
            )
        return plan

    def _turns(self, now_ms: int) -> list[ProfileQueue]:
        """The lines in which there is something to try."""
        out, paused = [], self.steering.routing.availability.paused
        for name, line in self.lines.items():
            if name in paused:
                continue
            holds = self.preempting.awake(name) if self.preempting.holds else []
            if line.gangs or holds or self.per_node.first(name) is not None:
                line.wake_due(now_ms)
                out.append(ProfileQueue(name, line, holds, self.per_node))
        return out

    def _take_places(self, plan: Plan, view: View) -> None:
        """Those for whom room was made come first; should it have come to nothing (a node went), they queue again."""
        for gang in self.preempting.ripe():
            result = self.engine.try_gang(gang, view)
            if isinstance(result, Refusal):
                self._void(gang, summary(result.verdicts, result.nodes), view.now_ms)
            else:
                self._bind(gang, result, plan, view.now_ms)

    def _start_elsewhere(self, hold: Hold, plan: Plan, view: View, refused: set[Hashable]) -> None:
        """One for whom room is being made takes other room that has appeared meanwhile."""
        placed = self.preempting.elsewhere(hold, view, refused)
        if placed is not None:
            self._bind(hold.gang, placed, plan, view.now_ms)
            self._wake("run_ended")  # what was held for it is anyone's now, whose line may have had its turn
            self._unfinished = True

    def _repair_gangs(self, plan: Plan, view: View, woken: bool) -> None:
        """Running gangs that lack a member have the first claim on what is free."""
        for gang in self.gangs.due(view.now_ms, woken=woken):
            if gang.id in self.preempting.holds:
                continue
            self._wake("run_ended")  # what was kept for it is anyone's now, wherever it goes
            result = self.preempting.try_gang(gang, view)
            if not isinstance(result, Refusal):
                self._bind(gang, result, plan, view.now_ms)
                continue
            evictions = None if beyond_help(result) else self.preempting.attempt(gang, view, result)
            if evictions is not None:
                plan.evictions += evictions
            else:
                plan.refusals.append(result)

    def _look_at_per_node(self, view: View, woken: bool) -> None:
        """Jobs that run on every node end when each has had its run, and want those that have none."""

        def end(job: Job, state: Literal["succeeded", "failed"], failed: Run | None) -> None:
            code, text = end_of(failed) if failed is not None else ("", "")
            exit_code = failed.exit_code if failed is not None else 0
            self._lives.finish(job, state, view.now_ms, code, text, exit_code=exit_code)

        self.per_node.begin(view, woken, end)

    def _spread(self, gang: Gang, plan: Plan, view: View) -> None:
        """A member of such a job, in its turn. It takes nobody's place."""
        result = self.engine.place(gang, view)
        if isinstance(result, Refusal):
            self.per_node.refused(gang, result)
        else:
            self._bind(gang, result, plan, view.now_ms)

    def _grow_gangs(self, plan: Plan, view: View, woken: bool) -> None:
        """Elastic gangs take what is left when nobody waits for room."""
        if self._unfinished or self.preempting.holds or any(line.wants_room() for line in self.lines.values()):
            return
        for gang in self.gangs.may_grow(woken=woken):
            result = self.engine.place(gang, view)
            if not isinstance(result, Refusal):
                self._bind(gang, result, plan, view.now_ms)

    def _void(self, gang: Gang, why: str, now_ms: int) -> None:
        reason = f"the room made for it came to nothing: {why}"
        self.world.tell("job.preemption_void", now_ms, job=gang.id, reason=reason)
        self._wake("run_ended")
        job = self.world.change_job(self.world.jobs[gang.id], now_ms, reason_code="PREEMPTION_VOID", reason=reason)
        self._unfinished = True  # the line that it stands in again may have had its turn
        (self.gangs.look if gang.joins else self._enqueue)(job, now_ms)

    def _refused(self, line: SchedulingQueue | BackfillQueue, gang: Gang, refusal: Refusal, now_ms: int) -> None:
        job = self.world.jobs[gang.id]
        text = summary(refusal.verdicts, refusal.nodes)
        code = refusal.verdicts[0].reason.code if refusal.verdicts else "NO_NODES"
        if refusal.fitted and refusal.verdicts and refusal.verdicts[0].count:
            text = f"{refusal.fitted} of {gang.size} members fit; for the next one {text}"
        if down := self.backend_availability.text(gang, refusal):
            code, text = UNAVAILABLE, down
        text = with_past(job, text)
        if (job.reason_code, job.reason) != (code, text):
            self.world.change_job(job, now_ms, reason_code=code, reason=text)
        if failed(refusal):
            until_ms = self.steering.after_fault(gang.job.profile, now_ms, self.retry.failed_plugin)
            if not self._left_broken_profile(line, job, text, now_ms):
                line.back_off(gang, until_ms)
        else:
            self.accounts.refused(gang, refusal, now_ms)
            known_ms = None if "time" in refusal.cured_by else self.preempting.next_change_ms(now_ms)
            if self.preempting.too_soon and known_ms is not None:
                refusal = structs.replace(refusal, cured_by=(*refusal.cured_by, "time"))
            line.refused(gang, refusal)
            if "time" in refusal.cured_by:
                self.steering.call_again(gang.job.profile, now_ms, known_ms)

    def _left_broken_profile(self, line: SchedulingQueue | BackfillQueue, job: Job, text: str, now_ms: int) -> bool:
        """A plugin of its profile fails again and again: it goes to another profile, if it may; whether it did."""
        if not self.steering.is_broken(job.spec.profile):
            return False
        problem = f"a plugin of profile {job.spec.profile} fails: {text}"
        moved = self.steering.recourses.relocated(self.world.jobs[job.id], now_ms, problem)
        if moved.spec.profile == job.spec.profile:
            return False
        line.remove(job.id)
        self._enqueue(moved, now_ms)
        self._unfinished = True  # the other line may have had its turn
        return True

    def _bind(self, gang: Gang, placements: Sequence[Placed], plan: Plan, now_ms: int) -> None:
        job = bind(self.world, gang, placements, plan, now_ms)
        self._watch_assembly(job, now_ms)
        if gang.kind == "backfill":  # the only ones who are in anyone's way when they take longer
            self._overrunning.watch(job)
        if gang.joins or any(gang.extra) or job.spec.gang.per_node:
            self.gangs.look(job, now_ms)
        self._wake("run_placed")
