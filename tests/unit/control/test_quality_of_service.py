"""QoS classes in the controller: the order of victims of equal priority, and the use of overcommitted capacity."""

from __future__ import annotations

import pytest

from builders import a_node
from hodei.control.explain.why import why
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.model.affinity import HostPort
from unit.control.harness import Harness, a_harness

GUARANTEED = {"limits": {"cpu": 2000, "memory": 1 << 30}}
BURSTABLE: dict[str, object] = {}


def _victims(harness: Harness) -> set[int]:
    return {int(run.split(".")[0]) for run in harness.stopped()}


@pytest.mark.parametrize("guaranteed", [1, 2])
def test_at_equal_priority_a_burstable_job_is_preempted_before_a_guaranteed_one(guaranteed):
    harness = a_harness(4, preemption=PreemptionPolicy())
    for job in (1, 2):
        harness.submit(job, cpu="2", memory="1Gi", priority=100, **(GUARANTEED if job == guaranteed else BURSTABLE))
        harness.observe(f"{job}.0.1", "running")
    harness.advance(1000)
    harness.submit(3, cpu="2", memory="1Gi", priority=1000)
    assert _victims(harness) == {3 - guaranteed}


@pytest.mark.parametrize("guaranteed", [1, 2])
def test_the_qos_class_also_decides_between_nodes(guaranteed):
    harness = a_harness(2, 2, preemption=PreemptionPolicy())
    for job in (1, 2):
        harness.submit(job, cpu="2", memory="1Gi", priority=100, **(GUARANTEED if job == guaranteed else BURSTABLE))
        harness.observe(f"{job}.0.1", "running")
        harness.advance(60_000)  # job 1 loses more work, which counts less than the class
    harness.submit(3, cpu="2", memory="1Gi", priority=1000)
    assert _victims(harness) == {3 - guaranteed}


def test_a_lower_priority_is_preempted_first_whatever_its_class():
    harness = a_harness(4, preemption=PreemptionPolicy())
    harness.submit(1, cpu="2", memory="1Gi", priority=100, **GUARANTEED)
    harness.submit(2, cpu="2", memory="1Gi", priority=250)
    for job in (1, 2):
        harness.observe(f"{job}.0.1", "running")
    harness.advance(1000)
    harness.submit(3, cpu="2", memory="1Gi", priority=1000)
    assert _victims(harness) == {1}


def test_a_best_effort_job_is_preempted_for_a_port_before_a_burstable_one():
    harness = a_harness(8, 8, preemption=PreemptionPolicy())
    harness.submit(1, cpu="1", memory="1Gi", ports=(HostPort(80),), priority=100)
    harness.submit(2, cpu="0", memory="0", ports=(HostPort(80),), priority=100)
    for job in (1, 2):
        harness.observe(f"{job}.0.1", "running")
    harness.advance(1000)
    harness.submit(3, cpu="1", ports=(HostPort(80),), priority=1000)
    assert _victims(harness) == {2}


def _overcommitted(kind: str = "local") -> Harness:
    harness = Harness(a_node("n1", 4, "8Gi", overcommit_percent={"cpu": 200}, kind=kind))
    harness.submit(1, cpu="3", memory="1Gi")
    return harness


def test_guaranteed_jobs_do_not_use_overcommitted_capacity_and_why_says_so():
    harness = _overcommitted()
    harness.submit(2, cpu="2", memory="1Gi", **GUARANTEED)
    assert harness.state(2) == "pending"
    explanation = why(harness.controller, 2, harness.now_ms)
    assert explanation is not None
    assert explanation.code == "ONLY_OVERCOMMITTED"
    assert "only overcommitted cpu is left" in explanation.summary
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.state(2) == "scheduled"


def test_burstable_and_best_effort_jobs_use_overcommitted_capacity():
    harness = _overcommitted()
    harness.submit(2, cpu="5", memory="1Gi")
    assert harness.state(2) == "scheduled"
    harness.submit(3, cpu="0", memory="0")
    assert harness.state(3) == "scheduled"


def test_without_overcommitment_a_guaranteed_job_fills_a_node():
    harness = a_harness(4)
    harness.submit(1, cpu="2", memory="1Gi", **GUARANTEED)
    harness.submit(2, cpu="2", memory="1Gi", **GUARANTEED)
    assert [harness.state(1), harness.state(2)] == ["scheduled", "scheduled"]


def test_guaranteed_jobs_use_overcommitted_capacity_of_a_batch_system():
    harness = _overcommitted("slurm")
    harness.submit(2, cpu="2", memory="1Gi", **GUARANTEED)
    assert harness.state(2) == "scheduled"
