"""Facts in, plan and effects out. The same steps in the server, the simulator and a replay.

`step` learns every fact, then lets the engine decide for all gangs that are ready. It never reads a clock and never fails
on a fact: what no longer applies (a late observation, a second cancel) changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from hodei.control.admission import AdmissionPolicy, Gate
from hodei.control.backlog import Line
from hodei.control.bookings import Bookings
from hodei.control.estimates import UserEstimates
from hodei.control.evictions import Evictions
from hodei.control.gangs import Gangs
from hodei.control.keeping import Keeping
from hodei.control.lives import Lives
from hodei.control.marks import described, marked, said
from hodei.control.placing import bind
from hodei.control.preempting import Preempting, PreemptionPolicy
from hodei.control.reserving import ReservingLine
from hodei.control.retry import RetryPolicy
from hodei.control.timers import Timers
from hodei.control.world import World
from hodei.engine.cycle import Engine
from hodei.engine.explain import summary
from hodei.engine.plan import Plan, Refusal
from hodei.engine.points import Placed, Trigger
from hodei.engine.profile import Profile
from hodei.engine.runner import PLUGIN_FAILED
from hodei.engine.view import Gang, View, gang_of
from hodei.model.effects import Act, Save
from hodei.model.estimate import ran
from hodei.model.facts import (
    BookingCancelled,
    BookingMade,
    Fact,
    HistoryRestored,
    JobCancelled,
    JobHeld,
    JobReleased,
    JobRequeued,
    JobRestored,
    JobSubmitted,
    MarksRestored,
    NodeJoined,
    NodeLost,
    NodeMarked,
    RunObserved,
)
from hodei.model.ids import JobId
from hodei.model.job import Job, JobSpec, Run
from hodei.model.lifecycle import JOB_ENDED, RUN_ENDED
from hodei.model.node import NodeMarks
from hodei.ports import Estimator

# How often those are tried again whom nothing but time may help.
_TICK_MS = 1000


class Step(Struct):
    """What one step decided and what is to be done about it: first all `saves` in one commit, then the `acts`."""

    plan: Plan
    saves: list[Save]
    acts: list[Act]

    @property
    def empty(self) -> bool:
        return self.plan.empty and not self.saves and not self.acts


class Controller:
    def __init__(
        self,
        profiles: Mapping[str, Profile],
        *,
        retry: RetryPolicy | None = None,
        admission: AdmissionPolicy | None = None,
        preemption: PreemptionPolicy | None = None,
        estimator: Estimator | None = None,
        last_event: int = 0,
        max_tries: int = 5000,
    ) -> None:
        self.world = World(last_event)
        self.engine = Engine(self.world.table, profiles)
        self.lines = {name: self._line(profile) for name, profile in sorted(profiles.items())}
        self.world.keeps_book = any(isinstance(line, ReservingLine) for line in self.lines.values())
        self.estimator: Estimator = estimator or UserEstimates()
        self.world.limit_ms = self._limit_ms
        self.keeping = Keeping(self.world)
        self.bookings = Bookings(self.world, self._wake)
        self.gate = Gate(self.engine, admission or AdmissionPolicy())
        self.retry = retry or RetryPolicy()
        self.beat_ms = 0
        self._timers = Timers()
        self.gangs = Gangs(self.world, profiles, self.retry)
        self._lives = Lives(self.world, self.retry, self.gangs, self._enqueue, self._wake)
        if self.estimator.learns:
            self._lives.ended = self._remember
        self._evictions = Evictions(self.world, self._lives)
        self.preempting = Preempting(self.world, self.engine, self._lives, preemption or PreemptionPolicy())
        self.gangs.given_up = self._give_up_room
        self._max_tries = max_tries
        self._triggers: set[Trigger] = set()
        self._tick_ms: int | None = None
        self._unfinished = False

    def _line(self, profile: Profile) -> Line | ReservingLine:
        return ReservingLine(profile, self.engine) if hasattr(profile.queue, "promises") else Line(profile)

    def view(self, now_ms: int) -> View:
        return View(now_ms, self.world.book)

    # -------------------------------------------------------------------------------------------- driving

    def step(self, now_ms: int, facts: Sequence[Fact] = ()) -> Step:
        self.keeping.judge(now_ms)
        for fact in facts:
            self._learn(fact, now_ms)
        self._expire(now_ms)
        plan = self._decide(now_ms)
        self.beat_ms = now_ms
        saves, acts = self.world.take_effects()
        return Step(plan, saves, acts)

    def next_wakeup_ms(self, now_ms: int) -> int | None:
        """When `step` should be called even if nothing happens; None for never."""
        if self._unfinished:
            return now_ms
        due = [line.next_due_ms() for line in self.lines.values()]
        due += [self._timers.next_ms(), self._evictions.next_ms(), self.gangs.next_ms(), self._tick_ms]
        due += [self.bookings.next_ms(), self.world.book.next_start_ms(now_ms)]
        return min((at for at in due if at is not None), default=None)

    def pending(self) -> dict[str, int]:
        held = [hold.gang.job.profile for hold in self.preempting.holds.values()]
        return {name: len(line) + held.count(name) for name, line in self.lines.items()}

    # ------------------------------------------------------------------------------------------- learning

    def _learn(self, fact: Fact, now_ms: int) -> None:
        world = self.world
        match fact:
            case JobSubmitted(job=job):
                world.add_job(job, new=True)
                world.tell("job.submitted", now_ms, job=job.id, name=job.spec.name, project=job.spec.project)
                if job.state == "pending":
                    self._enqueue(job, now_ms)
            case RunObserved():
                run = world.run(fact.run)
                if run is not None:
                    self._lives.observed(run, fact, now_ms)
            case JobCancelled():
                self._cancel(fact, now_ms)
            case JobHeld(job=id):
                held = world.jobs.get(id)
                if held is not None and held.state == "pending":
                    self._dequeue(held)
                    world.change_job(held, now_ms, to="held", reason_code="HELD", reason="held by a user")
                    world.tell("job.held", now_ms, job=id)
            case JobReleased(job=id):
                held = world.jobs.get(id)
                if held is not None and held.state == "held":
                    freed = world.change_job(held, now_ms, to="pending", reason_code="", reason="", queued_ms=now_ms)
                    world.tell("job.released", now_ms, job=id)
                    self._enqueue(freed, now_ms)
            case JobRequeued():
                self._requeue(fact, now_ms)
            case NodeJoined(node=node):
                known = world.nodes.get(node.name)
                if known != node:
                    world.put_node(node)
                    self._evictions.look_at(node.name, now_ms)
                    self._wake("node_joined" if known is None else "node_changed")
                    if known is None:
                        world.tell("node.joined", now_ms, node=node.name, backend=node.backend)
            case NodeLost():
                if fact.node in world.nodes:
                    self.gangs.leave_node(fact.node)
                    for gang in self.preempting.void_on(fact.node):
                        self._void(gang, f"node {fact.node} was lost", now_ms)
                    for held_run in sorted(world.on_node.get(fact.node, ())):
                        run = world.run(held_run)
                        if run is not None:
                            self._lives.lost(run, now_ms, fact.reason or f"node {fact.node} was lost")
                    gone = world.nodes[fact.node]
                    world.remove_node(fact.node)
                    world.tell("node.lost", now_ms, node=fact.node, reason=fact.reason, **described(gone))
                    self._wake("node_changed")
            case NodeMarked():
                self._mark(fact, now_ms)
            case JobRestored(job=job, runs=runs):
                self._restore(job, runs, now_ms)
            case MarksRestored(marks=marks):
                world.put_marks(marks, new=False)
            case BookingMade():
                self.bookings.made(fact.booking, now_ms, restored=fact.restored)
            case BookingCancelled():
                self.bookings.cancelled(fact.name, fact.by, now_ms)
            case HistoryRestored(ran=many):
                for each in many:
                    self.estimator.learn(each)
            case _:
                raise TypeError(f"unknown fact {fact!r}")

    def _restore(self, job: Job, runs: Sequence[Run], now_ms: int) -> None:
        self.world.add_job(job, new=False)
        for run in runs:
            self.world.add_run(run, new=False)
            if run.state not in RUN_ENDED:
                self._lives.hold_room(run)
        if job.state == "pending":
            self._enqueue(job, now_ms)
        elif job.state in ("scheduled", "running"):
            self._watch_assembly(job, max((run.placed_ms for run in runs), default=now_ms))
            if job.spec.size > 1:
                job = self.gangs.look(job, now_ms, pause_ms=max(job.not_before_ms - now_ms, 0))
            self._lives.conclude(job, now_ms)

    def _cancel(self, fact: JobCancelled, now_ms: int) -> None:
        job = self.world.jobs.get(fact.job)
        if job is None or job.cancel_requested:
            return
        reason = fact.reason or "cancelled by a user"
        self.world.tell("job.cancel_requested", now_ms, job=job.id, reason=reason)
        if job.state in ("pending", "held"):
            self._dequeue(job)
            self._lives.finish(job, "cancelled", now_ms, "CANCELLED", reason)
            return
        job = self.world.change_job(job, now_ms, cancel_requested=True, reason_code="CANCELLED", reason=reason)
        self._lives.stop_all(job, "cancelled", now_ms)
        self._lives.conclude(job, now_ms)

    def _requeue(self, fact: JobRequeued, now_ms: int) -> None:
        job = self.world.jobs.get(fact.job)
        if job is not None:
            if job.state in ("scheduled", "running") and not job.cancel_requested:
                self.world.tell("job.requeue_requested", now_ms, job=job.id)
                job = self.world.change_job(job, now_ms, requeue_requested=True)
                self._lives.stop_all(job, "requeued", now_ms)
                self._lives.conclude(job, now_ms)
        elif fact.record is not None and fact.record.state in JOB_ENDED:
            self._lives.again(fact.record, now_ms, "REQUEUED", "requeued by a user", fresh=True)

    def _mark(self, fact: NodeMarked, now_ms: int) -> None:
        world = self.world
        before = world.marks.get(fact.node, NodeMarks(fact.node))
        marks = marked(before, fact)
        if marks != before:
            world.put_marks(marks, new=True)
            self._evictions.look_at(fact.node, now_ms)
            self._wake("node_changed")
        if marks != before or fact.drain:
            world.tell("node.marked", now_ms, node=fact.node, cordoned=marks.cordoned, **said(fact))
        if fact.drain:
            for id in sorted(world.on_node.get(fact.node, ())):
                run = world.run(id)
                if run is not None:
                    self._lives.leave(run, "drained", now_ms)

    # --------------------------------------------------------------------------------------------- queueing

    def _enqueue(self, job: Job, now_ms: int) -> None:
        if job.spec.profile not in self.lines:
            # The configuration has changed since it was let in; it waits for a person rather than being thrown away.
            reason = f"its profile {job.spec.profile!r} is not configured any more"
            self.world.change_job(job, now_ms, to="held", reason_code="UNKNOWN_PROFILE", reason=reason)
            self.world.tell("job.held", now_ms, job=job.id, reason=reason)
            return
        gang = self.gang(job.id, job.spec, job.submitted_ms)
        gang.queued_ms = job.submitted_ms
        self.lines[job.spec.profile].add(gang, not_before_ms=job.not_before_ms, now_ms=now_ms)
        if job.spec.scheduling_timeout_ms:
            self._timers.set((job.queued_ms or job.submitted_ms) + job.spec.scheduling_timeout_ms, job.id)

    def gang(self, id: JobId, spec: JobSpec, submitted_ms: int) -> Gang:
        """All members of a job, with how long they may and are expected to run."""
        gang, estimate = gang_of(id, spec, submitted_ms), self.estimator.estimate(spec)
        gang.estimate_ms, gang.expected_ms = estimate.limit_ms, estimate.expected_ms
        line = self.lines.get(spec.profile)
        if not gang.estimate_ms and isinstance(line, ReservingLine):
            gang.estimate_ms = line.queue.estimate_ms(gang)
        gang.expected_ms = gang.expected_ms or gang.estimate_ms
        return gang

    def _remember(self, job: Job) -> None:
        told = ran(job)
        if told is not None:
            self.estimator.learn(told)
            for line in self.lines.values():
                if isinstance(line, ReservingLine):
                    line.reconsider(told.user, self.estimator.estimate)

    def _limit_ms(self, spec: JobSpec) -> int:
        return self.gang(0, spec, 0).estimate_ms

    def _dequeue(self, job: Job) -> None:
        self.world.book.withdraw(job.id)
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
        if self._tick_ms is not None and now_ms >= self._tick_ms:
            self._tick_ms = None
            self._wake("time")
        self._evictions.run_out(now_ms)
        self.bookings.turn(now_ms)
        for id in self.gangs.hopeless(now_ms):
            self._lives.fall_apart(self.world.jobs[id], "no place was found for a missing member", now_ms)
        for id in self._timers.due(now_ms):
            job = self.world.jobs.get(id)
            if job is not None and job.state in ("scheduled", "running"):
                self._check_assembly(job, now_ms)
            elif job is not None and job.state == "pending" and job.spec.scheduling_timeout_ms:
                waited = (job.queued_ms or job.submitted_ms) + job.spec.scheduling_timeout_ms
                if waited <= now_ms:
                    self._dequeue(job)
                    why = f"not scheduled within its scheduling timeout; {job.reason or 'other jobs were ahead'}"
                    self._lives.finish(job, "failed", now_ms, "SCHEDULING_TIMEOUT", why)

    def _watch_assembly(self, job: Job, placed_ms: int) -> None:
        if job.spec.gang.assembly_timeout_ms:
            self._timers.set(placed_ms + job.spec.gang.assembly_timeout_ms, job.id)

    def _check_assembly(self, job: Job, now_ms: int) -> None:
        """A gang whose members do not all run in time lets go of everything rather than hold it for ever."""
        patience_ms = job.spec.gang.assembly_timeout_ms
        live = self.world.live_runs(job.id)
        late = [run for run in live if run.state == "placed" and run.placed_ms + patience_ms <= now_ms]
        if late and patience_ms:
            names = ", ".join(f"member {run.member} on {run.node}" for run in late[:3])
            self._lives.stop_all(job, f"assembly not all members ran within {patience_ms / 1000:g} s: {names}", now_ms)

    # --------------------------------------------------------------------------------------------- deciding

    def _decide(self, now_ms: int) -> Plan:
        plan, view, tries = Plan([], [], [], []), self.view(now_ms), 0
        self.world.table.settle()
        woken = bool(self._triggers)
        self._take_places(plan, view)
        self._repair_gangs(plan, view, woken)
        for trigger in sorted(self._triggers):
            for line in self.lines.values():
                line.wake(trigger)
        self._triggers.clear()
        self._unfinished = False
        for line in self.lines.values():
            line.wake_due(now_ms)
            for gang in line.ready(view):
                if tries >= self._max_tries:
                    # Facts are waiting too; the rest of the line is tried in the next step, which comes at once.
                    self._unfinished = True
                    break
                tries += 1
                gang.attempts += 1
                gang.last_attempt_ms = now_ms
                result = self.engine.try_gang(gang, view)
                if isinstance(result, Refusal):
                    evictions = None if _failed(result) else self.preempting.attempt(gang, view)
                    if evictions is not None:
                        line.started(gang)
                        plan.evictions += evictions
                        continue
                    self._refused(line, gang, result, now_ms)
                    plan.refusals.append(result)
                else:
                    line.started(gang)
                    gang.kind = line.kind if isinstance(line, ReservingLine) else ""
                    self._bind(gang, result, plan, now_ms)
        self._grow_gangs(plan, view, woken or bool(self._triggers))
        plan.faults = self.engine.runner.take_faults()
        for fault in plan.faults:
            self.world.tell(
                "plugin.failed", now_ms, job=fault.job, plugin=fault.plugin, point=fault.point, error=fault.error
            )
        return plan

    def _take_places(self, plan: Plan, view: View) -> None:
        """Those for whom room was made come first; should it have come to nothing (a node went), they queue again."""
        for gang in self.preempting.ripe():
            result = self.engine.try_gang(gang, view)
            if isinstance(result, Refusal):
                self._void(gang, summary(result.verdicts, result.nodes), view.now_ms)
            else:
                self._bind(gang, result, plan, view.now_ms)

    def _repair_gangs(self, plan: Plan, view: View, woken: bool) -> None:
        """Running gangs that lack a member have the first claim on what is free."""
        for gang in self.gangs.due(view.now_ms, woken=woken):
            if gang.id in self.preempting.holds:
                continue
            result = self.engine.try_gang(gang, view)
            if not isinstance(result, Refusal):
                self._bind(gang, result, plan, view.now_ms)
                continue
            evictions = None if _failed(result) else self.preempting.attempt(gang, view)
            if evictions is not None:
                plan.evictions += evictions
            else:
                plan.refusals.append(result)

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
        if gang.joins:
            self.gangs.look(job, now_ms)
        else:
            self._enqueue(job, now_ms)

    def _refused(self, line: Line | ReservingLine, gang: Gang, refusal: Refusal, now_ms: int) -> None:
        job = self.world.jobs[gang.id]
        text = summary(refusal.verdicts, refusal.nodes)
        code = refusal.verdicts[0].reason.code if refusal.verdicts else "NO_NODES"
        if refusal.fitted and refusal.verdicts and refusal.verdicts[0].count:
            text = f"{refusal.fitted} of {gang.size} members fit; for the next one {text}"
        if (job.reason_code, job.reason) != (code, text):
            self.world.change_job(job, now_ms, reason_code=code, reason=text)
        if _failed(refusal):
            line.back_off(gang, now_ms + self.retry.failed_plugin.pause_ms(gang.id, gang.attempts))
        else:
            if self.preempting.too_soon and "time" not in refusal.cured_by:
                refusal = structs.replace(refusal, cured_by=(*refusal.cured_by, "time"))
            line.refused(gang, refusal)
            if "time" in refusal.cured_by and self._tick_ms is None:
                self._tick_ms = now_ms + _TICK_MS

    def _bind(self, gang: Gang, placements: Sequence[Placed], plan: Plan, now_ms: int) -> None:
        job = bind(self.world, gang, placements, plan, now_ms)
        self._watch_assembly(job, now_ms)
        if gang.joins or any(gang.extra):
            self.gangs.look(job, now_ms)
        self._wake("run_placed")


def _failed(refusal: Refusal) -> bool:
    return any(verdict.reason.code == PLUGIN_FAILED for verdict in refusal.verdicts)
