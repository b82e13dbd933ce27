"""A simulated backend: it keeps a journal, starts and ends runs in simulated time, and injects faults.

It keeps the contract of the port (idempotent by run id, ends repeated until forgotten) and nothing more. It says nothing
about processes, sockets or clocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count

from msgspec import structs

from hodei.model.effects import Forget, Start, Stop
from hodei.model.errors import BackendError, BackendRefused
from hodei.model.facts import RunObserved
from hodei.model.ids import NodeName, RunId
from hodei.model.job import RUN_ENDED, JobSpec, Run, RunState, TaskSpec
from hodei.model.node import Node
from tools.faults.setup import Chance, InvariantViolated

NEVER = 1 << 62


class Entry:
    """One run in the journal, `placed` until it starts."""

    __slots__ = (
        "begins_ms",
        "ends_ms",
        "exit_code",
        "outcome",
        "reason_code",
        "run",
        "spec",
        "state",
        "task",
        "times",
        "unanswered",
    )

    def __init__(self, order: Start, begins_ms: int) -> None:
        self.run: Run = order.run
        self.spec: JobSpec = order.spec
        self.task: TaskSpec = order.task
        self.state: RunState = "placed"
        self.begins_ms, self.ends_ms = begins_ms, NEVER
        self.outcome: RunState = "succeeded"
        self.exit_code: int | None = 0
        self.reason_code = ""
        self.unanswered = False
        self.times = [0, 0]

    @property
    def ended(self) -> bool:
        return self.state in RUN_ENDED

    def observation(self) -> RunObserved:
        at_ms = self.times[1] if self.ended else self.times[0]
        return RunObserved(
            self.run.id,
            self.state,
            at_ms,
            self.exit_code if self.ended else None,
            self.reason_code if self.ended else "",
        )


class FakeBackend:
    def __init__(self, name: str, nodes: Iterable[Node], chance: Chance, duration_ms: Callable[[JobSpec], int]) -> None:
        self.name = name
        self.offered: dict[NodeName, Node] = {node.name: node for node in nodes}
        self.lost_nodes: dict[NodeName, Node] = {}
        self.reachable = True
        self.generation = 1  # grows when the journal was lost, which connected servers notice
        self.journal: dict[RunId, Entry] = {}
        self._forgotten: set[RunId] = set()  # they must never start again
        self._messages: list[tuple[int, int, RunObserved]] = []
        self._numbers = count()
        self._chance, self._rng, self._duration_ms = chance, chance.rng, duration_ms

    def start(self, order: Start, now_ms: int) -> BackendError | BackendRefused | None:
        id, chance = order.run.id, self._chance
        known = self.journal.get(id)
        if known is not None:
            if known.run.node != order.run.node:
                raise InvariantViolated(f"run {id} is ordered on {order.run.node}, and was on {known.run.node}")
            return None
        if order.run.node not in self.offered:
            return BackendError(f"{order.run.node} does not exist")
        if chance("start is refused"):
            return BackendRefused("never") if self._rng.random() < 0.15 else BackendError("not now")
        entry = self.journal[id] = Entry(order, now_ms)
        if chance("start is never answered"):
            entry.begins_ms, entry.unanswered = NEVER, True
        elif chance("start is slow"):
            entry.begins_ms += self._rng.randint(1, 30_000)
        self.advance(now_ms)
        return None

    def stop(self, order: Stop, now_ms: int) -> None:
        entry = self.journal.get(order.run)
        if entry is None or entry.ended:
            return
        if entry.state == "placed":
            self._end(entry, now_ms, "stopped", None, "killed")
            return
        grace = self._rng.randint(0, order.grace_ms) if self._chance("stop is slow") else 0
        if now_ms + grace < entry.ends_ms:
            entry.ends_ms = now_ms + grace
            if not self._chance("stop comes too late"):
                entry.outcome, entry.exit_code, entry.reason_code = "stopped", 143, "killed"
        self.advance(now_ms)

    def forget(self, order: Forget) -> None:
        entry = self.journal.get(order.run)
        if entry is not None:
            if not entry.ended:
                raise InvariantViolated(f"run {order.run} is forgotten while it is {entry.state}")
            del self.journal[order.run]
            self._forgotten.add(order.run)

    def known(self) -> dict[RunId, RunObserved]:
        return {id: entry.observation() for id, entry in self.journal.items()}

    def next_ms(self) -> int:
        """The time of the next change or message."""
        alive = [entry for entry in self.journal.values() if not entry.ended]
        times = [entry.begins_ms if entry.state == "placed" else entry.ends_ms for entry in alive]
        if self._messages and self.reachable:
            times.append(self._messages[0][0])
        return min(times, default=NEVER)

    def advance(self, now_ms: int) -> None:
        for entry in self.journal.values():
            if entry.state == "placed" and entry.begins_ms <= now_ms:
                self._begin(entry)
            if entry.state == "running" and entry.ends_ms <= now_ms:
                self._end(entry, entry.ends_ms, entry.outcome, entry.exit_code, entry.reason_code)

    def _begin(self, entry: Entry) -> None:
        if entry.run.id in self._forgotten:
            raise InvariantViolated(f"run {entry.run.id} runs a second time")
        entry.state, entry.times[0] = "running", entry.begins_ms
        entry.ends_ms = entry.begins_ms + self._duration_ms(entry.spec)
        if self._chance("run fails"):
            entry.outcome, entry.exit_code = "failed", self._rng.choice((1, 3, 137))
            entry.reason_code = self._rng.choice(("", "", "oom", "timeout"))
        elif self._chance("run is lost"):
            entry.outcome, entry.exit_code, entry.reason_code = "lost", None, "lost"
        elif self._chance("run stops by itself"):
            entry.outcome, entry.exit_code, entry.reason_code = "stopped", 143, "killed"
        self._report(entry, entry.begins_ms)

    def _end(self, entry: Entry, at_ms: int, state: RunState, exit_code: int | None, reason_code: str) -> None:
        entry.state, entry.times[1] = state, at_ms
        entry.exit_code, entry.reason_code = exit_code, reason_code
        self._report(entry, at_ms)

    def _report(self, entry: Entry, at_ms: int) -> None:
        late = self._rng.randint(1, 20_000) if self._chance("observation late") else 0
        self._post(at_ms + late, entry.observation())
        if self._chance("observation twice"):
            self._post(at_ms + late + self._rng.randint(0, 10_000), entry.observation())

    def _post(self, at_ms: int, seen: RunObserved) -> None:
        heapq.heappush(self._messages, (at_ms, next(self._numbers), seen))

    def deliver(self, now_ms: int) -> list[RunObserved]:
        out = []
        while self._messages and self._messages[0][0] <= now_ms:
            out.append(heapq.heappop(self._messages)[2])
        if len(out) > 1 and self._chance("observations out of order"):
            self._rng.shuffle(out)
        return out

    def drop_messages(self) -> None:
        """Without a receiver most messages are lost."""
        self._messages = [message for message in self._messages if self._rng.random() < 0.3]
        heapq.heapify(self._messages)

    def repeat_ends(self, now_ms: int) -> None:
        """After a reconnect ends are reported again until they are forgotten."""
        for entry in self.journal.values():
            if entry.ended:
                self._post(now_ms, entry.observation())

    def lose_node(self, name: NodeName, now_ms: int) -> None:
        self.lost_nodes[name] = self.offered.pop(name)
        wiped = self._chance("journal lost with the node")
        self.generation += wiped
        for id, entry in list(self.journal.items()):
            if entry.run.node == name:
                if wiped:
                    del self.journal[id]
                elif not entry.ended:
                    self._end(entry, now_ms, "lost", None, "lost")

    def bring_back(self, name: NodeName) -> None:
        self.offered[name] = self.lost_nodes.pop(name)

    def end_faults(self, now_ms: int) -> None:
        """Restore nodes and the connection; starts without an answer proceed."""
        self.reachable = True
        for name in list(self.lost_nodes):
            self.bring_back(name)
        for name, node in list(self.offered.items()):
            self.offered[name] = structs.replace(node, ready=True, not_ready_reason="", not_ready_code="")
        for entry in self.journal.values():
            if entry.unanswered and entry.state == "placed":
                entry.begins_ms = now_ms
