"""Fair share over simulated days: the usage of projects with too many jobs converges to their shares."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import pytest

from builders import a_job_spec, a_node
from hodei.model.config import SchedulingConfig
from hodei.sim.driver import Simulation
from hodei.sim.traces import Arrival, Workload
from hodei.wiring import make_controller

HOUR = 3_600_000
DAY = 24 * HOUR


@dataclass
class Saturated:
    """Every project always has jobs for all nodes, of unequal length; `nodes` of one core each."""

    shares: dict[str, int]
    formula: str
    nodes: int = 8
    days: int = 10

    def run(self, seed: int):
        random_ = random.Random(seed)
        arrivals, id = [], 0
        for project in self.shares:
            hours = 0.0
            while hours < self.days * 24 * self.nodes * 1.2:
                length = random_.choice((0.5, 1, 2, 4))
                id += 1
                hours += length
                spec = a_job_spec(f"job-{id}", project=project, user="ann", estimate_ms=round(length * HOUR))
                arrivals.append(Arrival(0, id, spec, round(length * HOUR)))
        nodes = [a_node(f"n{i}", 1, "4Gi") for i in range(self.nodes)]
        workload = Workload("saturated", sorted(arrivals, key=lambda a: (a.at_ms, a.id)), tuple(nodes))
        accounts = [{"name": name, "shares": shares} for name, shares in self.shares.items()]
        shares = {"enabled": True, "formula": self.formula, "half_life": "1d", "refresh": "5m", "accounts": accounts}
        config = {"profiles": {"default": {"queue": "multifactor"}}, "shares": shares}
        controller = make_controller(msgspec.convert(config, SchedulingConfig))
        Simulation(workload, controller, until_ms=self.days * DAY).run()
        report = controller.accounts.share_report(controller.beat_ms)
        used = {row.account: row.usage for row in report.rows if row.account in self.shares}
        return {name: amount / sum(used.values()) for name, amount in used.items()}


@pytest.mark.parametrize("formula", ["fair_tree", "classic"])
@pytest.mark.parametrize(
    "shares",
    [{"a": 1, "b": 1}, {"a": 3, "b": 1}, {"a": 5, "b": 3, "c": 2}],
    ids=["equal", "three to one", "three projects"],
)
def test_usage_converges_to_the_shares_within_two_percent_after_ten_half_lives(shares, formula):
    ratios = Saturated(shares, formula).run(seed=7)
    for project, due in shares.items():
        assert ratios[project] == pytest.approx(due / sum(shares.values()), abs=0.02), ratios
