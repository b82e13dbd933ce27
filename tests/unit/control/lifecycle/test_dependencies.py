"""Dependencies: when they are met, when they can never be met, timeouts, and the reasons of dependent jobs."""

from __future__ import annotations

from typing import Any

import pytest

from builders import a_job
from hodei.control.clone import clone_controller
from hodei.control.explain.why import why
from hodei.model.dependency import Dependencies, Dependency, DependencyStatus, On
from hodei.model.facts import (
    DataAppeared,
    JobCancelled,
    JobHeld,
    JobReleased,
    JobRequeued,
    JobRestored,
    JobSubmitted,
    NodeJoined,
)
from unit.control.harness import Harness, a_harness, some_nodes


def after(*jobs: int, on: On = "succeeded", need: int = 0, timeout_ms: int = 0) -> Dependencies:
    return Dependencies(tuple(Dependency(on, job=job, name=f"job-{job}") for job in jobs), need, timeout_ms)


def data(what: str = "/data/x", timeout_ms: int = 0) -> Dependencies:
    return Dependencies((Dependency("exists", what=what),), 0, timeout_ms)


def submit(harness: Harness, *jobs: Any) -> None:
    harness.step(*(JobSubmitted(job) for job in jobs))


def job(harness: Harness, id: int, wanted: Dependencies | None = None, **fields: Any) -> Any:
    return a_job(id, at_ms=harness.now_ms, queued_ms=harness.now_ms, after=wanted or Dependencies(), **fields)


def end(harness: Harness, id: int, state: str = "succeeded", attempt: int = 1) -> None:
    harness.observe(f"{id}.0.{attempt}", "running")
    harness.observe(f"{id}.0.{attempt}", state, 0 if state == "succeeded" else 1)


@pytest.mark.parametrize(
    ("on", "ends", "then"),
    [
        pytest.param("succeeded", "succeeded", "scheduled", id="on success: succeeds"),
        pytest.param("succeeded", "failed", "failed", id="on success: fails"),
        pytest.param("succeeded", "cancelled", "failed", id="on success: cancelled"),
        pytest.param("completed", "succeeded", "scheduled", id="on completion: succeeds"),
        pytest.param("completed", "failed", "scheduled", id="on completion: fails"),
        pytest.param("completed", "cancelled", "scheduled", id="on completion: cancelled"),
        pytest.param("failed", "failed", "scheduled", id="on failure: fails"),
        pytest.param("failed", "succeeded", "failed", id="on failure: succeeds"),
        pytest.param("failed", "cancelled", "failed", id="on failure: cancelled"),
        pytest.param("checkpointed", "succeeded", "scheduled", id="on checkpoint: succeeds"),
        pytest.param("checkpointed", "failed", "failed", id="on checkpoint: fails without one"),
    ],
)
def test_an_end_meets_a_dependency_or_fails_the_dependent_job(on: On, ends: str, then: str) -> None:
    harness = a_harness(4)
    submit(harness, job(harness, 1), job(harness, 2, after(1, on=on)))
    assert harness.started() == ["1.0.1"]
    assert harness.state(2) == "pending"
    if ends == "cancelled":
        harness.observe("1.0.1", "running")
        harness.step(JobCancelled(1))
        harness.observe("1.0.1", "stopped", 143)
    else:
        end(harness, 1, ends)
    assert harness.state(1) == ends
    assert harness.state(2) == then
    if then == "failed":
        code, text = harness.reason(2)
        assert code == "DEPENDENCY_NEVER_MET"
        assert "job 1 (job-1)" in text
        assert {"cancelled": "was cancelled"}.get(ends, f"that {ends}") in text


def test_a_dependent_job_is_in_no_queue_and_its_reason_names_the_dependency() -> None:
    harness = a_harness(4)
    submit(harness, job(harness, 1), job(harness, 2, after(1)))
    assert harness.state(2) == "pending"
    assert harness.reason(2) == ("WAITING_FOR_DEPENDENCY", "waits for job 1 (job-1) to succeed")
    assert 2 not in harness.controller.queues["default"].gangs
    assert harness.controller.pending() == {"default": 1}
    assert (harness.controller.dependencies.dependents(1), harness.controller.dependencies.required_jobs(2)) == (
        [2],
        [1],
    )
    end(harness, 1)
    assert (harness.state(2), harness.jobs[2].queued_ms) == ("scheduled", harness.now_ms)
    assert "job.dependencies_met" in harness.event_kinds(2)
    assert not harness.controller.dependencies.dependents(1)


def test_the_order_of_submissions_does_not_matter() -> None:
    harness = a_harness(4)
    submit(harness, job(harness, 1, after(3)), job(harness, 2, after(1)), job(harness, 3))
    assert harness.started() == ["3.0.1"]
    end(harness, 3)
    assert harness.started() == ["1.0.1"]
    end(harness, 1)
    assert harness.started() == ["2.0.1"]


def test_a_failure_that_is_retried_is_not_an_end() -> None:
    harness = a_harness(4)
    submit(harness, job(harness, 1, retries=1), job(harness, 2, after(1)), job(harness, 3, after(1, on="failed")))
    end(harness, 1, "failed")
    assert (harness.state(2), harness.state(3)) == ("pending", "pending")
    harness.advance(60_000)
    end(harness, 1, "succeeded", attempt=2)
    assert (harness.state(2), harness.state(3)) == ("scheduled", "failed")


def test_a_checkpoint_meets_a_dependency_on_a_checkpoint() -> None:
    harness = a_harness(4)
    submit(harness, job(harness, 1), job(harness, 2, after(1, on="checkpointed")), job(harness, 3, after(1)))
    harness.observe("1.0.1", "running")
    assert harness.state(2) == "pending"
    harness.observe("1.0.1", "running", checkpoint_ms=harness.now_ms)
    assert (harness.state(2), harness.state(3)) == ("scheduled", "pending")
    submit(harness, job(harness, 4, after(1, on="checkpointed")))
    assert harness.state(4) == "scheduled"


def test_need_makes_some_dependencies_enough_and_fails_the_job_when_too_few_are_left() -> None:
    harness = a_harness(16)
    some = [job(harness, id) for id in range(1, 6)]
    submit(harness, *some, job(harness, 6, after(1, 2, 3, 4, 5, need=2)), job(harness, 7, after(1, 2, 3, 4, 5, need=4)))
    assert harness.reason(6)[1].startswith("waits for 2 of: job 1 (job-1) to succeed, job 2")
    end(harness, 3, "failed")
    end(harness, 4)
    assert (harness.state(6), harness.state(7)) == ("pending", "pending")
    assert harness.reason(6)[1].startswith("waits for 1 of: ")
    end(harness, 1, "failed")
    assert harness.state(7) == "failed"
    assert harness.reason(7)[1].startswith("needs 4 of 5 and 2 can never be met any more: it waited for job 3 (job-3)")
    end(harness, 5)
    assert harness.state(6) == "scheduled"


def test_data_that_appears_releases_all_dependent_jobs() -> None:
    harness = a_harness(4)
    submit(harness, job(harness, 1, data()), job(harness, 2, data()), job(harness, 3, data("/data/y")))
    assert sorted(harness.controller.dependencies.data) == ["/data/x", "/data/y"]
    assert harness.reason(1) == ("WAITING_FOR_DEPENDENCY", "waits for /data/x to appear")
    harness.step(DataAppeared("/data/x"))
    assert [harness.state(id) for id in (1, 2, 3)] == ["scheduled", "scheduled", "pending"]
    harness.step(JobCancelled(3))
    assert list(harness.controller.dependencies.data) == []


def test_a_dependency_timeout_fails_the_job() -> None:
    harness = a_harness(4)
    submit(harness, job(harness, 1, data(timeout_ms=5000)), job(harness, 2, after(1, on="failed")))
    assert harness.controller.next_wakeup_ms(harness.now_ms) == harness.now_ms + 5000
    harness.advance(4999)
    assert harness.state(1) == "pending"
    harness.advance(1)
    assert (harness.state(1), harness.state(2)) == ("failed", "scheduled")
    assert harness.reason(1) == ("DEPENDENCY_TIMEOUT", "after 5s it still waits for /data/x to appear")
    harness.step(JobRequeued(1, harness.jobs[1]))
    assert harness.state(1) == "pending"
    harness.advance(4999)
    assert harness.state(1) == "pending"
    harness.advance(1)
    assert harness.state(1) == "failed"


def test_a_failure_fails_a_long_chain_in_one_step() -> None:
    harness = a_harness(4)
    length = 3000
    submit(harness, job(harness, 1), *(job(harness, id, after(id - 1)) for id in range(2, length + 1)))
    end(harness, 1, "failed")
    assert {harness.state(id) for id in range(2, length + 1)} == {"failed"}
    assert "job 2999 (job-2999) to succeed, but that failed" in harness.reason(length)[1]


def test_a_held_job_stays_held_when_its_dependencies_are_met() -> None:
    harness = a_harness(4)
    submit(harness, job(harness, 1), job(harness, 2, after(1)), job(harness, 3, after(1)))
    harness.step(JobHeld(2), JobHeld(3))
    harness.step(JobReleased(3))
    assert harness.reason(3)[0] == "WAITING_FOR_DEPENDENCY"
    end(harness, 1)
    assert (harness.state(2), harness.state(3)) == ("held", "scheduled")
    harness.step(JobReleased(2))
    assert harness.state(2) == "scheduled"


def test_a_met_dependency_is_not_checked_again_on_a_retry() -> None:
    harness = a_harness(4)
    submit(harness, job(harness, 1), job(harness, 2, after(1), retries=1))
    end(harness, 1)
    harness.step(JobRequeued(1, harness.jobs[1]))
    end(harness, 2, "failed")
    harness.advance(60_000)
    assert harness.jobs[2].attempt == 2


def test_a_requeued_job_waits_again_for_an_unmet_dependency() -> None:
    harness = a_harness(4)
    submit(harness, job(harness, 1), job(harness, 2, after(1)))
    end(harness, 1, "failed")
    assert harness.state(2) == "failed"
    harness.step(JobRequeued(1, harness.jobs[1]))
    harness.step(JobRequeued(2, harness.jobs[2]))
    assert (harness.state(1), harness.state(2)) == ("scheduled", "pending")
    end(harness, 1, attempt=2)
    assert harness.state(2) == "scheduled"


def test_the_status_of_ended_jobs_comes_with_the_submission() -> None:
    harness = a_harness(4)
    statuses = (DependencyStatus(1, "succeeded"), DependencyStatus(2, "failed", saved=True))
    harness.step(JobSubmitted(job(harness, 5, after(1)), statuses), JobSubmitted(job(harness, 6, after(2)), statuses))
    harness.step(JobSubmitted(job(harness, 7, after(2, on="checkpointed")), statuses))
    assert [harness.state(id) for id in (5, 6, 7)] == ["scheduled", "failed", "scheduled"]


def test_a_deleted_job_counts_as_completed_with_an_unknown_result() -> None:
    harness = a_harness(4)
    submit(harness, job(harness, 5, after(1, on="completed")), job(harness, 6, after(1)))
    assert (harness.state(5), harness.state(6)) == ("scheduled", "failed")
    assert "is not known any more" in harness.reason(6)[1]


def test_dependencies_survive_a_restart() -> None:
    harness = a_harness(1)
    submit(harness, job(harness, 1), job(harness, 2, after(4)), job(harness, 3, after(1, 4)), job(harness, 4))
    end(harness, 1)
    assert harness.state(4) == "scheduled"
    harness.controller = Harness().controller
    # Restored one by one in order of id: job 4 is still unknown when the jobs that wait for it are restored.
    for id in (2, 3, 4):
        runs = tuple(run for run in harness.runs.values() if run.job == id)
        harness.step(
            JobRestored(harness.jobs[id], runs, (DependencyStatus(1, "succeeded"), DependencyStatus(4, "scheduled")))
        )
    harness.step(*(NodeJoined(node) for node in some_nodes(1)))
    assert (harness.state(2), harness.state(3)) == ("pending", "pending")
    assert harness.controller.dependencies.required_jobs(3) == [4]
    end(harness, 4)
    assert harness.started() == ["2.0.1"]
    assert "job.dependencies_met" in harness.event_kinds(3)


def test_why_names_the_dependency_and_why_that_waits() -> None:
    harness = a_harness(1)
    submit(harness, job(harness, 1, cpu=4), job(harness, 2, after(1)), job(harness, 3, after(2)))
    answer = why(harness.controller, 2, harness.now_ms)
    assert answer is not None
    assert (answer.status, answer.code) == ("waiting", "WAITING_FOR_DEPENDENCY")
    assert answer.summary == "waits for job 1 (job-1) to succeed"
    assert any("Insufficient cpu" in blocker.text for blocker in answer.blockers), answer.blockers
    assert "hodei why 1" in answer.hint
    next_in_chain = why(harness.controller, 3, harness.now_ms)
    assert next_in_chain is not None
    assert any("waits for job 1 (job-1) to succeed" in blocker.text for blocker in next_in_chain.blockers)


def test_the_dependencies_of_a_clone_are_its_own() -> None:
    harness = a_harness(4)
    submit(harness, job(harness, 1), job(harness, 2, after(1)))
    other = Harness()
    other.controller, other.jobs, other.now_ms = (
        clone_controller(harness.controller),
        dict(harness.jobs),
        harness.now_ms,
    )
    end(other, 1)
    assert (other.state(2), harness.state(2)) == ("scheduled", "pending")
    assert harness.controller.dependencies.required_jobs(2) == [1]


def test_why_lists_some_dependencies_and_counts_the_rest() -> None:
    harness = a_harness(1)
    submit(harness, *(job(harness, id) for id in range(1, 31)), job(harness, 99, after(*range(1, 31))))
    answer = why(harness.controller, 99, harness.now_ms)
    assert answer is not None
    assert len(answer.blockers) == 21
    assert answer.blockers[-1].text == "… and 10 more, not listed here"
