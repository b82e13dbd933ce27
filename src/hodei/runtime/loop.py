"""The scheduling loop: collect facts, step the controller, commit its saves, then publish events and carry out acts.

One step at a time. A large step (an array) runs in slices with the event loop in between, and is still one commit. Facts
that arrive during a commit go into the next step together, so the batch grows with the load. Nothing is published and no
act begins before its commit.
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
from hodei.runtime.metrics import Metrics
from hodei.runtime.observers import EventHub
from hodei.runtime.rights import CALLER, Caller, Rights

log = logging.getLogger("hodei.loop")
T = TypeVar("T")

_MAX_FACTS = 2000
_IDLE_S = 5.0
# How often a failing store is tried while there is nothing to write.
_PROBE_S = 1.0
# A successful write younger than this proves that the store is writable.
_RECENT_S = 5.0


def write_pending(error: Unavailable) -> Unavailable:
    return Unavailable(
        f"the request waits and is carried out when the store is writable again: {error.message}",
        hint="check with `hodei jobs` later; repeating it with the same Idempotency-Key never does it twice",
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
        *,
        rights: Rights | None = None,
        on_commit: Callable[[Sequence[Save]], None] = lambda saves: None,
        on_damage: Callable[[list[DamagedRecord]], None] = lambda found: None,
    ) -> None:
        """`on_damage`: a commit found damaged records, which are repaired."""
        self.controller = controller
        self.fatal: HodeiError | None = None
        # The error of the last write, while the store is not writable.
        self.store_error: Unavailable | None = None
        self._store_failed: asyncio.Future[None] | None = None
        self._written_s = 0.0
        self._store = store
        self._clock = clock
        self._hub = hub
        self._metrics = metrics
        self._act = act
        self._decision_log = decision_log
        self._rights, self._on_commit, self._on_damage = rights, on_commit, on_damage
        # Called with each committed step, in slices.
        self.step_listeners: list[Callable[[Step], None]] = []
        self._inbox: list[tuple[Sequence[Fact], Sequence[Save], asyncio.Future[None] | None]] = []
        self._in_step: list[asyncio.Future[None]] = []
        # Commits of clients that must not wait for a store that is down.
        self._client_commits: set[asyncio.Future[None]] = set()
        self._more = asyncio.Event()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._stopping = False
        self._shutting_down = asyncio.Event()
        # Jobs that have their numbers but are not committed yet; they count as pending for admission.
        self.uncommitted_jobs = 0
        # Held from a decision until it is stored and its acts are handed out. Code that compares the state with the
        # backends takes it first, so that it orders nothing that is not stored yet.
        self.step_lock = asyncio.Lock()

    def enqueue(self, facts: Sequence[Fact]) -> None:
        """Facts whose commit is not waited for."""
        self._inbox.append((facts, (), None))
        self._more.set()

    async def commit(self, facts: Sequence[Fact], saves: Sequence[Save] = (), *, wait_for_store: bool = False) -> None:
        """Returns when the facts and everything that follows from them are durable. NotPermitted if the caller may not.

        A call on behalf of a client does not wait for a store that is down. If it is known to be down, the call is refused
        and nothing is done. If it fails during the call, the client gets WRITE_PENDING, except with `wait_for_store`: for
        callers that must not be interrupted halfway."""
        caller = CALLER.get()
        self._check_open(caller)
        if caller is not None:
            if self._rights is not None:
                await self._check_rights(self._rights, caller, facts, saves)
                self._check_open(caller)
            facts, saves = caller.sign(facts), [*saves, *caller.record(facts, saves)]
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox.append((facts, saves, done))
        self._more.set()
        if caller is None or wait_for_store:
            await done
            return
        self._client_commits.add(done)
        try:
            await done
        finally:
            self._client_commits.discard(done)

    def _check_open(self, caller: Caller | None) -> None:
        if self.fatal is not None or self._stopping:
            raise Unavailable("the server is shutting down", hint="try again when it is back")
        if caller is not None and self.store_error is not None:
            raise Unavailable(
                f"the store is not writable, so nothing was done: {self.store_error.message}",
                hint=f"{self.store_error.hint or 'check the disk of the server'}; then try again",
            )

    async def _check_rights(self, rights: Rights, caller: Caller, facts: Sequence[Fact], saves: Sequence[Save]) -> None:
        """In slices, for changes of very many jobs. New jobs were checked at submission and cost nothing here."""
        rights.check(caller, (), saves)
        for number, part in enumerate(chunks(facts)):
            if number and type(part[0]) is not JobSubmitted:
                await asyncio.sleep(0)
            rights.check(caller, part, ())

    async def write(self, call: Callable[[], T]) -> T:
        """Another write to the store, between two commits."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, call)

    async def check_writable(self) -> None:
        """Unavailable if the last write failed, or an empty one fails now."""
        if self.store_error is None and time.monotonic() - self._written_s > _RECENT_S and not self.step_lock.locked():
            try:
                await self.write(partial(self._store.commit, ()))
                self._written_s = time.monotonic()
            except Unavailable as error:
                self._set_store_error(error)
        if self.store_error is not None:
            raise self.store_error

    def store_failed(self) -> asyncio.Future[None]:
        """Done when a write fails. Shared, so do not cancel it."""
        if self._store_failed is None:
            self._store_failed = asyncio.get_running_loop().create_future()
        return self._store_failed

    def _set_store_error(self, error: Unavailable | None) -> None:
        if self.store_error is not None and error is None:
            log.warning("the store is writable again")
        self.store_error = error
        if error is None:
            self._written_s = time.monotonic()
            self._store_failed = None
        else:
            if not self.store_failed().done():
                self.store_failed().set_result(None)
            self._more.set()
            for done in self._client_commits:
                if not done.done():
                    done.set_exception(write_pending(error))

    async def run(self) -> None:
        """Until `stop`, or until another server has opened the store; `fatal` is set then."""
        try:
            while not self._stopping:
                await self._wait()
                await self._step()
        except StaleEpoch as error:
            self.fatal = error
            log.error("stopped: another server has opened this store: %s", error)
        except Unavailable as error:
            self.fatal = error
            log.error("stopped while the store was not writable; unacknowledged requests are dropped: %s", error)
        finally:
            # However it ended, no caller may wait for an answer that will not come.
            self._stopping = True
            self._fail_all(Unavailable("the server is shutting down", hint="try again when it is back"))
            self._writer.shutdown(wait=True)

    def begin_shutdown(self) -> None:
        """From now on a failed write is not retried."""
        self._shutting_down.set()

    def stop(self) -> None:
        self.begin_shutdown()
        self._stopping = True
        self._more.set()

    async def _wait(self) -> None:
        now = self._clock.now_ms()
        due = self.controller.next_wakeup_ms(now)
        idle_s = _IDLE_S if self.store_error is None else _PROBE_S
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

    async def _step(self) -> None:
        facts: list[Fact] = []
        saves: list[Save] = []
        self._in_step = waiting = list[asyncio.Future[None]]()
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
        async with self.step_lock:
            await self._decide(facts, saves, waiting)

    async def _decide(self, facts: list[Fact], saves: list[Save], waiting: list[asyncio.Future[None]]) -> None:
        if self._decision_log is not None and self._decision_log.full:
            # Not right after the step that filled it: garbage that a large step leaves would be shared with the forked
            # process that writes the state, and copied page by page when it is freed.
            self._decision_log.begin_segment(self.controller)
        now = self._clock.now_ms()
        step, seconds = await self._in_slices(self.controller.step_in_chunks(now, facts))
        if self._decision_log is not None and (facts or not step.empty):
            await self._in_slices(self._decision_log.write_in_slices(now, facts, step.plan))
        saves += step.saves
        decided = time.perf_counter()
        if saves or self.store_error is not None:
            await self._write(saves)
        committed = time.perf_counter()
        for done in waiting:
            if not done.done():
                done.set_result(None)
        placed = self._metrics.decided(step, seconds, committed - decided)
        if saves:
            self._on_commit(saves)
        await self._in_slices(self._publish(step, placed))
        if step.acts:
            self._act(step.acts)

    def _publish(self, step: Step, placed: Mapping[JobId, int]) -> Generator[None, None, None]:
        self._metrics.runs_ended(step.saves, self.controller.cluster.jobs)
        for number, part in enumerate(chunks(step.saves)):
            if number:
                yield
            self._metrics.saved(part, placed)
            for listener in self.step_listeners:
                listener(Step(step.plan, part, []))
            events = [save.event for save in part if isinstance(save, SaveEvent)]
            ended = [save.job.id for save in part if isinstance(save, SaveJob) and save.job.state in JOB_ENDED]
            if events or ended:
                self._hub.publish(events, ended)

    async def _in_slices(self, work: Generator[None, None, T]) -> tuple[T, float]:
        """Runs the generator with the event loop in between; its value, and the time spent in it."""
        spent = 0.0
        while True:
            began = time.perf_counter()
            try:
                next(work)
            except StopIteration as done:
                return done.value, spent + time.perf_counter() - began
            spent += time.perf_counter() - began
            await asyncio.sleep(0)

    async def _write(self, saves: Sequence[Save]) -> None:
        """Retries until the store is back: what was decided stays decided."""
        loop, pause, repaired = asyncio.get_running_loop(), 0.1, False
        while True:
            try:
                await loop.run_in_executor(self._writer, self._store.commit, saves)
                if self.store_error is not None:
                    self._set_store_error(None)
                else:
                    self._written_s = time.monotonic()
                return
            except (NotFound, Conflict):
                # The store is damaged: rows are missing, or others are in their place.
                if repaired:
                    raise
                now_ms, repaired = self._clock.now_ms(), True
                found = await loop.run_in_executor(self._writer, self._store.repair_conflicts, saves, now_ms)
                if not found:
                    raise
                self._on_damage(found)
            except Unavailable as error:
                if self._shutting_down.is_set():
                    raise
                self._set_store_error(error)
                log.error("cannot write to the store, next try in %.1f s: %s; %s", pause, error, error.hint)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._shutting_down.wait(), pause)
                pause = min(pause * 2, 2.0)

    def _fail_all(self, error: HodeiError) -> None:
        for done in (*self._in_step, *(done for _, _, done in self._inbox)):
            if done is not None and not done.done():
                done.set_exception(error)
        self._inbox.clear()
        if self._decision_log is not None:
            self._decision_log.flush()
