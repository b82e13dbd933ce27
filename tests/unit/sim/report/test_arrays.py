"""Arrays of a result, sums over time, and fairness over time."""

from __future__ import annotations

import numpy as np
import pytest

from hodei.sim.metrics import Outcome, Result
from hodei.sim.report.pictures import dominant_shares, even_shares_over_time, fairness_over_time
from hodei.sim.report.table import arrays_of, cumulative, step_means, time_in_slices


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def a_result(*jobs: tuple[str, int, int, int], cpu: int = 1000) -> Result:
    """(user, submitted, started, ended) of jobs that each request `cpu` of 2000."""
    outcomes = [
        Outcome(n, "job", user, "p", submitted, started, ended, {"cpu": cpu})
        for n, (user, submitted, started, ended) in enumerate(jobs)
    ]
    return Result("easy", "w", {"cpu": 2000}, outcomes, [])


def test_time_in_slices_counts_whole_and_partial_slices() -> None:
    found = time_in_slices(ints(0, 0, 1), 2, ints(0, 5, 12), ints(20, 15, 12), np.array([1.0, 2.0, 9.0]), 40, 4)
    assert found.tolist() == [[2.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


def test_an_interval_up_to_the_end_is_counted_in_full() -> None:
    assert time_in_slices(ints(0), 1, ints(0), ints(40), np.ones(1), 40, 4).tolist() == [[1.0] * 4]


def test_averaging_many_samples_keeps_the_area_under_the_curve() -> None:
    rng = np.random.default_rng(3)
    at = np.sort(rng.integers(0, 100_000, 5000))
    values = rng.random(5000)
    exact = float((values * np.diff(np.append(at, 100_000))).sum())
    times, means = step_means(at, values, 100_000, 200)
    assert len(times) == 200
    assert float((means[:-1] * np.diff(times)).sum()) == pytest.approx(exact)


def test_few_samples_are_kept_unchanged() -> None:
    times, values = step_means(ints(0, 10, 30), np.array([1.0, 5.0, 2.0]), 50, 100)
    assert times.tolist() == [0, 10, 30, 50]
    assert values.tolist() == [1, 5, 2, 2]


def test_a_cumulative_distribution_ends_at_one_and_has_few_points() -> None:
    x, share = cumulative(np.arange(10_000.0), 1.0, 100)
    assert len(x) == 100
    assert x[0] == 1.0
    assert (x[-1], share[-1]) == (9999.0, 1.0)


def test_service_is_fair_if_all_users_get_what_they_request() -> None:
    arrays = arrays_of(a_result(("ada", 0, 0, 100), ("ada", 0, 0, 100), ("bob", 0, 0, 100)))
    assert fairness_over_time(arrays, 4).tolist() == pytest.approx([1.0] * 4)


def test_service_is_unfair_while_one_user_waits_and_another_runs() -> None:
    arrays = arrays_of(a_result(("ada", 0, 0, 100), ("bob", 0, 100, 200), cpu=2000))
    assert fairness_over_time(arrays, 2).tolist() == pytest.approx([0.5, 1.0])


def test_a_user_whose_job_never_starts_counts() -> None:
    arrays = arrays_of(a_result(("ada", 0, 0, 100), ("bob", 0, -1, -1)))
    assert fairness_over_time(arrays, 2).tolist() == pytest.approx([0.5, 0.5])


def test_the_dominant_share_is_the_largest_share_of_any_resource() -> None:
    outcomes = [Outcome(1, "job", "ada", "p", 0, 0, 100, {"cpu": 1000, "gpu": 3000})]
    result = Result("easy", "w", {"cpu": 4000, "gpu": 4000}, outcomes, [])
    assert dominant_shares(arrays_of(result), 2).tolist() == [[0.75, 0.75]]


SHORT = 1  # only the slice itself counts


def test_shares_are_even_if_a_small_request_is_met_and_another_user_gets_the_rest() -> None:
    arrays = arrays_of(a_result(("ada", 0, 0, 100), ("bob", 0, 0, 100), ("bob", 0, 0, 100)))
    assert even_shares_over_time(arrays, 2, SHORT).tolist() == pytest.approx([1.0, 1.0])


def test_shares_are_uneven_while_one_user_has_everything_and_another_waits() -> None:
    arrays = arrays_of(a_result(("ada", 0, 0, 100), ("bob", 0, 100, 200), cpu=2000))
    assert even_shares_over_time(arrays, 2, SHORT)[0] == pytest.approx(0.5)


def test_users_who_take_turns_have_even_shares_over_a_longer_time() -> None:
    arrays = arrays_of(a_result(("ada", 0, 0, 100), ("bob", 0, 100, 200), ("ada", 0, 200, 300), ("bob", 0, 300, 400)))
    assert even_shares_over_time(arrays, 4, SHORT)[2] < 0.6
    assert even_shares_over_time(arrays, 4, 400)[3] > 0.9


def test_an_even_share_is_never_more_than_requested() -> None:
    # ada requests one core and has it, so the other two are due to bob.
    jobs = [("ada", 0, 0, 100), ("bob", 0, 0, 100), ("bob", 0, 0, 100), ("bob", 0, 100, 200)]
    arrays = arrays_of(a_result(*jobs))
    assert even_shares_over_time(arrays, 2, SHORT)[0] == pytest.approx(1.0)
