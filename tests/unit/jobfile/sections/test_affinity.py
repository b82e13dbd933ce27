"""Job affinity, spread and ports in job files: Hodei's form, Kubernetes' blocks, and rendering."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hodei.jobfile.parse import parse_job
from hodei.jobfile.render import job_document
from hodei.model.affinity import (
    HostPort,
    JobAffinity,
    JobTerm,
    Requirement,
    SpreadRule,
    WeightedJobTerm,
    parse_selector,
)
from hodei.model.errors import InvalidInput
from hodei.model.job import JobSpec, TaskSpec

WEB = parse_selector("app=web")


def _task(**keys: Any) -> TaskSpec:
    return parse_job({"name": "job", "command": ["/bin/true"], **keys}, now_ms=0).tasks[0]


def _problems(**keys: Any) -> list[str]:
    with pytest.raises(InvalidInput) as caught:
        _task(**keys)
    return [f"{path}: {text}" for path, text in caught.value.problems]


def test_the_short_form_of_affinity():
    task = _task(
        job_affinity={"required": [{"match": "app=web", "topology": "zone"}]},
        jobAntiAffinity={
            "preferred": [{"weight": 10, "match": "*", "topology": "rack", "projects": ["a"], "project_match": "*"}]
        },
    )
    assert task.job_affinity == JobAffinity((JobTerm("zone", WEB),))
    assert task.job_anti_affinity == JobAffinity((), (WeightedJobTerm(10, JobTerm("rack", (), ("a",), ())),))


def test_affinity_rules_are_one_line_each():
    task = _task(
        affinity_rules=[
            {"with": "app=web", "same": "region"},
            {"with": "app=web", "different": "zone"},
            {"with": "app=web", "regions": 2},
        ]
    )
    assert task.job_affinity == JobAffinity((JobTerm("region", WEB),))
    assert task.job_anti_affinity == JobAffinity((JobTerm("zone", WEB),))
    assert task.spread == (SpreadRule("region", selector=WEB, min_domains=2),)


def test_spread_counts_the_jobs_own_labels_by_default():
    task = _task(
        labels={"app": "web"}, spread=[{"topology": "zone"}, {"topology": "host", "hard": False, "match": "x"}]
    )
    assert task.spread == (
        SpreadRule("zone", selector=WEB),
        SpreadRule("host", hard=False, selector=parse_selector("x")),
    )


def test_kubernetes_blocks_are_parsed():
    term = {
        "topologyKey": "zone",
        "labelSelector": {"matchLabels": {"app": "web"}, "matchExpressions": [{"key": "tier", "operator": "Exists"}]},
        "namespaces": ["a"],
        "namespaceSelector": {},
        "matchLabelKeys": ["version"],
    }
    task = _task(
        labels={"version": "2"},
        affinity={
            "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]},
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 5, "podAffinityTerm": {"topologyKey": "rack"}}
                ]
            },
        },
        topologySpreadConstraints=[
            {
                "maxSkew": 2,
                "topologyKey": "zone",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"app": "web"}},
                "matchLabelKeys": ["version", "absent"],
                "nodeAffinityPolicy": "Ignore",
                "nodeTaintsPolicy": "Honor",
            }
        ],
        ports=[{"containerPort": 80, "hostPort": 8080, "hostIP": "10.0.0.1", "protocol": "UDP"}, {"containerPort": 1}],
    )
    selector = (*WEB, Requirement("tier", "Exists"), Requirement("version", "In", ("2",)))
    assert task.job_affinity == JobAffinity((JobTerm("zone", selector, ("a",), ()),))
    assert task.job_anti_affinity == JobAffinity((), (WeightedJobTerm(5, JobTerm("rack")),))
    assert task.spread == (SpreadRule("zone", 2, False, (*WEB, Requirement("version", "In", ("2",))), 1, False, True),)
    assert task.ports == (HostPort(8080, "UDP", "10.0.0.1"),)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"spread": [{"topology": "zone"}]}, "spread[0].match: select the jobs to count"),
        ({"spread": [{"topology": "zone", "match": "*"}]}, "spread[0].match: select the jobs to count"),
        ({"spread": [{"topology": "zone", "match": "a=b", "max_skew": 0}]}, "spread[0].max_skew: out of range"),
        ({"spread": [{"topology": "a b", "match": "a=b"}]}, "spread[0].topology: 'a b' is not a label key"),
        ({"affinity_rules": [{"with": "a=b"}]}, "affinity_rules[0]: give exactly one of same, different and regions"),
        ({"affinity_rules": [{"with": "((", "same": "zone"}]}, "affinity_rules[0].with: cannot read the selector"),
        (
            {"job_affinity": {"required": [{"match": "", "topology": "zone"}]}},
            "job_affinity.required[0].match: an empty",
        ),
        ({"job_affinity": {"required": [{"match": "a=b"}]}}, "job_affinity.required[0].topology: missing key"),
        ({"ports": [70000]}, "ports[0]: out of range"),
        ({"ports": [80, {"port": 80, "ip": "10.0.0.1"}]}, "ports: the same port twice"),
        ({"ports": [{"port": 80, "ip": "here"}]}, "ports[0].ip: 'here' is not an address"),
        ({"ports": [{"protocol": "UDP"}]}, "ports[0].port: missing key"),
        (
            {"job_affinity": {}, "affinity": {"podAffinity": {}}},
            "job_affinity: give either job_affinity or affinity.podAffinity, not both",
        ),
    ],
)
def test_errors_have_their_paths(keys, problem):
    assert any(error.startswith(problem) for error in _problems(**keys)), _problems(**keys)


keys = st.sampled_from(["app", "tier", "example.com/team", "zone"])
values = st.sampled_from(["", "web", "A.b_c", "1"])
requirements = st.one_of(
    st.builds(Requirement, keys, st.sampled_from(["In", "NotIn"]), st.lists(values, min_size=1, max_size=3).map(tuple)),
    st.builds(Requirement, keys, st.sampled_from(["Exists", "DoesNotExist"])),
)
selectors = st.lists(requirements, max_size=3).map(tuple)
terms = st.builds(
    JobTerm, keys, st.none() | selectors, st.lists(st.sampled_from(["a", "b-c"]), max_size=2).map(tuple),
    st.none() | selectors,
)  # fmt: skip
affinities = st.builds(
    JobAffinity,
    st.lists(terms, max_size=2).map(tuple),
    st.lists(st.builds(WeightedJobTerm, st.integers(1, 100), terms), max_size=2).map(tuple),
)
spreads = st.builds(
    lambda rule: rule if rule.hard else SpreadRule(rule.topology, rule.max_skew, False, rule.selector),
    st.builds(
        SpreadRule, keys, st.integers(1, 9), st.booleans(), st.none() | selectors, st.integers(1, 4),
        st.booleans(), st.booleans(),
    ),
)  # fmt: skip
ports = st.lists(
    st.builds(
        HostPort, st.integers(1, 65535), st.sampled_from(["TCP", "UDP"]), st.sampled_from(["0.0.0.0", "10.0.0.1"])
    ),
    max_size=2,
    unique_by=lambda port: port.port,
).map(tuple)


@settings(max_examples=200, deadline=None)
@given(
    affinity=affinities, anti_affinity=affinities, spread=st.lists(spreads, max_size=2).map(tuple), ports_of_task=ports
)
def test_a_rendered_document_parses_to_the_same_rules(affinity, anti_affinity, spread, ports_of_task):
    request = {"cpu": 1000, "memory": 1 << 28}
    task = TaskSpec(
        command=("/bin/true",),
        request=request,
        job_affinity=affinity,
        job_anti_affinity=anti_affinity,
        spread=spread,
        ports=ports_of_task,
    )
    spec = JobSpec(name="job", tasks=(task,), labels={"app": "web"})
    assert parse_job(job_document(spec), now_ms=0) == spec
