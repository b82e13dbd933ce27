"""Retention of output: a clock that jumps ahead erases nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hodei.agent import logs
from hodei.agent.logs import RetentionClock
from hodei.backends.docker.logs import Logs as DockerLogs
from hodei.backends.hpc.tracked_run import Files
from hodei.backends.kubernetes.pod_api import Logs as PodLogs

DAY_S = 86_400.0
MONTH_S, YEAR_S = 30 * DAY_S, 365 * DAY_S


class Times:
    """Both clocks; only the wall clock can be set."""

    def __init__(self) -> None:
        self.wall_s, self.steady_s = time.time(), 1000.0

    def advance(self, seconds: float) -> None:
        self.wall_s += seconds
        self.steady_s += seconds


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    times = Times()
    monkeypatch.setattr(time, "time", lambda: times.wall_s)
    monkeypatch.setattr(logs, "steady_s", lambda: times.steady_s)
    return times


def test_the_cutoff_follows_the_clock(tmp_path: Path, times: Times):
    clock = RetentionClock(str(tmp_path / "clock"), MONTH_S)
    for _ in range(100):
        assert clock.cutoff_s() == pytest.approx(times.wall_s - MONTH_S)
        times.advance(DAY_S / 2)


def test_a_jump_ahead_counts_only_after_a_day_of_running(tmp_path: Path, times: Times):
    clock, began_s = RetentionClock(str(tmp_path / "clock"), MONTH_S), times.wall_s
    clock.cutoff_s()
    times.wall_s += YEAR_S
    for _ in range(24):
        assert clock.cutoff_s() <= began_s + DAY_S - MONTH_S
        times.advance(3600)
    times.advance(3600)
    assert clock.cutoff_s() == pytest.approx(times.wall_s - MONTH_S)


def test_a_corrected_clock_counts_at_once(tmp_path: Path, times: Times):
    clock = RetentionClock(str(tmp_path / "clock"), MONTH_S)
    clock.cutoff_s()
    times.wall_s += YEAR_S
    clock.cutoff_s()
    times.wall_s -= YEAR_S
    assert clock.cutoff_s() == pytest.approx(times.wall_s - MONTH_S)


def test_a_restart_does_not_confirm_a_jump(tmp_path: Path, times: Times):
    path, began_s = str(tmp_path / "clock"), times.wall_s
    RetentionClock(path, MONTH_S).cutoff_s()
    times.wall_s += YEAR_S
    for _ in range(100):
        times.steady_s = 7.0  # a reboot
        assert RetentionClock(path, MONTH_S).cutoff_s() < began_s - MONTH_S + 1


@pytest.mark.parametrize("text", ["", "soon", "1 2", "nan nan nan", "-1 0 0", "inf 0 0", "1e300 0 0", "\0" * 1000])
def test_a_damaged_file_is_ignored(tmp_path: Path, times: Times, text: str):
    path = tmp_path / "clock"
    path.write_text(text)
    assert RetentionClock(str(path), MONTH_S).cutoff_s() == pytest.approx(times.wall_s - MONTH_S)


def test_logs_of_other_backends_survive_a_clock_jump_and_expire_by_age(tmp_path: Path, times: Times):
    docker, pods = DockerLogs(tmp_path / "docker", None, MONTH_S), PodLogs(tmp_path / "pods", None, MONTH_S)
    files, clock = Files(tmp_path / "hpc"), RetentionClock(str(tmp_path / "clock"), MONTH_S)
    outputs = [
        tmp_path / "docker" / "1.0.1" / "stdout",
        tmp_path / "pods" / "1.0.1",
        tmp_path / "hpc" / "0" / "1.0.1.out",
    ]
    for output in outputs:
        output.parent.mkdir(parents=True)
        output.write_text("hello\n")
    os.utime(outputs[0].parent, (times.wall_s, times.wall_s))

    def prune_all() -> list[bool]:
        docker.prune()
        pods.prune()
        files.sweep(clock.cutoff_s(), ())
        return [output.exists() for output in outputs]

    assert prune_all() == [True] * 3
    times.wall_s += YEAR_S
    assert prune_all() == [True] * 3
    times.wall_s -= YEAR_S
    for _ in range(32):
        times.advance(DAY_S * 0.99)
        last = prune_all()
    assert last == [False] * 3
