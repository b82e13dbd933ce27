"""A controller that continues from a snapshot decides like one that was not interrupted."""

from __future__ import annotations

from hypothesis import Phase, given, settings

from hodei.control.snapshot import dump, load
from property.random_runs import RandomRun, random_runs


def _continue_from_snapshot(random_run: RandomRun) -> None:
    random_run.controller = load(dump(random_run.controller))


# Not shrunk: that would take minutes, and an example is readable as it is.
@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(random_runs)
def test_a_run_from_a_snapshot_after_each_step_takes_the_same_steps(example):
    plain = RandomRun(preemption=True).run(*example)
    restored = RandomRun(between=_continue_from_snapshot, preemption=True).run(*example)
    for number, (one, other) in enumerate(zip(plain.steps, restored.steps, strict=True)):
        assert one == other, f"step {number} differs"
