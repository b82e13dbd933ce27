"""Gangs: partial starts, growth, shrinking, repair of lost members, assembly timeouts."""

from __future__ import annotations

from builders import a_node, a_task
from hodei.model.effects import Start, Stop
from hodei.model.facts import JobCancelled, NodeJoined, NodeLost, NodeOverridden
from hodei.model.job import Checkpoint, GangRules
from hodei.model.outcome import StopReason
from unit.control.harness import Harness, a_harness
from unit.control.scenarios import live_runs, mark_running

REPAIR = GangRules(on_failure="repair")
ELASTIC = GangRules(elastic=True)


def start_orders(harness: Harness) -> dict[str, Start]:
    return {act.run.id: act for act in harness.acts if isinstance(act, Start)}


def test_a_gang_starts_with_as_many_members_as_fit_if_they_reach_its_minimum():
    harness = a_harness(3)
    harness.submit(1, count=5, min_count=2)
    assert harness.started() == ["1.0.1", "1.1.1", "1.2.1"]
    assert harness.reason() == ("PARTIAL", "3 of 5 members run")
    assert {order.world_size for order in start_orders(harness).values()} == {3}


def test_a_gang_that_fits_below_its_minimum_waits_without_holding_capacity():
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
    by_rank = {order.run.rank: order.run.node for order in start_orders(harness).values()}
    addresses = {order.addresses for order in start_orders(harness).values()}
    assert addresses == {tuple({"n1": "10.0.0.1", "n2": "10.0.0.2"}[by_rank[rank]] for rank in (0, 1))}


def test_an_elastic_gang_grows_into_new_capacity():
    harness = a_harness(2)
    harness.submit(1, count=4, min_count=1, gang=ELASTIC)
    assert harness.reason() == ("PARTIAL", "2 of 4 members run; more join when there is capacity")
    mark_running(harness, "1.0.1", "1.1.1")
    harness.step(NodeJoined(a_node("n2", 1, "64Gi")))
    assert harness.started() == ["1.2.2"]
    assert (start_orders(harness)["1.2.2"].world_size, harness.runs["1.2.2"].rank) == (3, 2)
    harness.step(NodeJoined(a_node("n3", 8, "64Gi")))
    assert (harness.started(), harness.reason()) == (["1.3.3"], ("", ""))
    for run in live_runs(harness):
        harness.observe(run, "succeeded", 0)
    assert harness.state() == "succeeded"


def test_an_elastic_gang_does_not_grow_while_another_job_waits_for_capacity():
    harness = a_harness(2)
    harness.submit(1, count=4, min_count=1, gang=ELASTIC)
    harness.submit(2, cpu=3)
    harness.step(NodeJoined(a_node("n2", 2, "64Gi")))
    assert harness.started() == []
    harness.step(JobCancelled(2))
    assert sorted(harness.started()) == ["1.2.2", "1.3.2"]


def test_an_elastic_gang_runs_on_without_a_lost_member_and_replaces_it():
    harness = a_harness(2, 1)
    harness.submit(1, count=3, min_count=2, gang=ELASTIC)
    mark_running(harness, *harness.started())
    lost = next(run for run in harness.runs.values() if run.node == "n2")
    harness.step(NodeLost("n2"))
    assert (harness.stopped(), harness.state(), len(live_runs(harness))) == ([], "running", 2)
    harness.step(NodeJoined(a_node("n2", 1, "64Gi")))
    [replacement] = harness.started()
    assert harness.runs[replacement].member == lost.member
    assert harness.runs[replacement].rank == lost.rank


def test_an_elastic_gang_below_its_minimum_is_restarted():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, min_count=2, gang=ELASTIC)
    mark_running(harness, *harness.started())
    harness.step(NodeLost("n2"))
    assert len(harness.stopped()) == 1


def test_a_shrunk_gang_succeeds_with_the_remaining_members():
    harness = a_harness(3)
    harness.submit(1, count=3, min_count=1, gang=ELASTIC)
    mark_running(harness, *harness.started())
    cluster = harness.controller.cluster
    reason = StopReason("preempted", "by job 9 (urgent, priority 750)")
    harness.controller._lifecycle.shrink(cluster.run("1.2.1"), reason)
    harness.step()
    assert harness.stopped() == ["1.2.1"]
    harness.submit(2, cpu=3)  # prevents immediate growth
    harness.observe("1.2.1", "stopped", 143)
    assert (harness.state(), len(live_runs(harness))) == ("running", 2)
    for run in live_runs(harness):
        harness.observe(run, "succeeded", 0)
    assert harness.state() == "succeeded"


def test_a_lost_member_is_replaced_before_pending_jobs_start():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, gang=REPAIR)
    mark_running(harness, *harness.started())
    harness.submit(2, 3)
    harness.observe("1.1.1", "lost", reason_code="lost", reason="vanished")
    assert harness.started() == ["1.1.2"]
    assert harness.runs["1.1.2"].rank == harness.runs["1.1.1"].rank == 1
    assert (harness.stopped(), harness.state(), harness.jobs[1].losses) == ([], "running", 1)


def test_the_capacity_of_a_failed_member_is_held_until_its_retry():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, gang=REPAIR, retries=1)
    mark_running(harness, *harness.started())
    harness.submit(2)
    harness.observe("1.1.1", "failed", 3)
    assert (harness.started(), harness.reason()) == ([], ("PARTIAL", "1 of 2 members run; member 1 is being replaced"))
    harness.advance(1000)
    assert harness.started() == ["1.1.2"]
    harness.observe("1.1.2", "failed", 3)
    assert harness.stopped() == ["1.0.1"], "no retries are left: the gang fails"
    harness.observe("1.0.1", "stopped", 143)
    assert (harness.state(), harness.jobs[1].failures) == ("failed", 2)


def test_members_lost_with_one_node_count_as_one_loss():
    harness = a_harness(4, 1, 8)
    harness.submit(1, count=5, gang=REPAIR, node_selector={})
    mark_running(harness, *harness.started())
    lost = [run for run in harness.runs.values() if run.node == harness.runs["1.0.1"].node]
    harness.step(NodeLost(lost[0].node))
    assert harness.jobs[1].losses == 1
    assert len(harness.started()) == len(lost)


def test_a_gang_being_repaired_can_be_cancelled():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, gang=REPAIR, retries=1)
    mark_running(harness, *harness.started())
    harness.observe("1.0.1", "succeeded", 0)
    harness.observe("1.1.1", "failed", 3)
    assert harness.state() == "running"
    harness.step(JobCancelled(1))
    assert (harness.state(), harness.used()) == ("cancelled", {"n1": {}, "n2": {}})
    harness.advance(60_000)
    assert harness.started() == []


def test_a_member_is_moved_alone_off_a_drained_node():
    harness = a_harness(1, 1, 1)
    harness.submit(1, count=2, gang=REPAIR)
    mark_running(harness, *harness.started())
    there = harness.runs["1.1.1"].node
    harness.step(NodeOverridden(there, drain=True))
    assert harness.stopped() == ["1.1.1"]
    harness.observe("1.1.1", "stopped", 143)
    assert harness.started() == ["1.1.2"]
    assert harness.runs["1.1.2"].node not in (there, harness.runs["1.0.1"].node)


def test_a_repair_continues_after_a_restart():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, gang=REPAIR)
    mark_running(harness, *harness.started())
    harness.step(NodeLost("n2"))
    assert harness.started() == []
    harness.restart(a_node("n1", 1, "64Gi"))
    assert (harness.state(), harness.started()) == ("running", [])
    harness.step(NodeJoined(a_node("n2", 1, "64Gi")))
    [replacement] = harness.started()
    assert harness.runs[replacement].attempt == 2
    mark_running(harness, replacement)
    for run in live_runs(harness):
        harness.observe(run, "succeeded", 0)
    assert harness.state() == "succeeded"


def test_restart_never_also_prevents_repair():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, gang=REPAIR, restart="never")
    mark_running(harness, *harness.started())
    harness.observe("1.1.1", "lost", reason_code="lost", reason="vanished")
    assert harness.stopped() == ["1.0.1"]


def test_a_gang_that_is_not_assembled_in_time_releases_all_its_capacity():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, gang=GangRules(assembly_timeout_ms=5000))
    mark_running(harness, "1.0.1")
    harness.advance(4999)
    assert harness.stopped() == []
    harness.advance(1)
    assert harness.stopped() == ["1.0.1", "1.1.1"]
    harness.observe("1.0.1", "stopped", 143)
    harness.observe("1.1.1", "stopped")
    code, text = harness.reason()
    assert (harness.state(), code, harness.jobs[1].losses) == ("pending", "ASSEMBLY_TIMEOUT", 1)
    assert text.startswith("not all members ran within 5 s: member 1 on n")
    harness.advance(3000)
    assert len(harness.started()) == 2


def test_a_gang_assembled_in_time_keeps_running():
    harness = a_harness(1, 1)
    harness.submit(1, count=2, gang=GangRules(assembly_timeout_ms=5000))
    mark_running(harness, "1.0.1", "1.1.1")
    harness.advance(60_000)
    assert harness.stopped() == []


def test_a_checkpoint_is_taken_before_a_move_but_not_before_a_cancellation():
    for fact, saved in ((NodeOverridden("n1", drain=True), True), (JobCancelled(1), False)):
        harness = a_harness(1)
        harness.submit(1, checkpoint=Checkpoint(signal="USR1"))
        mark_running(harness, "1.0.1")
        harness.step(fact)
        [stop] = [act for act in harness.acts if isinstance(act, Stop)]
        assert (stop.checkpoint is not None) is saved


def test_the_last_checkpoint_is_remembered():
    harness = a_harness(1)
    harness.submit(1)
    mark_running(harness, "1.0.1")
    harness.observe("1.0.1", "running", checkpoint_ms=harness.now_ms + 5)
    assert harness.runs["1.0.1"].checkpoint_ms == harness.now_ms + 5


def test_two_gangs_that_block_each_others_repair_are_resolved_by_a_timeout():
    """Each gang holds what the other needs. After the timeout both release it, and one of them starts whole."""
    harness = a_harness(1, 1, 1, 1)
    harness.submit(1, 2, count=2, gang=REPAIR)
    mark_running(harness, *harness.started())
    for job in (1, 2):
        harness.step(NodeLost(harness.runs[f"{job}.1.1"].node))
    assert (live_runs(harness, 1), live_runs(harness, 2)) == (["1.0.1"], ["2.0.1"])
    harness.advance(600_000)
    for run in harness.stopped():
        harness.observe(run, "stopped", 143)
    assert harness.reason(1) == ("ASSEMBLY_TIMEOUT", "no node was found for a missing member")
    harness.advance(60_000)
    assert sorted(len(live_runs(harness, job)) for job in (1, 2)) == [0, 2]


def test_capacity_held_for_a_member_is_released_when_its_replacement_starts_elsewhere():
    harness = Harness(a_node("a", 1, labels={"disk": "ssd"}), a_node("b", 1))
    harness.submit(1, count=2, cpu="1", retries=1, gang=GangRules(on_failure="repair"))
    on_a = next(run.id for run in harness.runs.values() if run.node == "a")
    harness.submit(2, cpu="1", node_selector={"disk": "ssd"})
    harness.observe(on_a, "failed", 1)
    harness.step(NodeJoined(a_node("c", 8)))
    assert harness.state(2) == "pending"  # `a` is held for the member that failed
    harness.advance(60_000)
    assert {run.node for run in harness.runs.values() if run.job == 1 and run.attempt == 2} == {"c"}
    assert harness.state(2) == "scheduled"
