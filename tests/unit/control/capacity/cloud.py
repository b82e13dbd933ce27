"""A harness with nodes that can be ordered: the planner runs on a clone, and a provider starts and stops nodes in time."""

from __future__ import annotations

import heapq
from typing import Any

from msgspec import structs

from builders import a_node
from hodei.control.capacity.planner import plan_capacity
from hodei.control.capacity.scaling import CapacityPolicy, GroupPolicy
from hodei.control.clone import clone_controller
from hodei.control.controller import Step
from hodei.model.capacity import NO_CAPACITY, CapacityPlan, NodeOrder
from hodei.model.effects import ReleaseNodes, SaveNodeOrder, Start, Stop, WantNodes
from hodei.model.facts import CapacityPlanned, Fact, NodeJoined, NodeLost, NodeOrderRestored, NodeRefused, RunObserved
from hodei.model.node import Node
from unit.control.harness import Harness

BOOT_MS = 90_000
STOP_MS = 10_000
HOUR_MS = 3_600_000


def potential(name: str, cpu: int = 4, *, group: str = "small", price: int = 100, **fields: Any) -> Node:
    """`price`: thousandths per hour."""
    return a_node(
        name, cpu, "16Gi", backend="cloud", phase="potential", group=group, cost_milli=price,
        **{"startup_ms": BOOT_MS} | fields,
    )  # fmt: skip


def some_potential(count: int, cpu: int = 4, *, group: str = "small", price: int = 100, **fields: Any) -> list[Node]:
    return [potential(f"{group}-{i}", cpu, group=group, price=price, **fields) for i in range(1, count + 1)]


class Cloud(Harness):
    """`full`: groups without capacity. `broken`: nodes that never start."""

    def __init__(self, *nodes: Node, policy: CapacityPolicy | None = None, **options: Any) -> None:
        self.orders: dict[str, NodeOrder] = {}
        self.offered = {node.name: node for node in nodes if node.group}
        self.full: set[str] = set()
        self.broken: set[str] = set()
        self.wanted: list[str] = []
        self.released: list[str] = []
        self._due: list[tuple[int, int, Fact]] = []
        self._run_ms: dict[int, int] = {}
        super().__init__(*nodes, capacity=policy or CapacityPolicy(), **options)

    def step(self, *facts: Fact) -> Step:
        done = super().step(*facts)
        for save in done.saves:
            if isinstance(save, SaveNodeOrder):
                self.orders.pop(save.order.name, None)
                if not save.deleted:
                    self.orders[save.order.name] = save.order
        for act in done.acts:
            if isinstance(act, WantNodes):
                self._want(act)
            elif isinstance(act, ReleaseNodes):
                self.released += act.nodes
                for name in act.nodes:
                    self.after(STOP_MS, NodeJoined(self.offered[name]))
            elif isinstance(act, Start) and act.run.job in self._run_ms:
                self.after(self._run_ms[act.run.job], RunObserved(act.run.id, "succeeded", 0, 0))
            elif isinstance(act, Stop) and act.run in self.runs:
                self.after(1, RunObserved(act.run, "stopped", 0, 143))
        return done

    def _want(self, act: WantNodes) -> None:
        for name in act.nodes:
            self.wanted.append(name)
            node = self.offered[name]
            if node.group in self.full:
                self.after(1, NodeRefused(name, NO_CAPACITY, f"no {node.group} left"))
            elif name in self.broken:
                self.after(1, NodeJoined(structs.replace(node, phase="starting")))
            else:
                self.after(1, NodeJoined(structs.replace(node, phase="starting")))
                self.after(node.startup_ms, NodeJoined(structs.replace(node, phase="ready")))

    def after(self, ms: int, fact: Fact) -> None:
        heapq.heappush(
            self._due, (self.now_ms + ms, len(self._due) + sum(map(len, (self.wanted, self.released))), fact)
        )

    def runs_for(self, ms: int, *jobs: int) -> None:
        self._run_ms |= dict.fromkeys(jobs, ms)

    def plan(self) -> CapacityPlan:
        """A plan of now, applied."""
        plan = plan_capacity(clone_controller(self.controller), self.now_ms)
        self.step(CapacityPlanned(plan))
        return plan

    def run(self, ms: int, *, every_ms: int = 5000) -> None:
        """Let time pass, with a plan at each interval."""
        end, planned = self.now_ms + ms, self.now_ms
        while self.now_ms < end:
            wake = self.controller.next_wakeup_ms(self.now_ms)
            times = [planned + every_ms, *([self._due[0][0]] if self._due else []), *([wake] if wake else [])]
            self.now_ms = min(max(min(times), self.now_ms), end)
            facts = []
            while self._due and self._due[0][0] <= self.now_ms:
                fact = heapq.heappop(self._due)[2]
                facts.append(structs.replace(fact, at_ms=self.now_ms) if isinstance(fact, RunObserved) else fact)
            self.step(*facts)
            if self.now_ms >= planned + every_ms:
                planned = self.now_ms
                self.plan()

    def restart(self, *nodes: Node) -> Step:
        orders = [NodeOrderRestored(order) for order in self.orders.values()]
        done = super().restart()
        self.step(*orders)
        self.step(*(NodeJoined(node) for node in nodes))
        return done

    def phases(self) -> dict[str, str]:
        """Of all nodes that are not potential."""
        nodes = self.controller.cluster.nodes.values()
        return {node.name: node.phase for node in nodes if node.phase != "potential"}

    def lose(self, name: str, *, reclaimed: bool = False) -> Step:
        return self.step(NodeLost(name, "gone", reclaimed=reclaimed))


def groups(**policies: GroupPolicy) -> CapacityPolicy:
    return CapacityPolicy(groups=policies)
