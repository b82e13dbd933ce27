"""Orders for the agent, and the nodes of the local backend. No agent is started here."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from agent_host import an_order
from hodei.backends import machine
from hodei.backends.agent_calls import start_order, stop_order
from hodei.backends.base import WORD_LIMIT
from hodei.backends.local import LocalBackend, VirtualNode
from hodei.model.effects import Stop
from hodei.model.errors import BackendRefused
from hodei.model.job import Checkpoint, HealthCheck, Interactive
from hodei.model.node import Grant, Socket
from hodei.model.outcome import StopReason


@pytest.mark.parametrize(
    ("grant", "cpus", "env"),
    [
        pytest.param(None, (0, 1), {"HODEI_CPUS": "0,1"}, id="cores of the node"),
        pytest.param(Grant(cpus=(3,)), (3,), {"HODEI_CPUS": "3"}, id="granted cores"),
        pytest.param(
            Grant(gpus=((1, 1000), (0, 1000))),
            (0, 1),
            {"HODEI_CPUS": "0,1", "HODEI_GPUS": "1,0", "CUDA_VISIBLE_DEVICES": "1,0"},
            id="whole devices",
        ),
        pytest.param(
            Grant(gpus=((2, 500),)),
            (0, 1),
            {"HODEI_CPUS": "0,1", "HODEI_GPUS": "2", "CUDA_VISIBLE_DEVICES": "2", "HODEI_GPU_MILLI": "500"},
            id="a fraction of one",
        ),
        pytest.param(
            Grant(gpus=((2, 1000), (2, 500))),
            (0, 1),
            {"HODEI_CPUS": "0,1", "HODEI_GPUS": "2", "CUDA_VISIBLE_DEVICES": "2", "HODEI_GPU_MILLI": "500"},
            id="one granted twice",
        ),
    ],
)
def test_a_run_gets_its_grant_or_the_cores_of_its_node(grant, cpus, env):
    order = an_order(1)
    order = structs.replace(order, run=structs.replace(order.run, grant=grant))
    wire = start_order(order, cpus=(0, 1))
    parts = {name: value for name, value in wire.env.items() if name.endswith(("CPUS", "GPUS", "DEVICES", "MILLI"))}
    assert (wire.cpus, parts) == (cpus, env)


def test_supervision_is_part_of_the_order():
    hook = Checkpoint(signal="USR1", every_ms=60_000)
    check = HealthCheck(http="http://node:8080/ready")
    wire = start_order(an_order(1, checkpoint=hook, health=check), address="fd00::7")
    assert (wire.save, wire.save_every_ms) == ({"signal": "USR1", "command": (), "timeout_ms": 30_000}, 60_000)
    assert wire.health == HealthCheck(http="http://[fd00::7]:8080/ready")
    assert start_order(an_order(1, workload=Interactive(idle_timeout_ms=5000))).idle_ms == 5000
    plain = start_order(an_order(1))
    assert (plain.save, plain.save_every_ms, plain.health, plain.idle_ms) == (None, 0, None, 0)


def test_an_elastic_gang_gets_its_minimum_and_maximum_size():
    order = an_order(1, count=8)
    task = structs.replace(order.task, min_count=3)
    spec = structs.replace(order.spec, tasks=(task, structs.replace(task, name="other", count=2, min_count=0)))
    env = start_order(structs.replace(order, spec=spec, world_size=6)).env
    sizes = [env[f"HODEI_{name}WORLD_SIZE"] for name in ("MIN_", "", "MAX_")]
    assert sizes == ["5", "6", "10"]
    assert "HODEI_ADDRESSES" not in env
    assert "HODEI_MASTER_ADDRESS" not in env


@pytest.mark.parametrize(
    ("checkpoint", "watched"),
    [
        pytest.param(Checkpoint(), None, id="none"),
        pytest.param(Checkpoint(signal="USR1"), "", id="no file"),
        pytest.param(Checkpoint(file="/srv/x"), "/srv/x", id="a file"),
    ],
)
def test_only_jobs_with_checkpoints_have_a_checkpoint_file(checkpoint, watched):
    assert start_order(an_order(1, checkpoint=checkpoint)).checkpoint_file == watched


@pytest.mark.parametrize(
    ("checkpoint", "hook"),
    [
        pytest.param(None, None, id="none"),
        pytest.param(Checkpoint(file="/srv/x"), None, id="only a file"),
        pytest.param(
            Checkpoint(signal="USR1", timeout_ms=7), {"signal": "USR1", "command": (), "timeout_ms": 7}, id="a signal"
        ),
        pytest.param(
            Checkpoint(command=("a", "b")), {"signal": "", "command": ("a", "b"), "timeout_ms": 30_000}, id="a command"
        ),
    ],
)
def test_a_stop_contains_its_hook(checkpoint, hook):
    assert stop_order(Stop("1.0.1", "local", 5, StopReason("cancelled", "why"), checkpoint)).get("checkpoint") == hook


def test_an_environment_that_is_too_large_is_refused():
    with pytest.raises(BackendRefused, match="longest word"):
        start_order(structs.replace(an_order(1), addresses=("a" * WORD_LIMIT, "b")))


def nodes_of(tmp_path, *offers: VirtualNode):
    backend = LocalBackend(home=tmp_path, installation="test", epoch=1, nodes=offers)
    return asyncio.run(backend.nodes())


def test_the_machine_reports_its_sockets_and_address(tmp_path):
    (node,) = nodes_of(tmp_path)
    assert (node.sockets, node.address) == (machine.sockets(), "127.0.0.1")


def test_a_virtual_node_has_its_configured_sockets_and_address(tmp_path):
    sockets = (Socket((0, 1), (0,)), Socket((2, 3)))
    plain, described = nodes_of(tmp_path, VirtualNode("a"), VirtualNode("b", sockets=sockets, address="10.0.0.2"))
    assert (plain.sockets, plain.address) == ((), "127.0.0.1")
    assert (described.sockets, described.address) == (sockets, "10.0.0.2")
