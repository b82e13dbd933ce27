"""Our books against a backend's: who is right, and what is to be done so that both agree."""

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
        pytest.param("placed", "", None, [], ["Start"], id="never seen: it is ordered again"),
        pytest.param(
            "placed", "cancelled", None, [], ["Start", "Stop"], id="never seen and unwanted: ordered, stopped"
        ),
        pytest.param("placed", "", RUNNING, [RUNNING], [], id="it has begun meanwhile"),
        pytest.param("placed", "", ENDED, [ENDED], [], id="it has begun and ended meanwhile"),
        pytest.param("running", "", RUNNING, [RUNNING], [], id="it goes on"),
        pytest.param("running", "", ENDED, [ENDED], [], id="it has ended meanwhile"),
        pytest.param("running", "drained", RUNNING, [RUNNING], ["Stop"], id="the stop may not have arrived"),
        pytest.param("running", "drained", ENDED, [ENDED], [], id="the stop has arrived"),
        pytest.param("running", "", None, [LOST], [], id="forgotten by a backend with a memory: lost"),
        pytest.param("succeeded", "", ENDED, [], ["Forget"], id="we know already: they may forget"),
        pytest.param("succeeded", "", RUNNING, [], ["Stop"], id="over for us, alive there: not wanted"),
        pytest.param("succeeded", "", None, [], [], id="over for both"),
        pytest.param(None, "", ENDED, [], ["Forget"], id="of an attempt that is over, ended"),
        pytest.param(None, "", RUNNING, [], ["Stop"], id="of an attempt that is over, alive"),
    ],
)
def test_both_sides_agree_again(ours, stop, theirs, facts, orders):
    known = {} if theirs is None else {"1.0.1": theirs}
    found, given = reconcile(_cluster(ours, stop), "local", known, NOW_MS)
    assert found == facts
    assert [type(order).__name__ for order in given] == orders


def test_orders_carry_all_that_a_backend_needs():
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


def test_runs_on_other_backends_are_none_of_its_business():
    assert reconcile(_cluster("running", backend="elsewhere"), "local", {}, NOW_MS) == ([], [])
