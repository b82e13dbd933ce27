"""Priority inheritance: a job counts in its line for as much as the most important job that waits for it, or for one that
waits for it. What it was submitted with does not change: it takes nobody's place for it, and shows it no longer when they
have ended or do not wait any more."""

from __future__ import annotations

from collections.abc import Mapping

from hodei.control.lifecycle.dependencies import Dependencies
from hodei.control.queue.base import SchedulingQueue
from hodei.control.state import ClusterState
from hodei.model.ids import JobId


class PriorityInheritance:
    def __init__(self, world: ClusterState, dependencies: Dependencies, lines: Mapping[str, object]) -> None:
        self._world, self._dependencies, self._lines = world, dependencies, lines
        self.lifts: dict[JobId, int] = {}

    def follow(self) -> None:
        """Once a step: what has changed in who waits for whom."""
        changed = self._dependencies.take_changed()
        while changed:
            job, _ = changed.popitem()
            if self._lift(job):
                changed |= dict.fromkeys(self._dependencies.awaited(job))

    def _lift(self, id: JobId) -> bool:
        """Whether it counts for more or less than before."""
        job, before = self._world.jobs.get(id), self.lifts.get(id)
        waiting = [self._worth(waiter) for waiter in self._dependencies.dependents(id)] if job is not None else []
        to = max(waiting, default=None)
        if job is None or to is None or to <= job.spec.priority:
            to = None
        if to == before:
            return False
        if to is None:
            del self.lifts[id]
        else:
            self.lifts[id] = to
        line = self._lines.get(job.spec.profile) if job is not None else None
        if isinstance(line, SchedulingQueue):
            line.lift(id, to)
        return True

    def _worth(self, id: JobId) -> int:
        job = self._world.jobs.get(id)
        own = job.spec.priority if job is not None else 0
        return max(own, self.lifts.get(id, own))
