"""Reconciliation of our runs with those that a backend reports."""

from __future__ import annotations

import pytest

from builders import NOW_MS, a_job, a_run
from hodei.control.lifecycle.runs import reconcile
from hodei.control.state import ClusterState
from hodei.model.effects import Forget, Start, Stop
from hodei.model.facts import RunObserved
from hodei.model.outcome import StopReason

RUNNING = RunObserved("1.0.1", "running", NOW_MS)
ENDED = RunObserved("1.0.1", "succeeded", NOW_MS, 0)
LOST = RunObserved("1.0.1", "lost", NOW_MS, reason_code="lost", reason="backend local does not know this run any more")


def _cluster(state, stop="", backend="local", spec_grace=10_000):
    cluster = ClusterState()
    cluster.add_job(a_job(1, state="scheduled", attempt=1, grace_ms=spec_grace), new=False)
    if state is not None:
        cluster.add_run(
            a_run(1, state=state, stop_reason=StopReason(stop) if stop else None, backend=backend), new=False
        )
    return cluster


@pytest.mark.parametrize(
    ("ours", "stop", "theirs", "facts", "orders"),
    [
        pytest.param("placed", "", None, [], ["Start"], id="unknown there: start is repeated"),
        pytest.param(
            "placed", "cancelled", None, [], ["Start", "Stop"], id="unknown there and to be stopped: start and stop"
        ),
        pytest.param("placed", "", RUNNING, [RUNNING], [], id="it has started meanwhile"),
        pytest.param("placed", "", ENDED, [ENDED], [], id="it has started and ended meanwhile"),
        pytest.param("running", "", RUNNING, [RUNNING], [], id="running on both sides"),
        pytest.param("running", "", ENDED, [ENDED], [], id="it has ended meanwhile"),
        pytest.param("running", "drained", RUNNING, [RUNNING], ["Stop"], id="the stop may not have arrived"),
        pytest.param("running", "drained", ENDED, [ENDED], [], id="the stop has arrived"),
        pytest.param("running", "", None, [LOST], [], id="running here, unknown there: lost"),
        pytest.param("succeeded", "", ENDED, [], ["Forget"], id="ended on both sides: forget"),
        pytest.param("succeeded", "", RUNNING, [], ["Stop"], id="ended here, running there: stop"),
        pytest.param("succeeded", "", None, [], [], id="ended here, unknown there"),
        pytest.param(None, "", ENDED, [], ["Forget"], id="unknown here, ended there: forget"),
        pytest.param(None, "", RUNNING, [], ["Stop"], id="unknown here, running there: stop"),
    ],
)
def test_reconcile_returns_the_missing_facts_and_orders(ours, stop, theirs, facts, orders):
    known = {} if theirs is None else {"1.0.1": theirs}
    found, ordered = reconcile(_cluster(ours, stop), "local", known, NOW_MS)
    assert found == facts
    assert [type(order).__name__ for order in ordered] == orders


def test_orders_have_all_that_a_backend_needs():
    cluster = _cluster("placed", "cancelled", spec_grace=777)
    _, (start, stop) = reconcile(cluster, "local", {}, NOW_MS)
    spec = cluster.jobs[1].spec
    assert start == Start(a_run(1, stop_reason=StopReason("cancelled")), spec, spec.tasks[0])
    assert stop == Stop("1.0.1", "local", 777, StopReason("cancelled"))


def test_an_unknown_run_is_stopped_without_grace_and_an_old_end_is_forgotten():
    known = {"7.0.3": RunObserved("7.0.3", "running", NOW_MS), "8.0.1": RunObserved("8.0.1", "failed", NOW_MS, 1)}
    facts, orders = reconcile(_cluster(None), "local", known, NOW_MS)
    assert facts == []
    assert orders == [Stop("7.0.3", "local", 0, StopReason("not_wanted")), Forget("8.0.1", "local")]


def test_runs_on_other_backends_are_ignored():
    assert reconcile(_cluster("running", backend="elsewhere"), "local", {}, NOW_MS) == ([], [])
