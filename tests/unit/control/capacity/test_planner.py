"""The capacity planner: which nodes are ordered for which jobs."""

from __future__ import annotations

import pytest

from builders import a_job_spec, a_node
from hodei.control.admission.gate import AdmissionPolicy
from hodei.control.capacity.planner import nodes_needed, spot_overhead
from hodei.control.capacity.scaling import CapacityPolicy, GroupPolicy
from hodei.engine.view import gang_of
from hodei.model.errors import InvalidInput
from hodei.model.facts import StartsForecast
from hodei.model.job import Checkpoint
from hodei.model.node import Taint
from unit.control.capacity.cloud import BOOT_MS, HOUR_MS, Cloud, groups, potential, some_potential


def ordered(cloud: Cloud) -> list[str]:
    return [planned.node for planned in cloud.plan().order]


def test_jobs_are_packed_on_as_few_new_nodes_as_they_need():
    cloud = Cloud(*some_potential(10, 4))
    cloud.submit(*range(1, 9), cpu="1")
    plan = cloud.plan()
    assert [len(planned.jobs) for planned in plan.order] == [4, 4]
    assert len(cloud.wanted) == 2
    assert {outlook.ready_ms for outlook in plan.outlooks} == {cloud.now_ms + BOOT_MS}


def test_no_node_is_ordered_for_what_fits_on_existing_or_starting_nodes():
    cloud = Cloud(a_node("n1", 4, "16Gi"), *some_potential(4))
    cloud.submit(1, 2, cpu="2")
    assert ordered(cloud) == []
    cloud.submit(3, cpu="4")
    assert ordered(cloud) == ["small-1"]
    assert ordered(cloud) == [], "it is starting"
    cloud.run(2 * BOOT_MS)
    assert cloud.runs["3.0.1"].node == "small-1"


def test_the_cheapest_group_that_takes_a_job_is_ordered():
    cloud = Cloud(*some_potential(3, 4, price=100), *some_potential(3, 16, group="large", price=350))
    cloud.submit(1, cpu="8")
    assert ordered(cloud) == ["large-1"]
    cloud.submit(2, cpu="16")
    assert ordered(cloud) == ["large-2"]
    cloud.submit(3, cpu="4")
    assert ordered(cloud) == [], "it fits beside the first"


def test_a_gang_gets_all_its_nodes_or_none():
    cloud = Cloud(*some_potential(3, 4))
    cloud.submit(1, cpu="4", count=4)
    assert ordered(cloud) == []
    cloud = Cloud(*some_potential(4, 4))
    cloud.submit(1, cpu="4", count=4)
    assert len(ordered(cloud)) == 4
    cloud.run(2 * BOOT_MS)
    assert cloud.state() == "scheduled"


def test_taints_selectors_and_gpu_types_of_offered_nodes_count():
    tainted = potential("t-1", group="t", price=1, taints=(Taint("team", "x"),))
    gpu = potential("g-1", group="g", price=900, gpu_type="A100", capacity={"gpu": "2"}, labels={"pool": "gpu"})
    cloud = Cloud(tainted, gpu)
    cloud.submit(1, cpu="1", node_selector={"pool": "gpu"})
    assert ordered(cloud) == ["g-1"]
    cloud.submit(2, cpu="4", gpu="1")
    assert ordered(cloud) == [], "too little is left of it"


def test_the_limit_on_costs_holds():
    cloud = Cloud(*some_potential(10, 4, price=100), policy=CapacityPolicy(max_cost_milli=250))
    cloud.submit(*range(1, 11), cpu="4")
    assert len(ordered(cloud)) == 2
    assert ordered(cloud) == []


def test_the_maximum_of_a_group_holds():
    cloud = Cloud(*some_potential(10, 4), policy=groups(small=GroupPolicy(max=3)))
    cloud.submit(*range(1, 11), cpu="4")
    assert len(ordered(cloud)) == 3
    assert ordered(cloud) == []


def test_no_node_is_ordered_for_a_job_that_starts_before_it_would_be_ready():
    cloud = Cloud(a_node("n1", 4, "16Gi"), *some_potential(4))
    cloud.submit(1, cpu="4")
    cloud.submit(2, cpu="4")
    cloud.step(StartsForecast({2: cloud.now_ms + 40_000}))
    plan = cloud.plan()
    assert plan.order == ()
    assert plan.outlooks[0].note == "it is expected to start in 40 s without a new node"
    cloud.step(StartsForecast({2: cloud.now_ms + 2 * BOOT_MS}))
    assert ordered(cloud) == ["small-1"]


def test_a_group_without_capacity_is_passed_over_for_a_while():
    cloud = Cloud(*some_potential(3, 4, price=100), *some_potential(3, 4, group="other", price=200))
    cloud.full.add("small")
    cloud.runs_for(60_000, 1)
    cloud.submit(1, cpu="4")
    cloud.run(4 * BOOT_MS)
    assert cloud.wanted == ["small-1", "other-1"]
    assert (cloud.state(), cloud.jobs[1].losses, cloud.jobs[1].failures) == ("succeeded", 0, 0)


def test_spot_is_cheaper_only_if_little_work_is_lost():
    spot = potential("spot-1", group="spot", price=40, spot=True, losses_milli=200_000)
    normal = potential("normal-1", group="normal", price=100)
    cloud = Cloud(spot, normal)
    cloud.submit(1, cpu="4", estimate_ms=20 * HOUR_MS)
    assert ordered(cloud) == ["normal-1"], "a run of 20 h would rarely end"
    cloud = Cloud(spot, normal)
    cloud.submit(1, cpu="4", estimate_ms=20 * HOUR_MS, checkpoint=Checkpoint(signal="USR1", every_ms=600_000))
    assert ordered(cloud) == ["spot-1"]


def test_the_overhead_of_spot_grows_with_the_time_between_checkpoints():
    cloud = Cloud(potential("a"))
    cloud.submit(1, cpu="4", estimate_ms=HOUR_MS)
    gang = gang_of(1, cloud.jobs[1].spec, 0)
    node = potential("b", spot=True, losses_milli=1_000_000)  # one loss per hour
    assert round(spot_overhead(gang, node, 0), 2) == 2.0, "half of an hour is repeated per hour"
    assert spot_overhead(gang, potential("c", spot=True), 0) == 1.0


def test_the_number_of_nodes_of_a_gang_follows_its_requests():
    cloud = Cloud(potential("a", 4))
    cloud.submit(1, cpu="1", count=10)
    assert nodes_needed(gang_of(1, cloud.jobs[1].spec, 0), potential("x", 4)) == 3
    assert nodes_needed(gang_of(1, cloud.jobs[1].spec, 0), potential("x", 16)) == 1


def test_half_empty_nodes_are_emptied_if_others_take_their_work():
    saves = {"checkpoint": Checkpoint(signal="USR1"), "cpu": "1"}
    cloud = Cloud(*some_potential(2, 4), policy=groups(small=GroupPolicy(idle_ms=60_000)))
    cloud.submit(1, cpu="4")
    cloud.submit(2, **saves)
    cloud.run(2 * BOOT_MS)
    assert cloud.phases() == {"small-1": "ready", "small-2": "ready"}
    cloud.submit(3, cpu="1", checkpoint=Checkpoint(signal="USR1"))
    cloud.observe("1.0.1", "succeeded", 0)
    cloud.submit(4, cpu="1", checkpoint=Checkpoint(signal="USR1"), node_selector={})
    assert len({run.node for run in cloud.runs.values() if not run.finished_ms}) <= 2
    cloud.run(10 * BOOT_MS)
    assert len(cloud.phases()) == 1
    assert {cloud.state(job) for job in (2, 3, 4)} <= {"scheduled", "running"}


def test_a_job_is_too_large_only_if_no_node_that_could_be_ordered_takes_it():
    cloud = Cloud(a_node("n1", 2), *some_potential(2, 16), admission=AdmissionPolicy("reject"))
    gate = cloud.controller.gate
    gate.check([a_job_spec(cpu="16")], {})
    gate.check([a_job_spec(cpu="16", count=2)], {})
    for too_large in ({"cpu": "17"}, {"cpu": "16", "count": 3}):
        with pytest.raises(InvalidInput, match="can never run here"):
            gate.check([a_job_spec(**too_large)], {})
