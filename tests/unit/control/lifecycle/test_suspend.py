"""Suspend and resume, and saving work in between, as the controller sees them."""

from __future__ import annotations

import pytest

from hodei.model.effects import Stop, TakeCheckpoint
from hodei.model.facts import JobCancelled, JobCheckpointRequested, JobReleased, JobRequeued, JobSuspended, NodeLost
from hodei.model.job import Checkpoint, GangRules
from hodei.model.outcome import StopReason
from unit.control.harness import Harness, a_harness, some_nodes
from unit.control.scenarios import gone, is_empty, live, running

SAVES = Checkpoint(signal="USR1")


def a_running(*cpus: int, **spec) -> Harness:
    harness = a_harness(*cpus or (1,))
    harness.submit(1, **spec)
    running(harness, *live(harness))
    return harness


def test_a_running_job_saves_its_work_leaves_and_is_held():
    harness = a_running(checkpoint=SAVES)
    harness.learn(JobSuspended(1))
    assert harness.acts == [Stop("1.0.1", "local", 10_000, StopReason("suspended"), SAVES)]
    assert (harness.state(), harness.jobs[1].suspend_requested) == ("running", True)
    harness.see("1.0.1", "stopped", 143, checkpoint_ms=harness.now_ms)
    assert (harness.state(), harness.reason()) == ("held", ("SUSPENDED", "suspended by a user"))
    assert (harness.jobs[1].suspend_requested, harness.runs["1.0.1"].checkpoint_ms) == (False, harness.now_ms)
    assert is_empty(harness)
    assert harness.kinds(1)[-3:] == ["job.suspend_requested", "run.ended", "job.suspended"]


def test_a_resumed_job_is_a_new_attempt_with_the_same_queue_position_and_failures():
    harness = a_running(retries=3)
    harness.see("1.0.1", "failed", 1)
    harness.later(5_000)
    running(harness, "1.0.2")
    submitted = harness.jobs[1].submitted_ms
    harness.learn(JobSuspended(1))
    gone(harness, "1.0.2")
    harness.learn(JobReleased(1))
    assert (harness.state(), harness.started()) == ("scheduled", ["1.0.3"])
    assert (harness.jobs[1].submitted_ms, harness.jobs[1].failures) == (submitted, 1)


def test_a_waiting_job_is_held_at_once():
    harness = a_harness(1)
    harness.submit(1, 2)
    harness.learn(JobSuspended(2))
    assert (harness.state(2), harness.reason(2)[0]) == ("held", "SUSPENDED")
    harness.see("1.0.1", "succeeded", 0)
    assert harness.started() == []
    harness.learn(JobReleased(2))
    assert harness.started() == ["2.0.1"]


def test_all_members_of_a_gang_go_and_come_back():
    harness = a_running(1, 1, cpu="1", count=2)
    harness.learn(JobSuspended(1))
    assert sorted(harness.stopped()) == ["1.0.1", "1.1.1"]
    gone(harness, "1.0.1", "1.1.1")
    assert harness.state() == "held"
    harness.learn(JobReleased(1))
    assert sorted(harness.started()) == ["1.0.2", "1.1.2"]


def test_a_gang_that_lacks_a_member_is_suspended_with_it():
    harness = a_running(1, 1, cpu="1", count=2, retries=3, gang=GangRules(on_failure="repair"))
    harness.see("1.0.1", "failed", 1)
    harness.learn(JobSuspended(1))
    assert harness.stopped() == ["1.1.1"]
    gone(harness, "1.1.1")
    assert harness.state() == "held"
    harness.later(60_000)
    assert (harness.state(), is_empty(harness)) == ("held", True)


@pytest.mark.parametrize(
    ("what", "state"),
    [
        pytest.param({"state": "succeeded", "exit_code": 0}, "succeeded", id="it was done already"),
        pytest.param({"state": "failed", "exit_code": 3}, "held", id="it ended badly when it was told to go"),
        pytest.param({"state": "lost"}, "held", id="it was lost on the way"),
    ],
)
def test_however_a_run_goes_its_job_is_suspended_unless_it_was_done(what, state):
    harness = a_running()
    harness.learn(JobSuspended(1))
    harness.see("1.0.1", **what)
    assert harness.state() == state


def test_a_job_resumed_before_it_has_stopped_is_queued_when_it_has():
    harness = a_running()
    harness.learn(JobSuspended(1))
    harness.learn(JobReleased(1))
    gone(harness, "1.0.1")
    assert (harness.state(), harness.started()) == ("scheduled", ["1.0.2"])


@pytest.mark.parametrize(
    ("word", "state"),
    [
        pytest.param(JobCancelled(1), "cancelled", id="cancelled"),
        pytest.param(JobRequeued(1), "scheduled", id="requeued"),
    ],
)
def test_the_last_word_counts(word, state):
    harness = a_running()
    harness.learn(JobSuspended(1))
    harness.learn(word)
    gone(harness, "1.0.1")
    assert harness.state() == state


def test_a_crash_between_the_wish_and_the_end_forgets_nothing():
    harness = a_running()
    harness.learn(JobSuspended(1))
    harness.restart(*some_nodes(1))
    gone(harness, "1.0.1")
    assert (harness.state(), harness.reason()[0]) == ("held", "SUSPENDED")
    harness.restart(*some_nodes(1))
    assert (harness.state(), harness.started()) == ("held", [])


def test_a_lost_node_does_not_resume_suspended_jobs():
    harness = a_running(1, 1)
    harness.learn(JobSuspended(1))
    harness.learn(NodeLost(harness.runs["1.0.1"].node))
    assert (harness.state(), harness.reason()[0]) == ("held", "SUSPENDED")


def test_a_checkpoint_request_reaches_every_run():
    harness = a_running(1, 1, cpu="1", count=2, checkpoint=SAVES)
    harness.learn(JobCheckpointRequested(1))
    assert harness.acts == [TakeCheckpoint(f"1.{member}.1", "local", SAVES) for member in (0, 1)]
    harness.see("1.0.1", "running", checkpoint_ms=harness.now_ms)
    assert harness.runs["1.0.1"].checkpoint_ms == harness.now_ms
    harness.see("1.1.1", "running", checkpoint_error="no checkpoint was seen within 30s")
    assert harness.events[-1].kind == "run.checkpoint_failed"
    assert (harness.state(), harness.runs["1.1.1"].checkpoint_ms) == ("running", 0)


@pytest.mark.parametrize("spec", [{}, {"checkpoint": Checkpoint(file="/x")}], ids=["nothing said", "only a file"])
def test_no_checkpoint_is_requested_without_a_hook(spec):
    harness = a_running(**spec)
    harness.learn(JobCheckpointRequested(1))
    assert harness.acts == []


def test_health_is_stored_with_the_run_and_changes_are_events():
    harness = a_running()
    for health in ("ok", "ok", "failing", "ok"):
        harness.see("1.0.1", "running", health=health)
    assert harness.runs["1.0.1"].health == "ok"
    assert [kind for kind in harness.kinds(1) if kind.endswith("healthy")] == [
        "run.healthy", "run.unhealthy", "run.healthy",
    ]  # fmt: skip
