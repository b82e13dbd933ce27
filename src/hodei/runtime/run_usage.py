"""What running runs use now: measured by their backends on request, and kept in memory only.

The end of a run brings its final usage (`RunObserved.usage`), which is stored with the run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from hodei.control.state import ClusterState
from hodei.model.ids import RunId
from hodei.model.job import Job, Run
from hodei.model.usage import RunUsage
from hodei.ports import Backend

log = logging.getLogger("hodei.run_usage")
# An answer is given again for so long. CPU usage is a rate between two measurements, which must not be too close.
FRESH_S = 2.0
TIMEOUT_S = 5.0


class LiveUsage(Struct, frozen=True):
    """`cpu_milli`: cores in use since the previous measurement, in thousandths; on average since the start of the run
    without one. None: unknown."""

    usage: RunUsage
    cpu_milli: int | None = None


class _Sample(Struct, frozen=True):
    at_s: float
    live: LiveUsage


class RunUsageReader:
    """`clock_s` is monotonic."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        cluster: ClusterState,
        now_ms: Callable[[], int],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backends, self._cluster, self._now_ms, self._clock_s = backends, cluster, now_ms, clock_s
        self._samples: dict[str, dict[RunId, _Sample]] = {}  # by backend
        self._locks: dict[str, asyncio.Lock] = {}

    def running(self, *, project: str = "", user: str = "", node: str = "") -> list[tuple[Job, Run]]:
        """The running runs that match, in order of their jobs."""
        jobs = self._cluster.jobs
        return [
            (jobs[id], run)
            for id, runs in self._cluster.runs.items()
            for run in runs.values()
            if run.state == "running"
            and (not node or run.node == node)
            and (not project or jobs[id].spec.project == project)
            and (not user or jobs[id].spec.user == user)
        ]

    async def read(self, runs: Iterable[Run], timeout_s: float = TIMEOUT_S) -> dict[RunId, LiveUsage]:
        """Of these running runs; those that were not measured in time are absent."""
        by_backend: dict[str, list[Run]] = {}
        for run in runs:
            backend = self._backends.get(run.backend)
            if backend is not None and backend.capabilities.run_usage:
                by_backend.setdefault(run.backend, []).append(run)
        found: dict[RunId, LiveUsage] = {}
        for answer in await asyncio.gather(*(self._read(*each, timeout_s) for each in by_backend.items())):
            found |= answer
        return found

    async def _read(self, name: str, runs: Sequence[Run], timeout_s: float) -> dict[RunId, LiveUsage]:
        try:
            async with asyncio.timeout(timeout_s), self._locks.setdefault(name, asyncio.Lock()):
                await self._measure(name, runs)
        except Exception as error:  # says nothing about the health of the backend
            log.debug("the usage of runs of backend %s is unknown: %s", name, str(error) or type(error).__name__)
        samples = self._samples.get(name, {})
        return {run.id: samples[run.id].live for run in runs if run.id in samples}

    async def _measure(self, name: str, runs: Sequence[Run]) -> None:
        kept = {id: one for id, one in self._samples.get(name, {}).items() if self._is_running(id)}
        due = [run for run in runs if run.id not in kept or self._clock_s() - kept[run.id].at_s >= FRESH_S]
        self._samples[name] = kept
        if not due:
            return
        usages = await self._backends[name].run_usage([run.id for run in due])
        at_s, now_ms = self._clock_s(), self._now_ms()
        for run in due:
            usage, before = usages.get(run.id), kept.pop(run.id, None)
            if usage is not None:
                kept[run.id] = _Sample(at_s, LiveUsage(usage, _cpu_milli(run, usage, before, at_s, now_ms)))

    def _is_running(self, id: RunId) -> bool:
        run = self._cluster.run(id)
        return run is not None and run.state == "running"


def _cpu_milli(run: Run, usage: RunUsage, before: _Sample | None, at_s: float, now_ms: int) -> int | None:
    if usage.cpu_ms is None:
        return None
    if before is not None and before.live.usage.cpu_ms is not None:
        used_ms, elapsed_s = usage.cpu_ms - before.live.usage.cpu_ms, at_s - before.at_s
    else:
        used_ms, elapsed_s = usage.cpu_ms, (now_ms - run.started_ms) / 1000
    return max(0, round(used_ms / elapsed_s)) if elapsed_s > 0 else None
