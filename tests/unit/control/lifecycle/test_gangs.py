"""Gangs that start with fewer, take in more, give some up, and have a lost member replaced."""

from __future__ import annotations

from builders import a_node, a_task
from hodei.model.effects import Start, Stop
from hodei.model.facts import JobCancelled, NodeJoined, NodeLost, NodeOverridden, RunObserved
from hodei.model.job import Checkpoint, GangRules
from unit.control.house import House, a_house

REPAIR = GangRules(on_failure="repair")
ELASTIC = GangRules(elastic=True)


def orders(house: House) -> dict[str, Start]:
    return {act.run.id: act for act in house.acts if isinstance(act, Start)}


def running(house: House, *runs: str) -> None:
    house.learn(*(RunObserved(run, "running", house.now_ms) for run in runs))


def live(house: House, job: int = 1) -> list[str]:
    return sorted(run.id for run in house.controller.world.live_runs(job))


# -------------------------------------------------------------------------------------------- partial start


def test_a_gang_starts_with_as_many_as_fit_if_they_are_enough():
    house = a_house(3)
    house.submit(1, count=5, min_count=2)
    assert house.started() == ["1.0.1", "1.1.1", "1.2.1"]
    assert house.reason() == ("PARTIAL", "3 of 5 members run")
    assert {order.world_size for order in orders(house).values()} == {3}


def test_a_gang_that_finds_room_for_fewer_than_its_least_waits_whole():
    house = a_house(1)
    house.submit(1, count=5, min_count=2)
    assert (house.started(), house.state()) == ([], "pending")
    assert house.used() == {"n1": {}}


def test_the_ranks_of_a_partial_gang_have_no_gaps():
    house = a_house(4)
    house.submit(1, tasks=[a_task("a", count=3, min_count=1), a_task("b", count=3, min_count=2)])
    assert sorted(house.started()) == ["1.0.1", "1.1.1", "1.3.1", "1.4.1"]
    assert [run.rank for run in sorted(house.runs.values(), key=lambda run: run.member)] == [0, 1, 2, 3]


def test_members_are_told_where_the_others_are_where_that_is_known():
    nodes = [a_node("n1", 1, "64Gi", address="10.0.0.1"), a_node("n2", 1, "64Gi", address="10.0.0.2")]
    house = House(*nodes)
    house.submit(1, count=2)
    by_rank = {order.run.rank: order.run.node for order in orders(house).values()}
    told = {order.addresses for order in orders(house).values()}
    assert told == {tuple({"n1": "10.0.0.1", "n2": "10.0.0.2"}[by_rank[rank]] for rank in (0, 1))}


# -------------------------------------------------------------------------------------------- growth and shrink


def test_an_elastic_gang_takes_in_more_when_room_appears():
    house = a_house(2)
    house.submit(1, count=4, min_count=1, gang=ELASTIC)
    assert house.reason() == ("PARTIAL", "2 of 4 members run; more join when there is room")
    running(house, "1.0.1", "1.1.1")
    house.learn(NodeJoined(a_node("n2", 1, "64Gi")))
    assert house.started() == ["1.2.2"]
    assert (orders(house)["1.2.2"].world_size, house.runs["1.2.2"].rank) == (3, 2)
    house.learn(NodeJoined(a_node("n3", 8, "64Gi")))
    assert (house.started(), house.reason()) == (["1.3.3"], ("", ""))
    for run in live(house):
        house.see(run, "succeeded", 0)
    assert house.state() == "succeeded"


def test_an_elastic_gang_does_not_grow_while_another_job_waits_for_room():
    house = a_house(2)
    house.submit(1, count=4, min_count=1, gang=ELASTIC)
    house.submit(2, cpu=3)
    house.learn(NodeJoined(a_node("n2", 2, "64Gi")))
    assert house.started() == []
    house.learn(JobCancelled(2))
    assert sorted(house.started()) == ["1.2.2", "1.3.2"]


def test_an_elastic_gang_goes_on_without_a_lost_member_and_takes_it_in_again():
    house = a_house(2, 1)
    house.submit(1, count=3, min_count=2, gang=ELASTIC)
    running(house, *house.started())
    gone = next(run for run in house.runs.values() if run.node == "n2")
    house.learn(NodeLost("n2"))
    assert (house.stopped(), house.state(), len(live(house))) == ([], "running", 2)
    house.learn(NodeJoined(a_node("n2", 1, "64Gi")))
    [back] = house.started()
    assert house.runs[back].member == gone.member
    assert house.runs[back].rank == gone.rank


def test_an_elastic_gang_that_falls_below_its_least_starts_again_whole():
    house = a_house(1, 1)
    house.submit(1, count=2, min_count=2, gang=ELASTIC)
    running(house, *house.started())
    house.learn(NodeLost("n2"))
    assert len(house.stopped()) == 1


def test_a_shrunk_gang_succeeds_with_those_who_stayed():
    house = a_house(3)
    house.submit(1, count=3, min_count=1, gang=ELASTIC)
    running(house, *house.started())
    world = house.controller.world
    house.controller._lives.shrink(world.run("1.2.1"), "shrunk for job 9 (urgent, priority 750)", house.now_ms)
    house.learn()
    assert house.stopped() == ["1.2.1"]
    house.submit(2, cpu=3)  # keeps the gang from growing again at once
    house.see("1.2.1", "stopped", 143)
    assert (house.state(), len(live(house))) == ("running", 2)
    for run in live(house):
        house.see(run, "succeeded", 0)
    assert house.state() == "succeeded"


# -------------------------------------------------------------------------------------------------- repair


def test_a_lost_member_is_replaced_before_anyone_else_gets_its_room():
    house = a_house(1, 1)
    house.submit(1, count=2, gang=REPAIR)
    running(house, *house.started())
    house.submit(2, 3)
    house.see("1.1.1", "lost", reason_code="lost", reason="gone")
    assert house.started() == ["1.1.2"]
    assert house.runs["1.1.2"].rank == house.runs["1.1.1"].rank == 1
    assert (house.stopped(), house.state(), house.jobs[1].losses) == ([], "running", 1)


def test_the_place_of_a_failed_member_is_kept_until_its_retry():
    house = a_house(1, 1)
    house.submit(1, count=2, gang=REPAIR, retries=1)
    running(house, *house.started())
    house.submit(2)
    house.see("1.1.1", "failed", 3)
    assert (house.started(), house.reason()) == ([], ("PARTIAL", "1 of 2 members run; member 1 is being replaced"))
    house.later(1000)
    assert house.started() == ["1.1.2"]
    house.see("1.1.2", "failed", 3)
    assert house.stopped() == ["1.0.1"], "no retries are left: it is the end of the gang"
    house.see("1.0.1", "stopped", 143)
    assert (house.state(), house.jobs[1].failures) == ("failed", 2)


def test_members_that_went_down_with_one_node_are_one_loss():
    house = a_house(4, 1, 8)
    house.submit(1, count=5, gang=REPAIR, node_selector={})
    running(house, *house.started())
    lost = [run for run in house.runs.values() if run.node == house.runs["1.0.1"].node]
    house.learn(NodeLost(lost[0].node))
    assert house.jobs[1].losses == 1
    assert len(house.started()) == len(lost)


def test_a_gang_being_repaired_can_be_cancelled():
    house = a_house(1, 1)
    house.submit(1, count=2, gang=REPAIR, retries=1)
    running(house, *house.started())
    house.see("1.0.1", "succeeded", 0)
    house.see("1.1.1", "failed", 3)
    assert house.state() == "running"
    house.learn(JobCancelled(1))
    assert (house.state(), house.used()) == ("cancelled", {"n1": {}, "n2": {}})
    house.later(60_000)
    assert house.started() == []


def test_a_member_is_moved_alone_off_a_drained_node():
    house = a_house(1, 1, 1)
    house.submit(1, count=2, gang=REPAIR)
    running(house, *house.started())
    there = house.runs["1.1.1"].node
    house.learn(NodeOverridden(there, drain=True))
    assert house.stopped() == ["1.1.1"]
    house.see("1.1.1", "stopped", 143)
    assert house.started() == ["1.1.2"]
    assert house.runs["1.1.2"].node not in (there, house.runs["1.0.1"].node)


def test_a_repair_under_way_is_found_again_after_a_restart():
    house = a_house(1, 1)
    house.submit(1, count=2, gang=REPAIR)
    running(house, *house.started())
    house.learn(NodeLost("n2"))
    assert house.started() == []
    house.restart(a_node("n1", 1, "64Gi"))
    assert (house.state(), house.started()) == ("running", [])
    house.learn(NodeJoined(a_node("n2", 1, "64Gi")))
    [back] = house.started()
    assert house.runs[back].attempt == 2
    running(house, back)
    for run in live(house):
        house.see(run, "succeeded", 0)
    assert house.state() == "succeeded"


def test_a_gang_that_may_not_be_restarted_is_not_repaired_either():
    house = a_house(1, 1)
    house.submit(1, count=2, gang=REPAIR, restart="never")
    running(house, *house.started())
    house.see("1.1.1", "lost", reason_code="lost", reason="gone")
    assert house.stopped() == ["1.0.1"]


# ------------------------------------------------------------------------------------------------- assembly


def test_a_gang_whose_members_do_not_all_run_in_time_lets_go_of_everything():
    house = a_house(1, 1)
    house.submit(1, count=2, gang=GangRules(assembly_timeout_ms=5000))
    running(house, "1.0.1")
    house.later(4999)
    assert house.stopped() == []
    house.later(1)
    assert house.stopped() == ["1.0.1", "1.1.1"]
    house.see("1.0.1", "stopped", 143)
    house.see("1.1.1", "stopped")
    code, text = house.reason()
    assert (house.state(), code, house.jobs[1].losses) == ("pending", "ASSEMBLY_TIMEOUT", 1)
    assert text.startswith("not all members ran within 5 s: member 1 on n")
    house.later(3000)
    assert len(house.started()) == 2


def test_a_gang_that_is_together_in_time_is_left_alone():
    house = a_house(1, 1)
    house.submit(1, count=2, gang=GangRules(assembly_timeout_ms=5000))
    running(house, "1.0.1", "1.1.1")
    house.later(60_000)
    assert house.stopped() == []


# ----------------------------------------------------------------------------------------------- checkpoints


def test_work_is_saved_before_a_run_is_moved_but_not_when_it_is_cancelled():
    for fact, saved in ((NodeOverridden("n1", drain=True), True), (JobCancelled(1), False)):
        house = a_house(1)
        house.submit(1, checkpoint=Checkpoint(signal="USR1"))
        running(house, "1.0.1")
        house.learn(fact)
        [stop] = [act for act in house.acts if isinstance(act, Stop)]
        assert (stop.checkpoint is not None) is saved


def test_the_last_checkpoint_is_remembered():
    house = a_house(1)
    house.submit(1)
    running(house, "1.0.1")
    house.see("1.0.1", "running", checkpoint_ms=house.now_ms + 5)
    assert house.runs["1.0.1"].checkpoint_ms == house.now_ms + 5


def test_two_gangs_that_each_wait_for_a_place_for_a_lost_member_do_not_wait_for_ever():
    """Both hold what the other would need: after a while each lets go, and one of them gets all."""
    house = a_house(1, 1, 1, 1)
    house.submit(1, 2, count=2, gang=REPAIR)
    running(house, *house.started())
    for job in (1, 2):
        house.learn(NodeLost(house.runs[f"{job}.1.1"].node))
    assert (live(house, 1), live(house, 2)) == (["1.0.1"], ["2.0.1"])
    house.later(600_000)
    for run in house.stopped():
        house.see(run, "stopped", 143)
    assert house.reason(1) == ("ASSEMBLY_TIMEOUT", "no place was found for a missing member")
    house.later(60_000)
    assert sorted(len(live(house, job)) for job in (1, 2)) == [0, 2]


def test_the_room_kept_for_a_member_is_free_for_others_when_its_replacement_goes_elsewhere():
    house = House(a_node("a", 1, labels={"disk": "ssd"}), a_node("b", 1))
    house.submit(1, count=2, cpu="1", retries=1, gang=GangRules(on_failure="repair"))
    on_a = next(run.id for run in house.runs.values() if run.node == "a")
    house.submit(2, cpu="1", node_selector={"disk": "ssd"})
    house.see(on_a, "failed", 1)
    house.learn(NodeJoined(a_node("c", 8)))
    assert house.state(2) == "pending"  # `a` is kept for the member that failed
    house.later(60_000)
    assert {run.node for run in house.runs.values() if run.job == 1 and run.attempt == 2} == {"c"}
    assert house.state(2) == "scheduled"
