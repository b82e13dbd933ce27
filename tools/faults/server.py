"""Drives the controller as a server does: learn, decide, commit, act; and make peace with every backend after an outage.

The same order of things as in `runtime`, without waiting for anything. It dies where a process could die.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from hodei.control.admission.gate import AdmissionPolicy
from hodei.control.controller import Controller, Step
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.control.lifecycle.runs import START_FAILED, reconcile
from hodei.model.effects import Act, Forget, Save, Start, Stop, WithdrawStop
from hodei.model.errors import BackendRefused, StaleEpoch, Unavailable
from hodei.model.facts import Fact, JobRestored, NodeJoined, NodeLost, OverridesRestored, RunObserved, StopWithdrawn
from hodei.model.ids import NodeName, RunId
from hodei.model.node import Node
from hodei.plugins.registry import build_profiles
from hodei.store.memory import MemoryStore
from tools.faults.backend import FakeBackend
from tools.faults.randomness import Chance, Wrong
from tools.faults.setup import FaultSetup


class Died(Exception):
    """The server is no more; what was not committed is forgotten."""


class Link:
    """What the server knows of one backend, and the orders that it has not carried out yet."""

    def __init__(self, backend: FakeBackend, chance: Chance) -> None:
        self.backend = backend
        self.up = False
        self.orders: list[Act] = []
        self._nodes: dict[NodeName, Node] = {}
        self._chance = chance
        self._known: dict[RunId, RunObserved] | None = None
        self._lifecycle = 0
        self._told_to_stop: set[RunId] = set()
        self._not_started: set[RunId] = set()  # told already: a later order for one of them must not start it after all

    def look_at_nodes(self) -> list[Fact]:
        found = dict(self.backend.offered)
        facts: list[Fact] = [NodeJoined(node) for name, node in found.items() if self._nodes.get(name) != node]
        facts += [NodeLost(name, "no longer offered by its backend") for name in self._nodes if name not in found]
        self._nodes = found
        return facts

    @property
    def has_news(self) -> bool:
        """Whether nodes came, went or changed since it was last looked at them."""
        return self._nodes != self.backend.offered

    def listen(self, controller: Controller, now_ms: int) -> list[Fact]:
        """One look at the backend: what it says, that it went away, or peace with it now that it is back."""
        if self.up and not (self.backend.reachable and self.backend.lifecycle == self._lifecycle):
            return self._went_down()
        if not self.backend.reachable or self.backend.lifecycle != self._lifecycle:
            self._known = None  # an answer does not outlive its connection
        if not self.backend.reachable:
            return []
        if self.up:
            return [*self.look_at_nodes(), *self.backend.deliver(now_ms)]
        facts: list[Fact] = []
        if self._known is None:
            facts += self.look_at_nodes()
            self._lifecycle = self.backend.lifecycle
            self._known = self.backend.known()
            if self._chance("peace with old news"):
                return facts  # the answer is on its way while the server goes on
        learnt, orders = reconcile(controller.cluster, self.backend.name, self._known, now_ms)
        self.orders += orders
        self._known, self.up = None, True
        self.backend.repeat_ends(now_ms)
        return [*facts, *learnt]

    def _went_down(self) -> list[Fact]:
        self.up, self._known = False, None
        reason = f"backend {self.backend.name} is out of reach"
        self._nodes = {
            n: structs.replace(node, ready=False, not_ready_reason=reason) for n, node in self._nodes.items()
        }
        self.backend.drop_mail()
        return [NodeJoined(node) for node in self._nodes.values()]

    def spare(self, run: RunId) -> list[Fact]:
        """Drop an order to stop that was not sent yet."""
        kept = [act for act in self.orders if not (isinstance(act, Stop) and act.run == run)]
        if len(kept) == len(self.orders) or run in self._told_to_stop:
            return []
        self.orders = kept
        return [StopWithdrawn(run)]

    def carry_out(self, now_ms: int) -> list[RunObserved]:
        """Starts, then stops, then forgets; a kind whose reply was lost is sent again, whole."""
        told: list[RunObserved] = []
        if not self.backend.reachable:
            return told
        acts, self.orders = self.orders, []
        starts = [act for act in acts if isinstance(act, Start)]
        others: list[Act] = [act for act in acts if not isinstance(act, Start)]
        refused = set[RunId]()
        for start in starts:
            if self._chance("reply is lost"):
                # It is not known which of them were accepted; those that come first were.
                self.orders = acts
                return []
            if start.run.id in self._not_started or start.run.id in refused:
                continue
            error = self.backend.start(start, now_ms)
            if error is not None:
                refused.add(start.run.id)
                permanent = isinstance(error, BackendRefused)
                told.append(
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
                self._told_to_stop.add(act.run)
                self.backend.stop(act, now_ms)
            elif isinstance(act, Forget):
                self.backend.forget(act)
        return told


class Server:
    def __init__(
        self, scene: FaultSetup, store: MemoryStore, backends: Mapping[str, FakeBackend], chance: Chance
    ) -> None:
        opened = store.open()
        self.store = store
        self.last_job = opened.last_job
        self.inbox: list[Fact] = []
        self.links = {name: Link(backend, chance) for name, backend in backends.items()}
        self._chance = chance
        self.controller = Controller(
            build_profiles(scene.config),
            admission=AdmissionPolicy("wait"),
            preemption=PreemptionPolicy(enabled=scene.preempts, min_runtime_ms=scene.min_runtime_ms),
            last_event=opened.last_event,
            max_tries=scene.max_tries,
        )

    def memories(self) -> list[Fact]:
        facts: list[Fact] = [OverridesRestored(overrides) for overrides in self.store.overrides()]
        return facts + [JobRestored(job, runs) for job, runs in self.store.active()]

    def decide(self, now_ms: int) -> tuple[list[Fact], Step]:
        facts, self.inbox = self.inbox, []
        step = self.controller.step(now_ms, facts)
        return facts, step

    def commit(self, saves: Sequence[Save]) -> None:
        """Died if it was refused: nothing of it may be acted upon."""
        if self._chance("crash before commit"):
            raise Died("before the commit")
        if self._chance("store is away"):
            raise Died("the store was away")
        if self._chance("store is taken over"):
            MemoryStore(of=self.store).open()
            try:
                self.store.commit(saves)
            except StaleEpoch:
                raise Died("another server took over") from None
            raise Wrong("a server that was shut out could still write")
        if self._chance("store is slow"):
            self.store.close()
            try:
                self.store.commit(saves)
            except Unavailable:
                self.store.open()  # back again: what was decided is written now
            else:
                raise Wrong("a store that is closed was written to")
        if saves:
            self.store.commit(saves)

    def send(self, acts: Sequence[Act]) -> None:
        for act in acts:
            backend = act.run.backend if isinstance(act, Start) else act.backend
            if isinstance(act, WithdrawStop):
                self.inbox += self.links[backend].spare(act.run)
            else:
                self.links[backend].orders.append(act)
