"""Drives the real controller through simulated time: facts come from heaps, effects push future facts onto them.

Each arrival and each end is its own step, as in a quiet cluster; at the same time, arrivals come first. Runs that take
exactly their estimate end in one step with the next event: the controller expected their ends. Runs take as long as the
trace says; a stopped run stops at once.
"""

from __future__ import annotations

import gc
import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Literal

from hodei.control.controller import Controller, Step
from hodei.model.effects import NodeAct, Start, Stop
from hodei.model.errors import InvalidInput
from hodei.model.facts import Fact, JobSubmitted, NodeJoined, NodeLost, RunObserved
from hodei.model.ids import JobId, NodeName, RunId, parse_run_id
from hodei.model.job import Job
from hodei.model.node import Node
from hodei.model.resources import Resources
from hodei.sim.metrics import Fragmentation, Outcome, Result, Sample, StartKind
from hodei.sim.provider import Provider
from hodei.sim.traces import Arrival, Workload

# Above this number, every other sample is dropped.
_MAX_SAMPLES = 20_000
_PROGRESS_EVERY_S = 0.2
# After this many wake-ups without effect, the remaining pending jobs are given up.
_MAX_IDLE_STEPS = 1000
_NEVER = (1 << 62, 0, "")
# Called with (simulated ms, jobs ended, jobs in total).
OnProgress = Callable[[int, int, int], None]


class _ActiveJob:
    """A job that has arrived and not ended."""

    __slots__ = ("arrival", "kind", "nodes", "preemptions", "running", "started_ms")

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.started_ms = -1
        self.running = 0
        self.nodes: tuple[str, ...] = ()
        self.kind: StartKind = "head"
        self.preemptions = 0


class Simulation:
    """One workload under one controller."""

    def __init__(
        self,
        workload: Workload,
        controller: Controller,
        nodes: Sequence[Node] = (),
        *,
        policy: str = "",
        until_ms: int | None = None,
        on_progress: OnProgress | None = None,
        provider: Provider | None = None,
    ) -> None:
        self._workload, self._controller, self._policy = workload, controller, policy
        self._nodes = list(nodes or workload.nodes)
        if not self._nodes:
            raise InvalidInput(f"{workload.name} defines no machine", hint="give --procs or --cluster")
        self._until_ms, self._on_progress = until_ms, on_progress
        self._ends: list[tuple[int, int, RunId]] = []
        self._expected_ends: list[tuple[int, int, RunId]] = []
        self._numbers = count()
        self._job_of: dict[RunId, JobId] = {}
        self._node_of: dict[RunId, NodeName] = {}  # only with a provider
        self._active: dict[JobId, _ActiveJob] = {}
        self._outcomes: list[Outcome] = []
        self._samples: list[Sample] = []
        self._stride, self._steps, self._busy = 1, 0, 0
        self._used: Resources = {}
        self._preemptions = 0
        self._fragmentation = Fragmentation(workload, controller.cluster.table)
        self._provider = provider
        if provider is None and any(node.group for node in self._nodes):
            self._provider = Provider(self._nodes)

    def run(self) -> Result:
        began = time.process_time()
        collecting = gc.isenabled()
        gc.disable()  # almost no garbage is cyclic; collecting would take a third of the time
        try:
            self._loop()
        finally:
            if collecting:
                gc.enable()
        self._outcomes += [_outcome(job, -1) for job in self._active.values()]
        if self._provider is not None:
            self._provider.finish(self._controller.beat_ms)
        return Result(
            policy=self._policy,
            workload=self._workload.name,
            capacity=_total(node.capacity for node in self._nodes),
            outcomes=sorted(self._outcomes, key=lambda outcome: outcome.id),
            samples=self._samples,
            seconds=time.process_time() - began,
            unplaced=sum(job.started_ms < 0 for job in self._active.values()),
            start_reservations_broken=self._controller.reservation_audit.broken,
            nodes_used=self._provider.used if self._provider is not None else None,
        )

    def _loop(self) -> None:
        arrivals = iter(self._workload.arrivals)
        arrival = next(arrivals, None)
        first_ms = arrival.at_ms if arrival is not None else 0
        if self._provider is not None:
            self._provider.begin(first_ms)
        self._step(first_ms, [NodeJoined(node) for node in self._nodes])
        reported_s = time.monotonic()
        idle = 0
        while arrival is not None or self._ends or self._expected_ends or self._wakeup_may_help(idle):
            idle = 0 if arrival is not None or self._ends or self._expected_ends else idle + 1
            now_ms = self._next_ms(arrival)
            if self._until_ms is not None and now_ms > self._until_ms:
                return
            facts: list[Fact] = []
            if arrival is not None and arrival.at_ms <= now_ms:
                self._active[arrival.id] = _ActiveJob(arrival)
                facts.append(JobSubmitted(Job(arrival.id, arrival.spec, "pending", now_ms, now_ms, queued_ms=now_ms)))
                arrival = next(arrivals, None)
            elif self._ends and self._ends[0][0] <= now_ms and self._ends[0] < self._first_expected_end():
                facts += self._end_run(heapq.heappop(self._ends)[2], now_ms)
            while self._expected_ends and self._expected_ends[0][0] <= now_ms:
                facts += self._end_run(heapq.heappop(self._expected_ends)[2], now_ms)
            if self._provider is not None:
                facts += self._take_back(self._provider.facts(self._controller, now_ms), now_ms)
            self._step(now_ms, facts)
            if (
                self._on_progress is not None
                and self._steps % 256 == 0
                and time.monotonic() - reported_s > _PROGRESS_EVERY_S
            ):
                reported_s = time.monotonic()
                self._on_progress(now_ms, len(self._outcomes), len(self._workload.arrivals))

    def _wakeup_may_help(self, idle: int) -> bool:
        """Nothing arrives and nothing runs: time alone may unblock a pending job (a backoff, the end of a reservation)."""
        if self._provider is not None and (
            self._provider.active or self._provider.next_ms(self._controller) is not None
        ):
            return idle < _MAX_IDLE_STEPS  # nodes may be ordered for pending jobs, and all are released at the end
        return (
            bool(self._active)
            and idle < _MAX_IDLE_STEPS
            and self._controller.next_wakeup_ms(self._controller.beat_ms) is not None
        )

    def _first_expected_end(self) -> tuple[int, int, RunId]:
        return self._expected_ends[0] if self._expected_ends else _NEVER

    def _next_ms(self, arrival: Arrival | None) -> int:
        """The next arrival, end, or wake-up of the controller."""
        now_ms = arrival.at_ms if arrival is not None else 1 << 62
        for heap in (self._ends, self._expected_ends):
            if heap and heap[0][0] < now_ms:
                now_ms = heap[0][0]
        if self._provider is not None and (due_ms := self._provider.next_ms(self._controller)) is not None:
            now_ms = min(now_ms, max(due_ms, self._controller.beat_ms))
        wake_ms = self._controller.next_wakeup_ms(self._controller.beat_ms)
        return now_ms if wake_ms is None else min(now_ms, max(wake_ms, self._controller.beat_ms))

    def _step(self, now_ms: int, facts: list[Fact]) -> Step:
        step = self._controller.step(now_ms, facts)
        self._steps += 1
        kinds = {bind.job: bind.kind for bind in step.plan.binds}
        for act in step.acts:
            if type(act) is Start:
                self._start_run(act, kinds[act.run.job], now_ms)
            elif type(act) is Stop and act.run in self._job_of:
                self._stop_run(act.run, now_ms)
            elif self._provider is not None and isinstance(act, NodeAct):
                self._provider.act(act, now_ms)
        if self._provider is not None and (facts or step.acts):
            self._provider.changed()
        if self._steps % self._stride == 0:
            self._sample(now_ms)
        return step

    def _start_run(self, start: Start, kind: StartKind | Literal[""], now_ms: int) -> None:
        job = self._active[start.run.job]
        if not job.running:
            job.started_ms, job.nodes = now_ms, ()
            job.kind = kind or "head"
            self._busy += 1
        job.running += 1
        job.nodes = (*job.nodes, start.run.node)
        self._job_of[start.run.id] = start.run.job
        if self._provider is not None:
            self._node_of[start.run.id] = start.run.node
            self._provider.run_started(start.run.node, start.task.request, now_ms)
        for resource, amount in start.task.request.items():
            self._used[resource] = self._used.get(resource, 0) + amount
        expected = job.arrival.run_ms == start.spec.estimate_ms
        heap = self._expected_ends if expected else self._ends
        heapq.heappush(heap, (now_ms + job.arrival.run_ms, next(self._numbers), start.run.id))

    def _take_back(self, facts: list[Fact], now_ms: int) -> list[Fact]:
        """The runs on nodes that are taken back stop."""
        lost = {fact.node for fact in facts if isinstance(fact, NodeLost)}
        for run in [run for run, node in self._node_of.items() if node in lost]:
            self._count_stop(run, now_ms)
        return facts

    def _count_stop(self, run: RunId, now_ms: int) -> _ActiveJob:
        job = self._release(run, now_ms)
        if not job.running:
            job.preemptions += 1
            self._preemptions += 1
            job.started_ms = -1
        return job

    def _release(self, run: RunId, now_ms: int) -> _ActiveJob:
        job = self._active[self._job_of.pop(run)]
        _, member, _ = parse_run_id(run)
        request = job.arrival.spec.task_of(member).request
        if self._provider is not None:
            self._provider.run_ended(self._node_of.pop(run), request, now_ms)
        for resource, amount in request.items():
            self._used[resource] -= amount
        job.running -= 1
        self._busy -= not job.running
        return job

    def _end_run(self, run: RunId, now_ms: int) -> list[Fact]:
        if run not in self._job_of:
            return []  # it was stopped earlier
        job = self._release(run, now_ms)
        if not job.running:
            self._outcomes.append(_outcome(job, now_ms))
            del self._active[job.arrival.id]
        return [RunObserved(run, "succeeded", now_ms, 0)]

    def _stop_run(self, run: RunId, now_ms: int) -> None:
        started_ms = self._active[self._job_of[run]].started_ms
        job = self._count_stop(run, now_ms)
        self._step(now_ms, [RunObserved(run, "stopped", now_ms, 143)])
        if job.arrival.id not in self._controller.cluster.jobs and job.arrival.id in self._active:
            job.started_ms = started_ms  # the stop ended the job, for example after an overrun
            self._outcomes.append(_outcome(job, now_ms))
            del self._active[job.arrival.id]

    def _sample(self, now_ms: int) -> None:
        waiting = len(self._active) - self._busy
        fragmented = self._fragmentation.share(self._steps)
        self._samples.append(Sample(now_ms, dict(self._used), self._busy, waiting, self._preemptions, fragmented))
        if len(self._samples) > _MAX_SAMPLES:
            del self._samples[::2]
            self._stride *= 2


def _outcome(job: _ActiveJob, ended_ms: int) -> Outcome:
    spec = job.arrival.spec
    requests = ({r: a * task.count for r, a in task.request.items()} for task in spec.tasks)
    return Outcome(
        id=job.arrival.id,
        name=spec.name,
        user=spec.user,
        project=spec.project,
        submitted_ms=job.arrival.at_ms,
        started_ms=job.started_ms,
        ended_ms=ended_ms,
        request=_total(requests),
        size=spec.size,
        nodes=job.nodes,
        estimate_ms=spec.estimate_ms,
        kind=job.kind,
        preemptions=job.preemptions,
        deadline_ms=spec.deadline_ms,
    )


def _total(amounts: Iterator[Resources]) -> Resources:
    out: Resources = {}
    for each in amounts:
        for resource, amount in each.items():
            out[resource] = out.get(resource, 0) + amount
    return out
