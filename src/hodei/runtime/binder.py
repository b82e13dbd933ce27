"""The binder carries out acts, in order, backend by backend. A slow backend holds up its own acts and no others.

Acts are idempotent, so those whose reply was lost are simply sent again; but a run that was said not to have started is
never started after that, and no run is said not to have started as long as that is unknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import Any

from hodei.control.lifecycle.runs import NOT_REACHED_RUN, START_FAILED
from hodei.model.effects import Act, Forget, Start, Stop, TakeCheckpoint, WithdrawStop
from hodei.model.errors import IN_DOUBT, NOT_REACHED, BackendError, BackendRefused, StaleEpoch
from hodei.model.facts import Fact, RunObserved, StopWithdrawn
from hodei.model.ids import RunId
from hodei.ports import Backend, Clock
from hodei.runtime.metrics import Metrics
from hodei.runtime.watcher import CALL_TIMEOUT_S

# ------------------------------------------------------------------------------------------- two phase
# Gangs on a backend that can set room aside: first room for all of its members there, then their starts; else none
# starts.


Failed = dict[RunId, BackendError | BackendRefused]


async def start(backend: Backend, orders: Sequence[Start], unsure: Set[RunId] = frozenset()) -> Failed:
    """As `Backend.start`: what is not in the answer was accepted. `unsure`: runs that may have begun already. For a gang with
    one of these no room is asked for: "no room" would be taken for "has not begun", and it may be what fills the room."""
    gangs: dict[tuple[int, int], list[Start]] = {}
    for order in orders:
        if order.world_size > 1:
            gangs.setdefault((order.run.job, order.run.attempt), []).append(order)
    for id in [id for id, members in gangs.items() if any(order.run.id in unsure for order in members)]:
        del gangs[id]
    failed: Failed = {}
    for members in gangs.values():
        try:
            await backend.reserve(members)
        except (BackendError, BackendRefused) as error:
            failed.update({order.run.id: error for order in members})
    left = [order for order in orders if order.run.id not in failed]
    refused = await backend.start(left) if left else {}
    if refused and gangs:
        await backend.unreserve([order.run.id for order in left if order.run.id in refused and order.world_size > 1])
    return {**failed, **refused}


# ----------------------------------------------------------------------------------------------------

log = logging.getLogger("hodei.binder")
# How often a backend is asked again about a start that is in doubt.
DOUBT_PAUSE_S = 0.5


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
        # Starts that were sent, or may have been, and not answered for certain. They are never given back.
        self._unsure: set[RunId] = set()
        # Runs whose order to stop was sent, or may have been.
        self._told: set[RunId] = set()

    def act_again(self, acts: Sequence[Act]) -> None:
        """Acts that were perhaps sent before, by us or by an earlier server."""
        self._unsure.update(act.run.id for act in acts if isinstance(act, Start))
        self.act(acts)

    def act(self, acts: Sequence[Act]) -> None:
        orphans: list[Fact] = []
        for act in acts:
            if isinstance(act, WithdrawStop):
                orphans += self._spared(act)
                continue
            backend = act.run.backend if isinstance(act, Start) else act.backend
            barred = self.barred and backend in self.barred and isinstance(act, Start)
            if barred and isinstance(act, Start) and act.run.id not in self._unsure:
                self._failed.add(act.run.id)
                orphans.append(self._not_started(act, BackendError(self.barred[backend], code=NOT_REACHED)))
            elif backend in self._acts:
                self._acts[backend].append(act)
                self._more[backend].set()
            elif isinstance(act, Start):
                orphans.append(self._not_started(act, BackendRefused(f"there is no backend {backend!r} any more")))
        if orphans:
            self._tell(orphans)

    def _spared(self, act: WithdrawStop) -> list[Fact]:
        """An order to stop that cannot have arrived is dropped. One that may have is left: the run goes."""
        orders = self._acts.get(act.backend, [])
        kept = [one for one in orders if not (isinstance(one, Stop) and one.run == act.run)]
        if len(kept) == len(orders) or act.run in self._told:
            return []
        self._acts[act.backend] = kept
        return [StopWithdrawn(act.run)]

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
            self._tell([self._not_started(act, BackendError(reason, code=NOT_REACHED)) for act in back])

    async def serve(self, name: str) -> None:
        """Carry out this backend's acts for ever."""
        backend, pause = self._backends[name], 0.1
        while True:
            await self._more[name].wait()
            self._more[name].clear()
            acts, self._acts[name] = self._acts[name], []
            if not acts:
                continue
            told = _stopped(acts) - self._told
            self._told |= told
            try:
                await self._carry_out(backend, acts)
                if pause > 0.1:
                    pause = 0.1
                    self.on_success(name)
                if acts:
                    self._told -= _stopped(acts) & told  # they were held back
                    self._ask_later(name, acts)
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
                    self._told -= _stopped(acts) & told
                self._acts[name] = acts + self._acts[name]
                self.on_failure(name, text)
                if name in self.barred:
                    self.bar(name, self.barred[name])
                await asyncio.sleep(pause)
                pause = min(pause * 2, 5.0)
                self._more[name].set()

    async def _carry_out(self, backend: Backend, acts: list[Act]) -> None:
        """What is done is taken off `acts`, so that only the rest is sent again should something fail. What is left without
        a failure is in doubt."""
        starts = [act for act in acts if isinstance(act, Start) and act.run.id not in self._failed]
        saves = [act for act in acts if isinstance(act, TakeCheckpoint)]
        stops = [act for act in acts if isinstance(act, Stop)]
        forgets = [act for act in acts if isinstance(act, Forget)]
        again: dict[RunId, BackendError] = {}
        held: list[Act] = []
        if starts:
            again = await self._start(backend, starts)
        if again:
            # A stop would not find its run yet: it waits for the start.
            held = [act for act in acts if (act.run.id if isinstance(act, Start) else act.run) in again]
            stops = [act for act in stops if act.run not in again]
            saves = [act for act in saves if act.run not in again]
            forgets = [act for act in forgets if act.run not in again]
        acts[:] = [*held, *stops, *saves, *forgets]
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
                done = set(map(id, orders))
                acts[:] = [act for act in acts if id(act) not in done]
                if orders is forgets:
                    gone = [act.run for act in forgets]
                    for runs in (self._failed, self._unsure, self._told):
                        runs.difference_update(gone)
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

    async def _start(self, backend: Backend, starts: list[Start]) -> dict[RunId, BackendError]:
        """Those that are to be ordered again, because it is unknown whether they began."""
        runs = {act.run.id for act in starts}
        before = runs & self._unsure if self._unsure else set[RunId]()
        self._unsure |= runs  # until it has answered
        failed: Mapping[RunId, BackendError | BackendRefused]
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                if backend.capabilities.reserve and any(act.world_size > 1 for act in starts):
                    failed = await start(backend, starts, before)
                else:
                    failed = await backend.start(starts)
        except BackendRefused as error:
            failed = {act.run.id: error for act in starts}
        except BackendError as error:
            if error.code == NOT_REACHED:
                self._unsure -= runs - before
            raise
        if not failed:
            self._unsure -= runs
            return {}
        again = {
            run: error
            for run, error in failed.items()
            # Not reached now says nothing of what was sent before.
            if isinstance(error, BackendError)
            and (error.code == IN_DOUBT or (error.code == NOT_REACHED and run in before))
        }
        self._unsure -= runs - again.keys()
        lost = [act for act in starts if act.run.id in failed and act.run.id not in again]
        self._failed.update(act.run.id for act in lost)
        if lost:
            self._tell([self._not_started(act, failed[act.run.id]) for act in lost])
        return again

    def doubtful(self, run: RunId) -> bool:
        """Whether its start was ordered and the backend has not said yet what became of it."""
        return run in self._unsure

    def _ask_later(self, name: str, acts: list[Act]) -> None:
        """These wait, and nothing waits for them."""
        self._acts[name] = acts + self._acts[name]
        asyncio.get_running_loop().call_later(DOUBT_PAUSE_S, self._more[name].set)

    def _not_started(self, act: Start, error: BackendError | BackendRefused) -> RunObserved:
        code = NOT_REACHED_RUN if error.code == NOT_REACHED else START_FAILED
        return RunObserved(
            act.run.id, "failed", self._clock.now_ms(), reason_code=code,
            reason=f"{error.message}; {error.hint}" if error.hint else error.message,
            permanent=isinstance(error, BackendRefused),
        )  # fmt: skip


def _stopped(acts: Sequence[Act]) -> set[RunId]:
    return {act.run for act in acts if isinstance(act, Stop)}
