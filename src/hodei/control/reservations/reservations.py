"""Reservations: the nodes of a new one, and the start and end of its window; and the audit of missed start reservations.

Nodes are chosen by the availability profile: what other reservations and start reservations leave. Runs are expected to
end as estimated; nodes that are free first are chosen first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from hodei.control.reservations.overruns import ReservationWindows
from hodei.control.state import ClusterState
from hodei.engine.availability import FOREVER, AvailabilityProfile, Claim, StartReservation
from hodei.engine.nodes import Table
from hodei.model.errors import Conflict, InvalidInput, NotFound
from hodei.model.ids import NodeName, RunId
from hodei.model.reservation import LateRun, Reservation, ReservationSpec
from hodei.model.resources import Resources, human_amount

_NAMED = 5
MAX_RESERVATIONS = 1000


class Reservations:
    def __init__(self, cluster: ClusterState, windows: ReservationWindows) -> None:
        self._cluster, self._windows = cluster, windows
        self._open: set[str] = set()

    def made(self, reservation: Reservation, now_ms: int, *, restored: bool = False) -> None:
        self._cluster.put_reservation(reservation, new=not restored)
        if not restored:
            self._cluster.emit(
                "reservation.created", now_ms, name=reservation.name, project=reservation.project, by=reservation.by,
                start_ms=reservation.start_ms, end_ms=reservation.end_ms, nodes=_nodes(reservation),
            )  # fmt: skip
        elif reservation.start_ms <= now_ms:
            self._open.add(reservation.name)  # its start was reported before the restart
            self._windows.begins(reservation)

    def deleted(self, name: str, by: str, now_ms: int) -> None:
        if self._drop(name) is not None:
            self._cluster.emit("reservation.deleted", now_ms, name=name, by=by)

    def expire(self, now_ms: int) -> None:
        """Open and close the windows that are due."""
        for _, reservation in sorted(self._cluster.availability.reservations.items()):
            if reservation.end_ms <= now_ms:
                self._drop(reservation.name)
                self._cluster.emit("reservation.ended", now_ms, name=reservation.name, project=reservation.project)
                self._windows.ends(reservation, now_ms)
            elif reservation.start_ms <= now_ms and reservation.name not in self._open:
                self._open.add(reservation.name)
                self._cluster.emit(
                    "reservation.started", now_ms, name=reservation.name, project=reservation.project, nodes=_nodes(reservation)
                )  # fmt: skip
                self._windows.begins(reservation)
        self._windows.clear(now_ms)

    def next_ms(self) -> int | None:
        """When the next window opens or closes."""
        due = (
            reservation.end_ms if reservation.name in self._open else reservation.start_ms
            for reservation in self._cluster.availability.reservations.values()
        )
        return min(due, default=None)

    def _drop(self, name: str) -> Reservation | None:
        self._open.discard(name)
        reservation = self._cluster.drop_reservation(name)
        if reservation is not None:
            self._cluster.wake("node_changed")
        return reservation


def choose_nodes(cluster: ClusterState, spec: ReservationSpec, now_ms: int) -> Reservation:
    """The reservation for a request, with its nodes. Conflict, naming the obstacles, if it does not fit."""
    _check(cluster, spec, now_ms)
    table, availability = cluster.table, cluster.build_availability()
    found: list[tuple[int, NodeName, Resources]] = []
    taken: dict[str, int] = {}
    short: list[str] = []
    for name in spec.named or table.names:
        row = table.row[name]
        node = table.nodes[row]
        if not spec.named and (not node.ready or node.cordoned):
            continue
        request = spec.request or {resource: amount for resource, amount in table.allocatable[row].items() if amount}
        lacking = _lacking(table, row, request)
        if lacking:
            short.append(f"{name} has {lacking}")
            continue
        conflicts = _conflicts(availability, table, name, request, spec)
        if conflicts:
            for claim in conflicts:
                taken[_owner(claim)] = taken.get(_owner(claim), 0) + 1
            continue
        free_ms = _free_from(availability, table, name, request, now_ms)
        found.append((max(free_ms, spec.start_ms), name, request))
    wanted = len(spec.named) or spec.count
    if len(found) < wanted:
        raise _does_not_fit(spec, len(found), taken, short)
    places = sorted((name, request) for _, name, request in sorted(found, key=lambda each: each[:2])[:wanted])
    return Reservation(
        spec.name, spec.project, spec.start_ms, spec.end_ms, tuple(places), spec.by, now_ms, spec.at_start, spec.at_end
    )  # fmt: skip


def late_runs(cluster: ClusterState, reservation: Reservation, now_ms: int) -> list[LateRun]:
    """Runs of other projects that may still hold the reserved capacity when the window starts."""
    table, availability = cluster.table, cluster.build_availability()
    out = []
    at_ms = max(reservation.start_ms, now_ms)
    for node, request in reservation.places:
        row = table.row.get(node)
        if row is None:
            continue
        others = [
            span
            for span in availability.spans(node, now_ms)
            if span.project != reservation.project and span.end_ms > at_ms
        ]
        allocatable = table.allocatable[row]
        held = {resource: sum(span.request.get(resource, 0) for span in others) for resource in request}
        if any(allocatable.get(resource, 0) - held[resource] < amount for resource, amount in request.items()):
            out += [LateRun(node, span.run, span.end_ms if span.end_ms < FOREVER else 0) for span in others]
    return out


def _check(cluster: ClusterState, spec: ReservationSpec, now_ms: int) -> None:
    if spec.end_ms <= max(spec.start_ms, now_ms):
        raise InvalidInput("the reservation would be over before it begins", hint="give it a later end")
    if len(cluster.availability.reservations) >= MAX_RESERVATIONS:
        raise Conflict(
            f"there are {MAX_RESERVATIONS} reservations already", hint="delete some; see: hodei reservation list"
        )
    if spec.name in cluster.availability.reservations:
        raise Conflict(
            f"there is a reservation {spec.name!r} already", hint=f"choose another name, or: hodei reservation delete {spec.name}"
        )  # fmt: skip
    unknown = [name for name in spec.named if name not in cluster.table.row]
    if unknown:
        raise NotFound(f"there is no node {unknown[0]!r}", hint="hodei nodes")
    if not spec.named and spec.count < 1:
        raise InvalidInput("the reservation is for no node", hint="say how many nodes, or name them")


def _lacking(table: Table, row: int, request: Resources) -> str:
    allocatable = table.allocatable[row]
    lacks = [resource for resource, amount in sorted(request.items()) if allocatable.get(resource, 0) < amount]
    return ", ".join(f"{resource} {human_amount(resource, allocatable.get(resource, 0))}" for resource in lacks)


def _conflicts(
    availability: AvailabilityProfile, table: Table, node: NodeName, request: Resources, spec: ReservationSpec
) -> list[Claim]:
    """The claims that exceed the node together with the request, at some moment of the window."""
    allocatable = table.allocatable[table.row[node]]
    window = [
        claim for claim in availability.claims_on(node) if claim.start_ms < spec.end_ms and claim.end_ms > spec.start_ms
    ]
    for at_ms in sorted({max(claim.start_ms, spec.start_ms) for claim in window}):
        now = [claim for claim in window if claim.start_ms <= at_ms < claim.end_ms]
        for resource, amount in request.items():
            claims = [claim for claim in now if claim.request.get(resource)]
            if amount + sum(claim.request[resource] for claim in claims) > allocatable.get(resource, 0):
                return claims
    return []


def _free_from(availability: AvailabilityProfile, table: Table, node: NodeName, request: Resources, now_ms: int) -> int:
    """When enough runs will have ended, claims not counted."""
    allocatable, used = table.allocatable[table.row[node]], dict(table.usage(table.row[node]))
    if _has(allocatable, used, request):
        return now_ms
    for span in availability.spans(node, now_ms):
        for resource, amount in span.request.items():
            used[resource] = used.get(resource, 0) - amount
        if _has(allocatable, used, request):
            return span.end_ms
    return FOREVER


def _does_not_fit(spec: ReservationSpec, found: int, taken: dict[str, int], short: Sequence[str]) -> Conflict:
    causes = [f"{owner} takes {_count(nodes)}" for owner, nodes in sorted(taken.items())[:_NAMED]]
    causes += list(short[:_NAMED])
    if len(taken) + len(short) > len(causes):
        causes.append("and more")
    wanted = len(spec.named) or spec.count
    text = (
        f"{found} of {wanted} nodes have that capacity for the whole time"
        if wanted > 1
        else "no node has that capacity"
    )
    if len(spec.named) == 1:
        text = f"node {spec.named[0]} does not have that capacity for the whole time"
    return Conflict(
        text + (f": {'; '.join(causes)}" if causes else ""), code="RESERVATION_DOES_NOT_FIT",
        hint="choose another time, fewer nodes or smaller amounts; see: hodei reservation list",
    )  # fmt: skip


def _owner(claim: Claim) -> str:
    return (
        f"the start reservation of job {claim.job}"
        if claim.job
        else f"reservation {claim.name} of project {claim.project}"
    )


def _count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def _nodes(reservation: Reservation) -> list[NodeName]:
    return [node for node, _ in reservation.places[:20]]


Cause = Literal["broken", "overrun", "node", "rules"]


class StartReservationAudit:
    """Classifies start reservations whose time has passed while the job still waits, once each.

    `broken`: the scheduler started something that blocks it, though everything went as estimated; this must never happen.
    Otherwise a run exceeded its estimate (`overrun`), a node was lost or shrank (`node`), or something else than capacity
    blocks the job (`rules`)."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self.missed: dict[str, int] = dict.fromkeys(get_args(Cause), 0)

    @property
    def broken(self) -> int:
        return self.missed["broken"]

    def check(self, now_ms: int) -> None:
        """Called before facts are learned, so that the state is that of the missed time."""
        for missed in self._cluster.availability.overdue(now_ms):
            cause = self._cause(missed)
            self.missed[cause] += 1
            self._cluster.emit(
                "start_reservation.missed", now_ms, job=missed.job, cause=cause, reserved_start_ms=missed.start_ms,
                nodes=[node for node, _ in missed.places[:20]],
            )  # fmt: skip

    def _cause(self, missed: StartReservation) -> Cause:
        table, availability = self._cluster.table, self._cluster.availability
        table.settle()
        overrun = False
        for name, request in missed.places:
            row = table.row.get(name)
            if row is None or not table.nodes[row].ready or table.nodes[row].cordoned:
                return "node"
            allocatable, used = table.allocatable[row], table.usage(row)
            if not _has(allocatable, {}, request):
                return "node"
            if not _has(allocatable, used, request):
                overrun = True
                left = dict(used)
                late = {span.run: span.request for span in availability.overdue_runs(name, missed.start_ms)}
                for request_held in (late | self._stopping(name)).values():
                    for resource, amount in request_held.items():
                        left[resource] = left.get(resource, 0) - amount
                if not _has(allocatable, left, request):
                    return "broken"
        return "overrun" if overrun else "rules"

    def _stopping(self, node: NodeName) -> dict[RunId, Resources]:
        """What stopping runs hold: their expected ends were moved to the end of the grace period."""
        cluster = self._cluster
        runs = [run for id in cluster.on_node.get(node, ()) if (run := cluster.run(id)) is not None and run.stop_reason]
        return {run.id: cluster.jobs[run.job].spec.task_of(run.member).request for run in runs}


def _has(allocatable: Resources, used: Resources, request: Resources) -> bool:
    return all(allocatable.get(resource, 0) - used.get(resource, 0) >= amount for resource, amount in request.items())
