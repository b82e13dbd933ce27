"""From the configuration's nodes to what is offered: data, cost and overcommit, and their mistakes in words."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from builders import a_job_spec, a_run, a_task
from hodei.backends.local import LocalBackend
from hodei.model.config import NodeConfig
from hodei.model.effects import Start
from hodei.model.errors import InvalidInput
from hodei.wire.render import node_view
from hodei.wiring import instant_node, load_config, node_offer

TOML = """
[[nodes]]
name = "big"
cpu = 4
storage = "10Gi"
data = ["imagenet", "words"]
cost = 0.35
overcommit = {cpu = 2.0, disk = 0.5}
"""


def test_data_cost_and_overcommit_reach_the_offer(tmp_path: Path):
    (tmp_path / "config.toml").write_text(TOML)
    (node,) = load_config(tmp_path / "config.toml").nodes
    offer = node_offer(node)
    assert offer.data == ("imagenet", "words")
    assert offer.cost_milli == 350
    assert offer.overcommit_percent == {"cpu": 200, "ephemeral-storage": 50}


@pytest.mark.parametrize("instant", [True, False])
def test_they_reach_the_node_and_its_view_whatever_runs_it(tmp_path: Path, instant: bool):
    (tmp_path / "config.toml").write_text(TOML)
    offer = node_offer(load_config(tmp_path / "config.toml").nodes[0])
    if instant:
        node = instant_node(offer)
    else:
        (node,) = asyncio.run(LocalBackend(home=tmp_path, installation="i", epoch=1, nodes=(offer,)).nodes())
    view = node_view(node, {"cpu": 6000}, 3)
    assert view.capacity["cpu"] == "4"
    assert view.used["cpu"] == "6"
    assert view.overcommit == {"cpu": 2.0, "ephemeral-storage": 0.5}
    assert (view.cost, view.data) == (0.35, ["imagenet", "words"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param({"overcommit": {"cpu": 0.05}}, "an overcommit of 0.05 for cpu", id="too little"),
        pytest.param({"overcommit": {"cpu": 101.0}}, "an overcommit of 101.0 for cpu", id="too much"),
        pytest.param({"overcommit": {"cpu": float("nan")}}, "an overcommit of nan", id="not a number"),
        pytest.param({"overcommit": {"cpu": 2.0, "cpus": 3.0}}, "given twice", id="said twice"),
        pytest.param({"overcommit": {"memry": 2.0}}, "did you mean 'memory'", id="a slip"),
        pytest.param({"cost": -1.0}, "a cost of -1", id="a negative cost"),
        pytest.param({"cost": float("inf")}, "a cost of inf", id="an infinite cost"),
        pytest.param({"data": ("a b",)}, "'a b' is not a name", id="a data set with a space"),
    ],
)
def test_mistakes_name_the_node(given, words):
    with pytest.raises(InvalidInput, match=f"node 'n1': .*{words}"):
        node_offer(NodeConfig("n1", **given))


def test_a_run_is_told_the_class_of_its_own_task(tmp_path: Path):
    best = a_task("a", limits={"cpu": 1000, "memory": 2**30})
    spec = a_job_spec(tasks=(best, a_task("b", cpu="0", memory="0")))
    backend = LocalBackend(home=tmp_path, installation="i", epoch=1)
    told = [
        backend._wire(Start(a_run(member=i, task=task.name), spec, task)).env["HODEI_QOS"]
        for i, task in enumerate(spec.tasks)
    ]
    assert told == ["guaranteed", "best-effort"]
