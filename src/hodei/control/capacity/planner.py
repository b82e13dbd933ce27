"""The capacity planner: which potential nodes the pending jobs need, and which nodes can be emptied.

It lets the scheduler itself decide on a copy of its state in which potential nodes exist. So gangs, affinity, spreading,
taints, quotas, budgets and the order of the queues count exactly as they do for a start. Three things differ: nothing is
preempted, members are packed, and a gang that does not fit on existing nodes gets the cheapest nodes that take it.

`plan_capacity` changes the controller: call it with a clone, or in a forked child.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from msgspec import structs

from hodei.control.capacity.scaling import HOUR_MS, NodeScaling
from hodei.control.controller import Controller
from hodei.control.queue.backfill import BackfillQueue
from hodei.control.queue.base import SchedulingQueue
from hodei.engine.nodes import Ints, Nodes, Table
from hodei.engine.points import MAX_SCORE, Layout, Layouts, Reads
from hodei.engine.profile import Weighted
from hodei.engine.view import Gang, Member, View
from hodei.model.capacity import CapacityOutlook, CapacityPlan, PlannedNode
from hodei.model.facts import JobSubmitted
from hodei.model.ids import JobId, NodeName, job_of
from hodei.model.job import Checkpoint, Job, JobSpec, Reason
from hodei.model.node import Node
from hodei.model.resources import CPU, GPU, MEMORY

# So many potential nodes of a group are considered in one plan; further ones follow in the next.
_MAX_PER_GROUP = 200
_MAX_STEPS = 20
_MAX_DRAINS = 5
# A run without estimate is assumed to take this long, to compare spot with other prices.
_USUAL_RUN_MS = HOUR_MS


def plan_capacity(controller: Controller, now_ms: int, go_on: Callable[[], bool] = lambda: True) -> CapacityPlan:
    scaling = controller.scaling
    offered = _offered_groups(scaling, controller.cluster.nodes.values(), now_ms)
    pending = any(controller.pending().values())
    drain = () if pending else _nodes_to_drain(controller, now_ms)
    starting = any(order.phase == "starting" for order in controller.cluster.node_orders.values())
    if not pending or not (offered or starting):
        return CapacityPlan(now_ms, drain=drain)
    planner = _Planner(controller, offered, now_ms)
    planner.run(go_on)
    return planner.answer(drain)


def outlooks_of_new_jobs(controller: Controller, specs: Sequence[JobSpec], now_ms: int) -> list[CapacityOutlook | None]:
    """What new nodes would mean for these jobs, if they were submitted now. Changes the controller like `plan_capacity`."""
    first = max(controller.cluster.jobs, default=0) + 1
    jobs = [Job(id, spec, "pending", now_ms, now_ms, queued_ms=now_ms) for id, spec in enumerate(specs, first)]
    controller.step(now_ms, [JobSubmitted(job) for job in jobs])
    found = {outlook.job: outlook for outlook in plan_capacity(controller, now_ms).outlooks}
    return [found.get(job.id) for job in jobs]


def _offered_groups(scaling: NodeScaling, nodes: Iterable[Node], now_ms: int) -> dict[str, list[Node]]:
    """Potential nodes that can be ordered now, by group."""
    groups: dict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        if node.phase == "potential" and node.ready and not node.cordoned and scaling.problem(node, now_ms) is None:
            groups[node.group].append(node)
    spot = scaling.policy.spot
    out = {}
    for group, members in sorted(groups.items()):
        policy = scaling.policy.of(members[0])
        left = policy.max - len(scaling.members(group))
        if left > 0 and not (members[0].spot and spot == "never"):
            members.sort(key=lambda node: (node.cost_milli, node.name))
            out[group] = members[: min(left, _MAX_PER_GROUP)]
    return out


class _Planner:
    def __init__(self, controller: Controller, offered: dict[str, list[Node]], now_ms: int) -> None:
        self._controller, self._offered, self._now_ms = controller, offered, now_ms
        self._scaling = controller.scaling
        self._new = {node.name: node for nodes in offered.values() for node in nodes}
        self._paid_milli = self._scaling.hourly_cost_milli()
        self._forecasts = controller.cluster.availability.forecasts
        self._generation = -1
        self._new_rows = self._costs = np.zeros(0, dtype=np.int64)
        self._group_rows: dict[str, np.ndarray] = {}
        self._placed: dict[JobId, list[NodeName]] = {}
        self._notes: dict[JobId, str] = {}

    def run(self, go_on: Callable[[], bool]) -> None:
        controller, cluster = self._controller, self._controller.cluster
        for order in cluster.node_orders.values():
            if order.phase == "starting":
                cluster.put_node(structs.replace(order.node, phase="ready"))
        for node in self._new.values():
            cluster.put_node(structs.replace(node, phase="ready"))
        controller.preemption.disable()
        self._use_planning_profiles()
        cluster.wake("node_joined")
        for _ in range(_MAX_STEPS):
            plan = controller.step(self._now_ms).plan
            for bind in plan.binds:
                self._placed.setdefault(bind.job, []).append(bind.node)
            if not cluster.unfinished or not go_on():
                return

    def _use_planning_profiles(self) -> None:
        """Pack on what exists, then on the cheapest new nodes. Shapes stay valid: the new plugins read nothing of a member
        but its request."""
        packing, choice = (Weighted(_Packing(self), 1),), _CheapestNodes(self)
        for profile in self._controller.engine.profiles.values():
            structs.force_setattr(profile, "scores", packing)
            structs.force_setattr(profile, "layouts", (*profile.layouts, choice))
        self._controller.engine.use(dict(self._controller.engine.profiles))
        for queue in self._controller.queues.values():
            for gang in _gangs(queue):
                gang.layout_plugins = (*gang.layout_plugins, choice)

    def _find_rows(self, table: Table) -> None:
        """The rows of the new nodes, and of each group, cheapest first."""
        if self._generation == table.generation:
            return
        self._generation = table.generation
        self._group_rows = {
            group: np.array([table.row[node.name] for node in nodes if node.name in table.row], dtype=np.intp)
            for group, nodes in self._offered.items()
        }
        self._new_rows = np.concatenate([np.zeros(0, dtype=np.intp), *self._group_rows.values()])
        self._costs = np.array([node.cost_milli for node in table.nodes], dtype=np.int64)

    def unused(self, table: Table) -> np.ndarray:
        """A mask of the new nodes on which nothing is planned."""
        self._find_rows(table)
        mask = np.zeros(len(table.names), dtype=np.bool_)
        mask[self._new_rows] = table.runs[self._new_rows] == 0
        return mask

    def options(self, gang: Gang, table: Table) -> list[Layout]:
        """First the nodes that exist or are planned already, then these with each group, cheapest first."""
        is_open = ~self.unused(table)
        out = [_layout(gang, is_open)]
        if self._starts_soon(gang):
            return out
        everything = is_open.copy()
        for _, group in sorted((self._price(gang, nodes[0]), group) for group, nodes in self._offered.items()):
            rows = is_open.copy()
            rows[self._affordable(group, table)] = True
            out.append(_layout(gang, rows))
            everything |= rows
        if len(self._offered) > 1:
            out.append(_layout(gang, everything))
        return out

    def _affordable(self, group: str, table: Table) -> np.ndarray:
        """The rows of the unused new nodes of a group that the limit on the cost allows."""
        found: np.ndarray = self._group_rows[group]
        found = found[table.runs[found] == 0]
        limit = self._scaling.policy.max_cost_milli
        if limit:
            used = self._costs[self._new_rows][table.runs[self._new_rows] > 0].sum()
            found = found[: np.searchsorted(np.cumsum(self._costs[found]), limit - self._paid_milli - used, "right")]
        return found

    def _starts_soon(self, gang: Gang) -> bool:
        """Whether it starts on existing nodes before a new one would be ready."""
        start_ms = self._forecasts.get(gang.id)
        if start_ms is None or not self._offered:
            return False
        fastest = min(self._scaling.startup_ms_of(nodes[0]) for nodes in self._offered.values())
        if start_ms > self._now_ms + fastest + self._scaling.policy.slack_ms:
            return False
        self._notes[gang.id] = (
            f"it is expected to start in {max(start_ms - self._now_ms, 0) // 1000} s without a new node"
        )
        return True

    def _price(self, gang: Gang, node: Node) -> tuple[int, int, int, str]:
        """What the gang would cost per hour on nodes like this one, with the work that losses repeat; then how fast it
        would start."""
        count = nodes_needed(gang, node)
        per_hour = node.cost_milli * count
        if node.spot:
            per_hour = round(per_hour * spot_overhead(gang, node, self._scaling.startup_ms_of(node)))
        last = int(node.spot and self._scaling.policy.spot == "last")
        return last, per_hour, self._scaling.startup_ms_of(node), node.group

    def answer(self, drain: tuple[NodeName, ...]) -> CapacityPlan:
        jobs_on: dict[NodeName, list[JobId]] = defaultdict(list)
        orders = self._controller.cluster.node_orders
        keep: set[NodeName] = set()
        outlooks = []
        for job, names in sorted(self._placed.items()):
            new = sorted({name for name in names if name in self._new})
            if new or any(self._starting_ms(name) for name in names):
                keep.update(name for name in names if name in orders and orders[name].phase == "ready")
            for name in new:
                jobs_on[name].append(job)
            if new:
                nodes = [self._new[name] for name in new]
                ready_ms = self._now_ms + max(map(self._scaling.startup_ms_of, nodes))
                cost = sum(node.cost_milli for node in nodes)
                outlooks.append(CapacityOutlook(job, nodes[0].group, len(nodes), ready_ms, cost))
            elif starting := [name for name in names if self._starting_ms(name)]:
                order = self._controller.cluster.node_orders[starting[0]]
                ready_ms = max(map(self._starting_ms, starting))
                outlooks.append(
                    CapacityOutlook(job, order.node.group, len(set(starting)), ready_ms, order.node.cost_milli)
                )
        outlooks += [CapacityOutlook(job, note=text) for job, text in self._notes.items() if job not in self._placed]
        wanted = tuple(PlannedNode(name, tuple(jobs_on[name])) for name in sorted(jobs_on))
        return CapacityPlan(self._now_ms, wanted, drain, tuple(outlooks), tuple(sorted(keep)))

    def _starting_ms(self, name: NodeName) -> int:
        """When an ordered node that is starting will be ready; 0 for other nodes."""
        order = self._controller.cluster.node_orders.get(name)
        if order is None or order.phase != "starting":
            return 0
        return max(order.ordered_ms + self._scaling.startup_ms_of(order.node), self._now_ms)


class _CheapestNodes:
    """A gang uses the nodes that exist, or additionally new ones of the cheapest group that takes it whole."""

    name = "capacity"

    def __init__(self, planner: _Planner) -> None:
        self._planner = planner

    def layouts(self, gang: Gang, table: Table, view: View) -> Layouts:
        reason = Reason(self.name, "NO_CAPACITY_OFFERED", "no group of nodes that can be started takes it")
        return Layouts(self._planner.options(gang, table), reason)


class _Packing:
    """Existing and planned nodes come before new ones, and used ones before empty ones."""

    name = "packing"
    reads: Reads = "usage"

    def __init__(self, planner: _Planner) -> None:
        self._planner = planner

    def key(self, member: Member) -> None:
        return None

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints:
        half = MAX_SCORE // 2
        points: Ints = np.where(self._planner.unused(nodes.table)[nodes.rows], 0, half)
        request = [resource for resource, amount in member.task.request.items() if amount]
        for resource in request:
            points = points + np.minimum(nodes.share(nodes.used(resource), resource), MAX_SCORE) // 2 // len(request)
        return points


def nodes_needed(gang: Gang, node: Node) -> int:
    """How many such nodes the needed members fill, by their requests alone."""
    shares = 0.0
    for member, numbers in zip(gang.members, gang.needed, strict=True):
        request = member.task.request
        fits = min((node.capacity.get(r, 0) // amount for r, amount in request.items() if amount), default=len(numbers))
        shares += len(numbers) / fits if fits else len(numbers)
    return max(-int(-shares // 1), 1)


def spot_overhead(gang: Gang, node: Node, startup_ms: int) -> float:
    """How much longer work takes on nodes that are taken back: each loss repeats half of what is lost, which is the time
    since the last checkpoint or the whole run, and a new start."""
    run_ms = gang.expected_ms or _USUAL_RUN_MS
    checkpoint = gang.job.checkpoint
    lost_ms = run_ms if checkpoint == Checkpoint() else min(checkpoint.every_ms or run_ms, run_ms)
    losses_per_ms = node.losses_milli / 1000 / 1000 / HOUR_MS
    repeated = losses_per_ms * (lost_ms / 2 + startup_ms)
    return 1 / (1 - repeated) if repeated < 0.99 else 100.0


def _gangs(queue: SchedulingQueue | BackfillQueue) -> Iterable[Gang]:
    return queue.gangs.values()


def _layout(gang: Gang, rows: np.ndarray) -> Layout:
    return Layout((rows,) * len(gang.members))


def _nodes_to_drain(controller: Controller, now_ms: int) -> tuple[NodeName, ...]:
    """Nodes whose runs would all fit on other nodes that stay, the least used first. Only work that loses little is moved:
    that of jobs that take checkpoints, and of long-running services."""
    cluster, policy = controller.cluster, controller.scaling.policy
    if not policy.consolidate_percent:
        return ()
    used = {name: _used_percent(cluster.table, name) for name in cluster.node_orders}
    candidates = []
    for order in list(cluster.node_orders.values()):
        if order.phase == "ready" and order.idle_ms:
            cluster.put_node(
                structs.replace(order.node, phase="draining")
            )  # it is released anyway: nothing moves there
        elif (
            order.phase == "ready"
            and used[order.name] < policy.consolidate_percent
            and now_ms - order.ready_ms >= policy.of(order.node).idle_ms
            and len(controller.scaling.members(order.node.group)) > policy.of(order.node).min
        ):
            candidates.append(order)
    candidates.sort(key=lambda order: (used[order.name], -order.node.cost_milli, order.name))
    drained: list[NodeName] = []
    for order in candidates[: 4 * _MAX_DRAINS]:
        jobs = sorted({job_of(run) for run in cluster.on_node[order.name]})
        if all(_moves_cheaply(cluster.jobs[job]) for job in jobs):
            cluster.put_node(structs.replace(order.node, phase="draining"))
            if controller.relocation.hold_elsewhere(jobs, now_ms):
                drained.append(order.name)
            else:
                cluster.put_node(structs.replace(order.node, phase="ready"))
        if len(drained) == _MAX_DRAINS:
            break
    return tuple(drained)


def _moves_cheaply(job: Job) -> bool:
    return job.spec.size == 1 and job.spec.checkpoint != Checkpoint()


def _used_percent(table: Table, name: NodeName) -> int:
    row = table.row.get(name)
    if row is None:
        return 100
    used, capacity = table.usage(row), table.allocatable[row]
    shares = [used.get(r, 0) * 100 // amount for r, amount in capacity.items() if amount and r in (CPU, MEMORY, GPU)]
    return max(shares, default=0)
