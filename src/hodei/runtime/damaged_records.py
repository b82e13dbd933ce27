"""Records of the store that cannot be read: set aside soon after anyone comes across them, told of in the log, the history,
the metrics, `doctor` and the answers about their job; and looked for, so that they are not found on a bad day.

A job that is in memory is written anew from there. One that is not, and still runs, is taken in again under its stand-in:
it holds its room, and its end is heard.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING

from hodei.model.audit import DamagedRecord
from hodei.model.errors import Unavailable
from hodei.model.escalation_state import EscalationStep
from hodei.model.facts import EventNoted, Fact, JobRestored
from hodei.model.ids import JobId
from hodei.model.job import JOB_ENDED

if TYPE_CHECKING:
    from hodei.runtime.service import Service

log = logging.getLogger("hodei.records")
_KINDS = ("job", "run", "event", "audit", "key")
_LOOK_S = 1.0
_AT_ONCE = 500
# A fifth of one core at most, once a day.
_IDLE_FOR_EACH_S = 4.0
_EVERY_S = 86_400.0
_MOST_SHOWN = 3


class DamagedRecords:
    def __init__(self, service: Service) -> None:
        self._service = service
        self.damaged: list[DamagedRecord] = []

    async def load(self) -> None:
        self._note(await self._service.read(self._service.store.damaged))

    def tell(self, found: list[DamagedRecord]) -> None:
        """These were set aside."""
        for damage in found:
            log.error("%s", damage.text)
        self._note(found)

    def _note(self, found: list[DamagedRecord]) -> None:
        self.damaged += found
        self._service.controller.cluster.damaged |= {damage.job for damage in found if damage.job}
        self._service.prometheus.damaged.set(len(self.damaged))

    # ------------------------------------------------------------------------------------------ telling

    def of(self, job: JobId) -> list[DamagedRecord]:
        return [damage for damage in self.damaged if damage.job == job] if self.damaged else []

    def text(self, job: JobId) -> str:
        """What is to be said of a job, "" for most."""
        return "; ".join(damage.text for damage in self.of(job)[-_MOST_SHOWN:])

    def escalation_steps(self, job: JobId) -> tuple[EscalationStep, ...]:
        return tuple(EscalationStep(damage.text, damage.at_ms) for damage in self.of(job)[-_MOST_SHOWN:])

    def told(self) -> tuple[bool, str]:
        """For `doctor`."""
        if not self.damaged:
            return True, "all that were read are well"
        latest = "; ".join(damage.text for damage in self.damaged[-_MOST_SHOWN:])
        return False, f"{len(self.damaged)} damaged and set aside; {latest}"

    # ------------------------------------------------------------------------------------------- mending

    async def mend(self, *, starting: bool = False) -> None:
        """Set aside all that was come across."""
        service, cluster = self._service, self._service.controller.cluster
        async with service.loop.quiet:
            jobs = {job for _, job in service.store.suspects}
            known = {
                id: (cluster.jobs[id], tuple(cluster.runs.get(id, {}).values())) for id in jobs if id in cluster.jobs
            }
            found = await service.loop.write(partial(service.store.repair, service.clock.now_ms(), known))
        self.tell(found)
        told: list[Fact] = [
            EventNoted("record.damaged", damage.job, {"what": f"{damage.kind} {damage.name}", "reason": damage.reason})
            for damage in found
        ]
        if not starting:
            told += await service.read(self._taken_in, [damage.job for damage in found if damage.kind == "job"])
        if told:
            service.loop.tell(told)

    def _taken_in(self, jobs: list[JobId]) -> list[Fact]:
        """Those that go on, and that nobody has in mind any more. Blocks."""
        store, cluster = self._service.store, self._service.controller.cluster
        out: list[Fact] = []
        for id in jobs:
            job = store.job(id) if id not in cluster.jobs else None
            if job is not None and job.state not in JOB_ENDED:
                runs = tuple(run for run in store.runs(id) if run.attempt >= job.first_attempt)
                out.append(JobRestored(job, runs))
        return out

    # ------------------------------------------------------------------------------------------- looking

    async def run(self) -> None:
        """For ever: set aside what others come across."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                if self._service.store.suspects:
                    await self.mend()
            except Unavailable as error:
                log.warning("damaged records could not be set aside: %s", error)
            except Exception:
                log.exception("damaged records could not be set aside")

    async def look_over(self) -> None:
        """For ever: read everything, slowly."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for kind in _KINDS:
                try:
                    await self._look_over(kind)
                except Unavailable as error:
                    log.warning("not all records could be looked at: %s", error)
                except Exception:
                    log.exception("not all records could be looked at")
            await asyncio.sleep(_EVERY_S)

    async def _look_over(self, kind: str) -> None:
        service, after = self._service, None
        while True:
            began = time.perf_counter()
            after = await service.read(service.store.scan, kind, after, _AT_ONCE)
            if after is None:
                return
            await asyncio.sleep((time.perf_counter() - began) * _IDLE_FOR_EACH_S)
