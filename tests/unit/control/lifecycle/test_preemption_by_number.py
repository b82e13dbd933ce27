"""Preemption by priority number, as in kube-scheduler: choice of victims, disruption budgets, holds of lower preemptors.

The guards here are plain lists; tests of the budgets themselves are elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from builders import a_job, a_job_spec, a_node
from hodei.control.explain.why import plan
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.engine.preemption.victims import Disruption
from hodei.model.affinity import HostPort
from hodei.model.facts import JobCancelled, JobSubmitted, RunObserved
from hodei.model.job import GangRules
from unit.control.harness import Harness, a_harness

BY_NUMBER = PreemptionPolicy(by="number")
SYSTEM = 2_000_001_000


class AtMost:
    """A guard that allows `allowed` preemptions among some jobs."""

    def __init__(self, allowed: int, *jobs: int) -> None:
        self.version, self.allowed, self.jobs = 0, allowed, jobs

    def guarded(self, job: int) -> bool:
        return job in self.jobs

    def violations(self, disruptions: Sequence[Disruption]) -> list[int]:
        out, taken = [], 0
        for job, _ in disruptions:
            taken += job in self.jobs
            out.append(int(job in self.jobs and taken > self.allowed))
        return out


def _cluster(*cpus: int, **options: Any) -> Harness:
    nodes = [a_node(f"n{i}", cpu, "64Gi", labels={"name": f"n{i}"}) for i, cpu in enumerate(cpus, 1)]
    return Harness(*nodes, preemption=BY_NUMBER, **options)


def _run(harness: Harness, id: int, priority: int, cpu: str = "1", *, node: str = "", **fields: Any) -> None:
    """A job that has been running for a minute, on `node` if given."""
    if node:
        fields["node_selector"] = {"name": node}
    harness.submit(id, cpu=cpu, priority=priority, **fields)
    assert harness.started() == [f"{id}.0.1"]
    harness.observe(f"{id}.0.1", "running")
    harness.now_ms += 60_000


def _stop(harness: Harness, *runs: str) -> None:
    harness.now_ms += 100
    for run in runs:
        harness.observe(run, "failed", 143)


@pytest.mark.parametrize(
    ("preemptor", "victim", "may"),
    [
        (5, 0, True),
        (1, 0, True),
        (0, -1, True),
        (-1, -2, True),
        (600, 550, True),
        (SYSTEM, 1_000_000_000, True),
        (0, 0, False),
        (-1, -1, False),
        (-2, -1, False),
        (5, 6, False),
        (SYSTEM, SYSTEM, False),
    ],
)
def test_a_higher_number_preempts_a_lower_one_and_never_an_equal(preemptor, victim, may):
    harness = _cluster(1)
    _run(harness, 1, victim)
    harness.submit(9, cpu="1", priority=preemptor)
    assert harness.stopped() == (["1.0.1"] if may else [])
    if may:
        _stop(harness, "1.0.1")
        assert harness.started() == ["9.0.1"]


def test_a_job_that_may_not_preempt_never_does():
    harness = _cluster(1)
    _run(harness, 1, 0)
    harness.submit(9, cpu="1", priority=SYSTEM, preempts=False)
    assert harness.stopped() == []
    harness.submit(10, cpu="1", priority=SYSTEM)
    assert harness.stopped() == ["1.0.1"]


def test_a_higher_number_is_tried_although_a_lower_one_of_its_class_was_refused():
    harness = _cluster(1)
    _run(harness, 1, 20)
    harness.submit(8, cpu="1", priority=20)
    assert harness.stopped() == []
    harness.submit(9, cpu="1", priority=21)
    assert harness.stopped() == ["1.0.1"]


def test_the_lowest_priorities_are_preempted_first():
    harness = _cluster(3)
    for id, priority in ((1, 30), (2, 10), (3, 20)):
        _run(harness, id, priority)
    harness.submit(9, cpu="2", priority=40)
    assert sorted(harness.stopped()) == ["2.0.1", "3.0.1"]


def test_a_stopping_job_is_waited_for_and_no_other_is_preempted():
    harness = _cluster(1, 1)
    _run(harness, 1, 0)
    _run(harness, 2, 0)
    harness.step(JobCancelled(1))
    harness.submit(9, cpu="1", priority=5)
    assert harness.stopped() == []
    assert "waiting for job 1 to stop" in harness.reason(9)[1]
    _stop(harness, "1.0.1")
    assert harness.started() == ["9.0.1"]


def test_the_holder_of_the_port_is_preempted_and_not_a_lower_job():
    harness = _cluster(8)
    _run(harness, 1, -5)
    _run(harness, 2, 3, ports=(HostPort(80),))
    harness.submit(9, cpu="1", priority=5, ports=(HostPort(80),))
    assert harness.stopped() == ["2.0.1"]


@pytest.mark.parametrize("names", [("n1", "n2"), ("n2", "n1")], ids=["in order of names", "in reverse order"])
@pytest.mark.parametrize(
    ("kept", "victims"),
    [
        ([(10, "4")], [(5, "4")]),
        ([(5, "2"), (10, "2")], [(9, "2"), (9, "2")]),
        ([(10, "2"), (9, "2")], [(10, "2"), (0, "2")]),
        ([(10, "2"), (10, "2")], [(10, "4")]),
        ([(-10, "2"), (-10, "2")], [(-10, "4")]),
        ([(10, "4")], [(10, "4")]),
        ([(0, "4")], [(-1, "1"), (-1, "1"), (-1, "1"), (-1, "1")]),
    ],
    ids=[
        "the lower priority",
        "the lower highest priority",
        "the smaller sum",
        "fewer victims",
        "fewer victims, also below zero",
        "the latest start",
        "four lower ones rather than one higher",
    ],
)
def test_the_node_with_the_lowest_victim_cost_is_chosen(kept, victims, names):
    harness, id = _cluster(4, 4), 0
    for name, jobs in zip(names, (kept, victims), strict=True):
        for priority, cpu in jobs:
            id += 1
            _run(harness, id, priority, cpu, node=name)
    harness.submit(99, cpu="4", priority=100)
    assert {harness.runs[run].node for run in harness.stopped()} == {names[1]}


def test_the_latest_start_is_preempted_regardless_of_lost_work():
    harness = _cluster(2)
    _run(harness, 1, 0)
    _run(harness, 2, 0)
    harness.observe("1.0.1", "running", checkpoint_ms=harness.now_ms)
    harness.submit(9, cpu="1", priority=5)
    assert harness.stopped() == ["2.0.1"]


def test_a_budget_is_respected_if_possible():
    harness = _cluster(1, 1)
    _run(harness, 1, 0)
    _run(harness, 2, 3)
    harness.controller.preemption.guard = AtMost(0, 1)
    harness.submit(9, cpu="1", priority=5)
    assert harness.stopped() == ["2.0.1"]


def test_a_budget_is_violated_if_there_is_no_other_way():
    harness = _cluster(1, 1)
    _run(harness, 1, 0)
    _run(harness, 2, 8)
    harness.controller.preemption.guard = AtMost(0, 1, 2)
    harness.submit(9, cpu="1", priority=5)
    assert harness.stopped() == ["1.0.1"]


def test_the_node_with_the_fewest_budget_violations_is_chosen_even_with_higher_priorities():
    harness = _cluster(2, 2)
    for id, priority in ((1, 0), (2, 0), (3, 3), (4, 3)):
        _run(harness, id, priority, node="n1" if id < 3 else "n2")
    harness.controller.preemption.guard = AtMost(0, 1, 2, 3)
    harness.submit(9, cpu="2", priority=5)
    assert sorted(harness.stopped()) == ["3.0.1", "4.0.1"]


def test_on_one_node_victims_that_would_violate_a_budget_are_reprieved_first():
    harness = _cluster(2)
    _run(harness, 1, 0)
    _run(harness, 2, 3)
    harness.controller.preemption.guard = AtMost(0, 1)
    harness.submit(9, cpu="1", priority=5)
    assert harness.stopped() == ["2.0.1"]


def test_both_victims_of_a_gang_count_against_one_budget():
    harness = _cluster(1, 1, 1)
    _run(harness, 1, 0)
    _run(harness, 2, 0)
    _run(harness, 3, 4)
    harness.controller.preemption.guard = AtMost(1, 1, 2)
    harness.submit(9, cpu="1", count=2, priority=5)
    assert len(harness.stopped()) == 2
    assert "3.0.1" in harness.stopped()


def test_a_changed_budget_is_read_again():
    harness = _cluster(1, 1)
    _run(harness, 1, 0)
    _run(harness, 2, 3)
    guard = harness.controller.preemption.guard = AtMost(0, 1)
    (planned,) = plan(harness.controller, [a_job_spec(cpu="1", priority=5)], harness.now_ms)
    assert "job 2" in planned.summary
    guard.allowed, guard.version = 1, 1
    (planned,) = plan(harness.controller, [a_job_spec(cpu="1", priority=5)], harness.now_ms)
    assert "job 1" in planned.summary


def test_a_node_without_budget_violations_is_found_among_many_with_them():
    harness = _cluster(*[1] * 150)
    harness.submit(*range(1, 151), cpu="1", priority=0)
    harness.now_ms += 60_000
    harness.controller.preemption.guard = AtMost(0, *(id for id in range(1, 151) if id != 77))
    harness.submit(999, cpu="1", priority=5)
    assert harness.stopped() == ["77.0.1"]


def test_preemption_by_class_with_a_guard_still_compares_classes():
    harness = a_harness(1, 1)
    _run(harness, 1, 500)
    _run(harness, 2, 250)
    harness.controller.preemption.guard = AtMost(0, 2)
    harness.submit(9, cpu="1", priority=600)
    assert harness.stopped() == ["2.0.1"]  # 500 is its own class, so the budget is violated
    harness.submit(10, cpu="1", priority=250)
    assert harness.stopped() == []


def test_a_higher_preemptor_takes_the_hold_of_a_lower_one():
    harness = _cluster(1)
    _run(harness, 1, 0)
    harness.submit(8, cpu="1", priority=5)
    assert harness.stopped() == ["1.0.1"]
    harness.submit(9, cpu="1", priority=7, name="urgent")
    assert harness.stopped() == []  # it waits for the same victim
    assert set(harness.controller.preemption.holds) == {9}
    assert "job.preemption_abandoned" in harness.event_kinds(8)
    _stop(harness, "1.0.1")
    assert harness.started() == ["9.0.1"]
    assert harness.state(8) == "pending"
    harness.observe("9.0.1", "succeeded", 0)
    assert harness.started() == ["8.0.1"]


@pytest.mark.parametrize("priority", [5, 4], ids=["equal", "lower"])
def test_a_hold_is_kept_from_equal_and_lower_preemptors(priority):
    harness = _cluster(1)
    _run(harness, 1, 0)
    harness.submit(8, cpu="1", priority=5)
    harness.submit(9, cpu="1", priority=priority)
    assert set(harness.controller.preemption.holds) == {8}
    _stop(harness, "1.0.1")
    assert harness.started() == ["8.0.1"]


def test_preemption_by_class_keeps_a_hold_even_from_higher_classes():
    harness = a_harness(1)
    _run(harness, 1, 250)
    harness.submit(8, cpu="1", priority="high")
    harness.submit(9, cpu="1", priority="critical")
    assert set(harness.controller.preemption.holds) == {8}


def test_free_capacity_held_for_a_lower_preemptor_is_used_at_once():
    harness = _cluster(3)
    _run(harness, 1, 0, "2")
    harness.submit(8, cpu="3", priority=5)  # one core is free and held for it
    assert harness.stopped() == ["1.0.1"]
    harness.submit(9, cpu="1", priority=7, preempts=False)
    assert harness.started() == ["9.0.1"]
    assert "job 9" in next(
        event.detail["reason"] for event in harness.events if event.kind == "job.preemption_abandoned"
    )
    harness.advance(0)
    assert harness.controller.preemption.holds == {}  # two cores are not enough for job 8


def test_a_hold_that_still_fits_next_to_the_higher_one_is_kept():
    harness = _cluster(4)
    _run(harness, 1, 0, "2")
    _run(harness, 2, 0, "2")
    harness.submit(8, cpu="1", priority=5)
    assert harness.stopped() == ["2.0.1"]
    harness.submit(9, cpu="1", priority=7)  # there will be capacity for both
    assert harness.stopped() == []
    assert set(harness.controller.preemption.holds) == {8, 9}
    assert "job.preemption_abandoned" not in harness.event_kinds(8)
    _stop(harness, "2.0.1")
    assert sorted(harness.started()) == ["8.0.1", "9.0.1"]


def test_a_job_that_lost_its_hold_preempts_again_at_once():
    harness = _cluster(4)
    _run(harness, 1, 0, "2")
    _run(harness, 2, 0, "1")
    harness.submit(8, cpu="2", priority=5)  # one core is free
    assert harness.stopped() == ["2.0.1"]
    harness.submit(9, cpu="1", priority=7)
    assert harness.started() == ["9.0.1"]
    assert harness.stopped() == ["1.0.1"]
    assert set(harness.controller.preemption.holds) == {8}


def test_a_higher_job_that_fits_elsewhere_leaves_the_hold_alone():
    harness = _cluster(1, 1)
    _run(harness, 1, 0)
    _run(harness, 2, 0)
    harness.submit(8, cpu="1", priority=5)
    (victim,) = harness.stopped()
    other = "2.0.1" if victim == "1.0.1" else "1.0.1"
    higher = JobSubmitted(a_job(9, cpu="1", priority=7, at_ms=harness.now_ms))
    harness.step(RunObserved(other, "succeeded", harness.now_ms, 0), higher)
    assert harness.started() == ["9.0.1"]
    assert set(harness.controller.preemption.holds) == {8}


def test_a_gang_takes_the_holds_of_several_lower_preemptors():
    harness = _cluster(1, 1)
    _run(harness, 1, 0)
    _run(harness, 2, 0)
    harness.submit(7, 8, cpu="1", priority=5)
    assert sorted(harness.stopped()) == ["1.0.1", "2.0.1"]
    harness.submit(9, cpu="1", count=2, priority=6, gang=GangRules())
    assert harness.stopped() == []
    assert set(harness.controller.preemption.holds) == {9}
    _stop(harness, "1.0.1", "2.0.1")
    assert harness.started() == ["9.0.1", "9.1.1"]


def test_a_plan_does_not_change_holds():
    harness = _cluster(1)
    _run(harness, 1, 0)
    harness.submit(8, cpu="1", priority=5)
    before = harness.used()
    (planned,) = plan(harness.controller, [a_job_spec(cpu="1", priority=7)], harness.now_ms)
    assert "1" in planned.summary
    assert harness.used() == before
    assert set(harness.controller.preemption.holds) == {8}


def test_new_settings_switch_to_numbers_and_keep_the_guard():
    harness = a_harness(1)
    _run(harness, 1, 0)
    guard = harness.controller.preemption.guard = AtMost(0, 1)
    harness.submit(9, cpu="1", priority=5)
    assert harness.stopped() == []
    other = a_harness(preemption=BY_NUMBER)
    harness.controller.preemption.take_settings(other.controller.preemption)
    assert harness.controller.preemption.guard is guard
    (planned,) = plan(harness.controller, [a_job_spec(cpu="1", priority=5)], harness.now_ms)
    assert "job 1" in planned.summary
