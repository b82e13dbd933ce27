"""Per-node jobs: one run on every matching node."""

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

PER_NODE = GangRules(per_node=True)


def _cluster(*names, **options):
    return Harness(*(a_node(name, 4) for name in names), **options)


def _submit(harness, id=1, **fields):
    return harness.submit(id, gang=PER_NODE, **{"cpu": "1", **fields})


def _live(harness, job=1):
    """The live run of each node."""
    runs = harness.controller.cluster.live_runs(job) if job in harness.controller.cluster.jobs else []
    return {run.node: run.id for run in runs}


def _run_all(harness, job=1):
    for run in list(_live(harness, job).values()):
        harness.observe(run, "running")


def test_a_per_node_job_has_one_run_on_each_matching_node():
    harness = Harness(
        a_node("a", 4), a_node("b", 4), a_node("c", 4, labels={"role": "db"}), a_node("d", 4, taints=(Taint("x"),))
    )
    _submit(harness)
    assert sorted(_live(harness)) == ["a", "b", "c"]
    assert len(harness.runs) == 3
    assert {run.member for run in harness.runs.values()} == {0, 1, 2}
    _submit(harness, 2, node_selector={"role": "db"})
    assert sorted(_live(harness, 2)) == ["c"]
    harness.advance(60_000)
    assert len(harness.runs) == 4


def test_runs_start_on_joining_nodes_and_end_with_lost_nodes():
    harness = _cluster("a", "b")
    _submit(harness)
    _run_all(harness)
    harness.step(NodeJoined(a_node("c", 4)))
    assert sorted(_live(harness)) == ["a", "b", "c"]
    harness.step(NodeLost("b"))
    assert sorted(_live(harness)) == ["a", "c"]
    assert harness.state() == "running"
    harness.advance(120_000)
    harness.step(NodeJoined(a_node("b", 4)))
    assert sorted(_live(harness)) == ["a", "b", "c"]
    of_b = [run.member for run in harness.runs.values() if run.node == "b"]
    assert len(of_b) == 2
    assert of_b[0] == of_b[1]  # the node keeps its member number


def test_a_run_on_a_joining_node_comes_before_pending_jobs():
    harness = _cluster("a")
    _submit(harness)
    harness.submit(2, cpu="3", name="fills a")
    harness.submit(3, cpu="4", name="waits")
    harness.step(NodeJoined(a_node("b", 4)))
    assert sorted(_live(harness)) == ["a", "b"]
    assert harness.state(3) == "pending"


def test_a_full_node_gets_its_run_when_capacity_is_freed_and_why_says_so():
    harness = _cluster("a", "b")
    harness.submit(1, cpu="4", node_selector={}, name="fills one")
    full = harness.runs["1.0.1"].node
    free = "b" if full == "a" else "a"
    _submit(harness, 2)
    harness.observe(harness.started()[0] if harness.started() else _live(harness, 2)[free], "running")
    assert sorted(_live(harness, 2)) == [free]
    assert harness.reason(2) == ("PARTIAL", f"runs on 1 node; no capacity now on {full} (Insufficient cpu)")
    assert f"no capacity now on {full}" in why(harness.controller, 2, harness.now_ms).summary
    harness.observe("1.0.1", "running")
    harness.observe("1.0.1", "succeeded", 0)
    assert sorted(_live(harness, 2)) == ["a", "b"]
    assert harness.reason(2) == ("", "")


def test_a_node_that_is_too_small_is_not_waited_for():
    harness = Harness(a_node("a", 4), a_node("tiny", "500m"))
    _submit(harness)
    _run_all(harness)
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.state() == "succeeded"


def test_the_job_succeeds_when_the_run_of_every_node_has():
    harness = _cluster("a", "b", "c")
    _submit(harness)
    _run_all(harness)
    for place, run in enumerate(_live(harness).values(), 1):
        assert harness.state() == "running"
        harness.observe(run, "succeeded", 0)
        assert (place == 3) == (harness.state() == "succeeded")
    assert len(harness.runs) == 3
    assert all(not any(used.values()) for used in harness.used().values())


def test_a_failed_run_is_retried_on_its_own_node_and_the_others_run_on():
    harness = _cluster("a", "b")
    _submit(harness, retries=1)
    _run_all(harness)
    live = _live(harness)
    harness.observe(live["a"], "failed", 3)
    assert sorted(_live(harness)) == ["b"]
    assert (harness.state(), harness.stopped()) == ("running", [])
    assert "to be tried again" in harness.reason()[1]
    harness.now_ms = harness.controller.next_wakeup_ms(harness.now_ms)
    harness.step()
    retry = _live(harness)["a"]
    assert (retry != live["a"], retry.split(".")[1]) == (True, live["a"].split(".")[1])
    harness.observe(retry, "running")
    harness.observe(retry, "failed", 3)
    harness.advance(600_000)
    assert sorted(_live(harness)) == ["b"]  # its retries are used up
    assert "failed on a" in harness.reason()[1]
    harness.observe(live["b"], "succeeded", 0)
    assert harness.state() == "failed"
    assert harness.reason() == ("EXIT_CODE", "on node a: exited with 3")


def test_a_per_node_job_with_restart_always_never_ends():
    harness = _cluster("a")
    _submit(harness, restart="always")
    for _ in range(3):
        (run,) = _live(harness).values()
        harness.observe(run, "running")
        harness.observe(run, "succeeded", 0)
        assert harness.state() == "running"
        harness.now_ms = harness.controller.next_wakeup_ms(harness.now_ms)
        harness.step()
    assert len(harness.runs) == 4


def test_a_per_node_job_is_cancelled_as_a_whole():
    harness = _cluster("a", "b")
    _submit(harness)
    _run_all(harness)
    runs = sorted(_live(harness).values())
    harness.step(JobCancelled(1))
    assert sorted(harness.stopped()) == runs
    harness.step(NodeJoined(a_node("c", 4)))
    assert sorted(_live(harness).values()) == runs
    for run in runs:
        harness.observe(run, "stopped")
    assert harness.state() == "cancelled"
    harness.advance(60_000)
    assert len(harness.runs) == 2


@pytest.mark.parametrize(
    "fact",
    [NodeOverridden("a", drain=True, cordon=True), NodeOverridden("a", add_taints=(Taint("x", effect="NoExecute"),))],
)
def test_only_the_run_on_a_drained_or_tainted_node_stops(fact):
    harness = _cluster("a", "b")
    _submit(harness)
    _run_all(harness)
    on_a = _live(harness)["a"]
    harness.step(fact)
    assert harness.stopped() == [on_a]
    harness.observe(on_a, "stopped")
    harness.advance(120_000)
    assert sorted(_live(harness)) == ["b"]
    assert harness.state() == "running"
    harness.step(NodeOverridden("a", cordon=False, remove_taints=(Taint("x", effect="NoExecute"),)))
    assert sorted(_live(harness)) == ["a", "b"]


def test_ended_runs_are_not_repeated_after_a_restart():
    harness = _cluster("a", "b")
    _submit(harness)
    _run_all(harness)
    harness.observe(_live(harness)["a"], "succeeded", 0)
    harness.restart(a_node("a", 4), a_node("b", 4), a_node("c", 4))
    assert sorted(_live(harness)) == ["b", "c"]
    assert len(harness.runs) == 3


def test_without_a_matching_node_a_per_node_job_waits():
    harness = _cluster("a")
    _submit(harness, node_selector={"role": "db"})
    assert harness.state() == "pending"
    harness.step(
        NodeJoined(a_node("db1", 4, labels={"role": "db"})), NodeJoined(a_node("db2", 4, labels={"role": "db"}))
    )
    assert sorted(_live(harness)) == ["db1", "db2"]


def test_runs_on_many_nodes_start_over_several_steps():
    harness = Harness(*(a_node(f"n{number:03}", 4) for number in range(450)))
    _submit(harness)
    for _ in range(5):
        harness.step()
    assert len(_live(harness)) == 450


def test_a_per_node_job_continues_from_a_snapshot():
    harness = _cluster("a", "b")
    _submit(harness, retries=1)
    _run_all(harness)
    harness.observe(_live(harness)["a"], "failed", 3)
    harness.controller = load(dump(harness.controller))
    harness.step(NodeJoined(a_node("c", 4)))
    assert sorted(_live(harness)) == ["b", "c"]
    harness.now_ms = harness.controller.next_wakeup_ms(harness.now_ms)
    harness.step()
    assert sorted(_live(harness)) == ["a", "b", "c"]


def test_the_nodes_of_a_per_node_job_are_those_with_a_live_run():
    harness = _cluster("a", "b")
    (planned,) = plan(harness.controller, [a_job_spec(gang=PER_NODE, cpu="1")], harness.now_ms)
    assert planned.summary == "would start now on 2 nodes, one run on each, a first"
    _submit(harness)
    _run_all(harness)
    assert harness.jobs[1].nodes == "a b"
    harness.step(NodeJoined(a_node("c", 4)))
    _run_all(harness)
    assert harness.jobs[1].nodes == "a b c"
    harness.step(NodeLost("b"))
    assert harness.jobs[1].nodes == "a c"
    assert why(harness.controller, 1, harness.now_ms).summary.startswith("running on a, c")


def test_while_its_profile_is_paused_a_per_node_job_starts_no_runs():
    harness = _cluster("a")
    _submit(harness)
    _run_all(harness)
    harness.controller.profile_router.routing.availability = ProfileAvailability(paused=["default"])
    harness.step(NodeJoined(a_node("b", 4)))
    harness.advance(60_000)
    assert sorted(_live(harness)) == ["a"]
    assert harness.reason() == ("PARTIAL", "runs on 1 node; not on b (profile default is paused)")
    assert harness.controller.next_wakeup_ms(harness.now_ms) != harness.now_ms  # no busy loop
    harness.observe(_live(harness)["a"], "succeeded", 0)
    assert harness.state() == "running"  # the run on b is still missing
    harness.controller.profile_router.routing.availability = ProfileAvailability()
    harness.step(NodeJoined(a_node("c", 4)))
    assert sorted(_live(harness)) == ["b", "c"]
    assert harness.reason()[0] == "PARTIAL"  # done on 1


@pytest.mark.parametrize(("priority", "first"), [("high", 3), ("medium", 1), ("low", 1)])
def test_a_run_on_a_joining_node_competes_by_the_priority_of_its_job(priority, first):
    """A pending job of higher priority gets the capacity of a joining node first."""
    harness = _cluster("a")
    _submit(harness, cpu="3", priority="medium")
    harness.now_ms += 1000
    harness.submit(2, cpu="1", priority="critical", preempts=False, name="fills a")
    harness.submit(3, cpu="2", priority=priority, preempts=False, name="waits")
    assert harness.state(3) == "pending"
    harness.step(NodeJoined(a_node("b", 4)))
    assert ("b" in _live(harness)) == (first == 1)
    assert harness.state(3) == ("scheduled" if first == 3 else "pending")


def test_the_runs_of_a_new_per_node_job_start_in_order_of_priority():
    harness = _cluster("a", "b", "c")
    facts = [
        JobSubmitted(a_job(1, cpu="3", priority="low", name="low", at_ms=harness.now_ms)),
        JobSubmitted(a_job(2, cpu="3", gang=PER_NODE, priority="medium", at_ms=harness.now_ms)),
        JobSubmitted(a_job(3, cpu="3", priority="high", name="high", at_ms=harness.now_ms)),
    ]
    harness.step(*facts)
    assert (harness.state(3), len(_live(harness, 2)), harness.state(1)) == ("scheduled", 2, "pending")


def test_only_the_preempted_run_starts_again():
    harness = Harness(*(a_node(name, 4, labels={"name": name}) for name in "abc"))
    _submit(harness, cpu="3", priority="low")
    _run_all(harness)
    live = _live(harness)
    harness.observe(live["a"], "succeeded", 0)
    harness.advance(1000)
    harness.submit(2, cpu="2", priority="critical", node_selector={"name": "b"})
    assert harness.stopped() == [live["b"]]
    harness.observe(live["b"], "stopped")
    assert (harness.state(), harness.state(2), _live(harness)) == ("running", "scheduled", {"c": live["c"]})
    assert harness.reason() == ("PARTIAL", "runs on 1 node; no capacity now on b (Insufficient cpu); done on 1")
    harness.observe("2.0.1", "running")
    harness.restart(*(a_node(name, 4, labels={"name": name}) for name in "abc"))
    harness.observe("2.0.1", "succeeded", 0)
    now = _live(harness)
    assert (sorted(now), now["c"]) == (["b", "c"], live["c"])
    assert len([run for run in harness.runs.values() if run.job == 1]) == 4
    for run in now.values():
        harness.observe(run, "running")
        harness.observe(run, "succeeded", 0)
    assert harness.state() == "succeeded"


@pytest.mark.parametrize(("state", "code"), [("succeeded", 0), ("failed", 3)])
def test_repeated_ends_of_a_run_use_bounded_memory(state, code):
    harness = _cluster("a", "b")
    _submit(harness, restart="always")
    _run_all(harness)
    other = _live(harness)["b"]
    for _ in range(40):
        run = _live(harness)["a"]
        harness.observe(run, "running")
        harness.observe(run, state, code)
        harness.advance(61_000)
    assert len(harness.runs) == 42
    assert len(harness.controller.cluster.runs[1]) <= ENDED_KEPT + 3
    before = _live(harness)
    assert (before["b"], before["a"].split(".")[1]) == (other, run.split(".")[1])
    harness.restart(a_node("a", 4), a_node("b", 4))
    assert _live(harness) == before
    assert len(harness.controller.cluster.runs[1]) <= ENDED_KEPT + 3


def test_failures_are_counted_across_other_ends():
    harness = _cluster("a", "b")
    _submit(harness, retries=2)
    _run_all(harness)
    for end in ["failed", "failed"] + ["stopped"] * 20:
        run = _live(harness)["a"]
        harness.observe(run, "running")
        if end == "stopped":
            harness.step(NodeOverridden("a", drain=True, cordon=True))
        harness.observe(run, end, 3)
        harness.step(NodeOverridden("a", cordon=False))
        harness.advance(61_000)
    harness.observe(_live(harness)["a"], "failed", 3)
    harness.advance(61_000)
    assert sorted(_live(harness)) == ["b"]
    assert "failed on a" in harness.reason()[1]
