"""Gangs with a topology or distribution rule in the controller: `why`, suggestions, preemption."""

from __future__ import annotations

import pytest

from builders import a_job_spec, a_node, a_task
from hodei.control.explain.why import plan, why
from hodei.model.job import Distribution, GangRules
from unit.control.harness import Harness

ONE_RACK = GangRules(topology="rack")


def racks(*names, cpu=4, **fields):
    return [a_node(f"{rack}-{number}", cpu, labels={"rack": rack}, **fields) for rack in names for number in (1, 2)]


def _why(harness, job=1):
    return why(harness.controller, job, harness.now_ms)


def _suggestions(harness, job=1):
    return [suggestion.change for suggestion in _why(harness, job).suggestions]


def test_why_names_the_best_rack_and_how_far_it_is_from_enough():
    harness = Harness(*racks("r1", "r2"))
    harness.submit(1, count=10, gang=ONE_RACK)
    explanation = _why(harness)
    assert explanation.code == "GANG_TOPOLOGY"
    assert explanation.summary.endswith("no rack has capacity for all 10 members; the best one, r1, for 8 or fewer")
    assert [(b.code, b.plugin) for b in explanation.blockers] == [("GANG_TOPOLOGY", "gang_topology")]


def test_suggestions_relax_or_drop_the_topology_or_shrink_the_gang():
    harness = Harness(*racks("r1", "r2"))
    harness.submit(1, count=10, gang=ONE_RACK)
    assert _suggestions(harness) == [
        "one rack for all members as a preference only",
        "drop gang topology rack",
        "8 members instead of 10",
    ]


def test_a_smaller_minimum_is_suggested_for_a_partial_gang():
    harness = Harness(*racks("r1", "r2"))
    harness.submit(1, count=12, min_count=10, gang=ONE_RACK)
    assert "start with 8 members instead of 10" in _suggestions(harness)


def test_a_gang_that_fits_nowhere_gets_no_suggestion_about_its_rack():
    harness = Harness(*racks("r1", "r2"))
    harness.submit(1, count=20, gang=ONE_RACK)
    assert _why(harness).code == "INSUFFICIENT_CPU"
    assert "8 members instead of 20" in _suggestions(harness)
    assert not [change for change in _suggestions(harness) if "rack" in change]


@pytest.mark.parametrize(
    ("model", "change"),
    [("colocated", "drop distribution colocated"), ("hub_and_spoke", "drop distribution hub and spoke")],
)
def test_dropping_the_distribution_is_suggested(model, change):
    harness = Harness(a_node("e", 4, backend="east"), a_node("w", 4, backend="west"))
    harness.submit(1, tasks=(a_task("a", count=5), a_task("b", count=3)), distribution=Distribution(model, "a"))
    assert _why(harness).code == "DISTRIBUTION"
    assert change in _suggestions(harness)


def test_every_suggestion_lets_the_job_start():
    harness = Harness(*racks("r1", "r2"))
    spec = a_job_spec(count=10, gang=ONE_RACK)
    (planned,) = plan(harness.controller, [spec], harness.now_ms)
    for suggestion in planned.suggestions:
        (changed,) = plan(harness.controller, [suggestion.patch.applied_to(spec)], harness.now_ms)
        assert changed.code == "WOULD_START", suggestion.change


def test_the_gang_starts_when_one_rack_has_capacity():
    harness = Harness(*racks("r1", "r2", cpu=4))
    for job, rack in ((1, "r1"), (2, "r2")):
        harness.submit(job, cpu="4", node_selector={"rack": rack})
        harness.observe(f"{job}.0.1", "running")
    harness.submit(3, count=8, gang=ONE_RACK)
    assert harness.state(3) == "pending"
    harness.observe("2.0.1", "succeeded", 0)
    assert {run.node for run in harness.runs.values() if run.job == 3} == {"r2-1", "r2-2"}


def test_preemption_for_a_rack_touches_no_other_rack():
    harness = Harness(*racks("r1", "r2"))
    for job in range(1, 5):
        harness.submit(job, cpu="3", priority="low")
        harness.observe(f"{job}.0.1", "running")
    harness.now_ms += 60_000
    harness.submit(9, cpu="2", count=4, priority="critical", gang=ONE_RACK)
    victim_nodes = {harness.runs[run].node for run in harness.stopped()}
    assert victim_nodes in ({"r1-1", "r1-2"}, {"r2-1", "r2-2"})
