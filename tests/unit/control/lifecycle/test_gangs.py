"""Gangs that start with fewer, take in more, give some up, and have a lost member replaced."""

from __future__ import annotations

from builders import a_node, a_task
from hodei.model.effects import Start, Stop
from hodei.model.facts import JobCancelled, NodeJoined, NodeLost, NodeOverridden, RunObserved
from hodei.model.job import Checkpoint, GangRules
from hodei.model.outcome import StopReason
from unit.control.harness import Harness, a_harness

REPAIR = GangRules(on_failure="repair")
ELASTIC = GangRules(elastic=True)


def orders(harness: Harness) -> dict[str, Start]:
    return {act.run.id: act for act in harness.acts if isinstance(act, Start)}


def running(harness: Harness, *runs: str) -> None:
    harness.learn(*(RunObserved(run, "running", harness.now_ms) for run in runs))


def live(harness: Harness, job: int = 1) -> list[str]:
    return sorted(run.id for run in harness.controller.cluster.live_runs(job))


def test_a_gang_starts_with_as_many_as_fit_if_they_are_enough():
    harness = a_harness(3)
    harness.submit(1, count=5, min_count=2)
    assert harness.started() == ["1.0.1", "1.1.1", "1.2.1"]
    assert harness.reason() == ("PARTIAL", "3 of 5 members run")
    assert {order.world_size for order in orders(harness).values()} == {3}


def test_a_gang_that_finds_room_for_fewer_than_its_least_waits_whole():
    harness = a_harness(1)
    harness.submit(1, count=5, min_count=2)
    assert (harness.started(), harness.state()) == ([], "pending")
    assert harness.used() == {"n1": {}}


def test_the_ranks_of_a_partial_gang_have_no_gaps():
    harness = a_harness(4)
    harness.submit(1, tasks=[a_task("a", count=3, min_count=1), a_task("b", count=3, min_count=2)])
    assert sorted(harness.started()) == ["1.0.1", "1.1.1", "1.3.1", "1.4.1"]
    assert [run.rank for run in sorted(harness.runs.values(), key=lambda run: run.member)] == [0, 1, 2, 3]


def test_start_orders_have_the_addresses_of_the_gang_if_known():
    nodes = [a_node("n1", 1, "64Gi", address="10.0.0.1"), a_node("n2", 1, "64Gi", address="10.0.0.2")]
    harness = Harness(*nodes)
    harness.submit(1, count=2)
    by_rank = {order.run.rank: order.run.node for order in orders(harness).values()}
    told = {order.addresses for order in orders(harness).values()}
    assert told == {tuple({"n1": "10.0.0.1", "n2": "10.0.0.2"}[by_rank[rank]] for rank in (0, 1))}


def test_an_elastic_gang_takes_in_more_when_room_appears():
    harness = a_harness(2)
    harness.submit(1, count=4, min_count=1, gang=ELASTIC)
    assert harness.reason() == ("PARTIAL", "2 of 4 members run; more join when there is capacity")
    running(harness, "1.0.1", "1.1.1")
    harness.learn(NodeJoined(a_node("n2", 1, "64Gi")))
    assert harness.started() == ["1.2.2"]
    assert (orders(harness)["1.2.2"].world_size, harness.runs["1.2.2"].rank) == (3, 2)
    harness.learn(NodeJoined(a_node("n3", 8, "64Gi")))
    assert (harness.started(), harness.reason()) == (["1.3.3"], ("", ""))
    for run in live(harness):
        harness.see(run, "succeeded", 0)
    assert harness.state() == "succeeded"


def test_an_elastic_gang_does_not_grow_while_another_job_waits_for_room():
    harness = a_harness(2)
    harness.submit(1, count=4, min_count=1, gang=ELASTIC)
    harness.submit(2, cpu=3)
    harness.learn(NodeJoined(a_node("n2", 2, "64Gi")))
    assert harness.started() == []
    harness.learn(JobCancelled(2))
    assert sorted(harness.started()) == ["1.2.2", "1.3.2"]


def test_an_elastic_gang_goes_on_without_a_lost_member_and_takes_it_in_again():
    harness = a_harness(2, 1)
    harness.submit(1, count=3, min_count=2, gang=ELASTIC)
    running(harness, *harness.started())
    gone = next(run for run in harness.runs.values() if run.node == "n2")
    harness.learn(NodeLost("n2"))
    assert (harness.stopped(), harness.state(), len(live(harness))) == ([], "running", 2)
    harness.learn(NodeJoined(a_node("n2", 1, "64Gi")))
    [back] = harness.started()
    assert harness.runs[back].member == gone.member
    assert harness.runs[back].rank == gone.rank


def test_an_elastic_gang_that_falls_below_its_least_starts_again_whole():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, min_count=2, gang=ELASTIC)
    running(harness, *harness.started())
    harness.learn(NodeLost("n2"))
    assert len(harness.stopped()) == 1


def test_a_shrunk_gang_succeeds_with_the_remaining_members():
    harness = a_harness(3)
    harness.submit(1, count=3, min_count=1, gang=ELASTIC)
    running(harness, *harness.started())
    cluster = harness.controller.cluster
    harness.controller._lifecycle.shrink(
        cluster.run("1.2.1"), StopReason("preempted", "by job 9 (urgent, priority 750)"), harness.now_ms
    )
    harness.learn()
    assert harness.stopped() == ["1.2.1"]
    harness.submit(2, cpu=3)  # keeps the gang from growing again at once
    harness.see("1.2.1", "stopped", 143)
    assert (harness.state(), len(live(harness))) == ("running", 2)
    for run in live(harness):
        harness.see(run, "succeeded", 0)
    assert harness.state() == "succeeded"


def test_a_lost_member_is_replaced_before_anyone_else_gets_its_room():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, gang=REPAIR)
    running(harness, *harness.started())
    harness.submit(2, 3)
    harness.see("1.1.1", "lost", reason_code="lost", reason="gone")
    assert harness.started() == ["1.1.2"]
    assert harness.runs["1.1.2"].rank == harness.runs["1.1.1"].rank == 1
    assert (harness.stopped(), harness.state(), harness.jobs[1].losses) == ([], "running", 1)


def test_the_place_of_a_failed_member_is_kept_until_its_retry():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, gang=REPAIR, retries=1)
    running(harness, *harness.started())
    harness.submit(2)
    harness.see("1.1.1", "failed", 3)
    assert (harness.started(), harness.reason()) == ([], ("PARTIAL", "1 of 2 members run; member 1 is being replaced"))
    harness.later(1000)
    assert harness.started() == ["1.1.2"]
    harness.see("1.1.2", "failed", 3)
    assert harness.stopped() == ["1.0.1"], "no retries are left: it is the end of the gang"
    harness.see("1.0.1", "stopped", 143)
    assert (harness.state(), harness.jobs[1].failures) == ("failed", 2)


def test_members_that_went_down_with_one_node_are_one_loss():
    harness = a_harness(4, 1, 8)
    harness.submit(1, count=5, gang=REPAIR, node_selector={})
    running(harness, *harness.started())
    lost = [run for run in harness.runs.values() if run.node == harness.runs["1.0.1"].node]
    harness.learn(NodeLost(lost[0].node))
    assert harness.jobs[1].losses == 1
    assert len(harness.started()) == len(lost)


def test_a_gang_being_repaired_can_be_cancelled():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, gang=REPAIR, retries=1)
    running(harness, *harness.started())
    harness.see("1.0.1", "succeeded", 0)
    harness.see("1.1.1", "failed", 3)
    assert harness.state() == "running"
    harness.learn(JobCancelled(1))
    assert (harness.state(), harness.used()) == ("cancelled", {"n1": {}, "n2": {}})
    harness.later(60_000)
    assert harness.started() == []


def test_a_member_is_moved_alone_off_a_drained_node():
    harness = a_harness(1, 1, 1)
    harness.submit(1, count=2, gang=REPAIR)
    running(harness, *harness.started())
    there = harness.runs["1.1.1"].node
    harness.learn(NodeOverridden(there, drain=True))
    assert harness.stopped() == ["1.1.1"]
    harness.see("1.1.1", "stopped", 143)
    assert harness.started() == ["1.1.2"]
    assert harness.runs["1.1.2"].node not in (there, harness.runs["1.0.1"].node)


def test_a_repair_under_way_is_found_again_after_a_restart():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, gang=REPAIR)
    running(harness, *harness.started())
    harness.learn(NodeLost("n2"))
    assert harness.started() == []
    harness.restart(a_node("n1", 1, "64Gi"))
    assert (harness.state(), harness.started()) == ("running", [])
    harness.learn(NodeJoined(a_node("n2", 1, "64Gi")))
    [back] = harness.started()
    assert harness.runs[back].attempt == 2
    running(harness, back)
    for run in live(harness):
        harness.see(run, "succeeded", 0)
    assert harness.state() == "succeeded"


def test_a_gang_that_may_not_be_restarted_is_not_repaired_either():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, gang=REPAIR, restart="never")
    running(harness, *harness.started())
    harness.see("1.1.1", "lost", reason_code="lost", reason="gone")
    assert harness.stopped() == ["1.0.1"]


def test_a_gang_whose_members_do_not_all_run_in_time_lets_go_of_everything():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, gang=GangRules(assembly_timeout_ms=5000))
    running(harness, "1.0.1")
    harness.later(4999)
    assert harness.stopped() == []
    harness.later(1)
    assert harness.stopped() == ["1.0.1", "1.1.1"]
    harness.see("1.0.1", "stopped", 143)
    harness.see("1.1.1", "stopped")
    code, text = harness.reason()
    assert (harness.state(), code, harness.jobs[1].losses) == ("pending", "ASSEMBLY_TIMEOUT", 1)
    assert text.startswith("not all members ran within 5 s: member 1 on n")
    harness.later(3000)
    assert len(harness.started()) == 2


def test_a_gang_that_is_together_in_time_is_left_alone():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, gang=GangRules(assembly_timeout_ms=5000))
    running(harness, "1.0.1", "1.1.1")
    harness.later(60_000)
    assert harness.stopped() == []


def test_work_is_saved_before_a_run_is_moved_but_not_when_it_is_cancelled():
    for fact, saved in ((NodeOverridden("n1", drain=True), True), (JobCancelled(1), False)):
        harness = a_harness(1)
        harness.submit(1, checkpoint=Checkpoint(signal="USR1"))
        running(harness, "1.0.1")
        harness.learn(fact)
        [stop] = [act for act in harness.acts if isinstance(act, Stop)]
        assert (stop.checkpoint is not None) is saved


def test_the_last_checkpoint_is_remembered():
    harness = a_harness(1)
    harness.submit(1)
    running(harness, "1.0.1")
    harness.see("1.0.1", "running", checkpoint_ms=harness.now_ms + 5)
    assert harness.runs["1.0.1"].checkpoint_ms == harness.now_ms + 5


def test_two_gangs_that_each_wait_for_a_place_for_a_lost_member_do_not_wait_for_ever():
    """Both hold what the other would need: after a while each lets go, and one of them gets all."""
    harness = a_harness(1, 1, 1, 1)
    harness.submit(1, 2, count=2, gang=REPAIR)
    running(harness, *harness.started())
    for job in (1, 2):
        harness.learn(NodeLost(harness.runs[f"{job}.1.1"].node))
    assert (live(harness, 1), live(harness, 2)) == (["1.0.1"], ["2.0.1"])
    harness.later(600_000)
    for run in harness.stopped():
        harness.see(run, "stopped", 143)
    assert harness.reason(1) == ("ASSEMBLY_TIMEOUT", "no node was found for a missing member")
    harness.later(60_000)
    assert sorted(len(live(harness, job)) for job in (1, 2)) == [0, 2]


def test_the_room_kept_for_a_member_is_free_for_others_when_its_replacement_goes_elsewhere():
    harness = Harness(a_node("a", 1, labels={"disk": "ssd"}), a_node("b", 1))
    harness.submit(1, count=2, cpu="1", retries=1, gang=GangRules(on_failure="repair"))
    on_a = next(run.id for run in harness.runs.values() if run.node == "a")
    harness.submit(2, cpu="1", node_selector={"disk": "ssd"})
    harness.see(on_a, "failed", 1)
    harness.learn(NodeJoined(a_node("c", 8)))
    assert harness.state(2) == "pending"  # `a` is kept for the member that failed
    harness.later(60_000)
    assert {run.node for run in harness.runs.values() if run.job == 1 and run.attempt == 2} == {"c"}
    assert harness.state(2) == "scheduled"
