"""Jobs that are important and still take nobody's place."""

from __future__ import annotations

import pytest

from unit.control.harness import a_harness


@pytest.mark.parametrize(("preempts", "stopped"), [(True, ["1.0.1"]), (False, [])], ids=["it may", "it may not"])
def test_a_job_takes_the_place_of_others_only_if_it_may(preempts, stopped):
    harness = a_harness(1)
    harness.submit(1, cpu="1", priority="low")
    harness.see("1.0.1", "running")
    harness.now_ms += 60_000
    harness.submit(9, cpu="1", priority="critical", preempts=preempts)
    assert harness.stopped() == stopped


def test_one_that_may_is_not_kept_waiting_by_one_alike_that_may_not():
    harness = a_harness(1)
    harness.submit(1, cpu="1", priority="low")
    harness.see("1.0.1", "running")
    harness.now_ms += 60_000
    harness.submit(8, cpu="1", priority="critical", preempts=False)
    harness.submit(9, cpu="1", priority="critical")
    assert harness.stopped() == ["1.0.1"]
