"""A clock that jumps erases no output, wherever that is kept."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hodei.agent import logs
from hodei.agent.logs import Aging
from hodei.backends.docker.logs import Logs as DockerLogs
from hodei.backends.hpc.request import Files
from hodei.backends.kubernetes.streams import Logs as PodLogs

DAY_S = 86_400.0
MONTH_S, YEAR_S = 30 * DAY_S, 365 * DAY_S


class Times:
    """Both clocks; only the wall clock can be set."""

    def __init__(self) -> None:
        self.wall_s, self.steady_s = time.time(), 1000.0

    def pass_by(self, seconds: float) -> None:
        self.wall_s += seconds
        self.steady_s += seconds


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    times = Times()
    monkeypatch.setattr(time, "time", lambda: times.wall_s)
    monkeypatch.setattr(logs, "steady_s", lambda: times.steady_s)
    return times


def test_what_is_older_than_it_is_kept_goes_as_time_passes(tmp_path: Path, times: Times):
    kept = Aging(str(tmp_path / "clock"), MONTH_S)
    for _ in range(100):
        assert kept.oldest_s() == pytest.approx(times.wall_s - MONTH_S)
        times.pass_by(DAY_S / 2)


def test_a_jump_ahead_is_believed_only_after_a_day_of_running(tmp_path: Path, times: Times):
    kept, began_s = Aging(str(tmp_path / "clock"), MONTH_S), times.wall_s
    kept.oldest_s()
    times.wall_s += YEAR_S
    for _ in range(24):
        assert kept.oldest_s() <= began_s + DAY_S - MONTH_S
        times.pass_by(3600)
    times.pass_by(3600)
    assert kept.oldest_s() == pytest.approx(times.wall_s - MONTH_S)


def test_a_clock_that_is_put_right_again_is_believed_at_once(tmp_path: Path, times: Times):
    kept = Aging(str(tmp_path / "clock"), MONTH_S)
    kept.oldest_s()
    times.wall_s += YEAR_S
    kept.oldest_s()
    times.wall_s -= YEAR_S
    assert kept.oldest_s() == pytest.approx(times.wall_s - MONTH_S)


def test_a_restart_is_no_confirmation(tmp_path: Path, times: Times):
    path, began_s = str(tmp_path / "clock"), times.wall_s
    Aging(path, MONTH_S).oldest_s()
    times.wall_s += YEAR_S
    for _ in range(100):
        times.steady_s = 7.0  # the machine was started anew
        assert Aging(path, MONTH_S).oldest_s() < began_s - MONTH_S + 1


@pytest.mark.parametrize("text", ["", "soon", "1 2", "nan nan nan", "-1 0 0", "inf 0 0", "1e300 0 0", "\0" * 1000])
def test_a_file_that_cannot_be_read_is_as_none(tmp_path: Path, times: Times, text: str):
    path = tmp_path / "clock"
    path.write_text(text)
    assert Aging(str(path), MONTH_S).oldest_s() == pytest.approx(times.wall_s - MONTH_S)


def test_output_on_other_backends_outlives_a_jump_and_goes_when_it_is_old(tmp_path: Path, times: Times):
    docker, pods = DockerLogs(tmp_path / "docker", None, MONTH_S), PodLogs(tmp_path / "pods", None, MONTH_S)
    files, kept = Files(tmp_path / "hpc"), Aging(str(tmp_path / "clock"), MONTH_S)
    outputs = [
        tmp_path / "docker" / "1.0.1" / "stdout",
        tmp_path / "pods" / "1.0.1",
        tmp_path / "hpc" / "0" / "1.0.1.out",
    ]
    for output in outputs:
        output.parent.mkdir(parents=True)
        output.write_text("hello\n")
    os.utime(outputs[0].parent, (times.wall_s, times.wall_s))

    def tidy_up() -> list[bool]:
        docker.prune()
        pods.prune()
        files.sweep(kept.oldest_s(), ())
        return [output.exists() for output in outputs]

    assert tidy_up() == [True] * 3
    times.wall_s += YEAR_S
    assert tidy_up() == [True] * 3
    times.wall_s -= YEAR_S
    for _ in range(32):
        times.pass_by(DAY_S * 0.99)
        last = tidy_up()
    assert last == [False] * 3
