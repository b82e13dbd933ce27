"""Preemption: only if it helps, as few victims as possible, capacity held for the preemptor, events for both sides."""

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
from unit.control.scenarios import full_cluster


def _stop(harness, *runs):
    harness.now_ms += 100
    for run in runs:
        harness.observe(run, "failed", 143)


@pytest.mark.parametrize(
    ("preemptor", "victim", "may"),
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
def test_a_class_preempts_strictly_lower_classes_and_low_ones_none(preemptor, victim, may):
    harness = full_cluster(1, priority=victim)
    harness.submit(9, cpu="1", priority=preemptor)
    assert harness.stopped() == (["1.0.1"] if may else [])


def test_whole_numbers_belong_to_the_highest_class_that_they_reach():
    assert [class_of(p) for p in (-5, 0, 99, 100, 499, 500, 999, 5000)] == [0, 0, 0, 100, 250, 500, 750, 1000]
    assert [may_preempt(p) for p in (0, 250, 499, 500)] == [False, False, False, True]


def test_the_victim_stops_its_capacity_is_held_and_the_preemptor_starts():
    harness = full_cluster(1)
    harness.submit(9, cpu="1", priority="high", name="urgent")
    assert harness.stopped() == ["1.0.1"]
    assert harness.started() == []
    assert harness.reason(9) == ("PREEMPTING", "preempting on n1: waiting for job 1 to stop")
    assert why(harness.controller, 9, harness.now_ms).code == "PREEMPTING"
    harness.submit(10, cpu="1", priority="critical")  # a higher job does not get the held capacity either
    assert harness.stopped() == []
    _stop(harness, "1.0.1")
    assert harness.started() == ["9.0.1"]
    assert harness.state(1) == "pending"
    assert harness.jobs[1].preemptions == 1
    assert "job.preempted" in harness.event_kinds(1)
    assert "job.preempting" in harness.event_kinds(9)


def test_a_victim_starts_again_when_capacity_is_freed():
    harness = full_cluster(1)
    harness.submit(9, cpu="1", priority="high")
    _stop(harness, "1.0.1")
    harness.observe("9.0.1", "running")
    harness.observe("9.0.1", "succeeded", 0)
    assert harness.started() == ["1.0.2"]


def test_no_job_is_preempted_if_it_would_not_help():
    harness = full_cluster(1, 1)
    harness.submit(9, cpu="2", priority="critical")
    assert (harness.stopped(), harness.state(9)) == ([], "pending")
    harness.submit(10, cpu="1", priority="critical", node_selector={"zone": "nowhere"})
    assert harness.stopped() == []


def test_victims_are_as_few_and_as_low_as_possible():
    harness = a_harness(4)
    for id, priority in ((1, "medium"), (2, "low"), (3, "batch"), (4, "scavenger")):
        harness.submit(id, cpu="1", priority=priority)
        harness.observe(f"{id}.0.1", "running")
    harness.now_ms += 60_000
    harness.submit(9, cpu="2", priority="critical")
    assert harness.stopped() == ["3.0.1", "4.0.1"]


def test_of_equal_victims_the_one_that_loses_least_work_is_preempted():
    harness = a_harness(2)
    harness.submit(1, cpu="1", priority="low")
    harness.observe("1.0.1", "running")
    harness.now_ms += 600_000
    harness.submit(2, cpu="1", priority="low")
    harness.observe("2.0.1", "running")
    harness.now_ms += 1000
    harness.submit(9, cpu="1", priority="high")
    assert harness.stopped() == ["2.0.1"]


def test_a_victim_that_is_not_needed_is_reprieved():
    # The first member takes the free core, so one victim is enough.
    harness = full_cluster(2, 2)
    harness.observe("4.0.1", "succeeded", 0)
    harness.submit(9, cpu="1", count=2, priority="high")
    assert len(harness.stopped()) == 1


def test_a_gang_preempts_for_all_members_or_none():
    harness = full_cluster(2, 2)
    harness.submit(9, cpu="2", count=3, priority="critical")
    assert harness.stopped() == []
    harness.submit(10, cpu="2", count=2, priority="critical")
    assert sorted(harness.stopped()) == ["1.0.1", "2.0.1", "3.0.1", "4.0.1"]
    _stop(harness, "1.0.1", "2.0.1", "3.0.1")
    assert harness.started() == []
    _stop(harness, "4.0.1")
    assert sorted(harness.started()) == ["10.0.1", "10.1.1"]


def test_a_gang_that_loses_one_member_to_a_preemptor_stops_whole():
    harness = a_harness(2, 2)
    harness.submit(1, cpu="2", count=2, priority="low")
    harness.now_ms += 1000
    harness.submit(9, cpu="1", priority="high")
    assert sorted(harness.stopped()) == ["1.0.1", "1.1.1"]


def test_taints_count_in_the_trial_of_a_preemption():
    harness = Harness(a_node("a", 1, taints=(Taint("dedicated"),)), a_node("b", 1))
    harness.submit(1, cpu="1", priority="low", node_selector={}, tolerations=(Toleration("dedicated", "Exists"),))
    harness.submit(2, cpu="1", priority="low")
    harness.now_ms += 1000
    victim_on_b = next(run.id for run in harness.runs.values() if run.node == "b")
    harness.submit(9, cpu="1", priority="high")
    assert harness.stopped() == [victim_on_b]


def test_min_runtime_protects_a_run_and_no_longer():
    harness = a_harness(1, preemption=PreemptionPolicy(min_runtime_ms=30_000))
    harness.submit(1, cpu="1", priority="low")
    harness.observe("1.0.1", "running")
    harness.now_ms += 10_000
    harness.submit(9, cpu="1", priority="high")
    assert harness.stopped() == []
    assert harness.controller.next_wakeup_ms(harness.now_ms) is not None
    harness.advance(25_000)
    assert harness.stopped() == ["1.0.1"]


def test_a_job_is_preempted_at_most_max_per_job_times():
    harness = a_harness(1, preemption=PreemptionPolicy(max_per_job=1))
    harness.submit(1, cpu="1", priority="low")
    harness.now_ms += 1000
    harness.submit(2, cpu="1", priority="high")
    _stop(harness, "1.0.1")
    harness.observe("2.0.1", "succeeded", 0)
    assert harness.started() == ["1.0.2"]
    harness.now_ms += 1000
    harness.submit(3, cpu="1", priority="high")
    assert (harness.stopped(), harness.state(3)) == ([], "pending")


def test_the_budget_limits_evictions_within_an_interval():
    harness = full_cluster(3, preemption=PreemptionPolicy(budget=2, interval_ms=60_000))
    harness.submit(7, 8, 9, cpu="1", priority="high")
    assert len(harness.stopped()) == 2
    harness.advance(61_000)
    assert len(harness.stopped()) == 1


def test_preemption_can_be_disabled():
    harness = full_cluster(1, preemption=PreemptionPolicy(enabled=False))
    harness.submit(9, cpu="1", priority="critical")
    assert harness.stopped() == []


def test_a_victim_does_not_preempt_its_preemptor():
    harness = full_cluster(1)
    harness.submit(9, cpu="1", priority="high")
    _stop(harness, "1.0.1")
    for _ in range(5):
        harness.advance(60_000)
        assert (harness.started(), harness.stopped()) == ([], [])
    assert (harness.state(9), harness.state(1)) == ("scheduled", "pending")


def test_a_cancelled_preemptor_releases_its_hold():
    harness = full_cluster(1)
    harness.submit(9, cpu="1", priority="high")
    harness.step(JobCancelled(9))
    assert harness.state(9) == "cancelled"
    _stop(harness, "1.0.1")
    assert harness.started() == ["1.0.2"]
    assert harness.used() == {"n1": {"cpu": 1000, "memory": harness.used()["n1"]["memory"]}}


def test_if_the_node_is_lost_the_preemptor_queues_again_with_an_event():
    harness = full_cluster(1, 1)
    harness.submit(9, cpu="1", priority="high")
    (victim,) = harness.stopped()
    harness.step(NodeLost(harness.runs[victim].node))
    assert "job.preemption_abandoned" in harness.event_kinds(9) or harness.state(9) == "scheduled"
    survivor = next(run for run in harness.runs.values() if run.state == "running")
    assert survivor.stop_reason.text.startswith("preempted by job 9")


def test_after_a_restart_no_other_job_is_preempted_for_the_same_capacity():
    harness = full_cluster(1, 1)
    harness.submit(9, cpu="1", priority="high")
    (victim,) = harness.stopped()
    harness.restart(*some_nodes(1, 1))
    assert harness.stopped() == []
    _stop(harness, victim)
    assert harness.started() == ["9.0.1"]


def test_a_plan_names_the_victims_and_preempts_none():
    harness = full_cluster(1)
    (planned,) = plan(harness.controller, [a_job_spec(cpu="1", priority="high")], harness.now_ms)
    assert planned.code == "WOULD_PREEMPT"
    assert "would preempt job 1" in planned.summary
    assert harness.step().plan.empty


def test_a_no_execute_taint_evicts_jobs_without_a_toleration():
    harness = a_harness(2, 2)
    harness.submit(1, cpu="2")
    harness.submit(2, cpu="2", tolerations=(Toleration("fire", "Exists"),))
    on = {run.job: run.node for run in harness.runs.values()}
    harness.step(NodeOverridden(on[1], add_taints=(Taint("fire", effect="NoExecute"),)))
    assert harness.stopped() == ["1.0.1"]
    harness.step(NodeOverridden(on[2], add_taints=(Taint("fire", effect="NoExecute"),)))
    assert harness.stopped() == []
    _stop(harness, "1.0.1")
    assert harness.state(1) == "pending"
    assert harness.jobs[1].reason_code == "UNTOLERATED_TAINT"


def test_a_toleration_with_seconds_expires_unless_the_taint_is_removed_first():
    harness = a_harness(2, 2)
    for id in (1, 2):
        harness.submit(id, cpu="2", tolerations=(Toleration("fire", "Exists", seconds=30),))
    on = {run.job: run.node for run in harness.runs.values()}
    for node in on.values():
        harness.step(NodeOverridden(node, add_taints=(Taint("fire", effect="NoExecute"),)))
    assert harness.controller.next_wakeup_ms(harness.now_ms) == harness.now_ms + 30_000
    harness.step(NodeOverridden(on[2], remove_taints=(Taint("fire", effect="NoExecute"),)))
    harness.advance(30_000)
    assert harness.stopped() == ["1.0.1"]


@pytest.mark.parametrize(("preempts", "stopped"), [(True, ["1.0.1"]), (False, [])], ids=["it may", "it may not"])
def test_a_job_preempts_only_if_it_may(preempts, stopped):
    harness = a_harness(1)
    harness.submit(1, cpu="1", priority="low")
    harness.observe("1.0.1", "running")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", priority="critical", preempts=preempts)
    assert harness.stopped() == stopped


def test_a_job_that_may_preempt_is_not_delayed_by_an_equal_one_that_may_not():
    harness = a_harness(1)
    harness.submit(1, cpu="1", priority="low")
    harness.observe("1.0.1", "running")
    harness.now_ms += 60_000
    harness.submit(8, cpu="1", priority="critical", preempts=False)
    harness.submit(9, cpu="1", priority="critical")
    assert harness.stopped() == ["1.0.1"]


def test_without_preemption_the_list_of_changed_runs_is_bounded(monkeypatch):
    monkeypatch.setattr(state, "_MAX_CHANGED", 10)
    harness = a_harness(1, preemption=PreemptionPolicy(enabled=False))
    for id in range(1, 100):
        harness.submit(id, cpu="1")
        harness.observe(f"{id}.0.1", "running")
        harness.observe(f"{id}.0.1", "succeeded", 0)
    assert len(harness.controller.cluster._changed) <= 10


def test_preemption_after_an_overflow_of_the_list_knows_all_runs(monkeypatch):
    monkeypatch.setattr(state, "_MAX_CHANGED", 10)
    harness = a_harness(1, 1)
    harness.submit(1, 2, cpu="1", priority="low")
    harness.now_ms += 60_000
    harness.submit(900, cpu="2", priority="high")  # is refused after a search for victims
    harness.observe("1.0.1", "running")
    harness.observe("1.0.1", "succeeded", 0)
    for id in range(3, 60):
        harness.submit(id, cpu="1", priority="low")
        harness.observe(f"{id}.0.1", "running")
        harness.observe(f"{id}.0.1", "succeeded", 0)
    assert len(harness.controller.cluster._changed) <= 10
    harness.submit(60, cpu="1", priority="low")
    harness.now_ms += 60_000
    harness.submit(901, 902, cpu="1", priority="high")
    assert sorted(harness.stopped()) == ["2.0.1", "60.0.1"]
