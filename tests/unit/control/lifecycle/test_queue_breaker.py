"""The breaker of a queue: in a cluster that stays full timed retries become rarer, but no possible start is delayed."""

from __future__ import annotations

import pytest

from builders import a_node
from hodei.control.explain.why import why
from hodei.control.lifecycle.retry import Backoff, Breaker, BreakerPolicy, Breakers
from hodei.model.facts import NodeJoined
from unit.control.configured import ConfiguredHarness

PROTECTED = '[scheduling.preemption]\nmin_runtime = "1h"\n'
MINUTE = 60_000


def full(toml: str = PROTECTED) -> ConfiguredHarness:
    """One core with a low job that is protected for an hour, and a pending high job."""
    harness = ConfiguredHarness(toml, a_node("n1", 1))
    harness.submit(1, priority="low")
    harness.observe("1.0.1", "running")
    harness.submit(2, priority="high")
    assert harness.state(2) == "pending"
    return harness


def attempts_within(harness: ConfiguredHarness, ms: int) -> int:
    before = harness.controller.queues["default"].gangs[2].attempts
    harness.run_for(ms)
    return harness.controller.queues["default"].gangs[2].attempts - before


def test_retries_become_rarer_in_a_cluster_that_stays_full() -> None:
    harness = full()
    first, later = attempts_within(harness, MINUTE), attempts_within(harness, 10 * MINUTE)
    assert first >= 10
    assert later <= 10 * 2 + 1  # at most one in thirty seconds
    assert harness.controller.profile_router.breakers.of["default"].open


def test_without_a_breaker_retries_stay_frequent() -> None:
    harness = full(PROTECTED + "[scheduling.breaker]\nrounds = 0\n")
    assert attempts_within(harness, 10 * MINUTE) == 600


@pytest.mark.parametrize("how", ["a run ends", "a node joins"])
def test_freed_capacity_closes_the_breaker_and_the_job_starts_in_the_same_step(how: str) -> None:
    harness = full()
    harness.run_for(10 * MINUTE)
    if how == "a run ends":
        harness.observe("1.0.1", "succeeded", 0)
    else:
        harness.step(NodeJoined(a_node("n2", 1)))
    assert harness.started() == ["2.0.1"]
    assert not harness.controller.profile_router.breakers.of["default"].open


def test_the_end_of_a_protection_is_not_missed() -> None:
    harness = full()
    started_ms = harness.now_ms
    while not harness.stopped():
        due = harness.controller.next_wakeup_ms(harness.now_ms)
        assert due is not None
        harness.now_ms = max(due, harness.now_ms)
        harness.step()
        assert harness.now_ms <= started_ms + 60 * MINUTE + 1000
    assert started_ms + 60 * MINUTE <= harness.now_ms <= started_ms + 60 * MINUTE + 1000


def test_a_new_job_that_fits_starts_at_once_despite_an_open_breaker() -> None:
    harness = full()
    harness.step(NodeJoined(a_node("n2", "500m")))
    harness.run_for(10 * MINUTE)
    assert harness.controller.profile_router.breakers.of["default"].open
    harness.submit(3, cpu="500m")
    assert harness.started() == ["3.0.1"]


def test_why_reports_an_open_breaker_of_a_queue() -> None:
    harness = full()
    harness.run_for(10 * MINUTE)
    explanation = why(harness.controller, 2, harness.now_ms)
    assert explanation is not None
    (step,) = explanation.escalation_steps
    assert step.text == (
        "the cluster stays full: the queue of profile default is retried every 30 s, and at once when capacity is freed"
    )
    assert step.at_ms > 0


def test_the_breaker_of_one_queue_does_not_pause_another() -> None:
    breakers = Breakers(BreakerPolicy(rounds=2, pause_ms=4000))
    for now_ms in (0, 1000, 2000):
        breakers.next_ms("slow", now_ms, 10**9)
        breakers.ticked("slow", 0, now_ms)
    breakers.next_ms("slow", 3000, 10**9)
    assert not breakers.allows("slow", 4000)
    assert breakers.allows("other", 4000)
    assert breakers.resume_ms(3000) == 3000 + 8000


def test_without_a_known_time_a_queue_is_retried_every_second() -> None:
    breakers = Breakers(BreakerPolicy(rounds=1))
    breakers.of["a"] = Breaker(futile_rounds=9, open=True, pause_ms=30_000)
    assert breakers.next_ms("a", 5000, None) == 6000


def test_gangs_refused_by_a_failed_plugin_pause_together() -> None:
    breakers, backoff = Breakers(), Backoff(max_ms=10_000, jitter_milli=0)
    first = breakers.after_fault("a", 0, backoff)
    assert breakers.after_fault("a", 500, backoff) == first == 1000  # a later gang waits for the same pause
    assert breakers.after_fault("a", 1000, backoff) == 3000
    assert breakers.after_fault("a", 3000, backoff) == 7000
    assert breakers.after_fault("a", 60_000, backoff) == 61_000  # no fault for a while: the pauses start again
