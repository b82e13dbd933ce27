"""A critical job lifts what it waits for."""

from __future__ import annotations

import pytest

from hodei.model.dependency import Dependencies, Dependency
from hodei.model.facts import JobCancelled
from hodei.plugins.registry import build_profile
from unit.control.house import House, some_nodes


def a_house(queue):
    house = House(*some_nodes(1), profiles={"default": build_profile("default", queue=queue)})
    house.submit(1, priority="critical")  # holds the only core
    return house


def after(*jobs):
    return Dependencies(tuple(Dependency("succeeded", job) for job in jobs))


def next_started(house):
    house.see(next(run.id for run in house.runs.values() if run.state in ("placed", "running")), "succeeded", 0)
    return [run.split(".")[0] for run in house.started()]


@pytest.mark.parametrize("queue", ["priority", "multifactor", "fair"])
def test_a_critical_job_lifts_what_it_waits_for(queue):
    house = a_house(queue)
    house.submit(2, priority="high")
    house.submit(3, priority="low")
    house.submit(4, priority="critical", after=after(3))
    assert next_started(house) == ["3"]
    assert next_started(house) == ["4"]


def test_the_lift_goes_all_the_way_down_a_chain():
    house = a_house("priority")
    house.submit(2, priority="high")
    house.submit(3, priority="low")
    house.submit(4, priority="low", after=after(3))
    house.submit(5, priority="critical", after=after(4))
    assert [next_started(house) for _ in range(4)] == [["3"], ["4"], ["5"], ["2"]]


def test_it_is_over_when_nobody_important_waits_any_more():
    house = a_house("priority")
    house.submit(2, priority="high")
    house.submit(3, priority="low")
    house.submit(4, priority="critical", after=after(3))
    house.learn(JobCancelled(4))
    assert next_started(house) == ["2"]


def test_less_important_work_that_waits_changes_nothing():
    house = a_house("priority")
    house.submit(2, priority="medium")
    house.submit(3, priority="low")
    house.submit(4, priority="batch", after=after(3))
    assert next_started(house) == ["2"]
    assert house.controller.inheriting.lifts == {}


def test_who_is_lifted_sends_nobody_away():
    house = House(*some_nodes(1))
    house.submit(1, priority="medium")
    house.later(1000)
    house.submit(2, priority="low")
    house.submit(3, priority="critical", after=after(2))
    assert house.stopped() == []
