"""A clone decides like the original, and nothing that it does affects the original."""

from __future__ import annotations

from hypothesis import given

from hodei.control.explain.lookahead import clone_controller, look_ahead
from property.examples import examples
from property.random_runs import Story, calm_stories, stories


def _go_on_as_a_twin(story: Story) -> None:
    story.controller = clone_controller(story.controller)


def _look_ahead(story: Story) -> None:
    look_ahead(clone_controller(story.controller), story.now_ms, lambda run, spec, so_far_ms: 60_000, max_steps=20)


@examples(40)
@given(stories)
def test_a_run_with_a_new_clone_after_each_step_has_the_same_plans_byte_for_byte(story):
    plain = Story(warlike=True).tell(*story)
    led_by_twins = Story(between=_go_on_as_a_twin, warlike=True).tell(*story)
    for number, (one, other) in enumerate(zip(plain.written, led_by_twins.written, strict=True)):
        assert one == other, f"step {number} differs"


@examples(25)
@given(calm_stories)
def test_looking_ahead_after_each_step_changes_no_plan(story):
    plain = Story(warlike=True).tell(*story)
    watched = Story(between=_look_ahead, warlike=True).tell(*story)
    for number, (one, other) in enumerate(zip(plain.written, watched.written, strict=True)):
        assert one == other, f"step {number} differs"
