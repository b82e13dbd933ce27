"""What a queueing system offers in delegate mode, and what it is asked for. The queue is a fake: that a system holds to it is
shown in tests/conformance."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from agent_host import an_order
from builders import a_node
from hodei.backends.hpc.nodes import ClusterNodes
from hodei.backends.hpc.ports import Cluster, Line
from hodei.backends.hpc.request import RequestBuilder
from hodei.backends.hpc.script import batch_script
from hodei.model.node import GPU_ONLY, Taint

GIB = 1 << 30
NODES = (a_node("n1", 4, "4Gi", gpu=2), a_node("n2", 4, "4Gi"), a_node("n3", 8, "8Gi"))
LARGEST = {"cpu": 8000, "memory": 8 * GIB, "gpu": 2000}
MAIN = Line("main", ("n1", "n2", "n3"), default=True, largest=LARGEST)
HIGH = Line("high", ("n2", "n3"), largest=LARGEST)
GPUS = Line("gpu", ("n1",), largest=NODES[0].capacity)
ALONE = Line("alone", ("n4",))


class _Queue:
    def __init__(self, *lines: Line, nodes: Any = NODES) -> None:
        self._cluster = Cluster(tuple(nodes), lines)

    async def cluster(self) -> Cluster:
        return self._cluster


def _offers(*lines: Line, mode: str = "delegate", **more: Any) -> ClusterNodes:
    nodes = (*NODES, a_node("n4", 2))
    return ClusterNodes("hpc", "slurm", _Queue(*lines, nodes=nodes), mode, (), **more)  # type: ignore[arg-type]


def _nodes(offers: ClusterNodes) -> dict[str, Any]:
    return {node.name: node for node in asyncio.run(offers.refresh())}


def test_machines_that_lines_share_are_one_pool_in_which_each_counts_once():
    found = _nodes(_offers(MAIN, HIGH, GPUS, ALONE))
    pool = found["hpc-main"].pool
    assert dict(pool.capacity) == {"cpu": 16_000, "memory": 16 * GIB, "gpu": 2000}
    assert found["hpc-high"].pool == found["hpc-gpu"].pool == pool
    assert found["hpc-alone"].pool is None
    assert found["hpc-high"].capacity["cpu"] == 12_000


def test_a_pool_promises_ahead_as_its_lines_do():
    found = _nodes(_offers(MAIN, HIGH, ahead_percent=150))
    assert dict(found["hpc-main"].pool.capacity)["cpu"] == 24_000


def test_machines_that_are_out_of_order_count_for_nothing_in_a_pool():
    nodes = (structs.replace(NODES[2], ready=False), *NODES[:2])
    found = _nodes(ClusterNodes("hpc", "slurm", _Queue(MAIN, HIGH, nodes=nodes), "delegate", ()))  # type: ignore[arg-type]
    assert dict(found["hpc-main"].pool.capacity)["cpu"] == 8000


@pytest.mark.parametrize(("setting", "effect"), [("never", "NoSchedule"), ("last", "PreferNoSchedule"), ("any", "")])
def test_a_line_of_gpu_nodes_alone_is_for_gpu_work(setting: Any, effect: Any):
    found = _nodes(_offers(MAIN, GPUS, cpu_jobs_on_gpus=setting))
    assert found["hpc-main"].taints == ()
    assert found["hpc-gpu"].taints == ((Taint(GPU_ONLY, effect=effect),) if effect else ())


def test_a_line_of_gpu_nodes_stays_for_gpu_work_while_the_others_are_closed():
    found = _nodes(_offers(structs.replace(MAIN, open=False), GPUS))
    assert found["hpc-main"].cordoned
    assert found["hpc-gpu"].taints == (Taint(GPU_ONLY, effect="NoSchedule"),)
    # A line that can never be ours is no other place to wait for.
    assert _nodes(_offers(structs.replace(MAIN, usable=False), GPUS))["hpc-gpu"].taints == ()


def test_where_all_lines_have_gpus_none_is_kept_for_them():
    assert _nodes(_offers(GPUS))["hpc-gpu"].taints == ()


# -------------------------------------------------------------------------------------------- memory limits


def _asked(node: str, mode: str, **fields: Any) -> Any:
    offers = _offers(MAIN, mode=mode)
    asyncio.run(offers.refresh())
    wants = RequestBuilder(offers, lambda order, line: (), job_variable="J", node_variable="N", element="", system="Slurm",
                  beside=True)  # fmt: skip
    order = an_order(1, **fields)
    order = structs.replace(order, run=structs.replace(order.run, node=node))
    return wants.submission(order, "mark", "/tmp/files", 0)[1]


def test_the_system_is_asked_for_the_memory_limit_at_most_what_the_node_has():
    assert _asked("hpc-n2", "placed", memory="1Gi").memory_mib == 1024
    assert _asked("hpc-n2", "placed", memory="1Gi", limits={"memory": 2 * GIB}).memory_mib == 2048
    assert _asked("hpc-n2", "placed", memory="1Gi", limits={"memory": 64 * GIB}).memory_mib == 4096
    assert _asked("hpc-main", "delegate", memory="1Gi", limits={"memory": 64 * GIB}).memory_mib == 8192


def test_without_control_groups_the_script_holds_the_command_to_its_memory(tmp_path: Path):
    greedy = ("/bin/sh", "-c", "x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo ${#x}")

    def run(name: str, **more: Any) -> int:
        script = batch_script(files=str(tmp_path / name), argv=greedy, env={}, workdir="/", claim="c",
                              job_variable="J", node_variable="N", **more)  # fmt: skip
        (tmp_path / f"{name}.sh").write_text(script)
        return subprocess.run(["/bin/bash", "-p", str(tmp_path / f"{name}.sh")], check=False, timeout=60).returncode

    assert run("free") == 0
    assert run("large", memory_bytes=2 * GIB) == 0
    assert run("small", memory_bytes=100 << 20) != 0
