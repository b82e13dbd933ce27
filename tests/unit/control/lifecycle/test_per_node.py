"""Jobs that run once on every node that suits them."""

from __future__ import annotations

import pytest

from builders import a_job, a_job_spec, a_node
from hodei.control.admission.profile_availability import ProfileAvailability
from hodei.control.explain.why import plan, why
from hodei.control.lifecycle.per_node import ENDED_KEPT
from hodei.control.snapshot import dump, load
from hodei.model.facts import JobCancelled, JobSubmitted, NodeJoined, NodeLost, NodeOverridden
from hodei.model.job import GangRules
from hodei.model.node import Taint
from unit.control.house import House

EVERYWHERE = GangRules(per_node=True)


def _house(*names, **options):
    return House(*(a_node(name, 4) for name in names), **options)


def _submit(house, id=1, **fields):
    return house.submit(id, gang=EVERYWHERE, **{"cpu": "1", **fields})


def _live(house, job=1):
    """By node, the run that is there now."""
    runs = house.controller.world.live_runs(job) if job in house.controller.world.jobs else []
    return {run.node: run.id for run in runs}


def _run_all(house, job=1):
    for run in list(_live(house, job).values()):
        house.see(run, "running")


def test_it_runs_once_on_each_node_that_suits_it_and_nowhere_twice():
    house = House(
        a_node("a", 4), a_node("b", 4), a_node("c", 4, labels={"role": "db"}), a_node("d", 4, taints=(Taint("x"),))
    )
    _submit(house)
    assert sorted(_live(house)) == ["a", "b", "c"]
    assert len(house.runs) == 3
    assert {run.member for run in house.runs.values()} == {0, 1, 2}
    _submit(house, 2, node_selector={"role": "db"})
    assert sorted(_live(house, 2)) == ["c"]
    house.later(60_000)
    assert len(house.runs) == 4


def test_it_follows_nodes_that_join_and_ends_on_nodes_that_leave():
    house = _house("a", "b")
    _submit(house)
    _run_all(house)
    house.learn(NodeJoined(a_node("c", 4)))
    assert sorted(_live(house)) == ["a", "b", "c"]
    house.learn(NodeLost("b"))
    assert sorted(_live(house)) == ["a", "c"]
    assert house.state() == "running"
    house.later(120_000)
    house.learn(NodeJoined(a_node("b", 4)))
    assert sorted(_live(house)) == ["a", "b", "c"]
    of_b = [run.member for run in house.runs.values() if run.node == "b"]
    assert len(of_b) == 2
    assert of_b[0] == of_b[1]  # it keeps its number there


def test_it_comes_before_those_who_wait_in_line():
    house = _house("a")
    _submit(house)
    house.submit(2, cpu="3", name="fills a")
    house.submit(3, cpu="4", name="waits")
    house.learn(NodeJoined(a_node("b", 4)))
    assert sorted(_live(house)) == ["a", "b"]
    assert house.state(3) == "pending"


def test_a_node_without_room_gets_its_run_when_there_is_some_and_why_says_so():
    house = _house("a", "b")
    house.submit(1, cpu="4", node_selector={}, name="fills one")
    full = house.runs["1.0.1"].node
    free = "b" if full == "a" else "a"
    _submit(house, 2)
    house.see(house.started()[0] if house.started() else _live(house, 2)[free], "running")
    assert sorted(_live(house, 2)) == [free]
    assert house.reason(2) == ("PARTIAL", f"runs on 1 node; no room now on {full} (Insufficient cpu)")
    assert f"no room now on {full}" in why(house.controller, 2, house.now_ms).summary
    house.see("1.0.1", "running")
    house.see("1.0.1", "succeeded", 0)
    assert sorted(_live(house, 2)) == ["a", "b"]
    assert house.reason(2) == ("", "")


def test_a_node_that_is_too_small_is_not_waited_for():
    house = House(a_node("a", 4), a_node("tiny", "500m"))
    _submit(house)
    _run_all(house)
    house.see("1.0.1", "succeeded", 0)
    assert house.state() == "succeeded"


def test_a_job_that_ends_is_over_when_every_node_has_had_its_run():
    house = _house("a", "b", "c")
    _submit(house)
    _run_all(house)
    for place, run in enumerate(_live(house).values(), 1):
        assert house.state() == "running"
        house.see(run, "succeeded", 0)
        assert (place == 3) == (house.state() == "succeeded")
    assert len(house.runs) == 3
    assert all(not any(used.values()) for used in house.used().values())


def test_a_failure_is_tried_again_on_its_own_node_and_the_others_go_on():
    house = _house("a", "b")
    _submit(house, retries=1)
    _run_all(house)
    live = _live(house)
    house.see(live["a"], "failed", 3)
    assert sorted(_live(house)) == ["b"]
    assert (house.state(), house.stopped()) == ("running", [])
    assert "to be tried again" in house.reason()[1]
    house.now_ms = house.controller.next_wakeup_ms(house.now_ms)
    house.learn()
    again = _live(house)["a"]
    assert (again != live["a"], again.split(".")[1]) == (True, live["a"].split(".")[1])
    house.see(again, "running")
    house.see(again, "failed", 3)
    house.later(600_000)
    assert sorted(_live(house)) == ["b"]  # its retries are used up
    assert "failed on a" in house.reason()[1]
    house.see(live["b"], "succeeded", 0)
    assert house.state() == "failed"
    assert house.reason() == ("EXIT_CODE", "on node a: exited with 3")


def test_one_that_restarts_always_runs_again_and_is_never_over():
    house = _house("a")
    _submit(house, restart="always")
    for _ in range(3):
        (run,) = _live(house).values()
        house.see(run, "running")
        house.see(run, "succeeded", 0)
        assert house.state() == "running"
        house.now_ms = house.controller.next_wakeup_ms(house.now_ms)
        house.learn()
    assert len(house.runs) == 4


def test_it_is_cancelled_as_one():
    house = _house("a", "b")
    _submit(house)
    _run_all(house)
    runs = sorted(_live(house).values())
    house.learn(JobCancelled(1))
    assert sorted(house.stopped()) == runs
    house.learn(NodeJoined(a_node("c", 4)))
    assert sorted(_live(house).values()) == runs
    for run in runs:
        house.see(run, "stopped")
    assert house.state() == "cancelled"
    house.later(60_000)
    assert len(house.runs) == 2


@pytest.mark.parametrize(
    "fact",
    [NodeOverridden("a", drain=True, cordon=True), NodeOverridden("a", add_taints=(Taint("x", effect="NoExecute"),))],
)
def test_on_a_node_that_is_drained_or_tainted_it_ends_and_elsewhere_it_goes_on(fact):
    house = _house("a", "b")
    _submit(house)
    _run_all(house)
    on_a = _live(house)["a"]
    house.learn(fact)
    assert house.stopped() == [on_a]
    house.see(on_a, "stopped")
    house.later(120_000)
    assert sorted(_live(house)) == ["b"]
    assert house.state() == "running"
    house.learn(NodeOverridden("a", cordon=False, remove_taints=(Taint("x", effect="NoExecute"),)))
    assert sorted(_live(house)) == ["a", "b"]


def test_after_a_restart_of_the_server_it_knows_where_it_has_been():
    house = _house("a", "b")
    _submit(house)
    _run_all(house)
    house.see(_live(house)["a"], "succeeded", 0)
    house.restart(a_node("a", 4), a_node("b", 4), a_node("c", 4))
    assert sorted(_live(house)) == ["b", "c"]
    assert len(house.runs) == 3


def test_without_a_node_that_suits_it_waits_like_any_job():
    house = _house("a")
    _submit(house, node_selector={"role": "db"})
    assert house.state() == "pending"
    house.learn(
        NodeJoined(a_node("db1", 4, labels={"role": "db"})), NodeJoined(a_node("db2", 4, labels={"role": "db"}))
    )
    assert sorted(_live(house)) == ["db1", "db2"]


def test_many_nodes_are_served_in_parts():
    house = House(*(a_node(f"n{number:03}", 4) for number in range(450)))
    _submit(house)
    for _ in range(5):
        house.learn()
    assert len(_live(house)) == 450


def test_a_saved_state_goes_on_from_where_it_was():
    house = _house("a", "b")
    _submit(house, retries=1)
    _run_all(house)
    house.see(_live(house)["a"], "failed", 3)
    house.controller = load(dump(house.controller))
    house.learn(NodeJoined(a_node("c", 4)))
    assert sorted(_live(house)) == ["b", "c"]
    house.now_ms = house.controller.next_wakeup_ms(house.now_ms)
    house.learn()
    assert sorted(_live(house)) == ["a", "b", "c"]


def test_it_is_said_to_be_on_the_nodes_where_it_runs():
    house = _house("a", "b")
    (planned,) = plan(house.controller, [a_job_spec(gang=EVERYWHERE, cpu="1")], house.now_ms)
    assert planned.summary == "would start now on 2 nodes, one run on each, a first"
    _submit(house)
    _run_all(house)
    assert house.jobs[1].nodes == "a b"
    house.learn(NodeJoined(a_node("c", 4)))
    _run_all(house)
    assert house.jobs[1].nodes == "a b c"
    house.learn(NodeLost("b"))
    assert house.jobs[1].nodes == "a c"
    assert why(house.controller, 1, house.now_ms).summary.startswith("running on a, c")


def test_while_its_profile_is_paused_it_starts_on_no_further_node():
    house = _house("a")
    _submit(house)
    _run_all(house)
    house.controller.steering.routing.availability = ProfileAvailability(paused=["default"])
    house.learn(NodeJoined(a_node("b", 4)))
    house.later(60_000)
    assert sorted(_live(house)) == ["a"]
    assert house.reason() == ("PARTIAL", "runs on 1 node; not on b (profile default is paused)")
    assert house.controller.next_wakeup_ms(house.now_ms) != house.now_ms  # it does not spin
    house.see(_live(house)["a"], "succeeded", 0)
    assert house.state() == "running"  # b has not had its run
    house.controller.steering.routing.availability = ProfileAvailability()
    house.learn(NodeJoined(a_node("c", 4)))
    assert sorted(_live(house)) == ["b", "c"]
    assert house.reason()[0] == "PARTIAL"  # done on 1


@pytest.mark.parametrize(("priority", "first"), [("high", 3), ("medium", 1), ("low", 1)])
def test_a_member_takes_its_turn_by_the_priority_of_its_job(priority, first):
    """Whoever waits for the room of a node that joins gets it first if it comes first in line."""
    house = _house("a")
    _submit(house, cpu="3", priority="medium")
    house.now_ms += 1000
    house.submit(2, cpu="1", priority="critical", preempts=False, name="fills a")
    house.submit(3, cpu="2", priority=priority, preempts=False, name="waits")
    assert house.state(3) == "pending"
    house.learn(NodeJoined(a_node("b", 4)))
    assert ("b" in _live(house)) == (first == 1)
    assert house.state(3) == ("scheduled" if first == 3 else "pending")


def test_the_members_of_a_new_job_come_before_lower_jobs_and_after_higher_ones():
    house = _house("a", "b", "c")
    facts = [
        JobSubmitted(a_job(1, cpu="3", priority="low", name="low", at_ms=house.now_ms)),
        JobSubmitted(a_job(2, cpu="3", gang=EVERYWHERE, priority="medium", at_ms=house.now_ms)),
        JobSubmitted(a_job(3, cpu="3", priority="high", name="high", at_ms=house.now_ms)),
    ]
    house.learn(*facts)
    assert (house.state(3), len(_live(house, 2)), house.state(1)) == ("scheduled", 2, "pending")


def test_only_the_member_that_lost_its_place_starts_again_after_a_preemption():
    house = House(*(a_node(name, 4, labels={"name": name}) for name in "abc"))
    _submit(house, cpu="3", priority="low")
    _run_all(house)
    live = _live(house)
    house.see(live["a"], "succeeded", 0)
    house.later(1000)
    house.submit(2, cpu="2", priority="critical", node_selector={"name": "b"})
    assert house.stopped() == [live["b"]]
    house.see(live["b"], "stopped")
    assert (house.state(), house.state(2), _live(house)) == ("running", "scheduled", {"c": live["c"]})
    assert house.reason() == ("PARTIAL", "runs on 1 node; no room now on b (Insufficient cpu); done on 1")
    house.see("2.0.1", "running")
    house.restart(*(a_node(name, 4, labels={"name": name}) for name in "abc"))
    house.see("2.0.1", "succeeded", 0)
    now = _live(house)
    assert (sorted(now), now["c"]) == (["b", "c"], live["c"])
    assert len([run for run in house.runs.values() if run.job == 1]) == 4
    for run in now.values():
        house.see(run, "running")
        house.see(run, "succeeded", 0)
    assert house.state() == "succeeded"


@pytest.mark.parametrize(("state", "code"), [("succeeded", 0), ("failed", 3)])
def test_a_run_that_ends_again_and_again_takes_no_more_and_more_memory(state, code):
    house = _house("a", "b")
    _submit(house, restart="always")
    _run_all(house)
    other = _live(house)["b"]
    for _ in range(40):
        run = _live(house)["a"]
        house.see(run, "running")
        house.see(run, state, code)
        house.later(61_000)
    assert len(house.runs) == 42
    assert len(house.controller.world.runs[1]) <= ENDED_KEPT + 3
    before = _live(house)
    assert (before["b"], before["a"].split(".")[1]) == (other, run.split(".")[1])
    house.restart(a_node("a", 4), a_node("b", 4))
    assert _live(house) == before
    assert len(house.controller.world.runs[1]) <= ENDED_KEPT + 3


def test_retries_are_counted_though_other_ends_lie_between():
    house = _house("a", "b")
    _submit(house, retries=2)
    _run_all(house)
    for end in ["failed", "failed"] + ["stopped"] * 20:
        run = _live(house)["a"]
        house.see(run, "running")
        if end == "stopped":
            house.learn(NodeOverridden("a", drain=True, cordon=True))
        house.see(run, end, 3)
        house.learn(NodeOverridden("a", cordon=False))
        house.later(61_000)
    house.see(_live(house)["a"], "failed", 3)
    house.later(61_000)
    assert sorted(_live(house)) == ["b"]
    assert "failed on a" in house.reason()[1]
