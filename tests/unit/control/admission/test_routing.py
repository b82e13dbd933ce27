"""Several schedulers: which profile a job goes to, who may use it, and which nodes it may use."""

from __future__ import annotations

from typing import Any

import pytest

from builders import a_job_spec, a_node
from hodei.control.explain.why import plan, why
from hodei.model.errors import InvalidInput
from hodei.model.job import Interactive
from unit.control.configured import Configured, scheduling
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
        pytest.param({}, "default", id="none fits: it stays where it was"),
        pytest.param({"gpu": 1}, "gpu", id="asks for a gpu"),
        pytest.param({"gpu": 1, "priority": "high"}, "gpu", id="the first that fits wins"),
        pytest.param({"priority": "critical"}, "urgent", id="of at least that priority"),
        pytest.param({"workload": Interactive()}, "desk", id="of that kind"),
        pytest.param({"labels": {"team": "a"}, "project": "lab-1"}, "lab", id="with those labels"),
        pytest.param({"labels": {"team": "a"}}, "default", id="the rule's profile is closed to its project"),
        pytest.param({"project": "lab-x", "user": "ann"}, "lab", id="of that project and user"),
        pytest.param({"project": "lab-x", "user": "bob"}, "default", id="of another user"),
        pytest.param({"gpu": 1, "profile": "compute"}, "compute", id="it names a profile itself"),
    ],
)
def test_a_job_that_names_no_profile_goes_to_that_of_the_first_rule_that_fits_it(
    fields: dict[str, Any], profile: str
) -> None:
    harness = Configured(ROUTES)
    harness.submit(1, **fields)
    assert harness.where(1) == profile


def test_why_and_plan_say_which_rule_has_sent_a_job_there() -> None:
    harness = Configured(ROUTES, *some_nodes(4))
    harness.submit(1, gpu=1)
    said = why(harness.controller, 1, harness.now_ms)
    assert said is not None
    assert said.escalation_steps[0].text == "routed to profile gpu by rule 1 (gpu)"
    (planned,) = plan(harness.controller, [a_job_spec(priority="critical")], harness.now_ms)
    assert [step.text for step in planned.escalation_steps] == [
        "routed to profile urgent by rule 2 (no gpu, priority at least high)"
    ]


def test_after_a_restart_a_job_is_still_where_its_rule_has_sent_it() -> None:
    harness = Configured(ROUTES, *some_nodes(4))
    harness.submit(1, gpu=1)
    harness.restart(*some_nodes(4))
    assert harness.where(1) == "gpu"
    assert harness.jobs[1].spec.routed_by == "rule 1 (gpu)"


def test_a_job_of_another_project_is_refused_with_the_projects_of_the_profile() -> None:
    harness = Configured(ROUTES)
    harness.controller.gate.check([a_job_spec(profile="lab", project="lab-7")], {})
    with pytest.raises(InvalidInput, match="profile 'lab' is not open to project 'other'") as refused:
        harness.controller.gate.check([a_job_spec(profile="lab", project="other")], {})
    assert refused.value.code == "PROFILE_FORBIDDEN"
    assert "lab-*" in refused.value.hint


def test_a_profile_uses_its_own_nodes_alone_and_why_says_so() -> None:
    here = a_node("n1", labels={"pool": "batch"})
    there = a_node("n2", labels={"pool": "gpu"})
    harness = Configured('[scheduling.profiles.gpu]\nnodes = "pool=gpu"\n', here, there)
    harness.submit(1, 2, cpu=4, profile="gpu")
    assert harness.started() == ["1.0.1"]
    assert harness.runs["1.0.1"].node == "n2"
    said = why(harness.controller, 2, harness.now_ms)
    assert said is not None
    assert ("OUTSIDE_PROFILE", ("n1",)) in [(blocker.code, blocker.nodes) for blocker in said.blockers]


@pytest.mark.parametrize(
    ("toml", "path"),
    [
        pytest.param('[[scheduling.routes]]\nprofile = "gpo"', "routes[0].profile", id="a route to nowhere"),
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
        pytest.param('[scheduling.profiles.a]\nfallback = "b"', "profiles.a.fallback", id="a fallback to nowhere"),
        pytest.param(
            '[scheduling.profiles.a]\nfallback = "b"\n[scheduling.profiles.b]\nfallback = "a"',
            "profiles.a.fallback",
            id="fallbacks in a ring",
        ),
        pytest.param(
            '[scheduling.profiles.a]\nfallback_after = "1m"', "profiles.a.fallback_after", id="after, to where"
        ),
        pytest.param('[scheduling.escalation]\nrelax_after = "1m"', "escalation.relax", id="relax, but what"),
        pytest.param('[scheduling.escalation]\npromote_to = "top"', "escalation.promote_to", id="promote to no class"),
        pytest.param('[scheduling.breaker]\npause = "soon"', "breaker.pause", id="not a duration"),
    ],
)
def test_a_configuration_problem_is_reported_with_its_path(toml: str, path: str) -> None:
    from hodei.control.admission.config import find_problems

    config = scheduling(toml)
    found = find_problems(config, {"default", "compute", *config.profiles})
    assert path in [place for place, _ in found]
