"""Enforcement of time: runs that stay longer than allowed are stopped when others are due their capacity.

Overruns: a backfilled run started ahead of a pending job because of its estimate; in a queue with `overrun = "stop"` it is
stopped when it exceeds the estimate and blocks a start reservation. Reservations: other runs may be evicted when a window
starts (`at_start`), and runs of its own project when it ends (`at_end`).

Everything follows from runs, start reservations and reservations, so that it is the same after a restart. No more runs
are stopped than needed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from hodei.control.lifecycle.jobs import JobLifecycle
from hodei.control.queue.backfill import BackfillQueue
from hodei.control.queue.base import SchedulingQueue
from hodei.control.state import ClusterState
from hodei.engine.availability import FOREVER, StartReservation
from hodei.model.ids import NodeName, RunId
from hodei.model.job import Job, Run
from hodei.model.outcome import StopReason
from hodei.model.reservation import Reservation
from hodei.model.resources import Resources, format_duration

STOP = "stop"


class OverrunEnforcement:
    """Stops backfilled runs that have exceeded their estimates and block a start reservation."""

    def __init__(
        self, cluster: ClusterState, lifecycle: JobLifecycle, queues: Mapping[str, SchedulingQueue | BackfillQueue]
    ) -> None:
        self._cluster, self._lifecycle, self._queues = cluster, lifecycle, queues
        self._due: list[tuple[int, RunId]] = []
        self._over: set[RunId] = set()

    def watch(self, job: Job) -> None:
        """The job was placed or restored."""
        queue = self._queues.get(job.spec.profile)
        if queue is None or getattr(queue.profile.queue, "overrun", "") != STOP:
            return
        for run in self._cluster.live_runs(job.id):
            end_ms = self._cluster.availability.expected_end_ms(run.id) if run.kind == "backfill" else FOREVER
            if end_ms < FOREVER:
                heapq.heappush(self._due, (end_ms, run.id))

    def next_ms(self) -> int | None:
        """When the next run exceeds its estimate."""
        return self._due[0][0] if self._due else None

    def enforce(self, now_ms: int) -> None:
        """Stop the overruns without which a job with a start reservation could start now."""
        while self._due and self._due[0][0] <= now_ms:
            self._over.add(heapq.heappop(self._due)[1])
        if not self._over:
            return
        staying = {run.id: run for id in self._over if (run := self._cluster.run(id)) is not None and _stays(run)}
        self._over.intersection_update(staying)
        if not staying:
            return
        self._cluster.table.settle()
        nodes = {run.node for run in staying.values()}
        reserved: dict[NodeName, Resources] = {}  # by earlier start reservations
        reservations = self._cluster.availability.start_reservations.values()
        for reservation in sorted(reservations, key=lambda reservation: (reservation.start_ms, reservation.job)):
            needed = _by_node(reservation.places)
            if not nodes.isdisjoint(needed):
                for run in self._blocking(needed, staying, reserved):
                    self._stop(run, reservation, now_ms)
            for node, request in needed.items():
                _add(reserved.setdefault(node, {}), request)

    def _blocking(
        self, needed: Mapping[NodeName, Resources], over: Mapping[RunId, Run], reserved: Mapping[NodeName, Resources]
    ) -> list[Run]:
        """The fewest overruns whose stop frees all that is needed; none if that is not enough."""
        out: list[Run] = []
        table = self._cluster.table
        for name in sorted(needed):
            row = table.row.get(name)
            if row is None or not table.nodes[row].ready or table.nodes[row].cordoned:
                return []
            here = on_node(self._cluster, name)
            lacking = dict(needed[name])
            _add(lacking, reserved.get(name, {}))
            _add(lacking, _total(here))
            _add(lacking, table.allocatable[row], sign=-1)
            lacking = {resource: lacking[resource] for resource in needed[name] if lacking[resource] > 0}
            picked = fewest(lacking, [one for one in here if one.run.id in over])
            if picked is None:
                return []
            out += [one.run for one in picked]
        return out

    def _stop(self, run: Run, reservation: StartReservation, now_ms: int) -> None:
        job = self._cluster.jobs.get(run.job)
        if job is None or not _stays(self._cluster.run(run.id)):
            return  # it was stopped with another member of its gang
        allowed = format_duration(self._cluster.availability.expected_end_ms(run.id) - run.since_ms)
        detail = f"its estimate of {allowed} and blocked the start reservation of job {reservation.job}"
        self._cluster.emit("job.overrun", now_ms, job=job.id, run=run.id, node=run.node, reserved_for=reservation.job)
        evict_run(self._cluster, self._lifecycle, run, StopReason("overran", detail), now_ms, whole=True)


class ReservationWindows:
    """Evicts runs at the start and at the end of a reservation's window."""

    def __init__(self, cluster: ClusterState, lifecycle: JobLifecycle) -> None:
        self._cluster = cluster
        self._lifecycle = lifecycle
        # Nodes to be cleared: after a restart they join one by one.
        self._to_clear: set[tuple[str, NodeName]] = set()

    def begins(self, reservation: Reservation) -> None:
        """Called at the start of the window, and after a restart within it."""
        if reservation.at_start == STOP:
            self._to_clear |= {(reservation.name, node) for node, _ in reservation.places}

    def clear(self, now_ms: int) -> None:
        """Evict other projects from nodes of open windows, as far as the reserved capacity is missing."""
        if self._to_clear:
            self._cluster.table.settle()  # nodes may have joined in this step
        for name, node in sorted(self._to_clear):
            reservation = self._cluster.availability.reservations.get(name)
            if reservation is None:
                self._to_clear.discard((name, node))
            elif node in self._cluster.table.row:
                self._to_clear.discard((name, node))
                self._clear_node(reservation, node, now_ms)

    def _clear_node(self, reservation: Reservation, node: NodeName, now_ms: int) -> None:
        here = on_node(self._cluster, node)
        reserved = self._reserved(node, now_ms)
        own = _total(one for one in here if one.project == reservation.project)
        others = [one for one in here if one.project != reservation.project]
        lacking = dict(reserved.get(reservation.project, {}))
        for resource in lacking:
            lacking[resource] = max(lacking[resource] - own.get(resource, 0), 0)
        allocatable = self._cluster.table.allocatable[self._cluster.table.row[node]]
        held = _total(here)
        lacking = {
            resource: amount - (allocatable.get(resource, 0) - held.get(resource, 0))
            for resource, amount in lacking.items()
        }
        lacking = {resource: amount for resource, amount in lacking.items() if amount > 0}
        detail = f"off {node}: reservation {reservation.name} of project {reservation.project} has started"
        # As much as possible: a node that has shrunk may never have all of it.
        for one in fewest(lacking, _beyond(others, reserved), all_or_nothing=False) or ():
            self._evict(one, reservation, StopReason("cleared", detail), now_ms)

    def ends(self, reservation: Reservation, now_ms: int) -> None:
        """Called after the reservation was removed: its project gives back what was reserved, its latest runs first."""
        if reservation.at_end != STOP:
            return
        for node, request in sorted(_by_node(reservation.places).items()):
            own = [one for one in on_node(self._cluster, node) if one.project == reservation.project]
            held, kept = _total(own), self._reserved(node, now_ms).get(reservation.project, {})
            back = {
                resource: min(amount, held.get(resource, 0) - kept.get(resource, 0))
                for resource, amount in request.items()
            }
            back = {resource: amount for resource, amount in back.items() if amount > 0}
            reason = StopReason("outstayed", f"reservation {reservation.name}, which is over")
            beyond = _beyond(own, {reservation.project: kept})
            for one in fewest(back, beyond, all_or_nothing=False) or ():
                self._evict(one, reservation, reason, now_ms)

    def _reserved(self, node: NodeName, now_ms: int) -> dict[str, Resources]:
        """The reserved capacity of a node now, by project."""
        out: dict[str, Resources] = {}
        for claim in self._cluster.availability.claims_on(node):
            if not claim.job and claim.start_ms <= now_ms < claim.end_ms:
                _add(out.setdefault(claim.project, {}), claim.request)
        return out

    def _evict(self, one: NodeOccupant, reservation: Reservation, reason: StopReason, now_ms: int) -> None:
        run = one.run
        if _stays(self._cluster.run(run.id)):
            self._cluster.emit(
                "reservation.run_stopped", now_ms, job=run.job, run=run.id, node=run.node, name=reservation.name,
                reason=reason.text,
            )  # fmt: skip
            evict_run(self._cluster, self._lifecycle, run, reason, now_ms)


class NodeOccupant:
    """A run on a node that is not being stopped, with its request."""

    __slots__ = ("priority", "project", "request", "run")

    def __init__(self, run: Run, job: Job) -> None:
        self.run, self.project, self.priority = run, job.spec.project, job.spec.priority
        self.request = job.spec.task_of(run.member).request


def on_node(cluster: ClusterState, node: NodeName) -> list[NodeOccupant]:
    """The runs of a node that are not being stopped, in the order of eviction: lowest priority first, then the latest."""
    runs = [run for id in cluster.on_node.get(node, ()) if (run := cluster.run(id)) is not None and _stays(run)]
    occupants = [NodeOccupant(run, cluster.jobs[run.job]) for run in runs]
    return sorted(occupants, key=lambda one: (one.priority, -one.run.placed_ms, one.run.id))


def fewest(
    lacking: Resources, candidates: Sequence[NodeOccupant], *, all_or_nothing: bool = True
) -> list[NodeOccupant] | None:
    """The first candidates that free all that is lacking. If all are not enough: None, or all that help."""
    left, picked = dict(lacking), list[NodeOccupant]()
    for one in candidates:
        if any(amount > 0 and one.request.get(resource, 0) for resource, amount in left.items()):
            picked.append(one)
            _take(left, one.request, 1)
    if any(amount > 0 for amount in left.values()):
        return None if all_or_nothing else picked
    for one in reversed(picked.copy()):  # a later and larger one may make it unnecessary
        if all(left[resource] + one.request.get(resource, 0) <= 0 for resource in left):
            picked.remove(one)
            _take(left, one.request, -1)
    return picked


def _beyond(occupants: Sequence[NodeOccupant], reserved: Mapping[str, Resources]) -> list[NodeOccupant]:
    """The occupants that can be evicted while their projects keep what is reserved for them."""
    held: dict[str, Resources] = {}
    for one in occupants:
        _add(held.setdefault(one.project, {}), one.request)
    out = []
    for one in occupants:
        theirs, kept = held[one.project], reserved.get(one.project, {})
        if all(
            theirs.get(name, 0) - one.request.get(name, 0) >= min(amount, theirs.get(name, 0))
            for name, amount in kept.items()
        ):
            out.append(one)
            _take(theirs, one.request, 1)
    return out


def evict_run(
    cluster: ClusterState, lifecycle: JobLifecycle, run: Run, reason: StopReason, now_ms: int, *, whole: bool = False
) -> None:
    """Stop a run, alone or with its gang; it is expected to end within its grace period."""
    spec = cluster.jobs[run.job].spec
    if whole:
        lifecycle.stop_all(cluster.jobs[run.job], reason, now_ms)
    else:
        lifecycle.evict(run, reason, now_ms)
    grace_ms = spec.grace_ms + (spec.checkpoint.timeout_ms if spec.checkpoint.has_hook else 0)
    live = cluster.live_runs(run.job)
    for other in live:
        if not _stays(other):
            cluster.availability.expect_end_by(other.id, now_ms + grace_ms)
    if not any(_stays(other) for other in live):
        code = {"overran": "OVERRUN", "cleared": "RESERVATION_STARTED", "outstayed": "RESERVATION_ENDED"}.get(
            reason.code, "PREEMPTED"
        )
        cluster.change_job(cluster.jobs[run.job], now_ms, reason_code=code, reason=reason.text)


def _stays(run: Run | None) -> bool:
    return run is not None and not run.stop_reason


def _by_node(places: Iterable[tuple[NodeName, Resources]]) -> dict[NodeName, Resources]:
    out: dict[NodeName, Resources] = {}
    for node, request in places:
        _add(out.setdefault(node, {}), request)
    return out


def _total(occupants: Iterable[NodeOccupant]) -> Resources:
    out: Resources = {}
    for one in occupants:
        _add(out, one.request)
    return out


def _add(to: Resources, amounts: Resources, sign: int = 1) -> None:
    for resource, amount in amounts.items():
        to[resource] = to.get(resource, 0) + sign * amount


def _take(from_: Resources, amounts: Resources, sign: int) -> None:
    """Subtract (or with sign -1 add) the amounts of the resources in `from_`."""
    for resource in from_:
        from_[resource] -= sign * amounts.get(resource, 0)
