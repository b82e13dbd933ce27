"""Orders to start and stop runs, with all that a backend needs to know in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hodei.control.state import ClusterState
from hodei.model.effects import Start, Stop
from hodei.model.ids import JobId
from hodei.model.job import Job, Run

# Past this many members each is told the first address only: all of them in every order would be too much.
_ADDRESSES_TOLD = 1000
# Why a run may be told to go without being to blame: its work is saved first, if it can be.
MOVED = (
    "requeued", "drained", "migrated", "suspended", "tainted", "preempted", "reclaimed", "assembly", "overran", "cleared",
    "outstayed",
)  # fmt: skip


def start_orders(
    world: ClusterState, job: JobId, runs: Iterable[Run], together: Sequence[Run] | None = None
) -> list[Start]:
    """Orders for runs of one job, with the size and the addresses of the gang as it will be then.
    `together`: all that are live then, by rank, from a caller who knows them."""
    spec = world.jobs[job].spec
    if together is None:
        together = sorted(world.live_runs(job), key=lambda run: run.rank)
    told = together if len(together) <= _ADDRESSES_TOLD else together[:1]
    nodes = [world.nodes.get(run.node) for run in told]
    known = tuple([node.address for node in nodes if node is not None and node.address])
    addresses = known if len(known) == len(nodes) else ()
    names = tuple([run.node for run in told]) if 1 < len(together) == len(told) else ()
    return [Start(run, spec, spec.task_of(run.member), len(together), addresses, names) for run in runs]


def stop_order(job: Job, run: Run, reason: str) -> Stop:
    saved_first = job.spec.checkpoint.hooked and reason.partition(" ")[0] in (*MOVED, "repair", "shrunk")
    return Stop(run.id, run.backend, job.spec.grace_ms, reason, job.spec.checkpoint if saved_first else None)
