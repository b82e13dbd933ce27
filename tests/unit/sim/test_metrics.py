"""The metrics of a run: small cases computed by hand, and published figures of published schedules."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from hodei.sim.metrics import (
    Outcome,
    Result,
    bounded_slowdown,
    dominant_shares,
    fairness_over_time,
    jain,
    main_resource,
    makespan_ms,
    mean_slowdown_by_user,
    percentile,
    slowdown,
    starved,
    summary,
    utilisation,
)
from hodei.sim.traces import open_workload
from unit.sim.traces.shared import TRACES, needs_traces


def an_outcome(id: int = 1, *, submit: int = 0, wait: int | None = 0, run: int | None = 10, **fields: Any) -> Outcome:
    """Times in seconds; a wait of None: it never started, a run of None: it did not end."""
    started = -1 if wait is None else (submit + wait) * 1000
    ended = -1 if wait is None or run is None else started + run * 1000
    defaults = {"name": "job", "user": "ann", "project": "default", "request": {"cpu": 1000}} | fields
    return Outcome(id=id, submitted_ms=submit * 1000, started_ms=started, ended_ms=ended, **defaults)


def a_result(*outcomes: Outcome, **fields: Any) -> Result:
    defaults: dict[str, Any] = {"policy": "easy", "workload": "w", "capacity": {"cpu": 2000}, "samples": []} | fields
    return Result(outcomes=list(outcomes), **defaults)


@pytest.mark.parametrize(
    ("wait_s", "run_s", "expected"),
    [
        pytest.param(0, 100, 1.0, id="no wait is no slowdown"),
        pytest.param(100, 100, 2.0, id="a wait as long as the run doubles it"),
        pytest.param(90, 1, 9.1, id="a short run counts as ten seconds"),
        pytest.param(0, 1, 1.0, id="it is never below one"),
    ],
)
def test_slowdown_is_bounded_at_both_ends(wait_s: int, run_s: int, expected: float) -> None:
    assert slowdown(wait_s * 1000, run_s * 1000) == pytest.approx(expected)


def test_a_job_that_never_started_is_counted_and_not_averaged() -> None:
    result = a_result(an_outcome(1, wait=10, run=10), an_outcome(2, wait=None), an_outcome(3, wait=30, run=None))
    numbers = summary(result)
    assert (numbers["jobs"], numbers["finished"]) == (3, 1)
    assert numbers["bounded_slowdown"] == 2.0
    assert numbers["mean_wait_s"] == 20.0  # two have started
    assert numbers["max_wait_s"] == 30.0


def test_a_run_without_jobs_has_a_summary() -> None:
    numbers = summary(a_result(capacity={}))
    assert numbers["jobs"] == 0
    assert numbers["bounded_slowdown"] == numbers["mean_wait_s"] == numbers["p95_wait_s"] == numbers["utilisation"] == 0


def test_the_summary_has_the_numbers_that_reports_and_scripts_read() -> None:
    result = a_result(
        an_outcome(1, kind="backfill", preemptions=2), seconds=0.5, start_reservations_broken=1, unplaced=3
    )
    numbers = summary(result)
    assert {"bounded_slowdown", "mean_wait_s", "max_wait_s", "utilisation", "jobs", "seconds"} <= numbers.keys()
    assert numbers["starts"] == {"head": 0, "backfill": 1, "spill": 0}
    assert (numbers["preemptions"], numbers["start_reservations_broken"], numbers["unplaced"]) == (2, 1, 3)
    assert numbers["jobs_per_second"] == 2.0


def test_a_job_that_ends_late_or_never_misses_its_deadline() -> None:
    outcomes = [an_outcome(id, run=10) for id in (1, 2, 3)]
    end_ms = outcomes[0].ended_ms
    dated = [structs.replace(outcomes[0], deadline_ms=end_ms), structs.replace(outcomes[1], deadline_ms=end_ms - 1),
             structs.replace(outcomes[2], deadline_ms=end_ms, ended_ms=-1), an_outcome(4)]  # fmt: skip
    numbers = summary(a_result(*dated))
    assert (numbers["deadlines"], numbers["deadlines_missed"]) == (3, 2)


def test_makespan_goes_from_the_first_submission_to_the_last_end() -> None:
    assert makespan_ms([an_outcome(1, submit=5, wait=5, run=10), an_outcome(2, submit=7, run=20)]) == 22_000


def test_utilisation_is_the_used_share_of_the_capacity() -> None:
    result = a_result(an_outcome(1, run=10), an_outcome(2, run=20))
    assert utilisation(result) == {"cpu": 0.75}


def test_utilisation_covers_every_resource_and_cpu_is_the_main_one_if_requested() -> None:
    gpus = a_result(an_outcome(1, request={"gpu": 1000}), capacity={"cpu": 1000, "gpu": 4000})
    assert utilisation(gpus) == {"cpu": 0.0, "gpu": 0.25}
    assert main_resource(gpus) == "gpu"
    assert summary(gpus)["utilisation"] == 0.25
    both = a_result(an_outcome(1, request={"gpu": 1000, "cpu": 1}), capacity={"cpu": 1000, "gpu": 4000})
    assert main_resource(both) == "cpu"


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        pytest.param(list(range(1, 101)), 95, 95, id="100 values"),
        pytest.param([1, 2], 95, 2, id="two values"),
        pytest.param([7], 50, 7, id="one value"),
        pytest.param([], 95, 0, id="no values"),
    ],
)
def test_a_percentile_is_one_of_the_values(values: list[int], percent: int, expected: int) -> None:
    assert percentile(values, percent) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([3, 3, 3], 1.0, id="equal"),
        pytest.param([1, 0, 0, 0], 0.25, id="one has everything"),
        pytest.param([0, 0], 1.0, id="all have nothing"),
        pytest.param([], 1.0, id="no users"),
        pytest.param([1, 2], 0.9, id="one has twice as much"),
    ],
)
def test_jains_index(values: list[int], expected: float) -> None:
    assert jain(values) == pytest.approx(expected)


def test_users_without_a_name_are_distinguished_by_project() -> None:
    outcomes = [an_outcome(1, user="", project="a"), an_outcome(2, user="", project="b", wait=10)]
    assert mean_slowdown_by_user(outcomes) == {"a": 1.0, "b": 2.0}


def test_dominant_shares_take_the_resource_of_which_a_user_has_most() -> None:
    """The example of the DRF paper: totals (9 cpu, 18 GB), three tasks of (1, 4) and two of (3, 1) have two thirds each."""
    ann = [an_outcome(id, user="ann", request={"cpu": 1000, "memory": 4}) for id in (1, 2, 3)]
    bob = [an_outcome(id, user="bob", request={"cpu": 3000, "memory": 1}) for id in (4, 5)]
    result = a_result(*ann, *bob, capacity={"cpu": 9000, "memory": 18})
    assert dominant_shares(result) == pytest.approx({"ann": 2 / 3, "bob": 2 / 3})


def test_fairness_over_time_is_low_while_one_user_runs_and_another_waits() -> None:
    ann = an_outcome(1, user="ann", run=10, request={"cpu": 2000})
    bob = an_outcome(2, user="bob", wait=10, run=10, request={"cpu": 2000})
    first, middle, last = fairness_over_time(a_result(ann, bob), points=3)
    assert (first.at_ms, first.shares, first.jain) == (0, {"ann": 1.0, "bob": 0.0}, 0.5)
    assert (middle.at_ms, middle.shares, middle.jain) == (10_000, {"bob": 1.0}, 1.0)
    assert (last.at_ms, last.shares) == (20_000, {})
    assert fairness_over_time(a_result()) == []


def test_starved_jobs_waited_too_long_or_still_wait() -> None:
    result = a_result(an_outcome(1, wait=100), an_outcome(2, wait=10), an_outcome(3, wait=None))
    assert starved(result, longer_than_ms=50_000) == 2
    assert starved(result, longer_than_ms=200_000) == 0
    assert starved(a_result(an_outcome(1, wait=None)), longer_than_ms=0) == 0


PUBLISHED = [
    pytest.param("kth-sp2", 100, "wait_easy_s", 92.576540, 6836.87, 0.6856, id="KTH, EASY"),
    pytest.param("kth-sp2", 100, "wait_easy_clairvoyant_s", 71.722385, None, None, id="KTH, clairvoyant"),
    pytest.param("kth-sp2", 100, "wait_easy_sjbf_clairvoyant_s", 49.847719, None, None, id="KTH, SJBF clairvoyant"),
    pytest.param("ctc-sp2", 338, "wait_easy_s", 49.571290, 14272.59, 0.8358, id="CTC, EASY"),
    pytest.param("ctc-sp2", 338, "wait_easy_clairvoyant_s", 37.165401, None, None, id="CTC, clairvoyant"),
    pytest.param("ctc-sp2", 338, "wait_easy_sjbf_clairvoyant_s", 17.571687, None, None, id="CTC, SJBF clairvoyant"),
    pytest.param("sdsc-sp2", 128, "wait_easy_s", 87.870324, 20497.76, 0.8229, id="SDSC, EASY"),
    pytest.param("sdsc-sp2", 128, "wait_easy_clairvoyant_s", 70.477941, None, None, id="SDSC, clairvoyant"),
    pytest.param("sdsc-sp2", 128, "wait_easy_sjbf_clairvoyant_s", 56.836221, None, None, id="SDSC, SJBF clairvoyant"),
]


@pytest.fixture(scope="module")
def traces() -> dict[str, Any]:
    return {}


@needs_traces
@pytest.mark.parametrize(("trace", "procs", "column", "expected", "mean_wait_s", "used"), PUBLISHED)
def test_published_schedules_have_their_published_figures(
    trace: str, procs: int, column: str, expected: float, mean_wait_s: float | None, used: float | None,
    traces: dict[str, Any],
) -> None:  # fmt: skip
    if trace not in traces:
        traces[trace] = open_workload(TRACES / trace / "golden.csv.gz", procs=procs)
    workload, waits = traces[trace], traces[trace].extra[column]
    outcomes = [
        Outcome(
            id=job.id, name="job", user=job.spec.user, project="default", request=job.spec.tasks[0].request,
            submitted_ms=job.at_ms, started_ms=job.at_ms + waits[job.id] * 1000,
            ended_ms=job.at_ms + waits[job.id] * 1000 + job.run_ms,
        )
        for job in workload.arrivals
    ]  # fmt: skip
    assert bounded_slowdown(outcomes) == pytest.approx(expected, abs=1e-5)
    if used is not None:
        numbers = summary(a_result(*outcomes, capacity=workload.nodes[0].capacity))
        assert round(numbers["utilisation"], 4) == used
        assert numbers["mean_wait_s"] == pytest.approx(mean_wait_s, abs=0.005)
