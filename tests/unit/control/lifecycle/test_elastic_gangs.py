"""Gangs that may start with fewer than all, by their contract: how many start, who comes before growth, what a loss means."""

from __future__ import annotations

import pytest

from builders import a_job, a_node, a_task
from hodei.model.facts import JobCancelled, JobHeld, JobSubmitted, NodeJoined, NodeLost, RunObserved
from hodei.model.job import GangRules
from unit.control.harness import Harness, a_harness, some_nodes
from unit.control.scenarios import live, running

ELASTIC = GangRules(elastic=True)


def grown(harness: Harness, node: str, cpu: int = 1) -> list[str]:
    """A node joins; what is started then."""
    harness.learn(NodeJoined(a_node(node, cpu, "64Gi")))
    return harness.started()


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
    harness = a_harness(*[1] * room)
    harness.submit(1, cpu="1", count=4, min_count=min_count)
    assert len(harness.started()) == started
    assert sorted(run.rank for run in harness.runs.values()) == list(range(started))


def test_every_task_has_its_least_before_any_has_more():
    harness = a_harness(*[1] * 4)
    tasks = [a_task("a", cpu="1", count=3, min_count=1), a_task("b", cpu="1", count=3, min_count=2)]
    harness.submit(1, tasks=tasks)
    there = [run.task for run in harness.runs.values()]
    assert (there.count("a"), there.count("b")) in ((2, 2), (1, 3))
    none = a_harness(1, 1)
    none.submit(1, tasks=tasks)
    assert none.started() == []


def test_a_gang_that_is_not_elastic_stays_as_it_started():
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=4, min_count=2)
    running(harness, *harness.started())
    assert grown(harness, "n3", 8) == []
    for run in live(harness):
        harness.see(run, "succeeded", 0)
    assert harness.state() == "succeeded"


def test_extra_members_use_free_capacity_only():
    harness = a_harness(1, 1, 1)
    harness.submit(1, 2, cpu="1", priority="low")
    running(harness, "1.0.1", "2.0.1")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", count=3, min_count=1, priority="high", gang=ELASTIC)
    assert (harness.started(), harness.stopped()) == (["9.0.1"], [])
    harness.later(60_000)
    assert harness.stopped() == []


def test_for_the_least_others_have_to_make_room_and_for_no_more_than_that():
    harness = a_harness(1, 1, 1)
    harness.submit(1, 2, cpu="1", priority="low")
    running(harness, "1.0.1", "2.0.1")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", count=3, min_count=2, priority="high")
    assert len(harness.stopped()) == 1


def test_a_partial_gang_that_starts_again_may_be_larger():
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=3, min_count=2, retries=1)
    running(harness, *harness.started())
    harness.learn(NodeJoined(a_node("n3", 1, "64Gi")))
    harness.see("1.0.1", "failed", 1)
    assert harness.stopped() == ["1.1.1"]
    harness.see("1.1.1", "failed", 143)
    harness.later(60_000)
    assert harness.started() == ["1.0.2", "1.1.2", "1.2.2"]


def test_an_elastic_gang_grows_one_by_one_up_to_all_and_no_further():
    harness = a_harness(1)
    harness.submit(1, cpu="1", count=3, min_count=1, gang=ELASTIC)
    running(harness, "1.0.1")
    assert grown(harness, "n2") == ["1.1.2"]
    assert grown(harness, "n3") == ["1.2.3"]
    assert grown(harness, "n4") == []
    assert sorted(run.rank for run in harness.runs.values()) == [0, 1, 2]


def test_it_grows_when_a_run_ends():
    harness = a_harness(1, 1)
    harness.submit(2, cpu="1")
    harness.submit(1, cpu="1", count=2, min_count=1, gang=ELASTIC)
    running(harness, "2.0.1", "1.0.1")
    harness.see("2.0.1", "succeeded", 0)
    assert harness.started() == ["1.1.2"]


def test_one_that_waits_gets_the_room_and_growth_what_is_left():
    harness = a_harness(1)
    harness.submit(1, cpu="1", count=3, min_count=1, gang=ELASTIC)
    running(harness, "1.0.1")
    harness.submit(2, cpu="1", priority="scavenger")
    assert grown(harness, "n2", 2) == ["2.0.1", "1.1.2"]


def test_a_job_that_arrives_with_the_room_comes_before_growth():
    harness = a_harness(1)
    harness.submit(1, cpu="1", count=2, min_count=1, gang=ELASTIC)
    running(harness, "1.0.1")
    newcomer = JobSubmitted(a_job(2, cpu="1", priority="scavenger", at_ms=harness.now_ms))
    harness.learn(NodeJoined(a_node("n2", 1, "64Gi")), newcomer)
    assert harness.started() == ["2.0.1"]


@pytest.mark.parametrize("who", ["held", "of no node's label"])
def test_a_job_that_does_not_wait_for_room_does_not_keep_a_gang_small(who):
    harness = a_harness(1)
    harness.submit(1, cpu="1", count=2, min_count=1, gang=ELASTIC)
    running(harness, "1.0.1")
    if who == "held":
        harness.submit(2, cpu="1")
        harness.learn(JobHeld(2))
    else:
        harness.submit(2, cpu="1", node_selector={"zone": "nowhere"})
    assert grown(harness, "n2") == ["1.1.2"]


def test_growth_preempts_nothing():
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2, min_count=1, priority="critical", gang=ELASTIC, node_selector={})
    running(harness, *live(harness))
    lost = next(run for run in harness.runs.values() if run.node == "n2")
    harness.learn(NodeLost("n2"))
    harness.submit(2, cpu="1", priority="scavenger")
    assert grown(harness, "n2") == ["2.0.1"]
    running(harness, "2.0.1")
    harness.later(60_000)
    harness.learn(NodeJoined(a_node("n9", "500m", "64Gi")))
    assert harness.stopped() == []
    harness.see("2.0.1", "succeeded", 0)
    (back,) = harness.started()
    assert harness.runs[back].member == lost.member


def test_two_elastic_gangs_share_new_capacity_within_their_sizes():
    harness = a_harness(1, 1)
    harness.submit(1, 2, cpu="1", count=3, min_count=1, gang=ELASTIC)
    running(harness, *live(harness, 1), *live(harness, 2))
    assert sum(len(live(harness, id)) for id in (1, 2)) == 2
    grown(harness, "n3", 8)
    grown(harness, "n4", 1)
    assert (len(live(harness, 1)), len(live(harness, 2))) == (3, 3)


def test_growth_goes_on_after_a_restart_of_the_scheduler():
    harness = a_harness(1)
    harness.submit(1, cpu="1", count=2, min_count=1, gang=ELASTIC)
    running(harness, "1.0.1")
    harness.restart(*some_nodes(1))
    assert harness.started() == []
    assert grown(harness, "n2") == ["1.1.2"]
    harness.restart(*some_nodes(1, 1))
    assert live(harness) == ["1.0.1", "1.1.2"]


def test_members_that_have_done_their_work_are_not_started_again_by_growth():
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=3, min_count=2, gang=ELASTIC)
    running(harness, *harness.started())
    harness.see("1.0.1", "succeeded", 0)
    running(harness, *harness.started())
    assert "1.0.2" not in harness.runs
    for run in live(harness):
        harness.see(run, "succeeded", 0)
    assert harness.state() == "succeeded"


def test_a_gang_that_is_being_cancelled_does_not_grow():
    harness = a_harness(1)
    harness.submit(1, cpu="1", count=2, min_count=1, gang=ELASTIC)
    running(harness, "1.0.1")
    harness.learn(JobCancelled(1))
    assert grown(harness, "n2") == []
    harness.see("1.0.1", "failed", 143)
    assert (harness.state(), harness.used()) == ("cancelled", {"n1": {}, "n2": {}})


def test_a_lost_member_does_not_stop_an_elastic_gang_while_enough_remain():
    harness = a_harness(1, 1, 1)
    harness.submit(1, cpu="1", count=3, min_count=2, gang=ELASTIC)
    running(harness, *harness.started())
    harness.learn(NodeLost(harness.runs["1.2.1"].node))
    assert (harness.stopped(), harness.state(), live(harness)) == ([], "running", ["1.0.1", "1.1.1"])
    harness.learn(*(RunObserved(run, "succeeded", harness.now_ms, 0) for run in live(harness)))
    assert harness.state() == "succeeded"


def test_a_loss_that_leaves_too_few_stops_the_gang_and_starts_it_again_as_it_fits():
    harness = a_harness(1, 1, 1)
    harness.submit(1, cpu="1", count=3, min_count=2, gang=ELASTIC)
    running(harness, *harness.started())
    harness.learn(NodeLost(harness.runs["1.2.1"].node))
    assert live(harness) == ["1.0.1", "1.1.1"]
    harness.see("1.1.1", "lost", reason_code="lost", reason="gone")
    assert harness.stopped() == ["1.0.1"]
    harness.see("1.0.1", "failed", 143)
    harness.later(60_000)
    assert len(harness.started()) == 2


def test_two_losses_in_one_step_are_weighed_together():
    harness = a_harness(2, 1)
    harness.submit(1, cpu="1", count=3, min_count=2, gang=ELASTIC)
    running(harness, *harness.started())
    two = next(
        run.node for run in harness.runs.values() if [r.node for r in harness.runs.values()].count(run.node) == 2
    )
    harness.learn(NodeLost(two))
    (survivor,) = live(harness)
    assert harness.stopped() == [survivor]


def test_the_room_of_a_lost_member_goes_to_one_that_waits():
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2, min_count=1, gang=ELASTIC)
    running(harness, *harness.started())
    harness.submit(2, cpu="1", priority="low")
    harness.see("1.1.1", "lost", reason_code="lost", reason="gone")
    assert (harness.started(), harness.stopped(), harness.state()) == (["2.0.1"], [], "running")


def test_a_lost_member_of_a_gang_that_is_not_elastic_stops_it_however_many_remain():
    harness = a_harness(1, 1, 1)
    harness.submit(1, cpu="1", count=3, min_count=1)
    running(harness, *harness.started())
    harness.see("1.2.1", "lost", reason_code="lost", reason="gone")
    assert sorted(harness.stopped()) == ["1.0.1", "1.1.1"]


def test_members_beyond_the_least_are_given_up_first():
    """When a higher class needs room, an elastic gang shrinks; it does not end."""
    harness = a_harness(1, 1, 1)
    harness.submit(1, cpu="1", count=3, min_count=1, priority="low", gang=ELASTIC)
    running(harness, *harness.started())
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", count=2, priority="high")
    assert len(harness.stopped()) == 2
    for run in harness.stopped():
        harness.see(run, "failed", 143)
    assert (live(harness, 9), len(live(harness, 1)), harness.state(1)) == (["9.0.1", "9.1.1"], 1, "running")
    harness.see("9.0.1", "succeeded", 0)
    harness.see("9.1.1", "succeeded", 0)
    assert len(live(harness, 1)) == 3


def test_a_member_that_is_being_given_up_does_not_count_as_one_that_remains():
    harness = a_harness(1, 1, 1)
    harness.submit(1, cpu="1", count=3, min_count=2, priority="low", gang=ELASTIC)
    running(harness, *harness.started())
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", priority="high")
    (leaving,) = harness.stopped()
    lost, last = (run for run in live(harness) if run != leaving)
    harness.see(lost, "lost", reason_code="lost", reason="gone")
    assert last in harness.stopped()
