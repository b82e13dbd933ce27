"""Whose place is taken when there is more to it than room: devices, ports, layouts, saved work, gangs that can shrink."""

from __future__ import annotations

import pytest

from builders import a_node
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.model.facts import JobCancelled, NodeLost
from hodei.model.job import Checkpoint, GangRules
from hodei.model.job_affinity import HostPort
from hodei.model.node import Location, Socket
from unit.control.house import House, a_house

ELASTIC = GangRules(elastic=True)


def _run(house: House, id: int, *members: int, **fields: object) -> None:
    """A job that runs, and a minute goes by."""
    house.submit(id, **fields)
    for member in members or (0,):
        house.see(f"{id}.{member}.1", "running")
    house.now_ms += 60_000


def _goes(house: House, *runs: str) -> None:
    house.now_ms += 100
    for run in runs:
        house.see(run, "failed", 143)


# ------------------------------------------------------------------------------------- not room alone


def test_who_holds_the_port_goes_even_if_there_is_room_for_both():
    house = a_house(8)
    _run(house, 1, cpu="1", priority="low")
    _run(house, 2, cpu="1", priority="low", ports=(HostPort(80),))
    _run(house, 3, cpu="1", priority="low")
    house.submit(9, cpu="1", priority="high", ports=(HostPort(80),))
    assert house.stopped() == ["2.0.1"]
    _goes(house, "2.0.1")
    assert house.started() == ["9.0.1"]


def test_nobody_goes_for_a_port_that_a_higher_job_holds():
    house = a_house(8)
    _run(house, 1, cpu="1", priority="critical", ports=(HostPort(80),))
    _run(house, 2, cpu="1", priority="low")
    house.submit(9, cpu="1", priority="high", ports=(HostPort(80),))
    assert (house.stopped(), house.state(9)) == ([], "pending")


def test_a_whole_gpu_is_made_free_not_two_halves_of_two():
    house = House(a_node("n1", 16, "64Gi", gpu=2))
    for id, priority in ((1, "batch"), (2, "low"), (3, "batch"), (4, "low")):
        _run(house, id, cpu="1", gpu="0.5", priority=priority)
    house.submit(9, cpu="1", gpu="1", priority="high")
    assert house.stopped() == ["3.0.1", "4.0.1"]  # 1 and 3 would lose less, but share no GPU
    _goes(house, "3.0.1", "4.0.1")
    assert house.started() == ["9.0.1"]


def test_cores_are_made_free_in_one_socket():
    sockets = (Socket(cpus=(0, 1)), Socket(cpus=(2, 3)))
    house = House(a_node("n1", 8, "64Gi", sockets=sockets))
    for id in (1, 2, 3, 4):
        _run(house, id, cpu="1", binding="cores", priority="low" if id % 2 else "batch")
    on = {id: house.runs[f"{id}.0.1"].grant.cpus[0] // 2 for id in (1, 2, 3, 4)}
    house.submit(9, cpu="2", binding="numa", priority="high")
    gone = [int(run.partition(".")[0]) for run in house.stopped()]
    assert len(gone) == 2
    assert len({on[id] for id in gone}) == 1


def test_room_is_made_in_one_rack_for_a_gang_that_must_be_in_one():
    nodes = [a_node(f"{rack}{i}", 1, location=Location(rack=rack)) for rack in "ab" for i in (1, 2)]
    house = House(*nodes)
    for id, priority in ((1, "batch"), (2, "low"), (3, "batch"), (4, "low")):
        _run(house, id, cpu="1", priority=priority)
    on = {run.job: run.node for run in house.runs.values()}
    house.submit(9, cpu="1", count=2, priority="high", gang=GangRules(topology="rack"))
    gone = house.stopped()
    assert len(gone) == 2
    assert len({on[int(run.partition(".")[0])][0] for run in gone}) == 1
    _goes(house, *gone)
    assert house.started() == ["9.0.1", "9.1.1"]


def test_two_who_come_at_once_do_not_count_on_the_same_room():
    house = a_house(2, 2)
    for id in (1, 2, 3, 4):
        _run(house, id, cpu="1", priority="low")
    house.submit(8, 9, cpu="2", priority="high")
    assert sorted(house.stopped()) == ["1.0.1", "2.0.1", "3.0.1", "4.0.1"]
    assert house.controller.preempting.holds.keys() == {8, 9}


def test_who_goes_anyway_is_not_reason_to_send_another_away():
    house = a_house(1, 1)
    _run(house, 1, cpu="1", priority="low")
    _run(house, 2, cpu="1", priority="low")
    house.learn(JobCancelled(1))
    house.submit(9, cpu="1", priority="high")
    assert house.stopped() == []
    assert "job 1 was told to go" in house.reason(9)[1]


def test_the_second_member_is_helped_by_what_is_left_after_the_first():
    house = a_house(2, 2)
    for id in (1, 2, 3):
        _run(house, id, cpu="1", priority="low")
    house.submit(9, cpu="1", count=2, priority="high")
    assert len(house.stopped()) == 1
    house.submit(10, cpu="1", count=2, priority="high")
    assert len(house.stopped()) == 2


# -------------------------------------------------------------------------------------- work that is saved


@pytest.mark.parametrize("saved_ms", [0, 500_000], ids=["never saved", "saved a moment ago"])
def test_work_lost_is_counted_from_the_last_checkpoint(saved_ms):
    house = a_house(2)
    house.submit(1, cpu="1", priority="low")
    house.see("1.0.1", "running")
    began = house.now_ms
    house.now_ms += 400_000
    _run(house, 2, cpu="1", priority="low")
    house.now_ms = began + 500_001
    if saved_ms:
        house.see("1.0.1", "running", checkpoint_ms=began + saved_ms)
    house.submit(9, cpu="1", priority="high")
    assert house.stopped() == (["1.0.1"] if saved_ms else ["2.0.1"])


def test_who_is_told_to_save_its_work_before_it_goes_loses_none():
    house = a_house(2)
    _run(house, 1, cpu="1", priority="low", checkpoint=Checkpoint(signal="USR1"))
    _run(house, 2, cpu="1", priority="low")
    house.submit(9, cpu="1", priority="high")
    assert house.stopped() == ["1.0.1"]


# -------------------------------------------------------------------------------------- gangs that can shrink


def test_members_that_a_gang_can_do_without_go_first_and_alone():
    house = a_house(3)
    _run(house, 1, 0, 1, 2, cpu="1", count=3, min_count=1, priority="low", gang=ELASTIC)
    done = house.submit(9, cpu="1", priority="high", name="urgent")
    assert house.stopped() == ["1.2.1"]
    assert house.runs["1.2.1"].stop_requested == "shrunk for job 9 (urgent, priority 750)"
    assert [(e.job, e.preemptor, e.nodes, e.members) for e in done.plan.evictions] == [(1, 9, ("n1",), (2,))]
    assert "job.shrunk" in house.kinds(1)
    assert "job.preempted" not in house.kinds(1)
    assert house.reason(9) == ("PREEMPTING", "room is being made on n1: job 1 (member 2) was told to go")
    _goes(house, "1.2.1")
    assert house.started() == ["9.0.1"]
    assert (house.state(1), house.jobs[1].preemptions) == ("running", 0)


def test_a_gang_shrinks_rather_than_that_another_of_its_class_ends():
    house = a_house(2, 1)
    _run(house, 1, 0, 1, cpu="1", count=2, min_count=1, priority="low", gang=ELASTIC)
    _run(house, 2, cpu="1", priority="low")
    house.submit(9, cpu="1", priority="high")
    assert house.stopped() == ["1.1.1"]


def test_a_gang_goes_whole_when_what_it_can_spare_is_not_enough():
    house = a_house(3)
    _run(house, 1, 0, 1, 2, cpu="1", count=3, min_count=2, priority="low", gang=ELASTIC)
    done = house.submit(9, cpu="2", priority="high")
    assert sorted(house.stopped()) == ["1.0.1", "1.1.1", "1.2.1"]
    assert [eviction.members for eviction in done.plan.evictions] == [()]
    assert "job.preempted" in house.kinds(1)


def test_a_gang_that_is_not_elastic_gives_nobody_up():
    house = a_house(3)
    _run(house, 1, 0, 1, 2, cpu="1", count=3, min_count=1, priority="low")
    house.submit(9, cpu="1", priority="high")
    assert sorted(house.stopped()) == ["1.0.1", "1.1.1", "1.2.1"]


def test_what_a_gang_gave_up_is_not_asked_of_it_twice():
    house = a_house(2)
    _run(house, 1, 0, 1, cpu="1", count=2, min_count=1, priority="low", gang=ELASTIC)
    house.submit(8, cpu="1", priority="high")
    assert house.stopped() == ["1.1.1"]
    house.submit(9, cpu="1", priority="high")
    assert house.stopped() == ["1.0.1"]  # now the rest of it has to go
    assert house.runs["1.0.1"].stop_requested.startswith("preempted")


def test_a_job_sent_away_too_often_is_safe_but_for_what_it_can_spare():
    house = a_house(2, preemption=PreemptionPolicy(max_per_job=0))
    _run(house, 1, 0, 1, cpu="1", count=2, min_count=1, priority="low", gang=ELASTIC)
    house.submit(8, cpu="1", priority="high")
    assert house.stopped() == ["1.1.1"]
    house.submit(9, cpu="1", priority="high")
    assert house.stopped() == []


def test_room_for_a_shrunk_member_that_goes_with_its_node_is_on_record_as_void():
    house = a_house(2)
    _run(house, 1, 0, 1, cpu="1", count=2, min_count=1, priority="low", gang=ELASTIC)
    house.submit(9, cpu="1", priority="high")
    house.learn(NodeLost("n1"))
    assert "job.preemption_void" in house.kinds(9)
