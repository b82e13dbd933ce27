"""The end of a run counts from when it happened, even if its backend, its agent or the server reports it late."""

from __future__ import annotations

import pytest

from builders import NOW_MS
from hodei.control.accounting.accounts import AccountsPolicy
from hodei.control.accounting.shares import SharesPolicy
from hodei.control.estimates import LearnedEstimates
from hodei.model.facts import JobCancelled, RunObserved
from hodei.model.resources import format_time
from unit.control.harness import Harness, a_harness, some_nodes

HOUR_MS = 3_600_000


def report_late(harness: Harness, run: str, state: str, at_ms: int, exit_code: int | None = 0, **more) -> None:
    harness.step(RunObserved(run, state, at_ms, exit_code, **more))


def test_a_late_report_ends_the_job_at_the_reported_time():
    harness = a_harness(4)
    harness.submit()
    harness.observe("1.0.1", "running")
    harness.now_ms += 19_000
    report_late(harness, "1.0.1", "succeeded", NOW_MS + 1000)
    job, run = harness.jobs[1], harness.runs["1.0.1"]
    assert (job.state, job.started_ms, job.finished_ms, run.finished_ms) == (
        "succeeded", NOW_MS, NOW_MS + 1000, NOW_MS + 1000,
    )  # fmt: skip
    events = {event.kind: event for event in harness.events}
    assert events["job.ended"].at_ms == NOW_MS + 19_000
    assert (
        events["job.ended"].detail["finished_at"]
        == events["run.ended"].detail["finished_at"]
        == format_time(NOW_MS + 1000)
    )


def test_an_event_of_a_prompt_report_has_no_finished_at():
    harness = a_harness(4)
    harness.submit()
    harness.observe("1.0.1", "succeeded", 0)
    assert all("finished_at" not in event.detail for event in harness.events)


@pytest.mark.parametrize(
    ("state", "code", "ended"),
    [("failed", 3, "failed"), ("lost", None, "failed"), ("stopped", 143, "failed")],
)
def test_late_failures_also_count_from_the_reported_time(state, code, ended):
    harness = a_harness(4)
    harness.submit(restart="never")
    harness.observe("1.0.1", "running")
    harness.now_ms += 19_000
    report_late(harness, "1.0.1", state, NOW_MS + 1000, code)
    assert (harness.state(), harness.jobs[1].finished_ms) == (ended, NOW_MS + 1000)


def test_a_cancelled_job_ends_with_its_last_run():
    harness = a_harness(4)
    harness.submit()
    harness.observe("1.0.1", "running")
    harness.now_ms += 1000
    harness.step(JobCancelled(1))
    harness.now_ms += 30_000
    report_late(harness, "1.0.1", "stopped", NOW_MS + 2000, 143)
    assert (harness.state(), harness.jobs[1].finished_ms) == ("cancelled", NOW_MS + 2000)


def test_a_pending_job_ends_when_it_is_cancelled():
    harness = a_harness(1)
    harness.submit(cpu=8)
    harness.now_ms += 500
    harness.step(JobCancelled(1))
    assert (harness.state(), harness.jobs[1].finished_ms) == ("cancelled", NOW_MS + 500)


def test_a_gang_ends_with_its_last_member():
    harness = a_harness(4)
    harness.submit(count=2)
    harness.observe("1.0.1", "running")
    harness.observe("1.1.1", "running")
    harness.now_ms += 60_000
    report_late(harness, "1.0.1", "succeeded", NOW_MS + 9000)
    report_late(harness, "1.1.1", "succeeded", NOW_MS + 4000)
    assert harness.jobs[1].finished_ms == NOW_MS + 9000


def test_a_run_with_only_an_end_report_starts_at_the_time_of_its_backend():
    harness = a_harness(4)
    harness.submit()
    harness.now_ms += 60_000
    report_late(harness, "1.0.1", "succeeded", NOW_MS + 9000, started_ms=NOW_MS + 4000)
    job = harness.jobs[1]
    assert (job.started_ms, job.finished_ms) == (NOW_MS + 4000, NOW_MS + 9000)
    started = next(event for event in harness.events if event.kind == "job.started")
    assert started.detail["started_at"] == format_time(NOW_MS + 4000)


@pytest.mark.parametrize(
    ("began", "ended", "started_ms", "finished_ms"),
    [
        pytest.param(0, 0, 60_000, 60_000, id="no times"),
        pytest.param(1000, -62_135_596_800_000 - NOW_MS, 1000, 60_000, id="the year 1"),
        pytest.param(1000, 10 * HOUR_MS, 1000, 60_000, id="an end in the future"),
        pytest.param(10 * HOUR_MS, 2000, 60_000, 60_000, id="a start in the future"),
        pytest.param(-HOUR_MS, 2000, 0, 2000, id="a start before the placement"),
        pytest.param(5000, 2000, 5000, 5000, id="an end before its start"),
    ],
)
def test_impossible_times_are_corrected(began, ended, started_ms, finished_ms):
    """`began` and `ended` count from the placement of the run; 0 means no time was reported."""
    harness = a_harness(4)
    harness.submit()
    harness.now_ms += 60_000
    at = [NOW_MS + since if since else 0 for since in (began, ended)]
    if began:
        harness.step(RunObserved("1.0.1", "running", at[0]))
    report_late(harness, "1.0.1", "succeeded", at[1])
    job, run = harness.jobs[1], harness.runs["1.0.1"]
    assert (run.started_ms - NOW_MS, run.finished_ms - NOW_MS) == (started_ms, finished_ms)
    assert (job.started_ms, job.finished_ms) == (run.started_ms, run.finished_ms)


def test_estimates_and_usage_count_the_actual_run_time():
    estimator = LearnedEstimates()
    harness = Harness(
        *some_nodes(4), estimator=estimator, accounts=AccountsPolicy(shares=SharesPolicy(half_life_ms=7 * 24 * HOUR_MS))
    )
    for id in (1, 2, 3):
        harness.submit(id, name="same", cpu=1)
        placed_ms = harness.now_ms
        harness.observe(f"{id}.0.1", "running")
        harness.now_ms += HOUR_MS
        report_late(harness, f"{id}.0.1", "succeeded", placed_ms + 10_000)
    guess = estimator.estimate(harness.jobs[1].spec)
    assert (guess.expected_ms, guess.source) == (10_000, "learned")
    sharing = harness.controller.accounts.sharing
    assert sharing is not None
    used = sum(row.amount for row in sharing.ledger.rows() if row.resource == "cpu")
    assert used == 3 * 10_000 * 1000  # thousandths of a core, in milliseconds
