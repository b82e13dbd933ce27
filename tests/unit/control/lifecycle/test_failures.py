"""Every class of failure against every restart policy and `retry_on`: is it tried again, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from hodei.control.lifecycle.runs import NOT_REACHED_RUN, START_FAILED
from hodei.model.facts import JobRequeued, NodeLost, RunObserved
from hodei.model.job import GangRules
from hodei.model.outcome import StopReason
from unit.control.harness import Harness, a_harness
from unit.control.scenarios import live, running

SEEN: dict[str, dict[str, Any]] = {
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


def struck(failure: str, **spec: Any) -> Harness:
    """A job on the first of two nodes, right after this has happened to it."""
    harness = a_harness(1, 1)
    harness.submit(1, **spec)
    if failure == "node_lost":
        running(harness, "1.0.1")
        harness.learn(NodeLost(harness.runs["1.0.1"].node))
    else:
        harness.learn(RunObserved("1.0.1", "failed", harness.now_ms, **SEEN[failure]))
    return harness


# For each: the restart policy, the retries, and which classes are tried again then.
POLICIES = [
    pytest.param("never", 3, set(), id="never"),
    pytest.param("on_failure", 0, {"node_lost", "backend_error"}, id="on failure, without retries"),
    pytest.param("on_failure", 1, set(CODES) - {"idle"}, id="on failure, with one"),
    pytest.param("always", 0, set(CODES) - {"idle"}, id="always"),
]


@pytest.mark.parametrize(("restart", "retries", "again"), POLICIES)
@pytest.mark.parametrize("failure", CODES)
def test_each_failure_is_tried_again_as_its_policy_says(failure, restart, retries, again):
    harness = struck(failure, restart=restart, retries=retries)
    job = harness.jobs[1]
    assert job.failure == failure
    if failure in again:
        assert job.state in ("pending", "scheduled")
        harness.later(60_000)
        assert harness.state() == "scheduled"
    else:
        assert (job.state, job.reason_code) == ("failed", CODES[failure])


@pytest.mark.parametrize("failure", CODES)
def test_retry_on_names_the_only_failures_after_which_it_is_tried_again(failure):
    harness = struck(failure, restart="always", retry_on=("node_lost", "out_of_memory"))
    assert (harness.state() == "failed") == (failure not in ("node_lost", "out_of_memory"))


def test_the_last_failure_stays_known_while_it_is_tried_again_and_is_forgotten_with_success():
    harness = struck("out_of_memory", retries=1)
    harness.later(10_000)
    running(harness, "1.0.2")
    assert harness.jobs[1].failure == "out_of_memory"
    harness.see("1.0.2", "succeeded", 0)
    assert (harness.state(), harness.jobs[1].failure) == ("succeeded", "")


def test_a_requeue_by_a_user_resets_failures():
    harness = struck("job_error")
    harness.learn(JobRequeued(1, harness.jobs[1]))
    assert (harness.state(), harness.jobs[1].failure, harness.jobs[1].failures) == ("scheduled", "", 0)


@pytest.mark.parametrize(
    ("retry_on", "is_repaired"),
    [pytest.param((), True, id="any"), pytest.param(("node_lost",), False, id="only a lost node")],
)
def test_a_member_is_replaced_only_after_failures_that_count_for_its_job(retry_on, is_repaired):
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2, retries=3, retry_on=retry_on, gang=GangRules(on_failure="repair"))
    running(harness, "1.0.1", "1.1.1")
    harness.see("1.0.1", "failed", 1)
    assert (harness.runs["1.0.1"].stop_reason == StopReason("member_ended", gang="repair")) == is_repaired
    assert (harness.stopped() == []) == is_repaired
    assert live(harness) == ["1.1.1"]


@pytest.mark.parametrize("restart", ["never", "on_failure", "always"])
def test_a_backend_that_is_out_of_reach_uses_up_nothing_however_often(restart):
    harness = a_harness(1)
    harness.submit(1, restart=restart, retry_on=("job_error",))
    for attempt in range(1, 11):
        harness.see(f"1.0.{attempt}", "failed", reason_code=NOT_REACHED_RUN, reason="connection refused")
        assert harness.reason() == ("NOT_REACHED", "connection refused")
        harness.later(2000)
        assert harness.state() == "scheduled"
    assert (harness.jobs[1].losses, harness.jobs[1].failures, harness.jobs[1].started_ms) == (0, 0, 0)


def test_a_member_whose_backend_is_out_of_reach_is_brought_back_without_being_counted():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, gang=GangRules(on_failure="repair"))
    running(harness, "1.0.1")
    for attempt in range(1, 6):
        harness.see(f"1.1.{attempt}", "failed", reason_code=NOT_REACHED_RUN, reason="connection refused")
        harness.later(10_000)
        assert harness.runs[f"1.1.{attempt + 1}"].state == "placed"
    assert harness.runs["1.0.1"].state == "running"
    assert (harness.jobs[1].losses, harness.jobs[1].failures) == (0, 0)


def test_a_gang_of_which_a_member_ran_does_not_run_again_if_it_never_may():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, restart="never")
    running(harness, "1.0.1")
    harness.see("1.1.1", "failed", reason_code=NOT_REACHED_RUN, reason="connection refused")
    harness.see("1.0.1", "stopped")
    assert (harness.state(), harness.reason()[0]) == ("failed", "START_FAILED")
