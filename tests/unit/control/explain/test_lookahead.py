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
from unit.control.house import House, a_house
from unit.control.scenes import running

MINUTE = 60_000


def as_said(run, spec, so_far_ms):
    return spec.estimate_ms


def state_of(house: House) -> bytes:
    world, controller = house.controller.world, house.controller
    waiting = {name: sorted(line.gangs) for name, line in controller.lines.items()}
    seen = (world.jobs, world.runs, list(world.nodes.values()), list(world.marks.values()), house.used(), waiting,
            list(world.book.promises.values()), world.last_event, controller.beat_ms)  # fmt: skip
    return msgspec.json.encode(seen)


def test_those_who_wait_start_when_those_before_them_are_expected_to_end():
    house = a_house(2)
    house.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    house.submit(2, 3, cpu="2", estimate_ms=5 * MINUTE)
    running(house, "1.0.1")
    before = state_of(house)
    ahead = look_ahead(clone_controller(house.controller), house.now_ms, as_said)
    assert ahead.starts == {
        2: Started(house.now_ms + 10 * MINUTE, ("n1",)),
        3: Started(house.now_ms + 15 * MINUTE, ("n1",)),
    }
    assert ahead.end == "done"
    assert state_of(house) == before


@pytest.mark.parametrize(
    ("wait", "ends"),
    [(20 * MINUTE, 30 * MINUTE), (-MINUTE, 10 * MINUTE)],
    ids=["its turn comes later", "its turn is overdue"],
)
def test_a_run_in_the_line_of_a_backend_takes_its_time_from_its_own_turn_on(wait, ends):
    house = a_house(2)
    house.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    house.now_ms += 5 * MINUTE
    house.submit(2, cpu="2", estimate_ms=MINUTE)
    ahead = look_ahead(clone_controller(house.controller), house.now_ms, as_said, begins={"1.0.1": house.now_ms + wait})
    assert ahead.starts[2].at_ms == house.now_ms + ends


def test_of_a_run_that_has_begun_it_does_not_count_when_it_should_have():
    house = a_house(2)
    house.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    running(house, "1.0.1")
    house.submit(2, cpu="2", estimate_ms=MINUTE)
    ahead = look_ahead(
        clone_controller(house.controller), house.now_ms, as_said, begins={"1.0.1": house.now_ms + 20 * MINUTE}
    )
    assert ahead.starts[2].at_ms == house.now_ms + 10 * MINUTE


def test_a_run_that_has_outlived_its_estimate_is_expected_to_take_twice_as_long():
    house = a_house(2)
    house.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    running(house, "1.0.1")
    began = house.now_ms
    house.now_ms += 15 * MINUTE
    house.submit(2, cpu="2", estimate_ms=MINUTE)
    ahead = look_ahead(clone_controller(house.controller), house.now_ms, as_said)
    assert ahead.starts[2].at_ms == began + 20 * MINUTE


@pytest.mark.parametrize(
    ("total", "so_far", "corrected"),
    [(0, 5, 0), (10, 0, 10), (10, 9, 10), (10, 10, 20), (10, 35, 40)],
    ids=["nobody knows", "not begun", "nearly over", "just outlived", "outlived twice"],
)
def test_how_long_a_run_takes_in_all(total, so_far, corrected):
    assert corrected_ms(total, so_far) == corrected


def test_behind_a_run_of_which_nobody_knows_how_long_it_takes_no_start_is_in_sight():
    house = a_house(2)
    house.submit(1, cpu="2")
    house.submit(2, cpu="2", estimate_ms=MINUTE)
    ahead = look_ahead(clone_controller(house.controller), house.now_ms, as_said)
    assert (ahead.starts, ahead.end) == ({}, "stuck")


def test_jobs_still_to_come_take_part_when_they_come():
    house = a_house(2)
    house.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    at = house.now_ms + 3 * MINUTE
    coming = [(at, a_job(9, at_ms=at, queued_ms=at, cpu="2", estimate_ms=MINUTE))]
    ahead = look_ahead(clone_controller(house.controller), house.now_ms, as_said, arrivals=coming)
    assert ahead.starts[9].at_ms == house.now_ms + 10 * MINUTE


def test_who_must_leave_a_node_that_goes_is_named_and_starts_again_elsewhere_later():
    house = a_house(2, 2)
    house.submit(1, 2, cpu="2", estimate_ms=10 * MINUTE)
    running(house, "1.0.1", "2.0.1")
    moved = next(run.job for run in (house.runs["1.0.1"], house.runs["2.0.1"]) if run.node == "n1")
    ahead = look_ahead(
        clone_controller(house.controller), house.now_ms, as_said, facts=[NodeOverridden("n1", cordon=True, drain=True)]
    )
    assert ahead.gone == [Evicted(moved, house.now_ms)]
    assert ahead.starts[moved] == Started(house.now_ms + 10 * MINUTE, ("n2",))


def test_members_that_join_a_gang_which_runs_are_no_start_of_it():
    house = a_house(3)
    house.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    house.submit(2, cpu="1", count=3, min_count=1, estimate_ms=30 * MINUTE, gang=GangRules(elastic=True))
    house.submit(3, cpu="3", estimate_ms=MINUTE)
    running(house, "1.0.1", "2.0.1")
    ahead = look_ahead(clone_controller(house.controller), house.now_ms, as_said)
    assert list(ahead.starts) == [3]


@pytest.mark.parametrize(
    ("limits", "end"),
    [({"max_steps": 1}, "steps"), ({"horizon_ms": MINUTE}, "horizon"), ({"go_on": lambda: False}, "stopped")],
    ids=["steps", "a horizon", "someone who says stop"],
)
def test_it_goes_only_as_far_as_it_may(limits, end):
    house = a_house(2)
    house.submit(1, 2, 3, cpu="2", estimate_ms=10 * MINUTE)
    assert look_ahead(clone_controller(house.controller), house.now_ms, as_said, **limits).end == end


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
def test_a_twin_made_at_any_moment_of_a_trace_goes_on_with_the_same_plans(name):
    workload = open_workload("generate:lublin?jobs=120&procs=32&seed=3")
    noting = _Noting(workload, make_controller(CONFIGS[name]), workload.nodes)
    noting.run()
    controller = make_controller(CONFIGS[name])
    for number, (now_ms, facts, plan) in enumerate(noting.told):
        if number % 7 == 0:
            controller = clone_controller(controller)
        assert msgspec.json.encode(controller.step(now_ms, facts).plan) == plan, f"step {number}"
