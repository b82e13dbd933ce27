"""`hodei sim forecasts`: the accuracy of forecasts against the replay, for each job and each time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hodei.sim.__main__ import main
from hodei.sim.forecasts import measure_accuracy
from hodei.sim.traces import open_workload

HOUR_MS = 3_600_000
HEAD = "id,submit_s,run_s,requested_s,procs\n"


@pytest.fixture
def three_jobs(tmp_path: Path) -> str:
    """Three jobs for one processor, with exact estimates: they run for an hour each, one after the other."""
    (path := tmp_path / "three.csv").write_text(HEAD + "".join(f"{n},0,3600,3600,1\n" for n in (1, 2, 3)))
    return str(path)


@pytest.fixture
def overtaken(tmp_path: Path) -> str:
    """Job 2 is long; for eight hours shorter ones arrive before it could start."""
    rows = ["1,0,3600,3600,1\n", "2,1,14400,14400,1\n"]
    rows += [f"{n},{(n - 2) * 3600 - 2000},3600,3600,1\n" for n in range(3, 11)]
    (path := tmp_path / "overtaken.csv").write_text(HEAD + "".join(rows))
    return str(path)


def test_with_exact_estimates_every_forecast_is_correct(three_jobs: str) -> None:
    accuracy = measure_accuracy(open_workload(three_jobs, procs=1), "fcfs", HOUR_MS // 2)
    assert (accuracy.covered, accuracy.starts_covered, accuracy.per_job, accuracy.per_moment) == (100, 100, 100, 100)
    assert (accuracy.median_absolute_error_s, accuracy.missing) == (0, 0)
    # Job 2 starts after one hour, job 3 after two; what is due at a start is forecast after it.
    assert [(group.job, group.forecasts) for group in accuracy.by_job] == [(2, 1), (3, 3)]
    assert [(group.at_ms * 2 // HOUR_MS, group.forecasts) for group in accuracy.by_moment] == [(1, 2), (2, 1), (3, 1)]
    assert (accuracy.starts, accuracy.moments, accuracy.forecasts) == (2, 3, 4)


def test_a_job_overtaken_by_others_counts_once_among_jobs(overtaken: str) -> None:
    accuracy = measure_accuracy(open_workload(overtaken, procs=1), "sjf", HOUR_MS // 2, futures=3)
    [late] = [group for group in accuracy.by_job if group.job == 2]
    assert late.forecasts > accuracy.forecasts / 3
    assert late.by_p90 < 90
    assert accuracy.covered < accuracy.per_job, "the mean per job does not weigh each job once"
    assert accuracy.starts_covered < 100
    assert accuracy.worst_moment <= accuracy.per_moment <= 100


def test_a_job_still_pending_after_its_p90_counts_as_missed(overtaken: str) -> None:
    accuracy = measure_accuracy(open_workload(overtaken, procs=1), "sjf", HOUR_MS // 2, futures=3, until_ms=6 * HOUR_MS)
    [late] = [group for group in accuracy.by_job if group.job == 2]
    assert (late.by_p90, late.forecasts > 0) == (0, True)


def test_the_command_shows_a_row_for_each_policy_and_each_moment(
    three_jobs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["forecasts", three_jobs, "--policies", "fcfs,easy", "--procs", "1", "--every", "30m", "--by", "moment"])
        == 0
    )
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{Path(three_jobs).parent.name}/three, 3 jobs, forecasts every 30m; BY P90 in percent"
    assert out[1].split()[:4] == ["POLICY", "JOBS", "MOMENTS", "FORECASTS"]
    assert [row.split()[0] for row in out[2:4]] == ["fcfs", "easy"]
    assert out[out.index("fcfs, by moment") + 1].split() == ["AT", "FORECASTS", "BY", "P90", "P50", "ERROR"]


def test_the_command_prints_json_for_programs(three_jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forecasts", three_jobs, "--procs", "1", "--every", "30m", "--by", "job", "-o", "json"]) == 0
    [numbers] = json.loads(capsys.readouterr().out)
    assert (numbers["policy"], numbers["covered"], numbers["per_job"]) == ("easy", 100, 100)
    assert [group["job"] for group in numbers["by_job"]] == [2, 3]
    assert "by_moment" not in numbers


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["?first=3"], "there is no job 3"),
        (["", "--policy", "best"], "there is no policy 'best'"),
    ],
)
def test_invalid_input_is_reported_before_anything_runs(
    three_jobs: str, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["forecasts", three_jobs + args[0], "--procs", "1", *args[1:]]) == 2
    assert message in capsys.readouterr().err


def test_jobs_that_never_wait_get_no_forecast(three_jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forecasts", three_jobs, "--procs", "3", "--by", "job", "-q"]) == 0
    out = capsys.readouterr().out
    assert "no job waited long enough to get a forecast" in out


def test_shares_of_no_forecasts_are_dashes(three_jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["forecasts", three_jobs, "--procs", "100", "--every", "30m"]
    assert main(args) == 0
    head, row = capsys.readouterr().out.splitlines()[1:]
    assert head.startswith("POLICY")
    assert row.split() == ["easy", "0", "0", "0", *["-"] * 7, "0"]
    assert main([*args, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["covered"] is None
