"""A controller that goes on from its written state decides as the one that went on without a break."""

from __future__ import annotations

from hypothesis import Phase, given, settings

from hodei.control.snapshot import dump, load
from property.random_runs import Story, stories


def _go_on_from_bytes(story: Story) -> None:
    story.controller = load(dump(story.controller))


# Not shortened: that would take minutes, and a story is readable as it is.
@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(stories)
def test_a_run_from_a_snapshot_after_each_step_takes_the_same_steps(story):
    plain = Story(warlike=True).tell(*story)
    again = Story(between=_go_on_from_bytes, warlike=True).tell(*story)
    for number, (one, other) in enumerate(zip(plain.taken, again.taken, strict=True)):
        assert one == other, f"step {number} differs"
