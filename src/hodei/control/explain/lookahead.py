"""Lookahead: a clone of the controller steps through simulated time.

It is stepped from one expected end of a run to the next; the caller provides the run times. No clock is read, and orders
to start and stop have no effect outside the simulation.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Literal

from msgspec import Struct, structs

from hodei.control.clone import clone_controller
from hodei.control.controller import Controller, Step
from hodei.model.effects import Start, Stop
from hodei.model.facts import Fact, JobSubmitted, NodeJoined, RunObserved
from hodei.model.ids import JobId, NodeName, RunId, job_of
from hodei.model.job import RUN_ENDED, Job, JobSpec, Run
from hodei.model.node import Node

__all__ = ["Evicted", "Lookahead", "Started", "clone_controller", "corrected_ms", "look_ahead"]

DAY_MS = 86_400_000
# Pauses between timed steps that decide nothing: they grow from the shortest to the longest.
_LONGEST_PAUSE_MS = 3_600_000
_SHORTEST_PAUSE_MS = 1000

# The total run time of a run that has run for `so_far_ms`; 0: unknown, it never ends.
RunMs = Callable[[Run, JobSpec, int], int]


class Started(Struct, frozen=True):
    """The first start of a pending job. `nodes`: the first twenty."""

    at_ms: int
    nodes: tuple[NodeName, ...]
    kind: str = ""


class Evicted(Struct, frozen=True):
    """A stopped job; `by`: the preemptor (0: none)."""

    job: JobId
    at_ms: int
    by: JobId = 0


class Lookahead(Struct):
    """`end`: no job is pending (done), nothing more will happen (stuck), or a limit was reached."""

    starts: dict[JobId, Started] = {}
    evicted: list[Evicted] = []
    end: Literal["done", "stuck", "steps", "horizon", "stopped"] = "done"
    at_ms: int = 0
    steps: int = 0


def corrected_ms(total_ms: int, so_far_ms: int) -> int:
    """A run beyond its estimate is expected to take twice as long, and twice again, as in the availability profile."""
    if total_ms <= 0:
        return 0
    while total_ms <= so_far_ms:
        total_ms *= 2
    return total_ms


def look_ahead(
    controller: Controller,
    now_ms: int,
    run_ms: RunMs,
    *,
    facts: Sequence[Fact] = (),
    arrivals: Iterable[tuple[int, Job]] = (),
    awaited: Iterable[JobId] | None = None,
    begins: Mapping[RunId, int] | None = None,
    max_steps: int = 100_000,
    horizon_ms: int = 365 * DAY_MS,
    go_on: Callable[[], bool] = lambda: True,
) -> Lookahead:
    """Step `controller` (a clone: it is changed) until no job is pending, or up to the limits.

    `facts` happen first; `arrivals`: future jobs, in order of time. With `awaited` it ends when all of these have started.
    `begins`: when placed runs that wait in the queue of a backend will start. `go_on` is called before each step; False
    ends it.
    """
    return _Simulation(controller, now_ms, run_ms, awaited, begins).run(
        facts, arrivals, max_steps, now_ms + horizon_ms, go_on
    )


class _Simulation:
    def __init__(
        self,
        controller: Controller,
        now_ms: int,
        run_ms: RunMs,
        awaited: Iterable[JobId] | None = None,
        begins: Mapping[RunId, int] | None = None,
    ) -> None:
        self._controller, self._now_ms, self._run_ms = controller, now_ms, run_ms
        self._ends: list[tuple[int, int, RunId]] = []
        self._numbers = count()
        self._live: set[RunId] = set()
        self._starting: list[tuple[int, NodeName, Node]] = []
        self._stopped: list[RunId] = []
        self._pause_ms = _SHORTEST_PAUSE_MS
        self._awaited = None if awaited is None else set(awaited)
        self._begins = begins or {}
        self._out = Lookahead({}, [])

    def run(
        self,
        facts: Sequence[Fact],
        arrivals: Iterable[tuple[int, Job]],
        max_steps: int,
        until_ms: int,
        go_on: Callable[[], bool],
    ) -> Lookahead:
        out, now_ms = self._out, self._now_ms
        self._add_live_runs()
        self._add_starting_nodes()
        coming = iter(arrivals)
        arrival = next(coming, None)
        due: list[Fact] = list(facts)
        while True:
            out.at_ms = now_ms
            if not go_on():
                return self._over("stopped")
            if out.steps >= max_steps:
                return self._over("steps")
            while arrival is not None and arrival[0] <= now_ms:
                due.append(JobSubmitted(arrival[1]))
                arrival = next(coming, None)
            self._step(now_ms, due)
            if self._all_started(arrival is None):
                return self._over("done")
            due = [RunObserved(run, "stopped", now_ms, 143) for run in self._stopped]
            self._stopped = []
            if due:
                continue  # stopped runs end at once
            then_ms = self._next_ms(now_ms, arrival)
            if then_ms is None:
                return self._over("stuck")
            if then_ms > until_ms:
                return self._over("horizon")
            now_ms = then_ms
            while self._starting and self._starting[0][0] <= now_ms:
                due.append(NodeJoined(self._starting.pop(0)[2]))
            while self._ends and self._ends[0][0] <= now_ms:
                run = heapq.heappop(self._ends)[2]
                if run in self._live:
                    self._live.discard(run)
                    due.append(RunObserved(run, "succeeded", now_ms, 0))

    def _all_started(self, no_more_arrivals: bool) -> bool:
        if self._awaited is not None and not self._awaited:
            return True
        return no_more_arrivals and not self._stopped and not any(self._controller.pending().values())

    def _over(self, end: Literal["done", "stuck", "steps", "horizon", "stopped"]) -> Lookahead:
        self._out.end = end
        return self._out

    def _add_starting_nodes(self) -> None:
        """Ordered nodes become ready in time. What would be ordered later is left out: nodes are ordered only for jobs that
        wait long without them."""
        scaling = self._controller.scaling
        for order in self._controller.cluster.node_orders.values():
            if order.phase == "starting":
                ready_ms = max(order.ordered_ms + scaling.startup_ms_of(order.node), self._now_ms)
                self._starting.append((ready_ms, order.name, structs.replace(order.node, phase="ready")))
        self._starting.sort(key=lambda one: one[:2])

    def _add_live_runs(self) -> None:
        cluster = self._controller.cluster
        for job in sorted(cluster.runs):
            for run in cluster.runs[job].values():
                if run.state in RUN_ENDED:
                    continue
                self._live.add(run.id)
                if run.stop_reason:
                    self._stop(run.id)
                else:
                    self._expect(run, cluster.jobs[job].spec, run.started_ms or self._begin_ms(run))

    def _begin_ms(self, run: Run) -> int:
        """The start of a placed run: at once, or when its turn comes in the queue of its backend."""
        return max(self._begins[run.id], self._now_ms) if run.id in self._begins else run.placed_ms

    def _expect(self, run: Run, spec: JobSpec, since_ms: int) -> None:
        so_far_ms = max(self._now_ms - since_ms, 0)
        total_ms = corrected_ms(self._run_ms(run, spec, so_far_ms), so_far_ms)
        if total_ms:
            heapq.heappush(self._ends, (since_ms + total_ms, next(self._numbers), run.id))

    def _step(self, now_ms: int, facts: list[Fact]) -> None:
        step = self._controller.step(now_ms, facts)
        out = self._out
        out.steps += 1
        self._now_ms = now_ms
        for act in step.acts:
            if type(act) is Start:
                self._live.add(act.run.id)
                self._expect(act.run, act.spec, now_ms)
            elif type(act) is Stop and act.run in self._live:
                self._stop(act.run)
        self._record(step, now_ms)
        decided = bool(facts or step.plan.binds or step.plan.evictions)
        self._pause_ms = _SHORTEST_PAUSE_MS if decided else min(self._pause_ms * 2, _LONGEST_PAUSE_MS)

    def _record(self, step: Step, now_ms: int) -> None:
        placed: dict[JobId, list[NodeName]] = {}
        kinds: dict[JobId, str] = {}
        for bind in step.plan.binds:
            placed.setdefault(bind.job, []).append(bind.node)
            kinds[bind.job] = bind.kind
        jobs, starts = self._controller.cluster.jobs, self._out.starts
        for job, nodes in placed.items():
            # Members that join a running gang are not a start of it.
            if job not in starts and jobs[job].scheduled_ms == now_ms:
                starts[job] = Started(now_ms, tuple(sorted(set(nodes))[:20]), kinds[job])
                if self._awaited is not None:
                    self._awaited.discard(job)
        # Besides victims: runs stopped because of their node or the end of a reservation.
        stopped = {eviction.job: eviction.preemptor for eviction in step.plan.evictions}
        for act in step.acts:
            if type(act) is Stop:
                stopped.setdefault(job_of(act.run), 0)
        self._out.evicted += [Evicted(job, now_ms, by) for job, by in stopped.items()]

    def _stop(self, run: RunId) -> None:
        self._live.discard(run)
        self._stopped.append(run)

    def _next_ms(self, now_ms: int, arrival: tuple[int, Job] | None) -> int | None:
        while self._ends and self._ends[0][2] not in self._live:
            heapq.heappop(self._ends)
        times = [self._ends[0][0]] if self._ends else []
        if self._starting:
            times.append(self._starting[0][0])
        if arrival is not None:
            times.append(arrival[0])
        wake_ms = self._controller.next_wakeup_ms(now_ms)
        if wake_ms is not None:
            # Timed retries happen every second in reality; here they would be most of the steps.
            times.append(wake_ms if wake_ms <= now_ms else max(wake_ms, now_ms + self._pause_ms))
        return max(min(times), now_ms) if times else None
