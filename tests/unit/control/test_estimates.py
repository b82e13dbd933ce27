"""Estimates of run times: given by users, and learned from similar jobs."""

from __future__ import annotations

import pytest

from builders import NOW_MS, a_job, a_job_spec
from hodei.control.estimates import LearnedEstimates, UserEstimates
from hodei.control.explain import why as explain
from hodei.engine.availability import corrected_end
from hodei.model.errors import InvalidInput
from hodei.model.estimate import Estimate, RuntimeSample, name_pattern, request_shape, runtime_sample
from hodei.model.facts import HistoryRestored
from unit.control.harness import a_harness

MINUTE = 60_000


def a_sample(spec, ran_ms: int) -> RuntimeSample:
    return RuntimeSample(spec.project, spec.user, name_pattern(spec), request_shape(spec), ran_ms)


def learned_from(spec, *times: int, percent: int = 75, window: int = 20) -> LearnedEstimates:
    learned = LearnedEstimates(percent, window)
    for ran_ms in times:
        learned.learn(a_sample(spec, ran_ms))
    return learned


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"estimate_ms": 5, "timeout_ms": 9}, Estimate(5, 5, "user"), id="the estimate first"),
        pytest.param({"timeout_ms": 9}, Estimate(9, 9, "timeout"), id="else the timeout"),
        pytest.param({}, Estimate(), id="else unknown"),
    ],
)
def test_the_estimate_of_a_user_is_the_estimate_or_the_timeout(fields, expected):
    assert UserEstimates().estimate(a_job_spec(**fields)) == expected
    assert LearnedEstimates().estimate(a_job_spec(**fields)) == expected, "nothing is learned yet"


@pytest.mark.parametrize(("percent", "expected"), [(50, 20), (75, 30), (100, 40), (1, 10)])
def test_a_quantile_of_the_last_runs_is_expected(percent: int, expected: int):
    spec = a_job_spec()
    found = learned_from(spec, 40, 10, 30, 20, percent=percent).estimate(spec)
    assert (found.expected_ms, found.percent, found.runs) == (expected, percent, 4)


def test_only_the_last_runs_of_the_window_count():
    spec = a_job_spec()
    assert learned_from(spec, 900, 900, 1, 2, 3, window=3).estimate(spec) == Estimate(3, 3, "learned", 75, 3)


def test_a_learned_estimate_does_not_exceed_or_change_the_limit_of_the_user():
    spec = a_job_spec(timeout_ms=25)
    found = learned_from(spec, 40, 40, 40).estimate(spec)
    assert (found.expected_ms, found.limit_ms) == (25, 25)
    shorter = learned_from(spec, 5, 5, 5).estimate(spec)
    assert (shorter.expected_ms, shorter.limit_ms) == (5, 25)


def test_a_job_without_an_estimate_is_limited_by_the_longest_similar_run():
    spec = a_job_spec()
    found = learned_from(spec, 10, 20, 90, 10).estimate(spec)
    assert (found.expected_ms, found.limit_ms) == (20, 90)


def test_the_most_specific_group_with_enough_samples_is_used():
    spec = a_job_spec("train-7", project="ml", user="ann", cpu=2)
    learned = learned_from(spec, 100)
    other_shape = a_job_spec("train-8", project="ml", user="ann", cpu=4)
    for ran_ms in (200, 200):
        learned.learn(a_sample(other_shape, ran_ms))
    assert learned.estimate(spec).expected_ms == 200, "one run of the same shape is not enough: by name"
    learned.learn(a_sample(spec, 100))
    assert learned.estimate(spec).expected_ms == 100, "two runs of the same shape are enough"
    unseen = a_job_spec("plot", project="ml", user="ann", cpu=8)
    assert learned.estimate(unseen).runs == 4, "all runs of that user"
    assert learned.estimate(a_job_spec("train-7", project="ml", user="bob", cpu=2)) == Estimate()
    assert learned.estimate(a_job_spec("train-7", project="web", user="ann", cpu=2)) == Estimate()


def test_numbers_in_job_names_are_ignored():
    assert name_pattern(a_job_spec("night-2026-01-31")) == name_pattern(a_job_spec("night-2025-12-01"))


@pytest.mark.parametrize("wrong", [{"percent": 0}, {"percent": 101}, {"window": 1}], ids=str)
def test_invalid_settings_are_refused(wrong):
    with pytest.raises(InvalidInput):
        LearnedEstimates(**wrong)


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        pytest.param({"state": "succeeded"}, True, id="a success"),
        pytest.param({"state": "failed", "reason_code": "EXIT_CODE"}, True, id="an exit code"),
        pytest.param({"state": "failed", "reason_code": "TIMEOUT"}, True, id="a timeout, as a lower bound"),
        pytest.param({"state": "failed", "reason_code": "LOST"}, False, id="a lost run"),
        pytest.param({"state": "cancelled", "reason_code": "CANCELLED"}, False, id="a cancelled job"),
        pytest.param({"state": "succeeded", "started_ms": 0}, False, id="a job that never ran"),
    ],
)
def test_run_times_are_learned_from_jobs_that_ended_by_themselves(fields, counts):
    times = {"scheduled_ms": NOW_MS, "started_ms": NOW_MS + 10, "finished_ms": NOW_MS + 50} | fields
    sample = runtime_sample(a_job(1, **times))
    assert (sample is not None) == counts
    if sample is not None:
        assert sample.runtime_ms == 40


def test_a_run_without_a_reported_start_counts_from_its_placement():
    job = a_job(1, state="succeeded", scheduled_ms=NOW_MS, started_ms=NOW_MS + 50, finished_ms=NOW_MS + 50)
    assert runtime_sample(job).runtime_ms == 50


def run_through(harness, id: int, ran_ms: int, **fields) -> None:
    harness.submit(id, name="nightly", **fields)
    harness.observe(f"{id}.0.1", "running")
    harness.now_ms += ran_ms
    harness.observe(f"{id}.0.1", "succeeded", 0)


def test_the_controller_learns_from_jobs_that_end_and_why_says_so():
    harness = a_harness(1, estimator=LearnedEstimates(percent=50))
    for id in (1, 2, 3):
        run_through(harness, id, 10 * MINUTE)
    harness.submit(4, 5, name="nightly")
    answer = explain.why(harness.controller, 5, harness.now_ms)
    assert answer.estimate == Estimate(10 * MINUTE, 10 * MINUTE, "learned", 50, 3)
    assert str(answer.estimate) == "expected to run 10m (P50 of its last 3 runs)"


def test_the_history_of_the_store_is_learned_again_after_a_restart():
    spec = a_job_spec("nightly")
    harness = a_harness(1, estimator=LearnedEstimates())
    harness.step(HistoryRestored((a_sample(spec, 5), a_sample(spec, 5), a_sample(spec, 5))))
    assert harness.controller.estimator.estimate(spec).runs == 3


def test_a_run_that_exceeds_its_estimate_is_expected_to_take_twice_as_long_and_why_says_so():
    harness = a_harness(1)
    harness.submit(1, estimate_ms=10 * MINUTE)
    harness.observe("1.0.1", "running")
    started = harness.now_ms
    harness.advance(5 * MINUTE)
    fine = explain.why(harness.controller, 1, harness.now_ms)
    assert (fine.expected_end_ms, fine.past_estimate) == (started + 10 * MINUTE, False)
    harness.advance(10 * MINUTE)
    late = explain.why(harness.controller, 1, harness.now_ms)
    assert (late.expected_end_ms, late.past_estimate) == (started + 20 * MINUTE, True)


@pytest.mark.parametrize(
    ("elapsed", "expected"), [(9, 10), (10, 10), (11, 20), (20, 20), (21, 40), (79, 80)], ids=lambda value: f"{value}"
)
def test_an_expected_end_in_the_past_moves_to_the_next_doubling(elapsed, expected):
    assert corrected_end(1000, 10, 1000 + elapsed) == 1000 + expected
