"""From the nodes of the configuration to the offered nodes: data, cost, overcommit, and errors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from builders import a_job_spec, a_run, a_task
from hodei.api.views import SocketView
from hodei.backends.agent_calls import start_order
from hodei.backends.local import LocalBackend
from hodei.configuration import check_scheduling, load_config, node_offer
from hodei.jobfile.render import node_view
from hodei.model.config import Config, NodeConfig, ProfileConfig, SchedulingConfig, ServerConfig
from hodei.model.config import SocketConfig as S
from hodei.model.effects import Start
from hodei.model.errors import InvalidInput
from hodei.model.node import Socket
from hodei.wiring import decision_log_path, instant_node, make_service

TOML = """
[[nodes]]
name = "big"
cpu = 4
storage = "10Gi"
data = ["imagenet", "words"]
cost = 0.35
overcommit = {cpu = 2.0, disk = 0.5}
gpu = 3
sockets = [{cpus = "0-1", gpus = "0,2"}, {cpus = [3, 2], gpus = 1}]
address = "10.0.0.7"
"""


def test_the_settings_of_a_node_are_in_its_offer(tmp_path: Path):
    (tmp_path / "config.toml").write_text(TOML)
    (node,) = load_config(tmp_path / "config.toml").nodes
    offer = node_offer(node)
    assert offer.data == ("imagenet", "words")
    assert offer.cost_milli == 350
    assert offer.overcommit_percent == {"cpu": 200, "ephemeral-storage": 50}
    assert offer.sockets == (Socket((0, 1), (0, 2)), Socket((2, 3), (1,)))
    assert offer.address == "10.0.0.7"


@pytest.mark.parametrize("instant", [True, False])
def test_the_settings_of_a_node_are_in_the_node_and_its_view(tmp_path: Path, instant: bool):
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
    assert view.sockets == [SocketView([0, 1], [0, 2]), SocketView([2, 3], [1])]
    assert view.address == "10.0.0.7"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"overcommit": {"cpu": 0.05}}, "an overcommit of 0.05 for cpu", id="too little"),
        pytest.param({"overcommit": {"cpu": 101.0}}, "an overcommit of 101.0 for cpu", id="too much"),
        pytest.param({"overcommit": {"cpu": float("nan")}}, "an overcommit of nan", id="not a number"),
        pytest.param({"overcommit": {"cpu": 2.0, "cpus": 3.0}}, "given twice", id="given twice"),
        pytest.param({"overcommit": {"memry": 2.0}}, "did you mean 'memory'", id="a misspelt resource"),
        pytest.param({"cost": -1.0}, "a cost of -1", id="a negative cost"),
        pytest.param({"cost": float("inf")}, "a cost of inf", id="an infinite cost"),
        pytest.param({"data": ("a b",)}, "'a b' is not a name", id="a data set with a space"),
        pytest.param({"cpu": 2, "sockets": (S("0"), S("0-1"))}, "name a cpu twice", id="a core in two sockets"),
        pytest.param({"cpu": 2, "sockets": (S("0,0"),)}, "listed twice", id="a core twice in one socket"),
        pytest.param({"cpu": 4, "sockets": (S("3-0"),)}, "3-0 is not a range", id="a reversed range"),
        pytest.param({"cpu": 4, "sockets": (S("a"),)}, "'a' is not a number or a range", id="not a number"),
        pytest.param({"cpu": 4, "sockets": (S((-1,)),)}, "-1 is out of range", id="a negative core"),
        pytest.param(
            {"sockets": (S("0-3"),)}, "the sockets have more cpus \\(4\\) than cpu = 1", id="more cores than it has"
        ),
        pytest.param(
            {"sockets": (S("0", "0"),)}, "the sockets have more gpus \\(1\\) than gpu = 0", id="more GPUs than it has"
        ),
        pytest.param({"sockets": (S(),)}, "neither cpus nor gpus", id="an empty socket"),
        pytest.param({"address": "10.0.0.1:80"}, "'10.0.0.1:80' is not an address", id="an address with a port"),
    ],
)
def test_mistakes_name_the_node(fields, message):
    with pytest.raises(InvalidInput, match=f"node 'n1': .*{message}"):
        node_offer(NodeConfig("n1", **fields))


@pytest.mark.parametrize("address", ["", "node-7.example.com", "10.0.0.1", "fe80::1"])
def test_an_address_is_a_host_name_or_an_ip_address(address: str):
    assert node_offer(NodeConfig("n1", address=address)).address == address


def test_half_a_gpu_may_be_a_numbered_one():
    assert node_offer(NodeConfig("n1", gpu="500m", sockets=(S("0", "3"),))).sockets == (Socket((0,), (3,)),)


def test_an_unknown_key_of_a_socket_gets_a_suggestion(tmp_path: Path):
    (tmp_path / "config.toml").write_text('[[nodes]]\nname = "a"\nsockets = [{cpuss = "0"}]\n')
    with pytest.raises(InvalidInput, match=r"config.toml: line \d+: .*unknown key 'cpuss'.*did you mean 'cpus'"):
        load_config(tmp_path / "config.toml")


def test_every_mistake_of_a_toml_file_is_named_with_its_line(tmp_path: Path):
    text = """# a comment
[server]
prot = 1

[scheduling.profiles."a b"]
queu = "fifo"

[[nodes]]
name = "a"

[[nodes]]
name = "b"
cpus = 3
[sever]
"""
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(InvalidInput) as caught:
        load_config(tmp_path / "config.toml")
    paths = [path for path, _ in caught.value.problems]
    assert paths == [
        "line 3: server.prot",
        "line 6: scheduling.profiles.'a b'.queu",
        "line 13: nodes[1].cpus",
        "line 14: sever",
    ]
    assert caught.value.message.startswith(f"{tmp_path}/config.toml: ")


def test_a_run_gets_the_quality_of_service_of_its_task():
    best = a_task("a", limits={"cpu": 1000, "memory": 2**30})
    spec = a_job_spec(tasks=(best, a_task("b", cpu="0", memory="0")))
    classes = [
        start_order(Start(a_run(member=i, task=task.name), spec, task)).env["HODEI_QOS"]
        for i, task in enumerate(spec.tasks)
    ]
    assert classes == ["guaranteed", "best-effort"]


@pytest.mark.parametrize(
    "name",
    [".", "..", "hodei.db", "tokens", "token", "config.toml", "agent/x.jsonl", "/tmp/x.jsonl", "../x.jsonl", ".jsonl",
     "x.jsonl/", "x.jsonl\n", "a b.jsonl", "decisions.jsonl.1", "lock"],
)  # fmt: skip
def test_the_decision_log_cannot_replace_other_files(tmp_path: Path, name: str):
    (tmp_path / "agent").mkdir()
    for existing in ("hodei.db", "tokens", "token", "config.toml", "lock"):
        (tmp_path / existing).write_text("kept")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(InvalidInput, match=r"server\.decision_log: .* is not a name for a decision log"):
        make_service(tmp_path, Config(server=ServerConfig(decision_log=name)), instant=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_the_decision_log_is_a_plain_file(tmp_path: Path):
    assert decision_log_path(tmp_path, "") is None
    assert decision_log_path(tmp_path, "my-log.2.jsonl") == tmp_path / "my-log.2.jsonl"
    (tmp_path / "dir.jsonl").mkdir()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "tokens")
    for name in ("dir.jsonl", "link.jsonl"):
        with pytest.raises(InvalidInput, match="is not a regular file"):
            decision_log_path(tmp_path, name)


@pytest.mark.parametrize(
    ("name", "text", "path"),
    [
        ("hodei.yaml", "scheduler:\n  scoring_weights:\n    load_balancing: .inf\n", "line 3: scheduler.scoring_weights.load_balancing"),
        ("hodei.yaml", "scheduler:\n  scoring_weights:\n    load_balancing: .nan\n", "line 3: scheduler.scoring_weights.load_balancing"),
        ("hodei.yaml", "nodes:\n- name: a\n  cost: -.inf\n", "line 3: nodes[0].cost"),
        ("config.toml", "[scheduling.retry]\njitter = nan\n", "line 2: scheduling.retry.jitter"),
        ("config.toml", "[[nodes]]\nname = 'a'\novercommit = {cpu = inf}\n", "line 3: nodes[0].overcommit.cpu"),
        ("config.toml", "[scheduling.profiles.default.options.x]\nfactor = inf\n", "line 2: scheduling.profiles.default.options.x.factor"),
        ("config.toml", "[backends.big]\nkind = 'docker'\nfactor = nan\n", "line 3: backends.big.factor"),
    ],
)  # fmt: skip
def test_an_infinite_number_is_refused_with_its_line(tmp_path: Path, name: str, text: str, path: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInput) as caught:
        load_config(tmp_path / name)
    assert [where for where, _ in caught.value.problems] == [path]
    assert "is not a finite number" in caught.value.message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SchedulingConfig(max_losses=-1), "scheduling.max_losses: out of range: -1 is not from 0 to 1000000000"),
        (
            SchedulingConfig(profiles={"a": ProfileConfig(max_pending=0)}),
            "scheduling.profiles.a.max_pending: out of range: 0 is not from 1 to 1000000000",
        ),
        (SchedulingConfig(profiles={"": ProfileConfig()}), "is not a name"),
        (SchedulingConfig(profiles={"a\u202eb": ProfileConfig()}), r"'a\u202eb' is not a name"),
        (SchedulingConfig(profiles={"x" * 5000: ProfileConfig()}), "is not a name"),
    ],
    ids=["losses", "pending", "an empty name", "a name with a right-to-left override", "a long name"],
)
def test_invalid_settings_are_refused(config: SchedulingConfig, message: str):
    with pytest.raises(InvalidInput) as caught:
        check_scheduling(config)
    assert message in caught.value.message
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("section", ["scheduling", "health", "backends"])
def test_a_section_that_is_not_a_table_is_refused(tmp_path: Path, section: str):
    (tmp_path / "hodei.yaml").write_text(f"scheduler:\n  queue_strategy: fifo\n{section}: 5\n")
    with pytest.raises(InvalidInput) as caught:
        load_config(tmp_path / "hodei.yaml")
    assert [where for where, _ in caught.value.problems] == [f"line 3: {section}"]
    (tmp_path / "hodei.yaml").write_text("scheduler:\n  queue_strategy: fifo\nscheduling:\n  profiles: 5\n")
    with pytest.raises(InvalidInput, match=r"line 4: scheduling\.profiles: a table"):
        load_config(tmp_path / "hodei.yaml")


def test_doctor_reports_missing_backends_of_the_fallback_chain(tmp_path: Path) -> None:
    service = make_service(tmp_path, Config(scheduling=SchedulingConfig(fallback=("instant", "clod"))), instant=True)

    async def checks() -> list[Any]:
        await service.start()
        try:
            return await service.checks()
        finally:
            await service.stop()

    (check,) = [check for check in asyncio.run(checks()) if check.name == "fallback"]
    assert (check.level, check.found) == ("warning", "scheduling.fallback names backends that do not exist: clod")


def test_a_backend_named_local_needs_its_kind(tmp_path: Path):
    with pytest.raises(InvalidInput, match='is reserved for this machine; write kind = "local", or use another name'):
        make_service(tmp_path, Config(backends={"local": {"enabled": False}}))
