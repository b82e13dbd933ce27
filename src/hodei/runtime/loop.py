"""The loop: facts are gathered, the controller steps, the saves are committed as one, then everyone is told and the acts begin.

One step at a time. A large one (an array) is gone through in parts, with everyone else's turn in between, and is one commit
all the same. While a commit waits for the disk new facts gather, so that the next commit carries more: the
group grows with the load. Nobody hears of anything that is not committed, and no act begins before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from hodei.control.controller import Controller, Step
from hodei.control.state import chunks
from hodei.model.audit import DamagedRecord
from hodei.model.effects import Act, Save, SaveEvent, SaveJob
from hodei.model.errors import Conflict, HodeiError, NotFound, StaleEpoch, Unavailable
from hodei.model.facts import Fact, JobSubmitted
from hodei.model.ids import JobId
from hodei.model.job import JOB_ENDED
from hodei.ports import Clock, Store
from hodei.runtime.decision_log import DecisionLog
from hodei.runtime.event_hub import EventHub
from hodei.runtime.metrics import Metrics
from hodei.runtime.rights import CALLER, Caller, Rights

log = logging.getLogger("hodei.loop")
T = TypeVar("T")

_MAX_FACTS = 2000
_IDLE_S = 5.0
# While the store takes nothing and there is nothing to write, it is tried so often.
_TRY_AGAIN_S = 1.0
# A write that is no older shows that the store can be written.
_RECENT_S = 5.0


def held(error: Unavailable) -> Unavailable:
    return Unavailable(
        f"the request is held and will be carried out when the store can be written again: {error.message}",
        hint="look with `hodei jobs` when it is back; the same Idempotency-Key again never does it twice",
        code="WRITE_PENDING",
    )


class Loop:
    def __init__(
        self,
        controller: Controller,
        store: Store,
        clock: Clock,
        hub: EventHub,
        metrics: Metrics,
        act: Callable[[Sequence[Act]], None],
        decision_log: DecisionLog | None = None,
    ) -> None:
        self.controller = controller
        self.fatal: HodeiError | None = None
        # Why the store takes nothing at the moment.
        self.trouble: Unavailable | None = None
        self._held_up: asyncio.Future[None] | None = None
        self._written_s = 0.0
        self._store = store
        self._clock = clock
        self._hub = hub
        self._metrics = metrics
        self._act = act
        self._decision_log = decision_log
        self._inbox: list[tuple[Sequence[Fact], Sequence[Save], asyncio.Future[None] | None]] = []
        self._answering: list[asyncio.Future[None]] = []
        self._impatient: set[asyncio.Future[None]] = set()
        self._more = asyncio.Event()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._stopping = False
        self._in_a_hurry = asyncio.Event()
        self.waiting_jobs = 0
        self.on_step: Callable[[Step], None] | None = None
        self.on_commit: Callable[[Sequence[Save]], None] | None = None
        self.on_damage: Callable[[list[DamagedRecord]], None] = lambda found: None
        self.rights: Rights | None = None
        # Held from a decision until it is stored and its acts are given out: whoever compares what is believed with what
        # runs takes it first, so that nothing is ordered that is not stored yet.
        self.quiet = asyncio.Lock()

    # ------------------------------------------------------------------------------------------- telling

    def tell(self, facts: Sequence[Fact]) -> None:
        """Facts that nobody waits for."""
        self._inbox.append((facts, (), None))
        self._more.set()

    async def committed(self, facts: Sequence[Fact], saves: Sequence[Save] = (), *, patient: bool = False) -> None:
        """Returns when the facts, with all that followed from them, are safely stored. NotPermitted if the caller may not.

        A call on behalf of a client does not wait for a store that takes nothing. If that is known before, it is refused
        and nothing is done. If it turns out on the way, the client is told that its request is held; unless `patient`:
        the caller then goes on by itself, and must not be left in between."""
        caller = CALLER.get()
        self._check_open(caller)
        if caller is not None:
            if self.rights is not None:
                await self._check_rights(self.rights, caller, facts, saves)
                self._check_open(caller)
            facts, saves = caller.sign(facts), [*saves, *caller.record(facts, saves)]
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox.append((facts, saves, done))
        self._more.set()
        if caller is None or patient:
            await done
            return
        self._impatient.add(done)
        try:
            await done
        finally:
            self._impatient.discard(done)

    def _check_open(self, caller: Caller | None) -> None:
        if self.fatal is not None or self._stopping:
            raise Unavailable("the server is shutting down", hint="try again when it is back")
        if caller is not None and self.trouble is not None:
            raise Unavailable(
                f"nothing can be stored now, so nothing was done: {self.trouble.message}",
                hint=f"{self.trouble.hint or 'run `hodei doctor`'}; then try again",
            )

    async def _check_rights(self, rights: Rights, caller: Caller, facts: Sequence[Fact], saves: Sequence[Save]) -> None:
        """Changes of very many jobs in parts. New jobs were judged before, and are passed over at once."""
        rights.check(caller, (), saves)
        for number, part in enumerate(chunks(facts)):
            if number and type(part[0]) is not JobSubmitted:
                await asyncio.sleep(0)
            rights.check(caller, part, ())

    async def write(self, call: Callable[[], T]) -> T:
        """Any other write to the store, between two commits."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, call)

    async def writable(self) -> None:
        """Unavailable if the store takes nothing: it failed at the last write, or fails at one that is tried now."""
        if self.trouble is None and time.monotonic() - self._written_s > _RECENT_S and not self.quiet.locked():
            try:
                await self.write(partial(self._store.commit, ()))
                self._written_s = time.monotonic()
            except Unavailable as error:
                self._in_trouble(error)
        if self.trouble is not None:
            raise self.trouble

    def held_up(self) -> asyncio.Future[None]:
        """Done when the store takes nothing; shared, so not to be cancelled."""
        if self._held_up is None:
            self._held_up = asyncio.get_running_loop().create_future()
        return self._held_up

    def _in_trouble(self, error: Unavailable | None) -> None:
        if self.trouble is not None and error is None:
            log.warning("the store can be written again")
        self.trouble = error
        if error is None:
            self._written_s = time.monotonic()
            self._held_up = None
        else:
            if not self.held_up().done():
                self.held_up().set_result(None)
            self._more.set()
            for done in self._impatient:
                if not done.done():
                    done.set_exception(held(error))

    # ------------------------------------------------------------------------------------------- turning

    async def run(self) -> None:
        """Until `stop`, or until another writer has taken over (then `fatal` says so)."""
        try:
            while not self._stopping:
                await self._pause()
                await self._turn()
        except StaleEpoch as error:
            self.fatal = error
            log.error("another server has taken over this store: %s", error)
        except Unavailable as error:
            self.fatal = error
            log.error("stopped before the store was back; what was not acknowledged is dropped: %s", error)
        finally:
            # Whatever ended it, nobody is left waiting for an answer that will not come.
            self._stopping = True
            self._fail_all(Unavailable("the server is shutting down", hint="try again when it is back"))
            self._writer.shutdown(wait=True)

    def hurry(self) -> None:
        """The end is near: go on, but give up what the store does not take now instead of waiting for it."""
        self._in_a_hurry.set()

    def stop(self) -> None:
        self.hurry()
        self._stopping = True
        self._more.set()

    async def _pause(self) -> None:
        now = self._clock.now_ms()
        due = self.controller.next_wakeup_ms(now)
        idle_s = _IDLE_S if self.trouble is None else _TRY_AGAIN_S
        wait = idle_s if due is None else min(max(due - now, 0) / 1000, idle_s)
        if not self._inbox and wait > 0:
            if self._decision_log is not None:
                self._decision_log.flush()
            try:
                await asyncio.wait_for(self._more.wait(), wait)
            except TimeoutError:
                pass
        else:
            await asyncio.sleep(0)
        self._more.clear()

    async def _turn(self) -> None:
        facts: list[Fact] = []
        saves: list[Save] = []
        self._answering = waiting = list[asyncio.Future[None]]()
        taken = 0
        for batch, more, done in self._inbox:
            if facts and len(facts) + len(batch) > _MAX_FACTS:
                break
            taken += 1
            facts += batch
            saves += more
            if done is not None:
                waiting.append(done)
        del self._inbox[:taken]
        if self._inbox:
            self._more.set()
        async with self.quiet:
            await self._decide(facts, saves, waiting)

    async def _decide(self, facts: list[Fact], saves: list[Save], waiting: list[asyncio.Future[None]]) -> None:
        if self._decision_log is not None and self._decision_log.full:
            # Not right after the step that filled it: all that a large one leaves behind to be freed would be shared with
            # the process that writes the state down, and copied page by page.
            self._decision_log.begin_segment(self.controller)
        now = self._clock.now_ms()
        step, seconds = await self._unhurried(self.controller.step_in_chunks(now, facts))
        if self._decision_log is not None and (facts or not step.empty):
            await self._unhurried(self._decision_log.writing(now, facts, step.plan))
        saves += step.saves
        decided = time.perf_counter()
        if saves or self.trouble is not None:
            await self._commit(saves)
        committed = time.perf_counter()
        for done in waiting:
            if not done.done():
                done.set_result(None)
        placed = self._metrics.decided(step, seconds, committed - decided)
        if self.on_commit is not None and saves:
            self.on_commit(saves)
        await self._unhurried(self._telling(step, placed))
        if step.acts:
            self._act(step.acts)

    def _telling(self, step: Step, placed: Mapping[JobId, int]) -> Generator[None, None, None]:
        """Everyone who wants to hear of it."""
        for number, part in enumerate(chunks(step.saves)):
            if number:
                yield
            self._metrics.saved(part, placed)
            if self.on_step is not None:
                self.on_step(Step(step.plan, part, []))
            events = [save.event for save in part if isinstance(save, SaveEvent)]
            ended = [save.job.id for save in part if isinstance(save, SaveJob) and save.job.state in JOB_ENDED]
            if events or ended:
                self._hub.publish(events, ended)

    async def _unhurried(self, work: Generator[None, None, T]) -> tuple[T, float]:
        """Work that may be long, in parts, with everyone else's turn in between; and how long the parts took."""
        spent = 0.0
        while True:
            began = time.perf_counter()
            try:
                next(work)
            except StopIteration as done:
                return done.value, spent + time.perf_counter() - began
            spent += time.perf_counter() - began
            await asyncio.sleep(0)

    async def _commit(self, saves: Sequence[Save]) -> None:
        """Held up, not lost, when storage fails: what was decided stays decided and is written when storage is back.
        Callers wait that long; those who give up may ask again with the same key."""
        loop, pause, made_way = asyncio.get_running_loop(), 0.1, False
        while True:
            try:
                await loop.run_in_executor(self._writer, self._store.commit, saves)
                if self.trouble is not None:
                    self._in_trouble(None)
                else:
                    self._written_s = time.monotonic()
                return
            except (NotFound, Conflict):
                # The store is not as we left it: rows are gone, or are where others belong.
                if made_way:
                    raise
                now_ms, made_way = self._clock.now_ms(), True
                found = await loop.run_in_executor(self._writer, self._store.repair_conflicts, saves, now_ms)
                if not found:
                    raise
                self.on_damage(found)
            except Unavailable as error:
                if self._in_a_hurry.is_set():
                    raise
                self._in_trouble(error)
                log.error("cannot write to the store, trying again in %.1f s: %s; %s", pause, error, error.hint)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._in_a_hurry.wait(), pause)
                pause = min(pause * 2, 2.0)

    def _fail_all(self, error: HodeiError) -> None:
        for done in (*self._answering, *(done for _, _, done in self._inbox)):
            if done is not None and not done.done():
                done.set_exception(error)
        self._inbox.clear()
        if self._decision_log is not None:
            self._decision_log.flush()
