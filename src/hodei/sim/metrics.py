"""Results of a simulation and the measures computed from them. Sums are integers; only the last division is not.

Jobs that never started have no wait, and jobs that did not end no run time: they are counted, not averaged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from math import fsum
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from hodei.engine.nodes import Nodes, Table
from hodei.model.ids import JobId, NodeName
from hodei.model.resources import CPU, GPU, Resources
from hodei.plugins.fragmentation import Fragments, Shape, typical_workload
from hodei.sim.provider import CapacityUse
from hodei.sim.traces import Workload

# From the head of the queue, backfilled ahead of a start reservation, or on capacity that no start reservation needs.
StartKind = Literal["head", "backfill", "spill"]


class Outcome(Struct, frozen=True):
    """One job; times in milliseconds of simulated time, -1 for never. `request` is the total of all members."""

    id: JobId
    name: str
    user: str
    project: str
    submitted_ms: int
    started_ms: int
    ended_ms: int
    request: Resources
    size: int = 1
    nodes: tuple[NodeName, ...] = ()
    estimate_ms: int = 0
    kind: StartKind = "head"
    preemptions: int = 0
    deadline_ms: int = 0

    @property
    def wait_ms(self) -> int:
        return self.started_ms - self.submitted_ms

    @property
    def run_ms(self) -> int:
        return self.ended_ms - self.started_ms


class Sample(Struct, frozen=True):
    """The cluster at one moment. `fragmented`: the share of free GPUs (of free CPU without GPU jobs) that a typical job
    cannot use, in thousandths."""

    at_ms: int
    used: Resources
    running: int
    waiting: int
    preemptions: int = 0
    fragmented: int = 0


class Result(Struct):
    """One workload under one policy. `seconds`: CPU time of the simulator. `capacity`: the total of all nodes.
    `nodes_used`: of nodes that were ordered."""

    policy: str
    workload: str
    capacity: Resources
    outcomes: list[Outcome]
    samples: list[Sample]
    seconds: float = 0.0
    unplaced: int = 0
    start_reservations_broken: int = 0
    nodes_used: CapacityUse | None = None


HOUR_MS = 3_600_000
SHORT_RUN_MS = 10_000
"""Shorter runs count as this long in a slowdown; otherwise the shortest jobs would dominate the mean."""
STARVED_MS = 7 * 86_400_000
"""A job that waits longer counts as starved."""


class Fairness(Struct, frozen=True):
    """The dominant share of each user with running or pending jobs at one moment, and Jain's index over them."""

    at_ms: int
    jain: float
    shares: dict[str, float]


def summary(result: Result, *, starved_ms: int = STARVED_MS) -> dict[str, Any]:
    """All numbers of a run by name, ready for JSON. Times end in `_s`; shares are between 0 and 1."""
    done = finished(result.outcomes)
    started = [outcome for outcome in result.outcomes if outcome.started_ms >= 0]
    waits = sorted(outcome.started_ms - outcome.submitted_ms for outcome in started)
    used = utilisation(result)
    kinds = dict.fromkeys(("head", "backfill", "spill"), 0)
    for outcome in started:
        kinds[outcome.kind] += 1
    return {
        "policy": result.policy,
        "workload": result.workload,
        "jobs": len(result.outcomes),
        "finished": len(done),
        "unplaced": result.unplaced,
        "bounded_slowdown": bounded_slowdown(done),
        "mean_wait_s": sum(waits) / len(waits) / 1000 if waits else 0.0,
        "median_wait_s": median(waits) / 1000,
        "p95_wait_s": percentile(waits, 95) / 1000,
        "max_wait_s": waits[-1] / 1000 if waits else 0.0,
        "makespan_s": makespan_ms(done) / 1000,
        "utilisation": used[main_resource(result)] if used else 0.0,
        "utilisation_of": used,
        "jain": jain(mean_slowdown_by_user(done).values()),
        "starved": starved(result, starved_ms),
        "starts": kinds,
        "deadlines": sum(outcome.deadline_ms > 0 for outcome in result.outcomes),
        "deadlines_missed": deadlines_missed(result.outcomes),
        "preemptions": sum(outcome.preemptions for outcome in result.outcomes),
        "start_reservations_broken": result.start_reservations_broken,
        "seconds": result.seconds,
        "jobs_per_second": len(result.outcomes) / result.seconds if result.seconds else 0.0,
        **(_capacity_numbers(result.nodes_used) if result.nodes_used is not None else {}),
    }


def _capacity_numbers(used: CapacityUse) -> dict[str, Any]:
    return {
        "cost": used.cost_milli / 1000,
        "node_hours": used.paid_ms / HOUR_MS,
        "wasted_hours": used.wasted_ms / HOUR_MS,
        "used_part": used.allocated_ms / used.paid_ms if used.paid_ms else 0.0,
        "nodes_started": used.started,
        "boots_failed": used.failed_boots,
        "orders_refused": used.refused,
        "reclaimed": used.reclaimed,
        "longest_idle_s": used.longest_idle_ms / 1000,
    }


def finished(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.started_ms >= 0 and outcome.ended_ms >= 0]


def slowdown(wait_ms: int, run_ms: int) -> float:
    """(wait + run) / max(run, 10 s), at least 1."""
    return max(1.0, (wait_ms + run_ms) / max(run_ms, SHORT_RUN_MS))


def slowdowns(outcomes: Iterable[Outcome]) -> list[float]:
    """Of all jobs that ended, in their order."""
    return [slowdown(outcome.wait_ms, outcome.run_ms) for outcome in finished(outcomes)]


def bounded_slowdown(outcomes: Iterable[Outcome]) -> float:
    """The mean over all jobs that ended, with no warm-up period excluded; 0 without jobs."""
    found = slowdowns(outcomes)
    return fsum(found) / len(found) if found else 0.0


def percentile(ordered: Sequence[int], percent: int) -> int:
    """The nearest-rank percentile; 0 without values."""
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else 0


def median(ordered: Sequence[int]) -> float:
    middle = len(ordered) // 2
    if not ordered:
        return 0.0
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def makespan_ms(outcomes: Iterable[Outcome]) -> int:
    """From the first submission to the last end."""
    done = finished(outcomes)
    return max(o.ended_ms for o in done) - min(o.submitted_ms for o in done) if done else 0


def utilisation(result: Result) -> dict[str, float]:
    """Per resource: held times how long, over capacity times makespan. Work lost by preemption does not count."""
    done = finished(result.outcomes)
    span_ms = makespan_ms(done)
    held = dict.fromkeys(result.capacity, 0)
    for outcome in done:
        for resource, amount in outcome.request.items():
            if resource in held:
                held[resource] += amount * outcome.run_ms
    return {
        resource: held[resource] / (capacity * span_ms) if capacity and span_ms else 0.0
        for resource, capacity in result.capacity.items()
    }


def main_resource(result: Result) -> str:
    """The resource of `utilisation`: cpu if any job requests it, else gpu, else the first requested one by name."""
    requested = {resource for outcome in result.outcomes for resource in outcome.request if resource in result.capacity}
    return next(
        (name for name in (CPU, GPU, *sorted(requested)) if name in requested), next(iter(result.capacity), CPU)
    )


def starved(result: Result, longer_than_ms: int = STARVED_MS) -> int:
    """Jobs that waited longer, whether they started in the end or not."""
    last_ms = max((_last_seen_ms(outcome) for outcome in result.outcomes), default=0)
    return sum(
        (outcome.started_ms if outcome.started_ms >= 0 else last_ms) - outcome.submitted_ms > longer_than_ms
        for outcome in result.outcomes
    )


def deadlines_missed(outcomes: Iterable[Outcome]) -> int:
    """Jobs that ended after their deadline, or not at all."""
    return sum(outcome.deadline_ms > 0 and not 0 <= outcome.ended_ms <= outcome.deadline_ms for outcome in outcomes)


def user_of(outcome: Outcome) -> str:
    """The tenant in measures of fairness: the user, or the project of jobs without a user."""
    return outcome.user or outcome.project


def jain(values: Iterable[int | float]) -> float:
    """Jain's fairness index: 1 when all values are equal, 1/n when one has everything; 1 without values or for all zeros."""
    found = list(values)
    squares = fsum(value * value for value in found)
    return fsum(found) ** 2 / (len(found) * squares) if squares else 1.0


def mean_slowdown_by_user(outcomes: Iterable[Outcome]) -> dict[str, float]:
    by_user: dict[str, list[float]] = {}
    for outcome in finished(outcomes):
        by_user.setdefault(user_of(outcome), []).append(slowdown(outcome.wait_ms, outcome.run_ms))
    return {user: fsum(found) / len(found) for user, found in sorted(by_user.items())}


def dominant_share(used: Resources, capacity: Resources) -> float:
    """The largest share of any one resource."""
    return max((amount / capacity[name] for name, amount in used.items() if capacity.get(name)), default=0.0)


def dominant_shares(result: Result) -> dict[str, float]:
    """Each user's dominant share of the whole run: resource times time, over capacity times makespan."""
    span_ms = makespan_ms(result.outcomes)
    held: dict[str, Resources] = {}
    for outcome in finished(result.outcomes):
        of_user = held.setdefault(user_of(outcome), {})
        for resource, amount in outcome.request.items():
            of_user[resource] = of_user.get(resource, 0) + amount * outcome.run_ms
    total = {resource: amount * span_ms for resource, amount in result.capacity.items()}
    return {user: dominant_share(used, total) for user, used in sorted(held.items())}


def fairness_over_time(result: Result, points: int = 200) -> list[Fairness]:
    """At `points` moments, evenly spread from the first submission to the last end."""
    moments = _moments(result.outcomes, points)
    changes = sorted(
        chain.from_iterable(_changes(outcome) for outcome in result.outcomes), key=lambda change: change[0]
    )
    used: dict[str, Resources] = {}
    present: dict[str, int] = {}
    out, place = [], 0
    for moment in moments:
        while place < len(changes) and changes[place][0] <= moment:
            _, outcome, step, sign = changes[place]
            place += 1
            user = user_of(outcome)
            if step == "presence":
                present[user] = present.get(user, 0) + sign
                continue
            of_user = used.setdefault(user, {})
            for resource, amount in outcome.request.items():
                of_user[resource] = of_user.get(resource, 0) + sign * amount
        shares = {
            user: dominant_share(used.get(user, {}), result.capacity) for user in sorted(present) if present[user]
        }
        out.append(Fairness(moment, jain(shares.values()), shares))
    return out


def _moments(outcomes: Sequence[Outcome], points: int) -> list[int]:
    if not outcomes or points < 1:
        return []
    first = min(outcome.submitted_ms for outcome in outcomes)
    last = max(_last_seen_ms(outcome) for outcome in outcomes)
    return [first + (last - first) * number // max(points - 1, 1) for number in range(points)]


def _last_seen_ms(outcome: Outcome) -> int:
    return max(outcome.submitted_ms, outcome.started_ms, outcome.ended_ms)


def _changes(outcome: Outcome) -> Iterator[tuple[int, Outcome, str, int]]:
    """A job is present from its submission to its end, and holds its request while it runs."""
    yield outcome.submitted_ms, outcome, "presence", 1
    if outcome.started_ms >= 0:
        yield outcome.started_ms, outcome, "use", 1
        if outcome.ended_ms >= 0:
            yield outcome.ended_ms, outcome, "use", -1
    if outcome.ended_ms >= 0:
        yield outcome.ended_ms, outcome, "presence", -1


# Typical requests are the most frequent ones of the first jobs. Limits keep the cost low on ten thousand nodes.
_SAMPLED_JOBS = 5000
_MAX_REQUESTS = 16
# A measurement is reused for this part of the steps so far: pictures have fewer points.
_REUSE_PART = 250


class Fragmentation:
    """The share of free capacity that a typical job cannot use, measured now and then."""

    def __init__(self, workload: Workload, table: Table) -> None:
        self._workload, self._table = workload, table
        self._requests: list[tuple[Resources, int]] | None = None
        self._fragments: Fragments | None = None
        self._due, self._last = 0, 0

    def share(self, step: int) -> int:
        """In thousandths of the free capacity after this many steps; 0 on a single node."""
        if step >= self._due:
            self._due = step + max(step // _REUSE_PART, 1)
            self._last = self._measure() if len(self._table.names) > 1 else 0
        return self._last

    def _measure(self) -> int:
        if self._requests is None:
            self._requests = self._typical_requests()
        nodes = Nodes(self._table)
        if self._fragments is not None:
            gpus = nodes.gpus()
            free = int(np.maximum(gpus, 0).sum())
            kinds = self._fragments.kinds(nodes)
            usable = int(self._fragments.usable(kinds, nodes.free(CPU), gpus).sum())
            return 1000 - usable * 1000 // (free * self._fragments.weight) if free else 0
        cpu = np.maximum(nodes.free(CPU), 0)
        free, weight = int(cpu.sum()), sum(times for _, times in self._requests)
        usable = 0
        for request, times in self._requests:
            fits = np.logical_and.reduce([nodes.free(resource) >= amount for resource, amount in request.items()])
            usable += times * int(cpu[fits].sum())
        return 1000 - usable * 1000 // (free * weight) if free and weight else 0

    def _typical_requests(self) -> list[tuple[Resources, int]]:
        """Requests of members, the most frequent first. Sets `_fragments` for GPU workloads."""
        seen: Counter[tuple[tuple[str, int], ...]] = Counter()
        for arrival in islice(iter(self._workload.arrivals), _SAMPLED_JOBS):
            for task in arrival.spec.tasks:
                seen[tuple(sorted((name, amount) for name, amount in task.request.items() if amount))] += task.count
        seen.pop((), None)
        requests = [(dict(request), times) for request, times in seen.most_common()]
        if self._table.gpus.shape[1]:
            shapes: Counter[Shape] = Counter()
            for request, times in requests:
                if GPU in request:
                    shapes[Shape(request.get(CPU, 0), request[GPU])] += times
            self._fragments = Fragments(typical_workload(shapes.elements())) if shapes else None
        return requests[:_MAX_REQUESTS]
