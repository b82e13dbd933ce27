"""One poll of all live jobs: reports what changed and searches for missing jobs.

A missing job has not necessarily ended: the batch system may have forgotten it, or crashed and reused its id. The record of
the run's script is consulted first, then the accounting history; only then is the run given up.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from hodei.backends.hpc.ports import JobStatus
from hodei.backends.hpc.script import NOT_STARTED
from hodei.backends.hpc.submission import choose_job
from hodei.backends.hpc.tracked_run import Record, TrackedRun, final_observation, read_record, seal
from hodei.model.errors import BackendError, BackendRefused
from hodei.model.facts import RunObserved

if TYPE_CHECKING:
    from hodei.backends.hpc.backend import HpcBackend

# How long a job must be missing before it is submitted again, and before it is reported as lost.
RESUBMIT_AFTER_MS = 2_000
LOST_AFTER_MS = 30_000
# A shared file system may show late what a node has written.
RECORD_DELAY_MS = 5_000
SAME_SUBMISSION_MS = 60_000


class JobPoll:
    """Polls the jobs of one backend, one poll at a time."""

    def __init__(self, backend: HpcBackend) -> None:
        self._backend = backend
        self._unclear_since_ms: dict[str, int] = {}
        self._lock = asyncio.Lock()

    async def poll(self) -> None:
        async with self._lock:
            await self._poll()

    async def _poll(self) -> None:
        live = [tracked for tracked in self._backend.tracked.values() if tracked.final is None]
        if not live:
            return
        found = {status.job: status for status in await self._backend.system.status([tracked.job for tracked in live])}
        ended: list[tuple[TrackedRun, JobStatus]] = []
        missing = []
        for tracked in live:
            status = found.get(tracked.job)
            if status is None or status.mark not in tracked.entry.marks or await self._is_duplicate(tracked, status):
                missing.append(tracked)
            elif status.phase == "ended":
                ended.append((tracked, status))
            else:
                self._update(tracked, status)
        if missing:
            ended += await self._search(missing)
        if ended:
            await self._end(ended)

    async def _is_duplicate(self, tracked: TrackedRun, status: JobStatus) -> bool:
        """Whether another job of a run that was submitted more than once runs it."""
        if tracked.entry.submissions < 2 or status.phase == "running":
            return False
        record = await asyncio.to_thread(read_record, tracked.files)
        return record.started and record.job != status.job

    def _update(self, tracked: TrackedRun, status: JobStatus) -> None:
        now_ms = self._backend.context.clock.now_ms()
        tracked.missing_since_ms = 0
        tracked.phase, tracked.submit_s = status.phase, status.submit_s
        if status.phase == "running" and not tracked.started_ms:
            self._start(tracked, min(now_ms, max(status.start_s * 1000, tracked.entry.submitted_ms)))
        elif status.phase == "pending" and not tracked.started_ms:
            reason = f"{self._backend.system_name}: {status.reason or status.state}"
            if tracked.reported is None or tracked.reported.reason != reason:
                tracked.reported = RunObserved(run=tracked.run, state="placed", at_ms=now_ms, reason=reason)
                self._backend.report(tracked.reported)
        if status.phase == "running":
            self._backend.supervision.check(tracked)

    def _start(self, tracked: TrackedRun, at_ms: int) -> None:
        tracked.started_ms, tracked.order = at_ms, None
        tracked.reported = RunObserved(run=tracked.run, state="running", at_ms=at_ms)
        self._backend.report(tracked.reported)

    async def _end(self, ended: list[tuple[TrackedRun, JobStatus]]) -> None:
        now_ms = self._backend.context.clock.now_ms()
        for (tracked, status), (record, checkpoint_ms) in zip(ended, await self._records(ended), strict=True):
            # 125 is the exit code of the command or of its script: the record that decides may arrive late. If the command
            # has started, the system has started the job a second time, and the first start may still be running.
            unclear = status.exit_code == NOT_STARTED and record.exit_code is None and not record.no_workdir
            wait_ms = LOST_AFTER_MS if record.started else RECORD_DELAY_MS
            if status.exit_code == 0 and not record.started and not tracked.stop_code:
                # A controller that crashed may report a job as completed that no node has seen.
                unclear, wait_ms = True, LOST_AFTER_MS
            if unclear and now_ms - self._unclear_since_ms.setdefault(tracked.run, now_ms) < wait_ms:
                continue
            self._unclear_since_ms.pop(tracked.run, None)
            if record.started and not tracked.started_ms:
                self._start(tracked, max(record.started_ms or status.start_s * 1000, tracked.entry.submitted_ms))
            final = final_observation(tracked, status, record, now_ms, self._backend.system_name, checkpoint_ms)
            if not record.started and (tracked.entry.submissions > 1 or final.state == "lost"):
                await asyncio.to_thread(seal, tracked.files)  # before a new attempt can start
            tracked.finish(final)
            self._backend.report(final)
            if tracked.entry.submissions > 1:
                with contextlib.suppress(BackendError):
                    await self._backend.cancel_duplicates(tracked)

    async def _records(self, ended: list[tuple[TrackedRun, JobStatus]]) -> list[tuple[Record, int]]:
        def read() -> list[tuple[Record, int]]:
            modified_ms = self._backend.files.modified_ms
            return [(read_record(tracked.files), modified_ms(tracked.entry.checkpoint_file)) for tracked, _ in ended]

        return await asyncio.to_thread(read)

    async def _search(self, missing: list[TrackedRun]) -> list[tuple[TrackedRun, JobStatus]]:
        """Returns the missing runs that have ended."""
        now_ms = self._backend.context.clock.now_ms()
        marked = await self._backend.system.marked(self._backend.prefix)
        records = await asyncio.to_thread(lambda: [read_record(tracked.files) for tracked in missing])
        out: list[tuple[TrackedRun, JobStatus]] = []
        unknown: list[tuple[TrackedRun, Record]] = []
        for tracked, record in zip(missing, records, strict=True):
            same = [status for status in marked if status.mark in tracked.entry.marks]
            if tracked.entry.submissions > 1 and record.started:
                same = [status for status in same if status.job == record.job]
            if not same:
                unknown.append((tracked, record))
                continue
            status = choose_job(same, record)
            self._backend.set_job(tracked, status.job)
            if status.phase == "ended":
                out.append((tracked, status))
            else:
                self._update(tracked, status)
        if not unknown:
            return out
        history = await self._backend.system.history([tracked.job for tracked, _ in unknown])
        for tracked, record in unknown:
            past = next((each for each in history if each.phase == "ended" and _same_submission(tracked, each)), None)
            if record.exit_code is not None or record.no_workdir:
                code = NOT_STARTED if record.no_workdir else record.exit_code
                out.append((tracked, JobStatus(tracked.job, tracked.entry.mark, "ended", "forgotten", exit_code=code)))
            elif past is not None:
                out.append((tracked, past))
            else:
                await self._resubmit_or_give_up(tracked, record, now_ms)
        return out

    async def _resubmit_or_give_up(self, tracked: TrackedRun, record: Record, now_ms: int) -> None:
        if not tracked.missing_since_ms:
            tracked.missing_since_ms = now_ms
            return
        missing_ms = now_ms - tracked.missing_since_ms
        untouched = not record.started and not tracked.started_ms and not tracked.stop_code
        if untouched and tracked.order is not None and not tracked.resubmitted:
            if missing_ms >= RESUBMIT_AFTER_MS:
                try:
                    await self._backend.resubmit(tracked)
                except BackendError:
                    return  # retried at the next poll
                except BackendRefused as error:
                    await self._lose(tracked, record, now_ms, f"forgot it and refused it again: {error.message}")
        elif missing_ms >= LOST_AFTER_MS or tracked.stop_code:
            reason = f"no longer knows its job {tracked.job}, and its exit code is unknown"
            await self._lose(tracked, record, now_ms, reason)

    async def _lose(self, tracked: TrackedRun, record: Record, now_ms: int, reason: str) -> None:
        """Report a run as lost, or as stopped if that was ordered. Another attempt follows, so this one must not start."""
        if not record.started and not await asyncio.to_thread(seal, tracked.files):
            return  # it has started after all, or the folder is not there: decided at the next poll
        at_ms = max(now_ms, tracked.started_ms)
        if tracked.stop_code == "stop":
            final = RunObserved(run=tracked.run, state="stopped", at_ms=at_ms, reason=tracked.stop_reason)
        else:
            reason = f"{self._backend.system_name} {reason}"
            final = RunObserved(run=tracked.run, state="lost", at_ms=at_ms, reason_code="lost", reason=reason)
        tracked.finish(final)
        self._backend.report(final)


def _same_submission(tracked: TrackedRun, status: JobStatus) -> bool:
    """A history has no marks and ids are reused, so the time of submission decides."""
    if status.job != tracked.job:
        return False
    if tracked.submit_s:
        return status.submit_s == tracked.submit_s
    return abs(status.submit_s * 1000 - tracked.entry.submitted_ms) < SAME_SUBMISSION_MS
