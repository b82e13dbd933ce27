"""The binder carries out acts, in order, backend by backend. A slow backend holds up its own acts and no others.

Acts are idempotent, so those whose reply was lost are simply sent again; but a run that was said not to have started is
never started after that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from hodei.control.gangs import START_FAILED
from hodei.model.effects import Act, Forget, SaveWork, Start, Stop
from hodei.model.errors import BackendError, BackendRefused
from hodei.model.facts import Fact, RunObserved
from hodei.model.ids import RunId
from hodei.ports import Backend, Clock
from hodei.runtime.metrics import Metrics

log = logging.getLogger("hodei.binder")


class Binder:
    def __init__(
        self, backends: Mapping[str, Backend], clock: Clock, metrics: Metrics, tell: Callable[[Sequence[Fact]], None]
    ) -> None:
        self._backends = backends
        self._clock = clock
        self._metrics = metrics
        self._tell = tell
        self._acts: dict[str, list[Act]] = {name: [] for name in backends}
        self._more = {name: asyncio.Event() for name in backends}
        self._failed: set[RunId] = set()

    def act(self, acts: Sequence[Act]) -> None:
        orphans: list[Fact] = []
        for act in acts:
            backend = act.run.backend if isinstance(act, Start) else act.backend
            if backend in self._acts:
                self._acts[backend].append(act)
                self._more[backend].set()
            elif isinstance(act, Start):
                orphans.append(self._not_started(act, BackendRefused(f"there is no backend {backend!r} any more")))
        if orphans:
            self._tell(orphans)

    async def serve(self, name: str) -> None:
        """Carry out this backend's acts for ever."""
        backend, pause = self._backends[name], 0.1
        while True:
            await self._more[name].wait()
            self._more[name].clear()
            acts, self._acts[name] = self._acts[name], []
            if not acts:
                continue
            try:
                await self._carry_out(backend, acts)
                pause = 0.1
            except (BackendError, OSError, TimeoutError) as error:
                self._metrics.backend_errors.labels(name).inc()
                log.warning("backend %s: %s; %d acts will be sent again in %.1f s", name, error, len(acts), pause)
                self._acts[name] = acts + self._acts[name]
                await asyncio.sleep(pause)
                pause = min(pause * 2, 5.0)
                self._more[name].set()

    async def _carry_out(self, backend: Backend, acts: list[Act]) -> None:
        """What is done is taken off `acts`, so that only the rest is sent again should something fail."""
        starts = [act for act in acts if isinstance(act, Start) and act.run.id not in self._failed]
        saves = [act for act in acts if isinstance(act, SaveWork)]
        stops = [act for act in acts if isinstance(act, Stop)]
        forgets = [act for act in acts if isinstance(act, Forget)]
        if starts:
            failed = await backend.start(starts)
            if failed:
                self._failed.update(failed)
                self._tell([self._not_started(act, failed[act.run.id]) for act in starts if act.run.id in failed])
        acts[:] = [*stops, *saves, *forgets]
        if stops:
            await backend.stop(stops)
        if saves:
            await backend.checkpoint(saves)
            acts[:] = [*stops, *forgets]
        if forgets:
            await backend.forget(forgets)
            self._failed.difference_update(act.run for act in forgets)

    def _not_started(self, act: Start, error: BackendError | BackendRefused) -> RunObserved:
        return RunObserved(
            act.run.id, "failed", self._clock.now_ms(), reason_code=START_FAILED, reason=error.message,
            permanent=isinstance(error, BackendRefused),
        )  # fmt: skip
