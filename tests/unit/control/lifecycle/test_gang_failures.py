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
from unit.control.scenarios import is_empty, running

GANG = 1
SIZE, LEAST = 3, 2
NODES = ["n1", "n2", "n3", "n4"]
RULES = {
    "restart": GangRules(),
    "repair": GangRules(on_failure="repair"),
    "repair with a time limit": GangRules(on_failure="repair", assembly_timeout_ms=3000),
    "elastic": GangRules(elastic=True),
    "elastic and repair": GangRules(elastic=True, on_failure="repair"),
}
TROUBLE = [
    "node goes", "node comes", "node comes", "member lost", "member fails", "job", "job", "job ends", "one goes",
    "one goes", "requeue", "restart", "drain", "uncordon",
]  # fmt: skip


class Story:
    def __init__(self, seed: int, rules: GangRules) -> None:
        self.dice, self.rules, self.down = random.Random(seed), rules, list[str]()
        self.harness = a_harness(*[1] * len(NODES), retry=structs.replace(EXACT, max_losses=1000))
        priority = self.dice.choice(["low", "medium", "high"])
        self.harness.submit(
            GANG, cpu="1", count=SIZE, min_count=LEAST, gang=rules, retries=1000, priority=priority
        )  # fmt: skip

    def here(self) -> list[Run]:
        """All that is placed or runs."""
        return sorted((r for r in self.harness.runs.values() if r.state in ("placed", "running")), key=lambda r: r.id)

    def members(self) -> list[Run]:
        return [run for run in self.here() if run.job == GANG]

    def start(self) -> None:
        running(self.harness, *(run.id for run in self.here() if run.state == "placed"))

    def happen(self, what: str, turn: int) -> None:
        harness, dice = self.harness, self.dice
        going = [run.id for run in self.here() if run.stop_reason]
        others = [run.id for run in self.here() if run.job != GANG]
        node = dice.choice(NODES)
        match what:
            case "node goes" if len(self.down) < len(NODES) - 1 and node not in self.down:
                self.down.append(node)
                harness.learn(NodeLost(node))
            case "node comes" if self.down:
                harness.learn(NodeJoined(a_node(self.down.pop(), 1, "64Gi")))
            case "member lost" if self.members():
                harness.see(dice.choice(self.members()).id, "lost", reason_code="lost", reason="gone")
            case "member fails" if self.members():
                harness.see(dice.choice(self.members()).id, "failed", 1)
            case "job":
                harness.submit(100 + turn, cpu="1", priority=dice.choice(["low", "medium", "high", "critical"]))
            case "job ends" if others:
                harness.see(dice.choice(others), "succeeded", 0)
            case "one goes" if going:
                harness.see(dice.choice(going), "failed", 143)
            case "requeue":
                harness.learn(JobRequeued(GANG))
            case "restart":
                harness.restart(*(a_node(name, 1, "64Gi") for name in NODES if name not in self.down))
            case "drain":
                harness.learn(NodeOverridden(node, drain=True))
            case "uncordon":
                harness.learn(NodeOverridden(node, cordon=False))
            case _:
                harness.learn()

    def check(self) -> None:
        nodes = [run.node for run in self.here()]
        assert len(nodes) == len(set(nodes)), "two on one core"
        members = self.members()
        assert len({run.member for run in members}) == len({run.rank for run in members}) == len(members) <= SIZE
        if self.harness.state(GANG) == "pending":
            assert members == [], "half a gang"
        elif self.rules.on_failure == "restart" and not any(run.stop_reason for run in members):
            assert len(members) >= LEAST, "fewer than its least, and none of them told to go"

    def calm_down(self) -> None:
        """All nodes are there, and everyone else ends; until the gang has what it wants."""
        for name in NODES:
            if name in self.down:
                self.harness.learn(NodeJoined(a_node(name, 1, "64Gi")))
            self.harness.learn(NodeOverridden(name, cordon=False))
        for _ in range(400):
            self.harness.later(5000)
            self.start()
            self.check()
            for run in self.here():
                if run.stop_reason:
                    self.harness.see(run.id, "failed", 143)
                elif run.job != GANG:
                    self.harness.see(run.id, "succeeded", 0)
            self.start()
            others = [job for id, job in self.harness.jobs.items() if id != GANG and not job.finished_ms]
            if not others and len(self.members()) >= (SIZE if self.rules.elastic else LEAST):
                return
        raise AssertionError(f"not at rest: {self.harness.reason(GANG)}, {[run.id for run in self.here()]}")


def tell(story: Story, turns: int = 60) -> Harness:
    for turn in range(turns):
        story.harness.now_ms += 1000
        if story.dice.random() < 0.8:
            story.start()
        story.happen(story.dice.choice(TROUBLE), turn)
        story.check()
    story.calm_down()
    for run in story.members():
        story.harness.see(run.id, "succeeded", 0)
        story.start()
    for _ in range(3):
        for run in story.members():
            story.harness.see(run.id, "succeeded", 0)
        story.harness.later(60_000)
    return story.harness


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rules", RULES)
def test_a_gang_comes_through_all_trouble(rules, seed):
    harness = tell(Story(seed, RULES[rules]))
    assert (harness.state(GANG), is_empty(harness)) == ("succeeded", True)
