"""The calendar: waits for the next time at which a periodic job is due, and submits it.

What was dealt with is in the store, and each time has a key of its own (`periodic/NAME/TIME`): a crash between the two,
or a second server, finds the job made already and makes no other.
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

log = logging.getLogger("hodei.calendar")
# The wall clock may be put forward while we sleep (a laptop that wakes up): look again at least so often.
_LONGEST_S = 60.0
_AFTER_TROUBLE_S = 5.0
# They are dealt with one after another, so one user must not be able to hold up those of all others.
MOST_EACH = 1000
MOST = 10_000


class CronTask:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._periodics: dict[str, Periodic] = {}
        self._changed = asyncio.Event()
        self._turning = asyncio.Lock()

    # ------------------------------------------------------------------------------------------ looking

    def all(self) -> list[Periodic]:
        return [self._periodics[name] for name in sorted(self._periodics)]

    def one(self, name: str) -> Periodic:
        found = self._periodics.get(name)
        if found is None:
            raise NotFound(f"there is no periodic job {name!r}", hint="hodei cron list")
        return found

    # ------------------------------------------------------------------------------------------ changing

    async def add(self, periodic: Periodic) -> Periodic:
        """Conflict if the name is taken, QueueFull if there are too many. Times before this moment are not due."""
        now = self._service.clock.now_ms()
        self._service.controller.gate.check([periodic.job], {})
        async with self._turning:
            if periodic.name in self._periodics:
                raise Conflict(
                    f"there is a periodic job {periodic.name!r} already", hint=f"hodei cron delete {periodic.name}"
                )
            mine = sum(one.by == periodic.by for one in self._periodics.values())
            if mine >= MOST_EACH or len(self._periodics) >= MOST:
                raise QueueFull(
                    f"{periodic.by} has {mine} periodic jobs, all users together {len(self._periodics)};"
                    f" at most {MOST_EACH} and {MOST} are kept",
                    hint="hodei cron delete; one job can make many (array)",
                )
            return await self._save(structs.replace(periodic, made_ms=now, handled_ms=now), "periodic.added")

    async def pause(self, name: str) -> Periodic:
        async with self._turning:
            return await self._save(structs.replace(self.one(name), paused=True), "periodic.paused")

    async def resume(self, name: str) -> Periodic:
        """From now on; what would have been due meanwhile is not made up for."""
        async with self._turning:
            found = self.one(name)
            handled = self._service.clock.now_ms() if found.paused else found.handled_ms
            return await self._save(structs.replace(found, paused=False, handled_ms=handled), "periodic.resumed")

    async def remove(self, name: str) -> Periodic:
        """Jobs that it has made go on."""
        async with self._turning:
            gone = self.one(name)
            await self._commit(gone, "periodic.removed", deleted=True)
            del self._periodics[name]
            return gone

    async def run_now(self, name: str) -> JobId:
        """Out of turn, whatever the schedule and the overlap say."""
        async with self._turning:
            periodic = self.one(name)
            now = self._service.clock.now_ms()
            spec = structs.replace(job_due_at(periodic, now), user=periodic.by)
            job = (await self._service.submit([spec])).ids[0]
            await self._save(structs.replace(periodic, last_job=job, last_due_ms=now, last_result="made"))
            return job

    # ------------------------------------------------------------------------------------------- turning

    async def load(self) -> None:
        for periodic in await self._service.read(self._service.store.periodics):
            self._periodics[periodic.name] = periodic

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self._changed.clear()
            try:
                wait_s = _seconds(await self.turn(), self._service.clock.now_ms())
            except HodeiError as error:
                log.error("periodic jobs are held up, trying again in %d s: %s", _AFTER_TROUBLE_S, error.message)
                wait_s = _AFTER_TROUBLE_S
            except Exception:
                log.exception("periodic jobs are held up, trying again in %d s", _AFTER_TROUBLE_S)
                wait_s = _AFTER_TROUBLE_S
            # Not `wait_for`: in Python 3.11 that loses a cancellation that comes together with a change, and a stop of the
            # server would wait for this task for ever.
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()

    async def turn(self) -> int:
        """Deal with all that is due now; when something is due next (0 for never)."""
        async with self._turning:
            for name in sorted(self._periodics):
                await self._deal_with(self._periodics[name])
            return min((at for one in self._periodics.values() if (at := one.next_ms())), default=0)

    async def _deal_with(self, periodic: Periodic) -> None:
        now = due(periodic, self._service.clock.now_ms())
        if now.handled_ms == periodic.handled_ms:
            return
        if now.dropped:
            await self._tell(periodic, "periodic.missed", left_out=now.dropped)
        for due_ms in now.run:
            periodic = await self._make(periodic, due_ms)
        await self._save(structs.replace(periodic, handled_ms=now.handled_ms))

    async def _make(self, periodic: Periodic, due_ms: int) -> Periodic:
        """The job for one time, unless the one before is in its way; the periodic as it stands then."""
        key, text = f"periodic/{periodic.name}/{due_ms}", due_text(due_ms)
        made = await self._service.read(self._service.store.key, key)
        if made is None and periodic.overlap != "allow" and await self._runs(periodic.last_job):
            if periodic.overlap == "skip":
                await self._tell(periodic, "periodic.skipped", job=periodic.last_job, due=text)
                return structs.replace(periodic, last_result=f"skipped {text}: job {periodic.last_job} had not ended")
            with suppress(Conflict, NotFound):  # it has ended just now
                await self._service.cancel(periodic.last_job, f"replaced by the next job of periodic {periodic.name}")
        spec = structs.replace(job_due_at(periodic, due_ms), user=periodic.by)
        try:
            job = (await self._service.submit([spec], key=key, fingerprint=key)).ids[0]
        except Unavailable:
            raise
        except HodeiError as error:
            # A full queue, a profile that is gone: this time is lost, the next one may do better.
            log.warning("periodic job %s of %s was refused: %s", periodic.name, text, error.message)
            await self._tell(periodic, "periodic.refused", due=text, reason=error.message, reason_code=error.code)
            return structs.replace(periodic, last_result=f"refused {text}: {error.message}")
        return structs.replace(periodic, last_job=job, last_due_ms=due_ms, last_result="made")

    async def _runs(self, job: JobId) -> bool:
        found = await self._service.read(self._service.store.job, job) if job else None
        return found is not None and found.state not in JOB_ENDED

    async def _save(self, periodic: Periodic, told: str = "") -> Periodic:
        await self._commit(periodic, told)
        self._periodics[periodic.name] = periodic
        self._changed.set()
        return periodic

    async def _commit(self, periodic: Periodic, told: str = "", *, deleted: bool = False) -> None:
        facts = [EventNoted(told, detail={"periodic": periodic.name})] if told else []
        await self._service.loop.committed(facts, [SavePeriodic(periodic, deleted)], patient=True)

    async def _tell(self, periodic: Periodic, kind: str, *, job: JobId = 0, **detail: object) -> None:
        await self._service.loop.committed([EventNoted(kind, job, {"periodic": periodic.name, **detail})])


def _seconds(next_ms: int, now_ms: int) -> float:
    return min(max(next_ms - now_ms, 0) / 1000, _LONGEST_S) if next_ms else _LONGEST_S
