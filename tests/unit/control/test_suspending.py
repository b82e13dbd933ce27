"""Suspend and resume, and saving work in between, as the controller sees them."""

from __future__ import annotations

import pytest

from hodei.model.effects import Stop, TakeCheckpoint
from hodei.model.facts import (
    JobCancelled,
    JobCheckpointRequested,
    JobReleased,
    JobRequeued,
    JobSuspended,
    NodeLost,
)
from hodei.model.job import Checkpoint, GangRules
from unit.control.house import House, a_house, some_nodes
from unit.control.scenes import gone, is_empty, live, running

SAVES = Checkpoint(signal="USR1")


def a_running(*cpus: int, **spec) -> House:
    house = a_house(*cpus or (1,))
    house.submit(1, **spec)
    running(house, *live(house))
    return house


def test_a_running_job_saves_its_work_leaves_and_is_held():
    house = a_running(checkpoint=SAVES)
    house.learn(JobSuspended(1))
    assert house.acts == [Stop("1.0.1", "local", 10_000, "suspended", SAVES)]
    assert (house.state(), house.jobs[1].suspend_requested) == ("running", True)
    house.see("1.0.1", "stopped", 143, checkpoint_ms=house.now_ms)
    assert (house.state(), house.reason()) == ("held", ("SUSPENDED", "suspended by a user"))
    assert (house.jobs[1].suspend_requested, house.runs["1.0.1"].checkpoint_ms) == (False, house.now_ms)
    assert is_empty(house)
    assert house.kinds(1)[-3:] == ["job.suspend_requested", "run.ended", "job.suspended"]


def test_a_resumed_job_is_a_new_attempt_with_the_same_place_in_line_and_the_same_failures():
    house = a_running(retries=3)
    house.see("1.0.1", "failed", 1)
    house.later(5_000)
    running(house, "1.0.2")
    submitted = house.jobs[1].submitted_ms
    house.learn(JobSuspended(1))
    gone(house, "1.0.2")
    house.learn(JobReleased(1))
    assert (house.state(), house.started()) == ("scheduled", ["1.0.3"])
    assert (house.jobs[1].submitted_ms, house.jobs[1].failures) == (submitted, 1)


def test_a_waiting_job_is_held_at_once():
    house = a_house(1)
    house.submit(1, 2)
    house.learn(JobSuspended(2))
    assert (house.state(2), house.reason(2)[0]) == ("held", "SUSPENDED")
    house.see("1.0.1", "succeeded", 0)
    assert house.started() == []
    house.learn(JobReleased(2))
    assert house.started() == ["2.0.1"]


def test_all_members_of_a_gang_go_and_come_back():
    house = a_running(1, 1, cpu="1", count=2)
    house.learn(JobSuspended(1))
    assert sorted(house.stopped()) == ["1.0.1", "1.1.1"]
    gone(house, "1.0.1", "1.1.1")
    assert house.state() == "held"
    house.learn(JobReleased(1))
    assert sorted(house.started()) == ["1.0.2", "1.1.2"]


def test_a_gang_that_lacks_a_member_is_suspended_with_it():
    house = a_running(1, 1, cpu="1", count=2, retries=3, gang=GangRules(on_failure="repair"))
    house.see("1.0.1", "failed", 1)
    house.learn(JobSuspended(1))
    assert house.stopped() == ["1.1.1"]
    gone(house, "1.1.1")
    assert house.state() == "held"
    house.later(60_000)
    assert (house.state(), is_empty(house)) == ("held", True)


@pytest.mark.parametrize(
    ("what", "state"),
    [
        pytest.param({"state": "succeeded", "exit_code": 0}, "succeeded", id="it was done already"),
        pytest.param({"state": "failed", "exit_code": 3}, "held", id="it ended badly when it was told to go"),
        pytest.param({"state": "lost"}, "held", id="it was lost on the way"),
    ],
)
def test_however_a_run_goes_its_job_is_suspended_unless_it_was_done(what, state):
    house = a_running()
    house.learn(JobSuspended(1))
    house.see("1.0.1", **what)
    assert house.state() == state


def test_one_that_is_resumed_before_it_has_gone_comes_back_when_it_has():
    house = a_running()
    house.learn(JobSuspended(1))
    house.learn(JobReleased(1))
    gone(house, "1.0.1")
    assert (house.state(), house.started()) == ("scheduled", ["1.0.2"])


@pytest.mark.parametrize(
    ("word", "state"),
    [
        pytest.param(JobCancelled(1), "cancelled", id="cancelled"),
        pytest.param(JobRequeued(1), "scheduled", id="requeued"),
    ],
)
def test_the_last_word_counts(word, state):
    house = a_running()
    house.learn(JobSuspended(1))
    house.learn(word)
    gone(house, "1.0.1")
    assert house.state() == state


def test_a_crash_between_the_wish_and_the_end_forgets_nothing():
    house = a_running()
    house.learn(JobSuspended(1))
    house.restart(*some_nodes(1))
    gone(house, "1.0.1")
    assert (house.state(), house.reason()[0]) == ("held", "SUSPENDED")
    house.restart(*some_nodes(1))
    assert (house.state(), house.started()) == ("held", [])


def test_a_node_that_goes_takes_nobody_out_of_suspension():
    house = a_running(1, 1)
    house.learn(JobSuspended(1))
    house.learn(NodeLost(house.runs["1.0.1"].node))
    assert (house.state(), house.reason()[0]) == ("held", "SUSPENDED")


# -------------------------------------------------------------------------------------- saving in between


def test_every_run_is_told_to_save_its_work_and_goes_on():
    house = a_running(1, 1, cpu="1", count=2, checkpoint=SAVES)
    house.learn(JobCheckpointRequested(1))
    assert house.acts == [TakeCheckpoint(f"1.{member}.1", "local", SAVES) for member in (0, 1)]
    house.see("1.0.1", "running", checkpoint_ms=house.now_ms)
    assert house.runs["1.0.1"].checkpoint_ms == house.now_ms
    house.see("1.1.1", "running", checkpoint_error="no checkpoint was seen within 30s")
    assert house.events[-1].kind == "run.checkpoint_failed"
    assert (house.state(), house.runs["1.1.1"].checkpoint_ms) == ("running", 0)


@pytest.mark.parametrize("spec", [{}, {"checkpoint": Checkpoint(file="/x")}], ids=["nothing said", "only a file"])
def test_nobody_is_told_who_can_not_save(spec):
    house = a_running(**spec)
    house.learn(JobCheckpointRequested(1))
    assert house.acts == []


def test_health_is_kept_with_the_run_and_told_when_it_changes():
    house = a_running()
    for health in ("ok", "ok", "failing", "ok"):
        house.see("1.0.1", "running", health=health)
    assert house.runs["1.0.1"].health == "ok"
    assert [kind for kind in house.kinds(1) if kind.endswith("healthy")] == [
        "run.healthy", "run.unhealthy", "run.healthy",
    ]  # fmt: skip
