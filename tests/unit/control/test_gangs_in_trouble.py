"""A gang in a cluster where everything goes wrong: nodes come and go, members fail and are lost, others want its room.

Whatever the dice say: a core has one tenant, a gang that waits has nothing running, no member is there twice, one that
gives members up keeps its least; and when the trouble is over it is whole, ends well and leaves nothing behind.
"""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from builders import a_node
from hodei.model.facts import JobRequeued, NodeJoined, NodeLost, NodeOverridden
from hodei.model.job import GangRules, Run
from unit.control.house import EXACT, House, a_house
from unit.control.scenes import is_empty, running

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
        self.house = a_house(*[1] * len(NODES), retry=structs.replace(EXACT, max_losses=1000))
        priority = self.dice.choice(["low", "medium", "high"])
        self.house.submit(
            GANG, cpu="1", count=SIZE, min_count=LEAST, gang=rules, retries=1000, priority=priority
        )  # fmt: skip

    def here(self) -> list[Run]:
        """All that is placed or runs."""
        return sorted((r for r in self.house.runs.values() if r.state in ("placed", "running")), key=lambda r: r.id)

    def members(self) -> list[Run]:
        return [run for run in self.here() if run.job == GANG]

    def start(self) -> None:
        running(self.house, *(run.id for run in self.here() if run.state == "placed"))

    def happen(self, what: str, turn: int) -> None:
        house, dice = self.house, self.dice
        going = [run.id for run in self.here() if run.stop_requested]
        others = [run.id for run in self.here() if run.job != GANG]
        node = dice.choice(NODES)
        match what:
            case "node goes" if len(self.down) < len(NODES) - 1 and node not in self.down:
                self.down.append(node)
                house.learn(NodeLost(node))
            case "node comes" if self.down:
                house.learn(NodeJoined(a_node(self.down.pop(), 1, "64Gi")))
            case "member lost" if self.members():
                house.see(dice.choice(self.members()).id, "lost", reason_code="lost", reason="gone")
            case "member fails" if self.members():
                house.see(dice.choice(self.members()).id, "failed", 1)
            case "job":
                house.submit(100 + turn, cpu="1", priority=dice.choice(["low", "medium", "high", "critical"]))
            case "job ends" if others:
                house.see(dice.choice(others), "succeeded", 0)
            case "one goes" if going:
                house.see(dice.choice(going), "failed", 143)
            case "requeue":
                house.learn(JobRequeued(GANG))
            case "restart":
                house.restart(*(a_node(name, 1, "64Gi") for name in NODES if name not in self.down))
            case "drain":
                house.learn(NodeOverridden(node, drain=True))
            case "uncordon":
                house.learn(NodeOverridden(node, cordon=False))
            case _:
                house.learn()

    def check(self) -> None:
        nodes = [run.node for run in self.here()]
        assert len(nodes) == len(set(nodes)), "two on one core"
        members = self.members()
        assert len({run.member for run in members}) == len({run.rank for run in members}) == len(members) <= SIZE
        if self.house.state(GANG) == "pending":
            assert members == [], "half a gang"
        elif self.rules.on_failure == "restart" and not any(run.stop_requested for run in members):
            assert len(members) >= LEAST, "fewer than its least, and none of them told to go"

    def calm_down(self) -> None:
        """All nodes are there, and everyone else ends; until the gang has what it wants."""
        for name in NODES:
            if name in self.down:
                self.house.learn(NodeJoined(a_node(name, 1, "64Gi")))
            self.house.learn(NodeOverridden(name, cordon=False))
        for _ in range(400):
            self.house.later(5000)
            self.start()
            self.check()
            for run in self.here():
                if run.stop_requested:
                    self.house.see(run.id, "failed", 143)
                elif run.job != GANG:
                    self.house.see(run.id, "succeeded", 0)
            self.start()
            others = [job for id, job in self.house.jobs.items() if id != GANG and not job.finished_ms]
            if not others and len(self.members()) >= (SIZE if self.rules.elastic else LEAST):
                return
        raise AssertionError(f"not at rest: {self.house.reason(GANG)}, {[run.id for run in self.here()]}")


def tell(story: Story, turns: int = 60) -> House:
    for turn in range(turns):
        story.house.now_ms += 1000
        if story.dice.random() < 0.8:
            story.start()
        story.happen(story.dice.choice(TROUBLE), turn)
        story.check()
    story.calm_down()
    for run in story.members():
        story.house.see(run.id, "succeeded", 0)
        story.start()
    for _ in range(3):
        for run in story.members():
            story.house.see(run.id, "succeeded", 0)
        story.house.later(60_000)
    return story.house


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rules", RULES)
def test_a_gang_comes_through_all_trouble(rules, seed):
    house = tell(Story(seed, RULES[rules]))
    assert (house.state(GANG), is_empty(house)) == ("succeeded", True)
