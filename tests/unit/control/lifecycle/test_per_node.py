"""Jobs that run once on every node that suits them."""

from __future__ import annotations

import pytest

from builders import a_job, a_job_spec, a_node
from hodei.control.admission.routing import ProfileAvailability
from hodei.control.explain.why import plan, why
from hodei.control.lifecycle.per_node import ENDED_KEPT
from hodei.control.snapshot import dump, load
from hodei.model.facts import JobCancelled, JobSubmitted, NodeJoined, NodeLost, NodeOverridden
from hodei.model.job import GangRules
from hodei.model.node import Taint
from unit.control.harness import Harness

EVERYWHERE = GangRules(per_node=True)


def _house(*names, **options):
    return Harness(*(a_node(name, 4) for name in names), **options)


def _submit(harness, id=1, **fields):
    return harness.submit(id, gang=EVERYWHERE, **{"cpu": "1", **fields})


def _live(harness, job=1):
    """By node, the run that is there now."""
    runs = harness.controller.cluster.live_runs(job) if job in harness.controller.cluster.jobs else []
    return {run.node: run.id for run in runs}


def _run_all(harness, job=1):
    for run in list(_live(harness, job).values()):
        harness.see(run, "running")


def test_it_runs_once_on_each_node_that_suits_it_and_nowhere_twice():
    harness = Harness(
        a_node("a", 4), a_node("b", 4), a_node("c", 4, labels={"role": "db"}), a_node("d", 4, taints=(Taint("x"),))
    )
    _submit(harness)
    assert sorted(_live(harness)) == ["a", "b", "c"]
    assert len(harness.runs) == 3
    assert {run.member for run in harness.runs.values()} == {0, 1, 2}
    _submit(harness, 2, node_selector={"role": "db"})
    assert sorted(_live(harness, 2)) == ["c"]
    harness.later(60_000)
    assert len(harness.runs) == 4


def test_it_follows_nodes_that_join_and_ends_on_nodes_that_leave():
    harness = _house("a", "b")
    _submit(harness)
    _run_all(harness)
    harness.learn(NodeJoined(a_node("c", 4)))
    assert sorted(_live(harness)) == ["a", "b", "c"]
    harness.learn(NodeLost("b"))
    assert sorted(_live(harness)) == ["a", "c"]
    assert harness.state() == "running"
    harness.later(120_000)
    harness.learn(NodeJoined(a_node("b", 4)))
    assert sorted(_live(harness)) == ["a", "b", "c"]
    of_b = [run.member for run in harness.runs.values() if run.node == "b"]
    assert len(of_b) == 2
    assert of_b[0] == of_b[1]  # it keeps its number there


def test_a_repair_comes_before_pending_jobs():
    harness = _house("a")
    _submit(harness)
    harness.submit(2, cpu="3", name="fills a")
    harness.submit(3, cpu="4", name="waits")
    harness.learn(NodeJoined(a_node("b", 4)))
    assert sorted(_live(harness)) == ["a", "b"]
    assert harness.state(3) == "pending"


def test_a_node_without_room_gets_its_run_when_there_is_some_and_why_says_so():
    harness = _house("a", "b")
    harness.submit(1, cpu="4", node_selector={}, name="fills one")
    full = harness.runs["1.0.1"].node
    free = "b" if full == "a" else "a"
    _submit(harness, 2)
    harness.see(harness.started()[0] if harness.started() else _live(harness, 2)[free], "running")
    assert sorted(_live(harness, 2)) == [free]
    assert harness.reason(2) == ("PARTIAL", f"runs on 1 node; no capacity now on {full} (Insufficient cpu)")
    assert f"no capacity now on {full}" in why(harness.controller, 2, harness.now_ms).summary
    harness.see("1.0.1", "running")
    harness.see("1.0.1", "succeeded", 0)
    assert sorted(_live(harness, 2)) == ["a", "b"]
    assert harness.reason(2) == ("", "")


def test_a_node_that_is_too_small_is_not_waited_for():
    harness = Harness(a_node("a", 4), a_node("tiny", "500m"))
    _submit(harness)
    _run_all(harness)
    harness.see("1.0.1", "succeeded", 0)
    assert harness.state() == "succeeded"


def test_a_job_that_ends_is_over_when_every_node_has_had_its_run():
    harness = _house("a", "b", "c")
    _submit(harness)
    _run_all(harness)
    for place, run in enumerate(_live(harness).values(), 1):
        assert harness.state() == "running"
        harness.see(run, "succeeded", 0)
        assert (place == 3) == (harness.state() == "succeeded")
    assert len(harness.runs) == 3
    assert all(not any(used.values()) for used in harness.used().values())


def test_a_failure_is_tried_again_on_its_own_node_and_the_others_go_on():
    harness = _house("a", "b")
    _submit(harness, retries=1)
    _run_all(harness)
    live = _live(harness)
    harness.see(live["a"], "failed", 3)
    assert sorted(_live(harness)) == ["b"]
    assert (harness.state(), harness.stopped()) == ("running", [])
    assert "to be tried again" in harness.reason()[1]
    harness.now_ms = harness.controller.next_wakeup_ms(harness.now_ms)
    harness.learn()
    again = _live(harness)["a"]
    assert (again != live["a"], again.split(".")[1]) == (True, live["a"].split(".")[1])
    harness.see(again, "running")
    harness.see(again, "failed", 3)
    harness.later(600_000)
    assert sorted(_live(harness)) == ["b"]  # its retries are used up
    assert "failed on a" in harness.reason()[1]
    harness.see(live["b"], "succeeded", 0)
    assert harness.state() == "failed"
    assert harness.reason() == ("EXIT_CODE", "on node a: exited with 3")


def test_one_that_restarts_always_runs_again_and_is_never_over():
    harness = _house("a")
    _submit(harness, restart="always")
    for _ in range(3):
        (run,) = _live(harness).values()
        harness.see(run, "running")
        harness.see(run, "succeeded", 0)
        assert harness.state() == "running"
        harness.now_ms = harness.controller.next_wakeup_ms(harness.now_ms)
        harness.learn()
    assert len(harness.runs) == 4


def test_it_is_cancelled_as_one():
    harness = _house("a", "b")
    _submit(harness)
    _run_all(harness)
    runs = sorted(_live(harness).values())
    harness.learn(JobCancelled(1))
    assert sorted(harness.stopped()) == runs
    harness.learn(NodeJoined(a_node("c", 4)))
    assert sorted(_live(harness).values()) == runs
    for run in runs:
        harness.see(run, "stopped")
    assert harness.state() == "cancelled"
    harness.later(60_000)
    assert len(harness.runs) == 2


@pytest.mark.parametrize(
    "fact",
    [NodeOverridden("a", drain=True, cordon=True), NodeOverridden("a", add_taints=(Taint("x", effect="NoExecute"),))],
)
def test_on_a_node_that_is_drained_or_tainted_it_ends_and_elsewhere_it_goes_on(fact):
    harness = _house("a", "b")
    _submit(harness)
    _run_all(harness)
    on_a = _live(harness)["a"]
    harness.learn(fact)
    assert harness.stopped() == [on_a]
    harness.see(on_a, "stopped")
    harness.later(120_000)
    assert sorted(_live(harness)) == ["b"]
    assert harness.state() == "running"
    harness.learn(NodeOverridden("a", cordon=False, remove_taints=(Taint("x", effect="NoExecute"),)))
    assert sorted(_live(harness)) == ["a", "b"]


def test_after_a_restart_of_the_server_it_knows_where_it_has_been():
    harness = _house("a", "b")
    _submit(harness)
    _run_all(harness)
    harness.see(_live(harness)["a"], "succeeded", 0)
    harness.restart(a_node("a", 4), a_node("b", 4), a_node("c", 4))
    assert sorted(_live(harness)) == ["b", "c"]
    assert len(harness.runs) == 3


def test_without_a_node_that_suits_it_waits_like_any_job():
    harness = _house("a")
    _submit(harness, node_selector={"role": "db"})
    assert harness.state() == "pending"
    harness.learn(
        NodeJoined(a_node("db1", 4, labels={"role": "db"})), NodeJoined(a_node("db2", 4, labels={"role": "db"}))
    )
    assert sorted(_live(harness)) == ["db1", "db2"]


def test_many_nodes_are_served_in_parts():
    harness = Harness(*(a_node(f"n{number:03}", 4) for number in range(450)))
    _submit(harness)
    for _ in range(5):
        harness.learn()
    assert len(_live(harness)) == 450


def test_a_snapshot_continues_where_it_was():
    harness = _house("a", "b")
    _submit(harness, retries=1)
    _run_all(harness)
    harness.see(_live(harness)["a"], "failed", 3)
    harness.controller = load(dump(harness.controller))
    harness.learn(NodeJoined(a_node("c", 4)))
    assert sorted(_live(harness)) == ["b", "c"]
    harness.now_ms = harness.controller.next_wakeup_ms(harness.now_ms)
    harness.learn()
    assert sorted(_live(harness)) == ["a", "b", "c"]


def test_it_is_said_to_be_on_the_nodes_where_it_runs():
    harness = _house("a", "b")
    (planned,) = plan(harness.controller, [a_job_spec(gang=EVERYWHERE, cpu="1")], harness.now_ms)
    assert planned.summary == "would start now on 2 nodes, one run on each, a first"
    _submit(harness)
    _run_all(harness)
    assert harness.jobs[1].nodes == "a b"
    harness.learn(NodeJoined(a_node("c", 4)))
    _run_all(harness)
    assert harness.jobs[1].nodes == "a b c"
    harness.learn(NodeLost("b"))
    assert harness.jobs[1].nodes == "a c"
    assert why(harness.controller, 1, harness.now_ms).summary.startswith("running on a, c")


def test_while_its_profile_is_paused_it_starts_on_no_further_node():
    harness = _house("a")
    _submit(harness)
    _run_all(harness)
    harness.controller.profile_router.routing.availability = ProfileAvailability(paused=["default"])
    harness.learn(NodeJoined(a_node("b", 4)))
    harness.later(60_000)
    assert sorted(_live(harness)) == ["a"]
    assert harness.reason() == ("PARTIAL", "runs on 1 node; not on b (profile default is paused)")
    assert harness.controller.next_wakeup_ms(harness.now_ms) != harness.now_ms  # it does not spin
    harness.see(_live(harness)["a"], "succeeded", 0)
    assert harness.state() == "running"  # b has not had its run
    harness.controller.profile_router.routing.availability = ProfileAvailability()
    harness.learn(NodeJoined(a_node("c", 4)))
    assert sorted(_live(harness)) == ["b", "c"]
    assert harness.reason()[0] == "PARTIAL"  # done on 1


@pytest.mark.parametrize(("priority", "first"), [("high", 3), ("medium", 1), ("low", 1)])
def test_a_member_takes_its_turn_by_the_priority_of_its_job(priority, first):
    """Whoever waits for the room of a node that joins gets it first if it comes first in line."""
    harness = _house("a")
    _submit(harness, cpu="3", priority="medium")
    harness.now_ms += 1000
    harness.submit(2, cpu="1", priority="critical", preempts=False, name="fills a")
    harness.submit(3, cpu="2", priority=priority, preempts=False, name="waits")
    assert harness.state(3) == "pending"
    harness.learn(NodeJoined(a_node("b", 4)))
    assert ("b" in _live(harness)) == (first == 1)
    assert harness.state(3) == ("scheduled" if first == 3 else "pending")


def test_the_members_of_a_new_job_come_before_lower_jobs_and_after_higher_ones():
    harness = _house("a", "b", "c")
    facts = [
        JobSubmitted(a_job(1, cpu="3", priority="low", name="low", at_ms=harness.now_ms)),
        JobSubmitted(a_job(2, cpu="3", gang=EVERYWHERE, priority="medium", at_ms=harness.now_ms)),
        JobSubmitted(a_job(3, cpu="3", priority="high", name="high", at_ms=harness.now_ms)),
    ]
    harness.learn(*facts)
    assert (harness.state(3), len(_live(harness, 2)), harness.state(1)) == ("scheduled", 2, "pending")


def test_only_the_member_that_lost_its_place_starts_again_after_a_preemption():
    harness = Harness(*(a_node(name, 4, labels={"name": name}) for name in "abc"))
    _submit(harness, cpu="3", priority="low")
    _run_all(harness)
    live = _live(harness)
    harness.see(live["a"], "succeeded", 0)
    harness.later(1000)
    harness.submit(2, cpu="2", priority="critical", node_selector={"name": "b"})
    assert harness.stopped() == [live["b"]]
    harness.see(live["b"], "stopped")
    assert (harness.state(), harness.state(2), _live(harness)) == ("running", "scheduled", {"c": live["c"]})
    assert harness.reason() == ("PARTIAL", "runs on 1 node; no capacity now on b (Insufficient cpu); done on 1")
    harness.see("2.0.1", "running")
    harness.restart(*(a_node(name, 4, labels={"name": name}) for name in "abc"))
    harness.see("2.0.1", "succeeded", 0)
    now = _live(harness)
    assert (sorted(now), now["c"]) == (["b", "c"], live["c"])
    assert len([run for run in harness.runs.values() if run.job == 1]) == 4
    for run in now.values():
        harness.see(run, "running")
        harness.see(run, "succeeded", 0)
    assert harness.state() == "succeeded"


@pytest.mark.parametrize(("state", "code"), [("succeeded", 0), ("failed", 3)])
def test_a_run_that_ends_again_and_again_takes_no_more_and_more_memory(state, code):
    harness = _house("a", "b")
    _submit(harness, restart="always")
    _run_all(harness)
    other = _live(harness)["b"]
    for _ in range(40):
        run = _live(harness)["a"]
        harness.see(run, "running")
        harness.see(run, state, code)
        harness.later(61_000)
    assert len(harness.runs) == 42
    assert len(harness.controller.cluster.runs[1]) <= ENDED_KEPT + 3
    before = _live(harness)
    assert (before["b"], before["a"].split(".")[1]) == (other, run.split(".")[1])
    harness.restart(a_node("a", 4), a_node("b", 4))
    assert _live(harness) == before
    assert len(harness.controller.cluster.runs[1]) <= ENDED_KEPT + 3


def test_retries_are_counted_though_other_ends_lie_between():
    harness = _house("a", "b")
    _submit(harness, retries=2)
    _run_all(harness)
    for end in ["failed", "failed"] + ["stopped"] * 20:
        run = _live(harness)["a"]
        harness.see(run, "running")
        if end == "stopped":
            harness.learn(NodeOverridden("a", drain=True, cordon=True))
        harness.see(run, end, 3)
        harness.learn(NodeOverridden("a", cordon=False))
        harness.later(61_000)
    harness.see(_live(harness)["a"], "failed", 3)
    harness.later(61_000)
    assert sorted(_live(harness)) == ["b"]
    assert "failed on a" in harness.reason()[1]
