"""What broke in other schedulers, played again here: half gangs, gangs in each other's way, members lost. Each says in one line what went wrong elsewhere and what
is promised.

No time passes but what the test lets pass, and backends are played by the test: that real processes stop and start is
shown by the stories of the real server.
"""

from __future__ import annotations

from typing import Any

import pytest

from builders import a_job, a_node
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.control.lifecycle.runs import START_FAILED
from hodei.model.facts import JobCancelled, JobRequeued, JobSubmitted, NodeJoined, NodeLost, RunObserved
from hodei.model.job import GangRules
from unit.control.harness import Harness, a_harness, some_nodes
from unit.control.scenarios import evicted, filled, gone, is_empty, live, running

REPAIR = GangRules(on_failure="repair")


def test_a_gang_that_fits_in_part_holds_no_room_while_it_waits():
    """Elsewhere: members that fitted were bound and idled on their nodes. Here: all or none, and others use the room."""
    harness = a_harness(1, 1, 1)
    harness.submit(1, cpu="1", count=4)
    assert (harness.started(), is_empty(harness)) == ([], True)
    harness.submit(2, 3, 4, cpu="1")
    assert harness.started() == ["2.0.1", "3.0.1", "4.0.1"]


def test_a_half_bound_gang_gives_all_its_room_back():
    """Elsewhere: one bind failed and the bound rest held its nodes for ever. Here: they go too, and it is tried whole."""
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2)
    running(harness, "1.0.1")
    harness.submit(2, cpu="1", count=2)
    harness.see("1.1.1", "failed", reason_code=START_FAILED, reason="no such image")
    assert harness.stopped() == ["1.0.1"]
    gone(harness, "1.0.1")
    assert harness.started() == ["2.0.1", "2.1.1"]  # the room is free for the next at once
    assert harness.state(1) == "pending"
    harness.see("2.0.1", "succeeded", 0)
    harness.see("2.1.1", "succeeded", 0)
    harness.later(60_000)
    assert harness.started() == ["1.0.2", "1.1.2"]


def test_a_gang_whose_last_member_never_comes_up_gives_all_its_room_back():
    """Elsewhere: one member hung in starting and the rest waited for it for ever. Here: the assembly has a time limit."""
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2, gang=GangRules(assembly_timeout_ms=10_000))
    running(harness, "1.0.1")
    harness.later(10_000)
    assert harness.stopped() == ["1.0.1", "1.1.1"]
    gone(harness, "1.0.1", "1.1.1")
    assert is_empty(harness)
    harness.submit(2, cpu="1", count=2)
    assert harness.started() == ["2.0.1", "2.1.1"]


def test_a_gang_half_bound_when_the_scheduler_died_is_no_half_gang_afterwards():
    """Elsewhere: a crash between two binds left half a gang. Here: all its runs are known again, and live or go together."""
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2)
    running(harness, "1.0.1")
    harness.restart(*some_nodes(1, 1))
    assert live(harness, 1) == ["1.0.1", "1.1.1"]
    harness.see("1.1.1", "lost", reason_code="lost", reason="nobody knows it")
    assert harness.stopped() == ["1.0.1"]
    gone(harness, "1.0.1")
    assert is_empty(harness)


def test_two_gangs_never_hold_and_wait_for_each_other():
    """Elsewhere: two gangs got half the cluster each and both waited for ever. Here: one starts, the other holds nothing."""
    harness = a_harness(1, 1, 1, 1)
    harness.submit(1, 2, cpu="1", count=3)
    assert harness.started() == ["1.0.1", "1.1.1", "1.2.1"]
    assert live(harness, 2) == []
    harness.submit(3, cpu="1")
    assert harness.started() == ["3.0.1"]  # what gang 2 cannot use whole is not kept from others
    for run in ("1.0.1", "1.1.1", "1.2.1"):
        harness.see(run, "succeeded", 0)
    assert harness.started() == ["2.0.1", "2.1.1", "2.2.1"]


def test_two_gangs_that_make_room_at_once_do_not_split_the_victims():
    """Elsewhere: two preempting gangs evicted half of what each needed. Here: one gets all its victims, the other none."""
    harness = filled(1, 1, 1, 1)
    harness.submit(8, 9, cpu="1", count=3, priority="high")
    assert len(evicted(harness)) == 3
    assert [harness.jobs[id].reason_code for id in (8, 9)] == ["PREEMPTING", "INSUFFICIENT_CPU"]
    gone(harness, *harness.stopped())
    assert live(harness, 8) == ["8.0.1", "8.1.1", "8.2.1"]
    assert live(harness, 9) == []
    harness.learn(*(RunObserved(run, "succeeded", harness.now_ms, 0) for run in live(harness, 8)))
    # The second in line comes before those who went: they are of a lower priority.
    assert live(harness, 9) == ["9.0.1", "9.1.1", "9.2.1"]
    assert len(evicted(harness)) == 3


def a_gang_and_a_filler(**fields: Any) -> Harness:
    """A gang of two that runs on both nodes, and a filler that waits for room, more important than the gang."""
    harness = a_harness(1, 1, preemption=PreemptionPolicy(enabled=False))
    harness.submit(1, cpu="1", count=2, **fields)
    running(harness, "1.0.1", "1.1.1")
    harness.submit(2, cpu="1", priority="critical")
    assert harness.state(2) == "pending"
    return harness


def test_the_slot_of_a_lost_member_is_not_taken_by_a_filler():
    """Elsewhere: a filler took the slot and the gang starved, half there. Here: the lost member is placed first, alone."""
    harness = a_gang_and_a_filler(gang=REPAIR)
    harness.see("1.1.1", "lost", reason_code="lost", reason="its host forgot it")
    assert (harness.started(), harness.stopped()) == (["1.1.2"], [])
    assert harness.state(2) == "pending"
    lost, again = harness.runs["1.1.1"], harness.runs["1.1.2"]
    assert (again.member, again.rank, again.attempt) == (lost.member, lost.rank, 2)
    assert harness.runs["1.0.1"].state == "running"
    running(harness, "1.1.2")
    for run in ("1.0.1", "1.1.2"):
        harness.see(run, "succeeded", 0)
    assert (harness.state(1), live(harness, 2)) == ("succeeded", ["2.0.1"])


def test_the_slot_of_a_member_whose_node_died_is_the_next_that_is_free():
    """Elsewhere: the node came back and a filler was there first. Here: whatever becomes free goes to the lost member."""
    harness = a_gang_and_a_filler(gang=REPAIR)
    lost = next(run for run in harness.runs.values() if run.node == "n2")
    harness.learn(NodeLost("n2"))
    assert (harness.started(), harness.stopped(), harness.state(1)) == ([], [], "running")
    harness.later(300_000)
    harness.learn(NodeJoined(a_node("n3", 1, "64Gi")))
    (again,) = harness.started()
    assert (harness.runs[again].member, harness.runs[again].rank) == (lost.member, lost.rank)
    assert (harness.runs[again].node, harness.state(2)) == ("n3", "pending")


def test_a_filler_that_arrives_with_the_news_of_the_loss_comes_second():
    """Elsewhere: loss and arrival came in one batch and the order of news decided. Here: the lost member comes first."""
    harness = a_gang_and_a_filler(gang=REPAIR)
    newcomer = a_job(3, cpu="1", priority="critical", at_ms=harness.now_ms)
    lost = RunObserved("1.1.1", "lost", harness.now_ms, reason_code="lost", reason="its host forgot it")
    harness.learn(JobSubmitted(newcomer), lost)
    assert harness.started() == ["1.1.2"]


def test_without_repair_a_gang_that_lost_a_member_leaves_whole():
    """Elsewhere: the rest ran on, useless, beside the filler. Here: it goes whole, so that nothing is held in vain."""
    harness = a_gang_and_a_filler()
    harness.see("1.1.1", "lost", reason_code="lost", reason="its host forgot it")
    assert harness.stopped() == ["1.0.1"]
    gone(harness, "1.0.1")
    assert live(harness, 1) == []
    assert live(harness, 2) == ["2.0.1"]


def test_a_gang_that_is_sent_away_while_a_member_is_missing_comes_back_whole():
    """Elsewhere: the replacement was started for a gang that was gone. Here: the repair is forgotten with the attempt."""
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2, priority="low", gang=REPAIR)
    running(harness, "1.0.1", "1.1.1")
    harness.learn(NodeLost("n2"))
    harness.now_ms += 60_000
    harness.submit(2, cpu="1", priority="high")
    (survivor,) = harness.stopped()
    gone(harness, survivor)
    running(harness, "2.0.1")
    assert harness.state(1) == "pending"
    harness.learn(NodeJoined(a_node("n2", 1, "64Gi")))
    assert harness.started() == []  # room for one of two is no room
    harness.see("2.0.1", "succeeded", 0)
    assert harness.started() == ["1.0.2", "1.1.2"]


@pytest.mark.parametrize("end", ["cancelled", "failed", "requeued"])
def test_room_made_for_a_lost_member_is_given_up_when_its_gang_goes(end):
    """Elsewhere: room stayed reserved for a gang that was gone. Here: nothing of it is held or started on its own."""
    harness = a_harness(1, 1, 1)
    harness.submit(1, cpu="1", count=2, priority="high", gang=REPAIR)
    harness.submit(2, cpu="1", priority="low")
    running(harness, "1.0.1", "1.1.1", "2.0.1")
    harness.now_ms += 60_000
    harness.learn(NodeLost(harness.runs["1.1.1"].node))
    assert harness.stopped() == ["2.0.1"]
    if end != "failed":
        harness.learn(JobCancelled(1) if end == "cancelled" else JobRequeued(1))
    gone(harness, "1.0.1")
    assert harness.state(1) == ("pending" if end == "requeued" else end)
    gone(harness, "2.0.1")
    if end == "requeued":
        assert (live(harness, 1), harness.state(1)) == (["1.0.2", "1.1.2"], "scheduled")
    else:
        assert (live(harness, 1), live(harness, 2)) == ([], ["2.0.2"])


@pytest.mark.parametrize("told", ["cancelled", "requeued", "preempted"])
@pytest.mark.parametrize("rules", [REPAIR, GangRules(elastic=True)], ids=["repair", "elastic"])
def test_a_gang_that_is_being_stopped_gets_no_new_members(told, rules):
    """Elsewhere: a replacement came up while its gang was taken down, and stayed. Here: what is going stays going."""
    harness = a_harness(1, 1, 1)
    harness.submit(1, cpu="1", count=3, min_count=2, priority="low", gang=rules)
    running(harness, *harness.started())
    node = harness.runs["1.2.1"].node
    harness.learn(NodeLost(node))
    harness.now_ms += 60_000
    if told == "preempted":
        harness.submit(9, cpu="1", count=2, priority="high")
    else:
        harness.learn(JobCancelled(1) if told == "cancelled" else JobRequeued(1))
    assert harness.stopped() == ["1.0.1", "1.1.1"]
    harness.learn(NodeJoined(a_node(node, 1, "64Gi")))
    assert [run for run in harness.started() if run.startswith("1.")] == []
    gone(harness, "1.0.1", "1.1.1")
    assert harness.state(1) in ("cancelled", "pending", "scheduled")
    assert len(live(harness, 1)) == (3 if told == "requeued" else 0)


def test_room_kept_for_a_member_that_failed_is_gone_with_its_node():
    """Elsewhere: what was kept on a node outlived it and was given back twice. Here: the node comes back with what it has."""
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2, gang=REPAIR, retries=5)
    running(harness, "1.0.1", "1.1.1")
    node = harness.runs["1.1.1"].node
    harness.see("1.1.1", "failed", 1)  # its place is kept until its retry
    harness.learn(NodeLost(node))
    harness.learn(NodeJoined(a_node(node, 1, "64Gi")))
    harness.submit(2, cpu="1")
    harness.later(60_000)
    assert harness.used()[node] == {"cpu": 1000, "memory": harness.used()[node]["memory"]}
    there = [run.id for run in harness.runs.values() if run.node == node and run.state in ("placed", "running")]
    assert len(there) == 1
