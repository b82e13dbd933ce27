"""Fragmentation: the part of free cpu or GPUs that a typical job could not use."""

from __future__ import annotations

import pytest

from builders import a_node
from hodei.engine.nodes import Table
from hodei.engine.view import gang_of
from hodei.model.job import JobSpec, TaskSpec
from hodei.model.node import Node
from hodei.sim.driver import Simulation
from hodei.sim.metrics import Fragmentation
from hodei.sim.policies import policy
from hodei.sim.traces import Arrival, Workload, open_workload
from hodei.wiring import make_controller


def a_workload(*requests: dict[str, int]) -> Workload:
    specs = [JobSpec(name="job", tasks=(TaskSpec(request=request),)) for request in requests]
    return Workload("test", [Arrival(number, number + 1, spec, 1000) for number, spec in enumerate(specs)])


def a_table(*nodes: Node) -> Table:
    table = Table(nodes)
    table.settle()
    return table


def two_nodes() -> Table:
    return a_table(a_node("a", cpu="4"), a_node("b", cpu="4"))


def test_empty_and_full_nodes_are_not_fragmented():
    table = two_nodes()
    assert Fragmentation(a_workload({"cpu": 2000}), table).share(1) == 0
    for row in (0, 1):
        table.place(row, {"cpu": 4000})
    assert Fragmentation(a_workload({"cpu": 2000}), table).share(1) == 0


def test_free_cpu_on_a_node_where_a_job_does_not_fit_is_fragmented():
    table = two_nodes()
    table.place(0, {"cpu": 3000})  # 1 of 5 free cores is left on this node
    assert Fragmentation(a_workload({"cpu": 2000}), table).share(1) == 200
    assert Fragmentation(a_workload({"cpu": 2000}, {"cpu": 1000}), table).share(1) == 100, (
        "half of the jobs could use it"
    )


@pytest.mark.parametrize(
    ("request_", "share"),
    [
        pytest.param({"cpu": 1000, "gpu": 1000}, 334, id="a whole GPU: the free half is unusable"),
        pytest.param({"cpu": 1000, "gpu": 500}, 0, id="half a GPU"),
    ],
)
def test_for_jobs_with_gpus_the_fragmentation_of_gpus_is_measured(request_: dict[str, int], share: int):
    table = a_table(a_node("a", cpu="8", gpu=1), a_node("b", cpu="8", gpu=1), a_node("c", cpu="8"))
    half = next(iter(a_workload({"cpu": 1000, "gpu": 500}).arrivals)).spec
    member = gang_of(1, half, 0).members[0]
    assert table.place(table.row["a"], member.task.request, member) is not None
    assert Fragmentation(a_workload(request_), table).share(1) == share


def test_a_single_node_is_not_fragmented_and_measurements_are_cached():
    table = a_table(a_node("a", cpu="4"))
    table.place(0, {"cpu": 3000})
    assert Fragmentation(a_workload({"cpu": 2000}), table).share(1) == 0
    table = two_nodes()
    measure = Fragmentation(a_workload({"cpu": 2000}), table)
    assert measure.share(1000) == 0
    table.place(0, {"cpu": 3000})
    assert [measure.share(step) for step in (1001, 1003, 1004)] == [0, 0, 200]


def test_a_simulated_run_over_several_nodes_is_sampled():
    workload = open_workload("generate:lublin?jobs=60&seed=3&nodes=4&cpus=16")
    result = Simulation(workload, make_controller(policy("easy")), workload.nodes).run()
    assert any(sample.fragmented for sample in result.samples)
    assert all(0 <= sample.fragmented <= 1000 for sample in result.samples)
