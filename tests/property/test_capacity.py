"""Nodes that are ordered, fail, are taken back and are released, with restarts in between: every job ends, no member runs twice
at once, nothing runs on a node that is not on, and no node is paid for and idle longer than configured."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from hypothesis import given, note
from hypothesis import strategies as st
from msgspec import structs

from hodei.control.capacity.planner import plan_capacity
from hodei.control.capacity.scaling import CapacityPolicy, GroupPolicy
from hodei.control.clone import clone_controller
from hodei.control.controller import Step
from hodei.model.capacity import NO_CAPACITY, NodeOrder
from hodei.model.effects import ReleaseNodes, SaveNodeOrder, Start, Stop, WantNodes
from hodei.model.facts import CapacityPlanned, Fact, NodeJoined, NodeLost, NodeOrderRestored, NodeRefused, RunObserved
from hodei.model.ids import parse_run_id
from hodei.model.job import JOB_ENDED, Checkpoint
from hodei.model.node import Node
from property.examples import examples
from unit.control.capacity.cloud import potential
from unit.control.harness import Harness

SECOND, MINUTE = 1000, 60_000
IDLE_MS, INTERVAL_MS, STOP_MS, BOOT_TIMEOUT_MS = 2 * MINUTE, 5 * SECOND, 10 * SECOND, 4 * MINUTE
SMALL_MAX, LARGE_MAX = 4, 2
SMALL_PRICE, LARGE_PRICE = 100, 350


class Provider(Harness):
    """`state`: what each machine really does, `live`: what really runs on it. `full` and `broken` groups fail."""

    def __init__(self, max_cost_milli: int, consolidate: int) -> None:
        small = [potential(f"small-{n}", 4, price=SMALL_PRICE, startup_ms=MINUTE) for n in range(6)]
        large = [
            potential(f"large-{n}", 16, group="large", price=LARGE_PRICE, startup_ms=2 * MINUTE, spot=True,
                      losses_milli=100_000)
            for n in range(3)
        ]  # fmt: skip
        self.offered: dict[str, Node] = {node.name: node for node in [*small, *large]}
        self.orders: dict[str, NodeOrder] = {}
        self.state = dict.fromkeys(self.offered, "off")
        self.idle_ms: dict[str, int] = {}
        self.live: dict[str, str] = {}
        self.full: set[str] = set()
        self.broken: set[str] = set()
        self.run_ms: dict[int, int] = {}
        self.max_cost_milli = max_cost_milli
        self._due: list[tuple[int, int, Callable[[], Fact | None]]] = []
        self._numbers = count()
        self._planned_ms = 0
        self._boots = dict.fromkeys(self.offered, 0)
        group = GroupPolicy(idle_ms=IDLE_MS, boot_timeout_ms=BOOT_TIMEOUT_MS, tries=2, pause_ms=30 * SECOND)
        policy = CapacityPolicy(
            interval_ms=INTERVAL_MS,
            groups={"small": structs.replace(group, max=SMALL_MAX), "large": structs.replace(group, max=LARGE_MAX)},
            max_cost_milli=max_cost_milli,
            consolidate_percent=consolidate,
        )
        super().__init__(capacity=policy)
        self.step(*(NodeJoined(node) for node in self.offered.values()))

    def step(self, *facts: Fact) -> Step:
        done = super().step(*facts)
        for save in done.saves:
            if isinstance(save, SaveNodeOrder):
                self.orders.pop(save.order.name, None)
                if not save.deleted:
                    self.orders[save.order.name] = save.order
        for act in done.acts:
            if isinstance(act, WantNodes):
                for name in act.nodes:
                    self._want(name)
            elif isinstance(act, ReleaseNodes):
                for name in act.nodes:
                    self._stop(name)
            elif isinstance(act, Start):
                self._start_run(act)
            elif isinstance(act, Stop) and act.run in self.live:
                self.after(1, lambda run=act.run: self._end_run(run, "stopped", 143))
        self._check_orders()
        return done

    def after(self, ms: int, happen: Callable[[], Fact | None]) -> None:
        heapq.heappush(self._due, (self.now_ms + ms, next(self._numbers), happen))

    # What the machines do.

    def _want(self, name: str) -> None:
        assert name in self.orders, "it was stored before it was sent"
        node = self.offered[name]
        if self.state[name] != "off":
            return
        if node.group in self.full:
            self.after(1, lambda: NodeRefused(name, NO_CAPACITY, "none left"))
            return
        self.state[name] = "starting"
        self._boots[name] += 1
        boot = self._boots[name]
        self.after(1, lambda: self._report(name) if self.state[name] == "starting" else None)
        if node.group not in self.broken:
            self.after(node.startup_ms, lambda: self._boot(name, boot))

    def _boot(self, name: str, boot: int) -> Fact | None:
        if self.state[name] != "starting" or self._boots[name] != boot:
            return None
        self.state[name], self.idle_ms[name] = "on", self.now_ms
        return self._report(name)

    def _report(self, name: str) -> Fact:
        phase = {"off": "potential", "on": "ready"}.get(self.state[name], self.state[name])
        return NodeJoined(structs.replace(self.offered[name], phase=phase))

    def _stop(self, name: str) -> None:
        assert not self._here(name), f"{name} is released while {self._here(name)} run on it"
        if self.state[name] == "off":
            self.after(1, lambda: self._report(name))
        elif self.state[name] != "stopping":
            self.state[name] = "stopping"
            self.idle_ms.pop(name, None)
            self.after(STOP_MS, lambda: self._switch_off(name))

    def _switch_off(self, name: str) -> Fact:
        for run in self._here(name):
            del self.live[run]
        self.state[name] = "off"
        self.idle_ms.pop(name, None)
        return self._report(name)

    def _here(self, name: str) -> list[str]:
        return [run for run, node in self.live.items() if node == name]

    def _start_run(self, act: Start) -> None:
        run, name = act.run, act.run.node
        assert self.state[name] == "on", f"{run.id} is started on {name}, which is {self.state[name]}"
        twins = [other for other in self.live if parse_run_id(other)[:2] == (run.job, run.member)]
        assert not twins, f"{run.id} runs at the same time as {twins}"
        self.live[run.id] = name
        self.idle_ms.pop(name, None)
        self.after(self.run_ms[run.job], lambda: self._end_run(run.id, "succeeded", 0))

    def _end_run(self, run: str, state: Any, exit_code: int) -> Fact | None:
        name = self.live.pop(run, None)
        if name is None:
            return None
        if not self._here(name):
            self.idle_ms[name] = self.now_ms
        return RunObserved(run, state, self.now_ms, exit_code)

    # What goes wrong.

    def on(self) -> list[str]:
        return sorted(name for name, state in self.state.items() if state == "on")

    def reclaim(self, name: str) -> None:
        """Its provider takes it back and offers it again later."""
        self._switch_off(name)
        self.step(NodeLost(name, "taken back", reclaimed=True))
        self.step(self._report(name))

    def switch_off(self, name: str) -> None:
        self.step(self._switch_off(name))

    def restart(self, *nodes: Any) -> Step:
        orders = dict(self.orders)
        super().restart()
        done = self.step(*(NodeOrderRestored(order) for order in orders.values()))
        self.step(*(self._report(name) for name in self.offered))
        return done

    # Time.

    def pass_time(self, ms: int) -> None:
        end, steps = self.now_ms + ms, 0
        while self.now_ms < end:
            steps += 1
            assert steps < 100 + ms // 500, f"no progress: {self.controller.next_wakeup_ms(self.now_ms)}"
            wake = self.controller.next_wakeup_ms(self.now_ms)
            times = [self._planned_ms + INTERVAL_MS, end, *([wake] if wake else [])]
            times += [self._due[0][0]] if self._due else []
            self.now_ms = max(min(times), self.now_ms)
            facts: list[Fact] = []
            while self._due and self._due[0][0] <= self.now_ms:
                fact = heapq.heappop(self._due)[2]()
                facts += [fact] if fact is not None else []
            self.step(*facts)
            if self.now_ms >= self._planned_ms + INTERVAL_MS:
                self._planned_ms = self.now_ms
                if not self.orders and not any(self.controller.pending().values()):
                    continue  # nothing to order or to release
                self.step(CapacityPlanned(plan_capacity(clone_controller(self.controller), self.now_ms)))
            self._check_idle()

    def _check_idle(self) -> None:
        for name, since_ms in self.idle_ms.items():
            if name in self.controller.scaling.plan.keep:
                continue  # its gang waits for further nodes, which start or are given up in time
            idle_ms = self.now_ms - since_ms
            assert idle_ms <= IDLE_MS + INTERVAL_MS, f"{name} is idle and paid for since {idle_ms} ms"

    def _check_orders(self) -> None:
        for group, most in (("small", SMALL_MAX), ("large", LARGE_MAX)):
            used = [o for o in self.orders.values() if o.node.group == group and o.phase != "stopping"]
            assert len(used) <= most, f"{len(used)} nodes of {group}, at most {most}"
        cost = sum(order.node.cost_milli for order in self.orders.values())
        assert not self.max_cost_milli or cost <= self.max_cost_milli
        for name, state in self.state.items():
            assert state in ("off", "stopping") or name in self.orders, f"{name} is {state} and nobody pays attention"


cpus = st.sampled_from(("1", "2", "4"))
events = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), cpus, st.sampled_from((1, 1, 1, 2, 3)), st.integers(1, 400)),
        st.tuples(st.just("pass"), st.integers(1, 300)),
        st.tuples(st.just("reclaim"), st.integers(0, 8)),
        st.tuples(st.just("switch off"), st.integers(0, 8)),
        st.tuples(st.sampled_from(("full", "broken")), st.sampled_from(("small", "large"))),
        st.tuples(st.just("restart")),
    ),
    max_size=20,
)


@given(events, st.sampled_from((0, 350, 800)), st.sampled_from((0, 50, 100)))
@examples(100)
def test_jobs_end_and_no_node_is_paid_for_longer_than_configured(
    events: list[tuple[Any, ...]], max_cost_milli: int, consolidate: int
):
    cloud = Provider(max_cost_milli, consolidate)
    jobs = 0
    for kind, *values in events:
        note(f"{cloud.now_ms} {kind} {values}")
        if kind == "submit":
            jobs += 1
            cpu, members, seconds = values
            cloud.run_ms[jobs] = seconds * SECOND
            moves = {"checkpoint": Checkpoint(signal="USR1")} if seconds % 2 else {}
            cloud.submit(jobs, cpu=cpu, count=members, memory="1Gi", **moves)
        elif kind == "pass":
            cloud.pass_time(values[0] * SECOND)
        elif kind in ("reclaim", "switch off") and (on := cloud.on()):
            (cloud.reclaim if kind == "reclaim" else cloud.switch_off)(on[values[0] % len(on)])
        elif kind in ("full", "broken"):
            getattr(cloud, kind).symmetric_difference_update(values)
        elif kind == "restart":
            cloud.restart()
    cloud.full.clear()
    cloud.broken.clear()
    for _ in range(200):
        if all(job.state in JOB_ENDED for job in cloud.jobs.values()):
            break
        cloud.pass_time(MINUTE)
    assert {job.id: job.state for job in cloud.jobs.values() if job.state not in JOB_ENDED} == {}
    cloud.pass_time(IDLE_MS + BOOT_TIMEOUT_MS + MINUTE)
    assert (cloud.orders, cloud.on(), cloud.live) == ({}, [], {})
