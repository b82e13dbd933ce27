"""Pools: nodes that share machines are allocated once."""

from __future__ import annotations

from builders import a_node
from hodei.model.facts import NodeJoined
from hodei.model.node import GPU_ONLY, Pool, Taint
from hodei.plugins.fit import Pools
from unit.control.harness import Harness
from unit.plugins.plugin_helpers import a_member, a_table, refused

POOL = Pool("hpc-main", (("cpu", 8000), ("memory", 64 << 30)))


def _partition(name, cpu, pool=POOL, **fields):
    return a_node(name, cpu, "64Gi", backend="hpc", pool=pool, **fields)


def test_usage_of_one_partition_counts_in_the_others():
    table = a_table([_partition("main", 8), _partition("high", 8), a_node("own", 8)], {"main": {"cpu": "6"}})
    assert refused(Pools(), a_member(cpu="2"), table) == {}
    text = "SHARED_MACHINES_FULL: the machines that it shares with other nodes have no cpu left"
    assert refused(Pools(), a_member(cpu="3"), table) == {text: ["high", "main"]}


def test_without_pools_nothing_is_refused_and_the_stamp_is_constant():
    table = a_table([a_node("n1", 8)])
    member = a_member(cpu="3")
    before = Pools().stamp(member, table)
    table.place(0, {"cpu": 4000})
    assert Pools().stamp(member, table) == before
    assert not Pools().filter(member, table.view(), None)


def test_two_queues_of_the_same_machines_are_allocated_once():
    harness = Harness(_partition("main", 8), _partition("high", 8))
    for job in range(1, 5):
        harness.submit(job, cpu="4")
    assert [harness.state(job) for job in range(1, 5)] == ["scheduled", "scheduled", "pending", "pending"]
    assert harness.reason(3)[0] == "SHARED_MACHINES_FULL"
    harness.observe("1.0.1", "running")
    harness.observe("1.0.1", "succeeded", 0)
    assert [harness.state(job) for job in (3, 4)] == ["scheduled", "pending"]


def test_the_members_of_a_gang_are_counted_together():
    harness = Harness(_partition("main", 8), _partition("high", 8))
    harness.submit(1, cpu="4", count=3)
    assert harness.state(1) == "pending"
    harness.submit(2, cpu="4", count=2)
    assert harness.state(2) == "scheduled"


def test_jobs_without_gpus_use_gpu_nodes_only_if_they_select_them():
    taint = Taint(GPU_ONLY)
    harness = Harness(a_node("gpu", 8, gpu=2, taints=(taint,), labels={"slurm.hodei.io/queue": "gpu"}))
    harness.submit(1, cpu="1")
    assert harness.reason(1)[0] == "UNTOLERATED_TAINT"
    harness.submit(2, cpu="1", gpu="1")
    harness.submit(3, cpu="1", node_selector={"slurm.hodei.io/queue": "gpu"})
    assert [harness.state(job) for job in (1, 2, 3)] == ["pending", "scheduled", "scheduled"]
    harness.step(NodeJoined(a_node("main", 1)))
    harness.submit(4, cpu="1", gpu="1")
    assert [harness.runs[f"{job}.0.1"].node for job in (1, 2, 3, 4)] == ["main", "gpu", "gpu", "gpu"]


def test_a_soft_taint_makes_gpu_nodes_the_last_choice():
    soft = Taint(GPU_ONLY, effect="PreferNoSchedule")
    harness = Harness(a_node("gpu", 64, gpu=2, taints=(soft,)), a_node("main", 1))
    harness.submit(1, cpu="1")
    harness.submit(2, cpu="1")
    assert [harness.runs[f"{job}.0.1"].node for job in (1, 2)] == ["main", "gpu"]
