"""Are promises kept? A promise whose time has passed while its job still waits is looked into, once.

Only the scheduler itself can break one: by having started something that stands in the way though all went as estimated.
That must never happen, and is counted apart (`broken`). Otherwise it came late because a run outlived its estimate
(`overrun`), because a node went or shrank (`node`), or because something else than room kept the job (`rules`).
"""

from __future__ import annotations

from typing import Literal, get_args

from hodei.control.state import ClusterState
from hodei.engine.availability import StartReservation
from hodei.model.ids import NodeName, RunId
from hodei.model.resources import Resources

Cause = Literal["broken", "overrun", "node", "rules"]


class StartReservationAudit:
    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self.missed: dict[str, int] = dict.fromkeys(get_args(Cause), 0)

    @property
    def broken(self) -> int:
        return self.missed["broken"]

    def judge(self, now_ms: int) -> None:
        """To be called before anything new is learned: what the world looks like is how it looked when time passed."""
        for start_reservation in self._cluster.availability.overdue(now_ms):
            cause = self._cause(start_reservation)
            self.missed[cause] += 1
            self._cluster.emit(
                "start_reservation.missed", now_ms, job=start_reservation.job, cause=cause, reserved_start_ms=start_reservation.start_ms,
                nodes=[node for node, _ in start_reservation.places[:20]],
            )  # fmt: skip

    def _cause(self, start_reservation: StartReservation) -> Cause:
        table, availability = self._cluster.table, self._cluster.availability
        table.settle()
        overrun = False
        for name, request in start_reservation.places:
            row = table.row.get(name)
            if row is None or not table.nodes[row].ready or table.nodes[row].cordoned:
                return "node"
            room, used = table.allocatable[row], table.usage(row)
            if not _has(room, {}, request):
                return "node"
            if not _has(room, used, request):
                overrun = True
                left = dict(used)
                late = {span.run: span.request for span in availability.overdue_runs(name, start_reservation.start_ms)}
                for request_held in (late | self._told_to_go(name)).values():
                    for resource, amount in request_held.items():
                        left[resource] = left.get(resource, 0) - amount
                if not _has(room, left, request):
                    return "broken"
        return "overrun" if overrun else "rules"

    def _told_to_go(self, node: NodeName) -> dict[RunId, Resources]:
        """What runs hold that are on their way out: the book expects them to be gone later than they should have been."""
        cluster = self._cluster
        runs = [run for id in cluster.on_node.get(node, ()) if (run := cluster.run(id)) is not None and run.stop_reason]
        return {run.id: cluster.jobs[run.job].spec.task_of(run.member).request for run in runs}


def _has(room: Resources, used: Resources, request: Resources) -> bool:
    return all(room.get(resource, 0) - used.get(resource, 0) >= amount for resource, amount in request.items())
