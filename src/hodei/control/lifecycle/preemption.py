"""Preemption: victims are stopped only after a full trial placement shows that the preemptor fits, and the freed capacity
is held for it.

From the stop orders until the last victim has ended the preemptor has a hold: its members count on their nodes, so that
no other gang takes the capacity, and nothing of it is started. Then it is placed, before all pending gangs.

A hold does not bind the gang to its nodes: when a trigger fires that could help, it is tried on all nodes, its own held
capacity included. If it starts, the hold is released, and victims whose stop orders have not been sent keep running.

With preemption by priority number, a hold counts for gangs of equal or lower priority only: a higher one takes the
capacity if it finds no other, and the holder is queued again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence

from msgspec import Struct, structs

from hodei.control.lifecycle.gangs import Gangs
from hodei.control.lifecycle.jobs import JobLifecycle
from hodei.control.lifecycle.runs import place_of
from hodei.control.lifecycle.victims import Hold, JobLink, JobLinks, LinkGuard, StopWithdrawals
from hodei.control.state import ClusterState
from hodei.engine.cycle import Engine
from hodei.engine.plan import Eviction, Refusal
from hodei.engine.points import ANY_TRIGGER, Placed, Trigger
from hodei.engine.preemption.search import Preemption, Preemptions, Victim
from hodei.engine.preemption.victims import FOREVER, NO_DEVICES, By, Guard, Place, VictimCandidate, VictimIndex
from hodei.engine.runner import PLUGIN_FAILED
from hodei.engine.view import Gang, View
from hodei.model.ids import JobId, NodeName
from hodei.model.job import RUN_ENDED, Job, JobSpec, Run
from hodei.model.outcome import StopReason

_NO_LIMIT = 1_000_000


class PreemptionPolicy(Struct, frozen=True):
    """`min_runtime_ms`: a run is not preempted before. `max_per_job`: how often one job may be preempted. `budget`: victims
    within `interval_ms`; 0 for no limit. `by`: a gang preempts lower classes (only critical, high and medium preempt), or
    lower priority numbers."""

    enabled: bool = True
    min_runtime_ms: int = 0
    max_per_job: int = 5
    budget: int = 0
    interval_ms: int = 60_000
    by: By = "class"


class Protection(Struct, frozen=True):
    """Victims that a gang could preempt if the setting `by` did not protect them, and until when it does."""

    victims: tuple[Victim, ...]
    until_ms: int
    by: str


class PreemptionControl:
    """`retry_later`: time alone may let the last attempt succeed: a protection or the budget interval ends."""

    def __init__(
        self,
        cluster: ClusterState,
        engine: Engine,
        gangs: Gangs,
        lifecycle: JobLifecycle,
        policy: PreemptionPolicy,
    ) -> None:
        self._cluster, self._engine, self._gangs, self._lifecycle = cluster, engine, gangs, lifecycle
        self._policy = policy
        self._victim_index = VictimIndex(cluster.table, policy.by)
        self._preemptions = Preemptions(engine, self._victim_index)
        for profile in engine.profiles.values():
            structs.force_setattr(profile, "by_number", policy.by == "number")
        self._evicted_at: deque[int] = deque()
        self.holds: dict[JobId, Hold] = {}
        self.links = JobLinks(cluster)
        self._guard: Guard | None = None
        self.withdrawals = StopWithdrawals(cluster, self.holds, self.links)
        self.retry_later = False
        cluster.signals.gang_released.append(self.release)

    @property
    def guard(self) -> Guard | None:
        """Disruption budgets, respected where possible; set by the driver of the controller."""
        return self._guard

    @guard.setter
    def guard(self, guard: Guard | None) -> None:
        self._guard = guard
        self._victim_index.guard = LinkGuard(guard, self.links) if guard is not None else None

    def link(self, key: Hashable, core: Sequence[JobId], spare: Sequence[JobId] = ()) -> None:
        """Treat jobs as one gang: `core` is preempted together, each of `spare` also alone. No core: unlink."""
        removed = self.links.link(key, core, spare)
        if removed is not None:
            self._victim_index.remove(removed)

    def _update_candidates(self) -> None:
        """Update the victim index for all jobs whose runs have changed."""
        cluster = self._cluster
        changed = cluster.take_changed_runs()
        linked = dict[JobId, JobLink]()
        for id in sorted({*self._victim_index.of_job, *cluster.runs}) if changed is None else changed:
            link = self.links.of(id) if self.links else None
            if link is not None:
                linked[link.id] = link
                self._victim_index.remove(id)
                continue
            live = cluster.live_runs(id)
            job = cluster.jobs.get(id)
            if job is None or not live:
                if id >= 0:
                    self._victim_index.remove(id)
                continue
            self._victim_index.put(id, self._candidates(job, live))
        for link in linked.values():
            by_job = {
                id: self._candidates(job, live)
                for id in link.jobs
                if (job := cluster.jobs.get(id)) is not None and (live := cluster.live_runs(id))
            }
            self._victim_index.put(link.id, self.links.candidates(link, by_job))

    def _candidates(self, job: Job, live: list[Run]) -> list[VictimCandidate]:
        """The gang as a whole, and each member that it can spare."""
        spec, least_ms = job.spec, max(self._policy.min_runtime_ms, 1)
        since = min(run.since_ms for run in live)
        staying = [run for run in live if not run.stop_reason]
        stopping = [run for run in live if run.stop_reason]
        out = []
        if stopping:
            members = tuple(run.member for run in stopping) if staying else ()
            out.append(VictimCandidate(job.id, spec, _places(spec, stopping), since, stopping=True, members=members))
        if staying:
            surplus = _surplus(spec, staying)
            core = [run for run in staying if run not in surplus]
            unsaved = [max(run.started_ms, run.checkpoint_ms) for run in staying if run.started_ms]
            # A run placed in this step is not a victim in the same step.
            until = max(since + least_ms, *(run.placed_ms + 1 for run in staying))
            lost = () if spec.checkpoint.has_hook else tuple(unsaved)  # with a checkpoint hook no work is lost
            until = until if job.preemptions < self._policy.max_per_job else FOREVER
            if core:
                out.append(
                    VictimCandidate(job.id, spec, _places(spec, core), since, unsaved_ms=lost, protected_until_ms=until)
                )
            for run in surplus:
                until = max(run.since_ms + least_ms, run.placed_ms + 1)
                places = _places(spec, [run])
                out.append(
                    VictimCandidate(
                        job.id, spec, places, since, protected_until_ms=until, members=(run.member,), order=run.rank
                    )
                )
        return out

    def preempt(self, gang: Gang, view: View, refusal: Refusal) -> list[Eviction] | None:
        """Stop victims for a refused gang if that helps; the gang then has a hold and must leave its queue."""
        # A plugin failed, or a quota and not capacity is in the way.
        if any(v.reason.code == PLUGIN_FAILED or v.reason.kind == "quota" for v in refusal.verdicts):
            self.retry_later = False
            return None
        found = self.find(gang, view)
        return self._carry_out(gang, found, view.now_ms, refusal.requeue_on) if found is not None else None

    def find(self, gang: Gang, view: View) -> Preemption | None:
        """The victims that would be stopped for the gang, if that helps and is allowed. Nothing is changed."""
        self.retry_later = False
        if not self._may_preempt(gang):
            return None
        self._update_candidates()
        found = self._search(gang, view)
        if found is not None and self.links:
            found.victims = self.links.split(found.victims, stopping=False)
            found.stopping = self.links.split(found.stopping, stopping=True)
        self.retry_later = self._preemptions.retry_later
        if found is not None and not found.victims and not found.stopping:
            return None  # no victim: it was refused for another reason than capacity
        if found is not None and len(found.victims) > self._budget_left(view.now_ms):
            self.retry_later = True
            return None
        return found

    def disable(self) -> None:
        self._policy = structs.replace(self._policy, enabled=False)

    def _may_preempt(self, gang: Gang) -> bool:
        return self._policy.enabled and gang.job.preempts and self._engine.profile(gang).queue.preempts

    def _search(self, gang: Gang, view: View) -> Preemption | None:
        lower = self._lower_holds(gang)
        if not lower:
            return self._preemptions.find(gang, view)
        with self._cluster.table.trial():
            self._free(lower)
            try:
                return self._preemptions.find(gang, view)
            finally:
                self._hold(lower)

    def protected(self, gang: Gang, view: View) -> Protection | None:
        """The victims that would be stopped if none were protected, and until when; None if that would not help."""
        if not self._may_preempt(gang):
            return None
        self._update_candidates()
        index, now_ms = self._victim_index, view.now_ms
        protected = {id: until for id, all in index.of_job.items() if (until := _protected_until(all)) > now_ms}
        budget_ms = 0
        if self._budget_left(now_ms) <= 0 and self._evicted_at:
            budget_ms = self._evicted_at[0] + self._policy.interval_ms
        if not protected and not budget_ms:
            return None
        unprotected = VictimIndex(self._cluster.table, self._policy.by)
        unprotected.guard = index.guard
        for id, candidates in index.of_job.items():
            unprotected.put(id, [structs.replace(each, protected_until_ms=0, counted=False) for each in candidates])
        found = Preemptions(self._engine, unprotected).find(gang, view)
        if found is None or not found.victims:
            return None
        kept = [victim for victim in found.victims if victim.id in protected]
        if not kept:
            return Protection(tuple(found.victims), budget_ms, "budget") if budget_ms else None
        until_ms = max(protected[victim.id] for victim in kept)
        return Protection(tuple(kept), until_ms, "max_per_job" if until_ms >= FOREVER else "min_runtime")

    def next_change_ms(self) -> int:
        """When time alone may next allow more: a protection ends, or the budget allows one more victim."""
        first = self._victim_index.next_unprotected_ms()
        if self._policy.budget and self._evicted_at:
            first = min(first, self._evicted_at[0] + self._policy.interval_ms)
        return first

    def take_settings(self, other: PreemptionControl) -> None:
        """Use another policy; protections are computed again."""
        if self._policy != other._policy:
            if self._policy.by != other._policy.by:
                guard, self._victim_index = self.guard, VictimIndex(self._cluster.table, other._policy.by)
                self._preemptions, self.guard = Preemptions(self._engine, self._victim_index), guard
            self._policy = other._policy
            for id in sorted(self._cluster.runs):
                self._cluster.mark_changed(id)

    def _carry_out(
        self, gang: Gang, found: Preemption, now_ms: int, requeue_on: tuple[Trigger, ...] = ANY_TRIGGER
    ) -> list[Eviction]:
        cluster, lower = self._cluster, self._lower_holds(gang)
        self._free(lower)
        waiting = {run.id for victim in (*found.victims, *found.stopping) for run in self._runs_of(victim)}
        places = []
        for placed in found.placements:
            # No devices yet: the victims still have them. They are chosen when the gang is placed.
            places.append(Place(placed.node.name, placed.member, NO_DEVICES))
            cluster.table.place_by_name(*places[-1])
        stopped = tuple(run.id for victim in found.victims for run in self._runs_of(victim))
        self.holds[gang.id] = Hold(gang, places, waiting, stopped, requeue_on)
        nodes = sorted({place.node for place in places})
        evictions = []
        for victim in found.victims:
            self._evicted_at.append(now_ms)
            self._stop_victim(victim, gang, now_ms)
            evictions.append(Eviction(victim.id, gang.id, victim.nodes, victim.members))
        victims = ", ".join(_describe(victim) for victim in (*found.victims, *found.stopping))
        text = f"preempting on {', '.join(nodes[:5])}: waiting for job {victims} to stop"
        cluster.change_job(cluster.jobs[gang.id], now_ms, reason_code="PREEMPTING", reason=text)
        cluster.emit("job.preempting", now_ms, job=gang.id, victims=[v.id for v in found.victims], nodes=nodes[:20])
        self._take_from(lower, gang, now_ms)
        return evictions

    def _stop_victim(self, victim: Victim, gang: Gang, now_ms: int) -> None:
        by = f"job {gang.id} ({gang.job.name}, priority {gang.job.priority})"
        if not victim.members:
            reason = StopReason("preempted", f"by {by}")
            self._lifecycle.stop_all(self._cluster.jobs[victim.id], reason, now_ms)
            self._cluster.emit("job.preempted", now_ms, job=victim.id, by=gang.id, reason=reason.text)
            return
        reason = StopReason("preempted", f"by {by}", gang="shrink")
        for run in self._runs_of(victim):
            self._lifecycle.shrink(run, reason)
        self._cluster.emit(
            "job.shrunk", now_ms, job=victim.id, by=gang.id, members=list(victim.members), reason=reason.text
        )  # fmt: skip

    def _runs_of(self, victim: Victim) -> list[Run]:
        live = self._cluster.live_runs(victim.id)
        return [run for run in live if run.member in victim.members] if victim.members else live

    def _budget_left(self, now_ms: int) -> int:
        """How many victims the budget still allows."""
        if not self._policy.budget:
            return _NO_LIMIT
        while self._evicted_at and self._evicted_at[0] <= now_ms - self._policy.interval_ms:
            self._evicted_at.popleft()
        return self._policy.budget - len(self._evicted_at)

    def try_gang(self, gang: Gang, view: View) -> list[Placed] | Refusal:
        """Place a gang; if nothing else is in its way, on capacity that is held for one of lower priority."""
        result = self._engine.try_gang(gang, view)
        if not (self.holds and isinstance(result, Refusal)):
            return result
        lower = self._lower_holds(gang)
        if not lower:
            return result
        with self._cluster.table.trial():
            self._free(lower)
            trial = self._engine.place(gang, view)
            if not isinstance(trial, Refusal):
                self._engine.withdraw(gang, trial)
            self._hold(lower)
        if isinstance(trial, Refusal):
            return result
        self._free(lower)
        placed = self._engine.place(gang, view)
        self._take_from(lower, gang, view.now_ms)
        return placed

    def _lower_holds(self, gang: Gang) -> list[Hold]:
        """The holds that do not count for a gang: those of lower priority numbers, the highest first."""
        if not self.holds or self._policy.by != "number":
            return []
        lower = [hold for hold in self.holds.values() if hold.gang.job.priority < gang.job.priority]
        return sorted(lower, key=lambda hold: (-hold.gang.job.priority, hold.gang.id))

    def _free(self, holds: Iterable[Hold]) -> None:
        for hold in holds:
            for place in hold.places:
                self._cluster.table.release_by_name(*place)

    def _hold(self, holds: Iterable[Hold]) -> None:
        for hold in holds:
            for place in hold.places:
                self._cluster.table.place_by_name(*place)

    def _take_from(self, freed: Iterable[Hold], gang: Gang, now_ms: int) -> None:
        """A gang was placed while these holds were freed: restore those that still fit, abandon the others."""
        taken = list[Gang]()
        for hold in freed:
            self._hold([hold])
            if not self._still_fits(hold):
                self.drop(hold.gang.id)
                taken.append(hold.gang)
        for lower in taken:
            self.abandon(lower, f"job {gang.id} ({gang.job.name}, priority {gang.job.priority}) took it", now_ms)

    def _still_fits(self, hold: Hold) -> bool:
        """Whether its nodes have capacity for everything on them, stopping runs excluded."""
        table = self._cluster.table
        for name in {place.node for place in hold.places}:
            row = table.row.get(name)
            if row is None:
                return False
            here = [run for id in self._cluster.on_node.get(name, ()) if (run := self._cluster.run(id)) is not None]
            stopping = [run for run in here if run.stop_reason]
            requests = [self._cluster.jobs[run.job].spec.task_of(run.member).request for run in stopping]
            for resource, used in table.node_usage[row].used.items():
                freed = sum(request.get(resource, 0) for request in requests)
                if used - freed > table.allocatable[row].get(resource, 0):
                    return False
        return True

    def wake(self, triggers: set[Trigger]) -> None:
        for hold in self.holds.values():
            hold.awake = hold.awake or not triggers.isdisjoint(hold.requeue_on)

    def awake(self, profile: str = "", *, joins: bool = False) -> list[Hold]:
        """Holds whose gangs may fit elsewhere now, in queue order: of one profile, or of members that join gangs."""
        found = [
            hold
            for hold in self.holds.values()
            if hold.awake
            and hold.gang.is_joining == joins
            and (joins or self._engine.profile(hold.gang).name == profile)
        ]
        return sorted(found, key=lambda hold: (hold.gang.order, hold.gang.id))

    def place_elsewhere(self, hold: Hold, view: View, refused: set[Hashable]) -> list[Placed] | None:
        """Place its gang now if it fits anywhere, its held capacity included; this drops the hold. `refused`: kinds of
        gangs that did not fit in this step (updated); for such a gang only its own capacity can help."""
        hold.awake = False
        gang, single = hold.gang, hold.gang.size == 1
        if single and gang.shape_key in refused and not self._fits_held_node(hold):
            return None
        with self._cluster.table.trial():
            self._free([hold])
            trial: list[Placed] | Refusal | None = None
            if not single or gang.layout_plugins or self._engine.best_row(gang, 0, view) >= 0:
                trial = self._engine.place(gang, view)
            if isinstance(trial, list):
                self._engine.withdraw(gang, trial)
            self._hold([hold])
        if not isinstance(trial, list):
            refused.add(gang.shape_key)
            return None
        self.drop(gang.id)
        nodes = sorted({place.node for place in hold.places})
        self._cluster.emit("job.preemption_not_needed", view.now_ms, job=gang.id, nodes=nodes[:20])
        placed = self._engine.try_gang(gang, view)
        assert not isinstance(placed, Refusal), "the trial has placed it"
        return placed

    def _fits_held_node(self, hold: Hold) -> bool:
        """Whether one of its nodes has enough for a member, by amounts, if its hold is not counted."""
        table = self._cluster.table
        for name, member, _ in hold.places:
            row = table.row.get(name)
            if row is not None:
                allocatable, used, request = table.allocatable[row], table.node_usage[row].used, member.task.request
                if all(
                    used.get(resource, 0) <= allocatable.get(resource, 0) for resource in request if request[resource]
                ):
                    return True
        return False

    def take_ready(self) -> list[Gang]:
        """Gangs whose victims have all ended. Their holds are dropped, so that they must be placed before any other."""
        out = []
        for id, hold in list(self.holds.items()):
            if not any((run := self._cluster.run(id)) and run.state not in RUN_ENDED for id in hold.waiting_for):
                self.drop(id)
                out.append(hold.gang)
        return out

    def abandon_node(self, node: NodeName, why: str, now_ms: int) -> None:
        """A node is about to be removed: the gangs with a hold on it are queued again."""
        gangs = [hold.gang for hold in self.holds.values() if any(place.node == node for place in hold.places)]
        for gang in gangs:
            self.drop(gang.id)
        for gang in gangs:
            self.abandon(gang, why, now_ms)

    def abandon(self, gang: Gang, why: str, now_ms: int) -> None:
        """Queue a gang again whose hold is lost."""
        cluster = self._cluster
        reason = f"the capacity that was freed for it cannot be used: {why}"
        cluster.emit("job.preemption_abandoned", now_ms, job=gang.id, reason=reason)
        cluster.wake("run_ended")
        job = cluster.change_job(cluster.jobs[gang.id], now_ms, reason_code="PREEMPTION_ABANDONED", reason=reason)
        cluster.unfinished = True  # its queue may have had its turn
        (self._gangs.update if gang.is_joining else cluster.enqueue)(job, now_ms)

    def release(self, job: JobId) -> None:
        """Drop the hold of a job, if it has one; its capacity is free for others."""
        if self.drop(job):
            self._cluster.wake("run_ended")

    def drop(self, job: JobId) -> bool:
        """Drop the hold of a job without waking others; returns whether it had one."""
        hold = self.holds.pop(job, None)
        if hold is None:
            return False
        self.withdrawals.not_needed(hold.stopped)
        self._free([hold])
        return True


def with_last_preemption(job: Job, text: str) -> str:
    """The reason of a preempted job names its preemption while it waits again."""
    return f"{job.last_preemption}; {text}" if job.last_preemption else text


def _protected_until(candidates: Sequence[VictimCandidate]) -> int:
    return max((candidate.protected_until_ms for candidate in candidates if not candidate.stopping), default=0)


def _places(spec: JobSpec, runs: list[Run]) -> tuple[Place, ...]:
    return tuple(place_of(spec, run) for run in runs)


def _surplus(spec: JobSpec, runs: list[Run]) -> list[Run]:
    """The members that a gang can spare: the highest ranks of each elastic task, all of a per-node job."""
    if spec.gang.per_node:
        return runs
    if not spec.gang.elastic:
        return []
    out = []
    for task in spec.tasks:
        mine = sorted((run for run in runs if run.task == task.name), key=lambda run: (run.rank, run.member))
        out += mine[task.needed :]
    return out


def _describe(victim: Victim) -> str:
    return f"{victim.id} (member {', '.join(map(str, victim.members))})" if victim.members else str(victim.id)
