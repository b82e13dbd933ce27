"""A provider in simulated time: starts and stops ordered nodes, fails to at times, takes spot nodes back, and counts what is
paid for.

A node that is ordered is paid until it has stopped. Boot times, failed boots and losses are drawn from a seed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from itertools import count

from msgspec import Struct, structs

from hodei.control.capacity.planner import plan_capacity
from hodei.control.capacity.scaling import HOUR_MS, cost_milli
from hodei.control.clone import clone_controller
from hodei.control.controller import Controller
from hodei.model.capacity import NO_CAPACITY, CapacityPlan, PlannedNode
from hodei.model.effects import NodeAct, WantNodes
from hodei.model.facts import CapacityPlanned, Fact, NodeJoined, NodeLost, NodeRefused
from hodei.model.ids import NodeName
from hodei.model.node import Node
from hodei.model.resources import Resources

# What decides about new nodes: the planner, or a rule to compare it with.
Strategy = Callable[[Controller, int], CapacityPlan]


class ProviderPolicy(Struct, frozen=True):
    """Boot times vary by `boot_jitter_percent` around `Node.startup_ms`. `failed_boots_percent`: of orders that never
    become ready; `refused_percent`: of orders without capacity. `stop_ms`: from the release until it costs nothing."""

    seed: int = 1
    boot_jitter_percent: int = 20
    failed_boots_percent: int = 0
    refused_percent: int = 0
    stop_ms: int = 20_000
    lose_spot: bool = True


class CapacityUse(Struct):
    """`paid_ms`: node time from the order until the node has stopped. `busy_ms`: when at least one run was on the node; the
    rest was wasted. `allocated_ms`: `busy_ms` weighted by the largest share of a resource that the runs requested.
    `longest_idle_ms`: the longest time that a ready node was paid for and idle until its release. `changes`: the time, and
    from then on how many nodes are paid for, and how many are busy."""

    paid_ms: int = 0
    busy_ms: int = 0
    allocated_ms: int = 0
    cost_milli: int = 0
    started: int = 0
    failed_boots: int = 0
    refused: int = 0
    reclaimed: int = 0
    longest_idle_ms: int = 0
    changes: list[tuple[int, int, int]] = []

    @property
    def wasted_ms(self) -> int:
        return self.paid_ms - self.busy_ms


class _Paid:
    """A node while it is paid for. `runs`: how many are on it; `share`: what they request of it."""

    __slots__ = ("busy_since_ms", "idle_since_ms", "node", "runs", "share", "share_since_ms", "since_ms")

    def __init__(self, node: Node, now_ms: int) -> None:
        self.node = node
        self.since_ms = now_ms
        self.busy_since_ms = -1
        self.idle_since_ms = -1
        self.runs = 0
        self.share = 0.0
        self.share_since_ms = now_ms


class Provider:
    """`nodes`: those with a group can be ordered; the others exist and are paid for from beginning to end."""

    def __init__(
        self, nodes: Iterable[Node], policy: ProviderPolicy | None = None, strategy: Strategy | None = None
    ) -> None:
        self.policy = policy or ProviderPolicy()
        self._strategy = strategy or plan_on_clone
        nodes = list(nodes)
        self.offered = {node.name: node for node in nodes if node.group}
        self._permanent = [node for node in nodes if not node.group]
        self.used = CapacityUse()
        self._random = random.Random(self.policy.seed)
        self._paid: dict[NodeName, _Paid] = {}
        self._busy = 0
        self._generation: dict[NodeName, int] = {}
        self._due: list[tuple[int, int, int, Fact]] = []
        self._numbers = count()
        self._planned_ms = -HOUR_MS
        self._changed = True

    def begin(self, now_ms: int) -> None:
        """The simulation starts: from now on the permanent nodes are paid for."""
        for node in self._permanent:
            self._paid[node.name] = _Paid(node, now_ms)
        self._note(now_ms)

    def act(self, act: NodeAct, now_ms: int) -> None:
        for name in act.nodes:
            (self._start if isinstance(act, WantNodes) else self._stop)(name, now_ms)

    def _start(self, name: NodeName, now_ms: int) -> None:
        if name in self._paid:
            return
        node, policy = self.offered[name], self.policy
        if self._chance(policy.refused_percent):
            self.used.refused += 1
            self._at(now_ms, name, NodeRefused(name, NO_CAPACITY, f"no capacity in group {node.group}"))
            return
        self.used.started += 1
        self._paid[name] = _Paid(node, now_ms)
        self._note(now_ms)
        self._generation[name] = self._generation.get(name, 0) + 1
        self._at(now_ms, name, NodeJoined(structs.replace(node, phase="starting")))
        if self._chance(policy.failed_boots_percent):
            self.used.failed_boots += 1
            return
        jitter = self._random.randint(-policy.boot_jitter_percent, policy.boot_jitter_percent)
        ready_ms = now_ms + max(node.startup_ms * (100 + jitter) // 100, 1)
        self._at(ready_ms, name, NodeJoined(structs.replace(node, phase="ready")))
        if node.spot and node.losses_milli and policy.lose_spot:
            lost_ms = ready_ms + round(self._random.expovariate(node.losses_milli / 1000 / 1000) * HOUR_MS)
            self._at(lost_ms, name, NodeLost(name, "taken back by its provider", reclaimed=True))

    def _stop(self, name: NodeName, now_ms: int) -> None:
        if name not in self._paid:
            return
        paid = self._paid[name]
        if paid.idle_since_ms >= 0:
            self.used.longest_idle_ms = max(self.used.longest_idle_ms, now_ms - paid.idle_since_ms)
            paid.idle_since_ms = -1
        self._generation[name] += 1  # what was still to come of it does not happen
        self._at(now_ms + self.policy.stop_ms, name, NodeJoined(self.offered[name]))

    def _chance(self, percent: int) -> bool:
        return percent > 0 and self._random.randrange(100) < percent

    def _at(self, at_ms: int, name: NodeName, fact: Fact) -> None:
        heapq.heappush(self._due, (at_ms, next(self._numbers), self._generation.get(name, 0), fact))

    def run_started(self, name: NodeName, request: Resources, now_ms: int) -> None:
        paid = self._paid.get(name)
        if paid is None:
            return
        self._allocate(paid, request, 1, now_ms)
        if paid.runs == 1:
            self._busy += 1
            paid.busy_since_ms = now_ms
            paid.idle_since_ms = -1
            self._note(now_ms)

    def run_ended(self, name: NodeName, request: Resources, now_ms: int) -> None:
        paid = self._paid.get(name)
        if paid is None:
            return
        self._allocate(paid, request, -1, now_ms)
        if not paid.runs:
            self._busy -= 1
            self.used.busy_ms += now_ms - paid.busy_since_ms
            paid.busy_since_ms, paid.idle_since_ms = -1, now_ms
            self._note(now_ms)

    def _allocate(self, paid: _Paid, request: Resources, sign: int, now_ms: int) -> None:
        self.used.allocated_ms += round(paid.share * (now_ms - paid.share_since_ms))
        paid.runs += sign
        capacity = paid.node.capacity
        share = max((amount / capacity[r] for r, amount in request.items() if amount and capacity.get(r)), default=0.0)
        paid.share, paid.share_since_ms = (paid.share + sign * share) if paid.runs else 0.0, now_ms

    def _note(self, now_ms: int) -> None:
        changes = self.used.changes
        if changes and changes[-1][0] == now_ms:
            changes.pop()
        changes.append((now_ms, len(self._paid), self._busy))

    def _ended(self, name: NodeName, now_ms: int) -> None:
        paid = self._paid.pop(name, None)
        if paid is None:
            return
        used = self.used
        if paid.busy_since_ms >= 0:
            self._busy -= 1
            used.busy_ms += now_ms - paid.busy_since_ms
            used.allocated_ms += round(paid.share * (now_ms - paid.share_since_ms))
        paid_ms = now_ms - paid.since_ms
        used.paid_ms += paid_ms
        used.cost_milli += cost_milli(paid.node, paid_ms)
        self._note(now_ms)

    def finish(self, now_ms: int) -> None:
        """The end of the simulation: what still runs is paid until now."""
        for name in list(self._paid):
            self._ended(name, now_ms)

    @property
    def active(self) -> bool:
        """Whether an ordered node is still paid for."""
        return len(self._paid) > len(self._permanent)

    def next_ms(self, controller: Controller) -> int | None:
        due = self._due[0][0] if self._due else None
        if not (self._changed and self.offered and (self.active or any(controller.pending().values()))):
            return due
        plan_ms = self._planned_ms + controller.scaling.policy.interval_ms
        return plan_ms if due is None else min(due, plan_ms)

    def changed(self) -> None:
        """Something happened: another plan may find something else."""
        self._changed = True

    def facts(self, controller: Controller, now_ms: int) -> list[Fact]:
        """What happens to nodes by now, and the next plan if it is due."""
        out: list[Fact] = []
        while self._due and self._due[0][0] <= now_ms:
            _, _, generation, fact = heapq.heappop(self._due)
            name = fact.node.name if isinstance(fact, NodeJoined) else fact.node  # type: ignore[attr-defined]
            if generation != self._generation.get(name, 0):
                continue
            if isinstance(fact, NodeLost):
                self.used.reclaimed += 1
                self._ended(name, now_ms)
                # It can be ordered again.
                out += [fact, NodeJoined(self.offered[name])]
                continue
            if isinstance(fact, NodeJoined) and fact.node.phase == "potential":
                self._ended(name, now_ms)
            elif isinstance(fact, NodeJoined) and fact.node.phase == "ready":
                self._paid[name].idle_since_ms = now_ms
            out.append(fact)
        if self.offered and self._changed and now_ms >= self._planned_ms + controller.scaling.policy.interval_ms:
            self._planned_ms, self._changed = now_ms, bool(out)
            plan = self._strategy(controller, now_ms)
            if not controller.scaling.is_known(plan):
                out.append(CapacityPlanned(plan))
        return out


def plan_on_clone(controller: Controller, now_ms: int) -> CapacityPlan:
    return plan_capacity(clone_controller(controller), now_ms)


def node_per_job(controller: Controller, now_ms: int) -> CapacityPlan:
    """The rule to compare with: for each pending job as many of the smallest nodes that take a member as it has members,
    whatever is free or starting."""
    cluster = controller.cluster
    free = sorted(
        (node for node in cluster.nodes.values() if node.phase == "potential"),
        key=lambda node: (node.cost_milli, node.name),
    )
    starting = sum(order.phase == "starting" for order in cluster.node_orders.values())
    wanted: list[PlannedNode] = []
    for queue in controller.queues.values():
        for gang in queue.gangs.values():
            for _, _, member in gang.needed_members():
                if starting > 0:
                    starting -= 1
                    continue
                request = member.task.request
                fit = next(
                    (n for n in free if all(n.capacity.get(r, 0) >= amount for r, amount in request.items())), None
                )
                if fit is not None:
                    free.remove(fit)
                    wanted.append(PlannedNode(fit.name, (gang.id,)))
    return CapacityPlan(now_ms, tuple(wanted))


FIXED = "fixed"
# By name; a fixed cluster has no nodes that can be ordered.
STRATEGIES: dict[str, Strategy] = {FIXED: plan_on_clone, "planner": plan_on_clone, "node-per-job": node_per_job}
