"""Ordered nodes: from the order until the backend reports them stopped.

The planner (`planner`) says which nodes to order and which to empty. This module carries that out, and decides what needs no
plan: nodes that do not start in time, idle nodes, minimum and warm nodes, groups without capacity.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable
from typing import Any

from msgspec import Struct, structs

from hodei.control.state import ClusterState
from hodei.model.capacity import CapacityOutlook, CapacityPlan, NodeOrder, OrderPhase
from hodei.model.config import CapacityConfig, NodeGroupConfig
from hodei.model.effects import ReleaseNodes, WantNodes
from hodei.model.errors import InvalidInput
from hodei.model.facts import NodeRefused
from hodei.model.ids import JobId, NodeName
from hodei.model.job import JobSpec, Run
from hodei.model.node import Node
from hodei.model.resources import parse_duration_ms

# A node that is told to stop and still runs is told again after this long.
_RELEASE_AGAIN_MS = 300_000
_LONGEST_PAUSE_FACTOR = 16
HOUR_MS = 3_600_000
MAX_NODES = 100_000


class GroupPolicy(Struct, frozen=True):
    """Of one group of nodes. `warm`: so many idle nodes are kept ready. `idle_ms`: how long others stay idle before they
    are released. `startup_ms` 0: what the backend says, or what was measured. `tries`: a node that did not start so often
    is set aside for `pause_ms`, and so is a group without capacity (longer each time)."""

    min: int = 0
    max: int = 10_000
    warm: int = 0
    idle_ms: int = 600_000
    boot_timeout_ms: int = 900_000
    tries: int = 3
    pause_ms: int = 120_000


class CapacityPolicy(Struct, frozen=True):
    """`groups`: by name of a group, else of a backend. `max_cost_milli`: of all ordered nodes per hour; 0: no limit.
    `slack_ms`: no node is ordered for a job that is expected to start this much after a new node would be ready, or
    earlier. `consolidate_percent`: nodes that are used less may be emptied if others can take their work; 0: never.
    `spot`: whether nodes that the provider may take back are ordered: by price and risk, only when nothing else is
    offered, or never."""

    enabled: bool = True
    interval_ms: int = 5000
    groups: dict[str, GroupPolicy] = {}
    default: GroupPolicy = GroupPolicy()
    max_cost_milli: int = 0
    slack_ms: int = 0
    consolidate_percent: int = 50
    spot: str = "allow"

    def of(self, node: Node) -> GroupPolicy:
        return self.groups.get(node.group) or self.groups.get(node.backend) or self.default


class SetAside(Struct, frozen=True):
    """Why a group or a node is not ordered until `until_ms`. `count`: failures in a row."""

    until_ms: int
    count: int
    code: str
    reason: str


class NodeScaling:
    """`is_held`: whether capacity of a node is held for a job that will start there."""

    def __init__(self, cluster: ClusterState, policy: CapacityPolicy, is_held: Callable[[NodeName], bool]) -> None:
        self._cluster, self.policy, self._is_held = cluster, policy, is_held
        self.set_aside: dict[str, SetAside] = {}
        # Measured start-up times by group: the mean, weighted to recent ones.
        self.startup_ms: dict[str, int] = {}
        self.plan = CapacityPlan()
        self.outlooks: dict[JobId, CapacityOutlook] = {}
        self._confirmed: set[NodeName] = set()  # reported as starting by their backend
        self._off: set[NodeName] = set()  # last reported as potential, which is not repeated
        self._due: list[tuple[int, NodeName]] = []
        self._unmet = True  # minimum and warm nodes have to be checked
        cluster.signals.run_opened.append(self._run_opened)
        cluster.signals.run_closed.append(self._run_closed)

    def take_settings(self, other: NodeScaling) -> None:
        self.policy = other.policy
        self._unmet = True
        for order in self._cluster.node_orders.values():
            self._watch(order)

    # What the backends report.

    def joined(self, node: Node, now_ms: int) -> Node:
        """A node as its backend reports it; returns it in its real phase."""
        order = self._cluster.node_orders.get(node.name)
        if not node.group:
            return node
        self._unmet = True
        (self._off.add if node.phase == "potential" else self._off.discard)(node.name)
        if order is None:
            if node.phase == "potential":
                return node
            # Adopted, so that it is released when idle: after a loss of the store it would run on for ever.
            phase: OrderPhase = "ready" if node.phase in ("ready", "draining") else "starting"
            if node.phase == "stopping":
                phase = "stopping"
            ready_ms = now_ms if phase == "ready" else 0
            order = NodeOrder(node, phase, now_ms, now_ms, ready_ms, ready_ms and self._idle_since(node.name, now_ms))
            self._put(order)
            self._cluster.emit("node.adopted", now_ms, node=node.name, backend=node.backend, phase=phase)
            return structs.replace(node, phase=phase)
        if node.phase == "potential":
            return self._reported_off(order, node, now_ms)
        if node.phase == "stopping" and order.phase != "stopping":
            self._change(order, "stopping", now_ms)
            self._cluster.emit("node.stopping", now_ms, node=node.name, reason="its backend stops it")
        elif node.phase == "starting":
            self._confirmed.add(node.name)
        elif node.phase == "ready" and order.phase == "starting":
            order = self._became_ready(order, now_ms)
        return structs.replace(node, phase=self._cluster.node_orders[node.name].phase)

    def _reported_off(self, order: NodeOrder, node: Node, now_ms: int) -> Node:
        if order.phase == "starting" and node.name not in self._confirmed:
            return structs.replace(node, phase="starting")  # the order may not have arrived yet
        reason = ""
        if order.phase == "starting":
            reason = "it stopped before it was ready"
            self._failed(node.name, now_ms, "BOOT_FAILED", reason, self.policy.of(node).tries)
        elif order.phase != "stopping":
            reason = "it was switched off"
        self.ended(order, now_ms, reason)
        return node

    def _became_ready(self, order: NodeOrder, now_ms: int) -> NodeOrder:
        took_ms = now_ms - order.ordered_ms
        group = order.node.group
        before = self.startup_ms.get(group, took_ms)
        self.startup_ms[group] = (3 * before + took_ms) // 4
        self.set_aside.pop(order.name, None)
        self.set_aside.pop(group, None)
        self._confirmed.discard(order.name)
        self._cluster.emit("node.ready", now_ms, node=order.name, took_ms=took_ms)
        order = structs.replace(order, ready_ms=now_ms, idle_ms=self._idle_since(order.name, now_ms))
        return self._change(order, "ready", now_ms)

    def lost(self, name: NodeName, now_ms: int) -> None:
        """Its backend does not offer the node any more."""
        order = self._cluster.node_orders.get(name)
        self._off.discard(name)
        if order is not None:
            self.ended(order, now_ms, "" if order.phase == "stopping" else "its backend does not offer it any more")

    def ended(self, order: NodeOrder, now_ms: int, reason: str) -> None:
        paid_ms, node = now_ms - order.ordered_ms, order.node
        self._confirmed.discard(order.name)
        self._cluster.put_node_order(order, deleted=True)
        detail: dict[str, Any] = {"reason": reason} if reason else {}
        detail |= {"backend": node.backend, "group": node.group}
        detail |= {"paid_ms": paid_ms, "cost_milli": cost_milli(node, paid_ms)}
        self._cluster.emit("node.stopped", now_ms, node=node.name, **detail)
        self._unmet = True

    def restored(self, order: NodeOrder) -> None:
        """Read from the store: the order may not have been sent, so it is sent again."""
        self._cluster.node_orders[order.name] = order
        self._watch(order)
        if order.phase == "starting":
            self._cluster.act(WantNodes(order.node.backend, (order.name,)))
        elif order.phase == "stopping":
            self._cluster.act(ReleaseNodes(order.node.backend, (order.name,)))

    def refused(self, fact: NodeRefused, now_ms: int) -> None:
        """The backend did not start an ordered node."""
        order = self._cluster.node_orders.get(fact.node)
        if order is None or order.phase != "starting":
            return
        key = order.name if fact.permanent else order.node.group
        self._failed(key, now_ms, fact.code, fact.reason, tries=1)
        self._cluster.put_node_order(order, deleted=True)
        self._cluster.emit("node.refused", now_ms, node=order.name, code=fact.code, reason=fact.reason)
        self._cluster.put_node(structs.replace(order.node, phase="potential"))
        self._unmet = True

    def _failed(self, key: str, now_ms: int, code: str, reason: str, tries: int) -> None:
        """Count a failure of a node or group; from the `tries`th in a row on it is set aside, longer each time."""
        count = 1 + (self.set_aside[key].count if key in self.set_aside else 0)
        pause_ms = 0
        if count >= tries:
            pause_ms = self._pause_ms(key) * min(2 ** (count - tries), _LONGEST_PAUSE_FACTOR)
        self.set_aside[key] = SetAside(now_ms + pause_ms, count, code, reason)

    def _pause_ms(self, key: str) -> int:
        node = self._cluster.nodes.get(key)
        policy = self.policy.of(node) if node is not None else self.policy.groups.get(key, self.policy.default)
        return policy.pause_ms

    def problem(self, node: Node, now_ms: int) -> SetAside | None:
        """Why this potential node cannot be ordered now."""
        for key in (node.name, node.group):
            found = self.set_aside.get(key)
            if found is not None and found.until_ms > now_ms:
                return found
        return None

    # What the planner says.

    @property
    def offers_nodes(self) -> bool:
        """Whether any node can be ordered or released."""
        return bool(self._cluster.node_orders) or any(node.group for node in self._cluster.nodes.values())

    def is_known(self, plan: CapacityPlan) -> bool:
        """Whether a plan orders nothing and says what the last one said."""
        return not plan.order and not plan.drain and (plan.outlooks, plan.keep) == (self.plan.outlooks, self.plan.keep)

    def apply(self, plan: CapacityPlan, now_ms: int) -> list[NodeName]:
        """Order the nodes of the plan; returns the nodes to drain."""
        self._unmet = self._unmet or plan.keep != self.plan.keep
        self.plan = plan
        self.outlooks = {each.job: each for each in plan.outlooks}
        for planned in plan.order:
            jobs = [id for id in planned.jobs if id in self._cluster.jobs and self._cluster.jobs[id].state == "pending"]
            if jobs:
                self.order([planned.node], now_ms, jobs)
        drains = []
        for name in plan.drain:
            order = self._cluster.node_orders.get(name)
            if order is not None and order.phase == "ready":
                self._change(order, "draining", now_ms)
                self._cluster.emit("node.draining", now_ms, node=name, reason="other nodes can take its work")
                drains.append(name)
        return drains

    def order(self, names: Iterable[NodeName], now_ms: int, jobs: Collection[JobId] = ()) -> None:
        by_backend: dict[str, list[NodeName]] = {}
        for name in names:
            node = self._cluster.nodes.get(name)
            if node is None or node.phase != "potential" or not self.may_order(node, now_ms):
                continue
            node = structs.replace(node, phase="starting")
            self._cluster.put_node(node)
            self._put(NodeOrder(node, "starting", now_ms, now_ms))
            self._cluster.emit(
                "node.ordered", now_ms, node=name, backend=node.backend, group=node.group, cost_milli=node.cost_milli,
                jobs=list(jobs)[:20],
            )  # fmt: skip
            by_backend.setdefault(node.backend, []).append(name)
        for backend, wanted in by_backend.items():
            self._cluster.act(WantNodes(backend, tuple(wanted)))

    def may_order(self, node: Node, now_ms: int) -> bool:
        if self.problem(node, now_ms) is not None or len(self.members(node.group)) >= self.policy.of(node).max:
            return False
        limit = self.policy.max_cost_milli
        return not limit or self.hourly_cost_milli() + node.cost_milli <= limit

    def hourly_cost_milli(self) -> int:
        return sum(order.node.cost_milli for order in self._cluster.node_orders.values())

    def startup_ms_of(self, node: Node) -> int:
        """Measured, else what its backend says."""
        return self.startup_ms.get(node.group) or node.startup_ms

    def members(self, group: str) -> list[NodeOrder]:
        """The ordered nodes of a group that are not being stopped."""
        orders = self._cluster.node_orders.values()
        return [order for order in orders if order.node.group == group and order.phase != "stopping"]

    # What time brings.

    def expire(self, now_ms: int) -> None:
        while self._due and self._due[0][0] <= now_ms:
            _, name = heapq.heappop(self._due)
            order = self._cluster.node_orders.get(name)
            if order is not None:
                self._check(order, now_ms)
            else:
                self._unmet = True
        if self._unmet:
            self._unmet = False
            for order in list(self._cluster.node_orders.values()):
                if order.phase == "ready" and order.idle_ms and (self._due_ms(order) or 0) <= now_ms:
                    self._check(order, now_ms)  # it was kept while its group had too few idle nodes
            self._keep_minimum(now_ms)

    def _check(self, order: NodeOrder, now_ms: int) -> None:
        at_ms = self._due_ms(order)
        if at_ms is None:
            return
        if at_ms > now_ms:
            self._watch(order)
            return
        if order.phase == "starting":
            minutes = (now_ms - order.ordered_ms) // 60_000
            reason = f"it was not ready after {minutes} min"
            self._failed(order.name, now_ms, "BOOT_TIMEOUT", reason, self.policy.of(order.node).tries)
            self._cluster.emit("node.boot_failed", now_ms, node=order.name, reason=reason)
            self._release(order, now_ms, reason)
        elif order.phase == "stopping" and order.name in self._off:
            self.ended(order, now_ms, "")  # its order never arrived, so its backend has nothing to report
            self._cluster.put_node(structs.replace(order.node, phase="potential"))
        elif order.phase == "stopping":
            self._cluster.emit("node.still_running", now_ms, node=order.name, since_ms=order.changed_ms)
            self._release(order, now_ms, "")
        elif self._busy(order.name):
            heapq.heappush(self._due, (now_ms + 1000, order.name))  # capacity is held: its job is about to start
        elif order.phase == "draining":
            self._release(order, now_ms, "its work was moved")
        elif self._spare(order):
            self._release(order, now_ms, "it was idle")

    def _due_ms(self, order: NodeOrder) -> int | None:
        policy = self.policy.of(order.node)
        match order.phase:
            case "starting":
                return order.ordered_ms + policy.boot_timeout_ms
            case "stopping":
                return order.changed_ms + _RELEASE_AGAIN_MS
            case "draining":
                return order.idle_ms or None
        return order.idle_ms + policy.idle_ms if order.idle_ms else None

    def _spare(self, order: NodeOrder) -> bool:
        """Whether its group keeps enough nodes and enough idle ones without it, and no gang waits with it for others."""
        if order.name in self.plan.keep:
            return False
        policy = self.policy.of(order.node)
        members = self.members(order.node.group)
        idle = sum(each.phase == "ready" and bool(each.idle_ms) for each in members)
        return len(members) > policy.min and idle > policy.warm

    def _release(self, order: NodeOrder, now_ms: int, reason: str) -> None:
        if order.phase != "stopping":
            self._cluster.emit("node.released", now_ms, node=order.name, reason=reason)
        self._change(order, "stopping", now_ms)
        node = self._cluster.nodes.get(order.name)
        if node is not None:
            self._cluster.put_node(structs.replace(node, phase="stopping"))
        self._cluster.act(ReleaseNodes(order.node.backend, (order.name,)))
        self._unmet = True

    def _keep_minimum(self, now_ms: int) -> None:
        """Order what is missing to the minimum and to the warm nodes of each group, the cheapest first."""
        offered: dict[str, list[Node]] = {}
        for node in self._cluster.nodes.values():
            if node.group:
                offered.setdefault(node.group, [])
                if node.phase == "potential":
                    offered[node.group].append(node)
        for group in sorted(offered):
            nodes = sorted(offered[group], key=lambda node: (node.cost_milli, node.name))
            members = self.members(group)
            sample = nodes[0] if nodes else members[0].node if members else None
            if sample is None:
                continue
            policy = self.policy.of(sample)
            idle = sum(order.phase == "starting" or bool(order.idle_ms) for order in members)
            missing = max(policy.min - len(members), policy.warm - idle)
            if missing > 0:
                self.order([node.name for node in nodes[:missing]], now_ms)
                again_ms = [found.until_ms for node in nodes if (found := self.problem(node, now_ms)) is not None]
                if again_ms:
                    heapq.heappush(self._due, (min(again_ms), ""))

    def next_ms(self) -> int | None:
        return self._due[0][0] if self._due else None

    def _watch(self, order: NodeOrder) -> None:
        at_ms = self._due_ms(order)
        if at_ms is not None:
            heapq.heappush(self._due, (at_ms, order.name))

    def _change(self, order: NodeOrder, phase: OrderPhase, now_ms: int) -> NodeOrder:
        order = structs.replace(order, phase=phase, changed_ms=now_ms)
        self._put(order)
        node = self._cluster.nodes.get(order.name)
        if node is not None and node.phase != phase:
            self._cluster.put_node(structs.replace(node, phase=phase))
        return order

    def _put(self, order: NodeOrder) -> None:
        self._cluster.put_node_order(order)
        self._watch(order)

    def _run_opened(self, run: Run, spec: JobSpec) -> None:
        order = self._cluster.node_orders.get(run.node)
        if order is not None and order.idle_ms:
            self._cluster.put_node_order(structs.replace(order, idle_ms=0))
            self._unmet = True

    def _run_closed(self, run: Run, spec: JobSpec) -> None:
        order = self._cluster.node_orders.get(run.node)
        if order is not None and not order.idle_ms and not self._cluster.on_node.get(run.node):
            self._put(structs.replace(order, idle_ms=max(run.finished_ms, order.ready_ms, 1)))

    def _idle_since(self, name: NodeName, now_ms: int) -> int:
        return 0 if self._cluster.on_node.get(name) else now_ms

    def _busy(self, name: NodeName) -> bool:
        return bool(self._cluster.on_node.get(name)) or self._is_held(name)


def cost_milli(node: Node, paid_ms: int) -> int:
    """The price of a node for this long, in thousandths."""
    return -(-node.cost_milli * paid_ms // HOUR_MS)


def capacity_policy(config: CapacityConfig) -> CapacityPolicy:
    """InvalidInput for a value that is out of range."""
    problems = []
    for path, group in (
        ("default", config.default),
        *((f"groups.{name}", each) for name, each in config.groups.items()),
    ):
        if not 0 <= group.min <= group.max <= MAX_NODES:
            problems.append((f"{path}.max", f"min and max are from 0 to {MAX_NODES}, and min is at most max"))
        if not 0 <= group.warm <= group.max:
            problems.append((f"{path}.warm", "from 0 to max"))
        if not 1 <= group.tries <= 100:
            problems.append((f"{path}.tries", "from 1 to 100"))
    if not 0 <= config.consolidate <= 100:
        problems.append(("consolidate", "percent, from 0 to 100"))
    if config.max_cost is not None and not 0 < config.max_cost <= 1e9:
        problems.append(("max_cost", "more than 0 and at most 1,000,000,000 per hour"))
    if parse_duration_ms(config.interval) < 1000:
        problems.append(("interval", "at least 1s"))
    if problems:
        path, text = problems[0]
        raise InvalidInput(
            f"scheduling.capacity.{path}: {text}",
            problems=tuple((f"scheduling.capacity.{path}", text) for path, text in problems),
            hint="docs/reference/configuration.md",
        )
    return CapacityPolicy(
        enabled=config.enabled,
        interval_ms=parse_duration_ms(config.interval),
        groups={name: _group_policy(group) for name, group in config.groups.items()},
        default=_group_policy(config.default),
        max_cost_milli=round((config.max_cost or 0) * 1000),
        slack_ms=parse_duration_ms(config.slack),
        consolidate_percent=config.consolidate,
        spot=config.spot,
    )


def _group_policy(group: NodeGroupConfig) -> GroupPolicy:
    return GroupPolicy(
        group.min,
        group.max,
        group.warm,
        parse_duration_ms(group.idle),
        parse_duration_ms(group.boot_timeout),
        group.tries,
        parse_duration_ms(group.pause),
    )
