"""Every failure class with every restart policy and `retry_on`: retried or not, and with which reason."""

from __future__ import annotations

from typing import Any

import pytest

from hodei.control.lifecycle.runs import NOT_REACHED_RUN, START_FAILED
from hodei.model.facts import JobRequeued, NodeLost, RunObserved
from hodei.model.job import GangRules
from hodei.model.outcome import StopReason
from unit.control.harness import Harness, a_harness
from unit.control.scenarios import live_runs, mark_running

OBSERVED: dict[str, dict[str, Any]] = {
    "job_error": {"exit_code": 1},
    "out_of_memory": {"exit_code": 137, "reason_code": "oom"},
    "timeout": {"exit_code": 143, "reason_code": "timeout"},
    "unhealthy": {"exit_code": 143, "reason_code": "unhealthy"},
    "idle": {"exit_code": 143, "reason_code": "idle"},
    "backend_error": {"reason_code": START_FAILED},
}
CODES = {
    "job_error": "EXIT_CODE", "out_of_memory": "OUT_OF_MEMORY", "timeout": "TIMEOUT", "unhealthy": "UNHEALTHY",
    "idle": "IDLE_TIMEOUT", "backend_error": "START_FAILED", "node_lost": "LOST",
}  # fmt: skip


def after_failure(failure: str, **spec: Any) -> Harness:
    """A job on one of two nodes, right after this failure."""
    harness = a_harness(1, 1)
    harness.submit(1, **spec)
    if failure == "node_lost":
        mark_running(harness, "1.0.1")
        harness.step(NodeLost(harness.runs["1.0.1"].node))
    else:
        harness.step(RunObserved("1.0.1", "failed", harness.now_ms, **OBSERVED[failure]))
    return harness


# Restart policy, retries, and the failure classes that are retried with them.
POLICIES = [
    pytest.param("never", 3, set(), id="never"),
    pytest.param("on_failure", 0, {"node_lost", "backend_error"}, id="on failure, without retries"),
    pytest.param("on_failure", 1, set(CODES) - {"idle"}, id="on failure, with one"),
    pytest.param("always", 0, set(CODES) - {"idle"}, id="always"),
]


@pytest.mark.parametrize(("restart", "retries", "retried"), POLICIES)
@pytest.mark.parametrize("failure", CODES)
def test_a_failure_is_retried_as_the_restart_policy_says(failure, restart, retries, retried):
    harness = after_failure(failure, restart=restart, retries=retries)
    job = harness.jobs[1]
    assert job.failure == failure
    if failure in retried:
        assert job.state in ("pending", "scheduled")
        harness.advance(60_000)
        assert harness.state() == "scheduled"
    else:
        assert (job.state, job.reason_code) == ("failed", CODES[failure])


@pytest.mark.parametrize("failure", CODES)
def test_only_failure_classes_in_retry_on_are_retried(failure):
    harness = after_failure(failure, restart="always", retry_on=("node_lost", "out_of_memory"))
    assert (harness.state() == "failed") == (failure not in ("node_lost", "out_of_memory"))


def test_the_last_failure_is_kept_during_retries_and_cleared_by_success():
    harness = after_failure("out_of_memory", retries=1)
    harness.advance(10_000)
    mark_running(harness, "1.0.2")
    assert harness.jobs[1].failure == "out_of_memory"
    harness.observe("1.0.2", "succeeded", 0)
    assert (harness.state(), harness.jobs[1].failure) == ("succeeded", "")


def test_a_requeue_by_a_user_resets_failures():
    harness = after_failure("job_error")
    harness.step(JobRequeued(1, harness.jobs[1]))
    assert (harness.state(), harness.jobs[1].failure, harness.jobs[1].failures) == ("scheduled", "", 0)


@pytest.mark.parametrize(
    ("retry_on", "is_repaired"),
    [pytest.param((), True, id="any"), pytest.param(("node_lost",), False, id="only a lost node")],
)
def test_a_member_is_replaced_only_after_failures_in_retry_on(retry_on, is_repaired):
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2, retries=3, retry_on=retry_on, gang=GangRules(on_failure="repair"))
    mark_running(harness, "1.0.1", "1.1.1")
    harness.observe("1.0.1", "failed", 1)
    assert (harness.runs["1.0.1"].stop_reason == StopReason("member_ended", gang="repair")) == is_repaired
    assert (harness.stopped() == []) == is_repaired
    assert live_runs(harness) == ["1.1.1"]


@pytest.mark.parametrize("restart", ["never", "on_failure", "always"])
def test_an_unreachable_backend_uses_no_retries(restart):
    harness = a_harness(1)
    harness.submit(1, restart=restart, retry_on=("job_error",))
    for attempt in range(1, 11):
        harness.observe(f"1.0.{attempt}", "failed", reason_code=NOT_REACHED_RUN, reason="connection refused")
        assert harness.reason() == ("NOT_REACHED", "connection refused")
        harness.advance(2000)
        assert harness.state() == "scheduled"
    assert (harness.jobs[1].losses, harness.jobs[1].failures, harness.jobs[1].started_ms) == (0, 0, 0)


def test_a_member_of_an_unreachable_backend_is_replaced_without_using_retries():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, gang=GangRules(on_failure="repair"))
    mark_running(harness, "1.0.1")
    for attempt in range(1, 6):
        harness.observe(f"1.1.{attempt}", "failed", reason_code=NOT_REACHED_RUN, reason="connection refused")
        harness.advance(10_000)
        assert harness.runs[f"1.1.{attempt + 1}"].state == "placed"
    assert harness.runs["1.0.1"].state == "running"
    assert (harness.jobs[1].losses, harness.jobs[1].failures) == (0, 0)


def test_a_gang_with_a_member_that_ran_is_not_restarted_under_restart_never():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, restart="never")
    mark_running(harness, "1.0.1")
    harness.observe("1.1.1", "failed", reason_code=NOT_REACHED_RUN, reason="connection refused")
    harness.observe("1.0.1", "stopped")
    assert (harness.state(), harness.reason()[0]) == ("failed", "START_FAILED")
