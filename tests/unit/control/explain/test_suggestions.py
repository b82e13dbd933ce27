"""Suggestions: the smallest single change that lets a pending job start now. Explanations for one node."""

from __future__ import annotations

import pytest

from builders import a_job_spec, a_node, a_task
from hodei.control.explain.suggestions import explain_on_node
from hodei.control.explain.why import plan, why
from hodei.engine.explain import format_exact, round_readable
from hodei.model.affinity import HostPort, NodeTerm, Requirement
from hodei.model.errors import NotFound
from hodei.model.facts import NodeOverridden
from hodei.model.job import Affinity, BackendChoice
from hodei.model.node import Taint
from unit.control.harness import Harness, a_harness

GI = 2**30


def _why(harness, job=1):
    return why(harness.controller, job, harness.now_ms)


def _suggestions(*nodes, **fields):
    harness = Harness(*nodes)
    harness.submit(1, **fields)
    return [(suggestion.change, suggestion.nodes) for suggestion in _why(harness).suggestions]


def test_a_resource_is_lowered_to_what_the_freest_node_has():
    nodes = [a_node(name, 8, f"{memory}Gi") for name, memory in (("a", 60), ("b", 60), ("c", 60), ("d", 30))]
    assert _suggestions(*nodes, memory="64Gi") == [("memory 64Gi to 60Gi", 3)]


def test_only_nodes_with_no_other_blocker_count():
    small, tainted = a_node("small", 2, "64Gi"), a_node("tainted", 3, "64Gi", taints=(Taint("x"),))
    assert _suggestions(small, tainted, cpu="4", memory="64Gi") == [("cpu 4 to 2", 1)]


def test_a_taint_is_tolerated():
    gpu = [a_node(f"g{i}", 8, taints=(Taint("dedicated", "gpu"),)) for i in range(5)]
    assert _suggestions(*gpu, a_node("full", 8, cordoned=True), cpu="4") == [("tolerate dedicated=gpu:NoSchedule", 5)]


def test_a_label_is_dropped_and_the_others_stay():
    nodes = [a_node("a", labels={"zone": "b", "disk": "ssd"}), a_node("b", labels={"zone": "b", "disk": "ssd"})]
    assert _suggestions(*nodes, node_selector={"zone": "a", "disk": "ssd"}) == [("drop label zone=a", 2)]


def test_required_affinity_is_dropped():
    wanted = Affinity(required=(NodeTerm(labels=(Requirement("disk", "In", ("nvme",)),)),))
    ((change, nodes),) = _suggestions(a_node(labels={"disk": "hdd"}), affinity=wanted)
    assert (change.startswith("drop required affinity [disk"), nodes) == (True, 1)


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({"arch": "arm64"}, "drop arch arm64"),
        ({"gpu": "1", "gpu_type": "A100"}, "drop gpu type A100"),
        ({"backend": BackendChoice("specific", ("cloud",))}, "drop backend cloud"),
        ({"gpu": "4"}, "gpu 4 to 2"),
        ({"request": {"example.com/fpga": 1}}, "drop example.com/fpga 1"),
    ],
    ids=["architecture", "gpu type", "backend", "fewer whole gpus", "a resource that no node has"],
)
def test_other_single_changes(fields, change):
    node = a_node("n1", 8, gpu="2", arch="x86_64", gpu_type="T4")
    assert _suggestions(node, **fields) == [(change, 1)]


def test_a_gang_gets_suggestions_of_fewer_or_smaller_members():
    assert _suggestions(a_node("a", 2), a_node("b", 3), cpu="2", count=4) == [
        ("cpu 2 to 1", 2),
        ("2 members instead of 4", 2),
    ]
    assert _suggestions(a_node("a", 2), a_node("b", 2), cpu="2", count=6) == [
        ("2 members instead of 6", 2),
        ("cpu 2 to 0.66", 2),
    ]


def test_the_smallest_change_comes_first():
    nodes = [
        a_node("a", 7, labels={"zone": "a"}),
        a_node("b", 8, labels={"zone": "b"}),
        a_node("c", 8, labels={"zone": "a"}, taints=(Taint("spot"),)),
        a_node("d", 1, "64Gi", labels={"zone": "a"}),
    ]
    assert _suggestions(*nodes, cpu="8", node_selector={"zone": "a"}) == [
        ("cpu 8 to 7", 1),
        ("tolerate spot:NoSchedule", 1),
        ("drop label zone=a", 1),
    ]


def test_with_several_tasks_the_changed_task_is_named():
    parts = [a_task("head", cpu="2"), a_task("worker", cpu="3")]
    harness = Harness(a_node("n1", 4))
    harness.submit(1, tasks=parts)
    suggestions = _why(harness).suggestions
    assert [suggestion.change for suggestion in suggestions] == ["task worker: cpu 3 to 2", "task head: cpu 2 to 1"]
    assert suggestions[0].patch.task == "worker"
    assert suggestions[0].patch.set == {"request": {"cpu": 2000, "memory": GI}}


def test_two_tasks_without_a_node_have_no_single_fix():
    harness = Harness(a_node("n1", 4))
    harness.submit(1, tasks=[a_task("head", cpu="9"), a_task("worker", cpu="9")])
    explanation = _why(harness)
    assert explanation.suggestions == ()
    assert explanation.hint == "no single change to the job lets it start now: change more, or add or change a node"


def test_a_port_conflict_is_solved_by_dropping_the_port():
    harness = Harness(a_node("n1", 8))
    harness.submit(1, ports=(HostPort(80),))
    harness.submit(2, ports=(HostPort(80),))
    assert [suggestion.change for suggestion in _why(harness, 2).suggestions] == ["drop host port 80/TCP"]


def test_a_patch_changes_what_it_names_and_nothing_else():
    harness = Harness(a_node("n1", 8, taints=(Taint("spot"),)))
    harness.submit(1, cpu="4")
    spec = harness.jobs[1].spec
    (suggestion,) = _why(harness).suggestions
    changed = suggestion.patch.applied_to(spec)
    assert [str(t.key) for t in changed.tasks[0].tolerations] == ["spot"]
    assert changed.tasks[0].request == spec.tasks[0].request
    assert (suggestion.kind, suggestion.example) == ("tolerate", "n1")


def test_a_plan_suggests_changes_that_account_for_earlier_jobs():
    harness = a_harness(4)
    first, second = plan(harness.controller, [a_job_spec("a", cpu="3"), a_job_spec("b", cpu="2")], harness.now_ms)
    assert first.suggestions == ()
    assert [suggestion.change for suggestion in second.suggestions] == ["cpu 2 to 1"]
    assert harness.used() == {"n1": {}}


def test_with_estimates_the_run_whose_end_frees_enough_is_named():
    harness = a_harness(4)
    harness.submit(1, cpu="1", estimate_ms=60_000, name="short")
    harness.submit(2, cpu="2", estimate_ms=300_000, name="long")
    harness.submit(3, cpu="1", estimate_ms=900_000)
    harness.submit(4, cpu="3")
    harness.advance(1000)
    assert _why(harness, 4).hint.endswith("wait: it fits when job 2 (long) ends, expected in 4m59s")


def test_without_estimates_the_hint_is_to_wait():
    harness = a_harness(4)
    harness.submit(1, cpu="3")
    harness.submit(2, cpu="2")
    explanation = _why(harness, 2)
    assert explanation.hint == "wait: it fits when the nodes are idle and in service"
    assert [suggestion.change for suggestion in explanation.suggestions] == ["cpu 2 to 1"]


def test_an_expected_end_in_the_past_is_overdue():
    harness = a_harness(4)
    harness.submit(1, cpu="4", estimate_ms=1000)
    harness.submit(2, cpu="2")
    harness.advance(5000)
    assert _why(harness, 2).hint.endswith("job 1 (job-1) ends, which is overdue")


def test_an_impossible_job_has_its_real_cause_and_not_busy_nodes():
    harness = Harness(a_node("n1", 4), a_node("n2", 4))
    harness.submit(1, 2, cpu="4", priority="critical")
    harness.submit(3, cpu="2", node_selector={"disk": "ssd"})
    explanation = _why(harness, 3)
    assert (explanation.status, explanation.code) == ("unsatisfiable", "SELECTOR_MISMATCH")
    assert (
        explanation.summary
        == "no node could take it even when idle; 0/2 nodes are available: 2 label disk=ssd required"
    )
    assert {blocker.code for blocker in explanation.blockers} == {"SELECTOR_MISMATCH", "INSUFFICIENT_CPU"}


def _explain_on(harness, node, job=1):
    return explain_on_node(harness.controller, harness.jobs[job].spec, _why(harness, job), node, harness.now_ms)


def test_the_explanation_of_one_node_lists_all_blockers():
    harness = Harness(a_node("a", 1, taints=(Taint("x"),)), a_node("b", 2, cordoned=True))
    harness.submit(1, cpu="4")
    explanation = _explain_on(harness, "a")
    assert [(blocker.code, blocker.nodes) for blocker in explanation.blockers] == [
        ("UNTOLERATED_TAINT", ("a",)),
        ("INSUFFICIENT_CPU", ("a",)),
    ]
    assert explanation.summary == "a cannot take it: untolerated taint x:NoSchedule; Insufficient cpu"
    assert explanation.nearest.text == "lacks 3 cpu (1 of 1 free, 4 requested)"
    assert (explanation.nodes, explanation.feasible, explanation.suggestions) == (1, 0, ())


def test_a_node_that_could_take_the_job_reports_its_score():
    harness = Harness(a_node("a", 8), a_node("b", 2))
    harness.submit(1, tasks=[a_task("head", cpu="1"), a_task("worker", cpu="3", count=9)])
    explanation = _explain_on(harness, "a")
    assert (explanation.status, explanation.code, explanation.feasible) == ("unsatisfiable", "FITS_HERE", 1)
    assert explanation.summary.startswith("a could take at least one member of it with a score of ")
    assert [(place.task, place.member) for place in explanation.placements] == [("head", 0), ("worker", 1)]
    assert _explain_on(harness, "b").summary == "b cannot take it: Insufficient cpu; it could take head"


def test_the_explanation_of_a_node_for_a_placed_job_is_about_another_one_like_it():
    harness = Harness(a_node("a", 4), a_node("b", 1))
    harness.submit(1, cpu="2")
    assert _explain_on(harness, "a").summary == "placed on a, about to start; a could take another one like it now"
    assert _explain_on(harness, "b").summary.endswith("b would refuse it now: Insufficient cpu")
    assert _explain_on(harness, "b").placements == ()


def test_an_unknown_node_is_not_found():
    harness = a_harness(4)
    harness.submit(1, cpu="9")
    with pytest.raises(NotFound, match="did you mean 'n1'"):
        _explain_on(harness, "n11")


@pytest.mark.parametrize(
    ("resource", "amount", "requested", "rounded", "text"),
    [
        ("memory", 60 * GI + 12345, 64 * GI, 60 * GI, "60Gi"),
        ("memory", 16 * GI - 1, 64 * GI, 15 * GI + 3 * GI // 4, "15.75Gi"),
        ("memory", 500, 64 * GI, 496, "496"),
        ("cpu", 3777, 8000, 3700, "3.7"),
        ("cpu", 257, 8000, 250, "0.25"),
        ("cpu", 7, 8000, 7, "0.007"),
        ("gpu", 2500, 4000, 2000, "2"),
        ("gpu", 300, 500, 300, "0.3"),
        ("gpu", 300, 1000, 0, "0"),
        ("example.com/fpga", 3, 5, 3, "3"),
    ],
)
def test_amounts_are_rounded_down_to_readable_values(resource, amount, requested, rounded, text):
    assert round_readable(resource, amount, requested) == rounded
    assert format_exact(resource, rounded) == text


def test_a_cordoned_cluster_has_no_suggestion_but_to_wait():
    harness = a_harness(4)
    harness.step(NodeOverridden("n1", cordon=True))
    harness.submit(1, cpu="2")
    explanation = _why(harness)
    assert explanation.suggestions == ()
    assert explanation.hint == (
        "no single change to the job lets it start now; wait: it fits when the nodes are idle and in service"
    )
