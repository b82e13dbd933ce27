"""The lifecycle of a placed job: ends, retries, losses, stops, and late or repeated reports."""

from __future__ import annotations

import pytest
from msgspec import structs

from builders import a_node, a_task
from hodei.control.lifecycle.runs import START_FAILED
from hodei.model.effects import Forget, Stop
from hodei.model.facts import JobCancelled, JobHeld, JobReleased, JobRequeued, NodeLost, NodeOverridden
from hodei.model.outcome import StopReason
from unit.control.harness import Harness, a_harness, some_nodes


def test_a_job_is_scheduled_runs_and_succeeds():
    harness = a_harness(4)
    harness.submit(1)
    assert (harness.state(), harness.started()) == ("scheduled", ["1.0.1"])
    harness.now_ms += 5
    harness.observe("1.0.1", "running")
    assert harness.state() == "running"
    assert harness.jobs[1].started_ms == harness.now_ms
    harness.now_ms += 5
    harness.observe("1.0.1", "succeeded", 0)
    assert (harness.state(), harness.jobs[1].exit_code, harness.reason()) == ("succeeded", 0, ("", ""))
    assert harness.acts == [Forget("1.0.1", "local")]
    assert harness.used() == {"n1": {}}
    assert harness.event_kinds(1) == ["job.submitted", "job.scheduled", "job.started", "run.ended", "job.ended"]


def test_an_end_without_a_reported_start_counts_as_both():
    harness = a_harness(4)
    harness.submit(1)
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.state() == "succeeded"
    assert harness.runs["1.0.1"].started_ms == harness.now_ms


def test_an_end_may_carry_the_time_of_the_start():
    harness = a_harness(4)
    harness.submit(1)
    harness.now_ms += 60_000
    harness.observe("1.0.1", "succeeded", 0, started_ms=harness.now_ms - 50_000)
    assert harness.runs["1.0.1"].started_ms == harness.jobs[1].started_ms == harness.now_ms - 50_000


def test_an_accepted_run_is_not_running_yet():
    harness = a_harness(4)
    harness.submit(1)
    harness.observe("1.0.1", "placed")
    assert (harness.state(), harness.runs["1.0.1"].state) == ("scheduled", "placed")


def test_a_failure_without_retries_fails_the_job_with_the_exit_code():
    harness = a_harness(4)
    harness.submit(1)
    harness.observe("1.0.1", "failed", 3)
    assert (harness.state(), harness.jobs[1].exit_code) == ("failed", 3)
    assert harness.reason() == ("EXIT_CODE", "member 0 exited with 3")


@pytest.mark.parametrize(
    ("report", "code"),
    [
        pytest.param({"exit_code": 1}, "EXIT_CODE", id="exit code"),
        pytest.param({"exit_code": 143, "reason_code": "timeout", "reason": "over 1h"}, "TIMEOUT", id="timeout"),
        pytest.param(
            {"exit_code": 137, "reason_code": "oom", "reason": "over 1Gi"}, "OUT_OF_MEMORY", id="out of memory"
        ),
        pytest.param({"reason_code": "error", "reason": "no such file"}, "RUN_ERROR", id="not executable"),
        pytest.param({"exit_code": 137, "reason_code": "killed", "reason": "signal 9"}, "EXIT_CODE", id="killed"),
    ],
)
def test_a_failure_has_its_cause_as_reason(report, code):
    harness = a_harness(4)
    harness.submit(1)
    harness.observe("1.0.1", "failed", **report)
    assert harness.state() == "failed"
    assert harness.reason() == (code, report.get("reason") or "member 0 exited with 1")


def test_a_retry_is_a_new_run_after_a_growing_pause():
    harness = a_harness(4)
    harness.submit(1, retries=2)
    pauses = []
    for attempt in (1, 2):
        harness.observe(f"1.0.{attempt}", "failed", 1)
        assert (harness.state(), harness.started()) == ("pending", [])
        assert harness.reason() == ("EXIT_CODE", f"member 0 exited with 1; retry {attempt}")
        pauses.append(harness.jobs[1].not_before_ms - harness.now_ms)
        assert harness.controller.next_wakeup_ms(harness.now_ms) == harness.jobs[1].not_before_ms
        harness.advance(pauses[-1] - 1)
        assert harness.started() == []
        harness.advance(1)
        assert harness.started() == [f"1.0.{attempt + 1}"]
    assert pauses == [1000, 2000]
    harness.observe("1.0.3", "failed", 7)
    assert (harness.state(), harness.jobs[1].exit_code, harness.jobs[1].failures, harness.jobs[1].attempt) == (
        "failed",
        7,
        3,
        3,
    )


def test_a_job_succeeds_after_a_retry():
    harness = a_harness(4)
    harness.submit(1, retries=1)
    harness.observe("1.0.1", "failed", 1)
    harness.advance(1000)
    harness.observe("1.0.2", "succeeded", 0)
    assert (harness.state(), harness.jobs[1].failures, harness.jobs[1].exit_code) == ("succeeded", 1, 0)


@pytest.mark.parametrize(
    ("restart", "retries", "end", "state"),
    [
        pytest.param("never", 5, "failed", "failed", id="never, however many retries"),
        pytest.param("on_failure", 0, "failed", "failed", id="on failure, but none are left"),
        pytest.param("on_failure", 1, "failed", "pending", id="on failure"),
        pytest.param("on_failure", 1, "succeeded", "succeeded", id="on failure, but it succeeded"),
        pytest.param("always", 0, "failed", "pending", id="always, after a failure"),
        pytest.param("always", 0, "succeeded", "pending", id="always, after a success"),
        pytest.param("never", 0, "lost", "failed", id="never, also when lost"),
        pytest.param("on_failure", 0, "lost", "pending", id="a loss is not a failure"),
    ],
)
def test_the_restart_policy_decides_about_a_retry(restart, retries, end, state):
    harness = a_harness(4)
    harness.submit(1, restart=restart, retries=retries)
    harness.observe("1.0.1", end, 0 if end == "succeeded" else 1)
    assert harness.state() == state


def test_a_lost_run_is_repeated_a_few_times_without_counting_as_a_failure():
    harness = a_harness(4)
    harness.submit(1)
    for attempt in (1, 2, 3):
        harness.observe(f"1.0.{attempt}", "lost", reason_code="lost", reason="agent forgot it")
        assert harness.reason() == ("LOST", "agent forgot it")
        assert (harness.jobs[1].losses, harness.jobs[1].failures) == (attempt, 0)
        harness.advance(60_000)
        assert harness.started() == [f"1.0.{attempt + 1}"]
    harness.observe("1.0.4", "lost", reason_code="lost", reason="agent forgot it")
    assert (harness.state(), harness.reason()) == ("failed", ("LOST", "agent forgot it"))


def test_a_failed_start_is_retried_and_the_run_has_no_start_time():
    harness = a_harness(4)
    harness.submit(1)
    harness.observe("1.0.1", "failed", reason_code=START_FAILED, reason="no route to host")
    assert harness.reason() == ("START_FAILED", "no route to host")
    assert (harness.state(), harness.runs["1.0.1"].started_ms, harness.jobs[1].losses) == ("pending", 0, 1)
    assert harness.jobs[1].not_before_ms == harness.now_ms + 1000


def test_a_permanent_refusal_ends_the_job_at_once():
    harness = a_harness(4)
    harness.submit(1, retries=5)
    harness.observe("1.0.1", "failed", reason_code=START_FAILED, reason="no such image", permanent=True)
    assert (harness.state(), harness.reason()) == ("failed", ("BACKEND_REFUSED", "no such image"))


def test_the_runs_of_a_lost_node_restart_on_other_nodes():
    harness = a_harness(4, 4)
    harness.submit(1, 2)
    assert {harness.runs["1.0.1"].node, harness.runs["2.0.1"].node} == {"n1", "n2"}
    lost_node = harness.runs["1.0.1"].node
    harness.step(NodeLost(lost_node, "unplugged"))
    assert (harness.runs["1.0.1"].state, harness.reason(1)) == ("lost", ("LOST", "unplugged"))
    assert harness.state(2) == "scheduled"
    harness.advance(1000)
    assert harness.runs["1.0.2"].node == harness.runs["2.0.1"].node
    assert lost_node not in harness.used()


def _gang() -> Harness:
    harness = a_harness(2, 2)
    harness.submit(1, tasks=[a_task("head", cpu="1"), a_task("worker", cpu="1", count=2)])
    assert harness.started() == ["1.0.1", "1.1.1", "1.2.1"]
    return harness


def test_the_first_failure_of_a_member_stops_its_siblings_and_the_job_ends_when_the_last_has_stopped():
    harness = _gang()
    harness.observe("1.1.1", "failed", 9)
    assert sorted(harness.stopped()) == ["1.0.1", "1.2.1"]
    assert harness.state() == "running"
    harness.observe("1.0.1", "stopped", 143)
    assert harness.state() == "running"
    harness.observe("1.2.1", "failed", 143)
    assert (harness.runs["1.2.1"].state, harness.state(), harness.jobs[1].exit_code) == ("stopped", "failed", 9)
    assert harness.reason() == ("EXIT_CODE", "member 1 exited with 9")
    assert harness.used() == {"n1": {}, "n2": {}}


def test_a_gang_succeeds_when_all_its_members_have():
    harness = _gang()
    for member in (2, 0):
        harness.observe(f"1.{member}.1", "succeeded", 0)
        assert harness.state() == "running"
    harness.observe("1.1.1", "succeeded", 0)
    assert harness.state() == "succeeded"


def test_a_lost_member_stops_its_siblings_and_the_gang_restarts():
    harness = _gang()
    harness.observe("1.2.1", "lost", reason_code="lost", reason="vanished")
    for run in harness.stopped():
        harness.observe(run, "stopped", 143)
    assert (harness.state(), harness.jobs[1].losses) == ("pending", 1)
    harness.advance(1000)
    assert harness.started() == [], "gangs back off longer"
    harness.advance(2000)
    assert harness.started() == ["1.0.2", "1.1.2", "1.2.2"]


@pytest.mark.parametrize("state", ["pending", "held"])
def test_a_pending_or_held_job_is_cancelled_at_once(state):
    harness = a_harness(1)
    harness.submit(1, cpu="2")
    if state == "held":
        harness.step(JobHeld(1))
    harness.step(JobCancelled(1, "not needed"))
    assert (harness.state(), harness.reason(), harness.acts) == ("cancelled", ("CANCELLED", "not needed"), [])
    assert harness.controller.pending() == {"default": 0}


@pytest.mark.parametrize("state", ["scheduled", "running"])
def test_a_started_job_is_cancelled_when_its_run_has_stopped(state):
    harness = a_harness(4)
    harness.submit(1, grace_ms=1234)
    if state == "running":
        harness.observe("1.0.1", "running")
    harness.step(JobCancelled(1))
    assert harness.acts == [Stop("1.0.1", "local", 1234, StopReason("cancelled"))]
    assert (harness.state(), harness.jobs[1].cancel_requested) == (state, True)
    harness.step(JobCancelled(1))
    assert harness.acts == []
    harness.observe("1.0.1", "failed", 143, reason_code="killed")
    assert (harness.state(), harness.runs["1.0.1"].state) == ("cancelled", "stopped")
    assert harness.jobs[1].exit_code == 143


def test_a_cancelled_job_is_not_retried():
    harness = a_harness(4)
    harness.submit(1, retries=5, restart="always")
    harness.step(JobCancelled(1))
    harness.observe("1.0.1", "lost", reason_code="lost")
    assert harness.state() == "cancelled"


def test_a_job_in_backoff_can_be_cancelled():
    harness = a_harness(4)
    harness.submit(1, retries=1)
    harness.observe("1.0.1", "failed", 1)
    harness.step(JobCancelled(1))
    assert harness.state() == "cancelled"
    harness.advance(10_000)
    assert harness.started() == []


def test_a_requeued_running_job_restarts_without_a_failure_and_without_backoff():
    harness = a_harness(4)
    harness.submit(1)
    harness.observe("1.0.1", "running")
    harness.step(JobRequeued(1))
    assert harness.stopped() == ["1.0.1"]
    harness.observe("1.0.1", "stopped", 143)
    assert (harness.state(), harness.started(), harness.jobs[1].failures) == ("scheduled", ["1.0.2"], 0)


def test_a_requeued_ended_job_starts_with_cleared_counters():
    harness = a_harness(4)
    harness.submit(1)
    harness.observe("1.0.1", "failed", 3)
    harness.step(JobRequeued(1, harness.jobs[1]))
    assert (harness.state(), harness.started()) == ("scheduled", ["1.0.2"])
    assert (harness.jobs[1].failures, harness.jobs[1].finished_ms, harness.jobs[1].exit_code) == (0, 0, None)
    assert harness.event_kinds(1).count("job.requeued") == 1


def test_a_cancelled_job_can_be_requeued():
    harness = a_harness(1)
    harness.submit(1, cpu="2")
    harness.step(JobCancelled(1))
    harness.step(JobRequeued(1, harness.jobs[1]))
    assert (harness.state(), harness.jobs[1].cancel_requested) == ("pending", False)


def test_a_drain_cordons_the_node_and_moves_its_jobs():
    harness = a_harness(4)
    harness.submit(1)
    harness.step(NodeOverridden("n1", drain=True))
    assert harness.overrides["n1"].cordoned
    assert harness.stopped() == ["1.0.1"]
    harness.observe("1.0.1", "stopped", 143)
    assert (harness.state(), harness.reason()[0], harness.jobs[1].failures) == ("pending", "NODE_CORDONED", 0)
    harness.step(NodeOverridden("n1", cordon=False))
    assert harness.started() == ["1.0.2"]


def test_a_run_that_succeeds_during_a_drain_succeeds():
    harness = a_harness(4)
    harness.submit(1)
    harness.step(NodeOverridden("n1", drain=True))
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.state() == "succeeded"


@pytest.mark.parametrize("late", ["running", "succeeded", "failed", "stopped", "lost"])
def test_a_report_about_an_ended_job_changes_nothing(late):
    harness = a_harness(4)
    harness.submit(1)
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.observe("1.0.1", late).empty


def test_a_second_end_of_a_member_is_only_acknowledged_with_forget():
    harness = _gang()
    harness.observe("1.0.1", "succeeded", 0)
    done = harness.observe("1.0.1", "failed", 1)
    assert done.saves == []
    assert done.acts == [Forget("1.0.1", "local")]
    assert harness.observe("1.0.1", "running").empty


@pytest.mark.parametrize("run", ["1.0.1", "99.0.1", "1.9.2", "rubbish", "", "x.y.z"])
def test_a_report_about_an_unknown_run_changes_nothing(run):
    harness = a_harness(4)
    harness.submit(1, retries=1)
    harness.observe("1.0.1", "failed", 1)
    harness.advance(1000)
    assert harness.observe(run, "succeeded", 0).empty
    assert harness.state() == "scheduled"


def test_a_repeated_running_report_changes_nothing():
    harness = a_harness(4)
    harness.submit(1)
    harness.observe("1.0.1", "running")
    assert harness.observe("1.0.1", "running").empty


def test_a_run_that_stops_without_an_order_has_failed():
    harness = a_harness(4)
    harness.submit(1)
    harness.observe("1.0.1", "stopped", 137, reason_code="killed", reason="killed by signal 9")
    assert (harness.runs["1.0.1"].state, harness.state()) == ("failed", "failed")


def test_a_held_job_waits_until_it_is_released():
    harness = Harness()
    harness.submit(1)
    harness.step(JobHeld(1))
    harness.restart(*some_nodes(4))
    assert (harness.state(), harness.started()) == ("held", [])
    harness.step(JobReleased(1))
    assert harness.started() == ["1.0.1"]


@pytest.mark.parametrize("fact", [JobHeld(1), JobReleased(1), JobHeld(99), JobCancelled(99), JobRequeued(99)], ids=str)
def test_a_command_that_does_not_apply_changes_nothing(fact):
    harness = a_harness(4)
    harness.submit(1)
    assert harness.step(fact).empty


def test_a_scheduling_timeout_fails_the_job_with_the_last_refusal():
    harness = a_harness(1)
    harness.submit(1, cpu="2", scheduling_timeout_ms=30_000)
    assert harness.controller.next_wakeup_ms(harness.now_ms) == harness.now_ms + 30_000
    harness.advance(29_999)
    assert harness.state() == "pending"
    harness.advance(1)
    code, text = harness.reason()
    assert (harness.state(), code) == ("failed", "SCHEDULING_TIMEOUT")
    assert text == "not scheduled within its scheduling timeout; 0/1 nodes are available: 1 Insufficient cpu"
    assert harness.controller.pending() == {"default": 0}
    assert harness.controller.next_wakeup_ms(harness.now_ms) is None


def test_the_scheduling_timeout_ignores_started_jobs_and_survives_a_restart():
    harness = a_harness(1)
    harness.submit(1, scheduling_timeout_ms=30_000)
    harness.submit(2, scheduling_timeout_ms=30_000)
    harness.now_ms += 10_000
    harness.restart(*some_nodes(1))
    harness.advance(20_000)
    assert (harness.state(1), harness.state(2)) == ("scheduled", "failed")


def test_time_spent_held_does_not_count_towards_the_scheduling_timeout():
    harness = a_harness(1)
    harness.submit(1, cpu="2", scheduling_timeout_ms=30_000)
    harness.step(JobHeld(1))
    harness.advance(60_000)
    assert harness.state() == "held"
    harness.step(JobReleased(1))
    harness.advance(29_999)
    assert harness.state() == "pending"
    harness.advance(1)
    assert harness.state() == "failed"


def test_a_job_of_a_removed_profile_is_held_with_a_reason():
    harness = Harness()
    harness.submit(1)
    harness.jobs[1] = structs.replace(harness.jobs[1], spec=structs.replace(harness.jobs[1].spec, profile="night"))
    harness.restart(a_node())
    assert (harness.state(), harness.reason()) == (
        "held",
        ("UNKNOWN_PROFILE", "its profile 'night' is not configured any more"),
    )
    harness.step(JobReleased(1))
    assert harness.state() == "held"
    harness.step(JobCancelled(1))
    assert harness.state() == "cancelled"
