"""The check of a configuration: every mistake at once, with its line; the same for all ways that a configuration takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hodei.configuration import check_config, load_config, read_config
from hodei.model.config import Config, NodeConfig
from hodei.model.errors import InvalidInput

BAD = """[server]
port = 70000
log_cap = "lots"
[server.limits]
burst_per_token = 1000000000000000000000000000000
headers_timeout = "0s"
[scheduling]
max_losses = 1000000000000000000
fallback_when = "no_room"
[scheduling.profiles.a]
queue = "fairr"
grace = "soon"
weights = {x = 0}
nodes = "a in ("
disable = ["gpu_lats"]
plugins = ["fgd", "no_such"]
[scheduling.escalation]
promote_to = "hgih"
[[scheduling.routes]]
profile = "missing"
[scheduling.quotas.lab]
hard = {cpu = "many", memory = 1000000000000000000000}
[scheduling.budgets.lab]
money = 5
[scheduling.retry]
jitter = 2
[[nodes]]
name = "a"
cpu = "4 cores"
labels = {"a b" = "x", ok = "not ok"}
taints = ["-x:NoSchedule", "gpu"]
[[nodes]]
name = "a"
zone = "eu west"
[[nodes]]
name = "a/b"
cost = 9000000
[backends.big]
kind = "docker"
pids_limit = 100000000000000000000
imge = "x"
cost = -1
[health]
failures = 0
"""
PLACES = {
    2: "server.port", 3: "server.log_cap", 5: "server.limits.burst_per_token", 6: "server.limits.headers_timeout",
    8: "scheduling.max_losses", 9: "scheduling.fallback_when", 11: "scheduling.profiles.a.queue",
    12: "scheduling.profiles.a.grace", 13: "scheduling.profiles.a.weights.x", 14: "scheduling.profiles.a.nodes",
    15: "scheduling.profiles.a.disable", 16: "scheduling.profiles.a.plugins[1]", 18: "scheduling.escalation.promote_to",
    20: "scheduling.routes[0].profile", 22: "scheduling.quotas.lab.hard.", 23: "scheduling.budgets.lab",
    26: "scheduling.retry.jitter", 29: "nodes[0].cpu", 30: "nodes[0].labels.", 31: "nodes[0].taints[",
    33: "nodes[1].name", 34: "nodes[1].zone", 36: "nodes[2].name", 37: "nodes[2].cost",
    40: "backends.big.pids_limit", 41: "backends.big.imge", 42: "backends.big.cost", 44: "health.failures",
}  # fmt: skip


def places(error: InvalidInput) -> set[tuple[int, str]]:
    return {(int(place.split(":")[0].removeprefix("line ")), place.split(": ", 1)[1]) for place, _ in error.problems}


def test_every_mistake_is_reported_at_once_with_its_line(tmp_path: Path):
    (tmp_path / "config.toml").write_text(BAD)
    with pytest.raises(InvalidInput) as caught:
        load_config(tmp_path / "config.toml")
    found = places(caught.value)
    for line, path in PLACES.items():
        assert any(number == line and place.startswith(path) for number, place in found), (line, path, sorted(found))
    assert {number for number, _ in found} == set(PLACES)
    assert (16, "scheduling.profiles.a.plugins[0]") not in found
    text = dict(caught.value.problems)
    assert text["line 2: server.port"] == "out of range: 70000 is not from 0 to 65535"
    assert text["line 8: scheduling.max_losses"] == f"out of range: {10**18} is not from 0 to 1000000000"
    assert "nodes[0] is the other" in text["line 33: nodes[1].name"]


def test_a_yaml_file_is_checked_the_same_way(tmp_path: Path):
    text = f"scheduler:\n  max_queue_time: {10**29}\n  queue_strategy: fifo\nnodes:\n- name: x\n  cpu: -1\n  labels: {{a: b c}}\n"
    (tmp_path / "hodei.yaml").write_text(text)
    with pytest.raises(InvalidInput) as caught:
        load_config(tmp_path / "hodei.yaml")
    assert places(caught.value) == {
        (2, "scheduler.max_queue_time"), (6, "nodes[0].cpu"), (7, "nodes[0].labels.a")
    }  # fmt: skip


@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "x" * 254, "a\nb", "ä"])
def test_a_node_name_is_up_to_253_safe_characters(name: str):
    with pytest.raises(InvalidInput, match="is not a node name"):
        check_config(Config(nodes=(NodeConfig(name),)))
    check_config(Config(nodes=(NodeConfig("Node_1.example-2"), NodeConfig("x" * 253))))


@pytest.mark.parametrize(
    "found",
    [
        {"scheduling": {"profiles": {"a": {"queue": "evil:Queue"}}}},
        {"scheduling": {"profiles": {"a": {"plugins": ["evil:Plugin"]}}}},
        {"scheduling": {"profiles": {"a": {"scores": {"evil:Score": 1}}}}},
        {"scheduling": {"estimates": {"source": "evil:Estimator"}}},
        {"server": {"authenticator": "evil:Authenticator"}},
        {"backends": {"b": {"kind": "evil:Backend"}}},
        {"sinks": {"s": {"kind": "evil:Sink"}}},
        {"collectors": {"evil:Collector": {}}},
    ],
)
def test_code_that_is_not_known_is_not_loaded(found, tmp_path: Path, monkeypatch):
    (tmp_path / "evil.py").write_text("raise SystemExit('loaded')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidInput, match=r"'evil:\w+' is code that the server's configuration file does not name"):
        read_config(found, full=True, known_code={"other:Thing"})


def check(*args: str, home: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hodei.cli.main", "config", "check", *args]
    return subprocess.run(command, env={"HODEI_HOME": str(home)}, capture_output=True, text=True, check=False)


def test_config_check_needs_no_server_and_its_exit_code_is_the_result(tmp_path: Path):
    assert check(home=tmp_path).returncode == 2
    assert check(str(tmp_path / "none.toml"), home=tmp_path).returncode == 2
    (tmp_path / "config.toml").write_text('[[nodes]]\nname = "a"\n')
    valid = check(home=tmp_path)
    assert (valid.returncode, valid.stderr) == (0, "")
    assert valid.stdout == f"{tmp_path}/config.toml has no mistakes: 0 profiles, 1 node, 0 backends\n"
    (tmp_path / "bad.toml").write_text(BAD)
    wrong = check(str(tmp_path / "bad.toml"), "-o", "json", home=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "  line 2: server.port: out of range: 70000 is not from 0 to 65535\n" in wrong.stderr


def test_a_number_of_any_size_is_refused_with_the_range_of_its_key():
    found = {
        "server": {"port": 10**30},
        "scheduling": {"max_losses": 10**400, "profiles": {"a": {"options": {"batch": {"lookahead": 10**30}}}}},
        "backends": {"b": {"kind": "instant", "nodes": 10**19}},
        "sinks": {"jsonl": {"sizes": [1, {"x": 10**30}]}},
    }
    with pytest.raises(InvalidInput) as caught:
        read_config(found, full=True)
    text = dict(caught.value.problems)
    assert text["server.port"] == f"out of range: {10**30} is not from 0 to 65535"
    assert text["scheduling.max_losses"] == "out of range: a number of 400 digits"
    assert set(text) == {
        "server.port", "scheduling.max_losses", "scheduling.profiles.a.options.batch.lookahead", "backends.b.nodes",
        "sinks.jsonl.sizes[1].x",
    }  # fmt: skip


@pytest.mark.parametrize("options", [{"lookahead": 10**15}, {"lookahead": "x"}, {"reservation_depth": 10**9}])
def test_the_options_of_a_batch_queue_have_limits(options):
    found = {"scheduling": {"profiles": {"a": {"queue": "batch", "options": {"batch": options}}}}}
    with pytest.raises(InvalidInput, match=r"^scheduling\.profiles\.a\.queue: .*write a whole number from 1 to 1"):
        read_config(found, full=True)


def test_the_names_of_projects_are_checked_where_they_are_keys():
    tables = {"quotas": {"hard": {"cpu": 1, "cpus": 2}}, "budgets": {"hours": {"gpu": 1}}, "ranges": {}}
    found = {"scheduling": {section: {"a/b": table, "*": {**table, "hard": {"cpu": 1}} if section == "quotas" else table}
                            for section, table in tables.items()}}  # fmt: skip
    with pytest.raises(InvalidInput) as caught:
        read_config(found, full=True)
    assert [path for path, _ in caught.value.problems] == [
        "scheduling.quotas.a/b.hard.cpus", "scheduling.budgets.a/b", "scheduling.ranges.a/b"
    ]  # fmt: skip
