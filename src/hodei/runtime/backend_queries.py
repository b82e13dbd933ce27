"""What a backend is asked now and then for people to see: when those in its own line will begin, what is used on its nodes.

The last answers are kept here and nowhere else. Each question has a task of its own and a time limit, and one that comes to
nothing costs no more than the answer: whether a backend is well is for its pulse to find out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Generic, TypeVar

from msgspec import Struct, structs

from hodei.control.state import ClusterState
from hodei.model.backend import NodeUsage
from hodei.model.explanation import BackendQueueEntry, Explanation
from hodei.model.ids import NodeName, RunId
from hodei.model.job import Run
from hodei.ports import Backend
from hodei.runtime.metrics import MAX_NODES

log = logging.getLogger("hodei.inquiries")
_LINE_EVERY_S = 30.0
_USAGE_EVERY_S = 60.0
_TIMEOUT_S = 20.0
# Nodes are measured for so long after someone last looked at the metrics: on some systems it is work.
_LOOKED_AT_S = 600.0

T = TypeVar("T")


class StartEstimates(Struct, frozen=True):
    """Of a run in a backend's own line: when it will begin (0 if nobody can tell), and why it waits."""

    start_ms: int = 0
    reason: str = ""


class BackendQuery(Generic[T]):
    """One question to one backend. There is no answer while it is not `wanted`, nor after one that came to nothing."""

    def __init__(
        self, what: str, ask: Callable[[], Awaitable[dict[str, T]]], wanted: Callable[[], bool], every_s: float
    ) -> None:
        self._what, self._ask, self._wanted, self._every_s = what, ask, wanted, every_s
        self._in_vain = False
        self.answer: dict[str, T] = {}

    async def run(self) -> None:
        while True:
            await self.once()
            await asyncio.sleep(self._every_s)

    async def once(self) -> None:
        if not self._wanted():
            self.answer = {}
            return
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                self.answer = await self._ask()
            self._in_vain = False
        except Exception as error:
            self.answer = {}
            if not self._in_vain:  # said once, not every minute of an outage
                log.warning("%s is not known for now: %s", self._what, str(error) or type(error).__name__)
            self._in_vain = True


class BackendQueries:
    """All that one backend is asked, as far as it says that it can tell. `well`: whether it is worth asking now."""

    def __init__(self, backend: Backend, cluster: ClusterState, well: Callable[[], bool]) -> None:
        self._backend, self._cluster, self._well = backend, cluster, well
        self._looked_s = -_LOOKED_AT_S
        self.line = BackendQuery[StartEstimates](
            f"when runs in the line of backend {backend.name} will begin", self._ask_line, self._has_line, _LINE_EVERY_S
        )
        self.used = BackendQuery[NodeUsage](
            f"what is used on the nodes of backend {backend.name}", backend.usage, self._is_looked_at, _USAGE_EVERY_S
        )

    def work(self) -> list[Coroutine[Any, Any, None]]:
        """To be run as tasks for as long as the backend is there."""
        can = self._backend.capabilities
        line = [self.line.run()] if can.delegates and can.expects else []
        return [*line, self.used.run()] if can.usage else line

    def look_at_usage(self) -> dict[NodeName, NodeUsage]:
        """What was measured last; someone wants to know, so it is measured again soon."""
        self._looked_s = time.monotonic()
        return self.used.answer if len(self.used.answer) <= MAX_NODES else {}

    def _has_line(self) -> bool:
        if not self._well():
            return False
        runs = (run for of_job in self._cluster.runs.values() for run in of_job.values())
        return any(run.state == "placed" and run.backend == self._backend.name for run in runs)

    def _is_looked_at(self) -> bool:
        lately = time.monotonic() - self._looked_s < _LOOKED_AT_S
        return lately and len(self._cluster.nodes) <= MAX_NODES and self._well()

    async def _ask_line(self) -> dict[RunId, StartEstimates]:
        starts, known = await self._backend.expected(), await self._backend.known()
        reasons = {run: said.reason for run, said in known.items() if said.state == "placed"}
        return {run: StartEstimates(starts.get(run, 0), reasons.get(run, "")) for run in starts.keys() | reasons.keys()}


def backend_queue(
    answer: Explanation, runs: Iterable[Run], backends: Mapping[str, Backend], foretold: Mapping[RunId, StartEstimates]
) -> Explanation:
    """The answer for a job that is placed, if the backend that it was handed to has a line of its own. Its gang begins when
    the last of those who wait does."""
    lines = {name for name, backend in backends.items() if backend.capabilities.delegates}
    waiting = [run for run in runs if run.state == "placed" and run.backend in lines]
    if answer.status != "placed" or not waiting:
        return answer
    told = {run.id: foretold.get(run.id, StartEstimates()) for run in waiting}
    # Those of whom nobody can tell come last of all.
    last = max(waiting, key=lambda run: (not told[run.id].start_ms, told[run.id].start_ms, run.id))
    line = BackendQueueEntry(last.backend, told[last.id].start_ms, told[last.id].reason)
    text = answer.summary.replace(", about to start", f", waits in {line.backend}'s own line", 1)
    return structs.replace(answer, summary=text, backend_queue=line)
