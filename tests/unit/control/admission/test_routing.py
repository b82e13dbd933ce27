"""Routing: the profile of a job, the projects that may use a profile, and the nodes of a profile."""

from __future__ import annotations

from typing import Any

import pytest

from builders import a_job_spec, a_node
from hodei.configuration import check_scheduling
from hodei.control.explain.why import plan, why
from hodei.model.errors import InvalidInput
from hodei.model.job import Interactive
from unit.control.configured import ConfiguredHarness, scheduling
from unit.control.harness import some_nodes

ROUTES = """
[scheduling.profiles.gpu]
[scheduling.profiles.urgent]
[scheduling.profiles.desk]
[scheduling.profiles.lab]
projects = ["lab-*"]

[[scheduling.routes]]
when = {gpu = true}
profile = "gpu"
[[scheduling.routes]]
when = {priority_at_least = "high", gpu = false}
profile = "urgent"
[[scheduling.routes]]
when = {workload = "interactive"}
profile = "desk"
[[scheduling.routes]]
when = {labels = "team in (a, b)"}
profile = "lab"
[[scheduling.routes]]
when = {project = "lab-x", user = "ann"}
profile = "lab"
"""


@pytest.mark.parametrize(
    ("fields", "profile"),
    [
        pytest.param({}, "default", id="no rule matches"),
        pytest.param({"gpu": 1}, "gpu", id="requests a gpu"),
        pytest.param({"gpu": 1, "priority": "high"}, "gpu", id="the first match wins"),
        pytest.param({"priority": "critical"}, "urgent", id="by priority"),
        pytest.param({"workload": Interactive()}, "desk", id="by workload"),
        pytest.param({"labels": {"team": "a"}, "project": "lab-1"}, "lab", id="by labels"),
        pytest.param({"labels": {"team": "a"}}, "default", id="the rule's profile is closed to its project"),
        pytest.param({"project": "lab-x", "user": "ann"}, "lab", id="by project and user"),
        pytest.param({"project": "lab-x", "user": "bob"}, "default", id="another user"),
        pytest.param({"gpu": 1, "profile": "compute"}, "compute", id="an explicit profile"),
    ],
)
def test_a_job_without_a_profile_is_routed_by_the_first_matching_rule(fields: dict[str, Any], profile: str) -> None:
    harness = ConfiguredHarness(ROUTES)
    harness.submit(1, **fields)
    assert harness.queue_of(1) == profile


def test_why_and_plan_name_the_rule_that_routed_a_job() -> None:
    harness = ConfiguredHarness(ROUTES, *some_nodes(4))
    harness.submit(1, gpu=1)
    explanation = why(harness.controller, 1, harness.now_ms)
    assert explanation is not None
    assert explanation.escalation_steps[0].text == "routed to profile gpu by rule 1 (gpu)"
    (planned,) = plan(harness.controller, [a_job_spec(priority="critical")], harness.now_ms)
    assert [step.text for step in planned.escalation_steps] == [
        "routed to profile urgent by rule 2 (no gpu, priority at least high)"
    ]


def test_a_routed_job_keeps_its_profile_after_a_restart() -> None:
    harness = ConfiguredHarness(ROUTES, *some_nodes(4))
    harness.submit(1, gpu=1)
    harness.restart(*some_nodes(4))
    assert harness.queue_of(1) == "gpu"
    assert harness.jobs[1].spec.routed_by == "rule 1 (gpu)"


def test_a_job_of_another_project_is_refused_with_the_projects_of_the_profile() -> None:
    harness = ConfiguredHarness(ROUTES)
    harness.controller.gate.check([a_job_spec(profile="lab", project="lab-7")], {})
    with pytest.raises(InvalidInput, match="profile 'lab' is not open to project 'other'") as refusal:
        harness.controller.gate.check([a_job_spec(profile="lab", project="other")], {})
    assert refusal.value.code == "PROFILE_FORBIDDEN"
    assert "lab-*" in refusal.value.hint


def test_a_profile_uses_only_its_own_nodes_and_why_says_so() -> None:
    batch_node = a_node("n1", labels={"pool": "batch"})
    gpu_node = a_node("n2", labels={"pool": "gpu"})
    harness = ConfiguredHarness('[scheduling.profiles.gpu]\nnodes = "pool=gpu"\n', batch_node, gpu_node)
    harness.submit(1, 2, cpu=4, profile="gpu")
    assert harness.started() == ["1.0.1"]
    assert harness.runs["1.0.1"].node == "n2"
    explanation = why(harness.controller, 2, harness.now_ms)
    assert explanation is not None
    assert ("OUTSIDE_PROFILE", ("n1",)) in [(blocker.code, blocker.nodes) for blocker in explanation.blockers]


@pytest.mark.parametrize(
    ("toml", "path"),
    [
        pytest.param('[[scheduling.routes]]\nprofile = "gpo"', "routes[0].profile", id="a route to an unknown profile"),
        pytest.param(
            '[[scheduling.routes]]\nprofile = "default"\nwhen = {priority_at_least = "hi"}',
            "routes[0].when.priority_at_least",
            id="no such priority",
        ),
        pytest.param(
            '[[scheduling.routes]]\nprofile = "default"\nwhen = {labels = "a in b"}',
            "routes[0].when.labels",
            id="not a selector",
        ),
        pytest.param('[scheduling.profiles.a]\nfallback = "b"', "profiles.a.fallback", id="an unknown fallback"),
        pytest.param(
            '[scheduling.profiles.a]\nfallback = "b"\n[scheduling.profiles.b]\nfallback = "a"',
            "profiles.a.fallback",
            id="a cycle of fallbacks",
        ),
        pytest.param(
            '[scheduling.profiles.a]\nfallback_after = "1m"',
            "profiles.a.fallback_after",
            id="fallback_after without a fallback",
        ),
        pytest.param('[scheduling.escalation]\nrelax_after = "1m"', "escalation.relax", id="relax_after without relax"),
        pytest.param('[scheduling.escalation]\npromote_to = "top"', "escalation.promote_to", id="no such class"),
        pytest.param('[scheduling.breaker]\npause = "soon"', "breaker.pause", id="not a duration"),
    ],
)
def test_a_configuration_problem_is_reported_with_its_path(toml: str, path: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_scheduling(scheduling(toml))
    assert {f"scheduling.{path}"} <= {location for location, _ in refused.value.problems}
