"""Periodic jobs: waits for the next due time and submits the job.

The last handled time is stored, and each due time has its idempotency key (`periodic/NAME/TIME`): after a crash between
the two, or with a second server, the job is found and not created again.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import structs

from hodei.model.cron import Periodic, due, due_text, job_due_at
from hodei.model.effects import SavePeriodic
from hodei.model.errors import Conflict, HodeiError, NotFound, QueueFull, Unavailable
from hodei.model.facts import EventNoted
from hodei.model.ids import JobId
from hodei.model.job import JOB_ENDED

if TYPE_CHECKING:
    from hodei.runtime.service import Service

log = logging.getLogger("hodei.cron")
# The wall clock may jump ahead during a sleep (a laptop that wakes up), so it is checked at least this often.
_MAX_SLEEP_S = 60.0
_RETRY_S = 5.0
# Periodic jobs are handled one after another: one user must not delay those of all others.
MAX_PER_USER = 1000
MAX_TOTAL = 10_000


class CronTask:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._periodics: dict[str, Periodic] = {}
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()

    def periodics(self) -> list[Periodic]:
        return [self._periodics[name] for name in sorted(self._periodics)]

    def get(self, name: str) -> Periodic:
        found = self._periodics.get(name)
        if found is None:
            raise NotFound(f"there is no periodic job {name!r}", hint="hodei cron list")
        return found

    async def add(self, periodic: Periodic) -> Periodic:
        """Conflict if the name is taken, QueueFull if there are too many. Its first due time is in the future."""
        now = self._service.clock.now_ms()
        self._service.controller.gate.check([periodic.job], {})
        async with self._lock:
            if periodic.name in self._periodics:
                raise Conflict(
                    f"periodic job {periodic.name!r} already exists", hint=f"hodei cron delete {periodic.name}"
                )
            mine = sum(one.by == periodic.by for one in self._periodics.values())
            if mine >= MAX_PER_USER or len(self._periodics) >= MAX_TOTAL:
                raise QueueFull(
                    f"too many periodic jobs: {periodic.by} has {mine} of at most {MAX_PER_USER},"
                    f" all users have {len(self._periodics)} of at most {MAX_TOTAL}",
                    hint="hodei cron delete; an array creates many jobs at once",
                )
            return await self._save(structs.replace(periodic, made_ms=now, handled_ms=now), "periodic.added")

    async def pause(self, name: str) -> Periodic:
        async with self._lock:
            return await self._save(structs.replace(self.get(name), paused=True), "periodic.paused")

    async def resume(self, name: str) -> Periodic:
        """Times that were due during the pause are not made up for."""
        async with self._lock:
            found = self.get(name)
            handled = self._service.clock.now_ms() if found.paused else found.handled_ms
            return await self._save(structs.replace(found, paused=False, handled_ms=handled), "periodic.resumed")

    async def remove(self, name: str) -> Periodic:
        """Jobs that it has created continue."""
        async with self._lock:
            removed = self.get(name)
            await self._commit(removed, "periodic.removed", removed=True)
            del self._periodics[name]
            return removed

    async def run_now(self, name: str) -> JobId:
        """Ignores the schedule and the overlap policy."""
        async with self._lock:
            periodic = self.get(name)
            now = self._service.clock.now_ms()
            spec = structs.replace(job_due_at(periodic, now), user=periodic.by)
            job = (await self._service.submit([spec])).ids[0]
            await self._save(structs.replace(periodic, last_job=job, last_due_ms=now, last_result="made"))
            return job

    async def load(self) -> None:
        for periodic in await self._service.read(self._service.store.periodics):
            self._periodics[periodic.name] = periodic

    async def run(self) -> None:
        while True:
            self._changed.clear()
            try:
                next_ms = await self.run_due()
                wait_s = (
                    min(max(next_ms - self._service.clock.now_ms(), 0) / 1000, _MAX_SLEEP_S)
                    if next_ms
                    else _MAX_SLEEP_S
                )
            except HodeiError as error:
                log.error("periodic jobs could not be handled, next try in %d s: %s", _RETRY_S, error.message)
                wait_s = _RETRY_S
            except Exception:
                log.exception("periodic jobs could not be handled, next try in %d s", _RETRY_S)
                wait_s = _RETRY_S
            # Not `wait_for`: in Python 3.11 it loses a cancellation that arrives together with a change, and the server
            # would wait for this task forever when it stops.
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()

    async def run_due(self) -> int:
        """Handles all that is due now; returns the next due time (0 for never)."""
        async with self._lock:
            for name in sorted(self._periodics):
                await self._handle(self._periodics[name])
            return min((at for one in self._periodics.values() if (at := one.next_ms())), default=0)

    async def _handle(self, periodic: Periodic) -> None:
        now = due(periodic, self._service.clock.now_ms())
        if now.handled_ms == periodic.handled_ms:
            return
        if now.dropped:
            await self._emit(periodic, "periodic.missed", left_out=now.dropped)
        for due_ms in now.run:
            periodic = await self._submit(periodic, due_ms)
        await self._save(structs.replace(periodic, handled_ms=now.handled_ms))

    async def _submit(self, periodic: Periodic, due_ms: int) -> Periodic:
        """Submits the job for one due time, subject to the overlap policy; returns the updated periodic job."""
        key, text = f"periodic/{periodic.name}/{due_ms}", due_text(due_ms)
        used = await self._service.read(self._service.store.key, key)
        if used is None and periodic.overlap != "allow" and await self._is_active(periodic.last_job):
            if periodic.overlap == "skip":
                await self._emit(periodic, "periodic.skipped", job=periodic.last_job, due=text)
                return structs.replace(periodic, last_result=f"skipped {text}: job {periodic.last_job} had not ended")
            with suppress(Conflict, NotFound):  # it has ended just now
                await self._service.cancel(periodic.last_job, f"replaced by the next job of periodic {periodic.name}")
        spec = structs.replace(job_due_at(periodic, due_ms), user=periodic.by)
        try:
            job = (await self._service.submit([spec], key=key, fingerprint=key)).ids[0]
        except Unavailable:
            raise
        except HodeiError as error:
            # A full queue, a removed profile: this time is skipped, the next one may succeed.
            log.warning("periodic job %s of %s was refused: %s", periodic.name, text, error.message)
            await self._emit(periodic, "periodic.refused", due=text, reason=error.message, reason_code=error.code)
            return structs.replace(periodic, last_result=f"refused {text}: {error.message}")
        return structs.replace(periodic, last_job=job, last_due_ms=due_ms, last_result="made")

    async def _is_active(self, job: JobId) -> bool:
        found = await self._service.read(self._service.store.job, job) if job else None
        return found is not None and found.state not in JOB_ENDED

    async def _save(self, periodic: Periodic, event: str = "") -> Periodic:
        await self._commit(periodic, event)
        self._periodics[periodic.name] = periodic
        self._changed.set()
        return periodic

    async def _commit(self, periodic: Periodic, event: str = "", *, removed: bool = False) -> None:
        facts = [EventNoted(event, detail={"periodic": periodic.name})] if event else []
        await self._service.loop.commit(facts, [SavePeriodic(periodic, removed)], wait_for_store=True)

    async def _emit(self, periodic: Periodic, kind: str, *, job: JobId = 0, **detail: object) -> None:
        await self._service.loop.commit([EventNoted(kind, job, {"periodic": periodic.name, **detail})])
