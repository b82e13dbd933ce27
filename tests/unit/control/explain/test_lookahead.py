"""Running ahead of time: who starts when if all goes as expected, and what the limits are."""

from __future__ import annotations

import msgspec
import pytest

from builders import a_job
from hodei.control.explain.lookahead import Evicted, Started, clone_controller, corrected_ms, look_ahead
from hodei.model.config import PreemptionConfig, ProfileConfig, SchedulingConfig
from hodei.model.facts import Fact, NodeOverridden
from hodei.model.job import GangRules
from hodei.sim.driver import Simulation
from hodei.sim.policies import policy
from hodei.sim.traces import open_workload
from hodei.wiring import make_controller
from unit.control.harness import Harness, a_harness
from unit.control.scenarios import running

MINUTE = 60_000


def as_said(run, spec, so_far_ms):
    return spec.estimate_ms


def state_of(harness: Harness) -> bytes:
    cluster, controller = harness.controller.cluster, harness.controller
    waiting = {name: sorted(line.gangs) for name, line in controller.queues.items()}
    seen = (cluster.jobs, cluster.runs, list(cluster.nodes.values()), list(cluster.overrides.values()), harness.used(), waiting,
            list(cluster.availability.start_reservations.values()), cluster.last_event, controller.beat_ms)  # fmt: skip
    return msgspec.json.encode(seen)


def test_pending_jobs_start_at_the_expected_ends_of_runs():
    harness = a_harness(2)
    harness.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    harness.submit(2, 3, cpu="2", estimate_ms=5 * MINUTE)
    running(harness, "1.0.1")
    before = state_of(harness)
    ahead = look_ahead(clone_controller(harness.controller), harness.now_ms, as_said)
    assert ahead.starts == {
        2: Started(harness.now_ms + 10 * MINUTE, ("n1",)),
        3: Started(harness.now_ms + 15 * MINUTE, ("n1",)),
    }
    assert ahead.end == "done"
    assert state_of(harness) == before


@pytest.mark.parametrize(
    ("wait", "ends"),
    [(20 * MINUTE, 30 * MINUTE), (-MINUTE, 10 * MINUTE)],
    ids=["its turn comes later", "its turn is overdue"],
)
def test_a_run_in_the_queue_of_a_backend_starts_at_its_turn(wait, ends):
    harness = a_harness(2)
    harness.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    harness.now_ms += 5 * MINUTE
    harness.submit(2, cpu="2", estimate_ms=MINUTE)
    ahead = look_ahead(
        clone_controller(harness.controller), harness.now_ms, as_said, begins={"1.0.1": harness.now_ms + wait}
    )
    assert ahead.starts[2].at_ms == harness.now_ms + ends


def test_of_a_run_that_has_begun_it_does_not_count_when_it_should_have():
    harness = a_harness(2)
    harness.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    running(harness, "1.0.1")
    harness.submit(2, cpu="2", estimate_ms=MINUTE)
    ahead = look_ahead(
        clone_controller(harness.controller), harness.now_ms, as_said, begins={"1.0.1": harness.now_ms + 20 * MINUTE}
    )
    assert ahead.starts[2].at_ms == harness.now_ms + 10 * MINUTE


def test_a_run_that_has_outlived_its_estimate_is_expected_to_take_twice_as_long():
    harness = a_harness(2)
    harness.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    running(harness, "1.0.1")
    began = harness.now_ms
    harness.now_ms += 15 * MINUTE
    harness.submit(2, cpu="2", estimate_ms=MINUTE)
    ahead = look_ahead(clone_controller(harness.controller), harness.now_ms, as_said)
    assert ahead.starts[2].at_ms == began + 20 * MINUTE


@pytest.mark.parametrize(
    ("total", "so_far", "corrected"),
    [(0, 5, 0), (10, 0, 10), (10, 9, 10), (10, 10, 20), (10, 35, 40)],
    ids=["nobody knows", "not begun", "nearly over", "just outlived", "outlived twice"],
)
def test_how_long_a_run_takes_in_all(total, so_far, corrected):
    assert corrected_ms(total, so_far) == corrected


def test_behind_a_run_without_an_estimate_no_start_is_predicted():
    harness = a_harness(2)
    harness.submit(1, cpu="2")
    harness.submit(2, cpu="2", estimate_ms=MINUTE)
    ahead = look_ahead(clone_controller(harness.controller), harness.now_ms, as_said)
    assert (ahead.starts, ahead.end) == ({}, "stuck")


def test_jobs_still_to_come_take_part_when_they_come():
    harness = a_harness(2)
    harness.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    at = harness.now_ms + 3 * MINUTE
    coming = [(at, a_job(9, at_ms=at, queued_ms=at, cpu="2", estimate_ms=MINUTE))]
    ahead = look_ahead(clone_controller(harness.controller), harness.now_ms, as_said, arrivals=coming)
    assert ahead.starts[9].at_ms == harness.now_ms + 10 * MINUTE


def test_evicted_jobs_of_a_drained_node_are_named_and_start_elsewhere():
    harness = a_harness(2, 2)
    harness.submit(1, 2, cpu="2", estimate_ms=10 * MINUTE)
    running(harness, "1.0.1", "2.0.1")
    moved = next(run.job for run in (harness.runs["1.0.1"], harness.runs["2.0.1"]) if run.node == "n1")
    ahead = look_ahead(
        clone_controller(harness.controller),
        harness.now_ms,
        as_said,
        facts=[NodeOverridden("n1", cordon=True, drain=True)],
    )
    assert ahead.evicted == [Evicted(moved, harness.now_ms)]
    assert ahead.starts[moved] == Started(harness.now_ms + 10 * MINUTE, ("n2",))


def test_members_that_join_a_gang_which_runs_are_no_start_of_it():
    harness = a_harness(3)
    harness.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    harness.submit(2, cpu="1", count=3, min_count=1, estimate_ms=30 * MINUTE, gang=GangRules(elastic=True))
    harness.submit(3, cpu="3", estimate_ms=MINUTE)
    running(harness, "1.0.1", "2.0.1")
    ahead = look_ahead(clone_controller(harness.controller), harness.now_ms, as_said)
    assert list(ahead.starts) == [3]


@pytest.mark.parametrize(
    ("limits", "end"),
    [({"max_steps": 1}, "steps"), ({"horizon_ms": MINUTE}, "horizon"), ({"go_on": lambda: False}, "stopped")],
    ids=["steps", "a horizon", "someone who says stop"],
)
def test_the_lookahead_ends_at_its_limits(limits, end):
    harness = a_harness(2)
    harness.submit(1, 2, 3, cpu="2", estimate_ms=10 * MINUTE)
    assert look_ahead(clone_controller(harness.controller), harness.now_ms, as_said, **limits).end == end


class _Noting(Simulation):
    """Keeps what the controller was told and what it decided."""

    def _step(self, now_ms: int, facts: list[Fact]):
        step = super()._step(now_ms, facts)
        self.told = [*getattr(self, "told", ()), (now_ms, list(facts), msgspec.json.encode(step.plan))]
        return step


CONFIGS = {
    **{name: policy(name) for name in ("easy", "conservative", "wfp3", "fgd")},
    "fair": SchedulingConfig(
        profiles={"default": ProfileConfig(queue="fair", tenant_key="user")}, preemption=PreemptionConfig(enabled=False)
    ),
}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_clone_made_at_any_moment_of_a_trace_makes_the_same_plans(name):
    workload = open_workload("generate:lublin?jobs=120&procs=32&seed=3")
    noting = _Noting(workload, make_controller(CONFIGS[name]), workload.nodes)
    noting.run()
    controller = make_controller(CONFIGS[name])
    for number, (now_ms, facts, plan) in enumerate(noting.told):
        if number % 7 == 0:
            controller = clone_controller(controller)
        assert msgspec.json.encode(controller.step(now_ms, facts).plan) == plan, f"step {number}"
