"""GPU placement: which node, and which GPU of it, each policy takes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from builders import a_job_spec, a_node
from hodei.engine.cycle import Engine
from hodei.engine.view import View, gang_of
from hodei.model.errors import InvalidInput
from hodei.model.node import Grant
from hodei.plugins.fragmentation import (
    DEFAULT_WORKLOAD,
    Fgd,
    Fragments,
    GpuHodei,
    Shape,
    parse_workload,
    typical_workload,
)
from hodei.plugins.gpu_packing import GpuBestfit, GpuClustering, GpuDotprod, GpuPacking
from hodei.plugins.registry import build_profile, find_plugin
from unit.plugins.plugin_helpers import a_member, a_table, best, scores

HALVES_AND_WHOLES = {Shape(1000, 500): 1, Shape(1000, 1000): 1}


def _table(held=(), **gpus):
    """Nodes by name with their number of GPUs; `held`: (node, GPU, thousandths)."""
    table = a_table([a_node(name, 32, gpu=str(count)) for name, count in gpus.items()])
    for name, gpu, milli in held:
        member = a_member(gpu=str(milli / 1000), cpu="1")
        table.place(table.row[name], member.task.request, member, Grant((), ((gpu, milli),)))
    return table


@pytest.mark.parametrize(
    ("plugin", "held", "fields", "chosen"),
    [
        (GpuBestfit(), [("b", 0, 500)], {"gpu": "0.5"}, "b"),
        (GpuDotprod(), [("b", 0, 1000), ("b", 1, 1000)], {"gpu": "2", "cpu": "8"}, "b"),
        (GpuPacking(), [("a", 0, 1000), ("b", 0, 500)], {"gpu": "0.5"}, "b"),
        (GpuPacking(), [("a", 0, 300), ("b", 0, 500)], {"gpu": "0.5"}, "b"),
        (GpuPacking(), [("b", 0, 500)], {"gpu": "1"}, "b"),
        (GpuClustering(), [("a", 0, 1000), ("b", 0, 500)], {"gpu": "0.2"}, "b"),
        (GpuClustering(), [("a", 0, 1000), ("b", 0, 500)], {"gpu": "1"}, "a"),
        (GpuClustering(), [("a", 0, 500), ("b", 0, 1000), ("b", 1, 500)], {"gpu": "1"}, "b"),
        (Fgd(workload=HALVES_AND_WHOLES), [("b", 0, 500)], {"gpu": "0.5"}, "b"),
        (GpuHodei(workload=HALVES_AND_WHOLES), [("a", 0, 250), ("b", 0, 500)], {"gpu": "0.5"}, "b"),
    ],
    ids=[
        "best fit: the fuller node", "dot product: the less similar node", "packing: a shared GPU before a free one",
        "packing: the fuller shared GPU", "packing: a node in use before an idle one", "clustering: fractions with fractions",
        "clustering: whole GPUs with whole GPUs", "clustering: an equal neighbour before none", "fgd: fill fragments",
        "hodei: fill fragments",
    ],
)  # fmt: skip
def test_the_node_that_each_policy_chooses(plugin, held, fields, chosen):
    assert best(plugin, a_member(**{"cpu": "1", **fields}), _table(held, a=2, b=2)) == chosen


@pytest.mark.parametrize("name", ["gpu_packing", "gpu_clustering"])
def test_gpu_only_policies_have_no_opinion_on_jobs_without_gpus(name):
    assert scores(find_plugin(name), a_member(cpu="1"), _table(a=2)) is None


def test_without_any_gpu_there_is_no_opinion_on_fragments():
    assert scores(Fgd(), a_member(cpu="1"), a_table([a_node("n1")])) is None


def test_jobs_without_gpus_avoid_cores_that_gpus_need():
    table = a_table([a_node("gpu", 4, gpu="4"), a_node("plain", 4)])
    plugin = Fgd(workload={Shape(1000, 1000): 1})
    assert best(plugin, a_member(cpu="4"), table) == "plain"


def _fragment(shape: Shape, cpu: int, gpus: list[int]) -> int:
    """The definition, for one job and one node: free GPU capacity that the job cannot use."""
    free = [max(each, 0) for each in gpus]
    number, each = (1, shape.gpu) if shape.gpu < 1000 else (-(-shape.gpu // 1000), 1000)
    usable = [left for left in free if left >= each]
    if not shape.gpu or shape.cpu > cpu or len(usable) < number:
        return sum(free)
    return sum(left for left in free if left < each)


def test_the_tables_equal_the_definition():
    rng = np.random.default_rng(7)
    amounts = [0, 100, 250, 500, 810, 1000, 1000, 2000, 4000]
    for _ in range(200):
        typical = {
            Shape(int(rng.integers(0, 9)) * 1000, amounts[rng.integers(len(amounts))]): int(rng.integers(1, 50))
            for _ in range(8)
        }
        fragments = Fragments(typical)
        cpu = rng.integers(0, 10_000, 20)
        gpus = np.where(rng.random((20, 4)) < 0.3, 1000, rng.integers(-1, 1001, (20, 4)))
        usable = fragments.usable(np.zeros(20, dtype=np.intp), cpu, gpus)
        for row in range(20):
            expected = sum(
                weight * _fragment(shape, int(cpu[row]), gpus[row].tolist()) for shape, weight in typical.items()
            )
            assert int(np.maximum(gpus[row], 0).sum()) * fragments.weight - int(usable[row]) == expected


def test_the_gain_is_the_fragment_before_minus_the_fragment_after():
    table = _table([("a", 0, 500), ("a", 1, 200), ("b", 0, 1000)], a=2, b=2)
    fragments = Fragments(DEFAULT_WORKLOAD)
    for gpu in ("", "0.3", "0.5", "1", "1.5", "2"):
        member = a_member(gpu=gpu, cpu="2")
        gains = fragments.gains(member, table.view())
        for row, devices in enumerate(table.view().devices()):
            grant = devices.find(member.task)
            if grant is None:
                assert (gains[row] < -(10**15)).all()
                continue
            before = _total(table, row)
            table.place(row, member.task.request, member, grant)
            after = _total(table, row)
            table.release(row, member.task.request, member, grant)
            column = list(devices.gpus).index(grant.gpus[-1][0]) if grant.gpus and grant.gpus[-1][1] < 1000 else 0
            assert gains[row, column] == before - after


def _total(table, row: int) -> int:
    cpu, gpus = int(table.view().free("cpu")[row]), table.gpus[row].tolist()
    return sum(weight * _fragment(shape, cpu, gpus) for shape, weight in DEFAULT_WORKLOAD.items())


def test_a_gpu_that_a_typical_job_may_not_use_is_a_fragment_to_it():
    table = a_table([a_node("a", 8, gpu="1", gpu_type="A10"), a_node("t", 8, gpu="1", gpu_type="T4")])
    fragments = Fragments({Shape(1000, 1000, ("t4",)): 3, Shape(1000, 1000): 1})
    nodes = table.view()
    assert fragments.usable(fragments.kinds(nodes), nodes.free("cpu"), nodes.gpus()).tolist() == [1000, 4000]


def test_the_gpu_with_the_least_fragmentation_is_shared():
    # The tightest GPU (600 free) would be left with 200, which no typical job can use; the other with 500.
    typical = {Shape(100, 400): 1, Shape(100, 500): 1, Shape(100, 1000): 1}
    profile = build_profile("default", scores={"fgd": 1}, arguments={"fgd": {"workload": typical}})
    table = _table([("a", 0, 400), ("a", 1, 100)], a=2)
    engine = Engine(table, {"default": profile})
    gang = gang_of(1, a_job_spec(gpu="0.4", cpu="100m"), 0)
    profile.admit(gang)
    [placed] = engine.place(gang, View(0))
    assert placed.grant == Grant((), ((1, 400),))
    assert not engine.runner.faults


def test_if_the_chooser_fails_the_tightest_gpu_is_used():
    class Broken(Fgd):
        def choose_gpu(self, member, nodes, view):
            raise RuntimeError("broken")

    profile = build_profile("default", scores={"fgd": 1})
    broken = Broken()
    profile = type(profile)(profile.name, profile.queue, profile.filters, gpu_choosers=(broken,))
    table = _table([("a", 1, 400)], a=2)
    engine = Engine(table, {"default": profile})
    gang = gang_of(1, a_job_spec(gpu="0.5", cpu="100m"), 0)
    profile.admit(gang)
    [placed] = engine.place(gang, View(0))
    assert placed.grant == Grant((), ((1, 500),))
    assert [(fault.plugin, fault.point) for fault in engine.runner.faults] == [("fgd", "choose_gpu")]


def test_the_typical_workload_has_the_most_frequent_shapes():
    observed = [Shape(1000, 500)] * 60 + [Shape(4000, 1000)] * 30 + [Shape(2000, 0)] * 8 + [Shape(9000, 8000)] * 2
    assert typical_workload(observed) == {Shape(1000, 500): 60, Shape(4000, 1000): 30, Shape(2000, 0): 8}
    assert typical_workload(observed, percent=50) == {Shape(1000, 500): 60}
    assert typical_workload([]) == {}


def test_the_typical_workload_can_be_configured():
    given = [{"cpu": 4, "gpu": "0.5", "weight": 10, "gpu_types": ["T4"]}, {"cpu": "500m"}, {"cpu": "500m"}]
    assert parse_workload(given) == {Shape(4000, 500, ("t4",)): 10, Shape(500, 0): 2}


@pytest.mark.parametrize(
    ("given", "message"),
    [([{"ram": 1}], "has no 'ram'"), ([{"gpu": 1, "weight": 0}], "whole number"), ([{"gpu": "x"}], "x")],
    ids=["an unknown key", "no weight", "not an amount"],
)
def test_an_invalid_workload_is_refused_with_a_reason(given, message):
    with pytest.raises(InvalidInput, match=message):
        build_profile("default", scores={"fgd": 1}, arguments={"fgd": {"typical": given}})


def _random_choices(seed: int) -> list[tuple[str, int]]:
    profile = build_profile("default", scores={"gpu_random": 1}, arguments={"gpu_random": {"seed": seed}})
    table = _table(**{f"n{i}": 4 for i in range(8)})
    engine = Engine(table, {"default": profile})
    out = []
    for i in range(200):
        gang = gang_of(i, a_job_spec(gpu="0.1", cpu="10m", memory="1Mi"), i)
        profile.admit(gang)
        [placed] = engine.place(gang, View(0))
        out.append((placed.node.name, placed.grant.gpus[0][0]))
    return out


def test_random_choices_depend_on_the_seed_and_cover_all_nodes_and_gpus():
    assert _random_choices(1) == _random_choices(1) != _random_choices(2)
    nodes = Counter(name for name, _ in _random_choices(1))
    gpus = Counter(gpu for _, gpu in _random_choices(1))
    assert len(nodes) == 8
    assert min(nodes.values()) > 10
    assert min(gpus[gpu] for gpu in range(4)) > 25
