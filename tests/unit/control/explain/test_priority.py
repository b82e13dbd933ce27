"""The breakdown of a job's priority, for every kind of queue."""

from __future__ import annotations

import pytest

from hodei.control.explain.why import priority_breakdown
from hodei.model.dependency import Dependencies, Dependency
from hodei.plugins.registry import build_profile
from unit.control.harness import Harness, some_nodes


def a_harness(queue, **arguments):
    profile = build_profile("default", queue=queue, queue_arguments=arguments)
    harness = Harness(*some_nodes(1), profiles={"default": profile})
    harness.submit(1, estimate_ms=3_600_000)
    harness.submit(2, priority="low", estimate_ms=3_600_000)
    harness.advance(7_200_000)
    return harness


@pytest.mark.parametrize(
    ("queue", "arguments", "terms"),
    [
        ("fifo", {}, {"age": 0}),
        ("priority", {}, {"priority": 250_000, "age": 0}),
        ("fair", {}, {"priority": 250_000, "age": 0}),
        ("multifactor", {"share": 0}, {"priority": 250_000, "age": 20_000}),
        ("batch", {}, {"order": 0, "submitted": 0, "age": 0}),
        ("batch", {"order": "hodei"}, {"order": 0, "submitted": 0, "estimate": 0, "age": 0}),
    ],
    ids=["fifo", "priority", "fair", "multifactor", "batch", "batch by estimate"],
)
def test_the_terms_of_the_priority_add_up(queue, arguments, terms):
    harness = a_harness(queue, **arguments)
    breakdown = priority_breakdown(harness.controller, 2, harness.now_ms)
    assert {term.name: term.milli for term in breakdown.terms} == terms
    assert breakdown.milli == sum(terms.values())
    assert (breakdown.position, breakdown.pending, breakdown.queue) == (1, 1, queue)
    assert all(term.text for term in breakdown.terms)


def test_inherited_priority_is_a_term():
    harness = a_harness("priority")
    harness.submit(3, priority="critical", after=Dependencies((Dependency("succeeded", 2),)))
    breakdown = priority_breakdown(harness.controller, 2, harness.now_ms)
    assert {term.name: term.milli for term in breakdown.terms}["inherited"] == 750_000


def test_a_job_that_is_not_queued_has_no_breakdown():
    harness = a_harness("priority")
    assert priority_breakdown(harness.controller, 1, harness.now_ms) is None
    assert priority_breakdown(harness.controller, 99, harness.now_ms) is None
