"""After a crash or an outage: what we believe of a backend's runs against what the backend says.

Absent from the backend's list means unknown, not finished. A run that was placed and never seen running may not have been
started at all, so it is ordered again: starting is idempotent. One that was seen running and is no longer known to a backend
with a memory can not be told any more: it is lost, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from hodei.control.lifecycle.run_orders import start_orders, stop_order
from hodei.control.state import ClusterState
from hodei.model.effects import Forget, Start, Stop
from hodei.model.facts import RunObserved
from hodei.model.ids import RunId
from hodei.model.lifecycle import RUN_ENDED

NOT_WANTED = "not wanted"


def reconcile(
    world: ClusterState, backend: str, known: Mapping[RunId, RunObserved], now_ms: int
) -> tuple[list[RunObserved], list[Start | Stop | Forget]]:
    """Facts to learn and orders to give, so that both sides agree again."""
    facts: list[RunObserved] = []
    orders: list[Start | Stop | Forget] = []
    ours = {run.id: run for runs in world.runs.values() for run in runs.values() if run.backend == backend}
    for run in ours.values():
        if run.state in RUN_ENDED:
            continue
        seen = known.get(run.id)
        if seen is not None:
            facts.append(seen)
            if seen.state not in RUN_ENDED and run.stop_requested:
                orders.append(stop_order(world.jobs[run.job], run, run.stop_requested))
        elif run.state == "placed":
            orders += start_orders(world, run.job, [run])
            if run.stop_requested:
                orders.append(stop_order(world.jobs[run.job], run, run.stop_requested))
        else:
            reason = f"backend {backend} no longer knows of it"
            facts.append(RunObserved(run.id, "lost", now_ms, reason_code="lost", reason=reason))
    for id, seen in known.items():
        if id not in ours or ours[id].state in RUN_ENDED:
            if seen.state in RUN_ENDED:
                orders.append(Forget(id, backend))
            else:
                # Nobody here wants it any more: it belongs to an attempt that is over.
                orders.append(Stop(id, backend, 0, NOT_WANTED))
    return facts, orders
