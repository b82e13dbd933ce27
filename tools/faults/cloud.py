"""A simulated backend with nodes that are ordered: orders are refused, nodes boot late or never, and are taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

from msgspec import structs

from hodei.control.capacity.scaling import CapacityPolicy, GroupPolicy
from hodei.model.capacity import NO_CAPACITY
from hodei.model.effects import Start
from hodei.model.errors import BackendError, BackendRefused
from hodei.model.facts import NodeRefused
from hodei.model.ids import NodeName
from hodei.model.job import JobSpec
from hodei.model.node import Node
from tools.faults.backend import NEVER, FakeBackend
from tools.faults.setup import GIB, Chance

CLOUD = "cloud"
FAULTS = {
    "order is refused": 0.2,
    "node never boots": 0.15,
    "node boots slowly": 0.3,
    "node is taken back": 0.03,
}
INTERVAL_MS, STOP_MS = 5000, 10_000
POLICY = CapacityPolicy(
    interval_ms=INTERVAL_MS,
    default=GroupPolicy(idle_ms=60_000, boot_timeout_ms=120_000, tries=2, pause_ms=10_000),
)


def draw_nodes(rng: Random) -> list[Node]:
    out = []
    for group in ("small", "large")[: rng.choice((1, 2))]:
        cpus, spot = (4, False) if group == "small" else (8, rng.random() < 0.5)
        for number in range(rng.randint(1, 4)):
            labels = {"disk": rng.choice(("ssd", "hdd")), "zone": rng.choice(("a", "b"))}
            node = Node(
                f"{group}-{number}", CLOUD, capacity={"cpu": cpus * 1000, "memory": cpus * GIB}, labels=labels,
                phase="potential", group=group, cost_milli=cpus * 50, startup_ms=20_000, spot=spot,
                losses_milli=100_000 if spot else 0,
            )  # fmt: skip
            out.append(node)
    return out


class CloudBackend(FakeBackend):
    """`offered` has each machine in its phase. A machine that is off has no runs."""

    def __init__(self, nodes: Iterable[Node], chance: Chance, duration_ms: Callable[[JobSpec], int]) -> None:
        super().__init__(CLOUD, nodes, chance, duration_ms)
        self._machines_due: dict[NodeName, tuple[int, Node]] = {}

    def start(self, order: Start, now_ms: int) -> BackendError | BackendRefused | None:
        node = self.offered.get(order.run.node)
        if node is not None and node.phase not in ("ready", "draining") and order.run.id not in self.journal:
            return BackendError(f"{node.name} is not on")
        return super().start(order, now_ms)

    def want(self, name: NodeName, now_ms: int) -> NodeRefused | None:
        """Idempotent by name."""
        node = self.offered.get(name)
        if node is None:
            return NodeRefused(name, "", f"there is no {name}", permanent=True)
        if node.phase != "potential":
            return None
        if self._chance("order is refused"):
            return NodeRefused(name, NO_CAPACITY, f"no {node.group} left")
        self.offered[name] = structs.replace(node, phase="starting")
        if not self._chance("node never boots"):
            late_ms = self._rng.randint(1, 200_000) if self._chance("node boots slowly") else 0
            self._machines_due[name] = (now_ms + node.startup_ms + late_ms, structs.replace(node, phase="ready"))
        return None

    def release(self, name: NodeName, now_ms: int) -> None:
        node = self.offered.get(name)
        if node is not None and node.phase not in ("potential", "stopping"):
            self.offered[name] = structs.replace(node, phase="stopping")
            self._machines_due[name] = (now_ms + STOP_MS, structs.replace(node, phase="potential"))

    def next_ms(self) -> int:
        return min(super().next_ms(), min((at_ms for at_ms, _ in self._machines_due.values()), default=NEVER))

    def advance(self, now_ms: int) -> None:
        super().advance(now_ms)
        for name, (at_ms, node) in sorted(self._machines_due.items()):
            if at_ms <= now_ms:
                del self._machines_due[name]
                self.offered[name] = structs.replace(node, ready=self.offered[name].ready)
                if node.phase == "potential":
                    self._end_runs(name, now_ms)

    def _end_runs(self, name: NodeName, now_ms: int) -> None:
        for entry in self.journal.values():
            if entry.run.node == name and not entry.ended:
                self._end(entry, now_ms, "lost", None, "lost")

    def lose_node(self, name: NodeName, now_ms: int) -> None:
        super().lose_node(name, now_ms)
        self._machines_due.pop(name, None)
        self.lost_nodes[name] = structs.replace(self.lost_nodes[name], phase="potential")

    @property
    def on(self) -> list[NodeName]:
        return sorted(name for name, node in self.offered.items() if node.phase != "potential")
