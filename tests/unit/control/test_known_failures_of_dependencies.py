"""Failures of dependencies known from other schedulers. Each test names the failure elsewhere and the guarantee here. The tests
report as the backends."""

from __future__ import annotations

from hodei.control.explain.why import explain_placement
from hodei.model.dependency import Dependencies, Dependency
from hodei.model.facts import JobCancelled, JobRequeued, NodeLost
from unit.control.harness import a_harness
from unit.control.lifecycle.test_dependencies import after, end, job, submit


def test_a_dependency_that_can_never_be_met_ends_the_job_at_once_and_says_why():
    """Elsewhere: `DependencyNeverSatisfied` stayed in the queue for weeks. Here: the job fails at once and names the cause."""
    harness = a_harness(4)
    submit(
        harness,
        job(harness, 1),
        job(harness, 2, after(1)),
        job(harness, 3, after(2)),
        job(harness, 4, after(3, on="failed")),
    )
    end(harness, 1, "failed")
    assert harness.reason(2) == ("DEPENDENCY_NEVER_MET", "it waited for job 1 (job-1) to succeed, but that failed")
    assert harness.reason(3) == ("DEPENDENCY_NEVER_MET", "it waited for job 2 (job-2) to succeed, but that failed")
    assert harness.started() == ["4.0.1"]
    answer = explain_placement(harness.jobs[2], [], harness.now_ms)
    assert (answer.status, answer.code) == ("ended", "DEPENDENCY_NEVER_MET")
    assert "job 1 (job-1)" in answer.summary


def test_a_failed_dependent_can_be_requeued_with_its_dependency():
    """Elsewhere: after a fix of the first job the rest of the pipeline stayed failed. Here: requeue both and it continues."""
    harness = a_harness(4)
    submit(harness, job(harness, 1), job(harness, 2, after(1)))
    end(harness, 1, "failed")
    harness.step(JobRequeued(1, harness.jobs[1]), JobRequeued(2, harness.jobs[2]))
    assert harness.reason(2)[0] == "WAITING_FOR_DEPENDENCY"
    end(harness, 1, attempt=2)
    assert harness.state(2) == "scheduled"


def test_a_lost_node_is_not_a_failed_job():
    """Elsewhere: a lost host failed all dependents. Here: the job is retried and its dependents wait."""
    harness = a_harness(1, 1)
    submit(harness, job(harness, 1), job(harness, 2, after(1)), job(harness, 3, after(1, on="failed")))
    harness.observe("1.0.1", "running")
    harness.step(NodeLost(harness.runs["1.0.1"].node))
    assert {harness.state(2), harness.state(3)} == {"pending"}
    harness.advance(60_000)
    assert harness.started() == ["1.0.2"]


def test_one_of_two_dependencies_is_enough_and_the_other_may_fail():
    """Elsewhere: any-of was not supported and needed a dummy job. Here: `need` sets how many are enough."""
    harness = a_harness(4)
    either = Dependencies((Dependency("succeeded", job=1), Dependency("succeeded", job=2)), need=1)
    submit(harness, job(harness, 1), job(harness, 2), job(harness, 3, either))
    end(harness, 1, "failed")
    assert harness.state(3) == "pending"
    end(harness, 2)
    assert harness.state(3) == "scheduled"


def test_cancelling_the_first_job_of_a_pipeline_ends_the_others():
    """Elsewhere: dependents of a cancelled job stayed in the queue. Here: each fails with a reason."""
    harness = a_harness(1)
    submit(harness, job(harness, 9))
    submit(harness, job(harness, 1), *(job(harness, id, after(id - 1)) for id in range(2, 6)))
    harness.step(JobCancelled(1))
    assert [harness.state(id) for id in range(2, 6)] == ["failed"] * 4
    assert "was cancelled" in harness.reason(2)[1]
    assert harness.controller.pending() == {"default": 0}
