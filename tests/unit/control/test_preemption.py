"""Taking the place of lower work: only when it helps, as little as possible, with the room held and both sides told."""

from __future__ import annotations

import pytest

from builders import a_job_spec, a_node
from hodei.control import state
from hodei.control.explain.why import plan, why
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.engine.preemption.victims import class_of, may_preempt
from hodei.model.facts import JobCancelled, NodeLost, NodeOverridden
from hodei.model.job import Toleration
from hodei.model.node import Taint
from unit.control.harness import Harness, a_harness, some_nodes


def _full(*cpus, priority="low", **options):
    """A house with a job of `priority` on each core, ids from 1, which have run for a minute."""
    harness = a_harness(*cpus, **options)
    for id in range(1, sum(cpus) + 1):
        harness.submit(id, cpu="1", priority=priority)
        harness.see(f"{id}.0.1", "running")
    harness.now_ms += 60_000
    return harness


def _goes(harness, *runs):
    harness.now_ms += 100
    for run in runs:
        harness.see(run, "failed", 143)


@pytest.mark.parametrize(
    ("who", "whom", "may"),
    [
        ("critical", "high", True),
        ("critical", "scavenger", True),
        ("high", "medium", True),
        ("medium", "low", True),
        ("medium", "batch", True),
        ("medium", "medium", False),
        ("medium", "high", False),
        ("low", "batch", False),
        ("low", "scavenger", False),
        ("batch", "scavenger", False),
        (600, 550, False),
        (760, 740, True),
    ],
)
def test_a_class_preempts_strictly_lower_classes_and_low_ones_none(who, whom, may):
    harness = _full(1, priority=whom)
    harness.submit(9, cpu="1", priority=who)
    assert harness.stopped() == (["1.0.1"] if may else [])


def test_whole_numbers_belong_to_the_highest_class_that_they_reach():
    assert [class_of(p) for p in (-5, 0, 99, 100, 499, 500, 999, 5000)] == [0, 0, 0, 100, 250, 500, 750, 1000]
    assert [may_preempt(p) for p in (0, 250, 499, 500)] == [False, False, False, True]


def test_the_victim_stops_its_capacity_is_held_and_the_preemptor_starts():
    harness = _full(1)
    harness.submit(9, cpu="1", priority="high", name="urgent")
    assert harness.stopped() == ["1.0.1"]
    assert harness.started() == []
    assert harness.reason(9) == ("PREEMPTING", "preempting on n1: waiting for job 1 to stop")
    assert why(harness.controller, 9, harness.now_ms).code == "PREEMPTING"
    harness.submit(
        10, cpu="1", priority="critical"
    )  # even a higher one does not get the room that was made for another
    assert harness.stopped() == []
    _goes(harness, "1.0.1")
    assert harness.started() == ["9.0.1"]
    assert harness.state(1) == "pending"
    assert harness.jobs[1].preemptions == 1
    assert "job.preempted" in harness.kinds(1)
    assert "job.preempting" in harness.kinds(9)


def test_a_victim_comes_back_by_itself_when_there_is_room_again():
    harness = _full(1)
    harness.submit(9, cpu="1", priority="high")
    _goes(harness, "1.0.1")
    harness.see("9.0.1", "running")
    harness.see("9.0.1", "succeeded", 0)
    assert harness.started() == ["1.0.2"]


def test_no_job_is_preempted_if_it_would_not_help():
    harness = _full(1, 1)
    harness.submit(9, cpu="2", priority="critical")
    assert (harness.stopped(), harness.state(9)) == ([], "pending")
    harness.submit(10, cpu="1", priority="critical", node_selector={"zone": "nowhere"})
    assert harness.stopped() == []


def test_no_more_go_than_must_and_the_least_valuable_of_them():
    harness = a_harness(4)
    for id, priority in ((1, "medium"), (2, "low"), (3, "batch"), (4, "scavenger")):
        harness.submit(id, cpu="1", priority=priority)
        harness.see(f"{id}.0.1", "running")
    harness.now_ms += 60_000
    harness.submit(9, cpu="2", priority="critical")
    assert harness.stopped() == ["3.0.1", "4.0.1"]


def test_of_equal_victims_the_one_that_loses_least_work_is_preempted():
    harness = a_harness(2)
    harness.submit(1, cpu="1", priority="low")
    harness.see("1.0.1", "running")
    harness.now_ms += 600_000
    harness.submit(2, cpu="1", priority="low")
    harness.see("2.0.1", "running")
    harness.now_ms += 1000
    harness.submit(9, cpu="1", priority="high")
    assert harness.stopped() == ["2.0.1"]


def test_a_victim_that_turns_out_not_to_be_needed_is_let_off():
    # Two members: the first takes a free core, so only one victim is needed, on whichever node is cheaper.
    harness = _full(2, 2)
    harness.see("4.0.1", "succeeded", 0)
    harness.submit(9, cpu="1", count=2, priority="high")
    assert len(harness.stopped()) == 1


def test_a_gang_takes_places_whole_or_not_at_all():
    harness = _full(2, 2)
    harness.submit(9, cpu="2", count=3, priority="critical")
    assert harness.stopped() == []
    harness.submit(10, cpu="2", count=2, priority="critical")
    assert sorted(harness.stopped()) == ["1.0.1", "2.0.1", "3.0.1", "4.0.1"]
    _goes(harness, "1.0.1", "2.0.1", "3.0.1")
    assert harness.started() == []
    _goes(harness, "4.0.1")
    assert sorted(harness.started()) == ["10.0.1", "10.1.1"]


def test_a_gang_that_loses_one_member_to_another_goes_whole():
    harness = a_harness(2, 2)
    harness.submit(1, cpu="2", count=2, priority="low")
    harness.now_ms += 1000
    harness.submit(9, cpu="1", priority="high")
    assert sorted(harness.stopped()) == ["1.0.1", "1.1.1"]


def test_rules_of_every_kind_count_in_the_trial():
    harness = Harness(a_node("a", 1, taints=(Taint("dedicated"),)), a_node("b", 1))
    harness.submit(1, cpu="1", priority="low", node_selector={}, tolerations=(Toleration("dedicated", "Exists"),))
    harness.submit(2, cpu="1", priority="low")
    harness.now_ms += 1000
    victim_on_b = next(run.id for run in harness.runs.values() if run.node == "b")
    harness.submit(9, cpu="1", priority="high")
    assert harness.stopped() == [victim_on_b]


def test_work_is_safe_for_its_minimum_run_time_and_no_longer():
    harness = a_harness(1, preemption=PreemptionPolicy(min_runtime_ms=30_000))
    harness.submit(1, cpu="1", priority="low")
    harness.see("1.0.1", "running")
    harness.now_ms += 10_000
    harness.submit(9, cpu="1", priority="high")
    assert harness.stopped() == []
    assert harness.controller.next_wakeup_ms(harness.now_ms) is not None
    harness.later(25_000)
    assert harness.stopped() == ["1.0.1"]


def test_a_job_is_sent_away_only_so_often():
    harness = a_harness(1, preemption=PreemptionPolicy(max_per_job=1))
    harness.submit(1, cpu="1", priority="low")
    harness.now_ms += 1000
    harness.submit(2, cpu="1", priority="high")
    _goes(harness, "1.0.1")
    harness.see("2.0.1", "succeeded", 0)
    assert harness.started() == ["1.0.2"]
    harness.now_ms += 1000
    harness.submit(3, cpu="1", priority="high")
    assert (harness.stopped(), harness.state(3)) == ([], "pending")


def test_the_budget_limits_evictions_within_an_interval():
    harness = _full(3, preemption=PreemptionPolicy(budget=2, interval_ms=60_000))
    harness.submit(7, 8, 9, cpu="1", priority="high")
    assert len(harness.stopped()) == 2
    harness.later(61_000)
    assert len(harness.stopped()) == 1


def test_it_can_be_switched_off():
    harness = _full(1, preemption=PreemptionPolicy(enabled=False))
    harness.submit(9, cpu="1", priority="critical")
    assert harness.stopped() == []


def test_there_is_no_ping_pong():
    harness = _full(1)
    harness.submit(9, cpu="1", priority="high")
    _goes(harness, "1.0.1")
    for _ in range(5):
        harness.later(60_000)
        assert (harness.started(), harness.stopped()) == ([], [])
    assert (harness.state(9), harness.state(1)) == ("scheduled", "pending")


def test_a_cancelled_preemptor_gives_its_room_up():
    harness = _full(1)
    harness.submit(9, cpu="1", priority="high")
    harness.learn(JobCancelled(9))
    assert harness.state(9) == "cancelled"
    _goes(harness, "1.0.1")
    assert harness.started() == ["1.0.2"]
    assert harness.used() == {"n1": {"cpu": 1000, "memory": harness.used()["n1"]["memory"]}}


def test_if_the_node_goes_too_the_preemptor_queues_again_and_it_is_on_record():
    harness = _full(1, 1)
    harness.submit(9, cpu="1", priority="high")
    (victim,) = harness.stopped()
    harness.learn(NodeLost(harness.runs[victim].node))
    assert "job.preemption_abandoned" in harness.kinds(9) or harness.state(9) == "scheduled"
    survivor = next(run for run in harness.runs.values() if run.state == "running")
    assert survivor.stop_reason.text.startswith("preempted by job 9")


def test_after_a_restart_no_other_job_is_preempted_for_the_same_capacity():
    harness = _full(1, 1)
    harness.submit(9, cpu="1", priority="high")
    (victim,) = harness.stopped()
    harness.restart(*some_nodes(1, 1))
    assert harness.stopped() == []
    _goes(harness, victim)
    assert harness.started() == ["9.0.1"]


def test_a_plan_says_whose_place_would_be_taken_and_takes_none():
    harness = _full(1)
    (said,) = plan(harness.controller, [a_job_spec(cpu="1", priority="high")], harness.now_ms)
    assert said.code == "WOULD_PREEMPT"
    assert "would preempt job 1" in said.summary
    assert harness.learn().plan.empty


def test_a_no_execute_taint_sends_away_what_does_not_tolerate_it():
    harness = a_harness(2, 2)
    harness.submit(1, cpu="2")
    harness.submit(2, cpu="2", tolerations=(Toleration("fire", "Exists"),))
    on = {run.job: run.node for run in harness.runs.values()}
    harness.learn(NodeOverridden(on[1], add_taints=(Taint("fire", effect="NoExecute"),)))
    assert harness.stopped() == ["1.0.1"]
    harness.learn(NodeOverridden(on[2], add_taints=(Taint("fire", effect="NoExecute"),)))
    assert harness.stopped() == []
    _goes(harness, "1.0.1")
    assert harness.state(1) == "pending"
    assert harness.jobs[1].reason_code == "UNTOLERATED_TAINT"


def test_a_toleration_with_seconds_runs_out_unless_the_taint_goes_first():
    harness = a_harness(2, 2)
    for id in (1, 2):
        harness.submit(id, cpu="2", tolerations=(Toleration("fire", "Exists", seconds=30),))
    on = {run.job: run.node for run in harness.runs.values()}
    for node in on.values():
        harness.learn(NodeOverridden(node, add_taints=(Taint("fire", effect="NoExecute"),)))
    assert harness.controller.next_wakeup_ms(harness.now_ms) == harness.now_ms + 30_000
    harness.learn(NodeOverridden(on[2], remove_taints=(Taint("fire", effect="NoExecute"),)))
    harness.later(30_000)
    assert harness.stopped() == ["1.0.1"]


@pytest.mark.parametrize(("preempts", "stopped"), [(True, ["1.0.1"]), (False, [])], ids=["it may", "it may not"])
def test_a_job_preempts_only_if_it_may(preempts, stopped):
    harness = a_harness(1)
    harness.submit(1, cpu="1", priority="low")
    harness.see("1.0.1", "running")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", priority="critical", preempts=preempts)
    assert harness.stopped() == stopped


def test_a_job_that_may_preempt_is_not_delayed_by_an_equal_one_that_may_not():
    harness = a_harness(1)
    harness.submit(1, cpu="1", priority="low")
    harness.see("1.0.1", "running")
    harness.now_ms += 60_000
    harness.submit(8, cpu="1", priority="critical", preempts=False)
    harness.submit(9, cpu="1", priority="critical")
    assert harness.stopped() == ["1.0.1"]


def test_without_preemption_the_list_of_changed_runs_is_bounded(monkeypatch):
    monkeypatch.setattr(state, "_MAX_CHANGED", 10)
    harness = a_harness(1, preemption=PreemptionPolicy(enabled=False))
    for id in range(1, 100):
        harness.submit(id, cpu="1")
        harness.see(f"{id}.0.1", "running")
        harness.see(f"{id}.0.1", "succeeded", 0)
    assert len(harness.controller.cluster._changed) <= 10


def test_preemption_after_an_overflow_of_the_list_knows_all_runs(monkeypatch):
    monkeypatch.setattr(state, "_MAX_CHANGED", 10)
    harness = a_harness(1, 1)
    harness.submit(1, 2, cpu="1", priority="low")
    harness.now_ms += 60_000
    harness.submit(900, cpu="2", priority="high")  # is refused, and looks
    harness.see("1.0.1", "running")
    harness.see("1.0.1", "succeeded", 0)
    for id in range(3, 60):
        harness.submit(id, cpu="1", priority="low")
        harness.see(f"{id}.0.1", "running")
        harness.see(f"{id}.0.1", "succeeded", 0)
    assert len(harness.controller.cluster._changed) <= 10
    harness.submit(60, cpu="1", priority="low")
    harness.now_ms += 60_000
    harness.submit(901, 902, cpu="1", priority="high")
    assert sorted(harness.stopped()) == ["2.0.1", "60.0.1"]
