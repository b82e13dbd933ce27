"""Tolerations, node overrides, members, and the state machines of jobs and runs."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

from builders import a_job_spec, a_node, a_task
from hodei.model.errors import did_you_mean
from hodei.model.ids import job_of, run_id
from hodei.model.job import (
    JOB_ENDED,
    JOB_TRANSITIONS,
    PRIORITY_CLASSES,
    RUN_ENDED,
    RUN_TRANSITIONS,
    InvalidTransition,
    JobState,
    RunState,
    Toleration,
    advance_job,
    advance_run,
)
from hodei.model.node import NodeOverrides, Taint

TAINT = Taint("dedicated", "team", "NoSchedule")


@pytest.mark.parametrize(
    ("toleration", "tolerates"),
    [
        pytest.param(Toleration("dedicated", "Equal", "team", "NoSchedule"), True, id="equal"),
        pytest.param(Toleration("dedicated", "Equal", "team"), True, id="no effect means every effect"),
        pytest.param(Toleration("dedicated", "Equal", "other"), False, id="another value"),
        pytest.param(Toleration("dedicated", "Equal"), False, id="the empty value is a value"),
        pytest.param(Toleration("dedicated", "Equal", "team", "NoExecute"), False, id="another effect"),
        pytest.param(Toleration("gpu", "Equal", "team"), False, id="another key"),
        pytest.param(Toleration("dedicated", "Exists"), True, id="any value"),
        pytest.param(Toleration("dedicated", "Exists", "", "NoExecute"), False, id="any value of another effect"),
        pytest.param(Toleration("", "Exists"), True, id="no key with Exists tolerates everything"),
        pytest.param(Toleration("", "Exists", "", "NoExecute"), False, id="everything of another effect"),
        pytest.param(Toleration("", "Equal", "team"), False, id="no key with Equal tolerates nothing"),
    ],
)
def test_tolerations_follow_kubernetes(toleration, tolerates):
    assert toleration.tolerates(TAINT) is tolerates


def test_overrides_apply_on_top_of_what_the_backend_reports():
    node = a_node(labels={"disk": "hdd", "old": "yes"}, taints=(Taint("spot"), TAINT))
    overrides = NodeOverrides(
        "n1", True, labels={"disk": "ssd"}, removed_labels=("old",), taints=(Taint("new"),), removed_taints=(TAINT,)
    )
    overridden = overrides.apply_to(node)
    assert overridden.cordoned
    assert overridden.labels == {"disk": "ssd"}
    assert overridden.taints == (Taint("spot"), Taint("new"))


def test_an_overridden_taint_replaces_one_with_the_same_key_and_effect():
    overridden = NodeOverrides("n1", taints=(Taint("dedicated", "others"),)).apply_to(a_node(taints=(TAINT,)))
    assert overridden.taints == (Taint("dedicated", "others"),)


def test_empty_overrides_change_nothing():
    node = a_node()
    assert NodeOverrides("n1").apply_to(node) is node


def test_members_map_to_their_task():
    spec = a_job_spec(tasks=[a_task("head"), a_task("worker", count=3)])
    assert spec.size == 4
    assert [spec.task_of(member).name for member in range(4)] == ["head", "worker", "worker", "worker"]
    with pytest.raises(IndexError):
        spec.task_of(4)


def test_a_run_id_contains_its_job():
    assert run_id(12, 3, 2) == "12.3.2"
    assert job_of("12.3.2") == 12


def test_critical_comes_before_high_before_medium_before_low():
    order = sorted(PRIORITY_CLASSES, key=lambda name: -PRIORITY_CLASSES[name])
    assert order == ["critical", "high", "medium", "low", "batch", "scavenger"]


@pytest.mark.parametrize("state", get_args(JobState))
def test_a_job_makes_only_the_transitions_of_its_table(state):
    for to in get_args(JobState):
        if to in JOB_TRANSITIONS[state]:
            assert advance_job(state, to) == to
        else:
            with pytest.raises(InvalidTransition, match=f"a {state} job cannot become {to}"):
                advance_job(state, to)


@pytest.mark.parametrize("state", get_args(RunState))
def test_a_run_makes_only_the_transitions_of_its_table(state):
    for to in get_args(RunState):
        if to in RUN_TRANSITIONS[state]:
            assert advance_run(state, to) == to
        else:
            with pytest.raises(InvalidTransition):
                advance_run(state, to)


def test_an_ended_run_is_final_and_an_ended_job_can_only_be_requeued():
    assert {"succeeded", "failed", "stopped", "lost"} == RUN_ENDED
    assert {"succeeded", "failed", "cancelled"} == JOB_ENDED
    assert all(JOB_TRANSITIONS[state] == {"pending"} for state in JOB_ENDED)


@pytest.mark.parametrize(
    ("word", "suggestion"), [("memroy", " (did you mean 'memory'?)"), ("zzz", ""), ("x" * 10_000_000, "")],
    ids=["a typo", "nothing similar", "ten million letters"],
)  # fmt: skip
def test_a_similar_word_is_suggested(word, suggestion):
    assert did_you_mean(word, ["memory", "cpu"]) == suggestion


def test_job_specs_are_built_by_keyword():
    # The struct is not `kw_only`: that would make snapshots of controllers slower.
    root = Path(__file__).parents[3]
    for file in (*root.glob("src/**/*.py"), *root.glob("benchmarks/**/*.py"), *root.glob("tools/**/*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "JobSpec":
                assert not call.args, f"{file}:{call.lineno}"
