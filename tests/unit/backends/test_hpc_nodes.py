"""The nodes of a batch system and the requests for them, with a fake batch system. tests/conformance has real ones."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from agent_host import an_order
from builders import a_node
from hodei.backends.hpc.nodes import ClusterNodes, ClusterSettings
from hodei.backends.hpc.ports import Cluster, Partition
from hodei.backends.hpc.script import batch_script
from hodei.backends.hpc.submission import SubmissionBuilder
from hodei.model.node import GPU_ONLY, Taint

GIB = 1 << 30
NODES = (a_node("n1", 4, "4Gi", gpu=2), a_node("n2", 4, "4Gi"), a_node("n3", 8, "8Gi"))
FOUR_NODES = (*NODES, a_node("n4", 2))
LARGEST = {"cpu": 8000, "memory": 8 * GIB, "gpu": 2000}
MAIN = Partition("main", ("n1", "n2", "n3"), default=True, largest=LARGEST)
HIGH = Partition("high", ("n2", "n3"), largest=LARGEST)
GPUS = Partition("gpu", ("n1",), largest=NODES[0].capacity)
ALONE = Partition("alone", ("n4",))


class _System:
    job_variable, node_variable, element_id = "J", "N", ""

    def __init__(self, *partitions: Partition, nodes: Any = NODES) -> None:
        self._cluster = Cluster(tuple(nodes), partitions)

    async def cluster(self) -> Cluster:
        return self._cluster


def _settings(**fields: Any) -> ClusterSettings:
    return ClusterSettings(output="/output", **{"mode": "delegate", **fields})


def _cluster_nodes(*partitions: Partition, nodes: Any = FOUR_NODES, **fields: Any) -> ClusterNodes:
    system: Any = _System(*partitions, nodes=nodes)
    return ClusterNodes("hpc", "slurm", system, _settings(**fields), ())


def _nodes(cluster_nodes: ClusterNodes) -> dict[str, Any]:
    return {node.name: node for node in asyncio.run(cluster_nodes.refresh())}


def test_nodes_shared_by_partitions_are_one_pool_in_which_each_counts_once():
    found = _nodes(_cluster_nodes(MAIN, HIGH, GPUS, ALONE))
    pool = found["hpc-main"].pool
    assert dict(pool.capacity) == {"cpu": 16_000, "memory": 16 * GIB, "gpu": 2000}
    assert found["hpc-high"].pool == found["hpc-gpu"].pool == pool
    assert found["hpc-alone"].pool is None
    assert found["hpc-high"].capacity["cpu"] == 12_000


def test_ahead_multiplies_the_capacity_of_a_pool_too():
    found = _nodes(_cluster_nodes(MAIN, HIGH, ahead=1.5))
    assert dict(found["hpc-main"].pool.capacity)["cpu"] == 24_000


def test_nodes_that_are_not_ready_add_nothing_to_a_pool():
    nodes = (structs.replace(NODES[2], ready=False), *NODES[:2])
    found = _nodes(_cluster_nodes(MAIN, HIGH, nodes=nodes))
    assert dict(found["hpc-main"].pool.capacity)["cpu"] == 8000


@pytest.mark.parametrize(("setting", "effect"), [("never", "NoSchedule"), ("last", "PreferNoSchedule"), ("any", "")])
def test_a_partition_of_gpu_nodes_is_tainted_for_gpu_jobs(setting: Any, effect: Any):
    found = _nodes(_cluster_nodes(MAIN, GPUS, cpu_jobs_on_gpus=setting))
    assert found["hpc-main"].taints == ()
    assert found["hpc-gpu"].taints == ((Taint(GPU_ONLY, effect=effect),) if effect else ())


def test_a_gpu_partition_keeps_its_taint_while_the_others_are_closed():
    found = _nodes(_cluster_nodes(structs.replace(MAIN, open=False), GPUS))
    assert found["hpc-main"].cordoned
    assert found["hpc-gpu"].taints == (Taint(GPU_ONLY, effect="NoSchedule"),)
    # An unusable partition does not count as another one.
    assert _nodes(_cluster_nodes(structs.replace(MAIN, usable=False), GPUS))["hpc-gpu"].taints == ()


def test_without_a_cpu_partition_no_partition_is_tainted():
    assert _nodes(_cluster_nodes(GPUS))["hpc-gpu"].taints == ()


def _submission(node: str, mode: str, **fields: Any) -> Any:
    cluster_nodes = _cluster_nodes(MAIN, mode=mode)
    asyncio.run(cluster_nodes.refresh())
    system: Any = _System()
    builder = SubmissionBuilder(
        cluster_nodes, lambda order, partition: (), system, _settings(), system_name="Slurm", can_execute=True
    )
    order = an_order(1, **fields)
    order = structs.replace(order, run=structs.replace(order.run, node=node))
    return builder.build(order, "mark", "/tmp/files", 0)[1]


def test_the_memory_limit_is_requested_up_to_the_capacity_of_the_node():
    assert _submission("hpc-n2", "placed", memory="1Gi").memory_mib == 1024
    assert _submission("hpc-n2", "placed", memory="1Gi", limits={"memory": 2 * GIB}).memory_mib == 2048
    assert _submission("hpc-n2", "placed", memory="1Gi", limits={"memory": 64 * GIB}).memory_mib == 4096
    assert _submission("hpc-main", "delegate", memory="1Gi", limits={"memory": 64 * GIB}).memory_mib == 8192


def test_without_control_groups_the_script_limits_the_memory_of_the_command(tmp_path: Path):
    greedy = ("/bin/sh", "-c", "x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo ${#x}")

    def run(name: str, **more: Any) -> int:
        script = batch_script(files=str(tmp_path / name), argv=greedy, env={}, workdir="/", claim="c",
                              job_variable="J", node_variable="N", **more)  # fmt: skip
        (tmp_path / f"{name}.sh").write_text(script)
        return subprocess.run(["/bin/bash", "-p", str(tmp_path / f"{name}.sh")], check=False, timeout=60).returncode

    assert run("free") == 0
    assert run("large", memory_bytes=2 * GIB) == 0
    assert run("small", memory_bytes=100 << 20) != 0
