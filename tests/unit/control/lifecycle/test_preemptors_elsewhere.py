"""A preemptor takes the first room that appears, wherever it is; the room made for it is for others then, and a victim whose
order to stop was not sent yet stays."""

from __future__ import annotations

from typing import Any

from builders import a_node
from hodei.control.explain.why import why
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.model.effects import WithdrawStop
from hodei.model.facts import JobCancelled, NodeJoined, NodeOverridden, StopWithdrawn
from hodei.model.job import GangRules
from unit.control.harness import Harness, a_harness
from unit.control.scenarios import filled, gone

BY_NUMBER = PreemptionPolicy(by="number")


def _joins(harness: Harness, name: str, cpu: int, **fields: Any) -> None:
    harness.now_ms += 1000
    harness.learn(NodeJoined(a_node(name, cpu, "64Gi", **fields)))


def _spared(harness: Harness) -> list[str]:
    return [act.run for act in harness.acts if isinstance(act, WithdrawStop)]


def _where(harness: Harness, job: int) -> list[str]:
    return sorted(run.node for run in harness.runs.values() if run.job == job and run.state in ("placed", "running"))


def test_a_preemptor_starts_on_a_node_that_joins_while_its_victim_still_stops():
    harness = filled(1)
    harness.submit(9, cpu="1", priority="high")
    assert harness.stopped() == ["1.0.1"]
    _joins(harness, "n2", 1)
    assert harness.started() == ["9.0.1"]
    assert _where(harness, 9) == ["n2"]
    assert not harness.controller.preemption.holds


def test_a_preemptor_starts_where_another_run_ends_first():
    harness = filled(1, 1)
    harness.submit(9, cpu="1", priority="high")
    (victim,) = harness.stopped()
    other = {"1.0.1": "2.0.1", "2.0.1": "1.0.1"}[victim]
    harness.now_ms += 1000
    harness.see(other, "succeeded", 0)
    assert harness.started() == ["9.0.1"]
    assert _where(harness, 9) == [harness.runs[other].node]


def test_a_preemptor_starts_on_its_own_node_when_another_there_ends_first():
    harness = a_harness(2, preemption=BY_NUMBER)
    for id, priority in ((1, 1), (2, 7)):
        harness.submit(id, cpu="1", priority=priority)
        harness.see(f"{id}.0.1", "running")
        harness.now_ms += 60_000
    harness.submit(8, 9, cpu="1", priority=7)
    assert harness.stopped() == ["1.0.1"]
    harness.now_ms += 1000
    harness.see("2.0.1", "succeeded", 0)
    assert harness.started() == ["8.0.1"]


def test_the_room_made_for_one_that_went_elsewhere_is_for_others():
    harness = filled(1)
    harness.submit(9, cpu="1", priority="high")
    _joins(harness, "n2", 1)
    harness.submit(10, cpu="1", priority="medium")
    assert harness.controller.preemption.holds.keys() == {10}
    gone(harness, "1.0.1")
    assert harness.started() == ["10.0.1"]
    assert _where(harness, 10) == ["n1"]


def test_a_node_that_is_opened_again_counts_too():
    harness = filled(1)
    harness.learn(NodeOverridden("n2", cordon=True), NodeJoined(a_node("n2", 1, "64Gi")))
    harness.submit(9, cpu="1", priority="high")
    assert harness.stopped() == ["1.0.1"]
    harness.learn(NodeOverridden("n2", cordon=False))
    assert harness.started() == ["9.0.1"]


def test_one_that_still_finds_no_room_keeps_the_room_that_is_made_for_it():
    harness = filled(2)
    harness.submit(9, cpu="2", priority="high")
    assert len(harness.stopped()) == 2
    before = harness.used()
    _joins(harness, "n2", 1)
    assert harness.started() == []
    assert harness.used()["n1"] == before["n1"]
    gone(harness, "1.0.1", "2.0.1")
    assert harness.started() == ["9.0.1"]


def test_a_gang_may_use_what_appears_together_with_what_was_made_for_it():
    harness = filled(1, 1)
    harness.submit(9, cpu="1", count=2, priority="high")
    assert len(harness.stopped()) == 2
    gone(harness, "1.0.1")
    assert harness.started() == []
    _joins(harness, "n3", 1)
    assert sorted(harness.started()) == ["9.0.1", "9.1.1"]
    assert _where(harness, 9) == ["n1", "n3"]


def test_a_job_ahead_of_a_preemptor_gets_new_capacity_first():
    harness = filled(2)
    harness.submit(9, cpu="1", priority="medium")
    (victim,) = harness.stopped()
    harness.submit(10, cpu="3", priority="critical")  # too large for all that is there
    assert harness.state(10) == "pending"
    _joins(harness, "n2", 3)
    assert harness.started() == ["10.0.1"]
    gone(harness, victim)
    assert harness.started() == ["9.0.1"]


def test_equals_behind_a_preemptor_do_not_get_the_new_room_before_it():
    harness = filled(1)
    harness.submit(9, cpu="1", priority="high")
    harness.submit(10, cpu="1", priority="high")
    _joins(harness, "n2", 1)
    assert harness.started() == ["9.0.1"]
    gone(harness, "1.0.1")
    assert harness.started() == ["10.0.1"]


def test_a_member_that_a_gang_wants_back_takes_any_room_too():
    harness = filled(1, 1, 1)
    for id in (2, 3):
        harness.see(f"{id}.0.1", "succeeded", 0)
    harness.submit(9, cpu="1", count=2, priority="high", gang=GangRules(on_failure="repair"), retries=3)
    for member in (0, 1):
        harness.see(f"9.{member}.1", "running")
    harness.submit(8, cpu="1", priority="critical", node_selector={"no": "where"})
    lost = harness.runs["9.1.1"].node
    harness.learn(NodeOverridden(lost, cordon=True))
    harness.see("9.1.1", "failed", 1)
    harness.later(120_000)
    assert harness.stopped() == ["1.0.1"]
    _joins(harness, "n9", 1)
    assert harness.started() == ["9.1.2"]
    assert not harness.controller.preemption.holds


def test_why_says_that_it_starts_at_whatever_comes_first():
    harness = filled(1)
    harness.submit(9, cpu="1", priority="high")
    said = why(harness.controller, 9, harness.now_ms)
    assert said.next_trigger == "when 1.0.1 has stopped, or other capacity is freed"


def test_of_many_preemptors_of_one_kind_each_finds_what_has_become_free_on_its_own_node():
    nodes = [a_node(name, 2, "64Gi", labels={"name": name}) for name in ("n1", "n2")]
    harness = Harness(*nodes, preemption=BY_NUMBER)
    for id, priority, node in ((1, 1, "n1"), (2, 7, "n1"), (3, 1, "n2"), (4, 7, "n2")):
        harness.submit(id, cpu="1", priority=priority, node_selector={"name": node})
        harness.see(f"{id}.0.1", "running")
        harness.now_ms += 60_000
    harness.submit(8, 9, cpu="1", priority=7)
    held = {hold.places[0].node: id for id, hold in harness.controller.preemption.holds.items()}
    assert sorted(held) == ["n1", "n2"]
    for ends, node in ((4, "n2"), (2, "n1")):
        harness.now_ms += 1000
        harness.see(f"{ends}.0.1", "succeeded", 0)
        assert harness.started() == [f"{held[node]}.0.1"]


def test_a_victim_that_is_not_needed_stays_if_its_stop_order_was_not_sent():
    harness = filled(1)
    harness.submit(9, cpu="1", priority="high")
    _joins(harness, "n2", 1)
    assert _spared(harness) == ["1.0.1"]
    harness.learn(StopWithdrawn("1.0.1"))
    assert harness.runs["1.0.1"].stop_reason is None
    assert harness.kinds(1)[-1] == "job.preemption_cancelled"
    harness.submit(10, cpu="1", priority="high")  # it is one among others again: its place may be taken
    assert harness.stopped() == ["1.0.1"]
    gone(harness, "1.0.1")
    assert (harness.started(), harness.jobs[1].preemptions) == (["10.0.1"], 1)


def test_a_victim_whose_stop_order_was_sent_stops():
    harness = filled(1)
    harness.submit(9, cpu="1", priority="high")
    _joins(harness, "n2", 1)
    gone(harness, "1.0.1")
    assert harness.jobs[1].preemptions == 1
    assert harness.started() == ["1.0.2"]


def test_a_cancelled_preemptor_spares_its_victims_too():
    harness = filled(1)
    harness.submit(9, cpu="1", priority="high")
    harness.learn(JobCancelled(9))
    assert _spared(harness) == ["1.0.1"]


def test_a_stop_that_another_preemptor_needs_is_not_withdrawn():
    harness = filled(1)
    harness.submit(8, cpu="1", priority="medium")
    harness.submit(9, cpu="1", priority="high")  # by class a hold is kept: it finds nobody else
    harness.learn(JobCancelled(8))
    assert harness.controller.preemption.holds.keys() == {9}
    assert _spared(harness) == []


def test_a_dropped_stop_order_is_sent_again_for_another_preemptor():
    harness = filled(1)
    harness.submit(8, cpu="1", priority="medium")
    harness.learn(JobCancelled(8))
    assert _spared(harness) == ["1.0.1"]
    harness.submit(9, cpu="1", priority="high")
    assert harness.controller.preemption.holds.keys() == {9}
    harness.learn(StopWithdrawn("1.0.1"))
    assert harness.stopped() == ["1.0.1"]
    assert harness.runs["1.0.1"].stop_reason.text.startswith("preempted by job 8")
    gone(harness, "1.0.1")
    assert harness.started() == ["9.0.1"]


def test_a_victim_that_is_cancelled_or_drained_stops_despite_a_withdrawal():
    harness = filled(1, 1)
    harness.submit(8, 9, cpu="1", priority="high")
    assert len(harness.stopped()) == 2
    harness.learn(JobCancelled(8), JobCancelled(9))
    assert len(_spared(harness)) == 2
    harness.learn(JobCancelled(1), NodeOverridden(harness.runs["2.0.1"].node, drain=True))
    assert sorted(harness.stopped()) == ["1.0.1", "2.0.1"]
    harness.learn(StopWithdrawn("1.0.1"), StopWithdrawn("2.0.1"))
    assert all(harness.runs[run].stop_reason for run in ("1.0.1", "2.0.1"))


def test_a_gang_is_spared_whole_or_not_at_all():
    harness = a_harness(2, 2)
    harness.submit(1, cpu="2", count=2, priority="low")
    for member in (0, 1):
        harness.see(f"1.{member}.1", "running")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", priority="high")
    assert sorted(harness.stopped()) == ["1.0.1", "1.1.1"]
    harness.learn(JobCancelled(9))
    assert sorted(_spared(harness)) == ["1.0.1", "1.1.1"]
    harness.learn(StopWithdrawn("1.0.1"))
    assert harness.runs["1.0.1"].stop_reason  # the other may have been told
    harness.learn(StopWithdrawn("1.1.1"))
    assert not any(harness.runs[run].stop_reason for run in ("1.0.1", "1.1.1"))
    assert harness.state(1) == "running"


def test_a_gang_with_one_sent_stop_order_stops_as_a_whole():
    harness = a_harness(2, 2)
    harness.submit(1, cpu="2", count=2, priority="low")
    for member in (0, 1):
        harness.see(f"1.{member}.1", "running")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", priority="high")
    harness.learn(JobCancelled(9))
    harness.learn(StopWithdrawn("1.0.1"))
    harness.see("1.1.1", "failed", 143)
    assert harness.stopped() == ["1.0.1"]
    gone(harness, "1.0.1")
    assert (harness.jobs[1].preemptions, harness.jobs[1].failures) == (1, 0)
