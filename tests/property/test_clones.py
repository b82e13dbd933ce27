"""A clone decides like the original, and nothing that it does affects the original."""

from __future__ import annotations

from hypothesis import given

from hodei.control.explain.lookahead import clone_controller, look_ahead
from property.examples import examples
from property.random_runs import RandomRun, random_runs, runs_without_restarts


def _continue_with_clone(random_run: RandomRun) -> None:
    random_run.controller = clone_controller(random_run.controller)


def _look_ahead(random_run: RandomRun) -> None:
    look_ahead(
        clone_controller(random_run.controller), random_run.now_ms, lambda run, spec, so_far_ms: 60_000, max_steps=20
    )


@examples(40)
@given(random_runs)
def test_a_run_with_a_new_clone_after_each_step_has_the_same_plans_byte_for_byte(example):
    plain = RandomRun(preemption=True).run(*example)
    cloned = RandomRun(between=_continue_with_clone, preemption=True).run(*example)
    for number, (one, other) in enumerate(zip(plain.encoded_steps, cloned.encoded_steps, strict=True)):
        assert one == other, f"step {number} differs"


@examples(25)
@given(runs_without_restarts)
def test_a_lookahead_after_each_step_changes_no_plan(example):
    plain = RandomRun(preemption=True).run(*example)
    with_lookahead = RandomRun(between=_look_ahead, preemption=True).run(*example)
    for number, (one, other) in enumerate(zip(plain.encoded_steps, with_lookahead.encoded_steps, strict=True)):
        assert one == other, f"step {number} differs"
