"""What broke in other schedulers, played again here: evictions in turn, in vain, too many, for good. Each says in one line what went wrong elsewhere and what
is promised.

No time passes but what the test lets pass, and backends are played by the test: that real processes stop and start is
shown by the stories of the real server.
"""

from __future__ import annotations

import pytest

from builders import a_node, a_task
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.model.facts import JobCancelled, NodeJoined, NodeLost
from hodei.model.job import Toleration
from hodei.model.job_affinity import HostPort
from hodei.model.node import Taint
from unit.control.house import House, a_house, some_nodes
from unit.control.scenes import evicted, filled, gone, live, running

# ---------------------------------------------------------------------------------------------- preemption ping-pong


def test_two_jobs_never_take_each_others_place_in_turn():
    """Elsewhere: A evicted B, B came back and evicted A, for ever. Here: a victim never takes its preemptor's place."""
    house = filled(1)
    house.submit(9, cpu="1", priority="high")
    gone(house, "1.0.1")
    running(house, "9.0.1")
    for _ in range(50):
        house.later(60_000)
        assert (house.started(), house.stopped()) == ([], [])
    assert evicted(house) == [1]


@pytest.mark.parametrize(("first", "second"), [(550, 600), (600, 550), (500, 500), (760, 999)])
def test_jobs_of_one_class_leave_each_other_alone(first, second):
    """Elsewhere: numbers that differ a little made jobs flap. Here: only a higher class takes a place, not a higher number."""
    house = filled(1, priority=first)
    house.submit(9, cpu="1", priority=second)
    for _ in range(10):
        house.later(60_000)
    assert evicted(house) == []


def test_a_job_is_not_sent_away_for_ever():
    """Elsewhere: a low job was evicted at every burst and never ended. Here: so often and no more, then it is left alone."""
    house = filled(1, preemption=PreemptionPolicy(max_per_job=3))
    for burst in range(10, 20):
        house.submit(burst, cpu="1", priority="high")
        if house.state(burst) == "pending" and not house.stopped():
            break
        gone(house, *house.stopped())
        house.see(f"{burst}.0.1", "succeeded", 0)
        running(house, *live(house, 1))
        house.now_ms += 60_000
    assert (evicted(house), live(house, 1)) == ([1, 1, 1], ["1.0.4"])
    house.see("1.0.4", "succeeded", 0)
    assert house.started() == ["13.0.1"]


def test_three_classes_in_a_ring_of_rules_come_to_rest():
    """Elsewhere: rules about company let three jobs displace each other in a ring. Here: every eviction goes downwards."""
    house = a_house(1, 1)
    for id, priority in ((1, "low"), (2, "medium")):
        house.submit(id, cpu="1", priority=priority)
        running(house, f"{id}.0.1")
    house.now_ms += 60_000
    house.submit(3, cpu="1", priority="critical")
    for _ in range(20):
        gone(house, *house.stopped())
        running(house, *(run for id in (1, 2, 3) for run in live(house, id)))
        house.later(60_000)
    assert evicted(house) == [1]
    assert (live(house, 2), live(house, 3)) == (["2.0.1"], ["3.0.1"])


# ---------------------------------------------------------------------- an eviction that does not help the preemptor


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"cpu": "3"}, id="it is larger than any node"),
        pytest.param({"cpu": "2", "count": 3}, id="its gang needs more nodes than there are"),
        pytest.param({"cpu": "1", "node_selector": {"zone": "nowhere"}}, id="no node has its label"),
        pytest.param({"cpu": "1", "arch": "sparc"}, id="no node has its processor"),
        pytest.param({"cpu": "1", "request": {"fpga": 1}}, id="the resource it lacks is held by nobody"),
    ],
)
def test_nobody_is_evicted_in_vain(asked):
    """Elsewhere: victims went and the preemptor still did not fit. Here: a full trial by all plugins comes first."""
    house = filled(2, 2)
    house.submit(9, priority="critical", **asked)
    house.later(60_000)
    assert (evicted(house), house.state(9)) == ([], "pending")


def test_nobody_is_evicted_for_a_port_that_one_who_stays_holds():
    """Elsewhere: cores were freed on the node where the port was taken. Here: the trial asks about ports too."""
    house = a_house(2)
    house.submit(1, cpu="1", priority="critical", ports=(HostPort(80),))
    house.submit(2, cpu="1", priority="low")
    running(house, "1.0.1", "2.0.1")
    house.now_ms += 60_000
    house.submit(9, cpu="1", priority="high", ports=(HostPort(80),))
    assert evicted(house) == []
    house.submit(10, cpu="1", priority="high", ports=(HostPort(81),))
    assert evicted(house) == [2]


def test_nobody_is_evicted_from_a_node_that_the_preemptor_may_not_use():
    """Elsewhere: the cheapest victims were on a tainted node. Here: only nodes that take the preemptor are looked at."""
    house = House(a_node("n1", 1, "64Gi", taints=(Taint("dedicated"),)), a_node("n2", 1, "64Gi"))
    house.submit(1, cpu="1", priority="scavenger", tolerations=(Toleration("dedicated", "Exists"),))
    house.submit(2, cpu="1", priority="low")
    running(house, "1.0.1", "2.0.1")
    on = {run.node: run.job for run in house.runs.values()}
    house.now_ms += 60_000
    house.submit(9, cpu="1", priority="high")
    assert evicted(house) == [on["n2"]]


def test_freed_room_goes_to_the_one_it_was_freed_for():
    """Elsewhere: while victims went, somebody else slipped in and more had to go. Here: the room is held by name."""
    house = filled(1)
    house.submit(9, cpu="1", priority="high")
    house.submit(10, cpu="1", priority="critical")
    gone(house, "1.0.1")
    assert live(house, 9) == ["9.0.1"]
    assert evicted(house) == [1]


def test_an_eviction_that_comes_to_nothing_is_on_record():
    """Elsewhere: a victim was gone and nobody could say why. Here: the preemptor says that its room came to nothing."""
    house = filled(1)
    house.submit(9, cpu="1", priority="high")
    house.learn(NodeLost("n1"))
    assert house.kinds(9)[-1] == "job.preemption_void"
    house.learn(NodeJoined(a_node("n1", 1, "64Gi")))
    assert live(house, 9) == ["9.0.1"]


# -------------------------------------------------------------------------------------------- more victims than needed


def test_no_more_are_evicted_than_needed():
    """Elsewhere: a node was emptied for one small job. Here: those who need not go stay."""
    house = filled(8)
    house.submit(9, cpu="3", priority="high")
    assert len(evicted(house)) == 3


def test_waiting_for_a_slow_victim_evicts_nobody_else():
    """Elsewhere: every retry during the grace period chose a new victim. Here: who is going already is waited for."""
    house = filled(1, 1, 1, 1)
    house.submit(9, cpu="1", priority="high")
    for _ in range(30):
        house.later(1_000)
    house.submit(20, cpu="4")  # other news, too
    house.restart(*some_nodes(1, 1, 1, 1))  # and a new process
    for _ in range(30):
        house.later(1_000)
    assert len(evicted(house)) == 1


def test_a_gang_evicts_only_where_free_room_does_not_do():
    """Elsewhere: a gang evicted one victim per member though nodes were free. Here: free room counts first."""
    house = filled(1, 1, 1, 1)
    house.see("2.0.1", "succeeded", 0)
    house.see("4.0.1", "succeeded", 0)
    house.submit(9, cpu="1", count=3, priority="high")
    assert len(evicted(house)) == 1


def test_one_large_victim_is_not_joined_by_small_ones_that_free_nothing_more():
    """Elsewhere: the smallest went first and in the end the large one too. Here: who turns out not to matter is let off."""
    house = a_house(4)
    for id, cpu, priority in ((1, "1", "scavenger"), (2, "3", "batch")):
        house.submit(id, cpu=cpu, priority=priority)
        running(house, f"{id}.0.1")
    house.now_ms += 60_000
    house.submit(9, cpu="3", priority="high")
    assert evicted(house) == [2]


def test_a_victim_gang_is_not_joined_by_single_jobs_that_its_leaving_makes_unneeded():
    """Elsewhere: single jobs went beside a gang that freed enough. Here: they stay, for the gang leaves whole anyway."""
    house = a_house(2, 2)
    house.submit(1, tasks=[a_task(cpu="2", count=1), a_task("side", cpu="1", count=1)], priority="scavenger")
    house.submit(2, cpu="1", priority="scavenger")
    running(house, "1.0.1", "1.1.1", "2.0.1")
    house.now_ms += 60_000
    house.submit(9, cpu="1", count=3, priority="high")
    assert evicted(house) == [1]


# ------------------------------------------------------------------------------- a preempted job that is never requeued


@pytest.mark.parametrize("restart", ["never", "on_failure", "always"])
@pytest.mark.parametrize("exit_code", [143, 137, 1])
def test_a_preempted_job_is_always_requeued(restart, exit_code):
    """Elsewhere: a victim counted as failed and was gone. Here: however it goes, it queues again and loses no retry."""
    house = a_house(1)
    house.submit(1, cpu="1", priority="low", restart=restart)
    running(house, "1.0.1")
    house.now_ms += 60_000
    house.submit(9, cpu="1", priority="high")
    gone(house, "1.0.1", exit_code=exit_code)
    assert (house.state(1), house.jobs[1].failures, house.jobs[1].preemptions) == ("pending", 0, 1)
    house.see("9.0.1", "succeeded", 0)
    assert house.started() == ["1.0.2"]
    house.see("1.0.2", "succeeded", 0)
    if restart != "always":
        assert house.state(1) == "succeeded"


def test_a_preempted_job_is_requeued_though_the_scheduler_died_meanwhile():
    """Elsewhere: the intention to requeue died with the process. Here: it follows from what was saved."""
    house = filled(1)
    house.submit(9, cpu="1", priority="high")
    house.restart(*some_nodes(1))
    gone(house, "1.0.1")
    assert (house.state(1), live(house, 9)) == ("pending", ["9.0.1"])
    house.restart(*some_nodes(1))
    house.see("9.0.1", "succeeded", 0)
    assert house.started() == ["1.0.2"]


def test_a_preempted_gang_is_requeued_whole_also_when_it_goes_piece_by_piece():
    """Elsewhere: members that went last were forgotten. Here: the gang queues again once, with all its members."""
    house = a_house(1, 1)
    house.submit(1, cpu="1", count=2, priority="low")
    running(house, "1.0.1", "1.1.1")
    house.now_ms += 60_000
    house.submit(9, cpu="1", priority="high")
    assert house.stopped() == ["1.0.1", "1.1.1"]
    gone(house, "1.1.1")
    assert house.state(1) == "running"
    gone(house, "1.0.1")
    assert (house.state(1), house.kinds(1).count("job.requeued")) == ("pending", 1)
    house.see("9.0.1", "succeeded", 0)
    assert house.started() == ["1.0.2", "1.1.2"]


def test_a_victim_that_ended_well_in_time_is_not_run_again():
    """Elsewhere: work that was done was done twice. Here: one that made it before it was stopped has made it."""
    house = filled(1)
    house.submit(9, cpu="1", priority="high")
    house.see("1.0.1", "succeeded", 0)
    assert (house.state(1), house.started()) == ("succeeded", ["9.0.1"])


def test_a_victim_whose_preemptor_is_cancelled_comes_back():
    """Elsewhere: the room stayed reserved for a preemptor that was gone. Here: the victim has its place again."""
    house = filled(1)
    house.submit(9, cpu="1", priority="high")
    house.learn(JobCancelled(9))
    gone(house, "1.0.1")
    assert house.started() == ["1.0.2"]
