"""What becomes of a job after it was placed: ends, retries, losses, stops, and news that comes late or twice."""

from __future__ import annotations

import pytest
from msgspec import structs

from builders import a_node, a_task
from hodei.control.lifecycle.gangs import START_FAILED
from hodei.model.effects import Forget, Stop
from hodei.model.facts import JobCancelled, JobHeld, JobReleased, JobRequeued, NodeLost, NodeOverridden
from unit.control.house import House, a_house, some_nodes


def test_a_job_is_scheduled_runs_and_succeeds():
    house = a_house(4)
    house.submit(1)
    assert (house.state(), house.started()) == ("scheduled", ["1.0.1"])
    house.now_ms += 5
    house.see("1.0.1", "running")
    assert house.state() == "running"
    assert house.jobs[1].started_ms == house.now_ms
    house.now_ms += 5
    house.see("1.0.1", "succeeded", 0)
    assert (house.state(), house.jobs[1].exit_code, house.reason()) == ("succeeded", 0, ("", ""))
    assert house.acts == [Forget("1.0.1", "local")]
    assert house.used() == {"n1": {}}
    assert house.kinds(1) == ["job.submitted", "job.scheduled", "job.started", "run.ended", "job.ended"]


def test_an_end_without_a_beginning_counts_as_both():
    house = a_house(4)
    house.submit(1)
    house.see("1.0.1", "succeeded", 0)
    assert house.state() == "succeeded"
    assert house.runs["1.0.1"].started_ms == house.now_ms


def test_an_end_that_tells_when_it_began_is_believed():
    house = a_house(4)
    house.submit(1)
    house.now_ms += 60_000
    house.see("1.0.1", "succeeded", 0, started_ms=house.now_ms - 50_000)
    assert house.runs["1.0.1"].started_ms == house.jobs[1].started_ms == house.now_ms - 50_000


def test_a_run_that_is_only_accepted_is_not_running_yet():
    house = a_house(4)
    house.submit(1)
    house.see("1.0.1", "placed")
    assert (house.state(), house.runs["1.0.1"].state) == ("scheduled", "placed")


def test_a_failure_without_retries_is_the_end_and_keeps_the_exit_code():
    house = a_house(4)
    house.submit(1)
    house.see("1.0.1", "failed", 3)
    assert (house.state(), house.jobs[1].exit_code) == ("failed", 3)
    assert house.reason() == ("EXIT_CODE", "member 0 exited with 3")


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        pytest.param({"exit_code": 1}, "EXIT_CODE", id="its own doing"),
        pytest.param({"exit_code": 143, "reason_code": "timeout", "reason": "over 1h"}, "TIMEOUT", id="too long"),
        pytest.param({"exit_code": 137, "reason_code": "oom", "reason": "over 1Gi"}, "OUT_OF_MEMORY", id="too large"),
        pytest.param({"reason_code": "error", "reason": "no such file"}, "RUN_ERROR", id="could not be run"),
        pytest.param({"exit_code": 137, "reason_code": "killed", "reason": "signal 9"}, "EXIT_CODE", id="killed"),
    ],
)
def test_a_failure_is_told_by_its_cause(seen, code):
    house = a_house(4)
    house.submit(1)
    house.see("1.0.1", "failed", **seen)
    assert house.state() == "failed"
    assert house.reason() == (code, seen.get("reason") or "member 0 exited with 1")


def test_a_retry_is_a_new_run_after_a_growing_pause():
    house = a_house(4)
    house.submit(1, retries=2)
    pauses = []
    for attempt in (1, 2):
        house.see(f"1.0.{attempt}", "failed", 1)
        assert (house.state(), house.started()) == ("pending", [])
        assert house.reason() == ("EXIT_CODE", f"member 0 exited with 1; retry {attempt}")
        pauses.append(house.jobs[1].not_before_ms - house.now_ms)
        assert house.controller.next_wakeup_ms(house.now_ms) == house.jobs[1].not_before_ms
        house.later(pauses[-1] - 1)
        assert house.started() == []
        house.later(1)
        assert house.started() == [f"1.0.{attempt + 1}"]
    assert pauses == [1000, 2000]
    house.see("1.0.3", "failed", 7)
    assert (house.state(), house.jobs[1].exit_code, house.jobs[1].failures, house.jobs[1].attempt) == (
        "failed",
        7,
        3,
        3,
    )


def test_a_retried_job_that_succeeds_has_succeeded():
    house = a_house(4)
    house.submit(1, retries=1)
    house.see("1.0.1", "failed", 1)
    house.later(1000)
    house.see("1.0.2", "succeeded", 0)
    assert (house.state(), house.jobs[1].failures, house.jobs[1].exit_code) == ("succeeded", 1, 0)


@pytest.mark.parametrize(
    ("restart", "retries", "end", "state"),
    [
        pytest.param("never", 5, "failed", "failed", id="never, however many retries"),
        pytest.param("on_failure", 0, "failed", "failed", id="on failure, but none are left"),
        pytest.param("on_failure", 1, "failed", "pending", id="on failure"),
        pytest.param("on_failure", 1, "succeeded", "succeeded", id="on failure, but it succeeded"),
        pytest.param("always", 0, "failed", "pending", id="always, after a failure"),
        pytest.param("always", 0, "succeeded", "pending", id="always, after a success"),
        pytest.param("never", 0, "lost", "failed", id="never, also when it was lost"),
        pytest.param("on_failure", 0, "lost", "pending", id="a loss is not a failure"),
    ],
)
def test_the_restart_policy_is_kept(restart, retries, end, state):
    house = a_house(4)
    house.submit(1, restart=restart, retries=retries)
    house.see("1.0.1", end, 0 if end == "succeeded" else 1)
    assert house.state() == state


def test_a_lost_run_is_repeated_a_few_times_and_counts_as_no_failure():
    house = a_house(4)
    house.submit(1)
    for attempt in (1, 2, 3):
        house.see(f"1.0.{attempt}", "lost", reason_code="lost", reason="agent forgot it")
        assert house.reason() == ("LOST", "agent forgot it")
        assert (house.jobs[1].losses, house.jobs[1].failures) == (attempt, 0)
        house.later(60_000)
        assert house.started() == [f"1.0.{attempt + 1}"]
    house.see("1.0.4", "lost", reason_code="lost", reason="agent forgot it")
    assert (house.state(), house.reason()) == ("failed", ("LOST", "agent forgot it"))


def test_a_run_that_could_not_be_started_is_tried_again_and_never_ran():
    house = a_house(4)
    house.submit(1)
    house.see("1.0.1", "failed", reason_code=START_FAILED, reason="no route to host")
    assert house.reason() == ("START_FAILED", "no route to host")
    assert (house.state(), house.runs["1.0.1"].started_ms, house.jobs[1].losses) == ("pending", 0, 1)
    assert house.jobs[1].not_before_ms == house.now_ms + 1000


def test_a_permanent_refusal_ends_the_job_at_once():
    house = a_house(4)
    house.submit(1, retries=5)
    house.see("1.0.1", "failed", reason_code=START_FAILED, reason="no such image", permanent=True)
    assert (house.state(), house.reason()) == ("failed", ("BACKEND_REFUSED", "no such image"))


def test_a_lost_node_loses_its_runs_and_they_go_elsewhere():
    house = a_house(4, 4)
    house.submit(1, 2)
    assert {house.runs["1.0.1"].node, house.runs["2.0.1"].node} == {"n1", "n2"}
    gone = house.runs["1.0.1"].node
    house.learn(NodeLost(gone, "unplugged"))
    assert (house.runs["1.0.1"].state, house.reason(1)) == ("lost", ("LOST", "unplugged"))
    assert house.state(2) == "scheduled"
    house.later(1000)
    assert house.runs["1.0.2"].node == house.runs["2.0.1"].node
    assert gone not in house.used()


# ------------------------------------------------------------------------------------------------ gangs


def _gang() -> House:
    house = a_house(2, 2)
    house.submit(1, tasks=[a_task("head", cpu="1"), a_task("worker", cpu="1", count=2)])
    assert house.started() == ["1.0.1", "1.1.1", "1.2.1"]
    return house


def test_the_first_failure_of_a_member_stops_its_siblings_and_the_job_ends_when_the_last_has_stopped():
    house = _gang()
    house.see("1.1.1", "failed", 9)
    assert sorted(house.stopped()) == ["1.0.1", "1.2.1"]
    assert house.state() == "running"
    house.see("1.0.1", "stopped", 143)
    assert house.state() == "running"
    house.see("1.2.1", "failed", 143)
    assert (house.runs["1.2.1"].state, house.state(), house.jobs[1].exit_code) == ("stopped", "failed", 9)
    assert house.reason() == ("EXIT_CODE", "member 1 exited with 9")
    assert house.used() == {"n1": {}, "n2": {}}


def test_a_gang_succeeds_when_all_its_members_have():
    house = _gang()
    for member in (2, 0):
        house.see(f"1.{member}.1", "succeeded", 0)
        assert house.state() == "running"
    house.see("1.1.1", "succeeded", 0)
    assert house.state() == "succeeded"


def test_a_lost_member_stops_its_siblings_and_the_gang_starts_again_whole():
    house = _gang()
    house.see("1.2.1", "lost", reason_code="lost", reason="gone")
    for run in house.stopped():
        house.see(run, "stopped", 143)
    assert (house.state(), house.jobs[1].losses) == ("pending", 1)
    house.later(1000)
    assert house.started() == [], "gangs pause longer"
    house.later(2000)
    assert house.started() == ["1.0.2", "1.1.2", "1.2.2"]


# ------------------------------------------------------------------------------------- cancel and requeue


@pytest.mark.parametrize("state", ["pending", "held"])
def test_a_waiting_job_is_cancelled_at_once(state):
    house = a_house(1)
    house.submit(1, cpu="2")
    if state == "held":
        house.learn(JobHeld(1))
    house.learn(JobCancelled(1, "not needed"))
    assert (house.state(), house.reason(), house.acts) == ("cancelled", ("CANCELLED", "not needed"), [])
    assert house.controller.pending() == {"default": 0}


@pytest.mark.parametrize("state", ["scheduled", "running"])
def test_a_started_job_is_cancelled_when_its_run_has_stopped(state):
    house = a_house(4)
    house.submit(1, grace_ms=1234)
    if state == "running":
        house.see("1.0.1", "running")
    house.learn(JobCancelled(1))
    assert house.acts == [Stop("1.0.1", "local", 1234, "cancelled")]
    assert (house.state(), house.jobs[1].cancel_requested) == (state, True)
    house.learn(JobCancelled(1))
    assert house.acts == []
    house.see("1.0.1", "failed", 143, reason_code="killed")
    assert (house.state(), house.runs["1.0.1"].state) == ("cancelled", "stopped")
    assert house.jobs[1].exit_code == 143


def test_a_cancelled_job_is_not_retried():
    house = a_house(4)
    house.submit(1, retries=5, restart="always")
    house.learn(JobCancelled(1))
    house.see("1.0.1", "lost", reason_code="lost")
    assert house.state() == "cancelled"


def test_a_job_in_its_pause_can_be_cancelled():
    house = a_house(4)
    house.submit(1, retries=1)
    house.see("1.0.1", "failed", 1)
    house.learn(JobCancelled(1))
    assert house.state() == "cancelled"
    house.later(10_000)
    assert house.started() == []


def test_a_requeued_running_job_starts_again_without_a_failure_and_without_a_pause():
    house = a_house(4)
    house.submit(1)
    house.see("1.0.1", "running")
    house.learn(JobRequeued(1))
    assert house.stopped() == ["1.0.1"]
    house.see("1.0.1", "stopped", 143)
    assert (house.state(), house.started(), house.jobs[1].failures) == ("scheduled", ["1.0.2"], 0)


def test_a_requeued_ended_job_starts_afresh():
    house = a_house(4)
    house.submit(1)
    house.see("1.0.1", "failed", 3)
    house.learn(JobRequeued(1, house.jobs[1]))
    assert (house.state(), house.started()) == ("scheduled", ["1.0.2"])
    assert (house.jobs[1].failures, house.jobs[1].finished_ms, house.jobs[1].exit_code) == (0, 0, None)
    assert house.kinds(1).count("job.requeued") == 1


def test_a_cancelled_job_can_be_requeued():
    house = a_house(1)
    house.submit(1, cpu="2")
    house.learn(JobCancelled(1))
    house.learn(JobRequeued(1, house.jobs[1]))
    assert (house.state(), house.jobs[1].cancel_requested) == ("pending", False)


def test_a_drain_cordons_the_node_and_moves_its_work():
    house = a_house(4)
    house.submit(1)
    house.learn(NodeOverridden("n1", drain=True))
    assert house.marks["n1"].cordoned
    assert house.stopped() == ["1.0.1"]
    house.see("1.0.1", "stopped", 143)
    assert (house.state(), house.reason()[0], house.jobs[1].failures) == ("pending", "NODE_CORDONED", 0)
    house.learn(NodeOverridden("n1", cordon=False))
    assert house.started() == ["1.0.2"]


def test_work_that_finishes_during_a_drain_has_finished():
    house = a_house(4)
    house.submit(1)
    house.learn(NodeOverridden("n1", drain=True))
    house.see("1.0.1", "succeeded", 0)
    assert house.state() == "succeeded"


# --------------------------------------------------------------------------------------------- old news


@pytest.mark.parametrize("late", ["running", "succeeded", "failed", "stopped", "lost"])
def test_news_of_a_job_that_has_ended_changes_nothing(late):
    house = a_house(4)
    house.submit(1)
    house.see("1.0.1", "succeeded", 0)
    assert house.see("1.0.1", late).empty


def test_a_second_end_of_a_member_is_only_forgotten_again():
    house = _gang()
    house.see("1.0.1", "succeeded", 0)
    done = house.see("1.0.1", "failed", 1)
    assert done.saves == []
    assert done.acts == [Forget("1.0.1", "local")]
    assert house.see("1.0.1", "running").empty


@pytest.mark.parametrize("run", ["1.0.1", "99.0.1", "1.9.2", "rubbish", "", "x.y.z"])
def test_news_of_a_run_that_is_not_ours_changes_nothing(run):
    house = a_house(4)
    house.submit(1, retries=1)
    house.see("1.0.1", "failed", 1)
    house.later(1000)
    assert house.see(run, "succeeded", 0).empty
    assert house.state() == "scheduled"


def test_a_second_running_changes_nothing():
    house = a_house(4)
    house.submit(1)
    house.see("1.0.1", "running")
    assert house.see("1.0.1", "running").empty


def test_a_run_stopped_by_nobody_here_has_failed():
    house = a_house(4)
    house.submit(1)
    house.see("1.0.1", "stopped", 137, reason_code="killed", reason="killed by signal 9")
    assert (house.runs["1.0.1"].state, house.state()) == ("failed", "failed")


# ------------------------------------------------------------------------------------ hold and timeouts


def test_a_held_job_waits_until_it_is_released():
    house = House()
    house.submit(1)
    house.learn(JobHeld(1))
    house.restart(*some_nodes(4))
    assert (house.state(), house.started()) == ("held", [])
    house.learn(JobReleased(1))
    assert house.started() == ["1.0.1"]


@pytest.mark.parametrize("fact", [JobHeld(1), JobReleased(1), JobHeld(99), JobCancelled(99), JobRequeued(99)], ids=str)
def test_a_word_that_does_not_apply_changes_nothing(fact):
    house = a_house(4)
    house.submit(1)
    assert house.learn(fact).empty


def test_a_job_that_is_not_scheduled_in_time_fails_with_the_reason_it_waited_for():
    house = a_house(1)
    house.submit(1, cpu="2", scheduling_timeout_ms=30_000)
    assert house.controller.next_wakeup_ms(house.now_ms) == house.now_ms + 30_000
    house.later(29_999)
    assert house.state() == "pending"
    house.later(1)
    code, text = house.reason()
    assert (house.state(), code) == ("failed", "SCHEDULING_TIMEOUT")
    assert text == "not scheduled within its scheduling timeout; 0/1 nodes are available: 1 Insufficient cpu"
    assert house.controller.pending() == {"default": 0}
    assert house.controller.next_wakeup_ms(house.now_ms) is None


def test_the_scheduling_timeout_does_not_touch_a_job_that_started_and_holds_across_a_restart():
    house = a_house(1)
    house.submit(1, scheduling_timeout_ms=30_000)
    house.submit(2, scheduling_timeout_ms=30_000)
    house.now_ms += 10_000
    house.restart(*some_nodes(1))
    house.later(20_000)
    assert (house.state(1), house.state(2)) == ("scheduled", "failed")


def test_the_time_spent_held_does_not_count():
    house = a_house(1)
    house.submit(1, cpu="2", scheduling_timeout_ms=30_000)
    house.learn(JobHeld(1))
    house.later(60_000)
    assert house.state() == "held"
    house.learn(JobReleased(1))
    house.later(29_999)
    assert house.state() == "pending"
    house.later(1)
    assert house.state() == "failed"


def test_a_job_whose_profile_is_gone_is_held_and_says_so():
    house = House()
    house.submit(1)
    house.jobs[1] = structs.replace(house.jobs[1], spec=structs.replace(house.jobs[1].spec, profile="night"))
    house.restart(a_node())
    assert (house.state(), house.reason()) == (
        "held",
        ("UNKNOWN_PROFILE", "its profile 'night' is not configured any more"),
    )
    house.learn(JobReleased(1))
    assert house.state() == "held"
    house.learn(JobCancelled(1))
    assert house.state() == "cancelled"
