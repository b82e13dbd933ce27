"""Classes of QoS at work: who has to go first among equals, and who may use overcommitted room."""

from __future__ import annotations

import pytest

from builders import a_node
from hodei.control.explain.why import why
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.model.affinity import HostPort
from unit.control.harness import Harness, a_harness

GUARANTEED = {"limits": {"cpu": 2000, "memory": 1 << 30}}
BURSTABLE: dict[str, object] = {}


def _going(harness: Harness) -> set[int]:
    return {int(run.split(".")[0]) for run in harness.stopped()}


@pytest.mark.parametrize("firm", [1, 2])
def test_of_equal_priority_the_burstable_job_goes_before_the_guaranteed_one_on_one_node(firm):
    harness = a_harness(4, preemption=PreemptionPolicy())
    for job in (1, 2):
        harness.submit(job, cpu="2", memory="1Gi", priority=100, **(GUARANTEED if job == firm else BURSTABLE))
        harness.see(f"{job}.0.1", "running")
    harness.later(1000)
    harness.submit(3, cpu="2", memory="1Gi", priority=1000)
    assert _going(harness) == {3 - firm}


@pytest.mark.parametrize("firm", [1, 2])
def test_the_same_goes_for_the_choice_between_nodes(firm):
    harness = a_harness(2, 2, preemption=PreemptionPolicy())
    for job in (1, 2):
        harness.submit(job, cpu="2", memory="1Gi", priority=100, **(GUARANTEED if job == firm else BURSTABLE))
        harness.see(f"{job}.0.1", "running")
        harness.later(60_000)  # the first has lost more work when it must go: that counts for less than the class
    harness.submit(3, cpu="2", memory="1Gi", priority=1000)
    assert _going(harness) == {3 - firm}


def test_a_lower_priority_goes_first_whatever_its_class():
    harness = a_harness(4, preemption=PreemptionPolicy())
    harness.submit(1, cpu="2", memory="1Gi", priority=100, **GUARANTEED)
    harness.submit(2, cpu="2", memory="1Gi", priority=250)
    for job in (1, 2):
        harness.see(f"{job}.0.1", "running")
    harness.later(1000)
    harness.submit(3, cpu="2", memory="1Gi", priority=1000)
    assert _going(harness) == {1}


def test_a_best_effort_job_goes_before_a_burstable_one_when_something_else_than_room_is_needed():
    harness = a_harness(8, 8, preemption=PreemptionPolicy())
    harness.submit(1, cpu="1", memory="1Gi", ports=(HostPort(80),), priority=100)
    harness.submit(2, cpu="0", memory="0", ports=(HostPort(80),), priority=100)
    for job in (1, 2):
        harness.see(f"{job}.0.1", "running")
    harness.later(1000)
    harness.submit(3, cpu="1", ports=(HostPort(80),), priority=1000)
    assert _going(harness) == {2}


def _overcommitted(kind: str = "local") -> Harness:
    harness = Harness(a_node("n1", 4, "8Gi", overcommit_percent={"cpu": 200}, kind=kind))
    harness.submit(1, cpu="3", memory="1Gi")
    return harness


def test_guaranteed_jobs_do_not_use_overcommitted_room_and_are_told_so():
    harness = _overcommitted()
    harness.submit(2, cpu="2", memory="1Gi", **GUARANTEED)
    assert harness.state(2) == "pending"
    said = why(harness.controller, 2, harness.now_ms)
    assert said is not None
    assert said.code == "ONLY_OVERCOMMITTED"
    assert "only overcommitted cpu is left" in said.summary
    harness.see("1.0.1", "succeeded", 0)
    assert harness.state(2) == "scheduled"


def test_burstable_and_best_effort_jobs_use_it():
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


def test_what_is_sent_ahead_to_a_batch_system_waits_there_and_is_for_all():
    harness = _overcommitted("slurm")
    harness.submit(2, cpu="2", memory="1Gi", **GUARANTEED)
    assert harness.state(2) == "scheduled"
