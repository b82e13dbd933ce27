"""Scenes that stories about gangs and preemption begin with, and words for what happens in them."""

from __future__ import annotations

from typing import Any

from hodei.model.facts import RunObserved
from unit.control.house import House, a_house


def running(house: House, *runs: str) -> None:
    """These have been started by their backends."""
    house.learn(*(RunObserved(run, "running", house.now_ms) for run in runs))


def filled(*cpus: int, priority: str = "low", **options: Any) -> House:
    """A house with a job of `priority` on each core, ids from 1, all running for a minute."""
    house = a_house(*cpus, **options)
    for id in range(1, sum(cpus) + 1):
        house.submit(id, cpu="1", priority=priority)
        running(house, f"{id}.0.1")
    house.now_ms += 60_000
    return house


def gone(house: House, *runs: str, exit_code: int = 143) -> None:
    """These have done as they were told, one after the other."""
    for run in runs:
        house.now_ms += 100
        house.see(run, "failed", exit_code)


def live(house: House, job: int = 1) -> list[str]:
    return sorted(run.id for run in house.controller.world.live_runs(job))


def evicted(house: House) -> list[int]:
    """Whose place was taken, in order."""
    return [event.job for event in house.events if event.kind == "job.preempted"]


def is_empty(house: House) -> bool:
    return not any(house.used().values())
