"""Runs a scenario with the real controller and records what happens. Facts go in, and effects become new facts.

Everything that happens at one moment is one step. A started run is running at once; a stopped one takes as long as the
job says. After every step the runner checks that no node is over-committed and that no member runs twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from itertools import count

from msgspec import Struct

from hodei.control.controller import Step
from hodei.control.explain import why as explain
from hodei.engine.device_slots import DeviceSlots, needs_devices
from hodei.engine.nodes import allocatable
from hodei.model.effects import Event, SaveEvent, SaveJob, SaveRun, Start, Stop
from hodei.model.errors import HodeiError
from hodei.model.explanation import Explanation
from hodei.model.facts import (
    DataAppeared,
    Fact,
    JobCancelled,
    JobHeld,
    JobMigrated,
    JobReleased,
    JobRequeued,
    JobRestored,
    JobSubmitted,
    JobSuspended,
    NodeJoined,
    NodeLost,
    NodeOverridden,
    RunObserved,
)
from hodei.model.ids import JobId, RunId, run_id
from hodei.model.job import JOB_ENDED, RUN_ENDED, Job, Run
from hodei.model.resources import Resources, format_duration, human_amount
from hodei.sim.scenario.parse import BEGIN_MS
from hodei.sim.scenario.schema import FOREVER_MS, NODE_VERBS, Scenario, ScenarioFact, ScenarioJob
from hodei.wiring import make_controller

# Times are in milliseconds since the start of the scenario.


class MemberStay(Struct):
    """One member on one node; `to_ms` is None while it runs there."""

    member: int
    node: str
    from_ms: int
    to_ms: int | None = None


class JobStart(Struct):
    """`stays`: also members that joined or were replaced later. `ended_ms`: of the last member; None while one runs."""

    at_ms: int
    stays: list[MemberStay]
    ended_ms: int | None = None

    @property
    def nodes(self) -> list[str]:
        """The nodes of the first placement."""
        return sorted({stay.node for stay in self.stays if stay.from_ms == self.at_ms})

    def nodes_at(self, at_ms: int) -> list[str]:
        active = (s for s in self.stays if s.from_ms <= at_ms and (s.to_ms is None or s.to_ms > at_ms))
        return sorted({stay.node for stay in active})


class JobHistory:
    """Every change of one job, and every start."""

    def __init__(self, job: ScenarioJob) -> None:
        self.job = job
        self.changes: list[tuple[int, Job]] = []
        self.starts: list[JobStart] = []
        self.refused: HodeiError | None = None

    def at(self, at_ms: int) -> Job | None:
        """The job after everything that happened at `at_ms`; None before its submission, or if it was refused."""
        return next((job for changed_ms, job in reversed(self.changes) if changed_ms <= at_ms), None)

    def state_at(self, at_ms: int) -> tuple[str, str]:
        """State and reason code."""
        found = self.at(at_ms)
        if found is not None:
            return found.state, found.reason_code
        if self.refused is not None and at_ms >= self.job.at_ms:
            return "refused", self.refused.code
        return "absent", ""

    @property
    def end(self) -> tuple[int, Job] | None:
        """The time and the job at its end; None if it has not ended."""
        last = self.changes[-1] if self.changes else None
        return last if last is not None and last[1].state in JOB_ENDED else None


class BrokenReservation(Struct):
    """A start reservation that was missed through a fault of the scheduler."""

    job: str
    reserved_start_ms: int
    noticed_ms: int


class Preemption(Struct):
    at_ms: int
    job: str
    by: str


class History:
    """`violations`: broken rules that hold in every scenario. `notes`: facts of the file that had no effect."""

    def __init__(self, jobs: tuple[ScenarioJob, ...]) -> None:
        self.jobs = {job.name: JobHistory(job) for job in jobs}
        self.by_id: dict[JobId, JobHistory] = {job.id: self.jobs[job.name] for job in jobs}
        self.preemptions: list[Preemption] = []
        self.broken: list[BrokenReservation] = []
        self.violations: list[str] = []
        self.notes: list[str] = []
        self.end_ms = 0


def controller_facts(fact: ScenarioFact, runner: ScenarioRunner) -> list[Fact]:
    """An entry of `facts` for the controller; empty if its target does not exist or is not in a fitting state."""
    if fact.verb == "appear":
        return [DataAppeared(fact.target)]
    return _node_facts(fact, runner) if fact.verb in NODE_VERBS else _job_facts(fact, runner)


def _node_facts(fact: ScenarioFact, runner: ScenarioRunner) -> list[Fact]:
    name, exists = fact.target, fact.target in runner.controller.cluster.nodes
    taints = (fact.taint,) if fact.taint is not None else ()
    if fact.verb == "join":
        return [] if exists else [NodeJoined(runner.nodes[name])]
    if not exists:
        return []
    match fact.verb:
        case "lose":
            return [NodeLost(name)]
        case "drain":
            return [NodeOverridden(name, cordon=True, drain=True)]
        case "taint":
            return [NodeOverridden(name, add_taints=taints)]
        case "untaint":
            return [NodeOverridden(name, remove_taints=taints)]
    return [NodeOverridden(name, cordon=fact.verb == "cordon")]


def _job_facts(fact: ScenarioFact, runner: ScenarioRunner) -> list[Fact]:
    record = runner.history.jobs[fact.target]
    job = record.changes[-1][1] if record.changes else None
    if job is None:
        return []
    ended, waiting = job.state in JOB_ENDED, job.state in ("pending", "held")
    match fact.verb:
        case "cancel":
            return [] if ended else [JobCancelled(job.id)]
        case "hold":
            return [JobHeld(job.id)] if job.state == "pending" else []
        case "release":
            return [JobReleased(job.id)] if job.state == "held" or job.suspend_requested else []
        case "suspend":
            return [] if ended else [JobSuspended(job.id)]
        case "migrate":
            return [JobMigrated(job.id)]
        case "requeue":
            return [] if waiting else [JobRequeued(job.id, job if ended else None)]
    runs = [live.run for live in runner.live.values() if live.job.id == job.id]
    wanted = sorted((run.member, run.id) for run in runs if fact.member in (None, run.member))
    return [
        RunObserved(run, "failed", BEGIN_MS + fact.at_ms, fact.exit)
        for _, run in wanted[: None if fact.member is not None else 1]
    ]


# How long the scenario continues for jobs that only time could unblock, after the last time in the file.
IDLE_LIMIT_MS = 3_600_000
# More rounds at one moment are an endless loop of the scheduler.
_MAX_ROUNDS = 10_000
MakeFacts = Callable[[], list[Fact]]


class LiveRun(Struct):
    """A run as its backend knows it."""

    run: Run
    job: ScenarioJob
    request: Resources
    stopping: bool = False


class ScenarioRunner:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.controller = make_controller(scenario.config)
        self.history = History(scenario.jobs)
        self.nodes = {node.name: node for node in scenario.nodes}
        self.live: dict[RunId, LiveRun] = {}
        self._numbers = count()
        self._heap: list[tuple[int, int, MakeFacts]] = []
        named = [fact.at_ms for fact in scenario.facts] + [job.at_ms for job in scenario.jobs]
        named += [at for one in scenario.expect for at in (one.at_ms, one.within_ms) if at is not None]
        self._last_named_ms = max(named, default=0)
        joined: list[Fact] = [NodeJoined(node) for node in scenario.nodes if node.name not in scenario.absent]
        self._step(0, joined)
        for job in sorted(scenario.jobs, key=lambda job: job.at_ms):
            if job.at_ms >= 0 and not job.running:
                self._schedule(job.at_ms, partial(self._submit, job))
        if old := [job for job in scenario.jobs if job.at_ms < 0 or job.running]:
            self._schedule(0, partial(list, self._restore(old)))
        for fact in scenario.facts:
            self._schedule(fact.at_ms, partial(self._apply, fact))

    def until(self, at_ms: int | None = None) -> ScenarioRunner:
        """Continue until after everything that happens at `at_ms`; without it, to the end."""
        end_ms = self.scenario.until_ms if at_ms is None else at_ms
        rounds, last_ms = 0, -1
        while (now_ms := self._next_ms()) is not None and (end_ms is None or now_ms <= end_ms):
            if end_ms is None and not self._heap and now_ms > self._deadline_ms():
                break
            rounds, last_ms = (rounds + 1 if now_ms == last_ms else 0), now_ms
            if rounds > _MAX_ROUNDS:
                raise HodeiError(
                    f"at {format_duration(now_ms)} the scheduler does not stop changing its decisions", code="RESTLESS"
                )
            self._run_moment(now_ms)
        return self

    def why(self, name: str, at_ms: int) -> Explanation | None:
        """None for a job that has ended or was refused."""
        return explain.why(self.controller, self.scenario.job(name).id, BEGIN_MS + at_ms)

    def _deadline_ms(self) -> int:
        return max(self._last_named_ms, self.history.end_ms) + IDLE_LIMIT_MS

    def _schedule(self, at_ms: int, make_facts: MakeFacts) -> None:
        heapq.heappush(self._heap, (at_ms, next(self._numbers), make_facts))

    def _next_ms(self) -> int | None:
        now_ms = self.controller.beat_ms
        wake_ms = self.controller.next_wakeup_ms(now_ms)
        due = [self._heap[0][0]] if self._heap else []
        if wake_ms is not None:
            due.append(max(wake_ms, now_ms) - BEGIN_MS)
        return min(due, default=None)

    def _run_moment(self, now_ms: int) -> None:
        """One step with everything that is due. Facts that follow at the same moment come in the next round."""
        facts: list[Fact] = []
        while self._heap and self._heap[0][0] <= now_ms:
            facts += heapq.heappop(self._heap)[2]()
        if facts:
            self.history.end_ms = now_ms
        self._step(now_ms, facts)

    def _step(self, now_ms: int, facts: list[Fact]) -> Step:
        step = self.controller.step(BEGIN_MS + now_ms, facts)
        saved = {save.job.id: save.job for save in step.saves if isinstance(save, SaveJob)}
        for job in saved.values():
            self.history.by_id[job.id].changes.append((now_ms, job))
        for save in step.saves:
            if isinstance(save, SaveRun) and save.run.state in RUN_ENDED:
                self._record_end(save.run, now_ms)
            elif isinstance(save, SaveEvent) and save.event.kind == "start_reservation.missed":
                self._record_missed(save.event, now_ms)
        for eviction in step.plan.evictions:
            victim, preemptor = self.history.by_id[eviction.job].job, self.history.by_id[eviction.preemptor].job
            self.history.preemptions.append(Preemption(now_ms, victim.name, preemptor.name))
        for act in step.acts:
            if isinstance(act, Start):
                self._start(act, now_ms)
            elif isinstance(act, Stop) and act.run in self.live:
                self._stop(act.run, now_ms)
        if step.acts:
            self._check(now_ms)
        return step

    def _submit(self, job: ScenarioJob) -> list[Fact]:
        try:
            self.controller.gate.check([job.spec], self.controller.pending())
        except HodeiError as error:
            self.history.by_id[job.id].refused = error
            return []
        at_ms = BEGIN_MS + job.at_ms
        return [JobSubmitted(Job(job.id, job.spec, "pending", at_ms, at_ms, queued_ms=at_ms))]

    def _restore(self, jobs: list[ScenarioJob]) -> list[Fact]:
        """Jobs from before the scenario: pending, or running on the given nodes."""
        out: list[Fact] = []
        slots = {name: DeviceSlots(node) for name, node in self.nodes.items()}
        for job in jobs:
            at_ms = BEGIN_MS + job.at_ms
            known = Job(job.id, job.spec, "pending", at_ms, at_ms, queued_ms=0 if job.spec.after.of else at_ms)
            runs = []
            for member, name in enumerate(job.running):
                task = job.spec.task_of(member)
                grant = slots[name].find(task) if needs_devices(task) else None
                if grant is not None:
                    slots[name].take(grant)
                runs.append(
                    Run(
                        id=run_id(job.id, member, 1), job=job.id, task=task.name, member=member, attempt=1, node=name,
                        backend=self.nodes[name].backend, state="running", placed_ms=at_ms, started_ms=at_ms,
                        rank=member, grant=grant,
                    )
                )  # fmt: skip
            if runs:
                known = Job(
                    job.id, job.spec, "running", at_ms, at_ms, attempt=1, first_attempt=1, queued_ms=at_ms,
                    scheduled_ms=at_ms, started_ms=at_ms, nodes=" ".join(sorted(set(job.running))[:20]),
                )  # fmt: skip
                self._record_start(job, runs, job.at_ms)
            self.history.by_id[job.id].changes.append((job.at_ms, known))
            out.append(JobRestored(known, tuple(runs)))
        self._check(0)
        return out

    def _apply(self, fact: ScenarioFact) -> list[Fact]:
        found = controller_facts(fact, self)
        if not found:
            self.history.notes.append(
                f"facts[{fact.place}] {fact.verb} {fact.target} at {format_duration(fact.at_ms)}: no effect"
            )
        return found

    def _start(self, order: Start, now_ms: int) -> None:
        run, record = order.run, self.history.by_id[order.run.job]
        self._record_start(record.job, [run], now_ms, joins=run.attempt > (record.changes[-1][1].first_attempt or 1))
        self._schedule(now_ms, lambda: [RunObserved(run.id, "running", BEGIN_MS + now_ms)])

    def _record_start(self, job: ScenarioJob, runs: list[Run], at_ms: int, *, joins: bool = False) -> None:
        starts = self.history.by_id[job.id].starts
        for run in runs:
            if not joins and (not starts or starts[-1].at_ms != at_ms or starts[-1].ended_ms is not None):
                starts.append(JobStart(at_ms, []))
            starts[-1].stays.append(MemberStay(run.member, run.node, at_ms))
            starts[-1].ended_ms = None
            self.live[run.id] = LiveRun(run, job, job.spec.task_of(run.member).request)
            attempt = len(starts) - 1
            if job.run_ms:
                lasts_ms = job.run_ms[min(attempt, len(job.run_ms) - 1)]
                code = job.exit_codes[min(attempt, len(job.exit_codes) - 1)]
                if lasts_ms < FOREVER_MS:
                    self._schedule_end(run, at_ms + lasts_ms, code)
            if job.spec.timeout_ms:
                self._schedule_end(run, at_ms + job.spec.timeout_ms, 143, "timeout")

    def _schedule_end(self, run: Run, at_ms: int, code: int, reason_code: str = "") -> None:
        def end() -> list[Fact]:
            if run.id not in self.live:
                return []  # it ended earlier in another way
            state = "failed" if code or reason_code else "succeeded"
            return [RunObserved(run.id, state, BEGIN_MS + max(at_ms, 0), code, reason_code)]  # type: ignore[arg-type]

        self._schedule(max(at_ms, 0), end)

    def _stop(self, run: RunId, now_ms: int) -> None:
        live = self.live[run]
        if not live.stopping:
            live.stopping = True
            at_ms = now_ms + live.job.stopping_ms
            self._schedule(
                at_ms, lambda: [RunObserved(run, "stopped", BEGIN_MS + at_ms, 143)] if run in self.live else []
            )

    def _record_end(self, run: Run, now_ms: int) -> None:
        live = self.live.pop(run.id, None)
        if live is None:
            return
        start = self.history.by_id[live.job.id].starts[-1]
        for stay in start.stays:
            if stay.member == live.run.member and stay.to_ms is None:
                stay.to_ms = now_ms
        if all(stay.to_ms is not None for stay in start.stays):
            start.ended_ms = now_ms

    def _record_missed(self, event: Event, now_ms: int) -> None:
        """The controller itself reports whether a late start is its own fault."""
        if event.detail.get("cause") == "broken":
            reserved_start_ms = int(event.detail["reserved_start_ms"]) - BEGIN_MS
            self.history.broken.append(
                BrokenReservation(self.history.by_id[event.job].job.name, reserved_start_ms, now_ms)
            )

    def _check(self, now_ms: int) -> None:
        if self.history.violations:
            return  # only the first violation is reported
        when = f"at {format_duration(now_ms)}"
        used: dict[str, Resources] = {}
        members: set[tuple[int, int]] = set()
        for live in self.live.values():
            on_node = used.setdefault(live.run.node, {})
            for resource, amount in live.request.items():
                on_node[resource] = on_node.get(resource, 0) + amount
            if (live.job.id, live.run.member) in members:
                self.history.violations.append(f"{when} member {live.run.member} of {live.job.name} runs twice")
            members.add((live.job.id, live.run.member))
        for name, amounts in sorted(used.items()):
            capacity = allocatable(self.nodes[name])
            for resource, amount in amounts.items():
                if amount > capacity.get(resource, 0):
                    held, most = human_amount(resource, amount), human_amount(resource, capacity.get(resource, 0))
                    self.history.violations.append(f"{when} {name} holds {held} {resource} and has {most}")


def run_scenario(scenario: Scenario) -> History:
    return ScenarioRunner(scenario).until().history
