"""A preemptor starts on the first capacity that appears on any node. Its hold is released then, and a victim whose stop order
was not sent yet keeps running."""

from __future__ import annotations

from typing import Any

from builders import a_node
from hodei.control.explain.why import why
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.model.effects import WithdrawStop
from hodei.model.facts import JobCancelled, NodeJoined, NodeOverridden, StopWithdrawn
from hodei.model.job import GangRules
from unit.control.harness import Harness, a_harness
from unit.control.scenarios import full_cluster, stop_runs

BY_NUMBER = PreemptionPolicy(by="number")


def _join(harness: Harness, name: str, cpu: int, **fields: Any) -> None:
    harness.now_ms += 1000
    harness.step(NodeJoined(a_node(name, cpu, "64Gi", **fields)))


def _withdrawn(harness: Harness) -> list[str]:
    return [act.run for act in harness.acts if isinstance(act, WithdrawStop)]


def _nodes_of(harness: Harness, job: int) -> list[str]:
    return sorted(run.node for run in harness.runs.values() if run.job == job and run.state in ("placed", "running"))


def test_a_preemptor_starts_on_a_node_that_joins_while_its_victim_still_stops():
    harness = full_cluster(1)
    harness.submit(9, cpu="1", priority="high")
    assert harness.stopped() == ["1.0.1"]
    _join(harness, "n2", 1)
    assert harness.started() == ["9.0.1"]
    assert _nodes_of(harness, 9) == ["n2"]
    assert not harness.controller.preemption.holds


def test_a_preemptor_starts_where_another_run_ends_first():
    harness = full_cluster(1, 1)
    harness.submit(9, cpu="1", priority="high")
    (victim,) = harness.stopped()
    other = {"1.0.1": "2.0.1", "2.0.1": "1.0.1"}[victim]
    harness.now_ms += 1000
    harness.observe(other, "succeeded", 0)
    assert harness.started() == ["9.0.1"]
    assert _nodes_of(harness, 9) == [harness.runs[other].node]


def test_a_preemptor_starts_on_its_held_node_when_another_run_there_ends_first():
    harness = a_harness(2, preemption=BY_NUMBER)
    for id, priority in ((1, 1), (2, 7)):
        harness.submit(id, cpu="1", priority=priority)
        harness.observe(f"{id}.0.1", "running")
        harness.now_ms += 60_000
    harness.submit(8, 9, cpu="1", priority=7)
    assert harness.stopped() == ["1.0.1"]
    harness.now_ms += 1000
    harness.observe("2.0.1", "succeeded", 0)
    assert harness.started() == ["8.0.1"]


def test_the_hold_of_a_preemptor_that_started_elsewhere_is_released():
    harness = full_cluster(1)
    harness.submit(9, cpu="1", priority="high")
    _join(harness, "n2", 1)
    harness.submit(10, cpu="1", priority="medium")
    assert harness.controller.preemption.holds.keys() == {10}
    stop_runs(harness, "1.0.1")
    assert harness.started() == ["10.0.1"]
    assert _nodes_of(harness, 10) == ["n1"]


def test_a_preemptor_starts_on_an_uncordoned_node():
    harness = full_cluster(1)
    harness.step(NodeOverridden("n2", cordon=True), NodeJoined(a_node("n2", 1, "64Gi")))
    harness.submit(9, cpu="1", priority="high")
    assert harness.stopped() == ["1.0.1"]
    harness.step(NodeOverridden("n2", cordon=False))
    assert harness.started() == ["9.0.1"]


def test_a_preemptor_that_does_not_fit_on_new_capacity_keeps_its_hold():
    harness = full_cluster(2)
    harness.submit(9, cpu="2", priority="high")
    assert len(harness.stopped()) == 2
    before = harness.used()
    _join(harness, "n2", 1)
    assert harness.started() == []
    assert harness.used()["n1"] == before["n1"]
    stop_runs(harness, "1.0.1", "2.0.1")
    assert harness.started() == ["9.0.1"]


def test_a_gang_combines_new_capacity_with_its_hold():
    harness = full_cluster(1, 1)
    harness.submit(9, cpu="1", count=2, priority="high")
    assert len(harness.stopped()) == 2
    stop_runs(harness, "1.0.1")
    assert harness.started() == []
    _join(harness, "n3", 1)
    assert sorted(harness.started()) == ["9.0.1", "9.1.1"]
    assert _nodes_of(harness, 9) == ["n1", "n3"]


def test_a_job_ahead_of_a_preemptor_gets_new_capacity_first():
    harness = full_cluster(2)
    harness.submit(9, cpu="1", priority="medium")
    (victim,) = harness.stopped()
    harness.submit(10, cpu="3", priority="critical")  # larger than the cluster
    assert harness.state(10) == "pending"
    _join(harness, "n2", 3)
    assert harness.started() == ["10.0.1"]
    stop_runs(harness, victim)
    assert harness.started() == ["9.0.1"]


def test_an_equal_job_behind_a_preemptor_does_not_get_new_capacity_first():
    harness = full_cluster(1)
    harness.submit(9, cpu="1", priority="high")
    harness.submit(10, cpu="1", priority="high")
    _join(harness, "n2", 1)
    assert harness.started() == ["9.0.1"]
    stop_runs(harness, "1.0.1")
    assert harness.started() == ["10.0.1"]


def test_a_replacement_member_that_preempts_starts_on_new_capacity():
    harness = full_cluster(1, 1, 1)
    for id in (2, 3):
        harness.observe(f"{id}.0.1", "succeeded", 0)
    harness.submit(9, cpu="1", count=2, priority="high", gang=GangRules(on_failure="repair"), retries=3)
    for member in (0, 1):
        harness.observe(f"9.{member}.1", "running")
    harness.submit(8, cpu="1", priority="critical", node_selector={"no": "where"})
    lost = harness.runs["9.1.1"].node
    harness.step(NodeOverridden(lost, cordon=True))
    harness.observe("9.1.1", "failed", 1)
    harness.advance(120_000)
    assert harness.stopped() == ["1.0.1"]
    _join(harness, "n9", 1)
    assert harness.started() == ["9.1.2"]
    assert not harness.controller.preemption.holds


def test_why_names_the_stop_and_other_capacity_as_triggers():
    harness = full_cluster(1)
    harness.submit(9, cpu="1", priority="high")
    explanation = why(harness.controller, 9, harness.now_ms)
    assert explanation.next_trigger == "when 1.0.1 has stopped, or other capacity is freed"


def test_each_of_several_equal_preemptors_uses_capacity_freed_on_its_held_node():
    nodes = [a_node(name, 2, "64Gi", labels={"name": name}) for name in ("n1", "n2")]
    harness = Harness(*nodes, preemption=BY_NUMBER)
    for id, priority, node in ((1, 1, "n1"), (2, 7, "n1"), (3, 1, "n2"), (4, 7, "n2")):
        harness.submit(id, cpu="1", priority=priority, node_selector={"name": node})
        harness.observe(f"{id}.0.1", "running")
        harness.now_ms += 60_000
    harness.submit(8, 9, cpu="1", priority=7)
    held = {hold.places[0].node: id for id, hold in harness.controller.preemption.holds.items()}
    assert sorted(held) == ["n1", "n2"]
    for ends, node in ((4, "n2"), (2, "n1")):
        harness.now_ms += 1000
        harness.observe(f"{ends}.0.1", "succeeded", 0)
        assert harness.started() == [f"{held[node]}.0.1"]


def test_a_victim_that_is_not_needed_stays_if_its_stop_order_was_not_sent():
    harness = full_cluster(1)
    harness.submit(9, cpu="1", priority="high")
    _join(harness, "n2", 1)
    assert _withdrawn(harness) == ["1.0.1"]
    harness.step(StopWithdrawn("1.0.1"))
    assert harness.runs["1.0.1"].stop_reason is None
    assert harness.event_kinds(1)[-1] == "job.preemption_cancelled"
    harness.submit(10, cpu="1", priority="high")  # job 1 may be preempted again
    assert harness.stopped() == ["1.0.1"]
    stop_runs(harness, "1.0.1")
    assert (harness.started(), harness.jobs[1].preemptions) == (["10.0.1"], 1)


def test_a_victim_whose_stop_order_was_sent_stops():
    harness = full_cluster(1)
    harness.submit(9, cpu="1", priority="high")
    _join(harness, "n2", 1)
    stop_runs(harness, "1.0.1")
    assert harness.jobs[1].preemptions == 1
    assert harness.started() == ["1.0.2"]


def test_the_stop_of_a_cancelled_preemptors_victim_is_withdrawn():
    harness = full_cluster(1)
    harness.submit(9, cpu="1", priority="high")
    harness.step(JobCancelled(9))
    assert _withdrawn(harness) == ["1.0.1"]


def test_a_stop_that_another_preemptor_needs_is_not_withdrawn():
    harness = full_cluster(1)
    harness.submit(8, cpu="1", priority="medium")
    harness.submit(9, cpu="1", priority="high")  # by class the hold is kept, and there is no other victim
    harness.step(JobCancelled(8))
    assert harness.controller.preemption.holds.keys() == {9}
    assert _withdrawn(harness) == []


def test_a_dropped_stop_order_is_sent_again_for_another_preemptor():
    harness = full_cluster(1)
    harness.submit(8, cpu="1", priority="medium")
    harness.step(JobCancelled(8))
    assert _withdrawn(harness) == ["1.0.1"]
    harness.submit(9, cpu="1", priority="high")
    assert harness.controller.preemption.holds.keys() == {9}
    harness.step(StopWithdrawn("1.0.1"))
    assert harness.stopped() == ["1.0.1"]
    assert harness.runs["1.0.1"].stop_reason.text.startswith("preempted by job 8")
    stop_runs(harness, "1.0.1")
    assert harness.started() == ["9.0.1"]


def test_a_victim_that_is_cancelled_or_drained_stops_despite_a_withdrawal():
    harness = full_cluster(1, 1)
    harness.submit(8, 9, cpu="1", priority="high")
    assert len(harness.stopped()) == 2
    harness.step(JobCancelled(8), JobCancelled(9))
    assert len(_withdrawn(harness)) == 2
    harness.step(JobCancelled(1), NodeOverridden(harness.runs["2.0.1"].node, drain=True))
    assert sorted(harness.stopped()) == ["1.0.1", "2.0.1"]
    harness.step(StopWithdrawn("1.0.1"), StopWithdrawn("2.0.1"))
    assert all(harness.runs[run].stop_reason for run in ("1.0.1", "2.0.1"))


def test_the_stop_of_a_gang_is_withdrawn_for_all_members_or_none():
    harness = a_harness(2, 2)
    harness.submit(1, cpu="2", count=2, priority="low")
    for member in (0, 1):
        harness.observe(f"1.{member}.1", "running")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", priority="high")
    assert sorted(harness.stopped()) == ["1.0.1", "1.1.1"]
    harness.step(JobCancelled(9))
    assert sorted(_withdrawn(harness)) == ["1.0.1", "1.1.1"]
    harness.step(StopWithdrawn("1.0.1"))
    assert harness.runs["1.0.1"].stop_reason  # the stop order of the other member may have been sent
    harness.step(StopWithdrawn("1.1.1"))
    assert not any(harness.runs[run].stop_reason for run in ("1.0.1", "1.1.1"))
    assert harness.state(1) == "running"


def test_a_gang_with_one_sent_stop_order_stops_as_a_whole():
    harness = a_harness(2, 2)
    harness.submit(1, cpu="2", count=2, priority="low")
    for member in (0, 1):
        harness.observe(f"1.{member}.1", "running")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", priority="high")
    harness.step(JobCancelled(9))
    harness.step(StopWithdrawn("1.0.1"))
    harness.observe("1.1.1", "failed", 143)
    assert harness.stopped() == ["1.0.1"]
    stop_runs(harness, "1.0.1")
    assert (harness.jobs[1].preemptions, harness.jobs[1].failures) == (1, 0)
