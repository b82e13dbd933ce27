"""Gangs under random failures: nodes join and are lost, members fail and are lost, other jobs need their capacity.

Invariants: a core has one user, a pending gang has no runs, no member runs twice, a shrunk gang keeps its minimum; and when
the failures end the gang is complete, succeeds and leaves nothing behind.
"""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from builders import a_node
from hodei.model.facts import JobRequeued, NodeJoined, NodeLost, NodeOverridden
from hodei.model.job import GangRules, Run
from unit.control.harness import EXACT, Harness, a_harness
from unit.control.scenarios import is_empty, mark_running

GANG = 1
SIZE, MINIMUM = 3, 2
NODES = ["n1", "n2", "n3", "n4"]
RULES = {
    "restart": GangRules(),
    "repair": GangRules(on_failure="repair"),
    "repair with a time limit": GangRules(on_failure="repair", assembly_timeout_ms=3000),
    "elastic": GangRules(elastic=True),
    "elastic and repair": GangRules(elastic=True, on_failure="repair"),
}
INCIDENTS = [
    "node lost", "node joins", "node joins", "member lost", "member fails", "job", "job", "job ends",
    "a stopping run ends", "a stopping run ends", "requeue", "restart", "drain", "uncordon",
]  # fmt: skip


class FaultRun:
    def __init__(self, seed: int, rules: GangRules) -> None:
        self.rng, self.rules, self.down = random.Random(seed), rules, list[str]()
        self.harness = a_harness(*[1] * len(NODES), retry=structs.replace(EXACT, max_losses=1000))
        priority = self.rng.choice(["low", "medium", "high"])
        self.harness.submit(
            GANG, cpu="1", count=SIZE, min_count=MINIMUM, gang=rules, retries=1000, priority=priority
        )  # fmt: skip

    def live(self) -> list[Run]:
        """Runs that are placed or running."""
        return sorted((r for r in self.harness.runs.values() if r.state in ("placed", "running")), key=lambda r: r.id)

    def members(self) -> list[Run]:
        return [run for run in self.live() if run.job == GANG]

    def start_placed(self) -> None:
        mark_running(self.harness, *(run.id for run in self.live() if run.state == "placed"))

    def cause(self, incident: str, turn: int) -> None:
        harness, rng = self.harness, self.rng
        stopping = [run.id for run in self.live() if run.stop_reason]
        others = [run.id for run in self.live() if run.job != GANG]
        node = rng.choice(NODES)
        match incident:
            case "node lost" if len(self.down) < len(NODES) - 1 and node not in self.down:
                self.down.append(node)
                harness.step(NodeLost(node))
            case "node joins" if self.down:
                harness.step(NodeJoined(a_node(self.down.pop(), 1, "64Gi")))
            case "member lost" if self.members():
                harness.observe(rng.choice(self.members()).id, "lost", reason_code="lost", reason="vanished")
            case "member fails" if self.members():
                harness.observe(rng.choice(self.members()).id, "failed", 1)
            case "job":
                harness.submit(100 + turn, cpu="1", priority=rng.choice(["low", "medium", "high", "critical"]))
            case "job ends" if others:
                harness.observe(rng.choice(others), "succeeded", 0)
            case "a stopping run ends" if stopping:
                harness.observe(rng.choice(stopping), "failed", 143)
            case "requeue":
                harness.step(JobRequeued(GANG))
            case "restart":
                harness.restart(*(a_node(name, 1, "64Gi") for name in NODES if name not in self.down))
            case "drain":
                harness.step(NodeOverridden(node, drain=True))
            case "uncordon":
                harness.step(NodeOverridden(node, cordon=False))
            case _:
                harness.step()

    def check(self) -> None:
        nodes = [run.node for run in self.live()]
        assert len(nodes) == len(set(nodes)), "two runs on one core"
        members = self.members()
        assert len({run.member for run in members}) == len({run.rank for run in members}) == len(members) <= SIZE
        if self.harness.state(GANG) == "pending":
            assert members == [], "a pending gang with runs"
        elif self.rules.on_failure == "restart" and not any(run.stop_reason for run in members):
            assert len(members) >= MINIMUM, "below the minimum, and none of the members is stopping"

    def settle(self) -> None:
        """All nodes join and all other jobs end, until the gang is complete."""
        for name in NODES:
            if name in self.down:
                self.harness.step(NodeJoined(a_node(name, 1, "64Gi")))
            self.harness.step(NodeOverridden(name, cordon=False))
        for _ in range(400):
            self.harness.advance(5000)
            self.start_placed()
            self.check()
            for run in self.live():
                if run.stop_reason:
                    self.harness.observe(run.id, "failed", 143)
                elif run.job != GANG:
                    self.harness.observe(run.id, "succeeded", 0)
            self.start_placed()
            others = [job for id, job in self.harness.jobs.items() if id != GANG and not job.finished_ms]
            if not others and len(self.members()) >= (SIZE if self.rules.elastic else MINIMUM):
                return
        raise AssertionError(
            f"the gang is not complete: {self.harness.reason(GANG)}, {[run.id for run in self.live()]}"
        )


def run_to_the_end(fault_run: FaultRun, turns: int = 60) -> Harness:
    for turn in range(turns):
        fault_run.harness.now_ms += 1000
        if fault_run.rng.random() < 0.8:
            fault_run.start_placed()
        fault_run.cause(fault_run.rng.choice(INCIDENTS), turn)
        fault_run.check()
    fault_run.settle()
    for run in fault_run.members():
        fault_run.harness.observe(run.id, "succeeded", 0)
        fault_run.start_placed()
    for _ in range(3):
        for run in fault_run.members():
            fault_run.harness.observe(run.id, "succeeded", 0)
        fault_run.harness.advance(60_000)
    return fault_run.harness


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rules", RULES)
def test_a_gang_succeeds_after_random_failures(rules, seed):
    harness = run_to_the_end(FaultRun(seed, RULES[rules]))
    assert (harness.state(GANG), is_empty(harness)) == ("succeeded", True)
