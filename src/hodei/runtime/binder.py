"""The binder carries out acts in order, one queue per backend: a slow backend delays only its own acts.

Acts are idempotent, so an act whose reply was lost is sent again. A run that was reported as not started is never started
afterwards, and a run is not reported as not started while its outcome is unknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import Any

from hodei.control.lifecycle.runs import NOT_REACHED_RUN, START_FAILED
from hodei.model.effects import Forget, RunAct, Start, Stop, TakeCheckpoint, WithdrawStop
from hodei.model.errors import IN_DOUBT, NOT_REACHED, BackendError, BackendRefused, StaleEpoch
from hodei.model.facts import Fact, RunObserved, StopWithdrawn
from hodei.model.ids import RunId
from hodei.ports import Backend, Clock
from hodei.runtime.metrics import Metrics
from hodei.runtime.watcher import CALL_TIMEOUT_S

log = logging.getLogger("hodei.binder")
# Pause before a start in doubt is sent again.
DOUBT_PAUSE_S = 0.5
Failed = dict[RunId, BackendError | BackendRefused]


async def start_gangs(backend: Backend, orders: Sequence[Start], in_doubt: Set[RunId] = frozenset()) -> Failed:
    """Two phases on a backend that can reserve: first capacity for all members of a gang, then their starts, or none.

    Like `Backend.start`, returns what was not accepted. `in_doubt`: runs that may have started. Their gangs are not reserved
    again: "no capacity" would be taken for "not started", while the gang itself may fill that capacity."""
    gangs: dict[tuple[int, int], list[Start]] = {}
    for order in orders:
        if order.world_size > 1:
            gangs.setdefault((order.run.job, order.run.attempt), []).append(order)
    for id in [id for id, members in gangs.items() if any(order.run.id in in_doubt for order in members)]:
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


class Binder:
    def __init__(
        self,
        backends: Mapping[str, Backend],
        clock: Clock,
        metrics: Metrics,
        enqueue: Callable[[Sequence[Fact]], None],
        on_failure: Callable[[str, str], None] = lambda name, text: None,
        on_success: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`on_failure` and `on_success`: a call of a backend failed, or succeeded after failures."""
        self._backends = backends
        # Why nothing may start on a backend, by its name.
        self.blocked: dict[str, str] = {}
        self._on_failure, self._on_success = on_failure, on_success
        self._clock = clock
        self._metrics = metrics
        self._enqueue = enqueue
        self._acts: dict[str, list[RunAct]] = {name: [] for name in backends}
        self._more = {name: asyncio.Event() for name in backends}
        self._failed: set[RunId] = set()
        # Starts that were sent, or may have been, without a definite answer. They are never returned to the queue.
        self._in_doubt: set[RunId] = set()
        # Runs whose stop was sent, or may have been.
        self._stop_sent: set[RunId] = set()

    def act_again(self, acts: Sequence[RunAct]) -> None:
        """Acts that this server or an earlier one may have sent before."""
        self._in_doubt.update(act.run.id for act in acts if isinstance(act, Start))
        self.act(acts)

    def act(self, acts: Sequence[RunAct]) -> None:
        facts: list[Fact] = []
        for act in acts:
            if isinstance(act, WithdrawStop):
                facts += self._withdraw_stop(act)
                continue
            backend = act.run.backend if isinstance(act, Start) else act.backend
            blocked = backend in self.blocked
            if blocked and isinstance(act, Start) and act.run.id not in self._in_doubt:
                self._failed.add(act.run.id)
                facts.append(self._not_started(act, BackendError(self.blocked[backend], code=NOT_REACHED)))
            elif backend in self._acts:
                self._acts[backend].append(act)
                self._more[backend].set()
            elif isinstance(act, Start):
                facts.append(self._not_started(act, BackendRefused(f"backend {backend!r} was removed")))
        if facts:
            self._enqueue(facts)

    def _withdraw_stop(self, act: WithdrawStop) -> list[Fact]:
        """Drops a stop that was certainly not sent. Otherwise the run is stopped."""
        orders = self._acts.get(act.backend, [])
        kept = [one for one in orders if not (isinstance(one, Stop) and one.run == act.run)]
        if len(kept) == len(orders) or act.run in self._stop_sent:
            return []
        self._acts[act.backend] = kept
        return [StopWithdrawn(act.run)]

    def add(self, name: str) -> None:
        """Call `serve` next."""
        self._acts.setdefault(name, [])
        self._more.setdefault(name, asyncio.Event())

    def remove(self, name: str) -> None:
        """Drops what is queued for the backend."""
        self._acts.pop(name, None)
        self._more.pop(name, None)
        self.blocked.pop(name, None)

    def block(self, name: str, reason: str) -> None:
        """Until it is called with an empty `reason`: starts that were certainly not sent fail as not reached, so that the runs
        are placed elsewhere. A start whose outcome is unknown waits for the backend, so that nothing runs twice."""
        if not reason:
            self.blocked.pop(name, None)
            return
        self.blocked[name] = reason
        unsent = [a for a in self._acts[name] if isinstance(a, Start) and a.run.id not in self._in_doubt | self._failed]
        if unsent:
            runs = {act.run.id for act in unsent}
            self._acts[name] = [a for a in self._acts[name] if not (isinstance(a, Start) and a.run.id in runs)]
            self._failed |= runs
            self._enqueue([self._not_started(act, BackendError(reason, code=NOT_REACHED)) for act in unsent])

    async def serve(self, name: str) -> None:
        """Carries out the acts of this backend, forever."""
        backend, pause = self._backends[name], 0.1
        while True:
            await self._more[name].wait()
            self._more[name].clear()
            acts, self._acts[name] = self._acts[name], []
            if not acts:
                continue
            new_stops = _stopped(acts) - self._stop_sent
            self._stop_sent |= new_stops
            try:
                await self._carry_out(backend, acts)
                if pause > 0.1:
                    pause = 0.1
                    self._on_success(name)
                if acts:
                    self._stop_sent -= _stopped(acts) & new_stops  # they wait for their starts
                    self._send_later(name, acts)
            except StaleEpoch:
                raise
            except BackendRefused as error:
                log.error("backend %s refuses %d acts for good, they are dropped: %s", name, len(acts), error)
            except Exception as error:
                if not isinstance(error, BackendError | OSError | TimeoutError):
                    log.exception("backend %s", name)
                text = str(error) or f"no answer within {CALL_TIMEOUT_S:g} s"
                self._metrics.backend_errors.labels(name).inc()
                log.warning("backend %s: %s; %d acts are sent again in %.1f s", name, text, len(acts), pause)
                if getattr(error, "code", "") == NOT_REACHED:
                    # What is still in `acts` did not arrive; stops that are no longer in it did.
                    self._stop_sent -= _stopped(acts) & new_stops
                self._acts[name] = acts + self._acts[name]
                self._on_failure(name, text)
                if name in self.blocked:
                    self.block(name, self.blocked[name])
                await asyncio.sleep(pause)
                pause = min(pause * 2, 5.0)
                self._more[name].set()

    async def _carry_out(self, backend: Backend, acts: list[RunAct]) -> None:
        """Removes what is done from `acts`. After a failure the rest is sent again; without one, it is in doubt."""
        starts = [act for act in acts if isinstance(act, Start) and act.run.id not in self._failed]
        saves = [act for act in acts if isinstance(act, TakeCheckpoint)]
        stops = [act for act in acts if isinstance(act, Stop)]
        forgets = [act for act in acts if isinstance(act, Forget)]
        again: dict[RunId, BackendError] = {}
        held: list[RunAct] = []
        if starts:
            again = await self._start(backend, starts)
        if again:
            # A stop would not find its run yet: it waits for the start.
            held = [act for act in acts if (act.run.id if isinstance(act, Start) else act.run) in again]
            stops = [act for act in stops if act.run not in again]
            saves = [act for act in saves if act.run not in again]
            forgets = [act for act in forgets if act.run not in again]
        acts[:] = [*held, *stops, *saves, *forgets]
        failure: BackendError | None = None
        kinds: tuple[tuple[Sequence[RunAct], Callable[[Any], Awaitable[None]]], ...] = (
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
                    failure = failure or error  # the next kind may still succeed
                    continue
                done = set(map(id, orders))
                acts[:] = [act for act in acts if id(act) not in done]
                if orders is forgets:
                    forgotten = [act.run for act in forgets]
                    for runs in (self._failed, self._in_doubt, self._stop_sent):
                        runs.difference_update(forgotten)
        if failure is not None:
            raise failure

    @staticmethod
    async def _order(name: str, orders: Sequence[RunAct], call: Callable[[Any], Awaitable[None]]) -> None:
        """One call for orders of one kind. A refusal drops these orders and no others."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await call(orders)
        except BackendRefused as error:
            kind = type(orders[0]).__name__
            log.error(
                "backend %s refuses %d orders (%s) for good, they are dropped: %s", name, len(orders), kind, error
            )

    async def _start(self, backend: Backend, starts: list[Start]) -> dict[RunId, BackendError]:
        """Returns the starts that are in doubt and must be sent again."""
        runs = {act.run.id for act in starts}
        before = runs & self._in_doubt if self._in_doubt else set[RunId]()
        self._in_doubt |= runs  # until the answer
        failed: Mapping[RunId, BackendError | BackendRefused]
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                if backend.capabilities.reserve and any(act.world_size > 1 for act in starts):
                    failed = await start_gangs(backend, starts, before)
                else:
                    failed = await backend.start(starts)
        except BackendRefused as error:
            failed = {act.run.id: error for act in starts}
        except BackendError as error:
            if error.code == NOT_REACHED:
                self._in_doubt -= runs - before
            raise
        if not failed:
            self._in_doubt -= runs
            return {}
        again = {
            run: error
            for run, error in failed.items()
            # "Not reached" now says nothing about an earlier try.
            if isinstance(error, BackendError)
            and (error.code == IN_DOUBT or (error.code == NOT_REACHED and run in before))
        }
        self._in_doubt -= runs - again.keys()
        failures = [act for act in starts if act.run.id in failed and act.run.id not in again]
        self._failed.update(act.run.id for act in failures)
        if failures:
            self._enqueue([self._not_started(act, failed[act.run.id]) for act in failures])
        return again

    def is_in_doubt(self, run: RunId) -> bool:
        """Whether its start was sent and the outcome is unknown."""
        return run in self._in_doubt

    def _send_later(self, name: str, acts: list[RunAct]) -> None:
        """Does not delay other acts."""
        self._acts[name] = acts + self._acts[name]
        asyncio.get_running_loop().call_later(DOUBT_PAUSE_S, self._more[name].set)

    def _not_started(self, act: Start, error: BackendError | BackendRefused) -> RunObserved:
        code = NOT_REACHED_RUN if error.code == NOT_REACHED else START_FAILED
        return RunObserved(
            act.run.id, "failed", self._clock.now_ms(), reason_code=code,
            reason=f"{error.message}; {error.hint}" if error.hint else error.message,
            permanent=isinstance(error, BackendRefused),
        )  # fmt: skip


def _stopped(acts: Sequence[RunAct]) -> set[RunId]:
    return {act.run for act in acts if isinstance(act, Stop)}
