"""Gangs that may start with fewer than all, by their contract: how many start, who comes before growth, what a loss means."""

from __future__ import annotations

import pytest

from builders import a_job, a_node, a_task
from hodei.model.facts import JobCancelled, JobHeld, JobSubmitted, NodeJoined, NodeLost, RunObserved
from hodei.model.job import GangRules
from unit.control.house import House, a_house, some_nodes
from unit.control.scenes import live, running

ELASTIC = GangRules(elastic=True)


def grown(house: House, node: str, cpu: int = 1) -> list[str]:
    """A node joins; what is started then."""
    house.learn(NodeJoined(a_node(node, cpu, "64Gi")))
    return house.started()


# --------------------------------------------------------------------------------------------------- partial start


@pytest.mark.parametrize(
    ("room", "min_count", "started"),
    [
        pytest.param(5, 2, 4, id="room for all: all"),
        pytest.param(4, 2, 4, id="room for exactly all: all"),
        pytest.param(3, 2, 3, id="room for some: as many as fit"),
        pytest.param(2, 2, 2, id="room for the least: the least"),
        pytest.param(1, 2, 0, id="room for fewer than the least: none"),
        pytest.param(3, 4, 0, id="the least is all: all or none"),
        pytest.param(3, 0, 0, id="no least is named: all or none"),
        pytest.param(1, 1, 1, id="one is enough"),
    ],
)
def test_a_gang_starts_with_as_many_as_fit_and_at_least_its_least(room, min_count, started):
    house = a_house(*[1] * room)
    house.submit(1, cpu="1", count=4, min_count=min_count)
    assert len(house.started()) == started
    assert sorted(run.rank for run in house.runs.values()) == list(range(started))


def test_every_task_has_its_least_before_any_has_more():
    house = a_house(*[1] * 4)
    tasks = [a_task("a", cpu="1", count=3, min_count=1), a_task("b", cpu="1", count=3, min_count=2)]
    house.submit(1, tasks=tasks)
    there = [run.task for run in house.runs.values()]
    assert (there.count("a"), there.count("b")) in ((2, 2), (1, 3))
    none = a_house(1, 1)
    none.submit(1, tasks=tasks)
    assert none.started() == []


def test_a_gang_that_is_not_elastic_stays_as_it_started():
    house = a_house(1, 1)
    house.submit(1, cpu="1", count=4, min_count=2)
    running(house, *house.started())
    assert grown(house, "n3", 8) == []
    for run in live(house):
        house.see(run, "succeeded", 0)
    assert house.state() == "succeeded"


def test_more_than_the_least_is_taken_from_what_is_free_and_from_nobody():
    house = a_house(1, 1, 1)
    house.submit(1, 2, cpu="1", priority="low")
    running(house, "1.0.1", "2.0.1")
    house.now_ms += 60_000
    house.submit(9, cpu="1", count=3, min_count=1, priority="high", gang=ELASTIC)
    assert (house.started(), house.stopped()) == (["9.0.1"], [])
    house.later(60_000)
    assert house.stopped() == []


def test_for_the_least_others_have_to_make_room_and_for_no_more_than_that():
    house = a_house(1, 1, 1)
    house.submit(1, 2, cpu="1", priority="low")
    running(house, "1.0.1", "2.0.1")
    house.now_ms += 60_000
    house.submit(9, cpu="1", count=3, min_count=2, priority="high")
    assert len(house.stopped()) == 1


def test_a_partial_gang_that_starts_again_may_be_larger():
    house = a_house(1, 1)
    house.submit(1, cpu="1", count=3, min_count=2, retries=1)
    running(house, *house.started())
    house.learn(NodeJoined(a_node("n3", 1, "64Gi")))
    house.see("1.0.1", "failed", 1)
    assert house.stopped() == ["1.1.1"]
    house.see("1.1.1", "failed", 143)
    house.later(60_000)
    assert house.started() == ["1.0.2", "1.1.2", "1.2.2"]


# --------------------------------------------------------------------------------------------------------- growth


def test_an_elastic_gang_grows_one_by_one_up_to_all_and_no_further():
    house = a_house(1)
    house.submit(1, cpu="1", count=3, min_count=1, gang=ELASTIC)
    running(house, "1.0.1")
    assert grown(house, "n2") == ["1.1.2"]
    assert grown(house, "n3") == ["1.2.3"]
    assert grown(house, "n4") == []
    assert sorted(run.rank for run in house.runs.values()) == [0, 1, 2]


def test_it_grows_when_a_run_ends():
    house = a_house(1, 1)
    house.submit(2, cpu="1")
    house.submit(1, cpu="1", count=2, min_count=1, gang=ELASTIC)
    running(house, "2.0.1", "1.0.1")
    house.see("2.0.1", "succeeded", 0)
    assert house.started() == ["1.1.2"]


def test_one_that_waits_gets_the_room_and_growth_what_is_left():
    house = a_house(1)
    house.submit(1, cpu="1", count=3, min_count=1, gang=ELASTIC)
    running(house, "1.0.1")
    house.submit(2, cpu="1", priority="scavenger")
    assert grown(house, "n2", 2) == ["2.0.1", "1.1.2"]


def test_a_job_that_arrives_with_the_room_comes_before_growth():
    house = a_house(1)
    house.submit(1, cpu="1", count=2, min_count=1, gang=ELASTIC)
    running(house, "1.0.1")
    newcomer = JobSubmitted(a_job(2, cpu="1", priority="scavenger", at_ms=house.now_ms))
    house.learn(NodeJoined(a_node("n2", 1, "64Gi")), newcomer)
    assert house.started() == ["2.0.1"]


@pytest.mark.parametrize("who", ["held", "of no node's label"])
def test_a_job_that_does_not_wait_for_room_does_not_keep_a_gang_small(who):
    house = a_house(1)
    house.submit(1, cpu="1", count=2, min_count=1, gang=ELASTIC)
    running(house, "1.0.1")
    if who == "held":
        house.submit(2, cpu="1")
        house.learn(JobHeld(2))
    else:
        house.submit(2, cpu="1", node_selector={"zone": "nowhere"})
    assert grown(house, "n2") == ["1.1.2"]


def test_growth_makes_nobody_go():
    house = a_house(1, 1)
    house.submit(1, cpu="1", count=2, min_count=1, priority="critical", gang=ELASTIC, node_selector={})
    running(house, *live(house))
    lost = next(run for run in house.runs.values() if run.node == "n2")
    house.learn(NodeLost("n2"))
    house.submit(2, cpu="1", priority="scavenger")
    assert grown(house, "n2") == ["2.0.1"]
    running(house, "2.0.1")
    house.later(60_000)
    house.learn(NodeJoined(a_node("n9", "500m", "64Gi")))
    assert house.stopped() == []
    house.see("2.0.1", "succeeded", 0)
    (back,) = house.started()
    assert house.runs[back].member == lost.member


def test_two_elastic_gangs_share_what_appears_and_nobody_gets_too_much():
    house = a_house(1, 1)
    house.submit(1, 2, cpu="1", count=3, min_count=1, gang=ELASTIC)
    running(house, *live(house, 1), *live(house, 2))
    assert sum(len(live(house, id)) for id in (1, 2)) == 2
    grown(house, "n3", 8)
    grown(house, "n4", 1)
    assert (len(live(house, 1)), len(live(house, 2))) == (3, 3)


def test_growth_goes_on_after_a_restart_of_the_scheduler():
    house = a_house(1)
    house.submit(1, cpu="1", count=2, min_count=1, gang=ELASTIC)
    running(house, "1.0.1")
    house.restart(*some_nodes(1))
    assert house.started() == []
    assert grown(house, "n2") == ["1.1.2"]
    house.restart(*some_nodes(1, 1))
    assert live(house) == ["1.0.1", "1.1.2"]


def test_members_that_have_done_their_work_are_not_started_again_by_growth():
    house = a_house(1, 1)
    house.submit(1, cpu="1", count=3, min_count=2, gang=ELASTIC)
    running(house, *house.started())
    house.see("1.0.1", "succeeded", 0)
    running(house, *house.started())
    assert "1.0.2" not in house.runs
    for run in live(house):
        house.see(run, "succeeded", 0)
    assert house.state() == "succeeded"


def test_a_gang_that_is_being_cancelled_does_not_grow():
    house = a_house(1)
    house.submit(1, cpu="1", count=2, min_count=1, gang=ELASTIC)
    running(house, "1.0.1")
    house.learn(JobCancelled(1))
    assert grown(house, "n2") == []
    house.see("1.0.1", "failed", 143)
    assert (house.state(), house.used()) == ("cancelled", {"n1": {}, "n2": {}})


# ----------------------------------------------------------------------------------------------------------- loss


def test_a_lost_member_does_not_stop_an_elastic_gang_while_enough_remain():
    house = a_house(1, 1, 1)
    house.submit(1, cpu="1", count=3, min_count=2, gang=ELASTIC)
    running(house, *house.started())
    house.learn(NodeLost(house.runs["1.2.1"].node))
    assert (house.stopped(), house.state(), live(house)) == ([], "running", ["1.0.1", "1.1.1"])
    house.learn(*(RunObserved(run, "succeeded", house.now_ms, 0) for run in live(house)))
    assert house.state() == "succeeded"


def test_a_loss_that_leaves_too_few_stops_the_gang_and_starts_it_again_as_it_fits():
    house = a_house(1, 1, 1)
    house.submit(1, cpu="1", count=3, min_count=2, gang=ELASTIC)
    running(house, *house.started())
    house.learn(NodeLost(house.runs["1.2.1"].node))
    assert live(house) == ["1.0.1", "1.1.1"]
    house.see("1.1.1", "lost", reason_code="lost", reason="gone")
    assert house.stopped() == ["1.0.1"]
    house.see("1.0.1", "failed", 143)
    house.later(60_000)
    assert len(house.started()) == 2


def test_two_losses_in_one_step_are_weighed_together():
    house = a_house(2, 1)
    house.submit(1, cpu="1", count=3, min_count=2, gang=ELASTIC)
    running(house, *house.started())
    two = next(run.node for run in house.runs.values() if [r.node for r in house.runs.values()].count(run.node) == 2)
    house.learn(NodeLost(two))
    (survivor,) = live(house)
    assert house.stopped() == [survivor]


def test_the_room_of_a_lost_member_goes_to_one_that_waits():
    house = a_house(1, 1)
    house.submit(1, cpu="1", count=2, min_count=1, gang=ELASTIC)
    running(house, *house.started())
    house.submit(2, cpu="1", priority="low")
    house.see("1.1.1", "lost", reason_code="lost", reason="gone")
    assert (house.started(), house.stopped(), house.state()) == (["2.0.1"], [], "running")


def test_a_lost_member_of_a_gang_that_is_not_elastic_stops_it_however_many_remain():
    house = a_house(1, 1, 1)
    house.submit(1, cpu="1", count=3, min_count=1)
    running(house, *house.started())
    house.see("1.2.1", "lost", reason_code="lost", reason="gone")
    assert sorted(house.stopped()) == ["1.0.1", "1.1.1"]


def test_members_beyond_the_least_are_given_up_first():
    """When a higher class needs room, an elastic gang shrinks; it does not end."""
    house = a_house(1, 1, 1)
    house.submit(1, cpu="1", count=3, min_count=1, priority="low", gang=ELASTIC)
    running(house, *house.started())
    house.now_ms += 60_000
    house.submit(9, cpu="1", count=2, priority="high")
    assert len(house.stopped()) == 2
    for run in house.stopped():
        house.see(run, "failed", 143)
    assert (live(house, 9), len(live(house, 1)), house.state(1)) == (["9.0.1", "9.1.1"], 1, "running")
    house.see("9.0.1", "succeeded", 0)
    house.see("9.1.1", "succeeded", 0)
    assert len(live(house, 1)) == 3


def test_a_member_that_is_being_given_up_does_not_count_as_one_that_remains():
    house = a_house(1, 1, 1)
    house.submit(1, cpu="1", count=3, min_count=2, priority="low", gang=ELASTIC)
    running(house, *house.started())
    house.now_ms += 60_000
    house.submit(9, cpu="1", priority="high")
    (leaving,) = house.stopped()
    lost, last = (run for run in live(house) if run != leaving)
    house.see(lost, "lost", reason_code="lost", reason="gone")
    assert last in house.stopped()
