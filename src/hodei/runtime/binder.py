"""The binder carries out acts, in order, backend by backend. A slow backend holds up its own acts and no others.

Acts are idempotent, so those whose reply was lost are simply sent again; but a run that was said not to have started is
never started after that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from hodei.control.gangs import START_FAILED
from hodei.model.effects import Act, Forget, SaveWork, Spare, Start, Stop
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused, StaleEpoch
from hodei.model.facts import Fact, RunObserved, RunSpared
from hodei.model.ids import RunId
from hodei.ports import Backend, Clock
from hodei.runtime import two_phase
from hodei.runtime.metrics import Metrics
from hodei.runtime.watcher import CALL_TIMEOUT_S

log = logging.getLogger("hodei.binder")


class Binder:
    def __init__(
        self, backends: Mapping[str, Backend], clock: Clock, metrics: Metrics, tell: Callable[[Sequence[Fact]], None]
    ) -> None:
        self._backends = backends
        self.barred: dict[str, str] = {}
        self.on_failure: Callable[[str, str], None] = lambda name, text: None
        self.on_success: Callable[[str], None] = lambda name: None
        self._clock = clock
        self._metrics = metrics
        self._tell = tell
        self._acts: dict[str, list[Act]] = {name: [] for name in backends}
        self._more = {name: asyncio.Event() for name in backends}
        self._failed: set[RunId] = set()
        self._unsure: set[RunId] = set()
        # Runs whose order to stop was sent, or may have been.
        self._told: set[RunId] = set()

    def act(self, acts: Sequence[Act]) -> None:
        orphans: list[Fact] = []
        for act in acts:
            if isinstance(act, Spare):
                orphans += self._spared(act)
                continue
            backend = act.run.backend if isinstance(act, Start) else act.backend
            if self.barred and backend in self.barred and isinstance(act, Start):
                self._failed.add(act.run.id)
                orphans.append(self._not_started(act, BackendError(self.barred[backend])))
            elif backend in self._acts:
                self._acts[backend].append(act)
                self._more[backend].set()
            elif isinstance(act, Start):
                orphans.append(self._not_started(act, BackendRefused(f"there is no backend {backend!r} any more")))
        if orphans:
            self._tell(orphans)

    def _spared(self, act: Spare) -> list[Fact]:
        """An order to stop that cannot have arrived is dropped. One that may have is left: the run goes."""
        orders = self._acts.get(act.backend, [])
        kept = [one for one in orders if not (isinstance(one, Stop) and one.run == act.run)]
        if len(kept) == len(orders) or act.run in self._told:
            return []
        self._acts[act.backend] = kept
        return [RunSpared(act.run)]

    def add(self, name: str) -> None:
        """A backend has come; `serve` is next."""
        self._acts.setdefault(name, [])
        self._more.setdefault(name, asyncio.Event())

    def remove(self, name: str) -> None:
        """A backend is no more: what was to be done there will not be."""
        self._acts.pop(name, None)
        self._more.pop(name, None)
        self.barred.pop(name, None)

    def bar(self, name: str, reason: str) -> None:
        """Starts that cannot have arrived are given back, so that they can be placed elsewhere; further ones too, until
        `reason` is empty. Those of which nobody knows whether they arrived wait: nothing runs twice."""
        if not reason:
            self.barred.pop(name, None)
            return
        self.barred[name] = reason
        back = [a for a in self._acts[name] if isinstance(a, Start) and a.run.id not in self._unsure | self._failed]
        if back:
            gone = {act.run.id for act in back}
            self._acts[name] = [a for a in self._acts[name] if not (isinstance(a, Start) and a.run.id in gone)]
            self._failed |= gone
            self._tell([self._not_started(act, BackendError(reason)) for act in back])

    async def serve(self, name: str) -> None:
        """Carry out this backend's acts for ever."""
        backend, pause = self._backends[name], 0.1
        while True:
            await self._more[name].wait()
            self._more[name].clear()
            acts, self._acts[name] = self._acts[name], []
            if not acts:
                continue
            told = {act.run for act in acts if isinstance(act, Stop)} - self._told
            self._told |= told
            try:
                await self._carry_out(backend, acts)
                if pause > 0.1:
                    pause = 0.1
                    self.on_success(name)
            except StaleEpoch:
                raise
            except BackendRefused as error:
                log.error("backend %s will never do it, %d acts are dropped: %s", name, len(acts), error)
            except Exception as error:
                if not isinstance(error, BackendError | OSError | TimeoutError):
                    log.exception("backend %s", name)
                text = str(error) or f"no answer within {CALL_TIMEOUT_S:g} s"
                self._metrics.backend_errors.labels(name).inc()
                log.warning("backend %s: %s; %d acts will be sent again in %.1f s", name, text, len(acts), pause)
                if getattr(error, "code", "") == NOT_REACHED:
                    # What is still in `acts` did not arrive; the stops before it did.
                    self._told -= {act.run for act in acts if isinstance(act, Stop)} & told
                else:
                    self._unsure.update(act.run.id for act in acts if isinstance(act, Start))
                self._acts[name] = acts + self._acts[name]
                self.on_failure(name, text)
                if name in self.barred:
                    self.bar(name, self.barred[name])
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
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    if backend.capabilities.reserve and any(act.world_size > 1 for act in starts):
                        failed = await two_phase.start(backend, starts)
                    else:
                        failed = await backend.start(starts)
            except BackendRefused as error:
                failed = {act.run.id: error for act in starts}
            if self._unsure:
                self._unsure.difference_update(act.run.id for act in starts)
            if failed:
                self._failed.update(failed)
                self._tell([self._not_started(act, failed[act.run.id]) for act in starts if act.run.id in failed])
        acts[:] = [*stops, *saves, *forgets]
        trouble: BackendError | None = None
        kinds: tuple[tuple[Sequence[Act], Callable[[Any], Awaitable[None]]], ...] = (
            (stops, backend.stop),
            (saves, backend.checkpoint),
            (forgets, backend.forget),
        )
        for orders, call in kinds:
            if orders:
                try:
                    await self._order(backend.name, orders, call)
                except BackendError as error:
                    if error.code == NOT_REACHED:
                        raise
                    trouble = trouble or error  # the next kind may be taken all the same
                    continue
                acts[:] = [act for act in acts if not isinstance(act, type(orders[0]))]
        if forgets and not any(isinstance(act, Forget) for act in acts):
            self._failed.difference_update(act.run for act in forgets)
            self._told.difference_update(act.run for act in forgets)
        if trouble is not None:
            raise trouble

    @staticmethod
    async def _order(name: str, orders: Sequence[Act], call: Callable[[Any], Awaitable[None]]) -> None:
        """One call for orders of one kind. A refusal drops these orders and no others."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await call(orders)
        except BackendRefused as error:
            kind = type(orders[0]).__name__
            log.error("backend %s refuses for good, %d orders (%s) are dropped: %s", name, len(orders), kind, error)

    def _not_started(self, act: Start, error: BackendError | BackendRefused) -> RunObserved:
        return RunObserved(
            act.run.id, "failed", self._clock.now_ms(), reason_code=START_FAILED, reason=error.message,
            permanent=isinstance(error, BackendRefused),
        )  # fmt: skip
