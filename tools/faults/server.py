"""Drives the controller like a server: receive facts, decide, commit, act, and reconcile with each backend after an outage.

The same order as in `runtime`, without waiting. It crashes where a process could crash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from hodei.control.admission.gate import AdmissionPolicy
from hodei.control.controller import Controller, Step
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.control.lifecycle.runs import START_FAILED, reconcile
from hodei.model.effects import Act, Forget, NodeAct, Save, Start, Stop, WantNodes, WithdrawStop
from hodei.model.errors import BackendRefused, StaleEpoch, Unavailable
from hodei.model.facts import (
    Fact,
    JobRestored,
    NodeJoined,
    NodeLost,
    NodeOrderRestored,
    NodeRefused,
    OverridesRestored,
    RunObserved,
    StopWithdrawn,
)
from hodei.model.ids import NodeName, RunId
from hodei.model.node import Node
from hodei.plugins.registry import build_profiles
from hodei.store.memory import MemoryStore
from tools.faults.backend import FakeBackend
from tools.faults.cloud import POLICY, CloudBackend
from tools.faults.setup import Chance, FaultSetup, InvariantViolated


class Crashed(Exception):
    """The server has ended; uncommitted changes are lost."""


class Link:
    """The server's view of one backend, with the orders that are not sent yet."""

    def __init__(self, backend: FakeBackend, chance: Chance) -> None:
        self.backend = backend
        self.up = False
        self.orders: list[Act] = []
        self._nodes: dict[NodeName, Node] = {}
        self._chance = chance
        self._known: dict[RunId, RunObserved] | None = None
        self._generation = 0
        self._stop_sent: set[RunId] = set()
        self._not_started: set[RunId] = set()  # reported already: a later order must not start them

    def poll_nodes(self) -> list[Fact]:
        found = dict(self.backend.offered)
        facts: list[Fact] = [NodeJoined(node) for name, node in found.items() if self._nodes.get(name) != node]
        facts += [
            NodeLost(name, "no longer offered by its backend", reclaimed=node.spot)
            for name, node in self._nodes.items()
            if name not in found
        ]
        self._nodes = found
        return facts

    @property
    def nodes_changed(self) -> bool:
        """Whether nodes have changed since the last poll."""
        return self._nodes != self.backend.offered

    def poll(self, controller: Controller, now_ms: int) -> list[Fact]:
        """Observations of the backend, its outage, or the reconciliation after it."""
        if self.up and not (self.backend.reachable and self.backend.generation == self._generation):
            return self._mark_down()
        if not self.backend.reachable or self.backend.generation != self._generation:
            self._known = None  # a response is valid for its connection only
        if not self.backend.reachable:
            return []
        if self.up:
            return [*self.poll_nodes(), *self.backend.deliver(now_ms)]
        facts: list[Fact] = []
        if self._known is None:
            facts += self.poll_nodes()
            self._generation = self.backend.generation
            self._known = self.backend.known()
            if self._chance("reconciled with old data"):
                return facts  # the response is delayed while the server continues
        learnt, orders = reconcile(controller.cluster, self.backend.name, self._known, now_ms)
        self.orders += orders
        self._known, self.up = None, True
        self.backend.repeat_ends(now_ms)
        return [*facts, *learnt]

    def _mark_down(self) -> list[Fact]:
        self.up, self._known = False, None
        reason = f"backend {self.backend.name} is unreachable"
        self._nodes = {
            n: structs.replace(node, ready=False, not_ready_reason=reason) for n, node in self._nodes.items()
        }
        self.backend.drop_messages()
        return [NodeJoined(node) for node in self._nodes.values()]

    def withdraw_stop(self, run: RunId) -> list[Fact]:
        """Drop a stop that was not sent yet."""
        kept = [act for act in self.orders if not (isinstance(act, Stop) and act.run == run)]
        if len(kept) == len(self.orders) or run in self._stop_sent:
            return []
        self.orders = kept
        return [StopWithdrawn(run)]

    def send_orders(self, now_ms: int) -> list[Fact]:
        """Orders of nodes, then starts, stops and forgets. A kind whose reply is lost is sent again completely."""
        failed: list[Fact] = []
        if not self.backend.reachable:
            return failed
        acts, self.orders = self.orders, []
        node_acts = [act for act in acts if isinstance(act, NodeAct)]
        acts = [act for act in acts if not isinstance(act, NodeAct)]
        while node_acts:
            failed += self._order_nodes(node_acts[0], now_ms)
            if self._chance("reply is lost"):
                self.orders = [*node_acts, *acts]
                return []
            node_acts.pop(0)
        starts = [act for act in acts if isinstance(act, Start)]
        others: list[Act] = [act for act in acts if not isinstance(act, Start)]
        refused = set[RunId]()
        for start in starts:
            if self._chance("reply is lost"):
                # Which of them were accepted is unknown; the first ones were.
                self.orders = acts
                return [fact for fact in failed if isinstance(fact, NodeRefused)]
            if start.run.id in self._not_started or start.run.id in refused:
                continue
            error = self.backend.start(start, now_ms)
            if error is not None:
                refused.add(start.run.id)
                permanent = isinstance(error, BackendRefused)
                failed.append(
                    RunObserved(
                        start.run.id, "failed", now_ms, None, START_FAILED, error.message, permanent=permanent
                    )
                )  # fmt: skip
        self._not_started |= refused
        for act in sorted(others, key=lambda act: isinstance(act, Forget)):
            if self._chance("reply is lost"):
                self.orders = others
                break
            if isinstance(act, Stop):
                self._stop_sent.add(act.run)
                self.backend.stop(act, now_ms)
            elif isinstance(act, Forget):
                self.backend.forget(act)
        return failed

    def _order_nodes(self, act: Act, now_ms: int) -> list[Fact]:
        backend = self.backend
        assert isinstance(backend, CloudBackend)
        assert isinstance(act, NodeAct)
        if isinstance(act, WantNodes):
            answers = [backend.want(name, now_ms) for name in act.nodes]
            return [answer for answer in answers if answer is not None]
        for name in act.nodes:
            backend.release(name, now_ms)
        return []


class Server:
    def __init__(
        self, setup: FaultSetup, store: MemoryStore, backends: Mapping[str, FakeBackend], chance: Chance
    ) -> None:
        opened = store.open()
        self.store = store
        self.last_job = opened.last_job
        self.inbox: list[Fact] = []
        self.links = {name: Link(backend, chance) for name, backend in backends.items()}
        self._chance = chance
        self.controller = Controller(
            build_profiles(setup.config),
            admission=AdmissionPolicy("wait"),
            preemption=PreemptionPolicy(enabled=setup.preempts, min_runtime_ms=setup.min_runtime_ms),
            last_event=opened.last_event,
            max_tries=setup.max_tries,
            capacity=POLICY,
        )

    def stored_facts(self) -> list[Fact]:
        facts: list[Fact] = [OverridesRestored(overrides) for overrides in self.store.overrides()]
        facts += [JobRestored(job, runs) for job, runs in self.store.active()]
        return facts + [NodeOrderRestored(order) for order in self.store.node_orders()]

    def decide(self, now_ms: int) -> tuple[list[Fact], Step]:
        facts, self.inbox = self.inbox, []
        step = self.controller.step(now_ms, facts)
        return facts, step

    def commit(self, saves: Sequence[Save]) -> None:
        """Crashed if it is refused: nothing of it may be carried out."""
        if self._chance("crash before commit"):
            raise Crashed("before the commit")
        if self._chance("store is away"):
            raise Crashed("the store was away")
        if self._chance("store is taken over"):
            MemoryStore(of=self.store).open()
            try:
                self.store.commit(saves)
            except StaleEpoch:
                raise Crashed("another server took over") from None
            raise InvariantViolated("a fenced server could still write")
        if self._chance("store is slow"):
            self.store.close()
            try:
                self.store.commit(saves)
            except Unavailable:
                self.store.open()  # available again: the decision is written now
            else:
                raise InvariantViolated("a closed store was written")
        if saves:
            self.store.commit(saves)

    def send(self, acts: Sequence[Act]) -> None:
        for act in acts:
            backend = act.run.backend if isinstance(act, Start) else act.backend
            if isinstance(act, WithdrawStop):
                self.inbox += self.links[backend].withdraw_stop(act.run)
            else:
                self.links[backend].orders.append(act)
