"""PRETENDS: moves the real controller through simulated time. Facts come off a heap, effects push future facts onto it.

Each arrival and each end is a step of its own, as they are in a quiet cluster; of those at the same time arrivals come
first. Runs that have used up their estimate end all together with the first thing that happens then: nobody has to be
told of an end that was known beforehand. Runs take what the trace says they took; what is told to stop stops at once.
"""

from __future__ import annotations

import gc
import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Literal

from hodei.control.controller import Controller, Step
from hodei.model.effects import Start, Stop
from hodei.model.errors import InvalidInput
from hodei.model.facts import Fact, JobSubmitted, NodeJoined, RunObserved
from hodei.model.ids import JobId, RunId
from hodei.model.job import Job
from hodei.model.node import Node
from hodei.model.resources import Resources
from hodei.sim.metrics import Fragmentation, Outcome, Result, Sample, StartKind
from hodei.sim.traces import Arrival, Workload

# Samples are thinned out, every other one, when there are so many.
_SAMPLES_KEPT = 20_000
_TOLD_EVERY_S = 0.2
# Wake-ups in a row that lead to nothing, after which those who wait are given up.
_IDLE_STEPS = 1000
_NEVER = (1 << 62, 0, "")
Tell = Callable[[int, int, int], None]


class _Life:
    """What the simulator knows of one job that has arrived and not ended."""

    __slots__ = ("arrival", "kind", "left", "nodes", "preemptions", "started_ms")

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.started_ms = -1
        self.left = 0
        self.nodes: tuple[str, ...] = ()
        self.kind: StartKind = "head"
        self.preemptions = 0


class Simulation:
    """One workload under one controller. `tell` is called now and then with (simulated ms, jobs ended, jobs in all)."""

    def __init__(
        self,
        workload: Workload,
        controller: Controller,
        nodes: Sequence[Node] = (),
        *,
        policy: str = "",
        until_ms: int | None = None,
        tell: Tell | None = None,
    ) -> None:
        self._workload, self._controller, self._policy = workload, controller, policy
        self._nodes = list(nodes or workload.nodes)
        if not self._nodes:
            raise InvalidInput(f"{workload.name} does not say what it ran on", hint="give --procs or --cluster")
        self._until_ms, self._tell = until_ms, tell
        self._ends: list[tuple[int, int, RunId]] = []
        self._foreseen: list[tuple[int, int, RunId]] = []
        self._numbers = count()
        self._running: dict[RunId, JobId] = {}
        self._lifecycle: dict[JobId, _Life] = {}
        self._outcomes: list[Outcome] = []
        self._samples: list[Sample] = []
        self._stride, self._steps, self._busy = 1, 0, 0
        self._used: Resources = {}
        self._preemptions = 0
        self._unusable = Fragmentation(workload, controller.cluster.table)

    def run(self) -> Result:
        began = time.process_time()
        collecting = gc.isenabled()
        gc.disable()  # hardly anything made here is garbage in a ring; looking for it would take a third of the time
        try:
            self._go()
        finally:
            if collecting:
                gc.enable()
        unplaced = [life for life in self._lifecycle.values() if life.started_ms < 0]
        for life in self._lifecycle.values():
            self._outcomes.append(_outcome(life, -1))
        return Result(
            policy=self._policy,
            workload=self._workload.name,
            capacity=_total(node.capacity for node in self._nodes),
            outcomes=sorted(self._outcomes, key=lambda outcome: outcome.id),
            samples=self._samples,
            seconds=time.process_time() - began,
            unplaced=len(unplaced),
            start_reservations_broken=self._controller.reservation_audit.broken,
        )

    # --------------------------------------------------------------------------------------------- the heap

    def _go(self) -> None:
        arrivals = iter(self._workload.arrivals)
        arrival = next(arrivals, None)
        first_ms = arrival.at_ms if arrival is not None else 0
        self._step(first_ms, [NodeJoined(node) for node in self._nodes])
        told = time.monotonic()
        idle = 0
        while arrival is not None or self._ends or self._foreseen or self._may_go_on(idle):
            idle = 0 if arrival is not None or self._ends or self._foreseen else idle + 1
            now_ms = self._next_ms(arrival)
            if self._until_ms is not None and now_ms > self._until_ms:
                return
            facts: list[Fact] = []
            if arrival is not None and arrival.at_ms <= now_ms:
                self._lifecycle[arrival.id] = _Life(arrival)
                facts.append(JobSubmitted(Job(arrival.id, arrival.spec, "pending", now_ms, now_ms, queued_ms=now_ms)))
                arrival = next(arrivals, None)
            elif self._ends and self._ends[0][0] <= now_ms and self._ends[0] < self._soonest_foreseen():
                facts += self._end_of(heapq.heappop(self._ends)[2], now_ms)
            while self._foreseen and self._foreseen[0][0] <= now_ms:
                facts += self._end_of(heapq.heappop(self._foreseen)[2], now_ms)
            self._step(now_ms, facts)
            if self._tell is not None and self._steps % 256 == 0 and time.monotonic() - told > _TOLD_EVERY_S:
                told = time.monotonic()
                self._tell(now_ms, len(self._outcomes), len(self._workload.arrivals))

    def _may_go_on(self, idle: int) -> bool:
        """Nothing arrives and nothing runs: whoever still waits may be helped by time alone (a pause, a booking's end)."""
        return (
            bool(self._lifecycle)
            and idle < _IDLE_STEPS
            and self._controller.next_wakeup_ms(self._controller.beat_ms) is not None
        )

    def _soonest_foreseen(self) -> tuple[int, int, RunId]:
        return self._foreseen[0] if self._foreseen else _NEVER

    def _next_ms(self, arrival: Arrival | None) -> int:
        """The next thing to happen: an arrival, an end, or what the controller wants to be woken for."""
        now_ms = arrival.at_ms if arrival is not None else 1 << 62
        for heap in (self._ends, self._foreseen):
            if heap and heap[0][0] < now_ms:
                now_ms = heap[0][0]
        wake_ms = self._controller.next_wakeup_ms(self._controller.beat_ms)
        return now_ms if wake_ms is None else min(now_ms, max(wake_ms, self._controller.beat_ms))

    def _step(self, now_ms: int, facts: list[Fact]) -> Step:
        step = self._controller.step(now_ms, facts)
        self._steps += 1
        kinds = {bind.job: bind.kind for bind in step.plan.binds}
        for act in step.acts:
            if type(act) is Start:
                self._started(act, kinds[act.run.job], now_ms)
            elif type(act) is Stop and act.run in self._running:
                self._stop(act.run, now_ms)
        if self._steps % self._stride == 0:
            self._sample(now_ms)
        return step

    # ------------------------------------------------------------------------------------------------- runs

    def _started(self, order: Start, kind: StartKind | Literal[""], now_ms: int) -> None:
        life = self._lifecycle[order.run.job]
        if not life.left:
            life.started_ms, life.nodes = now_ms, ()
            life.kind = kind or "head"
            self._busy += 1
        life.left += 1
        life.nodes = (*life.nodes, order.run.node)
        self._running[order.run.id] = order.run.job
        for resource, amount in order.task.request.items():
            self._used[resource] = self._used.get(resource, 0) + amount
        foreseen = life.arrival.run_ms == order.spec.estimate_ms
        heap = self._foreseen if foreseen else self._ends
        heapq.heappush(heap, (now_ms + life.arrival.run_ms, next(self._numbers), order.run.id))

    def _leave(self, run: RunId) -> _Life:
        life = self._lifecycle[self._running.pop(run)]
        member = int(run.split(".")[1])
        for resource, amount in life.arrival.spec.task_of(member).request.items():
            self._used[resource] -= amount
        life.left -= 1
        self._busy -= not life.left
        return life

    def _end_of(self, run: RunId, now_ms: int) -> list[Fact]:
        if run not in self._running:
            return []  # it was stopped before
        life = self._leave(run)
        if not life.left:
            self._outcomes.append(_outcome(life, now_ms))
            del self._lifecycle[life.arrival.id]
        return [RunObserved(run, "succeeded", now_ms, 0)]

    def _stop(self, run: RunId, now_ms: int) -> None:
        life = self._leave(run)
        started_ms = life.started_ms
        if not life.left:
            life.preemptions += 1
            self._preemptions += 1
            life.started_ms = -1
        self._step(now_ms, [RunObserved(run, "stopped", now_ms, 143)])
        if life.arrival.id not in self._controller.cluster.jobs and life.arrival.id in self._lifecycle:
            life.started_ms = started_ms  # that was its end, as when it overran
            self._outcomes.append(_outcome(life, now_ms))
            del self._lifecycle[life.arrival.id]

    def _sample(self, now_ms: int) -> None:
        waiting = len(self._lifecycle) - self._busy
        fragmented = self._unusable.share(self._steps)
        self._samples.append(Sample(now_ms, dict(self._used), self._busy, waiting, self._preemptions, fragmented))
        if len(self._samples) > _SAMPLES_KEPT:
            del self._samples[::2]
            self._stride *= 2


def _outcome(life: _Life, ended_ms: int) -> Outcome:
    spec = life.arrival.spec
    requests = ({r: a * task.count for r, a in task.request.items()} for task in spec.tasks)
    return Outcome(
        id=life.arrival.id,
        name=spec.name,
        user=spec.user,
        project=spec.project,
        submitted_ms=life.arrival.at_ms,
        started_ms=life.started_ms,
        ended_ms=ended_ms,
        request=_total(requests),
        size=spec.size,
        nodes=life.nodes,
        estimate_ms=spec.estimate_ms,
        kind=life.kind,
        preemptions=life.preemptions,
        deadline_ms=spec.deadline_ms,
    )


def _total(amounts: Iterator[Resources]) -> Resources:
    out: Resources = {}
    for each in amounts:
        for resource, amount in each.items():
            out[resource] = out.get(resource, 0) + amount
    return out
