"""`hodei sim capacity`: the offer file, its options and its output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hodei.model.errors import InvalidInput
from hodei.sim.__main__ import main
from hodei.sim.clusters import read_offer
from hodei.sim.report import why_no_pictures

OFFER = """
[[groups]]
name = "small"
count = 6
cpu = 8
memory = "32Gi"
cost = 0.4
startup = "90s"
labels = {tier = "small"}
fixed = 2

[[groups]]
name = "spot"
count = 3
cpu = 8
gpu = 2
gpu_type = "A100"
cost = 0.1
startup = "2m"
spot = true
losses_per_hour = 0.5

[capacity]
max_cost = 3.5

[capacity.groups.small]
idle = "3m"
max = 4
"""
JOBS = "id,submit_s,run_s,requested_s,procs\n1,0,600,900,8\n2,10,600,900,8\n3,4000,600,900,16\n"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("jobs.csv").write_text(JOBS)
    Path("offer.toml").write_text(OFFER)


def test_an_offer_has_groups_a_fixed_cluster_and_the_settings_of_the_planner():
    offer = read_offer(Path("offer.toml"))
    assert [node.name for node in offer.nodes] == [*(f"small-{n}" for n in range(6)), *(f"spot-{n}" for n in range(3))]
    small, spot = offer.nodes[0], offer.nodes[-1]
    assert (small.phase, small.group, small.startup_ms, small.cost_milli) == ("potential", "small", 90_000, 400)
    assert (small.labels["tier"], small.spot, small.losses_milli) == ("small", False, 0)
    assert (spot.spot, spot.losses_milli, spot.capacity["gpu"], spot.gpu_type) == (True, 500_000, 2000, "A100")
    assert [(node.name, node.group, node.phase) for node in offer.fixed] == [
        ("small-0", "", "ready"),
        ("small-1", "", "ready"),
    ]
    assert offer.capacity.max_cost_milli == 3500
    assert (offer.capacity.of(small).idle_ms, offer.capacity.of(small).max) == (180_000, 4)


def test_a_yaml_list_of_groups_is_an_offer_too():
    Path("offer.yaml").write_text("- {name: a, count: 2, cpu: 4}\n")
    offer = read_offer(Path("offer.yaml"))
    assert (len(offer.nodes), len(offer.fixed)) == (2, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no nodes"),
        ("- {name: a, startups: 4m}", "did you mean 'startup'"),
        ("- {name: a, startup: soon}", "startup of group 'a'"),
        ("- {name: a, count: 2, fixed: 3}", "fixed = 3"),
        ("- {name: a, losses_per_hour: -1}", "losses_per_hour = -1"),
        ("- {name: a, count: 20000}", "20,000 nodes"),
        ("- {name: a}\n- {name: a}", "two nodes called 'a'"),
        ("group: []", "did you mean 'groups'"),
        ("groups: [{name: a}]\ncapacity: {idle: 3m}", "unknown field `idle`"),
        ("groups: [{name: a}]\ncapacity: {consolidate: 200}", "consolidate"),
    ],
)
def test_an_invalid_offer_is_refused_with_a_reason(text: str, message: str):
    Path("offer.yaml").write_text(text)
    with pytest.raises(InvalidInput) as error:
        read_offer(Path("offer.yaml"))
    assert message in error.value.message
    assert error.value.hint


def run(capsys, *options: str) -> dict:
    assert main(["capacity", "jobs.csv", "--offer", "offer.toml", "--workers", "2", "-o", "json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_strategy_is_one_row_with_cost_and_node_hours(capsys):
    found = run(capsys, "--out", "report", "--waits", "waits.csv")
    fixed, planner, plain = found["results"]
    assert [row["policy"] for row in found["results"]] == ["fixed", "planner", "node-per-job"]
    assert [row["finished"] for row in found["results"]] == [3, 3, 3]
    assert fixed["nodes"] == 2
    assert fixed["node_hours"] == pytest.approx(2 * 4600 / 3600)
    assert fixed["mean_wait_s"] == 0
    assert planner["nodes_started"] >= 2
    assert 0 < planner["wasted_hours"] < planner["node_hours"] < fixed["node_hours"]
    assert planner["cost"] < fixed["cost"]
    assert plain["finished"] == 3
    assert Path("waits.csv").read_text().splitlines()[0].startswith("id,")
    assert "wasted_hours" in Path("report/summary.csv").read_text()
    if not why_no_pictures():
        assert Path("report/nodes.svg").exists()


def test_the_table_shows_cost_and_waste(capsys):
    assert main(["capacity", "jobs.csv", "--offer", "offer.toml", "--strategies", "planner,fixed", "-q"]) == 0
    out = capsys.readouterr().out
    for word in ("cost", "wasted", "started", "planner", "fixed"):
        assert word in out
    assert "bounded" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strategies", "planer"], "did you mean 'planner'"),
        (["--policy", "esay"], "did you mean 'easy'"),
        (["--offer", "none.toml"], "cannot read the offer none.toml"),
        (["--failed-boots", "101"], "0<=x<=100"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(options: list[str], message: str, capsys):
    assert main(["capacity", "jobs.csv", "--offer", "offer.toml", *options]) == 2
    assert message in capsys.readouterr().err
