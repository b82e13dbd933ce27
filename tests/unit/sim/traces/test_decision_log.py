"""Hodei's own decision log as a workload, from logs as the server writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders import NOW_MS, a_job, a_node
from hodei.engine.plan import Bind, Plan
from hodei.model.config import SchedulingConfig
from hodei.model.errors import InvalidInput
from hodei.model.facts import Fact, JobCancelled, JobRestored, JobSubmitted, NodeJoined, NodeLost, RunObserved
from hodei.runtime.decision_log import DecisionLog
from hodei.sim.traces import open_workload


def a_log(path: Path, *steps: tuple[int, list[Fact], list[int]]) -> Path:
    """Steps of (seconds after the start, facts, jobs that were placed)."""
    log = DecisionLog(path, SchedulingConfig(), last_event=0)
    for at, facts, placed in steps:
        binds = [Bind(job, "main", 0, "n1", "local") for job in placed]
        log.step(NOW_MS + at * 1000, facts, Plan(binds=binds))
    log.close()
    return path


def observed(run: str, state: Any, at: int) -> RunObserved:
    return RunObserved(run=run, state=state, at_ms=NOW_MS + at * 1000)


def test_submissions_nodes_and_run_times_come_from_the_facts(tmp_path: Path) -> None:
    path = a_log(
        tmp_path / "log",
        (0, [NodeJoined(a_node("n1"))], []),
        (5, [JobSubmitted(a_job(7, name="build", estimate_ms=90_000))], [7]),
        (6, [observed("7.0.1", "running", 6)], []),
        (46, [observed("7.0.1", "succeeded", 46)], []),
    )
    workload = open_workload(path)
    [job] = workload.arrivals
    assert (job.id, job.at_ms, job.run_ms, job.spec.name, job.spec.estimate_ms) == (7, 5000, 40_000, "build", 90_000)
    assert [node.name for node in workload.nodes] == ["n1"]
    assert workload.notes == []
    [known] = open_workload(path, estimates="actual").arrivals
    assert known.spec.estimate_ms == 40_000


def test_the_run_time_of_a_gang_is_that_of_its_slowest_member_in_its_last_attempt(tmp_path: Path) -> None:
    path = a_log(
        tmp_path / "log",
        (0, [JobSubmitted(a_job(1, count=2, estimate_ms=1))], [1]),
        (1, [observed("1.0.1", "running", 1), observed("1.1.1", "running", 1)], []),
        (99, [observed("1.0.1", "failed", 99), observed("1.1.1", "stopped", 99)], [1]),
        (110, [observed("1.0.2", "running", 100), observed("1.1.2", "running", 101)], []),
        (140, [observed("1.1.2", "succeeded", 120), observed("1.0.2", "succeeded", 140)], []),
    )
    [job] = open_workload(path).arrivals
    assert job.run_ms == 40_000


def test_a_run_never_observed_running_started_when_it_was_placed(tmp_path: Path) -> None:
    path = a_log(
        tmp_path / "log",
        (3, [JobSubmitted(a_job(1, estimate_ms=1))], [1]),
        (4, [observed("1.0.1", "succeeded", 5)], []),
    )
    [job] = open_workload(path).arrivals
    assert (job.at_ms, job.run_ms) == (0, 2000)


def test_values_missing_in_the_log_are_filled_in_and_counted(tmp_path: Path) -> None:
    path = a_log(
        tmp_path / "log",
        (0, [JobRestored(a_job(1)), JobRestored(a_job(2, state="succeeded")), JobSubmitted(a_job(3))], [1]),
        (1, [observed("1.0.1", "running", 1), JobSubmitted(a_job(4, estimate_ms=5000)), NodeLost("n9")], []),
        (31, [observed("1.0.1", "succeeded", 31), JobSubmitted(a_job(5)), JobCancelled(5)], []),
    )
    workload = open_workload(path)
    assert [(job.id, job.run_ms) for job in workload.arrivals] == [(1, 30_000), (3, 30_000), (4, 5000)]
    assert sorted(workload.notes) == [
        "1 jobs existed before the log: they arrive at its start",
        "1 jobs were cancelled before they ended: dropped",
        "1 nodes were lost: they are kept",
        "2 jobs have no end in the log: their estimate, else the median run time, is used",
        "2 jobs have no estimate",
    ]  # fmt: skip


def test_a_line_cut_off_by_a_killed_server_is_skipped(tmp_path: Path) -> None:
    path = a_log(tmp_path / "log", (0, [JobSubmitted(a_job(1, estimate_ms=1))], []))
    path.write_bytes(path.read_bytes() + b'{"now": 17')
    workload = open_workload(path)
    assert len(workload.arrivals) == 1
    assert "1 line at the end was cut off: skipped" in workload.notes


def test_a_damaged_line_is_reported_with_its_number(tmp_path: Path) -> None:
    path = a_log(tmp_path / "log", (0, [JobSubmitted(a_job(1))], []))
    path.write_bytes(path.read_bytes() + b'{"now": "noon", "facts": []}\n')
    with pytest.raises(InvalidInput, match="log, line 3"):
        open_workload(path)
