"""Work that stays longer than it may: it is told to go when its room is due to others, if the policy says so.

Two kinds of room are due. Room that a waiting job was promised: who went ahead of it (backfill) did so on the word of an
estimate, and in a line with `overrun = "stop"` is held to it. And room that is reserved: a reservation may say that others
are cleared off when its window begins (`at_start`), and that its own project's runs go when it ends (`at_end`).

Everything here follows from runs, promises and bookings, so that it is the same after a restart. Never more is told to go
than is needed; what is going already is not told again.
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
    """Backfilled runs whose estimate is over, and the promised jobs that could start if they were gone."""

    def __init__(
        self, cluster: ClusterState, lifecycle: JobLifecycle, queues: Mapping[str, SchedulingQueue | BackfillQueue]
    ) -> None:
        self._cluster, self._lifecycle, self._queues = cluster, lifecycle, queues
        self._due: list[tuple[int, RunId]] = []
        self._over: set[RunId] = set()

    def watch(self, job: Job) -> None:
        """The job was placed, or is known again after a restart."""
        queue = self._queues.get(job.spec.profile)
        if queue is None or getattr(queue.profile.queue, "overrun", "") != STOP:
            return
        for run in self._cluster.live_runs(job.id):
            end_ms = self._cluster.availability.expected_end_ms(run.id) if run.kind == "backfill" else FOREVER
            if end_ms < FOREVER:
                heapq.heappush(self._due, (end_ms, run.id))

    def next_ms(self) -> int | None:
        """When the next estimate is over."""
        return self._due[0][0] if self._due else None

    def enforce(self, now_ms: int) -> None:
        """Whoever is over time and keeps a promised job from starting now is told to go."""
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
        spoken_for: dict[NodeName, Resources] = {}
        start_reservations = self._cluster.availability.start_reservations.values()
        for start_reservation in sorted(
            start_reservations, key=lambda start_reservation: (start_reservation.start_ms, start_reservation.job)
        ):
            wanted = _by_node(start_reservation.places)
            if not nodes.isdisjoint(wanted):
                for run in self._in_the_way(wanted, staying, spoken_for):
                    self._stop(run, start_reservation, now_ms)
            for node, request in wanted.items():
                _add(spoken_for.setdefault(node, {}), request)

    def _in_the_way(
        self, wanted: Mapping[NodeName, Resources], over: Mapping[RunId, Run], spoken_for: Mapping[NodeName, Resources]
    ) -> list[Run]:
        """The fewest of those over time without whom there is room for all that is wanted; none if that is not enough."""
        out: list[Run] = []
        table = self._cluster.table
        for name in sorted(wanted):
            row = table.row.get(name)
            if row is None or not table.nodes[row].ready or table.nodes[row].cordoned:
                return []
            here = on_node(self._cluster, name)
            lacking = dict(wanted[name])
            _add(lacking, spoken_for.get(name, {}))
            _add(lacking, _together(here))
            _add(lacking, table.allocatable[row], sign=-1)
            lacking = {resource: lacking[resource] for resource in wanted[name] if lacking[resource] > 0}
            picked = fewest(lacking, [one for one in here if one.run.id in over])
            if picked is None:
                return []
            out += [one.run for one in picked]
        return out

    def _stop(self, run: Run, start_reservation: StartReservation, now_ms: int) -> None:
        job = self._cluster.jobs.get(run.job)
        if job is None or not _stays(self._cluster.run(run.id)):
            return  # it goes already, with another member of its gang
        allowed = format_duration(
            self._cluster.availability.expected_end_ms(run.id) - (run.started_ms or run.placed_ms)
        )
        detail = f"its estimate of {allowed} while job {start_reservation.job} was promised its room"
        self._cluster.emit("job.overrun", now_ms, job=job.id, run=run.id, node=run.node, promised=start_reservation.job)
        evict_run(self._cluster, self._lifecycle, run, StopReason("overran", detail), now_ms, whole=True)


class ReservationWindows:
    """What the beginning and the end of a reservation's window mean to the runs that are there."""

    def __init__(self, cluster: ClusterState, lifecycle: JobLifecycle) -> None:
        self._cluster = cluster
        self._lifecycle = lifecycle
        # Nodes that are still to be looked at: after a restart they join one by one.
        self._unseen: set[tuple[str, NodeName]] = set()

    def begins(self, reservation: Reservation) -> None:
        """Also to be called after a restart within the window: whoever should have gone meanwhile is told then."""
        if reservation.at_start == STOP:
            self._unseen |= {(reservation.name, node) for node, _ in reservation.places}

    def clear(self, now_ms: int) -> None:
        """Others leave nodes of windows that have begun, as far as the reserved room is not there without that."""
        if self._unseen:
            self._cluster.table.settle()  # nodes may have joined in this very step
        for name, node in sorted(self._unseen):
            reservation = self._cluster.availability.reservations.get(name)
            if reservation is None:
                self._unseen.discard((name, node))
            elif node in self._cluster.table.row:
                self._unseen.discard((name, node))
                self._clear(reservation, node, now_ms)

    def _clear(self, reservation: Reservation, node: NodeName, now_ms: int) -> None:
        here = on_node(self._cluster, node)
        booked = self._booked(node, now_ms)
        own = _together(one for one in here if one.project == reservation.project)
        others = [one for one in here if one.project != reservation.project]
        lacking = dict(booked.get(reservation.project, {}))
        for resource in lacking:
            lacking[resource] = max(lacking[resource] - own.get(resource, 0), 0)
        room = self._cluster.table.allocatable[self._cluster.table.row[node]]
        held = _together(here)
        lacking = {
            resource: amount - (room.get(resource, 0) - held.get(resource, 0)) for resource, amount in lacking.items()
        }
        lacking = {resource: amount for resource, amount in lacking.items() if amount > 0}
        detail = f"off {node}: reservation {reservation.name} of project {reservation.project} has begun"
        # As much as can be had: a node that has shrunk may never have all of it.
        for one in fewest(lacking, _beyond(others, booked), all_or_nothing=False) or ():
            self._send_away(one, reservation, StopReason("cleared", detail), now_ms)

    def ends(self, reservation: Reservation, now_ms: int) -> None:
        """To be called when the booking is off the book: its project gives back as much as was reserved, the latest of
        its runs first."""
        if reservation.at_end != STOP:
            return
        for node, request in sorted(_by_node(reservation.places).items()):
            own = [one for one in on_node(self._cluster, node) if one.project == reservation.project]
            held, kept = _together(own), self._booked(node, now_ms).get(reservation.project, {})
            back = {
                resource: min(amount, held.get(resource, 0) - kept.get(resource, 0))
                for resource, amount in request.items()
            }
            back = {resource: amount for resource, amount in back.items() if amount > 0}
            reason = StopReason("outstayed", f"reservation {reservation.name}, which is over")
            beyond = _beyond(own, {reservation.project: kept})
            for one in fewest(back, beyond, all_or_nothing=False) or ():
                self._send_away(one, reservation, reason, now_ms)

    def _booked(self, node: NodeName, now_ms: int) -> dict[str, Resources]:
        """What of a node is reserved now, by project."""
        out: dict[str, Resources] = {}
        for claim in self._cluster.availability.claims_on(node):
            if not claim.job and claim.start_ms <= now_ms < claim.end_ms:
                _add(out.setdefault(claim.project, {}), claim.request)
        return out

    def _send_away(self, one: NodeOccupant, reservation: Reservation, reason: StopReason, now_ms: int) -> None:
        run = one.run
        if _stays(self._cluster.run(run.id)):
            self._cluster.emit(
                "reservation.run_stopped",
                now_ms,
                job=run.job,
                run=run.id,
                node=run.node,
                name=reservation.name,
                reason=reason.text,
            )
            evict_run(self._cluster, self._lifecycle, run, reason, now_ms)


# ---------------------------------------------------------------------------------------------- who has to go


class NodeOccupant:
    """A run on a node that has not been told to go, with what it holds there."""

    __slots__ = ("priority", "project", "request", "run")

    def __init__(self, run: Run, job: Job) -> None:
        self.run, self.project, self.priority = run, job.spec.project, job.spec.priority
        self.request = job.spec.task_of(run.member).request


def on_node(cluster: ClusterState, node: NodeName) -> list[NodeOccupant]:
    """Those who stay there, in the order in which they would have to go: the least important first, of those the latest."""
    runs = [run for id in cluster.on_node.get(node, ()) if (run := cluster.run(id)) is not None and _stays(run)]
    tenants = [NodeOccupant(run, cluster.jobs[run.job]) for run in runs]
    return sorted(tenants, key=lambda one: (one.priority, -one.run.placed_ms, one.run.id))


def fewest(
    lacking: Resources, candidates: Sequence[NodeOccupant], *, all_or_nothing: bool = True
) -> list[NodeOccupant] | None:
    """Who of the candidates has to go, the first ones first, so that nothing is lacking. If it is not enough even
    without all of them: None, or all that help."""
    left, picked = dict(lacking), list[NodeOccupant]()
    for one in candidates:
        if any(amount > 0 and one.request.get(resource, 0) for resource, amount in left.items()):
            picked.append(one)
            _take(left, one.request, 1)
    if any(amount > 0 for amount in left.values()):
        return None if all_or_nothing else picked
    for one in reversed(picked.copy()):  # one that was picked early may not be needed beside a larger one
        if all(left[resource] + one.request.get(resource, 0) <= 0 for resource in left):
            picked.remove(one)
            _take(left, one.request, -1)
    return picked


def _beyond(tenants: Sequence[NodeOccupant], booked: Mapping[str, Resources]) -> list[NodeOccupant]:
    """Those that may go without their projects having less than what is reserved for them now."""
    held: dict[str, Resources] = {}
    for one in tenants:
        _add(held.setdefault(one.project, {}), one.request)
    out = []
    for one in tenants:
        theirs, kept = held[one.project], booked.get(one.project, {})
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
    """Told to go, alone or with its gang; the book expects it to be gone when its grace is over."""
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


def _together(tenants: Iterable[NodeOccupant]) -> Resources:
    out: Resources = {}
    for one in tenants:
        _add(out, one.request)
    return out


def _add(to: Resources, amounts: Resources, sign: int = 1) -> None:
    for resource, amount in amounts.items():
        to[resource] = to.get(resource, 0) + sign * amount


def _take(from_: Resources, amounts: Resources, sign: int) -> None:
    """As `_add` the other way, of what is in there alone."""
    for resource in from_:
        from_[resource] -= sign * amounts.get(resource, 0)
