"""Suspend, resume and checkpoint requests in the controller."""

from __future__ import annotations

import pytest

from hodei.model.effects import Stop, TakeCheckpoint
from hodei.model.facts import JobCancelled, JobCheckpointRequested, JobReleased, JobRequeued, JobSuspended, NodeLost
from hodei.model.job import Checkpoint, GangRules
from hodei.model.outcome import StopReason
from unit.control.harness import Harness, a_harness, some_nodes
from unit.control.scenarios import is_empty, live_runs, mark_running, stop_runs

SAVES = Checkpoint(signal="USR1")


def running_job(*cpus: int, **spec) -> Harness:
    harness = a_harness(*cpus or (1,))
    harness.submit(1, **spec)
    mark_running(harness, *live_runs(harness))
    return harness


def test_a_suspended_job_takes_a_checkpoint_stops_and_is_held():
    harness = running_job(checkpoint=SAVES)
    harness.step(JobSuspended(1))
    assert harness.acts == [Stop("1.0.1", "local", 10_000, StopReason("suspended"), SAVES)]
    assert (harness.state(), harness.jobs[1].suspend_requested) == ("running", True)
    harness.observe("1.0.1", "stopped", 143, checkpoint_ms=harness.now_ms)
    assert (harness.state(), harness.reason()) == ("held", ("SUSPENDED", "suspended by a user"))
    assert (harness.jobs[1].suspend_requested, harness.runs["1.0.1"].checkpoint_ms) == (False, harness.now_ms)
    assert is_empty(harness)
    assert harness.event_kinds(1)[-3:] == ["job.suspend_requested", "run.ended", "job.suspended"]


def test_a_resumed_job_is_a_new_attempt_with_the_same_queue_position_and_failures():
    harness = running_job(retries=3)
    harness.observe("1.0.1", "failed", 1)
    harness.advance(5_000)
    mark_running(harness, "1.0.2")
    submitted = harness.jobs[1].submitted_ms
    harness.step(JobSuspended(1))
    stop_runs(harness, "1.0.2")
    harness.step(JobReleased(1))
    assert (harness.state(), harness.started()) == ("scheduled", ["1.0.3"])
    assert "job.resumed" in harness.event_kinds(1)
    assert (harness.jobs[1].submitted_ms, harness.jobs[1].failures) == (submitted, 1)


def test_a_suspended_pending_job_is_held_at_once():
    harness = a_harness(1)
    harness.submit(1, 2)
    harness.step(JobSuspended(2))
    assert (harness.state(2), harness.reason(2)[0]) == ("held", "SUSPENDED")
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.started() == []
    harness.step(JobReleased(2))
    assert harness.started() == ["2.0.1"]


def test_all_members_of_a_gang_are_suspended_and_resumed():
    harness = running_job(1, 1, cpu="1", count=2)
    harness.step(JobSuspended(1))
    assert sorted(harness.stopped()) == ["1.0.1", "1.1.1"]
    stop_runs(harness, "1.0.1", "1.1.1")
    assert harness.state() == "held"
    harness.step(JobReleased(1))
    assert sorted(harness.started()) == ["1.0.2", "1.1.2"]


def test_a_gang_under_repair_is_suspended_without_a_replacement():
    harness = running_job(1, 1, cpu="1", count=2, retries=3, gang=GangRules(on_failure="repair"))
    harness.observe("1.0.1", "failed", 1)
    harness.step(JobSuspended(1))
    assert harness.stopped() == ["1.1.1"]
    stop_runs(harness, "1.1.1")
    assert harness.state() == "held"
    harness.advance(60_000)
    assert (harness.state(), is_empty(harness)) == ("held", True)


@pytest.mark.parametrize(
    ("report", "state"),
    [
        pytest.param({"state": "succeeded", "exit_code": 0}, "succeeded", id="it has already succeeded"),
        pytest.param({"state": "failed", "exit_code": 3}, "held", id="it fails while it stops"),
        pytest.param({"state": "lost"}, "held", id="it is lost while it stops"),
    ],
)
def test_a_job_is_suspended_however_its_run_stops_unless_it_succeeds(report, state):
    harness = running_job()
    harness.step(JobSuspended(1))
    harness.observe("1.0.1", **report)
    assert harness.state() == state


def test_a_job_resumed_before_it_has_stopped_is_queued_when_it_has():
    harness = running_job()
    harness.step(JobSuspended(1))
    harness.step(JobReleased(1))
    stop_runs(harness, "1.0.1")
    assert (harness.state(), harness.started()) == ("scheduled", ["1.0.2"])


@pytest.mark.parametrize(
    ("fact", "state"),
    [
        pytest.param(JobCancelled(1), "cancelled", id="cancelled"),
        pytest.param(JobRequeued(1), "scheduled", id="requeued"),
    ],
)
def test_a_later_command_replaces_the_suspension(fact, state):
    harness = running_job()
    harness.step(JobSuspended(1))
    harness.step(fact)
    stop_runs(harness, "1.0.1")
    assert harness.state() == state


def test_a_suspension_survives_a_restart():
    harness = running_job()
    harness.step(JobSuspended(1))
    harness.restart(*some_nodes(1))
    stop_runs(harness, "1.0.1")
    assert (harness.state(), harness.reason()[0]) == ("held", "SUSPENDED")
    harness.restart(*some_nodes(1))
    assert (harness.state(), harness.started()) == ("held", [])


def test_a_lost_node_does_not_resume_suspended_jobs():
    harness = running_job(1, 1)
    harness.step(JobSuspended(1))
    harness.step(NodeLost(harness.runs["1.0.1"].node))
    assert (harness.state(), harness.reason()[0]) == ("held", "SUSPENDED")


def test_a_checkpoint_request_reaches_every_run():
    harness = running_job(1, 1, cpu="1", count=2, checkpoint=SAVES)
    harness.step(JobCheckpointRequested(1))
    assert harness.acts == [TakeCheckpoint(f"1.{member}.1", "local", SAVES) for member in (0, 1)]
    harness.observe("1.0.1", "running", checkpoint_ms=harness.now_ms)
    assert harness.runs["1.0.1"].checkpoint_ms == harness.now_ms
    harness.observe("1.1.1", "running", checkpoint_error="no checkpoint was seen within 30s")
    assert harness.events[-1].kind == "run.checkpoint_failed"
    assert (harness.state(), harness.runs["1.1.1"].checkpoint_ms) == ("running", 0)


@pytest.mark.parametrize(
    "spec", [{}, {"checkpoint": Checkpoint(file="/x")}], ids=["no checkpoint section", "only a file"]
)
def test_no_checkpoint_is_requested_without_a_hook(spec):
    harness = running_job(**spec)
    harness.step(JobCheckpointRequested(1))
    assert harness.acts == []


def test_health_is_stored_with_the_run_and_changes_are_events():
    harness = running_job()
    for health in ("ok", "ok", "failing", "ok"):
        harness.observe("1.0.1", "running", health=health)
    assert harness.runs["1.0.1"].health == "ok"
    assert [kind for kind in harness.event_kinds(1) if kind.endswith("healthy")] == [
        "run.healthy", "run.unhealthy", "run.healthy",
    ]  # fmt: skip
