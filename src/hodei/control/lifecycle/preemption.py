"""Taking the place of lower work, by contract: told to go only after a full trial has shown that it helps, the freed room
held for the one it was freed for, and who went for whom said on both sides.

Between the order to go and the last victim's end the preemptor has a hold: it counts on the nodes as if it were there, so
that nobody else takes the room, and nothing of it is started. Then it is placed by the engine, before anyone else.

The hold does not tie it: whenever something happens that could help it, it is tried against all nodes in its turn, its own
room included. If it starts, the hold is released, and victims that were not told yet stay (`control.lifecycle.preemption`).

Where priority numbers count, a hold keeps the room from equals and lower ones only: a higher one takes it if it finds no
other, and the one it was held for queues again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence

from msgspec import Struct, structs

from hodei.control.lifecycle.jobs import JobLifecycle
from hodei.control.lifecycle.linked_jobs import JobLink, JobLinks, LinkGuard
from hodei.control.lifecycle.runs import stop_order
from hodei.control.state import ClusterState
from hodei.engine.cycle import Engine
from hodei.engine.plan import Eviction, Refusal
from hodei.engine.points import ANY_TRIGGER, Placed, Trigger
from hodei.engine.preemption.search import Preemption, Preemptions, Victim
from hodei.engine.preemption.victims import FOREVER, NO_PARTS, By, Guard, Place, VictimCandidate, VictimIndex
from hodei.engine.view import Gang, Member, View
from hodei.model.effects import WithdrawStop
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.job import RUN_ENDED, Job, JobSpec, Run
from hodei.model.outcome import StopReason

# -------------------------------------------------------------------------------------- spared victims
# Victims whose going helps nobody any more: they stay, if they have not been told to stop yet.


class _Asked(Struct):
    """The runs of one gang that need not stop any more, with why they were told to; those whose order was dropped."""

    runs: dict[RunId, StopReason]
    dropped: set[RunId]


class SparedVictims:
    """`wanted`: whether somebody waits for the end of a run. `gang`: what the gang of a job is known by."""

    def __init__(self, cluster: ClusterState, wanted: Callable[[RunId], bool], gang: Callable[[JobId], JobId]) -> None:
        self._cluster, self._wanted, self._gang = cluster, wanted, gang
        self._asked: dict[JobId, _Asked] = {}
        self._needless: dict[RunId, None] = {}

    def needless(self, runs: Iterable[RunId]) -> None:
        """These were told to go for one who does not need their room any more."""
        self._needless.update(dict.fromkeys(runs))

    def dropped(self, id: RunId) -> None:
        """The driver had not sent the order yet, and will not."""
        for asked in self._asked.values():
            if id in asked.runs:
                asked.dropped.add(id)
                return
        run = self._cluster.run(id)
        if run is not None and run.state not in RUN_ENDED and run.stop_reason:
            self._tell_again(run)

    def ask(self) -> None:
        """At the end of a step: ask for those whose end nobody has come to wait for meanwhile."""
        if not self._needless:
            return
        needless, self._needless = self._needless, {}
        for id in needless:
            run = self._cluster.run(id)
            if run is None or run.state in RUN_ENDED or not run.stop_reason or self._wanted(id):
                continue
            asked = self._asked.setdefault(self._gang(run.job), _Asked({}, set()))
            asked.runs[id] = run.stop_reason
            self._cluster.spared.add(id)
            self._cluster.act(WithdrawStop(id, run.backend))

    def settle(self, now_ms: int) -> None:
        """Whose orders have all been dropped stays. If one member went, or somebody has come to wait for one, or the job
        is to stop for another reason, then all go after all."""
        for gang, asked in list(self._asked.items()):
            runs = {id: self._cluster.run(id) for id in asked.runs}
            live = [run for run in runs.values() if run is not None and run.state not in RUN_ENDED]
            as_told = all(run.stop_reason == asked.runs[run.id] for run in live)
            if len(live) < len(runs) or not as_told or any(self._wanted(id) for id in runs):
                self._forget(gang)
                for run in live:
                    if run.id in asked.dropped and run.stop_reason == asked.runs[run.id]:
                        self._tell_again(run)
            elif len(asked.dropped) == len(runs):
                self._forget(gang)
                for run in live:
                    self._cluster.change_run(run, stop_reason=None)
                for job in sorted({run.job for run in live}):
                    self._cluster.emit(
                        "job.preemption_cancelled", now_ms, job=job, reason="its room is not needed any more"
                    )

    def _forget(self, gang: JobId) -> None:
        self._cluster.spared.difference_update(self._asked.pop(gang).runs)

    def _tell_again(self, run: Run) -> None:
        if run.stop_reason is not None:
            self._cluster.act(stop_order(self._cluster.jobs[run.job], run, run.stop_reason))


# ----------------------------------------------------------------------------------------------------


class PreemptionPolicy(Struct, frozen=True):
    """`min_runtime_ms`: nobody is told to go sooner than that. `max_per_job`: how often the same job may be sent away.
    `budget`: evictions within `interval_ms`; 0 for no limit. `by`: whoever is of a higher class may take the place of lower
    ones (critical, high, medium; the others take nobody's), or whoever has the higher priority number."""

    enabled: bool = True
    min_runtime_ms: int = 0
    max_per_job: int = 5
    budget: int = 0
    interval_ms: int = 60_000
    by: By = "class"


_PAST = ("preempted by ", "reclaimed ")


class Hold(Struct):
    """Room kept for a gang until the runs in `waiting_for` have ended; `told`: those of them that were told to go for it.
    `requeue_on`: what could let it start elsewhere before. `awake`: such a thing has happened since it was last tried."""

    gang: Gang
    places: list[Place]
    waiting_for: set[RunId]
    told: tuple[RunId, ...] = ()
    requeue_on: tuple[Trigger, ...] = ANY_TRIGGER
    awake: bool = False


class Protection(Struct, frozen=True):
    """Whose place a gang could take but for the setting `by`, and until when that holds (FOREVER: for good)."""

    victims: tuple[Victim, ...]
    until_ms: int
    by: str


class PreemptionControl:
    """`void` is called with every gang whose hold a higher one took, why, and when."""

    def __init__(
        self, cluster: ClusterState, engine: Engine, lifecycle: JobLifecycle, policy: PreemptionPolicy,
        void: Callable[[Gang, str, int], None],
    ) -> None:  # fmt: skip
        self._cluster, self._engine, self._lifecycle = cluster, engine, lifecycle
        self._policy, self._void = policy, void
        self._victim_index = VictimIndex(cluster.table, policy.by)
        self._preemptions = Preemptions(engine, self._victim_index)
        for profile in engine.profiles.values():
            structs.force_setattr(profile, "by_number", policy.by == "number")
        self._evicted_at: deque[int] = deque()
        self.holds: dict[JobId, Hold] = {}
        self.bonds = JobLinks(cluster)
        self._guard: Guard | None = None
        self.sparing = SparedVictims(cluster, self.waits_for, self.bonds.gang)
        self.too_soon = False  # whether the last attempt may do better later: a protection or the budget runs out

    @property
    def guard(self) -> Guard | None:
        """Budgets that are respected where that can be done; whoever drives the controller sets them."""
        return self._guard

    @guard.setter
    def guard(self, guard: Guard | None) -> None:
        self._guard = guard
        self._victim_index.guard = LinkGuard(guard, self.bonds) if guard is not None else None

    def tie(self, key: Hashable, core: Sequence[JobId], spare: Sequence[JobId] = ()) -> None:
        """Jobs that are one gang though each lives by itself: `core` go together or not at all, `spare` may go alone. No
        core: there is no such gang any more."""
        gone = self.bonds.tie(key, core, spare)
        if gone is not None:
            self._victim_index.remove(gone)

    # --------------------------------------------------------------------------------------- who is where

    def keep_up(self) -> None:
        """Learn where the gangs are that were placed, moved or stopped since last time."""
        cluster = self._cluster
        moved = cluster.take_moved()
        tied = dict[JobId, JobLink]()
        for id in sorted({*self._victim_index.of_job, *cluster.runs}) if moved is None else moved:
            bond = self.bonds.of(id) if self.bonds else None
            if bond is not None:
                tied[bond.id] = bond
                self._victim_index.remove(id)
                continue
            live = cluster.live_runs(id)
            job = cluster.jobs.get(id)
            if job is None or not live:
                if id >= 0:
                    self._victim_index.remove(id)
                continue
            self._victim_index.put(id, self._tenants(job, live))
        for bond in tied.values():
            self._victim_index.put(bond.id, self.bonds.tenants(bond, self._apart(bond)))

    def _apart(self, bond: JobLink) -> dict[JobId, list[VictimCandidate]]:
        """The jobs of a bond that hold room, each as if it were alone."""
        out: dict[JobId, list[VictimCandidate]] = {}
        for id in bond.jobs:
            job, live = self._cluster.jobs.get(id), self._cluster.live_runs(id)
            if job is not None and live:
                out[id] = self._tenants(job, live)
        return out

    def _tenants(self, job: Job, live: list[Run]) -> list[VictimCandidate]:
        """Those who can be told to go: the gang as a whole, and before it each member that it can do without."""
        spec, least_ms = job.spec, max(self._policy.min_runtime_ms, 1)
        since = min(run.started_ms or run.placed_ms for run in live)
        staying = [run for run in live if not run.stop_reason]
        going = [run for run in live if run.stop_reason]
        out = []
        if going:
            members = tuple(run.member for run in going) if staying else ()
            out.append(VictimCandidate(job.id, spec, _places(spec, going), since, stopping=True, members=members))
        if staying:
            spared = _surplus(spec, staying)
            core = [run for run in staying if run not in spared]
            unsaved = [max(run.started_ms, run.checkpoint_ms) for run in staying if run.started_ms]
            # One placed in this very step has not even been started: it is left for the next.
            safe = max(since + least_ms, *(run.placed_ms + 1 for run in staying))
            lost = () if spec.checkpoint.has_hook else tuple(unsaved)  # who is told to save its work loses none
            safe = safe if job.preemptions < self._policy.max_per_job else FOREVER
            if core:
                out.append(
                    VictimCandidate(job.id, spec, _places(spec, core), since, unsaved_ms=lost, protected_until_ms=safe)
                )
            for run in spared:
                safe = max((run.started_ms or run.placed_ms) + least_ms, run.placed_ms + 1)
                places = _places(spec, [run])
                out.append(
                    VictimCandidate(
                        job.id, spec, places, since, protected_until_ms=safe, members=(run.member,), order=run.rank
                    )
                )
        return out

    # -------------------------------------------------------------------------------------------- taking

    def attempt(self, gang: Gang, view: View, refusal: Refusal) -> list[Eviction] | None:
        """Make room for a refused gang if that can be done; None if it cannot. It has a hold then, and must leave the line."""
        found = self.look(gang, view)
        return self._carry_out(gang, found, view.now_ms, refusal.requeue_on) if found is not None else None

    def look(self, gang: Gang, view: View) -> Preemption | None:
        """Who would have to go for it, if that would help and is allowed. Nothing is changed."""
        self.too_soon = False
        if not (self._policy.enabled and gang.job.preempts and self._engine.profile(gang).queue.preempts):
            return None
        self.keep_up()
        found = self._find(gang, view)
        if found is not None and self.bonds:
            found.victims = self.bonds.apart(found.victims, going=False)
            found.leaving = self.bonds.apart(found.leaving, going=True)
        self.too_soon = self._preemptions.retry_later
        if found is not None and not found.victims and not found.leaving:
            return None  # nobody would go for it: it was refused for something else than room that others hold
        if found is not None and len(found.victims) > self._left(view.now_ms):
            self.too_soon = True
            return None
        return found

    def _find(self, gang: Gang, view: View) -> Preemption | None:
        lower = self._lower_holds(gang)
        if not lower:
            return self._preemptions.find(gang, view)
        with self._cluster.table.trial():
            self._set_aside(lower)
            try:
                return self._preemptions.find(gang, view)
            finally:
                self._keep(lower)

    def protected(self, gang: Gang, view: View) -> Protection | None:
        """Who would have to go for it if nobody were protected, and until when they are; None if that would not help."""
        if not (self._policy.enabled and gang.job.preempts and self._engine.profile(gang).queue.preempts):
            return None
        self.keep_up()
        known, now_ms = self._victim_index, view.now_ms
        safe = {id: until for id, all in known.of_job.items() if (until := _safe_until(all)) > now_ms}
        budget_ms = (
            self._evicted_at[0] + self._policy.interval_ms if self._left(now_ms) <= 0 and self._evicted_at else 0
        )
        if not safe and not budget_ms:
            return None
        bare = VictimIndex(self._cluster.table, self._policy.by)
        bare.guard = known.guard
        for id, tenants in known.of_job.items():
            bare.put(id, [structs.replace(tenant, protected_until_ms=0, counted=False) for tenant in tenants])
        found = Preemptions(self._engine, bare).find(gang, view)
        if found is None or not found.victims:
            return None
        kept = [victim for victim in found.victims if victim.id in safe]
        if not kept:
            return Protection(tuple(found.victims), budget_ms, "budget") if budget_ms else None
        until_ms = max(safe[victim.id] for victim in kept)
        return Protection(tuple(kept), until_ms, "max_per_job" if until_ms >= FOREVER else "min_runtime")

    def next_change_ms(self, now_ms: int) -> int:
        """When time alone may next let it do more: a protection runs out, or the budget allows one more."""
        first = self._victim_index.next_unprotected_ms(now_ms)
        if self._policy.budget and self._evicted_at:
            first = min(first, self._evicted_at[0] + self._policy.interval_ms)
        return first

    def take_settings(self, other: PreemptionControl) -> None:
        """From now on by another's policy; what was protected by the old one is looked at anew."""
        if self._policy != other._policy:
            if self._policy.by != other._policy.by:
                guard, self._victim_index = self.guard, VictimIndex(self._cluster.table, other._policy.by)
                self._preemptions, self.guard = Preemptions(self._engine, self._victim_index), guard
            self._policy = other._policy
            for id in sorted(self._cluster.runs):
                self._cluster.moved(id)

    def _carry_out(
        self, gang: Gang, found: Preemption, now_ms: int, requeue_on: tuple[Trigger, ...] = ANY_TRIGGER
    ) -> list[Eviction]:
        cluster, lower = self._cluster, self._lower_holds(gang)
        self._set_aside(lower)
        waiting = {run.id for victim in (*found.victims, *found.leaving) for run in self._runs_of(victim)}
        places = []
        for placed in found.placements:
            # What the victims still hold may not be given twice: which parts it gets is chosen when they are gone.
            cluster.table.hold(placed.node.name, placed.member.task.request, placed.member, NO_PARTS)
            places.append(Place(placed.node.name, placed.member, NO_PARTS))
        told = tuple(run.id for victim in found.victims for run in self._runs_of(victim))
        self.holds[gang.id] = Hold(gang, places, waiting, told, requeue_on)
        nodes = sorted({place.node for place in places})
        evictions = []
        for victim in found.victims:
            self._evicted_at.append(now_ms)
            self._send_away(victim, gang, now_ms)
            evictions.append(Eviction(victim.id, gang.id, victim.nodes, victim.members))
        who = ", ".join(_said(victim) for victim in (*found.victims, *found.leaving))
        text = f"room is being made on {', '.join(nodes[:5])}: job {who} was told to go"
        cluster.change_job(cluster.jobs[gang.id], now_ms, reason_code="PREEMPTING", reason=text)
        cluster.emit("job.preempting", now_ms, job=gang.id, victims=[v.id for v in found.victims], nodes=nodes[:20])
        self._take_from(lower, gang, now_ms)
        return evictions

    def _send_away(self, victim: Victim, gang: Gang, now_ms: int) -> None:
        by = f"job {gang.id} ({gang.job.name}, priority {gang.job.priority})"
        if not victim.members:
            reason = StopReason("preempted", f"by {by}")
            self._lifecycle.stop_all(self._cluster.jobs[victim.id], reason, now_ms)
            self._cluster.emit("job.preempted", now_ms, job=victim.id, by=gang.id, reason=reason.text)
            return
        reason = StopReason("preempted", f"by {by}", gang="shrink")
        for run in self._runs_of(victim):
            self._lifecycle.shrink(run, reason, now_ms)
        self._cluster.emit(
            "job.shrunk", now_ms, job=victim.id, by=gang.id, members=list(victim.members), reason=reason.text
        )  # fmt: skip

    def _runs_of(self, victim: Victim) -> list[Run]:
        live = self._cluster.live_runs(victim.id)
        return [run for run in live if run.member in victim.members] if victim.members else live

    def _left(self, now_ms: int) -> int:
        """How many evictions the budget still allows."""
        if not self._policy.budget:
            return 1_000_000
        while self._evicted_at and self._evicted_at[0] <= now_ms - self._policy.interval_ms:
            self._evicted_at.popleft()
        return self._policy.budget - len(self._evicted_at)

    # ------------------------------------------------------------------------------------------- holding

    def try_gang(self, gang: Gang, view: View) -> list[Placed] | Refusal:
        """As the engine does it; if that is all that is in its way, in room that is held for a lower one."""
        result = self._engine.try_gang(gang, view)
        if not (self.holds and isinstance(result, Refusal)):
            return result
        lower = self._lower_holds(gang)
        if not lower:
            return result
        with self._cluster.table.trial():
            self._set_aside(lower)
            trial = self._engine.place(gang, view)
            if not isinstance(trial, Refusal):
                self._engine.withdraw(gang, trial)
            self._keep(lower)
        if isinstance(trial, Refusal):
            return result
        self._set_aside(lower)
        placed = self._engine.place(gang, view)
        self._take_from(lower, gang, view.now_ms)
        return placed

    def _lower_holds(self, gang: Gang) -> list[Hold]:
        """The holds that do not count for a gang, the most important first: those for strictly lower priority numbers."""
        if not self.holds or self._policy.by != "number":
            return []
        lower = [hold for hold in self.holds.values() if hold.gang.job.priority < gang.job.priority]
        return sorted(lower, key=lambda hold: (-hold.gang.job.priority, hold.gang.id))

    def _set_aside(self, holds: Iterable[Hold]) -> None:
        for hold in holds:
            for name, member, grant in hold.places:
                self._cluster.table.let_go(name, member.task.request, member, grant)

    def _keep(self, holds: Iterable[Hold]) -> None:
        for hold in holds:
            for name, member, grant in hold.places:
                self._cluster.table.hold(name, member.task.request, member, grant)

    def _take_from(self, aside: Iterable[Hold], gang: Gang, now_ms: int) -> None:
        """A gang has its room now. Of the holds that were set aside for it those stay that still have theirs, the others
        are given up."""
        taken = list[Gang]()
        for hold in aside:
            self._keep([hold])
            if not self._still_has_room(hold):
                self.drop(hold.gang.id)
                taken.append(hold.gang)
        for lower in taken:
            self._void(lower, f"job {gang.id} ({gang.job.name}, priority {gang.job.priority}) took it", now_ms)

    def _still_has_room(self, hold: Hold) -> bool:
        """Whether its nodes are large enough for all who are and will be there, when those have gone who were told to."""
        table = self._cluster.table
        for name in {place.node for place in hold.places}:
            row = table.row.get(name)
            if row is None:
                return False
            here = [run for id in self._cluster.on_node.get(name, ()) if (run := self._cluster.run(id)) is not None]
            going = [run for run in here if run.stop_reason]
            requests = [self._cluster.jobs[run.job].spec.task_of(run.member).request for run in going]
            for resource, used in table.holds[row].used.items():
                freed = sum(request.get(resource, 0) for request in requests)
                if used - freed > table.allocatable[row].get(resource, 0):
                    return False
        return True

    # ------------------------------------------------------------------------------------- any other room

    def waits_for(self, run: RunId) -> bool:
        """Whether somebody's hold needs the end of a run."""
        return any(run in hold.waiting_for for hold in self.holds.values())

    def wake(self, triggers: set[Trigger]) -> None:
        for hold in self.holds.values():
            hold.awake = hold.awake or not triggers.isdisjoint(hold.requeue_on)

    def awake(self, profile: str = "", *, joins: bool = False) -> list[Hold]:
        """The holds whose gangs may find room elsewhere now, in their order in the line: those of one profile, or those of
        members that running gangs want back."""
        found = [
            hold
            for hold in self.holds.values()
            if hold.awake and hold.gang.joins == joins and (joins or self._engine.profile(hold.gang).name == profile)
        ]
        return sorted(found, key=lambda hold: (hold.gang.order, hold.gang.id))

    def elsewhere(self, hold: Hold, view: View, refused: set[Hashable]) -> list[Placed] | None:
        """Where its gang can start at once, its own room included; the hold is given up then. Else all is as before.
        `refused`: kinds that found no room in this step, to be added to; one of these can only be helped by its own room."""
        hold.awake = False
        gang, alone = hold.gang, hold.gang.size == 1
        if alone and gang.alike in refused and not self._own_room(hold):
            return None
        with self._cluster.table.trial():
            self._set_aside([hold])
            trial: list[Placed] | Refusal | None = None
            if not alone or gang.layout_plugins or self._engine.best_row(gang, 0, view) >= 0:
                trial = self._engine.place(gang, view)
            if isinstance(trial, list):
                self._engine.withdraw(gang, trial)
            self._keep([hold])
        if not isinstance(trial, list):
            refused.add(gang.alike)
            return None
        self.drop(gang.id)
        nodes = sorted({place.node for place in hold.places})
        self._cluster.emit("job.preemption_not_needed", view.now_ms, job=gang.id, nodes=nodes[:20])
        placed = self._engine.try_gang(gang, view)
        assert not isinstance(placed, Refusal), "the trial found room"
        return placed

    def _own_room(self, hold: Hold) -> bool:
        """Whether a node of its own has enough for a member, by amounts, if its hold is not counted."""
        table = self._cluster.table
        for name, member, _ in hold.places:
            row = table.row.get(name)
            if row is not None:
                room, used, request = table.allocatable[row], table.holds[row].used, member.task.request
                if all(used.get(resource, 0) <= room.get(resource, 0) for resource in request if request[resource]):
                    return True
        return False

    def ripe(self) -> list[Gang]:
        """Gangs whose room is free now; their holds are let go, so they must be placed before anyone else is tried."""
        out = []
        for id, hold in list(self.holds.items()):
            if not any((run := self._cluster.run(id)) and run.state not in RUN_ENDED for id in hold.waiting_for):
                self.drop(id)
                out.append(hold.gang)
        return out

    def void_on(self, node: NodeName) -> list[Gang]:
        """A node is about to go: the holds on it are given up. Their gangs must queue again."""
        gangs = [hold.gang for hold in self.holds.values() if any(place.node == node for place in hold.places)]
        for gang in gangs:
            self.drop(gang.id)
        return gangs

    def drop(self, job: JobId) -> bool:
        """Give up a hold; whether there was one."""
        hold = self.holds.pop(job, None)
        if hold is None:
            return False
        self.sparing.needless(hold.told)
        for name, member, grant in hold.places:
            self._cluster.table.let_go(name, member.task.request, member, grant)
        return True


def with_past(job: Job, text: str) -> str:
    """A job that was preempted goes on saying so while it waits for another place."""
    if job.preemptions and job.reason.startswith(_PAST):
        return f"{job.reason.partition('; ')[0]}; {text}"
    return text


def _safe_until(tenants: Sequence[VictimCandidate]) -> int:
    return max((tenant.protected_until_ms for tenant in tenants if not tenant.stopping), default=0)


def _places(spec: JobSpec, runs: list[Run]) -> tuple[Place, ...]:
    return tuple(Place(run.node, Member(spec, spec.task_of(run.member)), run.grant) for run in runs)


def _surplus(spec: JobSpec, runs: list[Run]) -> list[Run]:
    """The members that an elastic gang can do without: of each task those of the highest ranks. Of a job for every node
    each is on its own."""
    if spec.gang.per_node:
        return runs
    if not spec.gang.elastic:
        return []
    out = []
    for task in spec.tasks:
        mine = sorted((run for run in runs if run.task == task.name), key=lambda run: (run.rank, run.member))
        out += mine[task.needed :]
    return out


def _said(victim: Victim) -> str:
    return f"{victim.id} (member {', '.join(map(str, victim.members))})" if victim.members else str(victim.id)
