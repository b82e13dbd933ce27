"""Background maintenance of the store: retention of old records, and quarantine of damaged ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from hodei.model.audit import DamagedRecord
from hodei.model.effects import SaveValue
from hodei.model.errors import Unavailable
from hodei.model.escalation_state import EscalationStep
from hodei.model.facts import EventNoted, Fact, JobRestored
from hodei.model.ids import JobId
from hodei.model.job import JOB_ENDED
from hodei.model.resources import format_duration, format_time
from hodei.ports import JobQuery
from hodei.runtime.clock import RetentionClock, TrustedTime, steady_ms

if TYPE_CHECKING:
    from hodei.runtime.service import Service

log = logging.getLogger("hodei.store_maintenance")


_RETENTION_INTERVAL_S = 60.0
_NOTE = "clock"
_DAY_MS = 86_400_000
# A batch blocks commits for about this long; its size follows from the duration of the last one.
_BATCH_S = 0.02
_MIN_BATCH, _FIRST_BATCH, _MAX_BATCH = 20, 200, 2000


class Retention:
    """Prunes ended jobs with their runs and events, idempotency keys and audit rows, and returns free space to the system.

    Works in batches of some milliseconds between two commits. `retention_ms` and `audit_retention_ms`: 0 keeps forever.
    `trust_clock`: the wall clock is right, however far it is ahead."""

    def __init__(
        self,
        service: Service,
        *,
        retention_ms: int,
        audit_retention_ms: int,
        trust_clock: bool = False,
        steady_ms: Callable[[], int] = steady_ms,
    ) -> None:
        self._service, self._steady_ms, self._trust = service, steady_ms, trust_clock
        self._retention_ms, self._audit_retention_ms = retention_ms, audit_retention_ms
        self._shortest_ms = min((ms for ms in (retention_ms, audit_retention_ms) if ms), default=0)
        self.clock: RetentionClock | None = None

    @property
    def enabled(self) -> bool:
        return self._shortest_ms > 0

    async def run(self) -> None:
        while True:
            try:
                await self.prune()
            except Unavailable as error:
                log.warning("retention could not run: %s", error)
            except Exception:
                log.exception("retention failed; next try in %g s", _RETENTION_INTERVAL_S)
            await asyncio.sleep(_RETENTION_INTERVAL_S)

    async def prune(self) -> dict[str, int]:
        """Prunes all that is due; how many records of each kind."""
        service, store = self._service, self._service.store
        if self.clock is None:
            self.clock = await service.read(self._load_clock)
        before, now = self.clock.time, self.clock.update(service.clock.now_ms(), self._steady_ms())
        service.prometheus.retention_held.set(self.clock.in_doubt)
        if self.clock.time != before:
            await service.save(SaveValue(_NOTE, msgspec.json.encode(self.clock.time).decode()))
        pruned = dict.fromkeys(("jobs", "loose", "audit"), 0)
        if self._retention_ms:
            ended = now - self._retention_ms
            pruned["jobs"] = await self._in_batches(lambda limit: len(store.prune(ended_before_ms=ended, limit=limit)))
            pruned["loose"] = await self._in_batches(lambda limit: store.prune_unattached(before_ms=ended, limit=limit))
        if self._audit_retention_ms:
            old = now - self._audit_retention_ms
            pruned["audit"] = await self._in_batches(lambda limit: store.prune_audit(before_ms=old, limit=limit))
        await self._in_batches(store.shrink)
        for kind, count in pruned.items():
            service.prometheus.pruned.labels(kind).inc(count)
        if any(pruned.values()):
            log.info("pruned %d jobs, %d events and keys, %d audit rows", *pruned.values())
        return pruned

    async def _in_batches(self, work: Callable[[int], int]) -> int:
        """`work(limit)` returns how much it did; there may be more if that is the limit."""

        def timed(limit: int) -> tuple[int, float]:
            began = time.perf_counter()
            return work(limit), time.perf_counter() - began

        done, limit = 0, _FIRST_BATCH
        while True:
            count, took_s = await self._service.loop.write(partial(timed, limit))
            done += count
            if count < limit:
                return done
            await asyncio.sleep(took_s)  # commits get the store for as long as this has blocked them
            limit = min(max(int(limit * _BATCH_S / max(took_s, 0.0001)), _MIN_BATCH, limit // 2), _MAX_BATCH, limit * 2)

    def _load_clock(self) -> RetentionClock:
        bound_ms, hold_ms = min(_DAY_MS, self._shortest_ms // 4), min(_DAY_MS, self._shortest_ms)
        time = None if self._trust else self._load_time()
        return RetentionClock(
            time or TrustedTime(self._service.clock.now_ms()), self._steady_ms(), bound_ms=bound_ms, hold_ms=hold_ms
        )

    def _load_time(self) -> TrustedTime | None:
        store = self._service.store
        try:
            if text := store.note(_NOTE):
                return msgspec.json.decode(text, type=TrustedTime)
        except msgspec.MsgspecError as error:
            log.error("the stored time cannot be read, the time of the newest job is used: %s", error)
            store.mark_suspect("note", _NOTE, str(error))
        newest = store.jobs(JobQuery(limit=1)).jobs
        return TrustedTime(newest[0].changed_ms) if newest else None

    def status(self) -> tuple[bool, str]:
        """For `doctor`: whether it works as configured, and the details."""
        if not self.enabled:
            return True, "everything is kept forever"
        clock = self.clock
        if clock is None or not clock.in_doubt:
            return True, "works"
        return False, (
            f"uses {format_time(clock.time.believed_ms)} as the current time: the clock is "
            f"{format_duration(clock.time.ahead_ms // 1000 * 1000)} ahead of the expected time (it was set, or the server "
            f"was off); it is trusted after another {format_duration(clock.left_ms // 1000 * 1000)}"
        )


_KINDS = ("job", "run", "event", "audit", "key")
_CHECK_S = 1.0
_SCAN_BATCH = 500
# A scan uses at most a fifth of one core, once a day.
_SCAN_REST_FACTOR = 4.0
_SCAN_INTERVAL_S = 86_400.0
_MAX_SHOWN = 3


class DamagedRecords:
    """Quarantines records that cannot be read, and scans the store so that damage is found early. Reports it in the log, the
    events, the metrics, `doctor` and the answers about the job.

    A damaged job that is in memory is written again from there. One that is not, and is active, is restored from its
    stand-in: it keeps its capacity, and its end is observed."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.damaged: list[DamagedRecord] = []

    async def load(self) -> None:
        self._add(await self._service.read(self._service.store.damaged))

    def report(self, found: list[DamagedRecord]) -> None:
        """These were quarantined."""
        for damage in found:
            log.error("%s", damage.text)
        self._add(found)

    def _add(self, found: list[DamagedRecord]) -> None:
        self.damaged += found
        self._service.controller.cluster.damaged |= {damage.job for damage in found if damage.job}
        self._service.prometheus.damaged.set(len(self.damaged))

    def of(self, job: JobId) -> list[DamagedRecord]:
        """The latest of a job."""
        return [damage for damage in self.damaged if damage.job == job][-_MAX_SHOWN:] if self.damaged else []

    def text(self, job: JobId) -> str:
        return "; ".join(damage.text for damage in self.of(job))

    def escalation_steps(self, job: JobId) -> tuple[EscalationStep, ...]:
        return tuple(EscalationStep(damage.text, damage.at_ms) for damage in self.of(job))

    def status(self) -> tuple[bool, str]:
        """For `doctor`."""
        if not self.damaged:
            return True, "no damaged record was found"
        latest = "; ".join(damage.text for damage in self.damaged[-_MAX_SHOWN:])
        return False, f"{len(self.damaged)} damaged records were quarantined; {latest}"

    async def quarantine(self, *, starting: bool = False) -> None:
        """Quarantines the suspects of the store."""
        service, cluster = self._service, self._service.controller.cluster
        async with service.loop.step_lock:
            jobs = {job for _, job in service.store.suspects}
            known = {
                id: (cluster.jobs[id], tuple(cluster.runs.get(id, {}).values())) for id in jobs if id in cluster.jobs
            }
            found = await service.loop.write(partial(service.store.repair, service.clock.now_ms(), known))
        self.report(found)
        facts: list[Fact] = [
            EventNoted("record.damaged", damage.job, {"what": f"{damage.kind} {damage.name}", "reason": damage.reason})
            for damage in found
        ]
        if not starting:
            facts += await service.read(self._restore, [damage.job for damage in found if damage.kind == "job"])
        if facts:
            service.loop.enqueue(facts)

    def _restore(self, jobs: list[JobId]) -> list[Fact]:
        """Active jobs that are not in memory. Blocks."""
        store, cluster = self._service.store, self._service.controller.cluster
        out: list[Fact] = []
        for id in jobs:
            job = store.job(id) if id not in cluster.jobs else None
            if job is not None and job.state not in JOB_ENDED:
                runs = tuple(run for run in store.runs(id) if run.attempt >= job.first_attempt)
                out.append(JobRestored(job, runs))
        return out

    async def run(self) -> None:
        """Quarantines what readers of the store find, forever."""
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                if self._service.store.suspects:
                    await self.quarantine()
            except Unavailable as error:
                log.warning("damaged records could not be quarantined: %s", error)
            except Exception:
                log.exception("damaged records could not be quarantined")

    async def scan(self) -> None:
        """Reads all records slowly, forever."""
        while True:
            await asyncio.sleep(_CHECK_S)
            for kind in _KINDS:
                try:
                    await self._scan(kind)
                except Unavailable as error:
                    log.warning("the scan for damaged records is incomplete: %s", error)
                except Exception:
                    log.exception("the scan for damaged records is incomplete")
            await asyncio.sleep(_SCAN_INTERVAL_S)

    async def _scan(self, kind: str) -> None:
        service, after = self._service, None
        while True:
            began = time.perf_counter()
            after = await service.read(service.store.scan, kind, after, _SCAN_BATCH)
            if after is None:
                return
            await asyncio.sleep((time.perf_counter() - began) * _SCAN_REST_FACTOR)
