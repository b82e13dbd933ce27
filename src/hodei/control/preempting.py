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
from hodei.engine.preempt import Preemption, find
from hodei.engine.tenancy import NO_PARTS, Place, Tenancy, Tenant
from hodei.engine.view import Gang, Member, View
from hodei.model.ids import JobId, NodeName, RunId
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
            spec = job.spec
            self._tenancy.add(
                Tenant(
                    id=id,
                    job=spec,
                    places=tuple(Place(run.node, Member(spec, spec.task_of(run.member)), run.grant) for run in live),
                    since_ms=min(run.started_ms or run.placed_ms for run in live),
                    preemptions=job.preemptions,
                    stopping=all(run.stop_requested for run in live),
                )
            )

    # -------------------------------------------------------------------------------------------- taking

    def attempt(self, gang: Gang, view: View) -> list[Eviction] | None:
        """Make room for a refused gang if that can be done; None if it cannot. It has a hold then, and must leave the line."""
        found = self.look(gang, view)
        return self._carry_out(gang, found, view.now_ms) if found is not None else None

    def look(self, gang: Gang, view: View) -> Preemption | None:
        """Who would have to go for it, if that would help and is allowed. Nothing is changed."""
        self.too_soon = False
        if not self._policy.enabled or not self._engine.profile(gang).queue.preempts:
            return None
        self.keep_up()
        found = find(self._engine, self._tenancy, gang, view, lambda tenant: self._may_evict(tenant, view.now_ms))
        if found is not None and len(found.victims) > self._left(view.now_ms):
            self.too_soon = True
            return None
        return found

    def _carry_out(self, gang: Gang, found: Preemption, now_ms: int) -> list[Eviction]:
        world = self._world
        waiting = {run.id for tenant in (*found.victims, *found.leaving) for run in world.live_runs(tenant.id)}
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
            job = world.jobs[victim.id]
            reason = f"preempted by job {gang.id} ({gang.job.name}, priority {gang.job.priority})"
            self._lives.stop_all(job, reason, now_ms)
            world.tell("job.preempted", now_ms, job=victim.id, by=gang.id, reason=reason)
            evictions.append(Eviction(victim.id, gang.id, tuple(sorted(victim.holds))))
        who = ", ".join(str(tenant.id) for tenant in (*found.victims, *found.leaving))
        text = f"room is being made on {', '.join(nodes[:5])}: job {who} was told to go"
        world.change_job(world.jobs[gang.id], now_ms, reason_code="PREEMPTING", reason=text)
        world.tell("job.preempting", now_ms, job=gang.id, victims=[v.id for v in found.victims], nodes=nodes[:20])
        return evictions

    def _may_evict(self, tenant: Tenant, now_ms: int) -> bool:
        if tenant.preemptions >= self._policy.max_per_job:
            return False
        # One placed in this very step has not even been started: it is left for the next.
        if now_ms - tenant.since_ms < max(self._policy.min_runtime_ms, 1):
            self.too_soon = True
            return False
        return True

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
