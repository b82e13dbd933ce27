"""Quotas: hard and soft limits, limits per user, borrowing and reclaim in a cohort, checks at admission."""

from __future__ import annotations

import msgspec
import pytest

from builders import a_job_spec
from hodei.control.accounting.accounts import accounts_policy
from hodei.control.explain.why import why
from hodei.model.config import SchedulingConfig
from hodei.model.errors import InvalidInput, QueueFull
from hodei.model.facts import JobCancelled, NodeJoined
from hodei.model.job import GangRules
from hodei.plugins.registry import build_profile
from unit.control.harness import Harness, some_nodes


def a_harness(cpus=(8, 8), queue="priority", **sections):
    config = msgspec.convert(sections, SchedulingConfig)
    profiles = {"default": build_profile("default", queue=queue, plugins=("quota",))}
    return Harness(*some_nodes(*cpus), profiles=profiles, accounts=accounts_policy(config))


def quotas(**projects):
    return {name.replace("_", "-"): quota for name, quota in projects.items()}


def running(harness, *jobs):
    return [job for job in jobs if harness.state(job) in ("scheduled", "running")]


def test_a_project_starts_nothing_beyond_its_hard_quota():
    harness = a_harness(quotas=quotas(ml={"hard": {"cpu": 3}}))
    harness.submit(1, 2, 3, 4, project="ml", user="ann")
    assert running(harness, 1, 2, 3, 4) == [1, 2, 3]
    assert harness.reason(4) == ("QUOTA", "project ml may hold 3 cpu and holds 3 cpu (ann 3); it asks for 1 cpu")


def test_an_exhausted_quota_does_not_block_other_projects():
    harness = a_harness(quotas=quotas(ml={"hard": {"cpu": 1}}))
    harness.submit(1, 2, project="ml")
    harness.submit(3, project="web")
    assert running(harness, 1, 2, 3) == [1, 3]


def test_a_job_over_quota_starts_when_another_of_its_project_ends():
    harness = a_harness(quotas=quotas(ml={"hard": {"cpu": 1}}))
    harness.submit(1, 2, project="ml")
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.state(2) == "scheduled"


def test_the_count_of_running_jobs_is_a_quota_too():
    harness = a_harness(quotas=quotas(ml={"hard": {"jobs": 2}}))
    harness.submit(1, 2, 3, project="ml", count=2)
    assert running(harness, 1, 2, 3) == [1, 2]


def test_a_gang_counts_with_all_its_members():
    harness = a_harness(quotas=quotas(ml={"hard": {"cpu": 3}}))
    harness.submit(1, project="ml", count=2)
    harness.submit(2, project="ml", count=2)
    assert running(harness, 1, 2) == [1]


def test_a_wildcard_quota_applies_to_each_project_separately():
    harness = a_harness(quotas={"*": {"hard": {"cpu": 1}}})
    harness.submit(1, 2, project="a")
    harness.submit(3, 4, project="b")
    assert running(harness, 1, 2, 3, 4) == [1, 3]


def test_the_quota_per_user_limits_each_user():
    harness = a_harness(quotas=quotas(ml={"per_user": {"cpu": 1}}))
    harness.submit(1, 2, project="ml", user="ann")
    harness.submit(3, project="ml", user="bob")
    assert running(harness, 1, 2, 3) == [1, 3]
    assert harness.reason(2) == ("QUOTA", "user ann of project ml may hold 1 cpu and holds 1 cpu; it asks for 1 cpu")


def test_held_quota_survives_a_restart():
    harness = a_harness(quotas=quotas(ml={"hard": {"cpu": 1}}))
    harness.submit(1, project="ml")
    harness.restart(*some_nodes(8, 8))
    harness.submit(2, project="ml")
    assert harness.reason(2)[0] == "QUOTA"


def test_higher_priority_does_not_preempt_to_exceed_a_quota():
    harness = a_harness(quotas=quotas(ml={"hard": {"cpu": 1}}))
    harness.submit(1, project="ml", priority="low")
    harness.advance(1000)
    harness.submit(2, project="ml", priority="critical")
    assert harness.stopped() == []
    assert harness.reason(2)[0] == "QUOTA"


COHORT = quotas(
    a={"hard": {"cpu": 4}, "cohort": "lab"},
    b={"hard": {"cpu": 4}, "cohort": "lab"},
)


def test_unused_quota_is_lent_within_the_cohort():
    harness = a_harness(quotas=COHORT)
    harness.submit(*range(1, 9), project="a")
    assert len(running(harness, *range(1, 9))) == 8


def test_lending_is_limited_by_the_lender():
    harness = a_harness(
        quotas=quotas(
            a={"hard": {"cpu": 4}, "cohort": "lab"}, b={"hard": {"cpu": 4}, "lend": {"cpu": 1}, "cohort": "lab"}
        )
    )
    harness.submit(*range(1, 9), project="a")
    assert len(running(harness, *range(1, 9))) == 5


def test_borrowing_is_limited_by_the_borrower():
    harness = a_harness(
        quotas=quotas(
            a={"hard": {"cpu": 4}, "borrow": {"cpu": 2}, "cohort": "lab"}, b={"hard": {"cpu": 4}, "cohort": "lab"}
        )
    )
    harness.submit(*range(1, 9), project="a")
    assert len(running(harness, *range(1, 9))) == 6


def test_an_owner_reclaims_lent_quota_and_no_more_than_it_needs():
    harness = a_harness(quotas=COHORT)
    harness.submit(*range(1, 9), project="a")
    harness.advance(1000)
    harness.submit(10, project="b", count=2)
    assert harness.reason(10)[0] == "QUOTA_LENT"
    assert harness.stopped() == ["8.0.1", "7.0.1"], "the latest start is stopped first"
    for run in ("8.0.1", "7.0.1"):
        harness.observe(run, "stopped", 143)
    assert harness.state(10) == "scheduled"
    assert harness.jobs[7].state == "pending"
    assert harness.reason(7)[0] == "QUOTA", "a reclaimed job waits and does not borrow again"


def test_quota_being_reclaimed_is_not_reclaimed_twice():
    harness = a_harness(quotas=COHORT)
    harness.submit(*range(1, 9), project="a")
    harness.submit(10, project="b")
    assert len(harness.stopped()) == 1
    harness.advance(5000)
    harness.submit(11, project="c")
    assert harness.stopped() == []


def test_quota_that_its_owner_waits_for_is_not_lent_again():
    harness = a_harness(quotas=COHORT)
    harness.submit(*range(1, 9), project="a")
    harness.submit(10, project="b", count=3)
    harness.observe("8.0.1", "stopped", 143)
    harness.submit(12, project="a", priority="critical")
    assert harness.state(12) == "pending"


def test_jobs_within_their_own_quota_are_not_reclaimed():
    harness = a_harness(quotas=COHORT)
    harness.submit(1, 2, 3, 4, project="a")
    harness.submit(5, 6, 7, 8, project="b")
    harness.submit(9, project="b")
    assert harness.stopped() == []
    assert harness.reason(9)[0] == "QUOTA"


def test_amounts_are_compared_in_one_unit_however_they_are_written():
    """Regression: a quota of 4 cores admitted 4000, because one side counted cores and the other thousandths."""
    harness = a_harness(cpus=(64, 64), quotas=quotas(a={"hard": {"cpu": "4"}, "borrow": {"cpu": "500m"}, "cohort": "lab"},
                                                 b={"hard": {"cpu": "64"}, "cohort": "lab"}))  # fmt: skip
    harness.submit(*range(1, 20), project="a", cpu="500m")
    assert len(running(harness, *range(1, 20))) == 9


def test_a_project_exceeds_its_soft_quota_while_no_other_waits():
    harness = a_harness(cpus=(4,), quotas=quotas(ml={"soft": {"cpu": 1}}))
    harness.submit(1, 2, 3, project="ml")
    assert running(harness, 1, 2, 3) == [1, 2, 3]


def test_a_project_over_its_soft_quota_yields_to_pending_jobs_of_others():
    harness = a_harness(cpus=(4,), quotas=quotas(ml={"soft": {"cpu": 1}}))
    harness.submit(1, 2, 3, 4, project="ml")
    harness.submit(5, project="web", cpu=2)  # waits for capacity
    harness.submit(6, project="ml")
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.state(6) == "pending"
    assert harness.reason(6)[0] == "SOFT_QUOTA"
    harness.observe("2.0.1", "succeeded", 0)
    assert harness.state(5) == "scheduled"
    harness.observe("3.0.1", "succeeded", 0)
    assert harness.state(6) == "scheduled"


def test_a_cancelled_job_does_not_enforce_soft_quotas_any_more():
    harness = a_harness(cpus=(4,), quotas=quotas(ml={"soft": {"cpu": 1}}))
    harness.submit(1, 2, 3, 4, project="ml")
    harness.submit(5, project="web", cpu=4)
    harness.submit(6, project="ml")
    harness.observe("1.0.1", "succeeded", 0)
    harness.step(JobCancelled(5))
    assert harness.state(6) == "scheduled"


def test_a_job_that_exceeds_its_largest_possible_quota_is_refused_with_the_limit():
    harness = a_harness(quotas=COHORT)
    with pytest.raises(InvalidInput, match="asks for 9 cpu and project a may never hold more than 8"):
        harness.controller.accounts.admit([a_job_spec(project="a", cpu=9)])
    harness.controller.accounts.admit([a_job_spec(project="a", cpu=8)])


def test_more_pending_jobs_than_allowed_are_refused_with_the_users():
    harness = a_harness(cpus=(1,), quotas=quotas(ml={"pending": 2}))
    harness.submit(1, 2, 3, project="ml", user="ann")
    with pytest.raises(QueueFull, match=r"may have 2 pending jobs and has 2 \(ann 2\)"):
        harness.controller.accounts.admit([a_job_spec(project="ml", user="bob")])


def test_a_request_outside_the_range_is_refused_and_a_missing_one_gets_the_default():
    ranges = {"ml": {"min": {"cpu": "500m"}, "max": {"cpu": 4}, "default": {"memory": "2Gi"}}}
    accounts = a_harness(ranges=ranges).controller.accounts
    with pytest.raises(InvalidInput, match="must ask for at most 4 cpu"):
        accounts.admit([a_job_spec(project="ml", cpu=5)])
    with pytest.raises(InvalidInput, match=r"must ask for at least 0\.5 cpu"):
        accounts.admit([a_job_spec(project="ml", cpu="100m")])
    explicit = a_job_spec(project="ml", memory="1Gi")
    implicit = a_job_spec(project="ml", memory="256Mi")
    first, second = accounts.admit([explicit, implicit])
    assert first is explicit
    assert second.tasks[0].request["memory"] == 2 * 2**30


def test_quota_rows_report_each_project():
    harness = a_harness(quotas=COHORT)
    harness.submit(*range(1, 7), project="a", user="ann")
    row, other = harness.controller.accounts.quota_rows()
    assert (row.project, row.used, row.hard, row.borrowed, row.more, row.by) == ("a", 6000, 4000, 2000, 2000, (("ann", 6000),))  # fmt: skip
    assert (other.project, other.used, other.more) == ("b", 0, 2000)


def test_quotas_can_be_changed_while_jobs_run():
    harness = a_harness(quotas=quotas(ml={"hard": {"cpu": 2}}))
    harness.submit(1, 2, 3, project="ml")
    fresh = a_harness(quotas=quotas(ml={"hard": {"cpu": 3}}))
    harness.controller.accounts.take_settings(fresh.controller.accounts)
    (row,) = harness.controller.accounts.quota_rows()
    assert (row.used, row.hard) == (2000, 3000)
    harness.step(NodeJoined(some_nodes(8, 8, 8)[2]))
    assert harness.state(3) == "scheduled"


def test_the_reason_of_a_per_node_job_names_the_node_that_its_quota_blocks():
    harness = a_harness(cpus=(2, 2), quotas=quotas(ml={"hard": {"cpu": 1}}))
    harness.submit(1, project="ml", user="ann", gang=GangRules(per_node=True))
    (run,) = harness.started()
    harness.observe(run, "running")
    other = "n2" if harness.runs[run].node == "n1" else "n1"
    why_not = "project ml may hold 1 cpu and holds 1 cpu (ann 1); it asks for 1 cpu"
    assert harness.reason() == ("PARTIAL", f"runs on 1 node; not on {other} ({why_not})")
    explanation = why(harness.controller, 1, harness.now_ms)
    assert (explanation.code, why_not in explanation.summary) == ("PARTIAL", True)
    harness.observe(run, "succeeded", 0)
    (second,) = harness.started()
    assert harness.runs[second].node == other


def test_a_per_node_job_with_reclaimed_quota_continues_on_the_other_nodes():
    harness = a_harness(cpus=(4, 4), quotas=COHORT)
    harness.submit(1, project="a", cpu="3", gang=GangRules(per_node=True))
    runs = harness.started()
    for run in runs:
        harness.observe(run, "running")
    harness.advance(1000)
    harness.submit(10, project="b", cpu="4")
    stopped = harness.stopped()
    assert stopped
    for run in stopped:
        harness.observe(run, "stopped", 143)
    assert harness.state(10) == "scheduled"
    assert harness.state(1) == "running"
    assert harness.reason(1)[0] == "PARTIAL"
