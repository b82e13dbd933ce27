"""Victims of preemption: jobs that are linked to one gang, and victims whose stop order can be withdrawn."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from msgspec import Struct, structs

from hodei.control.lifecycle.runs import stop_order
from hodei.control.state import ClusterState
from hodei.engine.points import ANY_TRIGGER, Trigger
from hodei.engine.preemption.search import Victim
from hodei.engine.preemption.victims import Disruption, Guard, Place, VictimCandidate
from hodei.engine.view import Gang
from hodei.model.effects import WithdrawStop
from hodei.model.ids import JobId, RunId
from hodei.model.job import RUN_ENDED, Run
from hodei.model.outcome import StopReason


class Hold(Struct):
    """Capacity held for a preemptor until the runs in `waiting_for` have ended; `stopped`: those that were stopped for
    it. `requeue_on`: triggers that could let it start elsewhere before; `awake`: one of them has fired."""

    gang: Gang
    places: list[Place]
    waiting_for: set[RunId]
    stopped: tuple[RunId, ...] = ()
    requeue_on: tuple[Trigger, ...] = ANY_TRIGGER
    awake: bool = False


class _Withdrawal(Struct):
    """The runs of a gang that need not stop any more. `dropped`: runs whose stop order will never be sent."""

    runs: dict[RunId, StopReason]
    dropped: set[RunId]


class StopWithdrawals:
    """Victims whose capacity is not needed any more keep running, if their stop orders have not been sent yet."""

    def __init__(self, cluster: ClusterState, holds: Mapping[JobId, Hold], links: JobLinks) -> None:
        self._cluster, self._holds, self._links = cluster, holds, links
        self._withdrawals: dict[JobId, _Withdrawal] = {}
        self._not_needed: dict[RunId, None] = {}

    def not_needed(self, runs: Iterable[RunId]) -> None:
        """The preemptor for which these runs were stopped does not need their capacity any more."""
        self._not_needed.update(dict.fromkeys(runs))

    def order_dropped(self, id: RunId) -> None:
        """The driver had not sent the stop order yet, and will not."""
        for withdrawal in self._withdrawals.values():
            if id in withdrawal.runs:
                withdrawal.dropped.add(id)
                return
        run = self._cluster.run(id)
        if run is not None and run.state not in RUN_ENDED and run.stop_reason:
            self._stop_again(run)

    def request(self) -> None:
        """At the end of a step: withdraw the stop orders that no other preemptor needs."""
        if not self._not_needed:
            return
        not_needed, self._not_needed = self._not_needed, {}
        for id in not_needed:
            run = self._cluster.run(id)
            if run is None or run.state in RUN_ENDED or not run.stop_reason or self._is_needed(id):
                continue
            withdrawal = self._withdrawals.setdefault(self._links.gang(run.job), _Withdrawal({}, set()))
            withdrawal.runs[id] = run.stop_reason
            self._cluster.withdrawn_stops.add(id)
            self._cluster.act(WithdrawStop(id, run.backend))

    def settle(self, now_ms: int) -> None:
        """A gang keeps running if the stop orders of all its members were dropped. If one member stopped, or a preemptor
        needs one again, or the job stops for another reason, all stop."""
        for gang, withdrawal in list(self._withdrawals.items()):
            runs = {id: self._cluster.run(id) for id in withdrawal.runs}
            live = [run for run in runs.values() if run is not None and run.state not in RUN_ENDED]
            unchanged = all(run.stop_reason == withdrawal.runs[run.id] for run in live)
            if len(live) < len(runs) or not unchanged or any(self._is_needed(id) for id in runs):
                self._forget(gang)
                for run in live:
                    if run.id in withdrawal.dropped and run.stop_reason == withdrawal.runs[run.id]:
                        self._stop_again(run)
            elif len(withdrawal.dropped) == len(runs):
                self._forget(gang)
                for run in live:
                    self._cluster.change_run(run, stop_reason=None)
                for job in sorted({run.job for run in live}):
                    reason = "its capacity is not needed any more"
                    self._cluster.emit("job.preemption_cancelled", now_ms, job=job, reason=reason)

    def _is_needed(self, run: RunId) -> bool:
        return any(run in hold.waiting_for for hold in self._holds.values())

    def _forget(self, gang: JobId) -> None:
        self._cluster.withdrawn_stops.difference_update(self._withdrawals.pop(gang).runs)

    def _stop_again(self, run: Run) -> None:
        if run.stop_reason is not None:
            self._cluster.act(stop_order(self._cluster.jobs[run.job], run, run.stop_reason))


# Jobs that are one gang though each is a job of its own, such as the pods of a group. A preemptor stops all of them, or
# only those that the gang can do without. For the search for victims a link is one gang with a negative number; what the
# search finds is split into jobs again.


class JobLink(Struct, frozen=True):
    """`core` is preempted together, with all of `spare`; each spare may also be preempted alone, the last first."""

    id: JobId
    core: tuple[JobId, ...]
    spare: tuple[JobId, ...] = ()

    @property
    def jobs(self) -> tuple[JobId, ...]:
        return (*self.core, *self.spare)


class JobLinks:
    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._links: dict[Hashable, JobLink] = {}
        self._of_job: dict[JobId, Hashable] = {}
        self._by_id: dict[JobId, JobLink] = {}
        self._last_id = 0
        self.version = 0

    def __bool__(self) -> bool:
        return bool(self._links)

    def link(self, key: Hashable, core: Sequence[JobId], spare: Sequence[JobId] = ()) -> JobId | None:
        """Set the jobs of the gang `key`; no core removes the link. Returns the number of a removed link."""
        before = self._links.get(key)
        if (before.core, before.spare) == (tuple(core), tuple(spare)) if before is not None else not core:
            return None
        self.version += 1
        for id in before.jobs if before is not None else ():
            if self._of_job.get(id) == key:
                del self._of_job[id]
            self._cluster.mark_changed(id)
        if not core:
            assert before is not None
            del self._links[key], self._by_id[before.id]
            return before.id
        if before is None:
            self._last_id -= 1
        link = JobLink(before.id if before is not None else self._last_id, tuple(core), tuple(spare))
        self._links[key] = self._by_id[link.id] = link
        for id in link.jobs:
            self._of_job[id] = key
            self._cluster.mark_changed(id)
        return None

    def gang(self, job: JobId) -> JobId:
        """The number of the gang of a job: its own, or that of its link."""
        link = self.of(job)
        return job if link is None else link.id

    def of(self, job: JobId) -> JobLink | None:
        key = self._of_job.get(job)
        return self._links[key] if key is not None else None

    def jobs(self, id: JobId, some: Sequence[int] = ()) -> tuple[JobId, ...]:
        """The jobs behind a number of the search: itself, or `some` or all jobs of a link."""
        link = self._by_id.get(id)
        return (id,) if link is None else tuple(some) or link.jobs

    def candidates(self, link: JobLink, by_job: dict[JobId, list[VictimCandidate]]) -> list[VictimCandidate]:
        """The link as candidates of one gang, merged from the candidates of its jobs."""
        out: list[VictimCandidate] = []
        active = [id for id in link.jobs if id in by_job]
        staying = {id: c for id in active for c in by_job[id] if not c.stopping and c.stops_gang}
        stopping = [c for id in active for c in by_job[id] if c.stopping]
        core = [staying[id] for id in link.core if id in staying]
        if stopping:
            members = tuple(c.id for c in stopping) if staying else ()
            out.append(_merged(link.id, stopping, stopping=True, members=members))
        if core:
            # With the core all jobs stop, so that the highest priority and the longest protection count.
            highest = max(candidate.job.priority for candidate in staying.values())
            together = _merged(link.id, core, priority=highest)
            together.protected_until_ms = max(candidate.protected_until_ms for candidate in staying.values())
            out.append(together)
        for order, id in enumerate(link.spare):
            if id in staying:
                out.append(_merged(link.id, [staying[id]], members=(id,), order=order))
        return out

    def split(self, victims: Iterable[Victim], *, stopping: bool) -> list[Victim]:
        """Victims as single jobs: those that are `stopping` already, or the others."""
        out: list[Victim] = []
        for victim in victims:
            if victim.id not in self._by_id:
                out.append(victim)
                continue
            for id in self.jobs(victim.id, victim.members):
                runs = [run for run in self._cluster.live_runs(id) if bool(run.stop_reason) == stopping]
                if runs:
                    nodes = tuple(sorted({run.node for run in runs}))
                    out.append(Victim(id, self._cluster.jobs[id].spec, nodes))
        return out


class LinkGuard:
    """A guard that gets the jobs of a link instead of the link."""

    def __init__(self, guard: Guard, links: JobLinks) -> None:
        self._guard, self._links = guard, links

    @property
    def version(self) -> int:
        return self._guard.version + self._links.version  # both only grow

    @version.setter
    def version(self, value: int) -> None:
        raise AttributeError("the version follows from the guard and the links")

    def guarded(self, job: JobId) -> bool:
        return any(self._guard.guarded(id) for id in self._links.jobs(job))

    def violations(self, disruptions: Sequence[Disruption]) -> list[int]:
        by_victim = [
            [(id, ()) for id in self._links.jobs(job, some)] if job < 0 else [(job, some)] for job, some in disruptions
        ]
        counts = iter(self._guard.violations([one for each in by_victim for one in each]))
        return [sum(next(counts) for _ in each) for each in by_victim]


def _merged(
    id: JobId,
    candidates: Sequence[VictimCandidate],
    *,
    stopping: bool = False,
    members: tuple[int, ...] = (),
    order: int = 0,
    priority: int | None = None,
) -> VictimCandidate:
    first = candidates[0]
    spec = first.job if priority in (None, first.job.priority) else structs.replace(first.job, priority=priority)
    return VictimCandidate(
        id,
        spec,
        tuple(place for candidate in candidates for place in candidate.places),
        min(candidate.since_ms for candidate in candidates),
        unsaved_ms=tuple(at for candidate in candidates for at in candidate.unsaved_ms),
        stopping=stopping,
        protected_until_ms=max(candidate.protected_until_ms for candidate in candidates),
        members=members,
        order=order,
    )
