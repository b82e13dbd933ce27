"""A job inherits the priority of the jobs that depend on it."""

from __future__ import annotations

import pytest

from hodei.model.dependency import Dependencies, Dependency
from hodei.model.facts import JobCancelled
from hodei.plugins.registry import build_profile
from unit.control.harness import Harness, some_nodes


def a_harness(queue):
    harness = Harness(*some_nodes(1), profiles={"default": build_profile("default", queue=queue)})
    harness.submit(1, priority="critical")  # holds the only core
    return harness


def after(*jobs):
    return Dependencies(tuple(Dependency("succeeded", job) for job in jobs))


def next_started(harness):
    harness.observe(next(run.id for run in harness.runs.values() if run.state in ("placed", "running")), "succeeded", 0)
    return [run.split(".")[0] for run in harness.started()]


@pytest.mark.parametrize("queue", ["priority", "multifactor", "fair"])
def test_a_job_inherits_the_priority_of_a_critical_dependent(queue):
    harness = a_harness(queue)
    harness.submit(2, priority="high")
    harness.submit(3, priority="low")
    harness.submit(4, priority="critical", after=after(3))
    assert next_started(harness) == ["3"]
    assert next_started(harness) == ["4"]


def test_priority_is_inherited_along_a_chain():
    harness = a_harness("priority")
    harness.submit(2, priority="high")
    harness.submit(3, priority="low")
    harness.submit(4, priority="low", after=after(3))
    harness.submit(5, priority="critical", after=after(4))
    assert [next_started(harness) for _ in range(4)] == [["3"], ["4"], ["5"], ["2"]]


def test_inherited_priority_ends_with_the_dependents():
    harness = a_harness("priority")
    harness.submit(2, priority="high")
    harness.submit(3, priority="low")
    harness.submit(4, priority="critical", after=after(3))
    harness.step(JobCancelled(4))
    assert next_started(harness) == ["2"]


def test_a_dependent_of_lower_priority_changes_nothing():
    harness = a_harness("priority")
    harness.submit(2, priority="medium")
    harness.submit(3, priority="low")
    harness.submit(4, priority="batch", after=after(3))
    assert next_started(harness) == ["2"]
    assert harness.controller.priority_inheritance.inherited == {}


def test_inherited_priority_does_not_preempt():
    harness = Harness(*some_nodes(1))
    harness.submit(1, priority="medium")
    harness.advance(1000)
    harness.submit(2, priority="low")
    harness.submit(3, priority="critical", after=after(2))
    assert harness.stopped() == []
