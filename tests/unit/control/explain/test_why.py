"""`why` and `plan`: why a job waits, where and why it was placed, what would happen to a new one."""

from __future__ import annotations

from builders import a_job_spec, a_node, a_task
from hodei.control.explain.why import explain_placement, plan, why
from hodei.engine.profile import make_profile
from hodei.model.facts import JobCancelled, JobHeld, NodeOverridden
from hodei.model.job import Reason
from hodei.model.node import Taint
from hodei.plugins.fit import Fit
from hodei.plugins.queues import Fifo
from unit.control.harness import Harness, a_harness


def _why(harness, job=1):
    return why(harness.controller, job, harness.now_ms)


def test_the_most_frequent_reason_comes_first_and_every_reason_is_counted():
    harness = Harness(
        a_node("a", 1), a_node("b", 1), a_node("c", 8, taints=(Taint("gpu"),)), a_node("d", 1, cordoned=True)
    )
    harness.submit(1, cpu="4")
    explanation = _why(harness)
    assert (explanation.status, explanation.code) == ("unsatisfiable", "INSUFFICIENT_CPU")
    assert [(b.code, b.count, b.nodes) for b in explanation.blockers] == [
        ("INSUFFICIENT_CPU", 3, ("a", "b", "d")),
        ("NODE_CORDONED", 1, ("d",)),
        ("UNTOLERATED_TAINT", 1, ("c",)),
    ]
    assert explanation.summary == (
        "no node could take it even when idle; 0/4 nodes are available: 3 Insufficient cpu,"
        " 1 untolerated taint gpu:NoSchedule"
    )
    assert (explanation.nodes, explanation.feasible, explanation.hint != "") == (4, 0, True)


def test_a_job_in_a_full_cluster_waits_and_the_missing_amount_is_named():
    harness = a_harness(4)
    harness.submit(1, cpu="3")
    harness.now_ms += 10
    harness.submit(2, cpu="2")
    explanation = _why(harness, 2)
    assert (explanation.status, explanation.code) == ("waiting", "INSUFFICIENT_CPU")
    assert explanation.summary == "0/1 nodes are available: 1 Insufficient cpu"
    assert explanation.nearest.node == "n1"
    assert explanation.nearest.text == "lacks 1 cpu (1 of 4 free, 2 requested)"
    assert explanation.next_trigger == "when a run ends or a node joins or a node changes"
    assert (
        explanation.attempts,
        explanation.last_attempt_ms,
        explanation.queue.position,
        explanation.queue.pending,
    ) == (1, harness.now_ms, 1, 1)


def test_the_nearest_miss_is_the_node_with_the_fewest_and_smallest_blockers():
    harness = Harness(
        a_node("far", 1),
        a_node("near", 3),
        a_node("taken", 3, cordoned=True),
        a_node("tainted", 9, taints=(Taint("x"),)),
    )
    harness.submit(1, cpu="4")
    assert _why(harness).nearest.node == "tainted"
    assert _why(harness).nearest.text == "untolerated taint x:NoSchedule"
    harness.step(NodeOverridden("tainted", cordon=True))
    assert _why(harness).nearest.node == "near"
    assert _why(harness).nearest.text == "lacks 1 cpu (3 of 3 free, 4 requested)"


def test_the_position_in_the_queue_is_reported():
    harness = a_harness(1)
    harness.submit(1, priority="critical")
    harness.submit(2, cpu="1", priority="low")
    harness.submit(3, cpu="500m", priority="high", name="other")
    harness.submit(4, cpu="1", priority="low")
    assert [_why(harness, job).queue.position for job in (3, 2, 4)] == [1, 2, 3]
    assert _why(harness, 2).queue.pending == 3


def test_a_cluster_without_nodes_is_the_reason():
    harness = Harness()
    harness.submit(1)
    explanation = _why(harness)
    assert (explanation.status, explanation.code, explanation.summary) == (
        "waiting",
        "NO_NODES",
        "no nodes have joined yet",
    )


def test_the_reason_of_a_gang_that_is_too_large_names_how_many_fit():
    harness = a_harness(2, 2)
    harness.submit(1, cpu="2")
    harness.submit(2, cpu="1", count=3)
    explanation = _why(harness, 2)
    assert explanation.status == "waiting"
    assert explanation.summary.startswith("2 of 3 members fit now, all must start together; for the next one 0/2 nodes")
    assert explanation.feasible == 1
    assert {blocker.code for blocker in explanation.blockers} == {"INSUFFICIENT_CPU"}


def test_each_task_without_a_node_is_reported():
    harness = Harness(a_node("a", 4))
    harness.submit(1, tasks=[a_task("head", cpu="9"), a_task("fine", cpu="1"), a_task("gpu", cpu="1", gpu="1")])
    assert {(b.task, b.code) for b in _why(harness).blockers} == {
        ("head", "INSUFFICIENT_CPU"),
        ("gpu", "INSUFFICIENT_GPU"),
    }


def test_backoff_is_reported_with_its_end_and_cause():
    harness = a_harness(4)
    harness.submit(1, retries=1)
    harness.observe("1.0.1", "failed", 7)
    explanation = _why(harness)
    assert (explanation.code, explanation.next_attempt_ms) == ("BACKOFF", harness.now_ms + 1000)
    assert explanation.summary == "waits 1s before the next try: member 0 exited with 7; retry 1"


def test_the_hint_of_a_held_job_is_how_to_release_it():
    harness = Harness()
    harness.submit(1)
    harness.step(JobHeld(1))
    explanation = _why(harness)
    assert (explanation.status, explanation.code, explanation.hint) == ("held", "HELD", "hodei release 1")


def test_a_job_that_fits_has_its_queue_position_as_reason():
    harness = a_harness(8, max_tries=1)
    harness.submit(1, 2, 3)
    explanation = _why(harness, 3)
    assert (explanation.status, explanation.code) == ("waiting", "QUEUED")
    assert explanation.summary == "there is capacity for it; it is number 2 of 2 in the queue"


def test_a_placed_job_is_explained_with_its_node_and_the_runners_up():
    harness = Harness(a_node("a", 4), a_node("b", 8), a_node("c", 2))
    harness.submit(1, cpu="1")
    explanation = _why(harness)
    assert (explanation.status, explanation.code, explanation.summary) == (
        "placed",
        "PLACED",
        "placed on b, about to start",
    )
    (place,) = explanation.placements
    assert (place.node, place.run, place.state) == ("b", "1.0.1", "placed")
    assert [candidate.node for candidate in place.decision.runners_up] == ["a", "c"]
    harness.observe("1.0.1", "running")
    assert _why(harness).summary == "running on b"
    harness.step(JobCancelled(1))
    assert (_why(harness).code, _why(harness).summary) == ("CANCELLING", "running on b; being cancelled")


def test_an_ended_job_is_explained_from_the_store_alone():
    harness = a_harness(4)
    harness.submit(1)
    harness.observe("1.0.1", "failed", 3)
    assert _why(harness) is None
    explanation = explain_placement(harness.jobs[1], list(harness.runs.values()), harness.now_ms)
    assert (explanation.status, explanation.code, explanation.summary) == (
        "ended",
        "EXIT_CODE",
        "failed on n1: member 0 exited with 3",
    )


def test_an_unknown_job_has_no_explanation():
    assert _why(Harness(), 99) is None


def test_a_plan_places_jobs_after_each_other_and_changes_nothing():
    harness = a_harness(2, 1)
    before = harness.used()
    explanations = plan(
        harness.controller,
        [a_job_spec("a", cpu="2"), a_job_spec("b", cpu="1"), a_job_spec("c", cpu="1")],
        harness.now_ms,
    )
    assert [(e.code, [p.node for p in e.placements]) for e in explanations] == [
        ("WOULD_START", ["n1"]),
        ("WOULD_START", ["n2"]),
        ("INSUFFICIENT_CPU", []),
    ]
    assert explanations[0].summary == "would start now on n1"
    assert harness.used() == before
    assert harness.step().empty


def test_a_refusal_of_the_whole_gang_has_the_text_of_the_plugin():
    class Curfew:
        name = "curfew"
        requeue_on = ("time",)

        def key(self, member):
            return None

        def pre_filter(self, gang, view):
            return Reason("curfew", "CURFEW", "nothing starts at night")

    harness = Harness(a_node(), profiles={"default": make_profile("default", Fifo(), [Fit(), Curfew()], {})})
    harness.submit(1)
    explanation = _why(harness)
    assert (explanation.code, explanation.summary) == ("CURFEW", "nothing starts at night")
    assert [(b.code, b.plugin) for b in explanation.blockers] == [("CURFEW", "curfew")]
    assert harness.reason() == ("CURFEW", "nothing starts at night")
