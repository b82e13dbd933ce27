"""The table of failures: every code has one class, and every class has its codes."""

from __future__ import annotations

from typing import get_args

import pytest

from hodei.jobfile.sections.health import RetryOnKey
from hodei.model.outcome import (
    FAILURE_CLASSES,
    FAILURES,
    FailureClass,
    failure_class,
    job_code_of_run,
    may_retry,
    run_failure_class,
)


def test_no_code_belongs_to_two_classes():
    codes = [code for failure in FAILURES for code in failure.codes]
    run_codes = [code for failure in FAILURES for code in failure.run_codes]
    assert len(set(codes)) == len(codes)
    assert len(set(run_codes)) == len(run_codes)


def test_the_names_are_the_same_in_the_table_the_type_and_the_job_file():
    assert get_args(FailureClass) == FAILURE_CLASSES
    (key_type,) = get_args(get_args(RetryOnKey)[0])
    assert get_args(key_type) == FAILURE_CLASSES


@pytest.mark.parametrize(
    ("run_code", "code", "name"),
    [
        pytest.param("", "EXIT_CODE", "job_error", id="its own exit code"),
        pytest.param("killed", "EXIT_CODE", "job_error", id="ended by a signal"),
        pytest.param("something new", "EXIT_CODE", "job_error", id="an unknown code"),
        pytest.param("lost", "LOST", "node_lost", id="lost"),
        pytest.param("oom", "OUT_OF_MEMORY", "out_of_memory", id="out of memory"),
        pytest.param("timeout", "TIMEOUT", "timeout", id="timeout"),
        pytest.param("error", "RUN_ERROR", "backend_error", id="not executable"),
        pytest.param("start_failed", "START_FAILED", "backend_error", id="not started"),
        pytest.param("permanent", "BACKEND_REFUSED", "backend_error", id="permanently refused"),
        pytest.param("unhealthy", "UNHEALTHY", "unhealthy", id="unhealthy"),
        pytest.param("idle", "IDLE_TIMEOUT", "idle", id="idle"),
    ],
)
def test_a_runs_code_determines_the_code_of_its_job(run_code, code, name):
    assert (job_code_of_run(run_code), run_failure_class(run_code), failure_class(code)) == (code, name, name)


def test_a_code_that_is_no_failure_has_no_class():
    assert [failure_class(code) for code in ("", "SUSPENDED", "MIGRATED", "CANCELLED", "INSUFFICIENT_CPU")] == [""] * 5


def test_retry_on_does_not_limit_preemption_and_idle_jobs_are_never_retried():
    assert [name for name in FAILURE_CLASSES if may_retry((), name)] == [
        name for name in FAILURE_CLASSES if name != "idle"
    ]
    assert [name for name in FAILURE_CLASSES if may_retry(("node_lost",), name)] == ["node_lost", "preempted"]
