"""Preemption where the priority number itself counts, as kube-scheduler has it: who goes, who never does, and whose hold
a higher one may take.

The guards here are plain lists: that real budgets are read rightly is shown where they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from builders import a_job, a_job_spec, a_node
from hodei.control.explain.why import plan
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.engine.preemption.victims import Going
from hodei.model.affinity import HostPort
from hodei.model.facts import JobCancelled, JobSubmitted, RunObserved
from hodei.model.job import GangRules
from unit.control.harness import Harness, a_harness

BY_NUMBER = PreemptionPolicy(by="number")
SYSTEM = 2_000_001_000


class AtMost:
    """A guard: of some jobs no more than `allowed` may go."""

    def __init__(self, allowed: int, *jobs: int) -> None:
        self.version, self.allowed, self.jobs = 0, allowed, jobs

    def guarded(self, job: int) -> bool:
        return job in self.jobs

    def violations(self, going: Sequence[Going]) -> list[int]:
        out, taken = [], 0
        for job, _ in going:
            taken += job in self.jobs
            out.append(int(job in self.jobs and taken > self.allowed))
        return out


def _house(*cpus: int, **options: Any) -> Harness:
    nodes = [a_node(f"n{i}", cpu, "64Gi", labels={"name": f"n{i}"}) for i, cpu in enumerate(cpus, 1)]
    return Harness(*nodes, preemption=BY_NUMBER, **options)


def _run(harness: Harness, id: int, priority: int, cpu: str = "1", *, node: str = "", **fields: Any) -> None:
    """A job that runs, on that node, and a minute goes by."""
    if node:
        fields["node_selector"] = {"name": node}
    harness.submit(id, cpu=cpu, priority=priority, **fields)
    assert harness.started() == [f"{id}.0.1"]
    harness.see(f"{id}.0.1", "running")
    harness.now_ms += 60_000


def _goes(harness: Harness, *runs: str) -> None:
    harness.now_ms += 100
    for run in runs:
        harness.see(run, "failed", 143)


@pytest.mark.parametrize(
    ("who", "whom", "may"),
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
def test_a_higher_number_preempts_a_lower_one_and_never_an_equal(who, whom, may):
    harness = _house(1)
    _run(harness, 1, whom)
    harness.submit(9, cpu="1", priority=who)
    assert harness.stopped() == (["1.0.1"] if may else [])
    if may:
        _goes(harness, "1.0.1")
        assert harness.started() == ["9.0.1"]


def test_a_job_that_may_not_preempt_never_does():
    harness = _house(1)
    _run(harness, 1, 0)
    harness.submit(9, cpu="1", priority=SYSTEM, preempts=False)
    assert harness.stopped() == []
    harness.submit(10, cpu="1", priority=SYSTEM)
    assert harness.stopped() == ["1.0.1"]


def test_a_higher_one_of_the_same_class_is_not_kept_waiting_by_a_lower_one_that_was_refused():
    harness = _house(1)
    _run(harness, 1, 20)
    harness.submit(8, cpu="1", priority=20)
    assert harness.stopped() == []
    harness.submit(9, cpu="1", priority=21)
    assert harness.stopped() == ["1.0.1"]


def test_the_lowest_priorities_go_first():
    harness = _house(3)
    for id, priority in ((1, 30), (2, 10), (3, 20)):
        _run(harness, id, priority)
    harness.submit(9, cpu="2", priority=40)
    assert sorted(harness.stopped()) == ["2.0.1", "3.0.1"]


def test_a_stopping_job_is_waited_for_and_no_other_is_preempted():
    harness = _house(1, 1)
    _run(harness, 1, 0)
    _run(harness, 2, 0)
    harness.learn(JobCancelled(1))
    harness.submit(9, cpu="1", priority=5)
    assert harness.stopped() == []
    assert "waiting for job 1 to stop" in harness.reason(9)[1]
    _goes(harness, "1.0.1")
    assert harness.started() == ["9.0.1"]


def test_the_holder_of_the_port_is_preempted_and_not_a_lower_job():
    harness = _house(8)
    _run(harness, 1, -5)
    _run(harness, 2, 3, ports=(HostPort(80),))
    harness.submit(9, cpu="1", priority=5, ports=(HostPort(80),))
    assert harness.stopped() == ["2.0.1"]


@pytest.mark.parametrize("names", [("n1", "n2"), ("n2", "n1")], ids=["in order", "whatever the names"])
@pytest.mark.parametrize(
    ("stay", "go"),
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
        "the lower of the highest, not of the lowest",
        "the smaller sum",
        "the fewer",
        "the fewer, also below zero",
        "the youngest",
        "four lower ones before one higher",
    ],
)
def test_the_node_of_the_least_harm_is_chosen(stay, go, names):
    harness, id = _house(4, 4), 0
    for name, jobs in zip(names, (stay, go), strict=True):
        for priority, cpu in jobs:
            id += 1
            _run(harness, id, priority, cpu, node=name)
    harness.submit(99, cpu="4", priority=100)
    assert {harness.runs[run].node for run in harness.stopped()} == {names[1]}


def test_the_latest_start_is_preempted_regardless_of_lost_work():
    harness = _house(2)
    _run(harness, 1, 0)
    _run(harness, 2, 0)
    harness.see("1.0.1", "running", checkpoint_ms=harness.now_ms)
    harness.submit(9, cpu="1", priority=5)
    assert harness.stopped() == ["2.0.1"]


def test_a_budget_is_respected_if_that_can_be_done():
    harness = _house(1, 1)
    _run(harness, 1, 0)
    _run(harness, 2, 3)
    harness.controller.preemption.guard = AtMost(0, 1)
    harness.submit(9, cpu="1", priority=5)
    assert harness.stopped() == ["2.0.1"]


def test_a_budget_is_passed_if_there_is_no_other_way():
    harness = _house(1, 1)
    _run(harness, 1, 0)
    _run(harness, 2, 8)
    harness.controller.preemption.guard = AtMost(0, 1, 2)
    harness.submit(9, cpu="1", priority=5)
    assert harness.stopped() == ["1.0.1"]


def test_the_node_that_passes_the_fewest_budgets_is_chosen_even_at_the_cost_of_higher_priorities():
    harness = _house(2, 2)
    for id, priority in ((1, 0), (2, 0), (3, 3), (4, 3)):
        _run(harness, id, priority, node="n1" if id < 3 else "n2")
    harness.controller.preemption.guard = AtMost(0, 1, 2, 3)
    harness.submit(9, cpu="2", priority=5)
    assert sorted(harness.stopped()) == ["3.0.1", "4.0.1"]


def test_on_one_node_victims_that_would_violate_a_budget_are_reprieved_first():
    harness = _house(2)
    _run(harness, 1, 0)
    _run(harness, 2, 3)
    harness.controller.preemption.guard = AtMost(0, 1)
    harness.submit(9, cpu="1", priority=5)
    assert harness.stopped() == ["2.0.1"]


def test_a_budget_that_allows_one_is_passed_by_the_second_of_a_gang():
    harness = _house(1, 1, 1)
    _run(harness, 1, 0)
    _run(harness, 2, 0)
    _run(harness, 3, 4)
    harness.controller.preemption.guard = AtMost(1, 1, 2)
    harness.submit(9, cpu="1", count=2, priority=5)
    assert len(harness.stopped()) == 2
    assert "3.0.1" in harness.stopped()


def test_what_a_budget_allows_is_looked_at_anew_when_it_changes():
    harness = _house(1, 1)
    _run(harness, 1, 0)
    _run(harness, 2, 3)
    guard = harness.controller.preemption.guard = AtMost(0, 1)
    (told,) = plan(harness.controller, [a_job_spec(cpu="1", priority=5)], harness.now_ms)
    assert "job 2" in told.summary
    guard.allowed, guard.version = 1, 1
    (told,) = plan(harness.controller, [a_job_spec(cpu="1", priority=5)], harness.now_ms)
    assert "job 1" in told.summary


def test_a_node_within_budgets_is_found_behind_many_that_are_not():
    harness = _house(*[1] * 150)
    harness.submit(*range(1, 151), cpu="1", priority=0)
    harness.now_ms += 60_000
    harness.controller.preemption.guard = AtMost(0, *(id for id in range(1, 151) if id != 77))
    harness.submit(999, cpu="1", priority=5)
    assert harness.stopped() == ["77.0.1"]


def test_classes_with_a_guard_stay_classes():
    harness = a_harness(1, 1)
    _run(harness, 1, 500)
    _run(harness, 2, 250)
    harness.controller.preemption.guard = AtMost(0, 2)
    harness.submit(9, cpu="1", priority=600)
    assert harness.stopped() == ["2.0.1"]  # 500 is of its own class: the budget is passed
    harness.submit(10, cpu="1", priority=250)
    assert harness.stopped() == []


def test_a_higher_one_takes_the_room_that_is_held_for_a_lower_which_queues_again():
    harness = _house(1)
    _run(harness, 1, 0)
    harness.submit(8, cpu="1", priority=5)
    assert harness.stopped() == ["1.0.1"]
    harness.submit(9, cpu="1", priority=7, name="urgent")
    assert harness.stopped() == []  # it waits for the same victim
    assert set(harness.controller.preemption.holds) == {9}
    assert "job.preemption_abandoned" in harness.kinds(8)
    _goes(harness, "1.0.1")
    assert harness.started() == ["9.0.1"]
    assert harness.state(8) == "pending"
    harness.see("9.0.1", "succeeded", 0)
    assert harness.started() == ["8.0.1"]


@pytest.mark.parametrize("priority", [5, 4], ids=["an equal one", "a lower one"])
def test_room_held_is_kept_from_equals_and_lower_ones(priority):
    harness = _house(1)
    _run(harness, 1, 0)
    harness.submit(8, cpu="1", priority=5)
    harness.submit(9, cpu="1", priority=priority)
    assert set(harness.controller.preemption.holds) == {8}
    _goes(harness, "1.0.1")
    assert harness.started() == ["8.0.1"]


def test_classes_keep_what_is_held_from_higher_ones_too():
    harness = a_harness(1)
    _run(harness, 1, 250)
    harness.submit(8, cpu="1", priority="high")
    harness.submit(9, cpu="1", priority="critical")
    assert set(harness.controller.preemption.holds) == {8}


def test_free_room_that_is_held_for_a_lower_one_is_taken_at_once():
    harness = _house(3)
    _run(harness, 1, 0, "2")
    harness.submit(8, cpu="3", priority=5)  # one core is free and held for it
    assert harness.stopped() == ["1.0.1"]
    harness.submit(9, cpu="1", priority=7, preempts=False)
    assert harness.started() == ["9.0.1"]
    assert "job 9" in next(
        event.detail["reason"] for event in harness.events if event.kind == "job.preemption_abandoned"
    )
    harness.later(0)
    assert harness.controller.preemption.holds == {}  # with two cores it does not get by


def test_a_hold_that_still_has_its_room_beside_the_higher_one_stays():
    harness = _house(4)
    _run(harness, 1, 0, "2")
    _run(harness, 2, 0, "2")
    harness.submit(8, cpu="1", priority=5)
    assert harness.stopped() == ["2.0.1"]
    harness.submit(9, cpu="1", priority=7)  # there will be room for both
    assert harness.stopped() == []
    assert set(harness.controller.preemption.holds) == {8, 9}
    assert "job.preemption_abandoned" not in harness.kinds(8)
    _goes(harness, "2.0.1")
    assert sorted(harness.started()) == ["8.0.1", "9.0.1"]


def test_a_job_that_lost_its_hold_preempts_again_at_once():
    harness = _house(4)
    _run(harness, 1, 0, "2")
    _run(harness, 2, 0, "1")
    harness.submit(8, cpu="2", priority=5)  # one core is free
    assert harness.stopped() == ["2.0.1"]
    harness.submit(9, cpu="1", priority=7)
    assert harness.started() == ["9.0.1"]
    assert harness.stopped() == ["1.0.1"]
    assert set(harness.controller.preemption.holds) == {8}


def test_one_that_finds_other_room_leaves_the_hold_alone():
    harness = _house(1, 1)
    _run(harness, 1, 0)
    _run(harness, 2, 0)
    harness.submit(8, cpu="1", priority=5)
    (told,) = harness.stopped()
    other = "2.0.1" if told == "1.0.1" else "1.0.1"
    higher = JobSubmitted(a_job(9, cpu="1", priority=7, at_ms=harness.now_ms))
    harness.learn(RunObserved(other, "succeeded", harness.now_ms, 0), higher)
    assert harness.started() == ["9.0.1"]
    assert set(harness.controller.preemption.holds) == {8}


def test_a_gang_takes_the_room_that_is_held_for_several_lower_ones():
    harness = _house(1, 1)
    _run(harness, 1, 0)
    _run(harness, 2, 0)
    harness.submit(7, 8, cpu="1", priority=5)
    assert sorted(harness.stopped()) == ["1.0.1", "2.0.1"]
    harness.submit(9, cpu="1", count=2, priority=6, gang=GangRules())
    assert harness.stopped() == []
    assert set(harness.controller.preemption.holds) == {9}
    _goes(harness, "1.0.1", "2.0.1")
    assert harness.started() == ["9.0.1", "9.1.1"]


def test_a_look_leaves_holds_as_they_are():
    harness = _house(1)
    _run(harness, 1, 0)
    harness.submit(8, cpu="1", priority=5)
    before = harness.used()
    (told,) = plan(harness.controller, [a_job_spec(cpu="1", priority=7)], harness.now_ms)
    assert "1" in told.summary
    assert harness.used() == before
    assert set(harness.controller.preemption.holds) == {8}


def test_numbers_count_from_the_moment_that_the_policy_says_so_and_budgets_stay():
    harness = a_harness(1)
    _run(harness, 1, 0)
    guard = harness.controller.preemption.guard = AtMost(0, 1)
    harness.submit(9, cpu="1", priority=5)
    assert harness.stopped() == []
    other = a_harness(preemption=BY_NUMBER)
    harness.controller.preemption.take_settings(other.controller.preemption)
    assert harness.controller.preemption.guard is guard
    (told,) = plan(harness.controller, [a_job_spec(cpu="1", priority=5)], harness.now_ms)
    assert "job 1" in told.summary
