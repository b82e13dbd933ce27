"""Common setups and reports for tests of gangs and preemption."""

from __future__ import annotations

from typing import Any

from hodei.model.facts import RunObserved
from unit.control.harness import Harness, a_harness


def mark_running(harness: Harness, *runs: str) -> None:
    """The backends report that these runs are running."""
    harness.step(*(RunObserved(run, "running", harness.now_ms) for run in runs))


def full_cluster(*cpus: int, priority: str = "low", **options: Any) -> Harness:
    """A cluster with a job of `priority` on each core, ids from 1, all running for a minute."""
    harness = a_harness(*cpus, **options)
    for id in range(1, sum(cpus) + 1):
        harness.submit(id, cpu="1", priority=priority)
        mark_running(harness, f"{id}.0.1")
    harness.now_ms += 60_000
    return harness


def stop_runs(harness: Harness, *runs: str, exit_code: int = 143) -> None:
    """The backends report that these runs have stopped, one after the other."""
    for run in runs:
        harness.now_ms += 100
        harness.observe(run, "failed", exit_code)


def live_runs(harness: Harness, job: int = 1) -> list[str]:
    return sorted(run.id for run in harness.controller.cluster.live_runs(job))


def preempted_jobs(harness: Harness) -> list[int]:
    """The preempted jobs, in order."""
    return [event.job for event in harness.events if event.kind == "job.preempted"]


def is_empty(harness: Harness) -> bool:
    return not any(harness.used().values())
