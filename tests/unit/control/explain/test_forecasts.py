"""Forecasts of starts: drawn from past runs, graded by actual starts, stretched by past errors."""

from __future__ import annotations

import random

import msgspec
import pytest

from builders import NOW_MS, a_job, a_job_spec
from hodei.control.clone import clone_controller
from hodei.control.explain.forecasts import Forecasts, Record, RunTimes
from hodei.model.estimate import Forecast
from hodei.sim.forecasts import measure_accuracy
from hodei.sim.traces import open_workload
from property.examples import PERCENT
from unit.control.harness import a_harness
from unit.control.scenarios import mark_running

MINUTE = 60_000


def seeded() -> random.Random:
    return random.Random(1)


def test_run_times_are_drawn_from_the_ratio_of_past_runs_to_their_estimates():
    times = RunTimes()
    for _ in range(5):
        times.learn(a_job_spec(user="ann", estimate_ms=1000), 500)
        times.learn(a_job_spec(user="bob", estimate_ms=1000), 900)
    assert times.draw(a_job_spec(user="ann", estimate_ms=60_000), 0, seeded()) == 30_000
    assert times.draw(a_job_spec(user="bob", estimate_ms=60_000), 0, seeded()) == 54_000
    assert times.draw(a_job_spec(user="ann", estimate_ms=60_000), 40_000, seeded()) == 54_000, (
        "drawn from longer runs of others"
    )
    assert times.draw(a_job_spec(user="ann", estimate_ms=60_000), 59_000, seeded()) == 60_000, (
        "no known run lasted so long"
    )


def test_without_estimates_past_run_times_are_drawn():
    times = RunTimes()
    assert times.draw(a_job_spec(), 0, seeded()) == 0
    for ran_ms in (10, 20, 30):
        times.learn(a_job_spec(), ran_ms)
    assert times.draw(a_job_spec(), 25, seeded()) == 30
    assert times.usual_ms() == 20


def test_without_a_history_the_forecast_is_the_estimate_and_is_repeatable():
    harness = a_harness(2)
    harness.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    mark_running(harness, "1.0.1")
    harness.submit(2, cpu="2", estimate_ms=MINUTE)
    forecasts = Forecasts()
    found = forecasts.predict(clone_controller(harness.controller), harness.now_ms, random.Random)
    assert found[2].p50_ms == found[2].reach_ms == harness.now_ms + 10 * MINUTE
    assert found[2].p90_ms > found[2].p50_ms, "before any grades there is a margin"
    assert forecasts.predict(clone_controller(harness.controller), harness.now_ms, random.Random) == found


def test_behind_runs_without_an_expected_end_there_is_no_forecast():
    harness = a_harness(2)
    harness.submit(1, 2, cpu="2")
    assert Forecasts().predict(clone_controller(harness.controller), harness.now_ms, random.Random) == {}


def test_a_start_grades_every_forecast_of_the_job():
    forecasts = Forecasts()
    forecasts.keep({1: Forecast(NOW_MS, NOW_MS + 100, NOW_MS + 200, NOW_MS + 200)})
    forecasts.keep({1: Forecast(NOW_MS + 50, NOW_MS + 100, NOW_MS + 120, NOW_MS + 120)})
    grades = forecasts.started(1, NOW_MS + 150)
    assert [(grade.error_ms, grade.covered) for grade in grades] == [(50, True), (50, False)]
    assert (forecasts.graded, forecasts.covered_percent) == (2, 50)
    assert forecasts.latest(1) is None


def test_forecasts_are_stretched_after_jobs_started_later_than_forecast():
    forecasts = Forecasts()
    initial = forecasts.stretch(NOW_MS)
    for job in range(100):
        forecasts.keep({job: Forecast(NOW_MS, NOW_MS, NOW_MS, NOW_MS + 10 * MINUTE)})
        forecasts.started(job, NOW_MS + 43 * MINUTE)
    learned = forecasts.stretch(NOW_MS + 43 * MINUTE)
    assert initial < learned == 4000, "44 minutes for every 11, the floor of one minute included"


def test_pending_jobs_stretch_forecasts_too():
    forecasts = Forecasts()
    for job in range(100):
        forecasts.keep({job: Forecast(NOW_MS, NOW_MS, NOW_MS, NOW_MS + 10 * MINUTE)})
    for job in range(80):
        forecasts.started(job, NOW_MS + 10 * MINUTE)
    assert forecasts.stretch(NOW_MS + 10 * MINUTE) == 1000, "as forecast so far"
    assert forecasts.stretch(NOW_MS + 54 * MINUTE) == 5000, "a fifth has waited five times as long already"


def test_forecasts_include_future_arrivals_of_higher_priority():
    harness = a_harness(2)
    harness.submit(1, cpu="2", estimate_ms=10 * MINUTE)
    mark_running(harness, "1.0.1")
    harness.submit(2, cpu="2", estimate_ms=MINUTE, priority=100)
    forecasts = Forecasts()
    without_arrivals = forecasts.predict(clone_controller(harness.controller), harness.now_ms, random.Random)
    for number in range(100):  # one of high priority every five minutes, for four minutes each
        spec = a_job_spec(cpu="2", estimate_ms=4 * MINUTE, priority=750)
        at_ms = harness.now_ms - (100 - number) * 5 * MINUTE
        forecasts.arrivals.arrived(a_job(1000 + number, spec=spec, submitted_ms=at_ms))
    with_arrivals = forecasts.predict(clone_controller(harness.controller), harness.now_ms, random.Random)
    assert with_arrivals[2].p50_ms > without_arrivals[2].p50_ms
    assert with_arrivals == forecasts.predict(clone_controller(harness.controller), harness.now_ms, random.Random)


def test_the_first_and_the_latest_forecasts_of_a_job_are_kept():
    forecasts = Forecasts()
    for number in range(200):
        forecasts.keep({1: Forecast(number, number, number, number)})
    kept = forecasts.of[1]
    assert (len(kept) <= 16, kept[0].made_ms, kept[-1].made_ms) == (True, 0, 199)


def test_forecasts_and_grades_outlive_a_restart():
    forecasts = Forecasts()
    forecasts.keep({1: Forecast(1, 2, 3, 3), 2: Forecast(1, 2, 3, 3)})
    forecasts.started(2, 3)
    restored = Forecasts()
    restored.restore(msgspec.json.decode(msgspec.json.encode(forecasts.record()), type=Record))
    assert (restored.latest(1), restored.graded, restored.covered_percent) == (forecasts.latest(1), 1, 100)


def test_run_times_are_learned_from_successful_jobs_only():
    forecasts = Forecasts()
    for state in ("failed", "cancelled"):
        forecasts.ended(a_job(1, state=state, scheduled_ms=NOW_MS, finished_ms=NOW_MS + 5))
    assert forecasts.run_times.usual_ms() == 0
    forecasts.ended(a_job(1, state="succeeded", scheduled_ms=NOW_MS, finished_ms=NOW_MS + 5))
    assert forecasts.run_times.usual_ms() == 5


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["easy", "priority", "sjf"] if PERCENT >= 100 else ["easy"])
def test_on_a_replayed_trace_at_least_85_percent_of_starts_come_by_their_p90(policy):
    graded = measure_accuracy(open_workload("generate:lublin?jobs=600&procs=64&seed=1"), policy, 60 * MINUTE)
    assert graded.forecasts > 100
    assert graded.covered >= 85
    assert graded.starts_covered >= 85
