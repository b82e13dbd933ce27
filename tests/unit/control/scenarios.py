"""Start situations of tests about gangs and preemption, and helpers for what happens in them."""

from __future__ import annotations

from typing import Any

from hodei.model.facts import RunObserved
from unit.control.harness import Harness, a_harness


def running(harness: Harness, *runs: str) -> None:
    """These have been started by their backends."""
    harness.learn(*(RunObserved(run, "running", harness.now_ms) for run in runs))


def filled(*cpus: int, priority: str = "low", **options: Any) -> Harness:
    """A house with a job of `priority` on each core, ids from 1, all running for a minute."""
    harness = a_harness(*cpus, **options)
    for id in range(1, sum(cpus) + 1):
        harness.submit(id, cpu="1", priority=priority)
        running(harness, f"{id}.0.1")
    harness.now_ms += 60_000
    return harness


def gone(harness: Harness, *runs: str, exit_code: int = 143) -> None:
    """These have done as they were told, one after the other."""
    for run in runs:
        harness.now_ms += 100
        harness.see(run, "failed", exit_code)


def live(harness: Harness, job: int = 1) -> list[str]:
    return sorted(run.id for run in harness.controller.cluster.live_runs(job))


def evicted(harness: Harness) -> list[int]:
    """Whose place was taken, in order."""
    return [event.job for event in harness.events if event.kind == "job.preempted"]


def is_empty(harness: Harness) -> bool:
    return not any(harness.used().values())
