"""What broke in other schedulers, played again here: half gangs, gangs in each other's way, members lost. Each says in one line what went wrong elsewhere and what
is promised.

No time passes but what the test lets pass, and backends are played by the test: that real processes stop and start is
shown by the stories of the real server.
"""

from __future__ import annotations

from typing import Any

import pytest

from builders import a_job, a_node
from hodei.control.lifecycle.jobs import START_FAILED
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.model.facts import JobCancelled, JobRequeued, JobSubmitted, NodeJoined, NodeLost, RunObserved
from hodei.model.job import GangRules
from unit.control.house import House, a_house, some_nodes
from unit.control.scenes import evicted, filled, gone, is_empty, live, running

REPAIR = GangRules(on_failure="repair")


# -------------------------------------------------------------------------- a half-bound gang that holds room for ever


def test_a_gang_that_fits_in_part_holds_no_room_while_it_waits():
    """Elsewhere: members that fitted were bound and idled on their nodes. Here: all or none, and others use the room."""
    house = a_house(1, 1, 1)
    house.submit(1, cpu="1", count=4)
    assert (house.started(), is_empty(house)) == ([], True)
    house.submit(2, 3, 4, cpu="1")
    assert house.started() == ["2.0.1", "3.0.1", "4.0.1"]


def test_a_half_bound_gang_gives_all_its_room_back():
    """Elsewhere: one bind failed and the bound rest held its nodes for ever. Here: they go too, and it is tried whole."""
    house = a_house(1, 1)
    house.submit(1, cpu="1", count=2)
    running(house, "1.0.1")
    house.submit(2, cpu="1", count=2)
    house.see("1.1.1", "failed", reason_code=START_FAILED, reason="no such image")
    assert house.stopped() == ["1.0.1"]
    gone(house, "1.0.1")
    assert house.started() == ["2.0.1", "2.1.1"]  # the room is free for the next at once
    assert house.state(1) == "pending"
    house.see("2.0.1", "succeeded", 0)
    house.see("2.1.1", "succeeded", 0)
    house.later(60_000)
    assert house.started() == ["1.0.2", "1.1.2"]


def test_a_gang_whose_last_member_never_comes_up_gives_all_its_room_back():
    """Elsewhere: one member hung in starting and the rest waited for it for ever. Here: the assembly has a time limit."""
    house = a_house(1, 1)
    house.submit(1, cpu="1", count=2, gang=GangRules(assembly_timeout_ms=10_000))
    running(house, "1.0.1")
    house.later(10_000)
    assert house.stopped() == ["1.0.1", "1.1.1"]
    gone(house, "1.0.1", "1.1.1")
    assert is_empty(house)
    house.submit(2, cpu="1", count=2)
    assert house.started() == ["2.0.1", "2.1.1"]


def test_a_gang_half_bound_when_the_scheduler_died_is_no_half_gang_afterwards():
    """Elsewhere: a crash between two binds left half a gang. Here: all its runs are known again, and live or go together."""
    house = a_house(1, 1)
    house.submit(1, cpu="1", count=2)
    running(house, "1.0.1")
    house.restart(*some_nodes(1, 1))
    assert live(house, 1) == ["1.0.1", "1.1.1"]
    house.see("1.1.1", "lost", reason_code="lost", reason="nobody knows it")
    assert house.stopped() == ["1.0.1"]
    gone(house, "1.0.1")
    assert is_empty(house)


# --------------------------------------------------------------------------------------- two gangs that hold and wait


def test_two_gangs_never_hold_and_wait_for_each_other():
    """Elsewhere: two gangs got half the cluster each and both waited for ever. Here: one starts, the other holds nothing."""
    house = a_house(1, 1, 1, 1)
    house.submit(1, 2, cpu="1", count=3)
    assert house.started() == ["1.0.1", "1.1.1", "1.2.1"]
    assert live(house, 2) == []
    house.submit(3, cpu="1")
    assert house.started() == ["3.0.1"]  # what gang 2 cannot use whole is not kept from others
    for run in ("1.0.1", "1.1.1", "1.2.1"):
        house.see(run, "succeeded", 0)
    assert house.started() == ["2.0.1", "2.1.1", "2.2.1"]


def test_two_gangs_that_make_room_at_once_do_not_split_the_victims():
    """Elsewhere: two preempting gangs evicted half of what each needed. Here: one gets all its victims, the other none."""
    house = filled(1, 1, 1, 1)
    house.submit(8, 9, cpu="1", count=3, priority="high")
    assert len(evicted(house)) == 3
    assert [house.jobs[id].reason_code for id in (8, 9)] == ["PREEMPTING", "INSUFFICIENT_CPU"]
    gone(house, *house.stopped())
    assert live(house, 8) == ["8.0.1", "8.1.1", "8.2.1"]
    assert live(house, 9) == []
    house.learn(*(RunObserved(run, "succeeded", house.now_ms, 0) for run in live(house, 8)))
    # The second in line comes before those who went: they are of a lower priority.
    assert live(house, 9) == ["9.0.1", "9.1.1", "9.2.1"]
    assert len(evicted(house)) == 3


# ----------------------------------------------------------------------- a member lost, and its slot taken by a filler


def a_gang_and_a_filler(**fields: Any) -> House:
    """A gang of two that runs on both nodes, and a filler that waits for room, more important than the gang."""
    house = a_house(1, 1, preemption=PreemptionPolicy(enabled=False))
    house.submit(1, cpu="1", count=2, **fields)
    running(house, "1.0.1", "1.1.1")
    house.submit(2, cpu="1", priority="critical")
    assert house.state(2) == "pending"
    return house


def test_the_slot_of_a_lost_member_is_not_taken_by_a_filler():
    """Elsewhere: a filler took the slot and the gang starved, half there. Here: the lost member is placed first, alone."""
    house = a_gang_and_a_filler(gang=REPAIR)
    house.see("1.1.1", "lost", reason_code="lost", reason="its host forgot it")
    assert (house.started(), house.stopped()) == (["1.1.2"], [])
    assert house.state(2) == "pending"
    lost, again = house.runs["1.1.1"], house.runs["1.1.2"]
    assert (again.member, again.rank, again.attempt) == (lost.member, lost.rank, 2)
    assert house.runs["1.0.1"].state == "running"
    running(house, "1.1.2")
    for run in ("1.0.1", "1.1.2"):
        house.see(run, "succeeded", 0)
    assert (house.state(1), live(house, 2)) == ("succeeded", ["2.0.1"])


def test_the_slot_of_a_member_whose_node_died_is_the_next_that_is_free():
    """Elsewhere: the node came back and a filler was there first. Here: whatever becomes free goes to the lost member."""
    house = a_gang_and_a_filler(gang=REPAIR)
    lost = next(run for run in house.runs.values() if run.node == "n2")
    house.learn(NodeLost("n2"))
    assert (house.started(), house.stopped(), house.state(1)) == ([], [], "running")
    house.later(300_000)
    house.learn(NodeJoined(a_node("n3", 1, "64Gi")))
    (again,) = house.started()
    assert (house.runs[again].member, house.runs[again].rank) == (lost.member, lost.rank)
    assert (house.runs[again].node, house.state(2)) == ("n3", "pending")


def test_a_filler_that_arrives_with_the_news_of_the_loss_comes_second():
    """Elsewhere: loss and arrival came in one batch and the order of news decided. Here: the lost member comes first."""
    house = a_gang_and_a_filler(gang=REPAIR)
    newcomer = a_job(3, cpu="1", priority="critical", at_ms=house.now_ms)
    lost = RunObserved("1.1.1", "lost", house.now_ms, reason_code="lost", reason="its host forgot it")
    house.learn(JobSubmitted(newcomer), lost)
    assert house.started() == ["1.1.2"]


def test_without_repair_a_gang_that_lost_a_member_leaves_whole():
    """Elsewhere: the rest ran on, useless, beside the filler. Here: it goes whole, so that nothing is held in vain."""
    house = a_gang_and_a_filler()
    house.see("1.1.1", "lost", reason_code="lost", reason="its host forgot it")
    assert house.stopped() == ["1.0.1"]
    gone(house, "1.0.1")
    assert live(house, 1) == []
    assert live(house, 2) == ["2.0.1"]


def test_a_gang_that_is_sent_away_while_a_member_is_missing_comes_back_whole():
    """Elsewhere: the replacement was started for a gang that was gone. Here: the repair is forgotten with the attempt."""
    house = a_house(1, 1)
    house.submit(1, cpu="1", count=2, priority="low", gang=REPAIR)
    running(house, "1.0.1", "1.1.1")
    house.learn(NodeLost("n2"))
    house.now_ms += 60_000
    house.submit(2, cpu="1", priority="high")
    (survivor,) = house.stopped()
    gone(house, survivor)
    running(house, "2.0.1")
    assert house.state(1) == "pending"
    house.learn(NodeJoined(a_node("n2", 1, "64Gi")))
    assert house.started() == []  # room for one of two is no room
    house.see("2.0.1", "succeeded", 0)
    assert house.started() == ["1.0.2", "1.1.2"]


@pytest.mark.parametrize("end", ["cancelled", "failed", "requeued"])
def test_room_made_for_a_lost_member_is_given_up_when_its_gang_goes(end):
    """Elsewhere: room stayed reserved for a gang that was gone. Here: nothing of it is held or started on its own."""
    house = a_house(1, 1, 1)
    house.submit(1, cpu="1", count=2, priority="high", gang=REPAIR)
    house.submit(2, cpu="1", priority="low")
    running(house, "1.0.1", "1.1.1", "2.0.1")
    house.now_ms += 60_000
    house.learn(NodeLost(house.runs["1.1.1"].node))
    assert house.stopped() == ["2.0.1"]
    if end != "failed":
        house.learn(JobCancelled(1) if end == "cancelled" else JobRequeued(1))
    gone(house, "1.0.1")
    assert house.state(1) == ("pending" if end == "requeued" else end)
    gone(house, "2.0.1")
    if end == "requeued":
        assert (live(house, 1), house.state(1)) == (["1.0.2", "1.1.2"], "scheduled")
    else:
        assert (live(house, 1), live(house, 2)) == ([], ["2.0.2"])


@pytest.mark.parametrize("told", ["cancelled", "requeued", "preempted"])
@pytest.mark.parametrize("rules", [REPAIR, GangRules(elastic=True)], ids=["repair", "elastic"])
def test_a_gang_that_is_being_stopped_gets_no_new_members(told, rules):
    """Elsewhere: a replacement came up while its gang was taken down, and stayed. Here: what is going stays going."""
    house = a_house(1, 1, 1)
    house.submit(1, cpu="1", count=3, min_count=2, priority="low", gang=rules)
    running(house, *house.started())
    node = house.runs["1.2.1"].node
    house.learn(NodeLost(node))
    house.now_ms += 60_000
    if told == "preempted":
        house.submit(9, cpu="1", count=2, priority="high")
    else:
        house.learn(JobCancelled(1) if told == "cancelled" else JobRequeued(1))
    assert house.stopped() == ["1.0.1", "1.1.1"]
    house.learn(NodeJoined(a_node(node, 1, "64Gi")))
    assert [run for run in house.started() if run.startswith("1.")] == []
    gone(house, "1.0.1", "1.1.1")
    assert house.state(1) in ("cancelled", "pending", "scheduled")
    assert len(live(house, 1)) == (3 if told == "requeued" else 0)


def test_room_kept_for_a_member_that_failed_is_gone_with_its_node():
    """Elsewhere: what was kept on a node outlived it and was given back twice. Here: the node comes back with what it has."""
    house = a_house(1, 1)
    house.submit(1, cpu="1", count=2, gang=REPAIR, retries=5)
    running(house, "1.0.1", "1.1.1")
    node = house.runs["1.1.1"].node
    house.see("1.1.1", "failed", 1)  # its place is kept until its retry
    house.learn(NodeLost(node))
    house.learn(NodeJoined(a_node(node, 1, "64Gi")))
    house.submit(2, cpu="1")
    house.later(60_000)
    assert house.used()[node] == {"cpu": 1000, "memory": house.used()[node]["memory"]}
    there = [run.id for run in house.runs.values() if run.node == node and run.state in ("placed", "running")]
    assert len(there) == 1
