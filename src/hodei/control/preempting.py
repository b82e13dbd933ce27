"""Taking the place of lower work, by contract: told to go only after a full trial has shown that it helps, the freed room
held for the one it was freed for, and who went for whom said on both sides.

Between the order to go and the last victim's end the preemptor has a hold: it counts on the nodes as if it were there, so
that nobody else takes the room, and nothing of it is started. Then it is placed by the engine, before anyone else.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from hodei.control.lives import Lives
from hodei.control.world import World
from hodei.engine.cycle import Engine
from hodei.engine.plan import Eviction
from hodei.engine.preempt import Preemption, Preemptions, Victim
from hodei.engine.tenancy import FOR_EVER, NO_PARTS, Place, Tenancy, Tenant
from hodei.engine.view import Gang, Member, View
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.job import Job, JobSpec, Run
from hodei.model.lifecycle import RUN_ENDED


class PreemptionPolicy(Struct, frozen=True):
    """`min_runtime_ms`: nobody is told to go sooner than that. `max_per_job`: how often the same job may be sent away.
    `budget`: evictions within `interval_ms`; 0 for no limit."""

    enabled: bool = True
    min_runtime_ms: int = 0
    max_per_job: int = 5
    budget: int = 0
    interval_ms: int = 60_000


class Hold(Struct):
    """Room kept for a gang until the runs in `waiting_for` have ended."""

    gang: Gang
    places: list[Place]
    waiting_for: set[RunId]


class Preempting:
    def __init__(self, world: World, engine: Engine, lives: Lives, policy: PreemptionPolicy) -> None:
        self._world, self._engine, self._lives, self._policy = world, engine, lives, policy
        self._tenancy = Tenancy(world.table)
        self._preemptions = Preemptions(engine, self._tenancy)
        self._evicted_at: deque[int] = deque()
        self.holds: dict[JobId, Hold] = {}
        self.too_soon = False  # whether the last attempt may do better later: a protection or the budget runs out

    # --------------------------------------------------------------------------------------- who is where

    def keep_up(self) -> None:
        """Learn where the gangs are that were placed, moved or stopped since last time."""
        world = self._world
        for id in world.take_moved():
            live = world.live_runs(id)
            job = world.jobs.get(id)
            if job is None or not live:
                self._tenancy.remove(id)
                continue
            self._tenancy.put(id, self._tenants(job, live))

    def _tenants(self, job: Job, live: list[Run]) -> list[Tenant]:
        """Those who can be told to go: the gang as a whole, and before it each member that it can do without."""
        spec, least_ms = job.spec, max(self._policy.min_runtime_ms, 1)
        since = min(run.started_ms or run.placed_ms for run in live)
        staying = [run for run in live if not run.stop_requested]
        going = [run for run in live if run.stop_requested]
        out = []
        if going:
            members = tuple(run.member for run in going) if staying else ()
            out.append(Tenant(job.id, spec, _places(spec, going), since, stopping=True, members=members))
        if staying:
            spared = _surplus(spec, staying)
            core = [run for run in staying if run not in spared]
            unsaved = [max(run.started_ms, run.checkpoint_ms) for run in staying if run.started_ms]
            # One placed in this very step has not even been started: it is left for the next.
            safe = max(since + least_ms, *(run.placed_ms + 1 for run in staying))
            lost = () if spec.checkpoint.hooked else tuple(unsaved)  # who is told to save its work loses none
            safe = safe if job.preemptions < self._policy.max_per_job else FOR_EVER
            out.append(Tenant(job.id, spec, _places(spec, core), since, unsaved_ms=lost, safe_until_ms=safe))
            for run in spared:
                safe = (run.started_ms or run.placed_ms) + least_ms
                places = _places(spec, [run])
                out.append(
                    Tenant(job.id, spec, places, since, safe_until_ms=safe, members=(run.member,), order=run.rank)
                )
        return out

    # -------------------------------------------------------------------------------------------- taking

    def attempt(self, gang: Gang, view: View) -> list[Eviction] | None:
        """Make room for a refused gang if that can be done; None if it cannot. It has a hold then, and must leave the line."""
        found = self.look(gang, view)
        return self._carry_out(gang, found, view.now_ms) if found is not None else None

    def look(self, gang: Gang, view: View) -> Preemption | None:
        """Who would have to go for it, if that would help and is allowed. Nothing is changed."""
        self.too_soon = False
        if not (self._policy.enabled and gang.job.preempts and self._engine.profile(gang).queue.preempts):
            return None
        self.keep_up()
        found = self._preemptions.find(gang, view)
        self.too_soon = self._preemptions.too_soon
        if found is not None and not found.victims and not found.leaving:
            return None  # nobody would go for it: it was refused for something else than room that others hold
        if found is not None and len(found.victims) > self._left(view.now_ms):
            self.too_soon = True
            return None
        return found

    def next_change_ms(self, now_ms: int) -> int:
        """When time alone may next let it do more: a protection runs out, or the budget allows one more."""
        first = self._tenancy.next_unsafe_ms(now_ms)
        if self._policy.budget and self._evicted_at:
            first = min(first, self._evicted_at[0] + self._policy.interval_ms)
        return first

    def take_settings(self, other: Preempting) -> None:
        """From now on by another's policy; what was protected by the old one is looked at anew."""
        if self._policy != other._policy:
            self._policy = other._policy
            for id in sorted(self._world.runs):
                self._world.moved(id)

    def _carry_out(self, gang: Gang, found: Preemption, now_ms: int) -> list[Eviction]:
        world = self._world
        waiting = {run.id for victim in (*found.victims, *found.leaving) for run in self._runs_of(victim)}
        places = []
        for placed in found.placements:
            # What the victims still hold may not be given twice: which parts it gets is chosen when they are gone.
            world.table.hold(placed.node.name, placed.member.task.request, placed.member, NO_PARTS)
            places.append(Place(placed.node.name, placed.member, NO_PARTS))
        self.holds[gang.id] = Hold(gang, places, waiting)
        nodes = sorted({place.node for place in places})
        evictions = []
        for victim in found.victims:
            self._evicted_at.append(now_ms)
            self._send_away(victim, gang, now_ms)
            evictions.append(Eviction(victim.id, gang.id, victim.nodes, victim.members))
        who = ", ".join(_said(victim) for victim in (*found.victims, *found.leaving))
        text = f"room is being made on {', '.join(nodes[:5])}: job {who} was told to go"
        world.change_job(world.jobs[gang.id], now_ms, reason_code="PREEMPTING", reason=text)
        world.tell("job.preempting", now_ms, job=gang.id, victims=[v.id for v in found.victims], nodes=nodes[:20])
        return evictions

    def _send_away(self, victim: Victim, gang: Gang, now_ms: int) -> None:
        by = f"job {gang.id} ({gang.job.name}, priority {gang.job.priority})"
        if not victim.members:
            reason = f"preempted by {by}"
            self._lives.stop_all(self._world.jobs[victim.id], reason, now_ms)
            self._world.tell("job.preempted", now_ms, job=victim.id, by=gang.id, reason=reason)
            return
        reason = f"shrunk for {by}"
        for run in self._runs_of(victim):
            self._lives.shrink(run, reason, now_ms)
        self._world.tell(
            "job.shrunk", now_ms, job=victim.id, by=gang.id, members=list(victim.members), reason=reason
        )  # fmt: skip

    def _runs_of(self, victim: Victim) -> list[Run]:
        live = self._world.live_runs(victim.id)
        return [run for run in live if run.member in victim.members] if victim.members else live

    def _left(self, now_ms: int) -> int:
        """How many evictions the budget still allows."""
        if not self._policy.budget:
            return 1_000_000
        while self._evicted_at and self._evicted_at[0] <= now_ms - self._policy.interval_ms:
            self._evicted_at.popleft()
        return self._policy.budget - len(self._evicted_at)

    # ------------------------------------------------------------------------------------------- holding

    def ripe(self) -> list[Gang]:
        """Gangs whose room is free now; their holds are let go, so they must be placed before anyone else is tried."""
        out = []
        for id, hold in list(self.holds.items()):
            if not any((run := self._world.run(id)) and run.state not in RUN_ENDED for id in hold.waiting_for):
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
        for name, member, grant in hold.places:
            self._world.table.let_go(name, member.task.request, member, grant)
        return True


def _places(spec: JobSpec, runs: list[Run]) -> tuple[Place, ...]:
    return tuple(Place(run.node, Member(spec, spec.task_of(run.member)), run.grant) for run in runs)


def _surplus(spec: JobSpec, runs: list[Run]) -> list[Run]:
    """The members that an elastic gang can do without: of each task those of the highest ranks."""
    if not spec.gang.elastic:
        return []
    out = []
    for task in spec.tasks:
        mine = sorted((run for run in runs if run.task == task.name), key=lambda run: (run.rank, run.member))
        out += mine[task.needed :]
    return out


def _said(victim: Victim) -> str:
    return f"{victim.id} (member {', '.join(map(str, victim.members))})" if victim.members else str(victim.id)
