"""Partial and elastic gangs: how many members start, growth after pending jobs, losses, shrinking."""

from __future__ import annotations

import pytest

from builders import a_job, a_node, a_task
from hodei.model.facts import JobCancelled, JobHeld, JobSubmitted, NodeJoined, NodeLost, RunObserved
from hodei.model.job import GangRules
from unit.control.harness import Harness, a_harness, some_nodes
from unit.control.scenarios import live_runs, mark_running

ELASTIC = GangRules(elastic=True)


def join_node(harness: Harness, node: str, cpu: int = 1) -> list[str]:
    """A node joins; returns the runs that start."""
    harness.step(NodeJoined(a_node(node, cpu, "64Gi")))
    return harness.started()


@pytest.mark.parametrize(
    ("cores", "min_count", "started"),
    [
        pytest.param(5, 2, 4, id="more than all fit"),
        pytest.param(4, 2, 4, id="exactly all fit"),
        pytest.param(3, 2, 3, id="some fit"),
        pytest.param(2, 2, 2, id="the minimum fits"),
        pytest.param(1, 2, 0, id="fewer than the minimum fit"),
        pytest.param(3, 4, 0, id="the minimum is all"),
        pytest.param(3, 0, 0, id="no minimum"),
        pytest.param(1, 1, 1, id="a minimum of one"),
    ],
)
def test_a_gang_starts_with_as_many_members_as_fit_and_at_least_its_minimum(cores, min_count, started):
    harness = a_harness(*[1] * cores)
    harness.submit(1, cpu="1", count=4, min_count=min_count)
    assert len(harness.started()) == started
    assert sorted(run.rank for run in harness.runs.values()) == list(range(started))


def test_every_task_gets_its_minimum_before_any_gets_more():
    harness = a_harness(*[1] * 4)
    tasks = [a_task("a", cpu="1", count=3, min_count=1), a_task("b", cpu="1", count=3, min_count=2)]
    harness.submit(1, tasks=tasks)
    placed = [run.task for run in harness.runs.values()]
    assert (placed.count("a"), placed.count("b")) in ((2, 2), (1, 3))
    too_small = a_harness(1, 1)
    too_small.submit(1, tasks=tasks)
    assert too_small.started() == []


def test_a_gang_that_is_not_elastic_stays_as_it_started():
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=4, min_count=2)
    mark_running(harness, *harness.started())
    assert join_node(harness, "n3", 8) == []
    for run in live_runs(harness):
        harness.observe(run, "succeeded", 0)
    assert harness.state() == "succeeded"


def test_extra_members_use_free_capacity_only():
    harness = a_harness(1, 1, 1)
    harness.submit(1, 2, cpu="1", priority="low")
    mark_running(harness, "1.0.1", "2.0.1")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", count=3, min_count=1, priority="high", gang=ELASTIC)
    assert (harness.started(), harness.stopped()) == (["9.0.1"], [])
    harness.advance(60_000)
    assert harness.stopped() == []


def test_a_gang_preempts_for_its_minimum_and_no_more():
    harness = a_harness(1, 1, 1)
    harness.submit(1, 2, cpu="1", priority="low")
    mark_running(harness, "1.0.1", "2.0.1")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", count=3, min_count=2, priority="high")
    assert len(harness.stopped()) == 1


def test_a_partial_gang_that_starts_again_may_be_larger():
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=3, min_count=2, retries=1)
    mark_running(harness, *harness.started())
    harness.step(NodeJoined(a_node("n3", 1, "64Gi")))
    harness.observe("1.0.1", "failed", 1)
    assert harness.stopped() == ["1.1.1"]
    harness.observe("1.1.1", "failed", 143)
    harness.advance(60_000)
    assert harness.started() == ["1.0.2", "1.1.2", "1.2.2"]


def test_an_elastic_gang_grows_one_by_one_up_to_all_and_no_further():
    harness = a_harness(1)
    harness.submit(1, cpu="1", count=3, min_count=1, gang=ELASTIC)
    mark_running(harness, "1.0.1")
    assert join_node(harness, "n2") == ["1.1.2"]
    assert join_node(harness, "n3") == ["1.2.3"]
    assert join_node(harness, "n4") == []
    assert sorted(run.rank for run in harness.runs.values()) == [0, 1, 2]


def test_an_elastic_gang_grows_when_a_run_ends():
    harness = a_harness(1, 1)
    harness.submit(2, cpu="1")
    harness.submit(1, cpu="1", count=2, min_count=1, gang=ELASTIC)
    mark_running(harness, "2.0.1", "1.0.1")
    harness.observe("2.0.1", "succeeded", 0)
    assert harness.started() == ["1.1.2"]


def test_a_pending_job_comes_before_growth():
    harness = a_harness(1)
    harness.submit(1, cpu="1", count=3, min_count=1, gang=ELASTIC)
    mark_running(harness, "1.0.1")
    harness.submit(2, cpu="1", priority="scavenger")
    assert join_node(harness, "n2", 2) == ["2.0.1", "1.1.2"]


def test_a_job_that_arrives_with_new_capacity_comes_before_growth():
    harness = a_harness(1)
    harness.submit(1, cpu="1", count=2, min_count=1, gang=ELASTIC)
    mark_running(harness, "1.0.1")
    submission = JobSubmitted(a_job(2, cpu="1", priority="scavenger", at_ms=harness.now_ms))
    harness.step(NodeJoined(a_node("n2", 1, "64Gi")), submission)
    assert harness.started() == ["2.0.1"]


@pytest.mark.parametrize("who", ["held", "of no node's label"])
def test_a_job_that_does_not_wait_for_capacity_does_not_prevent_growth(who):
    harness = a_harness(1)
    harness.submit(1, cpu="1", count=2, min_count=1, gang=ELASTIC)
    mark_running(harness, "1.0.1")
    if who == "held":
        harness.submit(2, cpu="1")
        harness.step(JobHeld(2))
    else:
        harness.submit(2, cpu="1", node_selector={"zone": "nowhere"})
    assert join_node(harness, "n2") == ["1.1.2"]


def test_growth_preempts_nothing():
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2, min_count=1, priority="critical", gang=ELASTIC, node_selector={})
    mark_running(harness, *live_runs(harness))
    lost = next(run for run in harness.runs.values() if run.node == "n2")
    harness.step(NodeLost("n2"))
    harness.submit(2, cpu="1", priority="scavenger")
    assert join_node(harness, "n2") == ["2.0.1"]
    mark_running(harness, "2.0.1")
    harness.advance(60_000)
    harness.step(NodeJoined(a_node("n9", "500m", "64Gi")))
    assert harness.stopped() == []
    harness.observe("2.0.1", "succeeded", 0)
    (back,) = harness.started()
    assert harness.runs[back].member == lost.member


def test_two_elastic_gangs_share_new_capacity_within_their_sizes():
    harness = a_harness(1, 1)
    harness.submit(1, 2, cpu="1", count=3, min_count=1, gang=ELASTIC)
    mark_running(harness, *live_runs(harness, 1), *live_runs(harness, 2))
    assert sum(len(live_runs(harness, id)) for id in (1, 2)) == 2
    join_node(harness, "n3", 8)
    join_node(harness, "n4", 1)
    assert (len(live_runs(harness, 1)), len(live_runs(harness, 2))) == (3, 3)


def test_growth_continues_after_a_restart():
    harness = a_harness(1)
    harness.submit(1, cpu="1", count=2, min_count=1, gang=ELASTIC)
    mark_running(harness, "1.0.1")
    harness.restart(*some_nodes(1))
    assert harness.started() == []
    assert join_node(harness, "n2") == ["1.1.2"]
    harness.restart(*some_nodes(1, 1))
    assert live_runs(harness) == ["1.0.1", "1.1.2"]


def test_growth_does_not_restart_members_that_have_succeeded():
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=3, min_count=2, gang=ELASTIC)
    mark_running(harness, *harness.started())
    harness.observe("1.0.1", "succeeded", 0)
    mark_running(harness, *harness.started())
    assert "1.0.2" not in harness.runs
    for run in live_runs(harness):
        harness.observe(run, "succeeded", 0)
    assert harness.state() == "succeeded"


def test_a_gang_that_is_being_cancelled_does_not_grow():
    harness = a_harness(1)
    harness.submit(1, cpu="1", count=2, min_count=1, gang=ELASTIC)
    mark_running(harness, "1.0.1")
    harness.step(JobCancelled(1))
    assert join_node(harness, "n2") == []
    harness.observe("1.0.1", "failed", 143)
    assert (harness.state(), harness.used()) == ("cancelled", {"n1": {}, "n2": {}})


def test_a_lost_member_does_not_stop_an_elastic_gang_while_enough_remain():
    harness = a_harness(1, 1, 1)
    harness.submit(1, cpu="1", count=3, min_count=2, gang=ELASTIC)
    mark_running(harness, *harness.started())
    harness.step(NodeLost(harness.runs["1.2.1"].node))
    assert (harness.stopped(), harness.state(), live_runs(harness)) == ([], "running", ["1.0.1", "1.1.1"])
    harness.step(*(RunObserved(run, "succeeded", harness.now_ms, 0) for run in live_runs(harness)))
    assert harness.state() == "succeeded"


def test_a_loss_below_the_minimum_restarts_the_gang_with_as_many_as_fit():
    harness = a_harness(1, 1, 1)
    harness.submit(1, cpu="1", count=3, min_count=2, gang=ELASTIC)
    mark_running(harness, *harness.started())
    harness.step(NodeLost(harness.runs["1.2.1"].node))
    assert live_runs(harness) == ["1.0.1", "1.1.1"]
    harness.observe("1.1.1", "lost", reason_code="lost", reason="vanished")
    assert harness.stopped() == ["1.0.1"]
    harness.observe("1.0.1", "failed", 143)
    harness.advance(60_000)
    assert len(harness.started()) == 2


def test_two_losses_in_one_step_count_together():
    harness = a_harness(2, 1)
    harness.submit(1, cpu="1", count=3, min_count=2, gang=ELASTIC)
    mark_running(harness, *harness.started())
    two = next(
        run.node for run in harness.runs.values() if [r.node for r in harness.runs.values()].count(run.node) == 2
    )
    harness.step(NodeLost(two))
    (survivor,) = live_runs(harness)
    assert harness.stopped() == [survivor]


def test_the_capacity_of_a_lost_member_goes_to_a_pending_job():
    harness = a_harness(1, 1)
    harness.submit(1, cpu="1", count=2, min_count=1, gang=ELASTIC)
    mark_running(harness, *harness.started())
    harness.submit(2, cpu="1", priority="low")
    harness.observe("1.1.1", "lost", reason_code="lost", reason="vanished")
    assert (harness.started(), harness.stopped(), harness.state()) == (["2.0.1"], [], "running")


def test_a_lost_member_of_a_gang_that_is_not_elastic_stops_it_however_many_remain():
    harness = a_harness(1, 1, 1)
    harness.submit(1, cpu="1", count=3, min_count=1)
    mark_running(harness, *harness.started())
    harness.observe("1.2.1", "lost", reason_code="lost", reason="vanished")
    assert sorted(harness.stopped()) == ["1.0.1", "1.1.1"]


def test_members_above_the_minimum_are_stopped_first():
    """An elastic gang shrinks for a higher class instead of being preempted whole."""
    harness = a_harness(1, 1, 1)
    harness.submit(1, cpu="1", count=3, min_count=1, priority="low", gang=ELASTIC)
    mark_running(harness, *harness.started())
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", count=2, priority="high")
    assert len(harness.stopped()) == 2
    for run in harness.stopped():
        harness.observe(run, "failed", 143)
    assert (live_runs(harness, 9), len(live_runs(harness, 1)), harness.state(1)) == (["9.0.1", "9.1.1"], 1, "running")
    harness.observe("9.0.1", "succeeded", 0)
    harness.observe("9.1.1", "succeeded", 0)
    assert len(live_runs(harness, 1)) == 3


def test_a_stopping_member_does_not_count_towards_the_minimum():
    harness = a_harness(1, 1, 1)
    harness.submit(1, cpu="1", count=3, min_count=2, priority="low", gang=ELASTIC)
    mark_running(harness, *harness.started())
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", priority="high")
    (stopping,) = harness.stopped()
    lost, last = (run for run in live_runs(harness) if run != stopping)
    harness.observe(lost, "lost", reason_code="lost", reason="vanished")
    assert last in harness.stopped()
