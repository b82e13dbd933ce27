"""Jobs that leave their nodes for others: by a person's wish, or because their node is drained.

It is known where a job will go before it is told to leave, and that room is kept for it until it has left: a full trial
by all plugins, as for preemption. Then it is placed there before anyone else is tried. Which nodes it leaves is written
into the job (`Job.move`), so that it is still known after a crash.
"""

from __future__ import annotations

from collections.abc import Callable

from hodei.control.lifecycle.jobs import JobLifecycle
from hodei.control.lifecycle.preemption import Hold, PreemptionControl
from hodei.control.state import ClusterState, Timers
from hodei.engine.cycle import Engine
from hodei.engine.explain import summary
from hodei.engine.plan import Refusal
from hodei.engine.preemption.victims import NO_PARTS, Place
from hodei.engine.view import Gang, View
from hodei.model.facts import JobMigrated
from hodei.model.ids import JobId, NodeName
from hodei.model.job import Job
from hodei.model.outcome import StopReason

# So long a job that left its nodes looks for others alone: better late in the old place than never.
PATIENCE_MS = 600_000


class Relocation:
    def __init__(
        self,
        cluster: ClusterState,
        engine: Engine,
        lifecycle: JobLifecycle,
        preempting: PreemptionControl,
        gang: Callable[..., Gang],
        view: Callable[[int], View],
        dequeue: Callable[[Job], None],
        enqueue: Callable[[Job, int], None],
        timers: Timers,
    ) -> None:
        self._cluster, self._engine, self._lifecycle, self._preempting = cluster, engine, lifecycle, preempting
        self._gang, self._view = gang, view
        self._dequeue, self._enqueue, self._timers = dequeue, enqueue, timers
        self.kept: dict[JobId, list[Place]] = {}
        cluster.signals.job_ended.append(self._left)
        cluster.signals.job_suspended.append(self._left)

    # --------------------------------------------------------------------------------------------- leaving

    def migrate(self, fact: JobMigrated, now_ms: int) -> None:
        job = self._cluster.jobs.get(fact.job)
        if job is None or not can_move(job):
            return
        move = self._way(job, fact.to)
        places = self._trial(job, move, now_ms)
        if isinstance(places, str) and not fact.force:
            self._cluster.emit("job.migration_refused", now_ms, job=job.id, reason=places)
            return
        where = f"to {fact.to}" if fact.to else move
        self._cluster.emit("job.migrating", now_ms, job=job.id, move=where)
        job = self._cluster.change_job(job, now_ms, move=move)
        self._lifecycle.stop_all(job, StopReason("migrated", where), now_ms)
        if not isinstance(places, str):
            self._keep(job.id, places)
        self._lifecycle.conclude(self._cluster.jobs[job.id], now_ms)

    def drain(self, node: NodeName, now_ms: int) -> None:
        """The node takes nothing new any more; what is on it leaves. Room elsewhere is kept for those who find some now;
        the others wait in line, where they were before."""
        cluster = self._cluster
        for id in sorted(cluster.on_node.get(node, ())):
            run = cluster.run(id)
            if run is None:
                continue
            job = cluster.jobs[run.job]
            gang = job.spec.gang
            moves_whole = not gang.per_node and (job.spec.size == 1 or gang.on_failure != "repair")
            if moves_whole and not run.stop_reason and can_move(job):
                places = self._trial(job, job.move, now_ms)
                self._lifecycle.leave(run, StopReason("drained", node), now_ms)
                if not isinstance(places, str) and job.id in cluster.jobs:
                    self._keep(job.id, places)
            else:
                self._lifecycle.leave(run, StopReason("drained", node), now_ms)

    def refusal(self, job: Job, to: NodeName, now_ms: int) -> str:
        """Why nobody else could take the job now; "" if somebody could. Nothing is changed."""
        places = self._trial(job, self._way(job, to), now_ms)
        return places if isinstance(places, str) else ""

    def _way(self, job: Job, to: NodeName) -> str:
        if to:
            return f"to {to}"
        return "off " + " ".join(sorted({run.node for run in self._cluster.live_runs(job.id)}))

    def _trial(self, job: Job, move: str, now_ms: int) -> list[Place] | str:
        """Where it would go beside all that runs now, itself included; or why nowhere."""
        table = self._cluster.table
        table.settle()
        gang = self._steered(job, move)
        with table.trial():
            found = self._engine.place_needed(gang, self._view(now_ms))
            if isinstance(found, Refusal):
                return summary(found.verdicts, found.nodes)
            self._engine.undo(found)
        return [Place(placed.node.name, placed.member, NO_PARTS) for placed in found]

    def _steered(self, job: Job, move: str) -> Gang:
        gang = self._gang(job.id, job.spec, job.submitted_ms)
        steer(gang, move)
        self._engine.profile(gang).admit(gang)
        return gang

    # ------------------------------------------------------------------------------------------- the room

    def _keep(self, id: JobId, places: list[Place]) -> None:
        self.drop(id)
        for name, member, grant in places:
            self._cluster.table.hold(name, member.task.request, member, grant)
        self.kept[id] = places

    def drop(self, id: JobId) -> None:
        """It has ended or does not come any more: nothing is kept for it."""
        for name, member, grant in self.kept.pop(id, ()):
            self._cluster.table.let_go(name, member.task.request, member, grant)

    def _left(self, job: Job) -> None:
        self.drop(job.id)

    def void_on(self, node: NodeName) -> None:
        """A node is about to go: whoever was to go there finds another place in line."""
        for id in [id for id, places in self.kept.items() if any(place.node == node for place in places)]:
            self.drop(id)

    def arrive(self, gang: Gang, job: Job) -> bool:
        """It waits again. True if room is kept for it: it is placed before anyone else is tried, without queueing."""
        steer(gang, job.move)
        places = self.kept.pop(job.id, None) if self.kept else None
        if places is None:
            if job.move:
                self._timers.set(job.queued_ms + PATIENCE_MS, job.id)
            return False
        self._engine.profile(gang).admit(gang)
        self._preempting.holds[job.id] = Hold(gang, places, set())
        return True

    def lapse(self, id: JobId, now_ms: int) -> None:
        """One that has looked for another place long enough takes any, the one that it left included."""
        job = self._cluster.jobs.get(id)
        if job is not None and job.move and job.state == "pending" and job.queued_ms + PATIENCE_MS <= now_ms:
            self._dequeue(job)
            job = self._cluster.change_job(job, now_ms, move="")
            self._cluster.emit("job.migration_abandoned", now_ms, job=id)
            self._enqueue(job, now_ms)


def steer(gang: Gang, move: str) -> None:
    """What the job's `move` says, for the engine."""
    if not move:
        return
    how, *names = move.split(" ")
    if how == "to":
        gang.goes_to = names[0]
    else:
        gang.leaves = tuple(names)


def can_move(job: Job) -> bool:
    asked = job.cancel_requested or job.requeue_requested or job.suspend_requested
    return job.state in ("scheduled", "running") and not asked
