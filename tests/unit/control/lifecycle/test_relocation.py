"""Jobs that are moved to other nodes, by a wish or because theirs is drained."""

from __future__ import annotations

import pytest

from hodei.model.effects import Stop
from hodei.model.facts import (
    JobCancelled,
    JobHeld,
    JobMigrated,
    JobReleased,
    JobSuspended,
    NodeJoined,
    NodeLost,
    NodeOverridden,
)
from hodei.model.job import Checkpoint
from unit.control.house import House, a_house, some_nodes
from unit.control.scenes import gone, is_empty, live, running

SAVES = Checkpoint(signal="USR1")


def on_the_first(*cpus: int, **spec) -> House:
    """A job that runs on n1, where n1 is the only node until it does."""
    house = a_house(cpus[0])
    house.submit(1, **{"cpu": "1"} | spec)
    running(house, *live(house))
    for node in some_nodes(*cpus)[1:]:
        house.learn(NodeJoined(node))
    return house


def test_a_job_saves_its_work_and_goes_on_elsewhere():
    house = on_the_first(4, 1, checkpoint=SAVES)
    house.learn(JobMigrated(1))
    assert house.acts == [Stop("1.0.1", "local", 10_000, "migrated off n1", SAVES)]
    assert house.used()["n2"]["cpu"] == 1000, "the room is kept for it"
    gone(house, "1.0.1")
    assert (house.state(), house.started(), house.runs["1.0.2"].node) == ("scheduled", ["1.0.2"], "n2")
    assert house.used()["n1"] == {}
    requeued = [event for event in house.events if event.kind == "job.requeued"]
    assert requeued[0].detail["reason_code"] == "MIGRATED"
    assert (house.jobs[1].move, house.jobs[1].failures, house.jobs[1].preemptions) == ("", 0, 0)


def test_it_stays_if_nobody_else_can_take_it_and_that_is_said():
    house = on_the_first(4, 1, cpu="2")
    house.learn(JobMigrated(1))
    assert (house.acts, house.state()) == ([], "running")
    assert house.events[-1].kind == "job.migration_refused"
    assert house.events[-1].detail["reason"] == "it is being moved off n1, and no other node has room for it"


def test_by_force_it_leaves_and_waits_for_another_node_beside_its_own_that_is_free():
    house = on_the_first(4, 1, cpu="2")
    house.learn(JobMigrated(1, force=True))
    gone(house, "1.0.1")
    assert (house.state(), house.started()) == ("pending", [])
    house.learn()
    assert house.reason()[0] == "MOVING"
    assert "n1" in house.reason()[1]


def test_one_that_finds_no_other_node_for_ten_minutes_takes_any():
    house = on_the_first(4, 1, cpu="2")
    house.learn(JobMigrated(1, force=True))
    gone(house, "1.0.1")
    house.later(599_000)
    assert house.state() == "pending"
    house.later(1_000)
    assert house.runs["1.0.2"].node == "n1"


def test_one_that_waits_for_another_node_is_free_to_go_anywhere_when_it_was_held_and_released():
    house = on_the_first(4, 1, cpu="2")
    house.learn(JobMigrated(1, force=True))
    gone(house, "1.0.1")
    house.learn(JobHeld(1))
    house.learn(JobReleased(1))
    assert house.runs["1.0.2"].node == "n1"


def test_which_nodes_it_leaves_is_known_after_a_crash():
    house = on_the_first(4, 1, cpu="2")
    house.learn(JobMigrated(1, force=True))
    gone(house, "1.0.1")
    house.restart(*some_nodes(4, 1))
    assert (house.state(), house.started()) == ("pending", [])
    house.restart(*some_nodes(4, 1, 2))
    assert house.runs["1.0.2"].node == "n3"


def test_it_goes_to_the_node_that_was_named():
    house = on_the_first(4, 2, 2)
    house.learn(JobMigrated(1, "n3"))
    gone(house, "1.0.1")
    assert house.runs["1.0.2"].node == "n3"


def test_the_room_is_kept_from_those_who_come_first_meanwhile():
    house = on_the_first(4, 1)
    house.learn(JobMigrated(1))
    house.submit(2, cpu="1", node_selector={}, priority="high")
    house.submit(3, cpu="4", priority="high")
    assert house.runs["2.0.1"].node == "n1"
    gone(house, "1.0.1")
    assert house.runs["1.0.2"].node == "n2"


@pytest.mark.parametrize(
    "word", [JobCancelled(1), JobSuspended(1), NodeLost("n2")], ids=["cancelled", "suspended", "its new node goes"]
)
def test_no_room_is_kept_for_one_that_does_not_come(word):
    house = on_the_first(1, 1)
    house.learn(JobMigrated(1))
    house.learn(word)
    gone(house, "1.0.1")
    if isinstance(word, NodeLost):
        assert (house.state(), house.used()) == ("pending", {"n1": {}})
    else:
        assert is_empty(house)


def test_a_gang_leaves_all_its_nodes():
    house = a_house(1, 1)
    house.submit(1, cpu="1", count=2)
    running(house, *live(house))
    house.learn(JobMigrated(1))
    assert house.acts == []
    house = House(*some_nodes(1, 1, 1, 1))
    house.submit(1, cpu="1", count=2)
    running(house, *live(house))
    left = {run.node for run in house.runs.values()}
    house.learn(JobMigrated(1))
    gone(house, *live(house))
    came = {house.runs[run].node for run in live(house)}
    assert len(came) == 2
    assert not came & left


# ------------------------------------------------------------------------------------------------- drain


def test_a_drained_job_saves_its_work_and_goes_on_where_room_was_kept_for_it():
    house = on_the_first(1, 1, checkpoint=SAVES)
    submitted = house.jobs[1].submitted_ms
    house.learn(NodeOverridden("n1", cordon=True, drain=True))
    assert house.acts == [Stop("1.0.1", "local", 10_000, "drained n1", SAVES)]
    house.submit(2, cpu="1", priority="high")
    assert house.state(2) == "pending"
    gone(house, "1.0.1")
    assert (house.runs["1.0.2"].node, house.jobs[1].submitted_ms) == ("n2", submitted)
    requeued = [event.detail for event in house.events if event.kind == "job.requeued"]
    assert [detail["reason_code"] for detail in requeued] == ["DRAINED"]
    assert "n1" in requeued[0]["reason"]


def test_a_drain_waits_for_nobody_who_can_not_go_elsewhere():
    house = on_the_first(1)
    house.learn(NodeOverridden("n1", cordon=True, drain=True))
    gone(house, "1.0.1")
    assert house.state() == "pending"


def test_two_jobs_of_a_drained_node_are_not_promised_the_same_room():
    house = a_house(2)
    house.submit(1, 2, cpu="1")
    running(house, "1.0.1", "2.0.1")
    house.learn(NodeJoined(some_nodes(2, 1)[1]))
    house.learn(NodeOverridden("n1", cordon=True, drain=True))
    gone(house, "2.0.1", "1.0.1")
    assert sorted(house.state(id) for id in (1, 2)) == ["pending", "scheduled"]
    assert house.used()["n2"]["cpu"] == 1000
