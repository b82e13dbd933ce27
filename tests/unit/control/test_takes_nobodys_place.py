"""Jobs that are important and still take nobody's place."""

from __future__ import annotations

import pytest

from unit.control.house import a_house


@pytest.mark.parametrize(("preempts", "stopped"), [(True, ["1.0.1"]), (False, [])], ids=["it may", "it may not"])
def test_a_job_takes_the_place_of_others_only_if_it_may(preempts, stopped):
    house = a_house(1)
    house.submit(1, cpu="1", priority="low")
    house.see("1.0.1", "running")
    house.now_ms += 60_000
    house.submit(9, cpu="1", priority="critical", preempts=preempts)
    assert house.stopped() == stopped


def test_one_that_may_is_not_kept_waiting_by_one_alike_that_may_not():
    house = a_house(1)
    house.submit(1, cpu="1", priority="low")
    house.see("1.0.1", "running")
    house.now_ms += 60_000
    house.submit(8, cpu="1", priority="critical", preempts=False)
    house.submit(9, cpu="1", priority="critical")
    assert house.stopped() == ["1.0.1"]
