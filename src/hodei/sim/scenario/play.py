"""Lets the real controller live through a scenario. Nothing is decided here: facts go in, and effects become new facts.

All that happens at one moment is told together and decided once, as by a server that hears of it in one go. What is
started runs at once; what is told to stop takes as long as the job says. After every step it is checked that no node
holds more than it has and that no member runs twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

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
from hodei.model.ids import RunId, run_id
from hodei.model.job import JOB_ENDED, RUN_ENDED, Job, Run
from hodei.model.resources import Resources, format_duration, human_amount
from hodei.sim.scenario.history import Broken, Evicted, History, Started, Stay
from hodei.sim.scenario.parse import BEGIN_MS
from hodei.sim.scenario.schema import FOREVER_MS, NODE_VERBS, Happening, Scenario, ScenarioJob
from hodei.wiring import make_controller

if TYPE_CHECKING:
    pass


# ----------------------------------------------------------------------------------------------- facts
# What an entry under `facts` means to the controller.


def facts_of(happening: Happening, play: Play) -> list[Fact]:
    """None at all if it happens to something that is not there (any more), or not in a state for it."""
    if happening.verb == "appear":
        return [DataAppeared(happening.who)]
    return _of_node(happening, play) if happening.verb in NODE_VERBS else _of_job(happening, play)


def _of_node(happening: Happening, play: Play) -> list[Fact]:
    name, there = happening.who, happening.who in play.controller.cluster.nodes
    taints = (happening.taint,) if happening.taint is not None else ()
    if happening.verb == "join":
        return [] if there else [NodeJoined(play.nodes[name])]
    if not there:
        return []
    match happening.verb:
        case "lose":
            return [NodeLost(name)]
        case "drain":
            return [NodeOverridden(name, cordon=True, drain=True)]
        case "taint":
            return [NodeOverridden(name, add_taints=taints)]
        case "untaint":
            return [NodeOverridden(name, remove_taints=taints)]
    return [NodeOverridden(name, cordon=happening.verb == "cordon")]


def _of_job(happening: Happening, play: Play) -> list[Fact]:
    course = play.story.courses[happening.who]
    job = course.changes[-1][1] if course.changes else None
    if job is None:
        return []
    ended, waiting = job.state in JOB_ENDED, job.state in ("pending", "held")
    match happening.verb:
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
    mine = [live.run for live in play.live.values() if live.job.id == job.id]
    wanted = sorted((run.member, run.id) for run in mine if happening.member in (None, run.member))
    return [
        RunObserved(run, "failed", BEGIN_MS + happening.at_ms, happening.exit)
        for _, run in wanted[: None if happening.member is not None else 1]
    ]


# ----------------------------------------------------------------------------------------------------

# How long it goes on for jobs that only time could help, after the last thing that the file names.
PATIENCE_MS = 3_600_000
# More rounds than this in one moment are a fault of the scheduler, not a long story.
_MOST_ROUNDS = 10_000
Tell = Callable[[], list[Fact]]


class Live(Struct):
    """A run as whoever runs it knows it."""

    run: Run
    job: ScenarioJob
    request: Resources
    stopping: bool = False


class Play:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.controller = make_controller(scenario.config)
        self.story = History(scenario.jobs)
        self.nodes = {node.name: node for node in scenario.nodes}
        self.live: dict[RunId, Live] = {}
        self._numbers = count()
        self._heap: list[tuple[int, int, Tell]] = []
        named = [fact.at_ms for fact in scenario.facts] + [job.at_ms for job in scenario.jobs]
        named += [at for one in scenario.expect for at in (one.at_ms, one.within_ms) if at is not None]
        self._last_named_ms = max(named, default=0)
        there = [NodeJoined(node) for node in scenario.nodes if node.name not in scenario.absent]
        self._step(0, list(there))
        for job in sorted(scenario.jobs, key=lambda job: job.at_ms):
            if job.at_ms >= 0 and not job.running:
                self._later(job.at_ms, partial(self._submit, job))
        if old := [job for job in scenario.jobs if job.at_ms < 0 or job.running]:
            self._later(0, partial(list, self._restored(old)))
        for fact in scenario.facts:
            self._later(fact.at_ms, partial(self._happens, fact))

    def until(self, at_ms: int | None = None) -> Play:
        """Live on until after all that happens at `at_ms`; without it to the end."""
        end_ms = self.scenario.until_ms if at_ms is None else at_ms
        rounds, last_ms = 0, -1
        while (now_ms := self._next_ms()) is not None and (end_ms is None or now_ms <= end_ms):
            if end_ms is None and not self._heap and now_ms > self._patience_ms():
                break
            rounds, last_ms = (rounds + 1 if now_ms == last_ms else 0), now_ms
            if rounds > _MOST_ROUNDS:
                raise HodeiError(f"at {format_duration(now_ms)} the scheduler does not come to rest", code="RESTLESS")
            self._moment(now_ms)
        return self

    def why(self, name: str, at_ms: int) -> Explanation | None:
        """Of a job that has neither ended nor been refused."""
        return explain.why(self.controller, self.scenario.job(name).id, BEGIN_MS + at_ms)

    # ----------------------------------------------------------------------------------------------- time

    def _patience_ms(self) -> int:
        return max(self._last_named_ms, self.story.end_ms) + PATIENCE_MS

    def _later(self, at_ms: int, tell: Tell) -> None:
        heapq.heappush(self._heap, (at_ms, next(self._numbers), tell))

    def _next_ms(self) -> int | None:
        now_ms = self.controller.beat_ms
        wake_ms = self.controller.next_wakeup_ms(now_ms)
        due = [self._heap[0][0]] if self._heap else []
        if wake_ms is not None:
            due.append(max(wake_ms, now_ms) - BEGIN_MS)
        return min(due, default=None)

    def _moment(self, now_ms: int) -> None:
        """All that is told at `now_ms`, decided once. What follows from it at once is told in the next round."""
        facts: list[Fact] = []
        while self._heap and self._heap[0][0] <= now_ms:
            facts += heapq.heappop(self._heap)[2]()
        if facts:
            self.story.end_ms = now_ms
        self._step(now_ms, facts)

    def _step(self, now_ms: int, facts: list[Fact]) -> Step:
        step = self.controller.step(BEGIN_MS + now_ms, facts)
        saved = {save.job.id: save.job for save in step.saves if isinstance(save, SaveJob)}
        for job in saved.values():
            self.story.by_id[job.id].changes.append((now_ms, job))
        for save in step.saves:
            if isinstance(save, SaveRun) and save.run.state in RUN_ENDED:
                self._over(save.run, now_ms)
            elif isinstance(save, SaveEvent) and save.event.kind == "start_reservation.missed":
                self._missed(save.event, now_ms)
        for eviction in step.plan.evictions:
            victim, taker = self.story.by_id[eviction.job].job, self.story.by_id[eviction.preemptor].job
            self.story.evictions.append(Evicted(now_ms, victim.name, taker.name))
        for act in step.acts:
            if isinstance(act, Start):
                self._start(act, now_ms)
            elif isinstance(act, Stop) and act.run in self.live:
                self._stop(act.run, now_ms)
        if step.acts:
            self._check(now_ms)
        return step

    # ----------------------------------------------------------------------------------------------- jobs

    def _submit(self, job: ScenarioJob) -> list[Fact]:
        try:
            self.controller.gate.check([job.spec], self.controller.pending())
        except HodeiError as error:
            self.story.by_id[job.id].refused = error
            return []
        at_ms = BEGIN_MS + job.at_ms
        return [JobSubmitted(Job(job.id, job.spec, "pending", at_ms, at_ms, queued_ms=at_ms))]

    def _restored(self, jobs: list[ScenarioJob]) -> list[Fact]:
        """Jobs that were there before the scenario began: they wait, or run where it says."""
        out: list[Fact] = []
        parts = {name: DeviceSlots(node) for name, node in self.nodes.items()}
        for job in jobs:
            at_ms = BEGIN_MS + job.at_ms
            known = Job(job.id, job.spec, "pending", at_ms, at_ms, queued_ms=0 if job.spec.after.of else at_ms)
            runs = []
            for member, name in enumerate(job.running):
                task = job.spec.task_of(member)
                grant = parts[name].find(task) if needs_devices(task) else None
                if grant is not None:
                    parts[name].take(grant)
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
                self._began(job, runs, job.at_ms)
            self.story.by_id[job.id].changes.append((job.at_ms, known))
            out.append(JobRestored(known, tuple(runs)))
        self._check(0)
        return out

    def _happens(self, fact: Happening) -> list[Fact]:
        found = facts_of(fact, self)
        if not found:
            self.story.notes.append(
                f"facts[{fact.place}] {fact.verb} {fact.who} at {format_duration(fact.at_ms)}: nothing to happen to"
            )
        return found

    # ----------------------------------------------------------------------------------------------- runs

    def _start(self, order: Start, now_ms: int) -> None:
        run, course = order.run, self.story.by_id[order.run.job]
        self._began(course.job, [run], now_ms, joins=run.attempt > (course.changes[-1][1].first_attempt or 1))
        self._later(now_ms, lambda: [RunObserved(run.id, "running", BEGIN_MS + now_ms)])

    def _began(self, job: ScenarioJob, runs: list[Run], at_ms: int, *, joins: bool = False) -> None:
        starts = self.story.by_id[job.id].starts
        for run in runs:
            if not joins and (not starts or starts[-1].at_ms != at_ms or starts[-1].over_ms is not None):
                starts.append(Started(at_ms, []))
            starts[-1].stays.append(Stay(run.member, run.node, at_ms))
            starts[-1].over_ms = None
            self.live[run.id] = Live(run, job, job.spec.task_of(run.member).request)
            attempt = len(starts) - 1
            if job.run_ms:
                lasts_ms = job.run_ms[min(attempt, len(job.run_ms) - 1)]
                code = job.exit_codes[min(attempt, len(job.exit_codes) - 1)]
                if lasts_ms < FOREVER_MS:
                    self._ends(run, at_ms + lasts_ms, code)
            if job.spec.timeout_ms:
                self._ends(run, at_ms + job.spec.timeout_ms, 143, "timeout")

    def _ends(self, run: Run, at_ms: int, code: int, reason_code: str = "") -> None:
        def told() -> list[Fact]:
            if run.id not in self.live:
                return []  # it ended before, in another way
            state = "failed" if code or reason_code else "succeeded"
            return [RunObserved(run.id, state, BEGIN_MS + max(at_ms, 0), code, reason_code)]  # type: ignore[arg-type]

        self._later(max(at_ms, 0), told)

    def _stop(self, run: RunId, now_ms: int) -> None:
        live = self.live[run]
        if not live.stopping:
            live.stopping = True
            at_ms = now_ms + live.job.stopping_ms
            self._later(at_ms, lambda: [RunObserved(run, "stopped", BEGIN_MS + at_ms, 143)] if run in self.live else [])

    def _over(self, run: Run, now_ms: int) -> None:
        live = self.live.pop(run.id, None)
        if live is None:
            return
        start = self.story.by_id[live.job.id].starts[-1]
        for stay in start.stays:
            if stay.member == live.run.member and stay.to_ms is None:
                stay.to_ms = now_ms
        if all(stay.to_ms is not None for stay in start.stays):
            start.over_ms = now_ms

    # --------------------------------------------------------------------------------------- what must hold

    def _missed(self, event: Event, now_ms: int) -> None:
        """The controller judges by itself whether a start came late through its own fault."""
        if event.detail.get("cause") == "broken":
            reserved_start_ms = int(event.detail["reserved_start_ms"]) - BEGIN_MS
            self.story.broken.append(Broken(self.story.by_id[event.job].job.name, reserved_start_ms, now_ms))

    def _check(self, now_ms: int) -> None:
        if self.story.wrongs:
            return  # the first moment in which something is wrong says it all
        when = f"at {format_duration(now_ms)}"
        used: dict[str, Resources] = {}
        members: set[tuple[int, int]] = set()
        for live in self.live.values():
            on_node = used.setdefault(live.run.node, {})
            for resource, amount in live.request.items():
                on_node[resource] = on_node.get(resource, 0) + amount
            if (live.job.id, live.run.member) in members:
                self.story.wrongs.append(f"{when} member {live.run.member} of {live.job.name} runs twice")
            members.add((live.job.id, live.run.member))
        for name, amounts in sorted(used.items()):
            room = allocatable(self.nodes[name])
            for resource, amount in amounts.items():
                if amount > room.get(resource, 0):
                    held, most = human_amount(resource, amount), human_amount(resource, room.get(resource, 0))
                    self.story.wrongs.append(f"{when} {name} holds {held} {resource} and has {most}")


def play(scenario: Scenario) -> History:
    return Play(scenario).until().story
