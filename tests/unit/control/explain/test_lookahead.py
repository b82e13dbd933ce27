"""The lookahead runs a clone ahead of time: expected starts, evictions, and its limits."""

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
from unit.control.scenarios import mark_running

MINUTE = 60_000


def by_estimate(run, spec, so_far_ms):
    return spec.estimate_ms


def state_of(harness: Harness) -> bytes:
    cluster, controller = harness.controller.cluster, harness.controller
    waiting = {name: sorted(queue.gangs) for name, queue in controller.queues.items()}
    seen = (cluster.jobs, cluster.runs, list(cluster.nodes.values()), list(cluster.overrides.values()), harness.used(), waiting,
            list(cluster.availability.start_reservations.values()), cluster.last_event, controller.beat_ms)  # fmt: skip
    return msgspec.json.encode(seen)


def test_pending_jobs_start_at_the_expected_ends_of_runs():
    harness = a_harness(2)
    harness.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    harness.submit(2, 3, cpu="2", estimate_ms=5 * MINUTE)
    mark_running(harness, "1.0.1")
    before = state_of(harness)
    ahead = look_ahead(clone_controller(harness.controller), harness.now_ms, by_estimate)
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
        clone_controller(harness.controller), harness.now_ms, by_estimate, begins={"1.0.1": harness.now_ms + wait}
    )
    assert ahead.starts[2].at_ms == harness.now_ms + ends


def test_the_queue_turn_of_a_run_that_has_started_is_ignored():
    harness = a_harness(2)
    harness.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    mark_running(harness, "1.0.1")
    harness.submit(2, cpu="2", estimate_ms=MINUTE)
    ahead = look_ahead(
        clone_controller(harness.controller),
        harness.now_ms,
        by_estimate,
        begins={"1.0.1": harness.now_ms + 20 * MINUTE},
    )
    assert ahead.starts[2].at_ms == harness.now_ms + 10 * MINUTE


def test_a_run_that_exceeds_its_estimate_is_expected_to_take_twice_as_long():
    harness = a_harness(2)
    harness.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    mark_running(harness, "1.0.1")
    started_ms = harness.now_ms
    harness.now_ms += 15 * MINUTE
    harness.submit(2, cpu="2", estimate_ms=MINUTE)
    ahead = look_ahead(clone_controller(harness.controller), harness.now_ms, by_estimate)
    assert ahead.starts[2].at_ms == started_ms + 20 * MINUTE


@pytest.mark.parametrize(
    ("total", "so_far", "corrected"),
    [(0, 5, 0), (10, 0, 10), (10, 9, 10), (10, 10, 20), (10, 35, 40)],
    ids=["unknown", "not started", "nearly over", "just exceeded", "exceeded twice"],
)
def test_an_exceeded_run_time_is_doubled(total, so_far, corrected):
    assert corrected_ms(total, so_far) == corrected


def test_behind_a_run_without_an_estimate_no_start_is_predicted():
    harness = a_harness(2)
    harness.submit(1, cpu="2")
    harness.submit(2, cpu="2", estimate_ms=MINUTE)
    ahead = look_ahead(clone_controller(harness.controller), harness.now_ms, by_estimate)
    assert (ahead.starts, ahead.end) == ({}, "stuck")


def test_future_arrivals_are_queued_at_their_time():
    harness = a_harness(2)
    harness.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    at = harness.now_ms + 3 * MINUTE
    coming = [(at, a_job(9, at_ms=at, queued_ms=at, cpu="2", estimate_ms=MINUTE))]
    ahead = look_ahead(clone_controller(harness.controller), harness.now_ms, by_estimate, arrivals=coming)
    assert ahead.starts[9].at_ms == harness.now_ms + 10 * MINUTE


def test_evicted_jobs_of_a_drained_node_are_named_and_start_elsewhere():
    harness = a_harness(2, 2)
    harness.submit(1, 2, cpu="2", estimate_ms=10 * MINUTE)
    mark_running(harness, "1.0.1", "2.0.1")
    moved = next(run.job for run in (harness.runs["1.0.1"], harness.runs["2.0.1"]) if run.node == "n1")
    ahead = look_ahead(
        clone_controller(harness.controller),
        harness.now_ms,
        by_estimate,
        facts=[NodeOverridden("n1", cordon=True, drain=True)],
    )
    assert ahead.evicted == [Evicted(moved, harness.now_ms)]
    assert ahead.starts[moved] == Started(harness.now_ms + 10 * MINUTE, ("n2",))


def test_members_that_join_a_running_gang_are_not_a_start():
    harness = a_harness(3)
    harness.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    harness.submit(2, cpu="1", count=3, min_count=1, estimate_ms=30 * MINUTE, gang=GangRules(elastic=True))
    harness.submit(3, cpu="3", estimate_ms=MINUTE)
    mark_running(harness, "1.0.1", "2.0.1")
    ahead = look_ahead(clone_controller(harness.controller), harness.now_ms, by_estimate)
    assert list(ahead.starts) == [3]


@pytest.mark.parametrize(
    ("limits", "end"),
    [({"max_steps": 1}, "steps"), ({"horizon_ms": MINUTE}, "horizon"), ({"go_on": lambda: False}, "stopped")],
    ids=["steps", "a horizon", "a stop by the caller"],
)
def test_the_lookahead_ends_at_its_limits(limits, end):
    harness = a_harness(2)
    harness.submit(1, 2, 3, cpu="2", estimate_ms=10 * MINUTE)
    assert look_ahead(clone_controller(harness.controller), harness.now_ms, by_estimate, **limits).end == end


class _Recording(Simulation):
    """Records the facts and the plan of every step."""

    def _step(self, now_ms: int, facts: list[Fact]):
        step = super()._step(now_ms, facts)
        self.recorded = [*getattr(self, "recorded", ()), (now_ms, list(facts), msgspec.json.encode(step.plan))]
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
    recording = _Recording(workload, make_controller(CONFIGS[name]), workload.nodes)
    recording.run()
    controller = make_controller(CONFIGS[name])
    for number, (now_ms, facts, plan) in enumerate(recording.recorded):
        if number % 7 == 0:
            controller = clone_controller(controller)
        assert msgspec.json.encode(controller.step(now_ms, facts).plan) == plan, f"step {number}"
