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
from hodei.model.facts import JobCancelled, JobSubmitted, RunObserved
from hodei.model.job import GangRules
from hodei.model.job_affinity import HostPort
from unit.control.house import House, a_house

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


def _house(*cpus: int, **options: Any) -> House:
    nodes = [a_node(f"n{i}", cpu, "64Gi", labels={"name": f"n{i}"}) for i, cpu in enumerate(cpus, 1)]
    return House(*nodes, preemption=BY_NUMBER, **options)


def _run(house: House, id: int, priority: int, cpu: str = "1", *, node: str = "", **fields: Any) -> None:
    """A job that runs, on that node, and a minute goes by."""
    if node:
        fields["node_selector"] = {"name": node}
    house.submit(id, cpu=cpu, priority=priority, **fields)
    assert house.started() == [f"{id}.0.1"]
    house.see(f"{id}.0.1", "running")
    house.now_ms += 60_000


def _goes(house: House, *runs: str) -> None:
    house.now_ms += 100
    for run in runs:
        house.see(run, "failed", 143)


# ---------------------------------------------------------------------------------------------- who and whom


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
def test_whoever_has_the_higher_number_takes_the_place_of_a_lower_one_and_never_of_an_equal(who, whom, may):
    house = _house(1)
    _run(house, 1, whom)
    house.submit(9, cpu="1", priority=who)
    assert house.stopped() == (["1.0.1"] if may else [])
    if may:
        _goes(house, "1.0.1")
        assert house.started() == ["9.0.1"]


def test_one_that_takes_nobodys_place_never_does():
    house = _house(1)
    _run(house, 1, 0)
    house.submit(9, cpu="1", priority=SYSTEM, preempts=False)
    assert house.stopped() == []
    house.submit(10, cpu="1", priority=SYSTEM)
    assert house.stopped() == ["1.0.1"]


def test_a_higher_one_of_the_same_class_is_not_kept_waiting_by_a_lower_one_that_was_refused():
    house = _house(1)
    _run(house, 1, 20)
    house.submit(8, cpu="1", priority=20)
    assert house.stopped() == []
    house.submit(9, cpu="1", priority=21)
    assert house.stopped() == ["1.0.1"]


def test_the_lowest_priorities_go_first():
    house = _house(3)
    for id, priority in ((1, 30), (2, 10), (3, 20)):
        _run(house, id, priority)
    house.submit(9, cpu="2", priority=40)
    assert sorted(house.stopped()) == ["2.0.1", "3.0.1"]


def test_who_goes_already_is_waited_for_and_nobody_else_is_told_to_go():
    house = _house(1, 1)
    _run(house, 1, 0)
    _run(house, 2, 0)
    house.learn(JobCancelled(1))
    house.submit(9, cpu="1", priority=5)
    assert house.stopped() == []
    assert "job 1 was told to go" in house.reason(9)[1]
    _goes(house, "1.0.1")
    assert house.started() == ["9.0.1"]


def test_who_holds_the_port_goes_and_not_the_lower_one_beside_it():
    house = _house(8)
    _run(house, 1, -5)
    _run(house, 2, 3, ports=(HostPort(80),))
    house.submit(9, cpu="1", priority=5, ports=(HostPort(80),))
    assert house.stopped() == ["2.0.1"]


# ---------------------------------------------------------------------------------------------- the least harm


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
    house, id = _house(4, 4), 0
    for name, jobs in zip(names, (stay, go), strict=True):
        for priority, cpu in jobs:
            id += 1
            _run(house, id, priority, cpu, node=name)
    house.submit(99, cpu="4", priority=100)
    assert {house.runs[run].node for run in house.stopped()} == {names[1]}


def test_who_started_last_goes_however_little_work_the_older_one_would_lose():
    house = _house(2)
    _run(house, 1, 0)
    _run(house, 2, 0)
    house.see("1.0.1", "running", checkpoint_ms=house.now_ms)
    house.submit(9, cpu="1", priority=5)
    assert house.stopped() == ["2.0.1"]


# -------------------------------------------------------------------------------------------------- budgets


def test_a_budget_is_respected_if_that_can_be_done():
    house = _house(1, 1)
    _run(house, 1, 0)
    _run(house, 2, 3)
    house.controller.preempting.guard = AtMost(0, 1)
    house.submit(9, cpu="1", priority=5)
    assert house.stopped() == ["2.0.1"]


def test_a_budget_is_passed_if_there_is_no_other_way():
    house = _house(1, 1)
    _run(house, 1, 0)
    _run(house, 2, 8)
    house.controller.preempting.guard = AtMost(0, 1, 2)
    house.submit(9, cpu="1", priority=5)
    assert house.stopped() == ["1.0.1"]


def test_the_node_that_passes_the_fewest_budgets_is_chosen_even_at_the_cost_of_higher_priorities():
    house = _house(2, 2)
    for id, priority in ((1, 0), (2, 0), (3, 3), (4, 3)):
        _run(house, id, priority, node="n1" if id < 3 else "n2")
    house.controller.preempting.guard = AtMost(0, 1, 2, 3)
    house.submit(9, cpu="2", priority=5)
    assert sorted(house.stopped()) == ["3.0.1", "4.0.1"]


def test_on_one_node_those_are_let_off_first_who_would_pass_a_budget():
    house = _house(2)
    _run(house, 1, 0)
    _run(house, 2, 3)
    house.controller.preempting.guard = AtMost(0, 1)
    house.submit(9, cpu="1", priority=5)
    assert house.stopped() == ["2.0.1"]


def test_a_budget_that_allows_one_is_passed_by_the_second_of_a_gang():
    house = _house(1, 1, 1)
    _run(house, 1, 0)
    _run(house, 2, 0)
    _run(house, 3, 4)
    house.controller.preempting.guard = AtMost(1, 1, 2)
    house.submit(9, cpu="1", count=2, priority=5)
    assert len(house.stopped()) == 2
    assert "3.0.1" in house.stopped()


def test_what_a_budget_allows_is_looked_at_anew_when_it_changes():
    house = _house(1, 1)
    _run(house, 1, 0)
    _run(house, 2, 3)
    guard = house.controller.preempting.guard = AtMost(0, 1)
    (told,) = plan(house.controller, [a_job_spec(cpu="1", priority=5)], house.now_ms)
    assert "job 2" in told.summary
    guard.allowed, guard.version = 1, 1
    (told,) = plan(house.controller, [a_job_spec(cpu="1", priority=5)], house.now_ms)
    assert "job 1" in told.summary


def test_a_node_within_budgets_is_found_behind_many_that_are_not():
    house = _house(*[1] * 150)
    house.submit(*range(1, 151), cpu="1", priority=0)
    house.now_ms += 60_000
    house.controller.preempting.guard = AtMost(0, *(id for id in range(1, 151) if id != 77))
    house.submit(999, cpu="1", priority=5)
    assert house.stopped() == ["77.0.1"]


def test_classes_with_a_guard_stay_classes():
    house = a_house(1, 1)
    _run(house, 1, 500)
    _run(house, 2, 250)
    house.controller.preempting.guard = AtMost(0, 2)
    house.submit(9, cpu="1", priority=600)
    assert house.stopped() == ["2.0.1"]  # 500 is of its own class: the budget is passed
    house.submit(10, cpu="1", priority=250)
    assert house.stopped() == []


# ------------------------------------------------------------------------------------ room held for a lower one


def test_a_higher_one_takes_the_room_that_is_held_for_a_lower_which_queues_again():
    house = _house(1)
    _run(house, 1, 0)
    house.submit(8, cpu="1", priority=5)
    assert house.stopped() == ["1.0.1"]
    house.submit(9, cpu="1", priority=7, name="urgent")
    assert house.stopped() == []  # it waits for the same victim
    assert set(house.controller.preempting.holds) == {9}
    assert "job.preemption_void" in house.kinds(8)
    _goes(house, "1.0.1")
    assert house.started() == ["9.0.1"]
    assert house.state(8) == "pending"
    house.see("9.0.1", "succeeded", 0)
    assert house.started() == ["8.0.1"]


@pytest.mark.parametrize("priority", [5, 4], ids=["an equal one", "a lower one"])
def test_room_held_is_kept_from_equals_and_lower_ones(priority):
    house = _house(1)
    _run(house, 1, 0)
    house.submit(8, cpu="1", priority=5)
    house.submit(9, cpu="1", priority=priority)
    assert set(house.controller.preempting.holds) == {8}
    _goes(house, "1.0.1")
    assert house.started() == ["8.0.1"]


def test_classes_keep_what_is_held_from_higher_ones_too():
    house = a_house(1)
    _run(house, 1, 250)
    house.submit(8, cpu="1", priority="high")
    house.submit(9, cpu="1", priority="critical")
    assert set(house.controller.preempting.holds) == {8}


def test_free_room_that_is_held_for_a_lower_one_is_taken_at_once():
    house = _house(3)
    _run(house, 1, 0, "2")
    house.submit(8, cpu="3", priority=5)  # one core is free and held for it
    assert house.stopped() == ["1.0.1"]
    house.submit(9, cpu="1", priority=7, preempts=False)
    assert house.started() == ["9.0.1"]
    assert "job 9" in next(event.detail["reason"] for event in house.events if event.kind == "job.preemption_void")
    house.later(0)
    assert house.controller.preempting.holds == {}  # with two cores it does not get by


def test_a_hold_that_still_has_its_room_beside_the_higher_one_stays():
    house = _house(4)
    _run(house, 1, 0, "2")
    _run(house, 2, 0, "2")
    house.submit(8, cpu="1", priority=5)
    assert house.stopped() == ["2.0.1"]
    house.submit(9, cpu="1", priority=7)  # there will be room for both
    assert house.stopped() == []
    assert set(house.controller.preempting.holds) == {8, 9}
    assert "job.preemption_void" not in house.kinds(8)
    _goes(house, "2.0.1")
    assert sorted(house.started()) == ["8.0.1", "9.0.1"]


def test_one_who_lost_its_hold_makes_room_for_itself_again_at_once():
    house = _house(4)
    _run(house, 1, 0, "2")
    _run(house, 2, 0, "1")
    house.submit(8, cpu="2", priority=5)  # one core is free
    assert house.stopped() == ["2.0.1"]
    house.submit(9, cpu="1", priority=7)
    assert house.started() == ["9.0.1"]
    assert house.stopped() == ["1.0.1"]
    assert set(house.controller.preempting.holds) == {8}


def test_one_that_finds_other_room_leaves_the_hold_alone():
    house = _house(1, 1)
    _run(house, 1, 0)
    _run(house, 2, 0)
    house.submit(8, cpu="1", priority=5)
    (told,) = house.stopped()
    other = "2.0.1" if told == "1.0.1" else "1.0.1"
    higher = JobSubmitted(a_job(9, cpu="1", priority=7, at_ms=house.now_ms))
    house.learn(RunObserved(other, "succeeded", house.now_ms, 0), higher)
    assert house.started() == ["9.0.1"]
    assert set(house.controller.preempting.holds) == {8}


def test_a_gang_takes_the_room_that_is_held_for_several_lower_ones():
    house = _house(1, 1)
    _run(house, 1, 0)
    _run(house, 2, 0)
    house.submit(7, 8, cpu="1", priority=5)
    assert sorted(house.stopped()) == ["1.0.1", "2.0.1"]
    house.submit(9, cpu="1", count=2, priority=6, gang=GangRules())
    assert house.stopped() == []
    assert set(house.controller.preempting.holds) == {9}
    _goes(house, "1.0.1", "2.0.1")
    assert house.started() == ["9.0.1", "9.1.1"]


def test_a_look_leaves_holds_as_they_are():
    house = _house(1)
    _run(house, 1, 0)
    house.submit(8, cpu="1", priority=5)
    before = house.used()
    (told,) = plan(house.controller, [a_job_spec(cpu="1", priority=7)], house.now_ms)
    assert "1" in told.summary
    assert house.used() == before
    assert set(house.controller.preempting.holds) == {8}


# ----------------------------------------------------------------------------------------------- settings


def test_numbers_count_from_the_moment_that_the_policy_says_so_and_budgets_stay():
    house = a_house(1)
    _run(house, 1, 0)
    guard = house.controller.preempting.guard = AtMost(0, 1)
    house.submit(9, cpu="1", priority=5)
    assert house.stopped() == []
    other = a_house(preemption=BY_NUMBER)
    house.controller.preempting.take_settings(other.controller.preempting)
    assert house.controller.preempting.guard is guard
    (told,) = plan(house.controller, [a_job_spec(cpu="1", priority=5)], house.now_ms)
    assert "job 1" in told.summary
