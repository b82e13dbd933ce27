"""Classes of QoS at work: who has to go first among equals, and who may use overcommitted room."""

from __future__ import annotations

import pytest

from builders import a_node
from hodei.control.explain.why import why
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.model.job_affinity import HostPort
from unit.control.house import House, a_house

GUARANTEED = {"limits": {"cpu": 2000, "memory": 1 << 30}}
BURSTABLE: dict[str, object] = {}


def _going(house: House) -> set[int]:
    return {int(run.split(".")[0]) for run in house.stopped()}


@pytest.mark.parametrize("firm", [1, 2])
def test_of_equal_priority_the_burstable_job_goes_before_the_guaranteed_one_on_one_node(firm):
    house = a_house(4, preemption=PreemptionPolicy())
    for job in (1, 2):
        house.submit(job, cpu="2", memory="1Gi", priority=100, **(GUARANTEED if job == firm else BURSTABLE))
        house.see(f"{job}.0.1", "running")
    house.later(1000)
    house.submit(3, cpu="2", memory="1Gi", priority=1000)
    assert _going(house) == {3 - firm}


@pytest.mark.parametrize("firm", [1, 2])
def test_the_same_goes_for_the_choice_between_nodes(firm):
    house = a_house(2, 2, preemption=PreemptionPolicy())
    for job in (1, 2):
        house.submit(job, cpu="2", memory="1Gi", priority=100, **(GUARANTEED if job == firm else BURSTABLE))
        house.see(f"{job}.0.1", "running")
        house.later(60_000)  # the first has lost more work when it must go: that counts for less than the class
    house.submit(3, cpu="2", memory="1Gi", priority=1000)
    assert _going(house) == {3 - firm}


def test_a_lower_priority_goes_first_whatever_its_class():
    house = a_house(4, preemption=PreemptionPolicy())
    house.submit(1, cpu="2", memory="1Gi", priority=100, **GUARANTEED)
    house.submit(2, cpu="2", memory="1Gi", priority=250)
    for job in (1, 2):
        house.see(f"{job}.0.1", "running")
    house.later(1000)
    house.submit(3, cpu="2", memory="1Gi", priority=1000)
    assert _going(house) == {1}


def test_a_best_effort_job_goes_before_a_burstable_one_when_something_else_than_room_is_needed():
    house = a_house(8, 8, preemption=PreemptionPolicy())
    house.submit(1, cpu="1", memory="1Gi", ports=(HostPort(80),), priority=100)
    house.submit(2, cpu="0", memory="0", ports=(HostPort(80),), priority=100)
    for job in (1, 2):
        house.see(f"{job}.0.1", "running")
    house.later(1000)
    house.submit(3, cpu="1", ports=(HostPort(80),), priority=1000)
    assert _going(house) == {2}


def _overcommitted(kind: str = "local") -> House:
    house = House(a_node("n1", 4, "8Gi", overcommit_percent={"cpu": 200}, kind=kind))
    house.submit(1, cpu="3", memory="1Gi")
    return house


def test_guaranteed_jobs_do_not_use_overcommitted_room_and_are_told_so():
    house = _overcommitted()
    house.submit(2, cpu="2", memory="1Gi", **GUARANTEED)
    assert house.state(2) == "pending"
    said = why(house.controller, 2, house.now_ms)
    assert said is not None
    assert said.code == "ONLY_OVERCOMMITTED"
    assert "only overcommitted cpu is left" in said.summary
    house.see("1.0.1", "succeeded", 0)
    assert house.state(2) == "scheduled"


def test_burstable_and_best_effort_jobs_use_it():
    house = _overcommitted()
    house.submit(2, cpu="5", memory="1Gi")
    assert house.state(2) == "scheduled"
    house.submit(3, cpu="0", memory="0")
    assert house.state(3) == "scheduled"


def test_without_overcommitment_a_guaranteed_job_fills_a_node():
    house = a_house(4)
    house.submit(1, cpu="2", memory="1Gi", **GUARANTEED)
    house.submit(2, cpu="2", memory="1Gi", **GUARANTEED)
    assert [house.state(1), house.state(2)] == ["scheduled", "scheduled"]


def test_what_is_sent_ahead_to_a_batch_system_waits_there_and_is_for_all():
    house = _overcommitted("slurm")
    house.submit(2, cpu="2", memory="1Gi", **GUARANTEED)
    assert house.state(2) == "scheduled"
