"""A preemptor takes the first room that appears, wherever it is; the room made for it is for others then, and a victim whose
order to stop was not sent yet stays."""

from __future__ import annotations

from typing import Any

from builders import a_node
from hodei.control.explain.why import why
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.model.effects import Spare
from hodei.model.facts import JobCancelled, NodeJoined, NodeOverridden, RunSpared
from hodei.model.job import GangRules
from unit.control.house import House, a_house
from unit.control.scenes import filled, gone

BY_NUMBER = PreemptionPolicy(by="number")


def _joins(house: House, name: str, cpu: int, **fields: Any) -> None:
    house.now_ms += 1000
    house.learn(NodeJoined(a_node(name, cpu, "64Gi", **fields)))


def _spared(house: House) -> list[str]:
    return [act.run for act in house.acts if isinstance(act, Spare)]


def _where(house: House, job: int) -> list[str]:
    return sorted(run.node for run in house.runs.values() if run.job == job and run.state in ("placed", "running"))


# --------------------------------------------------------------------------------------------- any room


def test_a_preemptor_starts_on_a_node_that_joins_while_its_victim_still_stops():
    house = filled(1)
    house.submit(9, cpu="1", priority="high")
    assert house.stopped() == ["1.0.1"]
    _joins(house, "n2", 1)
    assert house.started() == ["9.0.1"]
    assert _where(house, 9) == ["n2"]
    assert not house.controller.preempting.holds


def test_a_preemptor_starts_where_somebody_else_ends_first():
    house = filled(1, 1)
    house.submit(9, cpu="1", priority="high")
    (victim,) = house.stopped()
    other = {"1.0.1": "2.0.1", "2.0.1": "1.0.1"}[victim]
    house.now_ms += 1000
    house.see(other, "succeeded", 0)
    assert house.started() == ["9.0.1"]
    assert _where(house, 9) == [house.runs[other].node]


def test_a_preemptor_starts_on_its_own_node_when_another_there_ends_first():
    house = a_house(2, preemption=BY_NUMBER)
    for id, priority in ((1, 1), (2, 7)):
        house.submit(id, cpu="1", priority=priority)
        house.see(f"{id}.0.1", "running")
        house.now_ms += 60_000
    house.submit(8, 9, cpu="1", priority=7)
    assert house.stopped() == ["1.0.1"]
    house.now_ms += 1000
    house.see("2.0.1", "succeeded", 0)
    assert house.started() == ["8.0.1"]


def test_the_room_made_for_one_that_went_elsewhere_is_for_others():
    house = filled(1)
    house.submit(9, cpu="1", priority="high")
    _joins(house, "n2", 1)
    house.submit(10, cpu="1", priority="medium")
    assert house.controller.preempting.holds.keys() == {10}
    gone(house, "1.0.1")
    assert house.started() == ["10.0.1"]
    assert _where(house, 10) == ["n1"]


def test_a_node_that_is_opened_again_counts_too():
    house = filled(1)
    house.learn(NodeOverridden("n2", cordon=True), NodeJoined(a_node("n2", 1, "64Gi")))
    house.submit(9, cpu="1", priority="high")
    assert house.stopped() == ["1.0.1"]
    house.learn(NodeOverridden("n2", cordon=False))
    assert house.started() == ["9.0.1"]


def test_one_that_still_finds_no_room_keeps_the_room_that_is_made_for_it():
    house = filled(2)
    house.submit(9, cpu="2", priority="high")
    assert len(house.stopped()) == 2
    before = house.used()
    _joins(house, "n2", 1)
    assert house.started() == []
    assert house.used()["n1"] == before["n1"]
    gone(house, "1.0.1", "2.0.1")
    assert house.started() == ["9.0.1"]


def test_a_gang_may_use_what_appears_together_with_what_was_made_for_it():
    house = filled(1, 1)
    house.submit(9, cpu="1", count=2, priority="high")
    assert len(house.stopped()) == 2
    gone(house, "1.0.1")
    assert house.started() == []
    _joins(house, "n3", 1)
    assert sorted(house.started()) == ["9.0.1", "9.1.1"]
    assert _where(house, 9) == ["n1", "n3"]


def test_whoever_is_before_it_in_the_line_gets_the_new_room_first():
    house = filled(2)
    house.submit(9, cpu="1", priority="medium")
    (victim,) = house.stopped()
    house.submit(10, cpu="3", priority="critical")  # too large for all that is there
    assert house.state(10) == "pending"
    _joins(house, "n2", 3)
    assert house.started() == ["10.0.1"]
    gone(house, victim)
    assert house.started() == ["9.0.1"]


def test_equals_behind_a_preemptor_do_not_get_the_new_room_before_it():
    house = filled(1)
    house.submit(9, cpu="1", priority="high")
    house.submit(10, cpu="1", priority="high")
    _joins(house, "n2", 1)
    assert house.started() == ["9.0.1"]
    gone(house, "1.0.1")
    assert house.started() == ["10.0.1"]


def test_a_member_that_a_gang_wants_back_takes_any_room_too():
    house = filled(1, 1, 1)
    for id in (2, 3):
        house.see(f"{id}.0.1", "succeeded", 0)
    house.submit(9, cpu="1", count=2, priority="high", gang=GangRules(on_failure="repair"), retries=3)
    for member in (0, 1):
        house.see(f"9.{member}.1", "running")
    house.submit(8, cpu="1", priority="critical", node_selector={"no": "where"})
    lost = house.runs["9.1.1"].node
    house.learn(NodeOverridden(lost, cordon=True))
    house.see("9.1.1", "failed", 1)
    house.later(120_000)
    assert house.stopped() == ["1.0.1"]
    _joins(house, "n9", 1)
    assert house.started() == ["9.1.2"]
    assert not house.controller.preempting.holds


def test_why_says_that_it_starts_at_whatever_comes_first():
    house = filled(1)
    house.submit(9, cpu="1", priority="high")
    said = why(house.controller, 9, house.now_ms)
    assert said.next_trigger == "when 1.0.1 has stopped, or other room appears"


def test_of_many_preemptors_of_one_kind_each_finds_what_has_become_free_on_its_own_node():
    nodes = [a_node(name, 2, "64Gi", labels={"name": name}) for name in ("n1", "n2")]
    house = House(*nodes, preemption=BY_NUMBER)
    for id, priority, node in ((1, 1, "n1"), (2, 7, "n1"), (3, 1, "n2"), (4, 7, "n2")):
        house.submit(id, cpu="1", priority=priority, node_selector={"name": node})
        house.see(f"{id}.0.1", "running")
        house.now_ms += 60_000
    house.submit(8, 9, cpu="1", priority=7)
    held = {hold.places[0].node: id for id, hold in house.controller.preempting.holds.items()}
    assert sorted(held) == ["n1", "n2"]
    for ends, node in ((4, "n2"), (2, "n1")):
        house.now_ms += 1000
        house.see(f"{ends}.0.1", "succeeded", 0)
        assert house.started() == [f"{held[node]}.0.1"]


# ----------------------------------------------------------------------------------------------- sparing


def test_a_victim_that_need_not_go_any_more_is_to_be_spared_and_stays_if_it_was_not_told_yet():
    house = filled(1)
    house.submit(9, cpu="1", priority="high")
    _joins(house, "n2", 1)
    assert _spared(house) == ["1.0.1"]
    house.learn(RunSpared("1.0.1"))
    assert house.runs["1.0.1"].stop_requested == ""
    assert house.kinds(1)[-1] == "job.spared"
    house.submit(10, cpu="1", priority="high")  # it is one among others again: its place may be taken
    assert house.stopped() == ["1.0.1"]
    gone(house, "1.0.1")
    assert (house.started(), house.jobs[1].preemptions) == (["10.0.1"], 1)


def test_a_victim_that_was_told_already_goes():
    house = filled(1)
    house.submit(9, cpu="1", priority="high")
    _joins(house, "n2", 1)
    gone(house, "1.0.1")
    assert house.jobs[1].preemptions == 1
    assert house.started() == ["1.0.2"]


def test_a_cancelled_preemptor_spares_its_victims_too():
    house = filled(1)
    house.submit(9, cpu="1", priority="high")
    house.learn(JobCancelled(9))
    assert _spared(house) == ["1.0.1"]


def test_nobody_is_spared_whose_room_another_preemptor_waits_for():
    house = filled(1)
    house.submit(8, cpu="1", priority="medium")
    house.submit(9, cpu="1", priority="high")  # by class a hold is kept: it finds nobody else
    house.learn(JobCancelled(8))
    assert house.controller.preempting.holds.keys() == {9}
    assert _spared(house) == []


def test_one_whose_order_was_dropped_is_told_again_if_another_has_come_to_wait_for_its_room():
    house = filled(1)
    house.submit(8, cpu="1", priority="medium")
    house.learn(JobCancelled(8))
    assert _spared(house) == ["1.0.1"]
    house.submit(9, cpu="1", priority="high")
    assert house.controller.preempting.holds.keys() == {9}
    house.learn(RunSpared("1.0.1"))
    assert house.stopped() == ["1.0.1"]
    assert house.runs["1.0.1"].stop_requested.startswith("preempted by job 8")
    gone(house, "1.0.1")
    assert house.started() == ["9.0.1"]


def test_a_victim_that_is_cancelled_or_drained_before_it_is_spared_goes_all_the_same():
    house = filled(1, 1)
    house.submit(8, 9, cpu="1", priority="high")
    assert len(house.stopped()) == 2
    house.learn(JobCancelled(8), JobCancelled(9))
    assert len(_spared(house)) == 2
    house.learn(JobCancelled(1), NodeOverridden(house.runs["2.0.1"].node, drain=True))
    assert sorted(house.stopped()) == ["1.0.1", "2.0.1"]
    house.learn(RunSpared("1.0.1"), RunSpared("2.0.1"))
    assert all(house.runs[run].stop_requested for run in ("1.0.1", "2.0.1"))


def test_a_gang_is_spared_whole_or_not_at_all():
    house = a_house(2, 2)
    house.submit(1, cpu="2", count=2, priority="low")
    for member in (0, 1):
        house.see(f"1.{member}.1", "running")
    house.now_ms += 60_000
    house.submit(9, cpu="1", priority="high")
    assert sorted(house.stopped()) == ["1.0.1", "1.1.1"]
    house.learn(JobCancelled(9))
    assert sorted(_spared(house)) == ["1.0.1", "1.1.1"]
    house.learn(RunSpared("1.0.1"))
    assert house.runs["1.0.1"].stop_requested  # the other may have been told
    house.learn(RunSpared("1.1.1"))
    assert not any(house.runs[run].stop_requested for run in ("1.0.1", "1.1.1"))
    assert house.state(1) == "running"


def test_a_gang_of_which_one_member_was_told_already_goes_whole():
    house = a_house(2, 2)
    house.submit(1, cpu="2", count=2, priority="low")
    for member in (0, 1):
        house.see(f"1.{member}.1", "running")
    house.now_ms += 60_000
    house.submit(9, cpu="1", priority="high")
    house.learn(JobCancelled(9))
    house.learn(RunSpared("1.0.1"))
    house.see("1.1.1", "failed", 143)
    assert house.stopped() == ["1.0.1"]
    gone(house, "1.0.1")
    assert (house.jobs[1].preemptions, house.jobs[1].failures) == (1, 0)
