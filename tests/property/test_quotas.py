"""Quotas under random events: no project or user exceeds its quota, counted from the runs themselves."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from hodei.control.accounting.accounts import accounts_policy
from hodei.model.config import SchedulingConfig
from hodei.model.facts import JobCancelled, NodeJoined, NodeLost
from hodei.model.job import RUN_ENDED
from hodei.plugins.registry import build_profile
from property.examples import examples
from unit.control.harness import Harness, some_nodes

PROJECTS = ("a", "b", "c", "free")
HARD = {"a": 3, "b": 4, "c": 2}
QUOTAS = {
    "a": {"hard": {"cpu": 3, "jobs": 4}, "borrow": {"cpu": 2}, "cohort": "lab"},
    "b": {"hard": {"cpu": 4}, "lend": {"cpu": 3}, "cohort": "lab"},
    "c": {"hard": {"cpu": 2}, "per_user": {"cpu": 1}},
}
NODES = some_nodes(6, 6)

submits = st.tuples(
    st.just("submit"), st.sampled_from(PROJECTS), st.sampled_from(("ann", "bob")), st.integers(1, 3),
    st.integers(1, 3), st.sampled_from(("low", "medium", "critical")),
)  # fmt: skip
other_events = st.tuples(
    st.sampled_from(("end", "fail", "stop", "cancel", "lose", "join", "wait", "restart")), st.integers(0, 99)
)


@examples(150)
@given(
    st.lists(st.one_of(submits, submits, other_events, other_events), max_size=40),
    st.sampled_from(("priority", "multifactor")),
)
def test_no_project_and_no_user_ever_holds_more_than_its_quota(events, queue):
    policy = accounts_policy(msgspec.convert({"quotas": QUOTAS}, SchedulingConfig))
    profiles = {"default": build_profile("default", queue=queue, plugins=("quota",))}
    harness = Harness(*NODES, profiles=profiles, accounts=policy)
    last = 0
    for what, *details in events:
        if what == "submit":
            last += 1
            project, user, cpu, count, priority = details
            harness.submit(last, project=project, user=user, cpu=cpu, count=count, priority=priority, retries=2)
        else:
            apply(harness, what, details[0])
        check(harness)


def apply(harness, what, number):
    live = sorted(run.id for run in harness.runs.values() if run.state not in RUN_ENDED)
    if what in ("end", "fail", "stop") and live:
        state = {"end": "succeeded", "fail": "failed", "stop": "stopped"}[what]
        harness.observe(live[number % len(live)], state, 0 if what == "end" else 1)
    elif what == "cancel" and harness.jobs:
        harness.step(JobCancelled(sorted(harness.jobs)[number % len(harness.jobs)]))
    elif what == "lose":
        harness.step(NodeLost(f"n{1 + number % 2}"))
    elif what == "join":
        harness.step(NodeJoined(NODES[number % 2]))
    elif what == "wait":
        harness.advance(1000 * number)
    elif what == "restart":
        harness.restart(*NODES)


def check(harness):
    held, users, jobs = Counter(), Counter(), {}
    for run in harness.runs.values():
        if run.state not in RUN_ENDED:
            spec = harness.jobs[run.job].spec
            cpu = spec.tasks[0].request["cpu"]
            held[spec.project] += cpu
            users[spec.project, spec.user] += cpu
            jobs.setdefault(spec.project, set()).add(run.job)
    assert held["a"] <= 5000, "3 of its own and 2 borrowed"
    assert held["a"] + held["b"] <= 7000, "the quota of the cohort"
    assert held["a"] <= 3000 + max(0, 3000 - max(0, held["b"] - 1000)), "b lends at most 3"
    assert held["c"] <= 2000
    assert len(jobs.get("a", ())) <= 4
    assert users["c", "ann"] <= 1000
    assert users["c", "bob"] <= 1000
    reported = {row.project: row.used for row in harness.controller.accounts.quota_rows() if row.resource == "cpu"}
    assert reported == {project: held[project] for project in HARD}, "the accounts disagree with the runs"
