"""Rules for a live run: how stops are shortened, and how an end is classified."""

from __future__ import annotations

import pytest

from hodei.supervision import CUT_SHORT, HealthCounter, StopPlan, checkpoint_signal, classify_end, start_error_code

STOPPED = StopPlan("", "drained", 9)
TIMED_OUT = StopPlan("timeout", "too long", 9, note="no checkpoint")
SAVING = StopPlan("", "drained", 9, saving=True)


@pytest.mark.parametrize(
    ("code", "stop", "oom", "end"),
    [
        pytest.param(0, None, "", ("succeeded", "", ""), id="success"),
        pytest.param(3, None, "", ("failed", "", "exit code 3"), id="exit code"),
        pytest.param(137, None, "", ("failed", "killed", "it was ended by SIGKILL"), id="signal"),
        pytest.param(137, None, "too much", ("failed", "oom", "too much"), id="out of memory"),
        pytest.param(0, None, "too much", ("succeeded", "", ""), id="a child ran out of memory"),
        pytest.param(143, STOPPED, "", ("stopped", "", "drained"), id="ordered stop"),
        pytest.param(143, TIMED_OUT, "", ("failed", "timeout", "too long; no checkpoint"), id="timeout"),
        pytest.param(0, SAVING, "", ("succeeded", "", ""), id="success while saving"),
        pytest.param(1, SAVING, "", ("stopped", "", "drained"), id="failure while saving"),
        pytest.param(None, STOPPED, "", ("stopped", "", "drained"), id="stop without an exit code"),
    ],
)
def test_an_end_is_explained_by_a_stop_then_the_kernel_then_the_command(code, stop, oom, end):
    assert classify_end(code, stop, oom=oom) == end


def test_a_run_without_an_exit_code_is_lost():
    assert classify_end(None, None).state == "lost"


def test_a_later_stop_counts_only_if_it_ends_the_run_earlier():
    plan = StopPlan.begin("", "drained", now=100, grace=10, save=30)
    assert not plan.shorten(105, grace=40)
    assert plan.shorten(105, grace=5)
    assert (plan.kill_at, plan.save_until, plan.note) == (110, 105, CUT_SHORT)


def test_a_checkpoint_that_succeeds_in_a_shortened_stop_is_not_reported_as_cut_short():
    plan = StopPlan.begin("", "drained", now=100, grace=10, save=30)
    plan.shorten(105, grace=5, save=10)
    plan.finish_saving(107)
    assert (plan.because, plan.kill_at, plan.saving) == ("drained", 112, False)


def test_health_checks_fail_the_run_after_failures_in_a_row():
    counter = HealthCounter()
    assert [counter.observe(error, 2) for error in ("a", "", "b", "c")] == [
        "", "", "", "its health check failed 2 times in a row: c",
    ]  # fmt: skip


def test_checkpoint_signals_are_normalised_and_checked():
    assert checkpoint_signal("sigusr1") == "USR1"
    with pytest.raises(ValueError, match="KILL cannot be used"):
        checkpoint_signal("KILL")


@pytest.mark.parametrize(
    ("text", "code"), [("exec: no such file or directory", 127), ("permission denied", 126), ("other", None)]
)
def test_a_start_error_has_the_exit_code_of_a_shell(text, code):
    assert start_error_code(text) == code
