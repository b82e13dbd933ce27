"""Backoff: pauses grow, are bounded, and are repeatable. Timers fire in order."""

from __future__ import annotations

import pytest

from hodei.control.lifecycle.retry import Backoff
from hodei.control.state import Timers


def test_pauses_double_up_to_the_maximum():
    backoff = Backoff(1000, 2, 10_000, jitter_milli=0)
    assert [backoff.pause_ms(1, tries) for tries in (0, 1, 2, 3, 4, 5, 1_000_000)] == [
        1000, 1000, 2000, 4000, 8000, 10_000, 10_000,
    ]  # fmt: skip


@pytest.mark.parametrize("tries", [1, 3, 9])
def test_the_jitter_is_at_most_a_tenth_and_repeatable(tries):
    backoff = Backoff(1000, 2, 10_000, jitter_milli=100)
    without_jitter = Backoff(1000, 2, 10_000, jitter_milli=0).pause_ms(1, tries)
    pauses = {backoff.pause_ms(job, tries) for job in range(1, 200)}
    assert all(without_jitter <= pause <= without_jitter + without_jitter // 10 for pause in pauses)
    assert len(pauses) > 50
    assert backoff.pause_ms(7, tries) == backoff.pause_ms(7, tries)


def test_timers_come_due_in_order():
    timers = Timers()
    for at, job in ((30, 1), (10, 2), (20, 3)):
        timers.set(at, job)
    assert timers.next_ms() == 10
    assert timers.due(20) == [2, 3]
    assert timers.due(29) == []
    assert timers.due(30) == [1]
    assert timers.next_ms() is None
